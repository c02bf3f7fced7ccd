"""benchmarks/matrix.py: it measures each setting, checks results, and keeps those of other runs; no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Run
from hosts import needs_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHORT = ("--ranks", "2", "--sizes", "8,64K", "--reps", "1", "--budget", "0.01")


Rows = list[tuple[str, int, int]]


def measured(run_python: Run, folder: Path, *options: str) -> dict[str, Rows]:
    """Run the benchmark; return the operation, the ranks and the size of each row of each setting."""
    run_python(args=[str(ROOT / "benchmarks/matrix.py"), *SHORT, *options, "--out", str(folder)])
    data = json.loads((folder / "matrix.json").read_text())

    def rows(found: list[dict[str, Any]]) -> Rows:
        return [(row["op"], row["ranks"], row["nbytes"]) for row in found]

    return {name: rows(found["rows"]) for name, found in data.items()}


def test_one_host_and_tcp(run_python: Run, tmp_path: Path) -> None:
    """A second run replaces the results of its own setting alone."""
    both = measured(run_python, tmp_path, "--settings", "direct,tcp", "--ops", "all_to_all")
    rows = [("all_to_all", 2, 16), ("all_to_all", 2, 65536)]
    assert both == {"direct": rows, "tcp": rows}
    again = measured(run_python, tmp_path, "--settings", "tcp", "--ops", "all_reduce")
    assert again == {"direct": rows, "tcp": [("all_reduce", 2, 8), ("all_reduce", 2, 65536)]}
    report = (tmp_path / "matrix.md").read_text()
    assert "### all_to_all: one host, direct reads" in report
    assert "### all_reduce: every rank a host of its own" in report


@needs_root
def test_hosts_with_limited_links(run_python: Run, tmp_path: Path) -> None:
    found = measured(run_python, tmp_path, "--settings", "hosts-2", "--ops", "broadcast")
    assert found == {"hosts-2": [("broadcast", 2, 8), ("broadcast", 2, 65536)]}


def test_options_that_leave_nothing(run_python: Run, tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks/matrix.py")
    for options, expected in {
        ("--settings", "hosts-4", "--ranks", "2"): "--ranks leaves nothing of hosts-4, which has 4, 8, 16",
        ("--settings", "tcp", "--most", "64"): "--most leaves no size for 4 ranks",
    }.items():
        done = run_python(args=[program, *options, "--out", str(tmp_path)], fails=True)
        assert done.stderr.endswith(f"error: {expected}\n")
