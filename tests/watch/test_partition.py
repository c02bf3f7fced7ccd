"""Connections that end between ranks that live: who goes on, who is told to stop, and that it is never two.

The ranks cut the control channel themselves. The processes live, so that nothing proves anybody's end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import clean_environment
from cutting import meet, who
from hosts import joined, needs_root
from meeting import failure, store, together, until_gone
from pynccl import NcclError, NcclInvalidUsage, RankFailedError
from pynccl._watch import channel, survivors
from pynccl._watch.watchdog import Watch
from pynccl.testing import RankError, run
from ranks import on_ranks

Outcome = tuple[str, list[int], str]


def parts(rank: int, nranks: int, groups: list[list[int]], quorum: Any) -> tuple[list[int], Outcome]:
    """Each part loses all others; answer what the error named, and what came of shrinking."""
    comm, cutter = meet(15, nranks)
    (mine,) = (group for group in groups if rank in group)
    cutter.cut(rank, (other for other in range(nranks) if other not in mine))
    error = failure(comm.barrier)
    try:
        comm = comm.shrink(exclude=error.ranks, abort=True, quorum=quorum)
    except RankFailedError as second:
        comm.abort()
        return error.ranks, ("RankFailedError", second.ranks, str(second))
    left = who(comm, rank)
    comm.destroy()
    return error.ranks, ("went on", left, "")


HALVES = [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("groups", "goes_on"),
    [
        pytest.param([[0], [1]], [0], id="two ranks"),
        pytest.param(HALVES, [0, 3], id="halves", marks=pytest.mark.slow),
        pytest.param([[0, 1], [2, 3, 4]], [2, 3, 4], id="a majority without rank 0"),
        pytest.param([[0], [1], [2]], None, id="everybody alone", marks=pytest.mark.slow),
    ],
)
def test_only_a_majority_goes_on(groups: list[list[int]], goes_on: list[int] | None) -> None:
    nranks = sum(map(len, groups))
    for rank, (named, outcome) in enumerate(
        run(nranks, parts, groups, "majority", backend="cpu", timeout=40)
    ):
        (mine,) = (group for group in groups if rank in group)
        others = [r for r in range(nranks) if r not in mine]
        assert named == others
        if mine == goes_on:
            assert outcome == ("went on", mine, "")
            continue
        assert outcome[:2] == ("RankFailedError", others)
        assert outcome[2].startswith("partition: ")
        assert "quorum=None" in outcome[2]


def test_every_part_goes_on_where_it_is_told_to() -> None:
    for rank, (_, outcome) in enumerate(run(4, parts, HALVES, None, backend="cpu", timeout=40)):
        assert outcome == ("went on", HALVES[rank in (1, 2)], "")


def has_late_verdicts() -> None:
    """As on a busy machine."""
    verdict = Watch.verdict

    def late(watch: Watch, wait_ms: int = 0) -> NcclError | None:
        time.sleep(1.6 if wait_ms else 0)
        return verdict(watch, wait_ms)

    setattr(Watch, "verdict", late)  # noqa: B010


def stops_while_it_connects(
    rank: int, nranks: int, calls: int, in_split: bool, busy: bool
) -> tuple[list[int], list[int]]:
    """The last rank stops after it has connected to some of the others; their part is then complete."""
    if busy and rank == nranks - 2:
        has_late_verdicts()
    parent = pynccl.init(timeout=3) if in_split else None
    # The parent's graph lacks connections that its split needs: of rank 7 to ranks 2 and 4.
    os.environ.pop("PYNCCL_MESH_RANKS", None)
    with store() as meeting:
        if rank == nranks - 1:
            meeting.set("pid", b"%d" % os.getpid())
            links: Any = getattr(channel, "_Links")  # noqa: B009
            finish = links._finish

            def finish_and_stop(mine: Any, *args: Any) -> None:
                finish(mine, *args)
                if len(mine.found) == calls:
                    os.kill(os.getpid(), signal.SIGSTOP)

            links._finish = finish_and_stop
        victim = int(meeting.get("pid"))
        try:
            comm = parent.split(0) if parent else pynccl.init(timeout=3)
            comm.barrier()
            raise AssertionError("a stopped rank took part")
        except RankFailedError as error:
            left = who(parent.shrink(exclude=error.ranks, abort=True), rank) if parent else []
            meeting.barrier("over", nranks - 1)
            if rank == 0:
                os.kill(victim, signal.SIGKILL)
            return error.ranks, left


@pytest.mark.parametrize(
    ("nranks", "calls", "in_split", "busy", "env"),
    [
        (4, 1, False, False, {}),
        (4, 2, False, False, {}),
        (4, 2, False, True, {}),
        (8, 1, True, False, {"PYNCCL_MESH_RANKS": "0"}),
        pytest.param(8, 1, True, True, {"PYNCCL_MESH_RANKS": "0"}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_stops_while_it_connects(
    nranks: int, calls: int, in_split: bool, busy: bool, env: dict[str, str]
) -> None:
    """Those that it has connected to and the others name it alike, and go on together."""
    how = calls, in_split, busy
    *others, _ = run(nranks, stops_while_it_connects, *how, backend="cpu", check=False, env=env, timeout=30)
    left = list(range(nranks - 1))
    assert others == [([nranks - 1], left if in_split else [])] * len(left)


def asks_again(rank: int, nranks: int) -> list[int]:
    """What the error says can be done."""
    comm, cutter = meet(15, nranks)
    cutter.cut(rank, [1 - rank])
    error = failure(comm.barrier)
    if rank == 1:
        with pytest.raises(RankFailedError, match="partition"):
            comm.shrink(exclude=error.ranks, abort=True)
    comm = comm.shrink(exclude=error.ranks, abort=True, quorum=None if rank else "majority")
    with comm:
        return who(comm, rank)


@pytest.mark.slow
def test_going_on_all_the_same() -> None:
    assert run(2, asks_again, backend="cpu", timeout=40) == [[0], [1]]


def loses_some(rank: int, nranks: int, edges: list[tuple[int, int]]) -> tuple[list[int], str, Outcome]:
    comm, cutter = meet(15, nranks)
    cutter.cut(rank, (b if rank == a else a for a, b in edges if rank in (a, b)))
    error = failure(comm.barrier)
    try:
        comm = comm.shrink(exclude=error.ranks, abort=True)
    except NcclError as second:
        comm.abort()
        return error.ranks, str(error), (type(second).__name__, getattr(second, "ranks", []), str(second))
    left = who(comm, rank)
    comm.destroy()
    return error.ranks, str(error), ("went on", left, "")


@pytest.mark.parametrize(
    ("nranks", "loser", "edges"),
    [
        (5, 0, [(0, 3), (0, 4)]),
        pytest.param(5, 4, [(4, 0), (4, 1)], marks=pytest.mark.slow),
        pytest.param(4, 1, [(1, 0), (1, 3)], marks=pytest.mark.slow),
        (3, 2, [(1, 2)]),
    ],
)
def test_who_lost_the_others_is_out(nranks: int, loser: int, edges: list[tuple[int, int]]) -> None:
    """All others hear each other, and name the one that lost some of them."""
    others = [rank for rank in range(nranks) if rank != loser]
    results = run(nranks, loses_some, edges, backend="cpu", timeout=40)
    for rank, (named, text, outcome) in enumerate(results):
        # On a busy machine the loser may also name those that it lost.
        assert loser in named if rank == loser else named == [loser], results
        assert f"rank {loser} " in text
        assert outcome[:2] == (("RankFailedError", [loser]) if rank == loser else ("went on", others)), (
            results
        )
    assert "the others go on without it" in results[loser][1]


def killed(rank: int, nranks: int, victim: int) -> list[int]:
    comm, _ = meet(15, nranks)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    comm = comm.shrink(exclude=failure(comm.barrier).ranks, abort=True)
    with comm:
        return who(comm, rank)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_of_two_is_proven_to_have_ended(victim: int) -> None:
    results = run(2, killed, victim, backend="cpu", check=False, timeout=40)
    assert isinstance(results[victim], RankError)
    assert results[1 - victim] == [1 - victim]


def aborts(rank: int, nranks: int) -> list[int]:
    """Who leaves in its own words is not missed."""
    comm, _ = meet(15, nranks)
    if rank == 0:
        comm.abort()
        together(nranks, "over")
        return []
    comm = comm.shrink(exclude=failure(comm.barrier).ranks, abort=True)
    together(nranks, "over")
    with comm:
        return who(comm, rank)


def test_a_rank_that_aborted_is_not_missed() -> None:
    assert run(2, aborts, backend="cpu", timeout=40) == [[], [1]]


# --- faults between two messages ----------------------------------------------------------------------------


def dies_between_messages(rank: int, nranks: int, victim: int, sends: int) -> list[int]:
    """A second rank dies when it has sent so many messages of the agreement."""
    comm, _ = meet(15, nranks)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    if rank == victim:
        send, sent = survivors.Survivors._send, 0

        def deadly(self: Any, number: int, out: Any) -> None:
            nonlocal sent
            for one in out:
                if sent == sends:
                    os.kill(os.getpid(), signal.SIGKILL)
                send(self, number, (one,))
                sent += 1

        setattr(survivors.Survivors, "_send", deadly)  # noqa: B010
    comm = comm.shrink(exclude=error.ranks, abort=True)
    # It may have died after it had decided.
    try:
        left = who(comm, rank)
    except RankFailedError as second:
        comm = comm.shrink(exclude=second.ranks, abort=True)
        left = who(comm, rank)
    comm.destroy()
    return left


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "sends", [pytest.param(n, marks=[] if n in (1, 5) else pytest.mark.slow) for n in range(16)]
)
def test_death_between_two_messages(victim: int, sends: int) -> None:
    results = run(5, dies_between_messages, victim, sends, backend="cpu", check=False, timeout=40)
    survivors = [rank for rank in range(5) if rank not in (3, victim)]
    for rank in survivors:
        assert results[rank] == survivors, results


def stops_while_shrinking(rank: int, nranks: int) -> tuple[str, list[int], float]:
    comm, _ = meet(3, nranks)
    pid = int(comm.all_gather(np.array([os.getpid()]))[1][0])
    together(nranks, "stopping")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(comm.barrier)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        comm.shrink(exclude=error.ranks, abort=True)
    except NcclError as second:
        outcome = type(second).__name__, getattr(second, "ranks", []), time.monotonic() - start
    comm.abort()
    together(nranks - 2, "over")
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
    return outcome


def test_a_rank_stopped_while_shrinking_is_named_by_all() -> None:
    results = run(5, stops_while_shrinking, backend="cpu", check=False, timeout=40)
    for rank in (0, 2, 4):
        kind, ranks, took = results[rank]
        assert (kind, ranks) == ("RankFailedError", [1, 3]), results
        assert took < 3 + 5, results


def one_lost_the_stopped(rank: int, nranks: int) -> list[int]:
    """Rank 1 lost the stopped rank, which may take rank 1's end for a death; rank 0 did not."""
    comm, cutter = meet(2, nranks)
    pid = int(comm.all_gather(np.array([os.getpid()]))[2][0])
    together(nranks, "stopping")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    cutter.cut(rank, [2] if rank == 1 else [])
    error = failure(comm.barrier)
    comm = comm.shrink(exclude=error.ranks, abort=True)
    # Within the time-out of 1 s.
    left = who(comm, rank)
    comm.destroy()
    together(nranks - 1, "over")
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
    return left


