"""What a type checker sees: the types of results, for NumPy and torch, and misuse that it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from processes import completed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]

# As a user with mypy --strict would write it; the lines that end in E are wrong.
PROGRAM = """
from __future__ import annotations
from array import array
from typing import Any
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_type
import pynccl
from pynccl import Buffer, Communicator, Plan, Prepared, UniqueId, Work

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]

def on_a_rank(rank: int, nranks: int) -> float:
    return rank / nranks

def runs() -> None:
    assert_type(pynccl.testing.run(2, on_a_rank), list[float])
    assert_type(pynccl.testing.run(2, on_a_rank, check=False), list[Any])

def arrays(comm: Communicator, x: F32, t: Tensor, b: Buffer, y: F64) -> None:
    assert_type(comm.all_reduce(x), F32)
    assert_type(comm.all_reduce(t), Tensor)
    assert_type(comm.all_reduce(b), Buffer)
    assert_type(comm.all_reduce(x, y), F64)
    assert_type(comm.all_reduce(x, t, "max", stream=3), Tensor)
    assert_type(comm.reduce(x), F32 | None)
    assert_type(comm.reduce(t, t, pynccl.RedOp.MAX, 1), Tensor | None)
    assert_type(comm.broadcast(t), Tensor)
    assert_type(comm.broadcast(None, x), F32)
    assert_type(comm.all_gather(x), F32)
    assert_type(comm.all_gather(t), Tensor)
    assert_type(comm.all_gather(x, y), F64)
    assert_type(comm.reduce_scatter(t, op="avg"), Tensor)
    assert_type(comm.reduce_scatter(x), F32)
    assert_type(comm.all_to_all(x), F32)
    assert_type(comm.gather(x), F32 | None)
    assert_type(comm.gather(t, root=1), Tensor | None)
    assert_type(comm.gather(t, x), F32 | None)
    assert_type(comm.scatter(t), Tensor)
    assert_type(comm.scatter(None, x), F32)
    assert_type(comm.recv(t, 0), Tensor)
    assert_type(comm.send_recv(x, 0, t, 1), Tensor)
    assert_type(comm.all_gather_v(x, t, [1, 2]), Tensor)
    assert_type(comm.reduce_scatter_v(x, y, [1, 2], "sum"), F64)
    assert_type(comm.gather_v(x, t, (1, 2)), Tensor | None)
    assert_type(comm.scatter_v(None, t, [1, 2]), Tensor)
    assert_type(comm.all_to_all_v(x, [1], t, [1]), Tensor)
    assert_type(comm.all_gather_v(t, None, [1, 2]), Tensor)
    assert_type(comm.gather_v(x, None, [1, 2]), F32 | None)

def later(comm: Communicator, x: F32, t: Tensor) -> None:
    assert_type(comm.all_reduce(x, wait=False).wait(), F32)
    assert_type(comm.reduce(t, wait=False), Work[Tensor | None])
    assert_type(comm.all_gather(x, wait=False), Work[NDArray[np.float32]])
    assert_type(comm.scatter_v(x, None, [1, 2], wait=False), Work[F32])
    assert_type(comm.barrier(wait=False), Work[None])

async def awaited(comm: Communicator, x: F32) -> None:
    assert_type(await comm.all_reduce(x, wait=False), F32)

def kinds(comm: Communicator, x: F32) -> None:
    numbers = array("d", [1.0])
    assert_type(comm.all_reduce(numbers), "array[float]")
    assert_type(comm.all_reduce(bytearray(8)), bytearray)
    assert_type(comm.all_reduce(x, memoryview(numbers)), memoryview[int])
    assert_type(comm.broadcast(np.zeros((2, 2), np.int64)), Matrix)
    comm.send(b"bytes", 0)

def shapes(comm: Communicator, x: Matrix) -> None:
    # In place keeps the shape, a new array has one more axis.
    assert_type(comm.all_reduce(x), Matrix)
    assert_type(comm.all_gather(x), NDArray[np.int64])

