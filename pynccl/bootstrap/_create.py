"""The creation of the communicator, while this rank watches for failures of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from pynccl._comm.communicator import Communicator
from pynccl._device.blocking import Running
from pynccl._errors import NcclError, NcclRemoteError, NcclTimeoutError, RankFailedError
from pynccl._watch.watchdog import BY_DEATH, DEATH_MS
from pynccl.bootstrap._exchange import Exchange
from pynccl.bootstrap._preflight import Failure, failure_of
from pynccl.bootstrap._store import StoreSilent

# Seconds before the first look for a failure of another rank, and between later looks of at most so many
# ranks. More ranks look less often each, since one store answers all of them.
_FIRST_LOOK, _PERIOD, _PROMPT = 0.05, 0.2, 64
# Seconds that the library gets, after the store was lost, to report the death of rank 0 itself.
_GRACE = 3.0
# Seconds after the deadline in which the creation can report the reason of its time-out itself: it may wait
# for the watchdogs' verdict, longer on a busy machine.
_WHY = 4 * DEATH_MS / 1000 + 1.0
# Seconds to wait for the report of a death after an error that a death may have caused.
_DEATH = 1.0
# Seconds more if the error began on another rank, which waits for the report, too, and then reports its own.
_ORIGIN = 0.5


def create(
    make: Callable[[], Communicator], exchange: Exchange | None, deadline: float, seconds: float
) -> Communicator:
    """Return the communicator that `make` creates; raise at the deadline, or if another rank fails first."""
    running = Running(make, "init", Communicator.abort, deadline)
    try:
        running.start()
    except BaseException as error:
        running.abandon()
        _raise_first(exchange, error)
    try:
        failure = _wait(running, exchange, deadline, seconds)
        if failure is None:
            comm = running.result()
    except BaseException as error:
        running.abandon()
        _raise_first(exchange, error)
    if failure is not None:
        running.abandon()
        raise failure.error()
    if exchange is not None:
        exchange.done()
    return comm


def _raise_first(exchange: Exchange | None, error: BaseException) -> NoReturn:
    """Report a failure to the other ranks; raise it, or the earlier failure of another rank."""
    earlier = None if exchange is None else _tell(exchange, error)
    # A failure that begins here may have caused the earlier one.
    if earlier is not None and isinstance(error, Exception) and (earlier.dead or _comes_from_others(error)):
        raise earlier.error() from error
    raise error


def _comes_from_others(error: Exception) -> bool:
    return isinstance(error, NcclRemoteError | NcclTimeoutError) or (
        isinstance(error, NcclError) and error.relayed
    )


def _tell(exchange: Exchange, error: BaseException) -> Failure | None:
    """Report a failure to the other ranks; return the earlier failure of another rank, if any."""
    seconds = 0.0
    if isinstance(error, NcclError) and error.result in BY_DEATH and not isinstance(error, RankFailedError):
        seconds = _DEATH + (_ORIGIN if _comes_from_others(error) else 0.0)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            if (found := exchange.failure()) is not None:
                return found
            time.sleep(_FIRST_LOOK)
        return exchange.fail(error)
    except RankFailedError as death:
        return failure_of(exchange.rank, exchange.size, death)
    except NcclError:
        # The store is lost, so the failure cannot be reported.
        return None


def _wait(
    running: Running[Communicator], exchange: Exchange | None, deadline: float, seconds: float
) -> Failure | None:
    """Wait until the creation has ended; return the failure of another rank if it comes first."""
    pause, silent = _FIRST_LOOK, ""
    period = _PERIOD * max(1.0, (1 if exchange is None else exchange.size) / _PROMPT)
    deadline += _WHY
    while not running.done.wait(max(0.0, min(pause, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise NcclTimeoutError(f"creating the communicator did not complete within {seconds:g} s{silent}")
        pause, silent = period, ""
        if exchange is None:
            continue
        try:
            failure = exchange.failure()
        except StoreSilent as error:
            failure, silent = None, f"; {error}"
        except NcclError as error:
            if running.done.wait(max(0.0, min(_GRACE, deadline - time.monotonic()))):
                return None
            return failure_of(exchange.rank, exchange.size, error)
        if failure is not None:
            return failure
    return None
