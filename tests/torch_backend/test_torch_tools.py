"""torch's own tools over the backend: the profiler, memory, and with a newer torch its flight recorder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torch_ranks
from processes import completed
from pynccl import testing
from ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(240)]


def needs_newest_torch(test: Any) -> Any:
    """Leave a test to `make test-torch`."""
    return pytest.mark.full(pytest.mark.newest_torch(test))


def start(rank: int, size: int, folder: str, seconds: float = 30) -> Any:
    torch_ranks.start(rank, size, f"file://{folder}/store", seconds=seconds)
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("cpu"))


# --- the profiler ---


def events_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
    return events


def described(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the profiler was told of each operation."""
    return [event["args"] for event in events if event.get("name") == "record_param_comms"]


def profiled(rank: int, size: int, folder: str) -> None:
    start(rank, size, folder)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        dist.all_gather_into_tensor(
            torch.empty(5 * size, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
        )
        dist.barrier()
    found.export_chrome_trace(f"{folder}/{rank}.json")
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
def test_the_profiler_shows_what_was_called(tmp_path: Path) -> None:
    testing.run(3, profiled, str(tmp_path), backend="cpu", timeout=200)
    for rank in range(3):
        events = events_of(tmp_path, rank)
        names = [event.get("name") for event in events]
        assert "pynccl:all_gather_into_tensor" in names and "pynccl:barrier" in names
        gathered, barrier = described(events)
        assert gathered["Collective name"] == "_allgather_base"
        assert (gathered["In msg nelems"], gathered["Out msg nelems"]) == (5, 15)
        assert (gathered["dtype"], gathered["Group size"]) == ("Long", 3)
        assert (gathered["Global rank start"], gathered["Global rank stride"]) == (0, 1)
        assert barrier["Collective name"] == "barrier"


def profiled_forms(rank: int, size: int, folder: str) -> None:
    start(rank, size, folder)
    uneven = dist.new_group([0, 1, 3])
    even = dist.new_group([1, 3])
    with profile(activities=[ProfilerActivity.CPU]) as found:
        if rank in (0, 1, 3):
            dist.all_reduce(torch.ones(5), group=uneven)
        if rank in (1, 3):
            dist.broadcast(torch.ones(3), 3, group=even)
        sizes = [1, 2, 1, 2]
        lengths = [sizes[rank]] * size
        dist.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(lengths)), sizes, lengths)
        dist.reduce(torch.ones(2), 2)
        if rank == 0:
            dist.send(torch.ones(7), 3)
        if rank == 3:
            dist.recv(torch.ones(7), 0)
    found.export_chrome_trace(f"{folder}/{rank}.json")
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
def test_the_profiler_shows_what_processgroupnccl_would_show(tmp_path: Path) -> None:
    testing.run(4, profiled_forms, str(tmp_path), backend="cpu", timeout=200)
    for rank in range(4):
        shown = {args["Collective name"]: args for args in described(events_of(tmp_path, rank))}
        if rank != 2:
            # The stride of uneven ranks is -1, from which torch makes no list.
            assert shown["allreduce"]["Process Group Ranks"] == "[]"
            assert shown["allreduce"]["Global rank start"] == 0
        if rank in (1, 3):
            assert shown["broadcast"]["Process Group Ranks"] == "[1, 3]"
            assert shown["broadcast"]["Rank"] == 1  # the root, by its rank in the group
        exchanged = shown["all_to_allv"]
        assert exchanged["Out split size"] == "[1, 2, 1, 2]"
        assert exchanged["In split size"] == str([[1, 2, 1, 2][rank]] * 4)
        assert shown["reduce"]["Rank"] == 2
        if rank == 0:
            assert (shown["send"]["Dst Rank"], shown["send"]["In msg nelems"]) == (3, 7)
        if rank == 3:
            assert (shown["recv"]["Src Rank"], shown["recv"]["Out msg nelems"]) == (0, 7)
        assert ("send" in shown, "recv" in shown) == (rank == 0, rank == 3)


# --- memory ---


