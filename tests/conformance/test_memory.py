"""Memory of the library, registrations and windows, whose handles are checked; very large counts."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from .backend import capi
from .bodies import on_pool
from .ranks import Pool, Ranks
from .scenario import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    SUM,
    UINT8,
    address,
    close,
    connect,
    outcome,
    synchronize,
    works,
)
from .worker import Rank


@on_pool(2, transports=["direct", "shm", "tcp", "threads"])
def test_allocate(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    pointers = []
    for size in (1, 4096, 1_000_000):
        pointer = api.ncclMemAlloc(size)
        assert pointer % 4096 == 0, "windows need that alignment"
        ctypes.memset(pointer, rank.rank + 1, size)
        api.ncclAllReduce(pointer, pointer, size, UINT8, SUM, comm, 0)
        assert synchronize(comm) == OK
        assert ctypes.string_at(pointer, size) == bytes([3]) * size
        pointers.append(pointer)
    assert len(set(pointers)) == 3
    for pointer in pointers:
        assert outcome(api.ncclMemFree, pointer + 64)[0] == INVALID_ARGUMENT
        assert outcome(api.ncclMemFree, pointer)[0] == OK
        assert outcome(api.ncclMemFree, pointer)[0] == INVALID_ARGUMENT, "freed twice"
    assert outcome(api.ncclMemFree, address(np.zeros(10)))[0] == INVALID_ARGUMENT
    assert outcome(api.ncclMemAlloc, 2**62)[0] not in (OK,)
    works(rank, comm, rank.nranks)
    close(rank, comm)


@on_pool(2, transports=["direct", "threads"])
def test_register(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    other = api.ncclCommSplit(comm, 0, 0)
    array = np.ones(4096, np.uint8)
    first = api.ncclCommRegister(comm, address(array), array.nbytes)
    second = api.ncclCommRegister(comm, address(array), array.nbytes)
    # NCCL's src/register/register.cc: counted; and ncclInvalidUsage for a handle that it does not know.
    assert first == second != 0
    assert outcome(api.ncclCommDeregister, other, first)[0] == INVALID_USAGE, "another communicator's"
    assert outcome(api.ncclCommWindowDeregister, comm, first)[0] == INVALID_ARGUMENT, "not a window"
    assert outcome(api.ncclCommRegister, comm, 0, 10)[0] == INVALID_ARGUMENT
    for handle in (first, second):
        assert outcome(api.ncclCommDeregister, comm, handle)[0] == OK
    for bad in (first, 12345, comm, address(array)):
        assert outcome(api.ncclCommDeregister, comm, bad)[0] == INVALID_USAGE
    nothing = api.ncclCommRegister(comm, address(array), 0)
    assert outcome(api.ncclCommDeregister, comm, nothing)[0] == OK
    # What is still registered when a communicator ends harms nobody.
    api.ncclCommRegister(comm, address(array), 100)
    works(rank, comm, rank.nranks)
    close(rank, other, comm)


def window(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    other = api.ncclCommSplit(comm, 0, 0)
    pointer = api.ncclMemAlloc(8192)
    for flags in (0, 1):
        win = api.ncclCommWindowRegister(comm, pointer, 8192, flags)
        assert win
        assert api.ncclWinGetUserPtr(comm, win) == pointer
        assert outcome(api.ncclWinGetUserPtr, other, win)[0] == INVALID_ARGUMENT
        assert outcome(api.ncclCommDeregister, comm, win)[0] == INVALID_USAGE, "not a registration"
        assert outcome(api.ncclCommWindowDeregister, other, win)[0] == INVALID_ARGUMENT
        put_to_the_right(rank, comm, win, pointer)
        assert outcome(api.ncclCommWindowDeregister, comm, win)[0] == OK
        assert outcome(api.ncclCommWindowDeregister, comm, win)[0] == INVALID_ARGUMENT, "deregistered twice"
        assert outcome(api.ncclWinGetUserPtr, comm, win)[0] == INVALID_ARGUMENT
    for wrong in [(0, 8192, 0), (pointer, 8192, 1 << 20), (pointer + 8, 4096, 1)]:
        assert outcome(api.ncclCommWindowRegister, comm, *wrong)[0] == INVALID_ARGUMENT, wrong
    api.ncclMemFree(pointer)
    works(rank, comm, rank.nranks)
    close(rank, other, comm)


def put_to_the_right(rank: Rank, comm: int, win: int, pointer: int) -> None:
    """Each rank puts into the window of the next, and reads its own when the signal has come."""
    api, n, me = capi(), rank.nranks, rank.rank
    values = np.arange(8, dtype=np.uint8) + 10 * me
    api.ncclPutSignal(values.ctypes.data, 8, UINT8, (me + 1) % n, win, 4096, 0, 0, 0, comm, 0)
    api.ncclWaitSignal(1, [(1, (me - 1) % n, 0, 0)], comm, 0)
    assert synchronize(comm) == OK
    got = np.frombuffer((ctypes.c_uint8 * 8).from_address(pointer + 4096), np.uint8)
    assert (got == np.arange(8) + 10 * ((me - 1) % n)).all()
    # Nobody overwrites what another has not read.
    api.ncclSignal((me - 1) % n, 0, 0, 0, comm, 0)
    api.ncclWaitSignal(1, [(1, (me + 1) % n, 0, 0)], comm, 0)
    assert synchronize(comm) == OK


@pytest.mark.parametrize("transport", ["direct", "tcp", "threads"])
def test_window(pool: Pool, transport: str) -> None:
    pool.get(2, transport).call(window)


def pattern(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that repeat after a prime number of them."""
    period = np.random.default_rng(seed).integers(0, 256, 1_000_003, np.uint8)
    return np.resize(period, n)


