"""Recovery under torchrun: a rank dies, the others get an error, torchrun starts all of them again.

torchrun --nproc-per-node 3 --max-restarts 1 examples/torch_elastic.py
"""

import os

import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401


def main() -> None:
    dist.init_process_group("pynccl")
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    x = torch.ones(1)
    dist.all_reduce(x)
    if attempt == 0 and rank == 1:
        os._exit(1)
    dist.all_reduce(x)
    print(f"rank {rank}, attempt {attempt}: {x.item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
