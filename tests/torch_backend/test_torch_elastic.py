"""Ranks that start again while the store goes on: under one torchrun agent, two, and without any."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conftest import ROOT, clean_environment
from meeting import free_port
from processes import piped
from pynccl import testing

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(240)]

WORKER = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import pynccl.torch

marker = sys.argv[1]
dist.init_process_group("pynccl", timeout=timedelta(seconds=30))
rank = dist.get_rank()
x = torch.ones(1)
dist.all_reduce(x)
if not os.path.exists(marker):
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        open(marker, "w").close()
        os._exit(1)
    # It computes until its agent ends it: it sees no error, so its agent counts no restart of its own.
    time.sleep(100)
part = dist.new_group([0, 3])
dist.all_reduce(x)
if rank in (0, 3):
    dist.all_reduce(x, group=part)
    dist.destroy_process_group(part)
# In one piece: torchrun's python -u writes the end of a line by itself.
os.write(1, f"rank {rank}, restarts {os.environ['TORCHELASTIC_RESTART_COUNT']}: {x.item():g}\\n".encode())
dist.destroy_process_group()
"""


# The same with pynccl.init, which uses torchrun's store, too.
BY_INIT = """
import os, sys, time
import numpy as np, pynccl

marker = sys.argv[1]
with pynccl.init(timeout=30) as comm:
    x = np.ones(1)
    comm.all_reduce(x)
    if not os.path.exists(marker):
        comm.barrier()
        if comm.rank == comm.size - 1:
            open(marker, "w").close()
            os._exit(1)
        time.sleep(100)
    comm.all_reduce(x)
    if comm.rank in (0, 3):
        x *= 2
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"rank {comm.rank}, restarts {restarts}: {x[0]:g}\\n".encode())
"""


def agents(folder: Path, nodes: int, per_node: int, worker: str) -> list[str]:
    """Run the worker under several agents on this host, and return what it prints."""
    script = folder / "worker.py"
    script.write_text(worker)
    keep = {name: os.environ[name] for name in ("PYNCCL_CACHE",) if name in os.environ}
    env = (
        clean_environment()
        | keep
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYNCCL_LIBRARY": "cpu"}
    )
    where = f"localhost:{free_port()}"
    counts = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node), "--max-restarts", "3"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", where]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2", *counts, *meeting]
    started = [
        piped([*launcher, "--node-rank", str(node), str(script), str(folder / "died")], env=env)
        for node in range(nodes)
    ]
    try:
        printed = [agent.communicate(timeout=180) for agent in started]
    finally:
        for agent in started:
            agent.kill()
    assert all(agent.returncode == 0 for agent in started), printed
    return sorted(line for out, _ in printed for line in out.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("worker", [WORKER, BY_INIT], ids=["torch", "init"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2)])
def test_a_death_under_torchrun(tmp_path: Path, nodes: int, per_node: int, worker: str) -> None:
    """Only the agent of the rank that died counts a restart."""
    lines = agents(tmp_path, nodes, per_node, worker)
    assert [line.split(",")[0] for line in lines] == [f"rank {rank}" for rank in range(4)]
    assert [float(line.split(": ")[1]) for line in lines] == [32, 16, 16, 32]
    assert {line.split("restarts ")[1][0] for line in lines} == ({"0", "1"} if nodes == 2 else {"1"})


Part = Callable[[int, int, Any], None]


def on_store(nranks: int, port: int, part: Part, *, check: bool = True) -> None:
    testing.run(nranks, with_store, port, part, backend="cpu", timeout=100, check=check)


def with_store(rank: int, size: int, port: int, part: Part) -> None:
    part(rank, size, dist.TCPStore("localhost", port, is_master=False))


def start(rank: int, size: int, store: Any, seconds: float = 60) -> None:
    import pynccl.torch  # noqa: F401

    limit = timedelta(seconds=seconds)
    dist.init_process_group("pynccl", store=store, rank=rank, world_size=size, timeout=limit)


def works(rank: int, size: int, store: Any) -> None:
    """Groups one after another in one store, some ranks late, several beside each other."""
    for round_ in range(3):
        time.sleep(0.2 * ((rank + round_) % 3))
        start(rank, size, store)
        beside = [dist.new_group(), dist.new_group([1, 0])]
        for group, expected in (None, size), (beside[0], size), (beside[1], 2):
            if expected == size or rank < 2:
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                assert x.tolist() == [float(expected)] * 2
        dist.destroy_process_group()


def dies_early(rank: int, size: int, store: Any) -> None:
    """Rank 1 dies without a group; the others wait for it, and give up."""
    if rank == 1:
        os._exit(1)
    with pytest.raises(dist.DistBackendError, match="the process group was not created in 3 s") as caught:
        start(rank, size, store, 3)
    assert f"rank {rank} of group '0' made it, and has waited for rank 1 of group '0'" in str(caught.value)


def dies_first(rank: int, size: int, store: Any) -> None:
    """Rank 0 dies while it waits for rank 2; rank 1 has come to it."""
    if rank == 0:
        threading.Timer(1, os._exit, [1]).start()
    if rank < 2:
        with pytest.raises(dist.DistBackendError, match="has waited for rank 0 of group '0'"):
            start(rank, size, store, 3)


def dies_late(rank: int, size: int, store: Any) -> None:
    start(rank, size, store)
    dist.barrier()
    if rank == size - 1:
        os._exit(1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "death",
    [
        dies_late,
        pytest.param(dies_early, marks=pytest.mark.slow),
        pytest.param(dies_first, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_start_again_in_a_store_that_stays(death: Part) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    on_store(3, store.port, death, check=False)
    on_store(3, store.port, works)
