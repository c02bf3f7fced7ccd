"""The control channel: TCP connections between the ranks of a communicator, beside the library's own.

With few ranks they connect any two; with more each rank has neighbours, which native/channel.h defines.
Communicators share the connection between two processes (native/lines.h): two neighbours connect only if
their processes have no connection yet.
The communicator itself carries the ranks' addresses and a fresh key; on a network, others may see its data.
A connection begins with a handshake (`handshake.py`) in which each side proves that
it has the key and, if there is one, the job's secret; with a secret all frames are encrypted. Then the
watchdog takes the connections, see native/watchdog.h.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pynccl._base.forks import accept, no_fork, open_socket, own
from pynccl._base.host import SHORTAGES, digest, loopback
from pynccl._errors import BootstrapError, NcclError, NcclSystemError, NcclTimeoutError, descriptor_limit
from pynccl._library.binding import ffi, lib
from pynccl._secure import handshake
from pynccl._secure.secret import read_secret
from pynccl._watch.ended import Process, process

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

_KEY = 16
# Seconds for a connection to prove the key, for each 64 ranks, and for a rank to connect after the library
# reported an error.
_HELLO_SECONDS = 5.0
_LAST_SECONDS = 0.5
# Seconds that all ranks have for a short step once each of them has come, however late the last one was:
# otherwise ranks that wait for one another would be blamed.
_STEP_SECONDS = 1.0
_SLICE = 0.1
_HELLO = struct.Struct("!16sII")
_MAGIC = b"pynccl-channel-4"
_NAME = struct.Struct("!Q")
_PLACE = struct.Struct("!B16sH")
# Bytes of a failure's text.
_TEXT = 256
_SIOCGIFADDR = 0x8915
_GREETING = struct.Struct(f"!{_KEY}s{_KEY}s{_KEY}sIQ?II")
# The variable that says up to how many ranks the channel connects any two.
_MESH, _MESH_RANKS, _MOST_MESH = "PYNCCL_MESH_RANKS", 32, 1 << 16

# This process's place among those of all its communicators: its rank in the first one with a channel.
_order = -1

# The host of the rendezvous that the last pynccl.init named, rather than the launcher's variables.
_met_at = ""


def remember_host(host: str) -> None:
    """Remember the host of pynccl.init's rendezvous: the way to it is the way to the other ranks."""
    global _met_at
    _met_at = host


# The lines that have connections and that the watchdog does not have yet.
_all_lines: weakref.WeakSet[_Lines] = weakref.WeakSet()


def _in_child() -> None:
    for lines in list(_all_lines):
        lines.close_copies()
    _all_lines.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def handing_over(lines: _Lines | None) -> Iterator[None]:
    """Have the watchdog take a channel's connections."""
    with no_fork:
        yield
        if lines is not None:
            _all_lines.discard(lines)


def time_for_a_step(deadline: float | None) -> float | None:
    """Return the deadline of a step for which all ranks have come just now."""
    return None if deadline is None else max(deadline, time.monotonic() + _STEP_SECONDS)


# A function that gathers an equal number of bytes from every rank.
Gather = Callable[[bytes], list[bytes]]


class Channel(NamedTuple):
    """The connections of a rank to its neighbours."""

    lines: _Lines
    # The neighbours that did not connect in time.
    late: list[int]
    # Up to so many ranks, any two are neighbours.
    mesh: int
    # The processes of all ranks, and for each whether it is visible to this one.
    processes: list[Process]
    visible: list[bool]
    # The encryption of each rank's frames, if there is a secret.
    sessions: dict[int, Session]


