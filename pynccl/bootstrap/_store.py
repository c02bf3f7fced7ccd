"""A small TCP key-value store through which ranks find each other.

The server is one thread that serves every connection. A connection begins with a challenge, which both sides
answer by an HMAC of the job's token; then come frames: a length of 4 bytes, and so many bytes.

    request    op (1 byte), length of the key (2 bytes), key, argument
    answer     status (1 byte), value

Nothing is pickled, and every length is bounded before memory is given to it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

from pynccl._errors import BootstrapError

MAX_FRAME = 1 << 20
_MAX_KEYS = 1 << 20
_NONCE = 16
_HELLO = b"pynccl-store-1\n\0"
_GREETING = len(_HELLO) + _NONCE
_DIGEST = 32
# A connection that has not proved the token by then, or whose output nobody reads, is dropped.
_HELLO_SECONDS = 10.0
_TICK = 0.05
_MAX_OUTPUT = 4 * MAX_FRAME
_MARGIN = 5.0
_SET, _GET, _ADD, _TIE = 1, 2, 3, 4
_OK, _MISSING, _BAD = 0, 1, 2
_LENGTH, _REQUEST, _INT64 = struct.Struct("!I"), struct.Struct("!BH"), struct.Struct("!q")
_FOREVER_MS = (1 << 63) - 1


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"pynccl store " + role + nonces, "sha256")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port"."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"expected host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """Return the text that parse_address reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Connection:
    """One client as the server sees it: bytes to read, bytes to write, and what it waits for."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.nonce = secrets.token_bytes(_NONCE)
        self.trusted = False
        self.input = bytearray()
        self.output = bytearray(_HELLO + self.nonce)
        self.events = selectors.EVENT_READ
        self.waits_for: bytes | None = None
        # What is set when the connection ends.
        self.ties: dict[bytes, bytes] = {}
        self.deadline = now + _HELLO_SECONDS

    def frames(self) -> Iterator[bytes]:
        """Yield the complete requests; they wait while an earlier one of the same client does."""
        while self.waits_for is None and len(self.input) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.input)
            if not _REQUEST.size <= length <= MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if len(self.input) < _LENGTH.size + length:
                return
            frame = bytes(self.input[_LENGTH.size : _LENGTH.size + length])
            del self.input[: _LENGTH.size + length]
            yield frame

    def answer(self, status: int, value: bytes = b"") -> None:
        self.output += _LENGTH.pack(1 + len(value)) + bytes([status]) + value
        if len(self.output) > _MAX_OUTPUT:
            raise ValueError("too much unread output")


class StoreServer:
    """Serve a store from a thread of this process; a context manager."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = secrets.token_hex(16) if token is None else token
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=4096)
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._data: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Connection]] = {}
        self._connections: set[_Connection] = set()
        self._timed: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._next_expiry = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="pynccl-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return what clients connect to, as host:port."""
        return format_address(self.host, self.port)

    def close(self) -> None:
        """End the thread and every connection; harmless when done twice or in a forked child."""
        if self._thread is not None and self._pid == os.getpid() and self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            running = True
            while running:
                # A coarse tick is enough for the deadlines, and cheaper than a heap of them.
                events = self._selector.select(_TICK if self._timed else None)
                for key, mask in events:
                    if key.fileobj is self._woken:
                        running = False
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._connections:
                        self._handle(key.data, mask)
                self._expire()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # Out of file descriptors: leave the rest in the backlog instead of spinning on it.
            time.sleep(0.01)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock, time.monotonic())
        self._connections.add(connection)
        self._timed.add(connection)
        self._selector.register(sock, connection.events, connection)
        self._flush(connection)

    def _handle(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = connection.sock.recv(65536)
                if not data:
                    raise ConnectionError("closed by the client")
                connection.input += data
                self._progress(connection)
            self._flush(connection)
        except BlockingIOError:
            pass
        except (OSError, ValueError, struct.error):
            self._drop(connection)

    def _progress(self, connection: _Connection) -> None:
        if not connection.trusted and not self._authenticate(connection):
            return
        for frame in connection.frames():
            self._request(connection, frame)
        if len(connection.input) > _LENGTH.size + MAX_FRAME:
            raise ValueError("too many requests at once")

    def _authenticate(self, connection: _Connection) -> bool:
        if len(connection.input) < _NONCE + _DIGEST:
            return False
        theirs, proof = bytes(connection.input[:_NONCE]), bytes(connection.input[_NONCE : _NONCE + _DIGEST])
        del connection.input[: _NONCE + _DIGEST]
        nonces = connection.nonce + theirs
        if not hmac.compare_digest(proof, _proof(self.token, b"client", nonces)):
            raise ValueError("wrong token")
        connection.trusted = True
        self._timed.discard(connection)
        connection.output += _proof(self.token, b"server", nonces)
        return True

    def _request(self, connection: _Connection, frame: bytes) -> None:
        op, key_length = _REQUEST.unpack_from(frame)
        key = frame[_REQUEST.size : _REQUEST.size + key_length]
        argument = frame[_REQUEST.size + key_length :]
        if len(frame) < _REQUEST.size + key_length:
            raise ValueError(f"a key of {key_length} bytes in a frame of {len(frame)}")
        if op == _SET:
            self._store(key, argument)
            connection.answer(_OK)
        elif op == _ADD:
            number = int(self._data.get(key, b"0")) + _INT64.unpack(argument)[0]
            self._store(key, b"%d" % number)
            connection.answer(_OK, b"%d" % number)
        elif op == _GET:
            self._get(connection, key, _INT64.unpack(argument)[0])
        elif op == _TIE:
            connection.ties[key] = argument
            if not argument:
                del connection.ties[key]
            connection.answer(_OK)
        else:
            raise ValueError(f"unknown operation {op}")

    def _store(self, key: bytes, value: bytes) -> None:
        if key not in self._data and len(self._data) >= _MAX_KEYS:
            raise ValueError("too many keys")
        self._data[key] = value
        for waiter in self._waiting.pop(key, set()):
            self._resume(waiter, _OK, value)

    def _get(self, connection: _Connection, key: bytes, timeout_ms: int) -> None:
        if key in self._data:
            connection.answer(_OK, self._data[key])
        elif timeout_ms <= 0:
            connection.answer(_MISSING)
        else:
            connection.waits_for = key
            connection.deadline = time.monotonic() + timeout_ms / 1000
            self._waiting.setdefault(key, set()).add(connection)
            self._timed.add(connection)

    def _resume(self, connection: _Connection, status: int, value: bytes = b"") -> None:
        """Answer a client that waited, and go on with what it has sent since."""
        connection.waits_for = None
        self._timed.discard(connection)
        try:
            connection.answer(status, value)
            self._progress(connection)
            self._flush(connection)
        except BlockingIOError:
            pass
        except (OSError, ValueError, struct.error):
            self._drop(connection)

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _TICK
        for connection in [c for c in self._timed if c.deadline <= now]:
            if connection.waits_for is None:
                self._drop(connection)
                continue
            self._forget_wait(connection)
            self._resume(connection, _MISSING)

    def _forget_wait(self, connection: _Connection) -> None:
        waiters = self._waiting.get(connection.waits_for or b"", set())
        waiters.discard(connection)
        if not waiters:
            self._waiting.pop(connection.waits_for or b"", None)

    def _flush(self, connection: _Connection) -> None:
        if connection.output:
            try:
                del connection.output[: connection.sock.send(connection.output)]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection)
                return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.output else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._timed.discard(connection)
            self._forget_wait(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
            for key, value in connection.ties.items():
                with suppress(ValueError):
                    self._store(key, value)


class Store:
    """A client of a StoreServer; every call is bounded in time, by default by the timeout given here."""

    def __init__(self, address: str, token: str = "", *, timeout: float = 300.0) -> None:
        self.address, self.timeout, self._token = address, timeout, token
        self._lock = threading.Lock()
        self._sock: socket.socket | None = self._connect(timeout)

    def _connect(self, timeout: float) -> socket.socket:
        """Connect and prove the token to each other, trying again as long as nobody listens yet."""
        deadline = time.monotonic() + timeout
        reason: Exception = TimeoutError("timed out")
        delay = 0.01
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = socket.create_connection(parse_address(self.address), timeout=left)
            except OSError as error:
                reason = error
                time.sleep(min(delay, max(0.0, deadline - time.monotonic())))
                delay = min(2 * delay, 0.5)
                continue
            try:
                self._greet(sock)
            except (OSError, BootstrapError) as error:
                sock.close()
                raise BootstrapError(
                    f"the store at {self.address} did not accept this process: {error}"
                ) from error
            return sock
        raise BootstrapError(
            f"no store answered at {self.address} within {timeout:.3g} s: {reason}"
        ) from reason

    def _greet(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _receive(sock, _GREETING)
        if not greeting.startswith(_HELLO):
            raise BootstrapError("it is no pynccl store")
        nonce = secrets.token_bytes(_NONCE)
        nonces = greeting[len(_HELLO) :] + nonce
        sock.sendall(nonce + _proof(self._token, b"client", nonces))
        try:
            proof = _receive(sock, _DIGEST)
        except ConnectionError as error:
            raise BootstrapError("the token (PYNCCL_STORE_TOKEN) is not the job's") from error
        if not hmac.compare_digest(proof, _proof(self._token, b"server", nonces)):
            raise BootstrapError("it does not know the job's token")

    def set(self, key: str, value: bytes) -> None:
        """Set a key, and wake who waits for it."""
        self._call(_SET, key, value, 0)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Return the value of a key, waiting until it is set; TimeoutError when that takes too long."""
        seconds = self.timeout if timeout is None else timeout
        status, value = self._call(
            _GET, key, _INT64.pack(min(int(max(seconds, 0) * 1000), _FOREVER_MS)), seconds
        )
        if status == _MISSING:
            raise TimeoutError(f"nobody set {key!r} in the store at {self.address} within {seconds:g} s")
        return value

    def add(self, key: str, number: int) -> int:
        """Add to the number under a key (0 when it is not set) and return the sum."""
        return int(self._call(_ADD, key, _INT64.pack(number), 0)[1])

    def tie(self, key: str, value: bytes) -> None:
        """Have a key set when this connection ends, however that comes; an empty value undoes it."""
        self._call(_TIE, key, value, 0)

    def close(self) -> None:
        """Close the connection; the keys stay."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, op: int, key: str, argument: bytes, wait: float) -> tuple[int, bytes]:
        name = key.encode()
        frame = _REQUEST.pack(op, len(name)) + name + argument
        if len(name) > 0xFFFF or len(frame) > MAX_FRAME - 1:
            raise ValueError(
                f"key {key[:40]!r}: {len(frame)} bytes are more than the store takes ({MAX_FRAME})"
            )
        # The server answers a wait in time; the margin is for its tick and for the way back.
        seconds = wait + _MARGIN if op == _GET else max(self.timeout, _MARGIN)
        with self._lock:
            sock = self._sock or self._connect(_MARGIN)
            # Interrupted, half an answer may still be on its way: only a whole one keeps the connection.
            self._sock = None
            try:
                answer = self._exchange(sock, frame, seconds)
            except OSError as error:
                raise BootstrapError(f"lost the store at {self.address}: {error}") from error
            finally:
                if self._sock is None:
                    sock.close()
        return answer[0], answer[1:]

    def _exchange(self, sock: socket.socket, frame: bytes, seconds: float) -> bytes:
        sock.settimeout(seconds)
        sock.sendall(_LENGTH.pack(len(frame)) + frame)
        (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
        if not 0 < length <= MAX_FRAME:
            raise BootstrapError(f"the store at {self.address} answered a frame of {length} bytes")
        answer = _receive(sock, length)
        self._sock = sock
        return answer


def _receive(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = sock.recv(size - len(parts))
        if not data:
            raise ConnectionError("the connection was closed")
        parts += data
    return bytes(parts)
