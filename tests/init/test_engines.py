"""The engines that start ranks, as a user starts them: mpirun of two MPIs, torchrun, Slurm, Ray, Dask.

All run the program of examples/all_reduce.py on the CPU library. Ranks that use torch.distributed too, before
and after, do so under each launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Script
from engines import (
    BIN,
    MOST_SECONDS,
    RETURNS,
    ROOT,
    RUNS,
    Command,
    end_well,
    environment,
    open_mpi,
    outputs,
    pynccl_run,
    torchrun,
)
from hosts import Hosts, needs_root
from meeting import free_port
from processes import piped

EXAMPLES = ROOT / "examples"
MPICH = "mpich==5.0.2"

# Every engine with two ranks; `make test-full` has the other numbers too.
RANKS = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]


def run(command: Command, **env: str) -> str:
    """Run a command in a process group of its own, and leave nothing of it behind; return what it printed."""
    process = piped(command, env=environment(**env), start_new_session=True)
    try:
        out, errors = process.communicate(timeout=50)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, out + errors
    return out


def run_ranks(command: Command, ranks: list[dict[str, str]]) -> str:
    """Run a command once for each rank, as a launcher does that only sets variables."""
    return "".join(outputs([(command, environment(**env)) for env in ranks]))


def ranks_of(text: str, nranks: int) -> list[int]:
    """Return the ranks that say that they have succeeded."""
    return sorted(int(r) for r in re.findall(rf"rank (\d+) of {nranks}: success", text))


def example(name: str = "all_reduce.py") -> Command:
    return [sys.executable, str(EXAMPLES / name), "--count", "100000"]


# --- the launchers ---


@pytest.fixture(scope="session")
def mpich() -> dict[str, str]:
    """Install MPICH beside the tests, where its mpirun does not replace Open MPI's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pynccl-tests"
    cache.mkdir(parents=True, exist_ok=True)
    prefix = cache / MPICH
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (prefix / "bin" / "mpiexec").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            options = ["--no-deps", "--ignore-installed", "--prefix", str(prefix), MPICH]
            subprocess.run([*pip, *options], check=True, timeout=50)
    return {
        "MPIEXEC": str(prefix / "bin" / "mpiexec"),
        "MPI4PY_MPIABI": "mpich",
        "LD_LIBRARY_PATH": str(prefix / "lib"),
    }


