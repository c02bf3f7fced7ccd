"""The creation of the communicator, while this rank listens for another one's failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pynccl._communicator import Communicator
from pynccl._errors import BootstrapError, NcclTimeoutError
from pynccl.bootstrap._round import Exchange

_FIRST_LOOK, _PERIOD = 0.05, 0.2
# What the library gets to say itself that rank 0 has died, which often is the reason why its store is gone.
_GRACE = 3.0


class _Creation:
    """A communicator in the making, in a thread of its own, since NCCL's call cannot be interrupted."""

    def __init__(self, make: Callable[[], Communicator]) -> None:
        self.make = make
        self.made: Communicator | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.done = threading.Event()
        self.lock = threading.Lock()
        threading.Thread(target=self._work, name="pynccl init", daemon=True).start()

    def _work(self) -> None:
        try:
            self.made = self.make()
        except BaseException as error:
            self.error = error
        with self.lock:
            self.done.set()
        if self.abandoned and self.made is not None:
            self.made.abort()

    def abandon(self) -> None:
        """Leave it to itself: should it ever come to be, it is aborted."""
        with self.lock:
            self.abandoned = True
            made = self.made if self.done.is_set() else None
        if made is not None:
            made.abort()

    def result(self) -> Communicator:
        """Return what was made, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        assert self.made is not None
        return self.made


def create(
    make: Callable[[], Communicator], exchange: Exchange | None, deadline: float, seconds: float
) -> Communicator:
    """Return what `make` makes, unless the time is up or another rank fails first, which is raised here."""
    running = _Creation(make)
    try:
        told = _wait(running, exchange, deadline, seconds)
        comm = None if told else running.result()
    except BaseException as error:
        running.abandon()
        earlier = _tell(exchange, error)
        if earlier and isinstance(error, Exception):
            raise BootstrapError(earlier) from error
        raise
    if comm is None:
        running.abandon()
        raise BootstrapError(told)
    if exchange is not None:
        exchange.done()
    return comm


def _tell(exchange: Exchange | None, error: BaseException) -> str:
    """Tell the others of a failure; return what another rank has failed with before."""
    if exchange is not None:
        # Where the store has gone with rank 0, nobody can be told.
        with suppress(BootstrapError):
            return exchange.fail(error)
    return ""


def _wait(running: _Creation, exchange: Exchange | None, deadline: float, seconds: float) -> str:
    """Wait until it has come to an end; return another rank's failure that came before."""
    pause = _FIRST_LOOK
    while not running.done.wait(max(0.0, min(pause, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise NcclTimeoutError(f"creating the communicator did not complete within {seconds:g} s")
        pause = _PERIOD
        if exchange is None:
            continue
        try:
            text = exchange.failure()
        except BootstrapError as error:
            if running.done.wait(max(0.0, min(_GRACE, deadline - time.monotonic()))):
                return ""
            return f"rank {exchange.rank} of {exchange.size}: {error}"
        if text:
            return text
    return ""
