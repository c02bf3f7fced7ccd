"""torch.distributed's all_reduce and DDP steps on pynccl and on gloo, in one run on the same processes.

    python benchmarks/torch_all_reduce.py [--ranks 2 4] [--max-bytes N] [--write]

Prints the medians of 5 repetitions, in each of which both backends take their turn; --write puts them into
benchmarks/results/. A repetition's time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _machine import describe
from _report import MIB
from pynccl import testing

BACKENDS = ("pynccl", "gloo")
REPETITIONS = 5
SECONDS = 0.15
RESULTS = Path(__file__).parent / "results"


def timed(call: Callable[[], Any], count: int) -> float:
    """Return the seconds of one call of `count`, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    took = torch.tensor([(time.perf_counter() - began) / count], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def calls_for(call: Callable[[], Any]) -> int:
    """Return how many calls fill a repetition, the same number on every rank."""
    timed(call, 1)
    return max(3, min(20000, int(SECONDS / timed(call, 3))))


def compare(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each backend's call; the backends alternate."""
    counts = {backend: calls_for(call) for backend, call in calls.items()}
    times: dict[str, list[float]] = {backend: [] for backend in calls}
    for _ in range(REPETITIONS):
        for backend, call in calls.items():
            times[backend].append(timed(call, counts[backend]))
    return {backend: statistics.median(all_times) for backend, all_times in times.items()}


def step(group: dist.ProcessGroup, rank: int) -> Callable[[], None]:
    """Return a training step of a small model under DistributedDataParallel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    parallel = nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))

    def run() -> None:
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()

    return run


def measure(rank: int, size: int, store: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Measure on one rank: both groups live at once, gloo's is the default one."""
    import pynccl.torch  # noqa: F401

    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        data = torch.zeros(nbytes // 4)
        calls = {b: partial(dist.all_reduce, data, group=g) for b, g in groups.items()}
        rows.append({"what": "all_reduce", "ranks": size, "bytes": nbytes, **compare(calls)})
    rows.append(
        {"what": "DDP step", "ranks": size, "bytes": 0}
        | compare({b: step(g, rank) for b, g in groups.items()})
    )
    dist.destroy_process_group()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Write the rows as Markdown."""
    lines = [
        "| what | processes | bytes | pynccl us | gloo us | gloo / pynccl |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = row["pynccl"] * 1e6, row["gloo"] * 1e6
        size = row["bytes"] or ""
        lines.append(
            f"| {row['what']} | {row['ranks']} | {size} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--max-bytes", type=int, default=64 * MIB)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    sizes = [size for power in range(3, 27) if (size := 1 << power) <= options.max_bytes]
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows += testing.run(ranks, measure, f"{folder}/store", sizes, backend="cpu", timeout=1500)[0]
    machine = describe() | {"torch": torch.__version__}
    text = "\n".join([f"- {name}: {value}" for name, value in machine.items()]) + "\n\n" + table(rows) + "\n"
    sys.stdout.write(text)
    if options.write:
        title = "# all_reduce and DDP of torch.distributed: pynccl and gloo\n\n"
        (RESULTS / "torch_all_reduce.md").write_text(title + text)
        (RESULTS / "torch_all_reduce.json").write_text(
            json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
