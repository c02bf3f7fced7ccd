"""A pytest plugin: `pynccl.testing.run` forks its ranks, which spares them most of their start.

Each process of pytest has a server for that (rank_server.py), and one more for tests that use torch. A rank
runs what a new interpreter would. At its end it joins threads and calls exit functions, but leaves modules as
they are: tests of the end use `run_program`, and `make coverage` forks no ranks. What the ranks share, and
others do not, is where the system has put their memory: tests/conformance starts its processes one by one,
except for tests of ranks that die.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pynccl import testing
from pynccl._run.process import Child

# Read once, by the interpreter, the dynamic linker, or a module when it is imported.
READ_AT_START = ("PYTHON", "LD_", "OPENBLAS_", "MKL_", "PYNCCL_TRACE_STACKS", "PYNCCL_STACKS_DIR")
# Set again in each fork, and an option of the server's.
SET = ("PYTHONPATH", "PYTHONUNBUFFERED")
LIGHT = ("numpy", "ml_dtypes", "pytest", "hypothesis", "pynccl.testing", "pynccl.bootstrap._init")
HEAVY = (*LIGHT, "cupy", "torch.distributed")


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START) and name not in SET}


class Server:
    """The process that forks, and the connection to it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.options, self.environment = testing._interpreter_options(), read_at_start(os.environ)
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", *self.options, "-c", "import rank_server; rank_server.main()"]
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [*command, str(theirs.fileno()), *self.modules],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def ask(self, *request: Any) -> Any:
        # Tests run ranks in several threads, too.
        with self.lock:
            if self.process is None:
                self.start()
            try:
                self.connection.send(request)
                return self.connection.recv()
            except BaseException:
                # The answer may still come, and would be taken for the next one's.
                self.close()
                raise

    def child(self, argv: Sequence[str], *, env: Mapping[str, str]) -> Child:
        """Fork a rank; start those that need an interpreter of their own."""
        _, *options, _, code, parent, folder, rank = argv
        if options != self.options or read_at_start(env) != self.environment:
            return Child(argv, env=env)
        return Fork(self, self.ask("fork", code, [parent, folder, rank], dict(env), os.getcwd()))

    def close(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.wait()
            self.process = None


class Fork(Child):
    """A fork of the server, in a session of its own as other ranks are."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server, self.pid = server, pid
        self.reaped, self._code = False, None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self.server.ask("exit code", self.pid, False)
        return self._code

    def close(self) -> None:
        if not self.reaped:
            self.send(signal.SIGKILL)
            code, self.reaped = self.server.ask("exit code", self.pid, True), True
            self._code = code if self._code is None else self._code


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[tuple[Server, Server]]:
    servers = Server(LIGHT), Server(HEAVY)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def forked_ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rank_servers: tuple[Server, Server]
) -> None:
    # What measures executed lines begins with the interpreter; and CUDA does not survive a fork.
    if "coverage" in sys.modules or request.node.get_closest_marker("gpu"):
        return
    if not hasattr(request.module, "NEW_INTERPRETERS"):
        # Not for all: a fork takes long that shares torch's memory.
        uses_torch = hasattr(request.module, "torch") or bool(request.node.get_closest_marker("torch"))
        monkeypatch.setattr(testing, "Child", rank_servers[uses_torch].child)


@pytest.fixture(scope="session")
def torch_backend(rank_servers: tuple[Server, Server]) -> None:
    """Compile the torch.distributed backend, before tests with time limits of their own want it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "Child", rank_servers[1].child)
        testing.run(1, import_backend, backend="cpu", timeout=900)


def import_backend(rank: int, nranks: int) -> None:
    import pynccl.torch  # noqa: F401
