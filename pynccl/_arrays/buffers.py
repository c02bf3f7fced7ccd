"""From an array to NCCL's arguments: pointer, count and datatype, and the device of the memory.

Each type is read in one way, chosen once in this order: pynccl.Buffer, numpy.ndarray, cupy.ndarray,
torch.Tensor, __cuda_array_interface__, DLPack, the buffer protocol. Nothing is copied or guessed. If a type
has both interfaces, as JAX's has, each array decides: only device memory has __cuda_array_interface__.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, NamedTuple, Protocol

import numpy as np

from pynccl._arrays import dlpack, dtypes
from pynccl._arrays.dtypes import from_name, from_numpy, from_torch, native
from pynccl._base.values import is_int, refuse_copy, shown
from pynccl._library import cuda
from pynccl._library.binding import ffi
from pynccl._types import DataType

# Pointer, count, dtype code (dtypes), device, flags. A plain tuple for speed: every argument of every call
# makes one. The flags are 0 for a writable array in C order with a dtype of NCCL's own.
Span = tuple[int, int, int, int, int]

READ_ONLY, FORTRAN, TRAVELS, RECORDED_BY_AUTOGRAD = 1, 2, 4, 8

HOST = -1
# The place of a communicator that accepts any memory: without a driver all memory is host memory.
ANYWHERE = -2


_CUDA_INTERFACE = "__cuda_array_interface__"
# The newest version of the interface.
_VERSION = 3
_MPI_CONSTANTS = {"InPlaceType": "MPI.IN_PLACE", "BottomType": "MPI.BOTTOM"}
# More than an address, or the bytes of an array, can be.
_MOST = 1 << 63
_cast, _from_memory = ffi.cast, ffi.from_buffer


class _HasDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class _HasCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Any: ...


class _HasBuffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...


class Kind(NamedTuple):
    """The functions that handle the arrays of one type."""

    span: Callable[[Any, str], Span]
    # Return the current stream of the array's own library.
    current: Callable[[Any], int]
    # Return a new array of the same kind and dtype, with this shape.
    empty: Callable[[Any, tuple[int, ...]], Any]
    # Make a stream wait for pending writes to the array, for producers that announce them.
    order: Callable[[Any, int], None] | None = None
    # Notify the array's library that the elements are about to change.
    changed: Callable[[Any], None] | None = None
    # Whether the object's memory moves when the object is resized, unless an export of its buffer exists.
    moves: bool = False


class Buffer:
    """Raw memory as an array: a pointer, a number of elements and their dtype.

    `dtype` is a NumPy dtype or its name ("bfloat16"), a DataType or a torch dtype. The buffer keeps `owner`
    alive. The CUDA driver knows the device of the memory; without a driver it is host memory. Wrong arguments
    raise TypeError or ValueError.
    """

    __slots__ = ("_span", "dtype", "owner")
    __reduce__ = refuse_copy

    def __init__(
        self, ptr: int, count: int, dtype: Any, *, owner: Any = None, readonly: bool = False
    ) -> None:
        for name, value in (("ptr", ptr), ("count", count)):
            if not is_int(value):
                raise TypeError(f"{name} is {shown(value)}; expected an int")
            if not 0 <= value < 1 << 63:
                raise ValueError(f"{name} is {shown(value)}; expected 0 <= {name} < 2**63")
        if not isinstance(readonly, bool):
            raise TypeError(f"readonly is {shown(readonly)}; expected True or False")
        if not ptr and count:
            raise ValueError(f"ptr is 0; expected the address of {count} elements")
        self.dtype, self.owner = dtype, owner
        code = code_of(dtype, "dtype")
        if int(count) * dtypes.itemsize(code) >= _MOST:
            raise ValueError(f"count is {count} of {dtype}; expected fewer than 2**63 bytes")
        self._span = _span(int(ptr), int(count), code, _device_of(int(ptr), int(count)), readonly=readonly)

    @property
    def ptr(self) -> int:
        """The address."""
        return self._span[0]

    @property
    def count(self) -> int:
        """The number of elements."""
        travel = dtypes.traveller(self._span[2])
        return self._span[1] // (travel.factor if travel else 1)

    def __repr__(self) -> str:
        return f"<pynccl.Buffer {self.ptr:#x}, {self.count} of {dtypes.name_of(self._span[2])}>"


# The static type of arrays.
Array = Buffer | _HasDLPack | _HasCudaArrayInterface | _HasBuffer


class Part(Buffer):
    """A part of another array, its owner, with the owner's stream and pending writes."""

    __slots__ = ()


