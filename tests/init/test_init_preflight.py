"""What ranks compare before NCCL is called: machine, device, library, settings; over the fake CUDA driver."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_cuda
import pynccl
from conftest import Run
from launchers import forget_the_launcher, logged
from meeting import free_port, until
from pynccl import BootstrapError, testing
from pynccl._library import cuda
from pynccl._secure.handshake import Open
from pynccl.bootstrap import _frames as f
from ranks import on_ranks

VERSIONS = {"2.28.9": 22809, "2.30.4": 23004}


class Gpus:
    """The fake driver's environment, and a libnccl of each version over it."""

    def __init__(self, folder: Path) -> None:
        self.environment, self.libraries = fake_cuda.compiled(folder), {}
        for version, number in VERSIONS.items():
            (folder / version).mkdir()
            self.libraries[version] = fake_cuda.compiled_nccl(folder / version, self.environment, number)

    def run(self, nranks: int, case: Any, *args: Any, version: str = "2.28.9") -> list[Any]:
        return testing.run(nranks, case, *args, backend=self.libraries[version], env=self.environment)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    return Gpus(tmp_path_factory.mktemp("gpus"))


def says(**more: Any) -> str:
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=10, **more)
    assert time.monotonic() - start < 5
    return str(caught.value)


# --- devices ---


def same_device(rank: int, nranks: int) -> str:
    return says(device=1 if rank in (0, 2) else 0)


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        pytest.param(
            "2.28.9",
            "use NCCL >= 2.30, or set a different NCCL_HOSTID on each rank",
            marks=pytest.mark.slow,
        ),
        ("2.30.4", "set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank"),
    ],
)
def test_two_ranks_on_one_device(gpus: Gpus, version: str, advice: str) -> None:
    for text in gpus.run(3, same_device, version=version):
        assert "ranks 0 and 2 are both on GPU-10111213-1415-1617-1819-1a1b1c1d1e1f" in text
        assert "(their devices 1 and 1)" in text
        assert advice in text


def sharing(rank: int, nranks: int, names: dict[str, str]) -> str:
    os.environ.update({name: value.format(rank=rank) for name, value in names.items()})
    try:
        pynccl.init(device=0).destroy()
    except BootstrapError as error:
        return str(error)
    return "good"


@pytest.mark.parametrize(
    ("version", "names", "good"),
    [
        ("2.30.4", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, True),
        pytest.param("2.28.9", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False, marks=pytest.mark.slow),
        pytest.param("2.30.4", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, False, marks=pytest.mark.slow),
        ("2.28.9", {"NCCL_HOSTID": "machine {rank}"}, True),
        pytest.param("2.28.9", {"NCCL_HOSTID": "one machine"}, False, marks=pytest.mark.slow),
    ],
)
def test_sharing_a_device_on_purpose(gpus: Gpus, version: str, names: dict[str, str], good: bool) -> None:
    texts = gpus.run(2, sharing, names, version=version)
    assert all((text == "good") == good for text in texts), texts


@on_ranks(2)
def test_two_ranks_on_one_virtual_device(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=10) as comm:
        assert comm.device == rank
    # Everybody has a device 3 of its own, until there are as many as this says.
    with pynccl.init(device=3, timeout=10) as comm:
        assert comm.device == 3
    os.environ["PYNCCL_CPU_DEVICES"] = "4"
    text = says(device=3)
    assert "ranks 0 and 1 are both on virtual device 3" in text


def counted(rank: int, nranks: int, port: int) -> int | None:
    forget_the_launcher()
    # Ranks 0 and 2 are on one machine, ranks 1 and 3 on another.
    os.environ["NCCL_HOSTID"] = f"machine {rank % 2}"
    with pynccl.init(f"tcp://127.0.0.1:{port}", rank=rank, world_size=nranks) as comm:
        assert comm.device == cuda.current_device() == rank // 2
    return comm.device


def test_devices_by_the_number_on_the_machine(gpus: Gpus) -> None:
    assert gpus.run(4, counted, free_port()) == [0, 0, 1, 1]


def own_device_only(rank: int, nranks: int, port: int) -> None:
    forget_the_launcher()
    os.environ.update(FAKE_CUDA_DEVICES="1", FAKE_CUDA_FIRST=str(rank))
    with pynccl.init(f"tcp://127.0.0.1:{port}", rank=rank, world_size=nranks) as comm:
        assert comm.device == 0


def test_each_rank_sees_its_own_device(gpus: Gpus) -> None:
    gpus.run(3, own_device_only, free_port())


# --- libraries ---


def other_library(rank: int, nranks: int, libraries: list[str]) -> str:
    os.environ.update(PYNCCL_LIBRARY=libraries[rank], FAKE_CUDA_DEVICES=str(nranks))
    return says()


