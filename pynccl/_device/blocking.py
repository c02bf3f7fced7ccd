"""Blocking calls that can be abandoned: after a time-out, by Ctrl-C, or by their caller."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

from pynccl import capi
from pynccl._errors import NcclError, NcclSystemError, NcclTimeoutError
from pynccl._library.binding import lib
from pynccl._timeouts import rounded
from pynccl._trace.recorder import dump_because

T = TypeVar("T")

_LOOK = 0.005
# Seconds between two looks for a reason to abandon a blocking call.
_SLICE = 0.1
# Seconds for a thread to begin.
_BEGIN = 5.0
# Seconds before the CPU library interrupts an abandoned call. Ranks with the same time-out should first find
# the missing rank themselves, and not that this rank has left.
_OTHERS = 1.0
# By then an abandoned call of the CPU library has ended.
LINGER = 2 * _OTHERS


# What limits the number of threads, for errors' texts.
THREAD_LIMITS = "RLIMIT_NPROC, RLIMIT_AS, or the cgroup's pids.max"


class NoThreadError(NcclSystemError):
    """No thread can be started: the interpreter is exiting, or the system has none left."""


def _raised_by(error: BaseException) -> object:
    """Return the object whose method raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace and trace.tb_frame.f_locals.get("self")


class _Caller(threading.Thread):
    """Makes a call for another thread."""


class _Late(threading.Timer):
    """A timer of pynccl."""


def another_thread_may_call() -> bool:
    """Tell whether the program has threads, besides this one and pynccl's, that may make a call.

    Then the search for deadlocks must not take the calls for missing that this thread has not made. A
    thread is pynccl's if its class is.
    """
    package = __name__.partition(".")[0]
    own = {t.ident for t in threading.enumerate() if type(t).__module__.partition(".")[0] == package}
    # Also those that `threading` does not know.
    return bool(sys._current_frames().keys() - own - {threading.get_ident()})


class Running(Generic[T]):
    """A blocking call in a thread of its own: NCCL's calls cannot be interrupted, but the caller can give up.

    `if_abandoned` gets the result of an abandoned call, which has `linger` seconds to end.
    """

    def __init__(
        self,
        call: Callable[[], T],
        what: str,
        if_abandoned: Callable[[T], object] | None = None,
        deadline: float = math.inf,
        limited: bool = False,
        linger: float = 0.0,
    ) -> None:
        self._call, self._if_abandoned, self.deadline = call, if_abandoned, deadline
        self._what, self._linger = what, linger
        outer: Running[object] | None = getattr(_here, "running", None)
        self._caller: int = threading.get_native_id() if outer is None else outer._caller
        inherited = another_thread_may_call() if outer is None else outer._limited
        self._limited: bool = inherited or limited or deadline < math.inf
        self._value: T | None = None
        self._error: BaseException | None = None
        self._abandoned = self._dropped = False
        self._thread = 0
        self._lock = threading.Lock()
        self.done = threading.Event()

    def start(self) -> None:
        """Start the call; raise NoThreadError if no thread can be started.

        Not part of the creation: an exception at its end, such as Ctrl-C, would leave a call without owner.
        After an exception here the caller abandons the call.
        """
        thread = _Caller(target=self._work, name=f"pynccl {self._what}", daemon=True)
        try:
            thread.start()
        except BaseException as error:
            # A signal handler that raises while the thread starts has a frame of its own.
            if isinstance(error, RuntimeError) and _raised_by(error) is thread:
                raise NoThreadError(f"{self._what}: {error} ({THREAD_LIMITS})") from error
            raise

    def _work(self) -> None:
        _here.running = self
        with self._lock:
            self._thread = threading.get_native_id()
            if self._abandoned:
                self.done.set()
                return
        self._run()
        with self._lock:
            try:
                if self._abandoned:
                    self._interrupt(False)
                if self._abandoned or self._dropped:
                    self._drop()
                    # Its traceback holds this object, and the arrays of the call.
                    self._error = None
            finally:
                self.done.set()

    def _run(self) -> None:
        try:
            if lib.cpu_api_find(b"pyncclCpuCallsFor"):
                capi.pyncclCpuCallsFor(self._caller, self._limited)
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def _interrupt(self, on: bool) -> None:
        """Make the CPU library interrupt this call; NVIDIA's NCCL continues until its own time-out."""
        if self._thread and lib.cpu_api_find(b"pyncclCpuInterrupt"):
            capi.pyncclCpuInterrupt(self._thread, on)

    def look(self) -> None:
        """Raise if the call was abandoned."""
        if self._abandoned:
            raise NcclError("the call was abandoned")

    def _drop(self) -> None:
        drop, self._if_abandoned = self._if_abandoned, None
        if self._error is None and drop is not None:
            drop(cast("T", self._value))

    def runs_here(self) -> bool:
        """Tell whether this thread makes the call."""
        return not self.done.is_set() and self._thread == threading.get_native_id()

    def has_failed(self) -> bool:
        """Tell whether the call has ended with an exception."""
        return self.done.is_set() and self._error is not None

    def drop(self) -> None:
        """Let the call go on, and drop its result at its end, or now."""
        with self._lock:
            self._dropped = True
            if self.done.is_set():
                self._drop()

    def wait_until(self, begun: Callable[[], bool]) -> None:
        """Wait until the call has begun, as `begun` tells, or has ended."""
        until = time.monotonic() + _BEGIN
        while not begun() and not self.done.is_set() and time.monotonic() < until:
            time.sleep(_LOOK)

    def wait(self, deadline: float = math.inf) -> bool:
        """Wait for the end of the call, or until the deadline; tell whether the call has ended."""
        begins = time.monotonic() + _BEGIN
        while not self.done.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            now = time.monotonic()
            if not self._thread and now > begins:
                # An exception that interrupted its start has left it without a thread.
                self.give_up()
                return True
            if now >= deadline:
                return False
        return True

    def give_up(self) -> bool:
        """Abandon the call; return False if it has already ended."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            if self._abandoned:
                late = _Late(_OTHERS, self._end)
                late.daemon, late.name = True, "pynccl interrupts"
                # An exiting interpreter starts no thread.
                with suppress(RuntimeError):
                    late.start()
            return self._abandoned

    def _end(self) -> None:
        with self._lock:
            if not self.done.is_set():
                self._interrupt(True)

    def abandon(self) -> None:
        """Abandon the call, or drop its result."""
        if not self.give_up():
            self._drop()
        # No wait for the event: a signal handler's exception may have left its lock locked.
        until = time.monotonic() + self._linger
        while not self.done.is_set() and time.monotonic() < until:
            time.sleep(_LOOK)

    def result(self) -> T:
        """Return the result of the call, or raise its exception."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


