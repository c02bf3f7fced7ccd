"""The control channel where ranks are connected to some of the others only, and pass on what they hear.

PYNCCL_MESH_RANKS=0 forces that. Of 8 ranks each then has the neighbours at the distances 1, 2 and 4, of 9 the
same: rank 0 has no connection to ranks 3 and 5, or 3 and 6.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import ROOT
from cutting import meet, who
from hosts import needs_root
from launchers import environment
from meeting import failure, hear, publish, state, tell, together, until
from processes import completed
from pynccl import (
    CollectiveMismatchError,
    Communicator,
    NcclError,
    NcclTimeoutError,
    RankFailedError,
    UniqueId,
)
from pynccl.testing import RankError, run

SPARSE = {"PYNCCL_MESH_RANKS": "0"}
SECRET = {"PYNCCL_SECRET": "a secret of the tests, long enough"}
SOON = 10


# --- deaths -------------------------------------------------------------------------------------------------


def dies(rank: int, nranks: int, victims: list[int]) -> tuple[list[int], float, str, list[int]]:
    """Answer who was named, how soon, and by which error or communicator this rank goes on."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    together(nranks)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = failure(comm.barrier)
    took = time.monotonic() - start
    try:
        comm = comm.shrink(exclude=error.ranks, abort=True)
    except RankFailedError as second:
        comm.abort()
        return error.ranks, took, str(second), second.ranks
    with comm:
        return error.ranks, took, "", who(comm, rank)


@pytest.mark.parametrize(
    "env", [SPARSE, pytest.param(SPARSE | SECRET, marks=pytest.mark.slow)], ids=["plain", "secret"]
)
@pytest.mark.parametrize(
    ("nranks", "victims"), [(8, [0]), (8, [5]), (9, [0, 3]), (9, [2, 5, 7]), (6, [1, 2, 4])]
)
def test_all_survivors_name_the_dead_and_go_on(nranks: int, victims: list[int], env: dict[str, str]) -> None:
    left = [rank for rank in range(nranks) if rank not in victims]
    results = run(nranks, dies, victims, backend="cpu", check=False, env=env, timeout=60)
    for rank in left:
        named, took, error, members = results[rank]
        assert (named, error, members) == (victims, "", left), results
        assert took < SOON, results


def test_a_rank_whose_neighbours_all_die() -> None:
    """Nobody is left who could tell whether it lives: those that reach each other go on."""
    results = run(8, dies, [1, 2, 4, 6, 7], backend="cpu", check=False, env=SPARSE, timeout=60)
    for rank in (3, 5):
        assert results[rank][0] == [0, 1, 2, 4, 6, 7], results
        assert results[rank][2:] == ("", [3, 5]), results
    named, _, error, lost = results[0]
    assert named == list(range(1, 8)), results
    assert error.startswith("partition: rank 0 cannot reach ranks [3, 5]"), results
    assert lost == list(range(1, 8))


def stops(rank: int, nranks: int, victim: int) -> tuple[list[int], str, list[int]]:
    comm = pynccl.init(timeout=2)
    pid = int(comm.all_gather(np.array([os.getpid()]))[victim][0])
    together(nranks)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = failure(comm.barrier)
    comm = comm.shrink(exclude=error.ranks, abort=True)
    left = who(comm, rank)
    comm.destroy()
    together(nranks - 1, "over")
    if rank == (victim + 1) % nranks:
        os.kill(pid, signal.SIGKILL)
    return error.ranks, str(error), left


@pytest.mark.slow
def test_all_name_a_stopped_rank() -> None:
    results = run(8, stops, 3, backend="cpu", check=False, env=SPARSE, timeout=60)
    for rank in (0, 1, 2, 4, 5, 6, 7):
        named, text, left = results[rank]
        assert (named, left) == ([3], [0, 1, 2, 4, 5, 6, 7]), results
        assert "rank 3 is not responding: " in text, results


# --- connections that end between ranks that live -----------------------------------------------------------


