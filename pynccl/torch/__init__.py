"""The torch.distributed backend "pynccl": NCCL for cuda tensors, the CPU library for cpu tensors.

Importing this module registers it; then `torch.distributed.init_process_group("pynccl")`.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pynccl import _lifetime
from pynccl.torch import _build, _provider

if not dist.is_available():
    raise ImportError("pynccl.torch needs a torch built with torch.distributed")

_extension = _build.load()
_extension.set_provider(_provider.provide)
# Before Python ends: a thread that runs callbacks would end the process then.
atexit.register(lambda: _extension.end_all(_lifetime.raised()))


def _create(options: Any, _: Any) -> Any:
    """Make the backend of one process group, from what torch says about it."""
    seconds = options.timeout.total_seconds()
    if seconds <= 0:
        raise ValueError(f"timeout is {options.timeout}; expected a positive timedelta")
    # torchrun's store outlives groups and, after a restart, ranks, and torch uses the same names again; gloo,
    # which takes no notice of that, hangs after a restart (seen with torch 2.13).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", options.store)  # type: ignore[attr-defined, unused-ignore]
    number = store.add(f"groups of rank {options.group_rank}", 1)
    return _extension.Backend(
        dist.PrefixStore(f"group {number}", store),  # type: ignore[attr-defined, unused-ignore]
        options.group_rank,
        options.group_size,
        timedelta(milliseconds=max(1, round(seconds * 1000))),
        # With CUDA devices a group may never see a cpu tensor.
        not torch.cuda.is_available(),
    )


dist.Backend.register_backend("pynccl", _create, extended_api=True, devices=["cpu", "cuda"])
