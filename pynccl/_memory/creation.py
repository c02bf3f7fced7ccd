"""New arrays over memory from NCCL: NumPy and CuPy arrays, and torch tensors."""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from operator import index
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import code_of
from pynccl._base.values import shown
from pynccl._device.devices import current_device, on_device
from pynccl._library import cuda, loader
from pynccl._memory.allocation import Allocation

A = TypeVar("A")
Shape = int | Sequence[int]
_MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


class Memory(Protocol):
    """Memory that an array shows and keeps alive."""

    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int | None: ...


class _Maker(NamedTuple):
    """The functions that make arrays of one library."""

    # Return the library's dtype of this name.
    dtype: Callable[[str], Any]
    # Return an array over an allocation; None: an array without elements.
    make: Callable[[Memory | None, tuple[int, ...], Any], Any]
    # The device of the array's memory; None on the host or for the current device.
    device: int | None = None


@overload
def empty(shape: Shape, dtype: Any = None, *, like: A) -> A: ...
@overload
def empty(shape: Shape, dtype: Any = None, *, like: None = None) -> Any: ...
def empty(shape: Shape, dtype: Any = None, *, like: Any = None) -> Any:
    """Return a new array in memory from ncclMemAlloc (NCCL >= 2.19), whose elements are arbitrary.

    NCCL can move such memory without copies once it is registered (`Communicator.register`). The array is a
    CuPy array on the current device, or a NumPy array with the CPU library. With `like`, an array, it is of
    the same library and on the same device: a torch tensor for a torch tensor. `dtype` is by default that of
    `like`, or float64.

    The memory is freed when no array over it is left, and no registration, prepared call, plan or call in
    flight uses it. On a GPU this waits for the work of the device. It was not run on a GPU yet (docs/gpu.md).

    Wrong arguments raise TypeError or ValueError. Raises NotSupportedError with an older library, and
    NcclError if there is not enough memory.
    """
    return _new(shape, dtype, like, clear=False)


@overload
def zeros(shape: Shape, dtype: Any = None, *, like: A) -> A: ...
@overload
def zeros(shape: Shape, dtype: Any = None, *, like: None = None) -> Any: ...
def zeros(shape: Shape, dtype: Any = None, *, like: Any = None) -> Any:
    """Return a new array in memory from ncclMemAlloc, filled with zeros; otherwise as `empty`."""
    return _new(shape, dtype, like, clear=True)


def _new(shape: Shape, dtype: Any, like: Any, *, clear: bool) -> Any:
    axes = _shape(shape)
    on_cpu = loader.backend() == "cpu"
    maker = _maker(like, on_cpu)
    code = code_of(_default_dtype(like) if dtype is None else dtype, "dtype")
    kind = maker.dtype(dtypes.name_of(code))
    nbytes = math.prod(axes) * kind.itemsize
    with on_device(maker.device):
        memory = Allocation(nbytes) if nbytes else None
        array = maker.make(memory, axes, kind)
        if clear and memory and memory.device is None:
            ctypes.memset(memory.ptr, 0, nbytes)
        elif clear and memory:
            array[...] = 0
    return array


def over(memory: Memory, shape: tuple[int, ...], code: int, like: Any) -> Any:
    """Return an array over memory, of the library of `like` if that can be, else as `empty` without it."""
    on_cpu = loader.backend() == "cpu"
    try:
        maker = _maker(like, on_cpu)
    except TypeError:
        maker = _maker(None, on_cpu)
    return maker.make(memory, shape, maker.dtype(dtypes.name_of(code)))


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        axes = (index(shape),) if hasattr(shape, "__index__") else tuple(index(axis) for axis in shape)
    except TypeError:
        raise TypeError(f"shape is {shown(shape)}; expected an int or a sequence of ints") from None
    # Of a dict or a set, the order or the values would be lost.
    if isinstance(shape, bool | str | bytes | Mapping | Set):
        raise TypeError(f"shape is {shown(shape)}; expected an int or a sequence of ints")
    if any(axis < 0 for axis in axes):
        raise ValueError(f"shape is {shown(shape)}; expected no negative axis")
    if len(axes) > _MOST_AXES or math.prod(axis or 1 for axis in axes) > dtypes.MOST_ELEMENTS:
        raise ValueError(
            f"shape is {shown(shape)}; expected fewer than 2**59 elements, and at most {_MOST_AXES} axes"
        )
    return axes