def test_different_versions(gpus: Gpus) -> None:
    libraries = [gpus.libraries[version] for version in ("2.28.9", "2.28.9", "2.30.4")]
    for text in gpus.run(3, other_library, libraries):
        assert "rank 0 and rank 2 have different libraries" in text
        assert f"has NCCL 2.28.9 ({libraries[0]})" in text
        assert f"has NCCL 2.30.4 ({libraries[2]})" in text
        assert "install the same release everywhere, or name one file by PYNCCL_LIBRARY" in text


def test_different_kinds(gpus: Gpus) -> None:
    for text in gpus.run(2, other_library, [gpus.libraries["2.28.9"], "cpu"]):
        assert "rank 0 on" in text and "has NCCL 2.28.9" in text
        assert "rank 1 on" in text and "has the CPU library 2.32.3" in text


# --- settings ---


def other_settings(rank: int, nranks: int) -> list[str]:
    lines = logged()
    os.environ.update(NCCL_BUFFSIZE="1", NCCL_DEBUG_FILE=f"rank{rank}.log", NCCL_IB_HCA=f"mlx{rank // 2}")
    if rank == 1:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    with pynccl.init(timeout=10) as comm:
        assert (comm.all_reduce(np.ones(2)) == nranks).all()
    return [line for line in lines if line.startswith("WARNING")]


@pytest.mark.parametrize("by", ["the variable", "the function"])
@on_ranks(2)
def test_check_mode_on_one_rank(rank: int, nranks: int, by: str) -> None:
    if by == "the variable":
        os.environ["PYNCCL_CHECK"] = str(rank)
    elif rank == 1:
        pynccl.check_mode()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=10)
    text = str(caught.value)
    assert "PYNCCL_CHECK differs between ranks: not set on rank 0, '1' on rank 1; check mode" in text


def job_of_its_own(rank: int, nranks: int, port: int) -> str:
    forget_the_launcher()
    place = {"RANK": str(rank), "WORLD_SIZE": str(nranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(port), PYNCCL_JOB_ID=str(rank))
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=3)
    return str(caught.value)


def test_different_jobs() -> None:
    first, second = testing.run(2, job_of_its_own, free_port(), backend="cpu")
    assert first.endswith("ranks that never arrived: 1 (1 of 2); refused: 1 of another job")
    assert "the id of the job (PYNCCL_JOB_ID) differs from the store's" in second


def leaves_in_the_handshake(rank: int, nranks: int, port: int) -> str:
    forget_the_launcher()
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def client() -> bytes:
        with socket.socket() as sock:
            until(lambda: sock.connect_ex(("127.0.0.1", port)) == 0)
            sock.sendall(f.HELLO + f.OPEN + bytes(Open.hello_size))
            return sock.recv(f.BEGINNING + Open.answer_size, socket.MSG_WAITALL)

    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(client)
        with pytest.raises(BootstrapError) as caught:
            pynccl.init(timeout=3)
    assert came.result().startswith(f.HELLO + f.OPEN)
    return str(caught.value)


def test_a_client_that_leaves_in_the_handshake_is_of_no_other_job() -> None:
    (text,) = testing.run(1, leaves_in_the_handshake, free_port(), backend="cpu")
    assert text.endswith("ranks that never arrived: 1 (1 of 2)")


def test_different_settings_are_a_warning() -> None:
    first, *others = testing.run(3, other_settings, backend="cpu")
    assert first == [
        "WARNING pynccl.init: NCCL_IB_HCA differs between ranks: 'mlx0' on ranks 0, 1, 'mlx1' on rank 2",
        "WARNING pynccl.init: NCCL_P2P_DISABLE differs between ranks: not set on ranks 0, 2, '1' on rank 1",
    ]
    assert others == [[], []]


def test_misspelled_variables_are_a_warning(run_program: Run) -> None:
    twice = "import pynccl\nfor _ in range(2): pynccl.init().destroy()"
    done = run_program(twice, 2, PYNCCL_TIMEOUTS="3", PYNCCL_MINE="1")
    said = "pynccl.init: the variable 'PYNCCL_TIMEOUTS' has no effect: pynccl does not read it; "
    assert done.stderr == f"[0] {said}the nearest name is PYNCCL_TIMEOUT\n"


def test_one_rank_among_those_of_mpi_is_a_warning(run_python: Run) -> None:
    for size in ("2", "1", "two"):
        of_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": size, "PYNCCL_LIBRARY": "cpu"}
        done = run_python("import pynccl; pynccl.init().destroy()", RANK="0", WORLD_SIZE="1", **of_mpi)
        said = "the only rank, although OMPI_COMM_WORLD_SIZE is 2; unset RANK and WORLD_SIZE" in done.stderr
        assert said == (size == "2")
