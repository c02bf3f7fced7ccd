"""Ranks that fail while a communicator is split or grown: who is named, how soon, and what stays."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import census, hear, leave_descriptors, publish, starved, tell, together, until
from pynccl import Communicator, NcclError, NcclTimeoutError, RankFailedError, UniqueId, capi
from pynccl._comm.core import Core
from pynccl._watch.survivors import _PROOF
from pynccl.testing import RankError, run
from ranks import on_ranks, total

# What the machine may take beyond a time-out.
SOON = 3.0
Outcome = tuple[str, list[int], str, float]


def outcome(what: Any) -> Outcome:
    """Return what came of a call, and how long it took."""
    start = time.monotonic()
    try:
        what()
    except NcclError as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), time.monotonic() - start
    return "returned", [], "", time.monotonic() - start


# --- split --------------------------------------------------------------------------------------------------


def dies_after_its_part(rank: int, nranks: int) -> Outcome | None:
    """Rank 2 dies in a split in which rank 1 has its part; rank 0 hears of it before it would split."""
    comm = pynccl.init()
    comm.barrier()
    if rank == 2:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if rank:
        came = outcome(lambda: comm.split(0))
        tell("rank 1 has ended")
        return came
    until(lambda: comm.async_error() is not None, 20)
    refused = outcome(lambda: comm.split(0))
    hear("rank 1 has ended")
    return refused


def test_a_death_of_which_the_other_ranks_hear_before_they_split() -> None:
    """Nobody leaves, so only the failure of the communicator can end the wait of rank 1."""
    *results, _ = run(3, dies_after_its_part, backend="cpu", check=False, timeout=60)
    for kind, _, text, _ in results:
        assert kind == "NcclRemoteError" and re.search(r"rank 2 \(.*\) died", text), results


def fails_in_split(rank: int, nranks: int, victim: int, number: int, blocking: bool) -> Outcome:
    """The victim fails after the library's split, where the child's control channel is opened."""
    comm = pynccl.init(timeout=4, config=None if blocking else {"blocking": 0})
    pid = int(comm.all_gather(np.array([os.getpid()]))[victim][0])
    together(nranks)
    if rank == victim:
        fail = (lambda *_: os.kill(os.getpid(), number)) if number else lambda *_: sys.exit(0)
        setattr(capi, "pyncclCpuExchange", fail)  # noqa: B010
    came = outcome(lambda: comm.split(rank % 2))
    together(nranks - 1, "over")
    comm.abort()
    if rank == (victim + 1) % nranks:
        os.kill(pid, signal.SIGKILL)
    return came


@pytest.mark.parametrize("blocking", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0])
def test_a_rank_fails_inside_split(number: int, blocking: bool) -> None:
    """Those that share its child name it as the parent does, and nobody waits for twice the time-out.

    Without a signal the rank leaves by sys.exit(0), which is no failure where nobody waits for it.
    """
    victim = 3
    results = run(6, fails_in_split, victim, int(number), blocking, backend="cpu", check=False, timeout=40)
    for rank, result in enumerate(results):
        if rank == victim:
            assert isinstance(result, RankError)
            continue
        assert not isinstance(result, RankError), result
        kind, ranks, text, took = result
        assert took < (4 if number == signal.SIGSTOP else 0) + SOON, results
        if rank % 2 == victim % 2 or kind != "returned":
            assert (kind, ranks) == ("RankFailedError", [victim]), results
            assert f"rank {victim} " in text


def is_slow_in_split(rank: int, nranks: int, victim: int, number: int) -> Outcome:
    """The victim takes its time before one of the exchanges that open the child's control channel."""
    comm = pynccl.init(timeout=4)
    together(nranks)
    exchange, calls = capi.pyncclCpuExchange, iter(range(9))

    def slow(*args: Any) -> None:
        if next(calls) == number:
            hear("told")
        exchange(*args)

    if rank == victim:
        setattr(capi, "pyncclCpuExchange", slow)  # noqa: B010
    came = outcome(lambda: comm.split(rank % 2))
    if rank == (victim + 2) % nranks:
        tell("told")
    together(nranks, "over")
    comm.abort()
    return came


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_rank_is_slow_inside_split(number: int) -> None:
    """All that share its child name it, numbered as in the parent, and so does the rank itself.

    In the last exchange it gets what the others have sent, and learns of their time-out from the parent.
    """
    victim = 3
    results = run(6, is_slow_in_split, victim, number, backend="cpu", timeout=40)
    for rank, (kind, ranks, text, _) in enumerate(results):
        knows = rank % 2 == victim % 2 and (rank != victim or number < 2)
        if knows or kind != "returned":
            assert (kind, ranks) == ("NcclTimeoutError", [victim]), results
            assert "ncclCommSplit took longer than 4 s on rank" in text
            assert f"; it waits for rank {victim}; all ranks respond" in text


