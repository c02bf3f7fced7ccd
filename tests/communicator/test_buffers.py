"""Every kind of array, resolved to pointer, count, datatype and place; what is refused, and how."""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any

import numpy as np
import pytest

from arrays import dtype_of
from device_arrays import Device, Exporter
from pynccl import DataType
from pynccl._arrays import dlpack
from pynccl._arrays.buffers import ANYWHERE, FORTRAN, HOST, READ_ONLY, TRAVELS, Span, kind_of, shape_of, spans
from pynccl._arrays.dtypes import TRAVELLERS, from_numpy

DTYPES = {
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
    "float8_e4m3fn": DataType.FLOAT8E4M3,
    "float8_e5m2": DataType.FLOAT8E5M2,
}


def resolve(array: Any, name: str) -> Span:
    return spans[type(array)](array, name)


@pytest.mark.parametrize("name", DTYPES)
def test_numpy(name: str) -> None:
    data = np.zeros((3, 4), dtype_of(name))
    assert resolve(data, "send") == (data.ctypes.data, 12, DTYPES[name], HOST, 0)


@pytest.mark.parametrize("name", DTYPES)
def test_cuda_array_interface(name: str) -> None:
    data = np.zeros((2, 5), dtype_of(name))
    wrapped: Any = Device(data)
    wrapped.dtype = data.dtype
    assert resolve(wrapped, "send") == (data.ctypes.data, 10, DTYPES[name], ANYWHERE, 0)


def test_cuda_array_interface_without_dtype() -> None:
    data = np.zeros(5, np.float32)
    assert resolve(Device(data), "send")[1:] == (5, DataType.FLOAT32, ANYWHERE, 0)
    assert resolve(Device(data, strides=(4,)), "send")[1] == 5
    assert resolve(Device(data, data=(data.ctypes.data, True)), "send")[4] == READ_ONLY
    assert resolve(Device(data, shape=(), strides=()), "send")[1] == 1


@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "uint64", "float16", "float64"])
@pytest.mark.parametrize("exporter", [Exporter, lambda data: Newer(data)], ids=["unversioned", "versioned"])
def test_dlpack(name: str, exporter: Any) -> None:
    data = np.zeros((3, 4), name)
    assert resolve(exporter(data), "send") == (data.ctypes.data, 12, DTYPES[name], HOST, 0)


class Newer:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_dlpack_offset_strides_and_read_only() -> None:
    data = np.arange(20, dtype=np.float32)
    assert resolve(Exporter(data[4:]), "send")[:2] == (data.ctypes.data + 16, 16)
    with pytest.raises(ValueError, match="send is not contiguous"):
        resolve(Exporter(data[::2]), "send")
    assert resolve(Exporter(data.reshape(4, 5).T), "send")[4] == FORTRAN
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 1):
        data.flags.writeable = False
        assert resolve(Newer(data), "send")[4] == READ_ONLY


def test_dlpack_narrow_types_and_devices() -> None:
    tensor = dlpack._Tensor(
        data=64, device_type=1, ndim=1, code=4, bits=16, lanes=1, shape=(ctypes.c_int64 * 1)(3)
    )
    assert dlpack._describe(tensor, False) == (64, (3,), None, "bfloat16", True, False)
    tensor.code, tensor.bits, tensor.device_type = 10, 8, 2
    assert dlpack._describe(tensor, True) == (64, (3,), None, "float8_e4m3fn", False, True)
    tensor.lanes = 4
    with pytest.raises(ValueError, match="vectors of 4"):
        dlpack._describe(tensor, False)
    tensor.device_type = 8
    with pytest.raises(ValueError, match="device type 8"):
        dlpack._describe(tensor, False)


@pytest.mark.parametrize(
    ("data", "count", "kind", "readonly"),
    [
        (bytearray(5), 5, DataType.UINT8, False),
        (b"abc", 3, DataType.UINT8, True),
        (array.array("f", [1, 2]), 2, DataType.FLOAT32, False),
        (array.array("q", [1]), 1, DataType.INT64, False),
        (memoryview(bytearray(8)).cast("d"), 1, DataType.FLOAT64, False),
    ],
)
def test_buffers(data: Any, count: int, kind: DataType, readonly: bool) -> None:
    span = resolve(data, "send")
    assert span[1:] == (count, kind, HOST, READ_ONLY if readonly else 0)
    assert span[0] == np.frombuffer(data, np.uint8).ctypes.data


def test_empty_arrays() -> None:
    assert resolve(np.zeros((0, 3)), "send")[1:] == (0, DataType.FLOAT64, HOST, 0)
    assert resolve(np.zeros((3, 0))[:, ::2], "send")[1] == 0
    assert resolve(Device(np.zeros(0), data=(0, False)), "send")[1] == 0


@pytest.mark.parametrize("wrap", [lambda a: a, Device, Exporter], ids=["numpy", "cuda", "dlpack"])
def test_strided_memory_is_refused(wrap: Any) -> None:
    for data in (np.zeros((4, 4))[:, ::2], np.zeros((2, 3, 4)).swapaxes(0, 1), np.zeros(4)[::-1]):
        if wrap is Exporter and data.strides[0] < 0:
            continue
        with pytest.raises(ValueError, match=r"recv is not contiguous \(shape .*ascontiguousarray"):
            resolve(wrap(data), "recv")