def is_cut(rank: int, nranks: int, group: list[int]) -> tuple[list[int], str, list[int]]:
    comm, cutter = meet(15, nranks)
    cutter.cut(rank, (other for other in range(nranks) if (other in group) != (rank in group)))
    error = failure(comm.barrier)
    try:
        comm = comm.shrink(exclude=error.ranks, abort=True)
    except RankFailedError as second:
        # A rank that ends earlier is proven to have ended, and no part of the partition for the others.
        together(len(group), "refused")
        comm.abort()
        return error.ranks, str(second), second.ranks
    left = who(comm, rank)
    comm.destroy()
    return error.ranks, "", left


def test_a_partition() -> None:
    small, large = [1, 2, 6], [0, 3, 4, 5, 7]
    for rank, (named, text, ranks) in enumerate(run(8, is_cut, small, backend="cpu", env=SPARSE, timeout=60)):
        assert named == (large if rank in small else small)
        if rank in large:
            assert (text, ranks) == ("", large)
        else:
            assert text.startswith(f"partition: ranks {small} cannot reach ranks {large}"), text
            assert ranks == large


# --- without a failure --------------------------------------------------------------------------------------


def shrinks_and_splits(rank: int, nranks: int) -> tuple[list[int], list[int], list[int]]:
    with pynccl.init(timeout=30) as comm:
        half = comm.split(rank % 2)
        assert half is not None
        parts = who(half, rank)
        half.destroy()
        if rank == 3:
            hear("shrunk")
            return [], parts, []
        with comm.shrink(exclude=[3]) as small:
            once = who(small, rank)
            if small.rank == 0:
                tell("shrunk")
            if small.rank == 5:
                return once, parts, []
            with small.shrink(exclude=[5]) as smaller:
                return once, parts, who(smaller, rank)


def test_shrink_and_split_a_healthy_communicator() -> None:
    results = run(9, shrinks_and_splits, backend="cpu", env=SPARSE, timeout=60)
    left = [0, 1, 2, 4, 5, 6, 7, 8]
    for rank, (once, parts, twice) in enumerate(results):
        assert parts == list(range(rank % 2, 9, 2))
        assert once == ([] if rank == 3 else left)
        assert twice == ([] if rank in (3, 6) else [0, 1, 2, 4, 5, 7, 8])


def grows(rank: int, nranks: int, folder: str) -> list[int]:
    """A rank has died; the others take in two new ones."""
    old, place = nranks - 2, Path(folder, "id")
    if rank >= old:
        until(place.exists)
        comm = Communicator.join(nranks - 1, UniqueId(place.read_bytes()), rank - 1, timeout=20)
    else:
        first = pynccl.init(rank=rank, world_size=old, timeout=20)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        small = first.shrink(exclude=failure(first.barrier).ranks, abort=True)
        uid = small.get_unique_id() if small.rank == 0 else None
        if uid is not None:
            publish(place, bytes(uid))
        comm = small.grow(nranks - 1, uid)
        small.destroy()
    with comm:
        return who(comm, rank)


def test_grow_after_a_death(tmp_path: Path) -> None:
    results = run(10, grows, str(tmp_path), backend="cpu", check=False, env=SPARSE, timeout=60)
    assert isinstance(results[2], RankError)
    for rank in (0, 1, *range(3, 10)):
        assert results[rank] == [0, 1, *range(3, 10)], results


def comes_late(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=2)
    comm.all_reduce(np.ones(3))
    if rank < 3:
        hear("told")
    with pytest.raises(NcclError) as caught:
        comm.barrier() if rank < 3 else comm.all_reduce(np.ones(3))
    if rank == 3:
        tell("told")
    comm.abort()
    return str(caught.value)


def test_late_ranks_are_heard_from_afar() -> None:
    """Each of the others lacks a connection to one of them."""
    texts = run(8, comes_late, backend="cpu", env=SPARSE, timeout=60)
    for text in texts[3:]:
        assert "have called: ranks 0-2: #1 all_reduce, ranks 3-7: #2 all_reduce" in text, texts


