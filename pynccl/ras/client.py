"""The connection to a RAS server; every step has a deadline, and every answer a limit."""

from __future__ import annotations

import math
import os
import socket
import time
from types import TracebackType

from pynccl._errors import NcclTimeoutError
from pynccl._trace.dumps import printable
from pynccl.ras import as_json, as_text
from pynccl.ras.report import Damaged, NoServer, RasError, Status

ADDRESS = "localhost:28028"
TIMEOUT = 5.0
# NCCL gives up a collection at most this long after its time-out; the connection gets a second more.
_EXTRA_S = 6.0
_HANDSHAKE_S = 5.0
_MOST_LINE, _MOST_ANSWER = 1024, 256 << 20
_MOST_TIMEOUT = 86400
_PROTOCOL = 2


def status(address: str | None = None, *, timeout: float = TIMEOUT, json: bool | None = None) -> Status:
    """Ask the RAS server of a job for its state.

    The address is NCCL_RAS_ADDR's value or localhost:28028 by default. The server has `timeout` seconds to
    greet, at most 5, and then the ranks have as many to answer the server, which may answer up to 6 s later.
    `json` chooses the format; by default it is JSON, and text where the server lacks it.
    """
    timeout = _checked_timeout(timeout)
    host, port = parse_address(address)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    raw, as_is_json = _ask(host, port, where, timeout, json)
    try:
        if not as_is_json:
            return as_text.read(raw, where)
        try:
            return as_json.read(raw, where)
        except Damaged:
            if json:
                raise
        raw, _ = _ask(host, port, where, timeout, False)
        return as_text.read(raw, where)
    except Damaged as damage:
        raise RasError(
            f"The answer of the RAS server at {where} cannot be read: {printable(str(damage))}"
        ) from None


def parse_address(address: str | None) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT or [IPV6]:PORT."""
    name = "address"
    if address is None:
        name, address = "NCCL_RAS_ADDR", os.environ.get("NCCL_RAS_ADDR") or ADDRESS
    if not isinstance(address, str):
        raise TypeError(f"address must be a str or None, not {type(address).__name__}")
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # int() takes other digits, signs and underscores, too.
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not colon or not bare or (":" in bare and bare == host) or not 0 < number < 65536:
        raise ValueError(f"{name} must be HOST:PORT or [IPV6]:PORT, not {address!r}")
    return bare, number


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= _MOST_TIMEOUT:
        raise ValueError(f"timeout must be more than 0 and at most {_MOST_TIMEOUT} seconds, not {timeout}")
    return float(timeout)


def _ask(host: str, port: int, where: str, timeout: float, json: bool | None) -> tuple[str, bool]:
    seconds = math.ceil(timeout)
    with _Connection(host, port, where, min(timeout, _HANDSHAKE_S)) as server:
        server.greet()
        server.order(f"TIMEOUT {seconds}")
        is_json = json is not False and server.accepts_json(required=bool(json))
        server.allow(seconds + _EXTRA_S)
        # Verbose adds nothing to JSON; to text it adds the names of more ranks.
        server.send("STATUS" if is_json else "VERBOSE STATUS")
        return server.rest(), is_json


class _Connection:
    def __init__(self, host: str, port: int, where: str, seconds: float) -> None:
        self._where = where
        self._got = bytearray()
        self.allow(seconds)
        try:
            self._socket = socket.create_connection((host, port), timeout=seconds)
        except TimeoutError:
            raise self._late("accept the connection") from None
        except (OSError, UnicodeError) as error:
            kind = NoServer if isinstance(error, ConnectionRefusedError) else RasError
            raise kind(
                f"No RAS server answers at {where}: {getattr(error, 'strerror', None) or error}. "
                "A job of NCCL 2.24 or later listens there unless NCCL_RAS_ENABLE=0 or NCCL_RAS_ADDR is set; "
                "the CPU library listens only with NCCL_RAS_ENABLE=1 or NCCL_RAS_ADDR"
            ) from None

    def __enter__(self) -> _Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def allow(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def greet(self) -> None:
        self.send(f"CLIENT PROTOCOL {_PROTOCOL}")
        answer = self._line("the greeting")
        if not answer.upper().startswith("SERVER PROTOCOL "):
            raise self._stranger(answer)

    def order(self, command: str) -> None:
        answer = self._command(command)
        if answer.upper() != "OK":
            raise RasError(f"The RAS server at {self._where} refused {command}: {printable(answer)}")

    def accepts_json(self, required: bool) -> bool:
        answer = self._command("SET FORMAT json")
        if answer.upper() == "OK":
            return True
        if not answer.upper().startswith("ERROR"):
            raise self._stranger(answer)
        if required:
            raise RasError(f"The RAS server at {self._where} has no JSON, which came with NCCL 2.28.7")
        return False

    def rest(self) -> str:
        """Return all that the server sends until it closes the connection."""
        while self._receive("the state of the job"):
            if len(self._got) > _MOST_ANSWER:
                raise RasError(f"The RAS server at {self._where} sent more than {_MOST_ANSWER} bytes")
        return self._got.decode("utf-8", "backslashreplace")

    def send(self, command: str) -> None:
        try:
            self._socket.settimeout(self._left(command))
            self._socket.sendall(f"{command}\n".encode())
        except TimeoutError:
            raise self._late(f"take {command}") from None
        except OSError as error:
            raise self._lost(error) from None

    def _command(self, command: str) -> str:
        self.send(command)
        return self._line(command)

    def _line(self, what: str) -> str:
        while b"\n" not in self._got and len(self._got) <= _MOST_LINE:
            if not self._receive(what):
                break
        line, newline, rest = bytes(self._got).partition(b"\n")
        text = line[:_MOST_LINE].decode("utf-8", "backslashreplace").rstrip("\r")
        if not newline:
            raise self._stranger(text)
        self._got = bytearray(rest)
        return text

    def _receive(self, what: str) -> bool:
        try:
            self._socket.settimeout(self._left(what))
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise self._late(f"answer {what}") from None
        except OSError as error:
            raise self._lost(error) from None
        self._got += data
        return bool(data)

    def _left(self, what: str) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late(f"answer {what}")
        return left

    def _late(self, what: str) -> NcclTimeoutError:
        return NcclTimeoutError(f"The server at {self._where} did not {what} within {self._seconds:g} s")

    def _lost(self, error: OSError) -> NoServer:
        return NoServer(f"The connection to {self._where} was lost: {error.strerror or error}")

    def _stranger(self, answer: str) -> RasError:
        if not answer:
            return NoServer(f"{self._where} is no RAS server: it closed the connection without an answer")
        return RasError(f"{self._where} is no RAS server: it answered {printable(answer[:80])!r}")
