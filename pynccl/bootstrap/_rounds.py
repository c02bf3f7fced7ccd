"""A new number for each rendezvous of the ranks in a torch store.

A torch store outlives rendezvous and ranks: torchrun's agents keep it when they restart the ranks, and their
counts of restarts may differ. So rank 0 opens a new round for each rendezvous, and closes the round after all
other ranks have joined. A rank never joins a closed round, and leaves an open round when rank 0 opens the
next one. No rank needs to know how often it was restarted, or which keys dead ranks left in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 0.01
# Upper bound of the requests per second of all ranks together.
_ASKED_PER_SECOND = 20_000


def meet(store: Any, rank: int, size: int, seconds: float, late: Callable[[list[int]], Exception]) -> int:
    """Return the number of this rendezvous after every rank has joined.

    The store has torch's `add`, `set` and `check`. After `seconds`, raise `late(missing ranks)`.
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
        # Rank 0 leaves the round open while ranks are missing; if none is, rank 0 itself is missing.
        return (_absent(store, joined, range(1, size)) if joined else []) or [0]

    while True:
        newest = int(store.add("rounds", 0))
        # Check after reading the number: rank 0 closes a complete round before it opens the next one.
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
        # The last rank may have come since the caller looked.
        if time.monotonic() >= self.until and (late := missing()):
            raise self.late(late)
        time.sleep(self.next)
        self.next = min(2 * self.next, self.longest)
