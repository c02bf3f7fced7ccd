"""What ranks compare before NCCL is called: machine, device, library, settings; over the fake CUDA driver."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import ROOT
from launchers import forget_the_launcher, logged
from meeting import free_port
from pynccl import BootstrapError, testing
from pynccl._library import cuda

FOLDER = ROOT / "tests" / "fake_cuda"
VERSIONS = {"2.28.9": "22809", "2.30.4": "23004"}


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the paths of the fake driver and of a libnccl of each version over it."""
    folder = tmp_path_factory.mktemp("gpus")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]
    driver = folder / "libcuda.so.1"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", *flags, soname, str(FOLDER / "fake_cuda.c"), "-o", str(driver)], check=True)
    paths = {"driver": str(folder)}
    source = (FOLDER / "null_nccl.c").read_text()
    for version, code in VERSIONS.items():
        (folder / version).mkdir()
        file, library = folder / version / "nccl.c", folder / version / "libnccl.so.2"
        assert "22809" in source
        file.write_text(source.replace("22809", code))
        subprocess.run(["gcc", *flags, str(file), str(driver), "-o", str(library)], check=True)
        paths[version] = str(library)
    return paths


def run_on(gpus: dict[str, str], nranks: int, case: Any, *args: Any, version: str = "2.28.9") -> list[Any]:
    return testing.run(nranks, case, *args, backend=gpus[version], env={"LD_LIBRARY_PATH": gpus["driver"]})


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
        ("2.28.9", "use NCCL >= 2.30, or set a different NCCL_HOSTID on each rank"),
        ("2.30.4", "set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank"),
    ],
)
def test_two_ranks_on_one_device(gpus: dict[str, str], version: str, advice: str) -> None:
    for text in run_on(gpus, 3, same_device, version=version):
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
        ("2.28.9", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False),
        ("2.30.4", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, False),
        ("2.28.9", {"NCCL_HOSTID": "machine {rank}"}, True),
        ("2.28.9", {"NCCL_HOSTID": "one machine"}, False),
    ],
)
def test_sharing_a_device_on_purpose(
    gpus: dict[str, str], version: str, names: dict[str, str], good: bool
) -> None:
    texts = run_on(gpus, 2, sharing, names, version=version)
    assert all((text == "good") == good for text in texts), texts


def on_the_cpu_library(rank: int, nranks: int) -> str:
    with pynccl.init(timeout=10) as comm:
        assert comm.device == rank
    # Everybody has a device 3 of its own, until there are as many as this says.
    with pynccl.init(device=3, timeout=10) as comm:
        assert comm.device == 3
    os.environ["PYNCCL_CPU_DEVICES"] = "4"
    return says(device=3)


def test_two_ranks_on_one_virtual_device() -> None:
    for text in testing.run(2, on_the_cpu_library, backend="cpu"):
        assert "ranks 0 and 1 are both on virtual device 3" in text


def counted(rank: int, nranks: int, port: int) -> int | None:
    forget_the_launcher()
    # Ranks 0 and 2 are on one machine, ranks 1 and 3 on another.
    os.environ["NCCL_HOSTID"] = f"machine {rank % 2}"
    with pynccl.init(f"tcp://127.0.0.1:{port}", rank=rank, world_size=nranks) as comm:
        assert comm.device == cuda.current_device() == rank // 2
    return comm.device


def test_devices_by_the_number_on_the_machine(gpus: dict[str, str]) -> None:
    assert run_on(gpus, 4, counted, free_port()) == [0, 0, 1, 1]


def own_device_only(rank: int, nranks: int, port: int) -> None:
    forget_the_launcher()
    os.environ.update(FAKE_CUDA_DEVICES="1", FAKE_CUDA_FIRST=str(rank))
    with pynccl.init(f"tcp://127.0.0.1:{port}", rank=rank, world_size=nranks) as comm:
        assert comm.device == 0


def test_each_rank_sees_its_own_device(gpus: dict[str, str]) -> None:
    run_on(gpus, 3, own_device_only, free_port())


# --- libraries ---


def other_library(rank: int, nranks: int, libraries: list[str]) -> str:
    os.environ.update(PYNCCL_LIBRARY=libraries[rank], FAKE_CUDA_DEVICES=str(nranks))
    return says()


def test_different_versions(gpus: dict[str, str]) -> None:
    libraries = [gpus["2.28.9"], gpus["2.28.9"], gpus["2.30.4"]]
    for text in run_on(gpus, 3, other_library, libraries):
        assert "rank 0 and rank 2 have different libraries" in text
        assert f"has NCCL 2.28.9 ({libraries[0]})" in text
        assert f"has NCCL 2.30.4 ({libraries[2]})" in text
        assert "install the same release everywhere, or name one file by PYNCCL_LIBRARY" in text


def test_different_kinds(gpus: dict[str, str]) -> None:
    for text in run_on(gpus, 2, other_library, [gpus["2.28.9"], "cpu"]):
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


def test_different_settings_are_a_warning() -> None:
    first, *others = testing.run(3, other_settings, backend="cpu")
    assert first == [
        "WARNING pynccl.init: NCCL_IB_HCA differs between ranks: 'mlx0' on ranks 0, 1, 'mlx1' on rank 2",
        "WARNING pynccl.init: NCCL_P2P_DISABLE differs between ranks: not set on ranks 0, 2, '1' on rank 1",
    ]
    assert others == [[], []]
