"""The job's secret: its sources, its minimum length, and the keys derived from it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping

from pynccl._errors import BootstrapError

# The shortest secret in bytes: a listener to one connection can try secrets offline.
LEAST_BYTES = 16
RECIPE = 'python -c "import secrets; print(secrets.token_urlsafe(24))"'
_MOST_BYTES = 1 << 16


def read_secret(environ: Mapping[str, str] | None = None) -> str:
    """Return PYNCCL_SECRET, or the content of the file PYNCCL_SECRET_FILE; "" if neither is set."""
    environ = os.environ if environ is None else environ
    secret, path = environ.get("PYNCCL_SECRET", ""), environ.get("PYNCCL_SECRET_FILE", "")
    if secret or not path:
        return check_secret(secret, "PYNCCL_SECRET")
    return check_secret(_read_file(path), f"PYNCCL_SECRET_FILE: the secret in {path!r}")


def check_secret(secret: str, name: str = "secret") -> str:
    """Return a secret, or "" for none; raise if it is too short to resist guessing."""
    if not isinstance(secret, str):
        raise TypeError(f"{name} is a {type(secret).__name__}; expected a str")
    size = len(encode(secret))
    if 0 < size < LEAST_BYTES:
        raise BootstrapError(
            f"{name} has {size} bytes; expected at least {LEAST_BYTES}, because a party to one "
            f"connection can try short secrets offline. This command makes a secret: {RECIPE}"
        )
    return secret


def _read_file(path: str) -> str:
    try:
        # Non-blocking: opening a named pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES).strip() if stat.S_ISREG(found.st_mode) else ""
    except OSError as error:
        raise BootstrapError(f"PYNCCL_SECRET_FILE: cannot read {path!r}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BootstrapError(
            f"PYNCCL_SECRET_FILE: {path!r} is not a regular file; expected a file with the secret"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IRWXO:
        raise BootstrapError(
            f"PYNCCL_SECRET_FILE: {path!r} is open to every user (mode {mode:04o}); expected 0600"
        )
    if not text:
        raise BootstrapError(f"PYNCCL_SECRET_FILE: {path!r} is empty; expected the secret")
    return text


def encode(text: str) -> bytes:
    """Return the original bytes of a text from the environment."""
    return text.encode("utf-8", "surrogateescape")


def derive_key(secret: str, purpose: bytes, context: bytes) -> bytes:
    """Return the 32-byte key for a purpose, such as b"pynccl store", and a context, such as a job."""
    material = hashlib.blake2b(encode(secret)).digest()
    return hashlib.blake2b(context, key=material, person=purpose, digest_size=32).digest()
