"""Check mode: every rank is told who called what from where, before anything is issued."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import hear, interrupted_soon, tell, together
from parameters import slow_except
from processes import completed
from pynccl import CollectiveMismatchError, Communicator, NcclError, NcclTimeoutError, Plan, capi
from pynccl._library.binding import lib
from pynccl.testing import RankError, run

CHECK = {"PYNCCL_CHECK": "1"}
HERE = re.escape(__file__ if len(__file__) < 100 else "..." + __file__[-96:])
AT = rf"at {HERE}:\d+"
X, Y, LONG = np.ones(4, np.float32), np.ones(4, np.float32), np.ones(12, np.float32)


def send(comm: Communicator, peer: int) -> None:
    comm.send(X, peer)


def grouped(comm: Communicator, *peers: int) -> None:
    with pynccl.group():
        for peer in peers:
            comm.send(X, peer)
            comm.recv(Y, peer)


def two_in_a_group(comm: Communicator) -> None:
    with pynccl.group():
        comm.all_reduce(X)
        comm.broadcast(X)


Call = Callable[[Communicator], Any]
# What ranks 0 and 1 call, what rank 2 calls, and what the table says of them.
CASES: dict[str, tuple[Call, Call, str, str]] = {
    "function": (
        lambda c: c.all_reduce(X),
        lambda c: c.broadcast(X),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) ",
        r"rank 2: broadcast\(float32, 4, root 0\) ",
    ),
    "count": (
        lambda c: c.all_reduce(X),
        lambda c: c.all_reduce(X[:3]),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) ",
        r"rank 2: all_reduce\(float32, 3, sum\) ",
    ),
    "dtype": (
        lambda c: c.all_gather(X),
        lambda c: c.all_gather(X.view(np.int32)),
        r"ranks 0-1: all_gather\(float32, 4\) ",
        r"rank 2: all_gather\(int32, 4\) ",
    ),
    "op": (
        lambda c: c.all_reduce(X, op="max"),
        lambda c: c.all_reduce(X, op="min"),
        r"ranks 0-1: all_reduce\(float32, 4, max\) ",
        r"rank 2: all_reduce\(float32, 4, min\) ",
    ),
    "root": (
        lambda c: c.broadcast(X, root=0),
        lambda c: c.broadcast(X, root=1),
        r"ranks 0-1: broadcast\(float32, 4, root 0\) ",
        r"rank 2: broadcast\(float32, 4, root 1\) ",
    ),
    "prepared": (
        lambda c: c.prepare.all_reduce(X)(),
        lambda c: c.prepare.all_reduce(X, op="prod")(),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) ",
        r"rank 2: all_reduce\(float32, 4, prod\) ",
    ),
    "plan": (
        lambda c: Plan([c.prepare.all_reduce(X), c.prepare.broadcast(Y)])(),
        lambda c: Plan([c.prepare.all_reduce(X), c.prepare.broadcast(Y, root=2)])(),
        r"ranks 0-1: broadcast\(float32, 4, root 0\) in a group of 2 ",
        r"rank 2: broadcast\(float32, 4, root 2\) in a group of 2 ",
    ),
    "first of a plan": (
        lambda c: Plan([c.prepare.all_reduce(X), c.prepare.broadcast(Y)])(),
        lambda c: Plan([c.prepare.all_reduce(X, op="max"), c.prepare.broadcast(Y)])(),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) in a group of 2 ",
        r"rank 2: all_reduce\(float32, 4, max\) in a group of 2 ",
    ),
    "split": (
        lambda c: c.split(0),
        lambda c: c.barrier(),
        r"ranks 0-1: split ",
        r"rank 2: barrier ",
    ),
    "finalize": (
        lambda c: c.finalize(),
        lambda c: c.all_reduce(X),
        r"ranks 0-1: finalize ",
        r"rank 2: all_reduce\(float32, 4, sum\) ",
    ),
    "suspend": (
        lambda c: c.suspend(),
        lambda c: c.all_reduce(X),
        r"ranks 0-1: suspend ",
        r"rank 2: all_reduce\(float32, 4, sum\) ",
    ),
    "suspend and resume": (
        lambda c: (c.suspend(), c.resume()),
        lambda c: (c.suspend(), c.all_reduce(X)),
        r"ranks 0-1: resume ",
        r"rank 2: all_reduce\(float32, 4, sum\) ",
    ),
    "split before a barrier": (
        lambda c: (c.barrier(), c.split(0)),
        lambda c: (c.split(0), c.barrier()),
        r"ranks 0-1: barrier ",
        r"rank 2: split ",
    ),
    "length of a message": (
        lambda c: c.recv(X, 2) if c.rank == 0 else c.recv(Y, 2),
        lambda c: (c.send(LONG, 0), c.send(LONG, 1)),
        r"ranks? 0(?:-1)?: recv\(float32, 4\) from rank 2 ",
        r"rank 2: send\(float32, 12\) to rank 0 ",
    ),
    "both send": (
        lambda c: send(c, 2) if c.rank == 0 else c.all_reduce(X),
        lambda c: send(c, 0),
        r"rank 0: send\(float32, 4\) to rank 2 ",
        r"rank 2: send\(float32, 4\) to rank 0 ",
    ),
    "one side grouped": (
        lambda c: grouped(c, 2) if c.rank == 0 else c.all_reduce(X),
        lambda c: (c.send(X, 0), c.send(X, 0), c.recv(Y, 0)),
        r"rank 0: send\(float32, 4\) to rank 2 in a group of 2 ",
        r"rank 2: send\(float32, 4\) to rank 0 ",
    ),
    "collectives grouped on one rank": (
        lambda c: (c.all_reduce(X), c.broadcast(X)),
        lambda c: two_in_a_group(c),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) ",
        r"rank 2: all_reduce\(float32, 4, sum\) in a group of 2 ",
    ),
    "unmatched send": (
        lambda c: c.all_reduce(X),
        lambda c: c.send(X, 1),
        r"ranks 0-1: all_reduce\(float32, 4, sum\) ",
        r"rank 2: send\(float32, 4\) to rank 1 ",
    ),
    "wrong peer": (
        lambda c: c.recv(X, 2) if c.rank == 0 else c.send(X, 2),
        lambda c: c.recv(Y, 0),
        r"rank 0: recv\(float32, 4\) from rank 2 ",
        r"rank 2: recv\(float32, 4\) from rank 0 ",
    ),
    "extra call": (
        lambda c: (c.all_reduce(X), c.barrier()),
        lambda c: (c.all_reduce(X), c.all_reduce(X), c.barrier()),
        r"ranks 0-1: barrier ",
        r"rank 2: all_reduce\(float32, 4, sum\) ",
    ),
}


def differ(rank: int, nranks: int, name: str) -> tuple[str, str, str, float]:
    most, last, _, _ = CASES[name]
    comm = pynccl.init(timeout=20)
    comm.all_reduce(np.ones(3))
    comm.barrier()
    # Of a rank that comes a second late the table says that it has called nothing yet.
    together(nranks)
    start = time.monotonic()
    first = second = ""
    kind = "nothing"
    try:
        (last if rank == 2 else most)(comm)
        comm.barrier()
    except NcclError as error:
        kind, first = type(error).__name__, str(error)
    try:
        comm.all_reduce(np.ones(3))
    except NcclError as error:
        second = str(error)
    took = time.monotonic() - start
    comm.abort()
    return kind, first, second, took


@pytest.mark.parametrize("name", CASES)
def test_mismatch(name: str) -> None:
    """The same table on every rank, whoever found it; it stays the reason of later calls."""
    results = run(3, differ, name, backend="cpu", env=CHECK, timeout=40)
    *_, one, two = CASES[name]
    for kind, first, second, took in results:
        assert kind == "CollectiveMismatchError", results
        assert "the ranks called different things:" in first
        assert re.search(rf"\n  {one}{AT}", first), first
        assert re.search(rf"\n  {two}{AT}", first), first
        assert second == f"the communicator failed earlier: {first}"
        assert took < 10, results
    print(results[0][1])


def calls_unchecked(comm: Communicator, name: str) -> None:
    x = np.ones(1024, np.float32)
    if name == "a collective":
        comm.all_reduce(x if comm.rank else x[:512])
    elif name == "a message":
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x[:512], 0)
    elif comm.rank == 0:
        comm.all_reduce(x)
    comm.finalize()


def differ_unchecked(rank: int, nranks: int, name: str) -> tuple[str, str]:
    comm = pynccl.init()
    with pytest.raises(NcclError) as caught:
        calls_unchecked(comm, name)
    comm.abort()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("name", ["a collective", "a message", "an end"])
def test_the_cpu_library_compares_too(name: str) -> None:
    """Without check mode; on the ranks that the difference concerns."""
    results = run(2, differ_unchecked, name, backend="cpu", timeout=40)
    assert any(kind == "CollectiveMismatchError" for kind, _ in results), results
    for kind, text in results:
        if kind == "CollectiveMismatchError":
            assert "the ranks called different things: " in text and "; the CPU library " in text
        else:
            assert kind == "NcclRemoteError", results


def agree(rank: int, nranks: int, rounds: int) -> bool:
    """Everything that is allowed works as without checks."""
    with pynccl.init(timeout=20) as comm:
        right, left = (rank + 1) % nranks, (rank - 1) % nranks
        x, y = np.full(5, rank), np.zeros(5, int)
        for _ in range(rounds):
            assert comm.all_reduce(np.ones(3))[0] == nranks
            comm.send_recv(x, right, y, left)
            assert y[0] == left
            gathered = comm.gather(x, root=1)
            assert (gathered is None) == (rank != 1)
            assert comm.all_to_all(np.arange(nranks)).tolist() == [rank] * nranks
            # One rank's group meets the others' single calls.
            if rank == 0:
                with pynccl.group():
                    for peer in range(1, nranks):
                        comm.send(x, peer)
            else:
                assert comm.recv(y, 0)[0] == 0
            with pynccl.group():
                comm.send(x, left)
                total = comm.all_reduce(np.ones(2))
                comm.recv(y, right)
            assert (y[0], total[0]) == (right, nranks)
            factor = comm.pre_mul_sum(2.0)
            if rank == 0:
                unused = comm.pre_mul_sum(3.0)
                del unused
            assert comm.all_reduce(np.ones(2), op=factor)[0] == 2 * nranks
            plan = Plan([comm.prepare.all_reduce(np.ones(4)), comm.prepare.all_gather(x)])
            assert plan()[1].shape == (nranks, 5)
            half = comm.split(rank % 2)
            assert half is not None
            assert half.all_reduce(np.ones(1))[0] == half.size
            with pynccl.group():
                half.all_reduce(np.ones(1))
                comm.all_reduce(np.ones(1))
            half.destroy()
            with pynccl.Stream() as stream:
                z = np.ones(1000)
                comm.all_reduce(z, stream=stream)
                comm.all_reduce(z, stream=stream)
                comm.synchronize(stream)
                assert z[0] == nranks**2
            comm.barrier()
    return lib.pynccl_watched() == 0


@pytest.mark.parametrize("nranks", [2, 4])
def test_what_is_right_works(nranks: int) -> None:
    assert run(nranks, agree, 5, backend="cpu", env=CHECK, timeout=50) == [True] * nranks


def absent(rank: int, nranks: int, late: list[int], message: bool) -> tuple[str, list[int]]:
    """The late ranks do not come; of the others rank 0 has made more calls."""
    together(nranks)
    comm = pynccl.init(timeout=2)
    comm.barrier()
    if rank == 0:
        comm.send(np.ones(3), 3)
    elif rank == 3:
        comm.recv(np.ones(3), 0)
    if rank in late:
        # A rank that still waited would see that the calls differ.
        for other in set(range(nranks)) - set(late):
            hear(f"told {other}")
    with pytest.raises(NcclTimeoutError) as caught:
        comm.recv(np.ones(3), late[0]) if message and rank == 0 else comm.all_gather(np.ones(3))
    if rank not in late:
        tell(f"told {rank}")
    comm.abort()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize(
    ("late", "who"),
    [([1], "rank 1"), ([1, 2], "ranks 1-2"), ([1, 2, 4], "ranks 1-2, 4")],
    ids=["one", "two", "three"],
)
def test_ranks_that_do_not_come(late: list[int], who: str) -> None:
    for text, ranks in run(5, absent, late, False, backend="cpu", env=CHECK, timeout=30):
        assert re.search(rf"all_gather\(float64, 3\) {AT}: {who} did not come within 2 s", text)
        assert ranks == late, text


def test_a_rank_that_does_not_send() -> None:
    """Rank 0 waits for it in a recv; the others in vain for both, as their text may say."""
    for text, ranks in run(4, absent, [1], True, backend="cpu", env=CHECK, timeout=30):
        message = rf"recv\(float64, 3\) from rank 1 {AT}: rank 1 did not come within 2 s"
        collective = rf"all_gather\(float64, 3\) {AT}: ranks 0-1 did not come within 2 s"
        assert ranks == [1], text
        assert re.search(message, text) or re.search(collective, text)


def hangs_in_check_mode(rank: int, nranks: int, folder: str) -> None:
    comm = pynccl.init(timeout=2)
    comm.all_reduce(np.ones(3))
    if rank == 1:
        hear("over")
    else:
        with pytest.raises(NcclTimeoutError):
            comm.broadcast(np.ones(3))
        pynccl.dump_trace(f"{folder}/rank{rank}.jsonl")
        tell("over")
    comm.abort()


def test_a_call_that_waits_in_check_mode_is_in_the_trace(tmp_path: Path) -> None:
    run(2, hangs_in_check_mode, str(tmp_path), backend="cpu", env=CHECK, timeout=30)
    command = [sys.executable, "-m", "pynccl", "trace", str(tmp_path)]
    report = completed(command).stdout
    assert "rank 0 waits in broadcast #2" in report, report


def crosses(rank: int, nranks: int) -> str:
    """No two ranks contradict each other, and yet nobody can go on."""
    together(nranks)
    comm = pynccl.init()
    x, right, left = np.ones(4, np.float32), (rank + 1) % nranks, (rank - 1) % nranks

    def cross() -> None:
        comm.send(x, right)
        comm.recv(x, left)

    with pytest.raises(NcclError) as caught:
        cross()
    # A rank that aborts first may not hear what the others called.
    tell(f"told {rank}")
    for one in range(nranks):
        hear(f"told {one}")
    comm.abort()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("nranks", slow_except([3], [3, 6]))
def test_a_ring_of_sends(nranks: int) -> None:
    """Every rank gets the calls of all without a time-out, and no rank is called late."""
    for text in run(nranks, crosses, backend="cpu", env=CHECK, timeout=30):
        head = (
            r"CollectiveMismatchError: (rank \d+ reports: )?deadlock: the ranks wait for each other in a ring"
        )
        assert re.match(head, text), text
        for rank in range(nranks):
            assert f"rank {rank}: send(float32, 4) to rank {(rank + 1) % nranks}" in text


def crosses_in_groups(rank: int, nranks: int, how: str) -> str:
    """Each rank waits for a message of a group that its neighbour does not answer; there is no time-out."""
    comm = pynccl.init()
    x, right, left = np.ones(4), (rank + 1) % nranks, (rank - 1) % nranks

    def cross() -> None:
        with pynccl.group():
            if how == "all_reduce, recv":
                comm.all_reduce(x)
                comm.recv(np.ones(4), left)
            else:
                comm.send(x, right)
                comm.recv(np.ones(4), right)

    with pytest.raises(CollectiveMismatchError) as caught:
        cross()
    together(nranks)
    comm.abort()
    return str(caught.value)


@pytest.mark.parametrize("how", slow_except(["send, recv"], ["send, recv", "all_reduce, recv"]))
def test_a_ring_in_groups(how: str) -> None:
    for text in run(3, crosses_in_groups, how, backend="cpu", env=CHECK, timeout=30):
        assert "deadlock: the ranks wait for each other in a ring" in text


def waits_through_communicators(rank: int, nranks: int, how: str) -> str:
    """Each rank waits on one communicator for a rank that waits on another one; there is no time-out."""
    one = pynccl.init()
    other = one.split(0)
    pairs = [one.split(int(rank not in (first, (first + 1) % nranks))) for first in range(nranks)]
    x = np.ones(4, np.float32)

    def cross() -> None:
        if how == "the other order":
            first, second = (other, one) if rank else (one, other)
            first.all_reduce(x)
            second.all_reduce(x)
        elif how == "a message, a barrier":
            one.recv(x, 0) if rank == 1 else other.barrier()
            one.send(x, 1) if rank == 0 else other.barrier()
        elif how == "a split":
            one.split(0) if rank else other.barrier()
        else:
            pairs[rank].broadcast(x)
            pairs[rank - 1].broadcast(x)

    with pytest.raises(CollectiveMismatchError) as caught:
        cross()
    together(nranks)
    for comm in (one, other, *pairs):
        comm.abort()
    return str(caught.value)


@pytest.mark.parametrize(
    "how",
    slow_except(
        ["the other order"],
        ["the other order", "a message, a barrier", "a communicator for each pair", "a split"],
    ),
)
def test_a_ring_through_communicators(how: str) -> None:
    for text in run(3, waits_through_communicators, how, backend="cpu", env=CHECK, timeout=30):
        assert "deadlock: the ranks wait for each other in a ring, through several communicators" in text
        assert "\n  on another communicator, a rank waits for rank " in text


def calls_meanwhile(rank: int, nranks: int, how: str) -> float:
    """Rank 0 waits on one communicator, and a thread or a handler makes the call that rank 1 awaits."""
    with pynccl.init() as one, one.split(0) as other:
        x, y = np.ones(3), np.ones(3)

        def late(*_: object) -> None:
            time.sleep(3)
            other.all_reduce(y)

        if rank == 0:
            thread = threading.Thread(target=late)
            if how == "in a thread":
                thread.start()
            else:
                signal.signal(signal.SIGALRM, late)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            one.all_reduce(x)
            if how == "in a thread":
                thread.join()
        else:
            other.all_reduce(y)
            one.all_reduce(x)
        return float(x[0] + y[0])


def waits_for_some_seconds(rank: int, nranks: int) -> float:
    """A barrier of rank 0 ends at its time-out, and then rank 0 makes the call for which rank 1 waits."""
    with pynccl.init() as one, one.split(0) as other:
        y = np.ones(3)
        if rank == 0:
            with pytest.raises(NcclTimeoutError):
                one.barrier(timeout=4)
            other.all_reduce(y)
        else:
            other.all_reduce(y)
            one.barrier()
        return float(2 * y[0])


def starts_a_thread(rank: int, nranks: int) -> float:
    """Rank 0 waits behind a barrier that has timed out; the thread is newer than the barrier's own."""
    with pynccl.init() as one, one.split(0) as other:
        y = np.ones(3)

        def late() -> None:
            time.sleep(3)
            other.all_reduce(y)

        if rank == 0:
            with pytest.raises(NcclTimeoutError):
                one.barrier(timeout=0.5)
            thread = threading.Thread(target=late)
            thread.start()
            one.barrier()
            thread.join()
        else:
            other.all_reduce(y)
            one.barrier()
            one.barrier()
        return float(2 * y[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "how"),
    [
        (calls_meanwhile, ["in a thread"]),
        (calls_meanwhile, ["in a handler"]),
        (waits_for_some_seconds, []),
        (starts_a_thread, []),
    ],
)
def test_a_ring_that_ends(body: Callable[..., float], how: list[str]) -> None:
    assert run(2, body, *how, backend="cpu", env=CHECK, timeout=30) == [4, 4]


