"""Random fault schedules: one fault at one stage of a small job, drawn from a seed, and what each rank owes.

`python tests/helpers/fault_schedules.py --seed 7` runs one and prints it, `--count 1000 --large 220
--table FILE` makes a table.
What is expected follows from the schedule alone. The ranks run fault_ranks.py, and fault_jobs.py runs them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

OPERATIONS = ("first collective", "collective", "group", "plan", "prepared", "stream", "barrier")
ONE_SIDED = ("window", "put", "signal", "register")
STAGES = (
    *("before the library", "in the library's creation", *OPERATIONS, *ONE_SIDED),
    *("between", "split", "finalize"),
)
RECOVERY = "recovery"
CALLS = tuple(stage for stage in OPERATIONS if stage != "barrier")
ROOTED = tuple(stage for stage in CALLS if stage != "group")
LATER = tuple(stage for stage in STAGES if not stage.startswith(("before", "in the library")))

# Seeds from here on draw jobs of so many ranks, on up to so many hosts; the others have one host.
LARGE, FEWEST, MOST, MOST_HOSTS = 2_000_000, 8, 32, 9

# Which faults fit which stages.
FITS: dict[str, tuple[str, ...]] = {
    "killed": (*STAGES, RECOVERY),
    "two killed": (*LATER, RECOVERY),
    "killed in a call": (*OPERATIONS, RECOVERY),
    "connections dropped": OPERATIONS,
    "call fails": OPERATIONS,
    "slow": ("before the library", *LATER),
    "too slow": ("before the library", *LATER),
    "slow in a call": OPERATIONS,
    "too slow in a call": OPERATIONS,
    "stopped": (*STAGES, RECOVERY),
    "exception": ("before the library", *LATER, RECOVERY),
    "exit": ("before the library", *LATER, RECOVERY),
    "destroy": tuple(stage for stage in LATER if stage != "finalize"),
    "abort": LATER,
    "missing call": (*OPERATIONS, "split"),
    "extra call": (*OPERATIONS, "split", "finalize"),
    "other function": (*ROOTED, "split"),
    "other count": CALLS,
    "other dtype": CALLS,
    "other op": ROOTED,
    "other root": ROOTED,
    "other peer": ("group",),
}
PAIRS = [(fault, stage) for fault, stages in FITS.items() for stage in stages]

DEADLY = ("killed", "two killed", "killed in a call", "exit")
LEAVING = ("exception", "abort")
WRONG = ("missing call", "extra call", *(fault for fault in FITS if fault.startswith("other ")))
HARMLESS = ("slow", "slow in a call")
IN_A_CALL = ("killed in a call", "connections dropped", "call fails", "slow in a call", "too slow in a call")
# Only a time-out finds these, or finds them too.
BY_TIME = ("too slow", "too slow in a call", "stopped", "destroy", *WRONG)

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
BY_PARTS = ("reduce_scatter", "all_to_all", "scatter")
COLLECTIVES = (*REDUCING, "broadcast", "all_gather", "all_to_all", "gather", "scatter")
RESULTS = {
    "ncclUnhandledCudaError": "NcclUnhandledCudaError",
    "ncclSystemError": "NcclSystemError",
    "ncclInternalError": "NcclInternalError",
    "ncclInvalidArgument": "NcclInvalidArgument",
    "ncclInvalidUsage": "NcclInvalidUsage",
    "ncclRemoteError": "NcclRemoteError",
}

# Calls of the library behind `pynccl.init` with a time-out, and in one round of work (see fault_ranks.py).
CALLS_OF_INIT, CALLS_OF_WORK = 2, 5
# What a rank may take after a death, and after the time-out: the promise of the issue.
SOON = 2.0


@dataclass(frozen=True)
class Schedule:
    """One job: who does what wrong, where; `work` are the arguments of the stage's call."""

    seed: int
    fault: str
    stage: str
    nranks: int
    victims: tuple[int, ...]
    # In recovery: who dies first.
    before: int | None
    # The fault comes while the victim waits inside the call, for this rank.
    late: int | None
    timeout: float
    check: bool
    recovers: bool
    traced: bool
    # Of what was stopped: it goes on when the others have ended.
    continues: bool
    by_interpreter: bool
    result: str
    # The number of the library's call in which something is injected.
    call: int
    seconds: float
    work: dict[str, Any]
    # By rank; empty: all ranks are on this host, which is not renamed.
    hosts: tuple[int, ...]
    direct: bool
    # Up to so many ranks the control channel connects each to each.
    mesh: int

    def __str__(self) -> str:
        who = " and ".join(map(str, self.victims))
        extra = [f"time-out {self.timeout:g} s"]
        extra += [f"after the death of rank {self.before}"] if self.before is not None else []
        extra += [f"rank {self.late} is late"] if self.late is not None else []
        extra += [f"call {self.call}"] if self.fault in IN_A_CALL else []
        extra += [self.result] if self.fault == "call fails" else []
        extra += ["check mode"] if self.check else []
        extra += ["the others shrink"] if self.recovers else []
        extra += [f"{len(set(self.hosts))} hosts"] if self.hosts else []
        extra += ["no direct reads"] if not self.direct else []
        extra += [f"PYNCCL_MESH_RANKS={self.mesh}"] if self.hosts else []
        return (
            f"seed {self.seed}: {self.fault}, {self.stage}: rank {who} of {self.nranks} ({', '.join(extra)})"
        )


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed; each pair of fault and stage comes up once in so many seeds."""
    order, large = list(PAIRS), seed >= LARGE
    turn, place = divmod(seed - LARGE if large else seed, len(PAIRS))
    random.Random(LARGE + turn if large else turn).shuffle(order)
    fault, stage = order[place]
    rng = random.Random(f"fault schedule {seed}")
    recovery = stage == RECOVERY
    least = 2 + (fault == "two killed") + recovery + (fault == "other peer")
    nranks = rng.randint(FEWEST, MOST) if large else rng.randint(least, FEWEST)
    ranks = rng.sample(range(nranks), nranks)
    before = ranks.pop() if recovery else None
    victims = tuple(ranks.pop() for _ in range(1 + (fault == "two killed")))
    can_be_late = fault in ("killed", "two killed", "stopped") and stage in (
        *OPERATIONS,
        *ONE_SIDED,
        "split",
        "finalize",
    )
    late = rng.choice(ranks) if ranks and can_be_late and rng.random() < 0.5 else None
    timeout = rng.choice((4.0, 4.5, 5.0) if large else (2.0, 2.25, 2.5)) if fault in BY_TIME else 15.0
    many = 2 if stage in ("group", "plan") else 1
    first = CALLS_OF_INIT + 1 + (0 if stage in ("first collective", RECOVERY) else CALLS_OF_WORK)
    return Schedule(
        seed,
        fault,
        stage,
        nranks,
        victims,
        before,
        late,
        timeout,
        check=rng.random() < 0.25 and fault not in IN_A_CALL,
        recovers=rng.random() < 0.5 and stage in LATER and stage != "finalize",
        traced=rng.random() < 0.5,
        continues=rng.random() < 0.5,
        by_interpreter=rng.random() < 0.5,
        result=rng.choice(tuple(RESULTS)),
        call=first + rng.randrange(many),
        seconds=timeout + 1 if fault.startswith("too") else rng.uniform(0.05, 0.3),
        work=_work(rng, fault, stage, nranks),
        **(_places(rng, nranks) if large else {"hosts": (), "direct": True, "mesh": MOST}),
    )


def _places(rng: random.Random, nranks: int) -> dict[str, Any]:
    count = rng.randint(1, min(nranks, MOST_HOSTS))
    hosts = tuple(rng.randrange(count) for _ in range(nranks))
    return {"hosts": hosts, "direct": rng.random() < 0.5, "mesh": rng.choice((4, MOST))}


def _work(rng: random.Random, fault: str, stage: str, nranks: int) -> dict[str, Any]:
    names = COLLECTIVES
    if fault == "other op":
        names = REDUCING
    elif fault == "other root":
        names = ("broadcast", "reduce")
    elif fault in WRONG:
        names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    name, count = rng.choice(names), rng.choice((1, 24, 1000, 30_000))
    return {
        "name": name,
        # Every rank knows what all ranks send.
        "count": min(count, 2_000_000 // nranks**2) if name in BY_PARTS else count,
        "dtype": rng.choice(("float32", "int32", "float64", "int64")),
        "op": rng.choice(("sum", "max", "min")),
        "root": rng.randrange(nranks),
        "peer": 1,
    }


def wrong_work(s: Schedule) -> dict[str, Any]:
    """Return the arguments of the stage's call as the victim has them."""
    work = dict(s.work)
    what = s.fault.removeprefix("other ")
    if what == "function":
        work["name"] = "all_gather" if work["name"] != "all_gather" else "all_reduce"
    elif what == "count":
        work["count"] += 3
    elif what == "dtype":
        work["dtype"] = {"float32": "int32", "int32": "float32"}.get(
            work["dtype"], {"int64": "float64", "float64": "int64"}.get(work["dtype"])
        )
    elif what == "op":
        work["op"] = "min" if work["op"] == "max" else "max"
    elif what == "root":
        work["root"] = (work["root"] + 1) % s.nranks
    elif what == "peer":
        work["peer"] = -1
    return work


