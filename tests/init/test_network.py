"""Ranks on different machines: network namespaces and a link, addresses, interfaces, nccl.conf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import clean_environment
from hosts import Hosts, needs_root
from processes import completed, piped

RANK = """
import sys
import numpy as np
from pynccl import capi
nranks, rank, first = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if rank == first:
    uid = capi.ncclGetUniqueId()
    print("id", uid.hex(), flush=True)
else:
    uid = bytes.fromhex(sys.argv[4])
comm = capi.ncclCommInitRank(nranks, uid, rank)
for count in (1, 1000, 300_000):
    x = np.arange(count, dtype=np.float32) + rank
    capi.ncclAllReduce(x.ctypes.data, x.ctypes.data, count, 7, 0, comm, 0)
    capi.pyncclCpuStreamSynchronize(comm, 0, -1)
    expected = nranks * np.arange(count, dtype=np.float32) + nranks * (nranks - 1) / 2
    assert (x == expected).all(), x
capi.ncclCommFinalize(comm)
capi.ncclCommDestroy(comm)
print("good", flush=True)
"""

IDENTITY = """
import json
from pynccl import capi
from pynccl._base import host
names = ("machine", "loopback", "process_ids", "clock")
print(json.dumps({name: getattr(host, name)() for name in names} | {"library": capi.pyncclCpuHostId()}))
"""


def identity(*prefix: str, **env: str) -> dict[str, str | int]:
    """Return what a process says of its host, in Python and by the CPU library."""
    command = [*prefix, sys.executable, "-c", IDENTITY]
    done = completed(command, env=clean_environment() | {"PYNCCL_LIBRARY": "cpu"} | env)
    assert done.returncode == 0, done.stderr
    said: dict[str, str | int] = json.loads(done.stdout)
    return said


def differing(prefix: list[str], **env: str) -> set[str]:
    here, there = identity(**env), identity(*prefix, **env)
    return {name for name, said in here.items() if said != there[name]}


@needs_root
def test_python_and_the_library_agree_what_one_host_is() -> None:
    """By the table in docs/architecture.md."""
    assert differing([]) == set()
    assert differing(["unshare", "--net"]) == {"loopback", "library"}
    processes = ["unshare", "--pid", "--fork", "--mount-proc"]
    assert differing(processes) == {"process_ids", "library"}
    assert differing(["unshare", "--net"], NCCL_HOSTID="pod") == {"loopback", "library"}
    assert differing(processes, NCCL_HOSTID="pod") == {"process_ids"}
    name = ["unshare", "--uts", "sh", "-ec", 'hostname other; exec "$@"', "sh"]
    assert differing(name) == {"machine", "loopback", "library"}
    assert differing(name, NCCL_HOSTID="pod") == {"machine", "loopback"}


def read_id(maker: subprocess.Popen[str]) -> str:
    """Return the id that a rank prints, or "" when it ends without; NCCL_DEBUG's lines may come before."""
    assert maker.stdout is not None
    return next((line.split()[1] for line in maker.stdout if line.startswith("id ")), "")


