"""The program of all_reduce.py in Ray actors, which meet through an actor that holds a dictionary.

PYNCCL_LIBRARY=cpu python examples/ray_actors.py -n 4            # on GPUs: --gpus
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from all_reduce import program

import pynccl


@ray.remote(num_cpus=0)
class Dictionary:
    """What the ranks leave for each other."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value


class Keys:
    """The dictionary as pynccl.init takes it: an object with get and set."""

    def __init__(self, dictionary: Any) -> None:
        self.dictionary = dictionary

    def get(self, name: str) -> Any:
        return ray.get(self.dictionary.get.remote(name))

    def set(self, name: str, value: bytes) -> None:
        ray.get(self.dictionary.set.remote(name, value))


@ray.remote
class Rank:
    """One rank; Ray shows it the GPUs that are its own."""

    def run(self, dictionary: Any, rank: int, size: int, count: int) -> str:
        with pynccl.init(Keys(dictionary), rank=rank, world_size=size, timeout=60) as comm:
            return program(comm, count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=4, help="number of ranks")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--count", type=int, default=1024 * 1024, help="floats per rank")
    args = parser.parse_args()

    with ray.init(num_cpus=args.n, include_dashboard=False, configure_logging=False):
        dictionary = Dictionary.remote()
        ranks = [Rank.options(num_gpus=int(args.gpus)).remote() for _ in range(args.n)]
        for line in ray.get([r.run.remote(dictionary, i, args.n, args.count) for i, r in enumerate(ranks)]):
            print(line)


if __name__ == "__main__":
    main()
