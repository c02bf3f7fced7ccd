"""From an array to what NCCL wants: pointer, count, datatype, and where the memory is.

How an object is read is decided once per type, in this order: numpy.ndarray, cupy.ndarray, torch.Tensor,
__cuda_array_interface__, DLPack, the buffer protocol. Nothing is copied, and nothing is guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pynccl import _cuda, _dlpack
from pynccl._types import DataType

# pointer, count, datatype, device, read-only. A plain tuple: one is made for every argument of every call.
Span = tuple[int, int, int, int, bool]
Resolver = Callable[[Any, str], Span]

HOST = -1
# Without a driver all memory is host memory, also what claims to be a device's.
ANYWHERE = -2

_NAMES = {
    **{dtype.name.lower(): dtype for dtype in DataType if not dtype.name.startswith("FLOAT8")},
    "float8_e4m3fn": DataType.FLOAT8E4M3,
    "float8_e5m2": DataType.FLOAT8E5M2,
}
_dtypes: dict[Any, int] = {}
_resolvers: dict[type, Resolver] = {}


def resolve(array: Any, name: str) -> Span:
    """Return the span of an array; `name` is what messages call it."""
    resolver = _resolvers.get(type(array))
    if resolver is None:
        resolver = _resolvers[type(array)] = _choose(array, name)
    return resolver(array, name)


def _choose(array: Any, name: str) -> Resolver:
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be lost; expected a plain array")
        return _from_numpy
    library = type(array).__module__.partition(".")[0]
    if library == "cupy" and hasattr(array, "data"):
        return _from_cupy
    if library == "torch" and hasattr(array, "__dlpack__"):
        # One type for tensors on every kind of device, of which only CUDA's have the array interface.
        return _from_dlpack
    if hasattr(type(array), "__cuda_array_interface__") or hasattr(array, "__cuda_array_interface__"):
        return _from_cuda_array_interface
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack
    try:
        memoryview(array).release()
    except TypeError:
        raise TypeError(
            f"{name} is of type {type(array).__qualname__}; expected a NumPy or CuPy array, or an object "
            "with __cuda_array_interface__, __dlpack__ or the buffer protocol"
        ) from None
    return _from_buffer


def datatype(dtype: Any, name: str) -> int:
    """Return NCCL's datatype for a NumPy dtype."""
    code = _dtypes.get(dtype)
    if code is None:
        code = _dtypes[dtype] = _find_datatype(np.dtype(dtype), name)
    return code


def _find_datatype(dtype: np.dtype[Any], name: str) -> int:
    if not dtype.isnative:
        raise TypeError(
            f"{name} has dtype {dtype.str}; expected the byte order of this machine, {sys.byteorder}-endian"
        )
    # By name, so that ml_dtypes' types are known without importing it.
    code = _NAMES.get(dtype.name)
    if code is None:
        hint = " (float8_e4m3 has infinities, NCCL's does not)" if dtype.name == "float8_e4m3" else ""
        raise TypeError(f"{name} has dtype {dtype}{hint}; expected one of {', '.join(_NAMES)}")
    return int(code)


def _require_contiguous(contiguous: bool, name: str, shape: Any, strides: Any) -> None:
    if not contiguous:
        raise ValueError(
            f"{name} is not C-contiguous (shape {tuple(shape)}, strides {strides}); nothing is copied "
            "silently: pass a contiguous array, as ascontiguousarray makes it"
        )


def _from_numpy(array: Any, name: str) -> Span:
    flags = array.flags
    if not flags.c_contiguous:
        _require_contiguous(False, name, array.shape, array.strides)
    return array.ctypes.data, array.size, datatype(array.dtype, name), HOST, not flags.writeable


def _from_cupy(array: Any, name: str) -> Span:
    if not array.flags.c_contiguous:
        _require_contiguous(False, name, array.shape, array.strides)
    memory = array.data
    device = memory.device_id if _cuda.available() else ANYWHERE
    return memory.ptr, array.size, datatype(array.dtype, name), device, False


def _from_cuda_array_interface(array: Any, name: str) -> Span:
    interface = array.__cuda_array_interface__
    shape, strides = interface["shape"], interface.get("strides")
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask, which would be lost; expected a plain array")
    # bfloat16 and float8 have no typestr of their own: where there is a NumPy dtype, it says more.
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(interface["typestr"])
    _require_contiguous(strides is None or _is_c_order(shape, strides, dtype.itemsize), name, shape, strides)
    pointer, readonly = interface["data"]
    count = _product(shape)
    return pointer, count, datatype(dtype, name), _device_of(pointer, count), bool(readonly)


def _from_dlpack(array: Any, name: str) -> Span:
    try:
        tensor = _dlpack.read(array)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{name} (a {type(array).__qualname__}) cannot be read through DLPack: {error}"
        ) from error
    _require_contiguous(
        tensor.strides is None or _is_c_order(tensor.shape, tensor.strides, 1),
        name,
        tensor.shape,
        tensor.strides,
    )
    code = _NAMES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {', '.join(_NAMES)}")
    count = _product(tensor.shape)
    device = HOST if tensor.on_host else _device_of(tensor.pointer, count)
    return tensor.pointer, count, int(code), device, tensor.readonly


def _from_buffer(array: Any, name: str) -> Span:
    try:
        view = np.asarray(memoryview(array))
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(f"{name} (a {type(array).__qualname__}) is no buffer of numbers: {error}") from error
    return _from_numpy(view, name)


def _device_of(pointer: int, count: int) -> int:
    """Ask the driver where memory is; an empty array is nowhere."""
    if not count or not _cuda.available():
        return ANYWHERE
    device = _cuda.pointer_device(pointer)
    return HOST if device is None else device


def _product(shape: Any) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _is_c_order(shape: Any, strides: Any, step: int) -> bool:
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def require_place(span: Span, name: str, backend: str, device: int) -> None:
    """Refuse memory that the loaded library cannot reach from this communicator's device."""
    where = span[3]
    if backend == "cpu":
        if where >= 0:
            raise ValueError(
                f"{name} is memory of device {where}; the CPU library is loaded, which works on host memory"
            )
    elif where == HOST and span[1]:
        raise ValueError(
            f"{name} is host memory; NVIDIA's NCCL is loaded, which works on device memory "
            "(PYNCCL_LIBRARY=cpu works on host memory)"
        )
    elif where >= 0 and where != device:
        raise ValueError(f"{name} is memory of device {where}; expected the communicator's device {device}")


def require_writable(span: Span, name: str) -> None:
    """Refuse a read-only array as an output."""
    if span[4] and span[1]:
        raise ValueError(f"{name} is read-only; expected a writable array, since the result goes there")


def require_alike(send: Span, recv: Span) -> None:
    """Refuse an output whose datatype or count is not the input's."""
    if send[2] != recv[2]:
        kinds = DataType(recv[2]).name.lower(), DataType(send[2]).name.lower()
        raise TypeError(f"recv has datatype {kinds[0]}; expected that of send, {kinds[1]}")
    if send[1] != recv[1]:
        raise ValueError(f"recv has {recv[1]} elements; expected as many as send, {send[1]}")
