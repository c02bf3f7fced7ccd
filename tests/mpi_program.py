"""Every method of pynccl.mpi.Comm on device-like arrays, against mpi4py on the same numbers; for mpirun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

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


def refusals(comm: Any) -> None:
    device, host = as_cupy(np.zeros(SIZE)), np.zeros(SIZE)
    derived = MPI.DOUBLE.Create_contiguous(1).Commit()
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (NotSupportedError, lambda: comm.Allreduce(device, device, op=MPI.LAND)),
        (NotSupportedError, lambda: comm.Allreduce(device, device, op=MPI.Op.Create(lambda a, b, t: None))),
        (NotSupportedError, lambda: comm.Send(device, 0, tag=3)),
        (NotSupportedError, lambda: comm.Recv(device)),
        (NotSupportedError, lambda: comm.Recv(device, source=0, tag=5)),
        (NotSupportedError, lambda: comm.Recv(device, source=0, status=MPI.Status())),
        (NotSupportedError, lambda: comm.Bcast([device, derived])),
        (NotSupportedError, lambda: comm.Scan(device, device)),
        (NotSupportedError, lambda: comm.Alltoall(MPI.IN_PLACE, device)),
        (TypeError, lambda: comm.Allreduce(device, host)),
        (TypeError, lambda: comm.Allreduce(host, device)),
        (TypeError, lambda: comm.Bcast([device, MPI.FLOAT])),
        (TypeError, lambda: Comm(3)),  # type: ignore[arg-type]
        (ValueError, lambda: comm.Allgatherv(device, [device, [SIZE + 1] * SIZE])),
        (ValueError, lambda: comm.Allgatherv(device, [device, [1] * (SIZE + 1)])),
    ]
    for error, call in calls:
        try:
            call()
        except error:
            continue
        raise AssertionError(f"no {error.__name__}: {call}")
    derived.Free()


def main() -> None:
    with Comm(WORLD) as comm:
        assert pynccl.library_info().backend == "cpu"
        assert (comm.rank, comm.size, comm.Get_rank(), comm.Get_size()) == (RANK, SIZE, RANK, SIZE)
        compare(as_cupy, comm)
        compare(Interface, comm)
        compare(lambda data: data, comm)
        refusals(comm)
        assert comm.bcast({"rank": RANK}) == {"rank": 0}
        half = comm.Split(RANK % 2, -RANK)
        data = np.full(3, float(RANK))
        half.Allreduce(MPI.IN_PLACE, as_cupy(data))
        assert (data == sum(r for r in range(SIZE) if r % 2 == RANK % 2)).all()
        assert half.rank == half.mpi.rank
        half.Free()
        none = comm.Split(MPI.UNDEFINED if RANK == 0 else 1)
        assert (none == MPI.COMM_NULL) == (RANK == 0)
        if RANK:
            none.Free()
        copy = comm.Dup()
        copy.Barrier()
        copy.Free()
    print(f"fine {RANK}", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
