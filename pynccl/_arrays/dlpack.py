"""The description of an array in a DLPack capsule, read in place: the capsule stays unconsumed."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_CPU, _CUDA_HOST, _CUDA_MANAGED, _CUDA = 1, 3, 13, 2
_READ_ONLY = 1
# The type codes of DLPack; bits and lanes complete them.
_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex"}
_NARROW = {4: "bfloat16", 6: "bool", 8: "float8_e4m3", 10: "float8_e4m3fn", 12: "float8_e5m2"}


class Tensor(NamedTuple):
    """DLPack's description of an array; strides count elements, None means C order."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    on_host: bool
    readonly: bool


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.argtypes, _name_of.restype = (ctypes.py_object,), ctypes.c_char_p


def read(array: Any) -> Tensor:
    """Describe an array, which must outlive the use of the pointer."""
    # -1: the consumer orders its streams itself. Producers in host memory accept no stream.
    on_device = array.__dlpack_device__()[0] in (_CUDA, _CUDA_MANAGED)
    options: dict[str, Any] = {"stream": -1} if on_device else {}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **options)
    except TypeError:
        capsule = array.__dlpack__(**options)
    name = _name_of(capsule)
    pointer = _pointer_of(capsule, name)
    if name == b"dltensor_versioned":
        managed = _Versioned.from_address(pointer)
        if managed.major != 1:
            raise ValueError(f"DLPack {managed.major}.{managed.minor} is not supported; expected version 1")
        return _describe(managed.tensor, bool(managed.flags & _READ_ONLY))
    return _describe(_Tensor.from_address(pointer), readonly=False)


def order(array: Any, stream: int) -> None:
    """Ask the producer to make a CUDA stream wait for pending writes to the array."""
    if array.__dlpack_device__()[0] in (_CUDA, _CUDA_MANAGED):
        # DLPack forbids 0; 1 is the legacy default stream. The capsule stays unconsumed.
        array.__dlpack__(stream=stream or 1)


def _describe(tensor: _Tensor, readonly: bool) -> Tensor:
    if tensor.device_type not in (_CPU, _CUDA_HOST, _CUDA_MANAGED, _CUDA):
        raise ValueError(
            f"its memory has DLPack device type {tensor.device_type}; expected CUDA or host memory"
        )
    if tensor.lanes != 1:
        raise ValueError(f"its elements are vectors of {tensor.lanes} numbers; expected single numbers")
    dtype = _NARROW.get(tensor.code) or f"{_KINDS.get(tensor.code, f'type {tensor.code} of ')}{tensor.bits}"
    axes = range(tensor.ndim)
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[i] for i in axes),
        tuple(tensor.strides[i] for i in axes) if tensor.strides else None,
        dtype,
        tensor.device_type in (_CPU, _CUDA_HOST),
        readonly,
    )
