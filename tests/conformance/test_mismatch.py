"""Where NCCL would hang or corrupt: what is reported, on which ranks, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .backend import capi
from .bodies import on_pool, transports
from .ranks import Pool
from .scenario import (
    FLOAT32,
    FLOAT64,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    SUM,
    TIMEOUT,
    UINT32,
    address,
    all_reduce,
    async_error,
    close,
    codes,
    connect,
    outcome,
    synchronize,
    works,
)
from .worker import Rank

TRANSPORTS = transports("direct", "shm", "tcp", "threads")

# Function, count, datatype, operation or None, root or peer or None.
Call = tuple[str, int, int, int | None, int | None]
BIG = 200_000
# More than sockets take before anybody reads them.
HUGE = 8_000_000

SUM_10: Call = ("AllReduce", 10, FLOAT32, SUM, None)
SUM_BIG: Call = ("AllReduce", BIG, FLOAT32, SUM, None)
ROOT_0: Call = ("Broadcast", 10, FLOAT32, None, 0)
GATHER: Call = ("AllGather", 10, FLOAT32, None, None)
SEND: Call = ("Send", 10, FLOAT32, None, 1)
RECV: Call = ("Recv", 10, FLOAT32, None, 0)

# What rank 0 calls, what rank 1 calls, and words that the report has to have.
MISMATCHES: dict[str, tuple[Call, Call, list[str]]] = {
    "function": (SUM_10, ROOT_0, ["AllReduce", "Broadcast"]),
    "count": (SUM_10, ("AllReduce", 11, FLOAT32, SUM, None), ["10", "11"]),
    "size": (SUM_10, SUM_BIG, ["10", str(BIG)]),
    "big count": (SUM_BIG, ("AllReduce", BIG + 1, FLOAT32, SUM, None), [str(BIG), str(BIG + 1)]),
    "datatype": (GATHER, ("AllGather", 10, UINT32, None, None), ["float32", "uint32"]),
    "operation": (SUM_10, ("AllReduce", 10, FLOAT32, 2, None), ["sum", "max"]),
    "root": (ROOT_0, ("Broadcast", 10, FLOAT32, None, 1), ["root 0", "root 1"]),
    "message count": (SEND, ("Recv", 11, FLOAT32, None, 0), ["10", "11"]),
    "message size": (("Send", BIG, FLOAT32, None, 1), RECV, [str(BIG), "10"]),
    "message datatype": (SEND, ("Recv", 10, FLOAT64, None, 0), ["float32", "float64"]),
    "two receives": (("Recv", 10, FLOAT32, None, 1), RECV, ["Recv"]),
    "collective and receive": (SUM_10, RECV, ["AllReduce", "Recv"]),
    "collective and send": (SUM_10, ("Send", HUGE, FLOAT32, None, 0), ["AllReduce", "Send"]),
}


def make_call(comm: int, call: Call, memory: np.ndarray[Any, Any]) -> None:
    name, count, dtype, op, root = call
    half = memory.size // 2
    buffers = [address(memory)] if name in ("Send", "Recv") else [address(memory), address(memory[half:])]
    extra = [value for value in (op, root) if value is not None]
    getattr(capi(), f"nccl{name}")(*buffers, count, dtype, *extra, comm, 0)


def mismatch(rank: Rank, calls: list[Call]) -> tuple[tuple[int, str], tuple[int, str], tuple[int, str]]:
    """Ranks 0 and 1 differ; rank 2, if any, does as rank 0."""
    comm = connect(rank)
    memory = np.zeros(2 * HUGE, np.float32)
    # Where the others have been quicker, the call itself tells what is wrong already.
    made = outcome(make_call, comm, calls[rank.rank % 2], memory)
    waited = made if made[0] != OK else outcome(synchronize, comm)
    error = async_error(comm)
    later = outcome(all_reduce, comm, np.ones(1, np.float32))
    rank.exchange()
    capi().ncclCommAbort(comm)
    fresh = connect(rank)
    works(rank, fresh, rank.nranks)
    close(rank, fresh)
    return waited, error, later


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_differ(pool: Pool, transport: str, kind: str) -> None:
    *calls, words = MISMATCHES[kind]
    for rank, (waited, error, later) in enumerate(pool.get(2, transport).call(mismatch, calls)):
        # A message that is on its way is none of the sender's business any more.
        sent = calls[rank][0] == "Send" and waited[0] == OK
        assert error[0] == INVALID_USAGE, (waited, error)
        assert sent or waited[0] == INVALID_USAGE, (waited, error)
        assert later[0] == INVALID_USAGE, later
        for word in ("rank 0", "rank 1", *words):
            assert word in error[1], error[1]


@pytest.mark.parametrize("kind", ["function", "count", "big count", "datatype", "operation", "root"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_of_three_ranks_differs(pool: Pool, transport: str, kind: str) -> None:
    *calls, words = MISMATCHES[kind]
    for waited, error, _ in pool.get(3, transport).call(mismatch, calls):
        assert waited[0] == error[0] == INVALID_USAGE, (waited, error)
        # Which two of the three calls are compared first is a matter of time.
        assert "rank 1" in error[1]
        assert all(word in error[1] for word in words), error[1]


@on_pool(2, transports=TRANSPORTS)
def test_custom_operations(rank: Rank) -> None:
    """PreMulSum with a factor of each rank's own is no mismatch; PreMulSum against sum is."""
    api, comm = capi(), connect(rank)
    factor = np.array([rank.rank + 1], np.float32)
    op = api.ncclRedOpCreatePreMulSum(address(factor), FLOAT32, 1, comm)
    array = np.ones(10, np.float32)
    api.ncclAllReduce(address(array), address(array), 10, FLOAT32, op, comm, 0)
    assert synchronize(comm) == OK
    assert (array == 3).all()
    api.ncclAllReduce(address(array), address(array), 10, FLOAT32, SUM if rank.rank else op, comm, 0)
    assert outcome(synchronize, comm)[0] == INVALID_USAGE
    rank.exchange()
    api.ncclCommAbort(comm)


