"""Print how much of the Python and of the C and C++ code the tests below execute, and fail below the floors.

A copy of the sources in build/coverage is compiled for gcov and tested there. Its Python adds that copy, and
coverage.py, to the packages of the Python that runs this.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ROOT / "tools" / "coverage_floors.json"
FOLDER = ROOT / "build" / "coverage"
TREE, VENV = FOLDER / "tree", FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
# The compiled backend of torch, and the notes of its compiler.
CACHE = FOLDER / "cache"
# Counts of coverage.py, a file for each process; and what libgcov has to say, which would stand among the
# output that tests compare.
COUNTS = FOLDER / "counts"
ERRORS = COUNTS / "gcov.log"
NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.so.*", "forward")

# What reaches most in the least time.
TESTS = (
    "tests/library/test_capi.py",
    "tests/library/test_errors.py",
    "tests/library/test_cuda.py",
    "tests/communicator/test_operations.py",
    "tests/communicator/test_communicator.py",
    "tests/communicator/test_config.py",
    "tests/communicator/test_end.py",
    "tests/communicator/test_groups.py",
    "tests/communicator/test_split_and_grow.py",
    "tests/communicator/test_work.py",
    "tests/conformance/test_memory.py",
    "tests/conformance/test_streams.py",
    "tests/memory/test_empty.py",
    "tests/memory/test_registration.py",
    "tests/memory/test_window.py",
    "tests/trace/test_live.py",
    "tests/trace/test_trace.py",
    "tests/trace/test_timeline.py::test_the_clocks_of_hosts_are_aligned",
    "tests/watch/test_watchdog.py",
    "tests/watch/test_checks.py",
    "tests/interfaces/test_compat_cupy.py",
    "tests/interfaces/test_compat_cupyx.py",
    "tests/clients/test_compat_engines.py",
    "tests/transfer/test_transfer.py",
    "tests/interfaces/test_mpi.py::test_every_method_against_mpi4py[2]",
    "tests/interfaces/test_mpi.py::test_persistent_requests_and_windows_against_mpi4py[2]",
    "tests/store/test_store.py",
    "tests/init/test_init.py",
    "tests/tools/test_bench.py",
    "tests/tools/test_bench_devices.py",
    "tests/tools/test_doctor.py",
    "tests/tools/test_ras.py",
    "tests/tools/test_ras_server.py",
    "tests/tools/test_topology.py",
    "tests/torch_backend/test_torch.py",
    "tests/torch_backend/test_torch_groups.py",
    "tests/torch_backend/test_torch_timeouts.py",
)

COMPILERS = {"CC": "gcc", "CXX": "g++"}
# Stands before the compiler, so that its options come last: -O1 instead of the package's -O3. Each library
# also gets DUMP, and exports it.
COMPILE = f"""\
#!/bin/sh
case " $* " in *" -shared "*)
  set -- "$@" {FOLDER}/dump.o
  sed -i 's/^global:$/global: coverage_dump;/' {TREE}/build/native/exports.map ;;
esac
exec "$@" -O1 --coverage -fprofile-update=atomic -fprofile-abs-path
"""
# Most ranks of the tests end by os._exit, which would lose the counts of C and C++.
DUMP = """\
void __gcov_dump(void);
__attribute__((visibility("default"))) void coverage_dump(void) { __gcov_dump(); }
"""
AT_EXIT = f"""\
import ctypes, os

def dump_first(leave):
    def dump_and_leave(status):
        with open("/proc/self/maps") as maps:
            loaded = {{line.split()[-1] for line in maps if {str(FOLDER)!r} in line}}
        for path in sorted(loaded):
            if ".so" in path and hasattr(library := ctypes.CDLL(path), "coverage_dump"):
                library.coverage_dump()
        leave(status)
    return dump_and_leave

os._exit = dump_first(os._exit)
"""


def run(*command: str | Path, **env: str) -> None:
    print(shlex.join(map(str, command)), flush=True)
    if subprocess.run(command, cwd=TREE, env=environment(**env)).returncode:
        raise SystemExit(f"failed: {shlex.join(map(str, command))}")


def environment(**more: str) -> dict[str, str]:
    counts = {
        "COVERAGE_FILE": str(COUNTS / "data"),
        "GCOV_ERROR_FILE": str(ERRORS),
        "PYNCCL_CACHE": str(CACHE),
    }
    # mpi4py looks below the interpreter's prefix for libmpi, which is below that of this Python.
    return os.environ | counts | {"LD_LIBRARY_PATH": f"{sys.prefix}/lib"} | more


def copy_sources() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(*NOT_COPIED))


def make_environment() -> None:
    """Make a Python that has the copy, then the packages of this Python, which may have pynccl too."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
    (site,) = VENV.glob("lib/python*/site-packages")
    packages = sysconfig.get_path("purelib")
    (site / "dump_at_exit.py").write_text(AT_EXIT)
    (site / "coverage_of_pynccl.pth").write_text(
        f"{TREE}\nimport dump_at_exit\nimport site; site.addsitedir({packages!r})\n"
    )
    # Programs such as mpirun are looked for beside the interpreter.
    for program in Path(sys.executable).parent.iterdir():
        link = VENV / "bin" / program.name
        if not link.exists():
            link.symlink_to(program)


