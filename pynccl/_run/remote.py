"""`pynccl run` of one machine of a hosts file: standard input says what to run, and its end ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress


def end_with_input() -> None:
    """End this process as SIGTERM does when standard input ends: ssh, or the first launcher, is gone."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="pynccl-input", daemon=True).start()


def _line() -> bytes:
    """Read a line and nothing behind it, which belongs to the program that follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("pynccl run: the connection ended before the command came")
        line += byte
    return line


def main() -> None:
    """Read the command, and become `pynccl run`."""
    order = json.loads(_line())
    try:
        os.chdir(order["folder"])
    except OSError as error:
        sys.exit(f"pynccl run: cannot work in {order['folder']} on {os.uname().nodename}: {error.strerror}")
    command = [sys.executable, "-m", "pynccl", "run", "--end-with-input", *order["args"]]
    os.execve(sys.executable, command, os.environ | order["environment"])


if __name__ == "__main__":
    main()
