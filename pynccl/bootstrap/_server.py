"""The server of the store: one thread serves all connections and bounds the memory of unknown clients."""

from __future__ import annotations

import base64
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from pynccl._base.forks import accept, open_socket
from pynccl._base.host import SHORTAGES
from pynccl._base.timeouts import check_timeout
from pynccl._base.values import check_int, check_text, shown
from pynccl._secure import handshake
from pynccl._secure.secret import check_secret, encode, read_secret
from pynccl.bootstrap import _frames as f
from pynccl.bootstrap._address import format_address, is_loopback, resolve
from pynccl.bootstrap._peer import UNKNOWN, SockDiag, why_not

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

log = logging.getLogger("pynccl")

# Most bytes of values and wills. Waits may use more, so that clients can wait while the store is full. A key
# costs more than its bytes.
_MAX_BYTES = 1 << 28
_MAX_WAITS = 1 << 26
_KEY_BYTES = 256
# Most bytes of incomplete requests. Beyond it each client may have a small request, and the oldest any.
_MAX_UNREAD = 1 << 26
_SMALL = 4096
_MAX_OUTPUT = 4 * f.MAX_FRAME
_TICK = 0.05
# Seconds in which a disconnected client may reconnect before its will is carried out.
_WILL_SECONDS = 0.5
# Unauthenticated connections: their longest life in seconds, their highest number, and the highest rate at
# which the oldest are dropped beyond this number, so that every client has time for its proof.
_HELLO_SECONDS = 10.0
_MOST_PENDING = 4096
_EVICTIONS_PER_SECOND = 8192
_ACCEPTS_AT_ONCE = 64
_MOST_UNTRUSTED = 4096
_NUMBER = re.compile(rb"-?[0-9]{1,20}")
_READ, _WRITE, _ENDED = 0x001, 0x004, 0x018  # EPOLLIN, EPOLLOUT, EPOLLERR and EPOLLHUP


class _StoreThread(threading.Thread):
    """Serves a store."""


class _Refused(Exception):
    """A request that the store refuses; the client gets the text."""


class _Connection:
    """The server's state of one client."""

    __slots__ = (
        "arrived",
        "counted",
        "deadline",
        "fd",
        "handshake",
        "input",
        "output",
        "session",
        "sock",
        "trusted",
        "wait",
        "will",
    )

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock, self.fd = sock, sock.fileno()
        self.arrived = now
        # Set after the client's hello; `trusted` after its proof.
        self.handshake: handshake.Answerer | None = None
        self.trusted = False
        # Encrypts the frames if there is a secret.
        self.session: Session | None = None
        self.input, self.output = bytearray(), bytearray()
        # Bytes of the input that the server's `_unread` includes.
        self.counted = 0
        # Operation and key that the client waits for, and the deadline of the wait.
        self.wait: tuple[int, bytes] | None = None
        self.deadline = 0.0
        # The client's identity, the key and the value.
        self.will: tuple[bytes, bytes, bytes] | None = None

    def next_frame(self) -> bytes | None:
        """Take a complete request from the input; None while the client's previous request waits."""
        if self.wait is not None or len(self.input) < f.LENGTH.size:
            return None
        (length,) = f.LENGTH.unpack_from(self.input)
        if not f.REQUEST.size <= length <= f.MAX_SEALED:
            raise ValueError(f"a frame has {length} bytes; expected at most {f.MAX_SEALED}")
        end = f.LENGTH.size + length
        if len(self.input) < end:
            return None
        frame = bytes(self.input[f.LENGTH.size : end])
        del self.input[:end]
        return frame if self.session is None else self.session.incoming.open(frame)


