"""What goes wrong while ranks meet; nothing takes longer to fail than its time-out and one second."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import clean_environment
from init_methods import Plain, meet
from launchers import forget_the_launcher, logged
from meeting import free_port, hear, leave_descriptors, starved, store, tell, together, until
from pynccl import BootstrapError, capi, testing
from pynccl._base import timeouts
from pynccl._watch import channel, watchdog
from pynccl.bootstrap import Store, StoreServer, _store
from pynccl.bootstrap._exchange import Round
from pynccl.bootstrap._keys import ObjectKeys
from ranks import on_ranks

METHODS = [
    "master",
    pytest.param("file", marks=pytest.mark.slow),
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("pynccl run", "tcp", "object")),
]


def method_of(kind: str, where: str, port: int) -> Any:
    """Return what to give to init, and set the environment for it."""
    if kind == "master":
        os.environ.pop("PYNCCL_STORE", None)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if kind in ("pynccl run", "master"):
        return None
    return {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{where}/meeting", "object": Plain(where, "")}[
        kind
    ]


def failure_in_time(method: Any, timeout: float, grace: float = 1, **more: Any) -> pynccl.NcclError:
    start, before = time.monotonic(), starved()
    with pytest.raises(pynccl.NcclError) as caught:
        pynccl.init(method, timeout=timeout, **more)
    took = time.monotonic() - start
    # The others, on the same machine, did not get to run either.
    assert took < timeout + grace + 2 * (starved() - before)
    return caught.value


def fails_in_time(method: Any, timeout: float, grace: float = 1, **more: Any) -> str:
    error = failure_in_time(method, timeout, grace, **more)
    return f"{type(error).__name__}: {error}"


# --- late and never ---


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_late(rank: int, nranks: int, kind: str, tmp_path: Path, port: int, late: int) -> None:
    where = str(tmp_path)
    method = method_of(kind, where, port)
    if rank == late:
        time.sleep(0.6)
    with pynccl.init(method, timeout=15) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_a_late_rank_is_logged(
    rank: int, nranks: int, kind: str, tmp_path: Path, port: int, late: int
) -> None:
    """A rank that has waited long while the ranks meet logs once for whom."""
    timeouts.LATE, lines = 0.3, logged()
    method = method_of(kind, str(tmp_path), port)
    if rank == late:
        time.sleep(2)
    pynccl.init(method, timeout=15).destroy()
    waits = [line for line in lines if line.startswith("WARNING")]
    if rank == late:
        assert waits == []
    elif late == 0 and kind in ("master", "tcp"):
        assert re.fullmatch(rf"WARNING no store has answered at .*:{port} for 0.3 s: .*", "\n".join(waits))
    else:
        text = rf"WARNING pynccl.init: rank {rank} of 2 has waited 0.3 s at .* for rank {late}"
        assert re.fullmatch(text, "\n".join(waits))


def stop_rank_0(folder: str, others: tuple[int, ...]) -> int:
    """Stop rank 0 once the others are on their way to meet; return its process."""
    while not all(Path(folder, str(other)).exists() for other in others):
        time.sleep(0.01)
    time.sleep(0.5)
    pid = int(Path(folder, "0").read_text())
    os.kill(pid, signal.SIGSTOP)
    return pid


@on_ranks(3)
def test_a_store_that_stands_still(rank: int, nranks: int, tmp_path: Path, port: int) -> None:
    """Rank 0, which has the store, stands still for a while; the others wait on."""
    folder = str(tmp_path)
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 2:
        pid = stop_rank_0(folder, (0, 1))
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
    meet(f"tcp://127.0.0.1:{port}", rank, nranks)


def waits_for_one_stopped_for_good(rank: int, nranks: int, folder: str, port: int) -> str:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        pid = stop_rank_0(folder, (0, 2))
    if rank == 0:
        meet(f"tcp://127.0.0.1:{port}", rank, nranks)
    text = fails_in_time(f"tcp://127.0.0.1:{port}", 2.5)
    if rank == 1:
        hear("failed")
        os.kill(pid, signal.SIGKILL)
    else:
        tell("failed")
    return text


def test_a_store_that_is_stopped(tmp_path: Path) -> None:
    stopped, *texts = testing.run(
        3, waits_for_one_stopped_for_good, str(tmp_path), free_port(), backend="cpu", check=False
    )
    assert isinstance(stopped, testing.RankError)
    for text in texts:
        # The former by who was connected already.
        assert (
            "rank 0, whose process serves the store, does not respond" in text
            or "did not meet rank 0" in text
        ), text


def is_stopped_while_rank_0_gives_up(rank: int, nranks: int, kind: str, folder: str, port: int) -> str:
    method = method_of(kind, folder, port)
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        text = fails_in_time(method, 3)
        Path(folder, "rank 0 has given up").touch()
        return text
    if rank == 1:
        return fails_in_time(method, 3, grace=60)
    time.sleep(1.5)
    pid = int(Path(folder, "1").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        until(Path(folder, "rank 0 has given up").exists)
        # Its store is closed soon after.
        time.sleep(1)
    finally:
        os.kill(pid, signal.SIGCONT)
    return ""


@pytest.mark.parametrize("kind", ["master", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_while_rank_0_gives_up(kind: str, tmp_path: Path) -> None:
    """It does not take the end of rank 0's store for the end of rank 0."""
    texts = testing.run(
        3, is_stopped_while_rank_0_gives_up, kind, str(tmp_path), free_port(), backend="cpu", timeout=60
    )
    for text in texts[:2]:
        assert text.startswith("BootstrapError: ") and "ranks that never arrived: 2 (1 of 3)" in text, texts


