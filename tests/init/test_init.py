"""pynccl.init: from every environment to a communicator, or to an error in time that says why not."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pynccl
from engines import mpirun
from launchers import forget_the_launcher
from meeting import free_port, together
from pynccl import BootstrapError, testing
from ranks import on_ranks


def sums(comm: pynccl.Communicator) -> bool:
    return bool((comm.all_reduce(np.ones(3)) == comm.size).all())


# --- methods ---


@on_ranks(1, 2, 4)
def test_the_launchers_environment(rank: int, nranks: int) -> None:
    for method in (None, "env", None):
        with pynccl.init(method, timeout=20) as comm:
            assert (comm.rank, comm.size, comm.device) == (rank, nranks, rank)
            assert sums(comm)


@on_ranks(2)
def test_several_communicators(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as one, pynccl.init(timeout=20) as two:
        assert one.handle != two.handle
        assert sums(one)
        assert sums(two)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@on_ranks(3)
def test_torchruns_environment(rank: int, nranks: int, host: str, port: int) -> None:
    del os.environ["PYNCCL_STORE"]
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    if rank == 1:
        time.sleep(0.5)
    for _ in range(2):
        with pynccl.init(timeout=20) as comm:
            assert sums(comm)
    # Nobody holds the port any more.
    if rank == 0:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))


@on_ranks(2)
def test_arguments_replace_the_environment(rank: int, nranks: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    with pynccl.init(rank=nranks - 1 - rank, world_size=nranks, timeout=20) as comm:
        assert comm.rank == comm.device == nranks - 1 - rank
        assert sums(comm)


@on_ranks(1)
def test_a_single_process(rank: int, nranks: int) -> None:
    forget_the_launcher()
    with pynccl.init() as comm:
        assert (comm.rank, comm.size, comm.device) == (0, 1, 0)
        assert sums(comm)
    with pynccl.init(rank=0, world_size=1, device=3) as comm:
        assert (comm.size, comm.device) == (1, 3)


@pytest.mark.parametrize("method", ["tcp", "http://host:1", "file://x", 3, object()])
def test_unknown_methods(method: object) -> None:
    with pytest.raises(ValueError, match="method is 'env://'; pynccl's name is 'env', the default; expected"):
        pynccl.init("env://")
    with pytest.raises(ValueError, match="method is .*; expected None, 'env', 'mpi', 'tcp://host:port'"):
        pynccl.init(method)


# --- what goes wrong ---


@on_ranks(1)
def test_wrong_environment(rank: int, nranks: int) -> None:
    forget_the_launcher()
    for env, words in (
        ({"RANK": "0"}, "WORLD_SIZE is not set; expected a number"),
        ({"SLURM_PROCID": "0"}, r"SLURM_NTASKS is not set; expected a number \(Slurm sets it\)"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK is 'two'; expected a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2; expected 0 <= RANK < WORLD_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "rank 0 has no store: expected PYNCCL_STORE=host:port, or MASTER_ADDR",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT is .y."),
    ):
        os.environ.update(env)
        with pytest.raises(BootstrapError, match=words):
            pynccl.init()
        for name in env:
            del os.environ[name]
    with pytest.raises(BootstrapError, match="WORLD_SIZE is not set"):
        pynccl.init(rank=0)


def some_stay_away(rank: int, nranks: int, absent: list[int], port: int) -> str:
    together(nranks)
    ours = os.environ["PYNCCL_STORE"]
    if rank in absent:
        # A rank whose process ends would be named before the time-out.
        together(nranks, "over")
        return "absent"
    if port:
        del os.environ["PYNCCL_STORE"]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=1.5)
    # Who is late learns it from rank 0, whose time has run for longer.
    assert (1.2 if rank == 0 else 0) < time.monotonic() - start < 6
    os.environ["PYNCCL_STORE"] = ours
    together(nranks, "over")
    return str(caught.value)


@pytest.mark.parametrize("own_store", [False, True])
def test_absent_ranks_are_named_on_every_rank(own_store: bool) -> None:
    texts = testing.run(4, some_stay_away, [1, 3], free_port() if own_store else 0, backend="cpu")
    for rank in (0, 2):
        assert "ranks that never arrived: 1, 3 (2 of 4)" in texts[rank]


@pytest.mark.slow
def test_rank_0_is_absent() -> None:
    texts = testing.run(3, some_stay_away, [0], 0, backend="cpu")
    assert all("ranks that never arrived: 0 (1 of 3)" in text for text in texts[1:])
    port = free_port()
    texts = testing.run(3, some_stay_away, [0], port, backend="cpu")
    assert all(f"did not meet rank 0: no store answered at 127.0.0.1:{port}" in text for text in texts[1:])


def rank_fails(rank: int, nranks: int, who: int, port: int) -> str:
    if port:
        del os.environ["PYNCCL_STORE"]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if rank == who:
        os.environ["PYNCCL_LIBRARY"] = "/nonexistent/libnccl.so.2"
    start = time.monotonic()
    with pytest.raises(pynccl.NcclError) as caught:
        pynccl.init(timeout=20)
    assert time.monotonic() - start < 15
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("own_store", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_is_raised_everywhere(who: int, own_store: bool) -> None:
    texts = testing.run(3, rank_fails, who, free_port() if own_store else 0, backend="cpu")
    for rank, text in enumerate(texts):
        assert "/nonexistent/libnccl.so.2" in text
        assert text.startswith("LibraryNotFoundError" if rank == who else "BootstrapError")
        assert rank == who or f"rank {who} of 3 failed" in text


def sizes_differ(rank: int, nranks: int, sizes: list[int]) -> str:
    together(nranks)
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(world_size=sizes[rank], timeout=3)
    return str(caught.value)


@pytest.mark.parametrize("sizes", [[2, 3, 3], [3, 2, 3], [3, 3, 4]])
def test_sizes_differ(sizes: list[int]) -> None:
    texts = testing.run(3, sizes_differ, sizes, backend="cpu")
    assert any(re.search(r"rank \d has world_size \d, rank 0 has \d", text) for text in texts)


def same_rank(rank: int, nranks: int, method: str | None) -> str:
    together(nranks)
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(method, rank=0 if rank == 0 else 1, world_size=nranks, timeout=2)
    return str(caught.value)


@pytest.mark.parametrize("by_address", [False, True])
def test_a_rank_twice(by_address: bool) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if by_address else None
    texts = testing.run(3, same_rank, method, backend="cpu")
    where = (method or "").removeprefix("tcp://")
    assert all(f"rank 1 of 3 arrived twice at {where}" in text for text in texts), texts


def port_is_taken(rank: int, nranks: int, port: int) -> str:
    del os.environ["PYNCCL_STORE"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=1)
    return str(caught.value)


def test_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        texts = testing.run(2, port_is_taken, port, backend="cpu")
    assert f"rank 0 cannot listen at 127.0.0.1:{port}: " in texts[0]
    assert "another rank 0, job or program listens there" in texts[0]
    assert f"the store at 127.0.0.1:{port}" in texts[1]


@on_ranks(1)
def test_wrong_token(rank: int, nranks: int) -> None:
    os.environ["PYNCCL_SECRET"] = "a guess that is long enough"
    with pytest.raises(
        BootstrapError, match=r"rank 0 of 2 cannot take part: .* it has no secret, but this process has one"
    ):
        pynccl.init(world_size=2, timeout=10)


@on_ranks(1)
def test_ctrl_c_while_waiting_for_others(rank: int, nranks: int) -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        pynccl.init(world_size=2, timeout=30)
    assert time.monotonic() - start < 10


# --- MPI ---

MPI_PROGRAM = """
import os, sys, time
from mpi4py import MPI
import numpy as np, pynccl
world, what = MPI.COMM_WORLD, sys.argv[1]
rank, size = world.rank, world.size

