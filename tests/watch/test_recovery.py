"""Going on after ranks have died: shrinking, growing, and the training that survives."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from cutting import who
from meeting import failure, hear, leave_descriptors, publish, tell, together, until
from null_library import forwarding
from processes import completed
from pynccl import (
    Communicator,
    NcclError,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclTimeoutError,
    RankFailedError,
    UniqueId,
    capi,
)
from pynccl._comm import recovery
from pynccl._library.binding import lib
from pynccl.testing import RankError, run
from ranks import total

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHRINK, GROW, REVOKE = "ncclCommShrink", "ncclCommGrow", "ncclCommRevoke"
# What libraries of these ages lack: recovery natively; before 2.29, 2.28 and 2.27.
AGES = {"2.32": (), "2.28": (GROW,), "2.27": (GROW, REVOKE), "2.26": (GROW, REVOKE, SHRINK)}


Age = Callable[[str], str]


@pytest.fixture(scope="module")
def library(compile_library: Callable[..., str]) -> Age:
    """Return a library as old as that, over the CPU library."""
    return lambda age: compile_library(forwarding(f"{age}.3"), "libnccl.so.2", "-ldl") if AGES[age] else "cpu"


def left_without(comm: pynccl.Communicator, failed: list[int], rank: int) -> list[int]:
    """Shrink; return the first numbers of the ranks that are left."""
    small = comm.shrink(exclude=failed, abort=True)
    assert total(small) == small.size
    left = who(small, rank)
    small.destroy()
    return left


def one_after_another(rank: int, nranks: int, victims: list[int], lacks: list[str]) -> list[Any]:
    """Ranks, numbered as in the beginning, kill themselves one by one; the others go on each time."""
    comm = pynccl.init(timeout=15)
    assert [bool(lib.nccl_api_find(name.encode())) for name in lacks] == [False] * len(lacks)
    here, seen = list(range(nranks)), []
    for victim in victims:
        comm.barrier()
        together(len(here))
        if rank == victim:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGKILL]).start()
        x = np.ones(50_000, np.float32)
        start = time.monotonic()
        error = failure(lambda: comm.all_reduce(x, op="max"))  # noqa: B023
        old, comm = comm, comm.shrink(exclude=error.ranks, abort=True)
        assert old.closed
        dead = [here[r] for r in error.ranks]
        here = [r for r in here if r not in dead]
        assert (comm.rank, comm.size) == (here.index(rank), len(here))
        seen.append((dead, total(comm), time.monotonic() - start))
    comm.destroy()
    assert lib.pynccl_watched() == 0
    return seen


@pytest.mark.parametrize(
    ("age", "victims"), [("2.32", [0, 5, 3, 7, 1]), ("2.27", [0, 4]), ("2.26", [0, 5, 7])]
)
def test_shrink_again_and_again(library: Age, age: str, victims: list[int]) -> None:
    results = run(
        8, one_after_another, victims, list(AGES[age]), backend=library(age), check=False, timeout=50
    )
    for rank, seen in enumerate(results):
        if rank in victims:
            assert isinstance(seen, RankError)
            continue
        assert not isinstance(seen, RankError), seen
        assert [dead for dead, _, _ in seen] == [[victim] for victim in victims]
        assert [ranks for _, ranks, _ in seen] == [7 - n for n in range(len(victims))]
        assert all(took < 10 for _, _, took in seen), seen


def several(rank: int, nranks: int, victims: list[int], second: int) -> tuple[list[int], float, list[int]]:
    """Several die at once, and one more when it has just heard of that."""
    comm = pynccl.init(timeout=15)
    comm.barrier()
    together(nranks)
    if rank in victims:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    if rank == second:
        os.kill(os.getpid(), signal.SIGKILL)
    small = comm.shrink(exclude=error.ranks, abort=True)
    count = total(small)
    ranks = small.all_gather(np.array([rank])).ravel().tolist()
    small.destroy()
    return error.ranks, count, ranks


@pytest.mark.parametrize("age", ["2.32", "2.26"])
def test_more_deaths_while_shrinking(library: Age, age: str) -> None:
    results = run(8, several, [1, 6], 4, backend=library(age), check=False, timeout=50)
    for rank, result in enumerate(results):
        if rank in (1, 4, 6):
            assert isinstance(result, RankError)
            continue
        assert not isinstance(result, RankError), result
        dead, count, left = result
        # Deaths that are a while apart are told one by one.
        assert dead and set(dead) <= {1, 4, 6}
        assert (count, left) == (5, [0, 2, 3, 5, 7])


def shrinks_without_descriptors(rank: int, nranks: int, spare: int) -> str:
    """Rank 1 has few free descriptors in the shrink that the death of rank 2 calls for."""
    comm = pynccl.init(timeout=15)
    comm.barrier()
    together(nranks)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        leave_descriptors(spare)
    with pytest.raises(NcclError) as caught:
        comm.shrink(exclude=error.ranks, abort=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    together(nranks - 1, "over")
    comm.abort()
    return str(caught.value)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_shrink_without_descriptors(spare: int) -> None:
    """Every rank is told the cause and whose it is, not the death that it knows."""
    results = run(4, shrinks_without_descriptors, spare, backend="cpu", check=False, timeout=50)
    for rank in (0, 1, 3):
        text = results[rank]
        assert isinstance(text, str), text
        assert "Too many open files" in text and "rank 2 (" not in text.partition("cannot connect to")[0]
        assert rank == 1 or re.search("rank 1( of 3)? reports: ", text)


def in_the_middle(rank: int, nranks: int, second: int, where: str) -> list[int]:
    """A second rank dies inside of the shrinking that the first one's death calls for."""
    comm = pynccl.init(timeout=15)
    comm.barrier()
    together(nranks)
    if rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    if rank == second:
        for name in (SHRINK, "ncclCommInitRankConfig") if where == "creation" else ("pyncclCpuExchange",):
            setattr(capi, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return left_without(comm, error.ranks, rank)


@pytest.mark.parametrize("where", ["creation", "the channel"])
@pytest.mark.parametrize("second", [0, 4])
@pytest.mark.parametrize("age", ["2.32", "2.26"])
def test_death_inside_a_shrink(library: Age, age: str, second: int, where: str) -> None:
    results = run(6, in_the_middle, second, where, backend=library(age), check=False, timeout=50)
    for rank, result in enumerate(results):
        assert isinstance(result, RankError) == (rank in (2, second)), result
        if rank not in (2, second):
            assert result == [r for r in range(6) if r not in (2, second)]


def healthy(rank: int, nranks: int, again: bool) -> float | None:
    """Ranks that are alive are excluded, and the parent lives on."""
    with pynccl.init(timeout=15) as comm:
        small = None
        if rank != 1:
            small = comm.shrink(exclude=[1])
            assert (small.rank, small.size) == ([0, -1, 1, 2][rank], 3)
        comm.barrier()
        assert total(comm) == 4
        # One of the ranks has not taken part in that.
        half = comm.split(rank % 2)
        assert half is not None
        assert total(half) == 2
        half.destroy()
        if again and rank != 2:
            other = comm.shrink(exclude=[2])
            assert total(other) == 3
            other.destroy()
        return total(small) if small else None


def shrinks_again(rank: int, nranks: int) -> list[int]:
    """Rank 2 has no descriptors in the first shrink; ranks 0 and 3 are excluded in turn."""
    sizes = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pynccl.init(timeout=15) as comm:
        for number, excluded in enumerate([0, 3, 0, 3]):
            if rank == 2 and not number:
                leave_descriptors(0)
            if rank != excluded:
                try:
                    with comm.shrink([excluded]) as small:
                        assert total(small) == 3
                        sizes.append(small.size)
                except NcclError:
                    sizes.append(0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert total(comm) == 4
    return sizes


def test_shrink_again_after_one_that_failed() -> None:
    assert run(4, shrinks_again, backend="cpu", timeout=50) == [[3, 3], [0, 3, 3, 3], [0, 3, 3, 3], [0, 3]]


def misses_a_shrink(rank: int, nranks: int, how: str) -> float:
    """Rank 1 takes no part in a shrink of ranks 0 to 2, or leaves it by Ctrl-C before the others begin."""
    with pynccl.init(timeout=2) as comm:
        comm.barrier()
        if rank == 1 and how == "refused":
            with pytest.raises(NcclInvalidUsage), pynccl.group():
                comm.shrink([3])
        elif rank == 1:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                comm.shrink([3])
        elif rank != 3 and how == "refused":
            with pytest.raises(RankFailedError) as caught:
                comm.shrink([3])
            assert caught.value.ranks == [1]
        together(nranks)
        for _ in range(2 if rank != 3 else 0):
            with comm.shrink([3]) as small:
                assert total(small) == 3
        together(nranks, "again")
        return total(comm)


@pytest.mark.parametrize("how", ["refused", "interrupted"])
def test_shrink_after_one_that_a_rank_missed(how: str) -> None:
    assert run(4, misses_a_shrink, how, backend="cpu", timeout=50) == [4] * 4


# The variables of the ranks: communicators are blocking, or not.
BLOCKING = pytest.mark.parametrize("env", [{}, {"NCCL_COMM_BLOCKING": "0"}], ids=["blocking", "non-blocking"])


@BLOCKING
@pytest.mark.parametrize("age", ["2.32", "2.26"])
def test_shrink_a_healthy_communicator(library: Age, age: str, env: dict[str, str]) -> None:
    counts = run(4, healthy, age == "2.26", backend=library(age), env=env, timeout=40)
    assert counts == [3, None, 3, 3]


@BLOCKING
def test_shrink_after_deaths(env: dict[str, str]) -> None:
    results = run(4, one_after_another, [2, 0], [], backend="cpu", check=False, env=env, timeout=50)
    for rank in (1, 3):
        assert [(dead, count) for dead, count, _ in results[rank]] == [([2], 3), ([0], 2)]


def dies_before_a_change(rank: int, nranks: int, dies_before: str) -> list[float]:
    """Rank 1 dies before suspend, resume or finalize, which then nobody can make."""
    comm = pynccl.init(timeout=20)
    if dies_before == "resume":
        comm.suspend()
    together(nranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(getattr(comm, dies_before))
    with comm.shrink(exclude=error.ranks, abort=True) as survivors:
        return [float(x) for x in survivors.all_reduce(np.array([float(rank)]))]


@pytest.mark.parametrize("dies_before", ["suspend", "resume", "finalize"])
def test_shrink_a_communicator_that_was_to_change(dies_before: str) -> None:
    results = run(4, dies_before_a_change, dies_before, backend="cpu", check=False, timeout=40)
    assert [results[rank] for rank in (0, 2, 3)] == [[5.0]] * 3, results


def shrinks_past_an_outstanding_call(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=2)
    if rank == 0:
        comm.all_reduce(np.ones(3), wait=False)
    text = ""
    if rank < 2:
        with pytest.raises((NcclTimeoutError, RankFailedError)) as caught:
            comm.shrink([2])
        text = str(caught.value)
    together(nranks)
    comm.abort()
    return text


def test_a_shrink_that_waits_for_an_outstanding_call_says_so() -> None:
    zero, *_ = run(3, shrinks_past_an_outstanding_call, backend="cpu", timeout=40)
    assert "use shrink(exclude, abort=True), which does not wait" in zero


def shrinks_after_finalize(rank: int, nranks: int) -> str:
    comm = pynccl.init(config=pynccl.Config(blocking=0))
    if rank == 1:
        hear("rank 0 finalizes")
        hear("rank 2 finalizes")
        os.kill(os.getpid(), signal.SIGKILL)
    # Blocking, one rank may hear of the death before it finalizes; that finalize is refused.
    capi.ncclCommFinalize(comm.handle)
    tell(f"rank {rank} finalizes")
    until(comm.async_error)
    assert isinstance(comm.async_error(), NcclRemoteError)
    with pytest.raises(NcclInvalidUsage) as caught:
        comm.shrink([1], abort=True)
    return str(caught.value)


def test_a_refusal_is_not_explained_by_an_earlier_failure() -> None:
    """Without a time-out the library alone shrinks, which it does not after finalize."""
    zero, _, two = run(3, shrinks_after_finalize, backend="cpu", check=False, timeout=40)
    for text in (zero, two):
        assert text.startswith("ncclCommShrink: ncclInvalidUsage: comm has been finalized;"), (zero, two)


def shrinks_as_if_all_were_well(rank: int, nranks: int, timeout: float | None) -> float:
    comm = pynccl.init(timeout=timeout)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(NcclError) as caught:
        comm.barrier()
    first = caught.value
    with pytest.raises(NcclError) as caught:
        comm.shrink(exclude=[1])
    again = caught.value
    assert type(again) is type(first) is (RankFailedError if timeout else NcclRemoteError)
    if timeout:
        assert first.ranks == again.ranks == [1]
        assert str(again) == f"{first}; after a failed call only shrink(exclude, abort=True) goes on"
    else:
        assert "rank 1 " in str(again)
        assert str(again).endswith("; after a failed call only shrink(exclude, abort=True) goes on")
    return total(comm.shrink(exclude=[1], abort=True))


@pytest.mark.parametrize("timeout", [15, None])
def test_only_shrink_with_abort_goes_on_after_a_failed_call(timeout: float | None) -> None:
    results = run(3, shrinks_as_if_all_were_well, timeout, backend="cpu", check=False, timeout=50)
    assert results[0] == results[2] == 2


def shrinks_while_another_waits(rank: int, nranks: int, what: str) -> tuple[list[int], int]:
    """Rank 3 is stopped; rank 0 waits for it in another call while the others shrink without it."""
    comm = pynccl.init(timeout=3)
    pid = int(comm.all_gather(np.array([os.getpid()]))[3][0])
    together(nranks)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.abort()
        return [], 0
    waits = partial(comm.split, 0) if what == "split" else partial(comm.recv, np.zeros(4), 3)
    with pytest.raises(RankFailedError) as caught:
        waits() if rank == 0 else comm.shrink(exclude=[3])
    small = comm.shrink(exclude=caught.value.ranks, abort=True)
    size = int(total(small))
    together(3, "shrunk")
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    return caught.value.ranks, size


@pytest.mark.parametrize("what", ["split", "recv"])
def test_a_rank_that_waits_for_another_is_not_blamed_by_a_shrink(what: str) -> None:
    results = run(4, shrinks_while_another_waits, what, backend="cpu", check=False, timeout=50)
    assert results[:3] == [([3], 3)] * 3, results


def excludes_another(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=20)
    said = ""
    if rank != 3:
        with pytest.raises(NcclError) as caught:
            comm.shrink(exclude=[0] if rank == 2 else [3])
        said = f"{caught.type.__name__}: {caught.value}"
    together(nranks)
    comm.abort()
    return said


def test_exclude_differs() -> None:
    told = "CollectiveMismatchError: shrinking the communicator: this rank does not exclude rank {},"
    results = run(4, excludes_another, backend="cpu", timeout=50)
    assert results[0] == "RankFailedError: the other ranks excluded this one, 0 of 4"
    assert results[1].startswith(told.format(0)) and results[2].startswith(told.format(3))


def excluded_elsewhere(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=3)
    said = ""
    if rank == 0:
        with pytest.raises(pynccl.RankFailedError) as caught:
            comm.shrink(exclude=[2])
        said = str(caught.value)
    else:
        assert total(comm.shrink(exclude=[0])) == 2
    together(nranks)
    comm.abort()
    return said


def test_a_rank_excludes_another_than_those_that_exclude_it() -> None:
    said = run(3, excluded_elsewhere, backend="cpu", timeout=40)[0]
    assert said.endswith("rank 1 did not take part within 3 s; exclude may differ between the ranks")


def aborts_meanwhile(rank: int, nranks: int, ends: bool) -> None:
    """Another thread aborts the communicator on rank 0, which waits in shrink for rank 1."""
    comm = pynccl.init(timeout=15)
    comm.barrier()
    start = time.monotonic()
    if rank == 0:
        threading.Timer(0.5, comm.abort).start()
        with pytest.raises(pynccl.NcclInvalidUsage, match="rank 0 of 3 .*cannot be used: it was aborted"):
            comm.shrink(exclude=[2], abort=ends)
        tell("aborted")
    else:
        hear("aborted")
        assert failure(comm.barrier).ranks == [0]
        comm.abort()
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("ends", [False, True])
def test_abort_inside_a_shrink(ends: bool) -> None:
    run(3, aborts_meanwhile, ends, backend="cpu", timeout=50)


def comes_late(rank: int, nranks: int, at: dict[int, float]) -> list[tuple[str, list[int]]]:
    """Shrink without rank 0 until that succeeds; some ranks come later, and the time-out is 3 s."""
    meeting, comm = pynccl.init(timeout=60), pynccl.init(timeout=3)
    meeting.barrier()
    came: list[tuple[str, list[int]]] = []
    exclude = {0}
    time.sleep(at.get(rank, 0))
    while rank not in exclude:
        try:
            small = comm.shrink(sorted(exclude), abort=True)
            came.append(("shrunk", [int(total(small))]))
            break
        except RankFailedError as error:
            came.append(("failed", error.ranks))
            exclude.update(error.ranks)
    meeting.barrier()
    return came


@pytest.mark.parametrize("seconds", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("absent", [False, True])
def test_a_rank_that_comes_at_the_time_out_of_a_shrink(absent: bool, seconds: float) -> None:
    """No rank that was in time is named, and all of these go on together, with the late one or without it."""
    at = {2: 3 - seconds} | ({3: 4.0} if absent else {})
    results = run(6, comes_late, at, backend="cpu", timeout=60)
    in_time = [results[rank] for rank in range(1, 6) if rank not in at]
    assert {rank for came in in_time for how, ranks in came[:-1] for rank in ranks} <= {0, *at}, results
    assert all(came[-1] == in_time[0][-1] for came in in_time), results
    assert in_time[0][-1] in (("shrunk", [len(in_time)]), ("shrunk", [len(in_time) + 1])), results
    if in_time[0][-1] == ("shrunk", [len(in_time) + 1]):
        assert results[2][-1] == in_time[0][-1], results


def closes_meanwhile(rank: int, nranks: int, how: str) -> str:
    comm = pynccl.init(timeout=15)
    comm.barrier()
    if rank == 1:
        # Nothing tells this rank that the other one has begun to shrink.
        time.sleep(1)
        getattr(comm, how)()
    text = ""
    if rank == 0:
        with pytest.raises(RankFailedError) as caught:
            comm.shrink(exclude=[2])
        assert caught.value.ranks == [1]
        text = str(caught.value)
    together(nranks)
    comm.abort()
    return text


@pytest.mark.parametrize(("how", "why"), [("destroy", "closed it"), ("abort", "aborted")])
def test_a_rank_closes_its_communicator_and_does_not_shrink(how: str, why: str) -> None:
    text = run(3, closes_meanwhile, how, backend="cpu", timeout=50)[0]
    assert re.search(f"rank 1 {why}", text) and "cannot be reached" not in text, text


def dies_while_all_are_well(rank: int, nranks: int, where: str) -> list[int]:
    """A rank dies inside a shrink that excludes a healthy one; the others go on without the dead one."""
    comm = pynccl.init(timeout=15)
    comm.barrier()
    if rank == 1 and where in ("before", "begun"):
        time.sleep(1 if where == "begun" else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and where == "begun":
        # Rank 0 is in the shrink by now, and waits for this rank.
        assert failure(comm.barrier).ranks == [1]
    if rank == 1:
        name = SHRINK if where == "creation" else "pyncclCpuExchange"
        setattr(capi, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    error = failure(comm.barrier) if rank == 3 else failure(lambda: comm.shrink(exclude=[3]))
    assert error.ranks == [1]
    # Before the time-out.
    assert time.monotonic() - start < 15
    return left_without(comm, error.ranks, rank)


@pytest.mark.parametrize("where", ["before", "begun", "creation", "the channel"])
def test_death_inside_a_shrink_of_a_healthy_communicator(where: str) -> None:
    results = run(4, dies_while_all_are_well, where, backend="cpu", check=False, timeout=50)
    assert isinstance(results.pop(1), RankError)
    assert results == [[0, 2, 3]] * 3


def stops_before_a_shrink(rank: int, nranks: int, stopped: int) -> list[tuple[list[int], str]]:
    """Rank 2, which lives, is excluded; the stopped rank continues after the other has tried to recover."""
    comm, errors = pynccl.init(timeout=2), list[tuple[list[int], str]]()
    comm.barrier()
    if rank == 2:
        hear("seen")
        return []
    if rank == stopped:
        if os.fork() == 0:
            time.sleep(6)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    exclude = [2]
    for ends in (False, True):
        try:
            comm.shrink(exclude=exclude, abort=ends)
            errors.append(([], "goes on"))
            break
        except pynccl.RankFailedError as error:
            errors.append((error.ranks, str(error)))
            exclude = sorted({2, *error.ranks} - {rank})
    if rank == stopped:
        tell("seen")
    else:
        # While it lives, nothing proves that it has ended.
        hear("seen")
    return errors


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_side_goes_on_after_a_failed_shrink(stopped: int) -> None:
    """Of two halves the one with the lowest rank goes on, although rank 2 was excluded while all was well."""
    results = run(3, stops_before_a_shrink, stopped, backend="cpu", timeout=50)
    other, late = results[1 - stopped], results[stopped]
    assert other[0][0] == [stopped]
    if stopped == 1:
        assert other[1] == ([], "goes on")
        # The news may come before the call or during it; the text then says that only an abort goes on.
        assert late[0][0] == [1]
        assert late[0][1].startswith("the other ranks went on without this one, 1 of 3")
    else:
        assert other[1][0] == [0]
        assert other[1][1].startswith("partition: rank 1 cannot reach rank 0, which may be alive")
        assert late[-1] == ([], "goes on")


def is_interrupted(rank: int, nranks: int) -> tuple[bool, list[int]]:
    """Rank 0 gets Ctrl-C while it waits in shrink for rank 1, and shrinks again."""
    comm, interrupted = pynccl.init(timeout=15), False
    comm.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            comm.shrink(exclude=error.ranks, abort=True)
        except KeyboardInterrupt:
            interrupted = True
        tell("interrupted")
    elif rank == 1:
        hear("interrupted")
    small = comm.shrink(exclude=error.ranks, abort=True)
    left = small.all_gather(np.array([rank])).ravel().tolist()
    small.destroy()
    return interrupted, left


def test_shrink_again_after_an_interrupt() -> None:
    results = run(4, is_interrupted, backend="cpu", check=False, timeout=50)[:3]
    assert results == [(True, [0, 1, 2]), (False, [0, 1, 2]), (False, [0, 1, 2])]


def two_stop(rank: int, nranks: int, shrinks: str) -> tuple[list[int], str]:
    """The last two ranks stop; the others shrink the communicator that failed, or an idle one."""
    world = pynccl.init(timeout=2)
    part = world.split(0)
    assert part is not None
    part.barrier()
    together(nranks)
    if rank >= nranks - 2:
        if os.fork() == 0:
            time.sleep(9)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    error = failure(part.barrier)
    comm = part if shrinks == "part" else world
    try:
        small = comm.shrink(exclude=error.ranks, abort=True)
    except pynccl.RankFailedError as second:
        return error.ranks, str(second)
    left = small.all_gather(np.array([rank])).ravel().tolist()
    small.destroy()
    return error.ranks, f"goes on: {left}"


@pytest.mark.parametrize("shrinks", ["part", "world"])
@pytest.mark.parametrize("nranks", [5, 3])
def test_two_ranks_stop(nranks: int, shrinks: str) -> None:
    """Every other rank names both, and only a majority goes on, with the idle communicator, too."""
    results = run(nranks, two_stop, shrinks, backend="cpu", check=False, timeout=50)
    stopped = [nranks - 2, nranks - 1]
    for named, outcome in results[:-2]:
        assert named == stopped
        assert (
            outcome == "goes on: [0, 1, 2]" if nranks == 5 else outcome.startswith("partition: rank 0 cannot")
        )


def grows(rank: int, nranks: int, folder: str, timeout: float | None) -> float:
    """The last rank joins the others."""
    old, place = nranks - 1, Path(folder, "id")
    if rank == old:
        while not place.exists():
            time.sleep(0.01)
        comm = Communicator.join(nranks, UniqueId(place.read_bytes()), rank, timeout=timeout)
    else:
        small = pynccl.init(rank=rank, world_size=old, timeout=timeout)
        uid = None
        if rank == 1:
            uid = small.get_unique_id()
            publish(place, bytes(uid))
        comm = small.grow(nranks, uid)
        small.destroy()
    with comm:
        assert (comm.rank, comm.size) == (rank, nranks)
        return total(comm)


@pytest.mark.parametrize("timeout", [None, 15])
@pytest.mark.parametrize("age", ["2.32", "2.28", "2.26"])
def test_grow(library: Age, age: str, timeout: float | None, tmp_path: Path) -> None:
    assert run(4, grows, str(tmp_path), timeout, backend=library(age), timeout=40) == [4] * 4


def dies_at_the_end_of_grow(rank: int, nranks: int, folder: str) -> object:
    """Rank 1 has made the new communicator, and dies before the old ranks agree that all have made it."""
    old, place = 3, Path(folder, "id")
    if rank >= old:
        until(place.exists)
        comm = Communicator.join(nranks, UniqueId(place.read_bytes()), rank, timeout=10)
        error = failure(comm.barrier)
        with pytest.raises(pynccl.RankFailedError) as caught:
            comm.shrink(exclude=error.ranks, abort=True)
        return str(caught.value)
    comm = pynccl.init(rank=rank, world_size=old, timeout=10)
    uid = comm.get_unique_id() if rank == 0 else None
    if uid is not None:
        publish(place, bytes(uid))
    if rank == 1:
        create = recovery.create
        recovery.create = lambda *args: (create(*args), os.kill(os.getpid(), signal.SIGKILL))
    error = failure(lambda: comm.grow(nranks, uid))
    comm = comm.shrink(exclude=error.ranks, abort=True)
    return error.ranks, comm.all_gather(np.array([rank])).ravel().tolist()


def test_death_at_the_end_of_grow(tmp_path: Path) -> None:
    """The old ranks go on, so the new ones must not: they would be a second job."""
    results = run(5, dies_at_the_end_of_grow, str(tmp_path), backend="cpu", check=False, timeout=50)
    assert results[0] == results[2] == ([1], [0, 2])
    for rank in (3, 4):
        assert results[rank] == f"the other ranks went on without this one, {rank} of 5"


def two_ids(rank: int, nranks: int) -> str:
    with pynccl.init(timeout=10) as comm:
        uid = comm.get_unique_id()
        with pytest.raises(ValueError, match="expected one") as caught:
            comm.grow(nranks + 1, uid)
        return str(caught.value)


def test_grow_with_two_ids(library: Age) -> None:
    for text in run(2, two_ids, backend=library("2.26"), timeout=30):
        assert text.startswith("2 ranks gave a unique_id to grow with; expected one: the rank that calls")


def disagree(rank: int, nranks: int) -> str:
    """Rank 0 excludes a rank that is alive, and is not told so by the others."""
    comm = pynccl.init(timeout=10)
    comm.barrier()
    together(nranks)
    if rank == 3:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    failure(comm.barrier)
    try:
        small = comm.shrink(exclude=[1, 3] if rank == 0 else [3], abort=True)
    except NcclError as error:
        comm.abort()
        return str(error)
    assert total(small) == 2
    small.destroy()
    return "went on"


def test_a_rank_that_others_exclude_is_told() -> None:
    first, second, third, _ = run(4, disagree, backend="cpu", check=False, timeout=40)
    assert (first, third) == ("went on", "went on")
    assert second == "the other ranks excluded this one, 1 of 4"


def with_children(rank: int, nranks: int) -> tuple[bool, ...]:
    comm = pynccl.init(timeout=10)
    half = comm.split(rank % 2)
    assert half is not None
    quarter = half.split(0)
    assert quarter is not None
    quarter.all_reduce(np.ones(3))
    comm.barrier()
    together(nranks)
    if rank == 3:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    small = comm.shrink(exclude=error.ranks, abort=True)
    assert total(small) == 3
    small.destroy()
    return comm.closed, half.closed, quarter.closed, lib.pynccl_watched() == 0


def test_shrinking_closes_the_children_of_the_parent() -> None:
    results = run(4, with_children, backend="cpu", check=False, timeout=40)
    assert results[:3] == [(True,) * 4] * 3


@pytest.mark.parametrize(("seed", "nranks"), [(1, 4), (2, 3)])
def test_training_survives(seed: int, nranks: int) -> None:
    """The accuracy is that of an undisturbed training: the example compares them itself."""
    command = [
        sys.executable,
        "examples/survive.py",
        "-n",
        str(nranks),
        "--seed",
        str(seed),
        "--epochs",
        # So many that the one that kills is in time.
        "80",
    ]
    env = os.environ | {"PYNCCL_LIBRARY": "cpu", "PYTHONPATH": str(ROOT)}
    done = completed(command, env=env, cwd=ROOT, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (victim,) = (line.split()[-1] for line in lines if line.startswith("killing rank"))
    assert f"survived the death of [{victim}]" in done.stdout
    (scores,) = (re.findall(r"\d\.\d+(?:e-\d+)?", line) for line in lines if "undisturbed" in line)
    assert abs(float(scores[0]) - float(scores[1])) < 0.01
    assert float(scores[2]) < 1e-3
    assert lines[-1] == "all survivors and the new rank have finished"
