"""Operations in flight: who runs them, what each waits for, and what they leave behind."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ranks
from meeting import free_port, hear, tell, together, until
from pynccl import testing

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(200)]

SECONDS = 40.0


def start(rank: int, size: int, port: int) -> None:
    # torchrun's kind of store: one connection for each process, on which one request waits for another.
    torch_ranks.start(rank, size, f"tcp://127.0.0.1:{port}", seconds=SECONDS)


def on_ranks(nranks: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return testing.run(nranks, fn, free_port(), *args, backend="cpu", timeout=150, **options)


def one_after_another(rank: int, size: int, port: int, programs: list[Callable[[int, int], None]]) -> None:
    start(rank, size, port)
    for program in programs:
        together(size, program.__name__)
        program(rank, size)
    dist.destroy_process_group()


def reduced(*tensors: torch.Tensor) -> list[Any]:
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert all(works)
    return works


def wait(*works: Any) -> None:
    for work in works:
        assert work is not None
        work.wait()


# ---- collectives ----


def each_on_its_own(rank: int, size: int) -> None:
    """Waiting for one operation does not wait for those behind it, however many are in flight."""
    many = [torch.ones(4) for _ in range(100)]
    if rank == 0:
        works = reduced(*many)
        wait(*works[:60])
        assert all(tensor[0] == size for tensor in many[:60])
        assert not any(work.is_completed() for work in works[60:])
        tell("sixty")
    else:
        works = reduced(*many[:60])
        hear("sixty")
        works += reduced(*many[60:])
    wait(*works)
    assert all(tensor[0] == size for tensor in many)


def without_a_wait(rank: int, size: int) -> None:
    """What nobody waits for is done all the same and at once, its handle kept or not."""
    took = []
    for _ in range(20):
        kept = torch.ones(2000)
        dist.barrier()
        began = time.monotonic()
        (work,) = reduced(kept)
        until(lambda x=kept: x[-1] == size)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        until(work.is_completed)
    # The quickest, since the machine may be busy; benchmarks/torch_in_flight.py has the bound, 1 ms.
    assert min(took) < 0.05
    dropped = torch.ones(2000)
    reduced(dropped)
    until(lambda: dropped[-1] == size)


def waits_in_threads(rank: int, size: int) -> None:
    """Several threads wait for operations of one group, in another order than they were issued."""
    many = [torch.full((1000,), float(i)) for i in range(30)]
    works = reduced(*many)
    threads = [threading.Thread(target=work.wait) for work in reversed(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [tensor[0].item() for tensor in many] == [float(size * i) for i in range(30)]


def timed_out_and_awaited(rank: int, size: int) -> None:
    """A wait that gave up leaves the operation to go on by itself."""
    x = torch.ones(10)
    if rank == 0:
        (work,) = reduced(x)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 200ms"):
            work.wait(timedelta(milliseconds=200))
        tell("gave up")
        until(lambda: bool(x[0] == size))
        wait(work)
    else:
        hear("gave up")
        dist.all_reduce(x)


def awaited_in_callbacks(rank: int, size: int) -> None:
    """A callback, in whichever thread, may wait for a later operation in each way that there is."""
    ends: list[Callable[[Any], Any]] = [
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        lambda work: until(work.is_completed),
    ]
    for round_ in range(60):
        first, second = torch.ones(4), torch.ones(4)
        works = reduced(first, second)
        end = ends[round_ % len(ends)]
        called = works[0].get_future().then(lambda _, end=end, work=works[1]: end(work))
        if round_ % 2:
            wait(works[0])
        until(called.done)
        assert first[0] == size and second[0] == size


def interrupted(rank: int, size: int) -> None:
    """An operation whose wait Ctrl-C ended goes on, even while the exception, and so the Work, is kept."""
    x = torch.ones(10)
    if rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            dist.all_reduce(x)
        tell("interrupted")
        until(lambda: bool(x[0] == size))
        assert caught.value is not None
    else:
        hear("interrupted")
        dist.all_reduce(x)


def memory(rank: int, size: int) -> None:
    """Operations beside an open receive leave nothing behind."""

    def used() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    opened = dist.irecv(torch.zeros(1), 1 - rank, tag=77)
    x = torch.ones(1)
    for _ in range(3000):
        dist.all_reduce(x)
    before = used()
    for _ in range(30_000):
        dist.all_reduce(x)
    assert used() - before < 5 << 20
    wait(dist.isend(torch.ones(1), 1 - rank, tag=77), opened)


COLLECTIVES = [
    each_on_its_own,
    without_a_wait,
    waits_in_threads,
    timed_out_and_awaited,
    awaited_in_callbacks,
    interrupted,
    memory,
]


def test_collectives_in_flight() -> None:
    on_ranks(2, one_after_another, COLLECTIVES)


# ---- messages ----


def while_the_store_is_busy(rank: int, size: int) -> None:
    """A message finds its receiver while the program waits on the store."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.isend(torch.full((3,), 7.0), 1, tag=100)
        store.wait(["received"], timedelta(seconds=30))
        wait(work)
    else:
        x = torch.zeros(3)
        dist.recv(x, 0, tag=100)
        assert x[0] == 7
        store.set("received", "1")


