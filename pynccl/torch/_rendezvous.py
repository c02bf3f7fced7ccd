"""A number for each group that its ranks make in one store, and that no earlier group there has.

A store outlives groups, and ranks: torchrun's agents keep theirs when they start the ranks again, and torch
uses the same names in it. So rank 0 opens a new round for each group that it makes, and closes it when all
other ranks have come. A round that its rank 0 left, or that is closed, is nobody's any more: a rank that
comes waits for the next one. No rank has to know how often it was started, or which keys the dead left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 0.01
# All ranks of a large group together do not ask more often than this.
_ASKED_PER_SECOND = 20_000


def meet(store: Any, rank: int, size: int, seconds: float, name: Callable[[int], str]) -> int:
    """Return the number of this group, when every rank of it has come.

    `name` says in errors which rank it is.
    """
    waiting = _Waiting(seconds, size)
    if rank == 0:
        return _lead(store, size, waiting, name)
    return _follow(store, rank, waiting, name)


def _lead(store: Any, size: int, waiting: _Waiting, name: Callable[[int], str]) -> int:
    number = store.add("rounds", 1)
    awaited = [f"{number}/rank {other}" for other in range(1, size)]

    def late() -> str:
        missing = [other for other in range(1, size) if not store.check([f"{number}/rank {other}"])]
        return f"{name(0)} made it, and has waited for {', '.join(map(name, missing))}"

    while awaited and not store.check(awaited):
        waiting.pause(late)
    store.set(f"{number}/closed", "1")
    return int(number)


def _follow(store: Any, rank: int, waiting: _Waiting, name: Callable[[int], str]) -> int:
    joined = 0

    def late() -> str:
        return f"{name(rank)} made it, and has waited for {name(0)}"

    while True:
        newest = store.add("rounds", 0)
        # Asked after the number: a rank 0 that has begun the next round has closed this one before.
        if joined and store.check([f"{joined}/closed"]):
            return int(joined)
        if newest != joined and not store.check([f"{newest}/closed"]):
            joined = newest
            store.set(f"{joined}/rank {rank}", "1")
        waiting.pause(late)


class _Waiting:
    def __init__(self, seconds: float, size: int) -> None:
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.longest = max(_LONGEST_PAUSE, size / _ASKED_PER_SECOND)
        self.next = _FIRST_PAUSE

    def pause(self, late: Callable[[], str]) -> None:
        if time.monotonic() >= self.until:
            raise dist.DistBackendError(
                f"pynccl: the process group did not come about in {self.seconds:g} s: {late()}"
            )
        time.sleep(self.next)
        self.next = min(2 * self.next, self.longest)
