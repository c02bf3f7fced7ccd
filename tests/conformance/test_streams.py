"""Streams and events: calls return at once, a stream runs in order, streams are independent."""

from __future__ import annotations

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
    OK,
    SUM,
    UINT32,
    address,
    all_reduce,
    close,
    connect,
    outcome,
    query,
    synchronize,
    works,
)
from .worker import Rank

TRANSPORTS = transports("direct", "shm", "tcp", "threads")
# Both below and above what travels inside a message's header slot.
SIZES = [10, 300_000]


def late_peer(rank: Rank, n: int, delay: float) -> tuple[int, int]:
    """Rank 2 calls when the others' calls have returned; they finish another stream's work in between."""
    comm = connect(rank)
    pair = capi().ncclCommSplit(comm, 0 if rank.rank < 2 else -1, rank.rank)
    slow, quick = capi().pyncclCpuStreamCreate(), capi().pyncclCpuStreamCreate()
    array = np.ones(n, np.float32)
    before, after = IN_PROGRESS, IN_PROGRESS
    if rank.rank < 2:
        all_reduce(comm, array, slow)
        before = query(comm, slow)
        works(rank, pair, 2, quick)
        after = query(comm, slow)
        rank.exchange()
    else:
        rank.exchange()
        time.sleep(delay)
        all_reduce(comm, array, slow)
    assert synchronize(comm, slow) == OK
    assert (array == 3).all()
    assert query(comm, slow) == OK
    close(rank, *filter(None, [pair, comm]))
    return before, after


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_call_returns_before_its_peer_arrives(pool: Pool, transport: str, n: int) -> None:
    delays = (0.0, 0.05, 1.0) if transport == "direct" else (0.0, 0.05, 0.2)
    for delay in delays:
        states = pool.get(3, transport).call(late_peer, n, delay)
        assert states == [(IN_PROGRESS, IN_PROGRESS)] * 3


