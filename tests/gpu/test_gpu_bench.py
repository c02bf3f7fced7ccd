"""`pynccl bench` on GPUs."""

from __future__ import annotations

import re

import pytest

from bench_runs import bench, lines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize("program", ["all_reduce", "sendrecv"])
def test_programs(nranks: int, program: str) -> None:
    """All ranks are on the first device, as NCCL >= 2.30 allows."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_TESTS_DEVICE": "0"}
    done = bench(
        nranks, program, "-b", "8", "-e", "1M", "-f", "128", "-C", "1", PYNCCL_LIBRARY="auto", **shared
    )
    found = lines(done)
    assert [line["wrong"] for line in found] == ["0"] * 3, done.stderr
    assert all(float(line["time"]) > 0 for line in found)
    addresses = re.findall(r" device  0 \[(\w{4}:\w\w:\w\w)\] (?!CPU library)", done.stdout)
    assert len(addresses) == nranks and set(addresses) != {"0000:00:00"}
