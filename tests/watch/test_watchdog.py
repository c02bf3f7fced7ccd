"""Ranks that die, stop or do not come: what every other rank is told, how soon, and what is left behind."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import error_of, hear, interrupted_soon, leave_descriptors, tell, together, until_gone
from pynccl import Communicator, NcclError, NcclTimeoutError, Plan, capi
from pynccl._library.binding import lib
from pynccl._watch import channel
from pynccl.testing import RankError, run

RANKS = 8
# For every survivor: docs/hangs.md promises less, the machine may be busy, and the time-outs are 20 s.
SOON = 5.0
Outcome = tuple[str, list[int], str, float]


def die(folder: str, number: int = signal.SIGKILL) -> None:
    """Write down when, and go."""
    write_down(folder)
    os.kill(os.getpid(), number)


def write_down(folder: str) -> None:
    """Write down that it is now that something happens."""
    draft = Path(folder, f"draft-{os.getpid()}")
    draft.write_text(repr(time.monotonic()))
    draft.rename(Path(folder, "died"))


def since_death(folder: str) -> float:
    return time.monotonic() - float(Path(folder, "died").read_text())


def told(folder: str, what: Callable[[], Any]) -> Outcome:
    """Do something until it raises; return what and when after the death, and check that it is final."""
    try:
        while True:
            what()
    except NcclError as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), since_death(folder)


def nothing_left() -> bool:
    """Tell whether the watchdog ends, with all its connections."""
    deadline = time.monotonic() + 10
    while (lib.pynccl_watched() or lib.pynccl_watchdog_runs()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return lib.pynccl_watched() == 0 and not lib.pynccl_watchdog_runs()


def stage_collective(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x = np.ones(100_000, np.float32)
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()
    return told(folder, lambda: comm.all_reduce(x, op="max"))


def stage_missing(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """All but the victim are inside one collective when it dies."""
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, lambda: comm.all_gather(np.ones(10)))


def stage_group(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x, y = np.ones(1000), np.ones(1000)
    other = (rank + 1) % comm.size, (rank - 1) % comm.size
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()

    def group() -> None:
        with pynccl.group():
            comm.send(x, other[0])
            comm.recv(y, other[1])

    return told(folder, lambda: (group(), comm.barrier()))


def stage_plan(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x, y = np.ones(1000), np.ones((comm.size, 1000))
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()
    # It is not even prepared once the death is known.
    prepare = comm.prepare
    return told(folder, lambda: Plan([prepare.all_reduce(x, op="max"), prepare.all_gather(x, y)])())


def stage_stream(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """Asynchronous calls on a stream of one's own."""
    with pynccl.Stream() as stream:
        x = np.ones(1000)
        if rank == victim:
            time.sleep(0.3)
            die(folder)
        return told(folder, lambda: (comm.all_reduce(x, op="max", stream=stream), comm.synchronize(stream)))


