"""Blocking calls that can be abandoned: after a time-out, by Ctrl-C, or by their caller."""

from __future__ import annotations

import _thread
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar, cast

from pynccl import capi
from pynccl._base.timeouts import rounded
from pynccl._errors import NcclError, NcclSystemError, NcclTimeoutError
from pynccl._library.binding import lib
from pynccl._trace.recorder import dump_because

T = TypeVar("T")

# Seconds between two looks for a reason to abandon a blocking call while at most so many threads wait. More
# threads look less often each: a process of many ranks must not spend its time on looks.
_SLICE, _PROMPT = 0.1, 8
# Seconds before the CPU library interrupts an abandoned call. Ranks with the same time-out should first find
# the missing rank themselves, and not that this rank has left.
_OTHERS = 1.0
# By then an abandoned call of the CPU library has ended.
LINGER = 2 * _OTHERS


# What limits the number of threads, for errors' texts.
THREAD_LIMITS = "RLIMIT_NPROC, RLIMIT_AS, or the cgroup's pids.max"


class NoThreadError(NcclSystemError):
    """No thread can be started: the interpreter is exiting, or the system has none left."""


class _Flag:
    """A flag to wait for.

    An exception of a signal handler, such as Ctrl-C, can leave the lock of a threading.Event taken for ever:
    https://github.com/python/cpython/issues/74174.
    """

    def __init__(self) -> None:
        self._set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Tell whether the flag is set."""
        return self._set

    def set(self) -> None:
        """Set the flag, once."""
        self._set = True
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, or for `timeout` seconds; tell whether it is set."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        try:
            _waiting.add(me)
            # In slices: one waiter has the lock, and an exception may leave the others without it.
            while not self._set and (left := deadline - time.monotonic()) > 0:
                if self._lock.acquire(timeout=min(_slice(), left)):
                    self._lock.release()
        finally:
            _waiting.discard(me)
        return self._set


# The threads that wait for a flag.
_waiting: set[int] = set()


def _slice() -> float:
    """Return the seconds between two looks of a thread that waits."""
    return _SLICE * max(1.0, len(_waiting) / _PROMPT)


# The threads that make calls for others.
_callers: set[int] = set()


class _Life:
    """Lives as long as a thread; without memory a thread may end before it runs any Python."""

    __slots__ = ("__weakref__",)


def _start(work: Callable[[], object], what: str, life: _Life | None = None) -> None:
    """Start a thread, which keeps its life; raise NoThreadError if none can be started.

    A threading.Thread is not started whole if an exception of a signal handler interrupts its start.
    """

    def begin(_: _Life | None) -> None:
        me = threading.get_ident()
        _callers.add(me)
        try:
            # As threading.Thread does.
            sys.settrace(threading.gettrace())
            sys.setprofile(threading.getprofile())
            work()
        finally:
            _callers.discard(me)

    try:
        _thread.start_new_thread(begin, (life,))
    except RuntimeError as error:
        # A signal handler that raises has a frame of its own.
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise
        raise NoThreadError(f"{what}: {error} ({THREAD_LIMITS})") from error


def another_thread_may_call(waiting: Iterable[int] = ()) -> bool:
    """Tell whether the program has threads, besides pynccl's, this one and `waiting`, that may make a call.

    Then the search for deadlocks must not take the calls for missing that this thread has not made. A
    thread is pynccl's if its class is, or if it makes a call for another.
    """
    package = __name__.partition(".")[0]
    own = {threading.get_ident(), *_callers, *waiting}
    for thread in threading.enumerate():
        # The object for a thread that `threading` has not started may outlive the thread.
        if thread.ident is None or thread.ident in own or type(thread).__name__ == "_DummyThread":
            continue
        if type(thread).__module__.partition(".")[0] != package:
            return True
        own.add(thread.ident)
    # Also those that `threading` does not know.
    return not sys._current_frames().keys() <= own


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
        self._lives: list[weakref.ref[_Life]] = []
        # The threads that wait for the end, without a deadline.
        self._awaiting: list[int] = []
        self._lock = threading.Lock()
        self.done = _Flag()

    def start(self) -> None:
        """Start the call unless it has begun; raise NoThreadError if no thread can be started.

        Not part of the creation: an exception at its end, such as Ctrl-C, would leave a call without owner.
        After an exception here the caller abandons the call, or starts it again.
        """
        if not self._thread:
            life = _Life()
            # Before the start: an exception behind it would hide the thread.
            self._lives.append(weakref.ref(life))
            _start(self._work, self._what, life)

    def _work(self) -> None:
        with self._lock:
            if self._thread or self._abandoned:
                return
            self._thread = threading.get_native_id()
        _here.running = self
        self._run()
        # What drops the result is no part of the call, which may be abandoned.
        del _here.running
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
            raise NcclError(f"{self._what} was abandoned", function=self._what)

    def _drop(self) -> None:
        drop, self._if_abandoned = self._if_abandoned, None
        if self._error is None and drop is not None:
            drop(cast("T", self._value))

    def runs_here(self) -> bool:
        """Tell whether this thread makes the call."""
        return not self.done.is_set() and self._thread == threading.get_native_id()

    def has_failed(self) -> bool:
        """Tell whether the call was abandoned, or has ended with an exception."""
        return self._abandoned or (self.done.is_set() and self._error is not None)

    def drop(self) -> None:
        """Let the call go on, and drop its result at its end, or now."""
        with self._lock:
            self._dropped = True
            if self.done.is_set():
                self._drop()

    def wait(self, deadline: float = math.inf) -> bool:
        """Wait for the end of the call, or until the deadline; tell whether it has ended, or never begins.

        Raises NoThreadError if its thread has ended before the call.
        """
        here = threading.get_ident()
        if deadline == math.inf:
            self._awaiting.append(here)
        try:
            while not self.done.is_set() and time.monotonic() < deadline:
                if self._abandoned and not self._thread:
                    return True
                self.done.wait(min(_slice(), deadline - time.monotonic()))
                self._look_for_thread()
        finally:
            if deadline == math.inf:
                self._awaiting.remove(here)
        return self.done.is_set()

    def others_may_call(self) -> bool:
        """Tell whether the program has a thread that may make other calls before this one ends."""
        return another_thread_may_call(list(self._awaiting))

    def _look_for_thread(self) -> None:
        """End the call if its thread has ended, which happens without memory."""
        ended = bool(self._lives) and not any(life() for life in self._lives)
        if not ended or self.done.is_set():
            return
        cls = NcclSystemError if self._thread else NoThreadError
        error = cls(
            f"{self._what}: the thread of the call has ended without memory (RLIMIT_AS, or the cgroup's "
            "memory.max)",
            function=self._what,
        )
        if not self._thread:
            raise error
        self._error = error
        self.done.set()

    def give_up(self) -> bool:
        """Abandon the call; return False if it has already ended."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            if self._abandoned and self._thread:
                # An exiting interpreter starts no thread.
                with suppress(NoThreadError):
                    _start(self._end, self._what)
            return self._abandoned

    def _end(self) -> None:
        self.done.wait(_OTHERS)
        with self._lock:
            if not self.done.is_set():
                self._interrupt(True)

    def abandon(self) -> None:
        """Abandon the call, or drop its result."""
        if not self.give_up():
            self._drop()
        self.wait(time.monotonic() + self._linger)

    def result(self) -> T:
        """Return the result of the call, or raise its exception."""
        self.look()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


