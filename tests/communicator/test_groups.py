"""group(): what is recorded, when it runs, what an exception leaves, and who may use it at once."""

# The body of a group is what is tested here.
# ruff: noqa: PT012

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arrays
import pynccl
from arrays import device_over
from fake_cuda import create
from fake_nccl import Fake, source
from meeting import hear, tell
from pynccl import (
    Communicator,
    NcclError,
    NcclInvalidUsage,
    NotSupportedError,
    capi,
    group,
    testing,
)
from ranks import on_ranks


@pytest.mark.torch
@on_ranks(1, 2, 4)
def test_results_are_there_at_the_end(rank: int, nranks: int) -> None:
    n, me = nranks, rank
    with pynccl.init(timeout=30) as comm:
        # Once is enough for what takes long to import.
        for kind in arrays.KINDS if n == 2 else arrays.KINDS[:1]:
            data = [np.full(4, float(i + me)) for i in range(8)]
            with group() as opened:
                for one in data:
                    comm.all_reduce(kind.wrap(one))
                if n > 1:
                    assert all((one == i + me).all() for i, one in enumerate(data))
            assert [one[0] for one in data] == [n * i + n * (n - 1) / 2 for i in range(8)], kind.name
            assert isinstance(opened, pynccl.Group)
        # Every operation, with results made in the body, and arrays that nobody else holds.
        x = np.arange(2.0 * n) + 10 * me
        each = np.stack([np.arange(2.0 * n) + 10 * r for r in range(n)])
        recv = np.zeros(2 * n)
        with group():
            summed = comm.all_reduce(x + 0)
            reduced = comm.reduce(x + 0, np.zeros(2 * n), root=n - 1)
            copied = comm.broadcast(x + 0)
            gathered = comm.all_gather(x)
            part = comm.reduce_scatter(x)
            turned = comm.all_to_all(x)
            rooted = comm.gather(x)
            scattered = comm.scatter(x)
            comm.send(x, (me + 1) % n)
            assert comm.recv(recv, (me - 1) % n) is recv
            listed = comm.all_gather_v(x, np.zeros((n, 2 * n)), [2 * n] * n)
        assert (summed == each.sum(0)).all()
        assert (reduced is None) == (me != n - 1)
        assert reduced is None or (reduced == each.sum(0)).all()
        assert (copied == each[0]).all() and (gathered == each).all() and (listed == each).all()
        mine = slice(2 * me, 2 * me + 2)
        assert (part == each.sum(0)[mine]).all()
        assert (turned == each[:, mine].ravel()).all()
        assert (rooted is None) == (me != 0)
        assert rooted is None or (rooted == each).all()
        assert (scattered == each[0][mine]).all()
        assert (recv == each[me - 1]).all()
        with group():
            pass


