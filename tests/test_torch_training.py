"""What runs on torch.distributed, on pynccl and on gloo: the same weights in the end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pynccl import testing

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.full, pytest.mark.timeout(240)]

Weights = dict[str, torch.Tensor]


def on_both(
    nranks: int, train: Callable[..., Weights], tmp_path: Path
) -> tuple[list[Weights], list[Weights]]:
    """Run `train(rank, size)` on gloo and on pynccl; return the weights of every rank."""
    found = []
    for backend in ("gloo", "pynccl"):
        store = f"file://{tmp_path}/{backend}"
        found.append(testing.run(nranks, _train, backend, store, train, backend="cpu", timeout=110))
    return found[0], found[1]


def _train(rank: int, size: int, backend: str, store: str, train: Callable[..., Weights]) -> Any:
    import pynccl.torch  # noqa: F401

    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)
    try:
        weights = train(rank, size)
        return {name: tensor.detach().numpy().copy() for name, tensor in weights.items()}
    finally:
        dist.destroy_process_group()


def same(gloo: list[Any], ours: list[Any]) -> None:
    for one, other in zip(gloo, ours, strict=True):
        assert one.keys() == other.keys() and one
        for name in one:
            torch.testing.assert_close(
                torch.from_numpy(other[name]), torch.from_numpy(one[name]), atol=1e-6, rtol=1e-6
            )


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)
    )


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def steps(net: nn.Module, optimizer: Any, rank: int, count: int) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        x = torch.randn(16, 20, generator=generator)
        loss = nn.functional.mse_loss(net(x), x[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def data_parallel(rank: int, size: int) -> Weights:
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.01)
    steps(net, torch.optim.SGD(net.parameters(), lr=0.05), rank, 100)
    return dict(net.module.state_dict())


def test_distributed_data_parallel(tmp_path: Path) -> None:
    gloo, ours = on_both(3, data_parallel, tmp_path)
    same(gloo, ours)
    parameters = [name for name in ours[0] if "running" not in name and "tracked" not in name]
    for other in ours[1:]:
        assert all((ours[0][name] == other[name]).all() for name in parameters)


def zero_redundancy(rank: int, size: int) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(plain_model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    steps(net, optimizer, rank, 30)
    optimizer.consolidate_state_dict(to=0)
    return dict(net.module.state_dict())


def test_zero_redundancy_optimizer(tmp_path: Path) -> None:
    same(*on_both(2, zero_redundancy, tmp_path))


def fully_sharded(rank: int, size: int) -> Weights:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (size,))
    net = plain_model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    steps(net, torch.optim.SGD(net.parameters(), lr=0.05), rank, 20)
    return {name: parameter.full_tensor() for name, parameter in net.named_parameters()}


def test_fully_shard(tmp_path: Path) -> None:
    same(*on_both(2, fully_sharded, tmp_path))


def tensor_parallel(rank: int, size: int) -> Weights:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    y = distribute_tensor(torch.arange(20.0).reshape(4, 5), mesh, [Replicate()])
    product = (x @ y).redistribute(mesh, [Shard(1)]).full_tensor()
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    steps(net, torch.optim.SGD(net.parameters(), lr=0.05), 0, 10)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in net.named_parameters()}
    return whole | {"product": product}


def test_tensor_parallel(tmp_path: Path) -> None:
    gloo, ours = on_both(2, tensor_parallel, tmp_path)
    same(gloo, ours)
    expected = torch.arange(24.0).reshape(6, 4) @ torch.arange(20.0).reshape(4, 5)
    assert torch.equal(torch.from_numpy(ours[0]["product"]), expected)