# --- what is expected ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a rank may do: return, or raise one of these, with these ranks and words, so soon after the fault.

    `ranks` is compared with RankFailedError's, where that is raised. "recovered" is a return after a shrink.
    """

    kinds: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    words: str = ""
    within: float = SOON


MISMATCH = ("NcclInvalidUsage", "CollectiveMismatchError")
KILLED = Expected(("killed",))
RETURNS = Expected(("returned",), within=20.0)


def expected(s: Schedule, rank: int) -> Expected:
    """Return what a rank has to do, by the schedule alone."""
    if rank == s.before:
        return KILLED
    return _of_victim(s, rank) if rank in s.victims else _of_survivor(s)


def _of_survivor(s: Schedule) -> Expected:
    late = s.timeout + SOON
    who = rf"rank {s.victims[0]}\b" if len(s.victims) == 1 else ""
    failed = "recovered" if s.recovers else "RankFailedError"
    creates = s.stage in ("before the library", "in the library's creation")
    if s.fault in HARMLESS:
        return RETURNS
    if s.stage == RECOVERY:
        if s.fault == "stopped":
            return Expected(("RankFailedError",), s.victims, who, 2 * late)
        return Expected(("recovered",), within=20.0)
    if s.fault in DEADLY:
        return Expected((failed, *_enough(s)), s.victims, "died|left without closing")
    if s.fault in LEAVING:
        if creates:
            return Expected(("BootstrapError",), words=f"{who}.*mine alone")
        return Expected((failed,), s.victims, "aborted its communicator")
    if s.fault == "stopped":
        if creates:
            return Expected(("NcclTimeoutError", "BootstrapError", "RankFailedError"), s.victims, "", late)
        if s.recovers and s.nranks == 2 and s.victims == (0,):
            # It lives, for all that its half knows.
            return Expected(
                ("RankFailedError", *_enough(s)), s.victims, "partition|not responding", late + 2.5
            )
        return Expected((failed, *_enough(s)), s.victims, f"{who} is not responding", late)
    if s.fault.startswith("too slow"):
        kinds = ("NcclTimeoutError", "BootstrapError") if creates else ("NcclTimeoutError",)
        return Expected(kinds, within=late)
    if s.fault == "call fails":
        # Who fails first asks for up to 1.5 s whether a death is behind it.
        return Expected((failed,), s.victims, "aborted its communicator", 1.5 + SOON)
    if s.fault == "connections dropped":
        return Expected(("NcclRemoteError",), words=who, within=1.0 + SOON)
    if s.fault == "destroy":
        return Expected(("NcclRemoteError", *MISMATCH, "NcclTimeoutError"), words=who, within=late)
    return Expected((*MISMATCH, "NcclTimeoutError"), within=late)


def _enough(s: Schedule) -> tuple[str, ...]:
    """Return what else may be: who fails after its last call, or exits, need not be missed."""
    return ("returned",) if s.stage == "finalize" and (s.late is not None or s.fault == "exit") else ()


def _of_victim(s: Schedule, rank: int) -> Expected:
    if s.fault in ("killed", "two killed", "killed in a call"):
        return KILLED
    if s.fault == "exit":
        return Expected(("exited",))
    if s.fault == "stopped":
        if not s.continues:
            return KILLED
        kinds = ("RankFailedError", "NcclTimeoutError", "NcclRemoteError", "BootstrapError")
        # When it goes on, all others have given up and ended: it may be the only one that is left.
        alone = ("recovered",) if s.stage == RECOVERY else ()
        return Expected((*kinds, *alone, *_enough(s)), within=s.timeout + SOON)
    if s.fault == "exception":
        return Expected(("Mine",))
    if s.fault in ("abort", "destroy"):
        kinds = (
            ("left",) if s.fault == "abort" else ("left", "NcclRemoteError", "NcclTimeoutError", *MISMATCH)
        )
        return Expected(kinds, within=s.timeout + SOON)
    if s.fault == "call fails":
        return Expected((RESULTS[s.result],), words="made to fail", within=1.5 + SOON)
    if s.fault.startswith("too slow"):
        other = _of_survivor(s)
        return Expected(other.kinds, within=s.seconds + SOON)
    return _of_survivor(s)


if __name__ == "__main__":
    from fault_jobs import main

    main()
