"""Operations whose group's time-out passes: their futures, polls and callers get one verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meeting import hear, store, tell, together
from pynccl import testing
from torch_ranks import on_ranks, start

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(120)]

SECONDS = 2.0
FUTURES = 20


def verdict(name: str = "all_reduce", late: str = "; it waits for a call of rank 1") -> str:
    """Return what rank 0 says of the last operation when its time is over."""
    group = dist.group.WORLD
    assert group is not None
    call = group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    return (
        f"pynccl: Timed out waiting {SECONDS * 1000:.0f}ms for {name} (call {call} of the group) on rank 0 "
        f"of group '0' (default_pg){late}. "
        "The operation goes on: wait for its work again, or destroy the group."
    )


def error(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def reduced(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work


def ended(began: float) -> None:
    """The group's time-out has just passed, and nobody came."""
    assert SECONDS - 0.1 <= time.monotonic() - began < SECONDS + 5


def each_way(rank: int, size: int) -> None:
    """Rank 1 is late: nobody waits for the operation, or a future, a poll, a callback or a wait does."""
    tensors = [torch.ones(1000) for _ in range(5)]
    if rank:
        hear("judged")
        for x in tensors:
            dist.all_reduce(x)
        return
    began = time.monotonic()
    works, texts = zip(*[(reduced(x), verdict()) for x in tensors], strict=True)
    first, second, third, fourth, alone = works
    seen = []
    chained = second.get_future().then(lambda future: seen.append(error(future.value)))
    assert not third.is_completed() and third.exception() is None
    assert error(first.get_future().wait) == texts[0]
    ended(began)
    chained.wait()
    assert seen == [texts[1]]
    while not third.is_completed():
        time.sleep(0.01)
    ended(began)
    assert error(fourth.wait) == texts[3]
    for work, text in zip(works, texts, strict=True):
        assert work.is_completed() and not work.is_success()
        assert text in str(work.exception())
        assert error(work.wait) == error(work.get_future().wait) == text
    # The operations go on.
    tell("judged")
    for work in works:
        assert work.wait(timedelta(seconds=60))
        assert work.is_success() and work.exception() is None
    assert all(x.eq(size).all() for x in tensors)
    assert torch.equal(alone.get_future().wait()[0], tensors[-1])


def late_messages(rank: int, size: int) -> None:
    """Ranks 2 and 0 wait for rank 1, as receiver and as sender, over connections that exist."""
    x = torch.ones(1 << 20)
    if rank == 1:
        dist.send(x, 2)
        dist.recv(x, 0)
        hear("judged 2")
        hear("judged 0")
        dist.send(x, 2)
        dist.recv(x, 0)
        return
    work = dist.irecv(x, 1) if rank else dist.isend(x, 1)
    assert work is not None
    work.wait()
    work = dist.irecv(x, 1) if rank else dist.isend(x, 1)
    assert work is not None
    text = error(lambda: work.wait(timedelta(seconds=1)))
    assert f"on rank {rank} of group '0' (default_pg); it waits for a call of rank 1. " in text, text
    tell(f"judged {rank}")
    work.wait(timedelta(seconds=60))


def own_times(rank: int, size: int) -> None:
    """A wait with a time-out of its own neither shortens nor lengthens the operation's."""
    x = torch.ones(3)
    if rank:
        hear("patience")
        time.sleep(SECONDS + 0.5)
        dist.all_reduce(x)
        return
    began = time.monotonic()
    work = reduced(x)
    assert "Timed out waiting 100ms for all_reduce" in error(lambda: work.wait(timedelta(milliseconds=100)))
    assert not work.is_completed() and work.exception() is None
    future = work.get_future()
    tell("patience")
    assert work.wait(timedelta(seconds=60))
    assert x[0] == size
    ended(began)
    assert "Timed out waiting 2000ms for all_reduce" in error(future.wait)


