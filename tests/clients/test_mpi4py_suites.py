"""mpi4py's own tests of collectives, as released, over pynccl.mpi.Comm."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest

from conftest import ROOT
from engines import mpirun
from released_files import sources

SUITE = ROOT / "tests" / "helpers" / "mpi4py_suite.py"


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_mpi4pys_own_suites(nranks: int) -> None:
    out = mpirun(nranks, str(SUITE), str(sources(f"mpi4py=={version('mpi4py')}")), timeout=580)
    outcomes = [json.loads(line) for line in re.findall(r"^outcome (.*)$", out, re.MULTILINE)]
    assert len(outcomes) == nranks
    for outcome in outcomes:
        assert outcome.pop("ran") > 100
        assert not any(outcome.values()), json.dumps(outcome, indent=1)