def stage_between(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """Nobody calls anything: the trouble is known all the same, and raised by the next call."""
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    while comm.async_error() is None:
        time.sleep(0.01)
    took = since_death(folder)
    return *told(folder, lambda: comm.all_reduce(np.ones(3)))[:3], took


def stage_finalize(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, comm.finalize)


def stage_split(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, lambda: comm.split(0))


STAGES = {
    name.removeprefix("stage_"): stage for name, stage in list(globals().items()) if name.startswith("stage_")
}


def in_stage(rank: int, nranks: int, stage: str, victim: int, folder: str) -> tuple[Outcome, Outcome, bool]:
    comm = pynccl.init(timeout=20)
    x = np.ones(10)
    comm.all_reduce(x)
    assert x[0] == nranks
    comm.barrier()
    together(nranks)
    first = STAGES[stage](comm, rank, victim, folder)
    # Every later call says the same.
    second = told(folder, lambda: comm.all_reduce(x))
    comm.abort()
    return first, second, nothing_left()


def check_survivors(results: list[Any], victims: list[int]) -> None:
    for rank, result in enumerate(results):
        if rank in victims:
            assert isinstance(result, RankError)
            assert "SIGKILL" in str(result), result
            continue
        assert isinstance(result, tuple), result
        (kind, ranks, text, took), again, clean = result
        assert (kind, ranks) == ("RankFailedError", victims), result
        assert again[:3] == (kind, ranks, text)
        assert f"rank {victims[0]} died" in text
        assert took < SOON, result
        assert clean


def cases(victims: tuple[int, ...]) -> list[Any]:
    """Every stage with every victim; the quick ones are a few of them."""
    return [
        pytest.param(stage, victim, marks=() if victim in victims[i % 2 :: 2] else pytest.mark.full)
        for i, stage in enumerate(STAGES)
        for victim in range(RANKS)
    ]


@pytest.mark.parametrize(("stage", "victim"), cases((0, 5)))
def test_killed_rank(stage: str, victim: int, tmp_path: Path) -> None:
    results = run(RANKS, in_stage, stage, victim, str(tmp_path), backend="cpu", check=False, timeout=40)
    check_survivors(results, [victim])


def creates(rank: int, nranks: int, where: str, victim: int, folder: str) -> tuple[Outcome, bool]:
    if rank == victim:
        name = "ncclCommInitRank" if where != "the channel" else "pyncclCpuExchange"
        original = getattr(capi, name)

        def fatal(*args: Any) -> Any:
            if where != "the library's rendezvous":
                die(folder)
            threading.Timer(0.05, die, [folder]).start()
            return original(*args)

        setattr(capi, name, fatal)
        if where == "the library's rendezvous":
            # Somebody is missing for as long as it takes.
            time.sleep(0.1)
    if where == "the library's rendezvous" and rank == (victim + 1) % nranks:
        create = capi.ncclCommInitRank

        def after_the_death(*args: Any) -> Any:
            while not Path(folder, "died").exists():
                time.sleep(0.01)
            return create(*args)

        setattr(capi, "ncclCommInitRank", after_the_death)  # noqa: B010
    return told(folder, lambda: pynccl.init(timeout=20)), nothing_left()


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        pytest.param(
            where,
            victim,
            marks=() if victim == 5 else pytest.mark.slow if victim == 0 else pytest.mark.full,
        )
        for where in ("before the library", "the library's rendezvous", "the channel")
        for victim in range(RANKS)
    ],
)
def test_killed_while_created(where: str, victim: int, tmp_path: Path) -> None:
    """The store, the library or the channel notices, and every survivor says the same."""
    results = run(RANKS, creates, where, victim, str(tmp_path), backend="cpu", check=False, timeout=40)
    for rank, result in enumerate(results):
        if rank == victim:
            assert isinstance(result, RankError)
            assert "SIGKILL" in str(result), result
            continue
        assert isinstance(result, tuple), result
        (kind, ranks, text, took), clean = result
        assert (kind, ranks) == ("RankFailedError", [victim]), result
        assert f"rank {victim}" in text, result
        assert took < SOON, result
        assert clean


# --- stopped, late and misled ranks -------------------------------------------------------------------------


def stops(rank: int, nranks: int, victim: int, folder: str) -> tuple[Outcome, bool]:
    together(nranks)
    comm = pynccl.init(timeout=3)
    pid = int(comm.all_gather(np.array([os.getpid()]))[victim][0])
    together(nranks)
    if rank == victim:
        die(folder, signal.SIGSTOP)
    outcome = told(folder, lambda: comm.all_reduce(np.ones(10)))
    comm.abort()
    together(nranks - 1, "over")
    if rank == (victim + 1) % nranks:
        os.kill(pid, signal.SIGKILL)
    return outcome, nothing_left()