@on_pool(3, transports=TRANSPORTS)
def test_stream_runs_in_order(rank: Rank) -> None:
    """Calls of very different size, each on what the one before left."""
    steps = 61
    comm, stream = connect(rank), capi().pyncclCpuStreamCreate()
    sizes = [1, 70_000, 500, 5000]
    everyone = np.arange(1, rank.nranks + 1, dtype=np.uint32)[:, None] * np.ones(max(sizes), np.uint32)
    mine = everyone[rank.rank].copy()
    for i in range(steps):
        n = sizes[i % len(sizes)]
        if i % 3:
            root = i % rank.nranks
            capi().ncclBroadcast(address(mine), address(mine), n, UINT32, root, comm, stream)
            everyone[:, :n] = everyone[root, :n]
        else:
            capi().ncclAllReduce(address(mine), address(mine), n, UINT32, SUM, comm, stream)
            everyone[:, :n] = everyone[:, :n].sum(0, dtype=np.uint32)
        if i % 7 == 0:
            capi().ncclAllReduce(address(mine), address(mine), n // 2, UINT32, SUM, comm, stream)
            everyone[:, : n // 2] = everyone[:, : n // 2].sum(0, dtype=np.uint32)
    assert synchronize(comm, stream) == OK
    assert (mine == everyone[rank.rank]).all()
    close(rank, comm)


@pytest.mark.parametrize("n", SIZES)
@on_pool(3, transports=TRANSPORTS)
def test_streams_are_independent(rank: Rank, n: int) -> None:
    """Two communicators and streams, which the ranks use in opposite orders."""
    first = connect(rank)
    second = capi().ncclCommSplit(first, 0, -rank.rank)
    calls = [(first, capi().pyncclCpuStreamCreate()), (second, capi().pyncclCpuStreamCreate())]
    arrays = {comm: np.ones(n, np.float32) for comm, _ in calls}
    for comm, stream in calls if rank.rank % 2 else reversed(calls):
        all_reduce(comm, arrays[comm], stream)
    for comm, stream in calls:
        assert synchronize(comm, stream) == OK
        assert (arrays[comm] == rank.nranks).all()
    close(rank, second, first)


@on_pool(2, transports=TRANSPORTS)
def test_one_communicator_on_two_streams(rank: Rank) -> None:
    comm = connect(rank)
    streams = [capi().pyncclCpuStreamCreate() for _ in range(2)]
    arrays = [np.full(50_000, float(i + 1), np.float32) for i in range(6)]
    for i, array in enumerate(arrays):
        all_reduce(comm, array, streams[i % 2])
    for stream in reversed(streams):
        assert synchronize(comm, stream) == OK
    for i, array in enumerate(arrays):
        assert (array == (i + 1) * rank.nranks).all()
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_events(rank: Rank) -> None:
    comm = connect(rank)
    other = capi().ncclCommSplit(comm, rank.rank, 0)
    first, second = capi().pyncclCpuStreamCreate(), capi().pyncclCpuStreamCreate()
    event = capi().pyncclCpuEventCreate()
    # As in CUDA, an event that was never recorded has happened.
    assert capi().pyncclCpuEventQuery(event) == OK
    assert capi().pyncclCpuStreamWaitEvent(comm, second, event) == OK
    assert synchronize(comm, second) == OK
    array = np.ones(1000, np.float32)
    if rank.rank == 0:
        all_reduce(comm, array, first)
        capi().pyncclCpuEventRecord(comm, event, first)
        assert capi().pyncclCpuEventQuery(event) == IN_PROGRESS
        assert capi().pyncclCpuEventSynchronize(event, 30) == IN_PROGRESS
        capi().pyncclCpuStreamWaitEvent(other, second, event)
        copy = np.zeros_like(array)
        capi().ncclAllReduce(address(array), address(copy), 1000, FLOAT32, SUM, other, second)
        assert synchronize(other, second, 0.05) == IN_PROGRESS
        rank.exchange()
        assert capi().pyncclCpuEventSynchronize(event, 20_000) == OK
        assert synchronize(other, second) == OK
        assert (copy == rank.nranks).all(), "the second stream did not wait for the first"
    else:
        rank.exchange()
        all_reduce(comm, array, first)
        assert synchronize(comm, first) == OK
    assert capi().pyncclCpuEventQuery(event) == OK
    capi().pyncclCpuEventDestroy(event)
    close(rank, other, comm)


def bounded_wait(rank: Rank) -> tuple[float, float]:
    comm = connect(rank)
    array = np.ones(10, np.float32)
    start = time.monotonic()
    short = long = 0.0
    if rank.rank == 0:
        all_reduce(comm, array)
        assert synchronize(comm, 0, 0.02) == IN_PROGRESS
        short = time.monotonic() - start
        assert synchronize(comm, 0, 0.4) == IN_PROGRESS
        long = time.monotonic() - start
    rank.exchange()
    if rank.rank == 1:
        all_reduce(comm, array)
    assert synchronize(comm) == OK
    assert (array == 2).all()
    close(rank, comm)
    return short, long


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_synchronize_is_bounded(pool: Pool, transport: str) -> None:
    (short, long), _ = pool.get(2, transport).call(bounded_wait)
    assert 0.42 <= long < 15
    assert short < long


@pytest.mark.parametrize("n", SIZES)
@on_pool(3, transports=TRANSPORTS)
def test_streams_run_by_themselves(rank: Rank, n: int) -> None:
    """Nobody synchronizes: the streams run by themselves, and a query says so in the end."""
    comm, stream = connect(rank), capi().pyncclCpuStreamCreate()
    array = np.ones(n, np.float32)
    all_reduce(comm, array, stream)
    until(lambda: query(comm, stream) == OK)
    assert (array == rank.nranks).all()
    close(rank, comm)


def blocking(rank: Rank, delay: float) -> tuple[float, int]:
    comm = connect(rank)
    array = np.ones(10, np.float32)
    start = time.monotonic()
    rank.exchange()
    if rank.rank == 1:
        time.sleep(delay)
    all_reduce(comm, array)
    took = time.monotonic() - start
    assert (array == 2).all()
    state = query(comm)
    close(rank, comm)
    return took, state


def test_blocking_calls(pool: Pool) -> None:
    (took, state), _ = pool.get(2, PYNCCL_CPU_BLOCKING="1").call(blocking, 0.4)
    assert state == OK
    assert took > 0.3


@on_pool(2)
def test_unknown_handles(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    destroyed = api.pyncclCpuStreamCreate()
    api.pyncclCpuStreamDestroy(destroyed)
    gone = api.pyncclCpuEventCreate()
    api.pyncclCpuEventDestroy(gone)
    array = np.ones(10, np.float32)
    stream = api.pyncclCpuStreamCreate()
    event = api.pyncclCpuEventCreate()
    for bad in (3, 0xDEADBEEF, 2**63, destroyed, comm, event, address(array)):
        attempts: list[tuple[Any, ...]] = [
            (api.ncclAllReduce, address(array), address(array), 10, FLOAT32, SUM, comm, bad),
            (api.ncclSend, address(array), 10, FLOAT32, 0, comm, bad),
            (api.pyncclCpuStreamQuery, comm, bad),
            (api.pyncclCpuStreamSynchronize, comm, bad, 100),
            (api.pyncclCpuStreamWaitEvent, comm, bad, event),
            (api.pyncclCpuEventRecord, comm, event, bad),
            (api.pyncclCpuStreamDestroy, bad),
        ]
        for function, *args in attempts:
            code, text = outcome(function, *args)
            assert code == INVALID_ARGUMENT, (function.__name__, hex(bad), code, text)
    for bad in (0, 5, 0xDEADBEEF, gone, stream, comm):
        attempts = [
            (api.pyncclCpuEventQuery, bad),
            (api.pyncclCpuEventSynchronize, bad, 100),
            (api.pyncclCpuEventRecord, comm, bad, stream),
            (api.pyncclCpuStreamWaitEvent, comm, stream, bad),
            (api.pyncclCpuEventDestroy, bad),
        ]
        for function, *args in attempts:
            code, text = outcome(function, *args)
            assert code == INVALID_ARGUMENT, (function.__name__, hex(bad), code, text)
    works(rank, comm, rank.nranks, stream)
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_default_streams(rank: Rank) -> None:
    """0 and 1 (CUDA's null and legacy handles) are one stream, that of the device; 2 is the thread's."""
    comm = connect(rank)
    child = capi().ncclCommSplit(comm, 0, rank.rank)
    array = np.ones(10, np.float32)
    if rank.rank == 0:
        all_reduce(comm, array, 0)
        assert [query(comm, stream) for stream in (0, 1, 2)] == [IN_PROGRESS, IN_PROGRESS, OK]
        assert query(child, 0) == IN_PROGRESS
    rank.exchange()
    if rank.rank == 1:
        all_reduce(comm, array, 2)
    assert synchronize(comm, 1 + rank.rank) == OK
    assert (array == rank.nranks).all()
    close(rank, child, comm)


@on_pool(2)
def test_destroyed_stream_finishes_its_work(rank: Rank) -> None:
    """As in CUDA, a stream that is destroyed finishes its work."""
    comm, stream = connect(rank), capi().pyncclCpuStreamCreate()
    array = np.ones(100_000, np.float32)
    if rank.rank == 0:
        all_reduce(comm, array, stream)
        start = time.monotonic()
        capi().pyncclCpuStreamDestroy(stream)
        assert time.monotonic() - start < 5
        rank.exchange()
    else:
        rank.exchange()
        all_reduce(comm, array, stream)
    # The communicator's calls keep their order over all streams.
    works(rank, comm, 2)
    assert (array == 2).all()
    close(rank, comm)


@on_pool(2, transports=["direct", "threads"])
def test_devices(rank: Rank) -> None:
    api = capi()
    assert api.pyncclCpuDeviceCount() == rank.nranks
    for device in (0, 3, 1000):
        api.pyncclCpuSetDevice(device)
        assert api.pyncclCpuGetDevice() == device
        comm = connect(rank)
        assert api.ncclCommCuDevice(comm) == device
        works(rank, comm, rank.nranks)
        close(rank, comm)
    assert outcome(api.pyncclCpuSetDevice, -1)[0] == INVALID_ARGUMENT
    api.pyncclCpuSetDevice(rank.rank)
