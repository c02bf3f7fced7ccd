"""Streams, events and devices of the library that is loaded."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import hear, tell, until
from pynccl import Communicator, NcclInvalidArgument, NcclInvalidUsage, NcclTimeoutError, testing
from ranks import on_ranks, single


@on_ranks(2)
def test_streams_and_events(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as comm:
        stream, event = pynccl.Stream(), pynccl.Event()
        assert stream.handle > 2
        assert stream.__cuda_stream__() == (0, stream.handle)
        assert event.query()
        for wrong in (None, "a"):
            with pytest.raises(TypeError, match="; expected a stream handle as an int, 0 or more"):
                event.record(wrong)
        comm.barrier()
        if rank == 1:
            hear("checked")
        x = comm.all_reduce(np.ones(3), stream=stream)
        event.record(stream)
        if rank == 0:
            assert not stream.query()
            assert not event.query()
            for wait, name in ((stream.synchronize, "Stream"), (event.synchronize, "Event")):
                with pytest.raises(NcclTimeoutError, match=f"{name}.synchronize took longer than 0.1 s"):
                    wait(0.1)
            tell("checked")
        event.synchronize(10)
        assert (x == nranks).all()
        stream.synchronize(10)
        assert stream.query() and event.query()
        stream.synchronize(0)
        for wait in (stream.synchronize, event.synchronize):
            with pytest.raises(ValueError, match="timeout is -1; expected seconds, 0 or more, or None"):
                wait(-1)
        assert repr(stream) == f"<pynccl.Stream {stream.handle:#x}>"
        comm.synchronize()
        stream.destroy()
        stream.destroy()
        event.destroy()
        how = r"was destroyed, by destroy\(\) or at the end of its `with` block; expected a live one"
        with pytest.raises(ValueError, match=f"this stream {how}"):
            _ = stream.handle
        with pytest.raises(ValueError, match=f"this event {how}"):
            event.query()
        with pytest.raises(ValueError, match="this stream was destroyed"):
            comm.all_reduce(np.ones(3), stream=stream)


@on_ranks(2)
def test_a_refused_stream_is_forgotten(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as comm:
        with pytest.raises(NcclInvalidArgument, match="stream is 0x3039, which was destroyed or never crea"):
            comm.synchronize(12345)
        with pytest.raises(NcclInvalidArgument, match="0x3039"):
            comm.all_reduce(np.ones(3), stream=12345)
        prepared = comm.prepare.all_reduce(np.ones(3), stream=12345)
        with pytest.raises(NcclInvalidArgument, match="0x3039"):
            prepared()
        with pytest.raises(NcclInvalidArgument, match="0x3039"):
            pynccl.Plan([prepared, prepared])()
        comm.synchronize()


@on_ranks(2)
def test_a_stream_destroyed_with_calls(rank: int, nranks: int) -> None:
    """It is named once, after a wait for the others; its calls complete, and their arrays live until then."""
    comm = pynccl.init(timeout=20)
    lost, kept = pynccl.Stream(), pynccl.Stream()
    handle = lost.handle
    total = np.empty(100_000)
    if rank == 1:
        hear("destroyed")
    comm.all_reduce(np.ones(100_000), total, stream=lost)
    if rank == 0:
        lost.destroy()
        tell("destroyed")
    if rank == 0:
        with pytest.raises(NcclInvalidArgument, match=f"stream {handle:#x} was destroyed with calls"):
            comm.synchronize()
        comm.synchronize()
    x = comm.all_reduce(np.ones(3), stream=kept)
    if rank == 0:
        again = pynccl.Stream()
        comm.all_reduce(np.ones(3), stream=again)
        again.destroy()
        with pytest.raises(NcclInvalidArgument, match="are kept until the communicator ends"):
            comm.synchronize()
        with pytest.raises(NcclInvalidArgument, match=f"stream is {handle:#x}, which was destroyed or never"):
            comm.synchronize(handle)
    else:
        comm.all_reduce(np.ones(3), stream=kept)
    for _ in range(2):
        comm.synchronize()
        y = comm.all_reduce(np.ones(3), stream=kept)
        comm.synchronize()
        assert (x == nranks).all() and (y == nranks).all()
    comm.destroy()
    assert (total == nranks).all()


def _take_a_step(comm: Communicator, step: int, end: str) -> weakref.ref[Any]:
    stream, x = pynccl.Stream(), np.ones(1000).view(Watched)
    if end == "prepared":
        prepared = comm.prepare.all_reduce(x, stream=stream)
        prepared()
        stream.synchronize()
        prepared()
    else:
        comm.all_reduce(x, stream=stream.handle if end == "handle" else stream)
    stream.synchronize()
    if end == "query":
        comm.all_reduce(x, stream=stream)
        while not stream.query():
            pass
    if end == "event":
        comm.all_reduce(x, stream=stream)
        event = pynccl.Event()
        event.record(stream)
        event.synchronize()
    if end != "dropped":
        stream.destroy()
    return weakref.ref(x)


class Watched(np.ndarray[Any, Any]):
    """An array that takes weak references."""


@on_ranks(2)
def test_a_stream_for_every_step(rank: int, nranks: int) -> None:
    """Streams that were waited for leave no arrays and no threads, and nothing to wait for."""
    comm, idle = pynccl.init(timeout=20), pynccl.init(timeout=20)
    idle.all_reduce(np.ones(3), stream=pynccl.Stream())
    for end in ("dropped", "destroyed", "handle", "query", "event", "prepared"):
        arrays = [_take_a_step(comm, step, end) for step in range(40)]
        gc.collect()
        assert sum(array() is not None for array in arrays) <= 1, end
        # The threads of destroyed streams take a moment to end.
        until(lambda: len(os.listdir("/proc/self/task")) < 35)
        comm.synchronize()
        gc.collect()
        assert not any(array() is not None for array in arrays), end
    assert {record.state for record in comm.trace()} == {"done"}
    comm.destroy()
    idle.destroy()


@on_ranks(2)
def test_the_end_of_a_with_block_waits(rank: int, nranks: int) -> None:
    x, late = np.ones(3), np.ones(3)
    with pynccl.init(timeout=20) as comm:
        if rank == 1:
            time.sleep(0.5)
        with pynccl.Stream() as stream:
            comm.all_reduce(x, stream=stream)
        assert (x == nranks).all()
        if rank == 1:
            hear("raised")
        with suppress(KeyError), pynccl.Stream() as stream:
            comm.all_reduce(late, stream=stream)
            raise KeyError
        if rank == 0:
            tell("raised")
            with pytest.raises(NcclInvalidArgument, match="was destroyed with calls"):
                comm.synchronize()
        comm.barrier()


@on_ranks(2)
def test_ctrl_c_at_the_end_of_a_with_block(rank: int, nranks: int) -> None:
    """The calls go on, and the stream lives until the communicator has waited for it."""
    with pynccl.init() as comm:
        x = np.ones(3)
        if rank == 0:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt), pynccl.Stream() as stream:
                comm.all_reduce(x, stream=stream.handle)
            alive = weakref.ref(stream)
            del stream
            gc.collect()
            tell("interrupted")
            comm.synchronize()
            gc.collect()
            assert alive() is None
        else:
            hear("interrupted")
            comm.all_reduce(x)
        assert (x == nranks).all()


@on_ranks(2)
def test_the_end_of_a_with_block_inside_a_group(rank: int, nranks: int) -> None:
    """The calls would come after the stream's end: all are dropped."""
    with pynccl.init(timeout=20) as comm:
        x = np.ones(3)
        how = r"ends inside pynccl.group\(\).*; expected group\(\) inside"
        with pytest.raises(NcclInvalidUsage, match=how), pynccl.group(), pynccl.Stream() as stream:
            comm.all_reduce(x, stream=stream)
        with pytest.raises(ValueError, match="this stream was destroyed"):
            _ = stream.handle
        with suppress(KeyError), pynccl.group(), pynccl.Stream() as stream:
            comm.all_reduce(x, stream=stream)
            raise KeyError
        comm.synchronize()
        assert (x == 1).all()
        with pynccl.Stream() as stream, pynccl.group():
            comm.all_reduce(x, stream=stream)
        assert (x == nranks).all()


