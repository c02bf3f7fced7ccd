"""The command of `pynccl run`, what launchers leave in the environment, and what pynccl logs about it."""

from __future__ import annotations

import logging
import os
import sys

PYNCCL_RUN = (sys.executable, "-m", "pynccl", "run")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "PALS_", "MPI_", "PYNCCL_S")


def clean_environment() -> dict[str, str]:
    """Return the environment without what changes which library is used or how it behaves."""
    foreign = ("NCCL_", "PYNCCL_", "CONDA_PREFIX", "LD_PRELOAD", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def without_launchers() -> dict[str, str]:
    """Return a clean environment without what launchers set."""
    outside = (*LAUNCHERS, "TORCHELASTIC_")
    return {name: value for name, value in clean_environment().items() if not name.startswith(outside)}


def environment(**more: str) -> dict[str, str]:
    """Return an environment of the CPU library without launchers, in which root may call mpirun."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return without_launchers() | root | {"PYNCCL_LIBRARY": "cpu", "OMP_NUM_THREADS": "1"} | more


def forget_the_launcher() -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def logged() -> list[str]:
    handler = Lines()
    logging.getLogger("pynccl").addHandler(handler)
    logging.getLogger("pynccl").setLevel(logging.INFO)
    return handler.lines
