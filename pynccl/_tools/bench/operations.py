"""The programs: how many elements each moves, which calls it makes, and what its bandwidth means.

Counts and bandwidths are those of nccl-tests 2.19.6, so that figures compare: src/<name>.cu, GetCollByteCount
and GetBw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pynccl._comm.communicator import Communicator
from pynccl._comm.prepared import Plan, Prepared
from pynccl._tools.bench.alltoallv import has_matrix, has_summary, summary, traffic
from pynccl._tools.bench.data import Pattern

# A call, or several, that run one after another.
Step = Prepared | Plan
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Counts:
    """The elements of one size: of a rank's buffers, of a call's count, and where in-place data begin."""

    send: int
    recv: int
    param: int
    # The in-place send buffer of rank r begins at r times this element of the receive buffer; likewise what
    # it receives.
    send_in_place: int = 0
    recv_in_place: int = 0


@dataclass(frozen=True)
class Shape:
    """What the counts and the bandwidth of an operation depend on."""

    count: int
    itemsize: int
    nranks: int


@dataclass(frozen=True)
class Slot:
    """One call to prepare: the communicator, its buffers (elements as in Counts) and its arguments."""

    comm: Communicator
    # Return a buffer of `count` elements that begins `start` elements behind the call's own.
    send: Callable[[int, int], Any]
    recv: Callable[[int, int], Any]
    counts: Counts
    itemsize: int
    op: Any
    root: int
    stream: Any
    # Of the receive buffers, and where this call's is in it.
    window: Any = None
    byte_offset: int = 0


@dataclass(frozen=True)
class Operation:
    """One program."""

    name: str
    title: str
    counts: Callable[[Shape], Counts]
    # Bytes of the algorithm bandwidth, and the factor from it to the bus bandwidth.
    moved: Callable[[Shape, Counts], float]
    factor: Callable[[int], float]
    calls: Callable[[Slot], Sequence[Step]]
    # The data of a rank before the call and of its receive buffer after it; None: as it was.
    fill: Callable[[Pattern, Counts, int, int], Array | None]
    expect: Callable[[Pattern, Counts, int, int], Array | None]
    reduces: bool = False
    # What the column redop shows; None: -o. nccl-tests' sendrecv shows -o, too, and hypercube nothing.
    redop: str | None = "none"
    rooted: bool = False
    # False: there is no in-place form; the second half of a line repeats the call, unchecked.
    in_place: bool = True
    windows: bool = False
    # Lines that a half prints before its columns, from the seconds of a call.
    lines_before: Callable[[Shape, Counts, float], str] = lambda shape, counts, seconds: ""


def _aligned(shape: Shape) -> int:
    """Return a rank's share of the elements, cut to 16 bytes."""
    return shape.count // shape.nranks & ~(16 // shape.itemsize - 1)


def _same(shape: Shape) -> Counts:
    return Counts(shape.count, shape.count, shape.count)


def _gathered(shape: Shape) -> Counts:
    base = _aligned(shape)
    return Counts(base, base * shape.nranks, base, send_in_place=base)


def _scattered(shape: Shape) -> Counts:
    base = _aligned(shape)
    return Counts(base * shape.nranks, base, base, recv_in_place=base)


def _exchanged(shape: Shape) -> Counts:
    base = _aligned(shape)
    return Counts(base * shape.nranks, base * shape.nranks, base)


def _one(shape: Shape, counts: Counts) -> float:
    return counts.param * shape.itemsize


def _all(shape: Shape, counts: Counts) -> float:
    return counts.param * shape.itemsize * shape.nranks


def _others(nranks: int) -> float:
    return (nranks - 1) / nranks


# --- reductions ---


