"""Ranks that die, stop or do not come: what every other rank is told, how soon, and what is left behind."""

from __future__ import annotations

import ctypes
import os
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
from pynccl import Communicator, NcclError, NcclTimeoutError, Plan, RankFailedError, capi
from pynccl._binding import lib
from pynccl.testing import RankError, run


RANKS = 8
# The promise of the issue, for every survivor.
SOON = 2.0
Outcome = tuple[str, list[int], str, float]


def die(folder: str, number: int = signal.SIGKILL) -> None:
    """Write down when, and go."""
    draft = Path(folder, "draft")
    draft.write_text(repr(time.monotonic()))
    draft.rename(Path(folder, "died"))
    os.kill(os.getpid(), number)


def since_death(folder: str) -> float:
    return time.monotonic() - float(Path(folder, "died").read_text())


def told(folder: str, what: Callable[[], Any]) -> Outcome:
    """Do something until it raises; return what and when after the death, and check that it is final."""
    try:
        while True:
            what()
    except NcclError as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), since_death(folder)


def nothing_left() -> bool:
    """Tell whether the watchdog has ended, with all its connections."""
    return lib.pynccl_watched() == 0 and not lib.pynccl_watchdog_runs()


def stage_collective(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x = np.ones(100_000, np.float32)
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()
    return told(folder, lambda: comm.all_reduce(x, op="max"))


def stage_missing(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """All but the victim are inside one collective when it dies."""
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, lambda: comm.all_gather(np.ones(10)))


def stage_group(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x, y = np.ones(1000), np.ones(1000)
    other = (rank + 1) % comm.size, (rank - 1) % comm.size
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()

    def group() -> None:
        with pynccl.group():
            comm.send(x, other[0])
            comm.recv(y, other[1])

    return told(folder, lambda: (group(), comm.barrier()))


def stage_plan(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    x, y = np.ones(1000), np.ones((comm.size, 1000))
    plan = Plan([comm.prepare.all_reduce(x, op="max"), comm.prepare.all_gather(x, y)])
    if rank == victim:
        threading.Timer(0.2, die, [folder]).start()
    return told(folder, plan)


def stage_stream(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """Asynchronous calls on a stream of one's own."""
    with pynccl.Stream() as stream:
        x = np.ones(1000)
        if rank == victim:
            time.sleep(0.3)
            die(folder)
        comm.all_reduce(x, op="max", stream=stream)
        return told(folder, lambda: comm.synchronize(stream))


def stage_between(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    """Nobody calls anything: the trouble is known all the same, and raised by the next call."""
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    while comm.async_error() is None:
        time.sleep(0.01)
    took = since_death(folder)
    return *told(folder, lambda: comm.all_reduce(np.ones(3)))[:3], took


def stage_finalize(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, comm.finalize)


def stage_split(comm: Communicator, rank: int, victim: int, folder: str) -> Outcome:
    if rank == victim:
        time.sleep(0.3)
        die(folder)
    return told(folder, lambda: comm.split(0))


STAGES = {
    name.removeprefix("stage_"): stage for name, stage in list(globals().items()) if name.startswith("stage_")
}


def in_stage(rank: int, nranks: int, stage: str, victim: int, folder: str) -> tuple[Outcome, Outcome, bool]:
    comm = pynccl.init(timeout=20)
    x = np.ones(10)
    comm.all_reduce(x)
    assert x[0] == nranks
    comm.barrier()
    first = STAGES[stage](comm, rank, victim, folder)
    # Every later call says the same.
    second = told(folder, lambda: comm.all_reduce(x))
    comm.abort()
    return first, second, nothing_left()


def check_survivors(results: list[Any], victims: list[int]) -> None:
    for rank, result in enumerate(results):
        if rank in victims:
            assert isinstance(result, RankError)
            assert "SIGKILL" in str(result), result
            continue
        assert isinstance(result, tuple), result
        (kind, ranks, text, took), again, clean = result
        assert (kind, ranks) == ("RankFailedError", victims), result
        assert again[:3] == (kind, ranks, text)
        assert f"rank {victims[0]} died" in text
        assert took < SOON, result
        assert clean


def cases(victims: tuple[int, ...]) -> list[Any]:
    """Every stage with every victim; the quick ones are a few of them."""
    return [
        pytest.param(stage, victim, marks=() if victim in victims[i % 2 :: 2] else pytest.mark.full)
        for i, stage in enumerate(STAGES)
        for victim in range(RANKS)
    ]


@pytest.mark.parametrize(("stage", "victim"), cases((0, 5)))
def test_killed_rank(stage: str, victim: int, tmp_path: Path) -> None:
    results = run(RANKS, in_stage, stage, victim, str(tmp_path), backend="cpu", check=False, timeout=40)
    check_survivors(results, [victim])


def creates(rank: int, nranks: int, where: str, victim: int, folder: str) -> tuple[Outcome, Outcome, bool]:
    if rank == victim:
        name = "ncclCommInitRank" if where != "the channel" else "ncclAllGather"
        original = getattr(capi, name)

        def fatal(*args: Any) -> Any:
            if where == "the library's rendezvous":
                threading.Timer(0.05, die, [folder]).start()
                return original(*args)
            die(folder)

        setattr(capi, name, fatal)
        if where == "the library's rendezvous":
            # Somebody is missing for as long as it takes.
            time.sleep(0.1)
    if where == "the library's rendezvous" and rank == (victim + 1) % nranks:
        create = capi.ncclCommInitRank
        setattr(capi, "ncclCommInitRank", lambda *args: (time.sleep(0.7), create(*args))[1])  # noqa: B010
    outcome = told(folder, lambda: pynccl.init(timeout=20))
    return outcome, outcome, nothing_left()


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        pytest.param(where, victim, marks=() if victim in (0, 5) else pytest.mark.full)
        for where in ("before the library", "the library's rendezvous", "the channel")
        for victim in range(RANKS)
    ],
)
def test_killed_while_created(where: str, victim: int, tmp_path: Path) -> None:
    results = run(RANKS, creates, where, victim, str(tmp_path), backend="cpu", check=False, timeout=40)
    check_survivors(results, [victim])
