"""The torch.distributed backend: groups, time-outs, and how they end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
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

from conftest import Run, Script, clean_environment
from launchers import PYNCCL_RUN
from meeting import free_port, until
from processes import completed, refusing_compiler
from pynccl import testing
from relays import relay
from torch_ranks import at_store, start

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(600)]


def device_map(rank: int, size: int, store: str, backend: str, expected: str) -> None:
    start(rank, size, store, backend)
    cpu = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert cpu.name() == expected
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 3
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "expected"),
    [("pynccl", "pynccl"), ("cpu:pynccl", "pynccl"), ("cpu:gloo,cuda:pynccl", "gloo")],
)
def test_device_maps(tmp_path: Path, backend: str, expected: str) -> None:
    at_store(2, device_map, tmp_path, backend, expected)


def subgroups(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    for members in ([0, 2], [1, 3], [3, 1, 0]):
        group = dist.new_group(members)
        if rank in members:
            x = torch.tensor([rank])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(members)
            dist.destroy_process_group(group)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mesh["tensor"].get_group())
    assert x.item() == 4 * (rank // 2) + 1
    redistribute(mesh)
    dist.destroy_process_group()


def redistribute(mesh: Any) -> None:
    """Multiply sharded matrices, and shard the product otherwise."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    a, b = torch.arange(24.0).reshape(6, 4), torch.arange(20.0).reshape(4, 5)
    product = distribute_tensor(a, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        b, mesh, [Replicate(), Shard(1)]
    )
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        assert torch.equal(product.redistribute(mesh, placements).full_tensor(), a @ b)


@pytest.mark.full
def test_subgroups_and_meshes(tmp_path: Path) -> None:
    at_store(4, subgroups, tmp_path)


def again(rank: int, size: int, store: str) -> None:
    for round_ in range(3):
        start(rank, size, f"{store}-{round_}")
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [float(size)] * 4
        dist.destroy_process_group()


@pytest.mark.full
def test_groups_made_again(tmp_path: Path) -> None:
    at_store(2, again, tmp_path)


def on_its_own(rank: int, size: int, store: str) -> None:
    from pynccl.torch import process_group

    shared = dist.FileStore(store.removeprefix("file://"), size)
    for turn in range(2):
        group = process_group(shared, rank, size, timedelta(seconds=30), f"turn {turn}")
        x = torch.full((3,), rank + 1.0)
        group.allreduce([x]).wait()
        assert x.tolist() == [size * (size + 1) / 2] * 3
        group.shutdown()
    assert not dist.is_initialized()
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("tcp://", rank, size), TypeError, "store is 'tcp://'; expected a torch.distributed.Store"),
        ((shared, size, size), ValueError, f"rank is {size} and size {size}; expected 0 <= rank < size"),
        ((shared, "0", size), TypeError, "rank is '0'; expected an int"),
        ((shared, rank, size, 30), TypeError, "timeout is 30; expected a timedelta"),
        ((shared, rank, size, timedelta(0)), ValueError, "timeout is 0:00:00; expected a positive timedelta"),
    ]
    for arguments, kind, text in wrong:
        with pytest.raises(kind) as caught:
            process_group(*arguments)
        assert str(caught.value) == text


@pytest.mark.full
def test_a_group_that_torch_does_not_register(tmp_path: Path) -> None:
    at_store(2, on_its_own, tmp_path)


def late(rank: int, size: int, store: str) -> tuple[float, str]:
    start(rank, size, store)
    # It bounds the creation, too.
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier()
    began = time.monotonic()
    message = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(5), group=group)
        except dist.DistBackendError as error:
            message = str(error)
        # The process goes on, and so does the group beside it.
    took = time.monotonic() - began
    dist.barrier()
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 15
    return took, message


def test_a_timeout_raises_in_the_caller(tmp_path: Path) -> None:
    (took, message), _ = at_store(2, late, tmp_path)
    assert "Timed out waiting 3000ms for all_reduce" in message
    assert 2.9 <= took < 13


