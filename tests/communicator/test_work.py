"""Operations with wait=False: results, waits, awaits, errors, and what is kept."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import importlib
import os
import resource
import signal
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import hear, tell, together
from pynccl import CollectiveMismatchError, Communicator, NcclInvalidUsage, NcclTimeoutError, RankFailedError
from pynccl.testing import run
from ranks import on_ranks


def started(comm: Communicator, x: Any) -> list[tuple[pynccl.Work[Any], Any]]:
    """Start every operation; return each with its result by NumPy."""
    me, n, right, left = comm.rank, comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    every = np.stack([x - me + r for r in range(n)])
    first, rest = every[0], me != 0
    counts, flat = [2] * n, every.ravel()
    return [
        (comm.all_reduce(x, x.copy(), wait=False), every.sum(0)),
        (comm.reduce(x, x.copy(), root=0, wait=False), None if rest else every.sum(0)),
        (comm.broadcast(x.copy(), wait=False), first),
        (comm.all_gather(x, wait=False), every),
        (comm.reduce_scatter(np.stack([x] * n), wait=False), every.sum(0)[None]),
        (comm.all_to_all(np.stack([x + 10 * r for r in range(n)]), wait=False), every + 10 * me),
        (comm.gather(x, wait=False), None if rest else every),
        (comm.scatter(None if rest else np.stack([x] * n), x.copy()[None], wait=False), first[None]),
        (comm.all_gather_v(x, np.zeros(2 * n), counts, wait=False), flat),
        (comm.reduce_scatter_v(np.tile(x, n), x.copy(), counts, wait=False), every.sum(0)),
        (comm.gather_v(x, np.zeros(2 * n), counts, wait=False), None if rest else flat),
        (comm.scatter_v(np.tile(x, n), x.copy(), counts, wait=False), first),
        (comm.all_to_all_v(np.tile(x, n), counts, np.zeros(2 * n), counts, wait=False), flat),
        (comm.send_recv(x, right, x.copy(), left, wait=False), every[left]),
        (
            comm.send(x, 1, wait=False) if me == 0 else comm.recv(x.copy(), 0, wait=False),
            first if rest else None,
        ),
        (comm.barrier(wait=False), None),
    ]


@on_ranks(2)
def test_every_operation(rank: int, nranks: int) -> None:
    """By wait, in order and backwards, and by await."""
    with pynccl.init(timeout=30) as comm:
        x = np.arange(2.0) + rank
        forwards, backwards = started(comm, x), started(comm, x)[::-1]
        for work, expected in forwards + backwards:
            np.testing.assert_array_equal(work.wait(), expected)
            assert work.done()
            assert work.exception() is None

        async def awaited() -> None:
            works = started(comm, x)
            results = await asyncio.gather(*(work for work, _ in works))
            for result, (_, expected) in zip(results, works, strict=True):
                np.testing.assert_array_equal(result, expected)

        asyncio.run(awaited())


@on_ranks(2)
def test_one_sided_prepared_and_plans(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        other, x = 1 - rank, np.full(4, rank + 1.0)
        with comm.window(np.zeros(4)) as window:
            works = [comm.put_signal(x, other, window, wait=False), comm.signal(other, 1, wait=False)]
            works += [comm.wait_signal(other, wait=False), comm.wait_signal({other: 1}, signal=1, wait=False)]
            assert [work.wait() for work in works] == [None] * 4
            np.testing.assert_array_equal(window.array, other + 1.0)
        op = comm.prepare.all_reduce(x, x.copy(), stream=stream)
        plan = pynccl.Plan([op, comm.prepare.all_gather(x)])
        for _ in range(3):
            np.testing.assert_array_equal(op(wait=False).wait(), [3.0] * 4)
            total, both = plan(wait=False).wait()
            np.testing.assert_array_equal(total, [3.0] * 4)
            np.testing.assert_array_equal(both, [[1.0] * 4, [2.0] * 4])
        assert op(wait=True) is op.result
        assert pynccl.Plan([])(wait=False).wait() == ()


@on_ranks(2)
def test_returns_before_the_peer_comes(rank: int, nranks: int) -> None:
    """Nothing blocks but `wait`, and a loop goes on; a cancelled await harms nothing."""
    with pynccl.init(timeout=30) as comm:
        x, ticks = np.ones(4), 0
        if rank == 1:
            hear("started")
            comm.all_reduce(x)
            hear("cancelled")
            comm.all_reduce(x)
            comm.all_reduce(x)
            return
        work = comm.all_reduce(x, wait=False)
        assert not work.done()
        assert "running" in repr(work)
        assert work.exception() is None
        with pytest.raises(NcclTimeoutError, match=r"ncclAllReduce did not complete within 0\.1 s"):
            work.wait(0.1)

        async def loop_goes_on() -> None:
            nonlocal ticks

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1
                    if ticks == 20:
                        tell("started")

            ticking = asyncio.create_task(tick())
            assert await work is x
            ticking.cancel()
            late = comm.all_reduce(x, wait=False)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(late, 0.1)
            tell("cancelled")
            assert await late is x

        asyncio.run(loop_goes_on())
        assert ticks >= 20
        comm.all_reduce(x)
        np.testing.assert_array_equal(x, [8.0] * 4)


async def largest_gap(seconds: float, work: pynccl.Work[Any] | None = None) -> float:
    """Sleep by turns of 10 ms, beside an await of an outstanding call; return the longest turn."""
    turns = []

    async def sleep() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            turns.append(time.monotonic() - begin)

    sleeping = asyncio.create_task(sleep())
    with contextlib.suppress(asyncio.TimeoutError):
        await (asyncio.sleep(seconds) if work is None else asyncio.wait_for(work, seconds))
    sleeping.cancel()
    return max(turns)


@on_ranks(2)
def test_an_await_holds_up_nothing(rank: int, nranks: int) -> None:
    """The loop turns as without it, and a cancelled await leaves nothing behind."""
    from pynccl._comm import awaiting

    async def watch(work: pynccl.Work[Any]) -> None:
        alone, beside = [], []
        for _ in range(5):
            alone.append(await largest_gap(0.15))
            beside.append(await largest_gap(0.15, work))
            (waker,) = awaiting._wakers.values()
            assert not waker.waiting
        # The best of each, since other programs hold up the loop too.
        assert min(beside) < max(0.045, 2 * min(alone)), (alone, beside)

    with pynccl.init(timeout=30) as comm:
        if rank == 1:
            hear("watched")
            comm.send(np.ones(3), 0)
        else:
            work = comm.recv(np.zeros(3), 1, wait=False)
            asyncio.run(watch(work))
            tell("watched")
            np.testing.assert_array_equal(work.wait(), [1.0] * 3)
        comm.barrier()


@on_ranks(2)
def test_an_await_is_told_of_the_end(rank: int, nranks: int) -> None:
    """It does not depend on the looks that it takes from time to time."""
    from pynccl._comm import awaiting

    with pytest.MonkeyPatch.context() as patch, pynccl.init(timeout=30) as comm:
        for name in ("_LOOK", "_POLL"):
            patch.setattr(awaiting, name, 1000)
        if rank == 1:
            hear("awaits")
            comm.send(np.ones(3), 0)
        else:
            work = comm.recv(np.zeros(3), 1, wait=False)

            async def wait() -> None:
                asyncio.get_running_loop().call_later(0.1, tell, "awaits")
                await asyncio.wait_for(work, 20)

            asyncio.run(wait())
        comm.barrier()


@on_ranks(2)
def test_an_await_without_a_free_descriptor(rank: int, nranks: int) -> None:
    ignored: list[Any] = []
    importlib.import_module("pynccl._comm.awaiting")

    async def many(comm: Communicator) -> None:
        with contextlib.ExitStack() as taken:
            with contextlib.suppress(OSError):
                while True:
                    taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            for _ in range(5):
                await comm.all_reduce(np.ones(4), wait=False)

    with pytest.MonkeyPatch.context() as patch, pynccl.init(timeout=30) as comm:
        patch.setattr(sys, "unraisablehook", lambda given: ignored.append(str(given.exc_value)))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        asyncio.run(many(comm))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not ignored


@on_ranks(2)
def test_what_is_kept(rank: int, nranks: int) -> None:
    """Arrays of a dropped Work stay alive until the call has ended, and no longer."""
    with pynccl.init(timeout=30) as comm:
        x = np.ones(1000)
        gone = weakref.ref(x)
        if rank == 0:
            comm.all_reduce(x, wait=False)
            del x
            gc.collect()
            assert gone() is not None
            tell("dropped")
            for _ in range(2):
                comm.all_reduce(np.ones(1), wait=False).wait()
            assert gone() is None
        else:
            hear("dropped")
            comm.all_reduce(x)
            for _ in range(2):
                comm.all_reduce(np.ones(1))
            np.testing.assert_array_equal(x, 2.0)


@on_ranks(2)
def test_nothing_is_kept_after_a_wait(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        for complete in (lambda work: work.wait(), lambda work: asyncio.run(awaited(work))):
            growing, x = array.array("d", [1.0]), np.ones(100_000)
            gone = weakref.ref(x)
            complete(comm.all_reduce(growing, wait=False))
            complete(comm.all_reduce(x, wait=False))
            growing.append(1.0)
            del x
            gc.collect()
            assert gone() is None


async def awaited(work: pynccl.Work[Any]) -> None:
    await work


def failing(work: pynccl.Work[Any], by_await: bool) -> pynccl.NcclError:
    async def wait() -> None:
        await work

    with pytest.raises(pynccl.NcclError) as caught:
        asyncio.run(wait()) if by_await else work.wait()
    assert work.exception() is caught.value
    return caught.value


@on_ranks(3, check=False)
def test_the_peer_dies(rank: int, nranks: int) -> None:
    """The rank is named; what had completed before keeps its result."""
    comm = pynccl.init(timeout=20)
    x = np.ones(4)
    good = comm.all_reduce(x, wait=False)
    comm.barrier()
    together(nranks)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin, bad = time.monotonic(), comm.all_reduce(x, wait=False)
    error = failing(bad, by_await=rank == 0)
    assert isinstance(error, RankFailedError)
    assert error.ranks == [2]
    assert time.monotonic() - begin < 15
    assert good.wait() is x
    assert good.exception() is None
    small = comm.shrink(exclude=[2], abort=True)
    assert small.all_reduce(np.ones(1), wait=False).wait() == [2]
    small.destroy()


@on_ranks(2)
def test_mismatches_time_outs_and_the_end(rank: int, nranks: int) -> None:
    comm = pynccl.init()
    error = failing(comm.all_reduce(np.ones(3 + rank), wait=False), by_await=rank == 0)
    assert isinstance(error, CollectiveMismatchError)
    comm.abort()
    with pynccl.init(timeout=1) as comm:
        if rank == 0:
            work = comm.recv(np.ones(3), 1, wait=False)
            # The other rank's news may be older than the call.
            with pytest.raises(NcclTimeoutError, match=r"and up to \d\.\d s ago had called: rank 0: #1 recv"):
                work.wait(timeout=0.01)
            error = failing(work, by_await=True)
            assert isinstance(error, NcclTimeoutError | RankFailedError)
            assert "calls up to #1 recv on stream 0x" in str(error)
            tell("timed out")
        else:
            hear("timed out")
        comm.abort()
    comm = pynccl.init()
    work = comm.all_reduce(np.ones(3), wait=False)
    comm.destroy()
    np.testing.assert_array_equal(work.wait(), 2.0)
    comm = pynccl.init()
    differs = comm.all_reduce(np.ones(3 + rank), wait=False)
    with pytest.raises(CollectiveMismatchError):
        comm.destroy()
    assert isinstance(differs.exception(), CollectiveMismatchError)
    comm = pynccl.init()
    missing = comm.all_reduce(np.ones(3), wait=False) if rank == 0 else None
    comm.destroy()
    if missing is not None:
        assert "ncclAllReduce did not complete: the communicator was destroyed" in str(
            failing(missing, by_await=False)
        )
    comm = pynccl.init()
    work = comm.recv(np.ones(3), 1 - rank, wait=False)
    waiting = threading.Timer(0.3, comm.abort)
    waiting.start()
    failing(work, by_await=False)
    waiting.join()
    with pytest.raises(NcclInvalidUsage, match="cannot be used"):
        comm.all_reduce(np.ones(3), wait=False)


@on_ranks(1)
def test_wrong_arguments(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        x = np.ones(3)
        for value in (0, 1, None, "no"):
            with pytest.raises(TypeError, match=f"wait is {value!r}; expected True or False"):
                comm.all_reduce(x, wait=value)
        op = comm.prepare.all_reduce(x)
        with pytest.raises(ValueError, match=r"timeout is 3 with wait=False; expected it in Work\.wait"):
            comm.barrier(timeout=3, wait=False)
        with pytest.raises(ValueError, match="timeout is -1"):
            comm.barrier(wait=False).wait(-1)
        with pytest.raises(NcclInvalidUsage, match=r"wait=False inside pynccl\.group\(\) or prepare"):
            comm.prepare.all_reduce(x, wait=False)
        with pytest.raises(NcclInvalidUsage, match="wait=False inside"), pynccl.group():
            op(wait=False)
        comm.all_reduce(x)


def continues(rank: int, nranks: int) -> tuple[str, list[int]]:
    """Ranks 0 and 2 are stopped until rank 1 has given them up; each call of theirs is awaited by a Work."""
    comm, x = pynccl.init(timeout=2), np.ones(4)
    comm.all_reduce(x)
    if rank != 1 and os.fork() == 0:
        time.sleep(2.8)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    try:
        if rank != 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(1000):
            comm.all_reduce(x, op="max", wait=False).wait()
            time.sleep(0.01)
    except pynccl.NcclError as error:
        found = type(error).__name__, getattr(error, "ranks", [])
    together(nranks)
    comm.abort()
    return found


@pytest.mark.slow
def test_ranks_that_continue_name_the_rank_that_gave_them_up() -> None:
    """The library's error comes before the ranks have agreed on a cause; a Work waits for the cause."""
    results = run(3, continues, backend="cpu", env={"PYNCCL_CHECK": "1"}, timeout=40)
    assert results == [("RankFailedError", [1]), ("RankFailedError", [0, 2]), ("RankFailedError", [1])]
