"""CuPy's own tests of cupy.cuda.nccl and cupyx.distributed, as released.

They run over the CPU library by CuPy's binding, and over pynccl.compat. What they import of CUDA is
host_cuda.py's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from clients_page import rows
from conftest import ROOT
from engines import BIN, environment
from processes import completed
from pynccl import cpu_library
from released_files import sources

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.network,
    pytest.mark.slow,
]

NCCL = "cupy_tests/cuda_tests/test_nccl.py"
DISTRIBUTED = "cupyx_tests/distributed_tests"
COMM = f"{DISTRIBUTED}/test_comm.py"
# The others beside test_comm.py, and why they do not run.
EXCLUDED = {
    "test_array_nccl.py": "kernels, events and streams of CUDA, and copies between devices",
    "test_linalg.py": "the same",
    "test_array_no_nccl.py": "calls no NCCL",
    "test_index_arith.py": "calls no NCCL",
    "test_store.py": "calls no NCCL",
}
# cupyx.distributed reads the sizes before it ends the group that receives them. With CUDA they are right by
# chance: CuPy's pool gives the memory in which this rank's own were, and both matrices are the same.
ITS_GROUP = "TestNCCLBackendSparse::test_send_recv"
# How many tests are in the file of the binding, and in that of cupyx.distributed; what each way leaves out.
OF_THE_BINDING, OF_CUPYX = 15, 46
BINDING_WAYS = ["cupy", "compat.cupy"]
CUPYX_WAYS: dict[str, list[str]] = {"cupy": [ITS_GROUP], "compat.cupy": [ITS_GROUP], "compat.cupyx": []}
SITE = "import host_cuda\nhost_cuda.install({way!r})\n"


@pytest.fixture(scope="module")
def theirs() -> Path:
    return sources(f"cupy=={version('cupy-cuda12x')}") / "tests"


def suite(file: Path, way: str, folder: Path, timeout: float, *excluded: str) -> int:
    """Run a file of tests one of host_cuda.WAYS; return how many have passed, when no other outcome was."""
    (folder / "sitecustomize.py").write_text(SITE.format(way=way))
    paths = [str(folder), str(ROOT / "tests" / "helpers"), str(ROOT)]
    env = environment(
        PYTHONPATH=os.pathsep.join(paths),
        PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
        HOST_CUDA_DEVICES="4",
        PYNCCL_CPU_BLOCKING="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    if way == "cupy":
        env["LD_PRELOAD"] = str(Path(cpu_library()).parent / "forward" / "libnccl.so.2")
    else:
        # A process for each dtype takes minutes; which calls there are does not depend on it.
        env["HOST_CUDA_DTYPES"] = "fD"
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(file.parent)]
    options += [f"--deselect={file.name}::{test}" for test in excluded]
    command = [sys.executable, "-m", "pytest", *options, file.name]
    done = completed(command, env=env, cwd=file.parent, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}
    assert counts.pop("deselected", 0) == len(excluded), last
    counts.pop("warnings", None)
    assert counts.keys() == {"passed"}, last
    return counts["passed"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("way", BINDING_WAYS)
def test_of_the_binding(way: str, theirs: Path, tmp_path: Path) -> None:
    assert suite(theirs / NCCL, way, tmp_path, 140) == OF_THE_BINDING


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("way", "excluded"), CUPYX_WAYS.items())
def test_of_cupyx_distributed(way: str, excluded: list[str], theirs: Path, tmp_path: Path) -> None:
    assert suite(theirs / COMM, way, tmp_path, 1400, *excluded) == OF_CUPYX - len(excluded)


def test_every_file_is_run_or_excluded(theirs: Path) -> None:
    assert {file.name for file in (theirs / DISTRIBUTED).glob("test_*.py")} == {*EXCLUDED, "test_comm.py"}


def test_the_page() -> None:
    found = rows(0, f"CuPy {version('cupy-cuda12x')}")
    binding, distributed = found[: len(BINDING_WAYS)], found[len(BINDING_WAYS) : -2]
    for way, (file, over, passed, excluded) in zip(BINDING_WAYS, binding, strict=True):
        assert (file, excluded) == (NCCL, "") and ("preloaded" if way == "cupy" else f"pynccl.{way}") in over
        assert passed == f"{OF_THE_BINDING} of {OF_THE_BINDING}"
    for (way, left_out), (file, over, passed, excluded) in zip(CUPYX_WAYS.items(), distributed, strict=True):
        assert file.startswith(COMM) and ("preloaded" if way == "cupy" else f"pynccl.{way}") in over
        assert passed == f"{OF_CUPYX - len(left_out)} of {OF_CUPYX}"
        assert excluded in ([f"{ITS_GROUP} (1)", "the same (1)"] if left_out else [""])
    said = {name: why for files, _, passed, why in found[-2:] for name in files.split(", ")}
    assert {passed for _, _, passed, _ in found[-2:]} == {"not run"}
    assert said.keys() == EXCLUDED.keys()
    assert {name for name, why in said.items() if why == "call no NCCL"} == {
        name for name, why in EXCLUDED.items() if why == "calls no NCCL"
    }
    # No client is without such a test.
    assert {cells[0].split()[0] for cells in rows(0, "")} == {"CuPy", "nccl4py", "mpi4py"}