def never_comes(rank: int, nranks: int, kind: str, where: str, port: int, absent: int) -> str:
    with store() as meeting:
        meeting.barrier("begin", nranks)
        method = method_of(kind, where, port)
        error = None if rank == absent else failure_in_time(method, 1)
        # A rank whose process ends would be named before the time-out.
        meeting.barrier("end", nranks)
    if error is None:
        return ""
    assert isinstance(error, BootstrapError) and error.ranks == [absent]
    return str(error)


@pytest.mark.parametrize("kind", METHODS)
def test_never(kind: str, tmp_path: Path) -> None:
    texts = testing.run(3, never_comes, kind, str(tmp_path), free_port(), 2, backend="cpu")
    for text in texts[:2]:
        assert "ranks that never arrived: 2 (1 of 3)" in text


@pytest.mark.parametrize("kind", METHODS)
def test_rank_0_never(kind: str, tmp_path: Path) -> None:
    texts = testing.run(3, never_comes, kind, str(tmp_path), free_port(), 0, backend="cpu")
    for text in texts[1:]:
        assert "did not meet rank 0" in text or "ranks that never arrived: 0 (1 of 3)" in text


# --- twice, and with another size ---


def comes_twice(rank: int, nranks: int, kind: str, where: str, port: int) -> str:
    together(nranks)
    method = method_of(kind, where, port)
    return fails_in_time(method, 1.2, rank=min(rank, 1))


@pytest.mark.parametrize("kind", METHODS)
def test_twice(kind: str, tmp_path: Path) -> None:
    texts = testing.run(3, comes_twice, kind, str(tmp_path), free_port(), backend="cpu")
    # Nothing but set and get cannot always tell.
    twice = all("rank 1 of 3 arrived twice" in text for text in texts)
    assert twice or (kind == "object" and "ranks that never arrived: 2" in texts[0])


def other_size(rank: int, nranks: int, sizes: list[int], kind: str, where: str, port: int) -> str:
    together(nranks)
    method = method_of(kind, where, port)
    return fails_in_time(method, 2, world_size=sizes[rank])


@pytest.mark.parametrize("sizes", [[2, 4], [4, 2]])
@pytest.mark.parametrize("kind", METHODS)
def test_another_size(kind: str, sizes: list[int], tmp_path: Path) -> None:
    texts = testing.run(2, other_size, sizes, kind, str(tmp_path), free_port(), backend="cpu")
    assert all(f"rank 1 has world_size {sizes[1]}, rank 0 has {sizes[0]}" in text for text in texts)


def retries(rank: int, nranks: int, kind: str, where: str, port: int) -> str:
    together(nranks)
    method = method_of(kind, where, port)
    text = fails_in_time(method, 6, world_size=nranks + (rank == nranks - 1))
    with pynccl.init(method, world_size=nranks, timeout=15) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()
    return text


@pytest.mark.parametrize("kind", METHODS)
def test_a_retry_at_once(kind: str, tmp_path: Path) -> None:
    """Rank 0 still waits for a fourth rank when the others come again."""
    texts = testing.run(3, retries, kind, str(tmp_path), free_port(), backend="cpu")
    assert all("rank 2 has world_size 4, rank 0 has 3" in text for text in texts)


def init_until_all_have_come(method: Any, seconds: float, **more: Any) -> tuple[int, list[str]]:
    """Call init until it succeeds; return the sum of ones over the ranks, and what it has raised before."""
    texts: list[str] = []
    while len(texts) < 12:
        try:
            with pynccl.init(method, timeout=seconds, **more) as comm:
                return int(comm.all_reduce(np.ones(2))[0]), texts
        except pynccl.NcclError as error:
            texts.append(f"{type(error).__name__}: {error}")
    raise AssertionError(texts)


