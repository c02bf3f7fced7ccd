"""The torch.distributed backend: rarer forms of operations, several groups at once, wrong arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_pairs import Op, on_groups, run_on_groups, same, values

# Each rank imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(600)]


@pytest.mark.full
@on_groups(3)
def test_averages_complex_and_bool(rank: int, size: int, gloo: Any, ours: Any) -> None:
    """AVG, PREMUL_SUM, complex and bool where all_reduce is not the operation."""
    everyone = [values(r, (size, 4), torch.float32) for r in range(size)]
    total: torch.Tensor = sum(everyone)
    half = dist._make_nccl_premul_sum(0.5)
    for op, factor in ((Op.AVG, 1 / size), (half, 0.5)):
        x = everyone[rank].clone()
        dist.reduce(x, 1, op, ours)
        if rank == 1:
            torch.testing.assert_close(x, total * factor)
        for scatter, given in (
            (dist.reduce_scatter_tensor, everyone[rank].clone()),
            (dist.reduce_scatter, list(everyone[rank].clone())),
        ):
            out = torch.zeros(4)
            scatter(out, given, op, ours)
            torch.testing.assert_close(out, total[rank] * factor)
    mine = [values(r, (size, 3), torch.complex64) for r in range(size)]
    x = mine[rank].clone()
    dist.all_reduce(x, Op.AVG, ours)
    torch.testing.assert_close(x, sum(mine) / size)
    out = torch.zeros(3, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, mine[rank].clone(), Op.SUM, ours)
    same([out], [sum(mine)[rank]], "complex reduce_scatter")
    flags = [values(r, (size, 9), torch.bool) for r in range(size)]
    out = torch.zeros(9, dtype=torch.bool)
    dist.reduce_scatter_tensor(out, flags[rank].clone(), Op.PRODUCT, ours)
    same([out], [torch.stack(flags).all(0)[rank]], "bool reduce_scatter")


@pytest.mark.full
@on_groups(3)
def test_coalesced_forms(rank: int, size: int, gloo: Any, ours: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    def filled(count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value)

    total = float(sum(range(size)))
    many = [filled(n, float(rank)) for n in (1, 50, 5000)]
    dist.all_reduce_coalesced(many, group=ours)
    same(many, [filled(n, total) for n in (1, 50, 5000)], "all_reduce_coalesced")
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [filled(2, float(rank)), filled(3, rank + 0.5)], ours)
    for source, (two, three) in enumerate(lists):
        same([two, three], [filled(2, float(source)), filled(3, source + 0.5)], "all_gather_coalesced")
    outs = [torch.zeros(n) for n in (2, 7)]
    with dist._coalescing_manager(ours, async_ops=True) as manager:
        for out in outs:
            dist.reduce_scatter_tensor(out, filled(out.numel() * size, float(rank)), group=ours)
    manager.wait()
    same(outs, [filled(2, total), filled(7, total)], "reduce_scatter_tensor coalesced")
    wide = [filled(size * n, float(rank)) for n in (1, 4)]
    reduced = functional.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], ours)
    same([functional.wait_tensor(out) for out in reduced], [filled(n, total) for n in (1, 4)], "functional")
    gathered = functional.all_gather_into_tensor_coalesced([filled(n, float(rank)) for n in (1, 4)], ours)
    order = torch.arange(float(size))
    waited = [functional.wait_tensor(out) for out in gathered]
    same(waited, [order.repeat_interleave(n) for n in (1, 4)], "functional all_gather")


@pytest.mark.full
@on_groups(3)
def test_groups_in_different_orders_do_not_block(rank: int, size: int, gloo: Any, ours: Any) -> None:
    """Two groups, whose operations every rank issues in an order of its own."""
    groups = [ours, dist.new_group(backend="pynccl")]
    groups.append(dist.new_group(backend="pynccl"))
    order = [groups[(rank + i) % 3] for i in range(3)]
    for count in (1, 100_000):
        tensors = [torch.ones(count) for _ in order]
        handles = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, order, strict=True)]
        for work in reversed(handles):
            work.wait()
        assert all(x[0] == size for x in tensors)

    def repeat(group: Any) -> None:
        for _ in range(50):
            x = torch.ones(10_000)
            dist.all_reduce(x, group=group)
            assert x[0] == size
            done.append(group)

    done: list[Any] = []
    threads = [threading.Thread(target=repeat, args=(group,)) for group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 150


def split(rank: int, size: int, gloo: Any, ours: Any) -> float | None:
    with pytest.raises(RuntimeError):
        dist.split_group(ours, [[0, 2], [1]])
    members = [0, 2] if rank != 1 else [1]
    part = ours.split_group(members, group_name=f"part-{members[0]}", group_desc="part")
    assert part.size() == len(members) and part.rank() == members.index(rank)
    x = torch.full((3,), float(rank))
    part.allreduce([x]).wait()
    value = x[0].item()
    part.shutdown()
    dist.barrier(ours)
    return value


@pytest.mark.full
def test_split_groups(tmp_path: Path) -> None:
    assert run_on_groups(3, split, tmp_path) == [2.0, 1.0, 2.0]


def wrong_arguments(size: int, ours: Any) -> list[tuple[Callable[[], Any], str]]:
    x, wide = torch.ones(4), torch.ones(4 * size)
    whole, other = torch.ones(4, dtype=torch.int64), torch.ones(4, device="meta")
    pg = ours._get_backend(torch.device("cpu"))
    lists: Callable[[int], list[torch.Tensor]] = lambda n: [torch.ones(4) for _ in range(n)]  # noqa: E731
    return [
        # Through dist, torch itself takes tensors on meta and does nothing.
        (lambda: pg.allreduce([other]), "cpu and cuda tensors, got meta"),
        (lambda: pg._allgather_base(wide.to("meta"), x), "output tensor is on meta, input on cpu"),
        (lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fnuz), group=ours), "Float8_e4m3fnuz"),
        (lambda: dist.all_gather_into_tensor(whole.repeat(size), x, ours), "Long.*Float|Float.*Long"),
        (lambda: dist.all_gather_into_tensor(x, x, ours), "world_size times input"),
        (lambda: pg.allgather([lists(size + 1)], [x]).wait(), f"{size + 1} .*expected {size}"),
        (lambda: dist.reduce_scatter_tensor(x, x, group=ours), "output size times world size"),
        (lambda: pg.reduce_scatter([x], [lists(1)]).wait(), f"1 tensors, expected {size}"),
        (
            lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1), group=ours),
            "divide equally",
        ),
        (lambda: dist.all_to_all_single(wide, wide, [1] * size, [1] * size, ours), "splits sum to"),
        (lambda: pg.alltoall(lists(1), lists(size)).wait(), f"1 outputs and {size} inputs"),
        (lambda: pg.broadcast([x], root(size)), f"invalid root rank: {size}, expected 0 to {size - 1}"),
        (lambda: pg.send([x], size, 0), f"dst is {size}, expected a rank from 0 to {size - 1}"),
        (lambda: pg.send([x], 0, -1), "send: tag is -1, expected 0 or more"),
        (lambda: pg.recv([x], 0, -1), "recv: tag is -1, expected 0 or more"),
        (lambda: pg.recv([x], size, 0), "src is"),
        (lambda: pg.allreduce([x, x]).wait(), "takes one tensor, got 2"),
        (
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist._make_nccl_premul_sum(2.0), ours),
            "Bool",
        ),
    ]


def root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def refused(rank: int, size: int, gloo: Any, ours: Any) -> list[str]:
    accepted = []
    for number, (call, pattern) in enumerate(wrong_arguments(size, ours)):
        try:
            with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError), match=pattern):
                call()
        except BaseException as error:
            accepted.append(f"{number}: {error!r}")
    # The group is none the worse for it.
    x = torch.ones(3)
    dist.all_reduce(x, group=ours)
    assert x.tolist() == [float(size)] * 3
    return accepted


def test_wrong_arguments_are_refused_and_named(tmp_path: Path) -> None:
    assert run_on_groups(2, refused, tmp_path) == [[], []]
