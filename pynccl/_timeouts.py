"""What is taken for a time-out: an argument, or PYNCCL_TIMEOUT."""

from __future__ import annotations

import math
import os
from numbers import Real
from typing import Any

# More than any clock, socket or poll takes; whoever asks for longer wants to wait for ever.
LONGEST = 1e9


def check_timeout(timeout: Any, *, zero: bool = False, optional: bool = True) -> float | None:
    """Return a positive number of seconds, or 0 where `zero`, or None where `optional`; else raise.

    It is never more than the system's calls take.
    """
    if optional and timeout is None:
        return None
    expected = ("seconds, 0 or more" if zero else "a positive number of seconds") + ", or None" * optional
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    seconds = float(timeout) if number else math.nan
    if not (seconds > 0 or (zero and seconds == 0)):
        raise (ValueError if number else TypeError)(f"timeout is {timeout!r}; expected {expected}")
    return min(seconds, LONGEST)


def resolve_timeout(timeout: float | None) -> float | None:
    """Return a time-out in seconds as given or by PYNCCL_TIMEOUT, None where there is none."""
    timeout = check_timeout(timeout)
    text = os.environ.get("PYNCCL_TIMEOUT")
    if timeout is not None or not text:
        return timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"PYNCCL_TIMEOUT is {text!r}; expected a positive number of seconds")
    return min(seconds, LONGEST)