def comes_late(rank: int, nranks: int, kind: str, where: str, port: int, late: int) -> tuple[int, list[str]]:
    together(nranks)
    method = method_of(kind, where, port)
    if rank == late:
        time.sleep(4)
    return init_until_all_have_come(method, 1.5)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("late", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_retries_until_a_late_rank_comes(kind: str, late: int, tmp_path: Path) -> None:
    """The rank comes when the others are at their third call, or about to be."""
    results = testing.run(3, comes_late, kind, str(tmp_path), free_port(), late, backend="cpu")
    for total, texts in results:
        assert total == 3
        assert not any("RankFailedError" in text for text in texts), texts
    assert any(f"that never arrived: {late} (1 of 3)" in text for text in results[1][1]) or any(
        "did not meet rank 0" in text for text in results[1][1]
    ), results
    assert not (tmp_path / "meeting").exists()


def started_anew(
    rank: int, nranks: int, kind: str, where: str, port: int, victim: int, timeout: float
) -> tuple[int, list[str]]:
    method, met = method_of(kind, where, port), Path(where, "met")
    if rank == victim and not (child := os.fork()):
        comm = pynccl.init(method, timeout=10)
        comm.barrier()
        met.touch()
        signal.pause()
    if rank == victim:
        until(met.exists)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        comm = pynccl.init(method, timeout=10)
        comm.barrier()
        with pytest.raises(pynccl.RankFailedError):
            comm.all_reduce(np.ones(2))
        comm.abort()
        Path(where, "again").touch()
    if timeout > 10 and rank == victim:
        # The others wait already.
        until(Path(where, "again").exists)
        time.sleep(0.5)
    return init_until_all_have_come(method, timeout)


# The last would need an object of its own for the new set of processes.
@pytest.mark.parametrize("kind", METHODS[:-1])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_started_anew(kind: str, victim: int, tmp_path: Path) -> None:
    """Its process knows nothing of the round in which the others are."""
    results = testing.run(
        2, started_anew, kind, str(tmp_path), free_port(), victim, 2, backend="cpu", timeout=60
    )
    assert [total for total, _ in results] == [2, 2], results


@pytest.mark.parametrize("kind", METHODS[:-1])
def test_a_rank_that_is_started_anew_meets_those_that_wait(kind: str, tmp_path: Path) -> None:
    """Before their time-out passes."""
    results = testing.run(2, started_anew, kind, str(tmp_path), free_port(), 1, 30, backend="cpu", timeout=60)
    assert results == [(2, []), (2, [])]


def asks_for_another_place_first(rank: int, nranks: int, where: str) -> None:
    method = f"file://{where}/meeting"
    together(nranks)
    if rank != 1:
        # A rank that comes after these two have failed would meet them in their next call.
        until(Path(where, "meeting").exists)
        time.sleep(0.2)
    with pytest.raises(BootstrapError, match="rank 2 of 3 arrived twice"):
        pynccl.init(method, rank=rank or 2, world_size=3, timeout=10)
    with pynccl.init(method, timeout=10) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


def test_a_folder_goes_after_a_failure_without_rank_0(tmp_path: Path) -> None:
    for _ in range(2):
        testing.run(3, asks_for_another_place_first, str(tmp_path), backend="cpu")
        assert not (tmp_path / "meeting").exists()


# --- the secret ---


def other_secret(rank: int, nranks: int, kind: str, port: int) -> str:
    together(nranks)
    method = method_of(kind, "", port)
    os.environ["PYNCCL_SECRET"] = "a guess, long enough" if rank else "the job's own secret"
    return fails_in_time(method, 2)


def has_few_descriptors(rank: int, nranks: int, where: str, spare: int) -> str:
    pynccl.load("cpu")
    if rank == 1:
        limit = len(os.listdir("/proc/self/fd")) + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return fails_in_time(f"file://{where}/meeting", 10, rank=rank, world_size=nranks)


@pytest.mark.parametrize("spare", [4, 5])
def test_a_lack_of_descriptors_is_told_through_a_folder(spare: int, tmp_path: Path) -> None:
    """Though its report needs a descriptor, too."""
    for text in testing.run(2, has_few_descriptors, str(tmp_path), spare, backend="cpu"):
        assert "Too many open files" in text, text


@pytest.mark.parametrize("kind", ["master", "tcp"])
def test_another_secret(kind: str) -> None:
    texts = testing.run(2, other_secret, kind, free_port(), backend="cpu")
    assert "ranks that never arrived: 1" in texts[0]
    assert "the secret (PYNCCL_SECRET)" in texts[1]


# --- rank 0 fails, before and after the id is out ---


def fails_later(rank: int, nranks: int, kind: str, where: str, port: int, who: int) -> str:
    method = method_of(kind, where, port)
    return fails_in_time(method, 10, config={"minCTAs": 8, "maxCTAs": 2} if rank == who else None)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_after_the_id_is_out(kind: str, who: int, tmp_path: Path) -> None:
    start = time.monotonic()
    texts = testing.run(3, fails_later, kind, str(tmp_path), free_port(), who, backend="cpu")
    assert time.monotonic() - start < 25
    for rank, text in enumerate(texts):
        assert "ncclCommInitRankConfig" in text, text
        assert rank == who or (f"rank {who} of 3 failed" in text and text.startswith("BootstrapError")), text


def dies(rank: int, nranks: int, kind: str, where: str, port: int, who: int) -> tuple[str, float]:
    together(nranks)
    method = method_of(kind, where, port)
    if rank == who:
        # In the middle of the wait for the others.
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2:
        time.sleep(1.2)
    start = time.monotonic()
    # In a folder nobody notices a death. After the time-out the creation has a second to say why it ended,
    # and the others have one to answer.
    return fails_in_time(method, 5, grace=4), time.monotonic() - start


@pytest.mark.parametrize("kind", ["pynccl run", "master", pytest.param("file", marks=pytest.mark.slow)])
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_is_killed_while_it_waits(kind: str, who: int, tmp_path: Path) -> None:
    results = testing.run(
        3, dies, kind, str(tmp_path), free_port(), who, backend="cpu", check=False, timeout=20
    )
    for rank, result in enumerate(results):
        if rank == who:
            assert "SIGKILL" in str(result)
            continue
        assert isinstance(result, tuple), result
        text, took = result
        # Rank 2 is too late to see that rank 0 was there; in a folder rank 0 has given no answer.
        if who == 1 or (kind != "file" and (kind, rank) != ("master", 2)):
            assert text.startswith(f"RankFailedError: rank {who}"), result
            assert kind == "file" or took < 4.5, result


def forks_and_dies(rank: int, nranks: int, folder: str, port: int, who: int, connects: int) -> Any:
    """A child that is forked before a connection, or while the rank waits, outlives the rank."""
    together(nranks)
    method = method_of("master", folder, port)
    made = 0

    def fork() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        Path(folder, "child").write_text(str(child))

    def connects_to(event: str, arguments: Any) -> None:
        nonlocal made
        if event == "socket.connect" and arguments[0].family == socket.AF_INET:
            made += 1
            if made == connects:
                fork()

    if rank == who:
        if connects:
            sys.addaudithook(connects_to)
        else:
            threading.Timer(0.5, fork).start()
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2:
        time.sleep(1.2)
    start = time.monotonic()
    try:
        text = fails_in_time(method, 8)
    finally:
        if rank == 2:
            os.kill(int(Path(folder, "child").read_text()), signal.SIGKILL)
    return text, time.monotonic() - start


@pytest.mark.parametrize(("who", "connects"), [(1, 2), pytest.param(1, 0, marks=pytest.mark.slow), (0, 0)])
def test_a_rank_forks_before_it_is_killed(who: int, connects: int, tmp_path: Path) -> None:
    results = testing.run(
        3, forks_and_dies, str(tmp_path), free_port(), who, connects, backend="cpu", check=False, timeout=30
    )
    assert "SIGKILL" in str(results[who])
    text, took = results[1 - who]
    assert text.startswith(f"RankFailedError: rank {who}"), results
    assert took < 4.5, results


def kills(pid: int) -> None:
    """End the server when both ranks wait for a third."""
    with Store(os.environ["PYNCCL_STORE"], "known to them all", timeout=30) as store:
        store.wait(["init/0/arrival/0", "init/0/arrival/1"])
    os.kill(pid, signal.SIGKILL)


def server_is_killed(rank: int, nranks: int, pid: int) -> str:
    if rank == 0:
        threading.Thread(target=kills, args=(pid,)).start()
    return fails_in_time(None, 40, world_size=nranks + 1)


SERVER = """
import sys, time
from pynccl.bootstrap import StoreServer
server = StoreServer(secret="known to them all")
print(server.address, flush=True)
time.sleep(60)
"""


def test_the_server_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        env = {"PYNCCL_STORE": server.stdout.readline().strip(), "PYNCCL_SECRET": "known to them all"}
        start = time.monotonic()
        texts = testing.run(2, with_environment, env, server.pid, backend="cpu")
        # At once, not after the time-out.
        assert time.monotonic() - start < 20
    finally:
        server.kill()
        server.communicate()
    assert all("lost the store at" in text for text in texts)


def with_environment(rank: int, nranks: int, env: dict[str, str], pid: int) -> str:
    os.environ.update(env)
    return server_is_killed(rank, nranks, pid)


# --- addresses ---


def resolves_not(rank: int, nranks: int, where: str) -> str:
    forget_the_launcher()
    return fails_in_time(where, 1.5, rank=rank, world_size=2)


def test_a_name_that_does_not_resolve() -> None:
    texts = testing.run(2, resolves_not, "tcp://no-such-host.invalid:5000", backend="cpu")
    assert "rank 0 cannot listen at no-such-host.invalid:5000" in texts[0]
    assert "rank 1 of 2 did not meet rank 0: no store answered at no-such-host.invalid:5000" in texts[1]


def no_master(rank: int, nranks: int, env: dict[str, str]) -> str:
    forget_the_launcher()
    os.environ.update(env, RANK=str(rank), WORLD_SIZE="2")
    # Name services may be late at the start of a job, and are asked again for some time.
    _store._UNRESOLVED_SECONDS = 1.0
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init()
    assert time.monotonic() - start < 30
    return str(caught.value)


def test_a_master_that_does_not_resolve() -> None:
    env = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "5000"}
    for rank, text in enumerate(testing.run(2, no_master, env, backend="cpu")):
        assert text.startswith(
            f"rank {rank} of 2: MASTER_ADDR is 'no-such-host.invalid', a name that cannot be resolved: "
        )
        assert "within 300 s" not in text


