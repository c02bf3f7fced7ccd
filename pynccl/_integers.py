"""Integers that users give, checked before C code gets them."""

from __future__ import annotations

from typing import Any

import numpy as np

# One more than the largest int of C.
INT = 1 << 31


def check_int(value: Any, name: str, least: int, end: int, expected: str) -> int:
    """Return an int or a NumPy integer, least <= value < end, as an int; raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}; expected {expected}")
    if not least <= value < end:
        raise ValueError(f"{name} is {value}; expected {expected}")
    return int(value)