# The call for which this thread was started.
_here = threading.local()


def others_may_call() -> bool:
    """Tell whether the program has another thread that may make calls while this one waits."""
    running: Running[object] | None = getattr(_here, "running", None)
    return another_thread_may_call() if running is None else running.others_may_call()


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
    at_timeout: Callable[[], object] | None = None,
) -> T:
    """Make a blocking call and return its result; Ctrl-C and the time-out can end the wait.

    `look` is called periodically and may raise. `if_abandoned` gets the result of an abandoned call. Before
    the exception is raised that ends the wait, the call has `linger` seconds to end. `at_timeout` is called
    before a late call is abandoned, which may end meanwhile.
    """
    running = Running(call, what, if_abandoned, limited=timeout is not None, linger=linger)
    try:
        running.start()
        ended = _wait(running, timeout, with_outside(look))
    except NoThreadError:
        # An exiting interpreter starts no thread, and a thread needs memory.
        return call()
    except BaseException:
        running.abandon()
        raise
    try:
        if ended:
            return running.result()
        if at_timeout is not None:
            at_timeout()
    except BaseException:
        running.abandon()
        raise
    if running.give_up():
        text = f"{what} took longer than {rounded(timeout)} s"
        dump_because("timeout", text)
        raise NcclTimeoutError(text, function=what)
    return running.result()


def _wait(running: Running[T], timeout: float | None, look: Callable[[], object]) -> bool:
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not running.wait(min(deadline, time.monotonic() + _slice())):
        if time.monotonic() >= deadline:
            return False
        look()
    return True
