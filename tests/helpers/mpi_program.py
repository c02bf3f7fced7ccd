"""Every method of pynccl.mpi.Comm on device-like arrays, against mpi4py on the same numbers; for mpirun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpi_forms
import pynccl
from pynccl import NotSupportedError
from pynccl.mpi import Comm

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


class Interface:
    """Host memory with nothing but __cuda_array_interface__."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": data.shape,
            "typestr": data.dtype.str,
            "data": (data.ctypes.data, False),
            "version": 3,
        }


class Typed(Interface):
    """An array of a dtype that has no typestr of its own."""

    def __init__(self, numbers: np.ndarray[Any, Any], dtype: Any) -> None:
        super().__init__(numbers.astype(dtype))
        self.dtype = self.data.dtype


def as_cupy(data: np.ndarray[Any, Any]) -> Any:
    memory = cupy.cuda.UnownedMemory(data.ctypes.data, max(data.nbytes, 1), data, 0)
    return cupy.ndarray(data.shape, data.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def numbers(count: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    return (np.arange(count) * 3 + RANK + 1).astype(dtype)


def spec(make: Callable[[Any], Any], data: Any, *more: Any) -> Any:
    """Return one of mpi4py's buffer arguments."""
    return [make(data), *more] if more else make(data)


def operations(make: Callable[[Any], Any], comm: Any) -> list[np.ndarray[Any, Any]]:
    """Call everything; return what each call has written."""
    counts = [rank + 1 for rank in range(SIZE)]
    starts = [sum(counts[:rank]) + rank for rank in range(SIZE)]
    total, last = sum(counts) + SIZE, SIZE - 1
    mine = counts[RANK]
    out: list[np.ndarray[Any, Any]] = []

    def new(count: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        out.append(np.zeros(count, dtype))
        return out[-1]

    def place(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out.append(data)
        return data

    for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
        comm.Allreduce(make(numbers(4)), make(new(4)), op=op)
        comm.Reduce(make(numbers(4, np.int32)), make(new(4, np.int32)), op=op, root=last)
    comm.Allreduce(make(numbers(4, np.complex128)), make(new(4, np.complex128)))
    comm.Allreduce(MPI.IN_PLACE, make(place(numbers(4))))
    own = place(numbers(4))
    comm.Reduce(MPI.IN_PLACE if RANK == 0 else make(own), make(own) if RANK == 0 else None)
    comm.Bcast(make(place(numbers(5, np.int16))), root=last)
    comm.Bcast([make(place(numbers(5))), MPI.DOUBLE])
    comm.Bcast([make(place(numbers(5))), 3, MPI.DOUBLE])
    comm.Allgather(make(numbers(3)), make(new(3 * SIZE)))
    whole = place(numbers(2 * SIZE))
    comm.Allgather(MPI.IN_PLACE, make(whole))
    comm.Allgatherv(make(numbers(mine)), spec(make, new(sum(counts)), counts))
    comm.Allgatherv(make(numbers(mine)), spec(make, new(total), (counts, starts), MPI.DOUBLE))
    comm.Gather(make(numbers(2)), make(new(2 * SIZE)) if last == RANK else None, root=last)
    comm.Gatherv(make(numbers(mine)), spec(make, new(sum(counts)), counts) if RANK == 0 else None)
    comm.Scatter(make(numbers(2 * SIZE)) if last == RANK else None, make(new(2)), root=last)
    comm.Scatterv(
        spec(make, numbers(total), counts, starts, MPI.DOUBLE) if RANK == 0 else None, make(new(mine))
    )
    comm.Alltoall(make(numbers(2 * SIZE)), make(new(2 * SIZE)))
    comm.Alltoallv(spec(make, numbers(SIZE * mine), [mine] * SIZE), spec(make, new(sum(counts)), counts))
    comm.Reduce_scatter(make(numbers(sum(counts))), make(new(mine)), counts)
    comm.Reduce_scatter(make(numbers(2 * SIZE)), make(new(2)), op=MPI.MAX)
    comm.Reduce_scatter_block(make(numbers(2 * SIZE)), make(new(2)), op=MPI.SUM)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    comm.Sendrecv(make(numbers(3)), right, 0, make(new(3)), left)
    if RANK == 0 and SIZE > 1:
        comm.Send(make(numbers(4)), last)
    elif last == RANK and SIZE > 1:
        comm.Recv(make(new(4)), source=0)
    comm.Send(make(numbers(1)), MPI.PROC_NULL)
    comm.Barrier()
    return out


def compare(make: Callable[[Any], Any], comm: Any) -> None:
    for index, (got, want) in enumerate(
        zip(operations(make, comm), operations(lambda data: data, WORLD), strict=True)
    ):
        np.testing.assert_array_equal(got, want, err_msg=f"result {index} of rank {RANK}")


def compare_forms(make: Callable[[Any], Any], comm: Any) -> None:
    found, expected = list(mpi_forms.calls(make, comm)), list(mpi_forms.calls(lambda data: data, WORLD))
    assert len(found) > 300
    for (what, got), (_, want) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=f"{what} on rank {RANK}")


def counts_are_each_ranks(comm: Any) -> None:
    """In MPI a count is that of each rank, also of the buffer that holds all ranks' elements."""
    x, y = (100 * RANK + np.arange(2 * SIZE)).astype(np.float32), np.zeros(2 * SIZE, np.float32)
    comm.Alltoall([as_cupy(x), 2, MPI.FLOAT], [as_cupy(y), 2, MPI.FLOAT])
    assert y.tolist() == [100 * peer + 2 * RANK + i for peer in range(SIZE) for i in range(2)]
    y = np.full(4 * SIZE, float(RANK), np.float32)
    comm.Allgather(MPI.IN_PLACE, [as_cupy(y), 4, MPI.FLOAT])
    assert y.tolist() == [float(peer) for peer in range(SIZE) for _ in range(4)]
    # Of nothing the datatype does not matter.
    few, none = as_cupy(np.zeros(2)), as_cupy(np.zeros(0, np.int32))
    comm.Alltoallv([few, 0, MPI.DOUBLE], none)
    comm.Allgather(none, [few, 0])
    comm.Gatherv(none, [few, 0], root=SIZE - 1)
    comm.Allreduce([few, 0], none)
    comm.Scan([few, 0], as_cupy(np.zeros(0)))
    nothing: Any = [None, 0, MPI.DOUBLE]
    z, given = np.zeros(SIZE), [0] + [1] * (SIZE - 1)
    mine = as_cupy(np.full(1, float(RANK))) if RANK else nothing
    comm.Allgatherv(mine, [as_cupy(z), given])
    assert z.tolist() == [*map(float, range(1, SIZE)), 0.0]


def scans_of_small_floats(comm: Any) -> None:
    """Numbers that MPI has no datatype for, and the sign of zero."""
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        for op, reduce in ((MPI.SUM, np.sum), (MPI.PROD, np.prod), (MPI.MAX, np.max), (MPI.MIN, np.min)):
            for name, before in (("Scan", RANK + 1), ("Exscan", RANK)):
                x, y = Typed(np.array([-1.0, 0.5]) - RANK, dtype), Typed(np.zeros(2), dtype)
                getattr(comm, name)(x, y, op)
                if before:
                    want = reduce([np.array([-1.0, 0.5]) - rank for rank in range(before)], axis=0)
                    np.testing.assert_array_equal(y.data.astype(float), want.astype(dtype).astype(float))
    zero = np.full(2, -0.0)
    comm.Scan(MPI.IN_PLACE, as_cupy(zero))
    assert np.signbit(zero).all()


def refusals(comm: Any) -> None:
    device, host, other = as_cupy(np.zeros(2 * SIZE)), np.zeros(SIZE), as_cupy(np.zeros(2 * SIZE))
    short, complexes = as_cupy(np.zeros(SIZE, np.int16)), as_cupy(np.zeros(SIZE, np.complex64))
    singles = as_cupy(np.zeros(SIZE, np.float32))
    long, fixed = Interface(np.zeros(SIZE, np.longdouble)), Interface(np.zeros(SIZE))
    fixed.__cuda_array_interface__["data"] = (fixed.data.ctypes.data, True)
    n = 2 * SIZE
    scattered = MPI.DOUBLE.Create_darray(1, 0, [4], [MPI.DISTRIBUTE_CYCLIC], [1], [1]).Commit()
    wide, gaps = MPI.DOUBLE.Create_contiguous(n + 1).Commit(), MPI.INT.Create_vector(2, 1, 2).Commit()
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    raw = as_cupy(np.zeros(8, np.uint8))
    user = MPI.Op.Create(lambda a, b, t: None)
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (NotSupportedError, "op is MPI.LAND; exp", lambda: comm.Allreduce(device, other, op=MPI.LAND)),
        (NotSupportedError, "op is MPI.MAXLOC; e", lambda: comm.Allreduce(device, other, op=MPI.MAXLOC)),
        (NotSupportedError, "op is one that MPI", lambda: comm.Allreduce(device, other, op=user)),
        (NotSupportedError, "op is MPI.BXOR; ex", lambda: comm.Scan(device, other, op=MPI.BXOR)),
        (NotSupportedError, "recvbuf has int16", lambda: comm.Allreduce(MPI.IN_PLACE, short)),
        (NotSupportedError, "complex64 .*op is prod", lambda: comm.Scan(None, complexes, MPI.PROD)),
        (NotSupportedError, "a datatype, which NCCL", lambda: comm.Allreduce(None, long)),
        (
            NotSupportedError,
            "a datatype, which NCCL",
            lambda: comm.Reduce_scatter_block(None, [device, MPI.BYTE]),
        ),
        (
            NotSupportedError,
            "a derived datatype, wh",
            lambda: comm.Reduce([device, 1, pair], [other, 1, pair]),
        ),
        (NotSupportedError, "float32 in an array of uint8", lambda: comm.Scan(None, [raw, MPI.FLOAT])),
        (NotSupportedError, "tag is 3", lambda: comm.Send(device, 0, tag=3)),
        (NotSupportedError, "source is ANY_SOURCE", lambda: comm.Recv(device)),
        (NotSupportedError, "tag is 5", lambda: comm.Recv(device, source=0, tag=5)),
        (NotSupportedError, "status is given", lambda: comm.Recv(device, source=0, status=MPI.Status())),
        (NotSupportedError, "buf has a datatype made as DARRAY", lambda: comm.Bcast([device, 1, scattered])),
        (NotSupportedError, "DOUBLE_INT, which has gaps", lambda: comm.Bcast([device, 1, MPI.DOUBLE_INT])),
        (NotSupportedError, "expected Allreduce or Allreduce_init$", lambda: comm.Iallreduce(device, other)),
        (NotSupportedError, "Ssend of .* operation$", lambda: comm.Ssend([device, MPI.DOUBLE], 0)),
        (NotSupportedError, "Idup: ", lambda: comm.Idup()),
        (TypeError, "recvbuf is host memory", lambda: comm.Allreduce(device, host)),
        (TypeError, "sendbuf is host memory", lambda: comm.Allreduce([host, 1], device)),
        (TypeError, "recvbuf is None", lambda: comm.Allreduce(device, None)),
        (TypeError, "buf has MPI datatype MPI_FLOAT, which is float32", lambda: comm.Bcast([device, "f"])),
        (TypeError, "the count of buf is 1.5", lambda: comm.Bcast([device, 1.5])),
        (TypeError, "buf has 3 for its datatype", lambda: comm.Bcast([device, 1, 3])),
        (TypeError, "recvcounts is None", lambda: comm.Reduce_scatter(MPI.IN_PLACE, device)),
        (TypeError, "mpi is 3", lambda: Comm(3)),  # type: ignore[arg-type]
        (TypeError, "mpi is MPI.COMM_NULL; expected", lambda: Comm(MPI.COMM_NULL)),
        (ValueError, "DATATYPE_NULL", lambda: comm.Bcast([device, 1, MPI.DATATYPE_NULL])),
        (ValueError, "buf has 5 items", lambda: comm.Bcast([device, 1, 2, MPI.DOUBLE, 3])),
        (ValueError, "buf has bytes 0 to", lambda: comm.Bcast([device, n + 1])),
        (ValueError, "buf has displacement", lambda: comm.Bcast([device, (None, n + 1)])),
        (ValueError, "the count of buf is -1", lambda: comm.Bcast([device, -1])),
        (ValueError, "the displacement of buf is -2", lambda: comm.Bcast([device, (1, -2)])),
        (ValueError, "buf has .* bytes and no count", lambda: comm.Bcast([device, wide])),
        (ValueError, "sendbuf has 8 bytes", lambda: comm.Allreduce([device, 1], [other, 2])),
        (
            ValueError,
            "sendbuf has float64; .* bytes",
            lambda: comm.Allgather([device, 1], [other, 8, MPI.BYTE]),
        ),
        (ValueError, "sendbuf has 8 bytes", lambda: comm.Allgather([device, 1], other)),
        (ValueError, "sendbuf has float64; .* float32", lambda: comm.Allreduce([device, SIZE], singles)),
        (ValueError, "recvbuf is read-only", lambda: comm.Allgatherv(MPI.IN_PLACE, fixed)),
        (ValueError, "recvbuf has bytes", lambda: comm.Allgatherv(device, [other, [n + 1] * SIZE])),
        (ValueError, "the counts of recvbuf has", lambda: comm.Allgatherv(device, [other, [1] * (SIZE + 1)])),
        (
            ValueError,
            "the displacements of .* has",
            lambda: comm.Allgatherv(device, [other, (1, [0] * n + [0])]),
        ),
        (ValueError, "the counts of recvbuf is -1", lambda: comm.Alltoallv(device, [other, [-1] * SIZE])),
        (ValueError, "sum|all ranks", lambda: comm.Reduce_scatter(device, [other, 1], [1] * SIZE)),
        (ValueError, "share memory", lambda: comm.Alltoallv(device, device)),
        (ValueError, "share memory", lambda: comm.Sendrecv([device, 2], 0, 0, [device, (1, 1)], 0)),
        (ValueError, "share memory", lambda: comm.Exscan(device, device)),
        (NotSupportedError, r"expected Sendrecv, Send_init, or Send in a", lambda: comm.Isend(device, 0)),
        (AttributeError, r"has no attribute 'all_reduce'; expected comm.nccl", lambda: comm.all_reduce),
    ]
    if SIZE > 1:
        overlap = lambda: comm.Allgatherv(device, [other, (2, 1)])  # noqa: E731
        calls.append((ValueError, "the parts of recvbuf overlap", overlap))
    for error, words, call in calls:
        with pytest.raises(error, match=words):
            call()
    with (
        pytest.raises(NotSupportedError, match=r"impossible inside pynccl.group\(\)"),
        pynccl.group(),
    ):
        comm.Bcast([device, 1, gaps])
    for made in (scattered, wide, gaps, pair, user):
        made.Free()


def relatives(comm: Comm) -> None:
    """What MPI makes of a communicator has its NCCL one, whoever has to call."""
    members = range(0, SIZE, 2)
    group = WORLD.group.Incl(members)
    made: list[tuple[Any, list[int]]] = [
        (comm.Split(RANK % 2, -RANK), [r for r in range(SIZE) if r % 2 == RANK % 2]),
        (comm.Split_type(MPI.COMM_TYPE_SHARED, key=-RANK), list(range(SIZE))),
        (comm.Dup(), list(range(SIZE))),
        (comm.Dup_with_info(MPI.INFO_NULL), list(range(SIZE))),
        (comm.Clone(), list(range(SIZE))),
        (comm.Create(group), list(members)),
        (comm.Create_cart([SIZE], periods=[True]), list(range(SIZE))),
    ]
    if RANK in members:
        made.append((comm.Create_group(group), list(members)))
    for relative, ranks in made:
        if RANK not in ranks:
            assert relative == MPI.COMM_NULL
            continue
        assert isinstance(relative, Comm), relative
        assert (relative.rank, relative.size) == (relative.mpi.rank, relative.mpi.size)
        data = np.full(3, float(RANK))
        relative.Allreduce(MPI.IN_PLACE, as_cupy(data))
        assert (data == sum(ranks)).all()
        data = np.full(1, float(relative.mpi.rank))
        relative.Bcast(as_cupy(data), root=relative.size - 1)
        assert data[0] == relative.size - 1
    cart = made[6][0]
    assert cart.Get_coords(cart.rank) == [cart.rank]
    (line,) = [cart.Sub([True])]
    assert isinstance(line, Comm) and line.size == SIZE
    for relative, ranks in [*made, (line, list(range(SIZE)))]:
        if RANK in ranks:
            relative.Free()
    none = comm.Split(MPI.UNDEFINED if RANK == 0 else 1)
    assert (none == MPI.COMM_NULL) == (RANK == 0)
    if RANK:
        none.Disconnect()
    group.Free()


def main() -> None:
    with Comm(WORLD) as comm:
        assert pynccl.library_info().backend == "cpu"
        assert (comm.rank, comm.size, comm.Get_rank(), comm.Get_size()) == (RANK, SIZE, RANK, SIZE)
        compare(as_cupy, comm)
        compare(Interface, comm)
        compare(lambda data: data, comm)
        compare_forms(as_cupy, comm)
        counts_are_each_ranks(comm)
        scans_of_small_floats(comm)
        refusals(comm)
        assert comm.bcast({"rank": RANK}) == {"rank": 0}
        relatives(comm)
    print(f"fine {RANK}", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
