"""`pynccl bench` on GPUs."""

from __future__ import annotations

import re
import subprocess

import pytest

from bench_runs import bench, lines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def on_a_gpu(nranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program; all ranks are on the first device, as NCCL >= 2.30 allows."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_TESTS_DEVICE": "0"}
    return bench(nranks, *args, "-b", "8", "-e", "1M", "-f", "128", PYNCCL_LIBRARY="auto", **shared)


@pytest.mark.parametrize("graph", [[], ["-G", "2"]])
@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize("program", ["all_reduce", "sendrecv"])
def test_programs(nranks: int, program: str, graph: list[str]) -> None:
    done = on_a_gpu(nranks, program, "-C", "1", *graph)
    found = lines(done)
    assert [line["wrong"] for line in found] == ["0"] * 3, done.stderr
    assert all(float(line["time"]) > 0 for line in found)
    addresses = re.findall(r" device  0 \[(\w{4}:\w\w:\w\w)\] (?!CPU library)", done.stdout)
    assert len(addresses) == nranks and set(addresses) != {"0000:00:00"}


def test_memory() -> None:
    """The buffers are two of 1 MiB; what a communicator needs depends on NCCL."""
    done = on_a_gpu(1, "all_reduce", "-M", "1")
    assert len(lines(done)) == 3
    amount = r"-?[\d.]+ [KMG]?B"
    parts = rf"Initialization {amount} \| User-Allocated {amount} \| Collective {amount} \| Total  {amount}"
    assert re.search(f"# GPU memory usage     : {parts}\n", done.stdout)
