"""How many bytes collectives send over the links of hosts with several ranks each: the least that can be."""

from __future__ import annotations

import json
import sys

import pytest

from engines import environment, outputs
from hosts import Hosts, needs_root

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np, pynccl
rank, size, address, link = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
comm = pynccl.init(address, rank=rank, world_size=size, timeout=60)
counter = Path(f"/sys/class/net/{link}/statistics/tx_bytes")
PART = 250_000  # float32
part, whole = np.full(PART, rank + 1, np.float32), np.full(PART * size, rank + 1, np.float32)
total = size * (size + 1) / 2
calls = {
    "all_reduce": lambda: comm.all_reduce(whole.copy()) == total,
    "reduce_scatter": lambda: comm.reduce_scatter(whole, np.empty_like(part)) == total,
    "reduce": lambda: reduced(),
    "all_gather": lambda: comm.all_gather(part) == np.arange(1, size + 1)[:, None],
    "broadcast": lambda: comm.broadcast(whole.copy(), root=1) == 2,
}
def reduced():
    out = comm.reduce(whole, np.empty_like(whole) if rank == 1 else None, root=1)
    return rank != 1 or (out == total)
def bytes_of(name):
    comm.barrier()
    before = int(counter.read_text())
    assert np.all(calls[name]()), name
    comm.barrier()
    return int(counter.read_text()) - before
# The least of several: on a busy machine TCP sends some segments again.
sent = {name: min(bytes_of(name) for _ in range(6)) / whole.nbytes for name in calls}
comm.destroy()
print(json.dumps(sent))
"""


@needs_root
@pytest.mark.parametrize("per_host", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_part_crosses_the_network_once(hosts: Hosts, per_host: int) -> None:
    """In units of the whole array, over both hosts; the ranks of a host count the same."""
    size = 2 * per_host
    commands = []
    for rank in range(size):
        host = rank // per_host
        arguments = [str(rank), str(size), f"tcp://{hosts.addresses[0]}:29511", hosts.links[host]]
        command = ["ip", "netns", "exec", hosts.names[host], sys.executable, "-c", PROGRAM, *arguments]
        commands.append((command, environment()))
    sent = [json.loads(out) for out in outputs(commands)]
    least = {"all_reduce": 2.0, "reduce_scatter": 1.0, "reduce": 1.0, "all_gather": 1.0, "broadcast": 1.0}
    for name, bytes_sent in least.items():
        # The first rank of each host has counted what the host has sent.
        assert bytes_sent <= sent[0][name] + sent[per_host][name] <= 1.05 * bytes_sent, (name, sent)
