"""Time-outs: from an argument or PYNCCL_TIMEOUT."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from enum import Enum
from numbers import Real
from typing import Any

# The longest time-out in seconds: clocks, sockets and polls accept it, and it is as good as none.
LONGEST = 1e9
# Seconds after which a rank logs, once, which ranks it waits for while the ranks meet.
LATE = 30.0


def check_timeout(timeout: Any, *, zero: bool = False, optional: bool = True) -> float | None:
    """Return a positive number of seconds, 0 if `zero`, or None if `optional`; else raise.

    Larger values are cut to LONGEST.
    """
    if optional and timeout is None:
        return None
    expected = ("seconds, 0 or more" if zero else "a positive number of seconds") + ", or None" * optional
    number = isinstance(timeout, Real) and not isinstance(timeout, bool | Enum)
    # An int may be too large for a float.
    seconds = float(min(timeout, LONGEST)) if number else math.nan
    if not (seconds > 0 or (zero and seconds == 0)):
        hint = "; write timeout.total_seconds()" if isinstance(timeout, timedelta) else ""
        raise (ValueError if number else TypeError)(f"timeout is {timeout!r:.200}; expected {expected}{hint}")
    return seconds


def rounded(seconds: float | None) -> str:
    """Return seconds for a message, rounded: what is left of a time-out of 5 s is shown as 5."""
    return "inf" if seconds is None else f"{round(seconds, 2) or seconds:g}"


def resolve_timeout(timeout: float | None) -> float | None:
    """Return the given time-out or PYNCCL_TIMEOUT in seconds; None if neither is set."""
    timeout = check_timeout(timeout)
    text = os.environ.get("PYNCCL_TIMEOUT")
    if timeout is not None or not text:
        return timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"PYNCCL_TIMEOUT is {text!r:.200}; expected a positive number of seconds")
    return min(seconds, LONGEST)
