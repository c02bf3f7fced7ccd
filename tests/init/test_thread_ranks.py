"""pynccl.testing.run with `threads`: ranks as threads of fewer processes."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import pynccl
from meeting import free_port, together
from pynccl import testing


def places(rank: int, nranks: int, given: list[int]) -> tuple[object, ...]:
    given.append(rank)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYNCCL_LIBRARY")
    return rank, nranks, given, os.getpid(), *(os.environ.get(name) for name in names)


def reduce_twice(rank: int, nranks: int, method: str | None) -> tuple[int, int, float, float]:
    sums = []
    # A second call of init meets in another round.
    for _ in range(2):
        with pynccl.init(method, timeout=30) as comm:
            assert comm.rank == rank and comm.device == rank
            sums.append(float(comm.all_reduce(np.full(3, rank + 1.0))[0]))
            comm.barrier()
    return comm.size, os.getpid(), sums[0], sums[1]


def threads_without_a_launcher(rank: int, nranks: int, kind: str, where: str, port: int) -> list[float]:
    if kind == "master":
        for name in ("PYNCCL_STORE", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{where}/meeting"}.get(kind)
    sums = [0.0, 0.0]

    def take_part(own: int) -> None:
        for turn in range(2):
            with pynccl.init(method, rank=2 * rank + own, world_size=4, timeout=20) as comm:
                sums[own] += float(comm.all_reduce(np.full(3, comm.rank + 10.0**turn))[0])

    threads = [threading.Thread(target=take_part, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


@pytest.mark.parametrize("kind", ["master", "tcp", "file", "pynccl run"])
def test_threads_of_a_program_are_ranks(kind: str, tmp_path: Path) -> None:
    """Two processes with two ranks each meet twice."""
    found = testing.run(
        2, threads_without_a_launcher, kind, str(tmp_path), free_port(), backend="cpu", timeout=60
    )
    assert found == [[6 + 4 + 6 + 40.0] * 2] * 2


def reduce_once(rank: int, nranks: int, timeout: float | None) -> float:
    with pynccl.init(timeout=timeout) as comm:
        return float(comm.all_reduce(np.full(1, rank + 1.0))[0])


def names_of_communicators(rank: int, nranks: int) -> str:
    with pynccl.init() as comm, comm.split(0) as half:
        half.barrier()
        return repr((comm._core.identity, half._core.identity))


def fail_on_2(rank: int, nranks: int) -> int:
    if rank == 2:
        raise KeyError("nothing under this key")
    return rank


def fail_while_others_wait(rank: int, nranks: int) -> int:
    with pynccl.init(timeout=30) as comm:
        comm.barrier()
        if rank == 1:
            raise KeyError("nothing under this key")
        comm.barrier()
    return rank


def hang_on_1(rank: int, nranks: int) -> int:
    if rank == 1:
        hang_here()
    return rank


def hang_here() -> None:
    time.sleep(60)


def leave_on_3(rank: int, nranks: int) -> int:
    if rank == 3:
        os._exit(7)
    time.sleep(10 if rank == 2 else 0)
    return rank


def crash_on_1(rank: int, nranks: int) -> int:
    if rank == 1:
        ctypes.string_at(0)
    time.sleep(10 if rank == 0 else 0)
    return rank


def init_in_a_helper(rank: int, nranks: int) -> str:
    found: list[str] = []

    def helper() -> None:
        try:
            pynccl.init()
        except pynccl.BootstrapError as error:
            found.append(str(error))

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    return found[0]


def fail(rank: int, nranks: int) -> None:
    raise KeyError(rank)


def test_each_rank_has_its_own_arguments_and_no_variables_of_a_process() -> None:
    got = testing.run(6, places, [7], backend="cpu", threads=2)
    assert [(*each[:3], *each[4:]) for each in got] == [
        (r, 6, [7, r], None, None, "6", "cpu") for r in range(6)
    ]
    pids = [each[3] for each in got]
    assert pids[::2] == pids[1::2] and len(set(pids)) == 3


@pytest.mark.parametrize(("nranks", "threads"), [(4, 2), (8, 8)])
def test_init_finds_the_rank_of_the_thread(nranks: int, threads: int) -> None:
    got = testing.run(nranks, reduce_twice, None, backend="cpu", threads=threads)
    total = nranks * (nranks + 1) / 2
    assert {(size, *sums) for size, _, *sums in got} == {(nranks, total, total)}
    assert set(Counter(pid for _, pid, *_ in got).values()) == {threads}


# So many threads on few cores that a hello often reaches the CPU library's listener late, and a heartbeat
# the others' watchdogs.
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nranks", "timeout"), [(512, None), (256, 200)])
def test_many_ranks(nranks: int, timeout: float | None) -> None:
    got = testing.run(nranks, reduce_once, timeout, backend="cpu", threads=32, timeout=280)
    assert got == [nranks * (nranks + 1) / 2] * nranks


def test_init_by_a_folder(tmp_path: Path) -> None:
    got = testing.run(4, reduce_twice, f"file://{tmp_path}/meet", backend="cpu", threads=2)
    assert [each[2:] for each in got] == [(10.0, 10.0)] * 4


def test_the_ranks_of_a_process_call_their_communicators_by_one_name() -> None:
    assert len(set(testing.run(4, names_of_communicators, backend="cpu", threads=2))) == 1


def test_a_failing_thread_is_named() -> None:
    with pytest.raises(testing.RankError, match="^rank 2 of 4 failed:\nTraceback") as caught:
        testing.run(4, fail_on_2, backend="cpu", threads=2)
    assert caught.value.ranks == [2]
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail_on_2" in str(caught.value)


def test_without_check_the_other_threads_have_results() -> None:
    got = testing.run(4, fail_on_2, backend="cpu", threads=4, check=False)
    assert got[:2] == [0, 1] and got[3] == 3
    assert isinstance(got[2], testing.RankError)
    assert got[2].ranks == [2]


def test_the_failure_that_came_first_is_the_cause() -> None:
    with pytest.raises(testing.RankError, match="^rank 1 of 4 failed:") as caught:
        testing.run(4, fail_while_others_wait, backend="cpu", threads=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value.errors[0], pynccl.NcclError)


def test_a_failure_ends_a_process_whose_other_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(testing.RankError, match="rank 0 of 2 failed") as caught:
        testing.run(2, fail_or_hang, backend="cpu", threads=2)
    assert time.monotonic() - start < 40
    assert caught.value.ranks == [0]
    assert "rank 1 of 2 was still running and was ended" in str(caught.value)


def fail_or_hang(rank: int, nranks: int) -> None:
    if rank == 0:
        raise KeyError("nothing under this key")
    hang_here()


def test_timeout_shows_the_stack_of_the_thread() -> None:
    with pytest.raises(testing.RankTimeout, match=r"ranks \[1\] of 4 were still running after 2 s") as caught:
        testing.run(4, hang_on_1, backend="cpu", threads=2, timeout=2)
    assert caught.value.ranks == [1]
    assert "in hang_here" in str(caught.value)
    # The main thread, which waits for its ranks.
    assert "join" not in str(caught.value)
    assert "Fatal Python error" not in str(caught.value)


def test_a_process_that_ends_is_the_end_of_its_ranks() -> None:
    with pytest.raises(testing.RankError) as caught:
        testing.run(4, leave_on_3, backend="cpu", threads=2)
    assert caught.value.ranks == [2, 3]
    text = "is a thread of the process of ranks 2 to 3, which exited with code 7, without a result"
    assert f"rank 3 of 4 {text}" in str(caught.value)


def test_a_crash_shows_the_stack() -> None:
    with pytest.raises(testing.RankError, match="ranks 0 to 1, which was killed by SIGSEGV") as caught:
        testing.run(2, crash_on_1, backend="cpu", threads=2)
    assert caught.value.ranks == [0, 1]
    assert "in string_at" in str(caught.value) and "in crash_on_1" in str(caught.value)


def test_init_in_a_thread_that_is_no_rank() -> None:
    (text,) = set(testing.run(2, init_in_a_helper, backend="cpu", threads=2))
    assert "WORLD_SIZE is '2', but RANK is not set" in text


def come_late(rank: int, nranks: int, late: int) -> tuple[str, list[int]]:
    together(nranks)
    if rank == late:
        time.sleep(3.5)
    with pytest.raises(pynccl.BootstrapError) as caught:
        pynccl.init(timeout=2)
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("late", [1, 3])
def test_a_thread_comes_after_the_others_have_given_up(threads: int, late: int) -> None:
    """It raises their error, which names it."""
    for text, ranks in testing.run(4, come_late, late, backend="cpu", threads=threads):
        assert text.endswith(f"ranks that never arrived: {late} (1 of 4)")
        assert ranks == [late]


def test_an_error_of_many_ranks_shows_some_tracebacks() -> None:
    with pytest.raises(testing.RankError) as caught:
        testing.run(20, fail, backend="cpu", threads=20)
    assert caught.value.ranks == list(range(20))
    assert str(caught.value).count("Traceback") == 16
    assert "4 more of 20 ranks failed: ranks " in str(caught.value)


@pytest.mark.parametrize("threads", [0, -2, True, 2.0, "2", None, 3])
def test_bad_numbers_of_threads(threads: object) -> None:
    with pytest.raises(
        ValueError, match="^threads is .*; expected a positive int that divides nranks, 4$"
    ) as caught:
        testing.run(4, fail, threads=threads)  # type: ignore[arg-type]
    assert repr(threads) in str(caught.value)


def test_check_mode_in_threads(capfd: pytest.CaptureFixture[str]) -> None:
    """Its variables are the same for all of them: no rank is warned of a difference."""
    testing.run(4, reduce_twice, None, backend="cpu", threads=4, env={"PYNCCL_CHECK": "1"})
    assert "differs between ranks" not in capfd.readouterr().err


def shared_mebibytes() -> float:
    """Return what this process has touched of the memory that a host's ranks share."""
    touched, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = "/memfd:pynccl" in line
        elif inside and first == "Rss:":
            touched += int(line.split()[1])
    return touched / 1024


def use_all_pairs(rank: int, nranks: int) -> float:
    with pynccl.init(timeout=None) as comm:
        for count in (1, 1000, 200_000):
            assert comm.all_reduce(np.ones(count))[-1] == nranks
            parts = np.full((nranks, count // 100 + 1), float(rank))
            got = np.empty_like(parts)
            comm.all_to_all(parts, got)
            assert (got[:, 0] == np.arange(nranks)).all()
        comm.barrier()
        touched = shared_mebibytes()
        comm.barrier()
    return touched


@pytest.mark.slow
@pytest.mark.parametrize("direct", ["0", "1"])
def test_shared_memory_of_128_ranks(direct: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_CPU_DIRECT", direct)
    touched = testing.run(128, use_all_pairs, backend="cpu", threads=128, timeout=120)
    assert 1 < max(touched) < 64
