"""torch's own suite for process groups, with pynccl and with gloo.

`python tests/torch_backend/test_torch_suite.py BACKEND [TEST …]` runs it under one backend: gloo, pynccl, or
pynccl-as-gloo, which runs the tests that the suite has for gloo alone on pynccl too.
The tests here run what is quick.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from typing import Any

import pytest

from processes import completed

WORLD_SIZE = 3
QUICK = [
    "test_all_reduce_sum",
    "test_all_gather",
    "test_broadcast",
    "test_send_recv_any_source",
    "test_scatter",
]


def _suite(backend: str) -> type[unittest.TestCase]:
    """Return torch's suite as a test case for this backend, which its tables learn to know first."""
    disguised = backend == "pynccl-as-gloo"
    os.environ.update(BACKEND="gloo" if disguised else backend, WORLD_SIZE=str(WORLD_SIZE))
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="pynccl-suite-"))
    import torch
    from torch.testing._internal import common_distributed

    import pynccl.torch  # noqa: F401

    # Else tests that look into these tables skip silently.
    for backends in common_distributed.DistTestCases.backend_feature.values():
        backends.add("pynccl")
    if disguised:
        _replace_gloo()
    from torch.testing._internal.distributed import distributed_test

    class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # Forked, for torch takes seconds to import.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    TorchSuite.__module__ = "__main__"
    return TorchSuite


def _replace_gloo() -> None:
    """Have process groups on gloo made on pynccl; torch's own Python takes them for gloo's."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    def make_on_pynccl(*args: Any, **kwargs: Any) -> Any:
        return make(*("pynccl" if arg == "gloo" else arg for arg in args), **kwargs)

    named = distributed_c10d.get_backend

    def get_backend(*args: Any, **kwargs: Any) -> str:
        name = named(*args, **kwargs)
        return "gloo" if name == "pynccl" else name

    distributed_c10d._new_process_group_helper = make_on_pynccl
    distributed_c10d.get_backend = get_backend


class _Result(unittest.TextTestResult):
    """Counts, and one line of JSON a test on stdout."""

    def _note(self, test: Any, outcome: str, detail: str = "") -> None:
        print(json.dumps({"test": test._testMethodName, "outcome": outcome, "detail": detail}), flush=True)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", str(err[1])[-1500:])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", str(err[1])[-1500:])


def run_suite(backend: str, patterns: list[str]) -> dict[str, dict[str, str]]:
    """Run the tests in a process of their own; return outcome and detail of each."""
    command = [sys.executable, __file__, backend, *patterns]
    done = completed(command, timeout=3600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"test"')]
    assert lines, f"no test ran:\n{done.stderr[-4000:]}"
    return {line["test"]: line for line in lines}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("torch_backend")
def test_quick_part_of_torchs_suite() -> None:
    outcomes = {backend: run_suite(backend, QUICK) for backend in ("gloo", "pynccl")}
    passed = {b: {t for t, line in o.items() if line["outcome"] == "passed"} for b, o in outcomes.items()}
    assert len(passed["gloo"]) >= 5
    assert passed["gloo"] <= passed["pynccl"], passed["gloo"] - passed["pynccl"]


def _main(backend: str, patterns: list[str]) -> None:
    suite = _suite(backend)
    names = unittest.TestLoader().getTestCaseNames(suite)
    wanted = [name for name in names if not patterns or name in patterns]
    runner = unittest.TextTestRunner(stream=sys.stderr, resultclass=_Result)
    runner.run(unittest.TestSuite(suite(name) for name in wanted))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
