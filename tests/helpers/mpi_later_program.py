"""Persistent requests and windows of pynccl.mpi against mpi4py's on the same numbers; for mpirun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpi_forms
import pynccl
from mpi_program import as_cupy, compare_forms, operations
from pynccl import NcclInvalidUsage, NotSupportedError
from pynccl.mpi import Comm, Prequest, Win

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
LARGE = 1 << 18


class Later:
    """A Comm whose calls are prepared, started and waited for."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        prepare = getattr(Comm, f"{name}_init", None)
        if prepare is None:
            return getattr(self.comm, name)

        def call(*args: Any, **kwargs: Any) -> None:
            request = prepare(self.comm, *args, **kwargs)
            assert isinstance(request, Prequest)
            request.Start()
            assert request.Wait()
            request.Free()

        return call


def every_form(comm: Comm) -> None:
    later = Later(comm)
    compare_forms(as_cupy, later)
    found, expected = operations(as_cupy, later), operations(lambda data: data, WORLD)
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(got, want, err_msg=f"result {index} of rank {RANK}")


def again(comm: Comm, oracle: MPI.Intracomm) -> None:
    """Each start reads the present contents, also through packed copies."""
    gaps = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    results = []
    for owner, make in ((comm, as_cupy), (oracle, lambda data: data)):
        x, y, z = np.zeros(6), np.zeros(6), np.zeros(6)
        requests: list[Any] = [
            owner.Allreduce_init(make(x), make(y)),
            owner.Bcast_init([make(z), 1, gaps], root=SIZE - 1),
        ]
        for turn in range(5):
            x[:] = np.arange(6) * (RANK + 1) + turn
            z[:] = 10 * RANK + turn
            Prequest.Startall(requests)
            Prequest.Waitall(requests)
            results.append((y.copy(), z.copy()))
        for request in requests:
            request.Free()
    for got, want in zip(results[:5], results[5:], strict=True):
        np.testing.assert_array_equal(got, want)
    gaps.Free()


def start_returns(comm: Comm) -> None:
    """Start does not wait for other ranks, and Wait for one request not for a later one."""
    x, y, z = np.full(LARGE, RANK + 1.0), np.zeros(LARGE), np.zeros(LARGE)
    first, second = comm.Allreduce_init(as_cupy(x), as_cupy(y)), comm.Allreduce_init(as_cupy(x), as_cupy(z))
    if RANK:
        WORLD.barrier()
        first.Start()
        first.Wait()
        WORLD.barrier()
        second.Start()
    else:
        first.Start()
        assert SIZE == 1 or not first.Test()
        second.Start()
        WORLD.barrier()
        first.Wait()
        assert y[0] == sum(range(SIZE + 1))
        WORLD.barrier()
    second.Wait()
    assert (y == z).all() and y[-1] == sum(range(SIZE + 1))
    first.Free()
    second.Free()


def messages(comm: Comm) -> None:
    """Messages in either order, with columns that are packed, and among calls that are not persistent."""
    column = MPI.DOUBLE.Create_vector(200, 500, 1000).Commit()
    x, y, z = np.zeros((200, 1000)), np.zeros((200, 1000)), np.zeros(LARGE)
    send, recv = comm.Send_init([as_cupy(x), 1, column], RIGHT), comm.Recv_init([as_cupy(y), 1, column], LEFT)
    for turn, order in enumerate(([send, recv], [recv, send])):
        x[:] = 100 * RANK + turn
        Prequest.Startall(order)
        while not Prequest.Testall(order):
            pass
        assert (y[:, :500] == 100 * LEFT + turn).all() and not y[:, 500:].any()
    # A blocking send goes along with the receive that was started before it.
    into = comm.Recv_init(as_cupy(z), LEFT)
    into.Start()
    comm.Send(as_cupy(np.full(LARGE, float(RANK))), RIGHT)
    into.Wait()
    assert (z == LEFT).all()
    # Messages that were started come before the next collective call.
    total = np.ones(1)
    send.Start()
    recv.Start()
    comm.Allreduce(MPI.IN_PLACE, as_cupy(total))
    Prequest.Waitall([send, recv])
    assert total[0] == SIZE
    nobody = comm.Send_init(as_cupy(x), MPI.PROC_NULL)
    nobody.Start()
    assert nobody.Wait()
    host: Any = [comm.Send_init(np.ones(1), RIGHT, 3), comm.Recv_init(z[:1], LEFT, 3)]
    assert all(isinstance(request, MPI.Prequest) for request in host)
    Prequest.Startall([*host, recv, send])
    Prequest.Waitall([recv, *host, send])
    assert z[0] == 1
    for request in [send, recv, into, nobody, *host]:
        request.Free()
    column.Free()


