"""examples/weight_transfer.py: two processes that are started, killed and started again one by one."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ROOT, clean_environment
from processes import piped

SCRIPT = str(ROOT / "examples" / "weight_transfer.py")
STEP = re.compile(r"step (\d+): 15 tensors, \d+ bytes, checked")
Start = Callable[..., "Side"]


class Side:
    """A process of the example."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, SCRIPT, "--layers", "3", "--repeats", "2", "--patience", "30", *arguments]
        env = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = piped(command, env=env, stderr=subprocess.STDOUT)
        self.lines: list[str] = []

    def until(self, start: str) -> None:
        """Read until a line that starts so; the time limit of the test is the only one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(start):
                return
        raise AssertionError(f"it ended with {self.process.wait()} before {start!r}: {self.lines}")

    def end(self) -> list[str]:
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        assert self.process.wait() == 0, self.lines
        return self.lines

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Side:
            side = Side(*arguments)
            stack.callback(side.kill)
            return side

        yield start


def place(scheme: str, folder: Path) -> str:
    if scheme == "file":
        return f"file://{folder}/id"
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"{scheme}://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("scheme", "more"),
    [("file", []), ("tcp", []), ("http", []), pytest.param("tcp", ["--torch"], marks=pytest.mark.slow)],
)
def test_the_weights_arrive(scheme: str, more: list[str], start: Start, tmp_path: Path) -> None:
    options = ["--meet", place(scheme, tmp_path), "--width", "64", "--steps", "3", "--pause", "0", *more]
    inference, trainer = start("inference", *options), start("trainer", *options)
    assert [STEP.fullmatch(line)[1] for line in inference.end()[1:]] == ["1", "2", "3"]  # type: ignore[index]
    *sent, last = trainer.end()
    assert sent == ["joined", "step 1 sent", "step 2 sent", "step 3 sent"]
    assert re.fullmatch(
        r"15 tensors, \d+ bytes: \d+\.\d\d GB/s by pynccl, "
        r"\d+\.\d\d GB/s by a copy into shared memory and out of it",
        last,
    )


@pytest.mark.parametrize(
    ("victim", "scheme"), [("trainer", "tcp"), pytest.param("inference", "file", marks=pytest.mark.slow)]
)
def test_either_side_restarts_alone(victim: str, scheme: str, start: Start, tmp_path: Path) -> None:
    """Small buckets and no pause: the victim dies in the middle of a transfer, nearly always."""
    options = ["--meet", place(scheme, tmp_path), "--width", "256", "--steps", "60", "--pause", "0"]
    options += ["--bucket", "65536"]
    sides = {role: start(role, *options) for role in ("trainer", "inference")}
    sides["inference"].until("step 5: ")
    sides[victim].kill()
    survivor = sides["inference" if victim == "trainer" else "trainer"]
    survivor.until("lost the other process: RankFailedError")
    again = start(victim, *options)
    assert "joined" in again.end()
    lines = survivor.end()
    assert lines.count("joined") == 2
    assert lines[-1].startswith("step 60: " if victim == "trainer" else "15 tensors")


def test_other_options_are_no_death(start: Start, tmp_path: Path) -> None:
    where = ["--meet", place("file", tmp_path)]
    sides = start("trainer", *where, "--width", "64"), start("inference", *where, "--width", "128")
    for side in sides:
        side.until("joined")
        with pytest.raises(AssertionError, match=r"with 1 .*CollectiveMismatchError: .*'layer\.0\."):
            side.until("joined")


def test_nobody_comes(start: Start, tmp_path: Path) -> None:
    options = ["--meet", place("file", tmp_path), "--timeout", "0.3"]
    for role, says in (("trainer", "without an inference process"), ("inference", "without a trainer")):
        side = start(role, *options, "--patience", "0.5")
        with pytest.raises(AssertionError, match=f"it ended with 1 before .*0.5 s {says} at file:"):
            side.until("joined")
