"""The torch.distributed backend "pynccl": NCCL for cuda tensors, the CPU library for cpu tensors.

Importing this module registers it; then `torch.distributed.init_process_group("pynccl")`.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pynccl.torch import _build, _provider

if not dist.is_available():
    raise ImportError("pynccl.torch needs a torch built with torch.distributed")

_extension = _build.load()
_extension.set_provider(_provider.provide)
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def _create(options: Any, _: Any) -> Any:
    """Make the backend of one process group, from what torch says about it."""
    # After a restart torchrun's store still has the keys of the ranks before; gloo, which takes no notice of
    # that, hangs there (seen with torch 2.13).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    backend = _extension.Backend(
        dist.PrefixStore(f"attempt {attempt}", options.store),  # type: ignore[attr-defined, unused-ignore]
        options.group_rank,
        options.group_size,
        timedelta(milliseconds=max(1, round(options.timeout.total_seconds() * 1000))),
        # With CUDA devices a group may never see a cpu tensor.
        not torch.cuda.is_available(),
    )
    _living.add(backend)
    return backend


@atexit.register
def _abort_what_is_left() -> None:
    for backend in list(_living):
        with suppress(RuntimeError):
            backend.abort()


dist.Backend.register_backend("pynccl", _create, extended_api=True, devices=["cpu", "cuda"])