def unreceived(rank: Rank, n: int) -> list[tuple[int, str]]:
    """A send that nobody receives is told when the communicator ends, by whoever ends it."""
    api, comm = capi(), connect(rank)
    array = np.ones(n, np.float32)
    if rank.rank == 0:
        api.ncclSend(address(array), n, FLOAT32, 1, comm, 0)
    finalized = outcome(api.ncclCommFinalize, comm)
    error = async_error(comm)
    api.ncclCommAbort(comm)
    return [finalized, error]


@pytest.mark.parametrize("n", [10, 1_000_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_send_without_receive(pool: Pool, transport: str, n: int) -> None:
    told = [r for r in pool.get(2, transport).call(unreceived, n) if r[0][0] == INVALID_USAGE]
    # The first rank of a process to finalize does not wait for the other.
    assert len(told) == 2 or (transport == "threads" and told)
    for results in told:
        assert codes(results) == [INVALID_USAGE] * 2, results
        assert all(word in results[1][1] for word in ("rank 0", "rank 1")), results


def missing_call(rank: Rank) -> list[tuple[int, str]]:
    """Rank 1 finalizes without the call that rank 0 waits in."""
    api, comm = capi(), connect(rank)
    array = np.ones(10, np.float32)
    results = []
    if rank.rank == 0:
        all_reduce(comm, array)
        results.append(outcome(synchronize, comm))
    results.append(outcome(api.ncclCommFinalize, comm))
    results.append(async_error(comm))
    api.ncclCommAbort(comm)
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_finalized_without_a_call(pool: Pool, transport: str) -> None:
    for results in pool.get(2, transport).call(missing_call):
        if transport == "threads" and len(results) == 2:
            del results[0]  # A rank does not wait for those of its own process.
        assert codes(results) == [INVALID_USAGE] * len(results), results
        assert "rank 0" in results[-1][1]
        assert "rank 1" in results[-1][1]


def never(rank: Rank) -> list[tuple[int, str]]:
    comm = connect(rank)
    results = []
    if rank.rank == 0:
        all_reduce(comm, np.ones(10, np.float32))
        results = [outcome(synchronize, comm), async_error(comm)]
    rank.exchange()
    state, _ = async_error(comm)
    capi().ncclCommAbort(comm)
    return [*results, (state, "")]


def test_operation_timeout(pool: Pool) -> None:
    zero, one = pool.get(2, PYNCCL_CPU_TIMEOUT="0.5").call(never)
    assert codes(zero) == [TIMEOUT] * 3, zero
    assert "AllReduce" in zero[1][1]
    assert "rank 1" in zero[1][1]
    assert codes(one) == [TIMEOUT], "the rank that is waited for is told"


@on_pool(2, transports=["direct", "threads"])
def test_bad_arguments(rank: Rank) -> None:
    """What can be told without the other ranks is told by the call, and harms nothing."""
    api, comm, n = capi(), connect(rank), rank.nranks
    array = np.ones(100, np.float32)
    a = address(array)
    f, s = FLOAT32, SUM
    invalid: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (api.ncclAllReduce, (0, a, 10, f, s, comm, 0)),
        (api.ncclAllReduce, (a, 0, 10, f, s, comm, 0)),
        (api.ncclAllReduce, (a, a, 10, 12, s, comm, 0)),
        (api.ncclAllReduce, (a, a, 10, -1, s, comm, 0)),
        (api.ncclAllReduce, (a, a, 10, f, 5, comm, 0)),
        (api.ncclAllReduce, (a, a, 10, f, -1, comm, 0)),
        (api.ncclAllReduce, (a, a, 10, f, s, 0, 0)),
        (api.ncclAllReduce, (a, a, 10, f, s, a, 0)),
        (api.ncclAllReduce, (a, a, 10, f, s, comm + 1, 0)),
        (api.ncclReduce, (a, a, 10, f, s, n, comm, 0)),
        (api.ncclReduce, (a, a, 10, f, s, -1, comm, 0)),
        (api.ncclBroadcast, (a, a, 10, f, n, comm, 0)),
        (api.ncclBcast, (0, 10, f, 0, comm, 0)),
        (api.ncclGather, (a, a, 10, f, -1, comm, 0)),
        (api.ncclScatter, (a, a, 10, f, n, comm, 0)),
        (api.ncclSend, (a, 10, f, n, comm, 0)),
        (api.ncclRecv, (a, 10, f, -1, comm, 0)),
        (api.ncclRecv, (0, 10, f, 0, comm, 0)),
        (api.ncclSend, (a, 10, 12, 0, comm, 0)),
        (api.ncclRedOpDestroy, (SUM, comm)),
        (api.ncclRedOpDestroy, (77, comm)),
        (api.ncclRedOpCreatePreMulSum, (0, f, 1, comm)),
        (api.ncclRedOpCreatePreMulSum, (a, 12, 1, comm)),
        (api.ncclRedOpCreatePreMulSum, (a, f, 2, comm)),
    ]
    for function, args in invalid:
        code, text = outcome(function, *args)
        assert code == INVALID_ARGUMENT, (function.__name__, args, code, text)
        assert text
    op = api.ncclRedOpCreatePreMulSum(a, f, 1, comm)
    # An operation belongs to a datatype and a communicator, and to nobody once it is destroyed.
    other = api.ncclCommSplit(comm, 0, rank.rank)
    assert outcome(api.ncclAllReduce, a, a, 10, FLOAT64, op, comm, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclAllReduce, a, a, 10, f, op, other, 0)[0] == INVALID_ARGUMENT
    api.ncclRedOpDestroy(op, comm)
    assert outcome(api.ncclAllReduce, a, a, 10, f, op, comm, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclRedOpDestroy, op, comm)[0] == INVALID_ARGUMENT
    assert (array == 1).all()
    works(rank, comm, n)
    close(rank, other, comm)


@on_pool(2, transports=["direct", "threads"])
def test_overlapping_buffers(rank: Rank) -> None:
    """Buffers overlap only as NCCL's in-place rules have it."""
    api, comm, n, me = capi(), connect(rank), rank.nranks, rank.rank
    array = np.ones(1000, np.float32)
    a, step = address(array), array.itemsize
    wrong: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (api.ncclAllReduce, (a, a + step, 10, FLOAT32, SUM, comm, 0)),
        (api.ncclAllReduce, (a + 9 * step, a, 10, FLOAT32, SUM, comm, 0)),
        (api.ncclReduce, (a, a + step, 10, FLOAT32, SUM, me, comm, 0)),
        (api.ncclBroadcast, (a, a + step, 10, FLOAT32, me, comm, 0)),
        (api.ncclAllGather, (a + step, a, 10, FLOAT32, comm, 0)),
        (api.ncclAllGather, (a + (me + 1) % n * 10 * step, a, 10, FLOAT32, comm, 0)),
        (api.ncclReduceScatter, (a, a + (me + 1) % n * 10 * step, 10, FLOAT32, SUM, comm, 0)),
        (api.ncclAlltoAll, (a, a, 10, FLOAT32, comm, 0)),
        (api.ncclAlltoAll, (a, a + (10 * n - 1) * step, 10, FLOAT32, comm, 0)),
        (api.ncclGather, (a + step, a, 10, FLOAT32, me, comm, 0)),
        (api.ncclScatter, (a, a + step, 10, FLOAT32, me, comm, 0)),
    ]
    for function, args in wrong:
        code, text = outcome(function, *args)
        assert code in (INVALID_ARGUMENT, INVALID_USAGE), (function.__name__, code, text)
        assert "overlap" in text, text
    # Side by side is not overlapping.
    api.ncclAllReduce(a, a + 10 * step, 10, FLOAT32, SUM, comm, 0)
    assert synchronize(comm) == OK
    assert (array[10:20] == n).all()
    assert (np.delete(array, range(10, 20)) == 1).all()
    works(rank, comm, n)
    close(rank, comm)


