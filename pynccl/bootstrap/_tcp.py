"""Meeting at a host and port: rank 0 listens there only until all have joined.

MASTER_PORT is where torch's store is going to listen, in the same program. So what is met at it is a
signpost: it names the job, the port of its own at which the job's store lives, and that store's id, which
only those know who were at the signpost.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from pynccl._errors import BootstrapError
from pynccl._secure.secret import read_secret
from pynccl.bootstrap._address import is_loopback, resolve
from pynccl.bootstrap._server import StoreServer
from pynccl.bootstrap._store import PromptStore, Store, StoreSilent, format_address, parse_address

_SIGN = "signpost"
_LEAVE_SECONDS = 2.0


class Place(NamedTuple):
    """A store that was met."""

    address: str
    # None: PYNCCL_JOB_ID's.
    job: str | None = None


def left(deadline: float) -> float:
    """Return the seconds until a deadline, a moment at least."""
    return max(0.05, deadline - time.monotonic())


def connect(place: Place, deadline: float, rank: int, size: int, what: str = "did not meet rank 0") -> Store:
    """Connect to a store; its absence is in most cases rank 0's."""
    try:
        return PromptStore(place.address, job=place.job, timeout=left(deadline))
    except BootstrapError as error:
        raise BootstrapError(f"rank {rank} of {size} {what}: {error}") from error


class _JobStore(StoreServer):
    """The store behind a signpost, which has said already who can reach both."""

    _warns = False


def _listen(kind: type[StoreServer], host: str, port: int, job: str | None, deadline: float) -> StoreServer:
    try:
        return kind(host, port, read_secret(), job=job, timeout=left(deadline))
    except OSError as error:
        raise BootstrapError(f"rank 0 cannot listen at {format_address(host, port)}: {error}") from error


class Host:
    """Rank 0's side: the signpost and the store."""

    def __init__(self, host: str, port: int, job: str, deadline: float) -> None:
        self.signpost = _listen(StoreServer, host, port, None, deadline)
        self.server: StoreServer | None = None
        try:
            self.server = _listen(_JobStore, host, 0, secrets.token_hex(16), deadline)
            self.place = Place(self.server.address, self.server.job)
            self.where = f"{self.signpost.address}{_loopback_note(host, deadline)}"
            with PromptStore(self.signpost.address, timeout=left(deadline)) as store:
                store.set(_SIGN, json.dumps([job, *self.place]).encode())
        except BaseException:
            self.close()
            raise

    def refused(self) -> str:
        """Return whom the store turned away, as the end of an error's text."""
        found = self.signpost.refused + (Counter() if self.server is None else self.server.refused)
        if not found:
            return ""
        return f"; turned away: {', '.join(f'{count} {who}' for who, count in sorted(found.items()))}"

    def wait_until_left(self) -> None:
        """Give the other ranks the time to read what they still have to know."""
        if self.server is not None:
            self.server.wait_until_left(_LEAVE_SECONDS)

    def close(self) -> None:
        """Close both."""
        self.signpost.close()
        if self.server is not None:
            self.server.close()


def _loopback_note(host: str, deadline: float) -> str:
    """Say so where a machine has its own name at an address that others cannot reach, as Debian does."""
    with suppress(OSError, ValueError):
        address = resolve(host, 0, left(deadline))[0][1][0]
        if host not in ("localhost", address) and is_loopback(address):
            return f" ({host} is {address} on rank 0's machine, which other machines cannot reach)"
    return ""


def ask(host: str, port: int, job: str, deadline: float, rank: int, size: int) -> Place:
    """Return the store that the signpost names."""
    address = format_address(host, port)
    with connect(Place(address), deadline, rank, size) as store:
        try:
            other, found, token = map(str, json.loads(store.get(_SIGN, left(deadline))))
        except (TimeoutError, StoreSilent):
            raise BootstrapError(
                f"rank {rank} of {size} did not meet rank 0, which is silent at {address}"
            ) from None
        except (ValueError, TypeError) as error:
            raise BootstrapError(f"what stands at {address} is not understood: {error}") from None
    if other != job:
        raise BootstrapError(
            f"rank {rank} of {size} found another job at {address}: {other or 'one without a name'!r} "
            f"instead of {job or 'one without a name'!r}; choose another MASTER_PORT"
        )
    # The name under which this rank reached the signpost, which rank 0 may know by another one.
    return Place(format_address(host, parse_address(found)[1]), token)
