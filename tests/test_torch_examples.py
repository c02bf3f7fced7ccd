"""The torch examples, as a user runs them: by torchrun and by mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, clean_environment

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.full, pytest.mark.timeout(150)]

MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(*command: str, **env: str) -> list[str]:
    keep = {name: os.environ[name] for name in ("PYNCCL_CACHE",) if name in os.environ}
    whole = clean_environment() | keep | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    # Else print writes the end of a line by itself, and another rank gets in between.
    whole.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def torchrun(nranks: int, script: str, *options: str) -> list[str]:
    # It would start Python with -u, see above.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nranks), *options]
    return run(*launcher, "--no-python", sys.executable, str(ROOT / "examples" / script))


def test_collectives() -> None:
    expected = [f"all_reduce, rank: {r}, before: {r}, after: 6" for r in range(4)]
    expected += [f"reduce_scatter, rank: {r}, output: [6]" for r in range(4)]
    expected += [f"all_gather, rank: {r}, outputs: [[0], [1], [2], [3]]" for r in range(4)]
    expected += [f"broadcast, rank: {r}, before: [{4 if r == 0 else 0}], after: [4]" for r in range(4)]
    assert torchrun(4, "torch_collectives.py") == sorted(expected)


def test_pipeline() -> None:
    assert torchrun(4, "torch_pipeline.py") == [f"rank {r}, stage {r // 2}: 6.0" for r in range(4)]


def test_recovery_under_torchrun() -> None:
    expected = [f"rank {r}, attempt 1: 9" for r in range(3)]
    assert torchrun(3, "torch_elastic.py", "--max-restarts", "1") == expected


def test_discovery_by_the_environment() -> None:
    expected = [f"rank {r} of 2 by environment: 1" for r in range(2)]
    assert torchrun(2, "torch_mpi_discovery.py") == expected


def test_discovery_by_mpi() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    assert mpirun.exists(), "the test extra brings Open MPI"
    script = str(ROOT / "examples" / "torch_mpi_discovery.py")
    lines = run(str(mpirun), "--oversubscribe", "-n", "3", sys.executable, script, **MPI_AS_ROOT)
    assert lines == [f"rank {r} of 3 by MPI: 3" for r in range(3)]


def deepspeed_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("rank ")]


def test_deepspeed_by_the_environment() -> None:
    expected = [f"rank {r} of 2 on pynccl: 1" for r in range(2)]
    assert deepspeed_lines(torchrun(2, "torch_deepspeed.py")) == expected


def test_deepspeed_by_mpi() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    script = str(ROOT / "examples" / "torch_deepspeed.py")
    lines = run(str(mpirun), "--oversubscribe", "-n", "2", sys.executable, script, **MPI_AS_ROOT)
    assert deepspeed_lines(lines) == [f"rank {r} of 2 on pynccl: 1" for r in range(2)]
