"""Every command and program in the documents: run as it stands there, or named here with the reason."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import ROOT, clean_environment
from meeting import free_port
from test_engines import environment

BIN = Path(sys.executable).parent
_PROGRAMS = (
    r"pynccl (?:run|trace|info|cpu-library)|python3?|torchrun|mpirun|deepspeed|srun|sbatch|make|pip|cc"
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{_PROGRAMS}) (?!is|in|of|and)\S.*")

# What the ranks of a user's own program do here.
TRAIN = """
import numpy as np, pynccl
with pynccl.init() as comm:
    x = comm.all_reduce(np.ones(4))
print("rank", comm.rank, "has", x[0])
"""

# What ends with success, and prints this.
RUNS = {
    "pynccl run -n 4 examples/all_reduce.py": "rank 3 of 4: success",
    "pynccl run -n 4 examples/data_parallel.py": "epoch 20",
    "pynccl run -n 4 examples/data_parallel.py --check": "bitwise equal on 4 ranks",
    "python examples/survive.py": "all survivors and the new rank have finished",
    "python examples/survive.py -n 3 --seed 5": "all survivors and the new rank have finished",
    "mpirun -n 4 python examples/all_reduce.py": "rank 3 of 4: success",
    "torchrun --nproc-per-node 4 examples/all_reduce.py": "rank 3 of 4: success",
    "python examples/ray_actors.py -n 4": "rank 3 of 4: success",
    "python examples/dask_workers.py -n 4": "rank 3 of 4: success",
    "torchrun --nproc-per-node 4 examples/torch_collectives.py": "rank: 3, before: [0], after: [4]",
    "torchrun --nproc-per-node 2 examples/torch_training.py data_parallel": "",
    "torchrun --nproc-per-node 4 examples/torch_pipeline.py": "rank 3, stage 1",
    "torchrun --nproc-per-node 3 --max-restarts 1 examples/torch_elastic.py": "",
    "torchrun --nproc-per-node 4 examples/torch_mpi_discovery.py": "",
    "mpirun -n 4 python examples/torch_mpi_discovery.py": "",
    "PYNCCL_LIBRARY=cpu PYNCCL_CPU_DEVICES=4 pynccl run -n 4 train.py": "rank 3 has 4.0",
    "PYNCCL_TRACE_DIR=traces pynccl run -n 4 train.py": "rank 3 has 4.0",
    "pynccl trace traces": "of 4 ranks",
    "python tests/fault_schedules.py --seed 7": "",
    'python -c "import secrets; print(secrets.token_urlsafe(24))"': "",
}
# The quick ones; `make test-full` runs the others.
QUICK = (
    "python examples/survive.py",
    "PYNCCL_TRACE_DIR=traces pynccl run -n 4 train.py",
    "PYNCCL_LIBRARY=cpu PYNCCL_CPU_DEVICES=4 pynccl run -n 4 train.py",
)
# What stands before one that needs it.
BEFORE = {"pynccl trace traces": "PYNCCL_TRACE_DIR=traces pynccl run -n 4 train.py"}
# Two ranks or nodes: the command, and what is another on the second.
PAIRS = {
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 "
    "examples/all_reduce.py": ("--node-rank 0", "--node-rank 1", 8),
    "RANK=0 WORLD_SIZE=2 python examples/all_reduce.py --method tcp://HOST0:29500": ("RANK=0", "RANK=1", 2),
}
ELSEWHERE = {
    "make ": "the Makefile's own; CI runs them",
    "pip ": "changes the environment; tests/test_packaging.py installs the wheel",
    "pynccl run -n 4 hello.py": "tests/test_readme.py, with what it prints",
    "mpirun -n 4 python program.py": "stands for a program of the reader's",
    "cc ": "tests/test_c_users.py, with what it prints",
    "sbatch ": "tests/test_slurm.py, where Slurm is installed",
    "srun ": "tests/test_slurm.py, where Slurm is installed",
    "deepspeed ": "needs GPUs to start; tests/test_engines.py sets what it sets",
    "mpirun -n 2 python examples/torch_deepspeed.py": "tests/test_torch_examples.py",
    "torchrun --nproc-per-node 2 examples/torch_deepspeed.py": "tests/test_torch_examples.py",
    "torchrun --nproc-per-node 2 examples/torch_accelerate.py": "tests/test_torch_examples.py",
    "python -m pynccl.torch build": "tests/test_torch_groups.py",
    "python tests/fault_schedules.py --count": "tests/test_fault_schedules.py",
    "python tests/test_torch_suite.py": "torch's own tests, for `make test-full`",
    "python tools/check_torch.py": "installs many torches",
    "python benchmarks/": "`make bench`, on a machine that does nothing else",
}


def shown() -> set[str]:
    """Return the commands of code blocks, of the tables' code and of the programs' first lines."""
    found = set()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("*/README.md"),
        *ROOT.glob("docs/*.md"),
    ):
        text = path.read_text()
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.M | re.S):
            found |= {line.strip().removeprefix("$ ") for line in block.splitlines()}
        found |= {line.strip() for line in text.splitlines() if line.startswith("    ")}
        found |= {
            code for code in re.findall(r"`([^`\n]+)`", text) if re.search(r"\.(py|sh)\b|^python", code)
        }
    for path in ROOT.glob("examples/*.py"):
        found |= {line.strip() for line in path.read_text().split('"""')[1].splitlines()}
    commands = {match[0] for text in found if (match := COMMAND.match(text))}
    return {re.sub(r"  +#.*", "", command).strip() for command in commands}


