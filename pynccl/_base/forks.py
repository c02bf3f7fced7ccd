"""Sockets that a forked child must not hold: an open copy would hide this process's death from its peer."""

from __future__ import annotations

import os
import socket
import threading
import weakref

# A fork waits for this lock. Hold it from the opening of a descriptor until a forked child would close it.
no_fork = threading.RLock()

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def open_socket(family: int) -> socket.socket:
    """Return a new TCP socket, whose copy a forked child closes."""
    with no_fork:
        return own(socket.socket(family, socket.SOCK_STREAM))


def accept(listener: socket.socket) -> socket.socket:
    """Accept a connection, whose copy a forked child closes; the listener must not block."""
    with no_fork:
        return own(listener.accept()[0])


def own(sock: socket.socket) -> socket.socket:
    """Have a forked child close its copy of a socket, until its owner detaches it."""
    _sockets.add(sock)
    return sock


def _in_child() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()
    no_fork.release()


os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_in_child)
