"""Direct reads of peers' memory: used where the kernel permits them, done without where it does not."""

from __future__ import annotations

import os
import sys

import pytest

from conftest import clean_environment
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom the kernel protects")
def test_shared_memory_where_the_kernel_forbids_reads() -> None:
    output = run_ranks(protect=True)
    assert output.count(", shared memory") == 3, output
