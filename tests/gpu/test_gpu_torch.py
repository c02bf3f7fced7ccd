"""The torch.distributed backend on GPUs: what its tests on CPU tensors cannot show.

Waits of streams, messages of pairs, bound devices. Ranks share a device where there are fewer devices than
ranks (see docs/gpu.md).
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpu_ranks import shared
from meeting import hear, tell, together, until
from ranks import on_ranks

# Each rank imports torch.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(300)]

LIMIT = timedelta(seconds=60)


def device_of(rank: int, size: int) -> torch.device:
    """Return a rank's device, which is then the current one; before NCCL is loaded."""
    assert torch.cuda.is_available(), "this torch has no CUDA; expected the build that brings its libraries"
    device = torch.device("cuda", shared(rank, size, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def start(rank: int, size: int, folder: Path, **options: Any) -> torch.device:
    """Make the default group; return this rank's device."""
    device = device_of(rank, size)
    import pynccl.torch  # noqa: F401

    if options.pop("bind", False):
        options["device_id"] = device
    method = f"file://{folder}/store"
    dist.init_process_group(
        "pynccl", init_method=method, rank=rank, world_size=size, timeout=LIMIT, **options
    )
    return device


def issued(work: Any) -> Any:
    assert work is not None
    return work


def summed(rank: int, size: int, device: torch.device, group: Any = None) -> None:
    """The group works: all its ranks have the sum."""
    x = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(x, group=group)
    members = range(size) if group is None else dist.get_process_group_ranks(group)
    assert x.tolist() == [float(sum(r + 1 for r in members))] * 1000


# --- streams ---


@on_ranks(2, backend="auto", timeout=200)
def test_collectives(rank: int, nranks: int, tmp_path: Path) -> None:
    """On the CPU the same calls are compared with gloo."""
    device = start(rank, nranks, tmp_path)
    everyone = torch.arange(nranks * nranks * 3, dtype=torch.float32, device=device).reshape(nranks, -1)
    mine = everyone[rank].clone()
    parts = list(everyone.reshape(nranks, nranks, 3)[:, rank])
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    assert torch.equal(mine, everyone.mean(0))
    out = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(out, everyone[rank].clone())
    assert torch.equal(out, sum(parts, torch.zeros_like(out)))
    gathered = torch.empty_like(everyone)
    dist.all_gather_into_tensor(gathered, everyone[rank].clone())
    assert torch.equal(gathered, everyone)
    lists = [torch.empty(3 * nranks, device=device) for _ in range(nranks)]
    dist.all_gather(lists, everyone[rank].clone())
    assert torch.equal(torch.stack(lists), everyone)
    swapped = torch.empty_like(everyone[rank])
    dist.all_to_all_single(swapped, everyone[rank].clone())
    assert torch.equal(swapped, torch.cat(parts))
    root = everyone[rank].clone()
    dist.broadcast(root, 1)
    assert torch.equal(root, everyone[1])
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(2, backend="auto", timeout=200)
def test_waits_of_streams(rank: int, nranks: int, tmp_path: Path) -> None:
    """Long work in front of an operation, and a reader behind: only the right waits keep their order."""
    device = start(rank, nranks, tmp_path)
    x = torch.zeros(1 << 22, device=device)
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for turn in range(20):
        with torch.cuda.stream(stream):
            x.zero_()
            for _ in range(20):
                x += 1
            work = issued(dist.all_reduce(x, async_op=True))
            work.wait()
            total = x.sum(dtype=torch.float64)
            assert total.item() == 20 * nranks * x.numel(), turn
            future = issued(dist.all_reduce(x, async_op=True)).get_future()
            doubled = future.then(lambda done: done.value()[0] * 2)
            assert (doubled.wait()[::1000] == 40 * nranks**2).all(), turn
    dist.destroy_process_group()


# --- time-outs and errors ---


@on_ranks(2, backend="auto", timeout=200)
def test_a_wait_with_a_time(rank: int, nranks: int, tmp_path: Path) -> None:
    """It notices that the other rank is late; the operation goes on."""
    device = start(rank, nranks, tmp_path)
    summed(rank, nranks, device)
    x = torch.ones(10, device=device)
    if rank == 0:
        work = issued(dist.all_reduce(x, async_op=True))
        with pytest.raises(
            dist.DistBackendError, match=r"Timed out waiting 500ms for all_reduce .*on rank 0"
        ):
            work.wait(timedelta(milliseconds=500))
        tell("gave up")
        assert work.wait(LIMIT)
    else:
        hear("gave up")
        dist.all_reduce(x)
    assert x.tolist() == [nranks] * 10
    dist.destroy_process_group()


def a_rank_dies(rank: int, nranks: int, folder: Path) -> None:
    # Between processes of one machine NCCL sees the end of a socket only.
    os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1", NCCL_NET="Socket")
    device = start(rank, nranks, folder)
    summed(rank, nranks, device)
    together(nranks)
    if rank == 1:
        os._exit(0)
    work = issued(dist.all_reduce(torch.ones(1 << 20, device=device), async_op=True))

    def told() -> bool:
        try:
            # Without a time it does not wait for the device.
            work.wait()
        except dist.DistBackendError as error:
            return "all_reduce: " in str(error)
        return False

    until(told, 60)
    dist.distributed_c10d._abort_process_group()
    # Nothing that waits for the dead rank is left on the device.
    torch.cuda.synchronize(device)


def test_a_wait_sees_the_error_of_the_communicator(tmp_path: Path) -> None:
    from pynccl import testing

    first, _ = testing.run(2, a_rank_dies, tmp_path, backend="auto", timeout=200, check=False)
    assert first is None, first


# --- messages ---


@on_ranks(3, backend="auto", timeout=200)
def test_messages_outside_batches(rank: int, nranks: int, tmp_path: Path) -> None:
    """Two ranks need no other one: the third calls nothing before they are done."""
    device = start(rank, nranks, tmp_path)
    if rank == 2:
        hear("exchanged")
    else:
        x = torch.full((1 << 20,), float(rank + 1), device=device)
        y = torch.zeros_like(x)
        for _ in range(3):
            dist.send(x, 1) if rank == 0 else dist.recv(y, 0)
            dist.recv(y, 1) if rank == 0 else dist.send(x, 0)
        assert (y == 2 - rank).all()
        for i in range(5):
            part = x[i * 100 : i * 100 + 100]
            work = dist.isend(part, 1) if rank == 0 else dist.irecv(y[:100].fill_(0), 0)
            issued(work).wait()
            assert rank == 0 or (y[:100] == 1).all()
        torch.cuda.synchronize(device)
        if rank == 0:
            tell("exchanged")
    # The group's own communicator, after those of pairs.
    summed(rank, nranks, device)
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    received = torch.zeros(4, device=device)
    sent = torch.full((4,), float(rank), device=device)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    ):
        work.wait()
    assert received.tolist() == [left] * 4
    dist.destroy_process_group()


@on_ranks(1, 2, backend="auto", timeout=200)
def test_messages_to_oneself(rank: int, nranks: int, tmp_path: Path) -> None:
    """As in NCCL, in a batch; on a device, another one would wait for ever."""
    device = start(rank, nranks, tmp_path)
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    mine, theirs = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    for turn in range(3):
        value = 10.0 * turn + rank
        ops = [
            dist.P2POp(dist.isend, torch.full((1000,), value, device=device), rank),
            dist.P2POp(dist.irecv, mine, rank),
        ]
        if nranks > 1:
            ops.insert(1, dist.P2POp(dist.isend, torch.full((1000,), -value, device=device), right))
            ops.append(dist.P2POp(dist.irecv, theirs, left))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (mine == value).all()
        assert nranks == 1 or (theirs == -10.0 * turn - left).all()
    with pytest.raises(ValueError, match=r"dst is \d, expected a rank from 0 to \d other than this one"):
        dist.isend(mine, rank)
    with pytest.raises(ValueError, match=r"src is \d, expected a rank from 0 to \d other than this one"):
        dist.irecv(mine, rank)
    summed(rank, nranks, device)
    dist.destroy_process_group()


# --- communicators ---


@on_ranks(2, backend="auto", timeout=200)
def test_a_bound_device(rank: int, nranks: int, tmp_path: Path) -> None:
    """Its communicator is made at once, and that of a split from it."""
    log = tmp_path / f"nccl-{rank}"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(log))
    device = start(rank, nranks, tmp_path, bind=True)
    assert "Init COMPLETE" in log.read_text()
    summed(rank, nranks, device)
    alone = dist.new_group([0])
    if rank == 0:
        summed(0, 1, device, alone)
    part = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=50))
    summed(rank, nranks, device, part)
    for group, limit in ((dist.group.WORLD, LIMIT), (part, timedelta(seconds=50))):
        assert group is not None
        assert group._get_backend(device).options._timeout == limit
    mesh = init_device_mesh("cuda", (nranks, 1), mesh_dim_names=("a", "b"))
    summed(rank, nranks, device, mesh["a"].get_group())
    dist.destroy_process_group()


