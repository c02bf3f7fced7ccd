"""One exchange through keys: every rank writes its arrival, rank 0 writes the answer.

Arrivals and answers carry failures as well as ids: every rank learns of the failure of any rank, even after
the id was published. With keys in pynccl's own store, every rank also learns of a death.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from pynccl._base import timeouts
from pynccl._base.values import rank_list
from pynccl._errors import BootstrapError, NcclError, NcclTimeoutError
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
    silence_of,
    unpack_answer,
    unpack_arrival,
    unpack_failure,
)
from pynccl.bootstrap._store import StoreSilent

# Seconds that rank 0 gets after the deadline to name the missing ranks.
_MARGIN = 0.5
# Seconds that rank 0 keeps its own store open after a failure, so that the other ranks can read the failure.
_LINGER = 4.0
# Seconds between two looks for a dead rank, and seconds in which keys that are polled are seen.
_LOOK = 0.5
_POLL = 0.1
# Seconds that a rank has to answer another whose time-out has passed.
ANSWER = 1.0

log = logging.getLogger("pynccl")


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
        """Report a failure after the exchange; return the failure to raise instead, if any.

        That is the earlier failure of another rank, or, after a time-out, the ranks that do not respond.
        """

    def done(self) -> None:
        """Remove the keys or messages after every rank has the answer."""


class Round:
    """This rank's part in one exchange through keys."""

    def __init__(
        self,
        keys: Keys,
        name: str,
        rank: int,
        size: int,
        deadline: float,
        *,
        lingers: bool = False,
        later: Iterator[int] | None = None,
    ) -> None:
        self.keys, self.rank, self.size, self.deadline, self.lingers = keys, rank, size, deadline, lingers
        self.prefix = f"init/{name}/"
        # The ranks that may come: more than `size` if one has a larger world_size.
        self._coming = size
        # The time at which it logs the ranks that it waits for.
        self._tells_at = time.monotonic() + timeouts.LATE
        # The numbers of later rounds, if the keys outlive processes: a script may run several programs.
        self.later = later
        # Called on rank 0 after every rank has arrived.
        self.when_joined: Callable[[], None] = lambda: None
        # How a rank has ended, if the launcher has said so; else "".
        self.how_ended: Callable[[int], str] = lambda _: ""
        # Called on rank 0 with the failure, before its own store closes.
        self.when_failed: Callable[[bytes], None] = lambda _: None
        # Returns the text about clients that the store of rank 0 refused.
        self.refused: Callable[[], str] = lambda: ""

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Send the result or the error of `prepare` to rank 0, and return rank 0's answer."""
        start = time.monotonic()
        while not self.keys.claim(self._key("claim", self.rank)):
            if self.later is None or not (self._is_set("answer") or self._is_set("failed")):
                raise self._duplicate()
            # An earlier process of this rank took part in that round.
            self.prefix = f"init/{next(self.later)}/"
        if (late := time.monotonic() - self.deadline) > _MARGIN:
            # Each further call may take as long, and the others have given up.
            raise BootstrapError(
                f"rank {self.rank} of {self.size} arrived {late:.1f} s after its time-out: calls of "
                f"{self.keys.where} took {time.monotonic() - start:.1f} s"
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

    def _duplicate(self) -> BootstrapError:
        error = BootstrapError(
            f"rank {self.rank} of {self.size} arrived twice at {self.keys.where}; two processes have the "
            "same rank, or keys of an earlier run remain"
        )
        # The other ranks would wait for a rank that this process should have been.
        self._put(self.prefix + "failed", pack(Failure(str(error))))
        return error

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
            arrivals = [self._arrival(other) for other in range(self.size)]
            if (failure := self._look()) is not None:
                # A rank has left since it arrived: this rank may be late.
                raise failure.error()
            answer = compare(arrivals, self.size)
            self.when_joined()
            self.keys.put(self.prefix + "answer", pack(answer), self._left() + _MARGIN)
        except BaseException as error:
            seconds = _LINGER if isinstance(error, Exception) else _MARGIN
            self._give_up(failure_of_rank_0(self.size, error), seconds)
            raise
        return answer

    def _arrival(self, rank: int) -> Arrival:
        try:
            arrival = unpack_arrival(self._fetch(self._key("arrival", rank), self._left(), rank), rank)
        except TimeoutError:
            raise self._absent() from None
        # The ranks that only the larger world_size has would never arrive.
        if arrival.size != self.size and arrival.failure is None:
            self._coming = max(self.size, arrival.size)
            raise BootstrapError(f"rank {rank} has world_size {arrival.size}, rank 0 has {self.size}")
        return arrival

    def _fetch(self, name: str, timeout: float, of: int) -> bytes:
        """Return a rank's value, waiting for it; raise if it exits or another rank reports a failure."""
        deadline, patience = time.monotonic() + timeout, _LOOK
        while True:
            left = deadline - time.monotonic()
            try:
                with suppress(TimeoutError):
                    return self.keys.fetch(name, max(0.0, min(patience, left)))
                patience, failure, end = _LOOK, self._look(), self.how_ended(of)
            except StoreSilent:
                # On a busy machine the store's process may not be scheduled for seconds.
                if left <= _LOOK:
                    raise
                patience = 0.0
                continue
            if failure is not None:
                raise failure.error()
            if time.monotonic() >= self._tells_at:
                # A store that is lost, or silent on a busy machine, shows at the next fetch.
                with suppress(NcclError):
                    self._tell_who_is_late()
            if end:
                # It may have written the value before.
                with suppress(TimeoutError):
                    return self.keys.fetch(name, 0.0)
                raise Failure(
                    f"rank {of} of {self.size} {end}, without this call of pynccl.init", (of,)
                ).error()
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
        # A rank that is stopped for longer reads this when it goes on.
        self.when_failed(pack(failure))
        deadline = time.monotonic() + min(seconds, self._left() + _MARGIN)
        try:
            for other in range(1, self._coming):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                if other not in failure.dead:
                    with suppress(TimeoutError, NcclError):
                        self.keys.fetch(self._key("left", other), left)
        finally:
            if self.keys.clears:
                self._remove()

    def _follow(self) -> Answer:
        try:
            answer = unpack_answer(self._fetch(self.prefix + "answer", self._left() + _MARGIN, 0))
        except TimeoutError:
            error = self._absent()
            self._clear_up(Failure(str(error), missing=tuple(error.ranks)))
            raise error from None
        except StoreSilent:
            raise
        except NcclError:
            self._clear_up()
            raise
        if answer.failure is not None or answer.size != self.size:
            self._leave()
        if answer.failure is not None:
            raise answer.failure.error()
        if answer.size != self.size:
            raise BootstrapError(f"rank {self.rank} has world_size {self.size}, rank 0 has {answer.size}")
        return answer

    def _tell_who_is_late(self) -> None:
        self._tells_at = math.inf
        if self.rank == 0:
            late, _ = self._missing()
        else:
            late = [] if self._has("arrival", 0) else [0]
        if late:
            text = "pynccl.init: rank %d of %d has waited %g s at %s for %s"
            log.warning(text, self.rank, self.size, timeouts.LATE, self.keys.where, rank_list(late))

    def _absent(self) -> BootstrapError:
        missing, looked = self._missing()
        if self.rank in missing and (why := self._unreadable()) is not None:
            return why
        return absent(self.rank, self.size, missing, self.keys.where, self.refused(), looked=looked)

    def _unreadable(self) -> BootstrapError | None:
        """Return the error of keys that do not return what this rank has set: they know of no rank."""
        try:
            self.keys.fetch(self._key("arrival", self.rank), 0.0)
        except TimeoutError as late:
            return BootstrapError(
                f"rank {self.rank} of {self.size}: {self.keys.where} does not return what this rank has set: "
                f"{late}"
            )
        return None

    def _missing(self) -> tuple[list[int], int]:
        """Return the ranks that have not arrived, and how many it has looked for."""
        # Every look is a round trip: a wrong world_size must not take more than the margin.
        until, missing, looked = time.monotonic() + _MARGIN, list[int](), 0
        while looked < self.size and time.monotonic() < until:
            if not self._has("arrival", looked):
                missing.append(looked)
            looked += 1
        return missing, looked

    def _has(self, kind: str, rank: int, timeout: float = 0.0) -> bool:
        return self._is_set(f"{kind}/{rank}", timeout)

    def _is_set(self, name: str, timeout: float = 0.0) -> bool:
        try:
            self.keys.fetch(self.prefix + name, max(0.0, timeout))
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
            failure = unpack_failure(self.keys.fetch(self.prefix + "failed", timeout))
        except TimeoutError:
            return None
        if failure.asks:
            self._put(self._key("here", self.rank), b"1")
            with suppress(TimeoutError):
                failure = unpack_failure(self.keys.fetch(self.prefix + "verdict", ANSWER + _MARGIN))
        return failure

    def _verdict(self, failure: Failure) -> Failure:
        """Ask every rank to answer this rank's time-out; return the failure that all ranks raise."""
        # Keys that cannot claim let two ranks ask at once.
        self._put(self._key("here", self.rank), b"1")
        self._put(self.prefix + "failed", pack(failure._replace(asks=True)))
        until = time.monotonic() + ANSWER
        others = (other for other in range(self.size) if other != self.rank)
        silent = [other for other in others if not self._has("here", other, until - time.monotonic())]
        verdict = silence_of(silent, self.rank, self.size) if silent else failure
        self._put(self.prefix + "verdict", pack(verdict))
        return verdict

    def failure(self) -> Failure | None:
        """Return the failure that another rank has reported since the exchange, or None."""
        failure = self._look()
        if failure is not None:
            self._leave()
            self._linger(failure, _LINGER)
        return failure

    def fail(self, error: BaseException) -> Failure | None:
        """Report a failure after the exchange; return the failure to raise instead, if any."""
        if isinstance(error, NcclError) and not self._has("arrival", self.rank):
            # Rank 0 has removed the keys: a new one would remain, and be read by the next round.
            return Failure(f"the other ranks have given up; {failure_of(self.rank, self.size, error).text}")
        other = self._look()
        if other is None and not self.keys.claim(self.prefix + "failing"):
            other = self._look(_MARGIN)
        failure = other or failure_of(self.rank, self.size, error)
        if other is None and isinstance(error, NcclTimeoutError):
            failure = self._verdict(failure)
            other = failure if failure.dead else None
        elif other is None:
            self._put(self.prefix + "failed", pack(failure))
        self._leave()
        self._linger(failure, _LINGER if isinstance(error, Exception) else _MARGIN)
        return other

    def _clear_up(self, failure: Failure | None = None) -> None:
        """Leave without an answer, after a failure of this rank or another's.

        Where keys have to go, the last rank to leave removes them in place of rank 0.
        """
        with suppress(NcclError):
            if failure is not None and not self._is_set("failed"):
                # For rank 0, which may come later.
                self._put(self.prefix + "failed", pack(failure))
            self._leave()
            # If rank 0 lives, it reads the failure, and removes the keys after its answer.
            if self.keys.clears and not (self._has("claim", 0) and self._is_set("answer", _LOOK + _POLL)):
                self._remove_as_the_last()

    def _remove_as_the_last(self) -> None:
        until = time.monotonic() + _LINGER
        for other in range(1, self.size):
            if time.monotonic() >= until or (self._has("arrival", other) and not self._has("left", other)):
                return
        self._remove()

    def _remove(self) -> None:
        self.keys.remove(self.prefix, self._names())

    def _names(self) -> Iterator[str]:
        """Yield the names of the keys."""
        yield from (self.prefix + name for name in ("answer", "failing", "failed", "verdict"))
        for rank in range(self.size):
            yield from (self._key(kind, rank) for kind in ("claim", "arrival", "here", "left"))

    def done(self) -> None:
        """Remove the keys after every rank has the answer."""
        if self.rank == 0:
            self._remove()
