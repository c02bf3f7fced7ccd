"""A stand-in for what NCCL's clients need of CUDA: devices that are numbers, and arrays in host memory.

`install` puts it under the names `cupy` and `cuda.core`, before a client is imported. CuPy's modules that
need no CUDA stay: its NCCL binding, its test decorators, and cupyx.distributed. Streams have no order:
PYNCCL_CPU_BLOCKING=1 has every call return when its work is done.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import runpy
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# How many devices there are.
COUNT = "HOST_CUDA_DEVICES"
# The type characters with which tests for several dtypes run; without it with all of theirs.
DTYPES = "HOST_CUDA_DTYPES"
# Whose binding is under the name cupy.cuda.nccl, and whose class under cupyx.distributed.
WAYS = ("cupy", "compat.cupy", "compat.cupyx")
# What CuPy has as NumPy has it: functions that return arrays, and others.
ARRAYS = ("arange", "array", "broadcast_to", "empty_like", "matmul", "ones", "zeros", "zeros_like")
OTHERS = ("allclose", "dtype", "float32", "int8", "int64")


class Device:
    """CuPy's device and cuda.core's in one: the number that the CPU library takes for the current device."""

    _current = 0

    def __init__(self, number: int | None = None) -> None:
        self.id = self.device_id = Device._current if number is None else int(number)
        self._before: list[int] = []
        self.name, self.default_stream = "host memory", STREAM
        self.compute_capability = types.SimpleNamespace(major=0, minor=0)

    def use(self) -> None:
        from pynccl import capi

        Device._current = self.id
        capi.pyncclCpuSetDevice(self.id)

    set_current = use

    def synchronize(self) -> None:
        """Return: the calls have returned, and so their work is done."""

    sync = synchronize

    def to_system_device(self) -> Any:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(memory_info=types.SimpleNamespace(total=total))

    def __enter__(self) -> Device:
        self._before.append(Device._current)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        Device(self._before.pop()).use()


class Stream:
    ptr = handle = 0
    null: Stream

    def synchronize(self) -> None:
        """Return: the calls have returned, and so their work is done."""


STREAM = Stream.null = Stream()


def count() -> int:
    return int(os.environ[COUNT])


# --- cupy ---------------------------------------------------------------------------------------------------


class HostArray(np.ndarray[Any, Any]):
    """NumPy's array with the two attributes by which CuPy's says where it lies."""

    # The library that makes more of them, as pynccl sees it.
    __module__ = "numpy"

    def __array_finalize__(self, source: Any) -> None:
        self._device = getattr(source, "_device", Device())

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return self._device


def _on_host(function: Callable[..., Any]) -> Callable[..., HostArray]:
    @functools.wraps(function)
    def make(*args: Any, **options: Any) -> HostArray:
        return function(*args, **options).view(HostArray)

    return make


def from_dlpack(buffer: Buffer, copy: bool) -> HostArray:
    """Return the bytes of a buffer, which lives as long as they do."""
    assert not copy
    memory = (ctypes.c_uint8 * buffer.size).from_address(buffer.handle)
    memory.buffer = buffer  # type: ignore[attr-defined]
    return np.frombuffer(memory, np.uint8).view(HostArray)


def _sparse() -> types.ModuleType:
    """Return scipy.sparse with CSR matrices of host arrays."""
    from scipy import sparse

    def part(name: str) -> property:
        def get(matrix: Any) -> HostArray:
            return vars(matrix)[name].view(HostArray)

        return property(get, lambda matrix, value: vars(matrix).__setitem__(name, value))

    class csr_matrix(sparse.csr_matrix):  # type: ignore[misc]
        data, indices, indptr = part("data"), part("indices"), part("indptr")

        def todense(self, *args: Any, **options: Any) -> HostArray:
            return self.toarray(*args, **options).view(HostArray)

    return _module("cupyx.scipy.sparse", vars(sparse) | {"csr_matrix": csr_matrix})


# --- cuda.core ----------------------------------------------------------------------------------------------


class MemoryResource:
    """What nccl4py derives its own from."""

    deallocate: Callable[[int, int], None]


class Buffer:
    """Memory of a resource, until close() or the end."""

    def __init__(self, ptr: int, size: int, mr: MemoryResource) -> None:
        self.handle, self.size = ptr, size
        self.close = weakref.finalize(self, mr.deallocate, ptr, size)

    @classmethod
    def from_handle(cls, ptr: int, size: int, mr: MemoryResource) -> Buffer:
        return cls(ptr, size, mr)


class Event:
    handle = 0


# --- torch --------------------------------------------------------------------------------------------------


def with_torch() -> None:
    """Have torch's tensors in host memory say that they are on a device."""
    import torch

    class HostTensor(torch.Tensor):
        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda", Device().id)

    def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, device: torch.device, **options: Any) -> Any:
            assert device.index == Device().id
            return function(*args, **options).as_subclass(HostTensor)

        return make

    torch.tensor, torch.zeros = on_host(torch.tensor), on_host(torch.zeros)
    torch.cuda.device_count = count
    torch.cuda.set_device = lambda device: Device(device.index).use()
    torch.cuda.synchronize = Device().synchronize


