"""Megatron's way of groups: tensor- and pipeline-parallel ones, and a broadcast from the last pipeline stage.

    torchrun --nproc-per-node 4 examples/torch_pipeline.py

Ranks 0, 1 are the first stage, 2, 3 the last; each stage's ranks are a tensor-parallel group. The last
stage's result reaches every stage through the pipeline's group.
"""

import sys

import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401

TENSOR_PARALLEL = 2


def groups(size: int, rank: int) -> tuple[dist.ProcessGroup, list[int], dist.ProcessGroup]:
    """Return this rank's pipeline group and its ranks, and its tensor-parallel group."""
    mine = None
    for first in range(TENSOR_PARALLEL):
        ranks = list(range(first, size, TENSOR_PARALLEL))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group, ranks
    assert mine is not None
    for first in range(0, size, TENSOR_PARALLEL):
        ranks = list(range(first, first + TENSOR_PARALLEL))
        group = dist.new_group(ranks)
        if rank in ranks:
            return *mine, group
    raise AssertionError("every rank is in a tensor-parallel group")


def broadcast_from_last_pipeline_stage(
    size: int, dtype: torch.dtype, tensor: torch.Tensor | None, ranks: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the last stage's tensor on every stage."""
    if tensor is None:
        tensor = torch.empty(size, dtype=dtype)
    dist.broadcast(tensor, ranks[-1], group=group)
    return tensor


def main() -> None:
    dist.init_process_group("pynccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    pipeline, stages, tensor_parallel = groups(size, rank)
    stage = stages.index(rank)
    # Forward: each stage receives, adds its tensor-parallel sum, and sends on.
    activation = torch.zeros(8)
    if stage > 0:
        dist.recv(activation, stages[stage - 1])
    partial = torch.full((8,), float(rank))
    dist.all_reduce(partial, group=tensor_parallel)
    activation += partial
    last = stage == len(stages) - 1
    if not last:
        dist.send(activation, stages[stage + 1])
    result = broadcast_from_last_pipeline_stage(
        8, torch.float32, activation if last else None, stages, pipeline
    )
    assert result.tolist() == [float(sum(range(size)))] * 8, result
    sys.stdout.write(f"rank {rank}, stage {stage}: {result[0].item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
