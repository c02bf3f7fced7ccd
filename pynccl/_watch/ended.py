"""The launcher's record of ended processes (`pynccl run --keep-going`), for survivors that cannot see them.

The launcher sets PYNCCL_KEEP_GOING in its ranks. When a process that it started has ended, the launcher
writes the time to its store, under a key derived from the process and the clock. So the key does not depend
on the process's rank in a communicator, and matches no other process: neither a process with the same id in
another pid namespace, nor a child of a rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from pynccl._base.host import clock, digest, process_ids
from pynccl._errors import BootstrapError
from pynccl._library.binding import lib

KEEP_GOING = "PYNCCL_KEEP_GOING"
# Seconds to wait for an answer of the launcher's store.
_ANSWER_SECONDS = 0.5


class Process(NamedTuple):
    """A process on any machine: where its number holds, the number, and when it started (0: unknown)."""

    space: bytes
    pid: int
    start: int


def process(pid: int) -> Process:
    """Return a process that this one knows by its process id."""
    return Process(digest(process_ids()), pid, int(lib.pynccl_process_start(pid)))


def key(ended: Process) -> str:
    """Return the store's key for the time at which a process ended."""
    return f"ended/{digest(clock()).hex()}/{ended.space.hex()}/{ended.pid}/{ended.start}"


def exit_key(rank: int) -> str:
    """Return the store's key that says how the launcher's rank has ended."""
    return f"exited/{rank}"


class Store(Protocol):
    """The part of a store's client that this module uses."""

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Return a value, or raise TimeoutError."""

    def close(self) -> None:
        """End the connection."""


_connect: Callable[[str, float], Store] | None = None


def connect_by(connect: Callable[[str, float], Store]) -> None:
    """Register what connects to the store at an address within a number of seconds."""
    global _connect
    _connect = connect


def is_told() -> bool:
    """Tell whether the launcher records the end of this process."""
    return os.environ.get(KEEP_GOING) == "1"


class EndedRecord:
    """The record of this process's launcher; empty without a launcher, or if its store does not answer."""

    def __init__(self) -> None:
        self._address = os.environ.get("PYNCCL_STORE", "") if is_told() else ""
        self._store: Store | None = None

    def ends(self, asked: Mapping[int, Process], deadline: float) -> Iterator[tuple[int, int]]:
        """Yield the ranks that have ended, and the time by the monotonic clock in nanoseconds."""
        seconds = min(_ANSWER_SECONDS, deadline - time.monotonic())
        if _connect is None or not self._address or seconds <= 0:
            return
        try:
            self._store = self._store or _connect(self._address, seconds)
            for rank, one in asked.items():
                with suppress(TimeoutError):
                    yield rank, int(self._store.get(key(one), 0.0))
        except BootstrapError:
            # The store is lost or slow: the next query opens a new connection.
            self.pause()

    def pause(self) -> None:
        """Close the connection until the next query."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