def goes_round_in_groups(rank: int, nranks: int) -> float:
    """Rank 0 comes late, twice: the others wait for each other, and for it."""
    with pynccl.init() as comm:
        x, y = np.full(2, float(rank)), np.zeros(2)
        for _ in range(2):
            time.sleep(0 if rank else 2.5)
            with pynccl.group():
                comm.send(x, (rank + 1) % nranks)
                comm.recv(y, (rank - 1) % nranks)
                comm.send(x, (rank - 1) % nranks)
                comm.recv(x.copy(), (rank + 1) % nranks)
        return float(y[0])


@pytest.mark.slow
def test_groups_that_wait_for_one_are_no_ring() -> None:
    assert run(4, goes_round_in_groups, backend="cpu", env=CHECK, timeout=40) == [3, 0, 1, 2]


def passes_on(rank: int, nranks: int) -> float:
    """All but one wait for another one, and that one takes its time."""
    with pynccl.init() as comm:
        x = np.zeros(1)
        if rank:
            comm.recv(x, rank - 1)
        time.sleep(1.5)
        comm.send(x + 1, (rank + 1) % nranks)
        if not rank:
            comm.recv(x, nranks - 1)
        return float(x[0])


@pytest.mark.slow
def test_a_chain_of_waits_is_no_ring() -> None:
    assert run(3, passes_on, backend="cpu", env=CHECK, timeout=30) == [3, 1, 2]


