"""What becomes of communicators: split, shrunk, grown, suspended, revoked, finalized, destroyed, aborted."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from meeting import until

from .backend import capi
from .bodies import on_pool, transports
from .ranks import Pool
from .scenario import (
    FLOAT32,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    REMOTE_ERROR,
    SUM,
    address,
    all_reduce,
    async_error,
    close,
    connect,
    outcome,
    synchronize,
    wait_for_state,
    works,
)
from .worker import Rank

TRANSPORTS = transports("direct", "shm", "tcp", "threads")
REFUSED = (INVALID_ARGUMENT, INVALID_USAGE)


@on_pool(4, transports=TRANSPORTS)
def test_split(rank: Rank) -> None:
    api, world = capi(), connect(rank)
    me, n = rank.rank, rank.nranks
    reverse = api.ncclCommSplit(world, 5, -me)
    assert (api.ncclCommUserRank(reverse), api.ncclCommCount(reverse)) == (n - 1 - me, n)
    ties = api.ncclCommSplit(world, 0, 7)
    assert api.ncclCommUserRank(ties) == me
    assert api.ncclCommSplit(world, -1, 0) == 0
    halves = api.ncclCommSplit(world, me % 2, me, {"splitShare": 1, "commName": "half"})
    assert api.ncclCommCount(halves) == (n + 1 - me % 2) // 2
    most = api.ncclCommSplit(reverse, 0 if me else -1, me)
    assert bool(most) == bool(me)
    # What comes from a communicator outlives it, and it them.
    close(rank, reverse)
    close(rank, world)
    works(rank, halves, (n + 1 - me % 2) // 2)
    if most:
        works(rank, most, n - 1)
        grandchild = api.ncclCommSplit(most, me % 2, 0)
        works(rank, grandchild, sum(r % 2 == me % 2 for r in range(1, n)))
        close(rank, grandchild, most)
    works(rank, ties, n)
    close(rank, ties, halves)


@on_pool(2)
def test_wrong_splits(rank: Rank) -> None:
    api, world = capi(), connect(rank)
    assert outcome(api.ncclCommSplit, world, -2, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommSplit, 0, 0, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommShrink, world, [], 0, None, 0)[0] in REFUSED
    assert outcome(api.ncclCommShrink, world, [rank.nranks], 1, None, 0)[0] in REFUSED
    assert outcome(api.ncclCommShrink, world, [rank.rank], 1, None, 0)[0] in REFUSED
    works(rank, world, rank.nranks)
    close(rank, world)


def refuses_one(rank: Rank, what: str, how: str) -> tuple[int, str]:
    """Rank 1 passes a wrong configuration once; the next calls are right."""
    api, world = capi(), connect(rank)
    old = rank.nranks - 1
    small = api.ncclCommSplit(world, 0 if rank.rank < old else -1, 0) if what == "grow" else world
    came = (OK, "")
    for first in (True, False):
        config = {"blocking": 7} if first and rank.rank == 1 else None
        if what == "grow":
            uid = rank.exchange(api.ncclCommGetUniqueId(small) if rank.rank == 0 else None)[0]
            call = (api.ncclCommGrow, small, rank.nranks, None if rank.rank else uid, -1, config)
            if rank.rank == old:
                call = (api.ncclCommGrow, 0, rank.nranks, uid, rank.rank, config)
        elif what == "split":
            call = (api.ncclCommSplit, world, 0, 0, config)
        else:
            call = (api.ncclCommShrink, world, [old], 1, config, int(how == "abort"))
        if what != "split" and rank.rank == old and (first or what == "shrink"):
            continue
        if first and how == "group":
            api.ncclGroupStart()
            outcome(api.ncclCommSplit, world, 0, 0)
            outcome(*call)
            came = outcome(api.ncclGroupEnd)
        elif first:
            came = outcome(*call)
        else:
            child = call[0](*call[1:])
            works(rank, child, old if what == "shrink" else rank.nranks)
            close(rank, child)
    rank.exchange()
    if how == "abort":
        api.ncclCommAbort(world)
        return came
    works(rank, api.ncclCommSplit(world, 0, 0), rank.nranks)
    works(rank, world, rank.nranks)
    close(rank, world)
    return came


@pytest.mark.parametrize(
    ("what", "how"),
    [("split", "alone"), ("split", "group"), ("shrink", "alone"), ("shrink", "abort"), ("grow", "alone")],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank_refuses(pool: Pool, transport: str, what: str, how: str) -> None:
    """The others hear why at once, and all derive communicators as before."""
    results = pool.get(4, transport).call(refuses_one, what, how)
    assert [code for code, _ in results] == [
        INVALID_ARGUMENT if r == 1 else OK if r == 3 and what != "split" else REMOTE_ERROR for r in range(4)
    ]
    for code, text in results:
        if code == REMOTE_ERROR:
            assert f"rank 1 reports: ncclComm{what.title()}: config.blocking is 7, expected 0 to 1" in text


@pytest.mark.parametrize("exclude", [[1], [0], [3, 1], [0, 1, 2]])
@on_pool(4, transports=TRANSPORTS)
def test_shrink(rank: Rank, exclude: list[int]) -> None:
    api, world = capi(), connect(rank)
    works(rank, world, rank.nranks)
    if rank.rank not in exclude:
        small = api.ncclCommShrink(world, exclude, len(exclude), None, 0)
        staying = [r for r in range(rank.nranks) if r not in exclude]
        assert api.ncclCommCount(small) == len(staying)
        assert api.ncclCommUserRank(small) == staying.index(rank.rank)
        works(rank, small, len(staying))
        close(rank, small)
    works(rank, world, rank.nranks)
    close(rank, world)


@pytest.mark.parametrize(("old", "root"), [(1, 0), (2, 0), (3, 2)])
@on_pool(4, transports=TRANSPORTS)
def test_grow(rank: Rank, old: int, root: int) -> None:
    api, me, n = capi(), rank.rank, rank.nranks
    uid = rank.exchange(api.ncclGetUniqueId() if me == 0 else None)[0]
    small = api.ncclCommInitRank(old, uid, me) if me < old else 0
    ticket = rank.exchange(api.ncclCommGetUniqueId(small) if me == root else None)[root]
    if me == root:
        assert outcome(api.ncclCommGetUniqueId, small)[0] in REFUSED, "a second id before the first is used"
    if me >= old:
        big = api.ncclCommGrow(0, n, ticket, me)
    else:
        big = api.ncclCommGrow(small, n, ticket if me == root else None, -1)
    assert (api.ncclCommUserRank(big), api.ncclCommCount(big)) == (me, n)
    works(rank, big, n)
    if small:
        works(rank, small, old)
        close(rank, small)
    works(rank, big, n)
    close(rank, big)


@pytest.mark.parametrize("how", ["ncclCommDestroy", "ncclCommAbort"])
@on_pool(2, transports=["direct", "threads"])
def test_use_after_the_end(rank: Rank, how: str) -> None:
    """A handle that is over is refused by every function, and a second end is an error."""
    api, comm = capi(), connect(rank)
    getattr(api, how)(comm)
    array = np.ones(10, np.float32)
    a = address(array)
    calls: list[tuple[Any, ...]] = [
        (api.ncclAllReduce, a, a, 10, FLOAT32, SUM, comm, 0),
        (api.ncclSend, a, 10, FLOAT32, 0, comm, 0),
        (api.ncclCommCount, comm),
        (api.ncclCommUserRank, comm),
        (api.ncclCommCuDevice, comm),
        (api.ncclCommGetAsyncError, comm),
        (api.ncclCommSplit, comm, 0, 0),
        (api.ncclCommFinalize, comm),
        (api.ncclCommDestroy, comm),
        (api.ncclCommAbort, comm),
        (api.ncclCommRevoke, comm, 0),
        (api.ncclCommRegister, comm, a, 40),
        (api.pyncclCpuStreamSynchronize, comm, 0, 100),
    ]
    for function, *args in calls:
        code, text = outcome(function, *args)
        assert code == INVALID_ARGUMENT, (function.__name__, code, text)
    for bad in (0, 12345, a):
        assert outcome(api.ncclCommCount, bad)[0] == INVALID_ARGUMENT


@on_pool(3, transports=TRANSPORTS)
def test_finalize(rank: Rank) -> None:
    """Finalize completes what was issued; afterwards there is nothing to do but destroy."""
    api, comm = capi(), connect(rank)
    array, stream = np.ones(500_000, np.float32), api.pyncclCpuStreamCreate()
    all_reduce(comm, array, stream)
    api.ncclCommFinalize(comm)
    assert wait_for_state(comm) == OK
    assert (array == rank.nranks).all()
    assert outcome(all_reduce, comm, array, stream)[0] in REFUSED
    assert outcome(api.ncclCommFinalize, comm)[0] in REFUSED
    api.ncclCommDestroy(comm)


@on_pool(3, transports=TRANSPORTS)
def test_destroy_without_finalize(rank: Rank) -> None:
    """Destroy without finalize completes what was issued too."""
    comm, array = connect(rank), np.ones(500_000, np.float32)
    all_reduce(comm, array)
    capi().ncclCommDestroy(comm)
    assert (array == rank.nranks).all()


@pytest.mark.parametrize("n", [10, 3000, 15_000, 100_000])
@on_pool(3, transports=TRANSPORTS)
def test_data_sent_just_before_the_end(rank: Rank, n: int) -> None:
    """The sender destroys its communicator as soon as its own part is done; the data still arrives."""
    rounds = 6
    for i in range(rounds):
        comm, array = connect(rank), np.full(n, rank.rank + 1.0, np.float32)
        if i % 2:
            capi().ncclBroadcast(address(array), address(array), n, FLOAT32, 0, comm, 0)
        elif rank.rank == 0:
            capi().ncclSend(address(array), n, FLOAT32, 1, comm, 0)
        elif rank.rank == 1:
            capi().ncclRecv(address(array), n, FLOAT32, 0, comm, 0)
        assert synchronize(comm) == OK
        assert (array == 1).all() or (i % 2 == 0 and rank.rank == 2)
        capi().ncclCommDestroy(comm)


def aborted(rank: Rank) -> float:
    """Rank 0 waits for rank 1, gives up, and returns at once; rank 1 hears of it."""
    api, comm, took = capi(), connect(rank), 0.0
    if rank.rank == 0:
        array = np.ones(500_000, np.float32)
        all_reduce(comm, array)
        assert synchronize(comm, 0, 0.05) == IN_PROGRESS
        start = time.monotonic()
        api.ncclCommAbort(comm)
        took = time.monotonic() - start
        del array
        rank.exchange()
    else:
        rank.exchange()
        code, text = async_error(comm)
        assert code == REMOTE_ERROR, text
        assert "rank 0" in text
        assert outcome(all_reduce, comm, np.ones(10, np.float32))[0] == REMOTE_ERROR
        api.ncclCommAbort(comm)
    return took


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort(pool: Pool, transport: str) -> None:
    assert pool.get(2, transport).call(aborted)[0] < 15


@on_pool(2, transports=["direct", "tcp"])
def test_abort_ends_a_wait(rank: Rank) -> None:
    """Abort is what ends a wait that would last for ever."""
    import threading

    api, comm = capi(), connect(rank)
    if rank.rank == 0:
        stream, results = api.pyncclCpuStreamCreate(), []
        array = np.ones(10, np.float32)
        all_reduce(comm, array, stream)
        thread = threading.Thread(target=lambda: results.append(outcome(synchronize, comm, stream, 20)))
        thread.start()
        time.sleep(0.1)
        api.ncclCommAbort(comm)
        thread.join(10)
        assert not thread.is_alive()
        assert results[0][0] != OK
        rank.exchange()
    else:
        rank.exchange()
        api.ncclCommAbort(comm)


@on_pool(3, transports=TRANSPORTS)
def test_revoke(rank: Rank) -> None:
    """A second revoke and a finalize are ncclInvalidArgument, communication is ncclInvalidUsage.

    NCCL's src: init.cc: ncclCommRevoke (sets finalizeCalled), ncclCommFinalize; enqueue.cc: ncclEnqueueCheck.
    """
    api, comm = capi(), connect(rank)
    array = np.ones(1000, np.float32)
    if rank.rank == 0:
        all_reduce(comm, array)
        assert synchronize(comm, 0, 0.05) == IN_PROGRESS
    rank.exchange()
    assert outcome(api.ncclCommRevoke, comm, 1)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommRevoke, comm, 0)[0] in (OK, IN_PROGRESS)
    until(lambda: api.ncclCommGetAsyncError(comm) != IN_PROGRESS)
    assert outcome(api.ncclCommRevoke, comm, 0)[0] == INVALID_ARGUMENT, "revoked twice"
    code, text = outcome(all_reduce, comm, array)
    assert code == INVALID_USAGE and "revoked" in text
    # That it is revoked is looked at before the arguments.
    a = address(array)
    assert outcome(api.ncclAllReduce, a, a, 10, 99, SUM, comm, 0)[0] == INVALID_USAGE
    assert outcome(api.ncclCommFinalize, comm)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommCount, comm) == (OK, "")
    assert api.ncclCommGetAsyncError(comm) == OK
    rank.exchange()
    # All have revoked it, so they can make new ones of it.
    child = api.ncclCommSplit(comm, 0, rank.rank)
    works(rank, child, rank.nranks)
    if rank.rank != 1:
        small = api.ncclCommShrink(comm, [1], 1, None, 0)
        works(rank, small, rank.nranks - 1)
        close(rank, small)
    close(rank, child)
    assert outcome(api.ncclCommDestroy, comm) == (OK, "")


@on_pool(2, transports=TRANSPORTS)
def test_suspend_and_resume(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    works(rank, comm, rank.nranks, n=300_000)
    total = api.ncclCommMemStats(comm, 3)
    assert api.ncclCommMemStats(comm, 1) == 0
    for _ in range(3):
        api.ncclCommSuspend(comm, 1)
        assert api.ncclCommMemStats(comm, 1) == 1
        assert outcome(all_reduce, comm, np.ones(1, np.float32))[0] in REFUSED
        assert outcome(api.ncclCommSuspend, comm, 1)[0] in REFUSED
        api.ncclCommResume(comm)
        assert api.ncclCommMemStats(comm, 1) == 0
        works(rank, comm, rank.nranks, n=300_000)
        works(rank, comm, rank.nranks, n=10)
    assert api.ncclCommMemStats(comm, 3) == total
    assert outcome(api.ncclCommResume, comm)[0] in REFUSED
    # NCCL's src/mem_manager.cc: without NCCL_SUSPEND_MEM nothing is suspended.
    for flags in (0, 2):
        assert outcome(api.ncclCommSuspend, comm, flags)[0] == OK
    works(rank, comm, rank.nranks)
    assert outcome(api.ncclCommMemStats, comm, 99)[0] == INVALID_ARGUMENT
    close(rank, comm)


def resources() -> tuple[int, int, int]:
    """Return how many threads, open files and shared mappings this process has."""
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), shared


@on_pool(2, transports=TRANSPORTS)
def test_nothing_is_left_in_the_process(rank: Rank) -> None:
    """Whatever ends, ends without a trace: threads, files, mappings."""
    rounds = 24
    api = capi()
    seen = []
    for i in range(rounds):
        comm = connect(rank, {"blocking": 1 - i % 2})
        assert wait_for_state(comm) == OK
        stream = api.pyncclCpuStreamCreate()
        works(rank, comm, rank.nranks, stream)
        works(rank, comm, rank.nranks, 0)
        # On a non-blocking one the handle comes late (NCCL's src/init.cc: ncclCommInitChildComm).
        late = api.ncclCommSplit(comm, 0, 0)
        assert wait_for_state(comm) == OK
        child = int(late)
        assert wait_for_state(child) == OK
        works(rank, child, rank.nranks, stream)
        ends = [api.ncclCommDestroy, api.ncclCommAbort][i // 2 % 2]
        rank.exchange()
        for each in (child, comm):
            ends(each)
        api.pyncclCpuStreamDestroy(stream)
        rank.exchange()
        time.sleep(0.02)
        seen.append(resources())
        rank.exchange()
    # A thread that has said its last word may take a moment to end.
    first = np.max(seen[:8], axis=0)
    until(lambda: bool((np.array(resources()) <= first).all()))


@on_pool(2, transports=TRANSPORTS)
def test_many_communicators(rank: Rank) -> None:
    n = 30
    world = connect(rank)
    comms = [capi().ncclCommSplit(world, 0, rank.rank) for _ in range(n)]
    streams = [capi().pyncclCpuStreamCreate() for _ in range(4)]
    arrays = [np.full(1000, i + 1.0, np.float32) for i in range(n)]
    for i, comm in enumerate(comms):
        all_reduce(comm, arrays[i], streams[i % 4])
    for i, comm in enumerate(comms):
        assert synchronize(comm, streams[i % 4]) == OK
    assert all((array == (i + 1) * rank.nranks).all() for i, array in enumerate(arrays))
    close(rank, *comms, world)
