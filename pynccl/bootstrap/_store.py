"""The client of the TCP key-value store through which ranks find each other.

`_server.py` is the server, `_frames.py` the protocol, `handshake.py` the authentication.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pynccl._base import timeouts
from pynccl._base.forks import open_socket
from pynccl._base.timeouts import check_timeout
from pynccl._base.values import check_int, check_list, check_text
from pynccl._errors import BootstrapError
from pynccl._secure import handshake
from pynccl._secure.secret import check_secret, encode, read_secret
from pynccl.bootstrap import _frames as f
from pynccl.bootstrap._address import format_address as format_address
from pynccl.bootstrap._address import parse_address as parse_address
from pynccl.bootstrap._address import resolve
from pynccl.bootstrap._frames import MAX_FRAME as MAX_FRAME
from pynccl.bootstrap._peer import GONE, SockDiag, why_not
from pynccl.bootstrap._server import StoreServer as StoreServer
from pynccl.bootstrap._server import resolve_job

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

log = logging.getLogger("pynccl")

# Seconds that the answer to a wait may be late: the server's tick and the network.
_MARGIN = 0.5
# Seconds in which a host name may become known while a cluster starts.
_UNRESOLVED_SECONDS = 15.0
_CLOSE_SECONDS = 1.0
_MOST_NAMED = 8
_LONGEST_KEY = 0xFFFF
# A send of up to this number of bytes never blocks, since the previous request was answered.
_FITS = 2048
# Bytes of an answer that one call receives. Python allocates them all, however short the answer is.
_AT_ONCE = 4096
# Socket time-outs up to this number of seconds are set exactly.
_SHORT = 0.05
# Errors that a later attempt to connect cannot change.
_HOPELESS = (errno.EMFILE, errno.ENFILE, errno.EAFNOSUPPORT, errno.EACCES, errno.EPERM, errno.EINVAL)


class _Silent(BootstrapError):
    """The connection was accepted, but the peer does not answer."""


class StoreLost(BootstrapError):
    """Report that the connection to the store ended, most likely with the store's process."""


class StoreEnded(StoreLost):
    """Report that the store's process has closed it; `last_word` says why."""

    def __init__(self, text: str, last_word: bytes) -> None:
        super().__init__(text)
        self.last_word = last_word


class StoreSilent(BootstrapError):
    """Report that the store has not answered in time; its process may only be suspended."""


