"""The machines of a hosts file: `pynccl run` on each of them, started by ssh."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from pynccl._base.colours import coloured
from pynccl._run.launch import ENDING, MOST_RANKS
from pynccl._run.ports import free_port
from pynccl._secure.secret import read_secret
from pynccl.bootstrap._address import format_address

# BatchMode: without a key, ssh fails at once instead of asking for a password.
SSH = "ssh -o BatchMode=yes"
_REMOTE = "pynccl._run.remote"
_LONGEST_FILE = 1 << 20
_PAUSE = 0.05
# Seconds for the launchers to end by themselves after one has failed, and after their input has ended.
_OWN_END, _END = 40.0, 20.0


@dataclass(frozen=True)
class Host:
    """A machine, as ssh names it, and its number of ranks; None: the number that -n gives."""

    name: str
    slots: int | None


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file: a machine on each line, perhaps with slots=N; "#" begins a comment."""
    with path.open(errors="replace") as file:
        text = file.read(_LONGEST_FILE)
    found = [
        _host(path, i, line) for i, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip()
    ]
    if not found:
        raise ValueError(f"{path} names no machine; expected one on each line")
    return found


def _host(path: Path, number: int, line: str) -> Host:
    name, *more = line.split("#")[0].split()
    slots = more[0].removeprefix("slots=") if more else ""
    right = slots.isascii() and slots.isdecimal() and len(slots) < 6 and 1 <= int(slots) <= MOST_RANKS
    right = not more or (len(more) == 1 and more[0].startswith("slots=") and right)
    # ssh would take a name with a dash for an option.
    if name.startswith("-") or not name.isprintable() or not right:
        raise ValueError(
            f"{path}, line {number}: {line.strip()!r}; expected HOST or HOST slots=N, 1 <= N <= {MOST_RANKS}"
        )
    return Host(name, int(slots) if slots else None)


def run_on(
    hosts: Sequence[Host], ssh: Sequence[str], nranks: str, store: str | None, options: Sequence[str]
) -> int:
    """Run `pynccl run` with these options on every machine; return the exit code of the first to fail.

    Every launcher ends when its standard input does: with this process, however this process ends.
    """
    if store is None:
        store = format_address(hosts[0].name.rpartition("@")[2], free_port())
    environment = _environment(os.environ)
    with _signals() as caught:
        started = []
        for number, host in enumerate(hosts):
            node = ["--nnodes", str(len(hosts)), "--node-rank", str(number), "--store", store]
            node = node if len(hosts) > 1 else []
            own = ["-n", nranks if host.slots is None else str(host.slots)]
            order = {"folder": os.getcwd(), "environment": environment, "args": [*own, *node, *options]}
            started.append(_start(ssh, host, order))
        return _wait(hosts, started, caught)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the other machines, with a secret if there can be one."""
    found = {name: value for name, value in environ.items() if name.startswith(("NCCL_", "PYNCCL_"))}
    secret = read_secret(environ)
    if not secret and find_spec("nacl") is not None:
        secret = secrets.token_urlsafe(24)
    # A file of secrets is this machine's.
    found.pop("PYNCCL_SECRET_FILE", None)
    return found | {"PYNCCL_SECRET": secret}


def _start(ssh: Sequence[str], host: Host, order: Mapping[str, object]) -> subprocess.Popen[bytes]:
    command = [*ssh, host.name, f"exec {shlex.quote(sys.executable)} -m {_REMOTE}"]
    # A session of its own: Ctrl-C reaches the launchers through this process only.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    return process


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that end this program."""
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(hosts: Sequence[Host], started: Sequence[subprocess.Popen[bytes]], caught: list[int]) -> int:
    code, end_at, kill_at, told = 0, float("inf"), float("inf"), set[int]()
    while len(told) < len(started):
        now = time.monotonic()
        for i, process in enumerate(started):
            if process.poll() is not None and i not in told:
                told.add(i)
                if process.returncode and not code:
                    code = process.returncode if process.returncode > 0 else 128 - process.returncode
                    end_at = min(end_at, now + _OWN_END)
                    _say(f"the launcher on {hosts[i].name} ended with code {code}")
        if (caught or now >= end_at) and kill_at == float("inf"):
            kill_at = now + _END
            _end_input(started)
        if now >= kill_at:
            for process in started:
                process.kill()
        time.sleep(_PAUSE)
    return 128 + caught[0] if caught else code


def _end_input(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def _say(text: str) -> None:
    print(coloured(f"pynccl run: {text}", "error", sys.stderr), file=sys.stderr, flush=True)
