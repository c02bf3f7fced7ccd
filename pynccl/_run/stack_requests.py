"""Traces and Python stacks of ranks that hang, at the launcher's request.

`pynccl run` names a folder in PYNCCL_STACKS_DIR. A process that imports pynccl creates a file there, with its
process id as the name and the signal of the request as the first line. On this signal the process dumps its
traces, if PYNCCL_TRACE_DIR is set, and appends the stacks of its threads and the line "end". The handler is
native: it runs inside C code, with or without the GIL. A process without a file never gets the signal.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pynccl._comm import lifetime
from pynccl._library.binding import lib

FOLDER = "PYNCCL_STACKS_DIR"
_REASON = b"asked by pynccl run before it ended the ranks"
_END = b"\nend\n"
_LEFT = b"left at "
_MOST_BYTES = 1 << 20
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
# A thread that waits for the exit (_comm/lifetime.py).
_IDLE = re.compile(
    r".*\n"
    r"(?:  File \".*/threading\.py\", line \d+ in wait\n)+"
    r"  File \".*/pynccl/_comm/lifetime\.py\", line \d+ in _work\n"
    r"(?:  File \".*/threading\.py\", line \d+ in \w+\n?)*"
)


# --- the rank's side ----------------------------------------------------------------------------------------


def listen() -> None:
    """Let the launcher request traces and stacks of this process; do nothing without PYNCCL_STACKS_DIR."""
    folder = os.environ.get(FOLDER)
    # The launcher may have ended; a process can run without answering requests.
    with suppress(OSError, RuntimeError, StopIteration):
        if folder:
            _listen(Path(folder))


def _listen(folder: Path) -> None:
    taken = _handled(os.getpid())
    number = next(n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if not taken >> (n - 1) & 1)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(folder / str(os.getpid()), flags, 0o600)
    faulthandler.register(number, file=fd, all_threads=True)
    error = lib.pynccl_trace_on_signal(number, b"launcher", _REASON, fd)
    if error:
        raise OSError(error, os.strerror(error))
    # From here on the launcher can send requests.
    os.write(fd, b"%d\n" % number)
    lifetime.when_leaving(partial(_tell_leaving, fd))


def _tell_leaving(fd: int) -> None:
    # The program may have closed its descriptors, or reached its limit of file sizes: it leaves all the same.
    with suppress(OSError):
        os.write(fd, _LEFT + b"%d\n" % time.monotonic_ns())


def _handled(pid: int) -> int:
    """Return the signals that a process ignores or has handlers for, as a mask."""
    return sum(int(status_of(pid, name), 16) for name in ("SigIgn", "SigCgt"))


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return not status_of(pid, "State").startswith("Z")
    return False


def status_of(pid: int, name: str) -> str:
    """Return a field of a process's status."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    raise OSError(f"no {name} in /proc/{pid}/status")


# --- stacks -------------------------------------------------------------------------------------------------


def in_order(text: str) -> str:
    """Return faulthandler's stacks, the current thread's first, then the oldest, without pynccl's idle ones.

    faulthandler writes the newest thread first, and the main thread last.
    """
    blocks = re.split(r"\n\n+", text.strip("\n"))
    stacks = [block for block in blocks if _THREAD.match(block)]
    kept = [block for block in reversed(stacks) if not _IDLE.fullmatch(block)]
    kept.sort(key=lambda block: not block.startswith("Current"))
    return "\n\n".join([*(block for block in blocks if block not in stacks), *kept])


# --- the launcher's side ------------------------------------------------------------------------------------


def left_at(folder: Path, pid: int) -> float:
    """Return when a process left the others, by time.monotonic(); inf: it has not, or nobody knows.

    It had an exception that no other rank caused, or began to exit with open communicators.
    """
    try:
        lines = (folder / str(pid)).read_bytes().splitlines()
    except OSError:
        return math.inf
    times = [line.removeprefix(_LEFT) for line in lines if line.startswith(_LEFT)]
    return min((int(time) / 1e9 for time in times if time.isdigit()), default=math.inf)


class Answer:
    """The answer of one process of a rank to a request."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self.pid, self._path = rank, int(path.name), path
        self.stopped = False
        self._start = 0

    def ask(self) -> bool:
        """Send the process its signal; return False if it has no handler."""
        number = self._read().partition(b"\n")[0]
        self._start = self._path.stat().st_size
        # The process may have executed another program.
        if not number.isdigit() or not int(status_of(self.pid, "SigCgt"), 16) >> (int(number) - 1) & 1:
            return False
        self.stopped = status_of(self.pid, "State").startswith("T")
        os.kill(self.pid, int(number))
        if self.stopped:
            os.kill(self.pid, signal.SIGCONT)
        return True

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(self._start)
            return file.read(_MOST_BYTES)

    @property
    def complete(self) -> bool:
        """Tell whether the answer is complete or the process has ended."""
        return self._read().endswith(_END) or not _runs(self.pid)

    @property
    def stacks(self) -> bytes:
        """Return the stacks that have been written, in order."""
        text = self._read().removesuffix(_END[1:]).decode(errors="replace")
        return f"{in_order(text)}\n".encode() if text.strip() else b""


class Request:
    """One request to every process of the ranks that has a handler; it does not wait.

    `groups` has the rank of each process group.
    """

    def __init__(self, folder: Path, groups: Mapping[int, int], seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.answers: list[Answer] = []
        for path in folder.iterdir():
            # Processes can end at any time.
            with suppress(OSError):
                group = os.getpgid(int(path.name))
                if group in groups and (answer := Answer(groups[group], path)).ask():
                    self.answers.append(answer)
        self.answers.sort(key=lambda answer: (answer.rank, answer.pid))
        asked = {answer.rank for answer in self.answers}
        self.deaf = [rank for rank in groups.values() if rank not in asked]

    @property
    def over(self) -> bool:
        """Tell whether all answers are complete."""
        return time.monotonic() >= self.deadline or all(answer.complete for answer in self.answers)
