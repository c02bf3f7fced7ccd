"""`pynccl run --hosts`: what a hosts file may say, and how the machines of a job begin and end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import pynccl_command
from conftest import Launch, clean_environment
from hosts import Hosts, needs_root
from launchers import PYNCCL_RUN
from meeting import until_gone
from processes import completed
from pynccl._run.hosts import SSH as OPENSSH

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import json, os, sys, time
import numpy as np
import pynccl
with pynccl.init(timeout=30) as comm:
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    assert (x == comm.size).all()
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR FOO NCCL_DEBUG_SUBSYS".split()
values = [os.environ.get(name) for name in names]
print(json.dumps([os.getpid(), os.getcwd(), *values, *sys.argv[1:]]), flush=True)
fails = "fails" in sys.argv or ("once" in sys.argv and os.environ["PYNCCL_RESTART_COUNT"] == "0")
if fails and os.environ["RANK"] == "2":
    sys.exit(7)
if "waits" in sys.argv or fails:
    time.sleep(50)
"""
# As ssh runs a command: by a shell, without this environment.
SSH = """#!/bin/sh
host=$1
shift
case $host in
    10.199.0.1) in="ip netns exec {0}" ;;
    10.199.0.2) in="ip netns exec {1}" ;;
    gone) exit 255 ;;
esac
exec env -i PATH="$PATH" HOME=/ $in sh -c "$*"
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, launched: Launch) -> Start:
    """Start a job on the machines of a file."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start_one(
        text: str,
        *args: str,
        options: tuple[str, ...] = (),
        nranks: tuple[str, ...] = ("-n", "2"),
        namespaces: Hosts | None = None,
    ) -> subprocess.Popen[str]:
        (tmp_path / "hosts").write_text(text)
        ssh = tmp_path / "my ssh"
        ssh.write_text(SSH.format(*(namespaces.names if namespaces else ("", ""))))
        ssh.chmod(0o700)
        command = [*PYNCCL_RUN, *nranks, "--cpu", "--no-tag", "--hosts", "hosts"]
        return launched(
            [*command, "--ssh", f"'{ssh}'", *options, "program.py", *args],
            env=clean_environment() | {"NCCL_DEBUG_SUBSYS": "NET"},
            cwd=tmp_path,
        )

    return start_one


def said(out: str) -> list[list[Any]]:
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda words: int(words[2]))