def _own_data(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.of(rank, counts.send)


def _reduced(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.reduced(counts.recv)


def _reduced_at_root(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array | None:
    return pattern.reduced(counts.recv) if rank == root else None


def _reduced_part(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.reduced(counts.recv, rank * counts.recv)


def _all_reduce(slot: Slot) -> list[Step]:
    n, prepare = slot.counts.param, slot.comm.prepare
    return [prepare.all_reduce(slot.send(0, n), slot.recv(0, n), slot.op, stream=slot.stream)]


def _reduce(slot: Slot) -> list[Step]:
    n, prepare = slot.counts.param, slot.comm.prepare
    return [prepare.reduce(slot.send(0, n), slot.recv(0, n), slot.op, slot.root, stream=slot.stream)]


def _reduce_scatter(slot: Slot) -> list[Step]:
    send, recv = slot.send(0, slot.counts.send), slot.recv(0, slot.counts.recv)
    return [slot.comm.prepare.reduce_scatter(send, recv, slot.op, stream=slot.stream)]


# --- data movement ---


def _own_block(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.of(rank, counts.send)


def _root_data(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array | None:
    return pattern.of(root, counts.send) if rank == root else None


def _of_root(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.of(root, counts.recv)


def _part_of_root(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.of(root, counts.recv, rank * counts.recv)


def _blocks(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return np.concatenate([pattern.of(r, counts.send) for r in range(pattern.nranks)])


def _blocks_at_root(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array | None:
    return _blocks(pattern, counts, rank, root) if rank == root else None


def _one_block_of_each(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    n = counts.param
    return np.concatenate([pattern.of(r, n, rank * n) for r in range(pattern.nranks)])


def _of_left(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    return pattern.of((rank - 1) % pattern.nranks, counts.recv)


def _broadcast(slot: Slot) -> list[Step]:
    n, prepare = slot.counts.param, slot.comm.prepare
    return [prepare.broadcast(slot.send(0, n), slot.recv(0, n), slot.root, stream=slot.stream)]


def _all_gather(slot: Slot) -> list[Step]:
    send, recv = slot.send(0, slot.counts.send), slot.recv(0, slot.counts.recv)
    return [slot.comm.prepare.all_gather(send, recv, stream=slot.stream)]


def _gather(slot: Slot) -> list[Step]:
    recv = slot.recv(0, slot.counts.recv) if slot.comm.rank == slot.root else None
    send = slot.send(0, slot.counts.send)
    return [slot.comm.prepare.gather(send, recv, slot.root, stream=slot.stream)]


def _scatter(slot: Slot) -> list[Step]:
    send = slot.send(0, slot.counts.send) if slot.comm.rank == slot.root else None
    recv = slot.recv(0, slot.counts.recv)
    return [slot.comm.prepare.scatter(send, recv, slot.root, stream=slot.stream)]


def _all_to_all(slot: Slot) -> list[Step]:
    send, recv = slot.send(0, slot.counts.send), slot.recv(0, slot.counts.recv)
    return [slot.comm.prepare.all_to_all(send, recv, stream=slot.stream)]


def _ring(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def _send_recv(slot: Slot) -> list[Step]:
    n, (right, left) = slot.counts.param, _ring(slot.comm)
    prepare = slot.comm.prepare
    return [prepare.send_recv(slot.send(0, n), right, slot.recv(0, n), left, stream=slot.stream)]


def _put_signal(slot: Slot) -> list[Step]:
    n, (right, left) = slot.counts.param, _ring(slot.comm)
    prepare, stream = slot.comm.prepare, slot.stream
    put = prepare.put_signal(slot.send(0, n), right, slot.window, byte_offset=slot.byte_offset, stream=stream)
    return [put, prepare.wait_signal(left, stream=stream)]


def _all_to_all_v(slot: Slot) -> list[Step]:
    size, rank, itemsize = slot.comm.size, slot.comm.rank, slot.itemsize
    sent = traffic(size, slot.counts.param * size * itemsize) // itemsize
    send_counts, recv_counts = sent[rank].tolist(), sent[:, rank].tolist()
    send, recv = slot.send(0, sum(send_counts)), slot.recv(0, sum(recv_counts))
    return [slot.comm.prepare.all_to_all_v(send, send_counts, recv, recv_counts, stream=slot.stream)]


def _uneven(shape: Shape) -> Counts:
    """Return the counts of the rank that sends most, and of the one that receives most."""
    base = 0 if has_matrix() else _aligned(shape)
    sent = traffic(shape.nranks, base * shape.nranks * shape.itemsize) // shape.itemsize
    return Counts(int(sent.sum(axis=1).max()), int(sent.sum(axis=0).max()), base)


def _most(shape: Shape, counts: Counts) -> float:
    return max(counts.send, counts.recv) * shape.itemsize


def _summary(shape: Shape, counts: Counts, seconds: float) -> str:
    total = counts.param * shape.nranks * shape.itemsize
    return summary(shape.nranks, total, seconds) if has_summary() else ""


def _uneven_blocks(pattern: Pattern, counts: Counts, rank: int, root: int) -> Array:
    itemsize, n = pattern.dtype.itemsize, pattern.nranks
    sent = traffic(n, counts.param * n * itemsize) // itemsize
    blocks = [pattern.of(r, int(sent[r, rank]), int(sent[r, :rank].sum())) for r in range(n)]
    received = np.concatenate(blocks)
    # The buffer is as long as that of the rank that receives most.
    return np.concatenate([received, np.zeros(counts.recv - len(received), pattern.dtype)])


def _hypercube(slot: Slot) -> list[Step]:
    """All ranks gather by exchanges of 1, 2, 4 … blocks (src/hypercube.cu)."""
    comm, n, prepare, stream = slot.comm, slot.counts.param, slot.comm.prepare, slot.stream
    mine, own = slot.send(0, n), slot.recv(comm.rank * n, n)
    steps: list[Step] = []
    if mine.ptr != own.ptr:
        # nccl-tests copies its block by cudaMemcpyAsync. A message to itself keeps the order of the stream.
        steps.append(prepare.send_recv(mine, comm.rank, own, comm.rank, stream=stream))
    mask = 1
    while mask < comm.size:
        first = comm.rank & ~(mask - 1)
        send, recv = slot.recv(first * n, n * mask), slot.recv((first ^ mask) * n, n * mask)
        steps.append(prepare.send_recv(send, comm.rank ^ mask, recv, comm.rank ^ mask, stream=stream))
        mask *= 2
    return steps


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "all_reduce",
            "AllReduce",
            _same,
            _one,
            lambda n: 2 * _others(n),
            _all_reduce,
            _own_data,
            _reduced,
            reduces=True,
            redop=None,
        ),
        Operation("all_gather", "AllGather", _gathered, _all, _others, _all_gather, _own_block, _blocks),
        Operation(
            "broadcast",
            "Broadcast",
            _same,
            _one,
            lambda n: 1.0,
            _broadcast,
            _root_data,
            _of_root,
            rooted=True,
        ),
        Operation(
            "reduce_scatter",
            "ReduceScatter",
            _scattered,
            _all,
            _others,
            _reduce_scatter,
            _own_data,
            _reduced_part,
            reduces=True,
            redop=None,
        ),
        Operation(
            "reduce",
            "Reduce",
            _same,
            _one,
            lambda n: 1.0,
            _reduce,
            _own_data,
            _reduced_at_root,
            reduces=True,
            redop=None,
            rooted=True,
        ),
        Operation(
            "alltoall",
            "AlltoAll",
            _exchanged,
            _all,
            _others,
            _all_to_all,
            _own_data,
            _one_block_of_each,
            in_place=False,
        ),
        Operation(
            "alltoallv",
            "AlltoAllv",
            _uneven,
            _most,
            _others,
            _all_to_all_v,
            _own_data,
            _uneven_blocks,
            in_place=False,
            lines_before=_summary,
        ),
        Operation(
            "scatter", "Scatter", _scattered, _all, _others, _scatter, _root_data, _part_of_root, rooted=True
        ),
        Operation(
            "gather", "Gather", _gathered, _all, _others, _gather, _own_block, _blocks_at_root, rooted=True
        ),
        Operation(
            "sendrecv",
            "SendRecv",
            _same,
            _one,
            lambda n: 1.0,
            _send_recv,
            _own_data,
            _of_left,
            redop=None,
            in_place=False,
        ),
        Operation(
            "hypercube",
            "HyperCube",
            _gathered,
            lambda shape, counts: counts.param * shape.itemsize * (shape.nranks - 1),
            lambda n: 1.0,
            _hypercube,
            _own_block,
            _blocks,
            redop="",
        ),
        Operation(
            "put_signal",
            "PutSignal",
            _same,
            _one,
            lambda n: 1.0,
            _put_signal,
            _own_data,
            _of_left,
            in_place=False,
            windows=True,
        ),
    )
}
