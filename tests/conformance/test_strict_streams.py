"""The streams 0, 1 and 2 are what they are in CUDA.

NCCL 2.30.7 hands them to CUDA as they are: src/enqueue.cc: ncclLaunchPrepare, ncclLaunchKernel.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from .backend import capi
from .calls import TRANSPORTS, ones
from .ranks import Pool
from .scenario import (
    FLOAT32,
    IN_PROGRESS,
    OK,
    SUM,
    Floats,
    address,
    all_reduce,
    connect,
    query,
    synchronize,
)
from .worker import Rank


def copy_on(solo: int, source: Floats, stream: int) -> Floats:
    """Copy through a communicator of one rank."""
    copy = np.zeros_like(source)
    capi().ncclAllReduce(address(source), address(copy), source.size, FLOAT32, SUM, solo, stream)
    return copy


def orders(rank: Rank, first: str, then: str) -> bool:
    """Return whether what comes on stream `then` waits for what waits for rank 1 on stream `first`."""
    api, comm = capi(), connect(rank)
    solo = api.ncclCommSplit(comm, rank.rank, 0)
    made = {"blocking": api.pyncclCpuStreamCreate()} if "blocking" in (first, then) else {}
    before, after = (made.get(name) or int(name) for name in (first, then))
    array, waited = ones(), False
    if rank.rank == 0:
        all_reduce(comm, array, before)
        copy = copy_on(solo, array, after)
        waited = synchronize(solo, after, 0.2) == IN_PROGRESS
        rank.exchange()
        assert synchronize(solo, after) == OK
        assert not waited or (copy == 2).all(), "it was let go too early"
    else:
        # What rank 0's device waits for is nothing to the device of this one.
        assert synchronize(solo, 0) == OK
        copy_on(solo, array, 0)
        assert synchronize(solo, 0) == OK
        rank.exchange()
        all_reduce(comm, array, before)
    assert synchronize(comm, before) == OK
    assert (array == 2).all()
    rank.exchange()
    for each in (solo, comm):
        api.ncclCommAbort(each)
    return waited


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("blocking", "0"),
        ("0", "blocking"),
        ("blocking", "1"),
        ("1", "blocking"),
        ("0", "1"),
        ("1", "0"),
        ("2", "0"),
        ("0", "2"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_legacy_stream_orders_against_blocking_streams(
    pool: Pool, transport: str, first: str, then: str
) -> None:
    """0 and 1 are the legacy stream, which waits for all blocking streams of its device, and they for it; 2
    is a blocking stream of each thread's own.
    """
    assert pool.get(2, transport).call(orders, first, then)[0]


@pytest.mark.parametrize(("first", "then"), [("blocking", "2"), ("2", "blocking")])
def test_blocking_streams_do_not_order_against_each_other(pool: Pool, first: str, then: str) -> None:
    """Only the legacy stream orders."""
    assert not pool.get(2).call(orders, first, then)[0]


def in_another_thread(rank: Rank, stream: int) -> bool:
    """Return whether another thread's call on the stream waits for this thread's."""
    api, comm = capi(), connect(rank)
    solo = api.ncclCommSplit(comm, rank.rank, 0)
    array, states = ones(), []
    if rank.rank == 0:
        all_reduce(comm, array, stream)

        def other() -> None:
            api.pyncclCpuSetDevice(rank.rank)
            copy_on(solo, array, stream)
            states.append(synchronize(solo, stream, 0.3))
            synchronize(solo, stream)

        thread = threading.Thread(target=other)
        thread.start()
        while not states:
            thread.join(0.01)
        assert query(comm, stream) == IN_PROGRESS
        rank.exchange()
        thread.join(20)
        assert not thread.is_alive()
    else:
        rank.exchange()
        all_reduce(comm, array, stream)
    assert synchronize(comm, stream) == OK
    rank.exchange()
    for each in (solo, comm):
        api.ncclCommAbort(each)
    return states == [IN_PROGRESS]


@pytest.mark.parametrize(("stream", "waits"), [(0, True), (1, True), (2, False)])
def test_streams_of_threads(pool: Pool, stream: int, waits: bool) -> None:
    """CUDA: the legacy stream is one for all threads of a device, cudaStreamPerThread each thread's own."""
    assert pool.get(2).call(in_another_thread, stream)[0] == waits
