"""Groups of ranks, as processes or threads, that outlive single tests: starting them takes long.

`pynccl.testing.run`, which other tests use, starts its ranks for each call.

Those that tests use up can be forks of a process that has done their imports. The memory of forks begins at
the same addresses, so tests of data have new interpreters.

The parent sends every rank the name of a function and its arguments; the function runs as `fn(rank, *args)`,
where `rank` (a `worker.Rank`) lets it talk to the others without the library under test. Any failure uses a
group up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from .backend import choose_backend

ROOT = Path(__file__).resolve().parents[2]
# What the other ranks get once one has failed: long enough to report it too.
GRACE = 5.0
NOTE_BYTES = 256
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["conformance.worker", "conformance.scenario", "pytest", "pynccl.capi"])


class RanksFailed(AssertionError):
    """Ranks raised, died or hung: their tracebacks, last notes and stacks."""

    def __init__(self, message: str, notes: Sequence[str]) -> None:
        super().__init__(message)
        self.notes = list(notes)


@dataclass(frozen=True)
class Died:
    """The result of a rank whose process ended."""

    code: int


@dataclass(frozen=True)
class Raised:
    """The result of a rank whose function raised."""

    text: str


def transport_layout(transport: str, nranks: int) -> list[list[int]]:
    """Return which ranks share a process."""
    if transport == "threads":
        return [list(range(nranks))]
    if transport in ("mixed", "hosts", "flat"):
        return [list(range(nranks))[i : i + 2] for i in range(0, nranks, 2)]
    if transport == "scattered":
        bounds = [sum(islice(cycle((1, 2, 3)), number)) for number in range(nranks + 1)]
        return [list(range(a, min(b, nranks))) for a, b in pairwise(bounds) if a < nranks]
    return [[rank] for rank in range(nranks)]


class Fork:
    """A process that the fork server forks, with the methods of a Popen."""

    def __init__(self, *args: Any) -> None:
        self._process = FORKED.Process(target=_run_fork, args=args)
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_fork(
    nranks: int, ranks: list[int], connections: list[Connection], env: dict[str, str], notes: str, log: Path
) -> None:
    from .worker import work

    os.environ.update(env)
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), output)
    work(nranks, ranks, connections, os.open(notes, os.O_WRONLY))


class Ranks:
    """`nranks` ranks over one transport; `env` adds variables to all of them."""

    def __init__(
        self,
        nranks: int,
        transport: str = "direct",
        env: dict[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        self.nranks, self.transport, self._forked = nranks, transport, forked
        self.healthy = True
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        self._notes = open(os.path.join(self._folder.name, "notes"), "w+b", buffering=0)  # noqa: SIM115
        self._notes.truncate(nranks * NOTE_BYTES)
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        self._process_of: dict[int, int] = {}
        self._connections: list[Connection] = []
        backend = choose_backend()
        for index, ranks in enumerate(transport_layout(transport, nranks)):
            self._start(index, ranks, backend.environment(transport, index, nranks) | (env or {}))

    def _start(self, index: int, ranks: list[int], env: dict[str, str]) -> None:
        theirs: list[Connection] = []
        for rank in ranks:
            ours, other = Pipe()
            self._connections.append(ours)
            theirs.append(other)
            self._process_of[rank] = index
        if self._forked:
            process = Fork(self.nranks, ranks, theirs, env, self._notes.name, self._log(index))
        else:
            process = self._interpreter(ranks, theirs, env, self._log(index))
        self._processes.append(process)
        for connection in theirs:
            connection.close()

    def _interpreter(
        self, ranks: list[int], connections: list[Connection], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        fds = [connection.fileno() for connection in connections]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        arguments = (self.nranks, ranks, fds, self._notes.fileno())
        with open(log, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "conformance.worker", pickle.dumps(arguments).hex()],
                env=os.environ | {"PYTHONPATH": path} | env,
                pass_fds=[*fds, self._notes.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def processes(self) -> int:
        """Return how many processes the ranks are."""
        return len(self._processes)

    def _log(self, index: int) -> Path:
        return Path(self._folder.name, f"{index}.log")

    def output(self, rank: int) -> str:
        """Return what the rank's process has printed."""
        return self._log(self._process_of[rank]).read_text(errors="replace")

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._processes[self._process_of[rank]].pid

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 30,
        only: Iterable[int] | None = None,
        check: bool = True,
        during: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run `fn(rank, *args)` on every rank and return the results in order.

        With `check=False` ranks that raise or die are results, `Raised` and `Died`, and the others go on.
        `during` runs in a thread of this process while they work.
        """
        ranks = list(range(self.nranks)) if only is None else list(only)
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for rank in ranks:
            self._connections[rank].send((fn.__module__, fn.__qualname__, args))
        helper = threading.Thread(target=during or (lambda: None))
        helper.start()
        exchanges: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(ranks) and time.monotonic() < deadline:
            for rank in self._ready(set(ranks) - set(results), deadline):
                kind, value = self._receive(rank)
                if kind == "exchange":
                    exchanges[rank] = value
                    continue
                results[rank] = value
                if kind == "result":
                    continue
                self.healthy = False
                if check:
                    failed[rank] = (
                        value.text if kind == "raised" else f"ended with {value.code}\n{self.output(rank)}"
                    )
                    deadline = min(deadline, time.monotonic() + GRACE)
            if exchanges and len(exchanges) + len(results) >= len(ranks):
                self._answer(exchanges, ranks)
        helper.join()
        hung = [rank for rank in ranks if rank not in results]
        if failed or hung:
            raise self._failure(fn, failed, hung, timeout)
        return [results[rank] for rank in ranks]

    def _ready(self, ranks: set[int], deadline: float) -> list[int]:
        by_connection = {self._connections[rank]: rank for rank in sorted(ranks)}
        ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
        return [by_connection[connection] for connection in ready if isinstance(connection, Connection)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            return "died", Died(self._processes[self._process_of[rank]].wait(10))
        return ("raised", Raised(value)) if kind == "raised" else (kind, value)

    def _answer(self, exchanges: dict[int, Any], ranks: list[int]) -> None:
        """Give the ranks that wait in `exchange` what all of them brought; None for those that have ended."""
        everyone = [exchanges.get(rank) for rank in ranks]
        for rank in exchanges:
            # One that was killed while it waited is found dead soon enough.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connections[rank].send(everyone)
        exchanges.clear()

    def notes(self) -> list[str]:
        """Return the last note of every rank."""
        size = NOTE_BYTES
        raw = [os.pread(self._notes.fileno(), size, rank * size) for rank in range(self.nranks)]
        return [text.rstrip(b"\0").decode(errors="replace") for text in raw]

    def _failure(
        self, fn: Callable[..., Any], failed: dict[int, str], hung: list[int], timeout: float
    ) -> RanksFailed:
        for index in {self._process_of[rank] for rank in hung}:
            # The worker writes its stacks to its log.
            self._processes[index].send_signal(signal.SIGUSR1)
        if hung:
            time.sleep(0.3)
        self.healthy = False
        notes = self.notes()
        text = [f"{fn.__qualname__} on {self.nranks} ranks over {self.transport}:"]
        text += [f"--- rank {rank} ({notes[rank]}) failed:\n{what}" for rank, what in failed.items()]
        late = "after another failed" if failed else f"after {timeout:g} s"
        text += [
            f"--- rank {rank} ({notes[rank]}) still ran {late}:\n{self.output(rank)[-3000:]}" for rank in hung
        ]
        self.close()
        return RanksFailed("\n".join(text), notes)

    def close(self) -> None:
        """End the processes: healthy ones by themselves, the others by force."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (5.0 if self.healthy else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.healthy = False
        self._notes.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Pool:
    """Keeps some groups alive for the next test with the same needs."""

    PROCESSES = 48

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str, tuple[tuple[str, str], ...]], Ranks] = {}

    def get(self, nranks: int, transport: str = "direct", **env: str) -> Ranks:
        """Return a healthy group; the variables are its own."""
        key = (nranks, transport, tuple(sorted(env.items())))
        group = self._groups.pop(key, None)
        if group is None or not group.healthy:
            if group:
                group.close()
            group = Ranks(nranks, transport, env)
        self._groups[key] = group
        while (
            sum(each.processes for each in self._groups.values()) > self.PROCESSES and len(self._groups) > 1
        ):
            self._groups.pop(next(iter(self._groups))).close()
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
