"""Check mode: the ranks compare every call before they issue it (native/checks.c)."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import numpy as np

from pynccl._base.values import shown
from pynccl._device.blocking import look_outside, others_may_call
from pynccl._library.binding import ffi, lib
from pynccl._trace.callers import caller

# NCCL's own checks, since 2.29.7; older libraries ignore the variable.
_NCCL_VARIABLE, _NCCL_VALUE = "NCCL_CHECK_MODE", "DEBUG_GLOBAL"

_on: bool | None = None
# The exception of a signal handler that ran while this thread waited in C.
_here = threading.local()


def check_mode(on: bool = True) -> None:
    """Make new communicators compare every call between the ranks before it is issued.

    Set it on all ranks or on none. If calls differ, every rank raises CollectiveMismatchError with a table of
    the ranks' calls and their source lines, and nothing is issued. PYNCCL_CHECK=1 does it for a whole
    program. NCCL's own checks are also switched on, if the version has them and no communicator exists yet.
    Raises TypeError unless `on` is a bool.
    """
    global _on
    if not isinstance(on, bool | np.bool_):
        raise TypeError(f"on is {shown(on)}; expected True or False")
    if on:
        # Before other threads, which may be ranks, see that it is on.
        os.environ.setdefault(_NCCL_VARIABLE, _NCCL_VALUE)
    _on = bool(on)


def enabled() -> bool:
    """Tell whether new communicators check their calls."""
    if _on is None:
        text = os.environ.get("PYNCCL_CHECK", "")
        if text not in ("", "0", "1"):
            raise ValueError(f"PYNCCL_CHECK is {shown(text)}; expected 0 or 1")
        check_mode(text == "1")
    return bool(_on)


def start(c: Any) -> bool:
    """Switch check mode on for a watched communicator, given by its C struct; tell whether it is on."""
    on = c.size > 1 and bool(lib.pynccl_check_on(c, 1))
    if on:
        lib.pynccl_check_locator(_locator())
    return on


def interrupted() -> BaseException:
    """Return the exception that interrupted a comparison."""
    error: BaseException = _here.__dict__.pop("stopped", None) or KeyboardInterrupt()
    return error


def _stop(kind: Any, error: BaseException, trace: Any) -> int:
    _here.stopped = error
    return lib.PYNCCL_LOCATED_STOPS


@cache
def _locator() -> Any:
    return ffi.callback("int(char*, int)", _locate, error=lib.PYNCCL_LOCATED_STOPS, onerror=_stop)


def _locate(text: Any, size: int) -> int:
    # Entering Python code is enough for pending signals to be handled.
    if not size:
        look_outside()
        return lib.PYNCCL_LOCATED_AMONG_THREADS if others_may_call() else lib.PYNCCL_LOCATED
    name, line = caller()
    where = f"{name if len(name) < 100 else '...' + name[-96:]}:{line}".encode()[: size - 1]
    ffi.memmove(text, where + b"\0", len(where) + 1)
    return 0
