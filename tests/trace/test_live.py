"""`pynccl trace --live`: the ranks of a job are asked while it runs, and go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import clean_environment
from launchers import PYNCCL_RUN
from meeting import free_port, state, until
from processes import completed
from terminals import RED, YELLOW, in_terminal

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import os
import numpy as np
import pynccl

with pynccl.init() as comm:
    for _ in range(5):
        comm.all_reduce(np.ones(4))
    os.write(1, f"{comm.rank} {os.getpid()}\\n".encode())
    if comm.rank == 2:
        os.read(os.open("go", os.O_RDONLY), 1)
    comm.all_reduce(np.ones(4))
"""
LINE = PROGRAM.splitlines().index("    comm.all_reduce(np.ones(4))") + 1
LIVE = [sys.executable, "-m", "pynccl", "trace", "--live"]


def live(*args: str) -> subprocess.CompletedProcess[str]:
    return completed([*LIVE, *args], env=clean_environment(), timeout=40)


@contextmanager
def job(folder: Path, **env: str) -> Iterator[list[int]]:
    """Run three ranks, of which the last waits for a word before the others' last call; yield their pids."""
    (folder / "program.py").write_text(PROGRAM)
    os.mkfifo(folder / "go")
    process = subprocess.Popen(
        [*PYNCCL_RUN, "-n", "3", "--cpu", "--no-tag", "program.py"],
        env=clean_environment() | {"PYNCCL_TRACE_SIGNAL": "USR2", "PYNCCL_TRACE_STACKS": "1"} | env,
        cwd=folder, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        pids = dict(process.stdout.readline().split() for _ in range(3))
        yield [int(pids[str(rank)]) for rank in range(3)]
        (folder / "go").write_text("!")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_who_is_behind_and_who_gives_no_dump(tmp_path: Path) -> None:
    """In the recorder's words and in RAS's; what does not listen, such as the launcher, is not signalled."""
    traces, address = tmp_path / "traces", f"127.0.0.1:{free_port()}"
    variables = {"PYNCCL_TRACE_DIR": str(traces), "NCCL_RAS_ADDR": address}
    with job(tmp_path, **variables) as pids:
        deaf = subprocess.Popen(["sleep", "60"], env=os.environ | variables | {"PYNCCL_TRACE_SIGNAL": "USR2"})
        place = f"{tmp_path}/program.py:{LINE}"
        behind = f"ranks 0 and 1 wait in all_reduce #6 (float64, 4) at {place}; rank 2 never reached #6"
        until(lambda: behind in live("--address", address, str(traces)).stdout, 20)
        done = live("--address", address, str(traces))
        assert done.returncode == 0, done.stderr
        (name,) = re.findall(r"^communicator (\w+) of 3 ranks$", done.stdout, re.M)
        assert re.search(rf"^communicator 0x\w+ \({name}\), 3 ranks: RUNNING MISMATCH$", done.stdout, re.M)
        assert f"rank 2 has launched 5 of 6 AllReduce operations (process {pids[2]}" in done.stdout
        assert "did not answer" not in done.stdout
        command = [*LIVE, "--address", address, str(traces)]
        shown, _ = in_terminal(command, clean_environment())
        red, yellow = ("".join(line for line in shown if line.startswith(one)) for one in (RED, YELLOW))
        assert behind in red and "RUNNING MISMATCH" in red
        assert "rank 2 has launched 5 of 6" in yellow

        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: state(pids[1]) == "T")
        done = live("--address", address, "--timeout", "2", str(traces))
        os.kill(pids[1], signal.SIGCONT)
        assert f"process {pids[1]} (rank 1) is stopped" in done.stdout
        assert "rank 1 gave no dump; all ranks have completed #5" in done.stdout
        assert deaf.poll() is None
        deaf.kill()
        deaf.wait()


def test_a_rank_that_does_not_listen(tmp_path: Path) -> None:
    traces, address = str(tmp_path / "traces"), f"127.0.0.1:{free_port()}"
    with job(tmp_path, PYNCCL_TRACE_DIR=traces, PYNCCL_TRACE_SIGNAL="") as pids:
        done = live("--address", address, traces)
        assert done.returncode == 1
        for rank, pid in enumerate(pids):
            assert (
                f"process {pid} (rank {rank}) does not listen: it has no PYNCCL_TRACE_SIGNAL" in done.stderr
            )


def test_nothing_to_ask(tmp_path: Path) -> None:
    done = live("--address", f"127.0.0.1:{free_port()}", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "no process of yours listens here: start the ranks with PYNCCL_TRACE_SIGNAL=USR2" in done.stderr
    assert "No RAS server answers" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "expected dumps, folders of dumps, or --live"),
        (["--address", "localhost:1", "traces"], "--address localhost:1: expected --live, too"),
        (["--timeout", "3", "traces"], "--timeout 3: expected --live, too"),
        (["--html", "", "traces"], "'--html': expected the name of a file, not ''"),
        (["--chrome", "", "traces"], "'--chrome': expected the name of a file, not ''"),
        (["--html", "x", "--chrome", "./x", "traces"], "are both x; expected different files"),
        (["--live", "--address", "nowhere"], "nowhere"),
        (["--live", "--timeout", "0"], "0"),
        (["--live", "--timeout", "nan"], "nan is not in the range 0<x<=86400"),
    ],
)
def test_wrong_command_lines(args: list[str], words: str) -> None:
    command = [sys.executable, "-m", "pynccl", "trace", *args]
    done = completed(command, env=clean_environment(), timeout=40)
    assert done.returncode == 2
    assert words in done.stderr