def deepspeed(nranks: int) -> list[dict[str, str]]:
    """Return what deepspeed's launcher sets for each rank."""
    common = {"WORLD_SIZE": str(nranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": str(nranks)}
    return [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(nranks)]


def slurm(nranks: int) -> list[dict[str, str]]:
    """Return what srun sets for each rank."""
    common = {"SLURM_NTASKS": str(nranks), "SLURM_JOB_ID": str(10_000 + os.getpid()), "SLURM_STEP_ID": "0"}
    common |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost"}
    return [common | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(nranks)]


@pytest.mark.parametrize("nranks", RANKS)
def test_open_mpi(nranks: int) -> None:
    assert ranks_of(run([*open_mpi(nranks), *example()]), nranks) == list(range(nranks))


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("nranks", RANKS)
def test_mpich(mpich: dict[str, str], nranks: int) -> None:
    text = run([mpich["MPIEXEC"], "-n", str(nranks), *example()], **mpich)
    assert ranks_of(text, nranks) == list(range(nranks))


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("how", ["plain", "barrier"])
@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_200_programs_that_return_end_well(
    mpich: dict[str, str], script: Script, nranks: int, how: str
) -> None:
    command = [mpich["MPIEXEC"], "-n", str(nranks), sys.executable, script(RETURNS), how]
    end_well(command, nranks, RUNS, **mpich)


@pytest.mark.slow
@pytest.mark.network
def test_the_wrong_mpirun(mpich: dict[str, str]) -> None:
    """mpi4py with Open MPI under MPICH's mpirun: each rank would be alone, and says so."""
    code = "import pynccl\ntry: pynccl.init(timeout=5)\nexcept pynccl.BootstrapError as e: print(f'{e}')"
    text = run([mpich["MPIEXEC"], "-n", "2", sys.executable, "-c", code])
    said = re.findall(r"MPICH's variables \(.*?\) started 2 ranks, but mpi4py sees 1: it uses", text)
    assert len(said) == 2, text


@pytest.mark.slow
@pytest.mark.parametrize("nranks", RANKS)
def test_torchrun(nranks: int) -> None:
    assert ranks_of(run([*torchrun(nranks), *example()[1:]]), nranks) == list(range(nranks))


@pytest.mark.slow
def test_two_nodes_of_torchrun_on_one_machine() -> None:
    place = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *place, "--master-port", str(free_port())]
    agents = [{"PET_NODE_RANK": str(node)} for node in range(2)]
    assert ranks_of(run_ranks([*command, *example()[1:]], agents), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("nranks", RANKS)
def test_pynccl_run(nranks: int) -> None:
    assert ranks_of(run([*pynccl_run(nranks), *example()[1:]]), nranks) == list(range(nranks))


@pytest.mark.slow
@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("launcher", [deepspeed, slurm])
def test_variables(launcher: Callable[[int], list[dict[str, str]]], nranks: int) -> None:
    assert ranks_of(run_ranks(example(), launcher(nranks)), nranks) == list(range(nranks))


@pytest.mark.slow
@pytest.mark.parametrize("nranks", RANKS)
def test_ray(nranks: int) -> None:
    text = run([*example("ray_actors.py"), "-n", str(nranks)])
    assert ranks_of(text, nranks) == list(range(nranks))


@pytest.mark.slow
@pytest.mark.parametrize("nranks", RANKS)
def test_dask(nranks: int) -> None:
    text = run([*example("dask_workers.py"), "-n", str(nranks)])
    assert ranks_of(text, nranks) == list(range(nranks))


@pytest.mark.slow
def test_torchrun_under_mpirun() -> None:
    """Two jobs of torchrun, started by mpirun: RANK counts, and the jobs do not meet."""
    text = run([*open_mpi(2), *torchrun(2), *example()[1:]])
    assert ranks_of(text, 2) == [0, 0, 1, 1]


@pytest.mark.full
def test_mpirun_inside_of_a_slurm_job() -> None:
    """Every rank sees the variables of the batch script."""
    text = run([*open_mpi(2), *example()], **slurm(2)[0])
    assert ranks_of(text, 2) == [0, 1]


@pytest.mark.full
def test_the_script_for_slurm(tmp_path: Path) -> None:
    """srun is not here: what stands in for it runs the command once for each rank, as srun would."""
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\nfor rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done\n'
        "wait %1 && wait %2\n"
    )
    srun.chmod(0o755)
    common = {k: v for k, v in slurm(2)[0].items() if k not in ("SLURM_PROCID", "SLURM_LOCALID")}
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    text = run(["sh", str(EXAMPLES / "slurm.sh"), "--count", "1000"], PATH=path, **common)
    assert ranks_of(text, 2) == [0, 1]


# --- several machines ---


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_on_two_nodes(hosts: Hosts, rendezvous: str) -> None:
    port = str(free_port())
    meeting = {
        "static": ["--master-addr", "10.199.0.1", "--master-port", port],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.199.0.1:{port}", "--rdzv-id", "job"],
    }[rendezvous]
    commands = []
    for node, name in enumerate(hosts.names):
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--local-addr", f"10.199.0.{node + 1}"]
        # An agent does not know the address as its own: the machine's name has another one.
        host = ["--rdzv-conf", f"is_host={1 - node}"]
        options += ["--node-rank", str(node)] if rendezvous == "static" else host
        command = [sys.executable, "-m", "torch.distributed.run", *options, *meeting, *example()[1:]]
        commands.append((["ip", "netns", "exec", name, *command], environment()))
    assert sorted(ranks_of(out, 4) for out in outputs(commands)) == [[0, 1], [2, 3]]


# As mpirun's ssh: its first argument names the host.
AGENT = """#!/bin/sh
shift
exec ip netns exec {} unshare --uts sh -c "hostname 10.199.0.2; $*"
"""


@needs_root
def test_mpirun_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The control channel, which the time-out opens, goes over the interface to rank 0's host."""
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(hosts.names[1]))
    agent.chmod(0o700)
    first = [*hosts.enter(0), "unshare", "--uts", "sh", "-c", 'hostname 10.199.0.1; exec "$@"', "sh"]
    options = ["--host", "10.199.0.1:2,10.199.0.2:2", "--prtemca", "plm_ssh_agent", str(agent)]
    options += ["--map-by", "ppr:2:node", "--mca", "btl_tcp_if_include", "10.199.0.0/24"]
    command = [*first, *open_mpi(4), *options, *example()]
    (said,) = outputs([(command, environment(PYNCCL_TIMEOUT="30", NCCL_DEBUG="INFO"))])
    assert ranks_of(said, 4) == [0, 1, 2, 3]
    assert "4 ranks on 2 hosts" in said


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("host", ["10.199.0.1", "[fd99::1]"])
def test_a_port_on_two_machines(hosts: Hosts, host: str) -> None:
    method = f"tcp://{host}:{free_port()}"
    commands = [
        (
            ["ip", "netns", "exec", name, *example(), "--method", method],
            environment(RANK=str(rank), WORLD_SIZE="2", PYNCCL_SECRET="known to both of them"),
        )
        for rank, name in enumerate(hosts.names)
    ]
    assert [ranks_of(out, 2) for out in outputs(commands)] == [[0], [1]]


