"""The torch.distributed backend "pynccl": NCCL for cuda tensors, the CPU library for cpu tensors.

Importing this module registers it; then `torch.distributed.init_process_group("pynccl")`.
"""

from __future__ import annotations

import atexit
import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pynccl._comm import lifetime
from pynccl.bootstrap._generation import meet
from pynccl.torch import _build, _provider

if not dist.is_available():
    raise ImportError("pynccl.torch needs a torch built with torch.distributed")


def _register() -> Any:
    extension = _build.load()
    extension.set_provider(_provider.provide)
    # Before Python exits: after that, a thread that runs callbacks would end the process.
    atexit.register(lambda: extension.end_all(lifetime.raised()))
    dist.Backend.register_backend("pynccl", _create, extended_api=True, devices=["cpu", "cuda"])
    return extension


def _runs_the_command() -> bool:
    """Tell whether Python imports this for `python -m pynccl.torch`, which compiles by itself."""
    named = ("-m", __name__) in pairwise(sys.orig_argv) or f"-m{__name__}" in sys.orig_argv
    return sys.argv[:1] == ["-m"] and named


def _create(options: Any, _: Any) -> Any:
    """Make the backend of one process group from torch's options."""
    seconds = options.timeout.total_seconds()
    if seconds <= 0:
        raise ValueError(f"timeout is {options.timeout}; expected a positive timedelta")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))

    def name(rank: int) -> str:
        of = f"rank {rank} of group {options.group_id!r}"
        return of if ranks[rank] == rank else f"{of} (global rank {ranks[rank]})"

    def late(missing: list[int]) -> Exception:
        return dist.DistBackendError(
            f"pynccl: the process group did not come about in {seconds:g} s: {name(options.group_rank)} "
            f"made it, and has waited for {', '.join(map(name, missing))}"
        )

    number = meet(options.store, options.group_rank, options.group_size, seconds, late)
    return _extension.Backend(
        dist.PrefixStore(f"group {number}", options.store),  # type: ignore[attr-defined, unused-ignore]
        options.group_rank,
        options.group_size,
        timedelta(milliseconds=max(1, round(seconds * 1000))),
        # With CUDA devices a group may never get a cpu tensor.
        not torch.cuda.is_available(),
        options.group_id,
        ranks,
    )


_extension: Any = None if _runs_the_command() else _register()
