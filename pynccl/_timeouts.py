"""What is taken for a time-out: an argument, or PYNCCL_TIMEOUT."""

from __future__ import annotations

import math
import os
from numbers import Real
from typing import Any


def check_timeout(timeout: Any, *, zero: bool = False, optional: bool = True) -> None:
    """Raise unless this is a positive number of seconds, or 0 where `zero`, or None where `optional`."""
    if optional and timeout is None:
        return
    expected = ("seconds, 0 or more" if zero else "a positive number of seconds") + ", or None" * optional
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    seconds = float(timeout) if number else math.nan
    if not (seconds > 0 or (zero and seconds == 0)):
        raise (ValueError if number else TypeError)(f"timeout is {timeout!r}; expected {expected}")


def resolve_timeout(timeout: float | None) -> float | None:
    """Return a time-out in seconds as given or by PYNCCL_TIMEOUT, None where there is none."""
    check_timeout(timeout)
    text = os.environ.get("PYNCCL_TIMEOUT")
    if timeout is not None or not text:
        return timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"PYNCCL_TIMEOUT is {text!r}; expected a positive number of seconds")
    return seconds
