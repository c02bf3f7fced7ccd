"""What the collectives have to compute, in NumPy, to the last bit.

Reductions go strictly in the order of the ranks. 16- and 8-bit floats are computed in float32 and rounded
once, float8 saturates, integers wrap around. avg of floats multiplies each input by 1/n first, avg of
integers divides the sum and truncates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Datatype:
    """A datatype of NCCL: its number, and how NumPy has it."""

    number: int
    name: str
    numpy: np.dtype[Any]
    # The greatest finite value of a float, which float8 saturates to.
    limit: float = 0.0

    @property
    def is_float(self) -> bool:
        return self.limit > 0

    @property
    def saturates(self) -> bool:
        return self.name.startswith("float8")

    @property
    def accumulator(self) -> np.dtype[Any]:
        """What it is computed in."""
        return np.dtype(np.float32) if self.is_float and self.numpy.itemsize < 4 else self.numpy


INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
FLOATS: list[tuple[str, Any, float]] = [
    ("float16", np.float16, 65504.0),
    ("float32", np.float32, 3.4e38),
    ("float64", np.float64, 1.7e308),
    ("bfloat16", ml_dtypes.bfloat16, 3.3e38),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, 448.0),
    ("float8_e5m2", ml_dtypes.float8_e5m2, 57344.0),
]
DATATYPES: dict[str, Datatype] = {
    **{name: Datatype(i, name, np.dtype(name)) for i, name in enumerate(INTEGERS)},
    **{name: Datatype(i + 6, name, np.dtype(kind), limit) for i, (name, kind, limit) in enumerate(FLOATS)},
}

# The last two are one operation, whose scalar NCCL reads from the host or from the device.
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4, "premul_host": -1, "premul_device": -1}


def to_datatype(values: Array, datatype: Datatype) -> Array:
    """Round to the datatype, as the library does once at the end."""
    if datatype.saturates:
        values = np.clip(values, -datatype.limit, datatype.limit)
    return values.astype(datatype.numpy)


# The default of PYNCCL_CPU_INLINE_BYTES. Larger arrays of ranks on several hosts are reduced on each host
# first (docs/strictness.md).
SMALL = 8192


def reduce(
    inputs: Sequence[Array],
    op: str,
    datatype: Datatype,
    scalars: Array | None = None,
    hosts: Sequence[int] | None = None,
) -> Array:
    """Return the reduction of one array per rank; `scalars` holds each rank's factor for PreMulSum.

    `hosts` has the host of each rank, if each host reduces its ranks' arrays first.
    """
    n = len(inputs)
    wide = datatype.accumulator
    if hosts and 1 < len(set(hosts)) < n:
        return _reduce_by_hosts(inputs, op, datatype, scalars, hosts)
    terms = [array.astype(wide) for array in inputs]
    with np.errstate(all="ignore"):
        if scalars is not None:
            terms = [term * factor for term, factor in zip(terms, scalars.astype(wide), strict=True)]
        if op == "avg" and datatype.is_float:
            terms = [term * (wide.type(1) / wide.type(n)) for term in terms]
        result = terms[0]
        for term in terms[1:]:
            result = _combine(op, result, term)
        if op == "avg" and not datatype.is_float:
            # fmod has the sign of the dividend, as C's %: what is left divides exactly.
            result = (result - np.fmod(result, wide.type(n))) // wide.type(n)
        return to_datatype(result, datatype)


def _reduce_by_hosts(
    inputs: Sequence[Array], op: str, datatype: Datatype, scalars: Array | None, hosts: Sequence[int]
) -> Array:
    n, wide = len(inputs), datatype.accumulator
    if op == "avg" and datatype.is_float:
        scalars = np.full(n, wide.type(1) / wide.type(n))
    each = "sum" if op == "avg" else op
    partial = []
    for host in dict.fromkeys(hosts):
        here = [rank for rank, at in enumerate(hosts) if at == host]
        factors = None if scalars is None else scalars[here]
        partial.append(reduce([inputs[rank] for rank in here], each, datatype, factors))
    total = reduce(partial, each, datatype)
    if op != "avg" or datatype.is_float:
        return total
    whole = total.astype(wide)
    return to_datatype((whole - np.fmod(whole, wide.type(n))) // wide.type(n), datatype)


def _combine(op: str, a: Array, b: Array) -> Array:
    if op == "prod":
        product: Array = a * b
        return product
    if op == "max":
        return np.fmax(a, b)
    if op == "min":
        return np.fmin(a, b)
    total: Array = a + b
    return total


def fill(datatype: Datatype, n: int, rng: np.random.Generator, extremes: bool, nans: bool) -> Array:
    """Return numbers whose sums need rounding, wrap around or saturate; no negative zero and no infinity."""
    if not datatype.is_float:
        info = np.iinfo(datatype.numpy)
        return rng.integers(info.min, info.max, n, datatype.numpy, endpoint=True)
    values = rng.standard_normal(n) * np.exp2(rng.integers(-3, 4, n))
    if extremes:
        values[rng.random(n) < 0.02] = datatype.limit
        values[rng.random(n) < 0.01] = -datatype.limit
    if nans:
        values[rng.random(n) < 0.02] = np.nan
    # Adding zero turns a negative zero, whose order is not specified for min and max, into a positive one.
    data: Array = to_datatype(values.astype(datatype.accumulator), datatype) + datatype.numpy.type(0)
    return data


def differences(got: Array, expected: Array, datatype: Datatype) -> Array:
    """Return the indices where the bits differ, not counting different NaNs."""
    bits = np.dtype(f"u{datatype.numpy.itemsize}")
    unequal: Array = got.view(bits) != expected.view(bits)
    if datatype.is_float and unequal.any():
        unequal &= ~(np.isnan(got.astype(np.float64)) & np.isnan(expected.astype(np.float64)))
    return np.flatnonzero(unequal)


# The error that one rounding may make, and the least magnitude it is relative to.
TOLERANCE = {
    "float16": 1e-3,
    "float32": 1e-6,
    "float64": 1e-14,
    "bfloat16": 8e-3,
    "float8_e4m3fn": 7e-2,
    "float8_e5m2": 0.13,
}


def distances(got: Array, expected: Array, datatype: Datatype, steps: int, scale: Array) -> Array:
    """Return the indices that differ by more than `steps` roundings of numbers as large as `scale`."""
    if not datatype.is_float:
        return np.flatnonzero(got != expected)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= steps * TOLERANCE[datatype.name] * np.maximum(scale, np.abs(b))
    return np.flatnonzero(~(near | (a == b) | (np.isnan(a) & np.isnan(b))))
