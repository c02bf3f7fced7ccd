"""CuPy's own NCCL binding over the CPU library, by LD_PRELOAD of the forwarding library.

`cupy.cuda.nccl` links against libnccl.so.2 and nothing else of CUDA: with the preload it imports and works
without a GPU, a driver or a CUDA runtime, on raw pointers to host memory. (Without the preload it is an empty
module and a warning.) CuPy cannot wait for a stream without CUDA; pynccl in the same process can: it uses the
same CPU library.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.ranks import ROOT, Ranks
from conformance.worker import Rank

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.timeout(150),
]

# All that the class offers; a new method of CuPy's has to be tried here too.
METHODS = {
    "_initAll", "abort", "allGather", "allReduce", "bcast", "broadcast", "check_async_error", "comm",
    "commSplit", "destroy", "device_id", "initAll", "rank_id", "recv", "reduce", "reduceScatter", "send",
    "size",
}  # fmt: skip
N = 1000

Array = NDArray[Any]


def nccl() -> Any:
    """Return CuPy's binding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl


@pytest.fixture(scope="module")
def preload() -> str:
    command = [sys.executable, "-m", "pynccl", "cpu-library", "--dir"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    library = Path(folder, "libnccl.so.2")
    assert library.exists()
    return str(library)


def connect(rank: Rank) -> Any:
    """Return this process's CuPy communicator."""
    if "cupy" not in rank.state:
        uid = rank.exchange(nccl().get_unique_id() if rank.rank == 0 else None)[0]
        rank.state["cupy"] = nccl().NcclCommunicator(rank.nranks, uid, rank.rank)
    return rank.state["cupy"]


def connects(rank: Rank) -> None:
    connect(rank)


@pytest.fixture(scope="module")
def ranks(preload: str) -> Iterator[Ranks]:
    with Ranks(4, env={"LD_PRELOAD": preload}) as ranks:
        # CuPy takes long to import.
        ranks.call(connects, timeout=80)
        yield ranks


def wait(comm: Any) -> None:
    """Wait for the default stream, through pynccl: the handle is good for both."""
    from pynccl import capi

    assert capi.pyncclCpuStreamSynchronize(comm.comm, 0, 20_000) == 0


def ptr(array: Array) -> int:
    return array.ctypes.data


def identity(rank: Rank) -> tuple[int, int, int, int, set[str]]:
    from pynccl import capi

    comm = connect(rank)
    assert (capi.ncclCommUserRank(comm.comm), capi.ncclCommCount(comm.comm)) == (comm.rank_id(), comm.size())
    # cpdef and property alike; the rest is Cython's.
    methods = {name for name in dir(nccl().NcclCommunicator) if not name.startswith("__")}
    return comm.rank_id(), comm.size(), comm.device_id(), nccl().get_version(), methods


def test_identity(ranks: Ranks) -> None:
    for rank, (rank_id, size, device, version, methods) in enumerate(ranks.call(identity)):
        assert (rank_id, size, version) == (rank, 4, 23203)
        assert device >= 0
        assert methods == METHODS


def libraries(rank: Rank) -> tuple[str, list[str]]:
    import pynccl

    connect(rank)
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if "libpynccl_cpu" in line}
    info = pynccl.library_info()
    return info.backend, sorted(mapped)


def test_one_library_in_the_process(ranks: Ranks) -> None:
    for backend, mapped in ranks.call(libraries):
        assert backend == "cpu"
        assert len(mapped) == 1


def datatypes(rank: Rank) -> None:
    module, comm = nccl(), connect(rank)
    names = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64"]
    operations = [("SUM", np.add), ("PROD", np.multiply), ("MAX", np.maximum), ("MIN", np.minimum)]
    for name in names:
        dtype, number = np.dtype(name.lower()), getattr(module, f"NCCL_{name}")
        everyone = [np.arange(N).astype(dtype) % dtype.type(5) + dtype.type(r) for r in range(rank.nranks)]
        for op, function in operations:
            result = np.empty_like(everyone[0])
            mine = everyone[rank.rank].copy()
            comm.allReduce(ptr(mine), ptr(result), N, number, getattr(module, f"NCCL_{op}"), 0)
            wait(comm)
            assert np.array_equal(result, function.reduce(everyone, dtype=dtype)), (name, op)
    average = np.full(N, rank.rank, np.float32)
    comm.allReduce(ptr(average), ptr(average), N, module.NCCL_FLOAT32, module.NCCL_AVG, 0)
    wait(comm)
    assert (average == 1.5).all()


def test_all_reduce(ranks: Ranks) -> None:
    ranks.call(datatypes)


def collectives(rank: Rank) -> None:
    module, comm = nccl(), connect(rank)
    me, n, f, total = rank.rank, rank.nranks, module.NCCL_FLOAT, module.NCCL_SUM
    mine, out = np.full(N, me + 1, np.float32), np.zeros(N, np.float32)
    for root in range(n):
        out[:] = 0
        comm.reduce(ptr(mine), ptr(out), N, f, total, root, 0)
        wait(comm)
        assert (out == (10 if me == root else 0)).all()
        comm.broadcast(ptr(mine), ptr(out), N, f, root, 0)
        wait(comm)
        assert (out == root + 1).all()
        out[:] = mine
        comm.bcast(ptr(out), N, f, root, 0)
        wait(comm)
        assert (out == root + 1).all()
    gathered = np.zeros(n * N, np.float32)
    comm.allGather(ptr(mine), ptr(gathered), N, f, 0)
    wait(comm)
    assert (gathered == np.repeat(np.arange(1, n + 1), N)).all()
    gathered *= me + 1
    comm.reduceScatter(ptr(gathered), ptr(out), N, f, total, 0)
    wait(comm)
    assert (out == 10 * (me + 1)).all()
    comm.check_async_error()


