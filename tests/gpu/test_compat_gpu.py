"""What of pynccl.compat needs a GPU: CuPy's own sparse matrices and streams, and arrays that CuPy allocates.

The rest of the same code runs on the CPU library in test_compat_cupy.py and test_compat_cupyx.py. Where there
is one device only, two ranks share it, each with an NCCL_HOSTID of its own (see docs/gpu.md).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from gpu_ranks import take_device
from meeting import free_port, publish
from pynccl import testing
from pynccl.compat import cupy as nccl
from pynccl.compat import cupyx

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def meet(rank: int, nranks: int, port: int) -> cupyx.NCCLBackend:
    take_device(rank, nranks)
    return cupyx.init_process_group(nranks, rank, port=port, timeout=60)


def ring(rank: int, nranks: int) -> None:
    """Do what CuPy's test_nccl.py does with one process."""
    import cupy

    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    assert (comm.rank_id(), comm.size()) == (0, 1)
    comm.check_async_error()
    child = comm.commSplit(color=0, key=0, config=nccl.NcclConfig(split_share=1))
    assert child is not None and child.size() == 1
    assert comm.commSplit(color=-1, key=0) is None
    child.destroy()
    comm.destroy()
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    comm.abort()
    (comm,) = nccl.NcclCommunicator.initAll(1)
    sent = cupy.arange(10)
    received = cupy.zeros_like(sent)
    nccl.groupStart()
    comm.allReduce(
        sent.data.ptr, received.data.ptr, 10, nccl.NCCL_INT64, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr
    )
    nccl.groupEnd()
    assert (sent == received).all()
    comm.destroy()


def test_cupy_nccl_in_one_process() -> None:
    testing.run(1, ring, timeout=120)


def splits(rank: int, nranks: int, folder: str) -> None:
    """Do what CuPy's test_nccl.py does with several processes."""
    import cupy

    take_device(rank, nranks)
    path = Path(folder, "uid")
    if rank == 0:
        publish(path, nccl.get_unique_id())
    while not path.exists():
        time.sleep(0.001)
    comm = nccl.NcclCommunicator(nranks, path.read_bytes(), rank, nccl.NcclConfig(split_share=1))
    child = comm.commSplit(rank // 2, rank)
    assert child is not None and (child.size(), child.rank_id()) == (2, rank % 2)
    array = cupy.array([rank], dtype=cupy.int8)
    child.allReduce(
        array.data.ptr, array.data.ptr, 1, nccl.NCCL_INT8, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr
    )
    assert array[0] == (1, 5)[rank // 2]
    child.destroy()
    comm.destroy()


def test_cupy_nccl_in_four_processes(tmp_path: Path) -> None:
    testing.run(4, splits, str(tmp_path), timeout=150)


def several_devices(rank: int, nranks: int) -> None:
    import cupy

    comms = nccl.NcclCommunicator.initAll([0, 1])
    arrays = []
    for device in range(2):
        with cupy.cuda.Device(device):
            arrays.append(cupy.arange(10, dtype=cupy.int64) * (1 - device))
    nccl.groupStart()
    comms[0].send(arrays[0].data.ptr, 10, nccl.NCCL_INT64, 1, cupy.cuda.Stream.null.ptr)
    comms[1].recv(arrays[1].data.ptr, 10, nccl.NCCL_INT64, 0, cupy.cuda.Stream.null.ptr)
    nccl.groupEnd()
    with cupy.cuda.Device(1):
        assert (arrays[1] == cupy.arange(10)).all()
    for comm in comms:
        comm.abort()


def test_cupy_nccl_over_two_devices() -> None:
    if pynccl.device_count() < 2:
        pytest.skip("one process drives two devices here, and there is one only")
    testing.run(1, several_devices, timeout=120)


def dense(rank: int, nranks: int, port: int) -> None:
    import cupy

    group = meet(rank, nranks, port)
    stream = cupy.cuda.Stream(non_blocking=True)
    for explicit in (None, stream):
        with stream:
            sent = cupy.full(1 << 16, rank + 1, "f")
            out = cupy.empty_like(sent)
            group.all_reduce(sent, out, stream=explicit)
            # On the current stream, so what follows on it is in order.
            assert (out == sum(range(1, nranks + 1))).all()
            rows = cupy.arange(nranks * 10, dtype="d").reshape(nranks, 10) + rank
            row = cupy.empty(10)
            group.scatter(rows, row, 1, stream=explicit)
            assert (row == cupy.arange(10) + 10 * rank + 1).all()
            # A count that is less than the array.
            gathered = cupy.empty((nranks, 10))
            group.all_gather(rows, gathered, 10, stream=explicit)
            assert (gathered[:, 0] == cupy.arange(nranks)).all()
    group.barrier()
    group.stop()


def test_dense_arrays_and_streams() -> None:
    testing.run(2, dense, free_port(), timeout=120)


def matrix(format: str, rank: int, dtype: str) -> Any:
    import cupy
    from cupyx.scipy import sparse

    random = np.random.default_rng(rank)
    whole = random.integers(1, 9, (6, 6)) * (random.random((6, 6)) < 0.2 + 0.2 * rank)
    return getattr(sparse, f"{format}_matrix")(sparse.csr_matrix(cupy.asarray(whole.astype(dtype))))


def empty(format: str, dtype: str) -> Any:
    from cupyx.scipy import sparse

    return getattr(sparse, f"{format}_matrix")((1, 1), dtype=dtype)


def sparse_calls(rank: int, nranks: int, port: int, format: str, dtype: str) -> None:
    import cupy

    group = meet(rank, nranks, port)
    everyone = [matrix(format, r, dtype) for r in range(nranks)]
    mine, total, product = everyone[rank], everyone[0], everyone[0]
    for one in everyone[1:]:
        total, product = total + one, product * one

    def equal(found: Any, expected: Any) -> None:
        assert (found.format, found.shape, found.dtype) == (format, expected.shape, expected.dtype)
        cupy.testing.assert_allclose(found.toarray(), expected.toarray())
        cupy.testing.assert_allclose(found.sum(axis=0), expected.sum(axis=0))

    stream = cupy.cuda.Stream(non_blocking=True)
    for explicit in (None, stream, stream.ptr):
        out = empty(format, dtype)
        group.all_reduce(mine, out, "sum", explicit)
        stream.synchronize()
        equal(out, total)
    out = empty(format, dtype)
    group.all_reduce(mine, out, "prod")
    equal(out, product)
    out = empty(format, dtype) if rank else mine.copy()
    group.broadcast(out)
    equal(out, everyone[0])
    out = empty(format, dtype)
    group.scatter(everyone if rank == 1 else None, out, 1)
    equal(out, mine)
    gathered: list[Any] = []
    group.all_to_all([mine * (i + 1) for i in range(nranks)], gathered)
    for source, one in enumerate(gathered):
        equal(one, everyone[source] * (rank + 1))
    gathered = []
    group.all_gather(mine, gathered, 0)
    for one, expected in zip(gathered, everyone, strict=True):
        equal(one, expected)
    group.send_recv(mine, out, 1 - rank)
    equal(out, everyone[1 - rank])
    group.stop()


@pytest.mark.parametrize("format", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", ["f", "d", "F", "D"])
def test_sparse_matrices(format: str, dtype: str) -> None:
    testing.run(2, sparse_calls, free_port(), format, dtype, timeout=120)
