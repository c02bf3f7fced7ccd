"""What training frameworks ask of a backend: coalescing, messages to oneself, splits, averages, names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torch_ranks import on_ranks, on_ranks_of_a_group

# Each rank imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(240)]

CPU = torch.device("cpu")
Program = Callable[[int, int], None]


def results_are_right(rank: int, size: int) -> None:
    """No group is open: what is issued now is done, in every form."""
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 3
    x = torch.full((3,), float(rank))
    dist.broadcast(x, 1)
    assert x.tolist() == [1.0] * 3
    right, left = (rank + 1) % size, (rank - 1) % size
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, x[:2], left)]
    )
    for work in works:
        work.wait()
    assert x.tolist() == [left, left, 1.0]


def refused_in_a_batch(rank: int, size: int) -> None:
    """Nothing of a batch is sent where one part is refused."""
    other = (rank + 1) % size

    def batch() -> None:
        with dist._coalescing_manager(device=CPU, async_ops=True):
            dist.isend(torch.full((2,), 100.0), other)
            dist.group.WORLD.recv([torch.ones(2), torch.ones(2)], other, 0)

    with pytest.raises(ValueError, match="recv takes one tensor, got 2"):
        batch()
    results_are_right(rank, size)


def sparse_in_a_batch(rank: int, size: int) -> None:
    """torch has no messages of sparse tensors; its record of the batch must not stay open."""
    other, dense = (rank + 1) % size, torch.ones(3, 3)
    for sparse, layout in ((dense.to_sparse(), "Sparse"), (dense.to_sparse_csr(), "SparseCsr")):
        for op, name in ((dist.isend, "send"), (dist.irecv, "recv")):
            refused = pytest.raises(ValueError, match=f"{name}: tensor has layout {layout}, expected a dense")
            with refused:
                dist.batch_isend_irecv([dist.P2POp(dist.isend, dense, other), dist.P2POp(op, sparse, other)])
            with refused:
                op(sparse, other)
            results_are_right(rank, size)


def refused_in_a_group(rank: int, size: int) -> None:
    x, wide = torch.ones(4), torch.ones(size)
    recorded = []

    def group() -> None:
        with dist._coalescing_manager(device=CPU, async_ops=True):
            recorded.append(dist.broadcast(x, 0, async_op=True))
            dist.all_to_all_single(wide, wide, [2] * size, [2] * size)
            dist.all_to_all_single(wide, wide, [3] * size, [3] * size)

    with pytest.raises(ValueError, match="its splits sum to"):
        group()
    (first,) = recorded
    with pytest.raises(ValueError, match="its splits sum to"):
        first.wait()
    assert x.tolist() == [1.0] * 4
    results_are_right(rank, size)


def left_by_an_exception(rank: int, size: int) -> None:
    """torch leaves its own record open, too; the next group that it coalesces closes both."""
    x = torch.full((2,), float(rank))
    recorded = []

    def group() -> None:
        with dist._coalescing_manager(device=CPU, async_ops=True):
            recorded.append(dist.broadcast(x, 1, async_op=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        group()
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        y = torch.full((2,), float(rank))
        dist.broadcast(y, 1, async_op=True)
    manager.wait()
    assert y.tolist() == [1.0, 1.0]
    (lost,) = recorded
    with pytest.raises(dist.DistBackendError, match="an exception left the group"):
        lost.wait()
    results_are_right(rank, size)


def test_refusals_in_coalesced_groups(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, refused_in_a_batch, sparse_in_a_batch, refused_in_a_group, left_by_an_exception)


def message(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count,), value)


def to_oneself_in_a_batch(rank: int, size: int) -> None:
    """A pipeline whose stages are on one rank; other ranks' messages go beside."""
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, theirs = torch.zeros(3), torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message(10.0 + rank), rank),
            dist.P2POp(dist.isend, message(float(rank)), right, tag=1),
            dist.P2POp(dist.irecv, theirs, left, tag=1),
            dist.P2POp(dist.irecv, mine, rank),
        ]
    )
    for work in works:
        work.wait()
    assert (mine.tolist(), theirs.tolist()) == ([10.0 + rank] * 3, [float(left)] * 3)