def leaves(rank: int, nranks: int) -> tuple[float, list[int]]:
    """All neighbours of rank 0 leave; ranks 0, 3 and 5 exchange messages, then rank 5 dies."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    if rank not in (0, 3, 5):
        comm.destroy()
        together(nranks)
        return 0, []
    together(nranks)
    x = np.zeros(3)
    comm.send_recv(np.full(3, float(rank)), {0: 3, 3: 5, 5: 0}[rank], x, {0: 5, 3: 0, 5: 3}[rank])
    named: list[int] = []
    together(3, "exchanged")
    if rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        named = failure(lambda: comm.recv(x.copy(), 5)).ranks
        tell("named")
    else:
        hear("named")
    comm.abort()
    return x[0], named


def test_who_has_left_hides_nobody() -> None:
    """Although it passes nothing on any more, so that rank 3 cannot know what rank 0 does."""
    results = run(8, leaves, backend="cpu", check=False, env=SPARSE, timeout=60)
    assert results[0] == (5, [])
    assert results[3] == (0, [5])


def dies_in_hiding(rank: int, nranks: int) -> list[int]:
    """All neighbours of rank 0 leave; ranks 0 and 3 wait for rank 5, which dies."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    if rank not in (0, 3, 5):
        comm.destroy()
    together(nranks)
    if rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    named = failure(lambda: comm.recv(np.zeros(3), 5)).ranks if rank in (0, 3) else []
    together(nranks - 1, "over")
    comm.abort()
    return named


@pytest.mark.parametrize("env", [SPARSE, SPARSE | {"PYNCCL_CHECK": "1"}], ids=["plain", "check"])
def test_the_death_of_a_hidden_rank(env: dict[str, str]) -> None:
    """Only the library of rank 0 sees it."""
    results = run(8, dies_in_hiding, backend="cpu", check=False, env=env, timeout=60)
    assert (results[0], results[3]) == ([5], [5]), results


def is_late(rank: int, nranks: int) -> tuple[str, list[int]]:
    comm = pynccl.init(timeout=2)
    comm.barrier()
    if rank not in (0, 3, 5):
        comm.destroy()
    together(nranks)
    text, ranks = "", [rank]
    if rank == 3:
        until(lambda: comm.async_error() is not None)
    elif rank == 0:
        with pytest.raises(NcclTimeoutError) as caught:
            comm.recv(np.ones(3), 3)
        text, ranks = str(caught.value), caught.value.ranks
    together(nranks, "over")
    comm.abort()
    return text, ranks


def test_a_late_rank_that_cannot_be_asked() -> None:
    """All neighbours of rank 0 have left: it does not take ranks 3 and 5 for silent."""
    text, ranks = run(8, is_late, backend="cpu", check=False, env=SPARSE, timeout=60)[0]
    assert "all ranks that can be asked respond, and have called: rank 0: #2 recv, ranks 1-2: #1" in text
    assert "rank 3, when last heard of: " in text
    assert ranks == []


# --- check mode ---------------------------------------------------------------------------------------------

CHECK = SPARSE | {"PYNCCL_CHECK": "1"}
X = np.ones(4, np.float32)


def other_count(comm: Communicator) -> Any:
    return comm.all_reduce(X[:3] if comm.rank == 5 else X)


def message_for_a_collective(comm: Communicator) -> Any:
    return comm.send(X, 6) if comm.rank == 0 else comm.all_reduce(X)


def other_length(comm: Communicator) -> Any:
    if comm.rank == 0:
        return comm.send(X, 3)
    return comm.recv(X[:2], 0) if comm.rank == 3 else comm.all_reduce(X)


CASES: dict[str, tuple[Callable[[Communicator], Any], list[str]]] = {
    "count": (other_count, [r"ranks 0-4: all_reduce\(float32, 4", r"rank 5: all_reduce\(float32, 3"]),
    "message": (message_for_a_collective, [r"rank 0: send\(float32, 4\) to rank 6", r"1-8: all_reduce"]),
    "length": (other_length, [r"rank 0: send\(float32, 4\)", r"rank 3: recv\(float32, 2\) from rank 0"]),
}


def differs(rank: int, nranks: int, name: str) -> str:
    comm = pynccl.init(timeout=20)
    comm.barrier()
    together(nranks)
    error: BaseException | None = None
    for call in (CASES[name][0], Communicator.barrier):
        try:
            call(comm)
        except CollectiveMismatchError as found:
            error = error or found
    comm.abort()
    return str(error)


