"""CuPy's and torch's memory pools over ncclMemAlloc."""

from __future__ import annotations

import importlib
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

from pynccl._errors import NcclError, NotSupportedError
from pynccl._library import cuda, loader
from pynccl._library.binding import fastcall
from pynccl._memory.allocation import Allocation
from pynccl._memory.registration import Segment
from pynccl._memory.segments import AllocatorCounts, Pin, Registered, Registers, segment


class _Entered(threading.local):
    """The contexts that this thread has entered, the newest last."""

    def __init__(self) -> None:
        self.contexts: list[ExitStack] = []


class _Pool(Protocol):
    _entered: _Entered

    def update(self) -> None:
        """Register the segments that the pool has got, and deregister those that it has freed."""


def _leave(
    self: _Pool, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Leave the newest context that this thread has entered."""
    self._entered.contexts.pop().close()
    self.update()


class CupyAllocator:
    """A CuPy memory pool that gets its memory from ncclMemAlloc; made by `pynccl.allocators.cupy`.

    As a context manager it is CuPy's allocator in this thread. `malloc` is an allocator for
    `cupy.cuda.set_allocator`, and `pool` the cupy.cuda.MemoryPool. Not run on a GPU yet (docs/gpu.md).
    """

    def __init__(self, comm: Registers | None = None) -> None:
        self._cupy = importlib.import_module("cupy")
        if not self._cupy.cuda.is_available():
            raise NotSupportedError(
                "pynccl.allocators.cupy needs a CUDA device, and CuPy finds none; for host memory use "
                "pynccl.empty"
            )
        loader.load()
        # Reentrant: an allocation can run finalizers, which free segments.
        self._lock = threading.RLock()
        self._segments: dict[int, Segment] = {}
        self._registered = Registered(comm)
        self._entered = _Entered()
        functions = self._cupy.cuda.PythonFunctionAllocator(self._allocate, self._free)
        self.pool: Any = self._cupy.cuda.MemoryPool(functions.malloc)

    def malloc(self, nbytes: int) -> Any:
        """Return memory of the pool, a cupy.cuda.MemoryPointer."""
        return self.pool.malloc(nbytes)

    def _allocate(self, nbytes: int, device: int) -> int:
        """Return a new segment, for the pool; CuPy has made the device current."""
        try:
            memory = Allocation(nbytes)
        except NcclError as error:
            # The error after which the pool frees what it has cached, and tries again.
            runtime = self._cupy.cuda.runtime
            raise runtime.CUDARuntimeError(runtime.errorMemoryAllocation) from error
        with self._lock:
            self._segments[memory.ptr] = segment(memory.ptr, memory)
            try:
                self._registered.update(self._segments)
            except BaseException:
                del self._segments[memory.ptr]
                raise
        return memory.ptr

    def _free(self, ptr: int, device: int) -> None:
        """Free a segment of the pool."""
        with self._lock:
            self._segments.pop(ptr, None)
            self._registered.update(self._segments)

    def update(self) -> None:
        """Register the segments that could not be registered when they were allocated."""
        with self._lock:
            self._registered.update(self._segments)

    def counts(self) -> AllocatorCounts:
        """Return the bytes that are allocated, in use and registered."""
        with self._lock:
            allocated = sum(each.count for each in self._segments.values())
            return AllocatorCounts(allocated, int(self.pool.used_bytes()), self._registered.nbytes)

    def __enter__(self) -> CupyAllocator:
        with ExitStack() as stack:
            stack.enter_context(self._cupy.cuda.using_allocator(self.malloc))
            self.update()
            self._entered.contexts.append(stack.pop_all())
        return self

    __exit__ = _leave


class TorchAllocator:
    """A torch.cuda.MemPool that gets its memory from ncclMemAlloc; made by `pynccl.allocators.torch`.

    As a context manager it is torch's pool in this thread, on the current device. `pool` is the MemPool. What
    is allocated inside is registered at the end of the `with`, or by `update`. Not run on a GPU yet
    (docs/gpu.md).
    """

    def __init__(self, comm: Registers | None = None) -> None:
        self._torch = importlib.import_module("torch")
        if loader.backend() == "cpu" or not cuda.available() or not self._torch.cuda.is_available():
            raise NotSupportedError(
                "pynccl.allocators.torch needs NVIDIA's NCCL and a torch that finds a CUDA device; for a "
                "tensor in host memory use pynccl.empty(shape, like=tensor)"
            )
        memory, path = self._torch.cuda.memory, fastcall.__file__
        # torch calls these functions of the compiled binding without Python's lock.
        self._functions = memory.CUDAPluggableAllocator(
            path, "pynccl_segment_allocate", "pynccl_segment_free"
        )
        self.pool: Any = self._torch.cuda.MemPool(self._functions.allocator())
        self._comm = comm
        self._registered = Registered(comm)
        self._known: dict[int, Segment] = {}
        self._entered = _Entered()

    def _snapshot(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.pool.snapshot()
        return found

    def update(self) -> None:
        """Register the pool's new segments, and deregister those that torch has freed."""
        if self._comm is None:
            # A segment that is known would outlive torch's use of it.
            return
        self._known = known_segments(self._known, [int(each["address"]) for each in self._snapshot()])
        self._registered.update(self._known)

    def counts(self) -> AllocatorCounts:
        """Return the bytes that are allocated, in use and registered."""
        found = self._snapshot()
        allocated = sum(int(each["total_size"]) for each in found)
        in_use = sum(int(each["allocated_size"]) for each in found)
        return AllocatorCounts(allocated, in_use, self._registered.nbytes)

    def __enter__(self) -> TorchAllocator:
        stack = ExitStack()
        stack.enter_context(self._torch.cuda.use_mem_pool(self.pool))
        self._entered.contexts.append(stack)
        return self

    __exit__ = _leave


def known_segments(before: dict[int, Segment], addresses: list[int]) -> dict[int, Segment]:
    """Return torch's segments at these addresses; each stays until nothing refers to it."""
    found = {}
    for address in addresses:
        known = before.get(address)
        if known is None:
            pin = Pin(address)
            # 0: not a segment of ours, or freed meanwhile.
            known = segment(address, pin) if pin.nbytes else None
        if known is not None:
            found[address] = known
    return found
