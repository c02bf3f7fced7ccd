"""Communicators share the connections of the control channel between two processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import pynccl
from cutting import meet
from meeting import census, failure, leave_descriptors, together
from pynccl import CollectiveMismatchError, Communicator
from pynccl._watch import channel
from pynccl.testing import run

SECRET = {"PYNCCL_SECRET": "a secret of the tests, long enough"}
SPARSE = {"PYNCCL_MESH_RANKS": "0"}
SETTINGS = pytest.mark.parametrize("env", [{}, SECRET, SPARSE | SECRET], ids=["plain", "secret", "sparse"])


def sockets() -> int:
    return census()[0]["socket"]


def derived(comm: Communicator) -> list[Communicator]:
    """A half, the ranks in reverse order, and all of them."""
    return [comm.split(comm.rank % 2), comm.split(0, key=-comm.rank), comm.split(0)]


def opens_none(rank: int, nranks: int) -> tuple[int, int]:
    comm = pynccl.init(timeout=20)
    comm.barrier()
    before = sockets()
    for _ in range(3):
        children = derived(comm)
        for child in children:
            assert child.all_reduce(np.ones(3))[0] == child.size
            child.destroy()
    comm.barrier()
    return before, sockets()


@SETTINGS
@pytest.mark.parametrize("nranks", [2, 5])
def test_a_split_opens_no_connection(nranks: int, env: dict[str, str]) -> None:
    """In the sparse graph the ranks of a half are neighbours, too, with few ranks."""
    for before, after in run(nranks, opens_none, backend="cpu", env=env, timeout=60):
        assert after <= before


def outlives(rank: int, nranks: int) -> tuple[int, float]:
    comm = pynccl.init(timeout=20)
    child = comm.split(0, key=-rank)
    comm.destroy()
    # Several heartbeats.
    time.sleep(2.5)
    for _ in range(3):
        total = float(child.all_reduce(np.ones(2))[0])
    grandchild = child.split(0)
    child.destroy()
    total += float(grandchild.all_reduce(np.ones(2))[0])
    grandchild.destroy()
    together(nranks)
    return census()[1]["pynccl-watch"], total


@SETTINGS
def test_a_child_outlives_its_parent(env: dict[str, str]) -> None:
    assert run(4, outlives, backend="cpu", env=env, timeout=60) == [(0, 8.0)] * 4


def dies(rank: int, nranks: int) -> list[list[int]]:
    """Each communicator names the dead rank by its own numbers."""
    comm = pynccl.init(timeout=20)
    half, *_ = children = derived(comm)
    together(nranks)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [failure(each.barrier).ranks for each in (comm, *children) if each is not half or rank % 2]


@SETTINGS
def test_a_death_is_named_in_every_communicator(env: dict[str, str]) -> None:
    results = run(5, dies, backend="cpu", check=False, env=env, timeout=60)
    for rank in (0, 2, 4):
        assert results[rank] == [[3], [1], [3]]
    assert results[1] == [[3], [1], [1], [3]]


def leaves_one(rank: int, nranks: int) -> tuple[list[int], float]:
    """A rank drops one communicator without closing it, and goes on in the other."""
    comm = pynccl.init(timeout=20)
    child = comm.split(0)
    together(nranks)
    if rank == 1:
        child.abort()
    left = failure(child.barrier).ranks if rank != 1 else [1]
    return left, float(comm.all_reduce(np.ones(1))[0])


def test_the_end_of_one_communicator_is_not_that_of_another() -> None:
    assert run(3, leaves_one, backend="cpu", timeout=60) == [([1], 3.0)] * 3


def is_cut(rank: int, nranks: int, ends: list[int]) -> tuple[list[int], list[int]]:
    """The connection between two ranks ends, of which the others hear from both."""
    comm, cutter = meet(20, nranks)
    child = comm.split(0, key=-rank)
    together(nranks, "split")
    if rank in ends:
        cutter.cut(rank, ends)
    named, in_child = [failure(each.barrier).ranks for each in (comm, child)]
    together(nranks, "named")
    return named, sorted(nranks - 1 - other for other in in_child)


@pytest.mark.parametrize("ends", [[0, 2], [0, 1], [1, 3]])
def test_a_connection_that_ends_between_living_ranks(ends: list[int]) -> None:
    """It ends in each communicator, and the ranks that go on name the same process in each."""
    results = run(4, is_cut, ends, backend="cpu", check=False, timeout=60)
    out = ends[1]
    for rank, named in enumerate(results):
        assert named == ([out], [out]) or rank == out, results


def aborts_at_once(rank: int, nranks: int, turns: int) -> list[str]:
    """One rank aborts a child as soon as it has it."""
    comm = pynccl.init(timeout=20)
    told = []
    for _ in range(turns):
        child = comm.split(0, key=-rank)
        if rank == nranks - 1:
            child.abort()
        else:
            error = failure(child.barrier)
            told.append(f"{error.ranks} {str(error).partition(' (')[0]}")
            child.abort()
        comm.barrier()
    return told


@pytest.mark.parametrize("threads", [1, 3])
def test_an_abort_as_soon_as_a_child_is_made(threads: int) -> None:
    """Every other rank has its child by then, or gets it, and is told who has aborted."""
    results = run(6, aborts_at_once, 15, threads=threads, backend="cpu", timeout=60)
    assert results == [["[0] rank 0 aborted its communicator"] * 15] * 5 + [[]]


def slow_to_watch(seconds: float) -> None:
    """This rank has connected a new communicator, and watches it later."""
    connect = channel.connect

    def slow(*args: Any) -> channel.Channel:
        made = connect(*args)
        time.sleep(seconds)
        return made

    setattr(channel, "connect", slow)  # noqa: B010


def checks_early(rank: int, nranks: int) -> tuple[float, str]:
    comm = pynccl.init(timeout=20)
    if rank == 1:
        slow_to_watch(0.5)
    child = comm.split(0, key=-rank)
    total = float(child.all_reduce(np.full(1, float(rank)))[0])
    with pytest.raises(CollectiveMismatchError) as caught:
        child.broadcast(np.ones(2), root=rank % 2)
    return total, str(caught.value)


@SETTINGS
def test_what_comes_before_a_rank_watches(env: dict[str, str]) -> None:
    """In check mode the others announce their calls to it."""
    results = run(4, checks_early, backend="cpu", env=env | {"PYNCCL_CHECK": "1"}, timeout=60)
    assert [total for total, _ in results] == [6.0] * 4
    assert all("root" in text for _, text in results), results


def dies_early(rank: int, nranks: int) -> list[int]:
    comm = pynccl.init(timeout=20)
    if rank == 1:
        slow_to_watch(1.0)
    child = comm.split(0, key=-rank)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(child.barrier).ranks


def test_a_death_before_a_rank_watches() -> None:
    results = run(3, dies_early, backend="cpu", check=False, timeout=60)
    assert results[1:] == [[2], [2]]


def gives_up(rank: int, nranks: int) -> tuple[str, float, int]:
    """A rank fails after it has connected a child; the others do not wait for it."""
    comm = pynccl.init(timeout=10)
    before = sockets()
    if rank == 1:

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        setattr(channel, "_unpack_place", fail)  # noqa: B010
    text = ""
    try:
        comm.split(0).barrier()
    except (KeyboardInterrupt, pynccl.NcclError) as error:
        text = type(error).__name__
    together(nranks)
    return text, float(comm.all_reduce(np.ones(1))[0]), sockets() - before


def test_a_rank_that_gives_up() -> None:
    """Its connections serve the parent as before."""
    results = run(3, gives_up, backend="cpu", timeout=60)
    assert results[1][0] == "KeyboardInterrupt"
    assert all(text for text, *_ in results), results
    assert [total for _, total, _ in results] == [3.0] * 3
    assert all(more <= 0 for *_, more in results), results


def with_few_descriptors(rank: int, nranks: int) -> list[float]:
    """A child has a descriptor of its own, that of the shared memory, but no connections."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    leave_descriptors(30)
    children = [comm.split(0) for _ in range(20)]
    return [float(child.all_reduce(np.ones(1))[0]) for child in children]


