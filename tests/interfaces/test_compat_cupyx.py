"""pynccl.compat.cupyx on the CPU library: arrays of CuPy's over host memory and NumPy's, matrices of SciPy's.

What needs a GPU, CuPy's own sparse matrices and streams, is in test_compat_gpu.py.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import ROOT, clean_environment
from meeting import free_port, hear, tell, together
from processes import completed
from pynccl import BootstrapError, NcclTimeoutError, testing
from pynccl.compat import cupyx

MPIRUN = Path(sys.executable).with_name("mpirun")
KINDS = [
    "numpy",
    pytest.param(
        "cupy",
        marks=pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"),
    ),
]
Array = NDArray[Any]


def run(nranks: int, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run a program that gets the port to meet at."""
    return testing.run(nranks, program, free_port(), *args, backend="cpu", timeout=40, **options)


def meet(rank: int, nranks: int, port: int, **options: Any) -> cupyx.NCCLBackend:
    return cupyx.init_process_group(nranks, rank, port=port, **({"timeout": 20} | options))


def of_kind(kind: str, host: Array) -> Any:
    """Return an array of the kind's library in the memory of `host`."""
    if kind == "numpy":
        return host
    import cupy

    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    strides = host.strides if not host.flags.c_contiguous else None
    return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


# --- arrays -------------------------------------------------------------------------------------------------


def dense(rank: int, nranks: int, port: int, kind: str, dtypes: list[str]) -> None:
    group = meet(rank, nranks, port)
    for dtype in dtypes:
        dense_calls(group, rank, nranks, kind, dtype)
    group.stop()
    group.stop()
    assert group.comm.closed


def dense_calls(group: cupyx.NCCLBackend, rank: int, nranks: int, kind: str, dtype: str) -> None:
    everyone = [(np.arange(nranks * 6).reshape(nranks, 6) % 7 + r).astype(dtype) for r in range(nranks)]

    def fresh(shape: Any) -> Array:
        return np.full(shape, 99, dtype)

    def sent(rows: Any = slice(None)) -> Any:
        return of_kind(kind, np.ascontiguousarray(everyone[rank][rows]))

    total = np.add.reduce(everyone, dtype=dtype)
    out = fresh((nranks, 6))
    assert group.all_reduce(sent(), of_kind(kind, out)) is None
    assert np.array_equal(out, total)
    group.all_reduce(of_kind(kind, out), of_kind(kind, out))
    assert np.array_equal(out, total * dtype_of(nranks, dtype))
    if np.dtype(dtype).kind != "c":
        for op, function in (("prod", np.multiply), ("max", np.maximum), ("min", np.minimum)):
            group.all_reduce(sent(), of_kind(kind, out), op)
            assert np.array_equal(out, function.reduce(everyone, dtype=dtype)), op
    for root in range(nranks):
        out = fresh((nranks, 6))
        group.reduce(sent(), of_kind(kind, out) if rank == root else None, root)
        assert np.array_equal(out, total if rank == root else fresh(out.shape))
        mine = everyone[rank].copy()
        group.broadcast(of_kind(kind, mine), root)
        assert np.array_equal(mine, everyone[root])
        row = fresh(6)
        group.scatter(sent() if rank == root else None, of_kind(kind, row), root)
        assert np.array_equal(row, everyone[root][rank])
        out = fresh((nranks, 6))
        group.gather(sent(0), of_kind(kind, out) if rank == root else None, root)
        assert np.array_equal(
            out, np.stack([one[0] for one in everyone]) if rank == root else fresh(out.shape)
        )
    row = fresh(6)
    group.reduce_scatter(sent(), of_kind(kind, row), 6)
    assert np.array_equal(row, total[rank])
    out = fresh((nranks, 6))
    group.all_gather(sent(1), of_kind(kind, out), 6)
    assert np.array_equal(out, np.stack([one[1] for one in everyone]))
    group.all_to_all(sent(), of_kind(kind, out))
    assert np.array_equal(out, np.stack([one[rank] for one in everyone]))
    if rank == 0:
        group.send(sent(), 1)
    elif rank == 1:
        group.recv(of_kind(kind, out), 0)
        assert np.array_equal(out, everyone[0])
    # With the rank on the other side, and with itself.
    for peer in (nranks - 1 - rank, rank):
        group.send_recv(sent(), of_kind(kind, out), peer)
        assert np.array_equal(out, everyone[peer])
    group.barrier()


