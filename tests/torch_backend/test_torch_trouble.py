"""Where a process group could go wrong without a word: refusals, callbacks, many messages, ends."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meeting import together
from ranks import on_ranks

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(120)]

LIMIT = timedelta(seconds=20)
MANY = 40


def start(rank: int, size: int, store: str) -> None:
    import pynccl.torch  # noqa: F401

    dist.init_process_group(
        "pynccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )


def total() -> float:
    x = torch.ones(3)
    dist.all_reduce(x)
    return float(x[0])


def refusals(rank: int, size: int) -> None:
    """What is refused in a group leaves no group open behind it."""
    whole = [torch.ones(2, dtype=torch.bool) for _ in range(2)]
    with pytest.raises(TypeError, match=r"Cannot use ReduceOp.AVG with Bool"):
        dist.all_reduce_coalesced(whole, dist.ReduceOp.AVG)
    assert total() == size


def overlapping(rank: int, size: int) -> None:
    """Messages that would overwrite others' data are refused; what goes to a rank may be replaced by it."""
    x = torch.arange(6.0)
    for call in (
        lambda: dist.all_to_all_single(x[2:6], x[:4]),
        lambda: dist.all_to_all_single(x[1:4], x[:4], [1, 2], [2, 2]),
        lambda: dist.all_to_all([x[2:3], x[0:1]], [x[0:1], x[2:3]]),
    ):
        with pytest.raises(ValueError, match=r"all_to_all: input \d and output \d overlap"):
            call()
    if rank == 0:
        with pytest.raises(ValueError, match="scatter: input 0 and output 0 overlap"):
            dist.scatter(x[1:3], [x[2:4], x[0:2]], 0)
        with pytest.raises(ValueError, match="gather: input 0 and output 0 overlap"):
            dist.gather(x[1:3], [x[0:2], x[2:4]], 0)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    x = torch.arange(4.0) + 10 * rank
    dist.all_to_all_single(x, x)
    assert x.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    x = torch.arange(4.0) + 10 * rank
    dist.scatter(x[:2], [x[:2], x[2:]] if rank == 0 else None, 0)
    assert x.tolist() == ([0, 1, 2, 3] if rank == 0 else [2, 3, 12, 13])
    dist.gather(x[:2], [x[:2], x[2:]] if rank == 0 else None, 0)
    assert x.tolist() == ([0, 1, 2, 3] if rank == 0 else [2, 3, 12, 13])
    assert total() == size


def nested_futures(rank: int, size: int) -> None:
    """A callback waits for the future of another operation, as the hook of PowerSGD does."""
    x, y = torch.ones(2), torch.ones(2)

    def again(_: Any) -> torch.Tensor:
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.get_future().wait()
        return y

    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert work.get_future().then(again).wait().tolist() == [size, size]


def many_receives(rank: int, size: int) -> None:
    """Messages that are sent later hold nothing up, however many are waited for."""
    if rank == 0:
        buffers = [torch.zeros(1) for _ in range(MANY)]
        works = [dist.irecv(buffer, 1) for buffer in buffers]
        assert total() == size
        for work in works:
            assert work is not None
            work.wait()
        assert [buffer.item() for buffer in buffers] == list(range(MANY))
    else:
        assert total() == size
        for i in range(MANY):
            dist.send(torch.full((1,), float(i)), 0)


def future_of_a_batch(rank: int, size: int) -> None:
    """It is complete with the last part."""
    if rank == 0:
        dist.send(torch.full((1,), 1.0), 1, tag=1)
        time.sleep(0.3)
        dist.send(torch.full((1,), 2.0), 1, tag=2)
        return
    first, second = torch.zeros(1), torch.zeros(1)
    (work,) = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, first, 0, tag=1), dist.P2POp(dist.irecv, second, 0, tag=2)]
    )
    parts = work.get_future().wait()
    assert (first.item(), second.item()) == (1, 2)
    assert [part.item() for part in parts] == [1, 2]
    assert len(work.result()) == 2


def times(rank: int, size: int) -> None:
    for wrong in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="timeout is .*; expected a positive timedelta"):
            dist.new_group(timeout=wrong)
    work = dist.all_reduce(
        torch.ones(1), async_op=True, group=dist.new_group(timeout=timedelta(days=200_000))
    )
    assert work is not None
    work.wait(timedelta(days=200_000))


