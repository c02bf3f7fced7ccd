"""From the dtypes of NumPy, torch and DLPack to NCCL's datatypes: one table, by name.

A code below 16 is NCCL's datatype. Other dtypes travel as one of NCCL's: complex numbers as twice as many
floats, which is correct for sum, avg and moving, and dtypes that NCCL cannot reduce as bytes. Their
codes hold an index into TRAVELLERS above the low byte.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from pynccl._library.generated.tables import DATATYPES, ITEM_SIZES
from pynccl._types import DataType

# Of a NumPy array; an element has at most 16 bytes.
MOST_ELEMENTS = (1 << 59) - 1


class Traveller(NamedTuple):
    """A dtype that travels as `factor` elements of another; `adds`: sum and avg are correct.

    `wider` has all its values, and NCCL reduces it.
    """

    name: str
    datatype: DataType
    factor: int
    adds: bool
    wider: str = ""


TRAVELLERS = (
    Traveller("complex64", DataType.FLOAT32, 2, True),
    Traveller("complex128", DataType.FLOAT64, 2, True),
    Traveller("bool", DataType.UINT8, 1, False, "int32"),
    Traveller("int16", DataType.UINT8, 2, False, "int32"),
    Traveller("uint16", DataType.UINT8, 2, False, "uint32"),
)

NATIVE: dict[str, int] = {name: code for code, name in enumerate(DATATYPES)}
CODES: dict[str, int] = {
    **NATIVE,
    **{t.name: int(t.datatype) | index << 8 for index, t in enumerate(TRAVELLERS, 1)},
}
# Short names that NumPy does not know.
OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
_NAMES = {code: name for name, code in CODES.items()}
_HINTS = {
    "float8_e4m3": " (it has infinities, NCCL's float8 e4m3 does not: float8_e4m3fn)",
    "object": " (Python objects have no fixed bytes)",
}

# Codes of the NumPy and torch dtypes used so far; `native` has only NCCL's own datatypes.
native: dict[Any, int] = {}
known: dict[Any, int] = {}


def traveller(code: int) -> Traveller | None:
    """Return how a dtype travels; None for NCCL's own datatypes."""
    return TRAVELLERS[(code >> 8) - 1] if code >> 8 else None


def name_of(code: int) -> str:
    """Return the dtype's name."""
    return _NAMES[code]


def itemsize(code: int) -> int:
    """Return the bytes of one element of the datatype that NCCL sends, without a traveller's factor."""
    return ITEM_SIZES[code & 0xFF]


def from_name(dtype: str, name: str) -> int:
    """Return the code for a dtype's name; `name` is the argument in messages."""
    code = CODES.get(dtype)
    if code is None:
        raise TypeError(
            f"{name} has dtype {dtype}{_HINTS.get(dtype, '')}; expected one of {', '.join(NATIVE)}, "
            f"or, only to be moved (complex numbers also added), {', '.join(t.name for t in TRAVELLERS)}"
        )
    return code


def from_numpy(dtype: Any, name: str) -> int:
    """Return the code for a NumPy dtype, including those of ml_dtypes."""
    code = known.get(dtype)
    if code is None:
        given, dtype = dtype, np.dtype(dtype)
        if not dtype.isnative:
            raise TypeError(
                f"{name} has dtype {dtype.str}; expected this machine's byte order, {sys.byteorder}-endian"
            )
        # By name, which avoids importing ml_dtypes.
        code = _remember(given, from_name(dtype.name if dtype.names is None else str(dtype), name))
    return code


def from_torch(dtype: Any, name: str) -> int:
    """Return the code for a torch dtype; torch uses the names of NumPy and ml_dtypes."""
    code = known.get(dtype)
    return _remember(dtype, from_name(str(dtype).partition(".")[2], name)) if code is None else code


def _remember(dtype: Any, code: int) -> int:
    known[dtype] = code
    if code < 16:
        native[dtype] = code
    return code
