"""The shared secret: where it comes from, how both sides prove it, and how frames are sealed with it.

Both sides send a nonce, and answer with keyed BLAKE2b of both: the secret itself never travels, and an
answer recorded once is worth nothing later. Keys for the two directions follow from the same nonces. A
frame is masked with keyed BLAKE2b of its number (a long one with SHAKE-256), and then authenticated with
keyed BLAKE2b: whoever sits on the way can neither read, change, repeat nor insert one. Without a secret only
the id of the job is proved, and frames are plain.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping

from pynccl import capi
from pynccl._errors import BootstrapError

NONCE = 16
DIGEST = 32
TAG = 16
# Masks of short frames are BLAKE2b's too: SHAKE-256 is OpenSSL's, whose start takes longer than a rendezvous.
_BLOCK = 64
_SHORT = 3 * _BLOCK
_MOST_BYTES = 1 << 16


def read_secret(environ: Mapping[str, str] | None = None) -> str:
    """Return what PYNCCL_SECRET is, or what the file at PYNCCL_SECRET_FILE has; "" where neither is set."""
    environ = os.environ if environ is None else environ
    secret, path = environ.get("PYNCCL_SECRET", ""), environ.get("PYNCCL_SECRET_FILE", "")
    return secret if secret or not path else _read_file(path)


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise BootstrapError(f"PYNCCL_SECRET_FILE: cannot read {path!r}: {error.strerror}") from error
    if mode & stat.S_IRWXO:
        raise BootstrapError(
            f"PYNCCL_SECRET_FILE: {path!r} is open to every user (mode {mode:04o}); expected 0600"
        )
    if not text:
        raise BootstrapError(f"PYNCCL_SECRET_FILE: {path!r} is empty; expected the secret")
    return text


def _encode(secret: str) -> bytes:
    return secret.encode("utf-8", "surrogateescape")


def job_key(secret: str, job: str) -> bytes:
    """Return the key from which all others of a job's store follow."""
    kind = b"pynccl, secret" if secret else b"pynccl, open"
    return hashlib.blake2b(_encode(job), key=hashlib.blake2b(_encode(secret)).digest(), person=kind).digest()


class Session:
    """What only the two sides of one connection know: their proofs, and the keys of each direction.

    All of it follows from the job's key and both nonces.
    """

    __slots__ = ("_key", "_nonces", "client_proof", "server_proof")

    def __init__(self, key: bytes, nonces: bytes) -> None:
        self._key, self._nonces = key, nonces
        proofs = self._derive(b"proofs")
        self.client_proof, self.server_proof = proofs[:DIGEST], proofs[DIGEST:]

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(self._nonces, key=self._key, person=purpose).digest()

    @property
    def to_server(self) -> bytes:
        """Return the key of what the client seals: half of it masks, half of it authenticates."""
        return self._derive(b"to server")

    @property
    def to_client(self) -> bytes:
        """Return the key of what the server seals."""
        return self._derive(b"to client")


class Seal:
    """One direction of one connection; the two ends of it count alike."""

    __slots__ = ("_count", "_mac", "_mask")

    def __init__(self, key: bytes) -> None:
        self._mask, self._mac = key[:32], key[32:]
        self._count = 0

    def close(self, body: bytes) -> bytes:
        """Return the body masked, with its tag."""
        self._count += 1
        number = self._count.to_bytes(8, "big")
        hidden = _mixed(body, self._mask, number)
        return hidden + hashlib.blake2b(number + hidden, digest_size=TAG, key=self._mac).digest()

    def open(self, sealed: bytes) -> bytes:
        """Return the body of what `close` made; ValueError when it is anything else."""
        self._count += 1
        number = self._count.to_bytes(8, "big")
        hidden = sealed[:-TAG]
        tag = hashlib.blake2b(number + hidden, digest_size=TAG, key=self._mac).digest()
        if not hmac.compare_digest(sealed[-TAG:], tag):
            raise ValueError("a frame that was not sealed with the job's secret")
        return _mixed(hidden, self._mask, number)


def _mixed(data: bytes, key: bytes, number: bytes) -> bytes:
    size = len(data)
    if size > _SHORT:
        mask = hashlib.shake_256(key + number).digest(size)
    else:
        starts = range(0, size, _BLOCK)
        mask = b"".join([hashlib.blake2b(number + bytes((at,)), key=key).digest() for at in starts])[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")).to_bytes(size, "little")


def encrypt_nccl(secret: str | None = None) -> None:
    """Let NCCL encrypt its TCP connections with a key that follows from the secret.

    The secret is by default PYNCCL_SECRET's. It takes NCCL 2.32 built with TLS, and a call on every rank
    before the first communicator or unique id.
    """
    secret = read_secret() if secret is None else secret
    if not secret:
        raise BootstrapError(
            "no secret: expected PYNCCL_SECRET or PYNCCL_SECRET_FILE, or the argument secret"
        )
    key = hmac.digest(_encode(secret), b"pynccl key for ncclSetEncryption", "sha256")
    capi.ncclSetEncryption({"mode": 1, "psk": key.hex()})
