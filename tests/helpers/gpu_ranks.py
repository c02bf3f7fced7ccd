"""Ranks on GPUs, which share a device where there are fewer devices than ranks."""

from __future__ import annotations

import os

import pynccl
from pynccl import Communicator


def shared(rank: int, nranks: int, count: int) -> int:
    """Return a rank's device of `count`, which ranks share if necessary; before NCCL is loaded."""
    if count < nranks:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    return rank % count


def take_device(rank: int, nranks: int) -> int:
    """Return a rank's device, which is then CuPy's current one."""
    import cupy

    device = shared(rank, nranks, cupy.cuda.runtime.getDeviceCount())
    cupy.cuda.Device(device).use()
    return device


def meet(rank: int, nranks: int) -> Communicator:
    return pynccl.init(device=take_device(rank, nranks), timeout=120)
