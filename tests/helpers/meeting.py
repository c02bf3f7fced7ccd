"""How the ranks of a test meet without the communicator under test: a rank that has left may end immediately.

Also: waits for what can be seen, interrupts, free ports, few descriptors, and how long a process did not get
to run.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from pynccl import NcclError, RankFailedError
from pynccl.bootstrap import Store

# Below the ports that a system gives to connections, which would take one at any time; each worker of xdist
# has its own, and no two processes begin with the same.
_FIRST_PORT, _PORTS = 12000, 4000
_numbers = itertools.count(97 * os.getpid())
E = TypeVar("E", bound=NcclError)


def store() -> Store:
    """Return the store that every rank of `pynccl.testing.run` has."""
    return Store(os.environ["PYNCCL_STORE"], os.environ.get("PYNCCL_SECRET", ""), timeout=40)


def together(nranks: int, name: str = "together") -> None:
    """Wait for the other ranks, whose processes may have started seconds apart."""
    with store() as meeting:
        meeting.barrier(name, nranks)


def tell(what: str) -> None:
    """Say something to the other ranks."""
    with store() as meeting:
        meeting.set(what, b"1")


def hear(what: str) -> None:
    """Wait until another rank has said something."""
    with store() as meeting:
        meeting.wait(what)


def publish(path: Path, data: bytes) -> None:
    """Write a file that others wait for; they see it only when it is complete."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.rename(path)


def interrupted_soon() -> list[float]:
    """Interrupt this process in a moment; return a list that the time then enters."""
    at: list[float] = []

    def interrupt() -> None:
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, interrupt).start()
    return at


def failure(what: Callable[[], object]) -> RankFailedError:
    """Do something until a rank has failed."""
    return error_of(what, RankFailedError)


def error_of(what: Callable[[], object], kind: type[E]) -> E:
    """Do something until it raises an error of this kind."""
    try:
        while True:
            what()
    except kind as error:
        return error


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what comes true soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(0.002)


def state(pid: int) -> str:
    """Return the letter that /proc has for a process; Z too where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def until_gone(pids: Iterable[int]) -> None:
    """Wait until none of these processes runs."""
    until(lambda: all(state(pid) == "Z" for pid in pids), 10)


def leave_descriptors(spare: int) -> None:
    """Limit this process to `spare` more descriptors: the numbers of those that are open may have gaps."""
    # The listing's own descriptor is closed again.
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    limit = next(itertools.islice((n for n in itertools.count() if n not in used), spare, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def census() -> tuple[Counter[str], Counter[str]]:
    """Return what this process has open, and its threads, without those that end meanwhile."""
    opened: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    threads: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            threads[Path(f"/proc/self/task/{task}/comm").read_text().strip()] += 1
    return opened, threads


def starved() -> float:
    """Return how long this process's threads have waited for a processor so far."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return total / 1e9


def free_port() -> int:
    """Return a port that nobody has, and that nobody is given soon."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5
    while True:
        port = _FIRST_PORT + _PORTS * worker + next(_numbers) % _PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
