"""What the ranks of test_trace.py do: each program goes wrong in one way."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np

import pynccl

# Of every wait: what cannot complete ends after it.
TIMEOUT = 2.0


def start() -> pynccl.Communicator:
    """Make a communicator and a few calls that succeed."""
    comm = pynccl.init(timeout=TIMEOUT)
    for _ in range(3):
        comm.all_reduce(ones())
    return comm


def ones(count: int = 4, dtype: type = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


def function(rank: int, nranks: int) -> None:
    comm = start()
    _ = comm.all_gather(ones(8)) if rank == 2 else comm.all_reduce(ones(1000))


def count(rank: int, nranks: int) -> None:
    start().all_reduce(ones(5 if rank == 1 else 4))


def dtype(rank: int, nranks: int) -> None:
    start().all_reduce(ones(4, np.float64 if rank == 1 else np.float32))


def op(rank: int, nranks: int) -> None:
    start().all_reduce(ones(), op="max" if rank == 0 else "sum")


def root(rank: int, nranks: int) -> None:
    start().broadcast(ones(), root=rank % 2)


def missing(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 2:
        time.sleep(3 * TIMEOUT)
    else:
        comm.all_reduce(ones())


def left(rank: int, nranks: int) -> None:
    comm = start()
    if rank != 2:
        comm.all_reduce(ones())


def extra(rank: int, nranks: int) -> None:
    """One rank makes a call too many, of another kind; the calls are queued on a stream."""
    comm = start()
    with contextlib.suppress(pynccl.NcclError), pynccl.Stream() as stream:
        if rank == 1:
            comm.broadcast(ones(7), stream=stream)
        for n in (1, 2, 3):
            comm.all_reduce(ones(n), stream=stream)
        comm.synchronize(stream)


def extra_at_the_end(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 1:
        comm.all_gather(ones(6))
    time.sleep(1.5 * TIMEOUT)


def order(rank: int, nranks: int) -> None:
    comm = start()
    other = comm.split(0)
    assert other is not None
    for each in (comm, other) if rank == 0 else (other, comm):
        each.all_reduce(ones())


def grouped(rank: int, nranks: int) -> None:
    """One rank issues two calls as one group; the others wait for the first alone before the second."""
    comm = start()
    if rank == 0:
        with pynccl.group():
            comm.all_reduce(ones(11))
            comm.all_reduce(ones(12))
    else:
        comm.all_reduce(ones(11))
        if rank == 2:
            time.sleep(3 * TIMEOUT)
        comm.all_reduce(ones(12))


def unmatched_send(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(1 << 20), 1)
    time.sleep(1.5 * TIMEOUT)


def wrong_peer(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(1 << 20), 1)
    elif rank == 1:
        comm.recv(ones(1 << 20), 2)
    else:
        time.sleep(1.5 * TIMEOUT)


def pair_count(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(4), 1)
        comm.send(ones(6), 1)
    elif rank == 1:
        comm.recv(ones(4), 0)
        comm.recv(ones(5), 0)


def killed(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(ones())


def raises(rank: int, nranks: int) -> None:
    with start() as comm:
        if rank == 1:
            raise ValueError("bad sample")
        comm.all_reduce(ones())


def creation(rank: int, nranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pynccl.init(timeout=TIMEOUT)


def finalize(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.finalize()
    else:
        time.sleep(1.5 * TIMEOUT)
    comm.destroy()


def fine(rank: int, nranks: int) -> None:
    with start() as comm:
        comm.barrier()
