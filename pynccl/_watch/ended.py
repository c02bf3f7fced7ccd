"""What `pynccl run --keep-going` knows of its ranks' ends, for survivors that cannot see those processes.

The launcher sets PYNCCL_KEEP_GOING in its ranks. When a process that it started has ended, it leaves the time
in its store, under a key that follows from the process and from the clock. So the word is found whatever rank
the process has in a communicator, and holds for no other process: not for one that has the same number in
another pid namespace, not for a child that a rank started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from pynccl import _host
from pynccl._errors import BootstrapError
from pynccl._library.binding import lib

KEEP_GOING = "PYNCCL_KEEP_GOING"
# A store that is there answers within much less.
_ANSWER_SECONDS = 0.5


class Process(NamedTuple):
    """A process on any machine: where its number holds, the number, and when it started (0: unknown)."""

    space: bytes
    pid: int
    start: int


def process(pid: int) -> Process:
    """Return a process that this one knows by its number."""
    return Process(_host.digest(_host.same_boot("pid")), pid, int(lib.pynccl_process_start(pid)))


def key(ended: Process) -> str:
    """Return where the time stands at which a process has ended, by this process's clock."""
    clock = _host.digest(_host.same_boot("time"))
    return f"ended/{clock.hex()}/{ended.space.hex()}/{ended.pid}/{ended.start}"


class Store(Protocol):
    """As much of a store's client as it takes."""

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Return a value, or raise TimeoutError."""

    def close(self) -> None:
        """End the connection."""


# Connects to the store at an address within so many seconds; `_run/word.py`, a layer above, sets it.
connect: Callable[[str, float], Store] | None = None


def is_told() -> bool:
    """Tell whether the launcher leaves word of this process's end."""
    return os.environ.get(KEEP_GOING) == "1"


class Word:
    """What the launcher of this process says: nothing where there is none, or its store does not answer."""

    def __init__(self) -> None:
        self._address = os.environ.get("PYNCCL_STORE", "") if is_told() else ""
        self._store: Store | None = None

    def ends(self, asked: Mapping[int, Process], deadline: float) -> Iterator[tuple[int, int]]:
        """Yield which of some ranks have ended, and by when on the monotonic clock, in nanoseconds."""
        seconds = min(_ANSWER_SECONDS, deadline - time.monotonic())
        if connect is None or not self._address or seconds <= 0:
            return
        try:
            self._store = self._store or connect(self._address, seconds)
            for rank, one in asked.items():
                with suppress(TimeoutError):
                    yield rank, int(self._store.get(key(one), 0.0))
        except BootstrapError:
            # Gone, or only slow: for the next question there is a new connection.
            self.pause()

    def pause(self) -> None:
        """End the connection until there is something to ask."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
