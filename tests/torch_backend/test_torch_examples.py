"""The torch examples, as a user runs them: by torchrun and by mpirun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT, clean_environment
from processes import completed

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.full, pytest.mark.timeout(600)]

MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(*command: str, **env: str) -> list[str]:
    keep = {name: os.environ[name] for name in ("PYNCCL_CACHE",) if name in os.environ}
    whole = clean_environment() | keep | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    # Else print writes the end of a line by itself, and another rank gets in between.
    whole.pop("PYTHONUNBUFFERED", None)
    done = completed(command, env=whole, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def torchrun(nranks: int, script: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    # It would start Python with -u, see above.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nranks), *options]
    return run(*launcher, "--no-python", sys.executable, str(ROOT / "examples" / script), *arguments)


def test_collectives() -> None:
    expected = [f"all_reduce, rank: {r}, before: {r}, after: 6" for r in range(4)]
    expected += [f"reduce_scatter, rank: {r}, output: [6]" for r in range(4)]
    expected += [f"all_gather, rank: {r}, outputs: [[0], [1], [2], [3]]" for r in range(4)]
    expected += [f"broadcast, rank: {r}, before: [{4 if r == 0 else 0}], after: [4]" for r in range(4)]
    assert torchrun(4, "torch_collectives.py") == sorted(expected)


def test_pipeline() -> None:
    assert torchrun(4, "torch_pipeline.py") == [f"rank {r}, stage {r // 2}: 6.0" for r in range(4)]


@pytest.mark.parametrize(
    ("way", "nranks"),
    [("data_parallel", 3), ("sharded_optimizer", 2), ("fully_sharded", 2), ("tensor_parallel", 2)],
)
def test_training(way: str, nranks: int, tmp_path: Path) -> None:
    """On gloo and on pynccl: the same losses, and the same weights in the end."""
    lines, weights = {}, {}
    for backend in ("gloo", "pynccl"):
        folder = tmp_path / backend
        folder.mkdir()
        options = "--backend", backend, "--save", str(folder)
        lines[backend] = torchrun(nranks, "torch_training.py", way, *options)
        weights[backend] = [torch.load(folder / f"{rank}.pt") for rank in range(nranks)]
    assert lines["pynccl"] == lines["gloo"] and len(lines["gloo"]) == nranks
    first = weights["pynccl"][0]
    assert first.keys() == weights["gloo"][0].keys()
    for ours, theirs in zip(weights["pynccl"], weights["gloo"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        # But for the running statistics, each rank's own.
        assert all(torch.equal(ours[name], first[name]) for name in first if "running" not in name)


def test_recovery_under_torchrun() -> None:
    expected = [f"rank {r}, attempt 1: 9" for r in range(3)]
    assert torchrun(3, "torch_elastic.py", options=("--max-restarts", "1")) == expected


def test_discovery_by_the_environment() -> None:
    expected = [f"rank {r} of 2 by environment: 1" for r in range(2)]
    assert torchrun(2, "torch_mpi_discovery.py") == expected


def test_discovery_by_mpi() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    assert mpirun.exists(), "the test extra brings Open MPI"
    script = str(ROOT / "examples" / "torch_mpi_discovery.py")
    lines = run(str(mpirun), "--oversubscribe", "-n", "3", sys.executable, script, **MPI_AS_ROOT)
    assert lines == [f"rank {r} of 3 by MPI: 3" for r in range(3)]


@pytest.mark.parametrize("way", ["loop", "trainer"])
def test_accelerate(way: str) -> None:
    """On CPUs both know gloo only by name: they use the group that there is."""
    losses = {}
    for backend in ("gloo", "pynccl"):
        lines = torchrun(2, "torch_accelerate.py", way, "--backend", backend)
        said = [line.split(": loss ") for line in lines if line.startswith("rank ")]
        assert [where for where, _ in said] == [f"rank {rank} of 2 on {backend}" for rank in range(2)]
        losses[backend] = [float(loss) for _, loss in said]
    assert losses["pynccl"] == pytest.approx(losses["gloo"], abs=1e-5)


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


def test_torchft() -> None:
    """The survivor and the new replica end with the same weights."""
    lines = run(sys.executable, str(ROOT / "examples" / "torch_torchft.py"))
    said = [line.split(": 8 steps together, weights ") for line in lines if line.startswith("replica ")]
    assert [where for where, _ in said] == ["replica 0", "replica 1"]
    assert said[0][1] == said[1][1]