def test_collectives(ranks: Ranks) -> None:
    ranks.call(collectives)


def messages(rank: Rank) -> None:
    module, comm = nccl(), connect(rank)
    me, n = rank.rank, rank.nranks
    sent, received = np.full(N, me, np.int32), np.zeros(N, np.int32)
    module.groupStart()
    comm.send(ptr(sent), N, module.NCCL_INT32, (me + 1) % n, 0)
    comm.recv(ptr(received), N, module.NCCL_INT32, (me - 1) % n, 0)
    module.groupEnd()
    wait(comm)
    assert (received == (me - 1) % n).all()
    # And without a group, along a line.
    if me > 0:
        comm.recv(ptr(received), N, module.NCCL_INT, me - 1, 0)
    if me + 1 < n:
        comm.send(ptr(sent), N, module.NCCL_INT, me + 1, 0)
    wait(comm)
    assert (received == (me - 1 if me else n - 1)).all()


def test_messages(ranks: Ranks) -> None:
    ranks.call(messages)


def splitting(rank: Rank) -> None:
    module, comm = nccl(), connect(rank)
    for config in (None, module.NcclConfig(split_share=1)):
        half = comm.commSplit(rank.rank % 2, -rank.rank, config)
        assert (half.size(), half.rank_id()) == (2, 1 - rank.rank // 2)
        array = np.full(N, rank.rank, np.float64)
        half.allReduce(ptr(array), ptr(array), N, module.NCCL_DOUBLE, module.NCCL_SUM, 0)
        wait(half)
        assert (array == (2, 4)[rank.rank % 2]).all()
        half.destroy()
        half.destroy()


def test_split(ranks: Ranks) -> None:
    ranks.call(splitting)


def errors(rank: Rank) -> None:
    module, comm = nccl(), connect(rank)
    array = np.zeros(N, np.float32)
    f, total, a = module.NCCL_FLOAT, module.NCCL_SUM, ptr(array)
    wrong: list[tuple[Any, ...]] = [
        (comm.reduce, a, a, N, f, total, rank.nranks, 0),
        (comm.allReduce, a, a, N, 99, total, 0),
        (comm.send, a, N, f, -1, 0),
    ]
    for function, *args in wrong:
        with pytest.raises(module.NcclError, match="INVALID_ARGUMENT") as caught:
            function(*args)
        assert caught.value.status == 4
    comm.check_async_error()


def test_errors(ranks: Ranks) -> None:
    ranks.call(errors)


def all_in_one(rank: Rank, devices: Any) -> None:
    module = nccl()
    comms = module.NcclCommunicator.initAll(devices)
    arrays = [np.full(N, i + 1, np.float32) for i in range(len(comms))]
    module.groupStart()
    for comm, array in zip(comms, arrays, strict=True):
        comm.allReduce(ptr(array), ptr(array), N, module.NCCL_FLOAT, module.NCCL_SUM, 0)
    module.groupEnd()
    for i, comm in enumerate(comms):
        wait(comm)
        assert (comm.rank_id(), comm.size()) == (i, 3)
        assert (arrays[i] == 6).all()
        comm.destroy()


@pytest.mark.parametrize("devices", [3, [2, 0, 1]])
def test_init_all(ranks: Ranks, devices: Any) -> None:
    ranks.call(all_in_one, devices)


def aborting(rank: Rank) -> None:
    module = nccl()
    uid = rank.exchange(module.get_unique_id() if rank.rank == 0 else None)[0]
    comm = module.NcclCommunicator(rank.nranks, uid, rank.rank)
    if rank.rank == 0:
        array = np.zeros(N, np.float32)
        comm.allReduce(ptr(array), ptr(array), N, module.NCCL_FLOAT, module.NCCL_SUM, 0)
        comm.abort()
        # Nothing is left of it: CuPy passes NULL.
        assert comm.comm == 0
        return
    try:
        while True:
            comm.check_async_error()
            time.sleep(0.001)
    except (module.NcclError, KeyError):
        # CuPy's table of names ends before ncclRemoteError in some releases.
        comm.abort()


def test_abort(ranks: Ranks) -> None:
    ranks.call(aborting)


def without_pynccl(rank: Rank) -> None:
    """PYNCCL_CPU_BLOCKING=1 makes CuPy alone enough."""
    module, comm = nccl(), connect(rank)
    array = np.full(N, rank.rank + 1, np.float16)
    comm.allReduce(ptr(array), ptr(array), N, module.NCCL_HALF, module.NCCL_SUM, 0)
    assert (array == 10).all()


def test_blocking_calls(preload: str) -> None:
    with Ranks(4, env={"LD_PRELOAD": preload, "PYNCCL_CPU_BLOCKING": "1"}) as ranks:
        ranks.call(without_pynccl, timeout=80)
