"""The launcher's record of ended processes: written to its store, and read there by survivors.

The store's client is imported at its first use, because most programs never need it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pynccl._watch import ended as ends

if TYPE_CHECKING:
    from pynccl.bootstrap._store import Store

# Seconds to reach the launcher's own store.
_STORE_SECONDS = 1.0


def tell(address: str, secret: str, job: str, ended: ends.Process) -> None:
    """Record in the launcher's store that a process has ended."""
    at = time.monotonic_ns()
    with _connect(address, _STORE_SECONDS, secret, job) as store:
        store.set(ends.key(ended), b"%d" % at)


def tell_exit(address: str, secret: str, job: str, rank: int, how: str) -> None:
    """Record in the launcher's store how a rank has ended, for ranks that wait for it in pynccl.init."""
    with _connect(address, _STORE_SECONDS, secret, job) as store:
        store.set(ends.exit_key(rank), how.encode())


def listen() -> None:
    """Let survivors in this process read the record."""
    ends.connect_by(_connect)


def _connect(address: str, seconds: float, secret: str | None = None, job: str | None = None) -> Store:
    from pynccl.bootstrap._store import PromptStore

    return PromptStore(address, secret, job=job, timeout=seconds)