def messages(rank: int, size: int) -> None:
    """Also those of a rank that has never connected, of any rank, of this one, and those of a batch."""
    parts = [torch.zeros(3) for _ in range(5)]
    if rank:
        hear("silence")
        for tag in (1, 2, 4, 5):
            dist.send(torch.full((3,), float(tag)), 0, tag=tag)
        return
    group = dist.group.WORLD
    assert group is not None
    began = time.monotonic()
    batch = [dist.P2POp(dist.irecv, parts[3], 1, tag=4), dist.P2POp(dist.irecv, parts[4], 1, tag=5)]
    begun: list[tuple[Any, str]] = [
        (dist.irecv(parts[0], 1, tag=1), verdict("recv")),
        (dist.irecv(parts[1], tag=2), verdict("recvAnySource", "")),
        (group.recv([parts[2]], 0, 3), verdict("recv", "; it waits for a call of rank 0")),
        (dist.batch_isend_irecv(batch)[0], verdict("recv")),
    ]
    works, texts = zip(*begun, strict=True)
    futures = [work.get_future() for work in works]
    for work, future, text in zip(works, futures, texts, strict=True):
        assert error(future.wait) == text
        ended(began)
        assert work.is_completed() and text in str(work.exception())
    group.send([torch.full((3,), 3.0)], 0, 3).wait()
    tell("silence")
    for work in works:
        work.wait(timedelta(seconds=60))
    assert [part[0].item() for part in parts] == [1, 2, 3, 4, 5]


def callbacks(rank: int, size: int) -> None:
    """One that waits for another operation which is over, too, holds nothing up; no future has a thread."""
    tensors = [torch.ones(3) for _ in range(FUTURES)]
    if rank:
        hear("all judged")
        for x in tensors:
            dist.all_reduce(x)
        return
    before = len(os.listdir("/proc/self/task"))
    began = time.monotonic()
    works, texts = zip(*[(reduced(x), verdict()) for x in tensors], strict=True)
    futures = [work.get_future() for work in works]
    assert len(os.listdir("/proc/self/task")) <= before + 2
    nested = futures[0].then(lambda _: error(futures[-1].wait))
    assert nested.wait() == texts[-1]
    ended(began)
    for future, text in zip(futures, texts, strict=True):
        assert error(future.wait) == text
    tell("all judged")
    for work in works:
        work.wait(timedelta(seconds=60))
    assert all(x.eq(size).all() for x in tensors)


def test_late_ranks(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, messages, each_way, own_times, callbacks, seconds=SECONDS, timeout=100)


def test_late_messages(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, late_messages, seconds=SECONDS, timeout=100)


def in_a_child(rank: int, size: int, path: str) -> None:
    """A forked process watches the futures of its own groups."""
    for name in ("parent", "child"):
        start(rank, size, f"file://{path}-{name}", seconds=1)
        work = dist.group.WORLD.recv([torch.zeros(3)], 0, 0)
        assert "Timed out waiting 1000ms for recv" in error(work.get_future().wait)
        dist.destroy_process_group()
        if name == "parent" and (child := os.fork()):
            assert os.waitpid(child, 0)[1] == 0
            return
    os._exit(0)


def test_a_forked_process(tmp_path: Path) -> None:
    testing.run(1, in_a_child, str(tmp_path / "store"), backend="cpu", timeout=60)


def trains(rank: int, size: int, path: str, backend: str, stops: bool) -> tuple[float, str]:
    """Rank 1 is stopped, or late, in the third step."""
    torch.set_num_threads(1)
    start(rank, size, f"file://{path}", backend, seconds=SECONDS)
    # gloo does not wait for a rank that is still in its imports.
    together(size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    for _ in range(2):
        model(torch.randn(4, 50)).sum().backward()
    if rank == 1:
        with store() as meeting:
            meeting.set("process", str(os.getpid()).encode())
        os.kill(os.getpid(), signal.SIGSTOP) if stops else hear("raised")
        with contextlib.suppress(RuntimeError):
            model(torch.randn(4, 50)).sum().backward()
        return 0, ""
    with store() as meeting:
        process = int(meeting.get("process"))
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 50)).sum().backward()
    took = time.monotonic() - began
    tell("raised")
    if stops:
        os.kill(process, signal.SIGCONT)
    return took, str(caught.value)


@pytest.mark.parametrize(
    ("backend", "stops"),
    [
        ("pynccl", True),
        pytest.param("pynccl", False, marks=pytest.mark.slow),
        pytest.param("gloo", True, marks=pytest.mark.slow),
    ],
)
def test_ddp_raises_in_backward(tmp_path: Path, backend: str, stops: bool) -> None:
    path = str(tmp_path / "store")
    (took, text), _ = testing.run(2, trains, path, backend, stops, backend="cpu", timeout=60)
    assert SECONDS - 0.1 <= took < SECONDS + 5
    if backend == "pynccl":
        assert f"Timed out waiting {SECONDS * 1000:.0f}ms for all_reduce" in text
        assert "on rank 0 of group '0' (default_pg)" in text
