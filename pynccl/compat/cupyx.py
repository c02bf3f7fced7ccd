"""The interface of cupyx.distributed over pynccl: `from pynccl.compat import cupyx as distributed`.

Arrays may be of any kind that a Communicator accepts; sparse matrices are CuPy's, or SciPy's on the CPU
library.

Differences from CuPy:

- The store is a thread of rank 0, not a process; it ends after the rendezvous, and a missing rank is
  named. The barrier uses NCCL. `timeout` bounds the rendezvous and every later wait.
- Dtypes, counts, memory order and shapes are checked before a call; buffers that only the root uses are
  not required elsewhere.
- Sparse matrices go from rank to rank, not all through rank 0, and reductions use rank order.
- `use_mpi=True` without mpi4py is an error. `stop` destroys the communicator: call it on every rank.
"""

from __future__ import annotations

import os
from typing import Any

from pynccl import Communicator, current_device, library_info
from pynccl import init as _init
from pynccl._arrays.buffers import in_shape_of
from pynccl._base.values import shown
from pynccl._comm.reductions import OpName
from pynccl.bootstrap._store import format_address
from pynccl.compat import _sparse

_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = 13333


def init_process_group(
    n_devices: int,
    rank: int,
    *,
    backend: str = "nccl",
    host: str | None = None,
    port: int | None = None,
    use_mpi: bool = False,
    timeout: float | None = None,
) -> NCCLBackend:
    """Meet the other ranks at rank 0's host and port, or over MPI, and return the communication backend.

    Host and port are by default CUPYX_DISTRIBUTED_HOST and CUPYX_DISTRIBUTED_PORT. The device
    is the current one. Raises ValueError for wrong arguments, RuntimeError for `use_mpi=True` without mpi4py,
    and otherwise as `pynccl.init` does, BootstrapError for example.
    """
    if n_devices <= 0:
        raise ValueError(f"n_devices is {n_devices}; expected 1 or more")
    if not 0 <= rank < n_devices:
        raise ValueError(f"rank is {rank}; expected 0 <= rank < {n_devices}")
    if backend != "nccl":
        raise ValueError(f"backend is {shown(backend)}; expected 'nccl'")
    host = os.environ.get("CUPYX_DISTRIBUTED_HOST", _DEFAULT_HOST) if host is None else host
    port = int(os.environ.get("CUPYX_DISTRIBUTED_PORT", _DEFAULT_PORT)) if port is None else port
    return NCCLBackend(n_devices, rank, host, port, use_mpi, timeout=timeout)


