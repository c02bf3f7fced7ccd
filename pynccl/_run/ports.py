"""A port of this machine for a server that starts later."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from pynccl._errors import BootstrapError


def free_port() -> int:
    """Return a port for rank 0's own server, such as torch's store.

    It is below those that the kernel gives to connections: one of them could take the port first.
    """
    first, end = 10000, 32768
    with suppress(OSError):
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = first + int.from_bytes(os.urandom(4), "little") % (end - first) if end > first else 0
        try:
            with socket.create_server(("", port)) as probe:
                return int(probe.getsockname()[1])
        except OSError:
            continue
    raise BootstrapError(f"none of 100 ports from {first} to {end - 1} is free for MASTER_PORT")
