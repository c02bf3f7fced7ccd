"""Groups: what is fused, what only works grouped, where errors surface; and point-to-point order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .backend import capi
from .bodies import on_pool, transports
from .scenario import (
    FLOAT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    SUM,
    address,
    all_reduce,
    async_error,
    close,
    connect,
    outcome,
    synchronize,
    works,
)
from .worker import Rank

TRANSPORTS = transports("direct", "shm", "tcp", "threads")
SIZES = [10, 1_000_000]


@on_pool(2)
def test_errors_surface_at_the_end(rank: Rank) -> None:
    """The valid call before the wrong one is not made either; the next group starts afresh."""
    api, comm = capi(), connect(rank)
    array = np.ones(10, np.float32)
    a = address(array)
    wrong: list[tuple[Any, ...]] = [
        (api.ncclReduce, a, a, 10, FLOAT32, SUM, rank.nranks, comm, 0),
        (api.ncclAllReduce, a, a, 10, 99, SUM, comm, 0),
        (api.ncclSend, a, 10, FLOAT32, -1, comm, 0),
        (api.ncclAllReduce, a, a, 10, FLOAT32, SUM, comm, 0xDEADBEEF),
        (api.ncclAllReduce, 0, a, 10, FLOAT32, SUM, comm, 0),
    ]
    for function, *args in wrong:
        api.ncclGroupStart()
        all_reduce(comm, array)
        api.ncclGroupStart()
        outcome(function, *args)
        api.ncclGroupEnd()
        code, text = outcome(api.ncclGroupEnd)
        assert code == INVALID_ARGUMENT, (function.__name__, args, code, text)
        assert (array == 1).all(), "a call of a spoiled group was made"
        works(rank, comm, rank.nranks)
    assert outcome(api.ncclGroupEnd)[0] == INVALID_USAGE
    works(rank, comm, rank.nranks)
    close(rank, comm)


@pytest.mark.parametrize("n", SIZES)
@on_pool(3, transports=TRANSPORTS)
def test_exchange(rank: Rank, n: int) -> None:
    """Everybody sends before they receive, which only a group allows; two messages a pair, in order."""
    api, comm = capi(), connect(rank)
    everyone = range(rank.nranks)
    sends = [np.full(n, 10.0 * rank.rank + other, np.float32) for other in everyone]
    receives = [np.zeros(n, np.float32) for _ in everyone]
    extra = [np.zeros(1, np.float32) for _ in everyone]
    api.ncclGroupStart()
    for other in everyone:
        api.ncclSend(address(sends[other]), n, FLOAT32, other, comm, 0)
        api.ncclSend(address(sends[other]), 1, FLOAT32, other, comm, 0)
    for other in reversed(everyone):
        api.ncclRecv(address(receives[other]), n, FLOAT32, other, comm, 0)
        api.ncclRecv(address(extra[other]), 1, FLOAT32, other, comm, 0)
    api.ncclGroupEnd()
    assert synchronize(comm) == OK
    for other in everyone:
        assert (receives[other] == 10.0 * other + rank.rank).all()
        assert extra[other][0] == 10.0 * other + rank.rank
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_ungrouped_exchange_is_reported(rank: Rank) -> None:
    """Without a group a send may wait for its receive, which comes too late here."""
    n = 10_000_000
    api, comm = capi(), connect(rank)
    array, other = np.ones(n, np.float32), 1 - rank.rank
    api.ncclSend(address(array), n, FLOAT32, other, comm, 0)
    api.ncclRecv(address(array), n, FLOAT32, other, comm, 0)
    code, text = async_error(comm)
    api.ncclCommAbort(comm)
    assert code == INVALID_USAGE, text
    assert "rank 0" in text
    assert "rank 1" in text
    assert "Send" in text
    assert "queued behind its own; sends and receives of one group, or of send_recv, start" in text


@pytest.mark.parametrize("n", SIZES)
@on_pool(4, transports=TRANSPORTS)
def test_several_communicators(rank: Rank, n: int) -> None:
    """The ranks name them in opposite orders; a part of the ranks is in each of the smaller ones."""
    api, world = capi(), connect(rank)
    copy = api.ncclCommSplit(world, 0, -rank.rank)
    half = api.ncclCommSplit(world, rank.rank % 2, rank.rank)
    stream = api.pyncclCpuStreamCreate()
    comms = [world, copy, half]
    arrays = {comm: np.full(n, rank.rank + 1.0, np.float32) for comm in comms}
    for streams in ([0, 0, 0], [0, stream, 0], [stream, 0, 0]):
        calls = list(zip(comms, streams, strict=True))
        for array in arrays.values():
            array[:] = rank.rank + 1
        api.ncclGroupStart()
        for comm, used in calls if rank.rank % 2 else reversed(calls):
            all_reduce(comm, arrays[comm], used)
        api.ncclGroupEnd()
        for comm, used in calls:
            assert synchronize(comm, used) == OK
        assert (arrays[world] == 10).all()
        assert (arrays[copy] == 10).all()
        assert (arrays[half] == (4, 6)[rank.rank % 2]).all()
    close(rank, half, copy, world)


@pytest.mark.parametrize("n", SIZES)
@on_pool(3, transports=TRANSPORTS)
def test_mixed_and_nested(rank: Rank, n: int) -> None:
    """Collectives and messages fuse; nothing happens before the outermost end."""
    api, comm = capi(), connect(rank)
    nranks, me = rank.nranks, rank.rank
    summed, gathered = np.full(n, 1.0, np.float32), np.zeros(n * nranks, np.float32)
    sent, received = np.full(n, float(me), np.float32), np.zeros(n, np.float32)
    api.ncclGroupStart()
    api.ncclRecv(address(received), n, FLOAT32, (me - 1) % nranks, comm, 0)
    api.ncclGroupStart()
    all_reduce(comm, summed)
    api.ncclGroupStart()
    api.ncclSend(address(sent), n, FLOAT32, (me + 1) % nranks, comm, 0)
    api.ncclGroupEnd()
    api.ncclAllGather(address(sent), address(gathered), n, FLOAT32, comm, 0)
    api.ncclGroupEnd()
    rank.exchange()
    assert synchronize(comm) == OK
    assert (summed == 1).all()
    api.ncclGroupEnd()
    assert synchronize(comm) == OK
    assert (summed == nranks).all()
    assert (received == (me - 1) % nranks).all()
    assert (gathered == np.repeat(np.arange(nranks), n)).all()
    close(rank, comm)


@on_pool(2)
def test_simulate(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    array = np.ones(1000, np.float32)
    api.ncclGroupStart()
    all_reduce(comm, array)
    info = api.ncclGroupSimulateEnd(None)
    assert info.estimatedTime is not None
    assert info.estimatedTime > 0
    assert synchronize(comm) == OK
    assert (array == 1).all(), "a simulated group was run"
    assert outcome(api.ncclGroupEnd)[0] == INVALID_USAGE
    works(rank, comm, rank.nranks)
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_inits_in_a_group(rank: Rank) -> None:
    """Each process is several ranks, from one thread."""
    ranks_each = 2
    api, nranks = capi(), rank.nranks * ranks_each
    uid = rank.exchange(api.ncclGetUniqueId() if rank.rank == 0 else None)[0]
    mine = [rank.rank * ranks_each + i for i in range(ranks_each)]
    api.ncclGroupStart()
    late = [api.ncclCommInitRank(nranks, uid, r) for r in mine]
    api.ncclGroupEnd()
    comms = [int(comm) for comm in late]
    assert [api.ncclCommUserRank(comm) for comm in comms] == mine
    arrays = [np.full(10_000, r + 1.0, np.float32) for r in mine]
    for _ in range(2):
        api.ncclGroupStart()
        for comm, array in zip(comms, arrays, strict=True):
            all_reduce(comm, array)
        api.ncclGroupEnd()
        for comm in comms:
            assert synchronize(comm) == OK
    assert all((array == nranks * (nranks + 1) / 2 * nranks).all() for array in arrays)
    api.ncclGroupStart()
    children = [api.ncclCommSplit(comm, r % 2, r) for comm, r in zip(comms, mine, strict=True)]
    api.ncclGroupEnd()
    assert [api.ncclCommCount(int(child)) for child in children] == [nranks // 2] * ranks_each
    api.ncclGroupStart()
    for comm in (*map(int, children), *comms):
        api.ncclCommDestroy(comm)
    api.ncclGroupEnd()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("devices", [None, [3, 1, 0, 2], [0, 0, 0, 0]])
@on_pool(1)
def test_init_all(rank: Rank, devices: list[int] | None, n: int) -> None:
    api = capi()
    comms = api.ncclCommInitAll(4, devices)
    assert [api.ncclCommUserRank(comm) for comm in comms] == [0, 1, 2, 3]
    assert [api.ncclCommCount(comm) for comm in comms] == [4] * 4
    assert [api.ncclCommCuDevice(comm) for comm in comms] == (devices or [0, 1, 2, 3])
    arrays = [np.full(n, r + 1.0, np.float32) for r in range(4)]
    api.ncclGroupStart()
    for comm, array in zip(comms, arrays, strict=True):
        all_reduce(comm, array)
    api.ncclGroupEnd()
    for comm in comms:
        assert synchronize(comm) == OK
    assert all((array == 10).all() for array in arrays)
    # Calls only enqueue, so that one thread may also make them one after the other.
    for comm, array in zip(comms, arrays, strict=True):
        all_reduce(comm, array)
    for comm in comms:
        assert synchronize(comm) == OK
    assert all((array == 40).all() for array in arrays)
    for comm in comms:
        api.ncclCommDestroy(comm)


@on_pool(3, transports=TRANSPORTS)
def test_empty_groups_and_zero_counts(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    api.ncclGroupStart()
    api.ncclGroupEnd()
    array = np.ones(4, np.float32)
    api.ncclGroupStart()
    for count in (0, 4, 0):
        api.ncclSend(address(array), count, FLOAT32, (rank.rank + 1) % rank.nranks, comm, 0)
    received = np.zeros(4, np.float32)
    for count in (0, 4, 0):
        api.ncclRecv(address(received), count, FLOAT32, (rank.rank - 1) % rank.nranks, comm, 0)
    api.ncclAllReduce(0, 0, 0, FLOAT32, SUM, comm, 0)
    api.ncclGroupEnd()
    assert synchronize(comm) == OK
    assert (received == 1).all()
    works(rank, comm, rank.nranks)
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_messages_keep_their_order(rank: Rank) -> None:
    """Messages of one pair keep their order over groups, with and without one."""
    rounds = 60
    api, comm = capi(), connect(rank)
    received = np.zeros((rounds, 3), np.float32)
    sent = np.arange(rounds * 3, dtype=np.float32).reshape(rounds, 3)
    for i in range(rounds):
        grouped = i % 3 == 0
        if grouped:
            api.ncclGroupStart()
        for j in range(3):
            if rank.rank == 0:
                api.ncclSend(address(sent[i, j:]), 1, FLOAT32, 1, comm, 0)
            else:
                api.ncclRecv(address(received[i, j:]), 1, FLOAT32, 0, comm, 0)
        if grouped:
            api.ncclGroupEnd()
    assert synchronize(comm) == OK
    if rank.rank == 1:
        assert (received == sent).all()
    close(rank, comm)
