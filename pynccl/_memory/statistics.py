"""How much memory the library has allocated for a communicator."""

from __future__ import annotations

from typing import NamedTuple

from pynccl import capi


class MemoryStats(NamedTuple):
    """The memory that the library has allocated for a communicator, in bytes; on a GPU, device memory."""

    suspend: int
    """What `Communicator.suspend` can release."""
    suspended: bool
    """True between `suspend` and `resume`."""
    persist: int
    """What stays until the communicator is closed."""
    total: int
    """All of it."""


def read(handle: int) -> MemoryStats:
    """Ask the library for a communicator's statistics."""
    return MemoryStats(
        suspend=capi.ncclCommMemStats(handle, capi.ncclStatGpuMemSuspend),
        suspended=bool(capi.ncclCommMemStats(handle, capi.ncclStatGpuMemSuspended)),
        persist=capi.ncclCommMemStats(handle, capi.ncclStatGpuMemPersist),
        total=capi.ncclCommMemStats(handle, capi.ncclStatGpuMemTotal),
    )
