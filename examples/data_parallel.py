"""Learn handwritten digits: the data is split over the ranks, all_reduce averages the gradients.

pynccl run -n 4 examples/data_parallel.py
pynccl run -n 4 examples/data_parallel.py --check      # and compare with a training on one rank
"""

from __future__ import annotations

import argparse
from typing import Any

import pynccl

PIXELS, HIDDEN, CLASSES = 64, 96, 10
TRAIN, BATCH, RATE, MOMENTUM = 1437, 48, 0.2, 0.9
GOAL = 0.95
Array = Any


def load_data(xp: Any, comm: pynccl.Communicator) -> tuple[Array, Array]:
    """Return images and digits in the same order everywhere: rank 0 reads them, the others receive."""
    images, digits = xp.empty((1797, PIXELS), xp.float32), xp.empty(1797, xp.int32)
    if comm.rank == 0:
        import numpy
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

        data = load_digits()
        order = numpy.random.default_rng(0).permutation(len(data.target))
        images[:] = xp.asarray(data.data[order] / 16)
        digits[:] = xp.asarray(data.target[order])
    return comm.broadcast(images), comm.broadcast(digits)


class Network:
    """Two layers; all parameters are views of one array, so that one all_reduce takes all gradients."""

    def __init__(self, xp: Any, seed: int = 1) -> None:
        import numpy

        self.xp = xp
        self.sizes = [PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES]
        random = numpy.random.default_rng(seed)
        scales = [PIXELS**-0.5, 0, HIDDEN**-0.5, 0]
        start = [scale * random.standard_normal(size) for scale, size in zip(scales, self.sizes, strict=True)]
        self.weights = xp.asarray(numpy.concatenate(start).astype(numpy.float32))

    def parts(self, flat: Array) -> tuple[Array, Array, Array, Array]:
        """Return the layers' matrices and biases as views of a flat array."""
        a, b, c, d = (sum(self.sizes[:i]) for i in range(1, 5))
        return flat[:a].reshape(PIXELS, HIDDEN), flat[a:b], flat[b:c].reshape(HIDDEN, CLASSES), flat[c:d]

    def scores(self, images: Array) -> tuple[Array, Array]:
        w1, b1, w2, b2 = self.parts(self.weights)
        hidden = self.xp.tanh(images @ w1 + b1)
        return hidden, hidden @ w2 + b2

    def gradient(self, images: Array, digits: Array, out: Array) -> Array:
        """Write the summed gradient of these samples to `out` and return their summed loss."""
        xp = self.xp
        hidden, scores = self.scores(images)
        scores -= scores.max(axis=1, keepdims=True)
        chances = xp.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = xp.arange(len(digits))
        loss = -xp.log(chances[rows, digits]).sum()
        chances[rows, digits] -= 1
        w1, b1, w2, b2 = self.parts(out)
        back = (chances @ self.parts(self.weights)[2].T) * (1 - hidden**2)
        w1[:], b1[:] = images.T @ back, back.sum(axis=0)
        w2[:], b2[:] = hidden.T @ chances, chances.sum(axis=0)
        return loss

    def accuracy(self, images: Array, digits: Array) -> float:
        return float((self.scores(images)[1].argmax(axis=1) == digits).mean())


def train(
    xp: Any, data: tuple[Array, Array], epochs: int, comm: pynccl.Communicator | None, show: bool
) -> Network:
    """Train a network, on the ranks of `comm` together or on this one alone; every choice is seeded."""
    import numpy

    images, digits = data
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    network, random = Network(xp), numpy.random.default_rng(2)
    velocity = xp.zeros_like(network.weights)
    # The last element carries the loss.
    total = xp.zeros(network.weights.size + 1, xp.float32)
    for epoch in range(1, epochs + 1):
        order = xp.asarray(random.permutation(TRAIN))
        losses = xp.zeros((), xp.float64)
        steps = TRAIN // BATCH
        for step in range(steps):
            mine = order[step * BATCH + rank : (step + 1) * BATCH : size]
            total[-1] = network.gradient(images[mine], digits[mine], total[:-1])
            # Scaled so, the average over the ranks is that over the batch, also when it is split unevenly.
            total *= size / BATCH
            if comm:
                comm.all_reduce(total, op="avg")
            velocity *= MOMENTUM
            velocity -= RATE * (1 - MOMENTUM) * total[:-1]
            network.weights += velocity
            losses += total[-1]
        if show:
            score = network.accuracy(images[TRAIN:], digits[TRAIN:])
            print(f"epoch {epoch} loss {float(losses) / steps:.4f} accuracy {score:.4f}", flush=True)
    return network


def equal_everywhere(xp: Any, comm: pynccl.Communicator, weights: Array) -> bool:
    """Tell whether all ranks hold the same bits."""
    bits = weights.view(xp.int32)
    lowest, highest = xp.empty_like(bits), xp.empty_like(bits)
    comm.all_reduce(bits, lowest, "min")
    comm.all_reduce(bits, highest, "max")
    return bool((lowest == highest).all())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare with a training on one rank")
    options = parser.parse_args()

    with pynccl.init() as comm:
        xp, leads = pynccl.array_module(), comm.rank == 0
        data = load_data(xp, comm)
        network = train(xp, data, options.epochs, comm, show=leads)
        if not equal_everywhere(xp, comm, network.weights):
            raise SystemExit(f"rank {comm.rank}: the ranks hold different weights")
        if options.check and leads:
            alone = train(xp, data, options.epochs, None, show=False)
            difference = float(xp.abs(alone.weights - network.weights).max())
            print(f"largest difference from one rank {difference:.1e}", flush=True)
            if not difference <= 1e-4:
                raise SystemExit("the weights differ from those of a training on one rank")
        if network.accuracy(data[0][TRAIN:], data[1][TRAIN:]) < GOAL:
            raise SystemExit(f"the accuracy is below {GOAL}")
        comm.barrier()
        if leads:
            print(f"weights bitwise equal on {comm.size} ranks", flush=True)


if __name__ == "__main__":
    main()
