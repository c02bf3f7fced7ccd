"""Training in each of torch's own ways, on pynccl: only the backend's name says so.

    torchrun --nproc-per-node 2 examples/torch_training.py data_parallel

data_parallel is DistributedDataParallel, sharded_optimizer ZeroRedundancyOptimizer, fully_sharded FSDP2's
fully_shard, tensor_parallel DTensor with parallelize_module. With a GPU for each rank it trains on them and
NVIDIA's libnccl, else on the CPU library. `--backend gloo --save FOLDER` is for comparing.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pynccl.torch  # noqa: F401

STEPS = 100


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, data: int) -> list[float]:
    """Return the losses of all steps on the random numbers that belong to `data`."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 + data)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 20, generator=generator)
        loss = nn.functional.mse_loss(net(x), x[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel(mesh: DeviceMesh) -> tuple[nn.Module, list[float]]:
    # The buffers of a BatchNorm are rank 0's at every step.
    net = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(20), model()), bucket_cap_mb=0.01)
    return net.module, train(net, torch.optim.SGD(net.parameters(), lr=0.05), mesh.get_rank())


def sharded_optimizer(mesh: DeviceMesh) -> tuple[nn.Module, list[float]]:
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(net, optimizer, mesh.get_rank())
    optimizer.consolidate_state_dict(to=0)
    return net.module, losses


def fully_sharded(mesh: DeviceMesh) -> tuple[nn.Module, list[float]]:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, train(net, torch.optim.SGD(net.parameters(), lr=0.05), mesh.get_rank())


def tensor_parallel(mesh: DeviceMesh) -> tuple[nn.Module, list[float]]:
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # The ranks share each layer, and see the same data.
    return net, train(net, torch.optim.SGD(net.parameters(), lr=0.05), 0)


WAYS = {way.__name__: way for way in (data_parallel, sharded_optimizer, fully_sharded, tensor_parallel)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--backend", default="pynccl")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for the weights, RANK.pt of each rank")
    args = parser.parse_args()
    device = "cpu"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(device)
    torch.manual_seed(0)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    net, losses = WAYS[args.way](dist.init_device_mesh(device, (size,)))
    weights = {name: whole(tensor) for name, tensor in net.state_dict().items()}
    if args.save:
        torch.save(weights, args.save / f"{rank}.pt")
    sys.stdout.write(
        f"rank {rank} of {size}, {args.way}: loss {losses[0]:.3f}, in the end {losses[-1]:.3f}\n"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