def comes_too_late_to_split(rank: int, nranks: int) -> Outcome:
    """The victim is stopped beyond the time-out, and comes while the others hear whether it responds."""
    comm, victim = pynccl.init(timeout=3), 1
    comm.barrier()
    if rank == victim:
        if os.fork() == 0:
            time.sleep(3.4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    came = outcome(lambda: comm.split(0))
    comm.abort()
    return came


def test_a_rank_that_comes_too_late_to_split() -> None:
    results = run(4, comes_too_late_to_split, backend="cpu", timeout=40)
    # On a busy machine the rank may come after the others have heard nothing of it.
    assert {kind for kind, *_ in results} <= {"NcclTimeoutError", "RankFailedError"}, results
    assert [ranks for _, ranks, *_ in results] == [[1]] * 4, results


def splits_with_a_dead_rank(rank: int, nranks: int) -> str:
    """Rank 2 dies inside a split; rank 0 hears of it, and leaves without a call of split."""
    comm = pynccl.init()
    comm.barrier()
    if rank == 2:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if rank == 0:
        until(lambda: capi.ncclCommGetAsyncError(comm.handle) != 0, 30)
        comm.destroy()
        return ""
    return str(outcome(lambda: comm.split(0))[:3])


def test_a_rank_that_left_after_a_death_is_not_blamed() -> None:
    _, told, _ = run(3, splits_with_a_dead_rank, backend="cpu", check=False, timeout=50)
    assert "NcclRemoteError" in told and "rank 2 (pid" in told and "died" in told


def departs_after_a_kill(rank: int, nranks: int, in_child: bool) -> str:
    """Rank 0 kills rank 2 and destroys its communicators: rank 1 can hear of the departure first."""
    comm = pynccl.init()
    child = comm.split(rank // 2)
    assert child
    pids = comm.all_gather(np.array([os.getpid()]))[:, 0]
    together(nranks)
    if rank == 2:
        signal.pause()
    if rank == 1:
        return str(outcome(lambda: total(child) if in_child else comm.split(0))[:3])
    time.sleep(0.3)  # rank 1 waits
    os.kill(int(pids[2]), signal.SIGKILL)
    child.destroy()
    comm.destroy()
    return ""


@pytest.mark.parametrize("in_child", [False, True])
def test_a_departure_just_after_a_kill_is_not_blamed(in_child: bool) -> None:
    _, told, _ = run(3, departs_after_a_kill, in_child, backend="cpu", check=False, timeout=50)
    assert "NcclRemoteError" in told and "rank 2 (pid" in told and "died" in told


def waits_to_be_connected(rank: int, nranks: int, then: str) -> tuple[str, int]:
    """Rank 3 does its part in the parent and stops, so rank 0 waits for its connection; then a rank dies."""
    comm = pynccl.init()
    pids = [int(pid) for pid in comm.all_gather(np.array([os.getpid()])).ravel()]
    together(nranks)
    if rank == 2:  # nobody has the data of the exchange before
        time.sleep(0.5)
        os.kill(pids[3], signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", "sleep 1; " + then.format(*pids)])
    size = 0

    def split() -> None:
        nonlocal size
        size = capi.ncclCommCount(capi.ncclCommSplit(comm.handle, int(rank == 2), 0))

    _, _, text, _ = outcome(split)
    together(nranks - 1, "over")
    comm.abort()
    return text, size


def test_the_death_of_a_rank_ends_the_wait_for_its_connection() -> None:
    """There is no time-out; the error has the rank in the parent."""
    zero, one, two, _ = run(4, waits_to_be_connected, "kill -9 {3}", backend="cpu", check=False, timeout=30)
    for result in (zero, one):
        assert not isinstance(result, RankError), result
        assert "rank 3 (pid" in result[0] and "died" in result[0]
    assert two == ("", 1)


def test_the_death_of_another_rank_leaves_a_creation_alone() -> None:
    then = "kill -9 {2}; sleep 1; kill -CONT {3}"
    zero, one, two, three = run(4, waits_to_be_connected, then, backend="cpu", check=False, timeout=30)
    assert [zero, one, three] == [("", 3)] * 3
    assert isinstance(two, RankError)


def splits_until_a_kill(rank: int, nranks: int, seconds: float, hosts: int) -> str:
    """The others may be anywhere in a split, or in a call on the child, and leave at once when they hear."""
    os.environ["NCCL_HOSTID"] = f"host {rank % hosts}"
    comm = pynccl.init()
    comm.barrier()
    if rank == 1:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def calls() -> None:
        while child := comm.split(rank % 2):
            total(child)

    text = str(outcome(calls)[:3])
    comm.abort() if rank == 0 else comm.destroy()
    return text


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_kill_amid_splits(part: int) -> None:
    """Without a time-out all ranks end, and name it."""
    hosts = 1 + part % 4
    results = run(4, splits_until_a_kill, part / 40, hosts, backend="cpu", check=False, timeout=30)
    for rank in (0, 2, 3):
        assert "NcclRemoteError" in str(results[rank]), results
        # In the child, whose calls may fail too, it is rank 0.
        if "ncclAllReduce" not in str(results[rank]):
            assert re.search(r"rank 1 \(pid \d+ on .*\) died", str(results[rank])), results


def dies_after_the_librarys_split(rank: int, nranks: int) -> list[int]:
    """Rank 1 dies when the library has split; the parts of the others are complete then."""
    with pynccl.init_all(1)[0]:
        before = census()[0]
    comm = pynccl.init(timeout=10)
    comm.barrier()
    settle = Core.settle

    def after_the_death(self: Core, *arguments: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: self.watch.verdict() is not None)
        settle(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Core, "settle", after_the_death)
        with pytest.raises(RankFailedError) as caught:
            comm.split(rank % 2)
    comm.abort()
    gc.collect()
    until(lambda: not census()[0] - before)  # a connection ends once both sides have aborted
    return caught.value.ranks


def test_a_split_that_the_death_of_another_part_ends_leaves_nothing() -> None:
    results = run(4, dies_after_the_librarys_split, backend="cpu", check=False, timeout=60)
    assert results[0] == results[2] == [1]


def splits_short_of_descriptors(rank: int, nranks: int, timeout: float | None) -> list[Outcome]:
    comm = pynccl.init(timeout=timeout)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    for spare in (0, 1, 2, 3, 4, 5, 6, 8):
        together(nranks, f"split {spare}")
        if rank == 1:
            leave_descriptors(spare)
        outcomes.append(outcome(lambda: comm.split(0)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        assert total(comm) == 3
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [pytest.param(None, marks=pytest.mark.slow), 30])
def test_split_without_descriptors(timeout: float | None) -> None:
    """Every rank is told at once, by whom; the communicator itself goes on."""
    zero, one, two = run(3, splits_short_of_descriptors, timeout, backend="cpu", timeout=50)
    assert one[0][0] == "NcclSystemError"
    for (kind, ranks, text, _), *others in zip(one, zero, two, strict=True):
        if kind == "returned":
            assert [other[0] for other in others] == ["returned"] * 2
            continue
        assert (kind, ranks) == ("NcclSystemError", []) and "Too many open files" in text
        for kind, ranks, text, seconds in others:
            assert kind in ("NcclSystemError", "NcclRemoteError") and "rank 1" in text
            assert not ranks and seconds < 10


def splits_short_of_memory(rank: int, nranks: int, spare: int, sound: bool) -> list[Outcome]:
    comm = pynccl.init(timeout=15)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    together(nranks)
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    first = outcome(lambda: comm.split(0))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    if sound:
        assert total(comm) == 3
    # An error of its own, which is not that of the split.
    return [first, outcome(lambda: comm.all_reduce(np.ones(4 if rank == 1 else 8)))]


# Less than the stack of a thread; enough for one, and too little for the shared memory.
@pytest.mark.parametrize("spare", [0, pytest.param(10 << 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sound", [False, True])
def test_split_without_memory(spare: int, sound: bool) -> None:
    """Every rank is told at once, by whom; the communicator itself goes on, until the ranks disagree."""
    zero, one, two = run(3, splits_short_of_memory, spare, sound, backend="cpu", timeout=50)
    assert one[0][0] == "NcclSystemError" and "memory" in one[0][2]
    for (kind, _, text, seconds), _ in (zero, two):
        assert kind in ("NcclSystemError", "NcclRemoteError") and "rank 1" in text and seconds < 10
    for _, (kind, _, text, _) in (zero, one, two):
        assert kind == "CollectiveMismatchError" and "rank 1 called AllReduce(count 4" in text


def split_ends_a_with(rank: int, nranks: int) -> list[Outcome]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def splits(spare: int) -> None:
        with pynccl.init(timeout=10) as comm:
            together(nranks, f"ready {spare}")
            if rank == 1:
                leave_descriptors(spare)
            comm.split(0)

    outcomes = []
    for spare in (0, 2, 4, 6, 8):
        outcomes.append(outcome(lambda spare=spare: splits(spare)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        together(nranks, f"over {spare}")
    return outcomes


@pytest.mark.slow
def test_abort_after_a_failed_split_names_nobody_else() -> None:
    """Each rank that hears of the failed split ends its communicator while others wait for its cause."""
    zero, one, two = run(3, split_ends_a_with, backend="cpu", timeout=50)
    for mine, *others in zip(one, zero, two, strict=True):
        if mine[0] == "returned":
            continue
        assert mine[:2] == ("NcclSystemError", []) and "Too many open files" in mine[2]
        for kind, ranks, text, _ in others:
            assert (kind in ("NcclSystemError", "NcclRemoteError") and not ranks) or ranks == [1], text
            assert "rank 1" in text


# --- grow ---------------------------------------------------------------------------------------------------


def belongings() -> tuple[Counter[str], Counter[str], int]:
    """Return what this process has open, its threads, and how many areas of memory the library shares."""
    gc.collect()
    shared = sum("nccl" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return *census(), shared


def same_again(before: tuple[Counter[str], Counter[str], int]) -> bool:
    """Wait until nothing is there that was not there before; what ended meanwhile does not matter."""

    def clean() -> bool:
        opened, threads, shared = belongings()
        # The thread of the communicator's stream starts with the first call that is slow, at any time.
        known = before[1] + Counter({"pynccl-stream": 1})
        return not opened - before[0] and not threads - known and shared <= before[2]

    deadline = time.monotonic() + 20
    while not clean() and time.monotonic() < deadline:
        time.sleep(0.05)
    return clean()


def shared_id(comm: Communicator, folder: str, name: str) -> UniqueId | None:
    """Return a fresh id on rank 0, and hand it out."""
    if comm.rank:
        return None
    uid = comm.get_unique_id()
    publish(Path(folder, name), bytes(uid))
    return uid


def read_id(folder: str, name: str) -> UniqueId:
    while not Path(folder, name).exists():
        time.sleep(0.01)
    return UniqueId(Path(folder, name).read_bytes())


def grows(rank: int, nranks: int, how: str, fresh: int, folder: str) -> Any:
    """All but the last rank grow; the last one comes only to the second time, when it is meant to."""
    old = nranks - 1
    if rank == old:
        joins(how, nranks, fresh, folder)
        return None
    comm = pynccl.init(rank=rank, world_size=old, timeout=3)
    assert total(comm) == old
    before = belongings()
    uid = shared_id(comm, folder, "first")
    first = outcome(lambda: comm.grow(old + fresh, uid))
    whole = comm.async_error() is None and total(comm) == old
    clean = same_again(before)
    together(old, "first is over")
    uid = shared_id(comm, folder, "second")
    large = comm.grow(nranks, uid)
    sums = total(large), total(comm)
    large.destroy()
    comm.destroy()
    return first, whole, clean, sums


def joins(how: str, nranks: int, fresh: int, folder: str) -> None:
    if how != "never comes":
        uid, place = read_id(folder, "first"), (nranks - 1 + fresh, nranks - 1)
        pid = os.fork()
        if not pid:
            if how == "dies while it joins":
                threading.Timer(0.3, os._exit, [1]).start()
            else:
                setattr(capi, "pyncclCpuExchange", lambda *_: os._exit(1))  # noqa: B010
            Communicator.join(place[0], uid, place[1], timeout=10)
            os._exit(0)
        os.waitpid(pid, 0)
    uid = read_id(folder, "second")
    with Communicator.join(nranks, uid, nranks - 1, timeout=10) as comm:
        total(comm)


@pytest.mark.parametrize(
    ("how", "fresh"),
    [
        ("never comes", 1),
        pytest.param("never comes", 2, marks=pytest.mark.slow),
        pytest.param("dies while it joins", 2, marks=pytest.mark.slow),
        ("dies in the channel", 1),
    ],
)
def test_a_new_rank_does_not_come(how: str, fresh: int, tmp_path: Path) -> None:
    """The communicator stays as it was, on all ranks, and grows when the new rank does come."""
    *results, _ = run(4, grows, how, fresh, str(tmp_path), backend="cpu", timeout=50)
    for first, whole, clean, sums in results:
        kind, ranks, _, took = first
        assert kind in ("NcclTimeoutError", "NcclRemoteError", "RankFailedError"), results
        assert took < 3 + SOON, results
        assert (whole, clean, sums) == (True, True, (4, 3)), results
        assert set(ranks) <= set(range(3, 3 + fresh)), results
    for (_, _, told, _), *_ in results:
        assert "rank 3" in told or "new ranks [3, 4]" in told, results


@on_ranks(1)
def test_a_rank_that_comes_too_late_to_grow(rank: int, nranks: int) -> None:
    """It learns at once that the others have given up, and not that it is missing itself."""
    # A rank gives the library what is left of its time.
    late = "this rank joined too late, and needs a new unique id: timed out after 0[.][12].* s: 1 of 2 ranks"
    with pynccl.init(timeout=0.2) as comm:
        uid = comm.get_unique_id()
        with pytest.raises(NcclTimeoutError, match="new rank 1 did not join within 0.2 s") as caught:
            comm.grow(2, uid)
        assert caught.value.ranks == [1]
        with pytest.raises(NcclTimeoutError, match=f"rank 1 of 2: {late} joined, missing rank 1"):
            Communicator.join(2, uid, 1, timeout=30)
        uid = comm.get_unique_id()
        with pytest.raises(
            NcclTimeoutError, match="rank 1 of 2: timed out after 0[.][12].* s: .*, missing rank 0"
        ):
            Communicator.join(2, uid, 1, timeout=0.2)
    with pynccl.init(timeout=30) as comm:
        uid = comm.get_unique_id()
        with pytest.raises(NcclTimeoutError):
            Communicator.join(2, uid, 1, timeout=0.2)
        with pytest.raises(NcclTimeoutError, match=f"rank 0 of 2: {late} joined, missing rank 0"):
            comm.grow(2, uid)


@pytest.mark.slow
def test_the_last_rank_grows(tmp_path: Path) -> None:
    """A new rank that does not come leaves a communicator of one rank as it was, too."""
    (first, *others), _ = run(2, grows, "never comes", 1, str(tmp_path), backend="cpu", timeout=30)
    assert first[0] == "NcclTimeoutError"
    assert "new rank 1 did not join within 3 s" in first[2]
    assert others == [True, True, (2, 1)]


def dies_while_it_grows(rank: int, nranks: int, victim: int, seconds: float) -> tuple[Outcome, float]:
    """The victim dies in grow, whose new rank never comes."""
    comm = pynccl.init(timeout=20)
    uid = comm.get_unique_id() if rank == 0 else None
    together(nranks)
    if rank == victim:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    before = starved()
    return outcome(lambda: comm.grow(nranks + 1, uid)), starved() - before


@pytest.mark.parametrize(
    ("victim", "seconds"),
    [
        (1, 0.03),
        pytest.param(0, 0.03, marks=pytest.mark.slow),
        *(pytest.param(1, seconds, marks=pytest.mark.slow) for seconds in (0, 0.01, 0.02, 0.05, 0.08)),
    ],
)
def test_an_old_rank_dies_while_it_grows(victim: int, seconds: float) -> None:
    """The others do not wait as after a shrink, where a lost rank could go on by itself."""
    results = run(3, dies_while_it_grows, victim, seconds, backend="cpu", check=False, timeout=40)
    assert isinstance(results.pop(victim), RankError)
    for (kind, ranks, _, took), lacked in results:
        assert (kind, ranks) == ("RankFailedError", [victim]), results
        assert took < _PROOF / 2 + 2 * lacked, results


def dies_before_all_grow(rank: int, nranks: int, folder: str) -> Outcome | None:
    """Rank 2 is killed in a grow to which rank 1 comes late."""
    old = nranks - 1
    if rank == old:
        return outcome(lambda: Communicator.join(nranks, read_id(folder, "id"), rank, timeout=20))
    comm = pynccl.init(rank=rank, world_size=old, timeout=20)
    uid = shared_id(comm, folder, "id")
    if rank == 1:
        hear("others know")
    elif rank == 2:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    came = outcome(lambda: comm.grow(nranks, uid))
    if rank == 0:
        tell("others know")
    return came


def test_an_old_rank_dies_before_all_grow(tmp_path: Path) -> None:
    """Nobody waits for the late rank, which could not grow either; all name the dead one."""
    results = run(4, dies_before_all_grow, str(tmp_path), backend="cpu", check=False, timeout=60)
    assert isinstance(results.pop(2), RankError)
    for kind, ranks, text, took in results:
        assert (kind, ranks) == ("RankFailedError", [2]), results
        assert took < 10, text


def misses_grow(rank: int, nranks: int, stays: bool, folder: str) -> Outcome | None:
    """Rank 1 does not call grow; the others stay, and grow again, or leave as soon as they know."""
    old = nranks - 1
    if rank == old:
        came = outcome(lambda: Communicator.join(nranks, read_id(folder, "first"), rank, timeout=20))
        if stays:
            with Communicator.join(nranks, read_id(folder, "second"), rank, timeout=10) as large:
                assert total(large) == nranks
        return came
    comm = pynccl.init(rank=rank, world_size=old, timeout=3)
    uid = shared_id(comm, folder, "first")
    came = outcome(lambda: comm.grow(nranks, uid)) if rank != 1 else None
    if not stays:
        if rank == 1:
            hear("0 gave up")
            hear("2 gave up")
        else:
            tell(f"{rank} gave up")
        comm.abort()
        return came
    together(old, "over")
    assert total(comm) == old
    with comm, comm.grow(nranks, shared_id(comm, folder, "second")) as large:
        assert total(large) == nranks
    return came


@pytest.mark.parametrize("stays", [True, False])
def test_an_old_rank_does_not_grow(stays: bool, tmp_path: Path) -> None:
    """A new rank hears of it as soon as the old ones have given up, and names it, too."""
    first, _, third, new = run(4, misses_grow, stays, str(tmp_path), backend="cpu", timeout=40)
    text = "growing the communicator: rank 1 did not take part within 3 s"
    for kind, ranks, told, took in (first, third):
        assert (kind, ranks, told) == ("RankFailedError", [1], text), (kind, ranks, told)
        assert took < 3 + SOON
    kind, ranks, told, took = new
    assert (kind, ranks) == ("RankFailedError", [1]) and f"rank 0 reports: {text}" in told, new
    assert took < 3 + SOON


def comes_after_the_others(rank: int, nranks: int, folder: str) -> list[Outcome]:
    """Rank 1 calls grow when the others have given up, twice; then all grow again."""
    old = nranks - 1
    rounds = ["first", "second"]
    came = []
    if rank == old:
        for each in rounds:
            joins = partial(Communicator.join, nranks, read_id(folder, each), rank, timeout=20)
            came.append(outcome(joins))
        with Communicator.join(nranks, read_id(folder, "third"), rank, timeout=20) as large:
            assert total(large) == nranks
        return came
    comm = pynccl.init(rank=rank, world_size=old, timeout=2)
    for each in rounds:
        uid = shared_id(comm, folder, each)
        if rank == 1:
            hear(f"0 gave up {each}")
            hear(f"2 gave up {each}")
        came.append(outcome(partial(comm.grow, nranks, uid)))
        if rank != 1:
            tell(f"{rank} gave up {each}")
        together(old, f"{each} is over")
        assert total(comm) == old
    with comm, comm.grow(nranks, shared_id(comm, folder, "third")) as large:
        assert total(large) == nranks
    return came


def test_an_old_rank_comes_to_grow_after_the_others(tmp_path: Path) -> None:
    """It is the late one each time, for itself too, and not those that have given up."""
    outcomes = run(4, comes_after_the_others, str(tmp_path), backend="cpu", timeout=40)
    for late in outcomes.pop(1):
        assert late[:3] == ("RankFailedError", [1], "the other ranks did not wait for this one, 1 of 3")
    for rank, came in zip((0, 2, 3), outcomes, strict=True):
        for kind, ranks, text, took in came:
            assert (kind, ranks) == ("RankFailedError", [1]), (rank, came)
            assert "growing the communicator: rank 1 did not take part within 2 s" in text
            assert took < 2 + SOON


def stops_after_it_made_the_id(rank: int, nranks: int, folder: str) -> Outcome | None:
    """Rank 0 makes the unique id and is stopped; the last rank, a new one, joins."""
    if rank == nranks - 1:
        joins = partial(Communicator.join, nranks, read_id(folder, "first"), rank, timeout=2)
        came = outcome(joins)
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
        return came
    comm = pynccl.init(rank=rank, world_size=nranks - 1)
    if rank == 0:
        Path(folder, "pid").write_text(str(os.getpid()))
    shared_id(comm, folder, "first")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    together(nranks - 1)
    comm.abort()
    return None


def test_the_maker_of_the_id_is_stopped(tmp_path: Path) -> None:
    *_, (kind, ranks, text, took) = run(
        3, stops_after_it_made_the_id, str(tmp_path), backend="cpu", timeout=40
    )
    assert (kind, ranks) == ("NcclTimeoutError", [])
    assert "the process that made the unique id does not respond" in text
    assert took < 2 + SOON


def is_stopped_after_it_joined(rank: int, nranks: int, stopped: int, folder: str) -> Outcome | None:
    """Three ranks grow with two new ones, of which the first comes once one of the others is stopped."""
    old = 3
    comm = pynccl.init(rank=rank, world_size=old, timeout=4) if rank < old else None
    uid = shared_id(comm, folder, "first") if comm else read_id(folder, "first")
    if rank == stopped:

        def stop() -> None:
            Path(folder, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        threading.Timer(0.7, stop).start()
    if rank == old:
        until(Path(folder, "pid").exists, 30)
    came = outcome(
        partial(comm.grow, nranks, uid) if comm else partial(Communicator.join, nranks, uid, rank, timeout=15)
    )
    if rank == stopped:
        return None
    tell(f"over {rank}")
    if rank == 0:
        for other in {1, 2, 3, 4} - {stopped}:
            hear(f"over {other}")
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    return came


@pytest.mark.parametrize("stopped", [1, 4])
def test_a_rank_is_stopped_after_it_joined(stopped: int, tmp_path: Path) -> None:
    """An old rank, or a new one: all others name it, also those that have just joined."""
    results = run(5, is_stopped_after_it_joined, stopped, str(tmp_path), backend="cpu", timeout=50)
    for came in results:
        if came is not None:
            assert came[:2] in (("NcclTimeoutError", [stopped]), ("RankFailedError", [stopped])), results


def is_slow_while_it_grows(rank: int, nranks: int, late: int, where: str, how: str, folder: str) -> Outcome:
    """Rank `late` is slow or stopped in a function while it grows with the last rank, a new one."""
    old = nranks - 1
    if rank == old:
        uid = read_id(folder, "first")
        came = outcome(lambda: Communicator.join(nranks, uid, rank, timeout=10))
        with Communicator.join(nranks, read_id(folder, "second"), rank, timeout=10) as large:
            assert total(large) == nranks
        return came
    comm = pynccl.init(rank=rank, world_size=old, timeout=3)
    pid = int(comm.all_gather(np.array([os.getpid()]))[late][0])
    function, ended = getattr(capi, where), threading.Event()

    def slow(*args: Any) -> Any:
        # The second grow calls the function itself, even if this call has been given up.
        setattr(capi, where, function)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            # On a busy machine this thread runs on until the thread that takes the signal is scheduled.
            time.sleep(0.5)
        else:
            hear("all others")
        try:
            return function(*args)
        finally:
            ended.set()

    if rank == late:
        setattr(capi, where, slow)
    uid = shared_id(comm, folder, "first")
    came = outcome(lambda: comm.grow(nranks, uid))
    if rank == 1 - late:
        tell("the other")
    if rank == 2:
        # If rank `late` went on before, the other one could still join.
        hear("the other")
        tell("all others")
        os.kill(pid, signal.SIGCONT)
    together(old, "over")
    assert total(comm) == old
    with comm, comm.grow(nranks, shared_id(comm, folder, "second")) as large:
        # The call that was given up does not come between the next ones.
        assert rank != late or ended.is_set()
        assert total(large) == nranks
    return came


@pytest.mark.parametrize(
    ("late", "where", "how"),
    [
        (1, "pyncclCpuExchange", "slow"),
        (1, "ncclCommGrow", "slow"),
        (1, "ncclCommGrow", "stopped"),
        pytest.param(0, "ncclCommGrow", "slow", marks=pytest.mark.slow),
    ],
)
def test_an_old_rank_is_slow_while_it_grows(late: int, where: str, how: str, tmp_path: Path) -> None:
    """All name it, and so does the rank itself; the others do not wait for it again, and can grow later."""
    outcomes = run(4, is_slow_while_it_grows, late, where, how, str(tmp_path), backend="cpu", timeout=40)
    new, slow = outcomes.pop(), outcomes.pop(late)
    for kind, ranks, text, took in outcomes:
        assert (kind, ranks) == ("RankFailedError", [late]), (outcomes, slow, new)
        did = (
            "cannot be reached by all of ranks [0, 2]" if how == "stopped" else "did not take part within 3 s"
        )
        assert text == f"growing the communicator: rank {late} {did}"
        assert took < 3 + SOON
    assert slow[:3] == ("RankFailedError", [late], f"the other ranks did not wait for this one, {late} of 3")
    if where == "ncclCommGrow":
        kind, ranks, text, _ = new
        # Rank 0 has the unique id, with which nobody joins before it does.
        assert (kind, ranks) == ("NcclTimeoutError" if late else "RankFailedError", [late])
        assert f"rank {late} (pid" in text or f"missing rank {late};" in text


@pytest.mark.parametrize("blocking", [1, 0])
@on_ranks(2)
def test_a_time_out_while_a_communicator_is_made_tells_the_missing_ranks(
    rank: int, nranks: int, blocking: int
) -> None:
    if rank == 0:
        text = "ncclTimeout: rank 0 of 4: timed out after .*missing ranks 1, 2, 3"
        with pytest.raises(NcclTimeoutError, match=text) as caught:
            Communicator(4, pynccl.get_unique_id(), 0, timeout=0.2, config={"blocking": blocking})
        assert caught.value.ranks == [1, 2, 3]