# --- with torch.distributed in the same program, which takes MASTER_PORT ---

BOTH = """
import os, sys
import numpy as np
import pynccl

def ours():
    with pynccl.init(timeout=20) as comm:
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()
        return comm.rank, comm.size

def torchs():
    import torch, torch.distributed as dist
    for names in (("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"),
                  ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE")):
        os.environ[names[0] + "_"] = next(os.environ[name] for name in names if name in os.environ)
    rank, size = int(os.environ["RANK_"]), int(os.environ["WORLD_SIZE_"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == size
    return rank, size

results = [ours() if letter == "p" else torchs() for letter in sys.argv[1]]
assert len(set(results)) == 1
import torch.distributed as dist
dist.destroy_process_group()
print(f"rank {results[0][0]} of {results[0][1]}: success", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "order"),
    [
        ("torchrun", "ptp"),
        pytest.param("torchrun", "tp", marks=pytest.mark.slow),
        pytest.param("pynccl run", "ptp", marks=pytest.mark.slow),
        pytest.param("mpirun", "tp", marks=pytest.mark.slow),
        pytest.param("pynccl run", "tp", marks=pytest.mark.full),
        pytest.param("mpirun", "ptp", marks=pytest.mark.full),
        *(
            pytest.param(engine, order, marks=pytest.mark.full)
            for engine in ("deepspeed", "slurm")
            for order in ("ptp", "tp")
        ),
    ],
)
def test_together_with_torch(engine: str, order: str, script: Script) -> None:
    script = [script(BOTH), order]
    python = [sys.executable, *script]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if engine == "torchrun":
        text = run([*torchrun(2), *script])
    elif engine == "pynccl run":
        text = run([*pynccl_run(2), *script])
    elif engine == "mpirun":
        text = run([*open_mpi(2), *python], **master)
    else:
        ranks = deepspeed(2) if engine == "deepspeed" else [env | master for env in slurm(2)]
        text = run_ranks(python, ranks)
    assert ranks_of(text, 2) == [0, 1]


# --- torchrun's agent and its store ---

RESTARTED = """
import os, sys
import pynccl
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
comm = pynccl.init(timeout=20)
if attempt == "0":
    os._exit(1)
comm.destroy()
print(f"rank {comm.rank} of {comm.size}: success", flush=True)
"""


@pytest.mark.full
def test_a_restart_by_torchrun(script: Script) -> None:
    """What the ranks before have left in the agent's store does not disturb those that come after."""
    assert ranks_of(run([*torchrun(2, "--max-restarts", "1"), script(RESTARTED)]), 2) == [0, 1]


# torch first, as in every program for torchrun: on a busy machine its import takes longer than init waits.
NEVER = """
import os, sys, time
import torch
import pynccl
if os.environ["RANK"] == "1":
    time.sleep(8)
    sys.exit()
start = time.monotonic()
try:
    pynccl.init(timeout=4)
except pynccl.BootstrapError as error:
    assert time.monotonic() - start < 5
    print(f"error: {error}", flush=True)
"""


@pytest.mark.full
def test_never_under_torchrun(script: Script) -> None:
    text = run([*torchrun(3), script(NEVER)])
    assert len(re.findall(r"torchrun's store at \S+; ranks that never arrived: 1 \(1 of 3\)", text)) == 2


