"""Train across Ray actors by ray.util.collective on pynccl, and go on when an actor is killed.

python examples/ray_training.py              # four actors on the CPU library; one of them is killed
python examples/ray_training.py -n 3 --gpus

The survivors learn from their error which rank has died, shrink the group, agree on the newest weights among
them, and train on. In the end the weights are those of a training that nothing disturbed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy
import ray
import ray.util.collective as collective
from data_parallel import BATCH, GOAL, RATE, TRAIN, Network, load_data

import pynccl.ray

STEPS = TRAIN // BATCH


class Trainer:
    """One actor's part. Its rank and the number of ranks are those of the group at each step."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        collective.init_collective_group(size, rank, backend="pynccl")
        xp = pynccl.array_module()
        self.images, self.digits = load_data(xp, pynccl.ray.communicator())
        self.network = Network(xp)
        self.gradient = xp.zeros_like(self.network.weights)
        self.step = xp.zeros(1, xp.int64)

    def advance(self) -> None:
        """Make one step; when it raises, the weights are as they were."""
        epoch, position = divmod(int(self.step[0]), STEPS)
        order = numpy.random.default_rng((2, epoch)).permutation(TRAIN)
        batch = order[position * BATCH : (position + 1) * BATCH]
        mine = batch[collective.get_rank() :: collective.get_collective_group_size()]
        self.network.gradient(self.images[mine], self.digits[mine], self.gradient)
        collective.allreduce(self.gradient)
        self.network.weights -= RATE / BATCH * self.gradient
        self.step += 1

    def recover(self, dead: list[int]) -> None:
        """Leave out the dead; take over the weights of the rank that got furthest."""
        comm = pynccl.ray.shrink(dead)
        source = int(comm.all_gather(self.step).argmax())
        collective.broadcast(self.step, source)
        collective.broadcast(self.network.weights, source)

    def train(self, steps: int) -> str:
        """Train up to a number of steps; return what happened meanwhile."""
        news = ""
        while int(self.step[0]) < steps:
            try:
                self.advance()
            except pynccl.RankFailedError as error:
                self.recover(error.ranks)
                place = f"rank {collective.get_rank()} of {collective.get_collective_group_size()}"
                news += f"survived the death of {error.ranks}: {place}"
        return news

    def result(self) -> tuple[float, Any]:
        """Return the accuracy and the weights."""
        score = self.network.accuracy(self.images[TRAIN:], self.digits[TRAIN:])
        return score, numpy.asarray(self.network.weights.tolist())


def main(options: argparse.Namespace) -> None:
    place = {} if options.gpus else {"PYNCCL_LIBRARY": "cpu"}
    actor = ray.remote(Trainer).options(num_gpus=int(options.gpus))
    with ray.init(num_cpus=options.ranks + 1, include_dashboard=False, runtime_env={"env_vars": place}):
        trainers = [actor.remote(rank, options.ranks) for rank in range(options.ranks)]
        ray.get([trainer.train.remote(STEPS) for trainer in trainers])
        running = [trainer.train.remote(options.epochs * STEPS) for trainer in trainers]
        time.sleep(options.kill_after)
        victim = options.ranks // 2
        print(f"killing rank {victim}", flush=True)
        ray.kill(trainers.pop(victim))
        del running[victim]
        for line in ray.get(running):
            print(line or "no rank died in this training", flush=True)
        score, weights = ray.get(trainers[0].result.remote())

        alone = actor.remote()
        ray.get(alone.train.remote(options.epochs * STEPS))
        same, undisturbed = ray.get(alone.result.remote())
        difference = float(abs(weights - undisturbed).max())
        print(f"accuracy {score:.4f}, undisturbed {same:.4f}, difference {difference:.1e}", flush=True)
        if score < GOAL or not difference < 1e-3:
            raise SystemExit("the training was disturbed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--kill-after", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each actor")
    main(parser.parse_args())