def connect(
    rank: int,
    size: int,
    gather: Gather,
    failure: NcclError | None,
    deadline: float | None,
    look: Callable[[], object],
) -> Channel:
    """Connect to the neighbours; `look` raises if the library has an error.

    With a failure of this rank, every rank raises it.
    """
    secret, mine, failure = ("", bytes(_GREETING.size), failure) if failure else _greeting(rank)
    greetings = [_GREETING.unpack(each) for each in _exchange(rank, size, gather, mine, failure)]
    _check_secrets(rank, size, [greeting[5] for greeting in greetings])
    key, mesh = greetings[0][1], greetings[0][6]
    processes = [Process(*greeting[2:5]) for greeting in greetings]
    one_host = len({greeting[0] for greeting in greetings}) == 1
    with ExitStack() as opened:
        lines = _Lines(rank, processes, [greeting[7] for greeting in greetings], mesh, key, bool(secret))
        opened.callback(lines.close)
        listener, mine, failure = _place(one_host, lines, opened)
        answers = _exchange(rank, size, gather, mine, failure)
        assert listener is not None
        lines.agree([answer[_PLACE.size :] for answer in answers])
        links = _Links(rank, size, lines.missing, secret, key, listener, time_for_a_step(deadline))
        opened.callback(links.close)
        links.call([_unpack_place(answer[: _PLACE.size]) for answer in answers])
        late = links.answer(look)
        if any(any(answer[_PLACE.size :]) for answer in answers):
            # A rank that shares its lines may be done, and abort, while others still exchange the places.
            try:
                gather(bytes(1))
            except NcclTimeoutError:
                raise
            except NcclError:
                pass
        # They were alive when they connected; a process that is invisible now never proves anything.
        here = processes[rank].space
        # Threads of one process are many ranks.
        starts = {pid: lib.pynccl_process_start(pid) for pid in {p.pid for p in processes if p.space == here}}
        visible = [one.space == here and 0 < one.start == starts[one.pid] for one in processes]
        with no_fork:
            lines.add(links.take_found(), late)
        # What was opened belongs to the watchdog from now on.
        return Channel(lines.hand_over(), late, mesh, processes, visible, links.sessions)


class _Lines:
    """The lines from this process to a communicator's neighbours, see native/lines.h."""

    def __init__(
        self, rank: int, processes: list[Process], orders: list[int], mesh: int, key: bytes, sealed: bool
    ) -> None:
        self.rank, self.size, self.key = rank, len(processes), key
        self.number = _number(key)
        steps = ffi.new("int[]", self.size)
        self._steps = list(steps[0 : lib.pynccl_watch_neighbours(self.size, mesh, steps)])
        self._neighbours = [(rank + step) % self.size for step in self._steps]
        self.connections = ffi.new("pynccl_connection[]", self.size)
        for connection, order in zip(self.connections, orders, strict=True):
            connection.order, connection.socket = order, lib.PYNCCL_NO_LINE
        for other in self._neighbours:
            connection, process = self.connections[other], processes[other]
            ffi.memmove(connection.process.space, process.space, _KEY)
            connection.process.pid, connection.process.start = process.pid, process.start
            # Both ends of a line within this process have one name.
            if process != processes[rank]:
                connection.line = lib.pynccl_line_offer(ffi.addressof(connection.process), sealed)
            if connection.line:
                connection.socket = lib.PYNCCL_SHARED
        self._owned = True
        _all_lines.add(self)

    @property
    def missing(self) -> frozenset[int]:
        """Return the neighbours to which no line is offered."""
        return frozenset(r for r in self._neighbours if self.connections[r].socket != lib.PYNCCL_SHARED)

    def expect(self) -> None:
        """Keep what others send over shared lines before this rank watches."""
        if lib.pynccl_channel_expect(self.number, self.rank):
            raise NcclSystemError("the control channel cannot be opened: there is not enough memory")

    def names(self) -> bytes:
        """Return the names of the lines to the neighbours; 0: none is offered."""
        return b"".join(_NAME.pack(self.connections[other].line) for other in self._neighbours)

    def agree(self, names: list[bytes]) -> None:
        """Keep the lines that the other ends offer, too."""
        at = {step: _NAME.size * i for i, step in enumerate(self._steps)}
        for step, other in zip(self._steps, self._neighbours, strict=True):
            connection = self.connections[other]
            (theirs,) = _NAME.unpack_from(names[other], at[self.size - step])
            if connection.line and connection.line != theirs:
                lib.pynccl_line_withdraw(connection.line)
                connection.socket = lib.PYNCCL_NO_LINE

    def add(self, found: dict[int, socket.socket | None], late: list[int]) -> None:
        """Add connections; None for a neighbour that died meanwhile."""
        for other, sock in found.items():
            connection = self.connections[other]
            connection.socket = lib.PYNCCL_LINE_GONE if sock is None else sock.detach()
            connection.line = _number(self.key + struct.pack("!II", *sorted((self.rank, other))))
        for other in late:
            self.connections[other].socket = lib.PYNCCL_LINE_LATE

    def hand_over(self) -> _Lines:
        """Leave the lines to the watchdog."""
        self._owned = False
        return self

    def close(self) -> None:
        """Close what was not handed over."""
        if self._owned:
            self._owned = False
            with no_fork:
                lib.pynccl_channel_give_up(self.number, self.rank, self.connections, self.size)
                _all_lines.discard(self)

    def close_copies(self) -> None:
        """Close this forked child's copies of what was added; those of shared lines belong to native code."""
        for connection in self.connections:
            if connection.socket >= 0:
                with suppress(OSError):
                    os.close(connection.socket)


