"""What is measured and what is to be reached: statements, their counted calls, and ratios between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COUNT = 1024
GROUP = 16
PLAN = 1000


@dataclass(frozen=True)
class Case:
    """One statement; `calls` is what its time is divided by, `functions` what it must call in the library."""

    name: str
    setup: str
    statement: str
    calls: int = 1
    functions: Mapping[str, int] = field(default_factory=lambda: {"ncclAllReduce": 1})


def _group(setup: str, name: str, begin: str, call: str, end: str = "", indent: str = "") -> Case:
    lines = [begin, *[indent + call] * GROUP, *([end] if end else [])]
    functions = {"ncclAllReduce": GROUP, "ncclGroupStart": 1, "ncclGroupEnd": 1}
    return Case(name, setup, "\n".join(lines), GROUP, functions)


_BY_HAND = (
    "cupy_comm.allReduce(a.data.ptr, {}.data.ptr, a.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)"
)

OWN = "the library's own time"
CLOCK = "a reading of the clock, which the recorder makes for each call"
LOOP = "an empty statement"
CFFI = "cffi, the bare call"
IN_PLACE, INTO = "pynccl: all_reduce(a)", "pynccl: all_reduce(a, b)"
STREAM = "pynccl: all_reduce(a, b, stream=stream)"
PREPARED, PLANNED = "pynccl: a prepared call", f"pynccl: a plan of {PLAN}"
GROUPED, GROUPED_PREPARED = f"pynccl: group of {GROUP} calls", f"pynccl: group of {GROUP} prepared calls"
IN_PLACE_ON, INTO_ON = "pynccl, recorder on: all_reduce(a)", "pynccl, recorder on: all_reduce(a, b)"
PREPARED_ON, PLANNED_ON = "pynccl, recorder on: a prepared call", f"pynccl, recorder on: a plan of {PLAN}"
GROUPED_ON = f"pynccl, recorder on: group of {GROUP} calls"
COMPAT = "pynccl.compat.cupy: bare ints"
CUPY_BARE = "cupy.cuda.nccl: bare ints"
CUPY_IN_PLACE, CUPY_INTO = "cupy.cuda.nccl: by hand, in place", "cupy.cuda.nccl: by hand, a to b"
CUPY_GROUP = f"cupy.cuda.nccl: group of {GROUP} by hand"
CUPYX_IN_PLACE, CUPYX_INTO = "cupyx: all_reduce(a, a)", "cupyx: all_reduce(a, b)"
N4_BARE = "nccl4py bindings: bare ints"
N4_IN_PLACE, N4_INTO = "nccl4py: allreduce(a, a)", "nccl4py: allreduce(a, b)"
CTYPES = "ctypes wrapper: all_reduce(a, b)"

_PLAN_CALLS = {"ncclAllReduce": PLAN, "ncclGroupStart": 1, "ncclGroupEnd": 1}

CASES = (
    Case(OWN, "library", f"repeat({PLAN})", PLAN, {"ncclAllReduce": PLAN}),
    Case(CLOCK, "library", f"read_clock({PLAN})", PLAN, {"ncclAllReduce": 0}),
    Case(LOOP, "library", "pass", 1, {"ncclAllReduce": 0}),
    Case(CFFI, "cffi", "lib.ncclAllReduce(p, q, n, 7, 0, handle, 0)"),
    # Each with the recorder on right behind the same without: their difference is smaller than what a machine
    # drifts in a while.
    Case(IN_PLACE, "pynccl", "comm.all_reduce(a)"),
    Case(IN_PLACE_ON, "recorder", "traced.all_reduce(a)"),
    Case(INTO, "pynccl", "comm.all_reduce(a, b)"),
    Case(INTO_ON, "recorder", "traced.all_reduce(a, b)"),
    Case(STREAM, "pynccl", "comm.all_reduce(a, b, stream=stream)"),
    Case(PREPARED, "pynccl", "op()"),
    Case(PREPARED_ON, "recorder", "traced_op()"),
    Case(PLANNED, "pynccl", "plan()", PLAN, _PLAN_CALLS),
    Case(PLANNED_ON, "recorder", "traced_plan()", PLAN, _PLAN_CALLS),
    _group("pynccl", GROUPED, "with pynccl.group():", "comm.all_reduce(a)", indent=" "),
    _group("recorder", GROUPED_ON, "with pynccl.group():", "traced.all_reduce(a)", indent=" "),
    _group("pynccl", GROUPED_PREPARED, "with pynccl.group():", "op()", indent=" "),
    Case(COMPAT, "compat", "compat_comm.allReduce(p, q, n, 7, 0, 0)"),
    Case(CUPY_BARE, "cupy", "cupy_comm.allReduce(p, q, n, 7, 0, 0)"),
    Case(CUPY_IN_PLACE, "cupy", _BY_HAND.format("a")),
    Case(CUPY_INTO, "cupy", _BY_HAND.format("b")),
    _group("cupy", CUPY_GROUP, "nccl.groupStart()", _BY_HAND.format("a"), "nccl.groupEnd()"),
    Case(CUPYX_IN_PLACE, "cupyx", "cupyx_comm.all_reduce(a, a, stream=stream)"),
    Case(CUPYX_INTO, "cupyx", "cupyx_comm.all_reduce(a, b, stream=stream)"),
    Case(N4_BARE, "nccl4py", "n4.all_reduce(p, q, n, 7, 0, n4_handle, 0)"),
    Case(N4_IN_PLACE, "nccl4py", "n4_comm.allreduce(a, a, n4_sum)"),
    Case(N4_INTO, "nccl4py", "n4_comm.allreduce(a, b, n4_sum)"),
    Case(CTYPES, "ctypes", "ctypes_comm.all_reduce(a, b, stream=stream)"),
)
# Where there is a driver, every array call asks for the current stream: the same calls with a fake one.
CUPYX_CURRENT = "cupyx: all_reduce(a, b), the current stream"
# There is something to wait for with a driver only. Each beside the same call with a wait.
SYNCHRONIZED, WORK = f"{STREAM}; synchronize", f"{STREAM} with wait=False; wait"
PREPARED_SYNCHRONIZED, PREPARED_WORK = f"{PREPARED}; synchronize", f"{PREPARED} with wait=False; wait"
PLANNED_SYNCHRONIZED, PLANNED_WORK = f"{PLANNED}; synchronize", f"{PLANNED} with wait=False; wait"
DRIVER_CASES = (
    *(case for case in CASES if case.name in (IN_PLACE, INTO, STREAM, PREPARED, CUPY_INTO, CUPYX_INTO)),
    Case(CUPYX_CURRENT, "cupyx", "cupyx_comm.all_reduce(a, b)"),
    Case(SYNCHRONIZED, "pynccl", "comm.all_reduce(a, b, stream=stream); comm.synchronize(stream)"),
    Case(WORK, "pynccl", "comm.all_reduce(a, b, stream=stream, wait=False).wait()"),
    Case(PREPARED_SYNCHRONIZED, "pynccl", "op(); comm.synchronize()"),
    Case(PREPARED_WORK, "pynccl", "op(wait=False).wait()"),
    Case(PLANNED_SYNCHRONIZED, "pynccl", "plan(); comm.synchronize()", PLAN, _PLAN_CALLS),
    Case(PLANNED_WORK, "pynccl", "plan(wait=False).wait()", PLAN, _PLAN_CALLS),
)
PEERS = (CUPY_BARE, CUPY_IN_PLACE, CUPY_INTO, CUPYX_INTO, N4_BARE, N4_INTO, CTYPES)

Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Target:
    """One bound, and what was reached; None where something it needs was not measured."""

    ours: str
    theirs: str
    unit: str
    needed: float
    reached: float | None

    @property
    def verdict(self) -> str:
        """Say whether it is met."""
        if self.reached is None:
            return "not measured"
        return "met" if self.reached <= self.needed else "NOT MET"


def ratio(samples: Samples, ours: str, theirs: str) -> float | None:
    """Return the median of the ratios within one repetition."""
    if ours not in samples or theirs not in samples:
        return None
    return statistics.median(a / b for a, b in zip(samples[ours], samples[theirs], strict=True))


def above(samples: Samples, ours: str, theirs: str) -> float | None:
    """Return the median of the differences within one repetition, in ns."""
    if ours not in samples or theirs not in samples:
        return None
    return statistics.median(a - b for a, b in zip(samples[ours], samples[theirs], strict=True))


def best_peer(samples: Samples) -> str | None:
    """Return the case of another binding that takes least."""
    measured = [name for name in PEERS if name in samples]
    return min(measured, key=lambda name: statistics.median(samples[name]), default=None)


def targets(samples: Samples, import_ms: float | None) -> list[Target]:
    """Compare what was measured with the bounds."""
    bounds = [
        (IN_PLACE, CUPYX_IN_PLACE, 0.35),
        (IN_PLACE, N4_IN_PLACE, 0.05),
        (IN_PLACE, CUPY_IN_PLACE, 2.5),
        (INTO, CUPYX_INTO, 0.45),
        (INTO, N4_INTO, 0.06),
        (INTO, CUPY_INTO, 3.5),
        (PREPARED, CUPY_BARE, 0.95),
        (PLANNED, best_peer(samples) or CUPY_BARE, 0.05),
        (GROUPED, CUPY_GROUP, 2.5),
        (GROUPED_PREPARED, CUPY_GROUP, 0.5),
        (IN_PLACE_ON, CUPYX_IN_PLACE, 0.35),
        (IN_PLACE_ON, N4_IN_PLACE, 0.05),
        (IN_PLACE_ON, CUPY_IN_PLACE, 2.5),
        (INTO_ON, CUPYX_INTO, 0.45),
        (INTO_ON, N4_INTO, 0.06),
        (INTO_ON, CUPY_INTO, 3.5),
        (PREPARED_ON, CUPY_BARE, 1.2),
        (PLANNED_ON, best_peer(samples) or CUPY_BARE, 0.05),
        (GROUPED_ON, CUPY_GROUP, 2.5),
    ]
    found = [
        Target(ours, theirs, "times", most, ratio(samples, ours, theirs)) for ours, theirs, most in bounds
    ]
    costs = [(PREPARED_ON, PREPARED), (IN_PLACE_ON, IN_PLACE), (INTO_ON, INTO), (GROUPED_ON, GROUPED)]
    found += [Target(on, off, "ns above", 15, above(samples, on, off)) for on, off in costs]
    found.append(Target(PLANNED, OWN, "ns above", 5, above(samples, PLANNED, OWN)))
    found.append(Target("import pynccl", "numpy's and cffi's import", "ms beyond", 50, import_ms))
    return found
