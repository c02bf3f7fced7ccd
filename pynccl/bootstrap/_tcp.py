"""Meeting at a host and port: rank 0 listens there only until all have joined.

MASTER_PORT is where torch's store is going to listen, in the same program. So what is met at it is a
signpost: it names the job, and the port of its own at which the job's store lives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from pynccl._errors import BootstrapError, NcclTimeoutError
from pynccl._lifetime import bounded
from pynccl.bootstrap._store import Store, StoreServer, format_address, parse_address

T = TypeVar("T")
_SIGN = "signpost"


def left(deadline: float) -> float:
    """Return the seconds until a deadline, a moment at least."""
    return max(0.05, deadline - time.monotonic())


def _in_time(call: Callable[[], T], deadline: float, what: str, close: Callable[[T], object]) -> T:
    """Bound a call that may look up a name, which nothing else can interrupt."""
    try:
        return bounded(call, left(deadline) + 0.3, what, if_abandoned=close)
    except NcclTimeoutError as error:
        raise BootstrapError(str(error)) from None


def listen(host: str, port: int, secret: str, deadline: float) -> StoreServer:
    """Serve a store, or say why that is not possible."""
    where = format_address(host, port)
    try:
        return _in_time(
            lambda: StoreServer(host, port, secret), deadline, f"listening at {where}", StoreServer.close
        )
    except OSError as error:
        raise BootstrapError(f"rank 0 cannot listen at {where}: {error}") from error


def connect(address: str, secret: str, deadline: float, rank: int, size: int) -> Store:
    """Connect to a store; its absence is rank 0's."""
    try:
        return _in_time(
            lambda: Store(address, secret, timeout=left(deadline)),
            deadline,
            f"connecting to {address}",
            Store.close,
        )
    except BootstrapError as error:
        raise BootstrapError(f"rank {rank} of {size} did not meet rank 0: {error}") from error


class Host:
    """Rank 0's side: the signpost and the store."""

    def __init__(self, host: str, port: int, secret: str, job: str, deadline: float) -> None:
        self.signpost = listen(host, port, secret, deadline)
        self.server: StoreServer | None = None
        try:
            self.server = listen(host, 0, secret, deadline)
            with Store(self.signpost.address, secret, timeout=left(deadline)) as store:
                store.set(_SIGN, json.dumps([job, self.server.address]).encode())
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Return where the store is."""
        assert self.server is not None
        return self.server.address

    def close(self) -> None:
        """Close both."""
        self.signpost.close()
        if self.server is not None:
            self.server.close()


def ask(address: str, secret: str, job: str, deadline: float, rank: int, size: int) -> str:
    """Return the address of the store that the signpost names."""
    with connect(address, secret, deadline, rank, size) as store:
        try:
            other, found = map(str, json.loads(store.get(_SIGN, left(deadline))))
        except TimeoutError:
            raise BootstrapError(f"rank {rank} of {size}: rank 0 is silent at {address}") from None
        except (ValueError, TypeError) as error:
            raise BootstrapError(f"what stands at {address} is not understood: {error}") from None
    if other != job:
        raise BootstrapError(
            f"rank {rank} of {size} found another job at {address}: {other or 'one without a name'!r} "
            f"instead of {job or 'one without a name'!r}; choose another MASTER_PORT"
        )
    # The name under which this rank reached the signpost, which rank 0 may know by another one.
    return format_address(parse_address(address)[0], parse_address(found)[1])
