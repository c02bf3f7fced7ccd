"""The command of `pynccl run`, what launchers leave in the environment, and what pynccl logs about it."""

from __future__ import annotations

import logging
import os
import sys

PYNCCL_RUN = (sys.executable, "-m", "pynccl", "run")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "PALS_", "MPI_", "PYNCCL_S")


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