def misuse(comm: Comm) -> None:
    x = as_cupy(np.ones(4))
    request = comm.Allreduce_init(MPI.IN_PLACE, x)
    assert request.Wait() and request.Test()
    request.Start()
    with pytest.raises(NcclInvalidUsage, match="it is active"):
        request.Start()
    request.Wait()
    with pytest.raises(NotSupportedError, match="status is given"):
        request.Wait(MPI.Status())
    with pytest.raises(NotSupportedError, match="cannot cancel"):
        request.Cancel()
    request.Free()
    for call in (request.Start, request.Wait, request.Test, request.Free):
        with pytest.raises(NcclInvalidUsage, match="was freed"):
            call()
    with pytest.raises(NotSupportedError, match="op is MPI.LAND"):
        comm.Allreduce_init(MPI.IN_PLACE, x, op=MPI.LAND)
    with pytest.raises(NotSupportedError, match="tag is 3"):
        comm.Send_init(x, 0, 3)
    with pytest.raises(NotSupportedError, match="ANY_SOURCE"):
        comm.Recv_init(x)
    with pytest.raises(NotSupportedError, match="Ssend_init of device arrays"):
        comm.Ssend_init(x, 0)


def puts_and_gets(window: Any, make: Callable[[Any], Any], mine: np.ndarray[Any, Any]) -> list[Any]:
    """Put and get in every form of a target; return what memory held."""
    gaps = MPI.DOUBLE.Create_vector(2, 1, 3).Commit()
    found = []
    window.Fence()
    forms: list[tuple[Any, Any]] = [
        (lambda x: x[:2], None),
        (lambda x: x[:1], 3),
        (lambda x: [x, 2, MPI.DOUBLE], [4]),
        (lambda x: [x, (3, 1)], (6, 3)),
        (lambda x: [x, 2], (12, 1, gaps)),
        (lambda x: [x, 1, gaps], (20, 2, "d")),
        (lambda x: [x, 0], None),
    ]
    for number, (form, target) in enumerate(forms):
        data, into = mpi_forms.numbers(8) + number, np.full(8, -1.0)
        window.Put(form(make(data)), RIGHT, target)
        window.Fence()
        found.append(mine.copy())
        window.Get(form(make(into)), RIGHT, target)
        window.Get(form(make(into[::-1].copy())), RANK, target)
        window.Put(make(data), MPI.PROC_NULL)
        window.Fence()
        found.append(into)
    gaps.Free()
    return found