class StoreServer:
    """Serve a store from a thread of this process; a context manager.

    `secret` is by default PYNCCL_SECRET, or else a new one, which the attribute `secret` returns; "" means
    none. A secret needs PyNaCl. Only clients with the same secret and the same `job` are served; without a
    secret, loopback clients must belong to the same user. `host` is a name or an address, with '0.0.0.0' or
    '::' for every interface. Port 0 takes a free port. Raises OSError if it cannot listen, and ValueError for
    a wrong port.
    """

    # True if it warns when a store without a secret can be reached from other machines.
    warns = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        *,
        job: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        check_timeout(timeout, optional=False)
        secret = read_secret() or _new_secret() if secret is None else check_secret(secret)
        self.secret = secret
        self.job = resolve_job(job)
        self._scheme = handshake.choose(secret, f.PURPOSE, encode(self.job), f.HELLO)
        self.host = host
        self._listener = _listen(host, port, timeout)
        bound, self.port = self._listener.getsockname()[:2]
        if self.warns and not self.secret and not is_loopback(bound):
            log.warning(
                "the store at %s has no secret: every process can take part; set PYNCCL_SECRET",
                self.address,
            )
        self._data: dict[bytes, bytes] = {}
        self._bytes = 0
        # Incomplete requests: their bytes, their clients with the time of arrival, and the clients that the
        # server does not read from.
        self._unread = 0
        self._partial: dict[_Connection, float] = {}
        self._held: set[_Connection] = set()
        self._waiting: dict[bytes, set[_Connection]] = {}
        self._barriers: dict[bytes, tuple[int, set[_Connection]]] = {}
        self._connections: dict[int, _Connection] = {}
        self._pending: dict[_Connection, None] = {}
        self._timed: set[_Connection] = set()
        # Wills of disconnected clients, by identity: the time to carry them out, the key and the value.
        self._wills: dict[bytes, tuple[float, bytes, bytes]] = {}
        self._resumed: deque[_Connection] = deque()
        # Unauthenticated clients may use a quarter of the process's file descriptors.
        self._most_pending = max(1, min(_MOST_PENDING, os.sysconf("SC_OPEN_MAX") // 4))
        self._paused = self._warned = self._told = False
        # The number of refused clients by reason.
        self.refused: Counter[str] = Counter()
        self._next_tick = 0.0
        self._diag = SockDiag()
        self._wake = os.eventfd(0)
        self._poll = select.epoll()
        self._poll.register(self._listener, _READ)
        self._poll.register(self._wake, _READ)
        self._pid = os.getpid()
        self._last_word = b""
        self._closing = threading.Lock()
        self._open = True
        self._thread = _StoreThread(target=self._serve, name="pynccl-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address for clients, as host:port."""
        return format_address(self.host, self.port)

    def wait_until_left(self, timeout: float) -> None:
        """Wait until all clients have disconnected, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while len(self._connections) > len(self._pending) and time.monotonic() < deadline:
            time.sleep(0.005)

    def end_with(self, last_word: bytes) -> None:
        """Have the clients told why the server closes, when it does."""
        self._last_word = last_word

    def close(self) -> None:
        """End the thread and every connection; no effect if repeated or in a forked child."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._open:
                self._open = False
                os.eventfd_write(self._wake, 1)
                self._thread.join()
                os.close(self._wake)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self._loop()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        # First, so that a client which has lost its connection cannot reach this store again.
        self._listener.close()
        for connection in list(self._connections.values()):
            if self._last_word and connection not in self._pending:
                with suppress(OSError, ValueError):
                    self._answer(connection, f.ENDED, self._last_word)
            connection.sock.close()
        self._poll.close()
        self._diag.close()
        self._connections.clear()

    def _loop(self) -> None:
        listener = self._listener.fileno()
        while True:
            busy = self._pending or self._timed or self._paused or self._wills or self._held
            arrivals = False
            for fd, mask in self._poll.poll(_TICK if busy else None):
                if fd == self._wake:
                    return
                if fd == listener:
                    arrivals = True
                elif (connection := self._connections.get(fd)) is not None:
                    self._handle(connection, mask)
            while self._resumed:
                connection = self._resumed.popleft()
                if self._connections.get(connection.fd) is connection:
                    self._handle(connection, 0)
            now = time.monotonic()
            # Accept last, so that many new connections do not delay the existing clients.
            if arrivals:
                self._accept(now)
            if now >= self._next_tick:
                self._next_tick = now + _TICK
                self._expire(now)

    # --- connections: accept, authenticate, end ---

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._pending) >= self._most_pending and not self._evict(now):
                self._pause(True)
                return
            try:
                sock = accept(self._listener)
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._make_room(error, now)
                return
            sock.setblocking(False)
            connection = _Connection(sock, now)
            self._connections[connection.fd] = connection
            self._pending[connection] = None
            self._poll.register(sock, _READ)
            # The hello has mostly arrived already.
            self._handle(connection, _READ)

    def _evict(self, now: float) -> bool:
        """Drop the oldest unauthenticated connection if it has had enough time; tell whether it was."""
        oldest = next(iter(self._pending))
        if now - oldest.arrived < self._most_pending / _EVICTIONS_PER_SECOND:
            return False
        self._drop(oldest)
        return True

    def _make_room(self, error: OSError, now: float) -> None:
        """Out of file descriptors: drop an unauthenticated connection if any, and pause accepting."""
        if self._pending:
            self._evict(now)
        elif not self._warned:
            self._warned = True
            log.warning(
                "the store at %s cannot serve more than %d clients: %s (see `ulimit -n`)",
                self.address,
                len(self._connections),
                error.strerror,
            )
        self._pause(True)

    def _pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self._poll.modify(self._listener, 0 if paused else _READ)

    def _expire(self, now: float) -> None:
        while self._pending and next(iter(self._pending)).arrived + _HELLO_SECONDS <= now:
            self._drop(next(iter(self._pending)))
        for connection in [waiter for waiter in self._timed if waiter.deadline <= now]:
            self._resume(connection, f.MISSING, self._forget(connection))
        for name, (at, key, value) in list(self._wills.items()):
            if at <= now:
                self._cancel(name)
                if key not in self._data:
                    with suppress(_Refused):
                        self._store(key, value)
        self._pause(False)
        self._read_on(now)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.get(connection.fd) is connection:
            del self._connections[connection.fd]
            self._pending.pop(connection, None)
            self._forget(connection)
            self._read_wills(connection)
            if connection.will is not None:
                name, key, value = connection.will
                self._cancel(name)
                self._wills[name] = time.monotonic() + _WILL_SECONDS, key, value
            connection.input.clear()
            self._count(connection)
            self._held.discard(connection)
            connection.sock.close()

    def _read_wills(self, connection: _Connection) -> None:
        """A client that ends while its request waits may have cancelled its will behind that request."""
        # The answer may meet a connection that was reset.
        with suppress(OSError, ValueError, struct.error):
            while connection.trusted and (frame := connection.next_frame()) is not None:
                if frame[0] == f.WILL:
                    self._request(connection, frame)

    # --- memory of incomplete requests ---

    def _count(self, connection: _Connection) -> None:
        """Update the count of a client's unread bytes."""
        left = len(connection.input) if connection.trusted else 0
        self._unread += left - connection.counted
        connection.counted = left
        if left:
            self._partial.setdefault(connection, time.monotonic())
        else:
            self._partial.pop(connection, None)

    def _hold(self, connection: _Connection) -> bool:
        """Over the limit of unread bytes, stop reading a large request unless it is the oldest."""
        if (
            self._unread < _MAX_UNREAD
            or connection.counted < _SMALL
            or connection is next(iter(self._partial))
        ):
            return False
        self._held.add(connection)
        self._poll.modify(connection.fd, _WRITE if connection.output else 0)
        return True

    def _read_on(self, now: float) -> None:
        """Read again from all clients; drop the oldest incomplete request after its time-out."""
        if self._held and next(iter(self._partial.values())) + _HELLO_SECONDS <= now:
            self._drop(next(iter(self._partial)))
        for connection in self._held:
            self._poll.modify(connection.fd, _READ | _WRITE if connection.output else _READ)
        self._held.clear()

    def _handle(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & _WRITE:
                self._flush(connection)
            if mask & _READ and not mask & _ENDED and self._hold(connection):
                return
            if mask & ~_WRITE and not self._read(connection):
                return
            while (frame := connection.next_frame() if connection.trusted else None) is not None:
                self._request(connection, frame)
            if len(connection.input) > f.LENGTH.size + f.MAX_SEALED:
                raise ValueError("too many requests at once")
            self._count(connection)
        except (OSError, ValueError, struct.error):
            self._drop(connection)

    def _read(self, connection: _Connection) -> bool:
        """Read the available bytes; return False if there is no request to handle."""
        try:
            few = self._unread >= _MAX_UNREAD and connection.counted < _SMALL
            data = connection.sock.recv(65536 if connection.trusted and not few else _MOST_UNTRUSTED)
        except BlockingIOError:
            return False
        if not data:
            if not connection.trusted and connection.input == f.REFUSES:
                self.refused[self._other] += 1
            raise ConnectionError("the client closed the connection")
        connection.input += data
        return connection.trusted or self._authenticate(connection)

    def _authenticate(self, connection: _Connection) -> bool:
        """Answer the client's hello, then check its proof; return False while the proof is missing."""
        got, scheme = connection.input, self._scheme
        if connection.handshake is None:
            if not got[: len(f.HELLO)] == f.HELLO[: len(got)]:
                raise ValueError("not a client of the store")
            if len(got) < f.BEGINNING:
                return False
            kind = f.SECURED if scheme.secured else f.OPEN
            if got[len(f.HELLO) : f.BEGINNING] != kind:
                lacks = "without a secret" if scheme.secured else "with a secret, unlike here"
                self._refuse(connection, kind, lacks)
            end = f.BEGINNING + scheme.hello_size
            if len(got) < end:
                return False
            try:
                connection.handshake = scheme.meet(bytes(got[f.BEGINNING : end]))
            except ValueError:
                self._refuse(connection, f.REFUSES, self._other)
            del got[:end]
            connection.sock.send(f.HELLO + kind + connection.handshake.answer)
        if len(got) < scheme.proof_size:
            return False
        connection.session = connection.handshake.check(bytes(got[: scheme.proof_size]))
        if not self.secret:
            self._ask_whose(connection)
        del got[: scheme.proof_size]
        connection.trusted = True
        self._pending.pop(connection)
        return True

    @property
    def _other(self) -> str:
        return "with another secret" if self._scheme.secured else "of another job"

    def _refuse(self, connection: _Connection, verdict: bytes, who: str) -> NoReturn:
        """Tell a client why it is refused, and raise."""
        self.refused[who] += 1
        connection.sock.send(f.HELLO + verdict)
        raise ValueError("the client has another secret, no secret, or another job")

    def _ask_whose(self, connection: _Connection) -> None:
        """Without a secret, refuse other users of this machine."""
        reason = why_not(connection.sock, self._diag)
        if reason == UNKNOWN and not self._told:
            self._told = True
            log.warning(
                "the store at %s has no secret and refuses a client: %s; set PYNCCL_SECRET",
                self.address,
                reason,
            )
        if reason:
            raise ValueError(reason)

    def _answer(self, connection: _Connection, status: int, value: bytes = b"") -> None:
        body = bytes((status,)) + value
        if connection.session is not None:
            body = connection.session.outgoing.seal(body)
        self._send(connection, f.LENGTH.pack(len(body)) + body)

    def _send(self, connection: _Connection, data: bytes) -> None:
        if connection.output:
            sent = 0
        else:
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            self._poll.modify(connection.fd, _READ | _WRITE)
        connection.output += data[sent:]
        if len(connection.output) > _MAX_OUTPUT:
            raise ValueError("too much unread output")

    def _flush(self, connection: _Connection) -> None:
        try:
            del connection.output[: connection.sock.send(connection.output)]
        except BlockingIOError:
            return
        if not connection.output:
            self._poll.modify(connection.fd, _READ)

    # --- requests ---

    def _request(self, connection: _Connection, frame: bytes) -> None:
        op, length = f.REQUEST.unpack_from(frame)
        start = f.REQUEST.size + length
        key, argument = frame[f.REQUEST.size : start], frame[start:]
        if len(frame) < start:
            raise ValueError(f"a key of {length} bytes in a frame of {len(frame)}")
        try:
            if op == f.SET:
                self._store(key, argument)
                self._answer(connection, f.OK)
            elif op == f.ADD:
                self._answer(connection, f.OK, self._add(key, *f.INT64.unpack(argument)))
            elif op in (f.GET, f.WAIT):
                self._get(connection, op, key, *f.INT64.unpack(argument))
            elif op == f.BARRIER:
                self._enter(connection, key, *f.BARRIER_ARGUMENT.unpack(argument))
            elif op == f.DELETE:
                self._answer(connection, f.OK, b"%d" % self._delete(key))
            elif op == f.WILL:
                self._replace_will(connection, key, argument[: f.IDENTITY], argument[f.IDENTITY :])
                self._answer(connection, f.OK)
            else:
                raise ValueError(f"unknown operation {op}")
        except _Refused as reason:
            self._answer(connection, f.REFUSED, str(reason).encode())

    def _charge(self, more: int, beyond: int = 0) -> None:
        """Change the count of stored bytes; refuse an increase beyond the limit."""
        if more > 0 and self._bytes + more > _MAX_BYTES + beyond:
            raise _Refused(f"it is full: it stores at most {_MAX_BYTES >> 20} MiB")
        self._bytes += more

    def _replace_will(self, connection: _Connection, key: bytes, name: bytes, value: bytes) -> None:
        self._cancel(name)
        if connection.will is not None:
            self._charge(-_size(*connection.will))
            connection.will = None
        if key:
            self._charge(_size(name, key, value))
            connection.will = name, key, value

    def _cancel(self, name: bytes) -> None:
        """Cancel the will of a disconnected client."""
        found = self._wills.pop(name, None)
        if found is not None:
            self._charge(-_size(name, *found[1:]))

    def _store(self, key: bytes, value: bytes) -> None:
        old = self._data.get(key)
        self._charge(_size(key, value) if old is None else len(value) - len(old))
        self._data[key] = value
        for waiter in self._waiting.pop(key, ()):
            assert waiter.wait is not None
            self._resume(waiter, f.OK, value if waiter.wait[0] == f.GET else b"")

    def _add(self, key: bytes, number: int) -> bytes:
        before = self._data.get(key, b"0")
        # Python's int() also takes spaces and underscores.
        if not _NUMBER.fullmatch(before):
            raise _Refused("its value is not a number")
        number += int(before)
        if not -(1 << 63) <= number < 1 << 63:
            raise _Refused("the sum does not fit into 64 bits")
        self._store(key, b"%d" % number)
        return b"%d" % number

    def _delete(self, key: bytes) -> bool:
        value = self._data.pop(key, None)
        if value is not None:
            self._charge(-_size(key, value))
        return value is not None

    def _get(self, connection: _Connection, op: int, key: bytes, timeout_ms: int) -> None:
        value = self._data.get(key)
        if value is not None:
            self._answer(connection, f.OK, value if op == f.GET else b"")
        elif timeout_ms <= 0:
            self._answer(connection, f.MISSING)
        else:
            self._suspend(connection, op, key, timeout_ms)
            self._waiting.setdefault(key, set()).add(connection)

    def _enter(self, connection: _Connection, key: bytes, timeout_ms: int, count: int) -> None:
        expected, inside = self._barriers.get(key, (count, set()))
        if expected != count:
            raise _Refused(f"count is {count}; expected {expected}, the count of the clients that wait there")
        self._suspend(connection, f.BARRIER, key, timeout_ms)
        self._barriers[key] = expected, inside
        inside.add(connection)
        if len(inside) >= count:
            del self._barriers[key]
            for waiter in inside:
                self._resume(waiter, f.OK)

    def _suspend(self, connection: _Connection, op: int, key: bytes, timeout_ms: int) -> None:
        self._charge(_size(key), _MAX_WAITS)
        connection.wait = op, key
        connection.deadline = time.monotonic() + timeout_ms / 1000
        self._timed.add(connection)

    def _resume(self, connection: _Connection, status: int, value: bytes = b"") -> None:
        """Answer a waiting client; its next requests are handled after the other clients' requests."""
        if connection.wait is not None:
            self._charge(-_size(connection.wait[1]))
        connection.wait = None
        self._timed.discard(connection)
        try:
            self._answer(connection, status, value)
        except (OSError, ValueError):
            self._drop(connection)
            return
        if connection.input:
            self._resumed.append(connection)

    def _forget(self, connection: _Connection) -> bytes:
        """End a client's wait; return the packed number of clients in its barrier."""
        if connection.wait is None:
            return b""
        op, key = connection.wait
        self._charge(-_size(key))
        connection.wait = None
        self._timed.discard(connection)
        if op == f.BARRIER:
            _, inside = self._barriers[key]
            present = b"%d" % len(inside)
            inside.discard(connection)
            if not inside:
                del self._barriers[key]
            return present
        waiters = self._waiting[key]
        waiters.discard(connection)
        if not waiters:
            del self._waiting[key]
        return b""


def _size(*parts: bytes) -> int:
    """Return the bytes that stored values count as."""
    return _KEY_BYTES + sum(map(len, parts))


def _new_secret() -> str:
    """Make a secret for a server that was given none; raise without what encrypts with it."""
    handshake.load_noise(
        "StoreServer makes a secret, because none is set",
        """, or pass secret="" for a store without one""",
    )
    return base64.urlsafe_b64encode(os.urandom(24)).decode()


def resolve_job(job: str | None) -> str:
    """Return the given job, else PYNCCL_JOB_ID, else ""."""
    if job is None:
        return os.environ.get("PYNCCL_JOB_ID", "")
    if not isinstance(job, str):
        raise TypeError(f"job is {shown(job)}; expected a str, or None")
    return job


def _listen(host: str, port: int, timeout: float) -> socket.socket:
    check_int(port, "port", 0, 1 << 16, "0 to 65535")
    check_text(host, "host", "a name or an address")
    try:
        family, where = resolve(host, port, timeout)[0]
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: host is {shown(host)}") from error
    listener = open_socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit the option.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise type(error)(error.errno, f"{error.strerror} ({format_address(host, port)})") from error
    return listener
