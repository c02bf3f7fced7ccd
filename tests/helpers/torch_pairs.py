"""Ranks that have a group of gloo and one of pynccl, and what they compare."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranks import stands_for
from torch_ranks import at_store

Op = dist.ReduceOp
SEED = 1234


def run_on_groups(nranks: int, fn: Callable[..., Any], tmp_path: Path, *args: Any) -> list[Any]:
    """Run `fn(rank, size, gloo, pynccl, *args)` on ranks that have both groups."""
    return at_store(nranks, _with_groups, tmp_path, fn, args, timeout=200)


def on_groups(nranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of rank, size, gloo and pynccl."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(tmp_path: Path, **_: object) -> None:
            run_on_groups(nranks, body, tmp_path)

        return stands_for(body, test, 4)

    return decorate


def _with_groups(rank: int, size: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import pynccl.torch  # noqa: F401

    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    ours = dist.new_group(backend="pynccl", timeout=limit)
    try:
        return fn(rank, size, dist.group.WORLD, ours, *args)
    finally:
        dist.destroy_process_group()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small values, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(SEED + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randint(-4, 5, (*shape, 2), generator=generator).float()
        return torch.view_as_complex(parts).to(dtype)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def same(got: Any, expected: Any, what: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), (what, one, other)
