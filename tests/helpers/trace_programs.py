"""What the ranks of test_trace.py do: each program goes wrong in one way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np

import pynccl
from meeting import together

# Of every wait: what cannot complete ends after it.
TIMEOUT = 3.0


def start() -> pynccl.Communicator:
    """Make a communicator and a few calls that succeed."""
    together(int(os.environ["WORLD_SIZE"]))
    comm = pynccl.init(timeout=TIMEOUT)
    for _ in range(3):
        comm.all_reduce(ones())
    # Whoever ends at once would be an error of the others' last call.
    together(comm.size)
    return comm


def outlast(*ranks: int) -> None:
    """Stay until these ranks have dumped their traces, so that they do not learn of the end."""
    folder = Path(os.environ["PYNCCL_TRACE_DIR"])
    while not all(any(folder.glob(f"rank{rank}.*.jsonl")) for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.3)


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
        outlast(0, 1)
    else:
        comm.all_reduce(ones())


def missing_in_a_split(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 2:
        outlast(0, 1)
    else:
        comm.split(0)


def left(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 2:
        # The others wait by then.
        time.sleep(1)
    else:
        comm.all_reduce(ones())


def extra(rank: int, nranks: int) -> None:
    """One rank makes a call too many, of another kind; all calls are issued before the first has failed."""
    comm = start()
    with pynccl.group():
        if rank == 1:
            comm.broadcast(ones(7))
        for n in (1, 2, 3):
            comm.all_reduce(ones(n))


def extra_at_the_end(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 1:
        comm.all_gather(ones(6))
    else:
        outlast(1)


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
            outlast(0, 1)
        comm.all_reduce(ones(12))


def unmatched_send(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(1 << 20), 1)
    else:
        outlast(0)


def left_message(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(4), 1)
        comm.send(ones(6), 1)
    elif rank == 1:
        comm.recv(ones(4), 0)
    comm.barrier()


def too_few_signals(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.wait_signal(1, 1, 3)
        comm.wait_signal(1, 2, 3)
    elif rank == 1:
        comm.signal(0, 3)
        comm.signal(0, 3)
        comm.signal(0, 1)
        outlast(0)
    else:
        outlast(0)


def wrong_peer(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.send(ones(1 << 20), 1)
    elif rank == 1:
        comm.recv(ones(1 << 20), 2)
    else:
        outlast(0, 1)


def pair_count(rank: int, nranks: int) -> None:
    comm = start()
    with contextlib.suppress(pynccl.NcclError):
        if rank == 0:
            comm.send(ones(4), 1)
            comm.send(ones(6), 1)
        elif rank == 1:
            comm.recv(ones(4), 0)
            comm.recv(ones(5), 0)
    time.sleep(TIMEOUT)


def killed(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(ones())


def raises(rank: int, nranks: int) -> None:
    with start() as comm:
        if rank == 1:
            time.sleep(1)
            raise ValueError("bad sample")
        comm.all_reduce(ones())


def finalize(rank: int, nranks: int) -> None:
    comm = start()
    if rank == 0:
        comm.finalize()
    else:
        outlast(0)
    comm.destroy()


def fine(rank: int, nranks: int) -> None:
    with start() as comm:
        comm.barrier()


def creation_of_a_dead(rank: int, nranks: int, folder: str) -> None:
    """A rank dies before it joins; the id goes through a file."""
    path = os.path.join(folder, "id")
    if rank == 0:
        with open(path + ".new", "wb") as file:
            file.write(bytes(pynccl.get_unique_id()))
        os.rename(path + ".new", path)
    together(nranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(path, "rb") as file:
        uid = file.read()
    try:
        pynccl.Communicator(nranks, uid, rank, timeout=TIMEOUT)
    finally:
        # The other one's time is up a little later, or earlier.
        time.sleep(1)


def in_a_plan(rank: int, nranks: int) -> None:
    """A plan of one rank has another count in its second call."""
    comm = start()
    plan = pynccl.Plan(
        [comm.prepare.all_reduce(ones(2)), comm.prepare.broadcast(ones(5 if rank == 2 else 4))]
    )
    plan()


def pairs_in_a_plan(rank: int, nranks: int) -> None:
    """The third run of a plan meets nobody: the peer ran its own twice."""
    comm = start()
    big = ones(1 << 20)
    if rank == 0:
        plan = pynccl.Plan([comm.prepare.send(big, 1), comm.prepare.send(ones(3), 1)])
        for _ in range(3):
            plan()
    elif rank == 1:
        plan = pynccl.Plan([comm.prepare.recv(big, 0), comm.prepare.recv(ones(3), 0)])
        for _ in range(2):
            plan()
    if rank:
        outlast(0)


def stuck_in_c(rank: int, nranks: int, folder: str) -> None:
    """A rank hangs in C outside of NCCL with the GIL held; the others ask for its dump by a signal."""
    comm = start()
    path = os.path.join(folder, "pid")
    if rank == 1:
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
        ctypes.PyDLL(None).usleep(int(3 * TIMEOUT * 1e6))
        # The signal ends that one.
        ctypes.PyDLL(None).usleep(500_000)
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(pynccl.NcclTimeoutError):
        comm.all_reduce(ones())
    if rank == 0:
        with open(path) as file:
            os.kill(int(file.read()), signal.SIGUSR2)
        time.sleep(0.3)