def _default_dtype(like: Any) -> Any:
    return np.dtype(np.float64) if like is None else getattr(like, "dtype", None)


def _maker(like: Any, on_cpu: bool) -> _Maker:
    """Return the maker of arrays like another one; raise if the library cannot use their memory."""
    if like is None:
        return _Maker(numpy_dtype, _numpy) if on_cpu else _cupy_maker(None, on_cpu)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return _torch_maker(torch, like, on_cpu)
    if type(like).__module__.partition(".")[0] == "cupy" and hasattr(like, "data"):
        return _cupy_maker(like.data.device_id if cuda.available() and not on_cpu else None, on_cpu)
    if isinstance(like, np.ndarray):
        if not on_cpu:
            raise ValueError(
                "like is a NumPy array, host memory; expected a CuPy array or a torch tensor on a CUDA "
                "device, since NVIDIA's NCCL is loaded (PYNCCL_LIBRARY=cpu works on host memory)"
            )
        return _Maker(numpy_dtype, _numpy)
    raise TypeError(
        f"like is of type {type(like).__qualname__}; expected a NumPy or CuPy array or a torch tensor"
    )


# --- NumPy --------------------------------------------------------------------------------------------------


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, NumPy's or that of ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return found


def _bytes(memory: Memory, interface: str) -> Any:
    """Return an object that shows the memory as bytes by an interface of arrays, and keeps it alive."""
    shown = {"shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.ptr, False), "version": 3}
    return SimpleNamespace(**{interface: shown, "memory": memory})


def _numpy(memory: Memory | None, shape: tuple[int, ...], dtype: Any) -> Any:
    if memory is None:
        return np.empty(shape, dtype)
    return np.asarray(_bytes(memory, "__array_interface__")).view(dtype).reshape(shape)


# --- CuPy ---------------------------------------------------------------------------------------------------


def _cupy_maker(device: int | None, on_cpu: bool) -> _Maker:
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"pynccl.empty makes CuPy arrays on a GPU, but cupy cannot be imported ({error}); expected CuPy, "
            "or like=, a torch tensor on a CUDA device"
        ) from error
    if device is None and not on_cpu and cuda.available():
        device = current_device()
    return _Maker(numpy_dtype, _cupy, device)


def _cupy(memory: Memory | None, shape: tuple[int, ...], dtype: Any) -> Any:
    cupy = sys.modules["cupy"]
    ptr, nbytes = (memory.ptr, memory.nbytes) if memory else (0, 0)
    # Without a driver every array is in host memory, and has device 0.
    device = (memory and memory.device) or 0
    unowned = cupy.cuda.UnownedMemory(ptr, nbytes, memory, device)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0))


# --- torch --------------------------------------------------------------------------------------------------


def _torch_maker(torch: Any, like: Any, on_cpu: bool) -> _Maker:
    expected = "cpu" if on_cpu else "cuda"
    if like.device.type != expected:
        library = "the CPU library" if on_cpu else "NVIDIA's NCCL"
        raise ValueError(
            f"like is a tensor on {like.device}; expected one on a {expected} device, "
            f"since {library} is loaded"
        )

    def dtype(name: str) -> Any:
        return getattr(torch, name)

    def make(memory: Memory | None, shape: tuple[int, ...], kind: Any) -> Any:
        if memory is None:
            return torch.empty(shape, dtype=kind, device=like.device)
        if on_cpu:
            flat = torch.from_numpy(np.asarray(_bytes(memory, "__array_interface__")))
        else:
            flat = torch.as_tensor(_bytes(memory, "__cuda_array_interface__"), device=like.device)
        return flat.view(kind).reshape(shape)

    return _Maker(dtype, make, None if on_cpu else like.device.index)