@on_ranks(2)
def test_calls_after_the_wait(rank: int, nranks: int) -> None:
    """A wait for a stream counts for the calls before it only."""
    with pynccl.init(timeout=20) as comm:
        stream = pynccl.Stream()
        comm.all_reduce(np.ones(3), stream=stream)
        stream.synchronize()
        if rank == 1:
            hear("destroyed")
        x = comm.all_reduce(np.ones(3), stream=stream)
        if rank == 0:
            assert not stream.query()
            stream.destroy()
            tell("destroyed")
            with pytest.raises(NcclInvalidArgument, match="was destroyed with calls"):
                comm.synchronize()
        comm.synchronize()
        comm.barrier()
        assert rank == 0 or (x == nranks).all()


@on_ranks(1)
def test_devices(rank: int, nranks: int) -> None:
    assert pynccl.array_module() is np
    assert pynccl.device_count() >= 1
    before = pynccl.current_device()
    pynccl.set_device(1)
    assert pynccl.current_device() == 1
    with single() as comm:
        assert comm.device == 1
    with single(device=5) as comm:
        assert comm.device == 5
        assert pynccl.current_device() == 1
    pynccl.set_device(before)
    wrong: Any
    for wrong, error in ((-1, ValueError), ("0", TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"device is {wrong!r}; expected"):
            pynccl.set_device(wrong)
    with pytest.raises(ValueError, match="device is -1"):
        single(device=-1)


@on_ranks(2)
def test_a_stream_that_waits_for_events_without_end(rank: int, nranks: int) -> None:
    """Nobody waits for the stream itself: it remembers no calls that have been waited for."""
    with pynccl.init(timeout=20) as comm:
        behind, event, x = pynccl.Stream(), pynccl.Event(), np.ones(3)

        def steps() -> int:
            for _ in range(200):
                stream = pynccl.Stream()
                comm.all_reduce(x, stream=stream)
                event.record(stream)
                behind.wait_event(event)
                stream.synchronize()
                stream.destroy()
            return len(gc.get_objects())

        assert steps() + 100 > steps()
        behind.synchronize()


def _raised(wait: Any) -> tuple[str, list[int], str]:
    with pytest.raises(pynccl.NcclError) as caught:
        wait()
    return type(caught.value).__name__, list(getattr(caught.value, "ranks", [])), str(caught.value)


def failed_calls(rank: int, nranks: int, how: str, timeout: float | None) -> list[tuple[str, list[int], str]]:
    """Everything that waits for a call that has failed raises the error of its communicator."""
    comm = pynccl.init(timeout=timeout)
    comm.barrier()
    stream, behind, event, last = pynccl.Stream(), pynccl.Stream(), pynccl.Event(), pynccl.Event()
    if how == "killed" and rank == nranks - 1:
        for other in range(rank):
            hear(f"{other} has called")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(4 + rank * (how == "mismatch")), stream=stream)
    tell(f"{rank} has called")
    event.record(stream)
    behind.wait_event(event)
    last.record(behind)
    waits = (last.synchronize, event.synchronize, behind.synchronize, stream.synchronize, comm.synchronize)
    # The error stays until the communicator ends.
    raised = [_raised(wait) for wait in (*waits, *waits)]
    for one in (stream, behind):
        event.record(one)
        raised.append(_raised(event.synchronize))
    if how == "killed":
        comm = comm.shrink(exclude=raised[0][1], abort=True)
        y = comm.all_reduce(np.ones(2), stream=stream)
        for ended in (stream, behind, event):
            ended.synchronize()
        assert (y == nranks - 1).all()
    comm.abort()
    return raised


@pytest.mark.parametrize("timeout", [None, 20])
def test_waits_for_a_call_that_differs(timeout: float | None) -> None:
    for raised in testing.run(2, failed_calls, "mismatch", timeout, backend="cpu"):
        for name, _, text in raised:
            assert name == "CollectiveMismatchError", raised
            assert "AllReduce(count 4, float64, sum)" in text and "AllReduce(count 5, float64, sum)" in text


def test_waits_for_a_call_of_a_dead_rank() -> None:
    for raised in testing.run(3, failed_calls, "killed", 20, backend="cpu", check=False)[:2]:
        assert isinstance(raised, list), raised
        assert [(name, ranks) for name, ranks, _ in raised] == [("RankFailedError", [2])] * 12
