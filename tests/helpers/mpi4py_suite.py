"""mpi4py's own tests of collectives with the communicators of pynccl.mpi in the place of MPI's; for mpirun.

`python tests/helpers/mpi4py_suite.py FOLDER` runs the files SUITES of the sources in FOLDER.
Their arrays with `__cuda_array_interface__` take NCCL's way, the others MPI's. MPI reduces what NCCL cannot,
so that a test goes on behind it, and the refusals are compared with those of docs/mpi.md.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable
from typing import Any

import mpi4py
from mpi4py import MPI

from pynccl import NotSupportedError
from pynccl.mpi import Comm

SUITES = (
    "test_cco_buf",
    "test_cco_vec",
    "test_cco_pr_buf",
    "test_cco_pr_vec",
    "test_cco_obj",
    "test_cco_ngh_obj",
)
REDUCTIONS = ("Allreduce", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan")
# By the type character of the arrays: what NCCL has no reduction of, and of what only the sum.
NEVER, ONLY_SUM = "hHgG", "FD"

refused: Counter[tuple[str, str, str]] = Counter()


class Suited(Comm):
    """A communicator that notes what pynccl refuses to reduce, and has MPI do it."""


def _noting(name: str) -> Callable[..., None]:
    def reduce(self: Suited, sendbuf: Any, recvbuf: Any, *more: Any) -> None:
        try:
            getattr(Comm, name)(self, sendbuf, recvbuf, *more)
        except NotSupportedError:
            data, datatype = sendbuf if isinstance(sendbuf, tuple) else recvbuf
            (op,) = (arg for arg in more if isinstance(arg, MPI.Op))
            assert hasattr(data, "__cuda_array_interface__")
            names = {op_name for op_name in ("SUM", "PROD", "MAX", "MIN") if getattr(MPI, op_name) == op}
            refused[name, datatype.typechar, names.pop()] += 1
            getattr(self.mpi, name)(sendbuf, recvbuf, *more)

    return reduce


for method in REDUCTIONS:
    setattr(Suited, method, _noting(method))


def expected() -> set[tuple[str, str, str]]:
    never = {
        (name, code, op) for name in REDUCTIONS for code in NEVER for op in ("SUM", "PROD", "MAX", "MIN")
    }
    # The suites leave out MAX and MIN of complex numbers.
    absent = {(name, "G", op) for name in REDUCTIONS for op in ("MAX", "MIN")}
    return never - absent | {(name, code, "PROD") for name in REDUCTIONS for code in ONLY_SUM}


def run(folder: str) -> dict[str, Any]:
    sys.path.insert(0, f"{folder}/test")
    # It cannot make arrays without a GPU; mpi4py's tests then go without.
    sys.modules["cupy"] = None  # type: ignore[assignment]
    world, alone = Suited(MPI.COMM_WORLD), Suited(MPI.COMM_SELF)
    other = types.ModuleType("mpi4py.MPI")
    other.__dict__.update(MPI.__dict__, COMM_WORLD=world, COMM_SELF=alone)
    mpi4py.MPI = sys.modules["mpi4py.MPI"] = other
    outcome: dict[str, Any] = {"ran": 0, "failures": {}, "skipped": []}
    for name in SUITES:
        tests = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(name))
        result = unittest.TestResult()
        tests.run(result)
        outcome["ran"] += result.testsRun
        outcome["failures"] |= {test.id(): text for test, text in result.failures + result.errors}
        outcome["skipped"] += [f"{test.id()}: {why}" for test, why in result.skipped]
    outcome["missing refusals"] = sorted(map(str, expected() - set(refused)))
    outcome["other refusals"] = sorted(map(str, set(refused) - expected()))
    alone.Free()
    world.Free()
    return outcome


if __name__ == "__main__":
    print("outcome", json.dumps(run(sys.argv[1])), flush=True)
