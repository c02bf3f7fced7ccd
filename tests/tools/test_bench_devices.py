"""`pynccl bench` on devices, without any: over a libnccl that moves little and the fake CUDA driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import pynccl_command
from fake_nccl import Fake
from pynccl import testing

SIZE = ("-b", "64", "-e", "64", "-w", "0")


def measured(*args: str) -> str:
    """Run a program in this rank, and return what it wrote."""
    done = pynccl_command("bench", *args)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def uses_the_devices_of_its_ranks(rank: int, nranks: int) -> None:
    """Memory and streams are those of each rank's device, in every thread."""
    flags, devices = ((), [rank]) if nranks > 1 else (("-g", "2"), [0, 1])
    for more in (flags, ("-y", "1", *flags), () if nranks > 1 else ("-t", "2")):
        output = measured("all_reduce", *SIZE, "--iters", "2", *more)
        # What nobody moved is wrong.
        assert rank or re.search("# Out of bounds values : [1-9] FAILED", output), output
    made = [line for line in Fake().log() if line.startswith("MemAlloc 64 ")]
    assert sorted(made) == [f"MemAlloc 64 on device {device}" for device in devices for _ in range(6)]


@pytest.mark.parametrize("nranks", [1, 2])
def test_devices(fake_gpus: dict[str, str], tmp_path: Path, nranks: int) -> None:
    env = fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)}
    testing.run(nranks, uses_the_devices_of_its_ranks, env=env)
