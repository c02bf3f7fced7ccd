"""pynccl.mpi: the mpi4py-shaped communicator, under mpirun, with mpi4py as the oracle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = Path(sys.executable).with_name("mpirun")
PROGRAM = Path(__file__).with_name("mpi_program.py")


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_every_method_against_mpi4py(nranks: int) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYNCCL_", "RANK", "WORLD_"))
    }
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYNCCL_LIBRARY": "cpu"}
    command = [str(MPIRUN), "--oversubscribe", "-n", str(nranks), sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"fine (\d)", done.stdout)) == [str(rank) for rank in range(nranks)]
