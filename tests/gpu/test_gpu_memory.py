"""Memory from NCCL on GPUs: arrays, registrations, and the memory pools of CuPy and torch."""

from __future__ import annotations

import gc
import os

import pytest

import pynccl
from gpu_ranks import meet
from pynccl import NcclInvalidUsage
from ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 1 << 20


def free_bytes() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


@on_ranks(2, backend="auto", timeout=120)
def test_arrays(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        x = pynccl.zeros(MIB, "float32")
        assert isinstance(x, cupy.ndarray)
        assert not x.any()
        x += rank + 1
        with comm.register(x):
            comm.all_reduce(x)
            assert (x == sum(range(nranks + 1))).all()
        comm.all_reduce(x)
        assert (x == nranks * sum(range(nranks + 1))).all()


@on_ranks(2, backend="auto", timeout=120)
def test_tensors(rank: int, nranks: int) -> None:
    import torch

    with meet(rank, nranks) as comm:
        like = torch.zeros(1, device=f"cuda:{comm.device}", dtype=torch.bfloat16)
        x = pynccl.zeros((2, 3), like=like)
        assert (x.device, x.dtype, x.shape) == (like.device, like.dtype, (2, 3))
        x += rank + 1
        comm.all_reduce(x)
        assert (x == sum(range(nranks + 1))).all()


@on_ranks(1, backend="auto", timeout=120)
def test_memory_is_freed_after_kernels_that_use_it(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        before = free_bytes()
        result = cupy.empty(64 * MIB, cupy.float32)
        for turn in range(10):
            x = pynccl.empty(64 * MIB, "float32")
            x.fill(turn)
            for _ in range(20):
                x += 1
            comm.all_reduce(x, result)
            # Work that uses it is still on the stream.
            del x
            assert (result == turn + 20).all()
        del result
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        assert free_bytes() > before - 64 * MIB


@on_ranks(1, backend="auto", timeout=120)
def test_capture(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        x, dropped = pynccl.zeros(1024, "float32"), pynccl.zeros(1024, "float32")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            comm.all_reduce(x)
            stream.synchronize()
            stream.begin_capture()
            with pytest.raises(NcclInvalidUsage, match="during the graph capture"):
                comm.register(x)
            # Freed now or later, the capture goes on.
            del dropped
            comm.all_reduce(x)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        del graph


@on_ranks(2, backend="auto", timeout=120)
def test_pool_of_cupy(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        allocator = pynccl.allocators.cupy(comm)
        with allocator:
            x = cupy.full(MIB, rank + 1, cupy.float32)
        assert comm.registered(x)
        counts = allocator.counts()
        assert counts.allocated >= counts.in_use >= x.nbytes
        assert counts.registered == counts.allocated
        comm.all_reduce(x)
        assert (x == sum(range(nranks + 1))).all()
        del x
        allocator.pool.free_all_blocks()
        assert allocator.counts() == (0, 0, 0)


@on_ranks(2, backend="auto", timeout=120)
def test_pool_of_torch(rank: int, nranks: int) -> None:
    import torch

    with meet(rank, nranks) as comm:
        torch.cuda.set_device(comm.device)
        allocator = pynccl.allocators.torch(comm)
        with allocator:
            x = torch.full((MIB,), rank + 1.0, device="cuda")
        assert comm.registered(x)
        counts = allocator.counts()
        assert counts.allocated >= counts.in_use >= x.numel() * 4
        assert counts.registered == counts.allocated
        comm.all_reduce(x)
        assert (x == sum(range(nranks + 1))).all()


@on_ranks(2, backend="auto", timeout=120)
def test_statistics(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        if pynccl.get_version() < (2, 29, 7):
            with pytest.raises(pynccl.NotSupportedError, match=r"needs NCCL >= 2\.29\.7"):
                comm.memory_stats()
            return
        x = cupy.ones(MIB, cupy.float32)
        comm.all_reduce(x)
        cupy.cuda.get_current_stream().synchronize()
        before = comm.memory_stats()
        assert before.total == before.suspend + before.persist
        with comm.register(x):
            comm.suspend()
            assert comm.memory_stats().suspended
            comm.resume()
            assert not comm.memory_stats().suspended
            comm.all_reduce(x)
            assert (x == nranks * nranks).all()


@on_ranks(2, backend="auto", timeout=120)
def test_puts_and_signals(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        mine, out = pynccl.zeros(MIB, "float32"), pynccl.zeros(MIB, "float32")
        out += rank + 1
        with comm.window(mine, symmetric=True) as window, comm.window(out, symmetric=True):
            comm.put_signal(out[:1000], 1 - rank, window, offset=500)
            comm.wait_signal(1 - rank)
            assert (mine[500:1500] == 2 - rank).all()
            assert not mine[:500].any()
            comm.signal(1 - rank)
            comm.wait_signal({1 - rank: 1})
            stream = cupy.cuda.Stream(non_blocking=True)
            plan = pynccl.Plan(
                [
                    comm.prepare.put_signal(out, 1 - rank, window, stream=stream),
                    comm.prepare.wait_signal(1 - rank, stream=stream),
                ]
            )
            plan()
            comm.synchronize(stream)
            assert (mine == 2 - rank).all()
            comm.barrier()
            if not os.environ.get("NCCL_HOSTID"):
                other = window.peer(1 - rank)
                assert isinstance(other, cupy.ndarray)
                assert (other == rank + 1).all()
            comm.barrier()
