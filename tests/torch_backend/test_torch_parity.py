"""What torch.distributed offers around the operations: groups, options, time-outs, compiled collectives."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

import torch_ranks

# Each rank imports torch.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("torch_backend"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CPU = torch.device("cpu")
Program = Callable[[int, int], None]


on_ranks = partial(torch_ranks.on_ranks, seconds=60, timeout=300)


def world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tensors_without_axes(rank: int, size: int) -> None:
    ranks = [float(r) for r in range(size)]
    mine = torch.tensor(float(rank))
    total = mine.clone()
    dist.all_reduce(total)
    assert total.shape == () and total.item() == sum(ranks)
    dist.broadcast(total, 1)
    dist.reduce(total, 0)
    gathered = [torch.tensor(-1.0) for _ in range(size)]
    dist.all_gather(gathered, mine)
    assert [each.item() for each in gathered] == ranks
    row = torch.empty(size)
    dist.all_gather_into_tensor(row, mine)
    assert row.tolist() == ranks
    part = torch.tensor(0.0)
    dist.reduce_scatter_tensor(part, row)
    assert part.item() == size * rank
    dist.scatter(part, gathered if rank == 0 else None)
    assert part.item() == rank


def groups(rank: int, size: int) -> None:
    """The ranks of each half make their group without the others."""
    half = [0, 1] if rank < 2 else list(range(2, size))
    group: Any = dist.new_group(half, use_local_synchronization=True, group_desc="half")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=group)
    assert x.item() == sum(half) and group.group_desc == "half"
    assert world().group_desc == "default_pg"


def split_by_nccl(rank: int, size: int) -> None:
    """Each member has the parent's communicator split; rank 1 is in no group."""
    dist.barrier()
    for round_ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            part = world().split_group([0, 2], group_name=f"part-{round_}", group_desc="part")
        assert "pynccl:split_group" in [event.name for event in found.events()]
        assert (part is None) == (rank == 1)
        if part is not None:
            assert (part.rank(), part.size()) == ([0, 2].index(rank), 2)
            x = torch.tensor([float(rank)])
            part.allreduce([x]).wait()
            assert x.item() == 2
            part.shutdown()


def splits_that_nobody_keeps(rank: int, size: int) -> None:
    """A rank drops its group at once, while others are still in the split."""
    for _ in range(20):
        world().split_group([0, 1, 2])
        dist.barrier()


def splits_that_differ(rank: int, size: int) -> None:
    """Each rank learns of the lists, and no group of another size than its communicator is made."""
    lists = r"rank 0 calls split_group with ranks \[0, 1\];"
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match=lists) as raised:
            world().split_group([0, 1] if rank == 0 else [0, 1, 2])
        assert " ranks 1, 2 call split_group with ranks [0, 1, 2];" in str(raised.value)
        assert f"(on rank {rank} of group '0'" in str(raised.value)
    backend = world()._get_backend(CPU)
    with pytest.raises(dist.DistBackendError, match="rank 0 calls suspend; ranks 1, 2 call resume;"):
        backend.suspend() if rank == 0 else backend.resume()
    part = world().split_group([0, 2] if rank != 1 else [1])
    x = torch.ones(2)
    part.allreduce([x]).wait()
    assert x.tolist() == [1 if rank == 1 else 2] * 2


def splits_of_strangers(rank: int, size: int) -> None:
    for ranks, wrong in (([0, 7], 7), ([-1], -1), ([0, 3], 3)):
        expected = f"ranks is {ranks}, expected ranks of the group, from 0 to 2, got {wrong}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            world().split_group(ranks)
    # The others learn why one has not come.
    error, text = (
        (ValueError, "") if rank == 1 else (dist.DistBackendError, "given up by rank 1 of group '0'")
    )
    with pytest.raises(error, match=rf"{text}.*ranks is \[0, 7\]"):
        world().split_group([0, 7] if rank == 1 else [0, 2])


def options(rank: int, size: int) -> None:
    import pynccl.torch

    chosen = pynccl.torch.Options(timeout=timedelta(seconds=9), is_high_priority_stream=True)
    assert copy.deepcopy(chosen).is_high_priority_stream
    group: Any = dist.new_group(pg_options=chosen, timeout=timedelta(seconds=40))
    kept = group._get_backend(CPU).options
    assert kept.is_high_priority_stream and kept._timeout == timedelta(seconds=40)
    assert copy.copy(kept).is_high_priority_stream and kept.backend == "pynccl"
    assert not world()._get_backend(CPU).options.is_high_priority_stream
    with pytest.raises(TypeError, match="pg_options is 'fast'; expected pynccl.torch.Options"):
        dist.new_group(pg_options="fast")


