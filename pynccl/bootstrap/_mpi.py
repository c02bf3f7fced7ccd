"""The exchange over MPI: of results instead of ids, so that no failure leaves ranks behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pynccl import capi
from pynccl._errors import BootstrapError
from pynccl._types import UniqueId


def is_communicator(method: Any) -> bool:
    """Tell whether this is an mpi4py communicator, without importing mpi4py."""
    return not isinstance(method, str) and all(
        hasattr(method, name) for name in ("Get_rank", "Get_size", "bcast")
    )


def exchange(method: Any, select: Callable[[int], int | None]) -> tuple[int, UniqueId, int, int | None]:
    """Return size, unique id, rank and device; `select` gets the rank on this machine."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BootstrapError(f"method='mpi' needs mpi4py, which cannot be imported: {error}") from error
    comm = MPI.COMM_WORLD if method == "mpi" else method
    rank, size = comm.Get_rank(), comm.Get_size()
    ok, answer = comm.bcast(
        _attempt(lambda: bytes(UniqueId(capi.ncclGetUniqueId()))) if rank == 0 else None, root=0
    )
    if not ok:
        raise BootstrapError(f"rank 0 of {size} failed: {answer}")
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    mine = _attempt(lambda: select(local.Get_rank()))
    local.Free()
    # A barrier as well: a broadcast may not have reached everybody yet, and NCCL blocks from here on.
    failures = [
        f"rank {other}: {text}" for other, (good, text) in enumerate(comm.allgather(mine)) if not good
    ]
    if failures:
        raise BootstrapError("; ".join(failures))
    return size, UniqueId(answer), rank, mine[1]


def _attempt(call: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, call()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
