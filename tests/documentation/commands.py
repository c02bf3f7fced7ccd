"""The commands in text, tables and the examples' docstrings: run here, or named with the reason."""

from __future__ import annotations

import re

from conftest import ROOT

from .pages import PAGES

_PROGRAMS = (
    r"pynccl (?:run|bench|doctor|trace|ras|info|cpu-library)|python3?|torchrun|mpirun|deepspeed|srun|sbatch|"
    r"make|pip|cc"
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{_PROGRAMS}) (?!is|in|of|and)\S.*")

# Each ends with success, and prints this.
RUNS = {
    "pynccl run -n 4 examples/all_reduce.py": "rank 3 of 4: success",
    "pynccl run -n 4 examples/asynchronous.py": "rank 3 of 4: all sums are right, the loop",
    "pynccl run -n 4 examples/halo_exchange.py": "rank 3 of 4: the three grids are equal",
    "pynccl run -n 4 examples/ring_all_reduce.py --plot ring.png": "rank 3 of 4: all sums are right",
    "pynccl run -n 3 examples/key_value_cache.py": "rank 2 of 3: 64 blocks, 2097152 bytes, received",
    "pynccl run -n 4 examples/data_parallel.py": "epoch 20",
    "pynccl run -n 4 examples/data_parallel.py --check": "bitwise equal on 4 ranks",
    "pynccl run -n 4 examples/tensor_parallel.py": "2 x 2 ranks, 4 heads each",
    "pynccl run -n 4 examples/tensor_parallel.py --tensor 4": "1 x 4 ranks, 2 heads each",
    "pynccl run -n 4 examples/pipeline_parallel.py": "1f1b: at most 4 of 8 micro-batches held",
    "pynccl run -n 4 examples/pipeline_parallel.py --micro-batches 16": "gpipe: at most 16 of 16",
    "pynccl run -n 4 examples/sharded_optimizer.py": "bytes of Adam's state: 1104 on each of 4 ranks",
    "pynccl run -n 4 examples/mixture_of_experts.py": "outputs and gradients differ from one rank's by",
    "pynccl run -n 4 examples/ring_attention.py": "24 of 96 tokens on each of 4 ranks",
    "pynccl run -n 4 examples/ring_attention.py --causal": "outputs and gradients differ from one rank's by",
    "python examples/survive.py": "all survivors and the new rank have finished",
    "python examples/survive.py -n 3 --seed 5": "all survivors and the new rank have finished",
    "mpirun -n 4 python examples/all_reduce.py": "rank 3 of 4: success",
    "torchrun --nproc-per-node 4 examples/all_reduce.py": "rank 3 of 4: success",
    "PYNCCL_LIBRARY=cpu python examples/ray_actors.py -n 4": "rank 3 of 4: success",
    "PYNCCL_LIBRARY=cpu python examples/dask_workers.py -n 4": "rank 3 of 4: success",
    "torchrun --nproc-per-node 4 examples/torch_collectives.py": "rank: 3, before: [0], after: [4]",
    "torchrun --nproc-per-node 2 examples/torch_training.py data_parallel": "",
    "torchrun --nproc-per-node 4 examples/torch_pipeline.py": "rank 3, stage 1",
    "torchrun --nproc-per-node 3 --max-restarts 1 examples/torch_elastic.py": "",
    "torchrun --nproc-per-node 4 examples/torch_mpi_discovery.py": "",
    "mpirun -n 4 python examples/torch_mpi_discovery.py": "",
    'python -c "import secrets; print(secrets.token_urlsafe(24))"': "",
    "pynccl bench all_reduce --help": "The flags are those of nccl-tests",
    "pynccl bench -n 4 all_reduce …": "# Out of bounds values : 0 OK",
    "pynccl bench all_reduce -n 4 …": "# Out of bounds values : 0 OK",
    "pynccl bench all_reduce -n 4 --iters 100 …": " iters: 100 ",
    "pynccl bench all_reduce -g 4 …": "# Out of bounds values : 0 OK",
    "pynccl run -n 4 --no-tag -m pynccl bench all_reduce …": "# Out of bounds values : 0 OK",
    "mpirun -n 4 pynccl bench all_reduce …": "# Out of bounds values : 0 OK",
    "torchrun --nproc-per-node 4 -m pynccl bench all_reduce …": "# Out of bounds values : 0 OK",
    "pynccl run -n N -m pynccl doctor": "all_reduce",
    "mpirun -n N pynccl doctor": "all_reduce",
    "torchrun --no-python pynccl doctor": "all_reduce",
    "pynccl info --json": '"version"',
    "pynccl info --topology": "NUMA node",
    "pynccl trace FILE…": "",
    "pynccl trace --chrome out.json FILE…": "",
    "pynccl trace --html out.html FILE…": "",
}
# What a reader puts in the place of these.
PLACEHOLDERS = {" N ": " 2 ", "FILE…": "traces", "…": "-b 8 -e 64 -n 2 -w 1"}
# `make test` runs these; `make test-full` the others.
QUICK = ("python examples/survive.py",)
# Two ranks or nodes: the command, and what is another on the second.
PAIRS = {
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 "
    "examples/all_reduce.py": ("--node-rank 0", "--node-rank 1", 8),
    "RANK=0 WORLD_SIZE=2 python examples/all_reduce.py --method tcp://HOST0:29500": ("RANK=0", "RANK=1", 2),
}
# How a command begins, and why it is not run here.
ELSEWHERE = {
    "pynccl bench --": "names an option; tests/tools/test_bench.py",
    "pynccl run --": "names an option; tests/init/test_launch.py",
    "pynccl trace --": "names an option; tests/trace",
    "pynccl run -n N ": "stands for a program of the reader's",
    "make ": "the Makefile's own; CI runs them",
    "pip ": "changes the environment; tests/package/test_packaging.py installs the wheel",
    "mpirun -n 4 python program.py": "stands for a program of the reader's",
    "sbatch ": "tests/init/test_slurm.py, where Slurm is installed",
    "srun ": "tests/init/test_slurm.py, where Slurm is installed",
    "deepspeed ": "needs GPUs to start; tests/init/test_engines.py sets what it sets",
    "mpirun -n 2 python examples/torch_deepspeed.py": "tests/torch_backend/test_torch_examples.py",
    "torchrun --nproc-per-node 2 examples/torch_deepspeed.py": "tests/torch_backend/test_torch_examples.py",
    "torchrun --nproc-per-node 2 examples/torch_accelerate.py": "tests/torch_backend/test_torch_examples.py",
    "python examples/torch_torchft.py": "tests/torch_backend/test_torch_examples.py",
    "python examples/weight_transfer.py ": "tests/programs/test_weight_transfer.py starts both sides",
    "python examples/ray_training.py": "tests/interfaces/test_ray.py",
    "python examples/ray_graph.py": "tests/interfaces/test_ray.py",
    "PYNCCL_LIBRARY=cpu python examples/engine_push.py ": "tests/programs/test_examples.py",
    "PYNCCL_LIBRARY=cpu PYNCCL_TIMEOUT=30 python examples/cupy_nccl.py": "the same",
    "PYNCCL_TIMEOUT=30 python examples/cupy_nccl.py": "needs GPUs",
    "python -m pynccl": "is the same as `pynccl`; the tests of each command start it so",
    "python -m pynccl.torch build": "tests/torch_backend/test_torch_groups.py",
    "python -m torch.distributed.flight_recorder.fr_trace": "tests/torch_backend/test_torch_tools.py",
    "python tests/torch_backend/test_torch_suite.py": "torch's own tests, for `make test-full`",
    "python tools/check_torch.py": "installs many torches",
    "python benchmarks/": "`make bench`, on a machine that does nothing else",
}


def shown() -> set[str]:
    """Return the commands of the tables' and the text's code, and of the examples' first lines.

    A command's bare name, such as `pynccl doctor`, is not one.
    """
    found = set()
    for path in PAGES:
        text = re.sub(r"^ *```\w*\n.*?^ *```", "", path.read_text(), flags=re.M | re.S)
        found |= {
            code
            for code in re.findall(r"`([^`\n]+)`", text)
            if re.search(r"\.(py|sh)\b|^python|\bpynccl [a-z-]+ \S|\S pynccl doctor", code)
        }
    for path in ROOT.glob("examples/*.py"):
        found |= {line.strip() for line in path.read_text().split('"""')[1].splitlines()}
    commands = {match[0] for text in found if (match := _COMMAND.match(text))}
    return {re.sub(r"  +#.*", "", command).strip() for command in commands}


def filled(command: str) -> str:
    """Return a command with something in the place of its placeholders."""
    for placeholder, text in PLACEHOLDERS.items():
        command = command.replace(placeholder, text)
    return command
