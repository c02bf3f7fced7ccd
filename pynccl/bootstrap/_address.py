"""Addresses: from text to socket addresses, in bounded time."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from functools import lru_cache
from typing import Any

from pynccl._base.values import check_text, shown

# Family, and the address for socket.bind and socket.connect.
Address = tuple[int, Any]


class _Resolver(threading.Thread):
    """Looks up a name."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port"."""
    host, separator, port = check_text(text, "the address", "host:port").rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) < 6 and int(port) <= 65535
    bracketed = host.startswith("[")
    wrong = bracketed != host.endswith("]") or "/" in host or not host.isprintable()
    if not separator or not digits or wrong:
        raise ValueError(f"the address is {shown(text)}; expected host:port, with a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """Return an address as text for parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a numeric address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def resolve(host: str, port: int, timeout: float) -> list[Address]:
    """Return the addresses of a host; raise TimeoutError if the name service takes too long.

    A thread looks names up, because neither a time-out nor Ctrl-C interrupts the C library's resolver.
    Numeric addresses need no look-up.
    """
    for family, rest in ((socket.AF_INET, ()), (socket.AF_INET6, (0, 0))):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return [(family, (host, port, *rest))]
    answers: queue.SimpleQueue[list[Address] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(_look_up(host, port))
        except (OSError, UnicodeError) as error:
            answers.put(
                error if isinstance(error, OSError) else OSError(f"{host!r} is not a host name: {error}")
            )

    _Resolver(target=look_up, name="pynccl-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError(f"the name {host!r} was not resolved in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _look_up(host: str, port: int) -> list[Address]:
    # For an empty name the C library would return any address of this machine.
    if not host:
        raise OSError("the host is empty; expected a name or an address ('0.0.0.0' or '::' for all of them)")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]
