"""The RAS server of the CPU library, asked by `pynccl ras` while a job runs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import pynccl
from conftest import clean_environment
from processes import completed
from pynccl import ras

pytestmark = pytest.mark.timeout(60)

RANKS = Path(__file__).parents[1] / "helpers" / "ras_ranks.py"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Job:
    """Three ranks that obey, each in a process."""

    def __init__(self, address: str, **env: str) -> None:
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, str(RANKS), "3"],
            env=clean_environment() | {"PYNCCL_LIBRARY": "cpu"} | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            start_new_session=True,
        )  # fmt: skip
        self.pids: dict[int, int] = {}

    def said(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def order(self, rank: int, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rank} {what}\n")

    def all(self, what: str) -> None:
        for rank in self.pids:
            self.order(rank, what)
        assert sorted(self.said() for _ in self.pids) == [[str(rank), what.split()[0]] for rank in self.pids]

    def status(self, **options: object) -> ras.Status:
        """Return the status; the server may be a moment late after the job is ready."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return ras.status(self.address, **options)  # type: ignore[arg-type]
            except ras.RasError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def until(self, errors: tuple[str, ...], **options: object) -> ras.Communicator:
        """Ask until the communicator has these errors."""
        deadline = time.monotonic() + 20
        while True:
            (one,) = self.status(**options).communicators
            if one.errors == errors or time.monotonic() > deadline:
                assert one.errors == errors
                return one
            time.sleep(0.02)

    def send(self, rank: int, signal_: signal.Signals) -> None:
        os.kill(self.pids[rank], signal_)

    def server(self) -> int:
        """Return the rank whose process listens."""
        port = f":{int(self.address.rpartition(':')[2]):04X} "
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        (inode,) = [row[9] for row in rows if row[1].endswith(port.strip()) and row[3] == "0A"]
        return next(rank for rank, pid in self.pids.items() if f"socket:[{inode}]" in _links(pid))