INTERRUPTED = """
import os, signal, sys, time
import pynccl
if "OMPI_COMM_WORLD_RANK" in os.environ:
    from mpi4py import MPI
else:
    import torch
signal.signal(signal.SIGALRM, signal.default_int_handler)
if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    time.sleep(7)
    sys.exit()
signal.setitimer(signal.ITIMER_REAL, 1)
start = time.monotonic()
try:
    pynccl.init(timeout=40)
except (KeyboardInterrupt, pynccl.BootstrapError) as error:
    # Rank 0, interrupted, may have told so before the other's own alarm.
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.monotonic() - start < 6 and (not str(error) or "KeyboardInterrupt" in str(error)), error
    print("interrupted", flush=True)
"""


@pytest.mark.full
def test_ctrl_c_under_torchrun(script: Script) -> None:
    assert run([*torchrun(3), script(INTERRUPTED)]).count("interrupted") == 2


# --- MPI ---

MPI_NEVER = """
import os, sys, time
from mpi4py import MPI
import pynccl
rank, absent = MPI.COMM_WORLD.rank, int(sys.argv[1])
start = time.monotonic()
if rank != absent:
    try:
        pynccl.init("mpi", timeout=1.5)
    except pynccl.BootstrapError as error:
        assert time.monotonic() - start < 2.5
        print(f"error: {error}", flush=True)
time.sleep(max(0, start + 3 - time.monotonic()))
# Late is not lost: the same communicator can be used again.
comm = pynccl.init("mpi", timeout=20)
print(f"rank {comm.rank} of {comm.size}: success", flush=True)
comm.destroy()
"""


@pytest.mark.full
@pytest.mark.parametrize("absent", [0, 2])
def test_never_under_mpi(absent: int, script: Script) -> None:
    text = run([*open_mpi(3), sys.executable, script(MPI_NEVER), str(absent)])
    assert len(re.findall(rf"ranks that never arrived: {absent} \(1 of 3\)", text)) == 2
    assert ranks_of(text, 3) == [0, 1, 2]


MPI_FAILS_LATER = """
import os, sys, time
from mpi4py import MPI
import pynccl
start = time.monotonic()
for who in (0, 2):
    config = {"minCTAs": 8, "maxCTAs": 2} if MPI.COMM_WORLD.rank == who else None
    try:
        pynccl.init("mpi", config=config, timeout=20)
    except pynccl.BootstrapError as error:
        assert f"rank {who} of 3 failed: NcclInvalidArgument" in str(error), error
        print("told", flush=True)
    except pynccl.NcclInvalidArgument:
        print("own", flush=True)
assert time.monotonic() - start < 10
pynccl.init("mpi", timeout=20).destroy()
"""


@pytest.mark.full
def test_a_failure_after_the_id_is_out_under_mpi(script: Script) -> None:
    words = run([*open_mpi(3), sys.executable, script(MPI_FAILS_LATER)]).split()
    assert (words.count("told"), words.count("own")) == (4, 2)


MPI_STOPPED = """
import os, signal, time
import pynccl
from mpi4py import MPI
from pynccl import capi
def stop(*_):
    if os.fork() == 0:
        time.sleep(6)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
if MPI.COMM_WORLD.rank == 1:
    capi.ncclCommInitRank = stop
try:
    pynccl.init("mpi", timeout=2)
except pynccl.NcclError as error:
    print(getattr(error, "ranks", None), error, flush=True)
"""


@pytest.mark.full
def test_stopped_in_the_creation_under_mpi(script: Script) -> None:
    text = run([*open_mpi(3), sys.executable, script(MPI_STOPPED)])
    assert text.count("[1] rank 1 did not respond while the communicator was created") == 2, text


@pytest.mark.full
def test_ctrl_c_under_mpi(script: Script) -> None:
    start = time.monotonic()
    assert run([*open_mpi(3), sys.executable, script(INTERRUPTED)]).count("interrupted") == 2
    assert time.monotonic() - start < 20


MPI_PARTS = """
import os
from mpi4py import MPI
import pynccl
world = MPI.COMM_WORLD
half = world.Split(world.rank % 2)
with pynccl.init(half, timeout=20) as comm:
    devices = world.allgather(comm.device)
    assert sorted(devices) == list(range(world.size)), devices
print(f"rank {world.rank} of {world.size}: success", flush=True)
"""


@pytest.mark.full
def test_parts_of_an_mpi_job_have_devices_of_their_own(script: Script) -> None:
    assert ranks_of(run([*open_mpi(4), sys.executable, script(MPI_PARTS)]), 4) == [0, 1, 2, 3]


def test_a_program_that_returns_ends_well(script: Script) -> None:
    assert run([*open_mpi(3), sys.executable, script(RETURNS), "broadcast"]).count("right") == 3