class Connection:
    """A connection to the store, in steps, so that a simulation can interleave many connections."""

    def __init__(self, sock: socket.socket, scheme: handshake.Scheme) -> None:
        self.sock, self._scheme = sock, scheme
        # True after the first answer.
        self.accepted = False
        # True while an answer is outstanding; if its request was given up, the answer is dropped.
        self.owed = False
        self._came = b""
        self._session: Session | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handshake = scheme.call()
        # Use the kernel's time-outs: Python's need three system calls for each send and each answer.
        if sock.gettimeout() is not None:
            sock.settimeout(None)
        self._limit = 0.0
        sock.sendall(f.HELLO + (f.SECURED if scheme.secured else f.OPEN) + self._handshake.hello)

    def prove(self, deadline: float, *, more: bool = False) -> None:
        """Verify that the server has the key, and prove that this side has it.

        With `more` the proof is sent together with the request that follows immediately.
        """
        answer = self._answer_to_hello(deadline)
        if not self._scheme.secured:
            with closing(SockDiag()) as diag:
                reason = why_not(self.sock, diag)
            if reason == GONE:
                # A store that ends: the next one may listen at this address soon.
                raise ConnectionError(reason)
            if reason:
                raise BootstrapError(
                    f"{reason}, so it may not be the job's store; "
                    "set PYNCCL_SECRET if ranks have several users"
                )
        try:
            proof, self._session = self._handshake.finish(answer)
        except ValueError:
            with suppress(OSError):
                self.sock.sendall(f.REFUSES)
            raise self._stranger() from None
        # With MSG_MORE the kernel delays the proof by 200 ms at most.
        self.sock.sendall(proof, socket.MSG_MORE if more else 0)

    def _answer_to_hello(self, deadline: float) -> bytes:
        came, end = b"", f.BEGINNING
        while len(came) < end:
            came += self._receive(f.BEGINNING + self._scheme.answer_size - len(came), deadline)
            if not came.startswith(f.HELLO[: len(came)]):
                raise BootstrapError("it is not a pynccl store")
            verdict = came[len(f.HELLO) : f.BEGINNING]
            if verdict:
                self._check(verdict)
                end = f.BEGINNING + self._scheme.answer_size
        return came[f.BEGINNING :]

    def _check(self, verdict: bytes) -> None:
        """Raise if the server refused this client; a side with a secret never connects without it."""
        secured = self._scheme.secured
        if verdict == f.REFUSES:
            raise self._stranger()
        if verdict == f.OPEN and secured:
            raise BootstrapError("it has no secret, but this process has one (PYNCCL_SECRET)")
        if verdict == f.SECURED and not secured:
            raise BootstrapError("it requires a secret, but this process has none; set PYNCCL_SECRET")

    def _stranger(self) -> BootstrapError:
        secret = "the secret (PYNCCL_SECRET) or " if self._scheme.secured else ""
        return BootstrapError(f"{secret}the id of the job (PYNCCL_JOB_ID) differs from the store's")

    def ask(self, frame: bytes, deadline: float) -> None:
        """Send a request, after the answer to an abandoned request has arrived."""
        if self.owed:
            self.answer(deadline)
        if self._came:
            # Only the last word of the server comes without a request: it is the answer.
            self.owed = True
            return
        if self._session is not None:
            frame = self._session.outgoing.seal(frame)
        if len(frame) > _FITS:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_left(deadline)))
        try:
            self.sock.sendall(f.LENGTH.pack(len(frame)) + frame)
        except BlockingIOError as error:
            raise _Silent("it did not accept the request in time") from error
        except ConnectionError:
            # The server has ended. `answer` reads its last word, or raises the same error.
            pass
        self.owed = True

    def add(self, frame: bytes) -> None:
        """Send a last request behind one without an answer, if the kernel accepts it immediately."""
        if self._session is not None:
            frame = self._session.outgoing.seal(frame)
        self.sock.send(f.LENGTH.pack(len(frame)) + frame, socket.MSG_DONTWAIT)

    def answer(self, deadline: float) -> tuple[int, bytes]:
        """Return status and value of the answer; raise StoreEnded with the last word of the server."""
        while len(self._came) < (end := self._end()):
            self._came += self._receive(max(_AT_ONCE, end - len(self._came)), deadline)
        # Only the server's last word can follow the answer, since the next request has not been sent.
        body, self._came = self._came[f.LENGTH.size : end], self._came[end:]
        self.owed, self.accepted = False, True
        if self._session is not None:
            body = self._session.incoming.open(body)
        if body[0] == f.ENDED:
            raise StoreEnded("the store was closed by its process", body[1:])
        return body[0], body[1:]

    def _end(self) -> int:
        """Return the bytes up to the end of the next frame, or of its length field."""
        if len(self._came) < f.LENGTH.size:
            return f.LENGTH.size
        (size,) = f.LENGTH.unpack_from(self._came)
        if not 0 < size <= f.MAX_SEALED:
            raise ValueError(f"a frame has {size} bytes; expected 1 to {f.MAX_SEALED}")
        return f.LENGTH.size + int(size)

    def _receive(self, most: int, deadline: float) -> bytes:
        """Return the next bytes, at least one."""
        while True:
            self._bound(deadline)
            try:
                data = self.sock.recv(most)
            except BlockingIOError as error:
                # The socket's time-out may be earlier than the deadline.
                if time.monotonic() < deadline:
                    continue
                raise _Silent("it did not answer in time") from error
            if not data:
                raise ConnectionError("the connection was closed")
            return data

    def _bound(self, deadline: float) -> None:
        """Set a socket time-out that ends at the deadline or earlier; several requests share one setting."""
        left = _left(deadline)
        if not left / 2 <= self._limit <= left:
            self._limit = left if left < _SHORT else left * 0.75
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._limit))