def without_the_dead(rank: int, size: int, store: str) -> list[tuple[str, float]]:
    """Rank 2 is dead: a group without it works, and one with it names it when its time is over."""
    start(rank, size, store)
    dist.barrier()
    if rank == 2:
        os._exit(3)
    outcomes = []
    for members in ([0, 1], [0, 1, 2]):
        began = time.monotonic()
        try:
            group = dist.new_group(members, timeout=timedelta(seconds=2))
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            outcomes.append((f"{x[0]:g}", time.monotonic() - began))
        except dist.DistBackendError as error:
            outcomes.append((str(error), time.monotonic() - began))
    return outcomes


def test_a_group_with_a_dead_member(tmp_path: Path) -> None:
    *alive, dead = at_store(3, without_the_dead, tmp_path, check=False)
    assert isinstance(dead, testing.RankError)
    for rank, outcomes in enumerate(alive):
        assert not isinstance(outcomes, testing.RankError), outcomes
        (healthy, _), (text, took) = outcomes
        assert healthy == "2"
        assert "the process group was not created in 2 s" in text and f"rank {rank} of" in text
        assert text.split("has waited for ")[1].startswith("rank 2 of")
        assert took < 12


def impatient(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    x = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 300ms"):
            work.wait(timedelta(milliseconds=300))
        assert not work.is_completed()
        dist.distributed_c10d._get_default_store().set("go", "1")
        assert work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["go"])
        dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    dist.destroy_process_group()


@pytest.mark.full
def test_a_wait_that_timed_out_can_be_repeated(tmp_path: Path) -> None:
    at_store(2, impatient, tmp_path)


def aborted(rank: int, size: int, store: str, how: str) -> float:
    start(rank, size, store)
    dist.barrier()
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    flags = dist.distributed_c10d._get_default_store()
    flags.set("issued", "1") if rank == 0 else flags.wait(["issued"])
    began = time.monotonic()
    if how == "abort":
        dist.distributed_c10d._abort_process_group()
    elif how == "reversed" and rank == 1:
        time.sleep(1)
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
    took = time.monotonic() - began
    if work is not None:
        with pytest.raises(RuntimeError):
            work.wait()
    start(rank, size, f"{store}-second")
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    return took


@pytest.mark.full
@pytest.mark.parametrize("how", ["abort", "destroy", "reversed"])
def test_ends_in_bounded_time_with_work_pending(tmp_path: Path, how: str) -> None:
    assert max(at_store(2, aborted, tmp_path, how)) < 15


def dies_when_all_are_past(rank: int, size: int) -> None:
    """End rank 1 when no other rank is in the barrier any more."""
    dist.barrier()
    flags = dist.distributed_c10d._get_default_store()
    if rank == 1:
        flags.wait([f"past{other}" for other in range(size) if other != 1])
        os._exit(0)
    flags.set(f"past{rank}", "1")


def dying(rank: int, size: int, store: str) -> str:
    start(rank, size, store)
    dies_when_all_are_past(rank, size)
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        message = str(error)
    dist.destroy_process_group()
    return message


@pytest.mark.full
def test_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    first, _ = at_store(2, dying, tmp_path, check=False)
    assert "rank 1" in first


def lost_with_the_store(rank: int, size: int, port: int) -> str:
    """Rank 0 dies, and with it torch's store; the others then send to it and receive from it."""
    start(rank, size, f"tcp://127.0.0.1:{port}", seconds=20)
    dist.barrier()
    if rank == 0:
        os._exit(0)
    with pytest.raises(dist.DistBackendError):
        dist.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.send(torch.ones(3), 0) if rank == 1 else dist.recv(torch.ones(3), 0)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.full
def test_messages_with_a_dead_rank_that_had_the_store() -> None:
    results = testing.run(3, lost_with_the_store, free_port(), backend="cpu", check=False)
    for rank, message in zip((1, 2), results[1:], strict=True):
        assert f"connecting with rank 0 for messages on rank {rank}" in message
        assert "rank 0" in message.partition("default_pg): ")[2]