def test_all_survivors_stay_until_none_misleads_a_rank() -> None:
    assert run(3, one_lost_the_stopped, backend="cpu", check=False, timeout=40)[:2] == 2 * [[0, 1]]


def comes_late(rank: int, nranks: int) -> tuple[str, list[int], list[int]]:
    """Rank 3 dies; rank 1 shrinks after the others went on without it and ended."""
    comm, _ = meet(2, nranks)
    pids = [int(pid) for pid in comm.all_gather(np.array([os.getpid()])).ravel()]
    together(nranks, "dying")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = set(failure(comm.barrier).ranks)
    if rank == 1:
        until_gone([pids[0], pids[2]])
    while True:
        try:
            with comm.shrink(exclude=sorted(failed), abort=True) as smaller:
                return "went on", sorted(failed), who(smaller, rank)
        except RankFailedError as error:
            if rank in error.ranks:
                return str(error), sorted(failed), error.ranks
            failed |= set(error.ranks)


def test_survivors_that_went_on_before_they_ended_are_not_dead() -> None:
    results = run(4, comes_late, backend="cpu", check=False, timeout=40)
    assert results[0] == results[2] == ("went on", [1, 3], [0, 2])
    assert results[1] == ("the other ranks went on without this one, 1 of 4", [3], [1])


