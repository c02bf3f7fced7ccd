"""Pipeline parallelism: each rank holds some of the layers, and passes micro-batches on to the next.

pynccl run -n 4 examples/pipeline_parallel.py
pynccl run -n 4 examples/pipeline_parallel.py --micro-batches 16

GPipe runs all micro-batches forward, then all backward. 1F1B turns round as early as it can: a rank then
holds as many micro-batches as there are ranks from it to the end, however many a batch has. Both have the
same bubble, the share of the time in which ranks wait for each other: (p - 1) / (m + p - 1) for p ranks and m
micro-batches.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from comparison import compare, divides, normal, positive

import pynccl

WIDTH, LAYERS, BATCH = 64, 12, 192
Array = Any
Schedule = list[tuple[str, int]]


def gpipe(rank: int, size: int, count: int) -> Schedule:
    return [("forward", i) for i in range(count)] + [("backward", i) for i in range(count)]


def one_forward_one_backward(rank: int, size: int, count: int) -> Schedule:
    ahead = min(size - 1 - rank, count)
    schedule = [("forward", i) for i in range(ahead)]
    for i in range(count):
        if ahead + i < count:
            schedule.append(("forward", ahead + i))
        schedule.append(("backward", i))
    return schedule


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


class Stage:
    """The layers of one rank: x becomes tanh(x @ w) in each; what backward needs of a micro-batch is held."""

    def __init__(self, weights: Array) -> None:
        self.weights, self.gradients = weights, pynccl.array_module().zeros_like(weights)
        self.held: dict[int, list[Array]] = {}
        self.most_held = 0

    def forward(self, i: int, x: Array) -> Array:
        outputs = [x]
        for w in self.weights:
            outputs.append(pynccl.array_module().tanh(outputs[-1] @ w))
        self.held[i] = outputs
        self.most_held = max(self.most_held, len(self.held))
        return outputs[-1]

    def backward(self, i: int, dy: Array) -> Array:
        outputs = self.held.pop(i)
        for layer in reversed(range(len(self.weights))):
            dy = dy * (1 - outputs[layer + 1] ** 2)
            self.gradients[layer] += outputs[layer].T @ dy
            dy = dy @ self.weights[layer].T
        return dy


class Pipeline:
    """One rank of a pipeline, for one batch: `y` fills on the last rank, `dx` on the first."""

    def __init__(self, comm: pynccl.Communicator, stage: Stage, x: list[Array], goal: list[Array]) -> None:
        self.comm, self.stage, self.x, self.goal = comm, stage, x, goal
        self.y: dict[int, Array] = {}
        self.dx: dict[int, Array] = {}
        self.busy = 0.0

    def run(self, schedule: Schedule, seconds: float = 0.0) -> None:
        """Work through a schedule; each pass takes at least so many seconds.

        Between two passes, one group sends the result of the first and receives the input of the second. So
        two neighbours can send to each other, though a send waits for its receive.
        """
        sending: tuple[Array, int] | None = None
        for name, i in schedule:
            # Activations go to the right, gradients to the left.
            source, dest = (-1, 1) if name == "forward" else (1, -1)
            arriving = self.exchange(sending, self.comm.rank + source, self.x[i])
            result = self.compute(name, i, arriving, seconds)
            sending = (result, self.comm.rank + dest)
        self.exchange(sending, -1, None)

    def exchange(self, sending: tuple[Array, int] | None, source: int, like: Array) -> Array | None:
        """Send to a rank and receive from another; neither has to be there."""
        ranks = range(self.comm.size)
        arriving = pynccl.array_module().empty_like(like) if source in ranks else None
        with pynccl.group():
            if sending and sending[1] in ranks:
                self.comm.send(*sending)
            if arriving is not None:
                self.comm.recv(arriving, source)
        return arriving

    def compute(self, name: str, i: int, arriving: Array | None, seconds: float) -> Array:
        start = time.perf_counter()
        if name == "forward":
            result = self.stage.forward(i, self.x[i] if arriving is None else arriving)
            if self.comm.rank == self.comm.size - 1:
                self.y[i] = result
        else:
            # The loss is half the squared distance from the goal, summed over the batch.
            result = self.stage.backward(i, self.y[i] - self.goal[i] if arriving is None else arriving)
            if self.comm.rank == 0:
                self.dx[i] = result
        self.comm.synchronize()
        # As long as on a device of its own, also where ranks share the cores.
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        self.busy += time.perf_counter() - start
        return result


def step(
    comm: pynccl.Communicator,
    name: str,
    weights: Array,
    x: list[Array],
    goal: list[Array],
    seconds: float = 0.0,
) -> tuple[dict[str, Array], int, float]:
    """Return this rank's results, how many micro-batches it held at most, and the bubble of all ranks."""
    xp = pynccl.array_module()
    stage = Stage(xp.split(weights, comm.size)[comm.rank])
    pipeline = Pipeline(comm, stage, x, goal)
    comm.barrier()
    start = time.perf_counter()
    pipeline.run(SCHEDULES[name](comm.rank, comm.size, len(x)), seconds)
    times = comm.all_gather(xp.array([pipeline.busy, time.perf_counter() - start]))
    bubble = 1 - float(times[:, 0].mean() / times[:, 1].max())

    results = {"gradients": stage.gradients}
    for end, parts in (("y", pipeline.y), ("dx", pipeline.dx)):
        if parts:
            results[end] = xp.concatenate([parts[i] for i in range(len(x))])
    return results, stage.most_held, bubble


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batches", type=positive, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="what each pass of a micro-batch takes")
    args = parser.parse_args()
    with pynccl.init() as comm:
        xp, count = pynccl.array_module(), args.micro_batches
        divides(comm, "the number of layers", LAYERS, comm.size)
        divides(comm, "the number of samples", BATCH, count)
        weights = xp.stack([normal(layer, WIDTH, WIDTH) for layer in range(LAYERS)])
        x, goal = (xp.split(normal(seed, BATCH, WIDTH), count) for seed in (20, 21))
        with comm.split(comm.rank) as alone:
            whole, _, _ = step(alone, "gpipe", weights, [xp.concatenate(x)], [xp.concatenate(goal)])
        for name in SCHEDULES:
            ours, held, bubble = step(comm, name, weights, x, goal, args.seconds)
            layers = xp.split(whole["gradients"], comm.size)[comm.rank]
            difference = compare(comm, ours, {key: (whole | {"gradients": layers})[key] for key in ours})
            if comm.rank == 0:
                formula = (comm.size - 1) / (count + comm.size - 1)
                print(f"{name}: bubble {bubble:.2f}, by the formula {formula:.2f}", flush=True)
                print(f"{name}: at most {held} of {count} micro-batches held", flush=True)
                print(f"{name}: gradients differ from one rank's by {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
