"""Non-blocking communicators: what is in progress, and what is refused meanwhile.

Each test says what NCCL 2.30.7 does and where in its `src/` that is written. NCCL's answer to a call is a
race between the caller and the thread that launches; here it is ncclInProgress always, so that a program that
never polls fails here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .backend import capi
from .bodies import on_pool
from .calls import COLLECTIVES, TRANSPORTS, N, Outcome, binding, ones, operation, state
from .ranks import Pool, Ranks
from .scenario import (
    FLOAT32,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    OK,
    SUM,
    address,
    all_reduce,
    connect,
    outcome,
    synchronize,
    wait_for_state,
)
from .worker import Rank

NOT_READY = "before the previous operation returned ncclSuccess"


def nonblocking(rank: Rank) -> int:
    """Return a non-blocking communicator of all ranks that is ready."""
    comm = connect(rank, {"blocking": 0})
    assert wait_for_state(comm) == OK
    return comm


def settle(comm: int) -> None:
    """Check that a call is in progress, and wait until it is not."""
    assert state(comm) == IN_PROGRESS
    assert wait_for_state(comm) == OK


def works_polled(rank: Rank, comm: int) -> None:
    """Check that a sum over a non-blocking communicator is right."""
    array = ones()
    assert outcome(all_reduce, comm, array) == (IN_PROGRESS, "")
    settle(comm)
    assert synchronize(comm) == OK
    assert (array == rank.nranks).all()


@pytest.mark.parametrize("name", [*COLLECTIVES, "SendRecv"])
@on_pool(2)
def test_nonblocking_operations_are_in_progress(rank: Rank, name: str) -> None:
    """A call answers the asynchronous state, and one that comes before the state is ncclSuccess is refused.

    enqueue.cc: ncclEnqueueCheck, init.cc: ncclCommEnsureReady. NCCL's answer is a race between the caller and
    the thread that launches; here it is ncclInProgress always, so that a program that never polls fails.
    """
    comm = nonblocking(rank)
    a, b = ones(2 * N), np.zeros(2 * N, np.float32)
    call = operation(name, rank, comm, address(a), address(b))
    assert outcome(*call) == (IN_PROGRESS, "")
    code, text = outcome(*call)
    assert code == INVALID_ARGUMENT, "used before GetAsyncError said that the first call is taken"
    assert NOT_READY in text, text
    settle(comm)
    assert synchronize(comm) == OK
    works_polled(rank, comm)
    rank.exchange()
    capi().ncclCommAbort(comm)


@on_pool(2, transports=TRANSPORTS)
def test_nonblocking_group(rank: Rank) -> None:
    """ncclGroupEnd launches in a thread and answers ncclInProgress. group.cc: ncclGroupEndInternal."""
    api, comm = capi(), nonblocking(rank)
    first, second = ones(), ones()
    api.ncclGroupStart()
    for array in (first, second):
        assert outcome(all_reduce, comm, array) == (OK, ""), "nothing is in progress inside a group"
    assert outcome(api.ncclGroupEnd) == (IN_PROGRESS, "")
    code, text = outcome(all_reduce, comm, first)
    assert code == INVALID_ARGUMENT
    assert NOT_READY in text
    settle(comm)
    assert synchronize(comm) == OK
    assert (first == 2).all()
    assert (second == 2).all()
    works_polled(rank, comm)
    rank.exchange()
    api.ncclCommAbort(comm)


@on_pool(2)
def test_nonblocking_group_comes_too_early(rank: Rank) -> None:
    """The refused call spoils its group: group.h: ncclGroupErrCheck."""
    api, comm = capi(), nonblocking(rank)
    array = ones()
    assert outcome(all_reduce, comm, array)[0] == IN_PROGRESS
    api.ncclGroupStart()
    assert outcome(all_reduce, comm, array)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclGroupEnd)[0] == INVALID_ARGUMENT
    rank.exchange()
    api.ncclCommAbort(comm)


REFUSED: dict[str, Callable[[Rank, int], tuple[Any, ...]]] = {
    "CommCount": lambda rank, comm: (comm,),
    "CommUserRank": lambda rank, comm: (comm,),
    "CommCuDevice": lambda rank, comm: (comm,),
    "CommQueryProperties": lambda rank, comm: (comm,),
    "CommMemStats": lambda rank, comm: (comm, 3),
    "CommSplit": lambda rank, comm: (comm, 0, 0),
    "CommShrink": lambda rank, comm: (comm, [1 - rank.rank], 1, None, 0),
    "CommGrow": lambda rank, comm: (comm, 3),
    "CommGetUniqueId": lambda rank, comm: (comm,),
    "CommSuspend": lambda rank, comm: (comm, 1),
    "CommResume": lambda rank, comm: (comm,),
    "CommFinalize": lambda rank, comm: (comm,),
    "CommDestroy": lambda rank, comm: (comm,),
    "CommWindowRegister": lambda rank, comm: (comm, capi().ncclMemAlloc(4096), 4096, 0),
    "RedOpCreatePreMulSum": lambda rank, comm: (address(ones()), FLOAT32, 1, comm),
}


@pytest.mark.parametrize("name", REFUSED)
@on_pool(2)
def test_refused_while_in_progress(rank: Rank, name: str) -> None:
    """All who call ncclCommEnsureReady (init.cc, enqueue.cc, mem_manager.cc, dev_runtime.cc) are refused."""
    comm, array = nonblocking(rank), ones()
    all_reduce(comm, array)
    code, text = outcome(getattr(capi(), f"nccl{name}"), *REFUSED[name](rank, comm))
    assert code == INVALID_ARGUMENT, (code, text)
    assert NOT_READY in text, text
    settle(comm)
    assert synchronize(comm) == OK
    works_polled(rank, comm)
    rank.exchange()
    capi().ncclCommAbort(comm)


@on_pool(2)
def test_allowed_while_in_progress(rank: Rank) -> None:
    """These never ask whether the communicator is ready, and abort ignores the answer.

    enqueue.cc: ncclRedOpDestroy, register/register.cc, init.cc: ncclCommAbort.
    """
    api, comm, array = capi(), nonblocking(rank), ones()
    op = api.ncclRedOpCreatePreMulSum(address(array), FLOAT32, 1, comm)
    all_reduce(comm, array)
    assert outcome(api.ncclRedOpDestroy, op, comm) == (OK, "")
    handle = api.ncclCommRegister(comm, address(array), array.nbytes)
    assert outcome(api.ncclCommDeregister, comm, handle) == (OK, "")
    api.ncclGetLastError(comm)
    settle(comm)
    assert synchronize(comm) == OK
    all_reduce(comm, array)
    assert synchronize(comm) == OK
    rank.exchange()
    assert outcome(api.ncclCommAbort, comm) == (OK, "")


@on_pool(2)
def test_nonblocking_calls_without_a_launch(rank: Rank) -> None:
    """A collective of no elements, or of a single rank, has no task to launch: it succeeds at once.

    enqueue.cc: taskAppend; group.cc: ncclGroupEndInternal starts a thread only for tasks and jobs.
    """
    comm = nonblocking(rank)
    assert outcome(capi().ncclAllReduce, 0, 0, 0, FLOAT32, SUM, comm, 0) == (OK, "")
    assert state(comm) == OK
    alone = capi().ncclCommInitRankConfig(1, capi().ncclGetUniqueId(), 0, {"blocking": 0})
    assert wait_for_state(alone) == OK
    array = ones()
    for _ in range(2):
        assert outcome(all_reduce, alone, array) == (OK, "")
    assert synchronize(alone) == OK
    assert state(alone) == OK
    works_polled(rank, comm)
    rank.exchange()
    for each in (alone, comm):
        capi().ncclCommAbort(each)


@on_pool(2)
def test_wrong_argument_stays_with_a_nonblocking_communicator(rank: Rank) -> None:
    """A failed call becomes the state of a non-blocking communicator, and nothing ever resets it.

    enqueue.cc: ncclEnqueueCheck, `fail: … ncclCommSetAsyncError(info->comm, ret)`.
    """
    api, comm, array = capi(), nonblocking(rank), ones()
    a = address(array)
    assert outcome(api.ncclAllReduce, a, a, N, 99, SUM, comm, 0)[0] == INVALID_ARGUMENT
    assert state(comm) == INVALID_ARGUMENT
    assert outcome(all_reduce, comm, array)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommCount, comm)[0] == INVALID_ARGUMENT
    assert state(comm) == INVALID_ARGUMENT
    rank.exchange()
    assert outcome(api.ncclCommAbort, comm) == (OK, "")


@on_pool(2)
def test_nonblocking_split(rank: Rank) -> None:
    """A split is in progress on its parent, and writes the child's handle when it is over.

    init.cc: ncclCommInitChildComm ("*newcomm should be NCCL_COMM_NULL until comm split fully complete"); the
    job's communicator is the parent. The call itself answers ncclSuccess.
    """
    (ffi, lib), comm = binding(), nonblocking(rank)
    child = ffi.new("uintptr_t*")
    assert lib.ncclCommSplit(comm, 0, rank.rank, child, ffi.NULL) in (OK, IN_PROGRESS)
    assert child[0] == 0, "the child is known before the split is over"
    assert outcome(all_reduce, comm, ones())[0] == INVALID_ARGUMENT
    settle(comm)
    assert child[0] != 0
    assert wait_for_state(child[0]) == OK
    works_polled(rank, child[0])
    works_polled(rank, comm)
    rank.exchange()
    for each in (child[0], comm):
        capi().ncclCommAbort(each)


@on_pool(2)
def test_nonblocking_management(rank: Rank) -> None:
    """Whatever goes through a group is in progress afterwards; only Destroy and Abort wait.

    mem_manager.cc, dev_runtime.cc: ncclCommWindowRegister, init.cc; group.cc: ncclAsyncLaunch (destroyFlag).
    """
    (ffi, lib), api, comm = binding(), capi(), nonblocking(rank)
    calls: list[tuple[Any, ...]] = [(api.ncclCommSuspend, comm, 1), (api.ncclCommResume, comm)]
    for call in calls:
        assert outcome(*call) == (IN_PROGRESS, ""), call
        settle(comm)
    works_polled(rank, comm)
    pointer, win = api.ncclMemAlloc(4096), ffi.new("uintptr_t*")
    assert lib.ncclCommWindowRegister(comm, pointer, 4096, win, 0) in (OK, IN_PROGRESS)
    settle(comm)
    assert api.ncclWinGetUserPtr(comm, win[0]) == pointer
    assert outcome(api.ncclCommWindowDeregister, comm, win[0]) == (OK, "")
    other = nonblocking(rank)
    rank.exchange()
    assert outcome(api.ncclCommRevoke, other, 0) == (IN_PROGRESS, "")
    settle(other)
    rank.exchange()
    assert outcome(api.ncclCommFinalize, comm) == (IN_PROGRESS, "")
    settle(comm)
    for each in (other, comm):
        assert outcome(api.ncclCommDestroy, each) == (OK, "")


def mixed_creations(rank: Rank) -> tuple[Outcome, Outcome]:
    api = capi()
    ids = rank.exchange([api.ncclGetUniqueId(), api.ncclGetUniqueId()] if rank.rank == 0 else None)[0]
    api.ncclGroupStart()
    api.ncclCommInitRankConfig(rank.nranks, ids[0], rank.rank, {"blocking": 0})
    second = outcome(api.ncclCommInitRankConfig, rank.nranks, ids[1], rank.rank, {"blocking": 1})
    return second, outcome(api.ncclGroupEnd)


def test_blocking_and_nonblocking_creations_in_a_group(pool: Pool) -> None:
    """The second is refused, and spoils the group. group.cc: ncclAsyncLaunch."""
    with Ranks(2) as ranks:
        for second, end in ranks.call(mixed_creations):
            assert second[0] == INVALID_ARGUMENT
            assert "Blocking and nonblocking communicators are not allowed in the same group" in second[1]
            assert end[0] == INVALID_ARGUMENT