@pytest.mark.parametrize("name", CASES)
def test_check_mode_shows_the_calls_of_all(name: str) -> None:
    for text in run(9, differs, name, backend="cpu", env=CHECK, timeout=60):
        for line in CASES[name][1]:
            assert re.search(line, text), text


def checked(rank: int, nranks: int) -> float:
    """Groups, messages and collectives that match."""
    with pynccl.init(timeout=30) as comm:
        x, y = np.full(3, float(rank)), np.empty(3)
        for _ in range(20):
            with pynccl.group():
                comm.send(x, (rank + 3) % nranks)
                total = comm.all_reduce(np.ones(2))
                comm.recv(y, (rank - 3) % nranks)
            assert (y[0], total[0]) == ((rank - 3) % nranks, nranks)
            comm.barrier()
        return float(comm.all_reduce(np.ones(1))[0])


@pytest.mark.parametrize("nranks", [2, 5, 7, 9])
def test_check_mode_lets_pass_what_matches(nranks: int) -> None:
    assert run(nranks, checked, backend="cpu", env=CHECK, timeout=60) == [nranks] * nranks


COUNTED = """
import numpy as np
import pynccl
from pynccl.testing import run
from scale import segments

CALLS = 50

def work(rank, nranks):
    with pynccl.init(timeout=60) as comm:
        ones = np.ones(100, np.float32)
        comm.all_reduce(ones)
        comm.barrier()
        before = segments()
        comm.barrier()
        for _ in range(CALLS):
            comm.all_reduce(ones)
        comm.barrier()
        return segments() - before

if __name__ == "__main__":
    for nranks in (4, 64):
        print(run(nranks, work, backend="cpu", threads=nranks // 4, timeout=60)[0] / CALLS / nranks)
"""


@pytest.mark.slow
@needs_root
def test_check_mode_sends_little_more_at_64_ranks_than_at_4(tmp_path: Path) -> None:
    """In a network of its own, whose TCP segments are counted: times depend on the machine's load."""
    (tmp_path / "counted.py").write_text(COUNTED)
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), *sys.path])
    up = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command = [*up, sys.executable, str(tmp_path / "counted.py")]
    done = completed(command, env=environment(PYNCCL_CHECK="1", PYTHONPATH=path), timeout=60)
    few, many = map(float, done.stdout.split())
    # log2(n) messages of each rank and what confirms them: three times as many.
    assert 1 < few < 8, done.stderr
    assert many < 6 * few


def leaves_a_message(rank: int, nranks: int, rounds: int) -> None:
    """Rank 0 sends to rank 3 and leaves; all ranks on the way are stopped just before they leave, too."""
    with pynccl.init(timeout=10) as whole:
        pids = whole.all_gather(np.array([os.getpid()])).ravel().tolist()
        others = [pid for number, pid in enumerate(pids) if number not in (0, 3)]
        for _ in range(rounds):
            comm = whole.split(0)
            assert comm is not None
            comm.barrier()
            if rank == 3:
                comm.recv(np.ones(3), 0)
                comm.destroy()
            elif rank == 0:
                until(lambda: all(state(pid) == "T" for pid in others))
                go_on = threading.Timer(0.2, let_go_on, [others])
                go_on.start()
                comm.send(np.ones(3), 3)
                comm.destroy()
                go_on.join()
            else:
                # Until rank 0 knows of the recv.
                time.sleep(0.1)
                stop_before_leaving(comm)
                comm.destroy()
            whole.barrier()


