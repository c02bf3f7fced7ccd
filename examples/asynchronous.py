"""Collectives in the background.

Gradients are summed while the next layer's are computed. An asyncio loop goes on while it awaits other ranks.

pynccl run -n 4 examples/asynchronous.py
"""

from __future__ import annotations

import argparse
import asyncio
import time

import pynccl


def overlapped(comm: pynccl.Communicator, layers: int, width: int) -> None:
    """Start the sum of each layer's gradient as soon as it is computed; wait once, at the end."""
    xp = pynccl.array_module()
    works = []
    for layer in range(layers):
        gradient = xp.full(width, float(comm.rank + layer))
        works.append(comm.all_reduce(gradient, wait=False))
    for layer, work in enumerate(works):
        expected = sum(rank + layer for rank in range(comm.size))
        if not bool((work.wait() == expected).all()):
            raise SystemExit(f"rank {comm.rank} of {comm.size}: the sum of layer {layer} is wrong")


async def requests(served: list[float]) -> None:
    """Stand for what else the process does: note the time every 10 ms."""
    while True:
        served.append(time.monotonic())
        await asyncio.sleep(0.01)


async def serve(comm: pynccl.Communicator) -> int:
    """Wait for a rank that is late; return how many requests were served meanwhile."""
    xp = pynccl.array_module()
    served: list[float] = []
    server = asyncio.create_task(requests(served))
    if comm.rank == 0:
        await asyncio.sleep(0.5)
    total = await comm.all_reduce(xp.ones(4), wait=False)
    server.cancel()
    if float(total[0]) != comm.size:
        raise SystemExit(f"rank {comm.rank} of {comm.size}: the sum is wrong")
    return len(served)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="gradients that are summed")
    parser.add_argument("--width", type=int, default=100_000, help="elements of a gradient")
    args = parser.parse_args()

    with pynccl.init() as comm:
        overlapped(comm, args.layers, args.width)
        served = asyncio.run(serve(comm))
        if served < 2:
            raise SystemExit(f"rank {comm.rank} of {comm.size}: the loop stood still")
        print(f"rank {comm.rank} of {comm.size}: all sums are right, the loop went on", flush=True)


if __name__ == "__main__":
    main()
