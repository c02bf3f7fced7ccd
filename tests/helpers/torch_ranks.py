"""Ranks of torch.distributed on the backend "pynccl"."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pynccl import testing
from ranks import stands_for

Program = Callable[[int, int], None]


def start(rank: int, size: int, store: str, backend: str = "pynccl", seconds: float = 30) -> None:
    """Make the default group by the store at a URL."""
    import pynccl.torch  # noqa: F401

    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)


def on_ranks(
    nranks: int, tmp_path: Path, *programs: Program, seconds: float = 30, timeout: float = 200
) -> None:
    """Run programs one after another on ranks of one group; `seconds` are the group's time-out."""
    at_store(nranks, one_after_another, tmp_path, list(programs), seconds, timeout=timeout)


def at_store(
    nranks: int, fn: Callable[..., Any], tmp_path: Path, *args: Any, timeout: float = 100, **options: Any
) -> list[Any]:
    """Run `fn(rank, size, store, *args)` on ranks, with the URL of a store; it may make a group there."""
    store = f"file://{tmp_path}/store"
    return testing.run(nranks, fn, store, *args, backend="cpu", timeout=timeout, **options)


def on_ranks_of_a_group(nranks: int) -> Callable[[Program], Callable[..., None]]:
    """Make a test of a program on ranks of one group."""

    def decorate(program: Program) -> Callable[..., None]:
        def test(tmp_path: Path, **_: object) -> None:
            on_ranks(nranks, tmp_path, program)

        return stands_for(program, test, 2)

    return decorate


def one_after_another(rank: int, size: int, store: str, programs: list[Program], seconds: float) -> None:
    start(rank, size, store, seconds=seconds)
    for program in programs:
        program(rank, size)
    dist.destroy_process_group()