@on_ranks(2, backend="auto", timeout=200, env={"NCCL_COMM_BLOCKING": "0"})
def test_communicators_that_do_not_block(rank: int, nranks: int, tmp_path: Path) -> None:
    """Every call of the library may return before it is done."""
    device = start(rank, nranks, tmp_path)
    for _ in range(20):
        summed(rank, nranks, device)
    x = torch.full((1 << 20,), float(rank), device=device)
    y = torch.zeros_like(x)
    dist.send(x, 1 - rank) if rank == 0 else dist.recv(y, 1 - rank)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
    for work in works:
        work.wait()
    assert (y == 1 - rank).all()
    summed(rank, nranks, device, dist.new_group())
    dist.destroy_process_group()


@on_ranks(2, backend="auto", timeout=200)
def test_ranks_begin_with_another_device(rank: int, nranks: int, tmp_path: Path) -> None:
    """Communicators on the CPU and on a device are counted apart: their ranks meet in any order."""
    device = start(rank, nranks, tmp_path)
    failures: list[BaseException] = []

    def reduced(where: torch.device) -> None:
        try:
            torch.cuda.set_device(device)
            x = torch.full((1000,), float(rank + 1), device=where)
            dist.all_reduce(x)
            assert x.tolist() == [3.0] * 1000
        except BaseException as error:
            failures.append(error)

    order = [torch.device("cpu"), device]
    threads = [threading.Thread(target=reduced, args=(where,)) for where in (order[::-1] if rank else order)]
    for thread in threads:
        thread.start()
        # Its communicator is the first that this rank begins.
        time.sleep(1)
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.destroy_process_group()
