"""Connections between machines: a listener that answers with the time of its clock, and its client."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

_TRIES = 3


class Answer(NamedTuple):
    """What came of a connection: seconds by which the other clock is ahead, or why there is none."""

    offset: float | None
    failure: str = ""


class Listener:
    """Answer every connection with the time of this machine; a context manager."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, name="pynccl-doctor", daemon=True).start()

    def _serve(self) -> None:
        # The socket's end ends the loop.
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                # A client that has left needs no answer.
                with connection, suppress(OSError):
                    connection.sendall(repr(time.time()).encode())

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # close alone would leave accept waiting.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask(address: tuple[str, int], timeout: float) -> Answer:
    """Connect to a listener several times, and take the answer that was quickest."""
    best: tuple[float, float] | None = None
    for _ in range(_TRIES):
        begin = time.time()
        try:
            with socket.create_connection(address, timeout) as connection:
                connection.settimeout(timeout)
                theirs = float(connection.recv(64))
        except (OSError, ValueError) as failure:
            return Answer(None, str(failure))
        end = time.time()
        if best is None or end - begin < best[0]:
            best = end - begin, theirs - (begin + end) / 2
    assert best is not None
    return Answer(best[1])
