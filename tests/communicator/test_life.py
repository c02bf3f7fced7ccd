"""A communicator's relatives and its end: split, shrink, grow, revoke, suspend, threads, signals."""

from __future__ import annotations

import _thread
import ctypes
import gc
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import hear, tell, together
from pynccl import (
    CollectiveMismatchError,
    Communicator,
    NcclError,
    NcclInvalidArgument,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclTimeoutError,
    UniqueId,
    capi,
    testing,
)
from pynccl._comm import core
from pynccl.testing import run
from ranks import on_ranks, single, total


def abort_together(comm: Communicator) -> None:
    """Abort when no rank is in a call any more: who is would be told of the abort."""
    together(comm.size, "abort")
    comm.abort()


@on_ranks(4)
def test_split(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        half = comm.split(rank % 2)
        assert half is not None
        assert (half.rank, half.size, half.device) == (rank // 2, 2, rank)
        assert half.all_gather(np.array([rank])).ravel().tolist() == [rank % 2, rank % 2 + 2]
        back = comm.split(7, key=-rank)
        assert back is not None
        assert back.rank == nranks - 1 - rank
        assert back.all_gather(np.array([rank])).ravel().tolist() == [3, 2, 1, 0]
        # Who gives no color takes part and joins nothing.
        some = comm.split(0 if rank else None, key=rank)
        assert (some is None) == (rank == 0)
        assert some is None or (some.size == 3 and total(some) == 3)
        named = comm.split(np.int64(1), config=pynccl.Config(commName="named", blocking=1))
        assert named is not None
        assert total(named) == 4
        grandchild = half.split(0)
        assert grandchild is not None
        assert total(grandchild) == 2
        color: Any
        for color, error in ((-1, ValueError), (1 << 31, ValueError), ("0", TypeError), (True, TypeError)):
            with pytest.raises(error, match=f"color is {color!r}; expected"):
                comm.split(color)
        with pytest.raises(TypeError, match="color is 'node'; expected an int .* number of their node"):
            comm.split("node")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="ncclConfig_t has no field comName"):
            comm.split(0, config={"comName": "x"})
        comm.barrier()
        # Destroying a parent leaves its children; aborting takes them along.
        half.destroy()
        assert total(grandchild) == 2
        abort_together(comm)
        assert back.closed and named.closed
        with pytest.raises(NcclInvalidUsage, match="cannot be used: it was aborted"):
            back.barrier()


def splits_without_one(rank: int, nranks: int, timeout: float | None) -> str:
    """The last rank destroys the communicator while the others split it."""
    if rank == nranks - 1:
        pynccl.init(timeout=timeout).destroy()
        return ""

    def split() -> None:
        # The other's report may come before init has ended here.
        with pynccl.init(timeout=timeout) as comm:
            comm.split(0)

    with pytest.raises(pynccl.CollectiveMismatchError) as caught:
        split()
    return str(caught.value)


@pytest.mark.parametrize("timeout", [None, 30])
def test_split_by_all_but_one(timeout: float | None) -> None:
    """The CPU library says so at once; with NCCL's own it is the time-out."""
    first, second, _ = testing.run(3, splits_without_one, timeout, backend="cpu", timeout=40)
    for text in (first, second):
        assert "waits in ncclCommSplit for rank 2, which has finalized, destroyed or dropped" in text


@on_ranks(4)
def test_shrink(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        exclude: Any
        for exclude, error, words in (
            ([rank], ValueError, rf"exclude is .*; expected at least one rank, and not this rank, {rank}"),
            ([], ValueError, r"exclude is \[\]; expected at least one rank"),
            ([4], ValueError, r"exclude is \[4\], with 4; expected ranks from 0 to 3"),
            ([0, "1"], TypeError, r"exclude is \[0, '1'\], with '1'; expected ints"),
        ):
            with pytest.raises(error, match=words):
                comm.shrink(exclude)
        if rank == 2:
            return
        small = comm.shrink([2])
        assert (small.rank, small.size) == ({0: 0, 1: 1, 3: 2}[rank], 3)
        assert total(small) == 3
        assert small.all_gather(np.array([rank])).ravel().tolist() == [0, 1, 3]
        assert not comm.closed
        small.destroy()


def shrinks_after_a_death(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=20)
    calls = [comm.prepare.all_reduce(np.zeros(1000)) for _ in range(1000)]

    def work() -> None:
        # The death may come before the barrier has ended on every rank.
        comm.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for call in calls:
            call()

    start = time.monotonic()
    with pytest.raises(NcclRemoteError, match="rank 1"):
        work()
    assert isinstance(comm.async_error(), NcclError | None)
    assert time.monotonic() - start < 10
    start = time.monotonic()
    with comm.shrink([1], abort=True) as small:
        assert time.monotonic() - start < 10
        assert comm.closed
        assert (small.rank, small.size) == (0 if rank == 0 else 1, 2)
        assert not small.closed
        assert total(small) == 2
    return "recovered"


def test_shrink_after_a_death() -> None:
    got = testing.run(3, shrinks_after_a_death, backend="cpu", check=False)
    assert [got[0], got[2]] == ["recovered"] * 2, got
    assert isinstance(got[1], testing.RankError)


@on_ranks(3)
def test_grow_and_join(rank: int, nranks: int) -> None:
    from pynccl.bootstrap import Store

    with Store(os.environ["PYNCCL_STORE"]) as store:
        if rank < 2:
            if rank == 0:
                store.set("first", bytes(pynccl.get_unique_id()))
            comm = Communicator(2, UniqueId(store.get("first")), rank, timeout=20)
            nranks_wanted: Any
            for nranks_wanted in (2, 1, 3.5, None):
                with pytest.raises(
                    (TypeError, ValueError), match=f"nranks is {nranks_wanted}; expected more than the pres"
                ):
                    comm.grow(nranks_wanted)
            uid = comm.get_unique_id() if rank == 0 else None
            if uid is not None:
                assert isinstance(uid, UniqueId)
                # A refused grow has not used it.
                with pytest.raises(ValueError, match="nranks is 1"):
                    comm.grow(1, comm.get_unique_id())
                assert comm.get_unique_id() == uid
                store.set("grown", bytes(uid))
            big = comm.grow(3, uid)
        else:
            comm = None
            with pytest.raises(ValueError, match="rank is 3 and nranks 3; expected 0 <= rank < nranks"):
                Communicator.join(3, bytes(128), 3)
            big = Communicator.join(3, store.get("grown"), 2, timeout=20)
        assert (big.rank, big.size) == (rank, 3)
        assert total(big) == 3
        big.barrier()
        together(nranks)
        if comm is not None:
            assert total(comm) == 2
            abort_together(comm)
            assert big.closed
        else:
            big.abort()


@on_ranks(2)
def test_revoke(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=20)
    assert total(comm) == nranks
    if rank == 0:
        # A call that can never complete is ended by another thread.
        threading.Timer(0.3, comm.revoke).start()
        start = time.monotonic()
        with pytest.raises(NcclError) as caught:
            comm.all_reduce(np.zeros(4))
        assert not isinstance(caught.value, NcclTimeoutError)
        assert time.monotonic() - start < 15
        tell("revoked")
    else:
        hear("revoked")
        comm.revoke()
    with pytest.raises(NcclError):
        comm.all_reduce(np.zeros(4))
    assert not comm.closed
    # A rank may come late: the revocation must not end the split of the others.
    time.sleep(2.5 * rank)
    again = comm.split(0, key=rank)
    assert again is not None
    assert total(again) == nranks
    abort_together(again)
    comm.abort()
    assert again.closed


@on_ranks(2)
def test_suspend_and_resume(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as comm:
        for _ in range(2):
            comm.suspend()
            with pytest.raises(NcclError):
                comm.all_reduce(np.zeros(4))
            comm.resume()
            assert total(comm) == nranks


@on_ranks(1)
def test_init_all(rank: int, nranks: int) -> None:
    for devices, places in ((3, [0, 1, 2]), ([4, 2], [4, 2]), (np.array([1]), [1])):
        ranks = pynccl.init_all(devices)  # type: ignore[arg-type]
        assert [comm.rank for comm in ranks] == list(range(len(places)))
        assert [comm.device for comm in ranks] == places
        assert {comm.size for comm in ranks} == {len(places)}
        with pynccl.group():
            results = [comm.all_reduce(np.full(2, comm.rank + 1.0)) for comm in ranks]
        assert all((got == sum(range(1, len(places) + 1))).all() for got in results)
        # Or in a thread each.
        threads = [threading.Thread(target=comm.barrier) for comm in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        # One after another: the first does not wait for those that this thread has still to finalize.
        for comm in ranks:
            comm.finalize()
        for comm in ranks:
            comm.destroy()


@on_ranks(1)
def test_ranks_of_init_all_that_one_thread_calls_in_turn(rank: int, nranks: int) -> None:
    x = np.ones(4)
    for call in (lambda comm: comm.all_reduce(x), lambda comm: comm.barrier(), lambda comm: comm.split(0)):
        ranks = pynccl.init_all(2, timeout=1)
        text = r"; expected a call of every rank: one thread .* of init_all into pynccl\.group\(\), or "
        with pytest.raises(NcclTimeoutError, match=text):
            call(ranks[0])
        for comm in ranks:
            comm.abort()


@on_ranks(1)
def test_a_forgotten_group(rank: int, nranks: int) -> None:
    """A rank of init_all that waits long without a time-out says for whom: perhaps for its own thread."""
    core.LONG = 0.5
    first, second = pynccl.init_all(2)
    x, y = np.ones(4), np.ones(4)
    late = threading.Timer(1.5, lambda: second.all_reduce(y))
    late.start()
    with redirect_stderr(io.StringIO()) as said:
        first.all_reduce(x)
    late.join()
    assert (x == 2).all() and (y == 2).all()
    text = r"pynccl: <.*> has waited 0.5 s in .* for rank 1; expected a call of every rank: one thread .*"
    assert re.fullmatch(text + "\n", said.getvalue())
    for comm in (first, second):
        comm.destroy()


@pytest.mark.slow
@on_ranks(1)
def test_a_thread_that_waits_for_its_own_call(rank: int, nranks: int) -> None:
    ranks = pynccl.init_all(2)
    with pytest.raises(
        CollectiveMismatchError, match="#1 for a call that the same thread makes only after it"
    ):
        ranks[0].all_reduce(np.ones(4))
    for comm in ranks:
        comm.abort()


def calls_once_more(rank: int, nranks: int) -> str:
    with pynccl.init(timeout=10) as comm:
        if rank == 0:
            with pytest.raises(CollectiveMismatchError) as caught, pynccl.Stream() as stream:
                comm.broadcast(np.ones(2), root=0, stream=stream)
        else:
            with pytest.raises(CollectiveMismatchError) as caught:
                comm.finalize()
        comm.abort()
        return str(caught.value)


def test_a_report_names_its_author_once() -> None:
    """A rank that learns of an error from the library passes on the author's name, also to the author."""
    for text in run(2, calls_once_more, backend="cpu", timeout=40):
        assert "rank 0 waits in Broadcast" in text
        assert text.count("reports: ") <= 1


@on_ranks(4)
def test_a_survivor_that_has_shrunk_may_close_the_parent(rank: int, nranks: int) -> None:
    """shrink(abort=True) does so at once, while the others still make their part of the new communicator."""
    with pynccl.init() as world:
        for _ in range(20):
            comm = world.split(0)
            comm.barrier()
            world.barrier()
            if rank == 3:
                comm.abort()
            else:
                with pytest.raises(NcclError):
                    comm.suspend()
                with comm.shrink([3], abort=True) as small:
                    assert total(small) == 3
            world.barrier()


def waits_in(rank: int, nranks: int, method: str) -> tuple[str, str]:
    """Rank 0 makes a call that rank 1 makes only after another, in which it waits for rank 0."""
    comm = pynccl.init()
    core.LONG = 0.5
    with redirect_stderr(io.StringIO()) as said:
        if rank == 0:
            threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            getattr(comm, method)(
                *{"split": (0,), "grow": (3,)}.get(method, ())
            ) if rank == 0 else comm.barrier()
        except (KeyboardInterrupt, NcclError) as error:
            comm.abort()
            return type(error).__name__, said.getvalue()
    return "", said.getvalue()


@pytest.mark.parametrize("method", ["split", "grow", "suspend"])
def test_a_call_that_no_other_rank_makes(method: str) -> None:
    """Without a time-out it waits; after a while it says for whom."""
    (kind, said), _ = run(2, waits_in, method, backend="cpu", timeout=40)
    assert kind == "KeyboardInterrupt"
    text = r"pynccl: <.*> has waited 0.5 s in ncclComm\w+ for rank 1; expected the same call on every rank\n"
    assert re.fullmatch(text, said)


@on_ranks(2)
def test_destroy_waits_for_a_late_rank(rank: int, nranks: int) -> None:
    """It completes the calls of this rank, and says after a while that it waits."""
    core.LONG = 0.5
    comm = pynccl.init()
    x, stream = np.ones(4), pynccl.Stream()
    if rank == 1:
        time.sleep(1.5)
    comm.all_reduce(x, stream=stream)
    with redirect_stderr(io.StringIO()) as said:
        comm.destroy()
    assert (x == 2).all()
    text = r"pynccl: <.*> has waited 0.5 s in ncclCommDestroy for other ranks; expected the same call .*\n"
    assert re.fullmatch(text if rank == 0 else "", said.getvalue())


DEADLOCKS: list[tuple[Callable[..., object], Callable[..., object]]] = [
    (lambda a, b: a.all_reduce(np.ones(4)), lambda a, b: b.all_reduce(np.ones(4))),
    (lambda a, b: a.all_reduce(np.ones(4)), lambda a, b: a.split(0)),
    (lambda a, b: a.barrier(), lambda a, b: a.suspend()),
    (lambda a, b: a.split(0), lambda a, b: b.split(0)),
]

# No thread of a rank waits for a call that the other rank's waiting thread would have to make.
NO_DEADLOCKS: list[tuple[Callable[..., object], Callable[..., object]]] = [
    (lambda a, b: a.barrier(), lambda a, b: (time.sleep(12), a.barrier())),
    (
        lambda a, b: beside(lambda: a.split(0), lambda: (time.sleep(12), b.barrier())),
        lambda a, b: (b.barrier(), a.split(0)),
    ),
    (
        lambda a, b: (a.split(0), b.barrier()),
        lambda a, b: beside(b.barrier, lambda: (time.sleep(12), a.split(0))),
    ),
    (
        lambda a, b: beside(a.barrier, lambda: (time.sleep(12), b.barrier())),
        lambda a, b: beside(b.barrier, lambda: (time.sleep(12), a.barrier())),
    ),
    (
        lambda a, b: beside_a_raw_thread(a.barrier, lambda: (time.sleep(12), b.barrier())),
        lambda a, b: beside_a_raw_thread(b.barrier, lambda: (time.sleep(12), a.barrier())),
    ),
    (lambda a, b: late_threads(), lambda a, b: None),
]


def beside(*bodies: Callable[[], object]) -> None:
    """Run the first body in this thread, the others in threads of their own."""
    # The name is the user's, too.
    threads = [threading.Thread(target=body, name="pynccl worker") for body in bodies[1:]]
    for thread in threads:
        thread.start()
    bodies[0]()
    for thread in threads:
        thread.join()


def beside_a_raw_thread(here: Callable[[], object], there: Callable[[], object]) -> None:
    """Run one body in this thread, the other in one that `threading` does not know."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (there(), done.set()), ())
    here()
    done.wait()


def late_threads() -> None:
    """Two threads of a process split a communicator each; the second is late."""
    first, second = pynccl.init_all(2)
    children: list[Communicator | None] = []
    split_late = threading.Timer(12, lambda: children.append(second.split(0)))
    beside(split_late.run, lambda: children.append(first.split(0)))
    assert len(children) == 2


def deadlocks(rank: int, nranks: int) -> str:
    """Each pair of ranks has two communicators, and makes two different calls."""
    world = pynccl.init()
    pair, index = divmod(rank, 2)
    a = world.split(pair)
    b = a.split(0)
    for comm in (a, b, world):
        comm.barrier()
    try:
        (DEADLOCKS + NO_DEADLOCKS)[pair][index](a, b)
    except CollectiveMismatchError as error:
        return str(error)
    finally:
        world.barrier()
        for comm in (b, a, world):
            comm.abort()
    return ""


@pytest.mark.slow
def test_deadlocks_without_a_time_out() -> None:
    said = run(2 * len(DEADLOCKS + NO_DEADLOCKS), deadlocks, backend="cpu", timeout=60)
    found = said[: 2 * len(DEADLOCKS)]
    waits = r"rank [01] waits in (AllReduce|AllGather|ncclCommSplit|ncclCommSuspend)\b.*"
    for text in found:
        assert re.search(f": deadlock: {waits}, {waits}: each for calls that the next has not made", text)
    assert "".join(said[len(found) :]) == ""


@on_ranks(1)
def test_every_rank_makes_its_own_unique_id(rank: int, nranks: int) -> None:
    core.LONG = 0.5
    threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with redirect_stderr(io.StringIO()) as said, pytest.raises(KeyboardInterrupt):
        pynccl.Communicator(2, pynccl.get_unique_id(), 0)
    assert (
        "rank 0 of 2 waits for other ranks; expected all of them in the call, with the same un"
        in said.getvalue()
    )
    with pytest.raises(
        NcclTimeoutError, match=r"missing rank 1.*; expected all 2 ranks .*, with the same unique id"
    ):
        pynccl.Communicator(2, pynccl.get_unique_id(), 0, timeout=0.5)


@on_ranks(1)
def test_of_many_ranks_that_wait_few_say_so(rank: int, nranks: int) -> None:
    core.LONG = 3.0

    def wait() -> None:
        pynccl.Communicator(2, pynccl.get_unique_id(), 0)

    with redirect_stderr(io.StringIO()) as said:
        for _ in range(16):
            threading.Thread(target=wait, daemon=True).start()
        time.sleep(5)
    assert 1 <= said.getvalue().count("waits for other ranks") <= 4


@on_ranks(2)
def test_two_ranks_in_each_process_end_one_after_another(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        shared = np.frombuffer(bytes(pynccl.get_unique_id()), np.uint8).copy()
        comm.broadcast(shared, root=0)
        capi.ncclGroupStart()
        made = [capi.ncclCommInitRank(2 * nranks, bytes(shared), 2 * rank + i) for i in range(2)]
        capi.ncclGroupEnd()
        for handle in map(int, made):
            capi.ncclCommFinalize(handle)
            capi.ncclCommDestroy(handle)


@on_ranks(2)
def test_non_blocking(rank: int, nranks: int) -> None:
    with pynccl.init(config={"blocking": 0}, timeout=30) as comm:
        x = np.ones(4)
        for _ in range(20):
            assert (comm.all_reduce(x.copy()) == nranks).all()
        op = comm.prepare.all_reduce(x, np.zeros(4))
        assert (pynccl.Plan([op, op])()[1] == nranks).all()
        with pynccl.group():
            gathered, summed = comm.all_gather(x), comm.all_reduce(x.copy())
        assert gathered.sum() == 4 * nranks
        assert summed.sum() == 4 * nranks
        with pynccl.Stream() as stream:
            y = comm.all_reduce(x.copy(), stream=stream)
            comm.synchronize(stream)
            assert (y == nranks).all()
        child = comm.split(0, config={"blocking": 0})
        assert child is not None
        assert total(child) == nranks
        child.finalize()
        child.destroy()
        comm.barrier()


@on_ranks(1)
def test_non_blocking_times_out_with_the_gil_released(rank: int, nranks: int) -> None:
    """The GIL is free while a non-blocking communicator is made, and the time-out holds."""
    ticks: list[int] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.02):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    with pytest.raises(
        NcclTimeoutError, match=r"(creating the communicator.*(within|longer than)|timed out after) 1 s"
    ):
        Communicator(2, pynccl.get_unique_id(), 0, config={"blocking": 0}, timeout=1)
    assert 0.9 < time.monotonic() - start < 15
    stop.set()
    thread.join()
    assert len(ticks) > 3


@on_ranks(2)
def test_another_bindings_communicator(rank: int, nranks: int) -> None:
    """A communicator that a ctypes binding made of the same library, in the same process."""

    class Id(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    from pynccl.bootstrap import Store

    nccl = ctypes.CDLL(pynccl.cpu_library())
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, Id, ctypes.c_int]
    uid, handle = Id(), ctypes.c_void_p()
    with Store(os.environ["PYNCCL_STORE"]) as store:
        if rank == 0:
            assert nccl.ncclGetUniqueId(ctypes.byref(uid)) == 0
            store.set("id", bytes(uid))
        uid = Id.from_buffer_copy(store.get("id"))
    assert nccl.ncclCommInitRank(ctypes.byref(handle), nranks, uid, rank) == 0
    assert handle.value is not None
    data = np.ones(5, np.float32)
    with Communicator.from_handle(handle.value) as comm:
        assert (comm.rank, comm.size, comm.handle) == (rank, nranks, handle.value)
        assert comm.all_reduce(data) is data
        assert (data == nranks).all()
        op = comm.prepare.all_reduce(data, op=comm.pre_mul_sum(0.5))
        op()
        assert (data == nranks).all()
        child = comm.split(0)
        assert child is not None
        assert total(child) == nranks
        child.destroy()
        # The other binding goes on with it in between.
        pointer = ctypes.c_void_p(data.ctypes.data)
        nccl.ncclAllReduce(pointer, pointer, ctypes.c_size_t(5), 7, 0, handle, None)
        comm.synchronize(0)
        assert (data == nranks**2).all()
    # Not ours: it lives on, and its owner gives it back.
    assert comm.closed
    count = ctypes.c_int()
    assert nccl.ncclCommCount(handle, ctypes.byref(count)) == 0
    assert count.value == nranks
    assert nccl.ncclCommDestroy(handle) == 0
    wrong: Any
    for wrong in (0, -1, None, "1", True, 1.5):
        with pytest.raises(
            (TypeError, ValueError), match="handle is .*; expected an ncclComm_t as a positive"
        ):
            Communicator.from_handle(wrong)


@on_ranks(2)
def test_children_of_children(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=20)
    family = [comm]
    for _ in range(3):
        child = family[-1].split(0, key=rank)
        assert child is not None
        family.append(child)
    gone = family.pop(1)
    ops = [one.prepare.all_reduce(np.ones(2)) for one in family]
    for op in ops:
        op()
    gone.destroy()
    del gone
    gc.collect()
    together(nranks)
    start = time.monotonic()
    if rank == 0:
        # Work that never completes holds nobody up.
        streams = [pynccl.Stream() for _ in family]
        for one, stream in zip(family, streams, strict=True):
            one.all_reduce(np.zeros(4), stream=stream)
    time.sleep(0.3 if rank == 0 else 0.9)
    comm.abort()
    assert time.monotonic() - start < 15
    assert comm.closed
    assert family[1].closed, "a grandchild whose own parent was destroyed"
    for op in ops:
        with pytest.raises(NcclInvalidUsage, match="cannot be used: it was aborted"):
            op()


@on_ranks(2)
def test_a_line_of_communicators(rank: int, nranks: int) -> None:
    """Each is made of the one before, which is then destroyed."""
    first = last = pynccl.init(timeout=20)

    def cores() -> int:
        gc.collect()
        return sum(type(one) is type(first._core) for one in gc.get_objects())

    before = cores()
    for _ in range(20):
        child = last.split(0, key=rank)
        assert child is not None
        if last is not first:
            last.destroy()
        last = child
    del child
    assert cores() == before + 1
    together(nranks)
    first.abort()
    assert last.closed


@on_ranks(2)
def test_abort_from_another_thread(rank: int, nranks: int) -> None:
    comm = pynccl.init()
    if rank == 0:
        threading.Timer(0.3, comm.abort).start()
        start = time.monotonic()
        with pytest.raises(NcclError):
            comm.all_reduce(np.zeros(3))
        assert time.monotonic() - start < 15
        assert comm.closed
        tell("aborted")
    else:
        hear("aborted")
        comm.abort()


@on_ranks(2)
def test_an_end_that_cannot_complete(rank: int, nranks: int) -> None:
    """Neither the end of `with` nor collection waits for ever for what a peer does not join."""
    together(nranks)
    comm = pynccl.init(timeout=2)
    if rank == 0:
        start = time.monotonic()
        comm.all_reduce(np.zeros(4), stream=pynccl.Stream())
        with pytest.raises(NcclError), comm:
            pass
        assert comm.closed
        assert time.monotonic() - start < 15
        tell("ended")
    else:
        hear("ended")
        comm.abort()


@on_ranks(2)
def test_two_threads(rank: int, nranks: int) -> None:
    """Every call of a second thread raises while the first is in one of any form."""
    with pynccl.init(timeout=20) as comm:
        x, op = np.zeros(4), comm.prepare.all_reduce(np.zeros(2))
        plan, done = pynccl.Plan([op, op]), []

        def grouped() -> None:
            with pynccl.group():
                comm.all_reduce(np.zeros(2))
                comm.all_reduce(np.zeros(2))

        for number, running in enumerate((lambda: comm.all_reduce(np.zeros(2)), op, plan, grouped), 1):
            comm.barrier()
            if rank == 1:
                hear(f"refused {number}")
                running()
                continue
            thread = threading.Thread(target=lambda running=running: done.append(running()))
            thread.start()
            while not comm._core.c.busy:
                time.sleep(0.001)
            for call in (
                lambda: comm.all_reduce(x),
                lambda: comm.broadcast(x),
                lambda: comm.all_gather(x),
                lambda: comm.send(x, 1),
                lambda: comm.all_to_all_v(x, [2, 2], np.zeros(4), [2, 2]),
                lambda: comm.split(0),
                lambda: comm.shrink([1]),
                lambda: comm.grow(3),
                comm.suspend,
                comm.resume,
                comm.barrier,
                comm.synchronize,
                comm.finalize,
                comm.destroy,
                op,
                plan,
                grouped,
            ):
                with pytest.raises(NcclInvalidUsage, match="rank 0 of 2 .* is in use by another thread"):
                    call()
            tell(f"refused {number}")
            thread.join()
            assert len(done) == number


@on_ranks(1)
def test_one_rank(rank: int, nranks: int) -> None:
    """One rank: everything works."""
    with single() as comm:
        child, small = comm.split(0), comm.split(None)
        assert child is not None
        assert small is None
        assert total(child) == 1
        child.destroy()
        comm.barrier()
        comm.suspend()
        comm.resume()
        assert comm.async_error() is None
        x = np.arange(4.0)
        for op in ("sum", "prod", "max", "min", "avg"):
            assert (comm.all_reduce(x.copy(), op=op) == x).all()
        assert (comm.all_reduce(x.copy(), op=comm.pre_mul_sum(3)) == 3 * x).all()
        with pytest.raises(TypeError, match="factor is <RedOp.MAX: 2>; expected a real number"):
            comm.pre_mul_sum(pynccl.RedOp.MAX)
        with pytest.raises(ValueError, match="expected at least one rank, and not this rank"):
            comm.shrink([0])
        assert comm.properties.nRanks == 1
        # NCCL refuses one without the other (src/init.cc: parseCommConfig).
        config = pynccl.Config(minCTAs=2, maxCTAs=4)
    with single(config=config) as comm:
        assert total(comm) == 1
    with pytest.raises(TypeError, match="has no field minCTA; expected minCTAs"):
        pynccl.Config(minCTA=2)  # type: ignore[call-arg]


# --- what an interrupt leaves -------------------------------------------------------------------------------


def issue(comm: Communicator, what: str, peer: int) -> None:
    """Make a call with arrays that nobody else holds."""
    x = np.ones(1000, np.float32)
    if what == "call":
        comm.all_reduce(x)
    elif what == "barrier":
        comm.barrier()
    elif what == "group":
        with pynccl.group():
            comm.send(x, peer)
            comm.recv(np.empty_like(x), peer)
    else:
        prepared = comm.prepare.all_reduce(x)
        (pynccl.Plan([prepared]) if what == "plan" else prepared)()


def interrupt_when_busy(comm: Communicator, seconds: float) -> None:
    """Interrupt this process's main thread so long after it has begun a call."""

    def interrupt() -> None:
        while not comm._core.c.busy:
            time.sleep(0.001)
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    threading.Thread(target=interrupt).start()


def goes_on(rank: int, nranks: int, what: str, seconds: float) -> float:
    """Interrupt a call that waits for the other rank, and use the communicator when that has come."""
    comm = pynccl.init()
    comm.barrier()
    if rank == 1:
        hear("interrupted")
        issue(comm, what, 0)
    else:
        interrupt_when_busy(comm, seconds)
        with pytest.raises(KeyboardInterrupt):
            issue(comm, what, 1)
        tell("interrupted")
        # The library still reads and writes them.
        assert sum(map(len, comm._core.in_flight.values())) == 1
        gc.collect()
        comm.synchronize()
    answer = total(comm)
    comm.destroy()
    return answer


# In the first wait of C alone, whose answer Python then never gets to see, and in a later one.
@pytest.mark.parametrize("seconds", [0.03, pytest.param(0.25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["call", "barrier", "group", "prepared", "plan"])
def test_an_interrupted_call_goes_on(what: str, seconds: float) -> None:
    assert testing.run(2, goes_on, what, seconds, backend="cpu", timeout=40) == [2.0, 2.0]


@on_ranks(1)
def test_synchronize_refuses_what_is_no_time(rank: int, nranks: int) -> None:
    with single() as comm:
        timeout: Any
        for timeout, error in (
            (-1, ValueError),
            (float("nan"), ValueError),
            ("1", TypeError),
            (True, TypeError),
        ):
            with pytest.raises(error, match=rf"timeout is {timeout!r}; expected seconds, 0 or more, or None"):
                comm.synchronize(timeout=timeout)
        comm.synchronize(timeout=np.float32(0.5))
        comm.synchronize(timeout=10**400)
        # With one rank in place there is nothing to do, but the stream is checked.
        with pytest.raises(NcclInvalidArgument, match="stream 0xdeadbeef was not created"):
            comm.all_reduce(np.ones(4), stream=0xDEADBEEF)
        comm.synchronize()