@pytest.mark.parametrize("wrap", [lambda a: a, Device, Exporter], ids=["numpy", "cuda", "dlpack"])
def test_fortran_order_is_noted(wrap: Any) -> None:
    assert resolve(wrap(np.zeros((4, 5), order="F")), "send")[4] == FORTRAN
    assert resolve(wrap(np.zeros((4, 1), order="F")), "send")[4] == 0


@pytest.mark.parametrize("kind", TRAVELLERS, ids=lambda kind: kind.name)
def test_dtypes_that_travel_as_another(kind: Any) -> None:
    span = resolve(np.zeros(3, kind.name), "send")
    assert span[1] == 3 * kind.factor
    assert span[2] & 255 == kind.datatype
    assert span[4] == TRAVELS


def test_axes_of_one_element_may_have_any_stride() -> None:
    data = np.zeros((1, 4), np.float32)
    assert resolve(Device(data, strides=(999, 4)), "send")[1] == 4


@pytest.mark.parametrize("dtype", ["U3", "O", "V4", "M8[s]", "float128", "complex256", "i4,f4"])
def test_dtypes_without_a_datatype(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"send has dtype .*; expected one of int8, uint8, .*float8_e5m2"):
        resolve(np.zeros(3, dtype), "send")


def test_byte_order() -> None:
    other = ">f4" if sys.byteorder == "little" else "<f4"
    with pytest.raises(TypeError, match=r"send has dtype .f4; expected this machine's byte order"):
        resolve(np.zeros(3, other), "send")
    assert resolve(np.zeros(3, "=f4"), "send")[2] == DataType.FLOAT32


@pytest.mark.parametrize("thing", [3, 1.5, "text", None, [1, 2], object()])
def test_what_is_no_array(thing: Any) -> None:
    with pytest.raises(
        TypeError, match=f"send is of type {type(thing).__name__}; expected a NumPy or CuPy array"
    ):
        resolve(thing, "send")


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": 4},
        {"strides": (8, 8)},
        {"shape": (-4,)},
        {"shape": (2**62, 8)},
        {"shape": (1.5,)},
        {"data": 4096},
        {"data": (-5, False)},
        {"data": (2**70, False)},
        {"typestr": "zz"},
        {"version": 4},
    ],
)
def test_wrong_cuda_array_interfaces(changes: dict[str, Any]) -> None:
    thing = Device(np.ones(4), **changes)
    with pytest.raises(
        TypeError, match=r"recv has the __cuda_array_interface__ \{.*; expected a dict with shape"
    ):
        resolve(thing, "recv")
    for wrong in ({}, 3):
        thing.__cuda_array_interface__ = wrong  # type: ignore[assignment]
        with pytest.raises(TypeError, match="recv has the __cuda_array_interface__ "):
            resolve(thing, "recv")


class Undecided:
    """As JAX's arrays: its type has an interface that only those in device memory answer for."""

    def __init__(self, data: np.ndarray[Any, Any], on_device: bool) -> None:
        self.data, self.on_device = data, on_device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.on_device:
            raise AttributeError("__cuda_array_interface__ is only defined for GPU buffers.")
        return Device(self.data).__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_each_array_says_which_interface_it_has() -> None:
    data = np.zeros((3, 4), np.float32)
    for on_device in (False, True, False):
        place = ANYWHERE if on_device else HOST
        array = Undecided(data, on_device)
        assert resolve(array, "send") == (data.ctypes.data, 12, DataType.FLOAT32, place, 0)
        assert shape_of(array) == (3, 4)
        kind = kind_of(array)
        assert kind.current(array) == 0
        assert kind.order is not None
        kind.order(array, 0)


class Column:
    """As a pandas column: it makes an array when it is asked to."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.zeros(3)


def test_what_only_makes_an_array() -> None:
    with pytest.raises(TypeError, match=r"recv is of type Column, .*expected .* as numpy\.array\(recv\)"):
        resolve(Column(), "recv")


@pytest.mark.parametrize("code", "bBiIlLqQfd")
def test_array_array(code: str) -> None:
    data = array.array(code, [1, 2, 3])
    pointer, count = data.buffer_info()
    for form in (data, memoryview(data)):
        assert resolve(form, "send") == (pointer, count, from_numpy(np.dtype(code), "send"), HOST, 0)


def test_masks() -> None:
    with pytest.raises(TypeError, match="send is a masked array"):
        resolve(np.ma.zeros(3), "send")
    with pytest.raises(TypeError, match="send has a mask"):
        resolve(Device(np.zeros(3), mask=Device(np.zeros(3))), "send")


def test_no_library_is_imported() -> None:
    before = set(sys.modules)
    resolve(Device(np.zeros(3)), "send")
    resolve(Exporter(np.zeros(3)), "send")
    assert not {"cupy", "torch"} & (set(sys.modules) - before)