def beside_a_receive_from_anybody(rank: int, size: int) -> None:
    """Another thread waits on the store; an open receive from any source holds nothing up."""
    store = dist.distributed_c10d._get_default_store()
    waiting = threading.Thread(target=store.wait, args=(["reduced"], timedelta(seconds=30)))
    x = torch.zeros(1)
    opened = dist.irecv(x, tag=101) if rank == 0 else None
    if rank == 0:
        waiting.start()
        time.sleep(0.1)
    y, slowest = torch.ones(5), 0.0
    for _ in range(100):
        began = time.monotonic()
        dist.all_reduce(y)
        slowest = max(slowest, time.monotonic() - began)
    # Who was held up was so for 10 s; on a busy machine all calls together may take that long.
    assert slowest < 5
    if rank == 1:
        store.set("reduced", "1")
        dist.send(torch.ones(1), 0, tag=101)
    else:
        waiting.join(30)
        wait(opened)
        assert x[0] == 1


def tags_in_any_order(rank: int, size: int) -> None:
    """A message that nobody asks for yet holds up no other tag."""
    for count in (1, 1 << 20):
        if rank == 0:
            sent = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in (1, 2, 3, 1)]
            wait(*sent)
            continue
        x = torch.zeros(count)
        for tag in (2, 1, 3, 1):
            dist.recv(x, 0, tag=tag)
            assert x[0] == tag and x[-1] == tag


def order_within_a_tag(rank: int, size: int) -> None:
    """Named and any-source receives take messages in the order in which they were asked for."""
    if rank == 0:
        for i in range(30):
            dist.send(torch.full((1,), float(i)), 1, tag=4 + i % 2)
        return
    buffers = [torch.zeros(1) for _ in range(30)]
    # The odd ones first, every third from anybody.
    order = [*range(1, 30, 2), *range(0, 30, 2)]
    works = [dist.irecv(buffers[i], None if i % 3 == 0 else 0, tag=4 + i % 2) for i in order]
    wait(*reversed(works))
    assert [buffer.item() for buffer in buffers] == list(range(30))


def exchange(rank: int, size: int) -> None:
    """Both send first, more than any buffer holds, and wait for the sends first."""
    big, other = torch.full((1 << 21,), float(rank)), torch.zeros(1 << 21)
    works = [dist.isend(big, 1 - rank, tag=8), dist.irecv(other, 1 - rank, tag=8)]
    wait(*works)
    assert other[-1] == 1 - rank


def another_size(rank: int, size: int) -> None:
    """A receive of another size fails, and the messages behind it come."""
    if rank == 0:
        for count in (4, 5, 6):
            dist.send(torch.full((count,), 1.0), 1, tag=9)
        return
    with pytest.raises(RuntimeError, match=r"the tensor has 12 bytes, but the message of rank [0-9] has 16"):
        dist.recv(torch.zeros(3), 0, tag=9)
    x = torch.zeros(5)
    dist.recv(x, 0, tag=9)
    with pytest.raises(RuntimeError, match=r"the tensor has 12 bytes, but the message of rank [0-9] has 24"):
        dist.recv(torch.zeros(3), tag=9)
    assert x[-1] == 1


def to_oneself(rank: int, size: int) -> None:
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    # dist.send refuses it, but for a group that splits its work among its ranks.
    group = dist.group.WORLD
    assert group is not None
    for first, second in ((group.send, group.recv), (group.recv, group.send)):
        y.zero_()
        works = [call([x if call == group.send else y], rank, 10) for call in (first, second)]
        wait(*works)
        assert torch.equal(x, y)


def nobody_receives(rank: int, size: int) -> None:
    """A large message waits for its receiver: the wait gives up, the message does not."""
    x = torch.full((1 << 20,), 3.0)
    if rank == 0:
        work = dist.isend(x, 1, tag=11)
        assert work is not None
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 300ms for send"):
            work.wait(timedelta(milliseconds=300))
        tell("unheard")
        wait(work)
    else:
        hear("unheard")
        x.zero_()
        dist.recv(x, 0, tag=11)
        assert x[-1] == 3


