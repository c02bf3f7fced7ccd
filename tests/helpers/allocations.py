"""What became of memory of ncclMemAlloc."""

from __future__ import annotations

from pynccl import NcclInvalidArgument, capi


def is_freed(ptr: int) -> bool:
    """Tell whether memory of the CPU library was freed; frees it otherwise."""
    try:
        capi.ncclMemFree(ptr)
    except NcclInvalidArgument as error:
        return "was freed before" in str(error)
    return False
