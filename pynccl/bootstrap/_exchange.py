"""One exchange through keys: every rank arrives, rank 0 answers.

What arrives and what is answered are results, not only ids: whoever fails, all ranks learn of it, also of a
failure after the id has been published, and, where the keys are in our own store, of a death.
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
    death_of,
    failure_of,
    judge,
    pack,
    unpack_answer,
    unpack_arrival,
    unpack_failure,
    verdict,
)
from pynccl.bootstrap._store import StoreSilent

# Whoever waits for rank 0's answer gives it this much longer to say who is missing.
_MARGIN = 0.5
# So long rank 0 stays after a failure, where the keys end with it, for the others to read what it was.
_LINGER = 4.0
# So often who waits looks whether somebody has died.
_LOOK = 0.5


class Exchange(Protocol):
    """How ranks reach each other, by keys or by MPI."""

    rank: int
    size: int

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Tell the others what `prepare` returns or raises, and return rank 0's answer."""

    def failure(self) -> Failure | None:
        """Return what another rank has failed with since."""

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the others of a failure after the exchange; return an earlier one."""

    def done(self) -> None:
        """Clean up, when every rank has what it needs."""


class Round:
    """This rank's part in one exchange through keys."""

    def __init__(
        self, keys: Keys, name: str, rank: int, size: int, deadline: float, *, lingers: bool = False
    ) -> None:
        self.keys, self.rank, self.size, self.deadline, self.lingers = keys, rank, size, deadline, lingers
        self.prefix = f"init/{name}/"
        # Called on rank 0 when every rank has arrived.
        self.when_joined: Callable[[], None] = lambda: None
        # What rank 0's store says of those that it turned away.
        self.refused: Callable[[], str] = lambda: ""

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Tell the others what `prepare` returns or raises, and return rank 0's answer."""
        if not self.keys.claim(self._key("claim", self.rank)):
            raise BootstrapError(
                f"rank {self.rank} of {self.size} arrived twice at {self.keys.where}; two processes have the "
                "same rank, or these are the leavings of an earlier run"
            )
        try:
            self.keys.will(self.prefix + "failed", pack(death_of(self.rank, self.size)))
            self._arrive(prepare)
            if self.rank != 0:
                return self._follow()
        except (KeyboardInterrupt, SystemExit) as error:
            # Rank 0 counts on this rank, or all count on rank 0: the others learn of it while they wait.
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
        """Tell the others of a failure; where the store has gone too, that is no news."""
        with suppress(NcclError):
            self.keys.put(name, value, _MARGIN)

    def _leave(self) -> None:
        self._put(self._key("left", self.rank), b"1")

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _lead(self) -> Answer:
        try:
            answer = judge([self._arrival(other) for other in range(self.size)], self.size)
            self.when_joined()
            self.keys.put(self.prefix + "answer", pack(answer), self._left() + _MARGIN)
        except BaseException as error:
            self._give_up(verdict(self.size, error), _LINGER if isinstance(error, Exception) else _MARGIN)
            raise
        return answer

    def _arrival(self, rank: int) -> Arrival:
        try:
            return unpack_arrival(self._fetch(self._key("arrival", rank), self._left()), rank)
        except TimeoutError:
            raise self._absent() from None

    def _fetch(self, name: str, timeout: float) -> bytes:
        """Return a value; raise what another rank has failed with while this one waits."""
        deadline, patience = time.monotonic() + timeout, _LOOK
        while True:
            left = deadline - time.monotonic()
            try:
                with suppress(TimeoutError):
                    return self.keys.fetch(name, max(0.0, min(patience, left)))
                patience, failure = _LOOK, self._look()
            except StoreSilent:
                # Where many processes start at once, one may not get to run for seconds.
                if left <= _LOOK:
                    raise
                patience = 0.0
                continue
            if failure is not None:
                raise failure.error()
            if left <= _LOOK:
                raise TimeoutError(f"nobody set {name!r}")

    def _give_up(self, failure: Failure, seconds: float) -> None:
        """Tell the others of a failure; only rank 0's word counts, the others have said theirs on arrival."""
        if self.rank != 0:
            self._leave()
            return
        self._put(self.prefix + "answer", pack(Answer(self.size, "", failure)))
        self._linger(failure, seconds)

    def _linger(self, failure: Failure, seconds: float) -> None:
        """Stay until the others know, where they know it from this process."""
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

    # --- after the exchange ---

    def _look(self, timeout: float = 0.0) -> Failure | None:
        try:
            return unpack_failure(self.keys.fetch(self.prefix + "failed", timeout))
        except TimeoutError:
            return None

    def failure(self) -> Failure | None:
        """Return what another rank has failed with since."""
        failure = self._look()
        if failure is not None:
            self._leave()
            self._linger(failure, _LINGER)
        return failure

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the others of a failure after the exchange; return an earlier one."""
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
        """Leave; the last who does removes what rank 0, which has gone without an answer, cannot."""
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
        """Clean up, when every rank has what it needs."""
        if self.rank == 0:
            self._remove()
