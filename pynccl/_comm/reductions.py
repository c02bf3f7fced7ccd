"""Reductions: the built-in ones by name, and PreMulSum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from pynccl import capi
from pynccl._arrays import dtypes
from pynccl._arrays.buffers import Span
from pynccl._base.values import Code, is_int, refuse_copy, shown
from pynccl._comm.core import Core
from pynccl._library.binding import ffi
from pynccl._library.generated.api import ncclScalarDevice, ncclScalarHostImmediate
from pynccl._library.generated.tables import REDUCTIONS
from pynccl._types import RedOp

NAMES = {name: op for op, name in enumerate(REDUCTIONS)}
_EXPECTED = f"expected one of {', '.join(NAMES)}, a RedOp or a PreMulSum"
# What other libraries call them, in lower case.
_OTHER_NAMES = {
    "add": "sum",
    "average": "avg",
    "maximum": "max",
    "mean": "avg",
    "minimum": "min",
    "mul": "prod",
    "multiply": "prod",
    "product": "prod",
}
_ADDING = (int(RedOp.SUM), int(RedOp.AVG))


class PreMulSum:
    """The sum of all ranks' elements, each multiplied by the factor of its rank before the addition.

    Returned by `comm.pre_mul_sum`. It ends with its communicator or by `destroy`.
    """

    __reduce__ = refuse_copy

    def __init__(self, core: Core, resolve: Callable[[Any, str], Span], factor: Any) -> None:
        """`resolve` takes an array on the device and its name, and returns its Span or raises."""
        self._core, self._factor = core, factor
        self._codes: dict[int, int] = {}
        # Pointer and dtype code of a factor in device memory; NCCL reads it when the reduction runs.
        self._device: tuple[int, int] | None = None
        if not isinstance(factor, int | float | np.generic) or isinstance(factor, bool | np.bool_ | Code):
            self._device = _on_device(factor, resolve)
        elif isinstance(factor, np.complexfloating):
            raise TypeError(f"factor is {shown(factor)}; expected a real number")

    def code(self, core: Core, dtype: int) -> int:
        """Return the ncclRedOp_t for a datatype; the first call with the datatype creates it."""
        if core is not self._core:
            raise ValueError(
                f"op was made by another communicator, {self._core!r}; expected one that this one made"
            )
        travel = dtypes.traveller(dtype)
        datatype = int(travel.datatype) if travel else dtype
        code = self._codes.get(datatype)
        if code is None:
            code = self._codes[datatype] = self._create(datatype)
        return code

    def _create(self, datatype: int) -> int:
        if self._device is not None:
            pointer, has = self._device
            if has != datatype:
                raise TypeError(
                    f"op has a factor of {dtypes.name_of(has)} on the device; expected the dtype of the "
                    f"arrays, {dtypes.name_of(datatype)}"
                )
            residence = ncclScalarDevice
        else:
            data = ffi.from_buffer(_as_bytes(self._factor, datatype))
            pointer, residence = int(ffi.cast("uintptr_t", data)), ncclScalarHostImmediate
        return capi.ncclRedOpCreatePreMulSum(pointer, datatype, residence, self._core.open())

    def destroy(self) -> None:
        """Destroy the operation: recorded and prepared calls with it can no longer run; issued ones go on."""
        codes, self._codes = self._codes, {}
        if self._core.handle:
            for code in codes.values():
                capi.ncclRedOpDestroy(code, self._core.open())

    def __repr__(self) -> str:
        return f"<pynccl.PreMulSum {self._factor!r} of {self._core!r}>"


def _on_device(factor: Any, resolve: Callable[[Any, str], Span]) -> tuple[int, int]:
    # The bytes of a number would be taken for an array of one integer.
    if isinstance(factor, complex | str | bytes | bool | np.bool_ | Code) or factor is None:
        raise TypeError(
            f"factor is {shown(factor)}; expected a real number, or an array of one element on the device"
        )
    pointer, count, code, _, _ = resolve(factor, "factor")
    if count != 1 or dtypes.traveller(code):
        raise ValueError(f"factor has {count} elements of {dtypes.name_of(code)}; expected one real number")
    return pointer, code


OpName = Literal["sum", "prod", "max", "min", "avg"]
Op = OpName | RedOp | int | PreMulSum


# The largest numbers of the datatypes that NumPy lacks.
_LARGEST = {"bfloat16": (2 - 2**-7) * 2.0**127, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def _as_bytes(factor: Any, datatype: int) -> bytes:
    """Convert a number to a datatype and return the bytes of one element."""
    name = dtypes.name_of(datatype)
    try:
        return _as_integer(factor, name) if "int" in name else _as_float(factor, name)
    except OverflowError:
        raise ValueError(
            f"op has the factor {shown(factor)}; expected a value of {name}, the dtype of the arrays: "
            f"{_range(name)}"
        ) from None


def _range(name: str) -> str:
    """Return which numbers a datatype has, for a message."""
    if "int" in name:
        return f"an integer from {np.iinfo(name).min} to {np.iinfo(name).max}"
    largest = _LARGEST[name] if name in _LARGEST else float(np.finfo(name).max)
    return f"from {-largest:.8g} to {largest:.8g}"


def _as_integer(factor: Any, name: str) -> bytes:
    # Convert to a Python number: scalars of ml_dtypes cannot be compared with large ints.
    factor = factor.item() if isinstance(factor, np.generic) else factor
    # NaN and the infinities cannot be converted to int, and equal no int.
    whole = int(factor) if -np.inf < factor < np.inf else 0
    if whole != factor or not np.iinfo(name).min <= whole <= np.iinfo(name).max:
        raise OverflowError
    return np.asarray(whole, name).tobytes()


def _as_float(factor: Any, name: str) -> bytes:
    if isinstance(factor, int) and not -1 << 63 <= factor < 1 << 64:
        # NumPy has no such integers.
        factor = float(factor)
    with np.errstate(over="ignore"):
        value = np.asarray(factor).astype(_numpy_type(factor, name))
    if name == "bfloat16":
        value = _rounded_to_bfloat16(value)
    # float8_e4m3fn has no infinities.
    if not np.isfinite(value) and (np.isfinite(factor) or np.isinf(factor) != np.isinf(value)):
        raise OverflowError
    return value.tobytes()[2 if name == "bfloat16" else 0 :]


def _numpy_type(factor: Any, name: str) -> Any:
    """Return NumPy's type for a datatype of floats; float32 for bfloat16, which is its upper half."""
    if name == "bfloat16":
        return np.float32
    if name not in _LARGEST:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"factor is {shown(factor)} for arrays of {name}; expected ml_dtypes to be installed, "
            "or a factor in device memory"
        ) from None
    return getattr(ml_dtypes, name)


