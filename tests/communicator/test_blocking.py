"""Calls in threads of their own, where no thread can be started."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pynccl._device.blocking import NoThreadError, Running, bounded


@pytest.fixture
def no_thread() -> Iterator[None]:
    """Let no thread start: the stack of a new one would not fit into memory."""
    before = threading.stack_size(1 << 46)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_thread")
def test_a_call_is_made_in_the_caller_s_thread_where_no_other_can_be_started() -> None:
    assert bounded(threading.get_ident, 1, "a call") == threading.get_ident()
    with pytest.raises(NoThreadError):
        Running(threading.get_ident, "a call").start()


def test_a_thread_that_ends_before_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory Python cannot call the function of a new thread."""
    start = _thread.start_new_thread
    monkeypatch.setattr(_thread, "start_new_thread", lambda _, arguments: start(lambda *_: None, arguments))
    assert bounded(threading.get_ident, None, "a call") == threading.get_ident()
    running = Running(print, "another call")
    running.start()
    with pytest.raises(NoThreadError, match="another call: the thread of the call has ended without memory"):
        running.wait()


def test_an_error_of_a_signal_handler_is_no_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    start = _thread.start_new_thread

    def interrupt(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(work: Callable[[], object], arguments: tuple[()]) -> int:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return start(work, arguments)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        monkeypatch.setattr(_thread, "start_new_thread", interrupted)
        with pytest.raises(RuntimeError) as caught:
            bounded(lambda: made.append(threading.get_ident()), 1, "a call")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not isinstance(caught.value, NoThreadError)
    assert threading.get_ident() not in made


def test_what_drops_the_result_of_an_abandoned_call_is_not_abandoned() -> None:
    begun, abandoned, dropped = threading.Event(), threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return abandoned.wait(10)

    def drop(_: bool) -> None:
        # As an abort may be.
        if bounded(partial(time.sleep, 1), None, "a slow end") is None:
            dropped.set()

    running = Running(call, "a call", drop)
    running.start()
    assert begun.wait(10)
    assert running.give_up()
    abandoned.set()
    assert dropped.wait(10)


def start_and_wait(running: Running[bool], seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    running.start()
    running.wait()


def test_ctrl_c_at_any_moment_leaves_nothing_locked() -> None:
    """Each comes a little later than the one before."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Python drops an exception in a callback of the collector, and a library of the tests has one.
    gc.disable()
    try:
        for number in range(1, 400):
            ended = threading.Event()
            running = Running(partial(ended.wait, 10), "a call")
            with pytest.raises(KeyboardInterrupt):
                start_and_wait(running, number * 1e-6)
            running.start()
            ended.set()
            assert running.wait(time.monotonic() + 10)
            assert running.result()
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