@pytest.mark.parametrize("victim", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_stopped_rank(victim: int, tmp_path: Path) -> None:
    results = run(RANKS, stops, victim, str(tmp_path), backend="cpu", check=False, timeout=40)
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        (kind, ranks, text, took), clean = result
        assert (kind, ranks, clean) == ("RankFailedError", [victim], True), result
        assert f"rank {victim} is not responding" in text
        # They may have begun to wait before it stopped.
        assert 1 < took < 3 + SOON, result


def asks_only(rank: int, nranks: int, timeout: float) -> tuple[list[int], str] | None:
    """Wait with a time-out that is not the communicator's for a rank that is stopped."""
    comm = pynccl.init(timeout=60)
    pid = int(comm.all_gather(np.array([os.getpid()]))[1][0])
    together(nranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    stream = pynccl.Stream()
    comm.all_reduce(np.ones(10), stream=stream)
    with pytest.raises(NcclTimeoutError) as caught:
        comm.synchronize(stream, timeout=timeout)
    together(nranks - 1, "over")
    comm.abort()
    if rank == 2:
        os.kill(pid, signal.SIGKILL)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("timeout", [1.0, 2.0, 3.0])
def test_a_wait_that_only_asks_names_a_stopped_rank(timeout: float) -> None:
    """With 1 s the rank has not had the time in which it should respond, but nobody says that it did."""
    first, stopped, last = run(3, asks_only, timeout, backend="cpu", check=False, timeout=40)
    assert isinstance(stopped, RankError)
    for ranks, text in (first, last):
        assert "all ranks respond" not in text
        assert ranks == [1]
        assert timeout == 1 or "rank 1 is not responding: last heard of" in text


def stops_near_the_end(rank: int, nranks: int, after: float) -> tuple[str, list[int]]:
    """The rank that all wait for is stopped when their time is nearly up; they began at different times."""
    comm = pynccl.init(timeout=2)
    pid = int(comm.all_gather(np.array([os.getpid()]))[1][0])
    together(nranks)
    if rank == 1:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.07 * rank)
    with pytest.raises(NcclError) as caught:
        comm.all_reduce(np.ones(10))
    comm.abort()
    together(nranks - 1, "over")
    if rank == 2:
        os.kill(pid, signal.SIGKILL)
    return type(caught.value).__name__, getattr(caught.value, "ranks", [])


@pytest.mark.parametrize(
    "after",
    [1.6, *(pytest.param(after, marks=pytest.mark.slow) for after in (0.9, 1.2, 2.0, 2.2))],
)
def test_one_verdict_at_the_timeout(after: float) -> None:
    results = run(5, stops_near_the_end, after, backend="cpu", check=False, timeout=40)
    outcomes = {(kind, tuple(ranks)) for kind, ranks in results[:1] + results[2:]}
    assert len(outcomes) == 1, results
    assert outcomes <= {("RankFailedError", (1,)), ("NcclTimeoutError", (1,))}
    if after < 1.5:
        assert outcomes == {("RankFailedError", (1,))}


def waits_for_some(rank: int, nranks: int, what: str) -> list[int] | None:
    comm = pynccl.init(timeout=1.5)
    x = np.ones(3)
    together(nranks)
    ranks = None
    if rank == 0:
        with pytest.raises(NcclTimeoutError) as caught:
            {"recv": lambda: comm.recv(x, 2), "finalize": comm.finalize}.get(what, lambda: comm.split(0))()
        ranks = list(caught.value.ranks)
        waits = re.search(r"; it waits for ranks? ([0-9-]+); all ranks respond", str(caught.value))
        assert (waits and waits[1]) == ("1-2" if what in ("finalize", "split") else None), caught.value
    elif what == "split, the others all_reduce":
        with pytest.raises(NcclTimeoutError) as caught:
            comm.all_reduce(x)
        ranks = list(caught.value.ranks)
    together(nranks, "over")
    comm.abort()
    return ranks


@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("recv", [[2], None, None]),
        ("split", [[1, 2], None, None]),
        ("finalize", [[1, 2], None, None]),
        ("split, the others all_reduce", [[], [], []]),
    ],
)
def test_only_ranks_that_a_call_waits_for_are_late(what: str, late: list[list[int] | None]) -> None:
    assert run(3, waits_for_some, what, backend="cpu", timeout=40) == late


def ring(comm: Communicator, x: Any, y: Any) -> None:
    comm.send_recv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)


