"""The segments of an allocator's pool, and their registration with a communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pynccl._errors import NcclError, NcclInvalidUsage, NcclRemoteError, NcclTimeoutError
from pynccl._library.binding import fastcall, lib
from pynccl._memory.allocation import Allocation
from pynccl._memory.registration import Registration, Segment

_NOT_NOW = (NcclInvalidUsage, NcclRemoteError, NcclTimeoutError)


class Registers(Protocol):
    """The part of a communicator that this module uses."""

    @property
    def closed(self) -> bool: ...

    def register(self, array: Any) -> Registration:
        """Register an array's memory."""


class AllocatorCounts(NamedTuple):
    """What an allocator holds, in bytes."""

    allocated: int
    """The segments that it has from ncclMemAlloc."""
    in_use: int
    """What arrays use of them."""
    registered: int
    """The segments that are registered with the communicator."""


class Pin:
    """Keeps a segment of torch's allocator after torch has freed it."""

    __slots__ = ("_owner", "nbytes")

    def __init__(self, begin: int) -> None:
        self.nbytes = lib.pynccl_segment_pin(begin)
        self._owner = fastcall.own_pin(begin) if self.nbytes else None


def segment(begin: int, owner: Allocation | Pin) -> Segment:
    """Return a segment as an array of bytes."""
    return Segment(begin, owner.nbytes, "uint8", owner=owner)


class Registered:
    """The registrations of an allocator's segments with one communicator, or with none."""

    def __init__(self, comm: Registers | None) -> None:
        self._comm = comm
        self._open: dict[int, Registration] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that are registered."""
        return sum(registration.nbytes for registration in list(self._open.values()))

    def update(self, segments: Mapping[int, Segment]) -> None:
        """Register the segments that are new, and deregister those that have gone.

        What is not possible now is left to the next update: the communicator is in a group, in a graph
        capture or in use by another thread, or it has failed.
        """
        comm = self._comm
        if comm is None:
            return
        for begin in [each for each in self._open if each not in segments]:
            self.drop(begin)
        if comm.closed:
            return
        for begin, memory in list(segments.items()):
            if begin not in self._open:
                try:
                    self._open[begin] = comm.register(memory)
                except _NOT_NOW:
                    return

    def drop(self, begin: int) -> None:
        """Deregister a segment; the registration holds its memory until that is possible."""
        registration = self._open.get(begin)
        if registration is not None:
            try:
                registration.close()
            except NcclError:
                return
            del self._open[begin]
