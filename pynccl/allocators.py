"""Memory pools for CuPy and torch whose memory comes from NCCL, registered with a communicator.

    with pynccl.allocators.cupy(comm):
        x = cupy.zeros(1 << 20)      # memory from ncclMemAlloc, registered with comm

Nothing here has run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

from pynccl._comm.communicator import Communicator
from pynccl._memory.allocators import CupyAllocator as CupyAllocator
from pynccl._memory.allocators import TorchAllocator as TorchAllocator
from pynccl._memory.segments import AllocatorCounts as AllocatorCounts

__all__ = ["AllocatorCounts", "CupyAllocator", "TorchAllocator", "cupy", "torch"]


def cupy(comm: Communicator | None = None) -> CupyAllocator:
    """Return a CuPy allocator with a memory pool of its own, fed by ncclMemAlloc (NCCL >= 2.19).

    The pool's segments are registered with `comm`, if given, until they are freed or `comm` is closed. Use it
    in the thread that uses `comm`. Raises ImportError without CuPy, and LibraryNotFoundError without a
    library.
    """
    return CupyAllocator(comm)


def torch(comm: Communicator | None = None) -> TorchAllocator:
    """Return a torch memory pool fed by ncclMemAlloc (NCCL >= 2.19).

    The pool's segments are registered with `comm`, if given, until torch frees them or `comm` is closed. Use
    it in the thread that uses `comm`. Raises ImportError without torch, and NotSupportedError without a CUDA
    device.
    """
    return TorchAllocator(comm)