def threads_of(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def schedule(thread: int, how: int, cpus: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setscheduler(thread, how, os.sched_param(0))
        os.sched_setaffinity(thread, cpus)


def stop_before_leaving(comm: Communicator) -> None:
    """Have this process stop as it leaves; when it goes on, this thread runs before the watchdog's."""
    watch = comm._core.watch
    stop = watch.stop

    def late(reason: Any) -> None:
        for thread in threads_of(os.getpid()):
            mine = thread == threading.get_native_id()
            schedule(thread, os.SCHED_OTHER if mine else os.SCHED_IDLE, {min(os.sched_getaffinity(0))})
        os.kill(os.getpid(), signal.SIGSTOP)
        stop(reason)

    watch.stop = late  # type: ignore[method-assign]


def let_go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    for pid in pids:
        for thread in threads_of(pid):
            schedule(thread, os.SCHED_OTHER, os.sched_getaffinity(0))


def test_who_leaves_passes_on_what_came_before() -> None:
    """In each round the announcement of the send waits in the socket of a rank that leaves."""
    run(9, leaves_a_message, 8, backend="cpu", env=CHECK, timeout=60)


def leave_in_any_order(rank: int, nranks: int, rounds: int) -> None:
    """Pairs exchange messages and leave at once; the others leave at any moment."""
    with pynccl.init(timeout=10) as whole:
        for number in range(rounds):
            comm = whole.split(0)
            assert comm is not None
            draw = random.Random(number)
            order = draw.sample(range(nranks), nranks)
            pairs = dict(zip(order[:8], order[4:8] + order[:4], strict=True))
            pause = [draw.uniform(0, 0.004) for _ in range(nranks)][rank]
            comm.barrier()
            if rank in pairs:
                exchange(comm, pairs[rank])
            else:
                time.sleep(pause)
            comm.destroy()
            whole.barrier()


def exchange(comm: Communicator, other: int) -> None:
    x, y = np.full(3, comm.rank), np.zeros(3, int)
    for turn in range(4):
        if (comm.rank < other) == bool(turn % 2):
            comm.send(x, other)
        else:
            comm.recv(y, other)
    assert y[0] == other


@pytest.mark.slow
def test_check_mode_while_ranks_leave() -> None:
    run(12, leave_in_any_order, 30, backend="cpu", env=CHECK, timeout=60)


# --- how many connections -----------------------------------------------------------------------------------


def go_on(rank: int, nranks: int, stay: list[int]) -> float:
    """The other ranks leave; these send to each other in a ring."""
    comm = pynccl.init(timeout=20)
    comm.barrier()
    if rank not in stay:
        comm.destroy()
    together(nranks)
    x = np.full(3, float(rank))
    if rank in stay:
        at = stay.index(rank)
        for _ in range(3):
            y = np.zeros(3)
            comm.send_recv(x, stay[(at + 1) % len(stay)], y, stay[at - 1])
            x = y
        comm.destroy()
    return float(x[0])


@pytest.mark.parametrize("stay", [[0, 3, 5], [0, 1, 3, 4, 5, 6, 7, 8]], ids=["few", "most"])
def test_check_mode_after_ranks_have_left(stay: list[int]) -> None:
    """Of 9 ranks rank 2 is on the way from rank 0 to rank 3; if only these three stay, no way is left."""
    results = run(9, go_on, stay, backend="cpu", check=False, env=CHECK, timeout=60)
    for at, rank in enumerate(stay):
        assert results[rank] == stay[at - 3]


def counts(rank: int, nranks: int, threads: int) -> float:
    """Return how many descriptors of a rank a time-out costs."""
    found = []
    for timeout in (None, 60):
        with pynccl.init(timeout=timeout) as comm:
            comm.barrier()
            found.append(len(os.listdir("/proc/self/fd")) / threads)
            comm.barrier()
    return found[1] - found[0]


def test_descriptors_grow_with_the_logarithm() -> None:
    nranks, threads = 64, 16
    found = run(nranks, counts, threads, backend="cpu", threads=threads, timeout=120)
    assert max(found) <= 2 * math.log2(nranks) + 2, found


def fails_to_open(rank: int, nranks: int) -> str:
    os.environ["PYNCCL_MESH_RANKS"] = "few" if rank == 1 else "3"
    with pytest.raises(NcclError) as caught:
        pynccl.init(timeout=10)
    return str(caught.value)


def test_bad_variable() -> None:
    for text in run(3, fails_to_open, backend="cpu", timeout=40):
        assert "PYNCCL_MESH_RANKS is 'few'; expected a number of ranks, 0 to 65536" in text
