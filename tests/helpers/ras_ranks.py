"""Ranks that do what the lines of standard input say: RANK all_reduce COUNT, RANK destroy."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import pynccl


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def run(rank: int, size: int, orders: int, unique_id: bytes) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    comm = pynccl.Communicator(size, unique_id, rank)
    say(f"{rank} ready {os.getpid()}")
    with os.fdopen(orders) as lines:
        for line in lines:
            order, *counts = line.split()
            try:
                if order == "destroy":
                    comm.destroy()
                for _ in range(int(*counts)):
                    comm.all_reduce(np.ones(4))
            except pynccl.NcclError:
                order = f"{order} failed"
            say(f"{rank} {order}")
    os._exit(0)


def main(size: int) -> None:
    pipes = [os.pipe() for _ in range(size)]
    handed, hand = os.pipe()
    for rank in range(size):
        if os.fork():
            continue
        for _, write in pipes:
            os.close(write)
        # RANK1_NAME sets NAME for rank 1 only.
        mine = {name: value for name, value in os.environ.items() if name.startswith(f"RANK{rank}_")}
        os.environ |= {name.partition("_")[2]: value for name, value in mine.items()}
        if rank == 0:
            unique_id = bytes(pynccl.get_unique_id())
            for _ in range(1, size):
                os.write(hand, unique_id)
        else:
            unique_id = os.read(handed, 128)
        run(rank, size, pipes[rank][0], unique_id)
    for line in sys.stdin:
        rank_text, order = line.split(" ", 1)
        os.write(pipes[int(rank_text)][1], order.encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
