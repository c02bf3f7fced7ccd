"""Jacobi's method for Laplace's equation on a grid: ranks own rows and put their edges into their neighbours.

pynccl run -n 4 examples/halo_exchange.py

The program runs three times: with put_signal and wait_signal, with send and recv, and on one rank alone. All
three grids are equal, bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynccl


class Part:
    """The rows of one rank, with a row of each neighbour above and below; twice, for old and new values."""

    def __init__(self, comm: pynccl.Communicator, size: int) -> None:
        rows = size // comm.size
        self.comm, self.halves = comm, pynccl.zeros((2, rows + 2, size), "float64")
        # The first row of the whole grid is warm, and stays so.
        if comm.rank == 0:
            self.halves[:, 0, :] = 1.0
        self.above = comm.rank - 1 if comm.rank > 0 else None
        self.below = comm.rank + 1 if comm.rank < comm.size - 1 else None

    def update(self, new: int) -> None:
        """Compute new values from the old ones: each is the mean of its four neighbours."""
        u, out = self.halves[1 - new], self.halves[new]
        out[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])

    def edges(self, half: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield each neighbour, the edge that it needs, and the row for its edge."""
        rows = self.halves[half]
        if self.above is not None:
            yield self.above, rows[1], rows[0]
        if self.below is not None:
            yield self.below, rows[-2], rows[-1]


def by_puts(part: Part, steps: int) -> None:
    """Put each edge into the neighbour's halo, and wait for the neighbours' edges.

    A put needs no receipt: a neighbour that has sent its edge of this step has read the halo of the step
    before, which is the half that the next put writes.
    """
    comm, shape = part.comm, part.halves.shape
    with comm.window(part.halves, symmetric=True) as window:
        for step in range(steps):
            new = (step + 1) % 2
            part.update(new)
            with pynccl.group():
                for peer, edge, _ in part.edges(new):
                    row = 0 if peer == part.below else shape[1] - 1
                    comm.put_signal(edge, peer, window, (new * shape[1] + row) * shape[2])
                    comm.wait_signal(peer)


def by_messages(part: Part, steps: int) -> None:
    """Exchange the edges with send and recv."""
    for step in range(steps):
        new = (step + 1) % 2
        part.update(new)
        with pynccl.group():
            for peer, edge, halo in part.edges(new):
                part.comm.send(edge, peer)
                part.comm.recv(halo, peer)


def solve(comm: pynccl.Communicator, size: int, steps: int, exchange: Callable[[Part, int], None]) -> Any:
    """Return the whole grid on every rank, and print how long the steps took."""
    part = Part(comm, size)
    comm.barrier()
    start = time.perf_counter()
    exchange(part, steps)
    comm.synchronize()
    if comm.rank == 0:
        seconds = time.perf_counter() - start
        print(f"{exchange.__name__} on {comm.size} ranks: {seconds / steps * 1e6:.0f} us a step", flush=True)
    own = pynccl.array_module().ascontiguousarray(part.halves[steps % 2, 1:-1])
    grid = comm.all_gather(own).reshape(-1, size)
    comm.synchronize()
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=240, help="rows and columns; a multiple of the ranks")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with pynccl.init() as comm:
        if args.size < comm.size or args.size % comm.size:
            raise SystemExit(f"--size is {args.size}; expected a multiple of the {comm.size} ranks")
        grids = [solve(comm, args.size, args.steps, exchange) for exchange in (by_puts, by_messages)]
        with comm.split(comm.rank) as alone:
            expected = solve(alone, args.size, args.steps, by_messages) if comm.rank == 0 else grids[0]
        comm.broadcast(expected)
        if not all(bool((grid == expected).all()) for grid in grids):
            raise SystemExit(f"rank {comm.rank}: the grids differ")
        print(f"rank {comm.rank} of {comm.size}: the three grids are equal", flush=True)


if __name__ == "__main__":
    main()
