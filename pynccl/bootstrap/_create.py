"""The creation of the communicator, while this rank listens for another one's failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from pynccl._comm.communicator import Communicator
from pynccl._device.blocking import Running
from pynccl._errors import NcclError, NcclTimeoutError, RankFailedError
from pynccl._watch.watchdog import BY_DEATH
from pynccl.bootstrap._exchange import Exchange
from pynccl.bootstrap._preflight import Failure, failure_of
from pynccl.bootstrap._store import StoreSilent

_FIRST_LOOK, _PERIOD = 0.05, 0.2
# What the library gets to say itself that rank 0 has died, which often is the reason why its store is gone.
_GRACE = 3.0
# What the creation gets to say itself why its time is up.
_WHY = 0.3
# The death behind an error of the library's may be known a little later.
_DEATH = 1.0


def create(
    make: Callable[[], Communicator], exchange: Exchange | None, deadline: float, seconds: float
) -> Communicator:
    """Return what `make` makes, unless the time is up or another rank fails first, which is raised here."""
    running = Running(make, "init", Communicator.abort, deadline)
    try:
        failure = _wait(running, exchange, deadline, seconds)
        if failure is None:
            comm = running.result()
    except BaseException as error:
        running.abandon()
        earlier = None if exchange is None else _tell(exchange, error)
        if earlier is not None and isinstance(error, Exception):
            raise earlier.error() from error
        raise
    if failure is not None:
        running.abandon()
        raise failure.error()
    if exchange is not None:
        exchange.done()
    return comm


def _tell(exchange: Exchange, error: BaseException) -> Failure | None:
    """Tell the others of a failure; return what another rank has failed with before."""
    by_death = isinstance(error, NcclError) and error.result in BY_DEATH
    until = time.monotonic() + (_DEATH if by_death and not isinstance(error, RankFailedError) else 0.0)
    try:
        while time.monotonic() < until:
            if (found := exchange.failure()) is not None:
                return found
            time.sleep(_FIRST_LOOK)
        return exchange.fail(error)
    except RankFailedError as death:
        return failure_of(exchange.rank, exchange.size, death)
    except NcclError:
        # Where the store has gone, nobody can be told.
        return None


def _wait(
    running: Running[Communicator], exchange: Exchange | None, deadline: float, seconds: float
) -> Failure | None:
    """Wait until it has come to an end; return another rank's failure that came before."""
    pause, silent = _FIRST_LOOK, ""
    deadline += _WHY
    while not running.done.wait(max(0.0, min(pause, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise NcclTimeoutError(f"creating the communicator did not complete within {seconds:g} s{silent}")
        pause, silent = _PERIOD, ""
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