def windows_against_mpi(comm: Comm) -> None:
    memory: Any = pynccl.zeros(40)
    oracle = np.zeros(40)
    ours, theirs = Win.Create(as_cupy(memory), 8, comm=comm), MPI.Win.Create(oracle, 8, comm=WORLD)
    assert isinstance(ours, Win)
    for got, want in zip(
        puts_and_gets(ours, as_cupy, memory),
        puts_and_gets(theirs, lambda data: data, oracle),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    assert ours.attrs == (memory.ctypes.data, 320, 8)
    for key in (MPI.WIN_SIZE, MPI.WIN_DISP_UNIT, MPI.WIN_CREATE_FLAVOR):
        assert ours.Get_attr(key) == theirs.Get_attr(key)
    group, other = ours.Get_group(), theirs.Get_group()
    assert MPI.Group.Compare(group, other) == MPI.IDENT
    ours.Free()
    theirs.Free()
    host = Win.Create(np.zeros(4), 8, comm=comm)
    assert isinstance(host, MPI.Win)
    host.Free()


def many_windows(comm: Comm) -> None:
    """The signals of a pair of ranks count for all windows: a fence of one completes the others' puts."""
    sizes = [LARGE + rank for rank in range(SIZE)]
    wins = [Win.Allocate(8 * sizes[RANK], RANK + 1, comm=comm) for _ in range(3)]
    arrays = [np.asarray(win.tomemory()).view(np.float64) for win in wins]
    for win in wins:
        win.Fence()
    for turn in range(4):
        for peer in range(SIZE):
            for number, win in enumerate(wins):
                for _ in range(1 + (RANK + number) % 3):
                    win.Put(as_cupy(np.full(1, 1000.0 * turn + 10 * RANK + number)), peer, 8 * RANK)
        wins[turn % 3].Fence()
        # A displacement is in the target's units, of as many bytes as its rank and 1.
        for number, array in enumerate(arrays):
            for rank in range(SIZE):
                assert array[rank * (RANK + 1)] == 1000.0 * turn + 10 * rank + number, (turn, number, rank)
        WORLD.barrier()
    large = np.arange(LARGE, dtype=float) + RANK
    wins[1].Fence()
    wins[1].Put(as_cupy(large), RIGHT)
    wins[1].Free()
    wins[2].Free()
    assert (arrays[1][:LARGE] == np.arange(LARGE) + LEFT).all()
    wins[0].Free()


def no_memory_on_a_rank(comm: Comm) -> None:
    memory = pynccl.zeros(2)
    win = Win.Create(None if RANK else as_cupy(memory), 8, comm=comm)
    win.Fence()
    if RANK == SIZE - 1:
        win.Put(as_cupy(np.full(1, 7.0)), 0, 1)
    if RANK and SIZE > 1:
        with pytest.raises(ValueError, match=f"within the 0 bytes of rank {RANK}"):
            win.Put(as_cupy(np.ones(1)), RANK)
    win.Fence()
    assert RANK or memory.tolist() == [0.0, 7.0]
    win.Free()


def wrong_windows(comm: Comm) -> None:
    x = as_cupy(np.ones(4))
    win = Win.Allocate(24, 8, comm=comm)
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "target has bytes 0 to 32; .* 24 bytes of rank", lambda: win.Put(x, RIGHT)),
        (ValueError, "target has bytes 16 to 32", lambda: win.Get([x, 2], RIGHT, 2)),
        (ValueError, "target has 8 bytes; expected 16", lambda: win.Put([x, 2], RIGHT, (0, 1))),
        (ValueError, "target has int64; ", lambda: win.Put([x, 2], RIGHT, (0, 2, MPI.INT64_T))),
        (ValueError, "the displacement of target is -1", lambda: win.Put([x, 1], RIGHT, -1)),
        (TypeError, "target is True; expected a displacement", lambda: win.Put([x, 1], RIGHT, True)),
        (TypeError, "assertion is 'x'; expected an int", lambda: win.Fence("x")),
        (TypeError, "requests is None; expected a list", lambda: Prequest.Startall(None)),
        (TypeError, r"requests\[0\] is 1; expected a request", lambda: Prequest.Waitall([1])),
        (ValueError, f"target_rank is {SIZE}; ", lambda: win.Put([x, 1], SIZE)),
        (TypeError, "target_rank is 'a'", lambda: win.Put([x, 1], "a")),  # type: ignore[arg-type]
        (TypeError, "target is 'a'", lambda: win.Put([x, 1], 0, "a")),
        (NotSupportedError, "Lock on device memory: NCCL tells only", lambda: win.Lock(0)),
        (NotSupportedError, "Accumulate on device memory: NCCL puts", lambda: win.Accumulate(x, 0)),
        (NotSupportedError, "Rput on device memory", lambda: win.Rput(x, 0)),
        (NotSupportedError, "Create_dynamic", lambda: Win.Create_dynamic(comm=comm)),
        (NotSupportedError, "Allocate_shared", lambda: Win.Allocate_shared(8, comm=comm)),
        (TypeError, "comm is .*; expected a pynccl.mpi.Comm", lambda: Win.Create(x, comm=WORLD)),  # type: ignore[arg-type]
        (ValueError, "disp_unit is 0", lambda: Win.Allocate(8, 0, comm=comm)),
    ]
    if SIZE > 1:
        # On one rank only: all of them get the error.
        mixed = np.ones(1) if RANK == 0 else x
        calls.append((TypeError, "host memory on rank 0", lambda: Win.Create(mixed, comm=comm)))
        plain = Win.Create(x, 8, comm=comm)
        calls.append((ValueError, "cannot be reached by loads", lambda: plain.Get([x, 1], RIGHT)))
    for error, words, call in calls:
        with pytest.raises(error, match=words):
            call()
    with pytest.raises(AttributeError):
        win.nonsense  # noqa: B018
    win.Free()
    with pytest.raises(NcclInvalidUsage, match="was freed"):
        win.Fence()
    if SIZE > 1:
        plain.Free()


def main() -> None:
    oracle = WORLD.Dup()
    with Comm(WORLD) as comm:
        every_form(comm)
        again(comm, oracle)
        start_returns(comm)
        messages(comm)
        misuse(comm)
        windows_against_mpi(comm)
        many_windows(comm)
        no_memory_on_a_rank(comm)
        wrong_windows(comm)
    print(f"fine {RANK}", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