def build() -> None:
    setup = ["setup.py"] if (TREE / "setup.py").exists() else ["-c", "import setuptools; setuptools.setup()"]
    wrapper = FOLDER / "compile"
    wrapper.write_text(COMPILE)
    wrapper.chmod(0o755)
    (FOLDER / "dump.c").write_text(DUMP)
    subprocess.run([COMPILERS["CC"], "-fPIC", "-c", "dump.c"], cwd=FOLDER, check=True)
    compilers = {name: f"{wrapper} {os.environ.get(name, default)}" for name, default in COMPILERS.items()}
    run(PYTHON, *setup, "--quiet", "build_ext", "--inplace", **compilers)
    run(PYTHON, "-m", "pynccl.torch", "build", **compilers)


def compiled(suffix: str) -> list[Path]:
    """Return the files that the compiler's and the programs' gcov wrote."""
    return sorted(path for folder in (TREE / "build", CACHE) for path in folder.glob(f"**/*{suffix}"))


def let_all_users_count() -> None:
    """Let processes of other users, which some tests start, write their counts."""
    COUNTS.mkdir()
    # Not sticky: there, the kernel lets nobody open another user's file to write it (fs.protected_regular).
    COUNTS.chmod(0o777)
    for counts in [ERRORS, *(notes.with_suffix(".gcda") for notes in compiled(".gcno"))]:
        counts.touch()
        counts.chmod(0o666)


def test() -> None:
    options = ["-n", "2", "--dist", "loadfile", "-q", "-m", "not gpu and not full and not slow"]
    run(PYTHON, "-m", "coverage", "run", "-m", "pytest", *options, *TESTS)
    drop_empty_counts()


def drop_empty_counts() -> None:
    """Remove what no process wrote: gcov refuses an empty file, and takes none for lines never executed."""
    for counts in compiled(".gcda"):
        if not counts.stat().st_size:
            counts.unlink()


def python_share() -> float:
    run(PYTHON, "-m", "coverage", "combine", "--quiet")
    report = FOLDER / "python.json"
    run(PYTHON, "-m", "coverage", "json", "--quiet", "-o", report)
    run(PYTHON, "-m", "coverage", "report", "--skip-covered", "--sort=cover")
    return float(json.loads(report.read_text())["totals"]["percent_covered"])


def gcov(notes: Path) -> list[dict[str, Any]]:
    """Return the files of one object: their lines, and how often each was executed."""
    command = [os.environ.get("GCOV", "gcov"), "--json-format", "--stdout", str(notes)]
    done = subprocess.run(command, cwd=notes.parent, capture_output=True, check=True)
    files: list[dict[str, Any]] = json.loads(done.stdout)["files"]
    return files


def executed() -> Iterator[tuple[Path, Counter[int]]]:
    """Yield each source of the copy, with its lines; a header's are those of all objects together."""
    sources: dict[Path, Counter[int]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for files in pool.map(gcov, compiled(".gcno")):
            for file in files:
                lines = sources.setdefault(Path(file["file"]), Counter())
                for line in file["lines"]:
                    lines[line["line_number"]] += line["count"]
    yield from sorted(sources.items())


def native_shares() -> dict[str, float]:
    """Return the shares of the folders with C and C++ code, and print those of their files."""
    lines, hit = Counter[str](), Counter[str]()
    for source, counts in executed():
        if not counts or not source.is_relative_to(TREE / "pynccl"):
            continue
        part = source.relative_to(TREE / "pynccl").parts[0]
        reached = sum(count > 0 for count in counts.values())
        lines[part] += len(counts)
        hit[part] += reached
        share = reached / len(counts)
        print(f"{source.relative_to(TREE)!s:45} {len(counts):6} {len(counts) - reached:6} {share:7.0%}")
    return {part: 100 * hit[part] / lines[part] for part in lines}


def main() -> int:
    start = time.monotonic()
    copy_sources()
    make_environment()
    build()
    let_all_users_count()
    print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    test()
    print(ERRORS.read_text(), end="")
    shares = native_shares() | {"python": python_share()}
    floors = json.loads(FLOORS.read_text())
    fallen = [part for part, floor in floors.items() if shares[part] < floor]
    for part, floor in floors.items():
        fell = "  FELL" if part in fallen else ""
        print(f"{part}: {shares[part]:.1f} % of the lines; at least {floor} % are due{fell}")
    print(f"in {time.monotonic() - start:.0f} s")
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