def dtype_of(number: int, dtype: str) -> Any:
    return np.dtype(dtype).type(number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nranks", [2, 3])
def test_dense(kind: str, nranks: int) -> None:
    run(nranks, dense, kind, ["float32", "int64", "uint8", "float16", "complex128"])


def first_parts(rank: int, nranks: int, port: int) -> None:
    group = meet(rank, nranks, port)
    long = np.arange(20.0) + rank
    out = np.zeros(nranks * 10)
    group.all_gather(long, out, 10)
    assert np.array_equal(out, np.concatenate([np.arange(10.0) + r for r in range(nranks)]))
    group.reduce_scatter(long, out, 5)
    assert np.array_equal(out[:5], nranks * np.arange(5.0) + 5 * nranks * rank + sum(range(nranks)))
    for count in (21, -1):
        with pytest.raises(ValueError, match=r"array has \d+ elements; expected at least"):
            group.all_gather(long, out, count)
    group.stop()


def test_counts_smaller_than_the_arrays() -> None:
    run(2, first_parts)


def refused(rank: int, nranks: int, port: int, kind: str) -> None:
    group = meet(rank, nranks, port)
    square = of_kind(kind, np.asfortranarray(np.arange(float(nranks * 3)).reshape(nranks, 3)))
    rows, row = of_kind(kind, np.zeros((nranks, 3))), of_kind(kind, np.zeros(3))
    for call, words in (
        (lambda: group.scatter(square, row, rank), "in_array is not C-contiguous"),
        (lambda: group.gather(row, square, rank), "out_array is not C-contiguous"),
        (lambda: group.all_to_all(square, rows), "in_array is not C-contiguous"),
        (lambda: group.all_to_all(row, rows), r"in_array has shape \(3,\); expected \d rows"),
        (lambda: group.all_to_all(rows, row), r"out_array has shape \(3,\)"),
        (lambda: group.scatter(None, row, rank), "in_array has shape None"),
        (lambda: group.all_reduce(rows, rows, "median"), "op is 'median'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="dtype"):
        group.all_to_all(rows, of_kind(kind, np.zeros((nranks, 3), np.float32)))
    group.barrier()
    group.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cupyx_gets_wrong_is_refused(kind: str) -> None:
    run(2, refused, kind)


# --- the group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0), "n_devices is 0"),
        ((2, 2), "rank is 2; expected 0 <= rank < 2"),
        ((2, -1), "rank is -1"),
    ],
)
def test_wrong_ranks(arguments: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cupyx.init_process_group(*arguments)
    with pytest.raises(ValueError, match="backend is 'gloo'"):
        cupyx.init_process_group(1, 0, backend="gloo")


def alone(rank: int, nranks: int, port: int) -> None:
    with pytest.raises(BootstrapError, match="ranks that never arrived: 1"):
        meet(0, 2, port, timeout=1)


def test_a_missing_rank_is_named() -> None:
    start = time.monotonic()
    run(1, alone)
    assert time.monotonic() - start < 15


def absent_from_barrier(rank: int, nranks: int, port: int) -> None:
    together(nranks)
    group = meet(rank, nranks, port, timeout=3)
    if rank == 0:
        with pytest.raises(NcclTimeoutError):
            group.barrier()
        tell("over")
    else:
        hear("over")
    group.comm.abort()


@pytest.mark.slow
def test_the_barrier_has_a_timeout() -> None:
    run(2, absent_from_barrier)


def late_to_barrier(rank: int, nranks: int, port: int) -> float:
    group = meet(rank, nranks, port)
    for _ in range(20):
        group.barrier()
    if rank == 0:
        time.sleep(1)
    start = time.monotonic()
    group.barrier()
    waited = time.monotonic() - start
    group.stop()
    return waited


def test_barrier() -> None:
    waited = run(3, late_to_barrier)
    assert waited[0] < 0.5 < waited[1] and waited[2] > 0.5


def from_environment(rank: int, nranks: int, port: int) -> None:
    os.environ.update(CUPYX_DISTRIBUTED_HOST="localhost", CUPYX_DISTRIBUTED_PORT=str(port))
    group = cupyx.init_process_group(nranks, rank, timeout=20)
    group.barrier()
    group.stop()
    # The port is free again, for the next group.
    group = cupyx.NCCLBackend(nranks, rank, port=port)
    group.barrier()
    group.stop()


def test_environment_and_one_group_after_another() -> None:
    run(2, from_environment)


def taken(rank: int, nranks: int, port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(BootstrapError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"),
    ):
        meet(0, 2, port, timeout=2)


def test_port_is_taken() -> None:
    run(1, taken)


def without_mpi(rank: int, nranks: int, port: int) -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="use_mpi=True needs mpi4py"):
        cupyx.init_process_group(1, 0, use_mpi=True)


def test_mpi_that_is_missing_is_an_error() -> None:
    run(1, without_mpi)


MPI_PROGRAM = """
import numpy as np
from mpi4py import MPI
from pynccl.compat import cupyx
world = MPI.COMM_WORLD
try:
    cupyx.init_process_group(world.size, 0, use_mpi=True)
except ValueError as error:
    assert "expected each of 0 to" in str(error)
else:
    raise AssertionError("two processes of one rank")
rank = world.size - 1 - world.rank
group = cupyx.init_process_group(world.size, rank, use_mpi=True, timeout=20)
assert group.comm.rank == rank
out = np.zeros(world.size)
group.all_gather(np.full(1, rank, float), out, 1)
assert np.array_equal(out, np.arange(world.size))
group.barrier()
group.stop()
"""


def test_mpi(tmp_path: Path) -> None:
    assert MPIRUN.exists() or shutil.which("mpirun"), "the test extra brings Open MPI"
    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    launcher = str(MPIRUN) if MPIRUN.exists() else "mpirun"
    options = ["-n", "3", "--oversubscribe", "--allow-run-as-root"]
    done = completed(
        [launcher, *options, sys.executable, str(tmp_path / "program.py")],
        env=clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_signatures() -> None:
    """Compare with the source of CuPy's, whose import needs libnccl: `timeout` is all that is new."""
    package = importlib.util.find_spec("cupyx")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("distributed") / "_nccl_comm.py"
    tree = ast.parse(source.read_text())
    backend = next(node for node in tree.body if getattr(node, "name", "") == "NCCLBackend")
    methods = {
        node.name: [argument.arg for argument in node.args.args]
        for node in backend.body
        if isinstance(node, ast.FunctionDef)
        if not node.name.startswith("_") or node.name == "__init__"
    }
    assert len(methods) == 13
    for name, parameters in methods.items():
        mine = list(inspect.signature(getattr(cupyx.NCCLBackend, name)).parameters)
        assert mine == parameters + (["timeout"] if name == "__init__" else []), name
    mine = list(inspect.signature(cupyx.init_process_group).parameters)
    assert mine == ["n_devices", "rank", "backend", "host", "port", "use_mpi", "timeout"]


# --- sparse matrices ----------------------------------------------------------------------------------------


def matrix(kind: str, rank: int, dtype: str = "float64", rows: int = 5) -> Any:
    """Return a matrix of its rank's own pattern and number of entries."""
    from scipy import sparse

    random = np.random.default_rng(rank)
    whole = random.integers(1, 9, (rows, rows)) * (random.random((rows, rows)) < 0.2 + 0.2 * rank)
    return getattr(sparse, kind)(whole.astype(dtype))


def empty(kind: str, dtype: str = "float64") -> Any:
    from scipy import sparse

    return getattr(sparse, kind)((1, 1), dtype=dtype)


def equal(found: Any, expected: Any, kind: str) -> None:
    assert (type(found).__name__, found.shape, found.dtype) == (kind, expected.shape, expected.dtype)
    assert np.array_equal(found.toarray(), expected.toarray())
    assert np.allclose(found @ np.ones(found.shape[1]), expected @ np.ones(found.shape[1]))


def sparse(rank: int, nranks: int, port: int, cases: list[tuple[str, str]]) -> None:
    group = meet(rank, nranks, port)
    for case in cases:
        sparse_calls(group, rank, nranks, *case)
    group.stop()


def sparse_calls(group: cupyx.NCCLBackend, rank: int, nranks: int, kind: str, dtype: str) -> None:
    everyone = [matrix(kind, r, dtype) for r in range(nranks)]
    mine, total, product = everyone[rank], everyone[0], everyone[0]
    for one in everyone[1:]:
        total, product = total + one, product * one
    for op, expected in (("sum", total), ("prod", product)):
        out = empty(kind, dtype)
        group.all_reduce(mine, out, op)
        equal(out, expected, kind)
    for root in range(nranks):
        out = empty(kind, dtype)
        group.reduce(mine, out if rank == root else None, root)
        equal(out, total if rank == root else empty(kind, dtype), kind)
        out = mine.copy()
        group.broadcast(out, root)
        equal(out, everyone[root], kind)
        out = empty(kind, dtype)
        group.scatter([one * 2 for one in everyone] if rank == root else None, out, root)
        equal(out, everyone[rank] * 2, kind)
        gathered: list[Any] = []
        group.gather(mine, gathered, root)
        assert len(gathered) == (nranks if rank == root else 0)
        for one, expected in zip(gathered, everyone, strict=False):
            equal(one, expected, kind)
    gathered = []
    group.all_gather(mine, gathered, 0)
    for one, expected in zip(gathered, everyone, strict=True):
        equal(one, expected, kind)
    parts = [matrix(kind, rank + 3 * i, dtype) for i in range(nranks)]
    gathered = []
    group.all_to_all(parts, gathered)
    for source, one in enumerate(gathered):
        equal(one, matrix(kind, source + 3 * rank, dtype), kind)
    out = empty(kind, dtype)
    group.reduce_scatter(parts, out, 1)
    expected = matrix(kind, 3 * rank, dtype)
    for source in range(1, nranks):
        expected = expected + matrix(kind, source + 3 * rank, dtype)
    equal(out, expected, kind)
    if rank == 0:
        group.send(mine, 1)
    elif rank == 1:
        group.recv(out, 0)
        equal(out, everyone[0], kind)
    for peer in (nranks - 1 - rank, rank):
        group.send_recv(mine, out, peer)
        equal(out, everyone[peer], kind)


@pytest.mark.parametrize("nranks", [2, 3])
def test_sparse(nranks: int) -> None:
    kinds = ["csr_matrix", "csc_matrix", "coo_matrix", "csr_array", "coo_array"]
    cases = [(kind, "float64") for kind in kinds]
    run(nranks, sparse, cases + [("csr_matrix", dtype) for dtype in ("float32", "complex128", "int32")])


def across_formats(rank: int, nranks: int, port: int) -> None:
    group = meet(rank, nranks, port)
    kinds = ["csr_matrix", "coo_matrix", "csc_matrix"]
    mine, out = matrix(kinds[rank], rank), empty(kinds[rank])
    group.all_reduce(mine, out)
    equal(out, sum(matrix("csr_matrix", r) for r in range(nranks)), kinds[rank])
    group.broadcast(out if rank else mine, 0)
    equal(out if rank else mine, matrix("csr_matrix", 0), kinds[rank])
    group.stop()


def test_sparse_formats_may_differ_between_ranks() -> None:
    run(3, across_formats)


def not_canonical(rank: int, nranks: int, port: int) -> None:
    from scipy import sparse

    group = meet(rank, nranks, port)
    doubled = sparse.csr_matrix((np.ones(3), np.array([2, 0, 0]), np.array([0, 3, 3, 3])), shape=(3, 3))
    out = matrix("csr_matrix", rank)
    # The answer is remembered, and does not hold for what comes.
    assert out.has_canonical_format
    group.send_recv(doubled, out, 1 - rank)
    assert not out.has_canonical_format and out.nnz == 3
    out.sum_duplicates()
    assert out.nnz == 2 and out[0, 0] == 2
    group.stop()


def test_sparse_duplicates_arrive_as_they_are() -> None:
    run(2, not_canonical)


def sparse_refusals(rank: int, nranks: int, port: int) -> None:
    from scipy import sparse

    group = meet(rank, nranks, port)
    mine = matrix("csr_matrix", rank)
    for call, kind, words in (
        (lambda: group.all_reduce(mine, mine, "max"), ValueError, "op is 'max'; expected 'sum' or 'prod'"),
        (lambda: group.reduce_scatter(mine, mine, 1), ValueError, "expected a list of 2 matrices"),
        (lambda: group.all_to_all([mine], []), ValueError, "in_array is 1 matrices"),
        (lambda: group.scatter(mine, mine, rank), ValueError, "in_array is a csr_matrix"),
        (
            lambda: group.send(sparse.dia_matrix(mine), 0),
            TypeError,
            "format 'dia'; expected .* csr, csc or coo",
        ),
    ):
        with pytest.raises(kind, match=words):
            call()
    group.barrier()
    group.stop()


def test_sparse_refusals() -> None:
    run(2, sparse_refusals)