def _part_stream(part: Any) -> int:
    return 0 if part.owner is None else kind_of(part.owner).current(part.owner)


def _order_part(part: Any, stream: int) -> None:
    order = None if part.owner is None else kind_of(part.owner).order
    if order is not None:
        order(part.owner, stream)


def _part_changed(part: Any) -> None:
    changed = None if part.owner is None else kind_of(part.owner).changed
    if changed is not None:
        changed(part.owner)


def code_of(dtype: Any, name: str) -> int:
    """Return the code of a dtype in any notation; `name` is the argument in messages."""
    if dtype is None:
        # np.dtype(None) is float64.
        raise TypeError(f"{name} is None; expected a dtype that NCCL can carry")
    if isinstance(dtype, DataType):
        return int(dtype)
    if type(dtype).__module__ == "torch":
        return from_torch(dtype, name)
    if isinstance(dtype, str) and dtype in dtypes.CODES:
        return dtypes.CODES[dtype]
    try:
        return from_numpy(np.dtype(dtype), name)
    except TypeError as error:
        ours = dtypes.OTHER_NAMES.get(dtype) if isinstance(dtype, str) else None
        hint = f"; pynccl's name is {shown(ours)}" if ours else ""
        raise TypeError(
            f"{name} is {shown(dtype)}{hint}; expected a dtype that NCCL can carry: {error!s:.200}"
        ) from None


# --- which kind ---------------------------------------------------------------------------------------------


class _Spans(dict[type, Callable[[Any, str], Span]]):
    """The reading function of each array type, chosen at the first array of the type."""

    def __missing__(self, kind: type) -> Callable[[Any, str], Span]:
        return lambda array, name: kind_of(array, name).span(array, name)


# cupy.ndarray, after the first array of this type.
cupy_array: Any = None
spans = _Spans()
_kinds: dict[type, Kind] = {}


def kind_of(array: Any, name: str = "send") -> Kind:
    """Return the Kind of an array; `name` is the argument in messages."""
    kind = _kinds.get(type(array))
    if kind is None:
        kind = _kinds[type(array)] = _choose(array, name)
        spans[type(array)] = kind.span
    return kind


def held(objects: Iterable[Any]) -> list[Any]:
    """Return the objects, and for each whose memory moves an export that keeps the memory where it is."""
    return [
        memoryview(each) if (kind := _kinds.get(type(each))) is not None and kind.moves else each
        for each in objects
    ]


def shape_of(array: Any) -> tuple[int, ...]:
    """Return an array's shape; a Buffer has one axis, and a plain buffer its own shape."""
    if isinstance(array, Buffer):
        return (array.count,)
    if hasattr(array, "shape"):
        return tuple(array.shape)
    if hasattr(array, _CUDA_INTERFACE):
        return tuple(array.__cuda_array_interface__["shape"])
    if hasattr(array, "__dlpack_device__"):
        return dlpack.read(array).shape
    return np.asarray(memoryview(array)).shape


def in_shape_of(array: Any, other: Any) -> Any:
    """Return a view of an array in another's shape; the array itself if no such view exists."""
    shape, wanted = getattr(array, "shape", None), getattr(other, "shape", None)
    if shape is None or wanted is None or tuple(shape) == tuple(wanted):
        return array
    flags = getattr(array, "flags", None)
    contiguous = (
        array.is_contiguous() if hasattr(array, "is_contiguous") else getattr(flags, "c_contiguous", False)
    )
    return array.reshape(wanted) if contiguous and _product(shape) == _product(wanted) else array


