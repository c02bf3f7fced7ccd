"""The examples in processes of their own, as a user runs them."""

from __future__ import annotations

import os
import subprocess

from conftest import ROOT
from launchers import PYNCCL_RUN
from processes import completed

EXAMPLES = ROOT / "examples"


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    outside = ("PYNCCL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    return completed(command, env=clean | env, timeout=55)


def launch(nranks: int, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    pynccl_run = [*PYNCCL_RUN, "-n", str(nranks), "--cpu"]
    return run(*pynccl_run, str(EXAMPLES / script), *args)