def _number(key: bytes) -> int:
    """Return a number other than 0 that is equal for equal keys."""
    return 1 | int(_NAME.unpack_from(digest(key.hex()))[0])


def _mesh_ranks() -> int:
    text = os.environ.get(_MESH) or str(_MESH_RANKS)
    if not (text.isascii() and text.isdigit() and int(text) <= _MOST_MESH):
        raise BootstrapError(f"{_MESH} is {text!r}; expected a number of ranks, 0 to {_MOST_MESH}")
    return int(text)


def _exchange(rank: int, size: int, gather: Gather, mine: bytes, failure: NcclError | None) -> list[bytes]:
    """Gather the data of all ranks; if one sends zeros and a failure, every rank raises the failure."""
    found = gather(mine)
    if bytes(len(mine)) not in found:
        return found
    reasons = gather(str(failure or "").encode()[:_TEXT].ljust(_TEXT, b"\0"))
    if failure is None:
        other = found.index(bytes(len(mine)))
        text = reasons[other].rstrip(b"\0").decode(errors="replace")
        # A rank of a derived communicator has another number in its parent.
        failure = NcclSystemError(
            f"in the new communicator rank {other} of {size} reports: {text}", rank=rank, size=size
        )
        failure.relayed = True
    failure.agreed = True
    # A rank that raises may end its communicators. It waits until all have the reasons.
    with suppress(NcclError):
        gather(mine)
    raise failure


def _cannot_open(error: OSError) -> NcclSystemError:
    return NcclSystemError(f"the control channel cannot be opened: {error}{descriptor_limit(error)}")


def _greeting(rank: int) -> tuple[str, bytes, NcclError | None]:
    """Return the secret and this process's first message; or zeros and the error."""
    global _order
    if _order < 0:
        _order = rank
    try:
        secret = read_secret()
        if secret:
            handshake.load_noise()
        host, key = digest(loopback()), os.urandom(_KEY)
        me, mesh = process(os.getpid()), _mesh_ranks()
        return secret, _GREETING.pack(host, key, *me, bool(secret), mesh, _order), None
    except BootstrapError as error:
        return "", bytes(_GREETING.size), error
    except OSError as error:
        return "", bytes(_GREETING.size), _cannot_open(error)


def _place(
    one_host: bool, lines: _Lines, opened: ExitStack
) -> tuple[socket.socket | None, bytes, NcclError | None]:
    """Listen and return the address, with the names of the lines; or zeros and the error."""
    names = lines.names()
    try:
        lines.expect()
        listener = opened.enter_context(_listen("127.0.0.1" if one_host else outward_address()))
        _require_descriptors(listener, len(lines.missing) + 1)
        return listener, _pack_place(*listener.getsockname()[:2]) + names, None
    except NcclSystemError as error:
        return None, bytes(_PLACE.size + len(names)), error


def _require_descriptors(listener: socket.socket, wanted: int) -> None:
    """Raise if there are fewer free file descriptors than the connections and a selector need."""
    spare: list[int] = []
    try:
        while len(spare) < wanted:
            spare.append(os.dup(listener.fileno()))
    except OSError as error:
        raise NcclSystemError(
            f"the control channel needs {wanted} more file descriptors, but only {len(spare)} are free: "
            f"{os.strerror(error.errno or 0)}{descriptor_limit(error)}"
        ) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)


class _Link:
    """A connection before the end of its handshake."""

    __slots__ = ("called", "caller", "data", "handshake", "need", "since")

    def __init__(self, called: int | None, handshake: Any, need: int) -> None:
        # The rank that this rank calls, or that claims to call this one.
        self.called, self.handshake, self.need = called, handshake, need
        self.caller: int | None = None
        self.data, self.since = bytearray(), time.monotonic()