def _links(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # The process may have closed it meanwhile.
        with suppress(FileNotFoundError):
            found.add(os.readlink(path))
    return found


@contextmanager
def running(address: str | None = None, **env: str) -> Iterator[Job]:
    address = address or free_address()
    job = Job(address, **({"NCCL_RAS_ADDR": address} | env))
    try:
        job.pids |= {int(rank): int(pid) for rank, _, pid in sorted(job.said() for _ in range(3))}
        yield job
    finally:
        # Ranks that leave by os._exit keep their counts of executed lines.
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.killpg(job.process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            job.process.communicate(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.communicate()


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, "-m", "pynccl", "ras", *args], env=clean_environment(), timeout=40)


# What ras_client.cc, NCCL's src/ras/client.cc, has of NCCL's headers.
HEADERS = {
    "os.h": "#include <getopt.h>\n#include <netdb.h>\n#include <sys/socket.h>\n#include <unistd.h>\n",
    "ras_internal.h": "#define NCCL_RAS_CLIENT_PORT 28028\n#define NCCL_RAS_CLIENT_PROTOCOL 2\n"
    "#define RAS_COLLECTIVE_LEG_TIMEOUT_SEC 5\n#define RAS_COLLECTIVE_EXTRA_TIMEOUT_SEC 5\n",
}


@pytest.mark.slow
def test_the_client_of_nccl(tmp_path: Path) -> None:
    for name, text in HEADERS.items():
        (tmp_path / name).write_text(text)
    client, source = tmp_path / "ncclras", Path(__file__).with_name("nvidia") / "ras_client.cc"
    include = Path(pynccl.cpu_library()).parent / "forward/include"
    flags = ["-std=c++17", "-DNCCL_OS_LINUX", f"-I{tmp_path}", f"-I{include}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(client)], check=True, timeout=50)
    with running() as job:
        job.all("all_reduce 5")
        assert job.status().ok
        where = ["-h", "127.0.0.1", "-p", job.address.rpartition(":")[2]]
        for args in ([], ["-v"], ["-t", "3"], ["-t", "0"]):
            done = completed([client, *where, *args])
            assert done.returncode == 0, done.stderr
            assert "NCCL version 2.32.3" in done.stdout
            # Group, communicators, nodes, ranks for each node, communicator and group.
            assert re.search(r"^ +0 +1 +1 +3 +3 +3 +RUNNING +OK$", done.stdout, re.M), done.stdout
        done = completed([client, *where, "-f", "json"])
        (one,) = json.loads(done.stdout)["communicators"]
        assert [rank["collective_counts"]["AllReduce"] for rank in one["ranks"]] == [5] * 3
        watching = completed([client, *where, "-m"])
        assert "The CPU library reports no events" in watching.stdout + watching.stderr


def test_all_run_one_lags_one_stops_one_dies() -> None:
    """In JSON and in text, which NCCL's own client asks for; the stopped process is not the server."""
    with running(NCCL_RAS_ENABLE="0", RANK0_NCCL_RAS_ENABLE="1") as job:
        job.all("all_reduce 5")
        found = job.status()
        assert found.ok
        assert found.nccl_version is not None
        assert (found.format, found.nccl_version.partition("+")[0]) == ("json", "2.32.3")
        (one,) = found.communicators
        assert (one.size, one.status, one.missing) == (3, "RUNNING", ())
        assert one.ranks is not None
        assert {rank.rank: rank.pid for rank in one.ranks} == job.pids
        assert [(rank.counts or {})["AllReduce"] for rank in one.ranks] == [5, 5, 5]
        assert [(rank.counts or {})["Broadcast"] for rank in one.ranks] == [0, 0, 0]
        text = job.status(json=False)
        assert (text.ok, text.nodes, text.processes, text.timeouts) == (True, 1, 3, 0)
        assert text.groups == (ras.Group(1, 1, "3", 3, 3, "RUNNING", ()),)
        shown = command("--address", job.address)
        assert (shown.returncode, "3 ranks: RUNNING OK" in shown.stdout) == (0, True)

        job.order(0, "all_reduce 1")
        job.order(1, "all_reduce 1")
        lag = ras.Lag("AllReduce", 5, 6, 1, (2,))
        while job.until(("MISMATCH",)).lagging != (lag,):
            time.sleep(0.02)
        assert job.until(("MISMATCH",), json=False).lagging == (lag,)
        shown = command("--address", job.address)
        assert shown.returncode == 2
        behind = f"rank 2 has launched 5 of 6 AllReduce operations (process {job.pids[2]} on "
        assert behind in shown.stdout

        job.send(1, signal.SIGSTOP)
        for seconds in (1, 5, 20):  # on a busy machine a rank that runs may not answer within a second
            with ThreadPoolExecutor() as both:
                asked = [both.submit(job.status, timeout=seconds, json=json) for json in (True, False)]
            answers = [one for answer in asked for one in answer.result().communicators]
            if all(len(one.missing or ()) == 1 for one in answers):
                break
        for one in answers:
            assert one.errors == ("INCOMPLETE", "MISMATCH")
            (missing,) = one.missing or ()
            assert (missing.rank, missing.unresponsive, bool(missing.dead)) == (1, True, False)
        job.send(1, signal.SIGCONT)
        job.until(("MISMATCH",))

        job.send(2, signal.SIGKILL)
        one = job.until(("INCOMPLETE", "ERROR"))
        assert one.missing is not None
        assert [(rank.rank, rank.pid, rank.dead) for rank in one.missing] == [(2, job.pids[2], True)]
        assert f"rank 2 is dead (process {job.pids[2]}" in command("--address", job.address).stdout
        assert job.status(json=False).missing_processes is not None


def test_another_process_takes_over() -> None:
    """After the server was killed, and after it has ended its communicators."""
    with running() as job:
        job.status()
        first = job.server()
        job.send(first, signal.SIGKILL)
        one = job.until(("INCOMPLETE", "ERROR"))
        assert [(rank.rank, rank.dead) for rank in one.missing or ()] == [(first, True)]
        second = job.server()
        job.order(second, "destroy")
        while job.said() != [str(second), "destroy"]:
            pass
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            (one,) = job.status().communicators
            if [rank.rank for rank in one.missing or () if not rank.dead] == [second]:
                break
        (survivor,) = one.ranks or ()
        assert survivor.rank == job.server() not in (first, second)


def test_off_by_default() -> None:
    address = free_address()
    with running(address, NCCL_RAS_ADDR="") as job:
        job.all("all_reduce 1")
        for pid in job.pids.values():
            threads = [task.read_text().strip() for task in Path(f"/proc/{pid}/task").glob("*/comm")]
            assert "pynccl-service" in threads
            assert "pynccl-ras" not in threads
        with pytest.raises(ras.RasError, match="the CPU library listens only with NCCL_RAS_ENABLE=1"):
            ras.status(address)
    with running(address, NCCL_RAS_ENABLE="0") as job:
        job.all("all_reduce 1")
        with pytest.raises(ras.RasError, match="No RAS server"):
            ras.status(address)


def test_the_port_is_taken() -> None:
    """The job runs; as soon as the port is free, it serves."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with running(address) as job:
            job.all("all_reduce 3")
            other.close()
            assert job.status().ok


def test_one_enabled_process_is_enough() -> None:
    """It asks a rank of its own host, and one that counts as on another, which proves the job's secret."""
    hosts = {"RANK0_NCCL_HOSTID": "a", "RANK1_NCCL_HOSTID": "a", "RANK2_NCCL_HOSTID": "b"}
    secret = {"PYNCCL_SECRET": "the secret of this job"}
    with running(NCCL_RAS_ENABLE="0", RANK1_NCCL_RAS_ENABLE="1", **secret, **hosts) as job:
        (one,) = job.status().communicators
        assert (one.errors, len(one.ranks or ())) == ((), 3)
        assert job.server() == 1
        job.send(2, signal.SIGKILL)
        one = job.until(("INCOMPLETE", "ERROR"))
        assert [(rank.rank, rank.dead) for rank in one.missing or ()] == [(2, True)]


def test_strangers() -> None:
    """Garbage, half lines, endless lines, 1,000 connections that say nothing: the job runs, and is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with running() as job:
        job.all("all_reduce 1")
        job.status()
        server = job.pids[job.server()]
        before = len(_links(server))
        host, _, port = job.address.rpartition(":")
        held = []
        for number in range(1000):
            try:
                held.append(socket.create_connection((host, int(port)), timeout=0.5))
            except OSError:
                break
            said = (b"", b"CLIENT PROT", b"x" * 900, b"STATUS", bytes(range(11, 256)), b"\x00\n" * 20)
            held[-1].sendall(said[number % len(said)])
        assert len(_links(server)) - before <= 40
        job.all("all_reduce 20")
        assert job.status(timeout=10).ok
        for connection in held:
            connection.close()
        with socket.create_connection((host, int(port)), timeout=10) as one:
            one.sendall(b"y" * 5000)
            with pytest.raises(OSError):  # noqa: PT011, PT012
                while one.recv(100):
                    pass
                raise OSError("closed")
        with socket.create_connection((host, int(port)), timeout=10) as one:
            one.sendall(b"nonsense\r\ntimeout -1\nset format xml\nmonitor\nCLIENT PROTOCOL 2\n")
            # NCCL's client documents 0 as no time-out.
            one.sendall(b"timeout 0\nstatus\n")
            one.shutdown(socket.SHUT_WR)
            answer = one.makefile().read()
        assert answer.startswith(
            "ERROR: Unknown command nonsense\nERROR: Invalid timeout value -1\nERROR: Invalid format xml\n"
            "ERROR: The CPU library reports no events\nSERVER PROTOCOL 2\nOK\nNCCL version 2.32.3"
        )
        assert "INCOMPLETE" not in answer
        assert answer.endswith("Warnings\n========\n\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
