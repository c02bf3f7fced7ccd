"""The launcher's word that a process has ended: left in its store, and asked for there by survivors.

The store's client is imported when it is used: most programs never are in such trouble.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pynccl._watch import ended as ends

if TYPE_CHECKING:
    from pynccl.bootstrap._server import StoreServer
    from pynccl.bootstrap._store import Store

# The launcher's own store answers within much less.
_STORE_SECONDS = 1.0


def tell(server: StoreServer, ended: ends.Process) -> None:
    """Leave in the launcher's store that a process has ended by now."""
    at = time.monotonic_ns()
    with _connect(server.address, _STORE_SECONDS, server.secret, server.job) as store:
        store.set(ends.key(ended), b"%d" % at)


def listen() -> None:
    """Have the survivors of this process ask the store."""
    ends.connect = _connect


def _connect(address: str, seconds: float, secret: str | None = None, job: str | None = None) -> Store:
    from pynccl.bootstrap._store import PromptStore

    return PromptStore(address, secret, job=job, timeout=seconds)
