"""The driver's side of one peer's processes: start them, command them, end them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from _hosts import Hosts
from _peers import ADDRESS, PEERS

WORKER = Path(__file__).with_name("_worker.py")
TICK = os.sysconf("SC_CLK_TCK")


class PeerError(RuntimeError):
    """A peer's process failed, died or did not answer."""


def mpirun() -> str | None:
    """Find mpirun: the one installed beside this Python first."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


class Group:
    """The ranks of one peer. Between commands they block on a socket; `idle_load` tells whether they do."""

    def __init__(
        self, peer: str, nranks: int, largest: int, hosts: Hosts | None = None, timeout: float = 120.0
    ) -> None:
        """Start the ranks, on `hosts` in equal shares if there are any."""
        self.peer, self.nranks, self.hosts, self.timeout = peer, nranks, hosts, timeout
        self.ranks: list[Connection] = []
        self.pids: list[int] = []
        self.idle_cpu = self.idle_time = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = open(Path(self._directory.name, "log"), "w+b")  # noqa: SIM115
        try:
            self._start(largest)
        except BaseException:
            self.kill()
            raise
        self._busy_until, self._cpu_then = time.monotonic(), self.cpu_seconds()

    def _start(self, largest: int) -> None:
        address = os.path.join(self._directory.name, "driver")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.nranks)
            listener.settimeout(0.1)
            self._spawn([sys.executable, str(WORKER), self.peer, address, str(largest)])
            connections = [self._accept(listener) for _ in range(self.nranks)]
        hellos = self._answers(connections)
        order = sorted(range(self.nranks), key=lambda i: int(hellos[i]["rank"]))
        self.ranks = [connections[i] for i in order]
        self.pids = [hellos[i]["pid"] for i in order]
        self.versions: dict[str, str] = hellos[order[0]]["versions"]
        self._command("connect", hellos[order[0]]["token"])

    def _spawn(self, command: list[str]) -> None:
        # One thread a rank, as torchrun has it; the same for every peer.
        env = {**os.environ, "OMP_NUM_THREADS": "1", **PEERS[self.peer].environment}
        options = PEERS[self.peer].mpirun
        if options is not None:
            places = self._mpirun_hosts(self.hosts) if self.hosts else ["--oversubscribe"]
            launcher = [str(mpirun()), "-n", str(self.nranks), "--allow-run-as-root", *places, *options]
            self._popen(launcher + command, env)
            return
        for rank in range(self.nranks):
            prefix, variables = self._place(rank)
            self._popen(prefix + command, {**env, **variables})

    def _place(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """Return the head of a rank's command and its variables: torchrun's, and its host's if it has one."""
        local = self.nranks // len(self.hosts.names) if self.hosts else self.nranks
        variables = {"RANK": rank, "LOCAL_RANK": rank % local}
        variables |= {"WORLD_SIZE": self.nranks, "LOCAL_WORLD_SIZE": local}
        texts = {name: str(value) for name, value in variables.items()}
        if self.hosts is None:
            return [], texts
        host = rank // local
        texts |= {ADDRESS: self.hosts.addresses[host], "GLOO_SOCKET_IFNAME": self.hosts.links[host]}
        return self.hosts.enter(host), texts

    def _mpirun_hosts(self, hosts: Hosts) -> list[str]:
        """Let mpirun start a daemon on each host, by a command in the place of ssh."""
        agent = Path(self._directory.name, "agent")
        cases = "".join(f"{a}) on={n};; " for a, n in zip(hosts.addresses, hosts.names, strict=True))
        # A daemon takes hosts of one name for one host.
        enter = 'exec ip netns exec "$on" unshare --uts sh -c "hostname $host; $*"'
        agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in {cases}esac\n{enter}\n")
        agent.chmod(0o700)
        share = self.nranks // len(hosts.names)
        options = ["--host", ",".join(f"{address}:{share}" for address in hosts.addresses)]
        options += ["--map-by", "slot:oversubscribe", "--prtemca", "plm_ssh_agent", str(agent)]
        # Each daemon sees its own ranks alone, and does not know that they share their cores with others.
        options += ["--mca", "mpi_yield_when_idle", "1"]
        return [*options, "--mca", "btl_tcp_if_include", f"{hosts.NETWORK}.0/24"]

    def _popen(self, command: list[str], env: dict[str, str]) -> None:
        # A session of its own: Ctrl-C reaches the driver alone, which then ends its groups in order.
        out, no_input = self._log, subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen(command, env=env, stdin=no_input, stdout=out, stderr=out, start_new_session=True)
        )

    def _accept(self, listener: socket.socket) -> Connection:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                raise PeerError(f"{self.peer}: a process ended before it connected\n{self.log()}")
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                continue
        raise PeerError(f"{self.peer}: a process did not connect within {self.timeout:.0f} s\n{self.log()}")

    def log(self) -> str:
        """What the processes wrote, the end of it."""
        self._log.flush()
        return Path(self._log.name).read_bytes()[-4000:].decode(errors="replace")

    def _answers(self, connections: list[Connection]) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        answers: dict[Connection, Any] = {}
        while len(answers) < len(connections):
            pending = [connection for connection in connections if connection not in answers]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"{self.peer}: no answer within {self.timeout:.0f} s\n{self.log()}")
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connection] = self._receive(connection)
        return [answers[connection] for connection in connections]

    def _receive(self, connection: Connection) -> Any:
        try:
            good, value = connection.recv()
        except (EOFError, ConnectionError):
            raise PeerError(f"{self.peer}: a process died\n{self.log()}") from None
        if not good:
            raise PeerError(f"{self.peer} failed\n{value}")
        return value

    def _command(self, *command: Any) -> list[Any]:
        for connection in self.ranks:
            # A rank that is gone tells so when its answer is read.
            with contextlib.suppress(ConnectionError):
                connection.send(command)
        return self._answers(self.ranks)

    def ask(self, *command: Any) -> list[Any]:
        """Give every rank one command; return the answers by rank."""
        self.idle_cpu += self.cpu_seconds() - self._cpu_then
        self.idle_time += time.monotonic() - self._busy_until
        answers = self._command(*command)
        self._busy_until, self._cpu_then = time.monotonic(), self.cpu_seconds()
        return answers

    def measure(self, warmup: int, iterations: int) -> float:
        """Return the seconds of one call, of the slowest rank."""
        return float(max(self.ask("run", warmup, iterations)))

    @property
    def idle_load(self) -> float:
        """CPUs used by all processes of this group between its commands (0 is right, 1 is one core)."""
        return self.idle_cpu / self.idle_time if self.idle_time else 0.0

    def cpu_seconds(self) -> float:
        """Return the CPU time that its processes have used."""
        total = 0
        for pid in {*self.pids, *(process.pid for process in self._processes)}:
            with contextlib.suppress(OSError):  # gone: its next command tells
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / TICK

    def close(self) -> None:
        """Let the processes end by themselves, and make sure that they do."""
        for connection in self.ranks:
            connection.close()
        try:
            for process in self._processes:
                process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            print(f"{self.peer}: did not end by itself and was killed\n{self.log()}", file=sys.stderr)
        self.kill()

    def kill(self) -> None:
        """End what still runs; mpirun is asked first, since its ranks are not in its process group."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._kill_orphans()
        for connection in self.ranks:
            connection.close()
        self._log.close()
        self._directory.cleanup()

    def _kill_orphans(self) -> None:
        """End ranks that mpirun left behind, known by the driver's address in their command line."""
        for pid in self.pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if self._directory.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
