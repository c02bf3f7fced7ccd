"""One exchange through keys: every rank arrives, rank 0 answers.

What arrives and what is answered are results, not only ids: whoever fails, all ranks learn of it, also of a
failure after the id has been published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pynccl._errors import BootstrapError
from pynccl.bootstrap._keys import Keys
from pynccl.bootstrap._preflight import (
    Answer,
    Arrival,
    Facts,
    absent,
    failure_of,
    judge,
    pack,
    unpack_answer,
    unpack_arrival,
    verdict,
)

# Whoever waits for rank 0's answer gives it this much longer to say who is missing.
_MARGIN = 0.5
# So long rank 0 stays after a failure, where the keys end with it, for the others to read what it was.
_LINGER = 4.0


class Exchange(Protocol):
    """How ranks reach each other, by keys or by MPI."""

    rank: int
    size: int

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Tell the others what `prepare` returns or raises, and return rank 0's answer."""

    def failure(self) -> str:
        """Return what another rank has failed with since, "" for nothing."""

    def fail(self, error: BaseException) -> str:
        """Tell the others of a failure after the exchange; return an earlier one, "" for none."""

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

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Tell the others what `prepare` returns or raises, and return rank 0's answer."""
        if not self.keys.claim(self._key("claim", self.rank)):
            raise BootstrapError(
                f"rank {self.rank} of {self.size} arrived twice at {self.keys.where}; two processes have the "
                "same rank, or these are the leavings of an earlier run"
            )
        try:
            mine = Arrival(self.size, prepare())
        except Exception as error:
            text = failure_of(self.rank, self.size, error)
            self._put(self._key("arrival", self.rank), pack(Arrival(self.size, None, text)))
            self._give_up(text, _LINGER)
            raise
        self.keys.put(self._key("arrival", self.rank), pack(mine), self._left() + _MARGIN)
        if self.rank == 0:
            return self._lead()
        try:
            return self._follow()
        except (KeyboardInterrupt, SystemExit) as error:
            # Rank 0 counts on this rank: the others learn of it while they create the communicator.
            self.fail(error)
            raise

    def _key(self, kind: str, rank: int) -> str:
        return f"{self.prefix}{kind}/{rank}"

    def _put(self, name: str, value: bytes) -> None:
        """Tell the others of a failure; where the store has gone too, that is no news."""
        with suppress(BootstrapError):
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
            return unpack_arrival(self.keys.fetch(self._key("arrival", rank), self._left()), rank)
        except TimeoutError:
            raise self._absent() from None

    def _give_up(self, text: str, seconds: float) -> None:
        """Tell the others of a failure; only rank 0's word counts, the others have said theirs on arrival."""
        if self.rank != 0:
            self._leave()
            return
        self._put(self.prefix + "answer", pack(Answer(self.size, "", text)))
        self._linger(seconds)

    def _linger(self, seconds: float) -> None:
        """Stay until the others know, where they know it from this process."""
        if not self.lingers or self.rank != 0:
            return
        deadline = time.monotonic() + min(seconds, self._left() + _MARGIN)
        for other in range(1, self.size):
            with suppress(TimeoutError, BootstrapError):
                self.keys.fetch(self._key("left", other), max(0.0, deadline - time.monotonic()))
        self.done()

    def _follow(self) -> Answer:
        try:
            answer = unpack_answer(self.keys.fetch(self.prefix + "answer", self._left() + _MARGIN))
        except TimeoutError:
            raise self._absent() from None
        if answer.error or answer.size != self.size:
            self._leave()
        if answer.error:
            raise BootstrapError(answer.error)
        if answer.size != self.size:
            raise BootstrapError(f"rank {self.rank} has world_size {self.size}, rank 0 has {answer.size}")
        return answer

    def _absent(self) -> BootstrapError:
        missing = [other for other in range(self.size) if not self._has_arrived(other)]
        return absent(self.rank, self.size, missing, self.keys.where)

    def _has_arrived(self, rank: int) -> bool:
        try:
            self.keys.fetch(self._key("arrival", rank), 0)
        except TimeoutError:
            return False
        return True

    # --- after the exchange ---

    def failure(self) -> str:
        """Return what another rank has failed with since, "" for nothing."""
        try:
            text = self.keys.fetch(self.prefix + "failed", 0).decode(errors="replace")
        except TimeoutError:
            return ""
        self._leave()
        self._linger(_LINGER)
        return text

    def fail(self, error: BaseException) -> str:
        """Tell the others of a failure after the exchange; return an earlier one, "" for none."""
        if not self.keys.claim(self.prefix + "failing"):
            with suppress(TimeoutError):
                return self.keys.fetch(self.prefix + "failed", _MARGIN).decode(errors="replace")
            return ""
        self._put(self.prefix + "failed", failure_of(self.rank, self.size, error).encode())
        self._leave()
        self._linger(_LINGER if isinstance(error, Exception) else _MARGIN)
        return ""

    def done(self) -> None:
        """Clean up, when every rank has what it needs."""
        if self.rank == 0:
            kinds = ("claim", "arrival", "left")
            names = [self._key(kind, rank) for kind in kinds for rank in range(self.size)]
            self.keys.remove([*names, *(self.prefix + name for name in ("answer", "failing", "failed"))])
