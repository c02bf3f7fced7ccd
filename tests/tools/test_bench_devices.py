"""`pynccl bench` on devices, without any: over a libnccl that moves little and the fake CUDA driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import pynccl_command
from fake_nccl import Fake
from pynccl import testing

Case = Callable[[int, int], None]

SIZE = ("-b", "64", "-e", "64", "-w", "0")


def measured(*args: str) -> str:
    """Run a program in this rank, and return what it wrote."""
    done = pynccl_command("bench", *args)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def reports_memory(rank: int, nranks: int) -> None:
    """3 MiB for a communicator, two buffers, and nothing that is kept of the measurements."""
    for flags in ((), ("-g", "2")):
        output = measured(
            "all_reduce", "-b", "64K", "-e", "64K", "--iters", "2", "-c", "0", "-M", "1", *flags
        )
        assert (
            "# GPU memory usage     : Initialization 3.00 MB | User-Allocated 128 KB | Collective 0.00 B "
            "| Total  3.12 MB\n" in output
        )
    assert Fake().log().count("destroy") == 2 + 3


def uses_the_devices_of_its_ranks(rank: int, nranks: int) -> None:
    """Memory and streams are those of each rank's device, in every thread."""
    flags, devices = ((), [rank]) if nranks > 1 else (("-g", "2"), [0, 1])
    for more in (flags, ("-y", "1", *flags), () if nranks > 1 else ("-t", "2")):
        output = measured("all_reduce", *SIZE, "--iters", "2", *more)
        # What nobody moved is wrong.
        assert rank or re.search("# Out of bounds values : [1-9] FAILED", output), output
    made = [line for line in Fake().log() if line.startswith("MemAlloc 64 ")]
    assert sorted(made) == [f"MemAlloc 64 on device {device}" for device in devices for _ in range(6)]


CASES = [reports_memory, uses_the_devices_of_its_ranks]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_fake_driver(fake_gpus: dict[str, str], tmp_path: Path, case: Case) -> None:
    testing.run(1, case, env=fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)})


def test_two_ranks(fake_gpus: dict[str, str], tmp_path: Path) -> None:
    env = fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)}
    testing.run(2, uses_the_devices_of_its_ranks, env=env)
