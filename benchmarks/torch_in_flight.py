"""Measure torch.distributed's operations in flight, on pynccl and on gloo, in one run.

Several all_reduces at once against one after another, an all_reduce that nobody waits for, a
DistributedDataParallel step beside an open receive, and the threads of many groups. README.md beside this
file says how it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _machine import Meter, describe
from _peers import DDP_BYTES
from _report import Target, number, table

BACKENDS = ("pynccl", "gloo")
RANKS, MANY, LARGE, SMALL = 2, 8, 1 << 20, 8 << 10
GROUPS, IN_FLIGHT = 50, 20
# The measurements that are compared with bounds.
SEQUENCE = f"{MANY} all_reduces of 1 MiB, one after another, ms"
FLIGHT = f"{MANY} all_reduces of 1 MiB, in flight, ms"
UNAWAITED = "an all_reduce of 8 KiB that nobody waits for, ms"
STEP = "DDP step, ms"
STEP_BESIDE = "DDP step beside an open receive, ms"
THREADS = f"threads for each of {GROUPS} groups with {IN_FLIGHT} in flight"
Call = Callable[[], object]


class Rank:
    """One process of one backend; every measurement is a method and returns seconds, or a count."""

    def __init__(self, backend: str, rank: int, port: int, reps: int) -> None:
        import torch
        import torch.distributed as dist

        if backend == "pynccl":
            import pynccl.torch  # noqa: F401
        torch.set_num_threads(1)
        self.torch, self.dist, self.rank, self.reps = torch, dist, rank, reps
        method = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=RANKS)
        self.many = [torch.zeros(LARGE // 4) for _ in range(MANY)]

    def medians(self, *calls: Call, times: int = 10) -> list[tuple[float, float]]:
        """Return the seconds and the changes of thread of each call, measured in turns."""
        measured: list[list[tuple[float, float]]] = [[] for _ in calls]
        for _ in range(self.reps):
            for call, all_of_it in zip(calls, measured, strict=True):
                call()
                self.dist.barrier()
                before, start = self.switches(), time.perf_counter()
                for _ in range(times):
                    call()
                seconds = (time.perf_counter() - start) / times
                all_of_it.append((seconds, (self.switches() - before) / times))
        return [
            (statistics.median(s for s, _ in one), statistics.median(n for _, n in one)) for one in measured
        ]

    def switches(self) -> int:
        """Count how often threads of this process gave up a core by themselves."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    def in_sequence(self) -> None:
        for tensor in self.many:
            self.dist.all_reduce(tensor)

    def in_flight(self) -> None:
        for work in [self.dist.all_reduce(tensor, async_op=True) for tensor in self.many]:
            work.wait()

    def unawaited(self) -> float:
        """Return the seconds until the result of an operation is seen in memory, without a wait."""
        seconds = []
        for _ in range(20 * self.reps):
            tensor = self.torch.ones(SMALL // 4)
            seen = tensor.numpy()
            self.dist.barrier()
            start = time.perf_counter()
            work = self.dist.all_reduce(tensor, async_op=True)
            while seen[-1] != RANKS:
                time.sleep(20e-6)
            seconds.append(time.perf_counter() - start)
            work.wait()
        return statistics.median(seconds)

    def step(self) -> Call:
        """Return a training step of a small model."""
        torch, nn = self.torch, self.torch.nn
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        parallel = nn.parallel.DistributedDataParallel(net)
        x = torch.randn(32, 64)

        def call() -> None:
            parallel.zero_grad()
            parallel(x).square().mean().backward()

        return call

    def threads(self) -> float:
        """Return the threads for each group that operations in flight need beside those that were there."""
        groups = [self.dist.new_group() for _ in range(GROUPS)]
        self.dist.barrier()
        before = len(os.listdir("/proc/self/task"))
        works = [
            self.dist.all_reduce(self.torch.ones(4), group=group, async_op=True)
            for _ in range(IN_FLIGHT)
            for group in groups
        ]
        count = len(os.listdir("/proc/self/task"))
        for work in works:
            work.wait()
        return (count - before) / GROUPS

    def measure(self) -> dict[str, float]:
        """Run all measurements."""
        sequence, flight = self.medians(self.in_sequence, self.in_flight)
        unawaited = self.unawaited()
        step = self.step()

        def beside_a_receive() -> None:
            receive = self.dist.irecv(self.torch.zeros(1), 1 - self.rank, tag=9)
            for _ in range(50):
                step()
            send = self.dist.isend(self.torch.ones(1), 1 - self.rank, tag=9)
            send.wait()
            receive.wait()

        def alone() -> None:
            for _ in range(50):
                step()

        steps = [seconds / 50 for seconds, _ in self.medians(alone, beside_a_receive, times=1)]
        return {
            SEQUENCE: 1e3 * sequence[0],
            FLIGHT: 1e3 * flight[0],
            "changes of thread, one after another": sequence[1],
            "changes of thread, in flight": flight[1],
            UNAWAITED: 1e3 * unawaited,
            STEP: 1e3 * steps[0],
            STEP_BESIDE: 1e3 * steps[1],
            THREADS: self.threads(),
        }


def run_backend(backend: str, reps: int) -> dict[str, float]:
    """Start the ranks of one backend and return what rank 0 measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYNCCL_LIBRARY": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--backend", backend, "--port", str(port), "--reps", str(reps)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE if rank == 0 else None
        )
        for rank in range(RANKS)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=300)
        if any(rank.wait(60) for rank in ranks):
            sys.exit(f"a process of {backend} failed")
    finally:
        for rank in ranks:
            rank.kill()
    measured: dict[str, float] = json.loads(out)
    return measured


def targets(ours: dict[str, float]) -> list[Target]:
    """Compare what pynccl reached with the bounds; the ratios allow for the noise of a run."""
    bounds = [
        ("in flight, times one after another", LARGE, 1.1, ours[FLIGHT] / ours[SEQUENCE]),
        ("done without a wait, ms", SMALL, 1, ours[UNAWAITED]),
        ("DDP step beside an open receive, times without", DDP_BYTES, 1.2, ours[STEP_BESIDE] / ours[STEP]),
        ("threads of a group", 16, 2, ours[THREADS]),
    ]
    return [
        Target(name, RANKS, nbytes, most, reached, at_most=True) for name, nbytes, most, reached in bounds
    ]


def document(about: dict[str, str], results: dict[str, dict[str, float]], judged: list[Target]) -> str:
    """Write the report."""
    count = sum(target.verdict == "met" for target in judged)
    parts = [
        f"# torch.distributed: operations in flight, {RANKS} ranks",
        "\n".join(f"- {key}: {value}" for key, value in about.items()),
        table(["", *results], lines(results)),
        f"## Targets: {count} of {len(judged)} met",
        table(
            ["target", "ranks", "size", "needed", "reached", "verdict"], (target.line() for target in judged)
        ),
    ]
    return "\n\n".join(parts) + "\n"


def lines(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return one line for each measurement."""
    names = next(iter(results.values()))
    return [[name, *(number(result[name]) for result in results.values())] for name in names]


def main() -> None:
    """Run the benchmark, or one rank of it; exit with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="torch.distributed's operations in flight.")
    parser.add_argument("--reps", type=int, default=7, help="repetitions, whose median counts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    for option, kind in (("--backend", str), ("--rank", int), ("--port", int)):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        rank = Rank(options.backend, options.rank, options.port, options.reps)
        measured = rank.measure()
        if options.rank == 0:
            print(json.dumps(measured))
        rank.dist.barrier()
        rank.dist.destroy_process_group()
        return
    machine, meter = describe(), Meter()
    results: dict[str, Any] = {backend: run_backend(backend, options.reps) for backend in BACKENDS}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    during = meter.text(used.ru_utime + used.ru_stime)
    about = {**machine, "during the run": during, "repetitions": str(options.reps)}
    judged = targets(results["pynccl"])
    text = document(about, results, judged)
    options.out.mkdir(exist_ok=True)
    (options.out / "torch_in_flight.md").write_text(text)
    verdicts = [{**asdict(target), "verdict": target.verdict} for target in judged]
    data = {"about": about, **results, "targets": verdicts}
    (options.out / "torch_in_flight.json").write_text(json.dumps(data, indent=1) + "\n")
    print(text)
    sys.exit(any(target.verdict != "met" for target in judged))


if __name__ == "__main__":
    main()