def test_every_command_is_known() -> None:
    known = {*RUNS, *PAIRS}
    unknown = {c for c in shown() - known if not c.startswith(tuple(ELSEWHERE))}
    assert not unknown, "neither run here nor named as run elsewhere"
    assert known <= shown(), f"no longer documented: {known - shown()}"


def as_written(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command in a shell, as a user of the CPU library does in a checkout."""
    more = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # Containers and small machines.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    # `pynccl run` and examples/survive.py choose the CPU library by themselves.
    env = environment(**more)
    if command.startswith(("pynccl", "python examples/survive")):
        del env["PYNCCL_LIBRARY"]
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], seconds: float) -> str:
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, out
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that looks like the checkout, with a program of the user's."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=() if c in QUICK else pytest.mark.full) for c in RUNS]
)
def test_a_command(command: str, folder: Path) -> None:
    if command in BEFORE:
        finished(as_written(BEFORE[command], folder), 100)
    assert RUNS[command] in finished(as_written(command, folder), 250)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", PAIRS)
def test_two_of_a_command(command: str, folder: Path) -> None:
    first, second, nranks = PAIRS[command]
    here = command.replace("HOST0", "127.0.0.1").replace("29500", str(free_port()))
    both = [as_written(text, folder) for text in (here, here.replace(first, second))]
    out = "".join(finished(process, 250) for process in both)
    assert f"rank {nranks - 1} of {nranks}: success" in out


# --- programs -----------------------------------------------------------------------------------------------


def blocks(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


PRELUDE = """
import numpy as np
import pynccl
comm = pynccl.init(timeout=60)
x, y, s = np.ones(8), np.zeros(8), pynccl.Stream()
counts = [2] * comm.size
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
"""


@pytest.mark.parametrize("name", ["communicator.md", "hangs.md"])
def test_the_blocks_of(name: str, tmp_path: Path) -> None:
    """All of a page one after another, on four ranks."""
    found = blocks(name)
    assert len(found) == {"communicator.md": 5, "hangs.md": 1}[name]
    program = "\n".join([PRELUDE, *map(textwrap.dedent, found), "print('done')\n"])
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "pynccl", "run", "-n", "4", "--cpu", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 4
