"""DeepSpeed's order of init_distributed, without the deepspeed package.

    mpirun -n 4 python examples/torch_mpi_discovery.py
    torchrun --nproc-per-node 4 examples/torch_mpi_discovery.py

A process group that is initialized already is used. Else the launcher's variables say who is who, and
where they are missing, MPI does through mpi4py: rank, size, local rank and rank 0's address go into the
environment first.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def discover_by_mpi() -> None:
    """Set the variables of torch's env:// method from MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = socket.gethostbyname(socket.gethostname()), probe.getsockname()[1]
    address, port = world.bcast(mine, root=0)
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(local.rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def init_distributed(dist_backend: str = "pynccl", auto_mpi_discovery: bool = True) -> str:
    """Initialize torch.distributed unless it is; return how the ranks were found."""
    if dist.is_initialized():
        return "already initialized"
    how = "environment"
    if auto_mpi_discovery and not all(name in os.environ for name in NEEDED):
        discover_by_mpi()
        how = "MPI"
    dist.init_process_group(dist_backend)
    return how


def main() -> None:
    how = init_distributed()
    assert init_distributed() == "already initialized"
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x)
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} by {how}: {x.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
