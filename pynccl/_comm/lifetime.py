"""The end of communicators at the interpreter's exit and in forked children."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from pynccl._base.timeouts import LONGEST
from pynccl._base.values import shown
from pynccl._errors import NcclError


class Member(Protocol):
    """The part of a communicator that this module uses."""

    handle: int

    def leave_at_exit(self, deadline: float | None) -> bool:
        """Complete the issued calls; False if the communicator must be aborted."""

    def forget(self, why: str) -> None:
        """Stop using the handle; `why` ends the message of later errors."""

    def leave_to_parent(self) -> None:
        """In a forked child: release nothing."""


# Handles that this process must release, and all communicators, also those that do not own their handle.
owned: set[int] = set()
living: weakref.WeakSet[Member] = weakref.WeakSet()
# What layers above register, by the functions below.
_on_leaving: Callable[[], object] | None = None
_hint: Callable[[BaseException], str] | None = None
# Arrays that the library may still write to after their communicator was garbage-collected.
_kept: list[Any] = []


class _ExitThread(threading.Thread):
    """Waits for the exit."""


class _AtEnd:
    """A thread that ends communicators at exit; started early, since no thread can start at exit."""

    def __init__(self, end: Callable[[int], int]) -> None:
        self._end = end
        self._handles: list[int] = []
        self._wake, self._done = threading.Event(), threading.Event()
        _ExitThread(target=self._work, name="pynccl-exit", daemon=True).start()

    def _work(self) -> None:
        self._wake.wait()
        for handle in self._handles:
            # At exit no caller is left that could handle the error.
            with suppress(NcclError):
                self._end(handle)
                disown(handle)
        self._done.set()

    def run(self, handles: Iterable[int], seconds: float) -> None:
        """End communicators one after another, for at most `seconds`."""
        self._handles = list(handles)
        self._wake.set()
        self._done.wait(seconds)


# PYNCCL_EXIT_TIMEOUT, read with the first communicator.
_DEFAULT = 5.0
_seconds = _DEFAULT
_leave: _AtEnd | None = None
_abort: _AtEnd | None = None


def own(handle: int) -> None:
    """Release a handle at exit, unless `disown` is called first."""
    global _leave, _abort, _seconds
    if _leave is None:
        # Imported late: `pynccl run` uses this module without a library.
        from pynccl import capi

        _seconds = _exit_seconds()
        _leave, _abort = _AtEnd(capi.ncclCommDestroy), _AtEnd(capi.ncclCommAbort)
        _when_multiprocessing_ends()
    owned.add(handle)


def keep_to_the_end(arrays: Iterable[Any]) -> None:
    """Keep arrays until the process ends: the library may still write to them."""
    _kept.extend(arrays)


def disown(handle: int) -> None:
    """Stop being responsible for a handle."""
    owned.discard(handle)


def _when_multiprocessing_ends() -> None:
    """Run `_at_exit` in multiprocessing's children too: a forked child skips atexit."""
    process, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=10)


def _at_exit() -> None:
    """Destroy open communicators after their issued calls; abort them if an exception ends the program.

    Completing the issued calls takes PYNCCL_EXIT_TIMEOUT seconds at most.
    """
    deadline = time.monotonic() + _seconds
    if owned:
        # Before the other ranks learn of it, and perhaps exit sooner.
        tell_launcher()
    last = _last_exception()
    if isinstance(last, TypeError) and (text := add_hint(last)):
        print(f"pynccl: {text}", file=sys.stderr)
    aborts = last is not None
    broken = set(owned) if aborts else set()
    interrupt: BaseException | None = None
    for communicator in list(living):
        handle = int(communicator.handle)
        try:
            completed = communicator.leave_at_exit(None if aborts else deadline)
        except KeyboardInterrupt as error:
            # The user does not want to wait: the others are aborted, too.
            interrupt, aborts, completed = error, True, communicator.leave_at_exit(None)
            broken = set(owned)
        if not completed:
            broken.add(handle)
        communicator.forget("the interpreter has ended")
    if _leave is not None and owned - broken:
        _leave.run(owned - broken, max(0.0, deadline - time.monotonic()))
    if _abort is not None and owned:
        _abort.run(owned, max(1.0, deadline - time.monotonic()))
    if interrupt is not None:
        _end_by_interrupt()


def when_leaving(tell: Callable[[], object]) -> None:
    """Register what tells the launcher that this rank leaves."""
    global _on_leaving
    _on_leaving = tell


def tell_launcher() -> None:
    """Tell the launcher, if there is one, that this rank leaves now."""
    if _on_leaving is not None:
        _on_leaving()


def hint_by(hint: Callable[[BaseException], str]) -> None:
    """Register what adds a hint to an exception that ends the program."""
    global _hint
    _hint = hint


def add_hint(error: BaseException) -> str:
    """Add a hint to an exception that ends the program, and return it; "" if there is none."""
    return "" if _hint is None else _hint(error)


def _end_by_interrupt() -> None:
    """End this process as Ctrl-C ends a program; an exception would only be shown, since this is the exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def raised() -> bool:
    """Tell whether an uncaught exception ends the program."""
    return _last_exception() is not None


def _last_exception() -> BaseException | None:
    # An interactive session survives it.
    found = (
        None if hasattr(sys, "ps1") else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    )
    return found if isinstance(found, BaseException) else None


def _exit_seconds() -> float:
    text = os.environ.get("PYNCCL_EXIT_TIMEOUT") or _DEFAULT
    with suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return min(seconds, LONGEST)
    raise ValueError(f"PYNCCL_EXIT_TIMEOUT is {shown(text)}; expected seconds, 0 or more")


def _in_child() -> None:
    """In a forked child: the library's threads and connections are the parent's."""
    global _leave, _abort
    owned.clear()
    _leave = _abort = None
    for communicator in list(living):
        communicator.leave_to_parent()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
