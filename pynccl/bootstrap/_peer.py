"""The user of the process at the other end of a loopback TCP connection, from the kernel.

Without a secret this check keeps other users of the machine out. An unknown user is refused.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from pynccl._base.host import EXHAUSTED
from pynccl.bootstrap._address import is_loopback

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
# inet_diag_sockid: ports and addresses in network byte order, any interface, any cookie.
_SOCKET = struct.Struct("!HH16s16s12s")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# Offset of user and inode in the answer: after the header, the state, the socket and three more fields.
_OWNER_AT = _HEADER.size + 4 + _SOCKET.size + 12
_SECONDS = 1.0


GONE = "its connection has ended"
OTHER = "it belongs to another user"
UNKNOWN = "its user is unknown (neither sock_diag nor /proc/net/tcp is available)"


def why_not(sock: socket.socket) -> str:
    """Return why the other end must be refused; "" if it belongs to this user, or is not on loopback."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        if not is_loopback(sock.getpeername()[0]):
            return ""
    except OSError:
        return GONE
    try:
        user = _user_at(sock)
    except OSError as error:
        return f"its user is unknown: {error.strerror}" if error.errno in EXHAUSTED else UNKNOWN
    return GONE if user is None else "" if user == os.geteuid() else OTHER


def _user_at(sock: socket.socket) -> int | None:
    """Return the user id of the other end; None if its process has closed it."""
    try:
        return _ask(sock)
    except OSError:
        # Some kernels lack the sock_diag module, and some sandboxes forbid netlink sockets.
        return _look_up(sock)


def _ask(sock: socket.socket) -> int | None:
    here, there = sock.getsockname(), sock.getpeername()
    ends = [socket.inet_pton(sock.family, end[0].partition("%")[0]) for end in (there, here)]
    request = struct.pack("=BBBBI", sock.family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += _SOCKET.pack(there[1], here[1], *(end.ljust(16, b"\0") for end in ends), _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(_SECONDS)
        size = _HEADER.size + len(request)
        kernel.sendto(_HEADER.pack(size, _BY_FAMILY, _REQUEST, 1, 0) + request, (0, 0))
        answer = kernel.recv(8192)
    if len(answer) < _OWNER_AT + 8 or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        raise OSError("the kernel does not know this connection")
    return _owner(*struct.unpack_from("=II", answer, _OWNER_AT))


def _look_up(sock: socket.socket) -> int | None:
    table = "tcp6" if sock.family == socket.AF_INET6 else "tcp"
    wanted = [_shown(sock.family, end) for end in (sock.getpeername(), sock.getsockname())]
    with open(Path("/proc/net", table), encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if words[1:3] == wanted:
                return _owner(int(words[7]), int(words[9]))
    return None


def _shown(family: int, end: tuple[str, int]) -> str:
    """Return an address in the notation of /proc/net/tcp: words in the machine's byte order."""
    packed = socket.inet_pton(family, end[0].partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


def _owner(user: int, inode: int) -> int | None:
    # Without an inode the socket is closed, or not accepted yet; the kernel then reports root.
    return user if inode else None
