"""Calls that several of the tests of strictness make."""

from __future__ import annotations

from typing import Any

import numpy as np

from .backend import capi
from .bodies import transports
from .scenario import FLOAT32, SUM, Floats, close, outcome, works
from .worker import Rank

N = 100
TRANSPORTS = transports("direct", "threads")

Outcome = tuple[int, str]

COLLECTIVES = [
    "AllReduce",
    "Reduce",
    "ReduceScatter",
    "Broadcast",
    "AllGather",
    "AlltoAll",
    "Gather",
    "Scatter",
]


def binding() -> tuple[Any, Any]:
    """Return cffi's ffi and lib: for NULL, and for handles that are written late."""
    from pynccl._library.binding import ffi, lib

    return ffi, lib


def state(comm: int) -> int:
    return int(capi().ncclCommGetAsyncError(comm))


def ones(n: int = N) -> Floats:
    return np.ones(n, np.float32)


def create_with(rank: Rank, config: dict[str, Any]) -> Outcome:
    """Create a communicator of one rank with a configuration, and use it."""
    api = capi()
    made: list[int] = []
    result = outcome(lambda: made.append(api.ncclCommInitRankConfig(1, api.ncclGetUniqueId(), 0, config)))
    for comm in made:
        works(rank, comm, 1)
        close(rank, comm)
    return result


def operation(name: str, rank: Rank, comm: int, a: int, b: int) -> tuple[Any, ...]:
    """Return a call with its arguments; a and b have N floats for each of two ranks."""
    api, f = capi(), FLOAT32
    if name == "SendRecv":
        return (api.ncclRecv, b, N, f, 0, comm, 0) if rank.rank else (api.ncclSend, a, N, f, 1, comm, 0)
    middle: dict[str, tuple[int, ...]] = {
        "AllReduce": (f, SUM),
        "Reduce": (f, SUM, 0),
        "ReduceScatter": (f, SUM),
        "Broadcast": (f, 0),
        "AllGather": (f,),
        "AlltoAll": (f,),
        "Gather": (f, 0),
        "Scatter": (f, 0),
    }
    return (getattr(api, f"nccl{name}"), a, b, N, *middle[name], comm, 0)
