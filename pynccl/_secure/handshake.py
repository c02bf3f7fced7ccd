"""The mutual authentication of two connected processes by three messages: hello, answer and proof.

With a secret this is Noise (`noise.py`), and all later frames are encrypted. Without a secret both sides
prove with nonces that they know the same key, which may only be a name, and later frames are plain.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol

from pynccl._errors import BootstrapError
from pynccl._secure.secret import derive_key

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

_NONCE, _DIGEST = 16, 32


class Caller(Protocol):
    """The calling side: it sends the hello and checks the answer."""

    hello: bytes

    def finish(self, answer: bytes) -> tuple[bytes, Session | None]:
        """Return the proof and the session that encrypts later frames; raise ValueError for another key."""


class Answerer(Protocol):
    """The answering side: it answers the hello and checks the proof."""

    answer: bytes

    def check(self, proof: bytes) -> Session | None:
        """Return the session that encrypts later frames; raise ValueError for a wrong proof."""


class Scheme(Protocol):
    """A kind of handshake, with the lengths of its messages."""

    secured: bool
    hello_size: int
    answer_size: int
    proof_size: int

    def call(self) -> Caller:
        """Begin a handshake."""

    def meet(self, hello: bytes) -> Answerer:
        """Answer a handshake; raise ValueError if the hello already shows another key."""


class Open:
    """Without a secret: keyed BLAKE2b of two nonces."""

    secured = False
    hello_size, answer_size, proof_size = _NONCE, _NONCE + _DIGEST, _DIGEST

    def __init__(self, key: bytes) -> None:
        self._key = key

    def call(self) -> OpenCaller:
        return OpenCaller(self)

    def meet(self, hello: bytes) -> OpenAnswerer:
        return OpenAnswerer(self, hello)

    def proofs(self, nonces: bytes) -> tuple[bytes, bytes]:
        """Return the proofs of the caller and of the answerer."""
        both = hashlib.blake2b(nonces, key=self._key).digest()
        return both[:_DIGEST], both[_DIGEST:]


class OpenCaller:
    """The caller without a secret: its hello is a nonce."""

    __slots__ = ("_scheme", "hello")

    def __init__(self, scheme: Open) -> None:
        self._scheme, self.hello = scheme, os.urandom(_NONCE)

    def finish(self, answer: bytes) -> tuple[bytes, None]:
        mine, theirs = self._scheme.proofs(self.hello + answer[:_NONCE])
        if not hmac.compare_digest(answer[_NONCE:], theirs):
            raise ValueError("the other side has another key")
        return mine, None


class OpenAnswerer:
    """The answerer without a secret: its answer is a nonce and a proof."""

    __slots__ = ("_expected", "answer")

    def __init__(self, scheme: Open, hello: bytes) -> None:
        nonce = os.urandom(_NONCE)
        self._expected, mine = scheme.proofs(hello + nonce)
        self.answer = nonce + mine

    def check(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._expected):
            raise ValueError("the other side has another key")


class Sealed:
    """With a secret: Noise's messages, then the session's first message, which is empty, as the proof."""

    secured = True
    hello_size = answer_size = 48
    proof_size = 16

    def __init__(self, key: bytes, prologue: bytes) -> None:
        self.noise = load_noise()
        self.start = self.noise.Start(key, prologue)

    def call(self) -> SealedCaller:
        return SealedCaller(self)

    def meet(self, hello: bytes) -> SealedAnswerer:
        return SealedAnswerer(self, hello)


class SealedCaller:
    """The caller with a secret: its hello already shows that it has the secret."""

    __slots__ = ("_initiator", "hello")

    def __init__(self, scheme: Sealed) -> None:
        self._initiator = scheme.noise.Initiator(scheme.start)
        self.hello: bytes = self._initiator.message

    def finish(self, answer: bytes) -> tuple[bytes, Session]:
        session: Session = self._initiator.finish(answer)[1]
        return session.outgoing.seal(b""), session


class SealedAnswerer:
    """The answerer with a secret: the caller's proof shows that the hello was not a recorded one."""

    __slots__ = ("_session", "answer")

    def __init__(self, scheme: Sealed, hello: bytes) -> None:
        _, self.answer, self._session = scheme.noise.respond(scheme.start, hello)

    def check(self, proof: bytes) -> Session:
        session: Session = self._session
        session.incoming.open(proof)
        return session


def load_noise(
    secret: str = "a secret is set (PYNCCL_SECRET, PYNCCL_SECRET_FILE or secret=)", otherwise: str = ""
) -> Any:
    """Import the encryption; an error says where the secret comes from, and what else helps."""
    try:
        return importlib.import_module("pynccl._secure.noise")
    except (ImportError, AttributeError) as error:
        if getattr(error, "name", "") == "pynccl._secure.noise":
            # The installation of pynccl lacks a file, or does not let this user read it.
            raise
        raise BootstrapError(
            f"{secret}, but PyNaCl, which encrypts with it, cannot be imported ({error}): "
            f"pip install pynacl{otherwise}"
        ) from error


def choose(secret: str, purpose: bytes, context: bytes, prologue: bytes) -> Scheme:
    """Return the scheme for a secret ("" for none); both sides must also have an equal context."""
    if secret:
        return Sealed(derive_key(secret, purpose, context), prologue)
    return Open(hashlib.blake2b(prologue + context, person=purpose).digest())
