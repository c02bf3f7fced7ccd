"""Ranks that die, are cut off or injected with faults: who is told what, how soon, and what is left."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meeting import until

from .backend import capi
from .bodies import transports
from .ranks import Died, Ranks
from .scenario import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    REMOTE_ERROR,
    SYSTEM_ERROR,
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

TRANSPORTS = transports("direct", "shm", "tcp", "mixed")
# The promise is one second; the machine may be busy.
SOON = 10.0


# What dies here is used up, and its data are other tests' subject.
forks = functools.partial(Ranks, forked=True)


def die_in_the_middle(
    rank: Rank, victims: list[int], n: int
) -> tuple[float, tuple[int, str], tuple[int, str]]:
    """The victims kill themselves while a sum goes on; the others see how it ends, and go on without them."""
    api, comm = capi(), connect(rank)
    works(rank, comm, rank.nranks, n=n)
    when = rank.exchange(time.monotonic() + 0.3)[0]
    array, seen, later = np.ones(n, np.float32), (OK, ""), 0.0
    if rank.rank in victims:
        all_reduce(comm, array)
        while time.monotonic() < when:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    while seen[0] == OK and time.monotonic() < when + 20:
        seen = outcome(all_reduce, comm, array)
        if seen[0] == OK:
            seen = outcome(synchronize, comm)
        later = time.monotonic() - when
    error = async_error(comm)
    left = [r for r in range(rank.nranks) if r not in victims]
    small = api.ncclCommShrink(comm, victims, len(victims), None, 1)
    assert (api.ncclCommCount(small), api.ncclCommUserRank(small)) == (len(left), left.index(rank.rank))
    works(rank, small, len(left), n=n)
    close(rank, small)
    api.ncclCommAbort(comm)
    return later, seen, error


@pytest.mark.parametrize("n", [10, pytest.param(300_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victims", [[0], [2], [1, 3]])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_are_told_and_go_on(transport: str, victims: list[int], n: int) -> None:
    # A process of the mixed transport is two ranks.
    dead = sorted({r for v in victims for r in (v, v ^ 1)}) if transport == "mixed" else victims
    with forks(6 if transport == "mixed" else 4, transport) as ranks:
        results = ranks.call(die_in_the_middle, dead, n, check=False)
    for rank, result in enumerate(results):
        if rank in dead:
            assert result == Died(-signal.SIGKILL)
            continue
        assert isinstance(result, tuple), result
        later, seen, error = result
        assert seen[0] == error[0] == REMOTE_ERROR, (seen, error)
        assert any(f"rank {victim}" in error[1] for victim in dead), error
        assert later < SOON, later


def die_while_others_shrink(rank: Rank) -> tuple[int, str]:
    """Rank 1 dies; then rank 2 dies while rank 0 excludes rank 1."""
    comm = connect(rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if outcome(all_reduce, comm, np.ones(10, np.float32))[0] == OK:
        outcome(synchronize, comm)
    if rank.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    seen = outcome(capi().ncclCommShrink, comm, [1], 1, None, 1)
    capi().ncclCommAbort(comm)
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_a_death_while_survivors_shrink_is_told(transport: str) -> None:
    with forks(3, transport) as ranks:
        code, text = ranks.call(die_while_others_shrink, check=False)[0]
    assert code == REMOTE_ERROR
    assert "rank 2 (pid" in text and "rank 1" not in text, text


def wait_for_a_dead_rank(rank: Rank) -> tuple[float, float, tuple[int, str]]:
    """Rank 1 is killed while it does nothing; rank 0 waits for it, rank 2 learns of it without any call.

    Return when it was killed, as rank 0 knows, and when this rank knew of it.
    """
    comm = connect(rank)
    pids = rank.exchange(os.getpid())
    if rank.rank == 1:
        time.sleep(60)
    if rank.rank == 0:
        all_reduce(comm, np.ones(10, np.float32))
    start = time.monotonic()
    if rank.rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    error = async_error(comm)
    told = time.monotonic()
    capi().ncclCommAbort(comm)
    return start, told, error


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_death_of_an_idle_rank(transport: str) -> None:
    with forks(3, transport) as ranks:
        results = ranks.call(wait_for_a_dead_rank, check=False)
    assert results[1] == Died(-signal.SIGKILL)
    killed = results[0][0]
    for _, told, error in (results[0], results[2]):
        assert error[0] == REMOTE_ERROR
        assert "rank 1" in error[1]
        assert told - killed < SOON


def exits_without_destroying(rank: Rank) -> tuple[int, str]:
    comm = connect(rank)
    rank.exchange()
    if rank.rank == 1:
        os._exit(0)
    error = async_error(comm)
    capi().ncclCommAbort(comm)
    return error


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_exit_without_destroying(transport: str) -> None:
    with forks(2, transport) as ranks:
        (code, text), other = ranks.call(exits_without_destroying, check=False)
    assert other == Died(0)
    assert code == REMOTE_ERROR
    assert "rank 1" in text


def faulty(rank: Rank, rounds: int) -> list[tuple[float, int, str]]:
    """Sum some times; return how long each took and how it ended."""
    comm, results = connect(rank), []
    array = np.ones(10, np.float32)
    for _ in range(rounds):
        start = time.monotonic()
        code, text = outcome(all_reduce, comm, array)
        issued = time.monotonic() - start
        if code == OK:
            code, text = outcome(synchronize, comm)
        results.append((issued, code, text))
    state = wait_for_state(comm)
    results.append((0.0, state, str(capi().ncclGetLastError(comm)) if state else ""))
    rank.exchange()
    capi().ncclCommAbort(comm)
    return results


def test_injected_death() -> None:
    with forks(3, env={"PYNCCL_CPU_FAULT": "rank=1,call=3,action=die"}) as ranks:
        results = ranks.call(faulty, 4, check=False)
    assert results[1] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        first, second, *rest = [code for _, code, _ in results[rank]]
        # Rank 1 needs not wait for the others to finish the second call.
        assert first == OK and second in (OK, REMOTE_ERROR), results[rank]
        assert rest == [REMOTE_ERROR] * 3, results[rank]
        assert "rank 1" in results[rank][-1][2]


def test_injected_sleep() -> None:
    with forks(2, env={"PYNCCL_CPU_FAULT": "rank=1,call=2,action=sleep:2"}) as ranks:
        results = ranks.call(faulty, 3)
    assert [code for _, code, _ in results[0] + results[1]] == [OK] * 8
    assert results[1][1][0] > 1.9
    assert all(issued < 1.9 for issued, _, _ in results[0])


@pytest.mark.parametrize(("name", "code"), [("ncclSystemError", SYSTEM_ERROR), ("5", INVALID_USAGE)])
def test_injected_failure(name: str, code: int) -> None:
    """Only the call fails: the other rank waits for it, and a later call serves as well."""
    with forks(
        2, env={"PYNCCL_CPU_FAULT": f"rank=0,call=2,action=fail:{name};rank=1,call=2,action=fail:{name}"}
    ) as ranks:
        results = ranks.call(faulty, 3)
    for result in results:
        assert [got for _, got, _ in result] == [OK, code, OK, OK], result
        assert "PYNCCL_CPU_FAULT" in result[1][2]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_injected_drop(transport: str) -> None:
    with forks(3, transport, env={"PYNCCL_CPU_FAULT": "rank=2,call=2,action=drop"}) as ranks:
        results = ranks.call(faulty, 3)
    for rank, result in enumerate(results):
        first, *rest = [code for _, code, _ in result]
        # Whether the others had finished the first call when the connections went is a matter of time.
        assert first in (OK, REMOTE_ERROR), (rank, result)
        assert rest == [REMOTE_ERROR] * 3, (rank, result)
    assert results[2][0][1] == OK, results[2]
    assert all("rank 2" in result[-1][2] for result in results[:2])


def creation(rank: Rank) -> tuple[int, str]:
    return outcome(connect, rank)


def test_malformed_fault() -> None:
    """A fault that cannot be injected is refused where it is seen first."""
    with forks(2, env={"PYNCCL_CPU_FAULT": "rank=1,call=2,action=explode"}) as ranks:
        for code, text in ranks.call(creation):
            assert code == INVALID_ARGUMENT
            assert "PYNCCL_CPU_FAULT" in text
            assert "explode" in text


def busy(rank: Rank, n: int) -> None:
    """Sum for ever; the first round tells the others that the work goes on."""
    comm = connect(rank)
    array = np.ones(n, np.float32)
    while True:
        all_reduce(comm, array)
        assert synchronize(comm) == OK
        rank.note("busy")


def names_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "nccl" in name}


def unix_sockets(pid: int) -> set[str]:
    """Return the inodes of a process's Unix sockets that carry the library's name."""
    mine = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    return {inode for inode in named_sockets() if f"socket:[{inode}]" in mine}


def named_sockets() -> set[str]:
    with open("/proc/net/unix") as table:
        return {line.split()[6] for line in table if "pynccl" in line}


def stands_still(pid: int) -> bool:
    """Tell whether a process that was sent SIGSTOP has stopped, with all its threads."""
    try:
        stats = [path.read_text() for path in Path("/proc", str(pid)).glob("task/*/stat")]
    except OSError:
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def all_busy(ranks: Ranks) -> None:
    deadline = time.monotonic() + 40
    while not all("busy" in note for note in ranks.notes()) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_after_sigkill(transport: str) -> None:
    shared, sockets = names_in_shared_memory(), set[str]()
    with forks(8, transport) as ranks:
        pids = sorted({ranks.pid(rank) for rank in range(8)})

        def kill() -> None:
            all_busy(ranks)
            sockets.update(*map(unix_sockets, pids))
            # Stopped first: none shall live to see another one die.
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            until(lambda: all(map(stands_still, pids)))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        results = ranks.call(busy, 100_000, check=False, during=kill, timeout=55)
    assert results == [Died(-signal.SIGKILL)] * 8
    assert names_in_shared_memory() <= shared
    assert len(sockets) >= len(pids)
    assert not sockets & named_sockets()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def stopped_peer(rank: Rank) -> float:
    """A rank that is stopped is late, not dead: the others wait for it."""
    comm, start = connect(rank), time.monotonic()
    pids = rank.exchange(os.getpid())
    if rank.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        all_reduce(comm, np.ones(10, np.float32))
        time.sleep(1.5)
        assert capi().ncclCommGetAsyncError(comm) == OK
        os.kill(pids[1], signal.SIGCONT)
    else:
        all_reduce(comm, np.ones(10, np.float32))
    assert synchronize(comm) == OK
    close(rank, comm)
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_stopped_rank_is_waited_for(transport: str) -> None:
    with forks(2, transport) as ranks:
        assert max(ranks.call(stopped_peer)) > 1.4


def dies_in(rank: Rank, action: str) -> tuple[int, str]:
    """Rank 1 dies while the others are in a call about the communicator itself."""
    api, comm = capi(), connect(rank)
    pids = rank.exchange(os.getpid())
    calls: dict[str, Callable[[], object]] = {
        "split": lambda: api.ncclCommSplit(comm, 0, rank.rank),
        "finalize": lambda: api.ncclCommFinalize(comm),
        "suspend": lambda: api.ncclCommSuspend(comm, 1),
    }
    if rank.rank == 1:
        time.sleep(60)
    if rank.rank == 2:
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGKILL)
    result = outcome(calls[action])
    api.ncclCommAbort(comm)
    return result


@pytest.mark.parametrize("action", ["split", "finalize", "suspend"])
def test_death_during_other_calls(action: str) -> None:
    with forks(3) as ranks:
        results = ranks.call(dies_in, action, check=False)
    assert results[1] == Died(-signal.SIGKILL)
    for code, text in (results[0], results[2]):
        assert code == REMOTE_ERROR, (code, text)
        assert "rank 1" in text