def to_oneself(rank: int, size: int) -> None:
    """In any order, with tags, gaps and callbacks."""
    sent = [dist.isend(message(float(i)), rank, tag=i % 2) for i in range(6)]
    wide = torch.zeros(6, 3, 2)
    for i in (1, 0, 3, 5, 2, 4):
        work = dist.irecv(wide[i, :, 0], rank, tag=i % 2)
        assert work is not None
        work.wait()
    assert wide[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    for work in sent:
        assert work is not None
        work.wait()
    x = torch.zeros(3)
    received = dist.irecv(x, rank)
    assert received is not None
    doubled = received.get_future().then(lambda future: future.value()[0] * 2)
    dist.isend(message(2.0), rank)
    assert doubled.wait().tolist() == [4.0] * 3
    dist.irecv(x, rank)
    work = dist.isend(message(1.0, 0), rank)
    assert work is not None
    work.wait()


def to_oneself_of_another_size(rank: int, size: int) -> None:
    dist.isend(message(1.0, 4), rank)
    work = dist.irecv(torch.zeros(3), rank)
    assert work is not None
    with pytest.raises(RuntimeError, match=r"12 bytes, but the message of rank [0-9] has 16"):
        work.wait()
    late = dist.irecv(torch.zeros(3), rank)
    assert late is not None
    with pytest.raises(dist.DistBackendError, match="Timed out waiting 200ms for recv"):
        late.wait(timedelta(milliseconds=200))
    dist.isend(message(1.0), rank)
    late.wait()


@pytest.mark.parametrize("nranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_messages_to_oneself(tmp_path: Path, nranks: int) -> None:
    on_ranks(nranks, tmp_path, to_oneself_in_a_batch, to_oneself, to_oneself_of_another_size)


def as_nccl(everyone: list[torch.Tensor]) -> torch.Tensor:
    """Return the average as NCCL has it: the sum, which wraps around, over the ranks, toward zero."""
    total = np.sum([x.numpy() for x in everyone], axis=0, dtype=everyone[0].numpy().dtype)
    return torch.from_numpy(np.trunc(total / len(everyone)).astype(total.dtype))


@on_ranks_of_a_group(3)
def test_averages_of_integers(rank: int, size: int) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32):
        low = -60 if dtype.is_signed else 0
        everyone = [
            torch.randint(low, 60, (size, 17), generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(size)
        ]
        mean = as_nccl(everyone)
        x = everyone[rank].clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert torch.equal(x, mean), (dtype, x, mean)
        x = everyone[rank].clone()
        dist.reduce(x, 1, dist.ReduceOp.AVG)
        assert rank != 1 or torch.equal(x, mean), dtype
        part = torch.empty(17, dtype=dtype)
        dist.reduce_scatter_tensor(part, everyone[rank].clone(), dist.ReduceOp.AVG)
        assert torch.equal(part, mean[rank]), dtype
    x = torch.full((3,), 200, dtype=torch.uint8)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [200 * size % 256 // size] * 3
    with pytest.raises(TypeError, match="AVG with Bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)


def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind the program's group to a device that is not there, as init_process_group(device_id=) does."""
    from pynccl.torch import _extension

    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(_extension.Backend, "eager_connect_single_device", lambda self, device: None)


def total(group: Any) -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return float(x.item())


@on_ranks_of_a_group(4)
def test_splits_with_a_device(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        accelerator(monkeypatch)
        assert dist.get_world_size(dist.new_group()) == size
        some = dist.new_group([0, 2])
        assert rank not in (0, 2) or total(some) == 2
        for round_ in range(2):
            part = dist.split_group(split_ranks=[[0, 2], [1, 3]], timeout=timedelta(seconds=7))
            assert part is not None and total(part) == (2 if rank % 2 == 0 else 4)
            backend = part._get_backend(CPU)
            assert backend.options._timeout == timedelta(seconds=7)
            assert part.group_desc == f"default_pg:split:{round_}"
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert total(mesh["b"].get_group()) == 4 * (rank // 2) + 1
        assert total(mesh["a"].get_group()) == 2 + 2 * (rank % 2)
    whole = dist.group.WORLD._get_backend(CPU)
    assert whole.options._timeout == timedelta(seconds=30)
    whole.options._timeout = timedelta(seconds=1)
    assert copy.deepcopy(whole.options)._timeout == copy.copy(whole.options)._timeout == timedelta(seconds=30)
    assert whole.options.backend == "pynccl"
    dist.group.WORLD.bound_device_id = None


@on_ranks_of_a_group(3)
def test_timeouts_name_the_group_and_the_rank(rank: int, size: int) -> None:
    group = dist.new_group([2, 1], group_desc="pipeline", timeout=timedelta(seconds=20))
    if rank == 2:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert work is not None
        where = rf"rank 1 of group '{group.group_name}' \(pipeline\), which is global rank 2[;.]"
        expected = rf"for all_reduce \(call 1 of the group\) on {where}"
        with pytest.raises(dist.DistBackendError, match=expected):
            work.wait(timedelta(milliseconds=300))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        if rank == 1:
            dist.all_reduce(torch.ones(2), group=group)