def test_a_port_that_is_taken() -> None:
    with StoreServer() as other:
        texts = testing.run(2, resolves_not, f"tcp://127.0.0.1:{other.port}", backend="cpu")
    assert f"rank 0 cannot listen at 127.0.0.1:{other.port}: " in texts[0]
    assert "rank 1 of 2 did not meet rank 0" in texts[1]


def test_a_name_that_others_cannot_reach() -> None:
    name = socket.gethostname()
    address = socket.gethostbyname(name)
    if not address.startswith("127."):
        pytest.skip("this machine has its name at an address that others can reach")
    (text,) = testing.run(1, resolves_not, f"tcp://{name}:{free_port()}", backend="cpu")
    assert f"({name} is {address} on rank 0's machine, which other machines cannot reach)" in text


@on_ranks(2, env={"NCCL_SOCKET_IFNAME": "lo"})
def test_ipv6(rank: int, nranks: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="::1", MASTER_PORT=str(port), NCCL_SOCKET_FAMILY="AF_INET6")
    del os.environ["PYNCCL_STORE"]
    with pynccl.init(timeout=20) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


@pytest.mark.parametrize("kind", ["pynccl run", "master", "tcp"])
@on_ranks(2)
def test_a_proxy_is_nothing_to_it(rank: int, nranks: int, kind: str, port: int) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ[name] = os.environ[name.upper()] = "http://127.0.0.1:9"
    method = method_of(kind, "", port)
    with pynccl.init(method, timeout=20) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