def limits(rank: int, size: int) -> None:
    backend = world()._get_backend(CPU)
    backend._set_default_timeout(timedelta(milliseconds=400))
    assert backend.options._timeout == timedelta(milliseconds=400)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        late = dist.all_reduce(torch.ones(2), async_op=True)
        assert late is not None
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 400ms"):
            late.wait()
        store.set("late", "yes")
        late.wait(timedelta(seconds=60))
    backend._set_default_timeout(timedelta(seconds=60))
    if rank > 0:
        store.wait(["late"])
        dist.all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="timeout is 0ms, expected more than 0"):
        backend._set_default_timeout(timedelta(0))
    if not hasattr(dist, "set_timeout"):
        # Before torch 2.15 its function knows only its own backends, and says so.
        with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
        assert backend.options._timeout == timedelta(seconds=60)


def numbers(rank: int, size: int) -> None:
    backend = world()._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 2


def tensors_in_memory_from_nccl(rank: int, size: int) -> None:
    backend = world()._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU) and not backend.supports_tensor_alloc(torch.device("cuda", 0))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        x = backend.allocate_tensor(1000, dtype=dtype, device=CPU)
        assert (x.dtype, x.device, tuple(x.shape)) == (dtype, CPU, (1000,))
        x.fill_(rank + 1)
        assert x.data_ptr() in memory_of_nccl()
        dist.all_reduce(x)
        assert (x == sum(range(1, size + 1))).all()
    assert backend.allocate_tensor(3, dtype=torch.bool, device=CPU).dtype == torch.bool
    assert backend.allocate_tensor(0, dtype=torch.float32, device=CPU).numel() == 0
    with pytest.raises(ValueError, match="expected no negative axis"):
        backend.allocate_tensor(-1, dtype=torch.float32, device=CPU)
    with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda|NVIDIA driver"):
        backend.allocate_tensor(1, dtype=torch.float32, device=torch.device("cuda", 0))


def memory_of_nccl() -> set[int]:
    """Return where the areas of memory from ncclMemAlloc begin."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.partition("-")[0], 16) for line in lines if "nccl" in line.rpartition("/")[2]}


def not_provided(rank: int, size: int) -> None:
    """What docs/torch.md says of calls that the backend does not have."""
    backend = world()._get_backend(CPU)
    with pytest.raises(RuntimeError, match="Backend pynccl does not support getMemAllocator"):
        _ = backend.mem_allocator
    # Functions of ProcessGroupNCCL alone, not of c10d::Backend.
    assert not any(hasattr(backend, name) for name in ("register_mem_pool", "deregister_mem_pool"))


def test_groups_options_and_limits(tmp_path: Path) -> None:
    splits = [split_by_nccl, splits_that_nobody_keeps, splits_that_differ, splits_of_strangers]
    on_ranks(3, tmp_path, tensors_without_axes, groups, *splits, options, limits, numbers)
    on_ranks(2, tmp_path, tensors_in_memory_from_nccl, not_provided)


# --- functional collectives, and graphs with them ---


def functional_calls(x: torch.Tensor) -> list[torch.Tensor]:
    group = world()
    reduced = functional.all_reduce(x * 2, "sum", group)
    gathered = functional.all_gather_tensor(reduced + 1, 0, group)
    return [
        reduced,
        gathered,
        functional.reduce_scatter_tensor(gathered, "sum", 0, group),
        functional.all_to_all_single(gathered, None, None, group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
    ]


def expected_calls(rank: int, size: int) -> list[list[float]]:
    total = float(size * (size + 1))
    return [
        [total] * 4,
        [total + 1] * (4 * size),
        [size * (total + 1)] * 4,
        [total + 1] * (4 * size),
        [2.0] * 4,
        [float(size)] * 4,
        [float(size + 1)] * 4,
    ]


def functionally(rank: int, size: int) -> None:
    results = functional_calls(torch.full((4,), rank + 1.0))
    assert [result.tolist() for result in results] == expected_calls(rank, size)


def compiled_with(compiler: str, rank: int, size: int) -> None:
    graph = torch.compile(functional_calls, backend=compiler, fullgraph=True)
    for _ in range(2):
        results = graph(torch.full((4,), rank + 1.0))
        assert [result.tolist() for result in results] == expected_calls(rank, size)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x + 1

    result = torch.compile(in_place, backend=compiler, fullgraph=True)(torch.ones(4))
    assert result.tolist() == [size + 1.0] * 4


def compiled(rank: int, size: int) -> None:
    compiled_with("aot_eager", rank, size)


def compiled_by_inductor(rank: int, size: int) -> None:
    compiled_with("inductor", rank, size)


def test_functional_collectives_and_graphs(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, functionally, compiled)


@pytest.mark.full
def test_graphs_of_inductor(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, compiled_by_inductor)


# --- what torch 2.15 forwards to the backend ---


def forwarded(rank: int, size: int) -> None:
    group = world()
    dist.set_timeout(timedelta(seconds=33))
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=33)
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    assert group._get_sequence_number_for_group() == before + 1
    part = group.split_group([1, 0], group_name="swapped")
    assert part.rank() == 1 - rank
    x = torch.tensor([float(rank)])
    part.broadcast(x, 0).wait()
    assert x.item() == 1
    part.shutdown()


@pytest.mark.full
@pytest.mark.newest_torch
def test_what_torch_forwards(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, forwarded)
