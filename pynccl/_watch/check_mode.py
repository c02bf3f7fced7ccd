"""Check mode: the ranks compare every call before it is issued (native/checks.c)."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import numpy as np

from pynccl._library.binding import ffi, lib

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# NCCL's own checks, which came with 2.29.7; older libraries do not know the variable.
_NCCL_VARIABLE, _NCCL_VALUE = "NCCL_CHECK_MODE", "DEBUG_GLOBAL"

_on: bool | None = None
# What a signal's handler raised while a thread waited in C.
_stopped: list[BaseException] = []


def check_mode(on: bool = True) -> None:
    """Have the ranks compare every call before it is issued, on communicators that are created from now on.

    All ranks have to do so alike. A difference raises CollectiveMismatchError on every rank, with a table of
    who called what from where; nothing is issued then. PYNCCL_CHECK=1 does it for a whole program. NCCL's own
    checks are turned on along, where the version has them and nothing was created yet.
    """
    global _on
    if not isinstance(on, bool | np.bool_):
        raise TypeError(f"on is {on!r}; expected True or False")
    _on = bool(on)
    if _on:
        os.environ.setdefault(_NCCL_VARIABLE, _NCCL_VALUE)


def enabled() -> bool:
    """Tell whether new communicators check their calls."""
    if _on is None:
        text = os.environ.get("PYNCCL_CHECK", "")
        if text not in ("", "0", "1"):
            raise ValueError(f"PYNCCL_CHECK is {text!r}; expected 0 or 1")
        check_mode(text == "1")
    return bool(_on)


def start(c: Any) -> None:
    """Have a watched communicator, given as its C struct, check its calls."""
    if c.size > 1 and lib.pynccl_check_on(c, 1):
        lib.pynccl_check_locator(_locator())


def interrupted() -> BaseException:
    """Return what stopped a thread that was comparing."""
    return _stopped.pop() if _stopped else KeyboardInterrupt()


def _stop(kind: Any, error: BaseException, trace: Any) -> int:
    _stopped.append(error)
    return 1


@cache
def _locator() -> Any:
    return ffi.callback("int(char*, int)", _locate, error=1, onerror=_stop)


def _locate(text: Any, size: int) -> int:
    # Being here is enough for Python to handle the signals that have come.
    if not size:
        return 0
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    name = frame.f_code.co_filename
    where = f"{name if len(name) < 100 else '...' + name[-96:]}:{frame.f_lineno}".encode()[: size - 1]
    ffi.memmove(text, where + b"\0", len(where) + 1)
    return 0