# The call for which this thread was started.
_here = threading.local()


def look_outside() -> None:
    """Raise if this thread runs an abandoned call."""
    running = getattr(_here, "running", None)
    if running is not None:
        running.look()


def deadline_of(timeout: float | None) -> float | None:
    """Return the deadline of a time-out, or the earlier deadline of the call that this thread runs."""
    if timeout is None:
        return None
    running = getattr(_here, "running", None)
    return min(time.monotonic() + timeout, math.inf if running is None else running.deadline)


def with_outside(look: Callable[[], object] | None) -> Callable[[], object]:
    """Return a look that also raises if this thread runs an abandoned call."""

    def both() -> None:
        look_outside()
        if look is not None:
            look()

    return both


def bounded(
    call: Callable[[], T],
    timeout: float | None,
    what: str,
    if_abandoned: Callable[[T], object] | None = None,
    look: Callable[[], object] | None = None,
    linger: float = 0.0,
) -> T:
    """Make a blocking call and return its result; Ctrl-C and the time-out can end the wait.

    `look` is called periodically and may raise. `if_abandoned` gets the result of an abandoned call. Before
    the exception is raised that ends the wait, the call has `linger` seconds to end.
    """
    running = Running(call, what, if_abandoned, limited=timeout is not None, linger=linger)
    try:
        running.start()
    except NoThreadError:
        # An exiting interpreter starts no thread.
        return call()
    except BaseException:
        running.abandon()
        raise
    try:
        if _wait(running.done, timeout, with_outside(look)):
            return running.result()
    except BaseException:
        running.abandon()
        raise
    if running.give_up():
        text = f"{what} took longer than {rounded(timeout)} s"
        dump_because("timeout", text)
        raise NcclTimeoutError(text, function=what)
    return running.result()


def _wait(done: threading.Event, timeout: float | None, look: Callable[[], object] | None) -> bool:
    if look is None:
        return done.wait(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
        if done.wait(max(0.0, left)):
            return True
        if left <= 0:
            return False
        look()
