"""What "the same host" means: a text for each thing that processes of one host may share.

docs/architecture.md has the table; cpu/base/core.cpp says the same for the CPU library, which has no Python.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import socket
from pathlib import Path

# Errors of a process or system without free descriptors.
EXHAUSTED = (errno.EMFILE, errno.ENFILE)
SHORTAGES = (*EXHAUSTED, errno.ENOBUFS, errno.ENOMEM)


def machine() -> str:
    """Return a text that is equal for processes of one machine, in any container: they see its GPUs."""
    return f"{socket.gethostname()} {_kernel()}"


def loopback() -> str:
    """Return a text that is equal for processes that reach one another at 127.0.0.1."""
    return f"{socket.gethostname()} {_kernel('net')}"


def process_ids() -> str:
    """Return a text that is equal for processes that know each other by the same process ids."""
    return _kernel("pid")


def clock() -> str:
    """Return a text that is equal for processes whose monotonic clocks agree."""
    return _kernel("time")


def _kernel(*namespaces: str) -> str:
    """Return a text that is equal for processes of one running kernel with the same namespaces."""
    parts = [_read(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()]
    return " ".join(parts + [_link(f"/proc/self/ns/{name}") for name in namespaces])


def digest(text: str) -> bytes:
    """Return a digest of 16 bytes of a text."""
    return hashlib.sha256(text.encode()).digest()[:16]


def is_short_of_descriptors() -> bool:
    """Tell whether three quarters of the file descriptors that this process may have are in use."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        return error.errno in EXHAUSTED
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and used * 4 >= limit * 3


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        # A sandbox may hide the file.
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
