"""What tests of operations share: every kind of array over NumPy memory, values, and NCCL's results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import pynccl
from device_arrays import Device, Exporter

Array = NDArray[Any]

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
COMPLEX = ("complex64", "complex128")
MOVED = ("bool", "int16", "uint16")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, *MOVED)
OPS = ("sum", "prod", "max", "min", "avg")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a NumPy dtype, one of ml_dtypes for what NumPy lacks."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


class Kind(NamedTuple):
    """A kind of array: made over NumPy memory, and read back as NumPy."""

    name: str
    wrap: Callable[[Array], Any]
    read: Callable[[Any], Array]
    # pynccl can make one for a result.
    creates: bool
    # The dtypes that this kind cannot say.
    lacks: Sequence[str] = ()


def cupy_over(data: Array) -> Any:
    """Return a CuPy array over host memory: without a GPU no other can be made."""
    import cupy

    memory = cupy.cuda.UnownedMemory(data.ctypes.data, data.nbytes, data, 0)
    order = "C" if data.flags.c_contiguous else "F"
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(data.shape, data.dtype, memptr=pointer, order=order)


def host_of_cupy(array: Any) -> Array:
    """Return the host memory below such an array."""
    size = max(1, array.nbytes)
    raw = (np.ctypeslib.ctypes.c_char * size).from_address(array.data.ptr)
    return np.frombuffer(raw, array.dtype, array.size).reshape(array.shape)


def torch_over(data: Array) -> Any:
    """Return a torch tensor over the memory."""
    import torch

    if data.dtype.name in NARROW:
        plain = data.view(np.int16 if data.itemsize == 2 else np.uint8)
        return torch.from_numpy(plain).view(getattr(torch, data.dtype.name))
    return torch.from_numpy(data)


def host_of_torch(tensor: Any) -> Array:
    """Return the memory below a torch tensor."""
    import torch

    name = str(tensor.dtype).partition(".")[2]
    if name in NARROW:
        plain: Array = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8).numpy()
        return plain.view(dtype_of(name))
    return np.asarray(tensor.numpy())


def device_over(data: Array) -> Any:
    """Return an object of no library with __cuda_array_interface__."""
    array: Any = Device(data)
    array.dtype = data.dtype
    return array


def buffer_over(data: Array) -> pynccl.Buffer:
    """Return a pynccl.Buffer of the memory."""
    return pynccl.Buffer(data.ctypes.data, data.size, data.dtype, owner=data)


# `make test-core` leaves out torch, which is large.
_WITHOUT = os.environ.get("TESTS_WITHOUT", "").split()
_KINDS = (
    Kind("numpy", lambda data: data, lambda array: array, True),
    Kind("torch", torch_over, host_of_torch, True),
    Kind("cupy", cupy_over, host_of_cupy, True),
    Kind("cuda_array_interface", device_over, lambda array: array.data, False),
    Kind("dlpack", Exporter, lambda array: array.data, False, (*NARROW, "bool")),
    Kind("memoryview", memoryview, np.asarray, True, NARROW),
    Kind("buffer", buffer_over, lambda buffer: buffer.owner, False),
)
KINDS = tuple(kind for kind in _KINDS if kind.name not in _WITHOUT)


def values(dtype: str, seed: int, shape: Any) -> Array:
    """Return small numbers whose sums and products over four ranks are exact in the dtype."""
    random = np.random.default_rng([seed, DTYPES.index(dtype)])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in MOVED:
        return random.integers(0, 1 << 15, shape).astype(dtype)
    if dtype in INTEGERS:
        return random.integers(0 if dtype.startswith("u") else -3, 4, shape).astype(dtype)
    real = random.choice([-2.0, -1.0, 1.0, 2.0], shape)
    if dtype in COMPLEX:
        return (real + 1j * random.choice([-2.0, -1.0, 1.0, 2.0], shape)).astype(dtype)
    return real.astype(dtype_of(dtype))


def factor_of(dtype: str, rank: int) -> int:
    """Return a rank's factor for PreMulSum: exact too."""
    return rank + 1 if dtype in INTEGERS else (2, -2)[rank % 2]


def reduced(op: str, inputs: Sequence[Array]) -> Array:
    """Return what NCCL makes of all ranks' arrays; "premulsum" uses `factor_of`."""
    dtype, nranks = inputs[0].dtype, len(inputs)
    wide = np.int64 if dtype.kind in "iu" else np.complex128 if dtype.kind == "c" else np.float64
    stack = np.stack([one.astype(wide) for one in inputs])
    if op == "premulsum":
        factors = [factor_of(dtype.name, rank) for rank in range(nranks)]
        result = sum(factor * one for factor, one in zip(factors, stack, strict=True))
    elif op == "avg" and dtype.kind in "iu":
        total = stack.sum(0)
        result = np.sign(total) * (abs(total) // nranks)
    elif op == "avg":
        result = (stack * (1 / nranks)).sum(0)
    else:
        result = {"sum": stack.sum, "prod": stack.prod, "max": stack.max, "min": stack.min}[op](0)
    return np.asarray(result).astype(dtype)
