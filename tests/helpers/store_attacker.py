"""Attack a store without its secret, until killed: python store_attacker.py KIND HOST:PORT.

It says "enough" once it has tried to connect 10,000 times.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress

ATTEMPTS = 10_000
GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
    os.urandom(70_000),
    struct.pack("!I", 0xFFFFFFFF) * 12,
    bytes(48) + struct.pack("!IBH", 1 << 31, 1, 3) + b"key" + bytes(1 << 16),
    b"pynccl-store-3\n\1" + os.urandom(48),
    b"pynccl-store-3\n\1" + os.urandom(64) + bytes(1 << 16),
]
# What goes into a connection at once, by kind; slow ones get a byte now and then.
OPENINGS = {
    "half-open": [b""],
    "garbage": GARBAGE,
    "oversized": GARBAGE[3:5] + GARBAGE[-1:],
    "slow": [b"x"],
    "all": GARBAGE,
}


def main() -> None:
    kind, address = sys.argv[1:]
    host, _, port = address.rpartition(":")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(ATTEMPTS, hard - 50)
    openings = OPENINGS[kind]
    held: deque[socket.socket] = deque()
    poll = select.poll()
    attempts = 0
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect((host, int(port)))
        held.append(sock)
        attempts += 1
        if attempts == ATTEMPTS:
            print("enough", flush=True)
        if len(held) >= most:
            held.popleft().close()
        # Some connections later it is there, or refused; what it is sent may not fit.
        with suppress(OSError):
            held[len(held) * 9 // 10].send(openings[attempts % len(openings)] or b"")
        if kind in ("slow", "all") and held:
            with suppress(OSError):
                held[attempts * 7919 % len(held)].send(b"x")
        if attempts > ATTEMPTS or attempts % 64 == 0:
            poll.poll(1)


main()