def differ(rank: int, nranks: int) -> tuple[str, list[int]]:
    """Halves exclude each other, though all ranks live."""
    comm, _ = meet(5, nranks)
    mine = [0, 1] if rank < 2 else [2, 3]
    try:
        comm = comm.shrink(exclude=[r for r in range(nranks) if r not in mine], abort=True)
    except RankFailedError as error:
        return str(error), error.ranks
    left = who(comm, rank)
    comm.destroy()
    return "went on", left


def test_not_both_of_halves_that_exclude_each_other_go_on() -> None:
    results = run(4, differ, backend="cpu", timeout=40)
    assert all(ranks for _, ranks in results)
    assert len({tuple(ranks) for text, ranks in results if text == "went on"}) <= 1


@on_ranks(2, timeout=30)
def test_a_closed_communicator_cannot_be_shrunk(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=10) as comm:
        pass
    with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
        comm.shrink(exclude=[1 - rank], abort=True)


UNREACHABLE = """
import os, signal, sys
import numpy as np
import pynccl
comm = pynccl.init("tcp://10.199.0.1:29777", rank=int(sys.argv[1]), world_size=4, timeout=2)
comm.barrier()
print("ready", flush=True)
if comm.rank == 3:
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.barrier()
except pynccl.RankFailedError as error:
    failed = error.ranks
try:
    with comm.shrink(exclude=failed, abort=True) as left:
        print(failed, left.size, *left.all_reduce(np.ones(2)), flush=True)
except pynccl.RankFailedError as error:
    print(failed, error.ranks, flush=True)
"""


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(90)
def test_survivors_that_silently_cannot_reach_each_other() -> None:
    """Ranks 1 and 2 lose each other as rank 3 dies; rank 0 hears both."""
    with joined(3) as hosts, ExitStack() as started:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", UNREACHABLE, str(rank)],
                env=clean_environment() | {"PYNCCL_LIBRARY": "cpu", "NCCL_HOSTID": name},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank, name in enumerate([*hosts.names, hosts.names[0]])
        ]  # fmt: skip
        for process in ranks:
            started.enter_context(process)
            started.callback(process.kill)
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        hosts.lose(1, 2)
        killed, *others, first = [process.communicate("\n", timeout=40)[0] for process in ranks[::-1]]
    goes_on = "[3] 2 2.0 2.0\n"
    assert (killed, first) == ("", goes_on)
    assert others in ([goes_on, "[3] [1]\n"], ["[3] [2]\n", goes_on])


@on_ranks(2, timeout=30)
def test_wrong_quorum(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=10) as comm:
        for value in ("all", 2, True, np.ones(4)):
            with pytest.raises(ValueError, match="quorum is .*; expected 'majority' or None"):
                comm.shrink(exclude=[1 - rank], quorum=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="abort is 'x'; expected True or False"):
            comm.shrink(exclude=[1 - rank], abort="x")  # type: ignore[arg-type]
