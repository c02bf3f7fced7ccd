"""What a RAS server answered. None: the answer does not say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pynccl._errors import NcclError

# NCCL's results that are no errors of a rank: ncclSuccess and ncclInProgress.
_SOUND = (0, 7)


class RasError(NcclError):
    """No RAS server answered, or its answer cannot be read."""


class NoServer(RasError):
    """Nobody listens at the address, or the server has left before its answer."""


class Damaged(ValueError):
    """An answer that no RAS server gives."""


@dataclass(frozen=True)
class Rank:
    """A rank that answered.

    `state` is INIT, RUNNING, FINALIZE or ABORT; `counts` are the launched collectives by name.
    """

    rank: int
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    nvml_device: int | None = None
    state: str | None = None
    init_state: int | None = None
    async_error: int | None = None
    counts: Mapping[str, int] | None = None

    @property
    def failed(self) -> bool | None:
        """Whether the creation or a later operation of this rank failed."""
        if self.init_state is None or self.async_error is None:
            return None
        return self.init_state not in _SOUND or self.async_error not in _SOUND


@dataclass(frozen=True)
class MissingRank:
    """A rank of which there is no state. `unresponsive` is False: its process answered, but has left."""

    rank: int
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    nvml_device: int | None = None
    unresponsive: bool | None = None
    dead: bool | None = None


@dataclass(frozen=True)
class Lag:
    """`count` ranks launched fewer operations of a kind than others; `ranks` are theirs where known.

    `operation` is None in answers of NCCL before 2.26, which count all collectives together.
    """

    operation: str | None
    launched: int
    furthest: int
    count: int
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class Communicator:
    """A communicator. `ranks` is None in a text answer, which lists only outliers."""

    hash: str
    secondary_hash: str | None = None
    size: int | None = None
    status: str | None = None
    errors: tuple[str, ...] = ()
    ranks: tuple[Rank, ...] | None = None
    missing: tuple[MissingRank, ...] | None = ()
    lagging: tuple[Lag, ...] = ()


@dataclass(frozen=True)
class Group:
    """A line of the table of a text answer: communicators of the same size, status and errors."""

    communicators: int
    nodes: int
    ranks_per_node: str
    size: int
    ranks: int
    status: str
    errors: tuple[str, ...]


@dataclass(frozen=True)
class MissingProcess:
    """A process that did not answer; `dead` is False: the server still tries to reach it."""

    pid: int
    host: str
    devices: str
    dead: bool


@dataclass(frozen=True)
class Status:
    """The state of a job.

    `communicators` has all of them in a JSON answer; a text answer names only those with errors or warnings.
    """

    address: str
    format: str
    nccl_version: str | None
    communicators: tuple[Communicator, ...]
    communicator_count: int
    cuda_runtime_version: int | None = None
    cuda_driver_version: int | None = None
    timestamp: str | None = None
    nodes: int | None = None
    processes: int | None = None
    devices: int | None = None
    groups: tuple[Group, ...] | None = None
    missing_processes: tuple[MissingProcess, ...] | None = None
    collection_seconds: float | None = None
    timeouts: int | None = None
    raw: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """Whether every communicator and process is as it should be."""
        rows: Iterable[Communicator | Group] = (*self.communicators, *(self.groups or ()))
        return not self.missing_processes and not any(row.errors for row in rows)


def lags(ranks: Iterable[Rank]) -> tuple[Lag, ...]:
    """Return who launched fewer operations than others, the furthest behind first."""
    values: dict[str, dict[int, list[int]]] = {}
    for rank in ranks:
        for name, count in (rank.counts or {}).items():
            values.setdefault(name, {}).setdefault(count, []).append(rank.rank)
    found = [
        Lag(name, count, max(by_count), len(members), tuple(sorted(members)))
        for name, by_count in values.items()
        for count, members in by_count.items()
        if count < max(by_count)
    ]
    return tuple(sorted(found, key=lambda lag: lag.launched - lag.furthest))


_STATES = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")


def judge(ranks: tuple[Rank, ...], missing: tuple[MissingRank, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the status and the errors that NCCL's text answer states for these ranks."""
    states = {rank.state for rank in ranks if rank.state is not None}
    absent = [rank for rank in missing if rank.unresponsive is False and not rank.dead]
    if absent:
        states.add("NOCOMM")
    errors = []
    if len(absent) < len(missing):
        errors.append("INCOMPLETE")
    if any(rank.failed for rank in ranks):
        errors.append("ERROR")
    if len(states) > 1 or absent or lags(ranks):
        errors.append("MISMATCH")
    return max(states, key=_STATES.index, default=None), tuple(errors)
