"""The devices of the loaded library: CUDA devices, or the CPU library's virtual devices."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from pynccl import capi
from pynccl._base.values import INT, check_int
from pynccl._library import cuda, loader


def _on_cpu() -> bool:
    return loader.backend() == "cpu"


def device_count() -> int:
    """Return the number of devices; the CPU library's are virtual (PYNCCL_CPU_DEVICES)."""
    return capi.pyncclCpuDeviceCount() if _on_cpu() else cuda.device_count()


def current_device() -> int:
    """Return this thread's current device; 0 if none was set."""
    if _on_cpu():
        return capi.pyncclCpuGetDevice()
    return (cuda.current_device() or 0) if cuda.available() else 0


def set_device(device: int) -> None:
    """Set this thread's current device, also for CuPy, torch and Numba.

    Raises TypeError or ValueError unless it is an ordinal, and NcclError if the driver refuses.
    """
    _require_device(device)
    if _on_cpu():
        capi.pyncclCpuSetDevice(device)
    else:
        cuda.set_device(device)


def array_module() -> ModuleType:
    """Return the module that makes arrays for the loaded library: cupy, or numpy for the CPU library."""
    return np if _on_cpu() else importlib.import_module("cupy")


def _require_device(device: int) -> None:
    check_int(device, "device", 0, INT, f"an int from 0 to {INT}")


def device_to_use(device: int | None) -> int | None:
    """Return the given device or this thread's; None without a driver."""
    if device is not None:
        _require_device(device)
        return device
    return current_device() if _on_cpu() or cuda.available() else None


@contextmanager
def on_device(device: int | None) -> Iterator[None]:
    """Make a device the current one of this thread, in the CPU library or in CUDA."""
    if device is None:
        yield
    elif _on_cpu():
        before = capi.pyncclCpuGetDevice()
        capi.pyncclCpuSetDevice(device)
        try:
            yield
        finally:
            capi.pyncclCpuSetDevice(before)
    else:
        with cuda.using_device(device):
            yield