def _choose(array: Any, name: str) -> Kind:
    if isinstance(array, Part):
        return Kind(lambda part, _: part._span, _part_stream, _cannot_create, _order_part, _part_changed)
    if isinstance(array, Buffer):
        return Kind(lambda buffer, _: buffer._span, _no_stream, _cannot_create)
    if isinstance(array, np.ndarray):
        # NumPy imports numpy.ma late, which needs a free descriptor.
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise TypeError(f"{name} is a masked array; its mask would be lost; expected a plain array")
        return Kind(_from_numpy, _no_stream, _numpy_empty)
    if isinstance(array, np.generic):
        raise TypeError(f"{name} is {shown(array)}, a number; expected an array, such as numpy.array({name})")
    library = type(array).__module__.partition(".")[0]
    if library == "cupy" and hasattr(array, "data") and hasattr(array, "flags"):
        # Without a driver every array is in host memory, whatever its device_id.
        global cupy_array
        if hasattr(array, "_c_contiguous"):
            cupy_array = type(array)
        span = _from_cupy_on_device if cuda.available() else _from_cupy_on_host
        return Kind(span if hasattr(array, "_c_contiguous") else _from_cupy, cupy_stream, _cupy_empty)
    if hasattr(array, "data_ptr") and isinstance(array, _torch_tensor()):
        return Kind(_from_torch, _torch_stream, _torch_empty, changed=_torch_changed)
    by_dlpack = Kind(_from_dlpack, _no_stream, _cannot_create, _order_dlpack)
    if library in ("jax", "jaxlib") and hasattr(array, "__dlpack__"):
        return by_dlpack._replace(span=_from_jax)
    if library == "mpi4py" and type(array).__name__ in _MPI_CONSTANTS:
        constant = _MPI_CONSTANTS[type(array).__name__]
        raise TypeError(f"{name} is {constant}; expected an array: a call without recv is in place")
    if isinstance(array, type):
        raise TypeError(f"{name} is the type {array.__qualname__}; expected an array")
    empty = _numba_empty if library in ("numba", "numba_cuda") else _cannot_create
    by_cuda = Kind(_from_cuda_array_interface, _producer_stream, empty, _order_producer)
    has_interface = hasattr(type(array), _CUDA_INTERFACE) or hasattr(array, _CUDA_INTERFACE)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _either(by_cuda, by_dlpack) if has_interface else by_dlpack
    if has_interface:
        return by_cuda
    try:
        memoryview(array).release()
    except TypeError:
        raise TypeError(_why_no_array(array, name)) from None
    return Kind(_from_buffer, _no_stream, _buffer_empty, moves=True)


def _either(by_cuda: Kind, by_dlpack: Kind) -> Kind:
    """Return the kind of a type with both interfaces: `by_cuda` for device memory, else `by_dlpack`."""

    def of(array: Any) -> Kind:
        return by_cuda if hasattr(array, _CUDA_INTERFACE) else by_dlpack

    def order(array: Any, stream: int) -> None:
        kind = of(array)
        assert kind.order is not None
        kind.order(array, stream)

    return Kind(
        lambda array, name: of(array).span(array, name),
        lambda array: of(array).current(array),
        by_cuda.empty,
        order,
    )


def _why_no_array(array: Any, name: str) -> str:
    kind = type(array).__qualname__
    if hasattr(array, "__array__"):
        return (
            f"{name} is of type {kind}, which may return its memory or a copy of "
            f"it; expected an array made from it, such as numpy.array({name})"
        )
    made = f", such as numpy.array({name})" if isinstance(array, list | tuple | int | float | complex) else ""
    pickled = f", such as bytearray(pickle.dumps({name}))" if isinstance(array, dict | set | str) else ""
    return (
        f"{name} is of type {kind}; expected a NumPy or CuPy array{made}, a torch tensor, a pynccl.Buffer, "
        f"or an object with __cuda_array_interface__, __dlpack__ or the buffer protocol{pickled}"
    )


def _torch_tensor() -> Any:
    # Never import torch: if an array is a tensor, torch is imported already.
    torch = sys.modules.get("torch")
    return getattr(torch, "Tensor", ())


def _span(
    pointer: int, count: int, code: int, where: int, *, readonly: bool = False, fortran: bool = False
) -> Span:
    flags = (READ_ONLY if readonly else 0) | (FORTRAN if fortran else 0)
    travel = dtypes.traveller(code)
    if travel is not None:
        return pointer, count * travel.factor, code, where, flags | TRAVELS
    return pointer, count, code, where, flags


def _not_contiguous(name: str, shape: Any, strides: Any) -> ValueError:
    return ValueError(
        f"{name} is not contiguous (shape {tuple(shape)}, strides {tuple(strides)}); nothing is copied "
        "silently: expected a contiguous array (see ascontiguousarray and .contiguous())"
    )


def _device_of(pointer: int, count: int) -> int:
    """Ask the driver for the device of memory; an empty array has none."""
    if not count or not cuda.available():
        return ANYWHERE
    device = cuda.pointer_device(pointer)
    return HOST if device is None else device