def _rounded_to_bfloat16(value: Any) -> Any:
    """Round a float32 to even where bfloat16 ends."""
    word = int(value.view(np.uint32))
    word = word | 0x400000 if np.isnan(value) else word + 0x7FFF + (word >> 16 & 1)
    return np.uint32(word & 0xFFFF0000).view(np.float32)


def _hint(name: object) -> str:
    """Return what pynccl calls another library's operation, for a message."""
    plain = str(name).lower()
    ours = _OTHER_NAMES.get(plain, plain)
    return f"; pynccl's name is {shown(ours)}" if ours in NAMES else ""


def op_code(core: Core, op: Any, dtype: int) -> int:
    """Return NCCL's code for an operation on arrays of a dtype."""
    if isinstance(op, PreMulSum):
        code, adds = op.code(core, dtype), True
    elif isinstance(op, str):
        if op not in NAMES:
            raise ValueError(f"op is {shown(op)}{_hint(op)}; {_EXPECTED}")
        code = NAMES[op]
        adds = code in _ADDING
    elif not isinstance(op, RedOp) and not (is_int(op) and isinstance(op, int)):
        # torch's ReduceOp.SUM, and NumPy's add, have a name.
        name = getattr(op, "name", None) or getattr(op, "__name__", None)
        hint = "; pynccl.mpi.Comm takes it" if type(op).__module__ == "mpi4py.MPI" else _hint(name)
        raise TypeError(f"op is {shown(op)}{hint}; {_EXPECTED}")
    elif not 0 <= op < 1 << 31:
        raise ValueError(f"op is {shown(op)}; {_EXPECTED}")
    else:
        code, adds = int(op), int(op) in _ADDING
    travel = dtypes.traveller(dtype)
    if travel and not (travel.adds and adds):
        can = (
            "reduces it by sum and avg only"
            if travel.adds
            else f"cannot reduce it, only move it: convert it to {travel.wider}"
        )
        raise TypeError(f"op is {shown(op)} and the arrays have dtype {travel.name}; NCCL {can}")
    return code
