"""The data that a program sends, and what NumPy says that the ranks must receive.

What is only moved ("none") is random bits. What is reduced is small whole numbers whose sums and products
every datatype holds exactly, so that results are compared bit by bit. Only `avg` and `mulsum` of floats may
round: NCCL multiplies by a factor first.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# nccl-tests' names of the datatypes, and NumPy's. NumPy gets the last three from ml_dtypes.
TYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
OPS = ("sum", "prod", "max", "min", "avg", "mulsum")

# Every whole number up to this is exact in every datatype: 2^3 for float8_e5m2 with its 2 bits of fraction.
_EXACT = 8
# Elements after which the data repeat: a prime, so that no block begins as another does.
_PERIOD = 65521


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of one of nccl-tests' names; raise ImportError if it needs ml_dtypes."""
    given = TYPES[name]
    if not hasattr(np, given):
        # Adds its dtypes to NumPy's.
        importlib.import_module("ml_dtypes")
    return np.dtype(given)


class Pattern:
    """The data of one repetition: `of` a rank, and `reduced` over all of them."""

    def __init__(self, dtype: np.dtype[Any], op: str, nranks: int, repetition: int) -> None:
        self.dtype, self.op, self.nranks = dtype, op, nranks
        self._first = 7919 * repetition

    def of(self, rank: int, count: int, start: int = 0) -> Array:
        """Return elements of a rank's data, from `start` on."""
        index = self._index(count, start)
        values = self._bits(rank, index) if self.op == "none" else self._values(rank, index)
        return np.resize(values.astype(self.dtype, copy=False), count)

    def reduced(self, count: int, start: int = 0) -> Array:
        """Return elements of what the reduction must give."""
        return np.resize(self._result(self._index(count, start)).astype(self.dtype), count)

    def wrong(self, got: Array, expected: Array) -> int:
        """Count the elements that differ."""
        if not self._rounds():
            bits = np.dtype(f"u{self.dtype.itemsize}")
            return int(np.count_nonzero(got.view(bits) != expected.view(bits)))
        a, b = got.astype(np.float64), expected.astype(np.float64)
        # Each rank's product and each addition may round once.
        return int(np.count_nonzero(~(np.abs(a - b) <= 2 * self.nranks * self._epsilon() * np.maximum(b, 1))))

    def factor(self, rank: int) -> int:
        """Return the factor of a rank's data in `mulsum` (ncclRedOpCreatePreMulSum)."""
        return 1 + rank % 2

    def _index(self, count: int, start: int) -> Array:
        return (start + np.arange(min(count, _PERIOD), dtype=np.int64)) % _PERIOD + self._first

    def _bits(self, rank: int, index: Array) -> Array:
        mixed = (index * self.nranks + rank).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        size = self.dtype.itemsize
        bits: Array = mixed.view(np.uint8).reshape(-1, 8)[:, 8 - size :].copy().view(self.dtype)
        return bits.reshape(-1)

    def _values(self, rank: int, index: Array) -> Array:
        mixed = (index * 2654435761 + 40503 * rank) >> 7
        if self.op in ("max", "min"):
            return mixed % (_EXACT + 1)
        if self.op == "prod":
            # At most three ranks have a 2, so that the product is at most 8.
            return 1 + ((index + rank) % self.nranks < 3) * (mixed % 2)
        # Of ranks in turn, as many as the sum has room for.
        most = _EXACT // 2 if self.op == "mulsum" else _EXACT
        share = most // self.nranks
        if share:
            return mixed % (share + 1)
        return ((index + rank) % self.nranks < most) * (mixed % 2)

    def _result(self, index: Array) -> Array:
        values = [self._values(rank, index) for rank in range(self.nranks)]
        if self.op == "mulsum":
            values = [v * self.factor(r) for r, v in enumerate(values)]
        functions = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}
        result = values[0]
        for value in values[1:]:
            result = functions.get(self.op, np.add)(result, value)
        if self.op != "avg":
            return result
        return result // self.nranks if self.dtype.kind in "iu" else result / self.nranks

    def _rounds(self) -> bool:
        return self.op in ("avg", "mulsum") and self.dtype.kind not in "iu"

    def _epsilon(self) -> float:
        if hasattr(np, self.dtype.name):
            return float(np.finfo(self.dtype).eps)
        return float(importlib.import_module("ml_dtypes").finfo(self.dtype).eps)