def _no_stream(array: Any) -> int:
    return 0


def _cannot_create(array: Any, shape: tuple[int, ...]) -> Any:
    raise TypeError(
        f"recv is None, and pynccl cannot make a new {type(array).__qualname__}; "
        f"expected an array of shape {shape} for the result, such as numpy.empty or cupy.empty makes"
    )


# --- host memory --------------------------------------------------------------------------------------------


def _from_numpy(array: Any, name: str) -> Span:
    flags = array.flags
    code = native.get(array.dtype)
    if code is not None and flags.carray:
        try:
            # Three times as fast as array.ctypes.data.
            pointer = int(_cast("uintptr_t", _from_memory(array)))
        except (TypeError, ValueError, BufferError):
            # Arrays of ml_dtypes have no buffer protocol.
            pointer = array.ctypes.data
        return pointer, array.size, code, HOST, 0
    fortran = not flags.c_contiguous
    if fortran and not flags.f_contiguous:
        raise _not_contiguous(name, array.shape, array.strides)
    code = from_numpy(array.dtype, name)
    return _span(array.ctypes.data, array.size, code, HOST, readonly=not flags.writeable, fortran=fortran)


def _numpy_empty(array: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, array.dtype)


def _from_buffer(array: Any, name: str) -> Span:
    try:
        view = np.asarray(memoryview(array))
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{name} (a {type(array).__qualname__}) is not a buffer of numbers: {error}"
        ) from error
    return _from_numpy(view, name)


def _buffer_empty(array: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, np.asarray(memoryview(array)).dtype)


# --- CuPy ---------------------------------------------------------------------------------------------------


def _from_cupy_on_device(array: Any, name: str) -> Span:
    memory = array.data
    code = native.get(array.dtype)
    if code is None or not array._c_contiguous:
        return _from_cupy(array, name)
    return memory.ptr, array.size, code, memory.device_id, 0


def _from_cupy_on_host(array: Any, name: str) -> Span:
    code = native.get(array.dtype)
    if code is None or not array._c_contiguous:
        return _from_cupy(array, name)
    return array.data.ptr, array.size, code, ANYWHERE, 0


def _from_cupy(array: Any, name: str) -> Span:
    flags = array.flags
    fortran = not flags.c_contiguous
    if fortran and not flags.f_contiguous:
        raise _not_contiguous(name, array.shape, array.strides)
    where = array.data.device_id if cuda.available() else ANYWHERE
    return _span(array.data.ptr, array.size, from_numpy(array.dtype, name), where, fortran=fortran)


def cupy_stream(array: Any = None) -> int:
    """Return CuPy's current stream."""
    return int(sys.modules["cupy"].cuda.get_current_stream().ptr) if cuda.available() else 0


def _cupy_empty(array: Any, shape: tuple[int, ...]) -> Any:
    cupy = sys.modules["cupy"]
    if cuda.available():
        with cupy.cuda.Device(array.data.device_id):
            return cupy.empty(shape, array.dtype)
    # CuPy's allocators need the driver; a CuPy array over foreign memory does not.
    host = np.empty(shape, array.dtype)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(shape, array.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


# --- torch --------------------------------------------------------------------------------------------------


def _not_plain(tensor: Any) -> str:
    """Return what keeps a tensor's memory from having its values, and what to write."""
    if tensor.layout is not sys.modules["torch"].strided:
        return f"layout {tensor.layout}; expected a strided one: .to_dense()"
    if tensor.is_conj():
        return "a pending conjugation; expected one without: .resolve_conj()"
    return "a pending negation; expected one without: .resolve_neg()"


def _from_torch(tensor: Any, name: str) -> Span:
    if tensor.layout is not sys.modules["torch"].strided or tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"{name} is a tensor with {_not_plain(tensor)}")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; expected a plain one, such as its .values()")
    if not tensor.is_contiguous():
        raise _not_contiguous(name, tensor.shape, tensor.stride())
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} is a tensor on {device}; expected a tensor on the CPU or on a CUDA device")
    where = HOST if device.type == "cpu" else device.index
    span = _span(tensor.data_ptr(), tensor.numel(), from_torch(tensor.dtype, name), where)
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        return (*span[:4], span[4] | RECORDED_BY_AUTOGRAD)
    return span


