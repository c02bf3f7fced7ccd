"""Facts that stand in one file of the package, from which the others take them."""

from __future__ import annotations

import ast
import re
import shlex
import sys

import pytest

from conftest import ROOT
from processes import completed
from pynccl import capi
from pynccl._run import launch

PACKAGE = ROOT / "pynccl"
# A text, and the file that has it.
ONCE = {
    '"float16"': "cpu/base/generated.inc",
    '"float8_e4m3fn"': "cpu/base/generated.inc",
    '"NCCL_DEBUG_SUBSYS"': "bootstrap/_variables.py",
    '"sys/bus/pci/devices"': "_tools/machine.py",
    "signal.SIGHUP, signal.SIGQUIT)": "_run/launch.py",
    "another package named pynccl is installed": "_base/installation.py",
    "since NCCL reports no status": "mpi/_requests.py",
    "FAST_RANKS = 64": "native/watch.h",
    "SLICE_MS = 100": "native/comm.h",
    "CU_STREAM_NON_BLOCKING = 1": "api/cuda_api.h",
}


@pytest.mark.parametrize("fact", ONCE)
def test_a_fact_stands_once(fact: str) -> None:
    kinds = (
        (".cpp", ".hpp", ".inc", ".c", ".h")
        if ONCE[fact].startswith(("api/", "cpu/", "native/"))
        else (".py",)
    )
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in kinds]
    code = {path: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in files}
    found = {path.relative_to(PACKAGE).as_posix() for path, text in code.items() if fact in text}
    assert found == {ONCE[fact]}


def test_docstrings_name_the_versions_of_the_table() -> None:
    """Every "(ncclX, NCCL >= v)" of the package is in capi.FUNCTIONS, as far as v has numbers."""
    said = []
    for path in PACKAGE.rglob("*.py"):
        text = " ".join(path.read_text(encoding="utf-8").split())
        said += re.findall(r"\((nccl[A-Z]\w+), NCCL >= ([\d.]*\d)", text)
    assert len(said) > 8
    wrong = {name: version for name, version in said if not begins(capi.FUNCTIONS[name], version)}
    assert not wrong


def begins(since: tuple[int, int, int], version: str) -> bool:
    """Tell whether a text is this version, or the minor version whose first release in the table it is."""
    first = min(other for other in capi.FUNCTIONS.values() if other[:2] == since[:2])
    whole = ".".join(map(str, since))
    return version == whole or (since == first and version == whole.rpartition(".")[0])


def test_versions_of_nccl_stand_in_tables() -> None:
    """No C or C++ source compares or names an NCCL version outside of a generated file or a table."""
    found = []
    for path in sorted(PACKAGE.rglob("*.[chi]*")):
        if path.suffix not in (".c", ".h", ".cpp", ".hpp") or path.parent.name == "api":
            continue
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        own = [] if path.name in GENERATED else re.findall(r'NCCL 2\.\d[^"]*"|"2\.\d+\.\d+"', text)
        found += [f"{path.name}: {one}" for one in own + re.findall(r"version >=? 2\d{4}", text)]
    assert not found


GENERATED = ("since.hpp", "nccl.h")


def test_python_compares_no_version_of_nccl() -> None:
    """Features ask the generated tables; the loader only has the two forms of ncclGetVersion's code."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            found += [path.name for side in sides if is_version(side)]
    assert found == ["loader.py"]


def is_version(node: ast.expr) -> bool:
    """Tell whether an expression is a literal such as 22803 or (2, 28, 3)."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return False
    numbers = value if isinstance(value, tuple) else (value,)
    if len(numbers) == 1:
        return isinstance(numbers[0], int) and 20000 <= numbers[0] < 40000
    return numbers[:1] == (2,) and all(isinstance(number, int) for number in numbers)


def test_the_oldest_nccl_is_the_same_everywhere() -> None:
    patterns = {
        "README.md": r"^\| NCCL \| ([\d.]+) to ",
        "CHANGELOG.md": r"with any libnccl from ([\d.]+) on",
        "docs/architecture.md": r"NVIDIA's libnccl, ([\d.]+) to ",
        "docs/figures/rooms.svg": r"NVIDIA's NCCL, ([\d.]+) to ",
    }
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in patterns}
    found = {name: re.findall(pattern, texts[name], re.M) for name, pattern in patterns.items()}
    assert len({tuple(versions) for versions in found.values()}) == 1, found
    assert all(found.values())


def test_a_host_has_as_many_ranks_for_the_launcher_as_for_the_library() -> None:
    wire = (PACKAGE / "cpu/service/wire.hpp").read_text(encoding="utf-8")
    assert re.findall(r"kMostLocalRanks = (\d+);", wire) == [str(launch.MOST_RANKS)]


def test_test_full_runs_the_complete_matrix() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ((options,),) = [re.findall(r"(?m)^test-full:.*\n\t\S+/python -m pytest (.*)$", makefile)]
    command = [sys.executable, "-m", "pytest", *shlex.split(options), "--collect-only", "-q"]
    done = completed([*command, "tests/conformance/test_matrix.py"], cwd=ROOT, timeout=50)
    assert done.stdout.count("::test_complete[") > 20
