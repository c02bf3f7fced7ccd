"""The identity of this host: name, boot id, and namespaces."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from pathlib import Path

# Errors of a process or system without free descriptors.
EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def same_host(*namespaces: str) -> str:
    """Return a text that is equal for processes of one host with the same namespaces ("net", "pid")."""
    return f"{socket.gethostname()} {same_boot(*namespaces)}"


def same_boot(*namespaces: str) -> str:
    """Return a text that is equal for processes of one running kernel with the same namespaces."""
    parts = [_read(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()]
    return " ".join(parts + [_link(f"/proc/self/ns/{name}") for name in namespaces])


def digest(text: str) -> bytes:
    """Return a digest of 16 bytes of a text."""
    return hashlib.sha256(text.encode()).digest()[:16]


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