def waits_in_turn(rank: int, nranks: int) -> tuple[str, list[int]]:
    comm = pynccl.init(timeout=2)
    comm.barrier()
    if rank == 2:
        for other in range(2):
            hear(f"told {other}")
    with pytest.raises(NcclTimeoutError) as caught:
        comm.recv(np.ones(3), rank + 1) if rank < 2 else comm.barrier()
    tell(f"told {rank}")
    comm.abort()
    return str(caught.value), caught.value.ranks


def test_a_rank_that_another_one_waits_for() -> None:
    """Ranks 0 and 1 wait in a row, which is no mismatch: rank 2 is late."""
    for text, ranks in run(3, waits_in_turn, backend="cpu", env=CHECK, timeout=30):
        assert ranks == [2], text


def closes_behind_a_relay(rank: int, nranks: int) -> float:
    """Rank 1 is stopped, through which rank 0 announces its send to rank 3."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    x = np.full(3, rank + 1.0)
    together(nranks)
    if rank == 1:
        tell("stops")
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank in (0, 3):
        hear("stops")
        time.sleep(0.3)
        comm.send(x, 3) if rank == 0 else comm.recv(x, 0)
        if rank == 0:
            comm.destroy()
            return 1.0
    hear("received") if rank != 3 else tell("received")
    comm.abort()
    return float(x[0])


@pytest.mark.slow
def test_a_rank_has_closed_behind_one_that_is_stopped() -> None:
    """What it announced comes when the other one goes on."""
    results = run(9, closes_behind_a_relay, backend="cpu", env=CHECK | {"PYNCCL_MESH_RANKS": "2"}, timeout=50)
    assert results[3] == 1


def closed_before(rank: int, nranks: int, message: bool) -> tuple[str, float] | None:
    comm = pynccl.init()
    comm.barrier()
    if rank == 1:
        comm.destroy()
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        comm.recv(np.ones(3), 1) if message and rank == 0 else comm.all_reduce(np.ones(3))
    took = time.monotonic() - start
    tell(f"told {rank}")
    hear(f"told {2 - rank}")
    comm.abort()
    return str(caught.value), took


@pytest.mark.parametrize("message", [False, True])
def test_a_rank_has_closed_its_communicator(message: bool) -> None:
    """The others need no time-out to hear of it."""
    zero, _, two = run(3, closed_before, message, backend="cpu", env=CHECK, timeout=40)
    for text, took in (zero, two):
        assert "rank 1: nothing: it has closed its communicator" in text, text
        assert took < 20


def raw_groups(rank: int, nranks: int) -> bool:
    """A group that is opened in C: its calls meet when it is issued."""
    with pynccl.init(timeout=10) as comm:
        other = 1 - rank
        for _ in range(3):
            capi.ncclGroupStart()
            with pynccl.Stream() as stream:
                comm.send(X, other, stream=stream)
                comm.recv(Y, other, stream=stream)
                capi.ncclGroupEnd()
                comm.synchronize(stream)
            comm.barrier()
    return True


def test_groups_opened_in_c() -> None:
    assert run(2, raw_groups, backend="cpu", env=CHECK, timeout=30) == [True, True]


def by_function(rank: int, nranks: int) -> tuple[str, str | None]:
    pynccl.check_mode()
    comm = pynccl.init()
    pynccl.check_mode(False)
    plain = pynccl.init()
    plain.all_reduce(np.ones(3))
    plain.barrier()
    plain.destroy()
    with pytest.raises(CollectiveMismatchError) as caught:
        comm.all_reduce(np.ones(3 + rank))
    comm.abort()
    return str(caught.value), os.environ.get("NCCL_CHECK_MODE")


def test_without_a_timeout() -> None:
    for text, variable in run(2, by_function, backend="cpu", timeout=30):
        assert "rank 1: all_reduce(float64, 4, sum)" in text
        assert variable == "DEBUG_GLOBAL"


def dies(rank: int, nranks: int) -> tuple[str, list[int], float]:
    comm = pynccl.init(timeout=20)
    comm.barrier()
    together(nranks)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        comm.all_reduce(np.ones(3))
    except NcclError as error:
        took = time.monotonic() - start
        small = comm.shrink(exclude=error.ranks, abort=True)  # type: ignore[attr-defined]
        assert small.all_reduce(np.ones(3))[0] == 2
        small.destroy()
        return type(error).__name__, error.ranks, took  # type: ignore[attr-defined]
    return "nothing", [], 0.0


def test_death_while_comparing() -> None:
    results = run(3, dies, backend="cpu", env=CHECK, check=False, timeout=30)
    assert isinstance(results[1], RankError)
    for kind, ranks, took in (results[0], results[2]):
        assert (kind, ranks) == ("RankFailedError", [1])
        assert took < 5


def interrupted(rank: int, nranks: int) -> float:
    comm = pynccl.init(timeout=20)
    comm.barrier()
    took = 0.0
    if rank == 0:
        at = interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.ones(3))
        took = time.monotonic() - at[0]
        tell("interrupted")
    else:
        hear("interrupted")
    comm.abort()
    return took


def test_one_interrupt_is_enough() -> None:
    assert run(2, interrupted, backend="cpu", env=CHECK, timeout=30)[0] < 5


def goes_on(rank: int, nranks: int, how: str) -> tuple[list[float], list[str]]:
    """Rank 0 is interrupted while it waits for rank 1, which then makes the same calls."""
    with pynccl.init(timeout=20) as comm:
        other = comm.split(0)
        x, y, z = np.full(3, rank + 1.0), np.full(3, 10.0), np.ones(3)
        prepared = comm.prepare.all_reduce(x)

        def call() -> None:
            if how == "prepared":
                prepared()
            elif how == "a group on two communicators":
                with pynccl.group():
                    comm.all_reduce(x)
                    other.all_reduce(y)
            elif how == "later":
                comm.all_reduce(x, wait=False)
            else:
                comm.all_reduce(x)

        if rank == 0:
            interrupted_soon()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert x[0] == 1
            tell("interrupted")
            with pytest.raises(NcclTimeoutError, match="synchronize did not complete within 0.2 s"):
                comm.synchronize(timeout=0.2)
            tell("late")
        else:
            hear("interrupted")
            hear("late")
            call()
        comm.synchronize()
        other.synchronize()
        comm.all_reduce(z)
        return [x[0], y[0], z[0]], [f"{record.call} {record.state}" for record in comm.trace()]


@pytest.mark.parametrize(
    "how",
    slow_except(
        ["a group on two communicators"], ["a call", "a group on two communicators", "prepared", "later"]
    ),
)
def test_an_interrupted_call_goes_on(how: str) -> None:
    mine, other = run(2, goes_on, how, backend="cpu", env=CHECK, timeout=40)
    assert mine[0] == other[0] == [3, 20 if how == "a group on two communicators" else 10, 2]
    # The call has one record, as on the other rank.
    assert mine[1] == other[1]


def shrinks_after_an_interrupt(rank: int, nranks: int) -> int:
    comm = pynccl.init(timeout=20)
    if rank == 0:
        interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.ones(3))
        tell("interrupted")
        with comm.shrink(exclude=[1], abort=True) as left:
            return left.size
    hear("interrupted")
    comm.abort()
    return 0


def test_going_on_without_an_interrupted_call() -> None:
    assert run(2, shrinks_after_an_interrupt, backend="cpu", env=CHECK, timeout=40) == [1, 0]


def waits_for_a_moment(rank: int, nranks: int) -> tuple[float, list[str]]:
    """A barrier that has timed out stays outstanding: the next one is another barrier."""
    with pynccl.init(timeout=20) as comm:
        x = np.ones(2)
        for _ in range(3):
            if rank:
                with pytest.raises(NcclTimeoutError, match="barrier did not complete within 0.3 s"):
                    comm.barrier(timeout=0.3)
        if rank:
            tell("over")
        else:
            hear("over")
            for _ in range(3):
                comm.barrier()
        comm.all_reduce(x)
        return float(x[0]), [record.call for record in comm.trace()]


@pytest.mark.parametrize("checks", slow_except(["1"], ["1", "0"]))
def test_a_barrier_with_a_timeout(checks: str) -> None:
    results = run(2, waits_for_a_moment, backend="cpu", env={"PYNCCL_CHECK": checks}, timeout=40)
    records = ["init", *["barrier"] * 3, "all_reduce"]
    assert results == [(2, records)] * 2


def test_bad_variable() -> None:
    with pytest.raises(RankError, match="PYNCCL_CHECK is 'yes'; expected 0 or 1"):
        run(1, absent, [], False, backend="cpu", env={"PYNCCL_CHECK": "yes"}, timeout=30)


def pace(rank: int, nranks: int, rounds: int) -> list[float]:
    """Microseconds a small all_reduce takes: without a time-out, with one, and with checks."""
    x, found = np.ones(1, np.float32), []
    for timeout, check in ((None, False), (30, False), (30, True)):
        pynccl.check_mode(check)
        with pynccl.init(timeout=timeout) as comm:
            best = float("inf")
            for _ in range(5):
                comm.barrier()
                start = time.perf_counter()
                for _ in range(rounds):
                    comm.all_reduce(x, op="max")
                best = min(best, (time.perf_counter() - start) / rounds)
            found.append(best * 1e6)
    return found


def test_what_checks_cost() -> None:
    """Printed, for docs/hangs.md; a check is one exchange of small messages."""
    plain, watched, checked = run(2, pace, 200, backend="cpu", timeout=50)[0]
    print(
        f"all_reduce of 4 bytes, 2 ranks: {plain:.1f} us, watched {watched:.1f} us, checked {checked:.1f} us"
    )
    assert checked < plain + 20_000