@needs_root
def test_two_machines(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    text = "10.199.0.1  # the first\n\n10.199.0.2 slots=1\n"
    job = start(text, "a b", "-x", options=("-x", "FOO=c d"), namespaces=hosts)
    out, errors = job.communicate(timeout=50)
    assert job.returncode == 0, errors
    assert [words[1:] for words in said(out)] == [
        [str(tmp_path), str(rank), "3", str(local), "10.199.0.1", "c d", "NET", "a b", "-x"]
        for rank, local in ((0, 0), (1, 1), (2, 0))
    ]


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_first_to_fail(start: Start) -> None:
    job = start("127.0.0.1\nuser@localhost slots=1\n", "fails")
    out, errors = job.communicate(timeout=50)
    assert job.returncode == 7, errors
    assert "pynccl run: rank 2 exited with code 7 on node 1" in errors
    until_gone([int(words[0]) for words in said(out)])


@pytest.mark.slow
def test_restarts(start: Start) -> None:
    job = start("127.0.0.1\nuser@localhost slots=1\n", "once", options=("--restarts", "1"))
    out, errors = job.communicate(timeout=50)
    assert job.returncode == 0, errors
    assert [words[2] for words in said(out)] == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_signal_ends_all_machines(number: signal.Signals, start: Start) -> None:
    job = start("127.0.0.1 slots=1\nuser@localhost slots=1\n", "waits")
    assert job.stdout is not None
    pids = [int(json.loads(job.stdout.readline())[0]) for _ in range(2)]
    job.send_signal(number)
    job.communicate(timeout=50)
    assert job.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    until_gone(pids)


def test_one_machine(start: Start) -> None:
    job = start("127.0.0.1 slots=1\n", nranks=())
    out, errors = job.communicate(timeout=50)
    assert job.returncode == 0, errors
    assert [words[2:4] for words in said(out)] == [["0", "1"]]


class Servers:
    """OpenSSH's server in each namespace, and how its client reaches them."""

    def __init__(self, hosts: Hosts, folder: Path, launched: Launch) -> None:
        key, sshd = folder / "key", shutil.which("sshd", path="/usr/sbin:/usr/bin")
        assert sshd, "expected Debian's openssh-server"
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=20)
        (folder / "known").touch()
        options = {"HostKey": key, "AuthorizedKeysFile": f"{key}.pub", "StrictModes": "no", "PidFile": "none"}
        options |= {"PermitRootLogin": "yes", "PasswordAuthentication": "no"}
        for name in hosts.names:
            command = [sshd, "-D", "-e", "-p", "2222", "-f", "/dev/null"]
            command += [word for item in options.items() for word in ("-o", "{}={}".format(*item))]
            launched(["ip", "netns", "exec", name, *command])
        client = {"Port": 2222, "IdentityFile": key, "StrictHostKeyChecking": "accept-new"}
        client |= {"UserKnownHostsFile": folder / "known", "ConnectionAttempts": 20, "LogLevel": "ERROR"}
        (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in client.items()))
        self.command = f"{OPENSSH} -F {folder / 'config'}"


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("breaks", [False, True])
def test_openssh(breaks: bool, hosts: Hosts, tmp_path: Path, launched: Launch) -> None:
    """Two machines, whose connection may break: then the other ranks end, too."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "hosts").write_text("root@10.199.0.1 slots=1\nroot@10.199.0.2 slots=1\n")
    servers = Servers(hosts, tmp_path, launched)
    words = ["--cpu", "--no-tag", "--hosts", "hosts", "--ssh", servers.command, "program.py"]
    job = launched(
        ["ip", "netns", "exec", hosts.names[0], *PYNCCL_RUN, *words, *(["waits"] if breaks else [])],
        env=clean_environment(),
        cwd=tmp_path,
    )
    if not breaks:
        out, errors = job.communicate(timeout=50)
        assert job.returncode == 0, errors
        assert [words[2:4] for words in said(out)] == [["0", "2"], ["1", "2"]]
        return
    assert job.stdout is not None
    pids = [int(json.loads(job.stdout.readline())[0]) for _ in range(2)]
    inside = completed(["ip", "netns", "pids", hosts.names[1]])
    for pid in map(int, inside.stdout.split()):
        if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
            os.kill(pid, signal.SIGKILL)
    _, errors = job.communicate(timeout=50)
    assert job.returncode == 255
    assert "pynccl run: the launcher on root@10.199.0.2 ended with code 255" in errors
    until_gone(pids)


@pytest.mark.slow
def test_a_machine_that_ssh_does_not_reach(start: Start) -> None:
    job = start("127.0.0.1 slots=1\ngone\n", options=("--timeout", "3"))
    _, errors = job.communicate(timeout=50)
    assert job.returncode == 255
    assert "pynccl run: the launcher on gone ended with code 255" in errors
    assert "no pynccl run with --node-rank 1 has come to" in errors


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", (), "hosts names no machine; expected one on each line"),
        ("a slots=0", (), "hosts, line 1: 'a slots=0'; expected HOST or HOST slots=N"),
        ("a\nb 4", (), "hosts, line 2: 'b 4'; expected HOST or HOST slots=N"),
        ("a\0b", (), "hosts, line 1: 'a\\x00b'; expected HOST"),
        ("-oProxyCommand=x", (), "line 1: '-oProxyCommand=x'; expected HOST"),
        ("a", ("--nnodes", "2"), "--hosts with --nnodes or --node-rank"),
        ("a", ("--status",), "--status with --hosts: expected one machine"),
        ("a", ("--store", "x"), "--store x: expected HOST:PORT"),
        ("a", ("--ssh", "no-such-command"), "--ssh 'no-such-command': expected a command that can be"),
        (
            "a",
            ("--ssh", "'"),
            """--ssh "'": expected a command that can be executed (No closing quotation)""",
        ),
    ],
)
def test_wrong_files_and_options(text: str, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    done = pynccl_command("run", "-n", "2", "--hosts", str(hosts), *options, __file__)
    assert done.exit_code == 2
    assert words in done.output


def test_a_machine_without_a_number_of_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb\n")
    done = pynccl_command("run", "--hosts", str(hosts), __file__)
    assert done.exit_code == 2
    assert "Missing option '-n'" in done.output
    assert "or give b slots=N" in " ".join(done.output.split())
