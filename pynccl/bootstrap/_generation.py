"""A number for each meeting of the same ranks in a store of torch's, and that no earlier meeting there has.

A store outlives meetings, and ranks: torchrun's agents keep theirs when they start the ranks again, and its
count of restarts may differ between agents. So rank 0 opens a new round for each meeting, and closes it when
all other ranks have come. A round that its rank 0 left, or that is closed, is nobody's any more: a rank that
comes waits for the next one. No rank has to know how often it was started, or which keys the dead left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 0.01
# All ranks of a large group together do not ask more often than this.
_ASKED_PER_SECOND = 20_000


def meet(store: Any, rank: int, size: int, seconds: float, late: Callable[[list[int]], Exception]) -> int:
    """Return the number of this meeting, when every rank has come; `late` makes the error of who has not.

    The store has torch's `add`, `set` and `check`.
    """
    waiting = _Waiting(seconds, size, late)
    return _lead(store, size, waiting) if rank == 0 else _follow(store, rank, size, waiting)


def _lead(store: Any, size: int, waiting: _Waiting) -> int:
    number = int(store.add("rounds", 1))
    awaited = [_key(number, other) for other in range(1, size)]
    while awaited and not store.check(awaited):
        waiting.pause(lambda: _absent(store, number, range(1, size)))
    store.set(_closed(number), "1")
    return number


def _follow(store: Any, rank: int, size: int, waiting: _Waiting) -> int:
    joined = 0

    def missing() -> list[int]:
        # Who has not come is why rank 0 does not close the round.
        return (_absent(store, joined, range(1, size)) if joined else []) or [0]

    while True:
        newest = int(store.add("rounds", 0))
        # Asked after the number: a rank 0 that has begun the next round has closed this one before.
        if joined and store.check([_closed(joined)]):
            return joined
        if newest != joined and not store.check([_closed(newest)]):
            joined = newest
            store.set(_key(joined, rank), "1")
        waiting.pause(missing)


def _key(number: int, rank: int) -> str:
    return f"{number}/rank {rank}"


def _closed(number: int) -> str:
    return f"{number}/closed"


def _absent(store: Any, number: int, ranks: range) -> list[int]:
    return [rank for rank in ranks if not store.check([_key(number, rank)])]


class _Waiting:
    def __init__(self, seconds: float, size: int, late: Callable[[list[int]], Exception]) -> None:
        self.until, self.late = time.monotonic() + seconds, late
        self.longest = max(_LONGEST_PAUSE, size / _ASKED_PER_SECOND)
        self.next = _FIRST_PAUSE

    def pause(self, missing: Callable[[], list[int]]) -> None:
        if time.monotonic() >= self.until:
            raise self.late(missing())
        time.sleep(self.next)
        self.next = min(2 * self.next, self.longest)