@on_ranks(2)
def test_nesting_and_exceptions(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        a, b, c = np.ones(2), np.ones(2), np.ones(2)
        with group():
            comm.all_reduce(a)
            with group():
                comm.all_reduce(b)
                with group():
                    comm.all_reduce(c)
            assert (a == 1).all() and (b == 1).all() and (c == 1).all()
        assert (a == 2).all() and (b == 2).all() and (c == 2).all()
        for depth in range(3):
            with pytest.raises(KeyError), group():
                comm.all_reduce(a)
                if depth == 0:
                    raise KeyError
                with group():
                    comm.all_reduce(b)
                    if depth == 1:
                        raise KeyError
                raise KeyError
            # Dropped on all ranks alike: the next call meets the others' next call.
            assert (a == 2).all() and (b == 2).all()
            assert (comm.all_reduce(np.ones(1)) == 2).all()
        # A wrong argument is told where it is given, and drops the rest, too.
        with pytest.raises(ValueError, match="send is not contiguous"), group():
            comm.all_reduce(a)
            comm.all_reduce(np.zeros(4)[::2])
        assert (a == 2).all()
        one = group()
        with one:
            comm.all_reduce(a)
            with pytest.raises(NcclInvalidUsage, match=r"open already; call pynccl.group\(\)"), one:
                pass
        with one:
            comm.all_reduce(a)
        assert (a == 8).all()
        # Not what a group takes.
        for call, name in (
            (comm.barrier, "barrier"),
            (lambda: comm.split(0), "ncclCommSplit"),
            (lambda: comm.shrink([1 - rank]), "ncclCommShrink"),
            (lambda: comm.grow(3), "ncclCommGrow"),
        ):
            with (
                pytest.raises(
                    NcclInvalidUsage, match=rf"{name} inside pynccl.group\(\) or prepare: expected"
                ),
                group(),
            ):
                call()
        assert (comm.all_reduce(np.ones(1)) == 2).all()


@on_ranks(4)
def test_several_communicators(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as world:
        half = world.split(rank % 2, key=rank)
        back = world.split(0, key=-rank)
        assert half is not None
        assert back is not None
        a, b, c = np.full(2, rank + 1.0), np.full(2, rank + 1.0), np.zeros(2)
        with group():
            world.all_reduce(a)
            half.all_reduce(b)
            back.broadcast(np.full(2, float(rank)), c)
        assert (a == 10).all()
        assert (b == (4 if rank % 2 == 0 else 6)).all()
        assert (c == nranks - 1).all()
        half.destroy()
        back.destroy()
        # One process that drives several ranks can do so in no other way.
        ranks = pynccl.init_all(3)
        data = [np.full(2, float(r)) for r in range(3)]
        with group():
            results = [comm.all_gather(one) for comm, one in zip(ranks, data, strict=True)]
        assert all((got == np.arange(3.0)[:, None]).all() for got in results)
        # The part of one that was destroyed in the body cannot run.
        x = np.ones(2)
        with pytest.raises(NcclInvalidUsage, match="rank 0 of 1.*cannot be used: it was destroyed"), group():
            single = Communicator(1, pynccl.get_unique_id(), 0)
            single.all_reduce(x, op=single.pre_mul_sum(3))
            single.destroy()
        assert (x == 1).all()
        with group():
            for comm in ranks:
                comm.all_reduce(data[comm.rank])
        assert (data[0] == 3).all()
        for comm in ranks:
            comm.abort()


@on_ranks(2)
def test_streams(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as one, pynccl.Stream() as two:
        a, b, c = np.ones(2), np.ones(2), np.ones(2)
        comm.barrier()
        if rank == 1:
            hear("checked")
        with group():
            comm.all_reduce(a, stream=one)
            comm.all_reduce(b, stream=two)
        if rank == 0:
            assert not (one.query() or two.query())
            tell("checked")
        comm.synchronize()
        assert (a == 2).all() and (b == 2).all()
        # With a call that has no stream the group waits for that one.
        with group():
            comm.all_reduce(a, stream=one)
            comm.all_reduce(c)
        assert (c == 2).all()
        comm.synchronize(one)
        assert (a == 4).all()
        # NCCL's own group functions, for those who want them.
        capi.ncclGroupStart()
        comm.all_reduce(a)
        comm.all_reduce(b)
        assert (a == 4).all()
        capi.ncclGroupEnd()
        comm.synchronize()
        assert (a == 8).all() and (b == 4).all()


@on_ranks(2)
def test_arrays_live_until_the_group_has_run(rank: int, nranks: int) -> None:
    class Kept(np.ndarray[Any, Any]):
        pass

    with pynccl.init(timeout=30) as comm:
        gone = []
        with group():
            for _ in range(10):
                data = np.ones(1000).view(Kept)
                gone.append(weakref.ref(data))
                comm.all_reduce(data)
                comm.all_gather_v(data, np.zeros(2000), [1000] * 2)
            del data
            gc.collect()
            assert all(ref() is not None for ref in gone)
        gc.collect()
        assert all(ref() is None for ref in gone)
        with pytest.raises(KeyError), group():
            data = np.ones(1000).view(Kept)
            gone.append(weakref.ref(data))
            comm.all_reduce(data)
            del data
            raise KeyError
        gc.collect()
        assert gone[-1]() is None


@on_ranks(2)
def test_several_threads(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as world:
        comms = [world.split(0, key=rank) for _ in range(4)]
        streams = [pynccl.Stream() for _ in range(4)]
        failures: list[BaseException] = []
        opened = threading.Barrier(4, timeout=20)

        def work(index: int) -> None:
            try:
                comm, stream = comms[index], streams[index]
                assert comm is not None
                for round in range(20):
                    data = [np.full(8, float(index + i + round)) for i in range(5)]
                    with group():
                        for one in data:
                            comm.all_reduce(one, stream=stream)
                        # All four groups are open at once: what one thread records is its own.
                        opened.wait()
                        assert all((one == index + i + round).all() for i, one in enumerate(data))
                    comm.synchronize(stream)
                    assert [one[0] for one in data] == [nranks * (index + i + round) for i in range(5)]
            except BaseException as error:
                failures.append(error)
                opened.abort()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        with group():
            # Nor is a group of this thread in anybody's way.
            for thread in threads:
                thread.join()
        assert not failures, failures
        for comm, stream in zip(comms, streams, strict=True):
            assert comm is not None
            comm.destroy()
            stream.destroy()


@on_ranks(2, timeout=50)
def test_threads_in_another_order(rank: int, nranks: int) -> None:
    """Threads with a communicator each need not reach their calls in the same order on all ranks."""
    with pynccl.init(timeout=20) as world:
        comms = [world.split(0, key=rank) for _ in range(2)]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            comm = comms[index]
            assert comm is not None
            try:
                time.sleep(0.3 if index == rank else 0)
                with group():
                    data = comm.all_reduce(np.ones(3))
                assert (data == nranks).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def mismatch(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=30)
    try:
        with group():
            comm.all_reduce(np.zeros(2))
            comm.all_reduce(np.zeros(3 + rank))
    except NcclError as error:
        return type(error).__name__
    finally:
        comm.abort()
    return "nothing"


def test_mismatch_in_a_group_is_an_error() -> None:
    assert not {"nothing", "NcclTimeoutError"} & set(testing.run(2, mismatch, backend="cpu"))


# --- simulated groups ---


@on_ranks(2)
def test_simulation_issues_nothing(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        data = np.ones(1000)
        with group(simulate=True) as estimate:
            comm.all_reduce(data)
            with pytest.raises(NcclInvalidUsage, match="there is no estimate"):
                _ = estimate.estimated_microseconds
        assert isinstance(estimate.estimated_microseconds, float)
        assert estimate.estimated_microseconds >= 0
        assert (data == 1).all()
        with group() as real:
            comm.all_reduce(data)
        assert (data == 2).all()
        with pytest.raises(NcclInvalidUsage, match="there is no estimate"):
            _ = real.estimated_microseconds
        with (
            pytest.raises(
                NcclInvalidUsage, match="simulate=True inside an open group; expected it on the out"
            ),
            group(),
        ):
            comm.all_reduce(data)
            with group(simulate=True):
                pass
        assert (data == 2).all()
        with pytest.raises(KeyError), group(simulate=True) as dropped:
            comm.all_reduce(data)
            raise KeyError
        with pytest.raises(NcclInvalidUsage, match="there is no estimate"):
            _ = dropped.estimated_microseconds
        assert (comm.all_reduce(np.ones(1)) == 2).all()


def what_reaches_the_library(rank: int, nranks: int) -> None:
    fake = Fake()
    with create() as comm, create() as other:
        x, y = device_over(np.zeros(4, np.float32)), device_over(np.zeros(4, np.int8))
        fake.log()
        with group():
            comm.all_reduce(x)
            other.broadcast(y, root=1)
            with group():
                comm.send(x, 0, stream=0x20)
            assert fake.log() == []
        pointer = f"{x.data.ctypes.data:#x}"
        lines = [
            "AllReduce in place 4 type 7 op 0 stream 0",
            "Broadcast in place 4 type 0 root 1 stream 0",
            f"Send {pointer} 4 type 7 to 0 stream 0x20",
        ]
        assert fake.log() == ["start", *lines, "end"]
        with pytest.raises(KeyError), group():
            comm.all_reduce(x)
            raise KeyError
        assert fake.log() == []
        with group(simulate=True) as estimate:
            comm.all_reduce(x)
        assert fake.log() == ["start", lines[0], "simulate"]
        # NCCL's number is in microseconds already.
        assert estimate.estimated_microseconds == 12.5
        # One call of several parts is a group of its own.
        comm.all_gather_v(y, device_over(np.zeros(9, np.int8)), [5, 4])
        assert [line.split()[0] for line in fake.log()] == ["start", "Broadcast", "Broadcast", "end"]
        # A failing call ends the group, and the next one is not affected.
        for at in (0, 1):
            fake.fail(at, 5)
            words = rf"^ncclAllReduce: ncclInvalidUsage: .*rank 1 of 2.*\(call {at} of 3, counted from 0\)$"
            with pytest.raises(NcclInvalidUsage, match=words), group():
                for _ in range(3):
                    comm.all_reduce(x)
            assert fake.log() == ["start", *lines[:1] * (at + 1), "end"]
        fake.fail(-1, 0)
        fake.fail_end(3)
        with pytest.raises(pynccl.NcclInternalError, match="^ncclGroupEnd: ncclInternalError"), group():
            comm.all_reduce(x)
        with pytest.raises(pynccl.NcclInternalError, match="^ncclGroupSimulateEnd"), group(simulate=True):
            comm.all_reduce(x)
        fake.fail_end(0)
        with group():
            comm.all_reduce(x)


def test_what_reaches_the_library(fake: str) -> None:
    testing.run(1, what_reaches_the_library, backend=fake)


def too_old(rank: int, nranks: int) -> None:
    with create() as comm:
        x = device_over(np.zeros(4, np.float32))
        with (
            pytest.raises(
                NotSupportedError, match=r"ncclGroupSimulateEnd needs NCCL >= 2.22.3; loaded NCCL 2.19.3"
            ),
            group(simulate=True),
        ):
            comm.all_reduce(x)
        fake = Fake()
        fake.log()
        with group():
            comm.all_reduce(x)
        assert fake.log() == ["start", "AllReduce in place 4 type 7 op 0 stream 0", "end"]


def test_simulation_on_a_library_without_it(compile_library: Callable[..., str]) -> None:
    testing.run(1, too_old, backend=compile_library(source(21903), "libnccl.so.2"))


@on_ranks(2)
def test_a_group_that_is_dropped(rank: int, nranks: int) -> None:
    """A group that is dropped before its end, here or by another thread, leaves later calls alone."""
    with pynccl.init(timeout=30) as comm:
        data = np.ones(4)

        def body() -> Iterator[None]:
            with group():
                comm.all_reduce(data)
                yield

        opened = group()
        opened.__enter__()
        comm.all_reduce(data)
        del opened
        for _ in range(100):
            comm.all_reduce(data, op="max")
            comm.prepare.all_reduce(data, op="max")()
        started = body()
        next(started)
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="has not begun"):
            pool.submit(started.close).result()
        del started
        for _ in range(100):
            comm.all_reduce(data, op="max")
            comm.prepare.all_reduce(data, op="max")()
        assert (data == 1).all()
        comm.all_reduce(data)
        assert (data == nranks).all()


@on_ranks(2)
def test_an_interrupt_at_the_end_of_a_group(rank: int, nranks: int) -> None:
    """An exception that comes as the end of a group or a preparation begins ends the recording."""

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__exit__" and "groups.py" in frame.f_code.co_filename:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with pynccl.init(timeout=30) as comm:
        data = np.ones(4)
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt), group():
                comm.all_reduce(data)
                sys.setprofile(interrupt)
            for _ in range(20):
                comm.all_reduce(data, op="max")
                comm.prepare.all_reduce(data, op="max")()
        assert (data == 1).all()