class Store:
    """A client of a StoreServer; `timeout` bounds every call, unless the call has its own.

    `secret` is by default PYNCCL_SECRET, and "" means none. `secret` and `job` must be those of the server.
    Threads may share a store, but their calls run one after another. A forked child opens a connection of its
    own. Calls raise TimeoutError if a value is not set in time, and BootstrapError if the store is lost, does
    not answer in time, or refuses.
    """

    # True if the first request follows immediately, so that the proof can be sent with it.
    _prompt = False
    # True if the store has listened before, so that a refusal means its end.
    _known = False

    def __init__(
        self, address: str, secret: str | None = None, *, job: str | None = None, timeout: float = 300.0
    ) -> None:
        self.address, self.timeout = address, _seconds(timeout)
        self._where = parse_address(address)
        secret = read_secret() if secret is None else check_secret(secret)
        self._scheme = handshake.choose(secret, f.PURPOSE, encode(resolve_job(job)), f.HELLO)
        self._lock, self._pid, self._closed = threading.RLock(), os.getpid(), False
        self._met = self._known
        self._name = os.urandom(f.IDENTITY)
        self._will: tuple[str, bytes] | None = None
        self._connection: Connection | None = self._connect(self.timeout, more=self._prompt)
        self._met = True

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set a key and wake its waiters."""
        self._call(f.SET, key, _bytes(key, value), timeout)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Wait until a key is set and return its value; raise TimeoutError after `timeout` seconds."""
        status, value = self._call(f.GET, key, self._milliseconds(timeout), timeout)
        if status == f.MISSING:
            raise self._nobody_set([key], timeout)
        return value

    def wait(self, keys: str | Iterable[str], timeout: float | None = None) -> None:
        """Wait until all of these keys are set; TimeoutError names some of the missing keys."""
        keys = [keys] if isinstance(keys, str) else check_list(keys, "keys", "a key or a list of keys")
        for index, key in enumerate(keys):
            check_text(key, f"keys[{index}]")
        deadline = time.monotonic() + self._seconds(timeout)
        for index, key in enumerate(keys):
            if not self._is_set(key, max(0.0, deadline - time.monotonic())):
                rest = [key, *(other for other in keys[index + 1 :] if not self._is_set(other, 0.0))]
                raise self._nobody_set(rest, timeout)

    def _is_set(self, key: str, timeout: float) -> bool:
        return self._call(f.WAIT, key, self._milliseconds(timeout), timeout)[0] == f.OK

    def add(self, key: str, number: int, timeout: float | None = None) -> int:
        """Add to the number under a key (0 if not set) and return the sum."""
        number = check_int(number, "number", -(1 << 63), 1 << 63, "a signed 64-bit integer")
        return int(self._call(f.ADD, key, f.INT64.pack(number), timeout)[1])

    def barrier(self, name: str, count: int, timeout: float | None = None) -> None:
        """Return when `count` clients have entered the barrier `name`; the barrier can be used again."""
        check_text(name, "name")
        count = check_int(count, "count", 1, 1 << 32, "the number of clients, at least 1")
        seconds = self._seconds(timeout)
        argument = f.BARRIER_ARGUMENT.pack(int(seconds * 1000), count)
        status, value = self._call(f.BARRIER, name, argument, timeout)
        if status == f.MISSING:
            raise TimeoutError(
                f"barrier {name!r} of the store at {self.address}: "
                f"{int(value)} of {count} clients arrived within {seconds:g} s"
            )

    def delete(self, key: str, timeout: float | None = None) -> bool:
        """Remove a key and return whether it was set."""
        return self._call(f.DELETE, key, b"", timeout)[1] == b"1"

    def will(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Have the server set a key if this process dies, unless the key is set; each client has one will."""
        self._will = check_text(key, "key"), _bytes(key, value)
        self._call(f.WILL, key, self._name + self._will[1], timeout)

    def withdraw(self, timeout: float | None = None) -> None:
        """Cancel the will."""
        if self._will is not None:
            self._will = None
            self._call(f.WILL, "", self._name, timeout)

    def close(self) -> None:
        """Close the connection and cancel the will; the keys stay."""
        if self._connection is not None and self._pid == os.getpid():
            # If the server has ended, the will has ended with it.
            with suppress(BootstrapError, TimeoutError, OSError):
                if self._connection.owed:
                    self._withdraw_unheard(self._connection)
                else:
                    self.withdraw(_CLOSE_SECONDS)
        self._closed = True
        self._disconnect()

    def _withdraw_unheard(self, connection: Connection) -> None:
        """Cancel the will without waiting for a server that has not answered an earlier request."""
        # Another thread, or the call that a signal handler interrupts, may be sending.
        if self._will is None or self._is_interrupted() or not self._lock.acquire(blocking=False):
            return
        try:
            connection.add(_frame(f.WILL, "", self._name))
        finally:
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else _seconds(timeout)

    def _milliseconds(self, timeout: float | None) -> bytes:
        return f.INT64.pack(int(self._seconds(timeout) * 1000))

    def _nobody_set(self, keys: list[str], timeout: float | None) -> TimeoutError:
        names = ", ".join(map(repr, keys[:_MOST_NAMED])) + (", ..." if len(keys) > _MOST_NAMED else "")
        return TimeoutError(
            f"no client set {names} in the store at {self.address} within {self._seconds(timeout):g} s"
        )

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.sock.close()

    def _call(self, op: int, key: str, argument: bytes, timeout: float | None) -> tuple[int, bytes]:
        seconds = self._seconds(timeout)
        frame = _frame(op, key, argument)
        if self._pid != os.getpid():
            self._lock, self._pid, self._will = threading.RLock(), os.getpid(), None
            self._disconnect()
        if self._is_interrupted():
            raise BootstrapError(
                f"the store at {self.address} is in use by the call that this signal handler interrupted"
            )
        deadline = time.monotonic() + seconds + _MARGIN
        try:
            if not self._lock.acquire(timeout=seconds + _MARGIN):
                raise TimeoutError(f"another thread used the store at {self.address} for {seconds:g} s")
            status, value = self._exchange(frame, deadline)
        finally:
            # A signal handler may raise before the result of `acquire` arrives, or here: only the lock knows
            # its owner, whose next call releases it.
            with suppress(RuntimeError):
                while True:
                    self._lock.release()
        if status == f.REFUSED:
            raise BootstrapError(f"the store at {self.address} refused {key!r}: {value.decode()}")
        return status, value

    def _is_interrupted(self) -> bool:
        """Tell whether the caller is a signal handler that interrupts a call of this store."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is Store._call.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _exchange(self, frame: bytes, deadline: float) -> tuple[int, bytes]:
        if self._closed:
            raise BootstrapError(f"the connection to the store at {self.address} was closed by this process")
        keep = False
        try:
            if self._connection is None:
                self._connection = self._connect(_left(deadline), more=True)
                if self._will is not None:
                    key, value = self._will
                    self._until_accepted(self._connection, _frame(f.WILL, key, self._name + value), deadline)
            answer = self._until_accepted(self._connection, frame, deadline)
            keep = True
        except ConnectionError as error:
            raise StoreLost(f"lost the store at {self.address}: {error}") from error
        except _Silent as error:
            keep = self._connection is not None and self._connection.owed and self._connection.accepted
            raise StoreSilent(f"the store at {self.address} does not respond: {error}") from error
        except (OSError, ValueError) as error:
            raise BootstrapError(f"lost the store at {self.address}: {error}") from error
        finally:
            # After an interruption a part of the answer may be lost: drop the connection.
            if not keep:
                self._disconnect()
        return answer

    def _until_accepted(self, connection: Connection, frame: bytes, deadline: float) -> tuple[int, bytes]:
        """Exchange; reconnect if a busy server drops the connection before it has read the proof."""
        while True:
            try:
                connection.ask(frame, deadline)
                return connection.answer(deadline)
            except ConnectionError:
                if connection.accepted or time.monotonic() >= deadline:
                    raise
            self._disconnect()
            # This fails if the server has ended.
            connection = self._connection = self._attempt(deadline, more=True)

    def _connect(self, timeout: float, *, more: bool) -> Connection:
        """Connect and authenticate; retry until the server listens."""
        start = time.monotonic()
        deadline = start + timeout
        delay, late = 0.01, start + timeouts.LATE
        while True:
            try:
                return self._attempt(deadline, more=more)
            except BootstrapError as error:
                raise BootstrapError(
                    f"the store at {self.address} did not accept this process: {error}"
                ) from error
            except OSError as error:
                gone = self._met and isinstance(error, ConnectionRefusedError)
                over = gone or time.monotonic() >= deadline or error.errno in _HOPELESS
                if isinstance(error, socket.gaierror):
                    over = over or time.monotonic() - start > _UNRESOLVED_SECONDS
                if over:
                    seconds = min(timeout, time.monotonic() - start)
                    raise (StoreLost if gone else BootstrapError)(
                        f"no store answered at {self.address} within {seconds:.3g} s: {error}"
                    ) from error
                if time.monotonic() >= late:
                    late = math.inf
                    text = "no store has answered at %s for %g s: %s; this process goes on trying for %.3g s"
                    log.warning(text, self.address, timeouts.LATE, error, _left(deadline))
            time.sleep(min(delay, _left(deadline)))
            delay = min(2 * delay, 0.5)

    def _attempt(self, deadline: float, *, more: bool) -> Connection:
        addresses = resolve(*self._where, _left(deadline))
        for index, (family, where) in enumerate(addresses):
            sock = open_socket(family)
            try:
                # Leave time for the other addresses if one does not respond.
                sock.settimeout(_left(deadline) / (len(addresses) - index))
                sock.connect(where)
                connection = Connection(sock, self._scheme)
                connection.prove(deadline, more=more)
                return connection
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError) or index == len(addresses) - 1:
                    raise
        raise AssertionError("a name without addresses")


