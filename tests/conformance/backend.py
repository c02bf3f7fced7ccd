"""Where the buffers and streams of the tests come from: the CPU library's, or a GPU's.

PYNCCL_TEST_BACKEND says which: "cpu" (the default) or "gpu" (CuPy and NVIDIA's library; ranks share a device
where there are fewer devices than ranks).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Of the ranks' own waits; the tests' time-outs are longer.
WAIT = 60.0


class Memory(ABC):
    """A piece of memory that the library can work on."""

    ptr: int

    @abstractmethod
    def write(self, offset: int, data: Bytes) -> None:
        """Copy `data` to the bytes from `offset` on."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> Bytes:
        """Return these bytes, as host memory."""


class Backend(ABC):
    """Memory, streams and devices of one kind."""

    name: str
    # Whether results are specified to the last bit.
    exact: bool

    @abstractmethod
    def environment(self, transport: str, process: int, nranks: int) -> dict[str, str]:
        """Return the variables for a process of a group that shall communicate in this way."""

    @abstractmethod
    def use_device(self, rank: int) -> None:
        """Select the device of the rank that this thread is."""

    @abstractmethod
    def supports(self, dtype: str, reduces: bool) -> bool:
        """Return whether the library has the datatype."""

    @abstractmethod
    def memory(self, nbytes: int) -> Memory:
        """Allocate."""

    @abstractmethod
    def create_stream(self) -> int:
        """Return a new stream."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of `create_stream`."""

    @abstractmethod
    def order(self, comm: int, first: int, then: int) -> None:
        """Have what comes later on stream `then` wait for what is on stream `first` now."""

    @abstractmethod
    def synchronize(self, comm: int, stream: int, timeout: float = WAIT) -> None:
        """Wait for a stream; raise what went wrong on it."""


def capi() -> ModuleType:
    """Import the functions under test; only the ranks' processes load a library."""
    import pynccl.capi

    return pynccl.capi


def host_of(transport: str, process: int) -> int | None:
    """Return the host of a process, if the transport has several."""
    if transport == "tcp":
        return process
    if transport == "scattered":
        return (0, 1, 0, 2)[process % 4]
    return process % 2 if transport in ("mixed", "hosts", "flat") else None


class HostMemory(Memory):
    def __init__(self, nbytes: int) -> None:
        self.array: Bytes = np.empty(max(nbytes, 1), np.uint8)
        self.ptr = self.array.ctypes.data

    def write(self, offset: int, data: Bytes) -> None:
        self.array[offset : offset + data.size] = data

    def read(self, offset: int, nbytes: int) -> Bytes:
        return self.array[offset : offset + nbytes]


class CpuBackend(Backend):
    """The CPU library over NumPy arrays; PYNCCL_LIBRARY may name another build of it."""

    name = "cpu"
    exact = True

    def environment(self, transport: str, process: int, nranks: int) -> dict[str, str]:
        env = {
            "PYNCCL_LIBRARY": os.environ.get("PYNCCL_LIBRARY", "cpu"),
            "LOCAL_WORLD_SIZE": str(nranks),
            "NCCL_DEBUG": "WARN",
        }
        env |= {"PYNCCL_CPU_INIT_TIMEOUT": "30"}
        if transport == "shm":
            env["PYNCCL_CPU_DIRECT"] = "0"
        if (host := host_of(transport, process)) is not None:
            env["NCCL_HOSTID"] = f"conformance-{host}"
        if transport == "shown":
            env["PYNCCL_CPU_INLINE_BYTES"] = "0"
        if transport in ("hosts", "flat"):
            env |= {"PYNCCL_CPU_INLINE_BYTES": "0", "PYNCCL_CPU_BY_HOSTS": str(int(transport == "hosts"))}
        return env

    def use_device(self, rank: int) -> None:
        capi().pyncclCpuSetDevice(rank)

    def supports(self, dtype: str, reduces: bool) -> bool:
        return True

    def memory(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def create_stream(self) -> int:
        stream: int = capi().pyncclCpuStreamCreate()
        return stream

    def destroy_stream(self, stream: int) -> None:
        capi().pyncclCpuStreamDestroy(stream)

    def order(self, comm: int, first: int, then: int) -> None:
        event = capi().pyncclCpuEventCreate()
        capi().pyncclCpuEventRecord(comm, event, first)
        capi().pyncclCpuStreamWaitEvent(comm, then, event)
        # As in CUDA, what waits for it still does.
        capi().pyncclCpuEventDestroy(event)

    def synchronize(self, comm: int, stream: int, timeout: float = WAIT) -> None:
        if capi().pyncclCpuStreamSynchronize(comm, stream, int(timeout * 1000)) != 0:
            raise TimeoutError(f"stream {stream:#x} is not done after {timeout:g} s")


class DeviceMemory(Memory):
    def __init__(self, nbytes: int) -> None:
        import cupy

        self.array = cupy.empty(max(nbytes, 1), cupy.uint8)
        self.ptr = int(self.array.data.ptr)

    def write(self, offset: int, data: Bytes) -> None:
        self.array[offset : offset + data.size].set(data)

    def read(self, offset: int, nbytes: int) -> Bytes:
        host: Bytes = self.array[offset : offset + nbytes].get()
        return host


class GpuBackend(Backend):
    """NVIDIA's library over CuPy arrays."""

    name = "gpu"
    exact = False

    def environment(self, transport: str, process: int, nranks: int) -> dict[str, str]:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
        if transport == "shm":
            env["NCCL_P2P_DISABLE"] = "1"
        if transport == "tcp":
            env |= {"NCCL_HOSTID": f"conformance-{process}", "NCCL_NET": "Socket"}
        return env

    def use_device(self, rank: int) -> None:
        import cupy

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()

    def supports(self, dtype: str, reduces: bool) -> bool:
        import cupy

        return (
            not (reduces and dtype.startswith("float8")) or int(cupy.cuda.Device().compute_capability) >= 90
        )

    def memory(self, nbytes: int) -> DeviceMemory:
        return DeviceMemory(nbytes)

    def create_stream(self) -> int:
        import cupy

        return int(cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        import cupy

        cupy.cuda.runtime.streamDestroy(stream)

    def order(self, comm: int, first: int, then: int) -> None:
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.ExternalStream(first))
        cupy.cuda.ExternalStream(then).wait_event(event)

    def synchronize(self, comm: int, stream: int, timeout: float = WAIT) -> None:
        import cupy

        deadline = time.monotonic() + timeout
        while not self._done(cupy, stream):
            capi().ncclCommGetAsyncError(comm)
            if time.monotonic() > deadline:
                raise TimeoutError(f"stream {stream:#x} is not done after {timeout:g} s")

    @staticmethod
    def _done(cupy: Any, stream: int) -> bool:
        # Raises for every other error.
        return bool(cupy.cuda.ExternalStream(stream).done)


def choose_backend() -> Backend:
    """Return the backend that PYNCCL_TEST_BACKEND names."""
    name = os.environ.get("PYNCCL_TEST_BACKEND", "cpu")
    kinds: dict[str, type[Backend]] = {"cpu": CpuBackend, "gpu": GpuBackend}
    return kinds[name]()
