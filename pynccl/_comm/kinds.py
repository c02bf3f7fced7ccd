"""The kinds of calls, numbered by native/calls.h, and the C function of each."""

from __future__ import annotations

from pynccl._library.binding import lib

ALL_REDUCE, REDUCE, BROADCAST = lib.PYNCCL_ALL_REDUCE, lib.PYNCCL_REDUCE, lib.PYNCCL_BROADCAST
ALL_GATHER, REDUCE_SCATTER = lib.PYNCCL_ALL_GATHER, lib.PYNCCL_REDUCE_SCATTER
ALL_TO_ALL, GATHER, SCATTER = lib.PYNCCL_ALL_TO_ALL, lib.PYNCCL_GATHER, lib.PYNCCL_SCATTER
SEND, RECV, BARRIER = lib.PYNCCL_SEND, lib.PYNCCL_RECV, lib.PYNCCL_BARRIER
REDUCING = (ALL_REDUCE, REDUCE, REDUCE_SCATTER)
ROOTED = (REDUCE, BROADCAST, GATHER, SCATTER)

FUNCTIONS = {
    ALL_REDUCE: "ncclAllReduce",
    REDUCE: "ncclReduce",
    BROADCAST: "ncclBroadcast",
    ALL_GATHER: "ncclAllGather",
    REDUCE_SCATTER: "ncclReduceScatter",
    ALL_TO_ALL: "ncclAlltoAll",
    GATHER: "ncclGather",
    SCATTER: "ncclScatter",
    SEND: "ncclSend",
    RECV: "ncclRecv",
    BARRIER: "barrier",
}


def function_name(kind: int, configured: bool = False) -> str:
    """Return the C function of a kind of call; `configured`: the variant that takes a configuration."""
    return FUNCTIONS[kind] + ("Config" if configured else "")
