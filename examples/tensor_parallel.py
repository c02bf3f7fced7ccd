"""Tensor parallelism: the matrices of a transformer block are split over ranks, by columns and then by rows.

pynccl run -n 4 examples/tensor_parallel.py
pynccl run -n 4 examples/tensor_parallel.py --tensor 4

The ranks form a grid. Those of a row, `tensor`, hold parts of one block; those of a column, `data`, hold the
same part and work on different sequences. Both are split from one communicator.
"""

from __future__ import annotations

import argparse
from typing import Any

from comparison import compare, divides, normal, positive

import pynccl

WIDTH, HEADS, HIDDEN = 32, 8, 64
BATCH, LENGTH = 4, 12
Array = Any
Arrays = dict[str, Array]
# Along which axis each matrix is split: what enters a layer by columns, what leaves it by rows.
AXIS = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}


class Grid:
    """This rank's row and column in the grid of ranks."""

    def __init__(self, comm: pynccl.Communicator, tensor_size: int) -> None:
        self.tensor = comm.split(comm.rank // tensor_size)
        self.data = comm.split(comm.rank % tensor_size)

    def part(self, name: str, whole: Array) -> Array:
        """Return this rank's part of a matrix, or its sequences of anything else."""
        comm = self.tensor if name in AXIS else self.data
        parts = pynccl.array_module().split(whole, comm.size, axis=AXIS.get(name, 0))
        return pynccl.array_module().ascontiguousarray(parts[comm.rank])

    def destroy(self) -> None:
        self.tensor.destroy()
        self.data.destroy()


class Attention:
    """Attention over the heads of one rank: columns of query, key and value, rows of out."""

    def __init__(self, comm: pynccl.Communicator, weights: Arrays) -> None:
        self.comm, self.weights, self.heads = comm, weights, HEADS // comm.size

    def split(self, rows: Array) -> Array:
        """(batch, length, columns) to (batch, heads, length, columns of a head)."""
        return rows.reshape(*rows.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def join(self, heads: Array) -> Array:
        rows = heads.transpose(0, 2, 1, 3)
        return rows.reshape(*rows.shape[:2], -1)

    def forward(self, x: Array) -> Array:
        xp, w = pynccl.array_module(), self.weights
        self.x = x
        self.q, self.k, self.v = (self.split(x @ w[name]) for name in ("query", "key", "value"))
        self.scale = self.q.shape[-1] ** -0.5
        scores = self.q @ self.k.swapaxes(2, 3) * self.scale
        chances = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        self.chances = chances / chances.sum(axis=-1, keepdims=True)
        self.heads_out = self.join(self.chances @ self.v)
        # Each rank has the sum over its own heads only.
        return self.comm.all_reduce(self.heads_out @ w["out"])

    def backward(self, dy: Array) -> tuple[Array, Arrays]:
        w, gradients = self.weights, {"out": outer(self.heads_out, dy)}
        dheads = self.split(dy @ w["out"].T)
        dchances = dheads @ self.v.swapaxes(2, 3)
        dscores = (
            self.chances * (dchances - (dchances * self.chances).sum(axis=-1, keepdims=True)) * self.scale
        )
        dx = pynccl.array_module().zeros_like(self.x)
        for name, part in (
            ("query", dscores @ self.k),
            ("key", dscores.swapaxes(2, 3) @ self.q),
            ("value", self.chances.swapaxes(2, 3) @ dheads),
        ):
            rows = self.join(part)
            gradients[name] = outer(self.x, rows)
            dx += rows @ w[name].T
        # Each rank has the part of the gradient that went through its own heads.
        return self.comm.all_reduce(dx), gradients


class Mlp:
    """Two matrices: columns of the first, rows of the second; what is between them stays on the rank."""

    def __init__(self, comm: pynccl.Communicator, weights: Arrays) -> None:
        self.comm, self.weights = comm, weights

    def forward(self, x: Array) -> Array:
        self.x, self.hidden = x, pynccl.array_module().tanh(x @ self.weights["up"])
        return self.comm.all_reduce(self.hidden @ self.weights["down"])

    def backward(self, dy: Array) -> tuple[Array, Arrays]:
        dhidden = (dy @ self.weights["down"].T) * (1 - self.hidden**2)
        gradients = {"up": outer(self.x, dhidden), "down": outer(self.hidden, dy)}
        return self.comm.all_reduce(dhidden @ self.weights["up"].T), gradients


def outer(x: Array, dy: Array) -> Array:
    """Return the gradient of w in y = x @ w, summed over all tokens."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def step(grid: Grid, weights: Arrays, x: Array, goal: Array) -> Arrays:
    """Run a block forward and backward; return this rank's parts of the outputs and the gradients.

    The loss is half the squared distance from `goal`, summed over all sequences.
    """
    mine = {name: grid.part(name, whole) for name, whole in weights.items()}
    attention, mlp = Attention(grid.tensor, mine), Mlp(grid.tensor, mine)
    x, goal = grid.part("x", x), grid.part("goal", goal)

    middle = x + attention.forward(x)
    y = middle + mlp.forward(middle)
    dy = y - goal
    dmiddle, of_mlp = mlp.backward(dy)
    dmiddle += dy
    dx, of_attention = attention.backward(dmiddle)
    dx += dmiddle

    gradients = of_mlp | of_attention
    for gradient in gradients.values():
        # Other sequences went through the same part of the block, on the other ranks of the column.
        grid.data.all_reduce(gradient)
    return {"y": y, "dx": dx, **gradients}


def inputs() -> tuple[Arrays, Array, Array]:
    """Return the whole weights, the sequences and what the block should make of them."""
    shapes = dict.fromkeys(AXIS, (WIDTH, WIDTH)) | {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    return weights, normal(10, BATCH, LENGTH, WIDTH), normal(11, BATCH, LENGTH, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tensor", type=positive, default=2, help="ranks that share a block; the others share the data"
    )
    args = parser.parse_args()
    with pynccl.init() as comm:
        divides(comm, "the number of ranks", comm.size, args.tensor)
        divides(comm, "the number of heads", HEADS, args.tensor)
        divides(comm, "the number of sequences", BATCH, comm.size // args.tensor)
        grid, alone = Grid(comm, args.tensor), Grid(comm.split(comm.rank), 1)
        ours, whole = step(grid, *inputs()), step(alone, *inputs())
        difference = compare(comm, ours, {name: grid.part(name, array) for name, array in whole.items()})
        grid.destroy()
        alone.destroy()
        if comm.rank == 0:
            print(f"{grid.data.size} x {args.tensor} ranks, {HEADS // args.tensor} heads each", flush=True)
            print(f"outputs and gradients differ from one rank's by {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
