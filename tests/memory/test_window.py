"""Windows, puts and signals on arrays: where data and signals arrive, and how long the memory lives."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import warnings
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pynccl
from allocations import is_freed
from arrays import torch_over
from meeting import hear, tell, together
from pynccl import (
    CollectiveMismatchError,
    NcclInvalidUsage,
    NcclSystemError,
    NcclTimeoutError,
    RankFailedError,
    Window,
    capi,
)
from pynccl.testing import RankError, run
from ranks import on_ranks, reach_by

# Two contexts of signals; the default is one.
CONTEXTS = {"numRmaCtx": 2}


def numbers(rank: int, peer: int, count: int, dtype: Any = np.int64) -> np.ndarray:
    """Return what a rank puts to a peer; different for every pair of ranks and every place."""
    return (np.arange(count) * 7 + rank * 31 + peer * 3).astype(dtype)


def exchange(rank: int, nranks: int, like: str, count: int, transport: str) -> None:
    """Every rank puts to every rank, itself too, and then reads what the others have put."""
    reach_by(transport, rank)
    with pynccl.init(timeout=30) as comm:
        mine = (
            pynccl.zeros(nranks * count, np.int64) if like == "empty" else np.zeros(nranks * count, np.int64)
        )
        with comm.window(mine) as window:
            assert window.sizes == (nranks * count,) * nranks
            for _ in range(3):
                mine[:] = -1
                comm.barrier()
                for peer in range(nranks):
                    comm.put_signal(numbers(rank, peer, count), peer, window, offset=rank * count)
                comm.wait_signal(dict.fromkeys(range(nranks), 1))
                assert (mine.reshape(nranks, count) == [numbers(p, rank, count) for p in range(nranks)]).all()
                comm.barrier()
        assert window.closed
        assert window.array is None


@pytest.mark.parametrize("transport", ["direct", "shm", "tcp", "mixed"])
@pytest.mark.parametrize("like", ["empty", "numpy"])
@pytest.mark.parametrize(("nranks", "count"), [(1, 10), (2, 300_000), (4, 1000)])
def test_exchange(nranks: int, count: int, like: str, transport: str) -> None:
    run(nranks, exchange, like, count, transport, backend="cpu")


@on_ranks(2)
def test_dtypes(rank: int, nranks: int) -> None:
    peer = 1 - rank
    with pynccl.init(timeout=30) as comm:
        for dtype in (np.float32, np.int8, np.complex64, bool, np.int16, np.float16, ml_dtypes.bfloat16):
            mine = pynccl.zeros(10, dtype)
            with comm.window(mine) as window:
                comm.put_signal(numbers(rank, peer, 4, dtype), peer, window, offset=3)
                comm.wait_signal(peer)
                assert (mine[3:7] == numbers(peer, rank, 4, dtype)).all()
                assert not mine[:3].any()
                assert not mine[7:].any()
                comm.barrier()
                bytes_ = np.full(2 * mine.itemsize, 1, np.uint8)
                comm.put_signal(bytes_, peer, window, byte_offset=8 * mine.itemsize)
                comm.wait_signal(peer)
                assert (mine.view(np.uint8)[-len(bytes_) :] == 1).all()


@pytest.mark.torch
@on_ranks(2)
def test_arrays(rank: int, nranks: int) -> None:
    """Any array that a call takes, at any address, of a size of its own."""
    memory = np.zeros(100, np.float32)
    with pynccl.init(timeout=30) as comm:
        for mine in (
            np.zeros(100, np.float32)[3 + rank : 50],
            torch_over(np.zeros(40 + rank, np.float32)),
            pynccl.Buffer(memory.ctypes.data, 20 + 5 * rank, "float32"),
            pynccl.zeros(100, np.float32)[10 * rank : 60],
        ):
            with comm.window(mine) as window:
                assert window.sizes[rank] == (mine.count if isinstance(mine, pynccl.Buffer) else len(mine))
                other = window.sizes[1 - rank]
                comm.put_signal(np.full(2, 5 + rank, np.float32), 1 - rank, window, offset=other - 2)
                comm.wait_signal(1 - rank)
                seen = memory[: mine.count] if isinstance(mine, pynccl.Buffer) else np.asarray(mine)
                assert list(seen[-2:]) == [6 - rank] * 2
                assert not seen[:-2].any()


@on_ranks(1)
def test_waits_for_nobody(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        comm.wait_signal({peer: 1 for peer in range(nranks) if peer != rank})
        comm.prepare.wait_signal({})()


@on_ranks(4)
def test_a_barrier_of_signals(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30, config=CONTEXTS) as comm:
        for turn in range(20):
            with pynccl.group():
                for peer in range(nranks):
                    comm.signal(peer, turn % 3, context=turn % 2)
                comm.wait_signal(dict.fromkeys(range(nranks), 1), signal=turn % 3, context=turn % 2)


@on_ranks(2)
def test_signals_are_counted_and_separate(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30, config=CONTEXTS) as comm:
        if rank == 0:
            for signal, context in ((0, 0), (1, 0), (0, 1), (1, 0)):
                comm.signal(1, signal, context=context)
            comm.barrier()
            comm.signal(1, 1)
        else:
            comm.wait_signal(0, 1, 1)
            comm.wait_signal(0, context=1)
            comm.wait_signal(0)
            comm.barrier()
            comm.wait_signal(0, 2, 1)
        comm.barrier()


@on_ranks(2)
def test_order_with_other_calls(rank: int, nranks: int) -> None:
    """A put takes the result of the call before it, and a call after a wait reads what was put."""
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        mine, out = pynccl.zeros(1000, np.float32), np.ones(1000, np.float32)
        with comm.window(mine) as window:
            for turn in range(1, 6):
                out[:] = turn
                comm.all_reduce(out, stream=stream)
                comm.put_signal(out, 1 - rank, window, stream=stream)
                comm.wait_signal(1 - rank, stream=stream)
                comm.all_reduce(mine, stream=stream)
                comm.synchronize(stream)
                assert (mine == 4 * turn).all()


@on_ranks(2)
def test_prepared_calls_plans_and_groups(rank: int, nranks: int) -> None:
    peer = 1 - rank
    with pynccl.init(timeout=30) as comm:
        mine, out, more = pynccl.zeros(8, np.float32), np.zeros(4, np.float32), np.ones(3, np.float32)
        with comm.window(mine) as window:
            put = comm.prepare.put_signal(out, peer, window, offset=4)
            wait = comm.prepare.wait_signal(peer)
            both = pynccl.Plan([put, comm.prepare.all_reduce(more), wait])
            for turn in range(3):
                out[:] = turn
                put()
                wait()
                assert (mine[4:] == turn).all()
                comm.barrier()
                out[:] = -turn
                both()
                assert (mine[4:] == -turn).all()
                comm.barrier()
                with pynccl.group():
                    put()
                    comm.signal(peer, 1)
                    comm.wait_signal({peer: 1}, signal=1)
                    wait()
        text = "^ncclPutSignal cannot be called: its window was closed"
        for call, where in ((put, ""), (both, r" \(call 0 of 3, counted from 0\)")):
            with pytest.raises(NcclInvalidUsage, match=f"{text}{where}$"):
                call()
        comm.barrier()
        assert (comm.all_reduce(np.ones(3)) == 2).all()


@on_ranks(2)
def test_a_group_that_outlives_its_window(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        window = comm.window(pynccl.zeros(4))
        recorded = comm.prepare.put_signal(np.ones(4), 1 - rank, window)
        window.close()
        with pytest.raises(NcclInvalidUsage, match="its window was closed"), pynccl.group():
            recorded()
        comm.barrier()


# --- the memory of peers ------------------------------------------------------------------------------------


@on_ranks(2)
def test_peer(rank: int, nranks: int) -> None:
    peer = 1 - rank
    comm = pynccl.init(timeout=30)
    mine = pynccl.zeros((4, 5), np.float32)
    window = comm.window(mine)
    other = window.peer(peer)
    assert other.shape == (4, 5)
    assert other.dtype == np.float32
    other[2, 3] = 10 + rank
    comm.barrier()
    assert mine[2, 3] == 10 + peer
    window.peer(rank)[0, 0] = 1
    assert mine[0, 0] == 1
    comm.barrier()
    window.close()
    # Also after the end of the communicator, and of its owner's array.
    other[0, 1] = 3
    together(nranks, "stored")
    assert mine[0, 1] == 3
    comm.abort()
    del mine, window
    gc.collect()
    together(nranks, "freed")
    part = other[0]
    del other
    assert part[1] == 3


@pytest.mark.torch
@on_ranks(2)
def test_peers_of_other_sizes_and_libraries(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        with comm.window(pynccl.zeros((2, 3 + rank), np.int32)) as window:
            assert window.peer(1 - rank).shape == (2 * (4 - rank),)
        tensor = torch_over(pynccl.zeros(6, np.float32))
        with comm.window(tensor) as window:
            assert type(window.peer(1 - rank)) is type(tensor)
            assert window.peer(1 - rank).shape == (6,)


@pytest.mark.parametrize(("like", "transport"), [("empty", "tcp"), ("numpy", "direct")])
@on_ranks(2)
def test_unreachable_peers(rank: int, nranks: int, like: str, transport: str) -> None:
    reach_by(transport, rank)
    with pynccl.init(timeout=30) as comm:
        mine = pynccl.zeros(10) if like == "empty" else np.zeros(10)
        with comm.window(mine) as window:
            with pytest.raises(ValueError, match=f"the memory of rank {1 - rank} in .* cannot be reached"):
                window.peer(1 - rank)
            assert (window.peer(rank) == 0).all()


@on_ranks(2)
def test_array_without_descriptor(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        mine = pynccl.zeros(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with comm.window(mine) as window:
            if rank == 1:
                assert (window.peer(0) == 0).all()
            else:
                with pytest.raises(ValueError, match="made while its process had file descriptors to spare"):
                    window.peer(1)


@on_ranks(2)
def test_peer_without_descriptors(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        mine = pynccl.zeros(10)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        window = comm.window(mine)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if rank == 1:
            with pytest.raises(NcclSystemError, match=r"memory of rank 0 .*: Too many open files"):
                window.peer(0)
        else:
            assert (window.peer(1) == 0).all()
        # Puts do not need the mapping.
        comm.put_signal(np.full(10, 5.0), 1 - rank, window)
        comm.wait_signal(1 - rank)
        assert (mine == 5).all()
        window.close()


# --- wrong arguments ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments(rank: int, nranks: int) -> None:
    x, y = pynccl.zeros(10, np.float32), np.ones(4, np.float32)
    with pynccl.init(timeout=30) as comm, comm.split(0) as child, child.window(np.zeros(4)) as foreign:
        with comm.window(x) as w:
            put = comm.put_signal
            wrong: list[tuple[Any, type[Exception], str]] = [
                (lambda: put(y, 2, w), ValueError, "peer is 2; expected 0 <= peer < 2"),
                (lambda: put(y, True, w), TypeError, "peer is True; expected an int"),
                (lambda: put(y, 0, None), TypeError, "window is None; expected a Window"),
                (lambda: put(y, 0, foreign), ValueError, "of another communicator; expected one of <pyn"),
                (
                    lambda: put(y, 0, w, 7),
                    ValueError,
                    "offset is 7 for 4 elements; the window of rank 0 has 10",
                ),
                (lambda: put(y, 0, w, -1), ValueError, "offset is -1 for 4 elements"),
                (lambda: put(y, 0, w, 1.5), TypeError, "offset is 1.5; expected an int"),
                (lambda: put(y, 0, w, 1 << 70), ValueError, "offset is 1180591620717411303424"),
                (lambda: put(y, 0, w, byte_offset=25), ValueError, "byte_offset is 25 for 16 bytes"),
                (lambda: put(y, 0, w, 1, byte_offset=2), TypeError, "expected one of them"),
                (
                    lambda: put(y.astype(int), 0, w),
                    TypeError,
                    "dtype int64; expected the dtype of the window",
                ),
                (lambda: put(np.ones(11, np.float32), 0, w), ValueError, "offset is 0 for 11 elements"),
                (lambda: put(y, 0, w, signal=-1), ValueError, "signal is -1; expected 0 <= signal"),
                (lambda: put(y, 0, w, signal=1 << 40), ValueError, "signal is 1099511627776"),
                (lambda: put(y, 0, w, signal="a"), TypeError, "signal is 'a'; expected an int"),
                (lambda: put(y, 0, w, context=1.0), TypeError, "context is 1.0; expected an int"),
                (lambda: put(y[::2], 0, w), ValueError, "array is not contiguous"),
                (lambda: comm.signal(5), ValueError, "peer is 5"),
                (lambda: comm.signal(0, 99), pynccl.NcclInvalidArgument, "sigIdx is 99, expected 0 to"),
                (lambda: comm.wait_signal(0, 0), ValueError, "count is 0 for rank 0; expected 1 <= count"),
                (lambda: comm.wait_signal(0, 1 << 31), ValueError, "count is 2147483648"),
                (lambda: comm.wait_signal({0: 1, 3: 1}), ValueError, "peer is 3"),
                (lambda: comm.wait_signal({0: "a"}), TypeError, "count is 'a'; expected an int"),
                (
                    lambda: comm.wait_signal({0: 1}, 2),
                    TypeError,
                    "expected none, since peer gives the counts",
                ),
                (lambda: comm.wait_signal([0]), TypeError, r"peer is \[0\]; expected a rank, or a dict"),
                (lambda: pickle.dumps(w), TypeError, "Window cannot be copied or pickled"),
                (lambda: w.peer(2), ValueError, "rank is 2; expected 0 <= rank < 2"),
                (lambda: w.peer("a"), TypeError, "rank is 'a'; expected an int"),
                (lambda: comm.window(np.zeros(0)), ValueError, r"array has no elements; .* \(rank . of 2\)"),
                (lambda: comm.window(np.zeros(9)[::2]), ValueError, "array is not contiguous"),
                (lambda: comm.window(3), TypeError, "array is of type int"),
                (lambda: comm.window(x, symmetric=1), TypeError, "symmetric is 1; expected True or False"),
            ]
            for call, kind, text in wrong:
                with pytest.raises(kind, match=text):
                    call()
            frozen = np.zeros(4)
            frozen.flags.writeable = False
            with pytest.raises(ValueError, match="array is read-only"):
                comm.window(frozen)
        with pytest.raises(NcclInvalidUsage, match=r"Window 1, float32, made at .*, closed> cannot be used"):
            put(y, 0, w)
        for use in (lambda: w.peer(0), w.__enter__, lambda: w.handle):
            with pytest.raises(NcclInvalidUsage, match="cannot be used: it was closed"):
                use()
        w.close()
        assert not x.any()
        comm.barrier()


@on_ranks(2)
def test_where_it_is_refused(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=30)
    window = comm.window(pynccl.zeros(10))
    with pynccl.group():
        with pytest.raises(NcclInvalidUsage, match=r"ncclCommWindowRegister inside pynccl.group\(\)"):
            comm.window(pynccl.zeros(10))
        with pytest.raises(NcclInvalidUsage, match=r"ncclCommWindowDeregister inside pynccl.group\(\)"):
            window.close()
    capi.ncclGroupStart()
    try:
        with pytest.raises(NcclInvalidUsage, match="ncclCommWindowRegister between ncclGroupStart"):
            comm.window(pynccl.zeros(10))
    finally:
        capi.ncclGroupEnd()
    window.close()
    comm.destroy()
    with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
        comm.window(pynccl.zeros(10))


@on_ranks(2)
def test_symmetric_windows(rank: int, nranks: int) -> None:
    array = pynccl.zeros(100)
    with pynccl.init(timeout=30) as comm, comm.split(0) as child:
        with comm.window(array, symmetric=True) as window, comm.window(array):
            assert window.symmetric
            assert "symmetric float64" in repr(window)
            line = repr(window).rpartition("made at ")[2].rstrip(">")
            with pytest.raises(ValueError, match=f"shares memory with the symmetric window made at {line}"):
                comm.window(array[50:], symmetric=True)
            with child.window(array, symmetric=True):
                pass
        with comm.window(array, symmetric=True):
            comm.barrier()


# --- ranks that differ --------------------------------------------------------------------------------------


@on_ranks(3)
def test_windows_that_differ(rank: int, nranks: int) -> None:
    odd = rank == 2
    with pynccl.init(timeout=30) as comm:
        cases: list[tuple[Any, bool, str, str]] = [
            (pynccl.zeros(8, np.int32 if odd else np.float32), False, "float32, 32 bytes", "int32, 32 bytes"),
            (pynccl.zeros(9 if odd else 8), True, "float64, 64 bytes, symmetric", "float64, 72 bytes, symm"),
            (pynccl.zeros(8), odd, "float64, 64 bytes", "float64, 64 bytes, symmetric"),
            (pynccl.zeros(20)[1 if odd else 0 :][:4], True, "32 bytes", "32 bytes from byte 8 of a page"),
        ]
        for array, symmetric, usual, other in cases:
            with pytest.raises(CollectiveMismatchError, match="the ranks registered different windows") as e:
                comm.window(array, symmetric=symmetric)
            lines = str(e.value).splitlines()[1:]
            assert [line.startswith(f"  rank {r}: window ") for r, line in enumerate(lines)] == [True] * 3
            assert usual in lines[0]
            assert usual in lines[1]
            assert other in lines[2]
        with comm.window(pynccl.zeros(8 + rank)) as window:
            assert window.sizes == (8, 9, 10)
        one, two = comm.window(pynccl.zeros(4)), comm.window(pynccl.zeros(4))
        with pytest.raises(CollectiveMismatchError, match="the ranks closed different windows") as e:
            (two if odd else one).close()
        assert str(e.value).splitlines()[1:] == [f"  rank {r}: window {6 + (r == 2)}" for r in range(3)]
        assert not one.closed
        one.close()
        two.close()


@pytest.mark.parametrize("what", ["window", "close"])
@on_ranks(2)
def test_a_window_against_an_all_gather_of_its_size(rank: int, nranks: int, what: str) -> None:
    comm = pynccl.init(timeout=5)
    window = comm.window(pynccl.zeros(4)) if what == "close" else None
    # The calls of a window gather a few int64 numbers.
    words = np.arange(1 if window else 5)

    def call() -> object:
        if rank:
            return comm.all_gather(words)
        return window.close() if window else comm.window(pynccl.zeros(4))

    with pytest.raises(CollectiveMismatchError, match="AllGather"):
        call()
    comm.abort()


@pytest.mark.parametrize("check", [False, True])
@on_ranks(2)
def test_a_window_against_another_call(rank: int, nranks: int, check: bool) -> None:
    if check:
        pynccl.check_mode(True)
    comm = pynccl.init(timeout=5)
    with pytest.raises(CollectiveMismatchError) as caught:
        comm.window(pynccl.zeros(4)) if rank else comm.all_reduce(np.zeros(4))
    if check:
        assert "rank 1: window" in str(caught.value)
        assert "rank 0: all_reduce(float64, 4, sum)" in str(caught.value)
    comm.abort()


@on_ranks(3)
def test_check_mode(rank: int, nranks: int) -> None:
    """One-sided calls have no counterpart that could be compared; the others are compared as ever."""
    pynccl.check_mode(True)
    comm = pynccl.init(timeout=30)
    window = comm.window(pynccl.zeros(4))
    if rank == 0:
        comm.put_signal(np.ones(4), 1, window)
    elif rank == 1:
        comm.wait_signal(0)
    with pynccl.group():
        comm.signal((rank + 1) % 3)
        comm.all_reduce(np.ones(2))
        comm.wait_signal((rank - 1) % 3)
    with pytest.raises(CollectiveMismatchError, match="the ranks called different things"):
        comm.all_reduce(np.ones(3 if rank else 2))
    comm.abort()


def missing(rank: int, nranks: int) -> str:
    comm = pynccl.init(timeout=2)
    if rank == 0:
        hear("late")
        return ""
    try:
        comm.window(pynccl.zeros(4))
    except pynccl.NcclError as error:
        tell("late")
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_does_not_come() -> None:
    texts = run(2, missing, backend="cpu")
    assert texts[1].startswith("NcclTimeoutError: ncclCommWindowRegister did not complete within 2 s")
    assert texts[1].endswith("all ranks respond, and have called: rank 0: nothing, rank 1: #1 window")


def unsignalled(rank: int, nranks: int, how: str) -> str:
    comm = pynccl.init(timeout=2, config=CONTEXTS)
    window = comm.window(pynccl.zeros(4))
    if rank == 0:
        comm.put_signal(np.ones(4), 1, window, signal=3)
        comm.signal(1, 3)
        comm.signal(1, 2)
        hear("late")
        comm.abort()
        return ""
    comm.wait_signal(0, signal=2)
    try:
        if how == "call":
            comm.wait_signal(0, 5, 3)
        elif how == "group":
            with pynccl.group():
                comm.wait_signal({0: 5}, signal=3)
                comm.wait_signal(0, signal=2, context=1)
        elif how == "plan":
            waits = [comm.prepare.wait_signal(0, 5, 3), comm.prepare.wait_signal(0, 1, 3)]
            pynccl.Plan(waits)()
        else:
            with pynccl.Stream() as stream:
                comm.wait_signal(0, 5, 3, stream=stream)
                comm.synchronize()
    except NcclTimeoutError as error:
        return str(error)
    finally:
        comm.abort()
        tell("late")
    return "no error"


@pytest.mark.parametrize(
    "how", ["call", "stream", *(pytest.param(how, marks=pytest.mark.slow) for how in ("group", "plan"))]
)
def test_a_signal_that_never_comes(how: str) -> None:
    text = run(2, unsignalled, how, backend="cpu")[1]
    assert "it waits for signal 3 from rank 0: 5 expected, 2 arrived; " in text
    assert ("it waits for signal 2 of context 1 from rank 0: 1 expected, 0 arrived" in text) == (
        how == "group"
    )
    assert "rank 0: #4 signal, rank 1: #" in text


def dying(rank: int, nranks: int, how: str) -> str:
    comm = pynccl.init(timeout=30)
    window = comm.window(pynccl.zeros(4))
    together(nranks)
    if rank == 1:
        os._exit(1)

    def put() -> None:
        while True:
            comm.put_signal(np.ones(4), 1, window)

    calls = {
        "signal": lambda: comm.wait_signal(1),
        "close": window.close,
        "put": put,
        "window": lambda: comm.window(pynccl.zeros(4)),
    }
    with pytest.raises(RankFailedError, match="rank 1 ") as caught:
        calls[how]()
    assert caught.value.ranks == [1], caught.value
    # The end of the communicator closes it.
    with pytest.raises(RankFailedError):
        window.close()
    assert not window.closed
    comm.abort()
    assert window.closed
    return "ended"


@pytest.mark.parametrize("how", ["signal", "close", "put", "window"])
def test_a_rank_that_dies(how: str) -> None:
    first, second, third = run(3, dying, how, backend="cpu", check=False)
    assert first == "ended", first
    assert third == "ended", third
    assert isinstance(second, RankError)


# --- how long the memory lives ------------------------------------------------------------------------------


@on_ranks(2)
def test_the_window_keeps_its_memory(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        array = pynccl.zeros(1000, np.float32)
        ptr, alive = array.ctypes.data, weakref.ref(array)
        window = comm.window(array)
        del array
        gc.collect()
        assert alive() is not None
        put = comm.prepare.put_signal(window.array, 1 - rank, window)
        comm.put_signal(np.ones(4, np.float32), 1 - rank, window, 20)
        comm.wait_signal(1 - rank)
        assert (window.array[20:24] == 1).all()
        window.close()
        assert alive() is not None, "the prepared call has it"
        del put
        assert alive() is None
        assert is_freed(ptr)
        moving = bytearray(100)
        with comm.window(moving), pytest.raises(BufferError):
            moving.extend(bytes(1 << 20))
        moving.extend(bytes(1 << 20))


def left(record: list[warnings.WarningMessage]) -> list[str]:
    """Return the lines of the windows that the warnings name."""
    texts = [str(one.message) for one in record if one.category is ResourceWarning]
    found = [text for text in texts if "window made at" in text]
    return [text.partition("made at ")[2].removesuffix(" was never closed") for text in found]


def noting(name: str, seen: list[str]) -> Any:
    """Return a C function that also notes its name."""
    function = getattr(capi, name)

    def call(*args: Any) -> Any:
        seen.append(name)
        return function(*args)

    return call


def made_at(window: Window) -> str:
    return repr(window).rpartition("made at ")[2].rstrip(">")


@on_ranks(2)
def test_closing_a_communicator_closes_them(rank: int, nranks: int) -> None:
    names = ("ncclCommWindowDeregister", "ncclCommDeregister", "ncclCommFinalize", "ncclCommDestroy")
    for end in ("with", "destroy", "finalize"):
        with pytest.MonkeyPatch.context() as patch:
            seen: list[str] = []
            comm = pynccl.init(timeout=30)
            for name in names:
                patch.setattr(capi, name, noting(name, seen))
            arrays = [pynccl.zeros(10), pynccl.zeros(10)]
            alive = [weakref.ref(array) for array in arrays]
            windows = [comm.window(array) for array in arrays]
            comm.register(arrays[0])
            lines = [made_at(window) for window in windows]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if end == "with":
                    with comm:
                        pass
                else:
                    getattr(comm, end)()
                    assert all(window.closed for window in windows)
                    comm.destroy()
            assert seen[:3] == [names[0], names[0], names[1]]
            assert left(caught) == lines
            del arrays
            assert [each() for each in alive] == [None, None]
            windows[0].close()


@on_ranks(2)
def test_an_error_leaves_the_window_to_the_communicator(rank: int, nranks: int) -> None:
    """A rank with an exception does not wait for the others, which may not come."""
    made: list[Window] = []

    def fail() -> None:
        with pynccl.init(timeout=30) as comm, comm.window(pynccl.zeros(10)) as window:
            made.append(window)
            together(nranks)
            if rank == 0:
                raise KeyError
            comm.barrier()

    with pytest.raises(RankFailedError if rank else KeyError, match="rank 0 aborted" if rank else ""):
        fail()
    assert made[0].closed


@on_ranks(2)
def test_abort_closes_them(rank: int, nranks: int) -> None:
    array = pynccl.zeros(100)
    alive = weakref.ref(array)
    comm = pynccl.init(timeout=30)
    window = comm.window(array)
    together(nranks)
    comm.abort()
    assert window.closed
    window.close()
    del array
    assert alive() is None


@on_ranks(2)
def test_suspend_and_resume(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, comm.window(pynccl.zeros(4)) as window:
        comm.suspend()
        with pytest.raises(NcclInvalidUsage, match="suspended"):
            comm.put_signal(np.ones(4), 1 - rank, window)
        comm.resume()
        comm.put_signal(np.ones(4), 1 - rank, window)
        comm.wait_signal(1 - rank)
        assert (window.array == 1).all()


@on_ranks(2)
def test_close_waits_for_puts_in_flight(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        mine = pynccl.zeros(1 << 16)
        window = comm.window(mine)
        if rank == 0:
            # The stream runs the put after the receive.
            comm.recv(np.zeros(4), 1, stream)
            comm.put_signal(np.ones(1 << 16), 1, window, stream=stream)
            tell("issued")
        else:
            hear("issued")
            comm.send(np.zeros(4), 0)
        window.close()
        if rank == 1:
            assert (mine == 1).all()
            comm.wait_signal(0)


@pytest.mark.parametrize("transport", ["direct", "shm", "tcp"])
@on_ranks(2)
def test_close_comes_after_the_puts_of_all_ranks(rank: int, nranks: int, transport: str) -> None:
    reach_by(transport, rank)
    with pynccl.init(timeout=30) as comm:
        x, y = np.zeros(4 << 20, np.int64), np.full(4 << 20, rank)
        for _ in range(3):
            window = comm.window(x)
            comm.put_signal(y, 1 - rank, window)
            window.close()
            assert (x == 1 - rank).all()
            comm.wait_signal(1 - rank)
            comm.barrier()


@on_ranks(2)
def test_a_child_reads_the_memory_of_peers(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, comm.window(mine := pynccl.zeros(10)) as window:
        mine[:] = rank
        comm.barrier()
        view = window.peer(1 - rank)
        child = os.fork()
        if not child:
            os._exit(0 if (view == 1 - rank).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        comm.barrier()


@on_ranks(1)
def test_a_forked_child(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, comm.window(pynccl.zeros(10)) as window:
        view = window.peer(0)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = 0 if window.closed else 2
                del view
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        view[0] = 1
        assert window.array[0] == 1


@on_ranks(2)
def test_non_blocking(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30, config={"blocking": 0}) as comm, comm.window(pynccl.zeros(4)) as window:
        comm.put_signal(np.ones(4), 1 - rank, window)
        comm.wait_signal(1 - rank)
        assert (window.array == 1).all()


@on_ranks(2)
def test_records(rank: int, nranks: int) -> None:
    with (
        pynccl.init(timeout=30, config=CONTEXTS) as comm,
        comm.window(pynccl.zeros(10, np.float32)) as window,
    ):
        comm.put_signal(np.ones(4, np.float32), 1 - rank, window, 2, 3)
        comm.signal(1 - rank, 1, context=1)
        comm.wait_signal(1 - rank, 1, 3)
        pynccl.Plan([comm.prepare.wait_signal(1 - rank, 1, 1, context=1), comm.prepare.signal(rank, 2)])()
        comm.wait_signal(rank, 1, 2)
        records = comm.trace()[1:]
        assert [(r.call, r.seq) for r in records if r.seq] == [("window", 1)]
        shown = [(r.call, r.peer, r.signal, r.context, r.offset, r.signals, r.count) for r in records[1:]]
        assert shown == [
            ("put_signal", 1 - rank, 3, 0, 8, None, 4),
            ("signal", 1 - rank, 1, 1, None, None, None),
            ("wait_signal", 1 - rank, 3, 0, None, 1, None),
            ("wait_signal", 1 - rank, 1, 1, None, 1, None),
            ("signal", rank, 2, 0, None, None, None),
            ("wait_signal", rank, 2, 0, None, 1, None),
        ]
        assert all(r.state == "done" for r in records)
        assert records[1].dtype == "float32"