def killed_while_it_connects(rank: int, size: int, store: str, how: str) -> float:
    """Rank 1 has begun to connect with rank 0 when rank 0 kills it; rank 0 then connects with it."""
    start(rank, size, store, seconds=40)
    x = torch.tensor([float(os.getpid())])
    pids = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(pids, x)
    flags = dist.distributed_c10d._get_default_store()
    if rank == 1:
        dist.irecv(x, 0) if how == "send" else dist.isend(x, 0)
        time.sleep(0.5)
        flags.set("begun", "1")
        time.sleep(60)
    if rank == 0:
        flags.wait(["begun"])
        os.kill(int(pids[1].item()), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"rank 1 .* on rank 0 "):
            dist.send(x, 1) if how == "send" else dist.recv(x, 1)
        took = time.monotonic() - began
        flags.set("over", "1")
    else:
        flags.wait(["over"])
        took = 0.0
    return took


@pytest.mark.parametrize("how", ["send", "receive"])
def test_a_message_to_a_rank_that_is_killed_while_it_connects(tmp_path: Path, how: str) -> None:
    """The time-out of 40 s must not be waited for."""
    first, *_ = at_store(3, killed_while_it_connects, tmp_path, how, timeout=60, check=False)
    assert first < 20


def leaving(rank: int, size: int, store: str, how: str) -> None:
    """Rank 2 leaves without an error, then rank 1; the others learn that their messages never come."""
    start(rank, size, store, seconds=60)
    if how != "without a collective":
        dist.barrier()
    if rank == 2:
        if how == "destroys":
            dist.destroy_process_group()
        # Its process ends with this function.
        return
    x = torch.ones(100_000)
    forms: list[Callable[[], Any]] = [
        lambda: dist.recv(x, 2),
        lambda: dist.send(x, 2),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 2)])[0].wait(),
    ]
    for form in forms:
        with pytest.raises(
            dist.DistBackendError, match=r"with rank 2 .* on rank [01] .*: it has left the group"
        ):
            form()
    if rank == 0:
        with pytest.raises(
            dist.DistBackendError, match="with rank [12] .* on rank 0 .*: it has left the group"
        ):
            dist.recv(x)
        with pytest.raises(dist.DistBackendError, match="it has left the group"):
            dist.recv(x)
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["destroys", "ends", "without a collective"])
def test_messages_with_a_rank_that_has_left(tmp_path: Path, how: str) -> None:
    at_store(3, leaving, tmp_path, how, timeout=50)


