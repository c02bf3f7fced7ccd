"""DeepSpeed's own init_distributed on pynccl: its environment's variables, or MPI where they are missing.

mpirun -n 2 python examples/torch_deepspeed.py
torchrun --nproc-per-node 2 examples/torch_deepspeed.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401


def main() -> None:
    deepspeed.init_distributed(dist_backend="pynccl", verbose=False)
    # What is initialized already is used.
    deepspeed.init_distributed(dist_backend="pynccl", verbose=False)
    x = torch.tensor([deepspeed.comm.get_rank()])
    deepspeed.comm.all_reduce(x)
    size = deepspeed.comm.get_world_size()
    sys.stdout.write(f"rank {dist.get_rank()} of {size} on {dist.get_backend()}: {x.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
