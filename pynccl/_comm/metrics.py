"""Counters of this process's communicators: calls, bytes, failures, and the time that calls have waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pynccl._comm.core import Core
from pynccl._comm.recording import cores
from pynccl._library.binding import lib
from pynccl._library.generated.kinds import FUNCTIONS, NAMES, PLAN

_GROUP = "group"
# The operation of each name by which Python waits; a group waits under a name of its own.
_WAITERS = {FUNCTIONS[kind] + more: NAMES[kind] for kind in range(PLAN) for more in ("", "Config")}
_WAITERS["synchronize"] = "synchronize"


@dataclass(frozen=True)
class OperationMetrics:
    """The sums of one operation on one communicator."""

    calls: int = 0
    """How many calls were made, also in groups and plans; 0 for `synchronize`, whose time alone is known."""
    bytes: int = 0
    """The elements that were counted for NCCL, in bytes: of an all_gather those that a rank sends, of a
    reduce_scatter those that it receives."""
    failed: int = 0
    """How many calls the library refused, and how many failed while a caller waited."""
    wait_seconds: float = 0.0
    """How long callers waited. A call on a stream returns at once: `synchronize` waits for it."""


@dataclass(frozen=True)
class CommunicatorMetrics:
    """The sums of a communicator since it was made."""

    name: str
    """The name in the trace, which is equal on all ranks."""
    rank: int
    size: int
    device: int
    operations: dict[str, OperationMetrics]
    """By name, only those that were used. `group` has the runs of groups and plans of several calls, whose
    time belongs to none of their calls."""


def metrics() -> list[CommunicatorMetrics]:
    """Return the counters of every open communicator of this process; they never go down.

    A communicator's counters end with it. Any thread may call this at any time: it waits for nothing, and
    counts calls in flight only when they are issued.
    """
    open_now = [core for core in list(cores.values()) if core.size and core.handle]
    return [
        CommunicatorMetrics(core.identity, core.rank, core.size, core.device, _operations(core))
        for core in open_now
    ]


def _operations(core: Core) -> dict[str, OperationMetrics]:
    waited: defaultdict[str, float] = defaultdict(float)
    for name, seconds in list(core.waited.items()):
        waited[_WAITERS.get(name, _GROUP)] += seconds
    found = {}
    for kind in range(PLAN + 1):
        tally, name = core.c.tallies[kind], _GROUP if kind == PLAN else NAMES[kind]
        seconds = lib.pynccl_trace_span(tally.waited) / 1e9 + waited.pop(name, 0.0)
        if tally.calls or seconds:
            found[name] = OperationMetrics(tally.calls, tally.bytes, tally.failed, seconds)
    return found | {name: OperationMetrics(wait_seconds=seconds) for name, seconds in waited.items()}
