"""Measure puts, signals and waits on one host against pynccl's messages, Open MPI's puts, and a copy.

Two ranks, started by mpirun, measure everything in one run and in turns. README.md beside this file says how.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _machine import describe
from _report import number, table

RANKS, SMALL, LARGE, MIB = 2, 8, 16 << 20, 1 << 20
Call = Callable[[], object]


class Rank:
    """One of two ranks; rank 0 begins every round trip."""

    def __init__(self) -> None:
        from mpi4py import MPI

        import pynccl

        self.mpi, self.comm = MPI.COMM_WORLD, pynccl.init()
        self.rank, self.peer = self.comm.rank, 1 - self.comm.rank
        self.small, self.large = np.ones(SMALL, np.uint8), np.ones(LARGE, np.uint8)
        self.window = self.comm.window(pynccl.zeros(LARGE, np.uint8))
        self.plain = self.comm.window(np.zeros(LARGE, np.uint8))
        self.mpi_window = MPI.Win.Allocate(LARGE, 1, comm=self.mpi)
        self.mpi_window.Lock_all()
        self.copy = np.zeros(LARGE, np.uint8)

    def in_turn(self, first: Call, second: Call) -> Call:
        """Return a round trip: rank 0 calls `first` then `second`, rank 1 the other way round."""
        one, two = (first, second) if self.rank == 0 else (second, first)

        def call() -> None:
            one()
            two()

        return call

    def round_trips(self) -> dict[str, Call]:
        """Return the round trips of 8 bytes."""
        prepare = self.comm.prepare
        into = np.zeros(SMALL, np.uint8)
        nothing = np.zeros(0, np.uint8)

        def put() -> None:
            self.mpi_window.Put(self.small, self.peer)
            self.mpi_window.Flush(self.peer)
            self.mpi.Send(nothing, self.peer)

        return {
            "pynccl put_signal, wait_signal": self.in_turn(
                prepare.put_signal(self.small, self.peer, self.window), prepare.wait_signal(self.peer)
            ),
            "pynccl send, recv": self.in_turn(
                prepare.send(self.small, self.peer), prepare.recv(into, self.peer)
            ),
            "MPI_Put, MPI_Win_flush, empty message": self.in_turn(
                put, lambda: self.mpi.Recv(nothing, self.peer)
            ),
            "MPI_Send, MPI_Recv": self.in_turn(
                lambda: self.mpi.Send(self.small, self.peer), lambda: self.mpi.Recv(into, self.peer)
            ),
        }

    def copies(self) -> dict[str, Call]:
        """Return what moves 16 MiB on rank 0, while rank 1 waits for it."""

        def of_rank_0(call: Call, other: Call) -> Call:
            return call if self.rank == 0 else other

        def mpi_put() -> None:
            self.mpi_window.Put(self.large, self.peer)
            self.mpi_window.Flush(self.peer)

        wait, prepare = self.comm.prepare.wait_signal(self.peer), self.comm.prepare
        return {
            "numpy.copyto": of_rank_0(lambda: np.copyto(self.copy, self.large), lambda: None),
            "pynccl put_signal, memory of pynccl.empty": of_rank_0(
                prepare.put_signal(self.large, self.peer, self.window), wait
            ),
            "pynccl put_signal, memory of NumPy": of_rank_0(
                prepare.put_signal(self.large, self.peer, self.plain), wait
            ),
            "MPI_Put, MPI_Win_flush": of_rank_0(mpi_put, lambda: None),
        }

    def seconds(self, calls: dict[str, Call], times: int, reps: int) -> dict[str, list[float]]:
        """Return the time of a call in each repetition; all are measured in turns."""
        measured: dict[str, list[float]] = {name: [] for name in calls}
        for rep in range(reps + 1):
            for name, call in calls.items():
                self.mpi.Barrier()
                start = time.perf_counter()
                for _ in range(times):
                    call()
                if rep:
                    measured[name].append((time.perf_counter() - start) / times)
        return measured

    def close(self) -> None:
        """Close what was opened."""
        self.mpi_window.Unlock_all()
        self.mpi_window.Free()
        self.plain.close()
        self.window.close()
        self.comm.destroy()


def rank_main(reps: int) -> None:
    rank = Rank()
    measured = rank.seconds(rank.round_trips(), 2000, reps), rank.seconds(rank.copies(), 20, reps)
    if rank.rank == 0:
        print(json.dumps(measured), flush=True)
    rank.close()


def ratio(of: list[float], to: list[float]) -> str:
    """Write the ratio of the medians, and the least and most ratio within one repetition."""
    each = [a / b for a, b in zip(of, to, strict=True)]
    return (
        f"{number(statistics.median(of) / statistics.median(to))} ({number(min(each))}–{number(max(each))})"
    )


def report(trips: dict[str, list[float]], copies: dict[str, list[float]]) -> str:
    ours = "pynccl put_signal, wait_signal"
    small = [
        [name, number(1e6 * statistics.median(of)), number(1e6 * min(of)), ratio(trips[ours], of)]
        for name, of in trips.items()
    ]
    large = [
        [name, number(LARGE / 1e9 / statistics.median(of)), ratio(copies["numpy.copyto"], of)]
        for name, of in copies.items()
    ]
    titles = f"{SMALL} bytes, round trip", "µs, median", "µs, least", "put_signal's time to this"
    heads = f"{LARGE // MIB} MiB", "GB/s", "bandwidth to numpy.copyto's"
    return f"{table(titles, small)}\n\n{table(heads, large)}"


def main() -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description="Puts, signals and waits on one host.")
    parser.add_argument("--reps", type=int, default=9, help="repetitions, whose median counts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.reps)
        return
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(RANKS)]
    command = [*mpirun, sys.executable, __file__, "--rank", "--reps", str(options.reps)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "PYNCCL_LIBRARY": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"a rank failed:\n{done.stderr}")
    trips, copies = json.loads(done.stdout)
    about: dict[str, Any] = {**describe(), "repetitions": str(options.reps)}
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    text = f"# One-sided calls, {RANKS} ranks on one host\n\n{facts}\n\n{report(trips, copies)}\n"
    options.out.mkdir(exist_ok=True)
    (options.out / "one_sided.md").write_text(text)
    record = {"about": about, "round_trips": trips, "copies": copies}
    (options.out / "one_sided.json").write_text(json.dumps(record, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
