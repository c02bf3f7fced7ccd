"""A real Slurm of one node, from Debian's slurm-wlm: the variables of srun itself."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT, clean_environment
from meeting import free_port
from processes import completed, piped

EXAMPLE = ROOT / "examples" / "all_reduce.py"
# `apt-get install slurm-wlm` first; without it the test fails, and says so.
pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

CONFIG = """
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmUser={user}
SlurmdUser={user}
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ReturnToService=2
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert found, f"{name} is not installed: this test needs Debian's slurm-wlm"
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "spool", "state"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host, port, other = socket.gethostname().partition(".")[0], free_port(), free_port()
    options = {"host": host, "folder": folder, "user": getpass.getuser(), "cpus": os.cpu_count()}
    (folder / "slurm.conf").write_text(CONFIG.format(port=port, other=other, **options))
    env = clean_environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "PYNCCL_LIBRARY": "cpu"}
    parts = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
    munge = [f"--{name}={folder}/munge/{file}" for name, file in (part.split("=") for part in parts)]
    commands = (
        [tool("munged"), "--foreground", "--force", *munge],
        [tool("slurmctld"), "-D", "-c"],
        [tool("slurmd"), "-D", "-N", host],
    )
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{Path(command[0]).name}.out", "wb") as out:
                daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            time.sleep(1)
        deadline = time.monotonic() + 30
        while "idle" not in completed([tool("sinfo")], env=env).stdout:
            assert time.monotonic() < deadline, (folder / "slurmd.out").read_text()
            time.sleep(0.2)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_srun(cluster: dict[str, str], nranks: int) -> None:
    command = [tool("srun"), "--overcommit", "-n", str(nranks), sys.executable, str(EXAMPLE)]
    done = completed(command, env=cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(rf"rank (\d) of {nranks}: success", done.stdout)
    assert sorted(map(int, found)) == list(range(nranks))


def test_two_jobs_at_once(cluster: dict[str, str]) -> None:
    command = [tool("srun"), "--overcommit", "--overlap", "-n", "2", sys.executable, str(EXAMPLE)]
    jobs = [piped(command, env=cluster, stderr=subprocess.STDOUT) for _ in range(2)]
    for job in jobs:
        text, _ = job.communicate(timeout=100)
        assert job.returncode == 0, text
        assert text.count("success") == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bench", "all_reduce", "-b", "8", "-e", "64"), "# Avg bus bandwidth"),
        (("doctor",), "1 MiB on 2 ranks"),
    ],
)
def test_tools(cluster: dict[str, str], arguments: tuple[str, ...], text: str) -> None:
    command = [tool("srun"), "--overcommit", "-n", "2", sys.executable, "-m", "pynccl", *arguments]
    done = completed(command, env=cluster, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert text in done.stdout
