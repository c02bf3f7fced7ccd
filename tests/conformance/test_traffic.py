"""How many bytes collectives send over the links of hosts with several ranks each: the least that can be."""

from __future__ import annotations

import json
import sys

import pytest

from engines import environment, outputs
from hosts import joined, needs_root

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
    "broadcast": lambda: comm.broadcast(whole.copy(), root=size - 1) == size,
    "all_to_all": lambda: comm.all_to_all(whole) == np.repeat(np.arange(1, size + 1), PART),
}
def reduced():
    out = comm.reduce(whole, np.empty_like(whole) if rank == size - 1 else None, root=size - 1)
    return rank != size - 1 or (out == total)
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


def least(hosts: int, per_host: int) -> dict[str, list[float]]:
    """Return what each host must send, in units of the whole array."""
    others = (hosts - 1) / hosts
    return {
        "all_reduce": [2 * others] * hosts,
        "reduce_scatter": [others] * hosts,
        "all_gather": [others] * hosts,
        # The root is on the last host; a broadcast goes from there to the first one, and on to the next.
        "reduce": [*[1] * (hosts - 1), 0],
        "broadcast": [*[1] * (hosts - 2), 0, 1],
        "all_to_all": [per_host * others] * hosts,
    }


@needs_root
@pytest.mark.parametrize(
    ("nhosts", "per_host"),
    [(2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((2, 1), (2, 3), (4, 2)))],
)
def test_every_part_crosses_the_network_once(nhosts: int, per_host: int) -> None:
    """Within 5 % for each host's link, however many ranks the host has."""
    size = nhosts * per_host
    with joined(nhosts) as hosts:
        commands = []
        for rank in range(size):
            host = rank // per_host
            arguments = [str(rank), str(size), f"tcp://{hosts.addresses[0]}:29511", hosts.links[host]]
            command = [*hosts.enter(host), sys.executable, "-c", PROGRAM, *arguments]
            commands.append((command, environment()))
        # The first rank of each host has counted what the host has sent.
        sent = [json.loads(out) for out in outputs(commands)][::per_host]
    for name, needed in least(nhosts, per_host).items():
        for host, there in enumerate(needed):
            # Beside the data there are the calls themselves, and what TCP confirms.
            assert there <= sent[host][name] <= 1.05 * there + 0.02, (name, host, sent)
