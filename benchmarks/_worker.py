"""One rank of one peer: waits, blocked, for the driver's commands and measures what they ask for."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

from _peers import DDP_STEP, PEERS, Array, Call, Peer


class Worker:
    """The commands: connect, prepare, run. Each answers with one value."""

    def __init__(self, peer: Peer, largest: int) -> None:
        self.peer = peer
        # Two buffers for all operations and sizes, touched once, so that no page fault is ever timed.
        self.send, self.recv = peer.buffer(largest // 4), peer.buffer(largest // 4)
        self.call: Call = peer.barrier

    def hello(self) -> dict[str, Any]:
        """Introduce this rank; rank 0 brings what the others need to connect."""
        token = self.peer.offer() if self.peer.rank == 0 else b""
        return {"rank": self.peer.rank, "pid": os.getpid(), "token": token, "versions": self.peer.versions()}

    def connect(self, token: bytes) -> None:
        """Join the group."""
        self.peer.connect(token)

    def prepare(self, op: str, nbytes: int) -> None:
        """Choose the operation and size, and check its result once."""
        rank, size = self.peer.rank, self.peer.size
        share = nbytes // 4 // size
        send = self.send[: share if op == "all_gather" else nbytes // 4]
        recv = self.recv[: share if op == "reduce_scatter" else nbytes // 4]
        self.call = self.peer.prepare(op, send, recv)
        send.fill(rank + 1)
        recv.fill(rank + 1)
        self.call()
        check(op, rank, size, recv)
        # In-place peers add up their own results from here on: zeros stay zeros.
        send.fill(0)
        recv.fill(0)

    def run(self, warmup: int, iterations: int) -> float:
        """Return the seconds that one call took on this rank."""
        call = self.call
        for _ in range(warmup):
            call()
        self.peer.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - start) / iterations


def check(op: str, rank: int, size: int, result: Array) -> None:
    """Compare with what ranks sending rank + 1 must give."""
    if op in ("all_reduce", "reduce_scatter"):
        expected: Array | float = size * (size + 1) / 2
    elif op in ("all_gather", "all_to_all"):
        expected = np.repeat(np.arange(1, size + 1, dtype=np.float32), result.size // size)
    elif op == "broadcast":
        expected = 1
    elif op == DDP_STEP:
        expected = rank + 1  # works on memory of its own
    else:
        expected = (rank - 1) % size + 1
    if not np.array_equal(result, np.broadcast_to(np.asarray(expected, np.float32), result.shape)):
        raise ArithmeticError(f"{op} gave a wrong result on rank {rank} of {size}")


def serve(worker: Worker, driver: Connection) -> None:
    """Answer commands until the driver closes its end."""
    while True:
        try:
            name, *args = driver.recv()
        except EOFError:
            return
        driver.send((True, getattr(worker, name)(*args)))


def main() -> None:
    """Take the peer, the driver's address and the largest size from the command line."""
    name, address, largest = sys.argv[1:]
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    gc.disable()
    with Client(address, "AF_UNIX") as driver:
        try:
            peer = PEERS[name]()
            worker = Worker(peer, int(largest))
            driver.send((True, worker.hello()))
            serve(worker, driver)
            peer.close()
        except Exception:
            driver.send((False, traceback.format_exc()))
            raise


if __name__ == "__main__":
    main()
