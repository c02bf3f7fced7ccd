"""What the ranks do in each row of the tables of docs/hangs.md.

One row has nothing here: a captured CUDA graph that holds a communicator needs a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

import numpy as np

import pynccl
from meeting import store, together
from pynccl import Communicator, capi
from pynccl.testing import run

TIMEOUT = 2.0
X = np.ones(1024, np.float32)
Body = Callable[[Communicator, bool], object]


def stop(comm: Communicator, odd: bool) -> None:
    pid = int(comm.all_gather(np.array([os.getpid()]))[1][0])
    if odd:
        os.kill(pid, signal.SIGSTOP)
    try:
        comm.all_reduce(X)
    finally:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def fail(comm: Communicator, odd: bool) -> None:
    with comm:
        if odd:
            raise ValueError("bad sample")
        comm.all_reduce(X)


def late_on_a_stream(comm: Communicator, odd: bool) -> None:
    with pynccl.Stream() as stream:
        if not odd:
            comm.all_reduce(X, stream=stream)
        time.sleep(2 * TIMEOUT)
        comm.all_reduce(X)


def in_two_orders(comm: Communicator, odd: bool) -> None:
    other = comm.split(0)
    assert other is not None
    for each in (other, comm) if odd else (comm, other):
        each.all_reduce(X)


def destroy(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.destroy()
        time.sleep(TIMEOUT)
    else:
        comm.all_reduce(X)


def destroy_twice(comm: Communicator, odd: bool) -> None:
    comm.destroy()
    comm.destroy()
    comm.all_reduce(X)


def fork(comm: Communicator, odd: bool) -> None:
    there, here = os.pipe()
    if not os.fork():
        try:
            comm.all_reduce(X)
        except pynccl.NcclInvalidUsage as error:
            os.write(here, str(error).encode())
        os._exit(0)
    text = os.read(there, 4096).decode()
    comm.destroy()
    raise pynccl.NcclInvalidUsage(text)


def ring(comm: Communicator, odd: bool) -> None:
    """One side groups its send and recv, the other sends first."""
    if odd:
        comm.send(X, 0)
        comm.recv(X, 0)
    elif comm.rank == 0:
        with pynccl.group():
            comm.send(X, 1)
            comm.send(X, 1)
    else:
        comm.barrier()


def sleep(comm: Communicator, odd: bool) -> None:
    time.sleep(2 * TIMEOUT)


def instead(usual: Body, wrong: Body) -> Body:
    """Return a body in which the odd rank does something else."""
    return lambda comm, odd: (wrong if odd else usual)(comm, odd)


def reduce(comm: Communicator, odd: bool) -> None:
    comm.all_reduce(X)


def barrier(comm: Communicator, odd: bool) -> None:
    comm.barrier()


# How a row of the tables begins, and what the ranks do after a first all_reduce.
HANGS: dict[str, Body] = {
    "killed (in a call": instead(reduce, lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
    "killed while": reduce,
    "exit without destroy": instead(reduce, lambda *_: None),
    "exception in one rank only": fail,
    "stopped": stop,
    "does not come: slow": instead(reduce, sleep),
    "the same, and nobody waits": late_on_a_stream,
    "does not come to `split`": instead(lambda comm, _: comm.split(0), sleep),
    "does not come, in check mode": instead(reduce, sleep),
    "different order on two": in_two_orders,
    "destroy on one rank only": destroy,
    "a call after destroy": destroy_twice,
    "fork after init": fork,
    "only one rank has": reduce,
}
MISMATCHES: dict[str, Body] = {
    "function": instead(reduce, lambda comm, _: comm.all_gather(X[:512])),
    "count": lambda comm, odd: comm.all_reduce(X[:512] if odd else X),
    "dtype": lambda comm, odd: comm.all_reduce(X.astype(np.int32) if odd else X),
    "operation": lambda comm, odd: comm.all_reduce(X, op="max" if odd else "sum"),
    "root": lambda comm, odd: comm.broadcast(X, root=int(odd)),
    "extra call on one rank": instead(barrier, reduce),
    "one side grouped": ring,
    "unmatched send": instead(barrier, lambda comm, _: comm.send(X, 0)),
    "wrong peer": lambda comm, odd: (
        comm.recv(X, 2) if odd else comm.send(X, 1) if comm.rank == 0 else comm.barrier()
    ),
}


def plain(text: str) -> str:
    """Take out what differs from run to run, and from rank to rank."""
    for pattern, same in (
        (r"rank \d reports: ", ""),
        (r"0x[0-9a-f]+", "0x0"),
        (r"rank \d of 3 on device \d", "rank N of 3"),
        (r"noticed by rank \d", "noticed by rank N"),
        (r"rank \d waits in", "rank N waits in"),
        (r"took longer than 2 s on rank \d", "took longer than 2 s on rank N"),
        (r"\d\.\d s ago", "T s ago"),
        (r"at \S*\.py:\d+", "at train.py:N"),
    ):
        text = re.sub(pattern, same, text)
    return text


def tried(rank: int, nranks: int, start: str) -> str:
    """Do what a row says; return what is raised."""
    # The time-out is init's, too, and the processes may have started seconds apart.
    together(nranks)
    # No row of a mismatch has it in its text.
    timeout = TIMEOUT if start in HANGS else 20.0
    if start == "killed while" and rank == 1:
        capi.ncclCommInitRank = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm = pynccl.init(timeout=None if start == "only one rank has" and rank else timeout)
        comm.all_reduce(X.copy())
        {**HANGS, **MISMATCHES}[start](comm, rank == 1)
    except pynccl.NcclError as error:
        # Whoever ends before the others have seen what happened may be taken for another that died.
        with store() as meeting, contextlib.suppress(TimeoutError):
            meeting.barrier("ended", nranks, 3)
        return f"{type(error).__name__}: {error}"
    return ""


def printed(start: str, nranks: int = 3, **env: str) -> str:
    results = run(nranks, tried, start, backend="cpu", check=False, timeout=50, env=env)
    return plain(next(result for rank, result in enumerate(results) if rank != 1 and isinstance(result, str)))