def _torch_changed(tensor: Any) -> None:
    # Increment the version counter, so that a backward pass that needs the old elements raises.
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def _torch_stream(tensor: Any) -> int:
    if tensor.device.type != "cuda":
        return 0
    return int(sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream)


def _torch_empty(tensor: Any, shape: tuple[int, ...]) -> Any:
    return sys.modules["torch"].empty(shape, dtype=tensor.dtype, device=tensor.device)


# --- __cuda_array_interface__ -------------------------------------------------------------------------------


def _from_cuda_array_interface(array: Any, name: str) -> Span:
    interface = array.__cuda_array_interface__
    # The typestr cannot express bfloat16 and float8; the NumPy dtype, if there is one, can.
    dtype: Any = getattr(array, "dtype", None)
    try:
        shape, (pointer, readonly) = tuple(map(index, interface["shape"])), interface["data"]
        if not isinstance(dtype, np.dtype):
            dtype = np.dtype(interface["typestr"])
        count = _product(shape)
        strides = interface.get("strides")
        strides = None if strides is None else tuple(map(index, strides))
        sound = (
            (strides is None or len(strides) == len(shape))
            and 0 <= index(pointer) < _MOST
            and index(interface.get("version", 0)) <= _VERSION
            and min(shape, default=0) >= 0
            and count * dtype.itemsize < _MOST
        )
    except (LookupError, TypeError, ValueError):
        sound = False
    if not sound:
        raise TypeError(
            f"{name} has the __cuda_array_interface__ {str(interface)[:200]}; expected a dict with shape, "
            "typestr, data, a pair of an address and whether it is read-only, all strides or none, and a "
            f"version of at most {_VERSION}"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask that would be lost; expected a plain array")
    fortran = _is_fortran(shape, strides, dtype.itemsize, name)
    where = _device_of(pointer, count)
    return _span(pointer, count, from_numpy(dtype, name), where, readonly=bool(readonly), fortran=fortran)


def _stated_stream(array: Any) -> int | None:
    """Return the stream of pending writes, which version 3 of the interface can name."""
    stream = array.__cuda_array_interface__.get("stream")
    if stream == 0:
        raise ValueError("__cuda_array_interface__ has the ambiguous stream 0; expected 1, 2 or None")
    return None if stream is None else int(stream)


def _producer_stream(array: Any) -> int:
    return (_stated_stream(array) or 0) if cuda.available() else 0


def _order_producer(array: Any, stream: int) -> None:
    stated = _stated_stream(array)
    # 0 and 1 both mean the legacy default stream.
    if stated is not None and stated != (stream or 1):
        cuda.order_streams(stated, stream)


def _numba_empty(array: Any, shape: tuple[int, ...]) -> Any:
    return sys.modules["numba"].cuda.device_array(shape, array.dtype)


# --- DLPack -------------------------------------------------------------------------------------------------


def _from_dlpack(array: Any, name: str) -> Span:
    try:
        tensor = dlpack.read(array)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{name} (a {type(array).__qualname__}) cannot be read through DLPack: {error}"
        ) from error
    fortran = _is_fortran(tensor.shape, tensor.strides, 1, name)
    count = _product(tensor.shape)
    where = HOST if tensor.on_host else _device_of(tensor.pointer, count)
    code = from_name(tensor.dtype, name)
    return _span(tensor.pointer, count, code, where, readonly=tensor.readonly, fortran=fortran)


def _from_jax(array: Any, name: str) -> Span:
    if getattr(array, "is_deleted", bool)():
        raise ValueError(
            f"{name} is a JAX array that was deleted: its delete(), or a function to which it was donated, "
            "has freed its memory; expected a live array"
        )
    # JAX arrays are immutable, even if the capsule does not say so.
    pointer, count, code, where, flags = _from_dlpack(array, name)
    return pointer, count, code, where, flags | READ_ONLY


def _order_dlpack(array: Any, stream: int) -> None:
    dlpack.order(array, stream)


def _is_fortran(shape: Any, strides: Any, step: int, name: str) -> bool:
    """Tell whether an array is in Fortran order only; raise if it is in neither order."""
    if strides is None or 0 in shape or _is_dense(shape[::-1], strides[::-1], step):
        return False
    if not _is_dense(shape, strides, step):
        raise _not_contiguous(name, shape, strides)
    return True


def _is_dense(shape: Any, strides: Any, step: int) -> bool:
    for length, stride in zip(shape, strides, strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _product(shape: Any) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