def pipeline(comm: Communicator, x: Any, y: Any) -> None:
    if comm.rank:
        comm.recv(y, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(x, comm.rank + 1)


def to_rank_0(comm: Communicator, x: Any, y: Any) -> None:
    for other in range(1, comm.size):
        if comm.rank == 0:
            comm.recv(y, other)
            comm.send(x, other)
        elif comm.rank == other:
            comm.send(x, 0)
            comm.recv(y, 0)


def pairs(comm: Communicator, x: Any, y: Any) -> None:
    other = comm.rank ^ 1
    comm.recv(y, other) if comm.rank % 2 else comm.send(x, other)
    comm.barrier()


def waits_through_others(rank: int, nranks: int, pattern: Callable[..., None], late: int) -> list[int] | None:
    comm = pynccl.init(timeout=1.5)
    x, y = np.ones(100), np.zeros(100)
    for _ in range(3):
        pattern(comm, x, y)
    together(nranks)
    ranks = None
    if rank != late:
        # A small message does not wait for its receiver.
        failed = error_of(lambda: pattern(comm, x, y), NcclError)
        assert isinstance(failed, NcclTimeoutError)
        ranks = failed.ranks
    together(nranks, "over")
    comm.abort()
    return ranks


@pytest.mark.parametrize("check", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", [ring, pipeline, to_rank_0, pairs])
def test_the_late_rank_is_named_for_which_others_wait(
    pattern: Callable[..., None], late: int, check: str
) -> None:
    """Most ranks wait for a rank that waits itself."""
    env = {"PYNCCL_CHECK": check}
    results = run(4, waits_through_others, pattern, late, backend="cpu", env=env, timeout=40)
    assert results == [None if rank == late else [late] for rank in range(4)]


def comes_after_the_time_out(rank: int, nranks: int, seconds: float) -> list[int] | None:
    """The last rank comes while the others hear who is late; rank 0 waits for it through all others."""
    comm = pynccl.init(timeout=1)
    x, y = np.ones(100), np.zeros(100)
    together(nranks)
    if rank == nranks - 1:
        time.sleep(1 + seconds)
    ranks = None
    try:
        if rank < nranks - 1:
            comm.recv(y, rank + 1)
        if rank:
            comm.send(x, rank - 1)
        comm.barrier()
    except NcclTimeoutError as error:
        ranks = error.ranks
    together(nranks, "over")
    comm.abort()
    return ranks


@pytest.mark.parametrize("check", ["1", pytest.param("", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seconds", [0.25, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.2, 0.3))])
def test_a_rank_that_comes_after_the_time_out_was_late(seconds: float, check: str) -> None:
    env = {"PYNCCL_CHECK": check}
    named = run(4, comes_after_the_time_out, seconds, backend="cpu", env=env, timeout=40)
    # Where the machine is slow, the others hear it in time.
    assert {tuple(ranks) for ranks in named if ranks is not None} <= {(3,)}


def waits_in_a_child(rank: int, nranks: int) -> list[int] | None:
    """Rank 0 is late; rank 1 waits for it on another communicator."""
    with pynccl.init(timeout=1.5) as comm, comm.split(0) as child:
        x = np.ones(3)
        together(nranks)
        ranks = None
        if rank:
            ranks = error_of(lambda: child.recv(x, 0) if rank == 1 else comm.all_reduce(x), NcclError).ranks
        together(nranks, "over")
        comm.abort()
        child.abort()
    return ranks


def test_a_rank_that_waits_on_another_communicator_is_not_late() -> None:
    assert run(4, waits_in_a_child, backend="cpu", timeout=40) == [None, [0], [0], [0]]


def fails_after_another_has_left(rank: int, nranks: int) -> tuple[str, str] | None:
    """Rank 1 returns without destroy; then rank 2 has no descriptor for its first message to rank 0."""
    os.environ["NCCL_HOSTID"] = str(rank)
    comm = pynccl.init(timeout=10)
    other = int(comm.all_gather(np.array([os.getpid()]))[1][0])
    if rank == 1:
        return None
    # Its connections, whose descriptors come free, end with the process.
    until_gone([other])
    time.sleep(0.5)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 2:
        tell("soon")
        leave_descriptors(0)
    else:
        # To tell it afterwards rank 2 would need a descriptor.
        hear("soon")
        time.sleep(0.5)
    with pytest.raises(NcclError) as caught:
        comm.send_recv(np.ones(3), 2 - rank, np.zeros(3), 2 - rank)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    comm.abort()
    return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_left_is_not_blamed_for_another_failure() -> None:
    first, _, last = run(3, fails_after_another_has_left, backend="cpu", timeout=40)
    for outcome in (first, last):
        assert outcome is not None
        kind, text = outcome
        assert kind in ("NcclSystemError", "NcclRemoteError"), outcome
        assert "cannot connect to rank 0" in text and "Too many open files" in text


def send_to_all(comm: Communicator) -> None:
    with pynccl.group():
        for other in set(range(comm.size)) - {comm.rank}:
            comm.send(np.ones(3), other)
            comm.recv(np.zeros(3), other)


def groups_first_messages(rank: int, nranks: int) -> str:
    """The ranks have no descriptor for their first messages, which are a group."""
    os.environ["NCCL_HOSTID"] = str(rank)
    with pynccl.init() as comm:
        comm.barrier()
        together(nranks, "barrier")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        leave_descriptors(0)
        with pytest.raises(NcclError) as caught:
            send_to_all(comm)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        comm.abort()
    return str(caught.value)


def test_a_group_tells_why_a_communicator_failed() -> None:
    for text in run(3, groups_first_messages, backend="cpu", timeout=40):
        assert "Too many open files" in text and " of 3: " in text


def late(rank: int, nranks: int, how: str, folder: str) -> Outcome:
    together(nranks)
    comm = pynccl.init(timeout=2)
    x = np.ones(10)
    for _ in range(3):
        comm.all_reduce(x, op="max")
    comm.barrier()
    together(nranks)
    write_down(folder)
    if rank == 1:
        if how == "sleeps in C":
            # PyDLL keeps the GIL: no Python runs in this process meanwhile.
            ctypes.PyDLL(None).usleep(5_000_000)
        elif how == "extra call":
            comm.all_gather(x)
        else:
            hear("told")
    with pynccl.Stream() as stream:
        if how == "nobody waits":
            if rank != 1:
                comm.all_reduce(x, stream=stream)
            while comm.async_error() is None:
                time.sleep(0.01)
            took = since_death(folder)
            outcome = *told(folder, lambda: comm.all_reduce(x))[:3], took
        else:
            outcome = told(folder, lambda: comm.all_reduce(x))
        if rank == 0:
            tell("told")
        comm.abort()
        return outcome


@pytest.mark.parametrize(
    "how", [pytest.param("sleeps", marks=pytest.mark.slow), "sleeps in C", "nobody waits"]
)
def test_late_rank(how: str, tmp_path: Path) -> None:
    """Every rank, the late one too, is told after the time-out; nobody is taken for dead."""
    results = run(3, late, how, str(tmp_path), backend="cpu", timeout=30)
    for rank, (kind, ranks, text, took) in enumerate(results):
        assert (kind, ranks) == ("NcclTimeoutError", [1]), results
        assert "within 2 s" in text
        assert rank == 1 or took < 2 + 3, results
        assert "rank 1: #4 barrier" in text
        assert "rank 0: #5 all_reduce" in text


def aborts(rank: int, nranks: int, folder: str) -> Outcome:
    """Rank 2 fails by itself, in the body of a with statement."""
    try:
        with pynccl.init(timeout=20) as comm:
            comm.barrier()
            if rank == 2:
                write_down(folder)
                raise KeyError("mine alone")
            x = np.ones(10)
            while True:
                comm.all_reduce(x, op="max")
    except NcclError as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), since_death(folder)
    except KeyError:
        return "KeyError", [], "", 0.0


def comes_while_the_others_are_heard(rank: int, nranks: int, call: str) -> list[float]:
    """Rank 1 makes the call after the others' time-out, while they hear whether it responds."""
    comm = pynccl.init(timeout=1)
    comm.barrier()
    heard = comm._core.watch.hear

    def hear_slowly() -> None:
        tell("the time-out has passed")
        heard()
        hear("rank 1 has come")

    comm._core.watch.hear = hear_slowly  # type: ignore[method-assign]
    if rank == 1:
        hear("the time-out has passed")
    x = np.ones(2)
    if call == "all_reduce":
        comm.all_reduce(x)
    else:
        getattr(comm, call)()
    if rank == 1:
        tell("rank 1 has come")
    if call == "suspend":
        comm.resume()
    if call != "finalize":
        comm.all_reduce(x, wait=False).wait()
    comm.destroy()
    return [float(one) for one in x]


@pytest.mark.parametrize(("call", "expected"), [("all_reduce", 4), ("suspend", 2), ("finalize", 1)])
def test_a_call_that_completes_while_the_others_are_heard(call: str, expected: int) -> None:
    results = run(2, comes_while_the_others_are_heard, call, backend="cpu", timeout=40)
    assert results == 2 * [[expected, expected]]


def test_exception_in_one_rank(tmp_path: Path) -> None:
    results = run(4, aborts, str(tmp_path), backend="cpu", timeout=30)
    assert results[2][0] == "KeyError"
    for kind, ranks, text, took in (*results[:2], results[3]):
        assert (kind, ranks) == ("RankFailedError", [2]), results
        assert "rank 2 aborted its communicator" in text
        assert took < SOON


def polls(rank: int, nranks: int, folder: str) -> Outcome:
    """Rank 2 dies; rank 0 learns of it by polling, and aborts for that reason."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    together(nranks)
    if rank == 2:
        die(folder)
    if rank == 0:
        while comm.async_error() is None:
            time.sleep(0.001)
        comm.abort()
        return "aborted", [], "", 0.0
    outcome = told(folder, lambda: comm.all_reduce(np.ones(10), op="max"))
    comm.abort()
    return outcome


def test_abort_for_a_death(tmp_path: Path) -> None:
    """Who aborts because of a death is not taken for the cause."""
    results = run(3, polls, str(tmp_path), backend="cpu", check=False, timeout=30)
    assert results[0] == ("aborted", [], "", 0.0)
    kind, ranks, text, took = results[1]
    assert (kind, ranks) == ("RankFailedError", [2]), (text, took)


def leaves(rank: int, nranks: int, how: str) -> tuple[str, list[int], str]:
    together(nranks)
    comm = pynccl.init(timeout=3)
    comm.barrier()
    together(nranks)
    if rank == 1:
        if how == "destroy":
            comm.destroy()
            return "", [], ""
        os._exit(0)
    try:
        while True:
            comm.all_reduce(np.ones(10))
    except NcclError as error:
        comm.abort()
        return type(error).__name__, getattr(error, "ranks", []), str(error)


def test_exit_without_destroy() -> None:
    results = run(3, leaves, "exit", backend="cpu", check=False, timeout=30)
    for kind, ranks, text in (results[0], results[2]):
        assert (kind, ranks) == ("RankFailedError", [1])
        assert "exited without closing its communicator" in text


def test_destroy_on_one_rank_only() -> None:
    """The CPU library says so by itself, at once; it is no death."""
    results = run(3, leaves, "destroy", backend="cpu", check=False, timeout=30)
    for kind, ranks, text in (results[0], results[2]):
        assert kind in ("NcclRemoteError", "CollectiveMismatchError", "NcclTimeoutError"), results
        assert ranks == []
        assert "rank 1" in text


# --- who pays, and what is left -----------------------------------------------------------------------------


def lives(rank: int, nranks: int) -> list[Any]:
    """Count threads and descriptors without a time-out, with one, and after many."""

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    plain = pynccl.init()
    plain.all_reduce(np.ones(3))
    before, running = counts(), bool(lib.pynccl_watchdog_runs())
    seen = []
    for _ in range(5):
        with pynccl.init(timeout=10) as comm:
            comm.all_reduce(np.ones(3))
            half = comm.split(rank % 2)
            assert half is not None
            half.all_reduce(np.ones(3))
            seen.append((lib.pynccl_watched(), lib.pynccl_watchdog_runs()))
            half.destroy()
    plain.all_reduce(np.ones(3))
    plain.barrier()
    deadline = time.monotonic() + 10
    while max(np.subtract(after := counts(), before)) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    plain.destroy()
    return [before, running, seen, after]


def test_nothing_is_started_without_a_timeout_and_nothing_left() -> None:
    for before, running, seen, after in run(4, lives, backend="cpu", timeout=40):
        assert not running
        assert seen == [(2, 1)] * 5
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def by_environment(rank: int, nranks: int, timeout: float | None = None) -> str:
    together(nranks)
    comm = pynccl.init(timeout=timeout)
    while rank and comm.async_error() is None:
        time.sleep(0.01)
    with pytest.raises(NcclTimeoutError) as caught:
        comm.all_reduce(np.ones(3))
    comm.abort()
    return str(caught.value)


def test_timeout_by_the_environment() -> None:
    for text in run(2, by_environment, backend="cpu", timeout=30, env={"PYNCCL_TIMEOUT": "2"}):
        assert "within 2 s" in text


@pytest.mark.parametrize(("given", "variable"), [(2, "60"), (3, "1")])
def test_an_argument_counts_before_the_environment(given: float, variable: str) -> None:
    env = {"PYNCCL_TIMEOUT": variable}
    for text in run(2, by_environment, given, backend="cpu", timeout=30, env=env):
        assert f"within {given} s" in text


def waits_long(rank: int, nranks: int, timeout: float | None) -> None:
    with pynccl.init(timeout=timeout) as comm, pynccl.Event() as event:
        assert comm.all_reduce(np.ones(3))[0] == nranks
        comm.barrier()
        half = comm.split(0)
        assert half is not None
        half.destroy()
        comm.synchronize(timeout=timeout)
        event.record(comm._core.own_stream)
        event.synchronize(timeout=timeout)


@pytest.mark.parametrize("seconds", ["1e9", "1e20", "1e308"])
def test_a_timeout_beyond_every_clock(seconds: str) -> None:
    run(2, waits_long, None, backend="cpu", timeout=30, env={"PYNCCL_TIMEOUT": seconds})
    run(2, waits_long, float(seconds), backend="cpu", timeout=30)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_bad_timeout_in_the_environment(value: str) -> None:
    with pytest.raises(RankError, match="PYNCCL_TIMEOUT is .* expected a positive number of seconds"):
        run(1, by_environment, backend="cpu", timeout=30, env={"PYNCCL_TIMEOUT": value})


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_bad_exit_timeout(value: str) -> None:
    with pytest.raises(RankError, match="PYNCCL_EXIT_TIMEOUT is .* expected seconds, 0 or more"):
        run(1, by_environment, backend="cpu", timeout=30, env={"PYNCCL_EXIT_TIMEOUT": value})


def one_has_a_timeout(rank: int, nranks: int) -> str:
    uid = np.zeros(128, np.uint8)
    with pynccl.init() as first:
        if rank == 0:
            uid[:] = np.frombuffer(bytes(pynccl.get_unique_id()), np.uint8)
        first.broadcast(uid)
        if rank:
            comm = Communicator(nranks, bytes(uid), rank)
            hear("refused")
            comm.abort()
            return ""
        with pytest.raises(NcclError) as caught:
            Communicator(nranks, bytes(uid), rank, timeout=3)
        tell("refused")
        return str(caught.value)


def test_timeouts_are_for_all_ranks_or_none() -> None:
    first, _ = run(2, one_has_a_timeout, backend="cpu", timeout=30)
    assert "on all ranks of a communicator, or on none" in first


def forks(rank: int, nranks: int, folder: str) -> tuple[Outcome, str]:
    """A forked child outlives the rank: its copies of the connections must not hide the death."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    together(nranks)
    refused = ""
    if rank == 1:
        child = os.fork()
        if child == 0:
            try:
                comm.all_reduce(np.ones(3))
            except NcclError as error:
                Path(folder, "refused").write_text(str(error))
            Path(folder, "child").write_text(str(os.getpid()))
            time.sleep(20)
            os._exit(0)
        while not Path(folder, "child").exists():
            time.sleep(0.01)
        die(folder)
    outcome = told(folder, lambda: comm.all_reduce(np.ones(3)))
    refused = Path(folder, "refused").read_text()
    if rank == 0:
        os.kill(int(Path(folder, "child").read_text()), signal.SIGKILL)
    comm.abort()
    return outcome, refused


def test_fork_after_init(tmp_path: Path) -> None:
    results = run(3, forks, str(tmp_path), backend="cpu", check=False, timeout=30)
    for outcome, refused in (results[0], results[2]):
        assert outcome[:2] == ("RankFailedError", [1])
        assert outcome[3] < SOON
        assert "forked" in refused


def forks_in_init(rank: int, nranks: int, owner: str, step: str, folder: str) -> Outcome:
    """A child that is forked while the control channel opens outlives the rank."""
    kind = getattr(channel, owner)
    going_on = getattr(kind, step)

    def forked(*args: Any) -> Any:
        setattr(kind, step, going_on)
        done = going_on(*args)
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        Path(folder, "child").write_text(str(child))
        return done

    if rank == 1:
        setattr(kind, step, forked)
    comm = pynccl.init(timeout=20)
    together(nranks)
    if rank == 1:
        die(folder)
    outcome = told(folder, lambda: comm.all_reduce(np.ones(3)))
    if rank == 0:
        os.kill(int(Path(folder, "child").read_text()), signal.SIGKILL)
    comm.abort()
    return outcome


@pytest.mark.parametrize(
    ("owner", "step"),
    [("_Links", "_connect"), ("_Links", "_found"), ("_Lines", "add"), ("_Lines", "hand_over")],
)
def test_fork_in_init(owner: str, step: str, tmp_path: Path) -> None:
    results = run(3, forks_in_init, owner, step, str(tmp_path), backend="cpu", check=False, timeout=30)
    for outcome in (results[0], results[2]):
        assert outcome[:2] == ("RankFailedError", [1])
        assert outcome[3] < SOON


def interrupted(rank: int, nranks: int, wait: str) -> tuple[str, float]:
    comm = pynccl.init(timeout=30)
    comm.barrier()
    if rank == 1:
        # Does not come until the other has left.
        try:
            time.sleep(1)
            while comm.async_error() is None:
                time.sleep(0.01)
        finally:
            comm.abort()
        return "", 0.0
    x = np.ones(10)
    with pynccl.Stream() as stream:
        at = interrupted_soon()
        try:
            if wait == "call":
                comm.all_reduce(x)
            elif wait == "barrier":
                comm.barrier()
            elif wait == "synchronize":
                comm.all_reduce(x, stream=stream)
                comm.synchronize()
            elif wait == "group":
                with pynccl.group():
                    comm.recv(x, 1)
            elif wait == "plan":
                Plan([comm.prepare.all_reduce(x)])()
            elif wait == "split":
                comm.split(0)
            elif wait == "finalize":
                comm.finalize()
        except KeyboardInterrupt:
            took = time.monotonic() - at[0]
            comm.abort()
            return "KeyboardInterrupt", took
    return "nothing", 0.0


@pytest.mark.parametrize("wait", ["call", "barrier", "synchronize", "group", "plan", "split", "finalize"])
def test_one_interrupt_is_enough(wait: str) -> None:
    (what, took), _ = run(2, interrupted, wait, backend="cpu", timeout=30)
    assert what == "KeyboardInterrupt"
    assert took < SOON


def dropped(rank: int, nranks: int) -> bool:
    """Let go of watched communicators, without closing them, while the watchdog goes through its list."""
    others = [Communicator(1, pynccl.get_unique_id(), 0, timeout=30) for _ in range(8)]
    for _ in range(300):
        Communicator(1, pynccl.get_unique_id(), 0, timeout=30)
    for comm in others:
        comm.destroy()
    return nothing_left()


def test_a_communicator_that_is_dropped_while_it_is_watched() -> None:
    assert run(1, dropped, backend="cpu", timeout=30) == [True]


def aborts_while_it_waits(rank: int, nranks: int) -> str:
    """Rank 2 is missing; rank 0 has no time-out, and another thread aborts."""
    comm = pynccl.init()
    together(nranks)
    text = ""
    if rank == 0:
        threading.Timer(1, comm.abort).start()
    if rank < 2:
        with pytest.raises(NcclError) as caught:
            comm.all_reduce(np.ones(3))
        text = str(caught.value)
    together(nranks, "over")
    comm.abort()
    return text


def test_an_abort_tells_for_whom_the_rank_waited() -> None:
    first, second, _ = run(3, aborts_while_it_waits, backend="cpu", timeout=40)
    why = "rank 0 aborted its communicator: rank 0 waits in AllReduce(count 3, float64, sum) #1 for rank 2"
    # Rank 0's own call ends by the library's error, or by the closed communicator, whichever it sees first.
    assert why in first or "cannot be used: it was aborted" in first, first
    assert f"rank 0 reports: {why}" in second, second


def hears_of_another_call(rank: int, nranks: int) -> Outcome | None:
    """Rank 1 dies. Of rank 0's calls on a stream one more fails than its wait has reported."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    query = capi.pyncclCpuStreamQuery

    def fails(comm: int, stream: int) -> int:
        query(comm, stream)
        raise pynccl.NcclRemoteError("rank 1 died", function="pyncclCpuStreamQuery")

    stream = pynccl.Stream()
    try:
        comm.all_reduce(np.ones(1), stream=stream)
        setattr(capi, "pyncclCpuStreamQuery", fails)  # noqa: B010
        comm.synchronize()
    except NcclError as error:
        comm.abort()
        return type(error).__name__, getattr(error, "ranks", []), str(error), 0.0
    return None


def test_a_death_explains_each_of_several_calls_that_fail() -> None:
    first, second = run(2, hears_of_another_call, backend="cpu", check=False, timeout=40)
    assert isinstance(second, RankError)
    assert first[:2] == ("RankFailedError", [1])
