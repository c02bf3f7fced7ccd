"""The Python functions that the C++ backend calls: they return a device's library and CUDA streams."""

from __future__ import annotations

from typing import Any

import torch

from pynccl._errors import LibraryNotFoundError, NcclInvalidUsage
from pynccl._library import discovery, loader
from pynccl._library.binding import ffi, lib
from pynccl._library.generated.api import CPU_FUNCTIONS, FUNCTIONS
from pynccl._memory.creation import empty

# Streams of the backends, kept for the life of the process.
_streams: list[Any] = []


def provide(kind: str, index: int, high_priority: bool) -> tuple[dict[str, int], int, int]:
    """Return the addresses of a device's library and, for CUDA, a new stream as torch's id and handle."""
    if kind == "cpu":
        return _cpu_addresses(), 0, 0
    stream = torch.cuda.Stream(index, priority=-1 if high_priority else 0)  # type: ignore[no-untyped-call]
    _streams.append(stream)
    return _cuda_addresses(), stream.stream_id, stream.cuda_stream


def allocates(index: int) -> bool:
    """Tell whether `allocate` works for a device: torch passes -1 for the CPU."""
    on_cpu = loader.backend() == "cpu"
    return on_cpu == (index < 0) and bool(lib.nccl_api_find(b"ncclMemAlloc"))


def allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor in memory from ncclMemAlloc."""
    # As bytes: NCCL does not reduce all of torch's types.
    return empty(size * dtype.itemsize, like=torch.empty(0, dtype=torch.uint8, device=device)).view(dtype)


def _cuda_addresses() -> dict[str, int]:
    info = loader.load()
    if info.backend != "nccl":
        raise NcclInvalidUsage(
            f"cuda tensors need NVIDIA's libnccl, but this process uses {info.path} ({info.how})",
            function="pynccl.torch",
        )
    return {name: int(ffi.cast("uintptr_t", lib.nccl_api_find(name.encode()))) for name in FUNCTIONS}


def _cpu_addresses() -> dict[str, int]:
    """Return the CPU library's functions, also if pynccl otherwise uses libnccl."""
    loaded = loader.loaded()
    cpu_is_loaded = loaded is not None and loaded.backend == "cpu"
    path = loaded.path if loaded and cpu_is_loaded else discovery.cpu_candidate("pynccl.torch").path
    handle = lib.pynccl_open(str(path).encode(), 0)
    if not handle:
        reason = ffi.string(lib.pynccl_error()).decode(errors="replace")
        raise LibraryNotFoundError(f"the CPU library {path} cannot be used: {reason}")
    names = (*FUNCTIONS, *CPU_FUNCTIONS)
    return {name: int(ffi.cast("uintptr_t", lib.pynccl_symbol(handle, name.encode()))) for name in names}
