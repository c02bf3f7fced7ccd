"""Ranks on GPUs, which share a device where there are fewer devices than ranks."""

from __future__ import annotations

import os

import pynccl
from pynccl import Communicator


def meet(rank: int, nranks: int) -> Communicator:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < nranks:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    cupy.cuda.Device(rank % count).use()
    return pynccl.init(device=rank % count, timeout=120)
