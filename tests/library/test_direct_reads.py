"""Direct reads of peers' memory: used where the kernel permits them, done without where it does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import clean_environment
from launchers import PYNCCL_RUN
from processes import completed

RANKS = """
import ctypes, os, sys
import numpy as np
from pynccl import capi
nranks, protect = int(sys.argv[1]), sys.argv[2] == "protect"
uid = capi.ncclGetUniqueId()
children = []
for rank in range(nranks):
    pid = os.fork()
    if pid == 0:
        break
    children.append(pid)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
libc = ctypes.CDLL(None)
if protect:
    os.setgid(65534)
    os.setuid(65534)
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
comm = capi.ncclCommInitRank(nranks, uid, rank)
for count in (5, 1_000_000):
    x = np.full(count, rank + 1, np.float64)
    y = np.zeros_like(x)
    capi.ncclAllReduce(x.ctypes.data, y.ctypes.data, count, 8, 0, comm, 0)
    capi.pyncclCpuStreamSynchronize(comm, 0, -1)
    assert (y == nranks * (nranks + 1) / 2).all()
assert not protect or libc.prctl(3, 0, 0, 0, 0) == 0, "still protected"
capi.ncclCommDestroy(comm)
os._exit(0)
"""


def run_ranks(protect: bool) -> str:
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "NCCL_DEBUG": "INFO"}
    command = [sys.executable, "-c", RANKS, "3", "protect" if protect else "open"]
    done = completed(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def yama() -> int:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


@pytest.mark.skipif(yama() > 0 and os.geteuid() != 0, reason="Yama forbids reads between siblings here")
def test_direct_where_permitted() -> None:
    assert run_ranks(protect=False).count("direct reads") == 3


# Records the requests of PR_SET_PTRACER, which this kernel may not know.
PRCTL = r"""
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int prctl(int option, ...) {
  va_list given;
  va_start(given, option);
  unsigned long a = va_arg(given, unsigned long), b = va_arg(given, unsigned long);
  unsigned long c = va_arg(given, unsigned long), d = va_arg(given, unsigned long);
  va_end(given);
  if (option == PR_SET_PTRACER) {
    FILE *file = fopen(getenv("REQUESTS"), "a");
    fprintf(file, "%ld %ld\n", (long)a, (long)getppid());
    fclose(file);
    return 0;
  }
  return (int)syscall(SYS_prctl, option, a, b, c, d);
}
"""


@pytest.mark.parametrize("how", ["run --direct", "parent", "pid", "unasked", "no direct reads"])
def test_yama_is_asked_for_the_launchers_processes(
    how: str, tmp_path: Path, compile_library: Callable[..., str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import pynccl\nwith pynccl.init() as comm:\n    comm.barrier()\n")
    requests = tmp_path / "requests"
    requests.touch()
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "REQUESTS": str(requests)}
    environment["LD_PRELOAD"] = compile_library(PRCTL)
    if how in ("parent", "pid"):
        environment["PYNCCL_CPU_PTRACER"] = "-1" if how == "parent" else str(os.getpid())
    if how == "no direct reads":
        environment["PYNCCL_CPU_DIRECT"] = "0"
    options = ["--direct"] if how in ("run --direct", "no direct reads") else []
    command = [*PYNCCL_RUN, "-n", "2", *options, str(program)]
    done = completed(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [tuple(map(int, line.split())) for line in requests.read_text().splitlines()]
    if how in ("unasked", "no direct reads"):
        assert not asked
    else:
        assert len(asked) == 2
        assert all(pid == (os.getpid() if how == "pid" else parent) for pid, parent in asked)


def test_what_yama_is_asked_is_checked() -> None:
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYNCCL_CPU_PTRACER": "-2"}
    done = completed([sys.executable, "-c", "import pynccl; pynccl.init_all([0])"], env=environment)
    assert "PYNCCL_CPU_PTRACER" in done.stderr
    assert "-2" in done.stderr


@pytest.mark.skipif(
    yama() != 1 or os.geteuid() == 0, reason="Yama does not forbid reads between siblings here"
)
def test_direct_under_yama(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import pynccl\nwith pynccl.init() as comm:\n    comm.barrier()\n")
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "NCCL_DEBUG": "INFO"}
    command = [*PYNCCL_RUN, "-n", "2"]
    for options, expected in ([], 0), (["--direct"], 2):
        done = completed([*command, *options, str(program)], env=environment)
        assert (done.stdout + done.stderr).count("direct reads") == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom the kernel protects")
def test_shared_memory_where_the_kernel_forbids_reads() -> None:
    output = run_ranks(protect=True)
    assert output.count(", shared memory") == 3, output
