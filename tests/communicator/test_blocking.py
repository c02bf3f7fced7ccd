"""Calls in threads of their own, where no thread can be started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

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


def test_an_error_of_a_signal_handler_is_no_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    wait = threading.Event.wait

    def interrupt(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGUSR1)
        return wait(event, timeout)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        # Thread.start waits for its thread's first step.
        monkeypatch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(RuntimeError) as caught:
            bounded(lambda: made.append(threading.get_ident()), 1, "a call")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not isinstance(caught.value, NoThreadError)
    assert threading.get_ident() not in made
