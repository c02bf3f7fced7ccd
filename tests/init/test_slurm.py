"""A real Slurm of two hosts, from Debian's slurm-wlm: srun, sbatch and salloc as a user types them.

The hosts are network namespaces, each with a name of its own, whose addresses only their /etc/hosts knows.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT, clean_environment
from engines import MOST_SECONDS, RETURNS, RUNS
from hosts import joined, needs_root
from meeting import until
from processes import completed

EXAMPLE = ROOT / "examples" / "all_reduce.py"
# `apt-get install slurm-wlm munge` first; without them the tests fail, and say so.
pytestmark = [pytest.mark.full, pytest.mark.timeout(180), needs_root]

CONFIG = """
ClusterName=test
SlurmctldHost=h1
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser={user}
SlurmdUser={user}
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
ReturnToService=2
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=h[1-2] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

SUM = """
import os, socket, sys
import numpy as np
import pynccl
comm = pynccl.init(timeout=40)
x = comm.all_reduce(np.ones(4))
# In one write: torchrun runs its ranks unbuffered, and joins what they print.
line = " ".join(map(str, ["sum", comm.rank, comm.size, int(x[0]), socket.gethostname()]))
os.write(1, line.encode() + bytes([10]))
for name in sys.argv[1:]:
    getattr(comm, name)()
"""

# torch's own rendezvous knows no Slurm.
TORCH_SUM = """
import os, socket
import torch, torch.distributed as dist
import pynccl.torch
rank, size = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS"))
dist.init_process_group("pynccl", init_method="tcp://h1:29600", rank=rank, world_size=size)
x, y = torch.ones(4), torch.ones(100_000)
dist.all_reduce(x)
# Rank 0 ends without a wait, and its part is done all the same.
work = dist.all_reduce(y, async_op=True)
if rank:
    work.wait()
line = " ".join(map(str, ["sum", rank, size, int(x[0]), socket.gethostname()]))
os.write(1, line.encode() + bytes([10]))
"""

