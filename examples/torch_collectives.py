"""AllReduce, ReduceScatter, AllGather and Broadcast by torch.distributed, on pynccl.

    torchrun --nproc-per-node 4 examples/torch_collectives.py

With a GPU for each rank it works on cuda tensors and NVIDIA's libnccl, else on cpu tensors and the CPU
library.
"""

import os
import sys

import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401


def show(name: str, text: str) -> None:
    sys.stdout.write(f"{name}, rank: {dist.get_rank()}, {text}\n")
    sys.stdout.flush()
    dist.barrier()


def all_reduce(rank: int) -> None:
    tensor = torch.tensor(rank)
    before = tensor.clone()
    dist.all_reduce(tensor)
    show("all_reduce", f"before: {before.item()}, after: {tensor.item()}")


def reduce_scatter(rank: int, size: int) -> None:
    output = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter(output, [torch.tensor([rank]) for _ in range(size)], op=dist.ReduceOp.SUM)
    show("reduce_scatter", f"output: {output.tolist()}")


def all_gather(rank: int, size: int) -> None:
    outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([rank]))
    show("all_gather", f"outputs: {[tensor.tolist() for tensor in outputs]}")


def broadcast(rank: int, size: int) -> None:
    tensor = torch.tensor([size]) if rank == 0 else torch.zeros(1, dtype=torch.int64)
    before = tensor.tolist()
    dist.broadcast(tensor, src=0)
    show("broadcast", f"before: {before}, after: {tensor.tolist()}")


def main() -> None:
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("pynccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    all_reduce(rank)
    reduce_scatter(rank, size)
    all_gather(rank, size)
    broadcast(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