def check(comm, rank, size):
    assert (comm.rank, comm.size) == (rank, size)
    assert (comm.all_reduce(np.ones(3)) == size).all()
    comm.destroy()

if what == "good":
    for method in (None, "mpi", world):
        comm = pynccl.init(method, timeout=20)
        assert comm.device == rank
        check(comm, rank, size)
    half = world.Split(rank % 2, -rank)
    comm = pynccl.init(half, timeout=20)
    # The device that this process has already, which is no other half's.
    assert comm.device == rank
    check(comm, half.rank, half.size)
    try:
        pynccl.init("mpi", rank=0)
    except ValueError as error:
        assert "since MPI numbers the ranks" in str(error)
else:
    if rank == int(what):
        os.environ["PYNCCL_LIBRARY"] = "/nonexistent.so"
    try:
        pynccl.init("mpi", timeout=20)
    except pynccl.NcclError as error:
        assert "/nonexistent.so" in str(error), error
        kind = pynccl.LibraryNotFoundError if rank == int(what) else pynccl.BootstrapError
        assert type(error) is kind, error
        assert rank == int(what) or f"rank {what} of 3 failed" in str(error), error
    else:
        raise SystemExit("no error")
print(f"fine {rank}", flush=True)
"""


@pytest.mark.parametrize("what", ["good", "0", "2"])
def test_mpi(what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    printed = mpirun(3, str(tmp_path / "program.py"), what, timeout=50)
    assert sorted(re.findall(r"fine \d", printed)) == ["fine 0", "fine 1", "fine 2"]


@on_ranks(1)
def test_mpi_without_mpi4py(rank: int, nranks: int) -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(BootstrapError, match="method='mpi' needs mpi4py"):
        pynccl.init("mpi")
