"""Memory from ncclMemAlloc, which lives as long as anything refers to it."""

from __future__ import annotations

from contextlib import nullcontext

from pynccl._base.values import refuse_copy
from pynccl._device.devices import current_device, on_device
from pynccl._library import cuda, loader
from pynccl._library.binding import fastcall, lib
from pynccl._library.status import check


class Allocation:
    """Memory from ncclMemAlloc, on this thread's current device; freed with the last reference to it."""

    __slots__ = ("__weakref__", "_owner", "device", "nbytes", "ptr")
    __reduce__ = refuse_copy

    def __init__(self, nbytes: int) -> None:
        lib.pynccl_memory_free_unwanted()
        on_gpu = loader.backend() != "cpu" and cuda.available()
        self.device = current_device() if on_gpu else None
        self.nbytes = nbytes
        with on_device(self.device), cuda.relaxed_capture() if on_gpu else nullcontext():
            made = fastcall.allocate(nbytes, on_gpu)
        if isinstance(made, int):
            check(made, "ncclMemAlloc")
        else:
            self._owner, self.ptr = made

    def __repr__(self) -> str:
        return f"<memory of ncclMemAlloc at {self.ptr:#x}, {self.nbytes} bytes>"
