"""A program written for cupy.cuda.nccl, on pynccl by one line: a dead rank is then an error, not a hang.

PYNCCL_LIBRARY=cpu PYNCCL_TIMEOUT=30 python examples/cupy_nccl.py
PYNCCL_TIMEOUT=30 python examples/cupy_nccl.py          # on GPUs; CuPy has to be installed, here and there
"""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pynccl.compat.cupy

RANKS, COUNT = 3, 1000


def program(rank: int, uid: bytes) -> None:
    """Know CuPy's interface alone."""
    from cupy.cuda import nccl

    xp = pynccl.array_module()
    comm = nccl.NcclCommunicator(RANKS, uid, rank)
    array = xp.full(COUNT, rank + 1, xp.float32)
    pointer = array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data
    try:
        while True:
            comm.allReduce(pointer, pointer, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, 0)
            if float(array[0]) != RANKS:
                raise SystemExit(f"rank {rank}: {array[0]} is wrong")
            if rank == 1:
                os._exit(1)
            # On GPUs a call only starts.
            comm.check_async_error()
    finally:
        comm.abort()


def run(rank: int, uid: bytes, parent: Connection) -> None:
    pynccl.compat.cupy.install()
    try:
        program(rank, uid)
    except pynccl.RankFailedError as error:
        parent.send(
            f"rank {rank}: rank {error.ranks} died: {type(error).__name__} of {type(error).__module__}"
        )


def main() -> None:
    context = multiprocessing.get_context("spawn")
    uid, (mine, others) = bytes(pynccl.get_unique_id()), context.Pipe(duplex=False)
    ranks = [context.Process(target=run, args=(rank, uid, others)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    others.close()
    for line in sorted(mine.recv() for _ in range(RANKS - 1)):
        print(line, flush=True)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