def missed(seconds: float, call: Any, match: str, error: Any = dist.DistBackendError) -> None:
    """A call that ends by this error at the group's time-out, or before."""
    begun = time.monotonic()
    with pytest.raises(error, match=match):
        call()
    assert time.monotonic() - begun < seconds


def calls_of_all(backend: Any) -> dict[str, Any]:
    """The calls before which all ranks meet."""
    return {
        "suspend": backend.suspend,
        "resume": backend.resume,
        "split_group": lambda: dist.group.WORLD.split_group([0, 1]),
    }


@pytest.mark.slow  # each rank imports torch
@on_ranks(2, timeout=200)
def test_a_rank_that_does_not_suspend(rank: int, nranks: int, tmp_path: Path) -> None:
    """The ranks meet first, so a late one is a time-out, after which the group is as it was."""
    backend = start(rank, nranks, str(tmp_path))
    backend._set_default_timeout(timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    late = r"Timed out waiting 2000ms for {} on rank 0 of group '0' .*; it waits for a call of rank 1"
    for name, call in calls_of_all(backend).items():
        if rank == 0:
            missed(20, call, late.format(name))
            store.set(f"missed {name}", "")
        else:
            store.wait([f"missed {name}"])
            # The call is over, and this rank does not make it alone.
            missed(1.5, call, late.format(name) + r".*\(on rank 1 of group '0'")
        part = call()
    x = torch.ones(3)
    part.allreduce([x]).wait()
    dist.all_reduce(x)
    assert x.tolist() == [nranks**2] * 3
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        missed(1.5, backend.suspend, "", KeyboardInterrupt)
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"])
        missed(1.5, backend.suspend, "given up by rank 0 of group '0'.*KeyboardInterrupt")
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
@on_ranks(2, timeout=200)
def test_a_rank_that_is_refused_tells_the_others(rank: int, nranks: int, tmp_path: Path) -> None:
    """A meeting counts on a rank whose call is refused, so that later meetings are of the same calls."""
    backend = start(rank, nranks, str(tmp_path))
    for name, call in calls_of_all(backend).items():
        if rank == 1:
            backend._start_coalescing()
            missed(5, call, f"{name} cannot be coalesced", RuntimeError)
            backend._end_coalescing()
        else:
            missed(5, call, rf"given up by rank 1 of group '0'.*{name} cannot be coalesced")
        part = call()
    x = torch.ones(3)
    part.allreduce([x]).wait()
    assert x.tolist() == [nranks] * 3
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
@on_ranks(2, timeout=200)
def test_threads_suspend_groups_of_their_own(rank: int, nranks: int, tmp_path: Path) -> None:
    """Ranks wait for each other without the GIL, which the thread of another group needs."""
    start(rank, nranks, str(tmp_path), seconds=20)
    failed: list[BaseException] = []

    def often(group: Any) -> None:
        try:
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            backend = group._get_backend(torch.device("cpu"))
            for _ in range(20):
                backend.suspend()
                backend.resume()
        except BaseException as error:
            failed.append(error)

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    threads = [threading.Thread(target=often, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
@on_ranks(2, timeout=200)
def test_a_rank_that_leaves_does_not_suspend(rank: int, nranks: int, tmp_path: Path) -> None:
    backend = start(rank, nranks, str(tmp_path))
    dist.barrier()
    if rank == 0:
        missed(15, backend.suspend, "suspend on rank 0 .*rank 1")
    dist.destroy_process_group()


@pytest.mark.slow  # each rank imports torch
@on_ranks(2, timeout=200)
def test_suspend(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    backend = start(rank, nranks, folder)
    late = dist.all_reduce(torch.ones(100_000), async_op=True)
    backend.suspend()
    assert late is not None and late.is_completed()
    stats = backend.memory_stats()
    assert set(stats) == {"suspend", "suspended", "persist", "total"}
    assert stats["suspended"] == 1 and stats["total"] > 0
    with pytest.raises(dist.DistBackendError, match="all_reduce: ncclAllReduce: comm is suspended"):
        dist.all_reduce(torch.ones(3))
    backend.resume()
    assert backend.memory_stats()["suspended"] == 0
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [nranks] * 3
    dist.destroy_process_group()


# --- what torch 2.15 adds ---


@needs_newest_torch
@pytest.mark.parametrize("name", ["pynccl", "cpu:pynccl", "cpu:gloo,cuda:pynccl"])
def test_torch_finds_the_backend(name: str, tmp_path: Path) -> None:
    program = f"""
import sys, torch, torch.distributed as dist
dist.init_process_group({name!r}, init_method="file://{tmp_path}/store", rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
assert "pynccl.torch" in sys.modules and x.tolist() == [1.0] * 3
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, cwd=tmp_path)


@needs_newest_torch
@on_ranks(2, timeout=200)
def test_the_flight_recorder_sees_completions(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    from torch._C._distributed_c10d import _dump_fr_trace_json

    start(rank, nranks, folder)
    dist.all_reduce(torch.ones(4))
    dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % nranks),
            dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % nranks),
        ]
    )[-1].wait()
    works = [dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), async_op=True) for _ in range(20)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    entries = json.loads(_dump_fr_trace_json(backend="pynccl"))["entries"]
    assert len(entries) >= 23
    assert {entry["state"] for entry in entries} == {"completed"}
    assert entries[0]["profiling_name"] == "pynccl:all_reduce" and entries[0]["input_sizes"] == [[4]]
    dist.destroy_process_group()


def hung(rank: int, size: int, folder: str, how: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    backend = start(rank, size, folder, seconds=3)
    heard: list[str] = []
    backend.register_abort_hook(7, lambda: heard.append("failing"))
    dist.all_reduce(torch.ones(4))
    assert not heard
    x = torch.ones(7)
    other = {
        "another call": lambda: dist.all_gather_into_tensor(torch.empty(4), x[:2]),
        "no call": lambda: dist.recv(x, 0),
    }[how]
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(x) if rank == 0 else other()
    assert heard
    backend.unregister_abort_hook(7)
    heard.clear()
    backend.abort()
    assert not heard


@needs_newest_torch
@pytest.mark.parametrize("how", ["another call", "no call"])
def test_torchs_analyzer_reads_the_dumps(how: str, tmp_path: Path) -> None:
    """A time-out, or a call that failed, has torch write a dump on each rank."""
    testing.run(2, hung, str(tmp_path), how, backend="cpu", timeout=200)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(tmp_path),
        "-p",
        "trace_",
    ]
    done = completed(command, timeout=100)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    if how == "another call":
        assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in told or "Culprit rank 0" in told
    else:
        assert "pynccl:all_reduce" in told and "world size: 2" in told


# --- windows ---


@needs_newest_torch
@on_ranks(3, timeout=200)
def test_windows(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    start(rank, nranks, folder)
    group = dist.group.WORLD
    assert group is not None and group.supports_window
    right, left = (rank + 1) % nranks, (rank - 1) % nranks
    x = torch.zeros(nranks + rank)  # another size on each rank
    window = group.new_window(x)
    for turn in range(3):
        window.put(torch.tensor([turn + 10.0 * rank]), right, rank, False)
        window.wait_signal(left, False)
        assert x[left] == turn + 10 * left
        window.signal(left, False)
        window.wait_signal(right, False)
    works = [window.put(torch.full((2,), float(turn)), right, 0, True) for turn in range(5)]
    works += [window.wait_signal(left, True) for _ in range(5)]
    for work in works:
        work.wait(timedelta(seconds=20))
    assert x[:2].tolist() == [4.0, 4.0]
    window.put(torch.full((1,), 7.0), rank, nranks - 1, False)
    window.wait_signal(rank, False)
    assert window.map_remote_tensor(rank)[nranks - 1] == 7
    beside = group.new_window()
    y = torch.zeros(4, dtype=torch.int64)
    beside.tensor_register(y, owning=False)
    with pytest.raises(RuntimeError, match="the window does not own its tensor"):
        beside.map_remote_tensor(rank)
    beside.put(torch.tensor([rank]), right, 3, False)
    beside.wait_signal(left, False)
    assert y.tolist() == [0, 0, 0, left]
    for each in (beside, window):
        each.tensor_deregister()
        with pytest.raises(
            RuntimeError, match="put: the window has no tensor; expected tensor_register first"
        ):
            each.put(torch.ones(1), right, 0, False)
    window.tensor_register(y)
    window.tensor_deregister()
    # What nobody deregisters ends with the group.
    group.new_window(torch.ones(3))
    dist.destroy_process_group()


@needs_newest_torch
@on_ranks(2, timeout=200)
def test_wrong_arguments_of_windows(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    from torch._C._distributed_c10d import PutOptions

    start(rank, nranks, folder)
    group, one = dist.group.WORLD, torch.ones(1)
    assert group is not None
    window = group.new_window(torch.zeros(4))
    hinted = PutOptions()
    hinted.hints = {"context": "1"}
    ranks = f"expected a rank from 0 to {nranks - 1}"
    room = "but the window of rank 1 has 4 elements"
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: window.put(one, nranks, 0, False), ValueError, f"put: rank is {nranks}, {ranks}"),
        (lambda: window.signal(-1, False), ValueError, f"signal: rank is -1, {ranks}"),
        (lambda: window.wait_signal(nranks, True), ValueError, f"wait_signal: rank is {nranks}, {ranks}"),
        (lambda: window.get_attr(nranks), ValueError, f"get_attr: rank is {nranks}, {ranks}"),
        (
            lambda: window.put(one.double(), 1, 0, False),
            TypeError,
            "put: tensor has dtype Double, expected Float, which the window of rank 1 has",
        ),
        (
            lambda: window.put(one, 1, 4, False),
            ValueError,
            f"put: tensor has 1 elements and the offset is 4, {room}",
        ),
        (
            lambda: window.put(one, 1, -1, True),
            ValueError,
            f"put: tensor has 1 elements and the offset is -1, {room}",
        ),
        (
            lambda: window.put(torch.ones(2, 2).t(), 1, 0, False),
            ValueError,
            "put: tensor is not a dense contiguous tensor",
        ),
        (
            lambda: window.put(one, 1, 0, False, hinted),
            ValueError,
            "put: hints has 1 entries, expected none",
        ),
        (
            lambda: window.map_remote_tensor(1 - rank),
            ValueError,
            f"map_remote_tensor: rank is {1 - rank}, expected this rank, {rank}",
        ),
        (
            lambda: window.tensor_register(one),
            RuntimeError,
            "tensor_register: the window has a tensor; expected tensor_deregister first",
        ),
        (
            lambda: group.new_window(torch.ones(3, 3).t()),
            ValueError,
            "tensor_register: tensor is not a dense contiguous tensor",
        ),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value).startswith(text), caught.value
    if rank == 0:
        missing = window.wait_signal(1, True)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 300ms for wait_signal"):
            missing.wait(timedelta(milliseconds=300))
        group.get_group_store().set("late", "yes")
        missing.wait()
    else:
        group.get_group_store().wait(["late"])
        window.signal(0, False)
    window.tensor_deregister()
    dist.destroy_process_group()


def loses_its_peer(rank: int, size: int, folder: str, call: str) -> str:
    start(rank, size, folder)
    assert dist.group.WORLD is not None
    window = dist.group.WORLD.new_window(torch.zeros(1 << 20))
    dist.barrier()
    if rank == 1:
        os._exit(3)

    def until_it_fails() -> None:
        # The first puts may be done before the death is noticed.
        for _ in range(100 if call == "put" else 0):
            window.put(torch.ones(1 << 20), 1, 0, False)
            time.sleep(0.1)
        window.wait_signal(1, False)

    with pytest.raises(dist.DistBackendError) as caught:
        until_it_fails()
    return str(caught.value)


@needs_newest_torch
@pytest.mark.parametrize("call", ["put", "wait_signal"])
def test_a_dead_peer_of_a_window(call: str, tmp_path: Path) -> None:
    text, dead = testing.run(2, loses_its_peer, str(tmp_path), call, backend="cpu", timeout=200, check=False)
    assert isinstance(dead, testing.RankError)
    assert isinstance(text, str), text
    assert text.startswith(call) and "rank 1" in text