def many_tags(rank: int, size: int) -> None:
    """A tag costs nothing that stays."""
    dist.barrier()
    before, threads = len(os.listdir("/proc/self/fd")), threading_count()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    x = torch.zeros(1)
    for tag in range(1000, 1600):
        dist.send(torch.full((1,), float(tag)), 1, tag=tag) if rank == 0 else dist.recv(x, 0, tag=tag)
        assert rank == 0 or x[0] == tag
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert threading_count() <= threads + 4


def threading_count() -> int:
    """Count the threads of the process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


MESSAGES = [
    while_the_store_is_busy,
    beside_a_receive_from_anybody,
    tags_in_any_order,
    order_within_a_tag,
    exchange,
    another_size,
    to_oneself,
    nobody_receives,
    many_tags,
]


def test_messages_in_flight() -> None:
    on_ranks(2, one_after_another, MESSAGES)


def from_many(rank: int, size: int) -> None:
    """Receives from anybody, posted before and after the messages come; the senders compute meanwhile."""
    if rank:
        for i in range(20):
            wait(dist.isend(torch.full((2,), float(100 * rank + i)), 0, tag=i % 3))
        return
    heard: dict[int, list[float]] = {source: [] for source in range(1, size)}
    for tag in (2, 0, 1):
        count = sum(1 for i in range(20) if i % 3 == tag) * (size - 1)
        buffers = [torch.zeros(2) for _ in range(count)]
        works = [dist.irecv(buffer, tag=tag) for buffer in buffers]
        for work, buffer in zip(works, buffers, strict=True):
            wait(work)
            assert work is not None
            source = work._source_rank()
            assert int(buffer[0]) // 100 == source
            heard[source].append(buffer[0].item() % 100)
    for source in heard:
        expected = [i for tag in (2, 0, 1) for i in range(20) if i % 3 == tag]
        assert heard[source] == expected


def beside_the_death_of_a_peer(rank: int, size: int) -> None:
    """Its messages fail, with its name; others go on, and one from anybody until nobody is left."""
    together(size, "all there")
    if rank == 2:
        dist.send(torch.ones(1), 0, tag=50)
        together(size, "sent")
        os._exit(0)
    x = torch.zeros(1)
    if rank == 0:
        dist.recv(x, 2, tag=50)
        together(size, "sent")
        with pytest.raises(dist.DistBackendError, match="died"):
            dist.recv(x, 2, tag=50)
        opened = dist.irecv(x, tag=51)
        dist.recv(x, 1, tag=50)
        assert x[0] == 5
        together(size - 1, "heard")
        # Nobody is left whose message it could be.
        with pytest.raises(dist.DistBackendError, match="died"):
            wait(opened)
    else:
        together(size, "sent")
        dist.send(torch.full((1,), 5.0), 0, tag=50)
        together(size - 1, "heard")
        os._exit(0)


def after_the_death_of_a_peer(rank: int, size: int, port: int) -> None:
    """Connections that it will never make fail at once, and errors name the ranks of the group."""
    start(rank, size, port)
    pair = dist.new_group([1, 2])
    x = torch.zeros(1)
    if rank == 2:
        dist.send(x, 1)
        dist.send(x, 1, group=pair)
        together(size, "sent")
        os._exit(0)
    if rank == 1:
        dist.recv(x, 2)
        dist.recv(x, 2, group=pair)
    together(size, "sent")
    began = time.monotonic()
    if rank == 0:
        for call in dist.recv, dist.send:
            with pytest.raises(
                dist.DistBackendError,
                match=r"connecting with rank 2 for messages on rank 0 of group .*: rank 2 \(pid .*died",
            ):
                call(x, 2)
    else:
        with pytest.raises(
            dist.DistBackendError, match=r"recv on rank 1 of group .*rank 1 of 3: rank 2 \(pid .*died"
        ):
            dist.recv(x, 2)
        with pytest.raises(
            dist.DistBackendError,
            match=r"recv on rank 0 of .*global rank 1: .*rank 0 of 2: rank 1 \(global rank 2\) \(pid .*died",
        ):
            dist.recv(x, 2, group=pair)
    assert time.monotonic() - began < SECONDS / 2
    together(size - 1, "told")
    dist.destroy_process_group()


def test_the_death_of_a_peer() -> None:
    first, second, _ = on_ranks(3, after_the_death_of_a_peer, check=False)
    assert first is None, first
    assert second is None, second


def test_messages_of_many_ranks() -> None:
    first, *_ = on_ranks(3, one_after_another, [from_many, beside_the_death_of_a_peer], check=False)
    assert first is None, first


def connections_to(port: int) -> int:
    """Return how many connections were made to a port of this machine in the last minute, or are open."""
    tables = [Path("/proc/self/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    remote = [line.split()[2] for table in tables for line in table]
    return sum(int(address.rpartition(":")[2], 16) == port for address in remote)


def in_many_groups(rank: int, size: int, port: int) -> None:
    start(rank, size, port)
    for group in [None, *(dist.new_group() for _ in range(3))]:
        wait(*reduced(torch.ones(3)))
        others = [peer for peer in range(size) if peer != rank]
        got = [torch.zeros(3) for _ in others]
        ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), peer, group) for peer in others]
        ops += [dist.P2POp(dist.irecv, x, peer, group) for x, peer in zip(got, others, strict=True)]
        wait(*dist.batch_isend_irecv(ops))
        assert [int(x[0]) for x in got] == others
    began = time.monotonic()
    for _ in range(10):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
    looks = 1 + int((time.monotonic() - began) / 3)
    together(size)
    # For each rank that of torch.distributed, one to wait on, one for short requests, and, while groups end,
    # one in three seconds to see whether the server listens.
    assert connections_to(port) <= (3 + looks) * size
    together(size, "counted")
    dist.destroy_process_group()


def test_connections_to_the_store() -> None:
    """For each, torch's server asks for the name of its address, which may take seconds."""
    on_ranks(4, in_many_groups)


