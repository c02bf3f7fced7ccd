"""Every form of mpi4py's buffer arguments in every method, and what each call has written."""

from __future__ import annotations

import array
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
T = MPI.DOUBLE

Form = Callable[[Any], Any]
Results = Iterator[tuple[str, np.ndarray[Any, Any]]]
# What becomes of a NumPy array before it is passed.
Make = Callable[[Any], Any]


def numbers(count: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    """Return as many numbers, other ones on every rank."""
    return (np.arange(count) * 3 + 1001 * RANK + 1).astype(dtype)


def simple_forms(count: int) -> list[tuple[int, Form]]:
    """Return where `count` elements of an array begin, and forms that say so."""
    return [
        (0, lambda x: [x, count]),
        (0, lambda x: (x, count)),
        (0, lambda x: [x, count, T]),
        (0, lambda x: [x, np.int64(count), "d"]),
        (0, lambda x: [x, (count, 0)]),
        (2, lambda x: [x, (count, 2)]),
        (1, lambda x: [x, [count, 1], T]),
        (1, lambda x: [x, (count, 1), "d"]),
        (2, lambda x: [x, count, 2, T]),
        (0, lambda x: [x, count, None, T]),
    ]


def byte_forms(count: int) -> list[tuple[int, Form]]:
    """Return the same, of bytes."""
    return [
        (0, lambda x: [x, 8 * count, MPI.BYTE]),
        (1, lambda x: [x, (8 * count, 8), MPI.BYTE]),
        (2, lambda x: [x, 8 * count, 16, MPI.BYTE]),
    ]


def whole_forms() -> list[Form]:
    """Return forms that name all of an array."""
    return [lambda x: x, lambda x: [x, T], lambda x: (x, "d"), lambda x: [x, None], lambda x: [x, None, T]]


def tail_forms(start: int) -> list[Form]:
    """Return forms that name an array from an element on."""
    return [lambda x: [x, (None, start), T], lambda x: [x, None, start, T], lambda x: [x, [None, start]]]


def vector_forms() -> list[tuple[list[int], Form]]:
    """Return the counts of the ranks, and forms that say them."""
    counts = [rank + 1 for rank in range(SIZE)]
    gaps = [sum(counts[:rank]) + rank for rank in range(SIZE)]
    back = [sum(counts[rank + 1 :]) for rank in range(SIZE)]
    two = [2] * SIZE
    return [
        (counts, lambda x: [x, counts]),
        (counts, lambda x: [x, np.array(counts)]),
        (counts, lambda x: [x, array.array("i", counts), T]),
        (counts, lambda x: [x, (counts, None)]),
        (counts, lambda x: [x, (counts, gaps)]),
        (counts, lambda x: [x, (counts, gaps), T]),
        (counts, lambda x: [x, (tuple(counts), np.array(back)), "d"]),
        (counts, lambda x: [x, counts, gaps, T]),
        (counts, lambda x: [x, counts, None, T]),
        (counts, lambda x: (x, (counts, SIZE + 1))),
        (two, lambda x: [x, 2]),
        (two, lambda x: [x, 2, T]),
        (two, lambda x: [x, (2, 3)]),
        (two, lambda x: [x, (2, 3), T]),
        (two, lambda x: [x, 2, 3, T]),
        (two, lambda x: [x, (2, None), T]),
        ([16] * SIZE, lambda x: [x, (16, 24), MPI.BYTE]),
        ([0] * SIZE, lambda x: [x, 0]),
    ]


def datatypes() -> Iterator[MPI.Datatype]:
    """Return derived datatypes of all kinds, of at most 12 numbers within 40."""
    yield T.Dup()
    yield T.Create_contiguous(3)
    yield T.Create_vector(3, 2, 4)
    yield T.Create_vector(2, 1, 1)
    yield T.Create_hvector(3, 1, 24)
    yield T.Create_indexed([2, 0, 3], [4, 0, 10])
    yield T.Create_hindexed([1, 2], [16, 64])
    yield T.Create_indexed_block(2, [7, 1, 4])
    yield T.Create_hindexed_block(1, [8, 0, 48])
    yield T.Create_struct([1, 2], [8, 32], [T, MPI.INT])
    yield T.Create_subarray([4, 5], [2, 3], [1, 1])
    yield T.Create_subarray([4, 5], [2, 3], [1, 1], MPI.ORDER_F)
    yield T.Create_subarray([2, 3, 4], [2, 2, 2], [0, 1, 1])
    yield T.Create_resized(0, 24)
    yield T.Create_vector(2, 1, 2).Create_resized(0, 40)
    yield T.Create_vector(2, 1, 3).Create_contiguous(2)
    yield T.Create_struct([1, 1], [0, 40], [T.Create_vector(2, 1, 2), T.Create_contiguous(2)])


def calls(make: Make, comm: Any) -> Results:
    """Make the calls; return the name of each, and what it has written."""
    yield from _simple(make, comm)
    yield from _scattered(make, comm)
    yield from _vectors(make, comm)
    yield from _derived(make, comm)
    yield from _at_random(make, comm)


def _simple(make: Make, comm: Any) -> Results:
    room, last = 8 * SIZE, SIZE - 1
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    few = [form for _, form in simple_forms(2)]
    for number, form in enumerate([*few, *(f for _, f in byte_forms(2)), *whole_forms(), *tail_forms(2)]):
        data, out = numbers(room), np.zeros(room)
        comm.Bcast(form(make(data)), root=last)
        yield f"Bcast {number}", data
        comm.Sendrecv(form(make(numbers(room))), right, 0, form(make(out)), left)
        yield f"Sendrecv {number}", out
        data = numbers(room)
        comm.Sendrecv_replace(form(make(data)), right, source=left)
        yield f"Sendrecv_replace {number}", data
    pairs = list(zip(few, few[3:] + few[:3], strict=True))
    pairs += [(give, take) for _, give in byte_forms(2) for _, take in byte_forms(2)]
    for number, (give, take) in enumerate(pairs):
        # A count is that of each rank, of one rank's elements as of all ranks'.
        for name, root in (("Allgather", ()), ("Gather", (last,)), ("Scatter", (0,)), ("Alltoall", ())):
            out = np.zeros(room)
            getattr(comm, name)(give(make(numbers(room))), take(make(out)), *root)
            yield f"{name} {number}", out
    for number, (start, form) in enumerate(simple_forms(2)):
        yield from _in_place(make, comm, form, number)
        yield from _reductions(make, comm, form, start, number)


def _in_place(make: Make, comm: Any, form: Form, number: int) -> Results:
    room = 8 * SIZE
    for name in ("Allgather", "Alltoall"):
        for nothing in (MPI.IN_PLACE, None):
            data = numbers(room)
            getattr(comm, name)(nothing, form(make(data)))
            yield f"{name} in place {number}", data
    data = numbers(room)
    comm.Gather(MPI.IN_PLACE if RANK == 0 else form(make(numbers(room))), form(make(data)))
    yield f"Gather in place {number}", data
    data, out = numbers(room), numbers(room)
    comm.Scatter(form(make(data)), None if RANK == 0 else form(make(out)))
    yield f"Scatter in place {number}", out


def _reductions(make: Make, comm: Any, form: Form, start: int, number: int) -> Results:
    room, last = 8 * SIZE, SIZE - 1
    out = np.zeros(room)
    comm.Allreduce(form(make(numbers(room))), form(make(out)), op=MPI.MAX)
    yield f"Allreduce {number}", out
    data = numbers(room)
    comm.Allreduce(None, form(make(data)))
    yield f"Allreduce in place {number}", data
    out = np.zeros(room)
    comm.Reduce(form(make(numbers(room))), form(make(out)) if last == RANK else None, MPI.SUM, last)
    yield f"Reduce {number}", out
    for name in ("Scan", "Exscan"):
        for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
            data, out = numbers(room), np.zeros(room)
            getattr(comm, name)(form(make(data)), form(make(out)), op)
            getattr(comm, name)(MPI.IN_PLACE, form(make(data)), op)
            # The first rank's results of Exscan mean nothing.
            if RANK or name == "Scan":
                yield f"{name} {number}", out
                yield f"{name} in place {number}", data
    out = np.zeros(room)
    comm.Reduce_scatter_block(form(make(numbers(room))), form(make(out)))
    yield f"Reduce_scatter_block {number}", out
    data = numbers(room)
    comm.Reduce_scatter_block(MPI.IN_PLACE, form(make(data)), MPI.MIN)
    # Behind the result anything may be.
    yield f"Reduce_scatter_block in place {number}", data[: start + 2]


def _scattered(make: Make, comm: Any) -> Results:
    for counts in ([rank + 1 for rank in range(SIZE)], [0] * (SIZE - 1) + [3], [2] * SIZE):
        total, mine = sum(counts), counts[RANK]
        for given in (None, counts, np.array(counts)):
            out = np.zeros(mine + 1)
            comm.Reduce_scatter([make(numbers(total + 1)), total], [make(out), mine, T], given)
            yield f"Reduce_scatter {counts}", out
        data = numbers(total)
        comm.Reduce_scatter(MPI.IN_PLACE, make(data), counts, MPI.MAX)
        yield f"Reduce_scatter in place {counts}", data[:mine]


def _vectors(make: Make, comm: Any) -> Results:
    room, last = (SIZE + 1) * (SIZE + 2) + 16, SIZE - 1
    for number, (counts, form) in enumerate(vector_forms()):
        unit = MPI.BYTE if counts[0] == 16 else T
        mine = counts[RANK]
        out = np.zeros(room)
        comm.Allgatherv([make(numbers(room)), mine, unit], form(make(out)))
        yield f"Allgatherv {number}", out
        data = numbers(room)
        comm.Allgatherv(MPI.IN_PLACE, form(make(data)))
        yield f"Allgatherv in place {number}", data
        out = np.zeros(room)
        comm.Gatherv([make(numbers(room)), mine, unit], form(make(out)) if last == RANK else None, last)
        yield f"Gatherv {number}", out
        data = numbers(room)
        give = MPI.IN_PLACE if RANK == 0 else [make(numbers(room)), mine, unit]
        comm.Gatherv(give, form(make(data)))
        yield f"Gatherv in place {number}", data
        out = np.zeros(room)
        comm.Scatterv(form(make(numbers(room))) if last == RANK else None, [make(out), mine, unit], last)
        yield f"Scatterv {number}", out
        data = numbers(room)
        take = MPI.IN_PLACE if RANK == 0 else [make(data), mine, unit]
        comm.Scatterv(form(make(numbers(room))) if RANK == 0 else None, take)
        yield f"Scatterv in place {number}", data
        # What rank i sends to j is what j receives from i: every rank sends everyone as much as it has.
        out = np.zeros(room)
        comm.Alltoallv([make(numbers(room)), (mine, 1), unit], form(make(out)))
        yield f"Alltoallv {number}", out
        if len(set(counts)) == 1:
            data = numbers(room)
            comm.Alltoallv(MPI.IN_PLACE, form(make(data)))
            yield f"Alltoallv in place {number}", data
    for extra in range(SIZE + 1):
        # Without counts: as even as it goes, the first ranks one more.
        shares = [extra // SIZE + 2 + (extra % SIZE > rank) for rank in range(SIZE)]
        out = np.zeros(2 * SIZE + extra)
        comm.Allgatherv([make(numbers(room)), shares[RANK]], make(out))
        yield f"Allgatherv of {len(out)}", out
        out = np.zeros(2 * SIZE + extra)
        comm.Allgatherv([make(numbers(room)), shares[RANK]], [make(out), T])
        yield f"Allgatherv of {len(out)} numbers", out


def _derived(make: Make, comm: Any) -> Results:
    room, right, left = 40 * (SIZE + 2), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for number, datatype in enumerate(datatypes()):
        datatype.Commit()
        yield from _with_datatype(make, comm, f"datatype {number}", datatype)
        if datatype.size % 8 == 0 and datatype.combiner != MPI.COMBINER_STRUCT:
            # Another layout on the other side: what counts is what it has.
            flat = datatype.size // 4
            out = np.zeros(room)
            comm.Sendrecv([make(numbers(room)), 2, datatype], right, 0, [make(out), flat], left)
            yield f"Sendrecv from datatype {number}", out
            out = np.zeros(room)
            comm.Sendrecv([make(numbers(room)), flat, T], right, 0, [make(out), 2, datatype], left)
            yield f"Sendrecv to datatype {number}", out
        datatype.Free()


def _with_datatype(make: Make, comm: Any, what: str, datatype: MPI.Datatype) -> Results:
    """Use one datatype on both sides of everything that moves data."""
    room, last, two = 200 * (SIZE + 2), SIZE - 1, [2] * SIZE
    # Elements may reach further than to the next one.
    stride = 2 + max(datatype.true_extent, datatype.extent) // datatype.extent
    starts = [rank * stride for rank in range(SIZE)]
    data = numbers(room)
    comm.Bcast([make(data), 2, datatype], last)
    yield f"Bcast {what}", data
    for name, root in (("Allgather", ()), ("Gather", (last,)), ("Scatter", (0,)), ("Alltoall", ())):
        out = np.zeros(room)
        getattr(comm, name)([make(numbers(room)), 1, datatype], [make(out), (1, 1), datatype], *root)
        yield f"{name} {what}", out
    for name in ("Allgather", "Alltoall"):
        data = numbers(room)
        getattr(comm, name)(MPI.IN_PLACE, [make(data), 1, datatype])
        yield f"{name} in place {what}", data
    for inside in (False, True):
        data, small = numbers(room), [make(numbers(room)), 2, datatype]
        into = [make(data), (two, starts), datatype]
        comm.Gatherv(MPI.IN_PLACE if inside and RANK == 0 else small, into if RANK == 0 else None)
        yield f"Gatherv {what}", data
        data = numbers(room)
        take = MPI.IN_PLACE if inside and RANK == 0 else [make(data), 2, datatype]
        comm.Scatterv([make(numbers(room)), (two, starts), datatype] if RANK == 0 else None, take)
        yield f"Scatterv {what}", data
        data = numbers(room)
        take = [make(data), 2, datatype]
        comm.Gather(MPI.IN_PLACE if inside and RANK == 0 else small, take if RANK == 0 else None)
        yield f"Gather {what}", data
        data = numbers(room)
        take = MPI.IN_PLACE if inside and RANK == 0 else [make(data), 2, datatype]
        comm.Scatter([make(numbers(room)), 2, datatype] if RANK == 0 else None, take)
        yield f"Scatter {what}", data
        data = numbers(room)
        comm.Allgatherv(MPI.IN_PLACE if inside else small, [make(data), (two, starts), datatype])
        yield f"Allgatherv {what}", data
    out = np.zeros(room)
    comm.Alltoallv([make(numbers(room)), (2, stride), datatype], [make(out), two, starts, datatype])
    yield f"Alltoallv {what}", out
    places = [start * datatype.extent for start in starts]
    out = np.zeros(room)
    comm.Alltoallw(
        [make(numbers(room)), (two, places), [datatype] * SIZE],
        [make(out), two, places, [datatype] * SIZE],
    )
    yield f"Alltoallw {what}", out
    data = numbers(room)
    comm.Alltoallw(MPI.IN_PLACE, (make(data), (two, places), [datatype] * SIZE))
    yield f"Alltoallw in place {what}", data


def _at_random(make: Make, comm: Any) -> Results:
    """Nest datatypes, the same on all ranks, and move them from and to anywhere."""
    chance = random.Random(SIZE)
    room, right, left = 20000, (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for number in range(60):
        made = [chance.choice([MPI.DOUBLE, MPI.INT, MPI.SHORT, MPI.BYTE])]
        for _ in range(chance.randint(1, 3)):
            made.append(_derive(chance, made[-1]))
        datatype = made[-1].Commit()
        # What is received must not overlap.
        most = 1 if datatype.true_extent > datatype.extent else 3
        count, start = chance.randint(0, most), chance.randint(0, 2)
        if (start + count) * datatype.extent + datatype.true_extent > room:
            continue
        data, out = numbers(room, np.uint8), np.zeros(room, np.uint8)
        comm.Bcast([make(data), count, start, datatype])
        yield f"Bcast of random {number}", data
        give = [make(numbers(room, np.uint8)), (count, start), datatype]
        comm.Sendrecv(give, right, 0, [make(out), count, datatype], left)
        yield f"Sendrecv of random {number}", out
        for one in made[1:]:
            one.Free()


def _derive(chance: random.Random, base: MPI.Datatype) -> MPI.Datatype:
    n, length = chance.randint(1, 4), chance.randint(1, 3)
    starts = chance.sample(range(0, 40, 4), n)
    match chance.randrange(6):
        case 0:
            return base.Create_vector(n, length, length + 2)
        case 1:
            return base.Create_contiguous(n * length)
        case 2:
            return base.Create_indexed([length] * n, starts)
        case 3:
            return base.Create_hindexed_block(length, [start * base.extent for start in starts])
        case 4:
            return base.Create_resized(0, base.extent + 4 * n)
    return base.Create_subarray([n + 2, 4], [n, 2], [1, 1])
