"""mpi4py's own tests of collectives, as released, over pynccl.mpi.Comm."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest

from clients_page import rows
from conftest import ROOT
from engines import mpirun
from released_files import sources

# mpi4py_suite.py's, which imports MPI.
FILES = ("test_cco_buf", "test_cco_vec", "test_cco_pr_buf", "test_cco_pr_vec")
SUITE = ROOT / "tests" / "helpers" / "mpi4py_suite.py"
TESTS = 266
RANKS = [1, 2, 3]


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nranks", RANKS)
def test_mpi4pys_own_suites(nranks: int) -> None:
    assert f"SUITES = {FILES}".replace("'", '"') in SUITE.read_text()
    out = mpirun(nranks, str(SUITE), str(sources(f"mpi4py=={version('mpi4py')}")), timeout=580)
    outcomes = [json.loads(line) for line in re.findall(r"^outcome (.*)$", out, re.MULTILINE)]
    assert len(outcomes) == nranks
    for outcome in outcomes:
        assert outcome.pop("ran") == TESTS
        assert not any(outcome.values()), json.dumps(outcome, indent=1)


@pytest.mark.slow
def test_the_page() -> None:
    ((files, over, passed, _),) = rows(0, f"mpi4py {version('mpi4py')}")
    names = ", ".join(f"{name}.py" for name in FILES)
    assert files == f"{names}, on {RANKS[0]} to {RANKS[-1]} ranks"
    assert (over, passed) == ("pynccl.mpi.Comm", f"{TESTS} of {TESTS}")
