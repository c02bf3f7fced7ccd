"""The launchers that tests start ranks by, and an environment in which none of them is at work already."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import clean_environment
from test_init_environment import LAUNCHERS

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]

Command = list[str]


def environment(**more: str) -> dict[str, str]:
    """Return an environment without launchers, in which mpirun may be called by root and Ray is quiet."""
    clean = {n: v for n, v in clean_environment().items() if not n.startswith((*LAUNCHERS, "TORCHELASTIC_"))}
    return (
        clean
        | {
            "PYNCCL_LIBRARY": "cpu",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        | more
    )


def open_mpi(nranks: int) -> Command:
    return [str(BIN / "mpirun"), "--oversubscribe", "-n", str(nranks)]


def torchrun(nranks: int, *more: str) -> Command:
    options = ["--nproc-per-node", str(nranks), "--standalone", *more]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def pynccl_run(nranks: int) -> Command:
    return [sys.executable, "-m", "pynccl", "run", "-n", str(nranks), "--cpu"]
