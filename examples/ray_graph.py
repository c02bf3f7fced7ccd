"""Ray's Compiled Graphs and its tensor transport on pynccl.

python examples/ray_graph.py                 # actors without GPUs, on the CPU library

A graph sums a tensor of each actor. Then one actor's weights go directly to another one.
"""

from typing import Any

import ray
import torch
from ray.dag import InputNode, MultiOutputNode
from ray.experimental.collective import allreduce
from ray.experimental.util.types import ReduceOp

import pynccl.ray

ACTORS = 3
pynccl.ray.register_transport()


class Worker:
    def gradient(self, step: float) -> torch.Tensor:
        return torch.full((4,), step)

    def norm(self, total: torch.Tensor) -> float:
        return float(total.norm())

    @ray.method(tensor_transport="pynccl")
    def weights(self) -> torch.Tensor:
        return torch.arange(4.0)

    def load(self, weights: torch.Tensor) -> list[float]:
        return weights.tolist()


def sums(workers: list[Any]) -> list[list[float]]:
    """Run a graph of the actors three times; return the norm of the sum on each actor, each time."""
    communicator = pynccl.ray.HostCommunicator(workers)  # actors with GPUs: DeviceCommunicator.of(workers)
    with InputNode() as step:
        made = [worker.gradient.bind(step) for worker in workers]
        totals = allreduce.bind(made, ReduceOp.SUM, transport=communicator)
        norms = [worker.norm.bind(total) for worker, total in zip(workers, totals, strict=True)]
        graph = MultiOutputNode(norms).experimental_compile()
    found = [ray.get(graph.execute(float(step))) for step in (1, 2, 3)]
    graph.teardown()
    communicator.destroy()
    return found


def main() -> None:
    place = {"env_vars": {"PYNCCL_LIBRARY": "cpu"}, "worker_process_setup_hook": pynccl.ray.register}
    with ray.init(num_cpus=ACTORS, include_dashboard=False, runtime_env=place):
        actor = ray.remote(enable_tensor_transport=True)(Worker)
        workers = [actor.remote() for _ in range(ACTORS)]
        for step, norms in enumerate(sums(workers), 1):
            print(f"step {step}: the norms are {norms}", flush=True)
        loaded = ray.get(workers[2].load.remote(workers[0].weights.remote()))
        print(f"worker 2 has worker 0's weights: {loaded}", flush=True)


if __name__ == "__main__":
    main()