class NCCLBackend:
    """Rank `rank` of `n_devices`; each method writes to the same arrays as cupyx.distributed.

    Every operation raises as `Communicator.all_reduce` does: TypeError, ValueError, NcclInvalidUsage,
    CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
    """

    def __init__(
        self,
        n_devices: int,
        rank: int,
        host: str = _DEFAULT_HOST,
        port: int = _DEFAULT_PORT,
        use_mpi: bool = False,
        *,
        timeout: float | None = None,
    ) -> None:
        self.rank = rank
        if use_mpi:
            self.comm = _over_mpi(n_devices, rank, timeout)
        else:
            self.comm = _over_tcp(n_devices, rank, host, port, timeout)

    def all_reduce(self, in_array: Any, out_array: Any, op: OpName = "sum", stream: Any = None) -> None:
        """Reduce the arrays of all ranks; every rank gets the result."""
        if _sparse.is_sparse(in_array):
            _sparse.all_reduce(self.comm, in_array, out_array, op, stream)
            return
        self.comm.all_reduce(in_array, in_shape_of(out_array, in_array), op, stream=stream)

    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: OpName = "sum", stream: Any = None
    ) -> None:
        """Reduce the arrays of all ranks to the root; out_array may be None elsewhere."""
        if _sparse.is_sparse(in_array):
            _sparse.reduce(self.comm, in_array, out_array, root, op, stream)
            return
        recv = in_shape_of(out_array, in_array) if self.rank == root else None
        self.comm.reduce(in_array, recv, op, root, stream=stream)

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy the root's array to every rank."""
        if _sparse.is_sparse(in_out_array):
            _sparse.broadcast(self.comm, in_out_array, root, stream)
            return
        self.comm.broadcast(in_out_array, root=root, stream=stream)

    def reduce_scatter(
        self, in_array: Any, out_array: Any, count: int, op: OpName = "sum", stream: Any = None
    ) -> None:
        """Reduce the arrays of all ranks; each rank gets `count` elements of the result."""
        if _sparse.is_sparse(in_array):
            _sparse.reduce_scatter(self.comm, in_array, out_array, op, stream)
            return
        whole = _first(in_array, "in_array", count * self.comm.size)
        self.comm.reduce_scatter(whole, _first(out_array, "out_array", count), op, stream=stream)

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Concatenate `count` elements of every rank's array on every rank."""
        if _sparse.is_sparse(in_array):
            _sparse.all_gather(self.comm, in_array, out_array, stream)
            return
        whole = _first(out_array, "out_array", count * self.comm.size)
        self.comm.all_gather(_first(in_array, "in_array", count), whole, stream=stream)

    def send(self, array: Any, peer: int, stream: Any = None) -> None:
        """Send an array to one rank, which receives it."""
        if _sparse.is_sparse(array):
            _sparse.send(self.comm, array, peer, stream)
            return
        self.comm.send(array, peer, stream=stream)

    def recv(self, out_array: Any, peer: int, stream: Any = None) -> None:
        """Receive an array from one rank, which sends it."""
        if _sparse.is_sparse(out_array):
            _sparse.recv(self.comm, out_array, peer, stream)
            return
        self.comm.recv(out_array, peer, stream=stream)

    def send_recv(self, in_array: Any, out_array: Any, peer: int, stream: Any = None) -> None:
        """Send an array to one rank and receive one from it."""
        if _sparse.is_sparse(in_array):
            _sparse.send_recv(self.comm, in_array, out_array, peer, stream)
            return
        self.comm.send_recv(in_array, peer, out_array, peer, stream=stream)

    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Give each rank its row of the root's array; in_array may be None elsewhere."""
        if _sparse.is_sparse(out_array):
            _sparse.scatter(self.comm, in_array, out_array, root, stream)
            return
        rows = None
        if self.rank == root:
            rows = _rows(in_array, "in_array", self.comm.size)
            out_array = in_shape_of(out_array, rows[0])
        self.comm.scatter(rows, out_array, root, stream=stream)

    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Collect the arrays of all ranks as rows of the root's; out_array may be None elsewhere."""
        if _sparse.is_sparse(in_array):
            _sparse.gather(self.comm, in_array, out_array, root, stream)
            return
        rows = None
        if self.rank == root:
            rows = _rows(out_array, "out_array", self.comm.size)
            in_array = in_shape_of(in_array, rows[0])
        self.comm.gather(in_array, rows, root, stream=stream)

    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """Send row i to rank i, and collect every rank's row for this rank."""
        if _sparse.is_sparse(in_array):
            _sparse.all_to_all(self.comm, in_array, out_array, stream)
            return
        rows, others = (
            _rows(a, f"{way}_array", self.comm.size) for a, way in ((in_array, "in"), (out_array, "out"))
        )
        self.comm.all_to_all(rows, in_shape_of(others, rows), stream=stream)

    def barrier(self) -> None:
        """Return when every rank's host has called barrier."""
        self.comm.barrier()

    def stop(self) -> None:
        """Destroy the communicator, together with the other ranks."""
        self.comm.destroy()


def _first(array: Any, name: str, count: int) -> Any:
    """Return the first elements of an array in memory."""
    if count < 0 or array.size < count:
        raise ValueError(f"{name} has {array.size} elements; expected at least {count}")
    if not array.flags.c_contiguous:
        if array.size == count:
            return array
        raise ValueError(f"{name} is not C-contiguous; expected a C-contiguous array")
    return array.reshape(-1)[:count]


def _rows(array: Any, name: str, size: int) -> Any:
    """Return an array with one row for each rank, contiguous in memory."""
    shape = getattr(array, "shape", None)
    if not shape or shape[0] != size:
        raise ValueError(f"{name} has shape {shape}; expected {size} rows, one for each rank")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not C-contiguous; expected C-contiguous rows")
    return array


def _device() -> int | None:
    """Return the program's current device; with the CPU library, the device numbered like the rank."""
    return None if library_info().backend == "cpu" else current_device()


def _over_tcp(size: int, rank: int, host: str, port: int, timeout: float | None) -> Communicator:
    where = format_address(host, port)
    return _init(f"tcp://{where}", rank=rank, world_size=size, device=_device(), timeout=timeout)


def _over_mpi(size: int, rank: int, timeout: float | None) -> Communicator:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(f"use_mpi=True needs mpi4py, which cannot be imported: {error}") from error
    ranks = MPI.COMM_WORLD.allgather(rank)
    if sorted(ranks) != list(range(size)):
        raise ValueError(f"MPI's processes have the ranks {ranks}; expected each of 0 to {size - 1} once")
    world = MPI.COMM_WORLD.Split(0, rank)
    try:
        return _init(world, device=_device(), timeout=timeout)
    finally:
        world.Free()
