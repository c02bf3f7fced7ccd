"""What registrations and windows need of a communicator, and the conditions that both share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from pynccl._arrays.buffers import kind_of
from pynccl._errors import NcclError, NcclInvalidUsage
from pynccl._library.binding import lib

T = TypeVar("T")


class Watch(Protocol):
    """The part of a communicator's watchdog that this package uses."""

    def verdict(self) -> NcclError | None:
        """Return the error that the watchdog has found, or None."""


class MemoryOwner(Protocol):
    """The part of a communicator that this package uses."""

    handle: int
    c: Any
    rank: int
    size: int
    device: int
    streamless: bool
    waits: int

    @property
    def watch(self) -> Watch: ...

    def live(self) -> int:
        """Return the handle; raise if the communicator is closed or has failed."""

    def outside_groups(self, what: str, *streams: int) -> None:
        """Raise inside group() or prepare, and during a graph capture of one of its streams or of these."""

    def alone(self, anyway: bool = False) -> AbstractContextManager[None]:
        """Reserve the communicator for this thread."""

    def wait(self, stream: int, what: str, timeout: float | None) -> None:
        """Wait for a stream."""

    def together(self, call: Callable[[], T], what: str, *, same: Hashable = None) -> T:
        """Make a call of all ranks, which goes on after an exception such as Ctrl-C."""

    def change(self, call: Callable[[], Any], what: str) -> Any:
        """Make a call that ends at the time-out; wait until a non-blocking communicator has accepted it."""


def complete(owner: MemoryOwner, what: str, timeout: float | None = None) -> None:
    """Wait for the calls in flight, which use the memory; the caller has reserved the communicator."""
    for stream in used_streams(owner.c):
        owner.wait(stream, what, timeout)


def used_streams(comm: Any) -> list[int]:
    """Return the streams with calls of a pynccl_comm that nobody has waited for."""
    found, entry = [], comm.used
    while entry:
        if entry.last > entry.waited:
            found.append(int(entry.stream))
        entry = entry.next
    return found


def refuse_unless_idle(owner: MemoryOwner, what: str, array: Any) -> None:
    """Raise in a group and during a graph capture: neither can record a registration."""
    own = [] if owner.waits or owner.streamless else [kind_of(array).current(array)]
    owner.outside_groups(what, *own)
    if lib.pynccl_group_depth():
        raise NcclInvalidUsage(f"{what} between ncclGroupStart and ncclGroupEnd: expected it outside")
