"""Commands whose output is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from contextlib import suppress

GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"


def in_terminal(
    command: Sequence[str], env: dict[str, str], typed: str = "", **variables: str
) -> tuple[list[str], int]:
    """Run a command; return the lines of its output and its errors, and its exit code.

    With `typed`, it reads that from the terminal.
    """
    # The terminal of who runs the tests may show no colours.
    env = {name: value for name, value in env.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | variables
    terminal, side = pty.openpty()
    written = b""
    stdin = side if typed else subprocess.DEVNULL
    with subprocess.Popen(
        command, env=env, stdin=stdin, stdout=side, stderr=side, start_new_session=True
    ) as process:
        os.close(side)
        os.write(terminal, typed.encode())
        # The end of the terminal is an error.
        with suppress(OSError):
            while data := os.read(terminal, 1 << 16):
                written += data
        code = process.wait(timeout=40)
    os.close(terminal)
    return written.decode().split("\r\n"), code
