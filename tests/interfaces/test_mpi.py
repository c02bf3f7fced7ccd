"""pynccl.mpi: the mpi4py-shaped communicator, under mpirun, with mpi4py as the oracle."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT, Run
from engines import mpirun

PROGRAM = ROOT / "tests" / "helpers" / "mpi_program.py"
LATER = ROOT / "tests" / "helpers" / "mpi_later_program.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("nranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
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
