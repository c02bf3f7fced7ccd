"""ZeRO: the optimizer's state is split over the ranks; each updates its part of the weights.

pynccl run -n 4 examples/sharded_optimizer.py

An all_reduce of the gradients is a reduce_scatter followed by an all_gather. Between the two, each rank has
the averaged gradient of its own part only. That is all it needs to update this part, so it is the only one
that holds Adam's moments for it. Then the all_gather moves new weights in place of gradients.
"""

from __future__ import annotations

import argparse
from typing import Any

from comparison import compare, divides, normal, positive

import pynccl

INPUTS, HIDDEN, OUTPUTS, BATCH = 10, 21, 3, 24
Array = Any


class ShardedAdam:
    """Adam for a flat array of weights, of which each rank updates one part."""

    rate, beta1, beta2, epsilon = 0.01, 0.9, 0.999, 1e-8

    def __init__(self, comm: pynccl.Communicator, weights: Array) -> None:
        xp = pynccl.array_module()
        self.comm, self.steps, self.count = comm, 0, weights.size
        # All parts have the same length; the last may end in zeros that no layer uses.
        part = -(-weights.size // comm.size)
        self.mine = slice(comm.rank * part, (comm.rank + 1) * part)
        self.padded = xp.zeros(part * comm.size, weights.dtype)
        self.padded[: self.count] = weights
        self.gradients = xp.zeros_like(self.padded)
        self.mean, self.square = xp.zeros(part, weights.dtype), xp.zeros(part, weights.dtype)

    @property
    def weights(self) -> Array:
        """The weights, the same on every rank after each step."""
        return self.padded[: self.count]

    def step(self, gradient: Array) -> None:
        """Update the weights by the mean of the ranks' gradients."""
        self.gradients[: self.count] = gradient
        mine = self.gradients[self.mine]
        # In place: this rank's part of the mean replaces its part of its own gradient.
        self.comm.reduce_scatter(self.gradients, mine, op="avg")
        self.steps += 1
        self.mean += (1 - self.beta1) * (mine - self.mean)
        self.square += (1 - self.beta2) * (mine**2 - self.square)
        mean = self.mean / (1 - self.beta1**self.steps)
        square = self.square / (1 - self.beta2**self.steps)
        self.padded[self.mine] -= self.rate * mean / (pynccl.array_module().sqrt(square) + self.epsilon)
        self.comm.all_gather(self.padded[self.mine], self.padded)


def gradient(weights: Array, x: Array, goal: Array) -> Array:
    """Return the gradient of two layers; the loss is half the squared distance, averaged over the samples."""
    xp, border = pynccl.array_module(), INPUTS * HIDDEN
    first, second = weights[:border].reshape(INPUTS, HIDDEN), weights[border:].reshape(HIDDEN, OUTPUTS)
    hidden = xp.tanh(x @ first)
    dy = (hidden @ second - goal) / len(x)
    dhidden = (dy @ second.T) * (1 - hidden**2)
    return xp.concatenate([(x.T @ dhidden).ravel(), (hidden.T @ dy).ravel()])


def train(comm: pynccl.Communicator, weights: Array, x: Array, goal: Array, steps: int) -> ShardedAdam:
    """Train on this rank's share of the samples; every step takes all of them."""
    mine = slice(comm.rank, None, comm.size)
    optimizer = ShardedAdam(comm, weights)
    for _ in range(steps):
        optimizer.step(gradient(optimizer.weights, x[mine], goal[mine]))
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=100)
    args = parser.parse_args()
    with pynccl.init() as comm:
        divides(comm, "the number of samples", BATCH, comm.size)
        weights = normal(1, INPUTS * HIDDEN + HIDDEN * OUTPUTS) * 5
        data = normal(2, BATCH, INPUTS) * 3, normal(3, BATCH, OUTPUTS) * 3
        ours = train(comm, weights, *data, args.steps)
        with comm.split(comm.rank) as alone:
            whole = train(alone, weights, *data, args.steps)
        difference = compare(comm, {"weights": ours.weights}, {"weights": whole.weights})
        if comm.rank == 0:
            held, all_of_it = (2 * each.mean.nbytes for each in (ours, whole))
            print(
                f"bytes of Adam's state: {held} on each of {comm.size} ranks, {all_of_it} on one", flush=True
            )
            print(f"weights after {args.steps} steps differ from one rank's by {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
