"""One exchange through keys: every rank writes its arrival, rank 0 writes the answer.

Arrivals and answers carry failures as well as ids: every rank learns of the failure of any rank, even after
the id was published. With keys in pynccl's own store, every rank also learns of a death.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pynccl._errors import BootstrapError, NcclError
from pynccl.bootstrap._keys import Keys
from pynccl.bootstrap._preflight import (
    Answer,
    Arrival,
    Facts,
    Failure,
    absent,
    compare,
    death_of,
    failure_of,
    failure_of_rank_0,
    pack,
    unpack_answer,
    unpack_arrival,
    unpack_failure,
)
from pynccl.bootstrap._store import StoreSilent

# Seconds that rank 0 gets after the deadline to name the missing ranks.
_MARGIN = 0.5
# Seconds that rank 0 keeps its own store open after a failure, so that the other ranks can read the failure.
_LINGER = 4.0
# Seconds between two looks for a dead rank.
_LOOK = 0.5


class Exchange(Protocol):
    """An exchange between the ranks, through keys or MPI."""

    rank: int
    size: int
    # The time until which it waits.
    deadline: float

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Send the result or the error of `prepare` to rank 0, and return rank 0's answer."""

    def collect(self, name: str, value: bytes) -> dict[int, bytes]:
        """Send a value to rank 0, which returns those that came until the deadline; others return nothing."""

    def announce(self, name: str, value: bytes) -> bytes:
        """Return rank 0's value on every rank; raise BootstrapError if it does not come."""

    def failure(self) -> Failure | None:
        """Return the failure that another rank has reported since the exchange, or None."""

    def fail(self, error: BaseException) -> Failure | None:
        """Report a failure after the exchange; return the earlier failure of another rank, if any."""

    def done(self) -> None:
        """Remove the keys or messages after every rank has the answer."""


