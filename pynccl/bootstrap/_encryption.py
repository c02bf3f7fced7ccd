"""NCCL's own encryption, with a key derived from the job's secret."""

from __future__ import annotations

import hmac

from pynccl import capi
from pynccl._errors import BootstrapError
from pynccl._secure.secret import check_secret, encode, read_secret


def encrypt_nccl(secret: str | None = None) -> None:
    """Let NCCL encrypt its TCP connections with a key derived from the secret.

    `secret` is by default PYNCCL_SECRET. Every rank must call this before its first communicator or unique
    id. Raises BootstrapError without a secret, and NotSupportedError unless NCCL is >= 2.32 and built with
    TLS.
    """
    secret = read_secret() if secret is None else check_secret(secret)
    if not secret:
        raise BootstrapError("no secret: expected PYNCCL_SECRET, PYNCCL_SECRET_FILE or the argument secret")
    key = hmac.digest(encode(secret), b"pynccl key for ncclSetEncryption", "sha256")
    capi.ncclSetEncryption({"mode": 1, "psk": key.hex()})
