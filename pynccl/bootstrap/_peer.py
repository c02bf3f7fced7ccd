"""The user of the process at the other end of a loopback TCP connection, from the kernel.

Without a secret this check keeps other users of the machine out. An unknown user is refused.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from pynccl._base.host import EXHAUSTED
from pynccl.bootstrap._address import is_loopback

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
# inet_diag_sockid: ports and addresses in network byte order, any interface, any cookie.
_SOCKET = struct.Struct("!HH16s16s12s")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# Offset of user and inode in the answer: after the header, the state, the socket and three more fields.
_OWNER_AT = _HEADER.size + 4 + _SOCKET.size + 12

# Address and port of one end, as the socket module gives them.
End = tuple[Any, ...]

GONE = "its connection has ended"
OTHER = "it belongs to another user"
UNKNOWN = "its user is unknown (neither sock_diag nor /proc/net/tcp is available)"


class SockDiag:
    """The kernel's sock_diag service, by a netlink socket that the first question opens."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._number = 0

    def ask(self, question: bytes) -> bytes:
        """Return the answer to one question. The kernel queues it before the question's send returns."""
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG)
                # From now on only the kernel can answer.
                self._socket.connect((0, 0))
            self._number += 1
            size = _HEADER.size + len(question)
            self._socket.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST, self._number, 0) + question)
            answer = self._socket.recv(8192, socket.MSG_DONTWAIT)
        except OSError:
            self.close()
            raise
        if len(answer) < _OWNER_AT + 8 or _HEADER.unpack_from(answer)[1:4:2] != (_BY_FAMILY, self._number):
            raise OSError("the kernel does not know this connection")
        return answer

    def close(self) -> None:
        """Close the socket; the next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def why_not(sock: socket.socket, diag: SockDiag) -> str:
    """Return why the other end must be refused; "" if it belongs to this user, or is not on loopback."""
    family = sock.family
    if family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:
        return GONE
    if not is_loopback(there[0]):
        return ""
    try:
        user = _user_at(family, here, there, diag)
    except OSError as error:
        return f"its user is unknown: {error.strerror}" if error.errno in EXHAUSTED else UNKNOWN
    return GONE if user is None else "" if user == os.geteuid() else OTHER


def _user_at(family: int, here: End, there: End, diag: SockDiag) -> int | None:
    """Return the user id of the other end; None if its process has closed it."""
    try:
        return _ask(family, here, there, diag)
    except OSError:
        # Some kernels lack the sock_diag module, and some sandboxes forbid netlink sockets.
        return _look_up(family, here, there)


def _ask(family: int, here: End, there: End, diag: SockDiag) -> int | None:
    ends = (_packed(family, end).ljust(16, b"\0") for end in (there, here))
    question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    question += _SOCKET.pack(there[1], here[1], *ends, _ANY)
    return _owner(*struct.unpack_from("=II", diag.ask(question), _OWNER_AT))


def _look_up(family: int, here: End, there: End) -> int | None:
    table = "tcp6" if family == socket.AF_INET6 else "tcp"
    wanted = [_shown(family, end) for end in (there, here)]
    with open(Path("/proc/net", table), encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if words[1:3] == wanted:
                return _owner(int(words[7]), int(words[9]))
    return None


def _packed(family: int, end: End) -> bytes:
    return socket.inet_pton(family, end[0].partition("%")[0])


def _shown(family: int, end: End) -> str:
    """Return an address in the notation of /proc/net/tcp: words in the machine's byte order."""
    packed = _packed(family, end)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


def _owner(user: int, inode: int) -> int | None:
    # Without an inode the socket is closed, or not accepted yet; the kernel then reports root.
    return user if inode else None