def other_memory(rank: int, size: int) -> None:
    """An operation in flight keeps the memory of its tensors, which the program replaces meanwhile."""
    x, row, rows = torch.ones(1 << 22), torch.ones(1 << 22), torch.zeros(size << 22)
    if rank == 1:
        time.sleep(0.5)
    works = [dist.all_reduce(x, async_op=True), dist.all_gather_into_tensor(rows, row, async_op=True)]
    works.append(dist.isend(row, 1) if rank == 0 else dist.irecv(row, 0))
    for tensor in (x, row, rows):
        tensor.set_(torch.full((2,), 7.0).untyped_storage(), 0, (2,), (1,))
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in (x, row, rows)] == [[7.0, 7.0]] * 3


PROGRAMS = [
    refusals,
    overlapping,
    nested_futures,
    many_receives,
    future_of_a_batch,
    times,
    other_memory,
]


@on_ranks(2, timeout=100)
def test_trouble(rank: int, nranks: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    start(rank, nranks, store)
    for program in PROGRAMS:
        program(rank, nranks)
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2, timeout=100)
def test_groups_one_after_another_in_one_store(rank: int, nranks: int, tmp_path: Path) -> None:
    """torchrun's store outlives a group, and torch gives the next one the same names."""
    path = str(tmp_path / "store")
    import pynccl.torch  # noqa: F401

    store = dist.FileStore(path, nranks)
    for round_ in range(3):
        together(nranks)
        if rank == 0:
            time.sleep(0.5 * round_)
        dist.init_process_group("pynccl", store=store, rank=rank, world_size=nranks, timeout=LIMIT)
        x = torch.full((2,), float(round_))
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        assert total() == nranks
        together(nranks, "end")
        dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2, timeout=100)
def test_exit_with_callbacks_outstanding(rank: int, nranks: int, tmp_path: Path) -> None:
    """The program ends without destroying the group; callbacks are still to be called."""
    store = str(tmp_path / "store")
    start(rank, nranks, store)
    dist.barrier()
    for _ in range(20):
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        assert work is not None
        work.get_future().then(lambda future: future.value())
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1)
        assert work is not None
        work.get_future().then(lambda future: future.value())
    together(nranks)


@pytest.mark.slow
@on_ranks(2, timeout=60)
def test_exit_with_slow_callbacks(rank: int, nranks: int, tmp_path: Path) -> None:
    """The program ends without destroying the group, and no callback ends before it.

    One that ended while Python finalizes could abort the process, as docs/torch.md says.
    """
    store = str(tmp_path / "store")

    def slow(_: object) -> None:
        # Of an operation that is done already it is called here, at once.
        if threading.current_thread() is not threading.main_thread():
            time.sleep(40)

    start(rank, nranks, store)
    for _ in range(20):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        work.get_future().then(slow)
    together(nranks)


@pytest.mark.slow
@on_ranks(3, timeout=100)
def test_what_is_dropped(rank: int, nranks: int, tmp_path: Path) -> None:
    """A callback drops the last reference to its group; a message needs no other ranks than its own."""
    store = str(tmp_path / "store")
    from pynccl.torch import _extension

    start(rank, nranks, store)
    held = {"group": dist.new_group()}
    work = dist.all_reduce(torch.ones(1), async_op=True, group=held["group"])
    assert work is not None
    dist.distributed_c10d.destroy_process_group(held["group"])

    def drop(future: Any) -> None:
        held.clear()

    done = work.get_future().then(drop)
    del work
    done.wait()
    where = dist.FileStore(store + "-direct", nranks)
    backend = _extension.Backend(where, rank, nranks, timedelta(seconds=5), False)
    x = torch.full((1,), float(rank))
    if rank == 0:
        backend.send([x], 1, 0).wait()
    elif rank == 1:
        backend.recv([x], 0, 0).wait()
        assert x.item() == 0
    if rank == 2:
        # The others do not come.
        with pytest.raises(dist.DistBackendError, match=r"connecting rank 2 of 3|waiting for rank 0"):
            backend.barrier().wait()
    together(nranks)
    backend.abort()
    work = dist.irecv(x, (rank + 1) % nranks)
    assert work is not None
    dist.distributed_c10d._abort_process_group()
    # Another rank's abort may come first.
    with pytest.raises(dist.DistBackendError, match="group was shut down|aborted its communicator"):
        work.wait()
