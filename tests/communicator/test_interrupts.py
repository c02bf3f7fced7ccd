"""Ctrl-C in the calls that all ranks make together: the call goes on, and the next one waits for it."""

from __future__ import annotations

import _thread
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

import pynccl
from meeting import hear, tell, together
from parameters import slow_except
from pynccl import Communicator, NcclInvalidArgument, NcclInvalidUsage, NcclRemoteError, RankFailedError, capi
from pynccl.testing import run
from ranks import on_ranks

# What the library calls each of them.
FUNCTIONS = {
    "split": "ncclCommSplit",
    "shrink": "ncclCommShrink",
    "suspend": "ncclCommSuspend",
    "resume": "ncclCommResume",
    "finalize": "ncclCommFinalize",
    "window": "ncclCommWindowRegister",
    "close": "ncclCommWindowDeregister",
}
KINDS = {
    "blocking": (None, None),
    "with a time-out": (None, 20.0),
    "non-blocking": ({"blocking": 0}, None),
    "non-blocking with a time-out": ({"blocking": 0}, 20.0),
}


def ctrl_c_in(when: str) -> None:
    """Get Ctrl-C in the next call: before its thread has started, or once it has, or later."""
    if when == "later":
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return
    start = _thread.start_new_thread

    def starting(work: Callable[..., object], arguments: tuple[()]) -> int:
        _thread.start_new_thread = start
        if when == "starting":
            signal.raise_signal(signal.SIGINT)
        thread = start(work, arguments)
        signal.raise_signal(signal.SIGINT)
        return thread

    _thread.start_new_thread = starting


def call_of(comm: Communicator, what: str) -> Callable[[], object]:
    """Return a call of ranks 0 and 1, after what must come before it."""
    if what in ("window", "close"):
        array = pynccl.zeros(4)
        return comm.window(array).close if what == "close" else lambda: comm.window(array)
    if what == "resume":
        comm.suspend()
    options: dict[str, Callable[[], object]] = {
        "split": lambda: comm.split(0 if comm.rank < 2 else None),
        "shrink": lambda: comm.shrink([2]),
    }
    return options.get(what) or getattr(comm, what)  # type: ignore[no-any-return]


def goes_on(rank: int, nranks: int, what: str, kind: str, when: str, *again: int) -> list[float]:
    """Rank 1 gets Ctrl-C in a call for which it waits for the others, and goes on with the communicator."""
    config, timeout = KINDS[kind]
    comm = pynccl.init(config=config, timeout=timeout)
    prepared = comm.prepare.all_reduce(np.zeros(3))
    call = call_of(comm, what)
    if rank == 1:
        ctrl_c_in(when)
        with pytest.raises(KeyboardInterrupt):
            call()
        with pytest.raises(NcclInvalidUsage, match=f"still makes {FUNCTIONS[what]}, which .*; expected sync"):
            prepared()
    together(nranks, "interrupted")
    if rank == 1:
        for _ in again:
            call()
    elif rank == 0 or what != "shrink":
        # Rank 1 aborts the communicator that nobody takes there.
        with suppress(NcclRemoteError if what in ("split", "shrink") and not again else ()):
            call()
    if what == "finalize":
        comm.destroy()
        return []
    if what == "suspend":
        comm.resume()
    x = comm.all_reduce(np.full(3, rank + 1.0)).tolist()
    comm.split(0).barrier()
    comm.destroy()
    return x


def expected(what: str) -> list[float]:
    return [] if what == "finalize" else [6.0, 6.0, 6.0]


SLOW_KINDS = slow_except(["blocking"], KINDS)


@pytest.mark.parametrize("kind", SLOW_KINDS)
@pytest.mark.parametrize("what", FUNCTIONS)
def test_the_communicator_can_be_used_afterwards(what: str, kind: str) -> None:
    assert run(3, goes_on, what, kind, "later", backend="cpu", timeout=40) == [expected(what)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["starting", "started"])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_ctrl_c_at_the_beginning(what: str, when: str, kind: str) -> None:
    assert run(3, goes_on, what, kind, when, backend="cpu", timeout=40) == [expected(what)] * 3


@pytest.mark.parametrize("what", ["shrink", "suspend", "resume", "finalize", "window", "close"])
def test_the_same_call_again_takes_the_interrupted_one_over(what: str) -> None:
    assert (
        run(3, goes_on, what, "with a time-out", "later", 1, backend="cpu", timeout=40)
        == [expected(what)] * 3
    )


@on_ranks(2)
def test_an_interrupted_window_can_be_made_again(rank: int, nranks: int) -> None:
    """Also a symmetric one, which must not share its memory with another."""
    with pynccl.init() as comm:
        array = pynccl.zeros(4)
        if rank == 1:
            ctrl_c_in("later")
            with pytest.raises(KeyboardInterrupt):
                comm.window(array, symmetric=True)
        together(nranks, "interrupted")
        comm.window(array, symmetric=True).close()
        assert (comm.all_reduce(np.ones(3)) == 2).all()


