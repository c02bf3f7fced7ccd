"""Memory from ncclMemAlloc, which lives as long as anything refers to it."""

from __future__ import annotations

import atexit
import os
from collections import deque
from contextlib import nullcontext, suppress

from pynccl import capi
from pynccl._base.values import refuse_copy
from pynccl._device.devices import current_device, on_device
from pynccl._errors import NcclError
from pynccl._library import cuda, loader


class Allocation:
    """Memory from ncclMemAlloc, on this thread's current device; freed with the last reference to it."""

    __slots__ = ("__weakref__", "_process", "device", "nbytes", "ptr")
    __reduce__ = refuse_copy

    def __init__(self, nbytes: int) -> None:
        # Set first: __del__ reads it even if the allocation failed.
        self.ptr = 0
        _free_unwanted()
        on_gpu = loader.backend() != "cpu" and cuda.available()
        self.device = current_device() if on_gpu else None
        self.nbytes, self._process = nbytes, os.getpid()
        # The first use of a function takes the loader's lock, which a finalizer must not wait for.
        _ = loader.functions.ncclMemFree
        with on_device(self.device), cuda.relaxed_capture() if on_gpu else nullcontext():
            self.ptr = capi.ncclMemAlloc(nbytes)

    def __repr__(self) -> str:
        return f"<memory of ncclMemAlloc at {self.ptr:#x}, {self.nbytes} bytes>"

    def __del__(self) -> None:
        # None: the interpreter has cleared this module. A forked child must not free its parent's memory.
        if _ended is not False or not self.ptr or os.getpid() != self._process:
            return
        _unwanted.append((self.ptr, self.device))
        _free_unwanted()


# Memory to free: address and device. An entry stays if the memory cannot be freed now.
_unwanted: deque[tuple[int, int | None]] = deque()
# True once the interpreter exits: the end of the process then frees the memory.
_ended: bool | None = False


def _free_unwanted() -> None:
    """Free what nothing refers to.

    Finalizers call this, in any thread: it takes no lock, and raises nothing.
    """
    for _ in range(len(_unwanted)):
        try:
            ptr, device = _unwanted.popleft()
        except IndexError:
            # Another thread was faster.
            return
        try:
            _complete(device)
        except NcclError:
            # For example while the device captures a graph: try again later.
            _unwanted.append((ptr, device))
        else:
            # An address that the library does not know may be another allocation's by the next time.
            with suppress(NcclError):
                capi.ncclMemFree(ptr)


def _complete(device: int | None) -> None:
    """Wait for the work of a device: ncclMemFree unmaps memory that kernels still use.

    This is NCCL's src/allocator.cc, ncclCuMemFree; cudaFree waits.
    """
    if device is not None:
        with cuda.relaxed_capture(), cuda.using_device(device):
            cuda.synchronize_device()


def _at_exit() -> None:
    global _ended
    _ended = True


def _in_child() -> None:
    _unwanted.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