class Round:
    """This rank's part in one exchange through keys."""

    def __init__(
        self, keys: Keys, name: str, rank: int, size: int, deadline: float, *, lingers: bool = False
    ) -> None:
        self.keys, self.rank, self.size, self.deadline, self.lingers = keys, rank, size, deadline, lingers
        self.prefix = f"init/{name}/"
        # Called on rank 0 after every rank has arrived.
        self.when_joined: Callable[[], None] = lambda: None
        # Returns the text about clients that the store of rank 0 refused.
        self.refused: Callable[[], str] = lambda: ""

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Send the result or the error of `prepare` to rank 0, and return rank 0's answer."""
        if not self.keys.claim(self._key("claim", self.rank)):
            raise BootstrapError(
                f"rank {self.rank} of {self.size} arrived twice at {self.keys.where}; two processes have the "
                "same rank, or keys of an earlier run remain"
            )
        try:
            self.keys.will(self.prefix + "failed", pack(death_of(self.rank, self.size)))
            self._arrive(prepare)
            if self.rank != 0:
                return self._follow()
        except (KeyboardInterrupt, SystemExit) as error:
            # Other ranks may be waiting for this rank: report the interruption.
            self.fail(error)
            raise
        return self._lead()

    def _arrive(self, prepare: Callable[[], Facts]) -> None:
        try:
            mine = Arrival(self.size, prepare())
        except Exception as error:
            failure = failure_of(self.rank, self.size, error)
            self._put(self._key("arrival", self.rank), pack(Arrival(self.size, None, failure)))
            self._give_up(failure, _LINGER)
            raise
        self.keys.put(self._key("arrival", self.rank), pack(mine), self._left() + _MARGIN)

    def _key(self, kind: str, rank: int) -> str:
        return f"{self.prefix}{kind}/{rank}"

    def _put(self, name: str, value: bytes) -> None:
        """Report a failure; ignore a lost store, which the other ranks notice themselves."""
        with suppress(NcclError):
            self.keys.put(name, value, _MARGIN)

    def _leave(self) -> None:
        self._put(self._key("left", self.rank), b"1")

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _lead(self) -> Answer:
        try:
            answer = compare([self._arrival(other) for other in range(self.size)], self.size)
            self.when_joined()
            self.keys.put(self.prefix + "answer", pack(answer), self._left() + _MARGIN)
        except BaseException as error:
            seconds = _LINGER if isinstance(error, Exception) else _MARGIN
            self._give_up(failure_of_rank_0(self.size, error), seconds)
            raise
        return answer

    def _arrival(self, rank: int) -> Arrival:
        try:
            return unpack_arrival(self._fetch(self._key("arrival", rank), self._left()), rank)
        except TimeoutError:
            raise self._absent() from None

    def _fetch(self, name: str, timeout: float) -> bytes:
        """Return a value, waiting for it; raise if another rank reports a failure meanwhile."""
        deadline, patience = time.monotonic() + timeout, _LOOK
        while True:
            left = deadline - time.monotonic()
            try:
                with suppress(TimeoutError):
                    return self.keys.fetch(name, max(0.0, min(patience, left)))
                patience, failure = _LOOK, self._look()
            except StoreSilent:
                # On a busy machine the store's process may not be scheduled for seconds.
                if left <= _LOOK:
                    raise
                patience = 0.0
                continue
            if failure is not None:
                raise failure.error()
            if left <= _LOOK:
                raise TimeoutError(f"no rank set {name!r}")

    def _give_up(self, failure: Failure, seconds: float) -> None:
        """Report a failure: rank 0 by its answer; another rank has reported it by its arrival."""
        if self.rank != 0:
            self._leave()
            return
        self._put(self.prefix + "answer", pack(Answer(self.size, "", failure)))
        self._linger(failure, seconds)

    def _linger(self, failure: Failure, seconds: float) -> None:
        """On rank 0, keep its own store open until the other ranks have read the failure."""
        if not self.lingers or self.rank != 0:
            return
        deadline = time.monotonic() + min(seconds, self._left() + _MARGIN)
        for other in set(range(1, self.size)) - set(failure.dead):
            with suppress(TimeoutError, NcclError):
                self.keys.fetch(self._key("left", other), max(0.0, deadline - time.monotonic()))
        self.done()

    def _follow(self) -> Answer:
        try:
            answer = unpack_answer(self._fetch(self.prefix + "answer", self._left() + _MARGIN))
        except TimeoutError:
            error = self._absent()
            self._clear_up()
            raise error from None
        if answer.failure is not None or answer.size != self.size:
            self._leave()
        if answer.failure is not None:
            raise answer.failure.error()
        if answer.size != self.size:
            raise BootstrapError(f"rank {self.rank} has world_size {self.size}, rank 0 has {answer.size}")
        return answer

    def _absent(self) -> BootstrapError:
        missing = [other for other in range(self.size) if not self._has("arrival", other)]
        return absent(self.rank, self.size, missing, self.keys.where, self.refused())

    def _has(self, kind: str, rank: int) -> bool:
        try:
            self.keys.fetch(self._key(kind, rank), 0)
        except TimeoutError:
            return False
        return True

    # --- without an exchange ---

    def collect(self, name: str, value: bytes) -> dict[int, bytes]:
        """Send a value to rank 0, which returns those that came until the deadline; others return nothing."""
        if self.rank != 0:
            self.keys.put(self._key(name, self.rank), value, self._left() + _MARGIN)
            return {}
        found = {0: value}
        for other in range(1, self.size):
            with suppress(TimeoutError):
                found[other] = self.keys.fetch(self._key(name, other), self._left())
        if len(found) == self.size:
            self.when_joined()
        return found

    def announce(self, name: str, value: bytes) -> bytes:
        """Return rank 0's value on every rank; raise BootstrapError if it does not come."""
        if self.rank == 0:
            self.keys.put(self.prefix + name, value, self._left() + _MARGIN)
            return value
        try:
            return self.keys.fetch(self.prefix + name, self._left() + _MARGIN)
        except TimeoutError:
            raise absent(self.rank, self.size, [0], self.keys.where) from None

    # --- after the exchange ---

    def _look(self, timeout: float = 0.0) -> Failure | None:
        try:
            return unpack_failure(self.keys.fetch(self.prefix + "failed", timeout))
        except TimeoutError:
            return None

    def failure(self) -> Failure | None:
        """Return the failure that another rank has reported since the exchange, or None."""
        failure = self._look()
        if failure is not None:
            self._leave()
            self._linger(failure, _LINGER)
        return failure

    def fail(self, error: BaseException) -> Failure | None:
        """Report a failure after the exchange; return the earlier failure of another rank, if any."""
        earlier = self._look()
        if earlier is None and not self.keys.claim(self.prefix + "failing"):
            earlier = self._look(_MARGIN)
        failure = earlier or failure_of(self.rank, self.size, error)
        if earlier is None:
            self._put(self.prefix + "failed", pack(failure))
        self._leave()
        self._linger(failure, _LINGER if isinstance(error, Exception) else _MARGIN)
        return earlier

    def _clear_up(self) -> None:
        """Leave after rank 0 gave no answer; the last rank to leave removes the keys in place of rank 0."""
        self._leave()
        with suppress(NcclError):
            arrived = [other for other in range(1, self.size) if self._has("arrival", other)]
            if all(self._has("left", other) for other in arrived):
                self._remove()

    def _remove(self) -> None:
        kinds = ("claim", "arrival", "left")
        names = [self._key(kind, rank) for kind in kinds for rank in range(self.size)]
        self.keys.remove([*names, *(self.prefix + name for name in ("answer", "failing", "failed"))])

    def done(self) -> None:
        """Remove the keys after every rank has the answer."""
        if self.rank == 0:
            self._remove()