def prepared(comm: Communicator, x: F32) -> None:
    op = comm.prepare.all_reduce(x, op="max", stream=0)
    assert_type(op, Prepared)
    plan = Plan([op, Plan([op])])
    op()
    plan()
    assert_type(op(wait=False), Work[Any])
    plan(wait=True)
    op.stream = pynccl.Stream()

def life(comm: Communicator, uid: UniqueId) -> None:
    assert_type(comm.split(0), Communicator)
    assert_type(comm.split(color=1, key=2), Communicator)
    maybe: int | None = 0 if comm.rank else None
    assert_type(comm.split(maybe), Communicator | None)
    comm.split(comm.rank % 2).barrier(timeout=3)
    none: None = comm.split(None)
    assert_type(comm.shrink([1]), Communicator)
    assert_type(comm.grow(3), Communicator)
    assert_type(pynccl.init_all(2), list[Communicator])
    assert_type(pynccl.init(), Communicator)
    assert_type(comm.rank, int)
    assert_type(comm.closed, bool)
    assert_type(comm.async_error(), pynccl.NcclError | None)
    with Communicator(2, uid, 0, config={"blocking": 0}, timeout=3) as other:
        assert_type(other, Communicator)
    with pynccl.group(simulate=True) as estimate:
        pass
    assert_type(estimate.estimated_microseconds, float)

def wrong(comm: Communicator, x: F32) -> None:
    comm.all_reduce()  # E
    pynccl.COMM_WORLD  # E
    pynccl.bootstrap.init_process_group  # E
    comm.all_reduce(x, op=1.5)  # E
    comm.all_reduce(x, x, "sum", None, {})  # E
    comm.all_reduce(x, strem=3)  # E
    comm.send(x)  # E
    comm.reduce(x, root="0")  # E
    comm.all_gather_v(x, x, 3)  # E
    comm.gather(x).sum()  # E
    comm.split(None).barrier()  # E
    comm.split("0")  # E
    comm.all_reduce(x, op="mean")  # E
    comm.reduce_scatter(x, x, "mean")  # E
    comm.all_reduce(x, "max")  # E
    comm.broadcast(x, 0)  # E
    comm.all_reduce("x")  # E
    comm.all_reduce([1.0])  # E
    comm.all_reduce(1.0)  # E
    comm.all_gather("x")  # E
    comm.send("x", 0)  # E
    comm.recv("x", 0)  # E
    comm.all_to_all_v("x", [1], x, [1])  # E
    comm.prepare.reduce(x, op="mean")  # E
    comm.prepare.all_reduce(x, oq="max")  # E
    comm.prepare.all_reduce(x)(3)  # E
    Plan([x])  # E
    comm.barrier(3)  # E
    comm.barrier(timeout="3")  # E
    comm.rank = 3  # E
    pynccl.Config(blockin=0)  # E
    pynccl.group(3, 4)  # E
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Check the program once; return the first error of each line."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n"
        "[mypy-pynccl.*,torch.*]\nfollow_imports = silent\n[mypy-cffi.*]\nignore_missing_imports = true\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "program.py"]
    done = completed(command, timeout=115, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        match = re.match(r"program\.py:(\d+): (error|note): (.*)", line)
        assert match, f"mypy complains about something else: {line}"
        if match[2] == "error":
            said.setdefault(int(match[1]), match[3])
    return said


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# E")}


def test_types_of_results(complaints: dict[int, str]) -> None:
    lines = PROGRAM.splitlines()
    assert {lines[n - 1].strip(): said for n, said in complaints.items() if n not in wrong_lines()} == {}
    assert PROGRAM.count("assert_type(") == 57


def test_misuse_is_refused(complaints: dict[int, str]) -> None:
    lines = PROGRAM.splitlines()
    missed = [lines[number - 1].strip() for number in wrong_lines() - set(complaints)]
    assert not missed
    assert len(wrong_lines()) > 12


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "pynccl" / "py.typed").exists()
