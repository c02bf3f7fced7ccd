"""CuPy's own NCCL binding over the CPU library, by LD_PRELOAD of the forwarding library.

`cupy.cuda.nccl` links against libnccl.so.2 and nothing else of CUDA: with the preload it imports and works
without a GPU, a driver or a CUDA runtime, on raw pointers to host memory. (Without the preload it is an empty
module and a warning.) tests/interfaces/test_compat_cupy.py compares its calls with those of pynccl's own
interface, and with NumPy; here is the rest. CuPy cannot wait for a stream without CUDA; pynccl in the same
process can: it uses the same CPU library.
"""

from __future__ import annotations

import importlib.util
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
from processes import completed

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
    folder = completed(command, check=True, cwd=ROOT).stdout.strip()
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