# Rank 0, whose process serves the store, ends first.
MESSAGES_WITHOUT_THE_STORE = """
import os, socket, time, torch, torch.distributed as dist, pynccl.torch
dist.init_process_group("pynccl")
dist.new_group([1, 2])
dist.all_reduce(torch.ones(2))
while dist.get_rank() > 0:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
    except OSError:
        break
    time.sleep(0.2)
rank, began = dist.get_rank(), time.monotonic()
if rank > 0:
    try:
        dist.send(torch.ones(2), 2) if rank == 1 else dist.recv(torch.ones(2), 1)
    except dist.DistBackendError as error:
        print(time.monotonic() - began < 10, error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_first_messages_without_the_store_say_so_at_once(run_program: Run) -> None:
    done = run_program(MESSAGES_WITHOUT_THE_STORE, 3)
    assert (done.returncode, done.stderr) == (0, "")
    for rank, peer in ((1, 2), (2, 1)):
        assert re.search(
            rf"True pynccl: connecting with rank {peer} for messages on rank {rank} of .*: "
            r"the store at \S+:\d+ is gone, .* rank 0 of the program or a launcher, has ended",
            done.stdout,
        )


# The store's server stops before the group ends, and ends after it.
ENDS_WITHOUT_AN_ANSWER = '''
import os, signal, subprocess, sys, time, torch.distributed as dist, pynccl.torch
rank, port = int(os.environ["RANK"]), int(sys.argv[1])
SERVER = f"""
import time, torch.distributed as dist
store = dist.TCPStore("localhost", {port}, is_master=True)
time.sleep(60)
"""
if rank == 0:
    server = subprocess.Popen([sys.executable, "-c", SERVER])
dist.init_process_group("pynccl", store=dist.TCPStore("localhost", port), rank=rank, world_size=2)
if rank == 0:
    server.send_signal(signal.SIGSTOP)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    server.kill()
    server.wait()
time.sleep(1)
'''


@pytest.mark.slow
def test_the_end_of_a_group_waits_for_no_answer_of_the_store(run_program: Run) -> None:
    done = run_program(ENDS_WITHOUT_AN_ANSWER, 2, str(free_port()))
    assert (done.returncode, done.stderr) == (0, "")


def mismatched(rank: int, size: int, store: str) -> str:
    start(rank, size, store)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3 + rank))
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.full
def test_different_sizes_are_an_error_on_every_rank(tmp_path: Path) -> None:
    assert all("3" in message and "4" in message for message in at_store(2, mismatched, tmp_path))


def shrunk(rank: int, size: int, store: str) -> Any:
    start(rank, size, store)
    dies_when_all_are_past(rank, size)
    time.sleep(0.5)
    group = dist.distributed_c10d.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    x = torch.tensor([rank])
    dist.all_reduce(x, group=group)
    answer = (x.item(), dist.get_world_size(group), dist.get_rank(group))
    dist.destroy_process_group()
    return answer


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "shrink_group"), reason="shrink_group came with torch 2.10"
)
def test_shrink_after_a_death(tmp_path: Path) -> None:
    answers = at_store(3, shrunk, tmp_path, check=False)
    assert [answers[0], answers[2]] == [(2, 2, 0), (2, 2, 1)]


def detailed(rank: int, size: int, store: str) -> str:
    start(rank, size, store)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(size)] * 3
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(3), 0)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.full
def test_debug_detail(tmp_path: Path) -> None:
    first, _ = at_store(2, detailed, tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert "collective" in first.lower()


def interrupted(rank: int, size: int, store: str) -> float:
    start(rank, size, store)
    dist.barrier()
    took = 0.0
    if rank == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        took = time.monotonic() - began
        dist.distributed_c10d._get_default_store().set("done", "1")
    else:
        dist.distributed_c10d._get_default_store().wait(["done"])
    dist.distributed_c10d._abort_process_group()
    return took


@pytest.mark.full
def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    assert at_store(2, interrupted, tmp_path)[0] < 10


@pytest.mark.full
def test_several_ranks_compile_once(tmp_path: Path) -> None:
    at_store(2, again, tmp_path, env={"PYNCCL_CACHE": str(tmp_path / "cache")})
    (folder,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["_pynccl_torch.so", "lock"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"PATH": ""},
            "there is no C++ compiler 'g++' on PATH; install a compiler (Debian and Ubuntu: apt install g++",
        ),
        ({"CXX": "false"}, f"compiling pynccl.torch against torch {torch.__version__} failed"),
        ({"PYNCCL_CACHE": "/dev/null"}, "keeps its compiled backend in /dev/null/torch-"),
    ],
    ids=["missing", "failing", "nowhere to put it"],
)
def test_what_cannot_be_compiled(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    env = clean_environment() | {"PYNCCL_CACHE": str(tmp_path)} | settings
    root = str(Path(__file__).resolve().parents[2])
    done = completed(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import pynccl.torch", root],
        env=env,
        timeout=120,
    )
    assert done.returncode != 0
    assert message in done.stderr


RETURNS = """
import torch, torch.distributed as dist, pynccl.torch
dist.init_process_group("pynccl")
x = torch.full((100_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
gathered = [torch.empty(100_000) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, x)
work = dist.all_reduce(x, async_op=True)
if dist.get_rank() != 2:
    work.wait()
    assert (x == 3 * 6).all()
"""


@pytest.mark.slow
def test_a_program_without_destroy_process_group_ends_well(script: Script) -> None:
    command = [*PYNCCL_RUN, "-n", "3", "--cpu", script(RETURNS)]
    done = completed(command, timeout=100)
    assert done.returncode == 0, done.stderr


def build(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pynccl.torch`."""
    whole = clean_environment() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])} | env
    command = [sys.executable, "-m", "pynccl.torch", *arguments]
    return completed(command, env=whole, timeout=250)


