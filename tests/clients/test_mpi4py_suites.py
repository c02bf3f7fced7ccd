"""mpi4py's own tests of collectives, as released, over pynccl.mpi.Comm."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from clients_page import rows
from conftest import ROOT
from engines import mpirun
from released_files import sources

# mpi4py_suite.py's, which imports MPI.
BUFFERS = ("test_cco_buf", "test_cco_vec", "test_cco_pr_buf", "test_cco_pr_vec")
OBJECTS = ("test_cco_obj", "test_cco_ngh_obj")
FILES = BUFFERS + OBJECTS
EXCLUDED = {
    "test_cco_nb_buf": "nonblocking collectives",
    "test_cco_nb_vec": "nonblocking collectives",
    "test_cco_ngh_buf": "neighbours' collectives",
    "test_cco_pr_ngh_buf": "neighbours' collectives",
    "test_cco_buf_inter": "intercommunicators",
    "test_cco_vec_inter": "intercommunicators",
    "test_cco_obj_inter": "intercommunicators",
}
SUITE = ROOT / "tests" / "helpers" / "mpi4py_suite.py"
TESTS, OF_BUFFERS = 314, 266
RANKS = [1, 2, 3]


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nranks", RANKS)
def test_mpi4pys_own_suites(nranks: int) -> None:
    named = re.search(r"^SUITES = \((.*?)\)$", SUITE.read_text(), re.MULTILINE | re.DOTALL)
    assert named is not None
    assert tuple(re.findall(r'"(\w+)"', named[1])) == FILES
    out = mpirun(nranks, str(SUITE), str(sources(f"mpi4py=={version('mpi4py')}")), timeout=580)
    outcomes = [json.loads(line) for line in re.findall(r"^outcome (.*)$", out, re.MULTILINE)]
    assert len(outcomes) == nranks
    for outcome in outcomes:
        assert outcome.pop("ran") == TESTS
        assert not any(outcome.values()), json.dumps(outcome, indent=1)


@pytest.mark.slow
@pytest.mark.network
def test_every_file_is_run_or_excluded() -> None:
    theirs = Path(sources(f"mpi4py=={version('mpi4py')}")) / "test"
    assert {file.stem for file in theirs.glob("test_cco_*.py")} == {*EXCLUDED, *FILES}


@pytest.mark.slow
def test_the_page() -> None:
    found = rows(0, f"mpi4py {version('mpi4py')}")
    run = zip(found, (BUFFERS, OBJECTS), (OF_BUFFERS, TESTS - OF_BUFFERS), strict=False)
    for (files, over, passed, _), names, tests in run:
        listed = ", ".join(f"{name}.py" for name in names)
        assert files == f"{listed}, on {RANKS[0]} to {RANKS[-1]} ranks"
        assert (over, passed) == ("pynccl.mpi.Comm", f"{tests} of {tests}")
    left_out = {}
    for files, _, passed, why in found[2:]:
        assert passed == "not run"
        left_out |= {name.removesuffix(".py"): why for name in files.split(", ")}
    assert left_out.keys() == EXCLUDED.keys()
    for name, why in EXCLUDED.items():
        assert why in left_out[name], name
