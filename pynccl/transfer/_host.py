"""Small messages from host memory through a communicator, also one of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from pynccl._arrays.buffers import Buffer
from pynccl._comm.communicator import Communicator
from pynccl._library import cuda, loader

# Bytes of one broadcast.
_PIECE = 1 << 20

Memory = NDArray[np.uint8] | NDArray[np.int64]


def gather_numbers(comm: Communicator, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the numbers of every rank, as many from each."""
    mine = np.array(numbers, np.int64)
    table = np.empty(comm.size * mine.size, np.int64)
    with _reachable(comm, mine) as send, _reachable(comm, table) as recv:
        comm.all_gather(send, recv)
    return [tuple(row) for row in table.reshape(comm.size, -1).tolist()]


def broadcast_bytes(comm: Communicator, data: bytes, length: int, root: int) -> bytes:
    """Return the root's bytes, whose number every rank knows.

    Raises MemoryError after all have arrived, so that the ranks go on together.
    """
    piece, parts = np.empty(min(length, _PIECE), np.uint8), bytearray()
    failed: MemoryError | None = None
    for begin in range(0, length, _PIECE):
        memory = piece[: length - begin]
        if comm.rank == root:
            memory[:] = np.frombuffer(data, np.uint8, memory.size, begin)
        with _reachable(comm, memory) as array:
            comm.broadcast(array, root=root)
        try:
            parts += memory.data
        except MemoryError as error:
            failed, parts = error, bytearray()
    if failed is not None:
        raise failed
    return bytes(parts)


def gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Return the bytes of every rank; one call less if none has any."""
    sizes = [size for (size,) in gather_numbers(comm, (len(data),))]
    if not any(sizes):
        return [b""] * comm.size
    mine, joined = np.frombuffer(data, np.uint8).copy(), np.empty(sum(sizes), np.uint8)
    with _reachable(comm, mine) as send, _reachable(comm, joined) as recv:
        comm.all_gather_v(send, recv, sizes)
    ends = np.cumsum(sizes)
    return [joined[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]


@contextmanager
def _reachable(comm: Communicator, memory: Memory) -> Iterator[Memory | Buffer]:
    """Yield memory with the same bytes that the communicator reaches; write them back at the end."""
    if loader.backend() == "cpu" or not cuda.available():
        yield memory
        return
    size = max(memory.nbytes, 1)
    with cuda.using_device(comm.device):
        pointer = cuda.memory_allocate(size)
        cuda.copy_to_device(pointer, memory.ctypes.data, memory.nbytes)
    # After a failure the library may still write it, so it is not freed then.
    yield Buffer(pointer, memory.size, memory.dtype, owner=memory)
    comm.synchronize()
    with cuda.using_device(comm.device):
        cuda.copy_to_host(memory.ctypes.data, pointer, memory.nbytes)
        cuda.memory_free(pointer)