def counting_relay(port: int) -> tuple[int, list[int]]:
    """Relay connections to a local port; return the relay's own, and the sizes of what clients send."""
    listener, sizes = socket.create_server(("127.0.0.1", 0)), list[int]()

    def counted(data: bytes) -> bytes:
        sizes.append(len(data))
        return data

    def serve() -> None:
        while True:
            client, server = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
            for ends in ((client, server, counted), (server, client, bytes)):
                threading.Thread(target=relay, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], sizes


def waits_while_it_joins(rank: int, size: int, port: int) -> list[int]:
    import pynccl.torch  # noqa: F401

    sizes = list[int]()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is None:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        through, sizes = counting_relay(port)
        store = dist.TCPStore("127.0.0.1", through, is_master=False)
    dist.init_process_group("pynccl", store=store, rank=rank, world_size=size)
    counts = list[int]()

    def count() -> None:
        for _ in range(3):
            time.sleep(0.8)
            counts.append(len(sizes))

    counting = threading.Thread(target=count)
    counting.start()
    if rank == 0:
        time.sleep(3)
    dist.all_reduce(torch.ones(3))
    counting.join()
    dist.destroy_process_group()
    return counts


def test_a_rank_that_waits_for_others_does_not_ask_the_store_again() -> None:
    """The first call makes the communicator; rank 0 is late for it."""
    _, counts = testing.run(2, waits_while_it_joins, free_port(), backend="cpu", timeout=60)
    assert counts[0] > 0 and len(set(counts)) == 1, counts


needs_clang = pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", ["g++ -m64", pytest.param("clang++", marks=needs_clang)])
def test_building_ahead(tmp_path: Path, compiler: str) -> None:
    """The backend compiles without a warning, too; whoever compiles says so."""
    env = {"PYNCCL_CACHE": str(tmp_path), "CXX": f"{compiler} -Werror"}
    done = build("build", **env)
    assert done.returncode == 0, done.stderr
    assert f"pynccl.torch compiles its backend against torch {torch.__version__} with " in done.stderr
    assert f"{compiler} -Werror, once: " in done.stderr
    (library,) = tmp_path.glob("*/_pynccl_torch.so")
    assert done.stdout == f"{library}\n"
    done = build("build", **env)
    assert (done.returncode, done.stdout) == (0, f"{library}\n")
    assert done.stderr == "pynccl.torch: already compiled\n"
    at_store(2, device_map, tmp_path, "pynccl", "pynccl", env=env)


def test_warnings_are_no_errors(tmp_path: Path) -> None:
    compiler, said = refusing_compiler(tmp_path)
    done = build("build", PYNCCL_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    assert done.returncode == 1
    assert "-Wall" in said.read_text() and "-Werror" not in said.read_text()


@pytest.mark.slow
def test_what_cannot_be_built(tmp_path: Path) -> None:
    for arguments in ((), ("nonsense",), ("build", "more")):
        done = build(*arguments, PYNCCL_CACHE=str(tmp_path))
        assert done.returncode == 2 and done.stderr.startswith("Usage: python -m pynccl.torch")
    done = build("build", PYNCCL_CACHE=str(tmp_path), PATH="", CXX="")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and "no C++ compiler 'g++'" in done.stderr
    assert not list(tmp_path.glob("*/*.so"))
