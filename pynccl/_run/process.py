"""Child processes that end with their parent, for the launcher and pynccl.testing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Runs before the program: the death signal survives exec. Setting the signal here, and not in a
# preexec_fn keeps Python code out of the fork of a process that has threads.
_EXEC_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "try: os.execv(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error:\n"
    "    what = ' (it, or the interpreter in its first line)' if error.errno == 2 else ''\n"
    "    sys.exit(f'{sys.argv[2]!r} cannot be run: {error.strerror}{what}')\n"
)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent with this id dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(code: int) -> str:
    """Return a description of subprocess's exit code (negative: a signal)."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _core_pattern() -> str:
    """Return where the kernel puts core dumps, as its administrator has written it."""
    with suppress(OSError):
        return f"core_pattern: {Path('/proc/sys/kernel/core_pattern').read_text().strip()}"
    return "its place is unknown"


class Child:
    """A program in its own session; its leader is reaped last, so that the group's id stays valid."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        tie: bool = False,
    ) -> None:
        if tie:
            argv = [sys.executable, "-I", "-S", "-c", _EXEC_TIED, str(os.getpid()), *argv]
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        self.pid = self._process.pid
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self._code: int | None = None
        self._dumped = False

    def poll(self) -> int | None:
        """Return the exit code of the leader (negative for a signal); None while it runs."""
        if self._code is None:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if state is not None:
                self._code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                self._dumped = state.si_code == os.CLD_DUMPED
        return self._code

    def describe_exit(self) -> str:
        """Return a description of the exit, with the core dump if there is one; the leader has exited."""
        text = describe_exit(self.poll() or 0)
        if self._dumped:
            text += f", core dumped ({_core_pattern()})"
        return text

    def send(self, number: int) -> None:
        """Send a signal to the whole process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Kill the remaining processes of the group and reap the leader."""
        if self._process.returncode is None:
            self.send(signal.SIGKILL)
            code = self._process.wait()
            self._code = code if self._code is None else self._code
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def wait_all(children: Iterable[Child], seconds: float) -> bool:
    """Wait until all leaders have exited; return False if that takes longer."""
    children, deadline = list(children), time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
