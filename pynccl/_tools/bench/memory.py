"""-M: nccl-tests' line about the memory of the communicators, of the buffers, and of the measurements.

A usage is read before and after the communicators are created, once the buffers are there, and at the end.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from itertools import pairwise

from pynccl._library import cuda

_PARTS = ("Initialization", "User-Allocated", "Collective")


class HostUsage:
    """What is resident of a process, at most.

    The buffers are touched, and so resident, only once they are used.
    """

    title = "Host memory usage"

    def __init__(self, buffers: int) -> None:
        self._buffers, self._resident = buffers, [_resident()]

    def read(self) -> None:
        """Read the memory in use."""
        self._resident.append(_resident())

    def amounts(self) -> list[int]:
        """Return the bytes of each part."""
        before, _, opened, ended = self._resident
        return [opened - before, self._buffers, max(0, ended - opened - self._buffers)]


class DeviceUsage:
    """What is used of a process's devices, by any process."""

    title = "GPU memory usage"

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices
        self._available = [self._read()]

    def read(self) -> None:
        """Read the memory in use."""
        self._available.append(self._read())

    def _read(self) -> list[int]:
        found = []
        for device in self._devices:
            with cuda.using_device(device):
                found.append(cuda.memory_available())
        return found

    def amounts(self) -> list[int]:
        """Return the bytes of each part, on the device where they are most."""
        return [
            max(was - now for was, now in zip(before, after, strict=True))
            for before, after in pairwise(self._available)
        ]


def _resident() -> int:
    """Return the bytes of memory that this process has used at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def line(title: str, amounts: Sequence[int]) -> str:
    """Return nccl-tests' line."""
    parts = " | ".join(f"{part} {_amount(amount)}" for part, amount in zip(_PARTS, amounts, strict=True))
    return f"# {title:<20} : {parts} | Total  {_amount(sum(amounts))}"


def _amount(nbytes: float) -> str:
    """Return an amount as nccl-tests writes it (getMemString)."""
    units = [" B", " KB", " MB", " GB"]
    while abs(nbytes) >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    decimals = 2 if abs(nbytes) < 10 else 1 if abs(nbytes) < 100 else 0
    return f"{nbytes:.{decimals}f}{units[0]}"
