"""The examples, as a user runs them: by `pynccl run` and by mpirun, on the CPU library."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from example_runs import EXAMPLES, launch, run

EPOCH = re.compile(r"^\[0\] epoch (\d+) loss (\d+\.\d+) accuracy (\d\.\d+)$")


# docs/run.md runs it with its own count.
@pytest.mark.parametrize(("nranks", "count"), [(1, 1000), (4, 1_000_003)])
def test_all_reduce_by_the_launcher(nranks: int, count: int) -> None:
    done = launch(nranks, "all_reduce.py", "--count", str(count))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] rank {rank} of {nranks}: success, {count} floats summed" for rank in range(nranks)
    ]


def test_all_reduce_by_mpi() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    assert mpirun.exists(), "the test extra brings Open MPI"
    script = [sys.executable, str(EXAMPLES / "all_reduce.py"), "--count", "1000000"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run(str(mpirun), "--oversubscribe", "-n", "4", *script, PYNCCL_LIBRARY="cpu", **root)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: success, 1000000 floats summed" in done.stdout


def test_asynchronous() -> None:
    done = launch(2, "asynchronous.py", "--layers", "3", "--width", "1000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all sums are right, the loop went on\n") == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_push(engine: str) -> None:
    done = run(sys.executable, str(EXAMPLES / "engine_push.py"), engine, PYNCCL_LIBRARY="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step}: 2 workers have the weights" for step in (1, 2, 3)]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_nccl() -> None:
    env = {"PYNCCL_LIBRARY": "cpu", "PYNCCL_TIMEOUT": "30"}
    done = run(sys.executable, str(EXAMPLES / "cupy_nccl.py"), **env)
    assert done.returncode == 0, done.stderr
    said = [f"rank {rank}: rank [1] died: RankFailedError of pynccl.compat.cupy" for rank in (0, 2)]
    assert done.stdout.splitlines() == said


@pytest.mark.parametrize("nranks", [1, 4])
def test_halo_exchange(nranks: int) -> None:
    done = launch(nranks, "halo_exchange.py", "--size", "48", "--steps", "51")
    assert done.returncode == 0, done.stderr
    for rank in range(nranks):
        assert f"[{rank}] rank {rank} of {nranks}: the three grids are equal\n" in done.stdout


@pytest.mark.parametrize("nranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ring_all_reduce(nranks: int, tmp_path: Path) -> None:
    plot = tmp_path / "ring.png"
    done = launch(nranks, "ring_all_reduce.py", "--count", "10007", "--repeats", "2", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    for rank in range(nranks):
        assert f"[{rank}] rank {rank} of {nranks}: all sums are right\n" in done.stdout
    assert done.stdout.count("chunks of ") == 8
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_key_value_cache() -> None:
    done = launch(3, "key_value_cache.py", "--blocks", "11", "--slots", "2")
    assert done.returncode == 0, done.stderr
    assert "[0] rank 0 of 3: 11 blocks, 360448 bytes, sent to each decode rank\n" in done.stdout
    assert done.stdout.count(": 11 blocks, 360448 bytes, received and checked\n") == 2
    done = launch(1, "key_value_cache.py")
    assert done.returncode != 0
    assert "one rank; expected a prefill rank and at least one decode rank" in done.stderr


@pytest.mark.parametrize("nranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_data_parallel(nranks: int) -> None:
    done = launch(nranks, "data_parallel.py", "--check")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    epochs = [match for line in lines if (match := EPOCH.match(line))]
    assert [int(match[1]) for match in epochs] == list(range(1, 21))
    assert float(epochs[-1][3]) >= 0.95
    assert float(epochs[-1][2]) < float(epochs[0][2])
    assert f"[0] weights bitwise equal on {nranks} ranks" in lines
    (difference,) = (line.split()[-1] for line in lines if "largest difference from one rank" in line)
    assert float(difference) <= 1e-4
    assert len(lines) == 22


@pytest.mark.slow
def test_data_parallel_is_deterministic() -> None:
    first, second = (launch(3, "data_parallel.py", "--epochs", "6") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
