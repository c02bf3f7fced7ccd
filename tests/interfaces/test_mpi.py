"""pynccl.mpi: the mpi4py-shaped communicator, under mpirun, with mpi4py as the oracle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import ROOT, Run

MPIRUN = Path(sys.executable).with_name("mpirun")
PROGRAM = ROOT / "tests" / "helpers" / "mpi_program.py"
LATER = ROOT / "tests" / "helpers" / "mpi_later_program.py"
SUITE = ROOT / "tests" / "helpers" / "mpi4py_suite.py"


def mpirun(nranks: int, *args: str, timeout: float) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYNCCL_", "RANK", "WORLD_"))
    }
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYNCCL_LIBRARY": "cpu"}
    command = [str(MPIRUN), "--oversubscribe", "-n", str(nranks), sys.executable, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(150)
@pytest.mark.parametrize("nranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_against_mpi4py(nranks: int) -> None:
    out = mpirun(nranks, str(PROGRAM), timeout=140)
    assert sorted(re.findall(r"fine (\d)", out)) == [str(rank) for rank in range(nranks)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "nranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_persistent_requests_and_windows_against_mpi4py(nranks: int) -> None:
    out = mpirun(nranks, str(LATER), timeout=140)
    assert sorted(re.findall(r"fine (\d)", out)) == [str(rank) for rank in range(nranks)]


@pytest.fixture(scope="session")
def mpi4py_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources of the mpi4py that is installed, whose tests its wheels leave out."""
    folder, has = tmp_path_factory.mktemp("mpi4py"), version("mpi4py")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*pip, *options, f"mpi4py=={has}"], check=True, timeout=280)
    with tarfile.open(folder / f"mpi4py-{has}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"mpi4py-{has}"


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_mpi4pys_own_suites(nranks: int, mpi4py_sources: Path) -> None:
    out = mpirun(nranks, str(SUITE), str(mpi4py_sources), timeout=580)
    outcomes = [json.loads(line) for line in re.findall(r"^outcome (.*)$", out, re.MULTILINE)]
    assert len(outcomes) == nranks
    for outcome in outcomes:
        assert outcome.pop("ran") > 100
        assert not any(outcome.values()), json.dumps(outcome, indent=1)


# The names of the methods that Comm defines, and of mpi4py's others with buffers; MPI stays as it is.
NAMES = """
import re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from pynccl.mpi import Comm
own = {name for name in vars(Comm) if name[:1].isupper()}
texts = {name: str(getattr(MPI.Intracomm, name).__doc__) for name in dir(MPI.Intracomm) if name[0].isupper()}
others = {name for name, text in texts.items() if re.search(r"\\b(sendbuf|recvbuf|buf): ", text)}
print(*own)
print(*(others - own))
"""


def test_the_document_names_every_method(run_python: Run) -> None:
    own, others = (set(line.split()) for line in run_python(NAMES, PYTHONPATH=str(ROOT)).stdout.splitlines())
    named = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "docs" / "mpi.md").read_text()))
    assert len(own) > 20 and len(others) > 40
    assert own <= named, own - named
    assert others <= named, others - named
