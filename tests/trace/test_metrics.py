"""pynccl.metrics and the NVTX ranges: what a program has called, and how long it has waited."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pynccl
from conftest import ROOT, Run
from pynccl.testing import run

Operations = dict[str, pynccl.OperationMetrics]
LATE = 0.5


def uses(rank: int, nranks: int) -> tuple[Operations, float]:
    comm = pynccl.init(timeout=20)
    x, wide = np.ones(1000, np.float32), np.empty(1000 * nranks, np.float32)
    begin = time.perf_counter()
    for _ in range(3):
        comm.all_reduce(x)
    for late in ("all_reduce", "group", "synchronize"):
        if rank == 1:
            time.sleep(LATE)
        if late == "all_reduce":
            comm.all_reduce(x)
        elif late == "group":
            with pynccl.group():
                comm.broadcast(x, root=0)
                comm.all_gather(x, wide)
        else:
            with pynccl.Stream() as stream:
                comm.reduce_scatter(wide, x, stream=stream)
                comm.synchronize(stream)
    plan = pynccl.Plan([comm.prepare.all_to_all(wide), comm.prepare.all_reduce(x)])
    plan()
    with pytest.raises(pynccl.NcclError):
        comm.all_reduce(x, stream=1 << 40)
    comm.barrier()
    seconds = time.perf_counter() - begin
    (found,) = pynccl.metrics()
    assert (found.rank, found.size, found.device) == (rank, nranks, comm.device)
    child = comm.split(0)
    assert [one.size for one in pynccl.metrics()] == [nranks, nranks]
    child.destroy()
    comm.destroy()
    assert pynccl.metrics() == []
    return found.operations, seconds


def test_metrics() -> None:
    for rank, (found, seconds) in enumerate(run(2, uses, backend="cpu")):
        counts = {name: (one.calls, one.bytes, one.failed) for name, one in found.items()}
        assert counts == {
            "all_reduce": (6, 24000, 1),
            "broadcast": (1, 4000, 0),
            "all_gather": (1, 4000, 0),
            "reduce_scatter": (1, 4000, 0),
            "all_to_all": (1, 4000, 0),
            "barrier": (1, 0, 0),
            "group": (2, 0, 0),
            "synchronize": (0, 0, 0),
        }
        waited = {name: one.wait_seconds for name, one in found.items()}
        assert sum(waited.values()) <= seconds
        if rank == 0:
            # Rank 1 came late to one call of each kind.
            assert all(waited[name] > 0.8 * LATE for name in ("all_reduce", "group", "synchronize")), waited
        assert waited["broadcast"] == waited["reduce_scatter"] == 0


def read_meanwhile(rank: int, nranks: int) -> int:
    comm, x, wrong, ended = pynccl.init(timeout=20), np.ones(4), list[object](), threading.Event()

    def read() -> None:
        last = 0
        while not ended.is_set():
            (found,) = pynccl.metrics()
            now = found.operations["all_reduce"].calls if found.operations else 0
            wrong.extend([now] if now < last else [])
            last = now

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        comm.all_reduce(x)
    ended.set()
    reader.join()
    assert not wrong
    return pynccl.metrics()[0].operations["all_reduce"].calls


def test_another_thread_reads_metrics() -> None:
    assert run(2, read_meanwhile, backend="cpu") == [2000, 2000]


# --- ranges -------------------------------------------------------------------------------------------------

RANGES = """
import numpy as np, pynccl
comm = pynccl.init()
x = np.ones(1000, np.float32)
comm.all_reduce(x)
try:
    comm.broadcast(x, root=7)
except ValueError:
    pass
comm.barrier()
# A prepared call has its range here; its runs, and split, have none.
plan = pynccl.Plan([comm.prepare.reduce(x)])
plan()
comm.split(0).destroy()
"""


def test_ranges(run_python: Run, tmp_path: Path) -> None:
    """A tool that NVTX itself loads gets the ranges."""
    tool = tmp_path / "tool.so"
    source = ROOT / "tests" / "helpers" / "nvtx_tool.c"
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", tool, source], check=True)
    done = run_python(RANGES, PYNCCL_LIBRARY="cpu", PYNCCL_NVTX="1", NVTX_INJECTION64_PATH=str(tool))
    assert done.stdout.splitlines() == [
        *("pynccl all_reduce 4000", "pynccl pop"),
        *("pynccl broadcast 4000", "pynccl pop"),
        *("pynccl barrier -1", "pynccl pop"),
        *("pynccl reduce 4000", "pynccl pop"),
    ], done.stderr


PROFILED = """
import torch, pynccl
from torch.profiler import profile
comm = pynccl.init()
x = torch.ones(1000)
with profile() as profiled:
    comm.all_reduce(x)
    comm.barrier()
print([event.name for event in profiled.events() if "pynccl" in event.name])
"""


@pytest.mark.slow
def test_ranges_of_torch(run_python: Run) -> None:
    done = run_python(PROFILED, PYNCCL_LIBRARY="cpu", PYNCCL_TORCH_PROFILER="1")
    assert done.stdout == "['pynccl:all_reduce', 'pynccl:barrier']\n"


@pytest.mark.parametrize("variable", ["PYNCCL_NVTX", "PYNCCL_TORCH_PROFILER"])
def test_bad_values(variable: str, run_python: Run) -> None:
    done = run_python("import pynccl; pynccl.init", fails=True, **{variable: "yes"})
    assert f"{variable} is 'yes'; expected 0 or 1" in done.stderr


@pytest.mark.parametrize(
    ("variable", "package"), [("PYNCCL_NVTX", "nvtx"), ("PYNCCL_TORCH_PROFILER", "torch")]
)
def test_without_the_package(variable: str, package: str, run_python: Run) -> None:
    code = f"import sys; sys.modules['{package}'] = None; import pynccl; pynccl.init"
    done = run_python(code, fails=True, **{variable: "1"})
    assert f"{variable}=1 needs the package {package}: pip install {package}" in done.stderr