def run_ranks(places: list[list[str]], **env: str) -> list[str]:
    """Run one rank with each command prefix and return what each printed; rank 0 makes the id."""
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYNCCL_CPU_INIT_TIMEOUT": "20"} | env
    n = str(len(places))

    def start(rank: int, *uid: str) -> subprocess.Popen[str]:
        command = [*places[rank], sys.executable, "-c", RANK, n, str(rank), "0", *uid]
        return piped(command, env=environment)

    processes = [start(0)]
    try:
        uid = read_id(processes[0])
        processes += [start(r, uid) for r in range(1, len(places))] if uid else []
        done = [p.communicate(timeout=40) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return [out + err for out, err in done]


@needs_root
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_across_network_namespaces(hosts: Hosts, family: str) -> None:
    places = [["ip", "netns", "exec", hosts.names[i % 2]] for i in range(4)]
    outputs = run_ranks(places, NCCL_SOCKET_FAMILY=family, NCCL_DEBUG="INFO")
    assert all("good" in text for text in outputs), outputs
    assert all("2 hosts" in text for text in outputs), outputs


@needs_root
def test_a_cable_that_is_cut_is_a_dead_peer(hosts: Hosts) -> None:
    code = RANK.replace(
        "capi.ncclCommFinalize(comm)",
        "import time\nprint('cut', flush=True)\n"
        "try:\n"
        "    while True:\n        capi.ncclBroadcast(x.ctypes.data, x.ctypes.data, count, 7, 0, comm, 0)\n"
        "        capi.ncclAllReduce(x.ctypes.data, x.ctypes.data, count, 7, 2, comm, 0)\n"
        "        capi.pyncclCpuStreamSynchronize(comm, 0, -1)\n"
        "except Exception as error:\n    print(type(error).__name__, flush=True)\n    import os; os._exit(0)",
    )
    environment = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYNCCL_CPU_TIMEOUT": "3"}
    prefix = [["ip", "netns", "exec", name] for name in hosts.names]

    def start(rank: int, *uid: str) -> subprocess.Popen[str]:
        command = [*prefix[rank], sys.executable, "-c", code, "2", str(rank), "0", *uid]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    first = start(0)
    second = start(1, read_id(first))
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "cut"
        hosts.ip("-n", hosts.names[0], "link", "set", hosts.links[0], "down")
        outputs = [p.communicate(timeout=30)[0] for p in (first, second)]
    finally:
        for p in (first, second):
            p.kill()
            p.wait()
    assert all("NcclTimeoutError" in t or "NcclRemoteError" in t for t in outputs), outputs


@needs_root
@pytest.mark.parametrize("method", ["tcp://10.199.0.1:29777", "tcp://[fd99::1]:29777", "Slurm"])
def test_a_time_out_on_hosts_without_a_default_route(hosts: Hosts, method: str) -> None:
    """The control channel, which a time-out opens, goes over the interface of the rendezvous."""
    how = (
        "timeout=20" if method == "Slurm" else f"{method!r}, rank=int(sys.argv[1]), world_size=2, timeout=20"
    )
    code = (
        "import sys, numpy as np, pynccl\n"
        f"with pynccl.init({how}) as comm:\n"
        "    print(*comm.all_reduce(np.ones(2)))"
    )
    command, env = [sys.executable, "-c", code], clean_environment() | {"PYNCCL_LIBRARY": "cpu"}
    if method == "Slurm":
        env |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "10.199.0.[1-2]"}
    started = [
        piped(
            ["ip", "netns", "exec", name, *command, str(rank)],
            env=env | {"NCCL_HOSTID": name, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"},
        )
        for rank, name in enumerate(hosts.names)
    ]
    assert [process.communicate(timeout=40)[0] for process in started] == 2 * ["2.0 2.0\n"]


def test_ipv6_loopback() -> None:
    outputs = run_ranks([[], []], NCCL_SOCKET_IFNAME="lo", NCCL_SOCKET_FAMILY="AF_INET6", NCCL_DEBUG="INFO")
    assert all("good" in text for text in outputs), outputs


def test_interface_that_is_not_there() -> None:
    (output,) = run_ranks([[]], NCCL_SOCKET_IFNAME="nothere")
    assert "NcclSystemError" in output or "NcclInvalidUsage" in output
    assert "nothere" in output


@pytest.mark.slow
def test_configuration_file(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# a comment\nNCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME = lo\n")
    outputs = run_ranks([[], []], HOME=str(tmp_path))
    assert all("good" in text and "NCCL INFO" in text for text in outputs), outputs
    outputs = run_ranks([[], []], HOME=str(tmp_path), NCCL_DEBUG="WARN")
    assert all("good" in text and "NCCL INFO" not in text for text in outputs), outputs


def test_debug_file(tmp_path: Path) -> None:
    outputs = run_ranks([[], []], NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "log.%p"))
    assert all("good" in text and "INFO" not in text for text in outputs), outputs
    logs = list(tmp_path.iterdir())
    assert len(logs) == 2
    assert all("NCCL INFO rank" in log.read_text() for log in logs)