class PromptStore(Store):
    """A store that sends its proof together with its first request, which must follow immediately."""

    _prompt = True


class KnownStore(PromptStore):
    """A store that has listened before: the constructor raises StoreLost if it no longer does."""

    _known = True


def _bytes(key: str, value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"value of {key!r} is {value!r:.100}; expected bytes")
    return bytes(value)


def _frame(op: int, key: str, argument: bytes) -> bytes:
    name = check_text(key, "key").encode()
    if len(name) > _LONGEST_KEY:
        raise ValueError(f"key {key[:40]!r} has {len(name)} bytes; expected at most {_LONGEST_KEY}")
    frame = f.REQUEST.pack(op, len(name)) + name + argument
    if len(frame) >= f.MAX_FRAME:
        room = f.MAX_FRAME - 1 - f.REQUEST.size
        raise ValueError(
            f"key {key[:40]!r} and its value take {len(name) + len(argument)} bytes; expected at most {room}"
        )
    return frame


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _left(deadline: float) -> float:
    """Return the seconds left, but more than 0, since 0 makes a socket non-blocking."""
    return max(0.001, deadline - time.monotonic())


def _seconds(timeout: float) -> float:
    check_timeout(timeout, zero=True, optional=False)
    return min(float(timeout), f.LONGEST_SECONDS)
