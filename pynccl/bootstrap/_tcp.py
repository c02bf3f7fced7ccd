"""Rendezvous at a host and port, where rank 0 listens only until all ranks have joined.

torch's store will listen at MASTER_PORT in the same program. So rank 0 serves only an entry store there. The
entry names the job, the port of the job's own store, and the id of this store, which only ranks that read the
entry know.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from pynccl._errors import BootstrapError
from pynccl._secure.secret import read_secret
from pynccl.bootstrap._address import is_loopback, resolve
from pynccl.bootstrap._server import StoreServer
from pynccl.bootstrap._store import PromptStore, Store, StoreLost, StoreSilent, format_address, parse_address

_ENTRY = "signpost"
_LEAVE_SECONDS = 2.0
# Seconds between two looks for another entry.
_PAUSE = 0.05
# The ids of the stores where a rank of this process has failed, with the rank.
_failed: set[tuple[str | None, int]] = set()


class Place(NamedTuple):
    """The address and job of a store."""

    address: str
    # None for the value of PYNCCL_JOB_ID.
    job: str | None = None


# What a rank fails to do that does not reach the store of rank 0.
_MEETING = "did not meet rank 0"


def left(deadline: float) -> float:
    """Return the seconds until a deadline, but more than 0."""
    return max(0.05, deadline - time.monotonic())


def connect(
    place: Place,
    deadline: float,
    rank: int,
    size: int,
    what: str = _MEETING,
    *,
    kind: type[Store] = PromptStore,
) -> Store:
    """Connect to a store; a failure mostly means that rank 0 is missing."""
    try:
        return kind(place.address, job=place.job, timeout=left(deadline))
    except StoreLost:
        raise
    except BootstrapError as error:
        nobody_listens = isinstance(error.__cause__, ConnectionRefusedError | TimeoutError)
        missing = [0] if what == _MEETING and rank and nobody_listens else []
        raise BootstrapError(f"rank {rank} of {size} {what}: {error}", ranks=missing) from error


@contextmanager
def visit(store: Store, place: Place, rank: int) -> Iterator[Store]:
    """Use the store at a place and close it; after a failure there `ask` does not return the place again.

    Rank 0 keeps it open for some seconds, so that the other ranks can read the reason.
    """
    with store:
        try:
            yield store
        except BaseException:
            _failed.add((place.job, rank))
            raise


class _JobStore(StoreServer):
    """A store of a job whose first entry store has already warned about a missing secret."""

    warns = False


def _listen(kind: type[StoreServer], host: str, port: int, job: str | None, deadline: float) -> StoreServer:
    try:
        return kind(host, port, read_secret(), job=job, timeout=left(deadline))
    except OSError as error:
        why = ""
        if error.errno == errno.EADDRINUSE:
            why = ": another rank 0, job or program listens there; choose another port on every rank"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = f": {socket.gethostname()}, on which rank 0 runs, does not have this address"
        raise BootstrapError(f"rank 0 cannot listen at {format_address(host, port)}: {error}{why}") from error


class Host:
    """Rank 0's side: the entry store and the job's store, which may be that of an earlier call."""

    def __init__(
        self, host: str, port: int, job: str, deadline: float, server: StoreServer | None = None
    ) -> None:
        with ExitStack() as undo:
            self.entry = _listen(StoreServer if server is None else _JobStore, host, port, None, deadline)
            undo.callback(self.entry.close)
            self.server = server or _listen(_JobStore, host, 0, os.urandom(16).hex(), deadline)
            if server is None:
                # The server of an earlier call goes on without this entry.
                undo.callback(self.server.close)
            self.place = Place(self.server.address, self.server.job)
            self.where = f"{self.entry.address}{_loopback_note(host, deadline)}"
            with PromptStore(self.entry.address, timeout=left(deadline)) as store:
                store.set(_ENTRY, json.dumps([job, *self.place]).encode())
            undo.pop_all()

    def refused(self) -> str:
        """Return a text about the clients that the stores refused, as the end of an error's text."""
        found = self.entry.refused + self.server.refused
        if not found:
            return ""
        return f"; refused: {', '.join(f'{count} {who}' for who, count in sorted(found.items()))}"

    def wait_until_left(self) -> None:
        """Wait until the other ranks have read the last values and left."""
        self.server.wait_until_left(_LEAVE_SECONDS)

    def close(self) -> None:
        """Close both stores."""
        self.entry.close()
        self.server.close()


def _loopback_note(host: str, deadline: float) -> str:
    """Return a note if the host's own name resolves to a loopback address, as on Debian."""
    with suppress(OSError, ValueError):
        address = resolve(host, 0, left(deadline))[0][1][0]
        if host not in ("localhost", address) and is_loopback(address):
            return f" ({host} is {address} on rank 0's machine, which other machines cannot reach)"
    return ""


def ask(host: str, port: int, job: str, deadline: float, rank: int, size: int) -> Place:
    """Return the store that the entry at a host and port names, but none where this rank has failed."""
    address = format_address(host, port)
    while True:
        try:
            with connect(Place(address), deadline, rank, size) as store:
                other, found, token = map(str, json.loads(store.get(_ENTRY, left(deadline))))
        except (TimeoutError, StoreSilent):
            raise BootstrapError(
                f"rank {rank} of {size} did not meet rank 0, which is silent at {address}"
            ) from None
        except (ValueError, TypeError) as error:
            raise BootstrapError(f"the entry at {address} cannot be parsed: {error}") from None
        except StoreLost:
            # An earlier rendezvous at this address has just ended.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)
            continue
        if other != job:
            raise BootstrapError(
                f"rank {rank} of {size} found another job at {address}: {other or 'a job without a name'!r}; "
                f"expected {job or 'a job without a name'!r}; choose another MASTER_PORT"
            )
        if (token, rank) not in _failed:
            # Keep the host name by which this rank reached the entry; rank 0 may use another one.
            return Place(format_address(host, parse_address(found)[1]), token)
        if time.monotonic() >= deadline:
            raise BootstrapError(
                f"rank {rank} of {size} did not meet rank 0: only the rendezvous that has failed is open at "
                f"{address}"
            )
        time.sleep(_PAUSE)