class _Links:
    """One rank's side of the connections: it calls its lower neighbours, and the higher ones call it."""

    def __init__(
        self,
        rank: int,
        size: int,
        neighbours: frozenset[int],
        secret: str,
        key: bytes,
        listener: socket.socket,
        deadline: float | None,
    ) -> None:
        self.rank, self.size, self.neighbours, self.deadline = rank, size, neighbours, deadline
        self.patience = _HELLO_SECONDS * -(-size // lib.PYNCCL_FAST_RANKS)
        self.secret, self.key = secret, key
        self.listener = listener
        self.found: dict[int, socket.socket | None] = {}
        self.sessions: dict[int, Session] = {}
        self.open: dict[socket.socket, _Link] = {}
        self.selector = selectors.DefaultSelector()

    def _scheme(self, caller: int, called: int) -> handshake.Scheme:
        pair = _HELLO.pack(_MAGIC, caller, called)
        return handshake.choose(self.secret, b"pynccl channel", self.key, pair)

    def call(self, places: list[tuple[str, int]]) -> None:
        for other in sorted(other for other in self.neighbours if other < self.rank):
            left = self.patience if self.deadline is None else max(0.1, self.deadline - time.monotonic())
            try:
                sock = self._connect(places[other], left)
            except OSError as error:
                _refuse_shortage(error)
                self.found[other] = None
                continue
            scheme = self._scheme(self.rank, other)
            caller = scheme.call()
            self._add(sock, _Link(other, caller, scheme.answer_size))
            with suppress(OSError):
                sock.send(_HELLO.pack(_MAGIC, self.rank, other) + caller.hello)

    def _connect(self, place: tuple[str, int], seconds: float) -> socket.socket:
        sock = open_socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        sock.settimeout(seconds)
        try:
            sock.connect(place)
        except BaseException:
            sock.close()
            raise
        return sock

    def _add(self, sock: socket.socket, link: _Link) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.open[sock] = link
        self.selector.register(sock, selectors.EVENT_READ)

    def answer(self, look: Callable[[], object]) -> list[int]:
        """Complete all connections; return the ranks that did not connect in time."""
        hello_size = _HELLO.size + self._scheme(0, 0).hello_size
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        last: float | None = None
        while len(self.found) < len(self.neighbours):
            for key, _ in self.selector.select(_SLICE):
                if key.fileobj is self.listener:
                    self._accept(hello_size)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            now = time.monotonic()
            for sock, link in list(self.open.items()):
                if link.called is None and now - link.since > self.patience:
                    self._drop(sock)
            if last is None:
                try:
                    look()
                except NcclError:
                    # A rank died; give the living ranks a last chance to connect.
                    last = now + _LAST_SECONDS
            elif now >= last:
                self.found |= dict.fromkeys(self._missing())
            if self.deadline is not None and now >= self.deadline:
                return self._missing()
        return []

    def _accept(self, hello_size: int) -> None:
        try:
            sock = accept(self.listener)
        except OSError as error:
            _refuse_shortage(error)
            return
        with suppress(OSError):
            self._add(sock, _Link(None, None, hello_size))

    def _missing(self) -> list[int]:
        return sorted(self.neighbours - self.found.keys())

    def _drop(self, sock: socket.socket) -> None:
        link = self.open.pop(sock)
        self.selector.unregister(sock)
        sock.close()
        if link.called is not None:
            self.found[link.called] = None

    def _read(self, sock: socket.socket) -> None:
        link = self.open[sock]
        try:
            more = sock.recv(link.need - len(link.data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._drop(sock)
            return
        link.data += more
        if len(link.data) < link.need:
            return
        data, link.data = bytes(link.data), bytearray()
        try:
            if link.called is not None:
                self._finish(sock, link, data)
            elif link.handshake is None:
                self._meet(sock, link, data)
            else:
                self._prove(sock, link, data)
        except (OSError, ValueError):
            self._drop(sock)

    def _finish(self, sock: socket.socket, link: _Link, answer: bytes) -> None:
        """Handle the answer to this rank's call."""
        assert link.called is not None
        try:
            proof, session = link.handshake.finish(answer)
        except ValueError:
            if not self.secret:
                raise
            raise BootstrapError(
                f"rank {self.rank} of {self.size} cannot open the control channel to rank {link.called}: "
                "that rank has another secret (PYNCCL_SECRET), or a third party intercepts the connection"
            ) from None
        sock.send(proof)
        self._found(sock, link.called, session)

    def _meet(self, sock: socket.socket, link: _Link, data: bytes) -> None:
        """Answer a rank's call; a caller without the key learns nothing but the refusal."""
        magic, caller, called = _HELLO.unpack_from(data)
        known = magic == _MAGIC and called == self.rank < caller and caller in self.neighbours
        if not known or caller in self.found:
            raise ValueError("the caller is not a rank that must still call")
        scheme = self._scheme(caller, called)
        try:
            link.handshake = scheme.meet(data[_HELLO.size :])
        except ValueError:
            sock.send(bytes(scheme.answer_size))
            raise
        link.caller, link.need = caller, scheme.proof_size
        sock.send(link.handshake.answer)

    def _prove(self, sock: socket.socket, link: _Link, proof: bytes) -> None:
        """Handle the proof of a caller that its hello was not a recorded one."""
        session = link.handshake.check(proof)
        assert link.caller is not None
        if link.caller in self.found:
            raise ValueError("the rank is connected already")
        self._found(sock, link.caller, session)

    def _found(self, sock: socket.socket, other: int, session: Session | None) -> None:
        self.found[other] = sock
        self.selector.unregister(sock)
        del self.open[sock]
        if session is not None:
            self.sessions[other] = session

    def take_found(self) -> dict[int, socket.socket | None]:
        """Return the connections, which then belong to the caller."""
        for sock in list(self.open):
            self._drop(sock)
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        for sock in (*self.open, *(sock for sock in self.found.values() if sock is not None)):
            sock.close()
        self.selector.close()


def _refuse_shortage(error: OSError) -> None:
    """Raise if the error is a shortage of this process, not a failure of the other end."""
    if error.errno in SHORTAGES:
        raise _cannot_open(error) from error


def _check_secrets(rank: int, size: int, have: list[bool]) -> None:
    """Raise if only some ranks have a secret."""
    if len(set(have)) > 1:
        ranks = ", ".join(str(other) for other in range(size) if not have[other])
        raise BootstrapError(
            f"rank {rank} of {size}: ranks {ranks} have no secret, but the others have one; expected "
            "PYNCCL_SECRET or PYNCCL_SECRET_FILE on every rank or on none"
        )


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A caller of a child's copy would wait for an answer.
        return own(socket.create_server((host, 0), family=family, backlog=4096))
    except OSError as error:
        raise NcclSystemError(f"the control channel cannot listen at {host}: {error}") from error


def _pack_place(host: str, port: int) -> bytes:
    address = ipaddress.ip_address(host)
    return _PLACE.pack(address.version, address.packed, port)


def _unpack_place(data: bytes) -> tuple[str, int]:
    version, packed, port = _PLACE.unpack(data)
    address = ipaddress.IPv4Address(packed[:4]) if version == 4 else ipaddress.IPv6Address(packed)
    return str(address), port


def outward_address() -> str:
    """Return this host's address for others: on NCCL_SOCKET_IFNAME, or on the route to the rendezvous."""
    for name in _wanted_interfaces():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    store = os.environ.get("PYNCCL_STORE", "").rpartition(":")[0].strip("[]")
    target = _met_at or store or os.environ.get("MASTER_ADDR", "")
    # Addresses reserved for documentation: only the route is looked up, no packet is sent.
    for host in filter(None, (target, "192.0.2.1", "2001:db8::1")):
        with suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(where)
                address = str(sock.getsockname()[0])
                if not ipaddress.ip_address(address).is_loopback:
                    return address
    raise NcclSystemError(
        "the ranks are on several hosts, but this host has no address for the control channel: "
        "set NCCL_SOCKET_IFNAME to the interface that leads to the others"
    )


def _wanted_interfaces() -> Iterator[str]:
    """Yield the interfaces in NCCL_SOCKET_IFNAME: prefixes, "=" before exact names, "^" before exclusions."""
    text = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not text:
        return
    exact, others = text[0] == "=" or text[:2] == "^=", text[0] == "^"
    wanted = tuple(part.split(":")[0] for part in text.lstrip("^=").split(",") if part)
    for _, name in socket.if_nameindex():
        matches = name in wanted if exact else name.startswith(wanted)
        if matches != others and not (others and name == "lo"):
            yield name
