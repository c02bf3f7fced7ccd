"""The communicator on GPUs: the same operations as on the CPU library, and what only a GPU has.

Streams that are current, graphs that are captured and replayed, memory of the wrong place. Ranks share a
device where there are fewer devices than ranks (see docs/gpu.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pynccl
from arrays import DTYPES, NARROW, Array, Kind, host_of_torch, torch_over
from gpu_ranks import meet
from operation_cases import Cases
from pynccl import Plan, testing
from ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def kinds() -> list[Kind]:
    import cupy
    import torch

    def torch_on_device(data: Array) -> Any:
        return torch_over(data).cuda()

    def read_torch(tensor: Any) -> Array:
        return host_of_torch(tensor.cpu())

    found = [Kind("cupy", cupy.asarray, cupy.asnumpy, True, NARROW)]
    if torch.cuda.is_available():
        found.append(Kind("torch", torch_on_device, read_torch, True))
    return found


def dtypes() -> list[str]:
    import cupy

    # NCCL computes with float8 from compute capability 9.0 on.
    new = int(cupy.cuda.Device().compute_capability) >= 90
    return [name for name in DTYPES if new or not name.startswith("float8")]


@on_ranks(1, 2, backend="auto", timeout=200)
def test_every_operation(rank: int, nranks: int) -> None:
    with meet(rank, nranks) as comm:
        assert pynccl.library_info().backend == "nccl"
        for kind in kinds():
            for dtype in dtypes():
                if dtype not in kind.lacks:
                    Cases(comm, kind, dtype).all()


@on_ranks(2, backend="auto", timeout=120)
def test_current_streams(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        x = cupy.zeros(1 << 22, cupy.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        for turn in range(20):
            with stream:
                # Long work in front, and a reader behind: only the right stream has both in order.
                x.fill(0)
                for _ in range(20):
                    x += 1
                comm.all_reduce(x)
                total = int(x.sum())
            assert total == 20 * nranks * x.size, turn
        own = pynccl.Stream()
        x.fill(1)
        cupy.cuda.get_current_stream().synchronize()
        comm.all_reduce(x, stream=own)
        own.synchronize(timeout=60)
        assert (x == nranks).all()
        own.destroy()


def graphs(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        x, y, z = (cupy.ones(1024, cupy.float32) for _ in range(3))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            # Once before: NCCL connects its channels at the first call.
            for array in (x, y, z):
                comm.all_reduce(array)
            op = comm.prepare.all_reduce(y)
            plan = Plan([comm.prepare.all_reduce(z), comm.prepare.broadcast(x)])
            stream.synchronize()
            for array in (x, y, z):
                array.fill(1)
            stream.synchronize()
            stream.begin_capture()
            comm.all_reduce(x)
            op()
            plan()
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
            for array in (x, y, z):
                assert (array == nranks**3).all()
        # A graph holds the communicator: it goes first.
        del graph


def test_graphs() -> None:
    testing.run(2, graphs, backend="auto", timeout=120)


@on_ranks(2, backend="auto", timeout=120)
def test_refuses_other_memory(rank: int, nranks: int) -> None:
    import cupy

    with meet(rank, nranks) as comm:
        here = cupy.zeros(4, cupy.float32)
        with pytest.raises(ValueError, match=r"send is host memory.*\(rank"):
            comm.all_reduce(np.zeros(4, np.float32))
        with pytest.raises(ValueError, match=r"recv is host memory.*\(rank"):
            comm.all_reduce(here, np.zeros(4, np.float32))
        with pytest.raises(ValueError, match=r"send is not contiguous.*\(rank"):
            comm.all_reduce(cupy.zeros((4, 4), cupy.float32)[:, ::2])
        if cupy.cuda.runtime.getDeviceCount() > 1:
            other = 1 - comm.device
            with cupy.cuda.Device(other):
                there = cupy.zeros(4, cupy.float32)
            with pytest.raises(
                ValueError, match=f"send is memory of device {other}; expected the communicator"
            ):
                comm.all_reduce(there)
        assert cupy.cuda.runtime.getDevice() == comm.device
        comm.all_reduce(here)
        assert (here == 0).all()