# --- under their names --------------------------------------------------------------------------------------


def _module(name: str, values: dict[str, Any], path: str | None = None) -> types.ModuleType:
    """Make a module; those of its submodules that are not made here are found in `path`."""
    module = types.ModuleType(name)
    vars(module).update(
        {key: value for key, value in values.items() if key == "__getattr__" or key[:2] != "__"}
    )
    if path is not None:
        module.__path__ = [path]
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return str(Path(spec.origin).parent)


def install(way: str) -> None:
    """Put the stand-ins under their names, and one of WAYS under CuPy's."""
    cupy, cupyx = _folder("cupy"), _folder("cupyx")
    names = {name: _on_host(getattr(np, name)) for name in ARRAYS}
    # A matrix of CuPy's may have no sorted, or no valid, indices for a while; SciPy's looks at them.
    names["empty"] = names["zeros"]
    values = names | {name: getattr(np, name) for name in OTHERS}
    values |= {"ndarray": HostArray, "asnumpy": np.array, "from_dlpack": from_dlpack}
    _module("cupy", values, cupy)
    stream = types.SimpleNamespace(get_current_stream=lambda: STREAM)
    runtime = types.SimpleNamespace(getDeviceCount=count)
    values = {"Device": Device, "Stream": Stream, "stream": stream, "runtime": runtime}
    _module("cupy.cuda", values, f"{cupy}/cuda")
    _module("cupy.testing", {"__getattr__": _tester}, f"{cupy}/testing")
    _module("cupyx", {}, cupyx)
    _module("cupyx.scipy", {"sparse": _sparse()}, f"{cupyx}/scipy")
    own = (Buffer, Device, Event, MemoryResource, Stream)
    system = types.SimpleNamespace(get_num_devices=count)
    _module("cuda.core", {one.__name__: one for one in own} | {"system": system})
    _module("cuda.core.typing", {"DevicePointerType": int, "IsStreamType": object})
    _module("cuda.core.utils", {"StridedMemoryView": object, "args_viewable_as_strided_memory": _unused})
    if way != "cupy":
        importlib.import_module("pynccl.compat.cupy").install()
    if way == "compat.cupyx":
        ours = importlib.import_module("pynccl.compat.cupyx")
        theirs = [importlib.import_module(f"cupyx.distributed{part}") for part in ("", "._nccl_comm")]
        for module in theirs:
            vars(module).update(NCCLBackend=ours.NCCLBackend, init_process_group=ours.init_process_group)


def _tester(name: str) -> Any:
    """Return a decorator or an assertion of CuPy's, and not import the others, which need CUDA."""
    parts = {"multi_gpu": "_attr", "for_all_dtypes": "_loops", "for_dtypes": "_loops"}
    if name.startswith("_"):
        raise AttributeError(name)
    found = getattr(importlib.import_module(f"cupy.testing.{parts.get(name, '_array')}"), name)
    if parts.get(name) != "_loops" or DTYPES not in os.environ:
        return found
    dtypes = os.environ[DTYPES]
    return lambda *_, **__: importlib.import_module("cupy.testing._loops").for_dtypes(dtypes)


def _unused(_: object) -> Callable[..., Any]:
    """Leave out what nccl4py does with memory that is neither torch's nor CuPy's."""
    return lambda function: function


def run(path: str) -> None:
    """Run one of nccl4py's examples."""
    install("cupy")
    if "import torch" in Path(path).read_text():
        with_torch()
    else:
        # nccl4py uses it where it is, and it takes long to import.
        sys.modules["torch"] = None  # type: ignore[assignment]
    runpy.run_path(path, run_name="__main__")