# ---- groups ----

GROUPS, IN_FLIGHT = 20, 20


def many_groups(rank: int, size: int, port: int) -> None:
    start(rank, size, port)
    groups = [dist.new_group() for _ in range(GROUPS)]
    together(size)
    before = threading_count()
    tensors = [torch.ones(10) for _ in range(GROUPS * IN_FLIGHT)]
    if rank:
        hear("counted")
    works = [
        dist.all_reduce(tensor, group=groups[i % GROUPS], async_op=True) for i, tensor in enumerate(tensors)
    ]
    if rank == 0:
        time.sleep(0.5)
        threads = threading_count()
        tell("counted")
        assert threads - before <= 2 * GROUPS
    wait(*works)
    assert all(tensor[0] == size for tensor in tensors)
    dist.destroy_process_group()


@pytest.mark.slow
def test_threads_of_many_groups() -> None:
    on_ranks(2, many_groups)


def late_ranks(rank: int, size: int, port: int) -> None:
    """A connection that timed out may be waited for again; one that is given up leaves quietly."""
    import pynccl.torch  # noqa: F401
    from pynccl.torch import _extension

    def backend(name: str) -> Any:
        store = dist.PrefixStore(name, shared)  # type: ignore[attr-defined, unused-ignore]
        return _extension.Backend(store, rank, size, timedelta(milliseconds=700), False)

    shared = dist.TCPStore(  # type: ignore[attr-defined, unused-ignore]
        "127.0.0.1", port, size, rank == 0, timedelta(seconds=SECONDS), wait_for_workers=False
    )
    for first in range(size):
        group = backend(f"first {first}")
        if rank == first:
            late = rf"connecting rank {rank} of 2.*not come: {1 - rank}"
            for _ in range(2):
                with pytest.raises(dist.DistBackendError, match=late):
                    group.barrier().wait()
            tell(f"in vain {first}")
        else:
            hear(f"in vain {first}")
        together(size, f"again {first}")
        x = torch.ones(2)
        until(lambda group=group, x=x: tried(group, x))  # type: ignore[misc]
        assert x[0] == size
        together(size, f"done {first}")
        group.shutdown()
    alone = backend(f"alone {rank}")
    with pytest.raises(dist.DistBackendError, match="connecting"):
        alone.barrier().wait()
    before = threading_count()
    alone.abort()
    del alone
    gc.collect()
    until(lambda: threading_count() < before)
    together(size, "end")


def tried(group: Any, x: torch.Tensor) -> bool:
    """Reduce, unless the other rank is still late."""
    try:
        work = group.allreduce([x])
    except dist.DistBackendError:
        return False
    work.wait()
    return True


@pytest.mark.slow
def test_connections_that_time_out() -> None:
    on_ranks(2, late_ranks)


def not_blocking(rank: int, size: int, port: int) -> None:
    """Every call of the library may return before it is done."""
    start(rank, size, port)
    x = torch.ones(100_000)
    for _ in range(20):
        dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x[-1] == 1
    exchange(rank, size)
    outs = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(outs, torch.full((2,), float(rank)))
    dist.all_to_all(list(torch.zeros(size, 3)), list(torch.ones(size, 3)))
    assert [out[0].item() for out in outs] == list(range(size))
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    assert x[0] == size
    dist.destroy_process_group()


def test_nonblocking_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    on_ranks(2, not_blocking)