def test_many_children_with_few_descriptors() -> None:
    assert run(4, with_few_descriptors, backend="cpu", timeout=60) == [[4.0] * 20] * 4


def forks(rank: int, nranks: int) -> list[int]:
    """A child process holds no line open: the death of its parent is noticed."""
    comm = pynccl.init(timeout=20)
    child = comm.split(0)
    pid = os.fork() if rank == 1 else 0
    if rank == 1 and not pid:
        time.sleep(30)
        os._exit(0)
    pids = comm.all_gather(np.array([pid]))
    together(nranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    named = failure(child.barrier).ranks
    os.kill(int(pids[1][0]), signal.SIGKILL)
    return named


def test_a_fork_holds_no_line() -> None:
    results = run(2, forks, backend="cpu", check=False, timeout=60)
    assert results[0] == [1]


def in_threads(rank: int, nranks: int) -> float:
    comm = pynccl.init(timeout=20)
    children = derived(comm)
    total = sum(float(child.all_reduce(np.ones(1))[0]) for child in children)
    for each in (*children, comm):
        each.destroy()
    return total


def test_ranks_that_are_threads() -> None:
    """Several lines join two processes; one between two ranks of a process has both ends there."""
    assert run(6, in_threads, threads=3, backend="cpu", timeout=60) == [3.0 + 6.0 + 6.0] * 6
