"""Which algorithm a collective uses: by size and layout, by force, and the same one on all ranks."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

import pynccl
from pynccl import testing

LINE = re.compile(r'NCCL INFO (\w+) of (\d+) elements of (\d+) B: algorithm "(.+)", 4 ranks on 2 hosts')
LARGE = 100_000
PAIRS = {"AllReduce": "shares", "Broadcast": "copies", "AllGather": "copies"}
HOSTS = {
    "AllReduce": "all_reduce across hosts",
    "Broadcast": "broadcast across hosts",
    "AllGather": "all_gather across hosts",
}


def calls(rank: int, nranks: int, log: str, flat: int | None) -> str:
    os.environ |= {"NCCL_HOSTID": f"host{rank % 2}", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log + "%p"}
    if flat == rank:
        os.environ["PYNCCL_CPU_BY_HOSTS"] = "0"
    with pynccl.init(timeout=30) as comm:
        for count in (2, LARGE):
            ones = np.ones(count, np.float32)
            assert np.all(comm.all_reduce(ones) == nranks)
            assert np.all(comm.broadcast(np.full(count, rank), root=1) == 1)
            assert np.all(comm.all_gather(ones) == nranks)
    return f"{log}{os.getpid()}"


@pytest.mark.parametrize("flat", [None, 2], ids=["by hosts", "one rank refuses"])
def test_the_log_shows_it(tmp_path: os.PathLike[str], flat: int | None) -> None:
    for name in testing.run(4, calls, str(tmp_path) + "/log.", flat, backend="cpu"):
        with open(name) as file:
            used = {(function, int(count)): how for function, count, _, how in LINE.findall(file.read())}
        expected = {(function, 2): "local" for function in PAIRS}
        expected |= {(function, LARGE): how for function, how in (HOSTS if flat is None else PAIRS).items()}
        assert used.items() >= expected.items()
