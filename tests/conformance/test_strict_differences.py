"""The rest of docs/strictness.md: what knowingly differs from NCCL 2.30.7, and calls that are as NCCL's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .backend import capi
from .bodies import on_pool
from .calls import Outcome, binding, create_with, ones, state
from .ranks import Ranks
from .scenario import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    SUM,
    UINT32,
    address,
    all_reduce,
    close,
    codes,
    connect,
    outcome,
    synchronize,
    wait_for_state,
    works,
)
from .worker import Rank


@pytest.mark.parametrize(
    "config",
    [
        {"cgaClusterSize": 9},
        # Not looked at: what is newer than 2.30.7, and the name of a network.
        {"launchOrderImplicit": 7, "numRmaSig": -5, "rmaEagerInit": 7, "hostCftMode": 77},
        {"netName": "no such network"},
    ],
    ids=str,
)
@on_pool(1)
def test_what_is_accepted(rank: Rank, config: dict[str, Any]) -> None:
    assert create_with(rank, config) == (OK, "")


@on_pool(3)
def test_wrong_shrinks(rank: Rank) -> None:
    comm = connect(rank)
    others = [q for q in range(rank.nranks) if q != rank.rank]
    results = [
        outcome(capi().ncclCommShrink, comm, [others[0]] * 2, 2, None, 0),
        outcome(capi().ncclCommShrink, comm, others[:1], 1, None, 8),
    ]
    works(rank, comm, rank.nranks)
    close(rank, comm)
    assert codes(results) == [INVALID_ARGUMENT] * 2, results
    assert "twice" in results[0][1]
    assert "shrinkFlags" in results[1][1]


@on_pool(4)
def test_shrink_leaves_the_list_alone(rank: Rank) -> None:
    """NCCL sorts it. init.cc: ncclCommInitChildComm."""
    (ffi, lib), comm = binding(), connect(rank)
    excluded = ffi.new("int[]", [2, 1])
    child = ffi.new("uintptr_t*")
    if rank.rank in (0, 3):
        assert lib.ncclCommShrink(comm, excluded, 2, child, ffi.NULL, 0) == OK
        works(rank, child[0], 2)
        close(rank, child[0])
    rank.exchange()
    close(rank, comm)
    assert list(excluded) == [2, 1]


@on_pool(2)
def test_blocking_and_nonblocking_collectives_in_a_group(rank: Rank) -> None:
    """As creations: NCCL lets the one that joined last decide. group.h: ncclGroupCommJoin."""
    api, one, two = capi(), connect(rank), connect(rank, {"blocking": 0})
    assert wait_for_state(two) == OK
    array = ones()
    api.ncclGroupStart()
    all_reduce(one, array)
    code, text = outcome(all_reduce, two, array)
    assert code == INVALID_ARGUMENT
    assert "Blocking and nonblocking communicators" in text
    assert outcome(api.ncclGroupEnd)[0] == INVALID_ARGUMENT
    assert (array == 1).all()
    for each in (one, two):
        works(rank, each, rank.nranks)
        close(rank, each)


@on_pool(2)
def test_simulated_group(rank: Rank) -> None:
    """Nothing is launched or made; NCCL makes communicators, and launches for non-blocking ones."""
    (ffi, lib), api, comm = binding(), capi(), connect(rank, {"blocking": 0})
    assert wait_for_state(comm) == OK
    array = ones()
    api.ncclGroupStart()
    all_reduce(comm, array)
    late = api.ncclCommSplit(comm, 0, 0)
    api.ncclGroupSimulateEnd()
    assert state(comm) == OK
    assert synchronize(comm) == OK
    assert (array == 1).all()
    assert int(late) == 0, "a simulated split was made"
    # Without a struct it is ncclGroupEnd (group.cc: ncclGroupEndInternal).
    api.ncclGroupStart()
    all_reduce(comm, array)
    assert lib.ncclGroupSimulateEnd(ffi.NULL) == IN_PROGRESS
    assert wait_for_state(comm) == OK
    assert synchronize(comm) == OK
    assert (array == rank.nranks).all()
    close(rank, comm)


@on_pool(2)
def test_failed_communicator(rank: Rank) -> None:
    """Queries answer its error (init.cc: ncclCommEnsureReady); here it can be destroyed all the same."""
    api, comm, array = capi(), connect(rank), np.ones(10, np.uint32)
    outcome(api.ncclAllReduce, address(array), address(array), 10 - rank.rank, UINT32, SUM, comm, 0)
    assert outcome(synchronize, comm)[0] == INVALID_USAGE
    asked = [outcome(call, comm) for call in (api.ncclCommCount, api.ncclCommUserRank, api.ncclCommCuDevice)]
    rank.exchange()
    assert outcome(api.ncclCommDestroy, comm) == (OK, "")
    assert codes(asked) == [INVALID_USAGE] * 3, asked


@on_pool(3)
def test_grow_where_nobody_passes_the_id(rank: Rank) -> None:
    """Who made it has told the others. init.cc: bcastGrowHandle."""
    api = capi()
    uid = rank.exchange(api.ncclGetUniqueId() if rank.rank == 0 else None)[0]
    comm = api.ncclCommInitRank(2, uid, rank.rank) if rank.rank < 2 else 0
    made = rank.exchange(api.ncclCommGetUniqueId(comm) if rank.rank == 1 else None)[1]
    larger = api.ncclCommGrow(comm, 3) if comm else api.ncclCommGrow(0, 3, made, 2)
    works(rank, larger, 3)
    close(rank, larger)
    if comm:
        close(rank, comm)


@on_pool(2)
def test_resume_is_collective(rank: Rank) -> None:
    """mem_manager.cc: ncclCommResume."""
    api, comm = capi(), connect(rank, {"blocking": 0})
    assert wait_for_state(comm) == OK
    assert api.ncclCommSuspend(comm, 1) == IN_PROGRESS
    assert wait_for_state(comm) == OK
    if rank.rank == 0:
        assert api.ncclCommResume(comm) == IN_PROGRESS
        assert [state(comm) for _ in range(5)] == [IN_PROGRESS] * 5, "it does not wait for the others"
    rank.exchange()
    if rank.rank == 1:
        assert api.ncclCommResume(comm) == IN_PROGRESS
    assert wait_for_state(comm) == OK
    works(rank, comm, rank.nranks)
    close(rank, comm)


@on_pool(2)
def test_nothing_is_shared(rank: Rank) -> None:
    """In NCCL what shares memory cannot be suspended. mem_manager.cc: ncclCommSuspend."""
    api, comm = capi(), connect(rank, {"splitShare": 1})
    child = api.ncclCommSplit(comm, 0, rank.rank, {"splitShare": 1})
    api.ncclCommSuspend(child, 1)
    works(rank, comm, rank.nranks)
    api.ncclCommResume(child)
    works(rank, child, rank.nranks)
    close(rank, child, comm)


@on_pool(1)
def test_memory_of_nothing(rank: Rank) -> None:
    """As cudaMalloc. allocator.cc: ncclMemAlloc."""
    assert capi().ncclMemAlloc(0) == 0
    assert outcome(capi().ncclMemFree, 0) == (OK, "")


def encrypt(rank: Rank) -> Outcome:
    return outcome(capi().ncclSetEncryption, {"mode": 1, "psk": "secret"})


def test_encryption() -> None:
    """Not there, and it says so."""
    with Ranks(1) as ranks:
        code, text = ranks.call(encrypt)[0]
    assert code == INVALID_USAGE, text
