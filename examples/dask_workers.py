"""The program of all_reduce.py on Dask workers, which meet through the scheduler's metadata.

PYNCCL_LIBRARY=cpu python examples/dask_workers.py -n 4          # on GPUs: dask_cuda's LocalCUDACluster
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster, get_client

import pynccl


class Keys:
    """The scheduler's metadata as pynccl.init takes them: an object with get and set."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def get(self, name: str) -> Any:
        return self.client.get_metadata(["pynccl", name], default=None)

    def set(self, name: str, value: bytes) -> None:
        self.client.set_metadata(["pynccl", name], value)


def run(rank: int, size: int, count: int) -> str:
    """Run one rank, on a worker."""
    from all_reduce import program

    with pynccl.init(Keys(get_client()), rank=rank, world_size=size, timeout=60) as comm:
        return str(program(comm, count))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=4, help="number of workers")
    parser.add_argument("--count", type=int, default=1024 * 1024, help="floats per rank")
    args = parser.parse_args()

    with (
        LocalCluster(n_workers=args.n, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.upload_file(str(Path(__file__).with_name("all_reduce.py")))
        workers = client.scheduler_info(n_workers=-1)["workers"]
        # One task on each worker, all at the same time: a rank waits for the others.
        tasks = [
            client.submit(run, rank, args.n, args.count, workers=[worker], pure=False)
            for rank, worker in enumerate(workers)
        ]
        for line in client.gather(tasks):
            print(line)


if __name__ == "__main__":
    main()