def very_large(rank: Rank, function: str) -> None:
    """More elements than fit a signed 32-bit integer."""
    api, comm, n = capi(), connect(rank), 2**31 + 5
    mine = pattern(n, rank.rank)
    if function == "AllReduce":
        api.ncclAllReduce(address(mine), address(mine), n, UINT8, SUM, comm, 0)
    elif function == "Broadcast":
        api.ncclBroadcast(address(mine), address(mine), n, UINT8, 1, comm, 0)
    elif rank.rank == 0:
        api.ncclSend(address(mine), n, UINT8, 1, comm, 0)
    else:
        api.ncclRecv(address(mine), n, UINT8, 0, comm, 0)
    assert synchronize(comm, 0, 200) == OK
    expected = pattern(n, {"AllReduce": 1 - rank.rank, "Broadcast": 1, "Send": 0}[function])
    if function == "AllReduce":
        mine -= pattern(n, rank.rank)
    assert np.array_equal(mine, expected)
    close(rank, comm)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("function", ["AllReduce", "Broadcast", "Send"])
@pytest.mark.parametrize("transport", ["direct", "shm", "tcp"])
def test_counts_over_2_to_the_31(transport: str, function: str) -> None:
    with Ranks(2, transport) as ranks:
        ranks.call(very_large, function, timeout=300)


@on_pool(2)
def test_device_communicators(rank: Rank) -> None:
    """No kernels run here: whatever only a kernel could use is refused by name."""
    api, comm = capi(), connect(rank)
    team = api.ncclTeamWorld(comm)
    refused = [
        (api.ncclDevCommCreate, (comm,), "has no device communicators"),
        (api.ncclDevCommDestroy, (comm, api.DevComm(None)), "has no device communicators"),
        (api.ncclLsaBarrierCreateRequirement, (team, 1), "has no device communicators"),
        (api.ncclGinBarrierCreateRequirement, (comm, team, 1), "has no device communicators"),
        (api.ncclLLA2ACreateRequirement, (1, 1), "has no device communicators"),
        (api.ncclGinOutboxCreateRequirement, (1, 4), "has no device communicators"),
        (api.ncclGinInboxA2ACreateRequirement, (team, 1, 4), "has no device communicators"),
        (api.ncclGetMultimemDeviceLeInfo, (0, 0), "has no CFT"),
        (api.ncclGetCftDeviceLeInfo, (0, 0, 0, team), "has no CFT"),
        (api.ncclGetPeerDeviceLeInfo, (0, 0, 0), "has no CFT"),
    ]
    for function, arguments, words in refused:
        code, text = outcome(function, *arguments)
        assert code == INVALID_USAGE
        assert text.startswith(f"{function.__name__}: ncclInvalidUsage: the CPU library {words}")
    for function in (lambda c: api.ncclTeamCft(c, 0), api.ncclTeamCftMultimem):
        code, text = outcome(function, comm)
        assert code == INVALID_ARGUMENT
        assert "the CPU library has no CFT" in text
    # NCCL's src/nccl_device/ll_a2a.cc
    assert [api.ncclLLA2ACalcSlots(n, size) for n, size in ((3, 1), (3, 8), (3, 9), (0, 8))] == [3, 3, 6, 0]
    assert outcome(api.ncclLLA2ACalcSlots, -1, 8)[0] == INVALID_ARGUMENT
    pointer = api.ncclMemAlloc(8192)
    window = api.ncclCommWindowRegister(comm, pointer, 8192)
    assert api.ncclGetLsaMultimemDevicePointer(window, 0) == 0, "as NCCL without multicast memory"
    assert api.ncclGetMultimemDevicePointer(window, 0, 4096) == 0
    for bad in (0, comm):
        assert outcome(api.ncclGetLsaMultimemDevicePointer, bad, 0)[0] == INVALID_ARGUMENT
    api.ncclCommWindowDeregister(comm, window)
    api.ncclMemFree(pointer)
    close(rank, comm)
