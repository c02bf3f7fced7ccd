"""How the members of a reconfigured group find one another: in a store that the first of them serves.

A rank's handle has the address of its own store, and a word that only this store knows.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pynccl._base.values import shown
from pynccl._errors import NcclSystemError
from pynccl._watch.channel import outward_address
from pynccl.bootstrap._address import format_address, parse_address
from pynccl.bootstrap._rounds import meet

if TYPE_CHECKING:
    from collections.abc import Iterator

_HANDLE = re.compile(r"pynccl:(?P<word>[0-9a-f]{32}):(?P<address>.+)")
_PROBED_SECONDS = 0.05
_TRIED_SECONDS = 5.0


def serve() -> tuple[Any, str]:
    """Start the store of one group's rank; return it and the rank's handle."""
    store = _store("127.0.0.1", 0, is_master=True)
    word = secrets.token_hex(16)
    store.set(word, "")
    return store, f"pynccl:{word}:{format_address(_host(), store.port)}"


def join(
    served: Any, own: str, uuid: int, handles: Sequence[str], seconds: float, group: str
) -> tuple[Any, int, int]:
    """Meet the other members; return the new group's store, this rank in it and its size.

    `own` is this rank's handle, and `served` its store. After `seconds` raise an error that names the
    members that did not come.
    """
    until = time.monotonic() + seconds
    places = _places(handles)
    if own not in handles:
        raise ValueError(
            f"handles has {len(handles)} handles and not this rank's; expected {own!r} among them"
        )
    rank = handles.index(own)
    failed = f"pynccl: group {group!r} was not reconfigured (uuid {uuid})"

    def late(missing: list[int]) -> Exception:
        names = ", ".join(f"rank {other} ({handles[other]})" for other in missing)
        return dist.DistBackendError(f"{failed}: after {seconds:g} s rank {rank} still waits for {names}")

    with _lost(f"{failed}: rank 0 ({handles[0]}), where the members meet, is lost"):
        first = served if rank == 0 else _connect(*places[0], until)
        store = dist.PrefixStore(f"uuid {uuid}", first)  # type: ignore[attr-defined, unused-ignore]
        _agree(store, uuid, handles)
        number = meet(store, rank, len(handles), max(0, until - time.monotonic()), late)
    return dist.PrefixStore(f"group {number}", store), rank, len(handles)  # type: ignore[attr-defined, unused-ignore]


def _host() -> str:
    try:
        return outward_address()
    except NcclSystemError:
        return "127.0.0.1"  # a host without a network: all members run on it


def _store(host: str, port: int, **options: Any) -> Any:
    return dist.TCPStore(host, port, wait_for_workers=False, **options)  # type: ignore[attr-defined, unused-ignore]


def _places(handles: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return the word, host and port of each handle."""
    if not handles:
        raise ValueError("handles is empty; expected one handle of each member")
    places = []
    for at, handle in enumerate(handles):
        found = _HANDLE.fullmatch(handle)
        try:
            place = parse_address(found["address"]) if found else None
        except ValueError:
            place = None
        if not found or not place:
            raise ValueError(
                f"handles[{at}] is {shown(handle)}; expected a get_reconfigure_handle() of pynccl"
            )
        if handle in handles[:at]:
            raise ValueError(f"handles[{at}] is handles[{handles.index(handle)}], too: {handle}")
        places.append((found["word"], *place))
    return places


def _connect(word: str, host: str, port: int, until: float) -> Any:
    """Connect to the first member's store.

    It listens since the handle was made, so a refused connection is the end of its process.
    """
    while True:
        left = max(0.001, until - time.monotonic())
        _check_listens(host, port, left)
        try:
            store = _store(host, port, timeout=timedelta(seconds=min(left, _TRIED_SECONDS)))
            break
        except dist.DistError:
            if time.monotonic() >= until:
                raise
    if not store.check([word]):
        raise ConnectionError("another process has its port")
    store.set_timeout(timedelta(seconds=left))
    return store


def _check_listens(host: str, port: int, seconds: float) -> None:
    """Raise if nobody listens: torch would try again until its time-out, with a lot of output."""
    with socket.create_connection((host, port), timeout=seconds) as probe, suppress(TimeoutError):
        # A store does not speak first; a process that is about to end resets the connection.
        probe.settimeout(_PROBED_SECONDS)
        if not probe.recv(1):
            raise ConnectionError("its process has ended")


def _agree(store: Any, uuid: int, handles: Sequence[str]) -> None:
    """Raise unless the members that came before have the same handles."""
    agreed = store.compare_set("handles", "", "\n".join(handles)).decode().split("\n")
    if agreed != list(handles):
        raise ValueError(
            f"handles is {list(handles)}, but another member passed {agreed} with the same uuid {uuid}; "
            "expected the same handles from every member, and a new uuid"
        )


@contextmanager
def _lost(text: str) -> Iterator[None]:
    """Name the store in errors of the connection to it."""
    try:
        yield
    except dist.DistBackendError:
        raise
    except (OSError, dist.DistError) as error:
        raise dist.DistBackendError(f"{text}: {error}") from error
