"""benchmarks/call_overhead.py: what it measures with, what it refuses, and what it reports; no times."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT, Run, clean_environment
from processes import completed
from pynccl import capi

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def library(load: Load, tmp_path: Path) -> str:
    return str(load("_overhead_library").build(tmp_path))


def test_the_library_has_every_function_and_counts(load: Load, library: str) -> None:
    counter, loaded = load("_overhead_library").Counter(library), ctypes.CDLL(library)
    assert all(hasattr(loaded, name) for name in capi.FUNCTIONS)
    assert counter("ncclAllReduce") == 0
    counter.repeat(1000)
    assert counter("ncclAllReduce") == 1000
    assert loaded.ncclGroupStart() == 0
    assert [counter(name) for name in ("ncclGroupStart", "ncclGroupEnd")] == [1, 0]
    assert counter("ncclNothing") == 2**64 - 1


def test_pynccl_runs_over_it(library: str, run_python: Run) -> None:
    code = """
import pynccl
from pynccl import capi
comm = pynccl.Communicator(2, bytes(128), 0)
assert (comm.size, comm.rank, comm.device, pynccl.get_version()) == (2, 0, 0, (2, 32, 3))
buffer = pynccl.Buffer(4096, 8, "float32")
comm.all_reduce(buffer, stream=0)
assert capi.ncclCommInitAll(2) == [comm.handle] * 2
comm.destroy()
"""
    run_python(code, PYNCCL_LIBRARY=library, PYTHONPATH=str(ROOT))


def test_calls_that_were_not_made_are_an_error(load: Load, library: str) -> None:
    worker, cases = load("_overhead_worker"), load("_overhead_cases")
    counter = load("_overhead_library").Counter(library)
    names = {"counter": counter, "repeat": counter.repeat}
    good = cases.Case("good", "library", "repeat(3)", 3, {"ncclAllReduce": 3, "ncclGroupStart": 0})
    (measured,) = worker.Bench([good], names, 1e-4).run(4)
    assert len(measured.samples) == 4 and all(sample > 0 for sample in measured.samples)
    for functions in ({"ncclAllReduce": 2}, {"ncclAllReduce": 3, "ncclGroupEnd": 1}):
        short = cases.Case("short", "library", "repeat(3)", 3, functions)
        with pytest.raises(AssertionError, match="short: ncclAllReduce|short: ncclGroupEnd"):
            worker.Bench([short], names, 1e-4)


def test_every_case_is_a_statement_and_every_target_has_its_cases(load: Load) -> None:
    cases = load("_overhead_cases")
    known = {case.name for case in cases.CASES}
    assert len(known) == len(cases.CASES)
    for case in (*cases.CASES, *cases.DRIVER_CASES):
        timeit.Timer(case.statement)
        assert case.setup in load("_overhead_worker").SETUPS
    assert set(cases.PEERS) <= known
    for target in cases.targets({}, None):
        assert target.verdict == "not measured"
        assert {target.ours, target.theirs} <= known | {"import pynccl", "numpy's and cffi's import"}


def ideal(cases: ModuleType) -> dict[str, list[float]]:
    """Return samples that meet every target: ours next to nothing, the peers' 100 ns."""
    return {case.name: [0.1 if "pynccl" in case.name else 100.0] * 3 for case in cases.CASES}


def test_targets(load: Load) -> None:
    cases = load("_overhead_cases")
    samples = ideal(cases)
    assert {target.verdict for target in cases.targets(samples, 10.0)} == {"met"}
    samples[cases.IN_PLACE] = [36.0, 36.0, 10.0]
    samples[cases.PLANNED] = [200.0] * 3
    missed = {
        (target.ours, target.theirs) for target in cases.targets(samples, 60.0) if target.verdict == "NOT MET"
    }
    assert missed == {
        (cases.IN_PLACE, cases.CUPYX_IN_PLACE),
        (cases.IN_PLACE, cases.N4_IN_PLACE),
        (cases.PLANNED, cases.OWN),
        (cases.PLANNED, cases.CUPY_BARE),
        ("import pynccl", "numpy's and cffi's import"),
    }
    # The best peer is the one that takes least.
    samples[cases.N4_BARE] = [50.0] * 3
    assert cases.best_peer(samples) == cases.N4_BARE


@pytest.mark.parametrize(("import_ms", "status"), [(10.0, 0), (51.0, 1)])
def test_a_missed_target_is_the_exit_status(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_ms: float, status: int
) -> None:
    main, cases = load("call_overhead"), load("_overhead_cases")
    found = [{"name": name, "number": 1, "ns": ns, "counted": {}} for name, ns in ideal(cases).items()]
    monkeypatch.setattr(main, "require", lambda setups: None)
    monkeypatch.setattr(main, "measure", lambda *options, driver: {"versions": {}, "cases": found})
    monkeypatch.setattr(main, "import_time", lambda reps: [import_ms])
    monkeypatch.setattr(sys, "argv", ["call_overhead.py", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert int(exit.value.code or 0) == status
    text = (tmp_path / "call_overhead-quick.md").read_text()
    assert f"## Targets: {25 - status} of 25 met" in text
    assert ("NOT MET" in text) == bool(status)
    assert len(json.loads((tmp_path / "call_overhead-quick.json").read_text())["targets"]) == 25


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "call_overhead.py"), "--quick", *args]
    return completed(command, env=clean_environment(), timeout=55)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_it_runs(tmp_path: Path) -> None:
    """Without nccl4py, which the test extra does not bring; targets without their peer are not met."""
    done = run("--only", "library,cffi,pynccl,recorder,compat,cupy,cupyx,ctypes", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    data: dict[str, Any] = json.loads((tmp_path / "call_overhead-quick.json").read_text())
    assert {target["ours"] for target in data["targets"] if target["reached"] is None} == {
        "pynccl: all_reduce(a)",
        "pynccl: all_reduce(a, b)",
        "pynccl, recorder on: all_reduce(a)",
        "pynccl, recorder on: all_reduce(a, b)",
    }
    assert (len(data["cases"]), len(data["cases_with_driver"])) == (24, 13)
    for case in data["cases"] + data["cases_with_driver"]:
        assert len(case["ns"]) == 5 and min(case["ns"]) > 0
        assert case["name"] in done.stdout
    assert {"pynccl", "cffi", "cupy"} <= set(data["about"]["Versions"])


def test_wrong_arguments() -> None:
    done = run("--only", "pynccl,abacus")
    assert done.returncode == 2 and "unknown: abacus" in done.stderr


def test_a_missing_peer_is_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    main = load("call_overhead")
    monkeypatch.setitem(main.NEEDS, "nccl4py", "no_such_package.core")
    with pytest.raises(SystemExit, match="nccl4py needs no_such_package.core"):
        main.require(["cupy", "nccl4py"][1:])


def test_import_is_timed_alone(load: Load) -> None:
    (taken,) = load("call_overhead").import_time(1)
    assert taken > 0
