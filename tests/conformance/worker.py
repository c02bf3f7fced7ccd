"""One process of a group of ranks: a thread per rank, each serving its own connection to the parent."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .backend import Backend, choose_backend
from .ranks import NOTE_BYTES

PR_SET_PDEATHSIG = 1


class Rank:
    """What a function that runs on a rank knows and can do besides calling the library."""

    def __init__(self, rank: int, nranks: int, connection: Connection, notes: int, backend: Backend) -> None:
        self.rank, self.nranks, self.backend = rank, nranks, backend
        self.state: dict[str, Any] = {}
        self._connection, self._notes = connection, notes

    def exchange(self, value: Any = None) -> list[Any]:
        """Return every rank's value, in the order of the ranks; so it is a barrier too."""
        self._connection.send(("exchange", value))
        values: list[Any] = self._connection.recv()
        return values

    def note(self, text: str) -> None:
        """Leave word of what is about to happen, should it kill or hang the process."""
        os.pwrite(self._notes, text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0"), self.rank * NOTE_BYTES)

    def serve(self) -> None:
        """Run what the parent asks for until it closes the connection."""
        self.backend.use_device(self.rank)
        while True:
            try:
                module, name, args = self._connection.recv()
            except EOFError:
                return
            try:
                answer = ("result", _find(module, name)(self, *args))
            except BaseException:
                answer = ("raised", traceback.format_exc())
            self._connection.send(answer)


def _find(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def main() -> None:
    """Start the ranks of this process, which the command line names."""
    nranks, ranks, fds, notes = pickle.loads(bytes.fromhex(sys.argv[1]))
    work(nranks, ranks, [Connection(fd) for fd in fds], notes)


def work(nranks: int, ranks: list[int], connections: list[Connection], notes: int) -> None:
    """Start the ranks of this process and stay until all connections are closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    backend = choose_backend()
    members = [
        Rank(rank, nranks, connection, notes, backend)
        for rank, connection in zip(ranks, connections, strict=True)
    ]
    threads = [threading.Thread(target=member.serve, name=f"rank {member.rank}") for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.flush()
    # Communicators that a test left open must not hold up the next one.
    os._exit(0)


if __name__ == "__main__":
    main()
