"""What the tests of semantics have their ranks do again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meeting import until

from .backend import capi
from .worker import Rank

Floats = NDArray[np.float32]

FLOAT32, FLOAT64, UINT8, UINT32 = 7, 8, 1, 3
SUM = 0
OK, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 0, 2, 4, 5, 6, 7, 8


def connect(rank: Rank, config: dict[str, Any] | None = None) -> int:
    """Return a new communicator of all ranks."""
    uid = rank.exchange(capi().ncclGetUniqueId() if rank.rank == 0 else None)[0]
    comm: int = capi().ncclCommInitRankConfig(rank.nranks, uid, rank.rank, config)
    return comm


def close(rank: Rank, *comms: int) -> None:
    """Finalize and destroy communicators."""
    for comm in comms:
        if capi().ncclCommFinalize(comm) == IN_PROGRESS:
            wait_for_state(comm)
        capi().ncclCommDestroy(comm)


def outcome(function: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """Call and return the result code, with the error's text."""
    from pynccl import NcclError

    try:
        result = function(*args)
    except NcclError as error:
        return -1 if error.result is None else error.result, str(error)
    return (result if isinstance(result, int) and result == IN_PROGRESS else OK), ""


def address(array: NDArray[Any]) -> int:
    return array.ctypes.data


def all_reduce(comm: int, array: Floats, stream: int = 0) -> int:
    """Sum an array in place."""
    return int(capi().ncclAllReduce(address(array), address(array), array.size, FLOAT32, SUM, comm, stream))


def synchronize(comm: int, stream: int = 0, seconds: float = 20) -> int:
    return int(capi().pyncclCpuStreamSynchronize(comm, stream, int(seconds * 1000)))


def query(comm: int, stream: int = 0) -> int:
    return int(capi().pyncclCpuStreamQuery(comm, stream))


def works(rank: Rank, comm: int, members: int, stream: int = 0, n: int = 100) -> None:
    """Check that a sum over a communicator of so many ranks is right."""
    array = np.ones(n, np.float32)
    if all_reduce(comm, array, stream) == IN_PROGRESS:
        assert wait_for_state(comm) == OK
    assert synchronize(comm, stream) == OK
    assert (array == members).all(), array


def wait_for_state(comm: int, seconds: float = 20) -> int:
    """Return the communicator's state once it is no longer in progress."""
    until(lambda: capi().ncclCommGetAsyncError(comm) != IN_PROGRESS, seconds)
    return int(capi().ncclCommGetAsyncError(comm))


def async_error(comm: int, seconds: float = 20) -> tuple[int, str]:
    """Wait for an error of the communicator and return it with its text."""
    until(lambda: capi().ncclCommGetAsyncError(comm) not in (OK, IN_PROGRESS), seconds)
    return int(capi().ncclCommGetAsyncError(comm)), str(capi().ncclGetLastError(comm))


def codes(results: Sequence[tuple[int, str]]) -> list[int]:
    return [code for code, _ in results]