SURVIVE = """
import os, signal, sys
import numpy as np
import pynccl
comm = pynccl.init(timeout=40)
try:
    for step in range(1000):
        if step == 3 and comm.rank == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.ones(4))
except pynccl.RankFailedError as error:
    lost = error.ranks
    comm = comm.shrink(exclude=lost, abort=True)
x = comm.all_reduce(np.ones(4))
print("survivor", comm.rank, comm.size, int(x[0]), *lost, flush=True)
comm.barrier()
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert found, f"{name} is not installed: this test needs Debian's slurm-wlm"
    return found


class Cluster:
    """The daemons in a folder, and commands on the first host."""

    def __init__(self, folder: Path, namespaces: list[str]) -> None:
        self.folder, self.namespaces = folder, namespaces
        self.env = clean_environment() | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PYNCCL_LIBRARY": "cpu",
        }  # fmt: skip
        self.daemons: list[subprocess.Popen[bytes]] = []

    def on(self, host: int, *command: str) -> list[str]:
        """Return a command for a host with its own names and the /sys of all, where slurmd wants cgroups."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespaces[host]}", "unshare", "--uts", "--mount"]
        names = f"mount --bind {self.folder}/hosts /etc/hosts; hostname h{host + 1}"
        return [*enter, "sh", "-c", f'{names}; exec "$@"', "-", *command]

    def start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=out))

    def run(self, *command: str, fails: bool = False, **env: str) -> str:
        """Run a command of Slurm and return what it and its job print."""
        done = subprocess.run(
            self.on(0, tool(command[0]), *command[1:]), env=self.env | env, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    def batch(self, script: str, *options: str, fails: bool = False) -> str:
        """Run a batch script to its end and return what it prints."""
        end = self.folder / "job.end"
        end.unlink(missing_ok=True)
        # sbatch --wait would ask every few seconds only.
        (self.folder / "job.sh").write_text(f"#!/bin/sh\ntrap 'echo $? > end; mv end {end}' EXIT\n{script}\n")
        self.run("sbatch", "--output=job.out", *options, "job.sh")
        until(end.exists, 100)
        text = (self.folder / "job.out").read_text()
        assert (end.read_text() != "0\n") == fails, text
        return text

    def program(self, text: str) -> str:
        """Write a program and return the command line that runs it."""
        (self.folder / "program.py").write_text(text)
        return f"{sys.executable} program.py"

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.out"))

    def stop(self) -> None:
        """Cancel what still runs, and end the daemons."""
        subprocess.run(
            self.on(0, tool("scancel"), "--full", f"--user={getpass.getuser()}"), env=self.env, check=False
        )
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", "spool-h1", "spool-h2"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, user=getpass.getuser()))
    parts = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
    munge = [f"--{name}={folder}/munge/{file}" for name, file in (part.split("=") for part in parts)]
    with joined(2) as hosts:
        names = [f"{address} h{i + 1}" for i, address in enumerate(hosts.addresses)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        made = Cluster(folder, hosts.names)
        try:
            made.start("munged", [tool("munged"), "--foreground", "--force", *munge])
            until((folder / "munge" / "socket").exists)
            made.start("slurmctld", made.on(0, tool("slurmctld"), "-D", "-c"))
            for host in range(2):
                made.start(f"slurmd{host}", made.on(host, tool("slurmd"), "-D"))
            info = made.on(0, tool("sinfo"), "--noheader", "--states=idle", "--format=%D")
            deadline = time.monotonic() + 60
            while completed(info, env=made.env).stdout.strip() != "2":
                assert time.monotonic() < deadline, made.logs()
                time.sleep(0.2)
            yield made
        finally:
            made.stop()
            # slurmd leaves the steps that it has started to themselves.
            until(lambda: not processes_of(folder), 60)


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose environment names this cluster: its daemons, steps and ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURM_CONF={folder}/slurm.conf".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def check_sums(text: str, nranks: int, hosts: int) -> None:
    """Every rank has the sum of all, and the ranks are on so many hosts."""
    found = re.findall(r"sum (\d+) (\d+) (\d+) (h\d)", text)
    assert sorted(line[:3] for line in found) == [
        (str(r), str(nranks), str(nranks)) for r in range(nranks)
    ], text
    assert len({host for *_, host in found}) == hosts, text


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_srun(cluster: Cluster, nranks: int) -> None:
    text = cluster.run("srun", "-N1", f"-n{nranks}", sys.executable, str(EXAMPLE))
    found = re.findall(rf"rank (\d) of {nranks}: success", text)
    assert sorted(map(int, found)) == list(range(nranks))


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
@pytest.mark.parametrize("end", ["", "barrier", "destroy", "barrier destroy"])
def test_two_hosts(cluster: Cluster, mpi: str, end: str) -> None:
    program = cluster.program(SUM).split()
    check_sums(cluster.run("srun", "-N2", "-n4", f"--mpi={mpi}", *program, *end.split()), 4, 2)


@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("how", ["plain", "barrier"])
@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_200_programs_that_return_end_well(cluster: Cluster, nranks: int, how: str) -> None:
    program = cluster.program(RETURNS).split()
    for run in range(RUNS):
        text = cluster.run(
            "srun", "-Q", "-N2", f"-n{nranks}", *program, how, PYNCCL_SECRET="a secret of the job"
        )
        assert text.split() == ["right"] * nranks, f"run {run}: {text}"


@pytest.mark.usefixtures("torch_backend")
def test_the_torch_backend_ends_without_destroy(cluster: Cluster) -> None:
    text = cluster.run("srun", "-N2", "-n4", *cluster.program(TORCH_SUM).split())
    check_sums(text, 4, 2)
    # torch says that it finds no name for its peer's address.
    others = [line for line in text.splitlines() if not line.startswith("sum ") and "[c10d]" not in line]
    assert not others, text


def test_a_secret(cluster: Cluster) -> None:
    secret = "a secret of more than sixteen bytes"
    text = cluster.run("srun", "-N2", "-n2", *cluster.program(SUM).split(), PYNCCL_SECRET=secret)
    check_sums(text, 2, 2)
    assert "no secret" not in text


def test_sbatch(cluster: Cluster) -> None:
    """The batch script's whole job, a step of a part, and two steps at once, which do not meet."""
    step = f"srun --overlap -n2 {cluster.program(SUM)} barrier"
    text = cluster.batch(f"srun {cluster.program(SUM)}; echo next; {step} & {step} & wait", "-N2", "-n4")
    first, second = text.split("next")
    check_sums(first, 4, 2)
    assert re.findall(r"sum \d \d \d", second).count("sum 0 2 2") == 2, second
    assert re.findall(r"sum \d \d \d", second).count("sum 1 2 2") == 2, second


@pytest.mark.parametrize(
    ("options", "tasks"),
    [("", 1), ("-n1", 1), ("-N1 --exclusive", 1), ("-n4", 4), ("-N2", 2), ("-N2 --ntasks-per-node=2", 4)],
)
def test_a_batch_script_without_srun(cluster: Cluster, options: str, tasks: int) -> None:
    text = cluster.batch(cluster.program(SUM), *options.split(), fails=tasks > 1)
    if tasks == 1:
        check_sums(text, 1, 1)
    else:
        assert (
            f"BootstrapError: Slurm's batch script started this process alone, although the job has {tasks}"
            in text
        )


def test_a_shell_of_salloc(cluster: Cluster) -> None:
    """It runs in a step of one task, with the variables of the whole job."""
    program = cluster.program(SUM)
    ours, theirs = pty.openpty()
    command = cluster.on(0, tool("salloc"), "-N2", "-n4")
    shell = subprocess.Popen(
        command, env=cluster.env | {"SHELL": "/bin/sh", "PS1": "$ "}, cwd=cluster.folder,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        # The terminal's echo has no number behind "step".
        os.write(ours, f"echo step $SLURM_STEP_ID; {program}; srun {program}; exit\n".encode())
        text = b""
        while chunk := read(ours):
            text += chunk
        assert shell.wait(20) == 0, text
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    assert b"step 4294967290" in text, text
    alone, _, all_of_them = text.decode().partition("sum 0 1 1 h1")
    assert "sum" not in alone.replace("program.py", ""), text
    check_sums(all_of_them, 4, 2)


def read(terminal: int) -> bytes:
    """Return what a terminal shows next; nothing when its last process has ended."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_shrink(cluster: Cluster, victim: int) -> None:
    program = cluster.program(SURVIVE).split()
    text = cluster.run("srun", "-N2", "-n4", "--kill-on-bad-exit=0", *program, str(victim), fails=True)
    assert sorted(re.findall(r"survivor.*", text)) == [f"survivor {r} 3 3 {victim}" for r in range(3)], text


def test_a_death_ends_the_job(cluster: Cluster) -> None:
    program = cluster.program(SURVIVE.replace("except pynccl.RankFailedError", "except KeyError")).split()
    cluster.run("srun", "-N2", "-n4", "--kill-on-bad-exit=1", *program, "3", fails=True)
    until(lambda: not any("program.py" in command_line(pid) for pid in processes_of(cluster.folder)))


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_a_heterogeneous_job(cluster: Cluster) -> None:
    program = cluster.program(SUM).split()
    check_sums(cluster.run("srun", "-n1", *program, ":", "-n2", *program), 3, 2)


def test_rank_0_on_another_host(cluster: Cluster) -> None:
    """What the error says helps."""
    srun = ("srun", "-N2", "-n2", "--distribution=arbitrary", "--nodelist=h2,h1")
    # Nothing ends rank 1, whose wait is short, so that no line of rank 0's is lost.
    text = cluster.run(*srun, *cluster.program(SUM.replace("40", "5")).split(), fails=True)
    assert "the first host of Slurm's node list is 'h1', not rank 0's; expected MASTER_ADDR with" in text
    check_sums(cluster.run(*srun, *cluster.program(SUM).split(), MASTER_ADDR="h2"), 2, 2)


BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "launcher",
    [
        "pynccl run -n 2 --nnodes 2 --node-rank $SLURM_NODEID --store h1:29400",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint h1:29500 --rdzv-id 1",
    ],
    ids=["pynccl run", "torchrun"],
)
def test_a_launcher_on_each_host(cluster: Cluster, launcher: str) -> None:
    cluster.program(SUM)
    # Each task has the number of its host.
    check_sums(cluster.batch(f"srun sh -c '{BIN}/{launcher} program.py'", "-N2", "--ntasks-per-node=1"), 4, 2)


def test_mpirun_in_a_batch_script(cluster: Cluster) -> None:
    mpirun = f"{BIN}/mpirun --allow-run-as-root --oversubscribe -n 2"
    check_sums(cluster.batch(f"{mpirun} {cluster.program(SUM)}", "-N1", "-n2"), 2, 1)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("bench", "all_reduce", "-b", "8", "-e", "64"), ("# Avg bus bandwidth",)),
        (("doctor",), ("all 4 came, on 2 machines", "each of 2 machines reaches every other", "on 4 ranks")),
    ],
)
def test_tools(cluster: Cluster, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    out = cluster.run("srun", "-N2", "-n4", sys.executable, "-m", "pynccl", *arguments)
    assert all(text in out for text in texts), out
