"""The launchers that tests start ranks by, and an environment in which none of them is at work already."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import launchers
from launchers import PYNCCL_RUN
from processes import completed, piped

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]

Command = list[str]

# How often the programs below run in `make test-full`, and the time that all the runs of one test have.
RUNS = int(os.environ.get("TEST_ENDS_RUNS", "200"))
_RUN_SECONDS = 120
MOST_SECONDS = RUNS * _RUN_SECONDS + 600


# A program that returns without destroy, however far the other ranks are: no rank may notice.
RETURNS = """
import sys, numpy as np, pynccl
how = sys.argv[1]
comm = pynccl.init(timeout=30 if how == "timeout" else None)
x = np.full(100_000, comm.rank + 1.0)
if how == "stream":
    stream = pynccl.Stream()
    for _ in range(20):
        comm.all_reduce(x, stream=stream)
elif how == "split":
    child = comm.split(comm.rank % 2)
    child.all_reduce(x)
else:
    comm.all_reduce(x)
    assert (x == sum(range(1, comm.size + 1))).all()
if how == "messages":
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with pynccl.group():
        comm.send(x, right)
        comm.recv(np.zeros_like(x), left)
if how == "broadcast":
    for count in (1, 500, 100_000):
        comm.broadcast(x[:count], root=0)
if how == "collected":
    del comm
if how == "barrier":
    comm.barrier()
if how == "exit in with":
    x = np.ones(1 << 20)
    with comm:
        for _ in range(20):
            comm.all_reduce(x, op="avg")
        comm.broadcast(x, root=0)
        print("right", flush=True)
        sys.exit()
print("right", flush=True)
if how == "exit":
    sys.exit(0)
"""


def end_well(command: Command, nranks: int, runs: int, **env: str) -> None:
    """Run a program that says "right" on each rank; none fails, and none prints anything else."""
    for run in range(runs):
        done = completed(command, timeout=_RUN_SECONDS, env=environment(**env))
        assert done.returncode == 0, f"run {run}: {done.stderr}"
        assert done.stdout.count("right") == nranks, f"run {run}: {done.stdout}"
        assert done.stderr == "", f"run {run}"


def environment(**more: str) -> dict[str, str]:
    """Return an environment without launchers, in which Gloo finds an interface and Ray is quiet."""
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return launchers.environment(PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo") | ray | more


def outputs(commands: Sequence[tuple[Command, dict[str, str]]]) -> list[str]:
    """Run command lines at once, each in its environment; return what they print, when all have succeeded."""
    processes = [piped(command, env=env) for command, env in commands]
    try:
        done = [process.communicate(timeout=50) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), done
    return [out for out, _ in done]


def open_mpi(nranks: int) -> Command:
    return [str(BIN / "mpirun"), "--oversubscribe", "-n", str(nranks)]


def torchrun(nranks: int, *more: str) -> Command:
    options = ["--nproc-per-node", str(nranks), "--standalone", *more]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def pynccl_run(nranks: int) -> Command:
    return [*PYNCCL_RUN, "-n", str(nranks), "--cpu"]


def mpirun(nranks: int, *args: str, timeout: float, **variables: str) -> str:
    """Run a command line of Python on the ranks of Open MPI, and return what it prints."""
    command = [*open_mpi(nranks), sys.executable, *args]
    env = environment(**variables)
    done = completed(command, env=env, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
