"""Noise_NNpsk0_25519_ChaChaPoly_BLAKE2b, after https://noiseprotocol.org/noise.html, revision 34.

    -> psk, e
    <- e, ee

The functions are libsodium's, from PyNaCl's low-level binding: its wrappers take several times as long as
the functions themselves. Imported only with a secret.
"""

from __future__ import annotations

import importlib
import os
from hashlib import blake2b
from typing import NamedTuple

# Without types: a type checker need not find it.
_sodium = importlib.import_module("nacl._sodium")
ffi, lib = _sodium.ffi, _sodium.lib

KEY = 32
TAG = 16
# A message of the handshake without a payload.
MESSAGE = KEY + TAG
_PROTOCOL = b"Noise_NNpsk0_25519_ChaChaPoly_BLAKE2b"
_HASH, _BLOCK = 64, 128
_INNER = bytes(byte ^ 0x36 for byte in range(256)), b"\x36" * (_BLOCK - _HASH)
_OUTER = bytes(byte ^ 0x5C for byte in range(256)), b"\x5c" * (_BLOCK - _HASH)

if lib.sodium_init() < 0:
    raise ImportError("libsodium cannot be initialized")


class Cipher:
    """One direction of a connection: a key and the number of messages encrypted or decrypted with it."""

    __slots__ = ("count", "key")

    def __init__(self, key: bytes) -> None:
        self.key, self.count = key, 0

    def _nonce(self) -> bytes:
        count = self.count
        self.count = count + 1
        return b"\0\0\0\0" + count.to_bytes(8, "little")

    def seal(self, body: bytes, also: bytes = b"") -> bytes:
        """Return the encrypted body with a tag that also authenticates the associated data."""
        size = len(body) + TAG
        out = ffi.new("unsigned char[]", size)
        lib.crypto_aead_chacha20poly1305_ietf_encrypt(
            out, ffi.NULL, body, len(body), also, len(also), ffi.NULL, self._nonce(), self.key
        )
        return bytes(ffi.buffer(out, size))

    def open(self, sealed: bytes, also: bytes = b"") -> bytes:
        """Return the decrypted body; raise ValueError unless `seal` made the message with this key."""
        size = len(sealed) - TAG
        out = ffi.new("unsigned char[]", max(1, size))
        if size < 0 or lib.crypto_aead_chacha20poly1305_ietf_decrypt(
            out, ffi.NULL, ffi.NULL, sealed, len(sealed), also, len(also), self._nonce(), self.key
        ):
            raise ValueError("the message was not encrypted with this key")
        return bytes(ffi.buffer(out, size))


class Session(NamedTuple):
    """The ciphers of both directions of a connection after its handshake."""

    outgoing: Cipher
    incoming: Cipher


def _digest(data: bytes) -> bytes:
    return blake2b(data).digest()


def _hkdf(chaining: bytes, material: bytes, outputs: int = 2) -> list[bytes]:
    """Return HKDF's outputs; HMAC is written out, since its key is always as long as the hash."""
    inner, outer = (chaining.translate(table) + rest for table, rest in (_INNER, _OUTER))
    key = _digest(outer + _digest(inner + material))
    inner, outer = (key.translate(table) + rest for table, rest in (_INNER, _OUTER))
    found = [b""]
    for number in range(1, outputs + 1):
        found.append(_digest(outer + _digest(inner + found[-1] + bytes((number,)))))
    return found[1:]


def _exchange(private: bytes, public: bytes) -> bytes:
    shared = ffi.new("unsigned char[32]")
    if lib.crypto_scalarmult(shared, private, public):
        raise ValueError("the public key gives no shared key")
    return bytes(ffi.buffer(shared))


class _Symmetric:
    """Noise's SymmetricState: hash, chaining key, and the cipher of the handshake."""

    __slots__ = ("chaining", "cipher", "hash")

    def __init__(self, hash_: bytes, chaining: bytes, key: bytes) -> None:
        self.hash, self.chaining, self.cipher = hash_, chaining, Cipher(key)

    def mix_hash(self, data: bytes) -> None:
        self.hash = _digest(self.hash + data)

    def mix_key(self, material: bytes) -> None:
        self.chaining, key = _hkdf(self.chaining, material)
        self.cipher = Cipher(key[:KEY])

    def mix_public(self, public: bytes) -> None:
        """Token "e" of a handshake with a pre-shared key."""
        self.mix_hash(public)
        self.mix_key(public)

    def seal(self, payload: bytes) -> bytes:
        sealed = self.cipher.seal(payload, self.hash)
        self.mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        payload = self.cipher.open(sealed, self.hash)
        self.mix_hash(sealed)
        return payload

    def split(self) -> tuple[Cipher, Cipher]:
        first, second = _hkdf(self.chaining, b"")
        return Cipher(first[:KEY]), Cipher(second[:KEY])


class Start:
    """The common start of all handshakes with one key and one prologue: the state before the first "e"."""

    __slots__ = ("_chaining", "_hash", "_key")

    def __init__(self, psk: bytes, prologue: bytes) -> None:
        name = _PROTOCOL.ljust(_HASH, b"\0")
        self._chaining, mixed, key = _hkdf(name, psk, 3)
        self._hash = _digest(_digest(name + prologue) + mixed)
        self._key = key[:KEY]

    def state(self) -> _Symmetric:
        return _Symmetric(self._hash, self._chaining, self._key)


def _ephemeral(private: bytes | None) -> tuple[bytes, bytes]:
    """Return a new key pair; tests of published vectors replace it."""
    private = os.urandom(KEY) if private is None else private
    public = ffi.new("unsigned char[32]")
    lib.crypto_scalarmult_base(public, private)
    return private, bytes(ffi.buffer(public))


class Initiator:
    """The side that begins: it sends `message` to the other side."""

    __slots__ = ("_private", "_state", "message")

    def __init__(self, start: Start, payload: bytes = b"", private: bytes | None = None) -> None:
        self._state = start.state()
        self._private, public = _ephemeral(private)
        self._state.mix_public(public)
        self.message = public + self._state.seal(payload)

    def finish(self, answer: bytes) -> tuple[bytes, Session]:
        """Return the payload of the answer and the session; ValueError for an answer without the key."""
        state, public = self._state, answer[:KEY]
        if len(public) < KEY:
            raise ValueError("the message has no public key")
        state.mix_public(public)
        state.mix_key(_exchange(self._private, public))
        payload = state.open(answer[KEY:])
        mine, theirs = state.split()
        return payload, Session(mine, theirs)


def respond(
    start: Start, message: bytes, payload: bytes = b"", private: bytes | None = None
) -> tuple[bytes, bytes, Session]:
    """Return the payload of a first message, the answer and the session; raise ValueError without the key.

    The answer depends on the key only if the message was made with the key. The message may be
    a recorded one: only the caller's next message proves that it is not.
    """
    state, public = start.state(), message[:KEY]
    if len(public) < KEY:
        raise ValueError("the message has no public key")
    state.mix_public(public)
    received = state.open(message[KEY:])
    secret, mine = _ephemeral(private)
    state.mix_public(mine)
    state.mix_key(_exchange(secret, public))
    answer = mine + state.seal(payload)
    theirs, ours = state.split()
    return received, answer, Session(ours, theirs)


def native_functions() -> tuple[int, int]:
    """Return the addresses of libsodium's encryption and decryption, for native code."""
    names = "crypto_aead_chacha20poly1305_ietf_encrypt", "crypto_aead_chacha20poly1305_ietf_decrypt"
    seal, open_ = (int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names)
    return seal, open_