def shrinks_differ(rank: Rank, excluded: list[list[int] | None], how: str) -> list[tuple[int, str]]:
    """Every rank excludes ranks of its own; None: it does not take part."""
    api, comm = capi(), connect(rank)
    # A rank whose creation has not returned yet would get the verdict from it.
    rank.exchange()
    mine, abort = excluded[rank.rank], how == "abort"
    if how == "revoked":
        api.ncclCommRevoke(comm, 0)
        rank.exchange()
    results = []
    if mine is not None:
        results.append(outcome(api.ncclCommShrink, comm, mine, len(mine), None, abort))
        results.append((OK, api.ncclGetLastError(comm)))
    rank.exchange()
    if how == "healthy":
        results.append(async_error(comm))
        results.append(outcome(all_reduce, comm, np.ones(1, np.float32)))
        results.append(outcome(api.ncclCommSplit, comm, 0, 0))
    rank.exchange()
    api.ncclCommAbort(comm)
    fresh = connect(rank)
    works(rank, fresh, rank.nranks)
    close(rank, fresh)
    return results


@pytest.mark.parametrize("how", [pytest.param("healthy", marks=pytest.mark.slow), "revoked", "abort"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_exclude_different_ranks(pool: Pool, transport: str, how: str) -> None:
    """Rank 3 is kept by rank 0 alone: it cannot see the difference itself."""
    excluded = [[2], [2, 3], None, [2]]
    for rank, results in enumerate(pool.get(4, transport).call(shrinks_differ, excluded, how)):
        if rank != 2:
            (code, text), (_, last) = results[:2]
            assert code == INVALID_USAGE, results
            for words in (text, last):
                assert "called different things" in words and "[2]" in words and "[2, 3]" in words, results
        if how == "healthy":
            assert codes(results[-3:]) == [INVALID_USAGE] * 3, results
            assert all("called different things" in text for _, text in results[-3:]), results


@on_pool(4, transports=TRANSPORTS)
def test_ranks_grow_to_different_numbers(rank: Rank) -> None:
    """The ranks grow to different numbers; rank 0 has the id."""
    to = [5, 6, 5, 5]
    api, comm = capi(), connect(rank)
    rank.exchange()
    ticket = api.ncclCommGetUniqueId(comm) if rank.rank == 0 else None
    results = [outcome(api.ncclCommGrow, comm, to[rank.rank], ticket, -1)]
    results.append(async_error(comm))
    rank.exchange()
    api.ncclCommAbort(comm)
    assert codes(results) == [INVALID_USAGE] * 2, results
    for _, text in results:
        assert (
            "ranks 0, 2, 3 called ncclCommGrow to 5 ranks; rank 1 called ncclCommGrow to 6 ranks" in text
        ), results


@on_pool(2)
def test_what_an_error_is_about(rank: Rank) -> None:
    """Of a failed communicator its failure, which names the rank; of a refused call why it was refused."""
    api, comm = capi(), connect(rank)
    x, place = np.ones(10 + rank.rank, np.float32), f"rank {rank.rank} of 2: "
    refused = outcome(api.ncclSend, address(x), 1, FLOAT32, 7, comm, 0)
    outcome(all_reduce, comm, x)
    outcome(synchronize, comm)
    later = outcome(all_reduce, comm, x)
    about = api.pyncclCpuGetErrorPrefix(comm), str(api.ncclGetLastError(comm))
    reported = api.pyncclCpuIsErrorReported(comm)
    key = outcome(api.ncclParamBind, place)
    rank.exchange()
    api.ncclCommAbort(comm)
    assert later[0] == INVALID_USAGE and later[1].count(f"rank {rank.rank} of 2") == 1, later
    assert about[0] == (0, len(place)) and about[1].startswith(place), about
    assert reported == about[1].startswith((place + "rank 0 reports: ", place + "rank 1 reports: ")), about
    assert refused[1].startswith("ncclSend: ncclInvalidArgument: peer is 7"), refused
    assert f"; rank {rank.rank} of 2; " in refused[1], refused
    assert key[1].startswith("ncclParamBind: ncclInvalidArgument: no parameter is called"), key


@pytest.mark.parametrize("end", ["revoke", "shrink"])
@on_pool(3, transports=TRANSPORTS)
def test_a_mismatch_stays_the_first_error(rank: Rank, end: str) -> None:
    """Rank 2 calls nothing and hears of the mismatch of the others; then it ends its calls."""
    api, comm = capi(), connect(rank)
    if rank.rank < 2:
        outcome(all_reduce, comm, np.ones(10 + rank.rank, np.float32))
        outcome(synchronize, comm)
    assert async_error(comm)[0] == INVALID_USAGE
    if end == "revoke":
        api.ncclCommRevoke(comm, 0)
        later = outcome(api.ncclAllReduce, comm, comm, 1, FLOAT32, SUM, comm, 0)
    else:
        small = api.ncclCommShrink(comm, [2], 1, None, 1) if rank.rank < 2 else 0
        later = 0, str(api.ncclGetLastError(comm))
        if small:
            works(rank, small, 2)
            close(rank, small)
    rank.exchange()
    text = str(api.ncclGetLastError(comm))
    kind = api.pyncclCpuGetErrorKind(comm)
    api.ncclCommAbort(comm)
    assert "called different things" in later[1], later
    assert kind == 1
    assert "rank 0 called AllReduce(count 10" in text and "rank 1 called AllReduce(count 11" in text, text