def times_out(rank: int, nranks: int) -> tuple[list[float], float]:
    """The other ranks come too late for the interrupted shrink, and all make another."""
    with pynccl.init(timeout=3) as comm:
        if rank == 1:
            ctrl_c_in("later")
            with pytest.raises(KeyboardInterrupt):
                comm.shrink([2])
            time.sleep(4)
        together(nranks, "late")
        small = comm.shrink([2]).all_reduce(np.ones(1)).tolist() if rank < 2 else []
        together(nranks, "shrunk")
        return small, float(comm.all_reduce(np.ones(1))[0])


def test_a_call_that_failed_after_ctrl_c_is_made_again() -> None:
    assert run(3, times_out, backend="cpu", timeout=40) == [([2.0], 3.0)] * 2 + [([], 3.0)]


def dies_after(rank: int, nranks: int, timeout: float) -> tuple[str, list[int], float]:
    comm = pynccl.init(timeout=timeout)
    if rank == 1:
        ctrl_c_in("later")
        with pytest.raises(KeyboardInterrupt):
            comm.split(0)
    together(nranks, "interrupted")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError) as caught:
        comm.barrier() if rank == 1 else comm.split(0)
    with comm.shrink(caught.value.ranks, abort=True) as small:
        return type(caught.value).__name__, caught.value.ranks, float(small.all_reduce(np.ones(1))[0])


def test_a_death_in_an_interrupted_call() -> None:
    zero, one, _ = run(3, dies_after, 10.0, backend="cpu", check=False, timeout=40)
    assert zero == one == ("RankFailedError", [2], 2.0)


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_the_end_takes_along_what_an_interrupted_split_makes(end: str) -> None:
    assert len(set(run(2, ends_after_ctrl_c, end, backend="cpu", timeout=40))) == 1


def ends_after_ctrl_c(rank: int, nranks: int, end: str) -> bool:
    with pynccl.init() as world:
        descriptors = []
        for number in range(3):
            parent = world.split(0, config={"blocking": number % 2})
            if rank == 1:
                ctrl_c_in("started")
                with pytest.raises(KeyboardInterrupt):
                    parent.split(0)
                tell(f"interrupted {number}")
            else:
                hear(f"interrupted {number}")
                with suppress(NcclRemoteError):
                    parent.split(0).abort()
            world.barrier()
            getattr(parent, end)()
            world.barrier()
            gc.collect()
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert descriptors[0] == descriptors[2]
        return True


def allocate_until_interrupted(start: Callable[[], object]) -> None:
    start()
    while True:
        pynccl.empty(3000)


def free_until_interrupted(start: Callable[[], object]) -> None:
    start()
    while True:
        pynccl.empty(16 << 20, "uint8").fill(1)


@on_ranks(1)
def test_ctrl_c_while_memory_is_freed(rank: int, nranks: int) -> None:
    """Most of them come inside `__del__`, where Python drops a KeyboardInterrupt."""
    for seconds in np.random.default_rng(1).uniform(0.005, 0.025, 50):
        caught = threading.Event()

        def interrupt(seconds: float, caught: threading.Event) -> None:
            time.sleep(seconds)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not caught.wait(20):
                faulthandler.dump_traceback()
                os._exit(1)

        sender = threading.Thread(target=interrupt, args=(seconds, caught))
        with pytest.raises(KeyboardInterrupt):
            free_until_interrupted(sender.start)
        caught.set()
        sender.join()


@on_ranks(1)
def test_ctrl_c_while_memory_is_allocated(rank: int, nranks: int) -> None:
    """No descriptor or mapping of a memory is lost; a timer stands for the Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    pynccl.empty(3000).fill(1)
    before = len(os.listdir("/proc/self/fd"))
    for seconds in np.random.default_rng(1).uniform(0.003, 0.004, 200):
        with pytest.raises(KeyboardInterrupt):
            allocate_until_interrupted(partial(signal.setitimer, signal.ITIMER_REAL, seconds))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@on_ranks(1)
def test_ctrl_c_at_the_first_line_of_a_finalizer(rank: int, nranks: int) -> None:
    """Where no `try` of a decorator in Python would be reached."""

    def interrupt(frame: object, event: str, argument: object) -> None:
        if event == "call":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    streams = [pynccl.Stream() for _ in range(20)]
    while streams:
        handle = streams[-1].handle
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            sys.setprofile(interrupt)
            streams.pop()
            time.sleep(20)
        with pytest.raises(NcclInvalidArgument):
            capi.pyncclCpuStreamQuery(0, handle)
