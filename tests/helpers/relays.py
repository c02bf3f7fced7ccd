"""What stands between the two ends of a connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress


def relay(source: socket.socket, target: socket.socket, passing: Callable[[bytes], bytes]) -> None:
    """Send what `passing` makes of what the source sends, until one of the connections ends."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(passing(data))