# --- start methods ---


def child(rank: int, nranks: int, port: int) -> None:
    forget_the_launcher()
    meet(f"tcp://127.0.0.1:{port}", rank, nranks)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(nranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    for _ in range(2):
        with pynccl.init(timeout=20) as comm:
            assert comm.all_reduce(np.ones(1))[0] == nranks


@pytest.mark.parametrize("how", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
@pytest.mark.parametrize("used_before", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(1)
def test_start_methods(rank: int, nranks: int, how: str, used_before: bool, port: int) -> None:
    if used_before:
        # What the parent has met is the parent's.
        meet(f"tcp://127.0.0.1:{port}", 0, 1)
        os.environ.update(RANK="0", WORLD_SIZE="1")
        pynccl.init(timeout=5).destroy()
    context = multiprocessing.get_context(how)
    processes = [context.Process(target=child, args=(r, 3, port)) for r in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def forks_after_it_met(rank: int, nranks: int, port: int, second: int) -> None:
    """Fork when the store of MASTER_PORT is kept: the children meet anew."""
    method_of("master", "", port)
    with pynccl.init(timeout=20) as comm:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(MASTER_PORT=str(second))
                with pynccl.init(timeout=10) as mine:
                    code = 0 if mine.all_reduce(np.ones(1))[0] == nranks else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert comm.all_reduce(np.ones(1))[0] == nranks


def test_forks_after_it_met() -> None:
    testing.run(2, forks_after_it_met, free_port(), free_port(), backend="cpu")


# --- Ctrl-C in every wait ---

WAITS = {
    "rank 0 waits for the others at a port": ("tcp://127.0.0.1:{port}", 0),
    "a rank waits for rank 0's port": ("tcp://127.0.0.1:{port}", 1),
    "a rank waits for a name": ("tcp://no-such-host.invalid:{port}", 1),
    "rank 0 waits in a folder": ("file://{folder}/meeting", 0),
    "a rank waits in a folder": ("file://{folder}/meeting", 1),
    "rank 0 waits at an object": ("object", 0),
    "a rank waits at an object": ("object", 1),
    "rank 0 waits at the launcher's store": ("env", 0),
    "a rank waits at the launcher's store": ("env", 1),
}
INTERRUPTED = """
import sys, time
import pynccl
class Nothing:
    def get(self, name): return None
    def set(self, name, value): pass
method, rank, alone = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# The interpreter loses a Ctrl-C in a callback of an import: this imports what the wait needs.
pynccl.init(alone, rank=0, world_size=1).destroy()
print("ready", flush=True)
try:
    pynccl.init(Nothing() if method == "object" else method, rank=rank, world_size=3, timeout=30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c(wait: str, tmp_path: Path) -> None:
    text, rank = WAITS[wait]
    method = text.format(port=free_port(), folder=tmp_path)
    with StoreServer() as server:
        env = clean_environment() | {
            "PYNCCL_STORE": server.address, "PYNCCL_SECRET": server.secret, "PYNCCL_LIBRARY": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-c", INTERRUPTED, method, str(rank), f"file://{tmp_path}/alone"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            assert process.stdout.readline() == "interrupted\n"
            assert time.monotonic() - start < 6
            process.wait(10)
        finally:
            process.kill()
            process.communicate()


def interrupted_early(rank: int, nranks: int) -> str:
    """Ctrl-C on rank 1, which has arrived, before rank 2 does."""
    if rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
    if rank == 2:
        time.sleep(1.2)
    start = time.monotonic()
    with pytest.raises((KeyboardInterrupt, BootstrapError)) as caught:
        pynccl.init(timeout=20)
    assert time.monotonic() - start < 15
    return repr(caught.value)


def test_ctrl_c_on_one_rank() -> None:
    texts = testing.run(3, interrupted_early, backend="cpu")
    assert texts[1] == "KeyboardInterrupt()"
    assert all("rank 1 of 3 failed: KeyboardInterrupt" in texts[rank] for rank in (0, 2))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", ["will", "prepare", "put"])
def test_ctrl_c_before_the_others_know_of_a_rank(
    at: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ObjectKeys(Plain(str(tmp_path), ""))
    meeting = Round(keys, "a", rank, 2, time.monotonic() + 20)
    put = keys.put

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def interrupted_at_the_arrival(name: str, *rest: Any) -> None:
        put(name, *(interrupted() if "arrival" in name else rest))

    if at == "will":
        monkeypatch.setattr(keys, "will", interrupted)
    if at == "put":
        monkeypatch.setattr(keys, "put", interrupted_at_the_arrival)
    with pytest.raises(KeyboardInterrupt):
        meeting.exchange(interrupted if at == "prepare" else lambda: None)  # type: ignore[arg-type,return-value]
    failure = Round(keys, "a", 1 - rank, 2, time.monotonic()).failure()
    assert failure is not None
    assert f"rank {rank} of 2 failed: KeyboardInterrupt" in str(failure.error())


def interrupted_creation(rank: int, nranks: int) -> str:
    """Ctrl-C on rank 0 when the id is out: the others learn of it at once."""
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
    if rank == 2:
        os.environ["PYNCCL_CPU_FAULT"] = ""
        original = pynccl.Communicator.__init__

        def slow(self: Any, *args: Any, **more: Any) -> None:
            time.sleep(4)
            original(self, *args, **more)

        pynccl.Communicator.__init__ = slow  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        pynccl.init(timeout=20)
    except KeyboardInterrupt:
        assert rank == 0
        assert time.monotonic() - start < 6
        return "interrupted"
    except BootstrapError as error:
        # At once, not after the time-out.
        assert time.monotonic() - start < 20
        return str(error)
    return "no error"


def test_ctrl_c_while_the_communicator_is_created() -> None:
    texts = testing.run(3, interrupted_creation, backend="cpu")
    assert texts[0] == "interrupted"
    assert all("rank 0 of 3 failed: KeyboardInterrupt" in text for text in texts[1:])


def dies_in_the_creation(rank: int, nranks: int, seen: bool) -> tuple[list[int], str]:
    if rank == 1:
        os.environ["PYNCCL_CPU_FAULT"] = "rank=1,call=1,action=die"
    with store() as meeting:
        if rank == 0:
            meeting.set("id", bytes(pynccl.get_unique_id()))
        unique_id = meeting.get("id", timeout=20)
    create = capi.ncclCommInitRank

    def created(*args: Any) -> int:
        handle = create(*args)
        tell(f"{rank} is created")
        # Earlier ncclCommInitRank itself would report the death.
        for other in range(nranks if rank == 1 else 0):
            hear(f"{other} is created")
        if rank != 1 and seen:
            until(lambda: capi.pyncclCpuIsGone(handle, 1) != 0)
        return handle

    capi.ncclCommInitRank = created
    with pytest.raises(pynccl.RankFailedError) as caught:
        pynccl.Communicator(nranks, unique_id, rank, timeout=20)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("seen", [False, True], ids=["later", "seen"])
def test_a_rank_dies_in_a_creation_by_unique_id(seen: bool) -> None:
    """Rank 1 dies as it opens the control channel, with the others or before them."""
    results = testing.run(3, dies_in_the_creation, seen, backend="cpu", check=False)
    assert results[::2] == [([1], "rank 1 of 3 died while the communicator was created")] * 2


def stopped_in_the_creation(rank: int, nranks: int, kind: str, where: str, port: int, function: str) -> str:
    method = method_of(kind, where, port)
    if rank == 1:

        def stop(*_: object) -> None:
            Path(where, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            # Another thread may take the signal a moment before this one stops.
            time.sleep(60)

        setattr(capi, function, stop)
    # The others have a second to answer.
    text = fails_in_time(method, 3, grace=2)
    if rank == 2:
        Path(where, "failed").touch()
    else:
        until(Path(where, "failed").exists)
        os.kill(int(Path(where, "pid").read_text()), signal.SIGKILL)
    return text


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    "function", ["ncclCommInitRank", pytest.param("pyncclCpuExchange", marks=pytest.mark.slow)]
)
def test_stopped_in_the_creation(kind: str, function: str, tmp_path: Path) -> None:
    first, stopped, last = testing.run(
        3, stopped_in_the_creation, kind, str(tmp_path), free_port(), function, backend="cpu", check=False
    )
    assert isinstance(stopped, testing.RankError)
    assert first == last
    assert first.startswith("RankFailedError: rank 1 did not respond while the communicator was created")


def is_slow_in_the_creation(
    rank: int, nranks: int, kind: str, where: str, port: int
) -> tuple[str, list[int]]:
    """Rank 1 takes its time before it opens the control channel, and answers the others meanwhile."""
    connect = channel.connect

    def slow(*args: Any) -> Any:
        until(Path(where, "failed").exists)
        return connect(*args)

    if rank == 1:
        setattr(channel, "connect", slow)  # noqa: B010
    with pytest.raises(pynccl.NcclTimeoutError) as caught:
        pynccl.init(method_of(kind, where, port), timeout=3)
    if rank == 2:
        Path(where, "failed").touch()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("kind", METHODS)
def test_slow_in_the_creation(kind: str, tmp_path: Path) -> None:
    """All ranks name it alike, and so does the rank itself."""
    for text, ranks in testing.run(
        3, is_slow_in_the_creation, kind, str(tmp_path), free_port(), backend="cpu", timeout=40
    ):
        assert "timed out while it waited for rank 1 to open the control channel" in text
        assert ranks == [1]


def comes_last_into_the_channel(rank: int, nranks: int, number: int) -> tuple[str, list[int]]:
    """Rank 2 leaves the others no time for what follows in the creation, on a busy machine."""
    exchange, calls, came = capi.pyncclCpuExchange, iter(range(9)), time.monotonic()
    call = channel._Links.call

    def slow(*args: Any) -> None:
        if next(calls) == number:
            time.sleep(max(0.0, came + 2.7 - time.monotonic()))
        exchange(*args)

    def busy(*args: Any) -> None:
        time.sleep(0.5)
        call(*args)

    setattr(channel._Links, "call", busy)  # noqa: B010
    if rank == 2:
        setattr(capi, "pyncclCpuExchange", slow)  # noqa: B010
    try:
        comm = pynccl.init(timeout=3)
    except pynccl.NcclTimeoutError as error:
        return str(error), error.ranks
    comm.barrier()
    return "", []


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_that_wait_for_a_late_one_are_not_blamed(number: int) -> None:
    """It comes in time for some ranks, or for all."""
    results = testing.run(4, comes_last_into_the_channel, number, backend="cpu", timeout=40)
    assert len({tuple(ranks) for _, ranks in results}) == 1, results
    assert results[0][1] in ([], [2]), results


def with_far_too_many(rank: int, nranks: int, method: str) -> str:
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(method, rank=0, world_size=2**31 - 1, timeout=1)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["tcp", pytest.param("file", marks=pytest.mark.slow)])
def test_far_too_many_ranks(kind: str, tmp_path: Path) -> None:
    method = method_of(kind, str(tmp_path), free_port())
    (text,) = testing.run(1, with_far_too_many, method, backend="cpu")
    assert re.search(r"never arrived: 1, 2, 3, .*\(at least \d+ of 2147483647\)", text)
    assert not list(tmp_path.iterdir())


def test_integers_that_c_cannot_have() -> None:
    for name in ("rank", "world_size", "device"):
        given: dict[str, Any] = {name: 10**30}
        with pytest.raises(ValueError, match=f"{name} is 10{{30}}; expected an int, . or more and below"):
            pynccl.init(**given)
        given = {name: np.array([1, 2])}
        with pytest.raises(TypeError, match=rf"{name} is array\(\[1, 2\]\); expected an int"):
            pynccl.init(**given)


# --- nothing left ---


def init_without_descriptors(rank: int, nranks: int, spare: int, where: int) -> str:
    """One rank has few free descriptors, after the imports of a first communicator."""
    pynccl.init(timeout=20).destroy()
    together(nranks)
    if rank == where:
        leave_descriptors(spare)
    with pytest.raises((pynccl.NcclError, OSError)) as caught:
        pynccl.init(timeout=5)
    return str(caught.value)


@pytest.mark.parametrize(
    "spare", [1, 3, *(pytest.param(spare, marks=pytest.mark.slow) for spare in (2, 4, 5))]
)
def test_init_without_descriptors(spare: int) -> None:
    first, second = testing.run(2, init_without_descriptors, spare, 1, backend="cpu", timeout=60)
    assert "Too many open files" in second
    # A rank that cannot reach the store cannot tell its reason either.
    assert "Too many open files" in first or "rank 1 of 2 exited with code 0, without this call" in first


@pytest.mark.parametrize("spare", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_maker_of_the_unique_id_has_no_descriptors(spare: int) -> None:
    """It cannot accept the other ranks, which must not be blamed."""
    for said in testing.run(3, init_without_descriptors, spare, 0, backend="cpu", timeout=60):
        assert "Too many open files" in said


def inits_until_no_descriptor_is_left(rank: int, nranks: int) -> str:
    kept = [pynccl.init(timeout=20)]
    if rank == 1:
        descriptors = len(os.listdir("/proc/self/fd")) - 1 + 25
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    while len(kept) < 30:
        try:
            kept.append(pynccl.init(timeout=20))
        except pynccl.NcclError as error:
            return str(error)
    return "no error"


def has_no_watchdog(rank: int, nranks: int) -> str:
    if rank == 1:
        error = pynccl.NcclSystemError("the watchdog cannot be started")
        setattr(watchdog, "_thread", lambda: nullcontext(error))  # noqa: B010
    with pytest.raises(pynccl.NcclError) as caught:
        pynccl.init(timeout=20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (inits_until_no_descriptor_is_left, "Too many open files"),
        (has_no_watchdog, "the watchdog cannot be started"),
    ],
)
def test_the_rank_that_fails_while_the_communicator_is_made(fails: Callable[..., str], why: str) -> None:
    """It raises its own error, and the others name it, not one another."""
    first, second, third = testing.run(3, fails, backend="cpu", timeout=60)
    assert why in second and "failed" not in second
    assert first == third == f"rank 1 of 3 failed: NcclSystemError: {second}"


def init_without_a_thread(rank: int, nranks: int) -> str:
    pynccl.init(timeout=20).destroy()
    if rank == 1:
        # The stack of a new thread does not fit into memory.
        threading.stack_size(1 << 46)
    began = time.monotonic()
    with pytest.raises((RuntimeError, pynccl.NcclError)) as caught:
        pynccl.init(timeout=40)
    assert time.monotonic() - began < 20
    return str(caught.value)


def test_init_without_a_thread() -> None:
    """As where RLIMIT_NPROC or memory allows none."""
    first, second = testing.run(2, init_without_a_thread, backend="cpu", timeout=60)
    assert second == "init: can't start new thread (RLIMIT_NPROC, RLIMIT_AS, or the cgroup's pids.max)"
    assert first == f"rank 1 of 2 failed: NoThreadError: {second}"
