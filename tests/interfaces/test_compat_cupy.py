"""pynccl.compat.cupy: the same programs through CuPy's class and ours; then what CuPy's lacks.

CuPy's own runs over the CPU library by LD_PRELOAD of the forwarding library (see test_preload_cupy.py).
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import pickle
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pynccl
from conftest import ROOT, Run
from meeting import publish, until
from pynccl import capi, testing
from pynccl._library import discovery
from pynccl.compat import cupy as ours
from ranks import on_ranks

N = 1000
BOTH = ["ours", "theirs"]
Array = NDArray[Any]
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


def binding(whose: str) -> Any:
    """Return the module of that name's interface."""
    if whose == "ours":
        return ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl


def environment(whose: str) -> dict[str, str]:
    folder = Path(discovery.cpu_library()).parent / "forward"
    library = folder / "libnccl.so.2"
    assert library.exists() or whose == "ours"
    return {"LD_PRELOAD": str(library)} if whose == "theirs" else {}


def through(whose: str, nranks: int, program: Callable[..., Any], *args: Any, **variables: str) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        env = environment(whose) | variables
        return testing.run(nranks, program, whose, f"{folder}/uid", *args, backend="cpu", timeout=50, env=env)


def same(nranks: int, program: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a program through both; return what it returned, once it is known to be the same."""
    results = {whose: through(whose, nranks, program, *args) for whose in BOTH}
    assert pickle.dumps(results["ours"]) == pickle.dumps(results["theirs"])
    return results["ours"]


def connect(nccl: Any, rank: int, nranks: int, uid_file: str, **options: Any) -> Any:
    """Return a communicator of all; the id goes through a file, as nothing else of pynccl is meant here."""
    path = Path(uid_file)
    if rank == 0:
        publish(path, nccl.get_unique_id())
    until(path.exists)
    return nccl.NcclCommunicator(nranks, path.read_bytes(), rank, **options)


def all_are_here(rank: int, nranks: int, uid_file: str) -> None:
    """Wait for the other ranks, without the communicator."""
    Path(f"{uid_file}.{rank}").touch()
    for other in range(nranks):
        until(Path(f"{uid_file}.{other}").exists)


def wait(comm: Any) -> None:
    """Wait for the default stream: the handle is good for both."""
    assert capi.pyncclCpuStreamSynchronize(comm.comm, 0, 20_000) == 0


def ptr(array: Array) -> int:
    return int(array.ctypes.data)


# --- the same program through both --------------------------------------------------------------------------


def identity(rank: int, nranks: int, whose: str, uid_file: str) -> Any:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file)
    found = comm.rank_id(), comm.size(), comm.device_id(), nccl.get_version(), nccl.available
    methods = sorted(name for name in dir(type(comm)) if not name.startswith("_"))
    constants = {name: getattr(nccl, name) for name in sorted(dir(nccl)) if name.startswith("NCCL_")}
    assert comm.comm > 0
    comm.check_async_error()
    comm.destroy()
    comm.destroy()
    comm.abort()
    with pytest.raises(nccl.NcclError) as caught:
        comm.size()
    return found, methods, constants, comm.comm, caught.value.status


@needs_cupy
def test_identity() -> None:
    for rank, (found, methods, constants, comm, status) in enumerate(same(2, identity)):
        assert found == (rank, 2, found[2], 23203, True)
        assert (comm, status) == (0, 4)
        assert len(methods) == 17 and "commSplit" in methods
        assert len(constants) == 20


REDUCED = ("INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64")
OPERATIONS: dict[str, Callable[[Array], Array]] = {
    "SUM": lambda both: both.sum(0),
    "PROD": lambda both: both.prod(0),
    "MAX": lambda both: both.max(0),
    "MIN": lambda both: both.min(0),
    "AVG": lambda both: both.sum(0) / 2 if both.dtype.kind == "f" else both.sum(0) // 2,
}


def reductions(rank: int, nranks: int, whose: str, uid_file: str) -> list[Array]:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file)
    results = []
    for name in REDUCED:
        for op in OPERATIONS:
            mine = (np.arange(N) % 5 + rank).astype(name.lower())
            out = np.zeros_like(mine)
            comm.allReduce(
                ptr(mine), ptr(out), N, getattr(nccl, f"NCCL_{name}"), getattr(nccl, f"NCCL_{op}"), 0
            )
            wait(comm)
            results.append(out)
    comm.destroy()
    return results


@needs_cupy
def test_all_reduce() -> None:
    base = np.arange(N) % 5
    for results in same(2, reductions):
        found = iter(results)
        for name in REDUCED:
            both = np.stack([base, base + 1]).astype(name.lower())
            for op, expected in OPERATIONS.items():
                assert np.array_equal(next(found), expected(both)), (name, op)


def movements(rank: int, nranks: int, whose: str, uid_file: str) -> list[Array]:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file)
    f, results = nccl.NCCL_FLOAT, []

    def done(array: Array) -> None:
        wait(comm)
        results.append(array.copy())

    for root in range(nranks):
        mine, out = np.full(N, rank + 1, np.float32), np.zeros(N, np.float32)
        comm.reduce(ptr(mine), ptr(out), N, f, nccl.NCCL_SUM, root, 0)
        done(out)
        assert (out == (6 if rank == root else 0)).all()
        comm.broadcast(ptr(mine), ptr(out), N, f, root, 0)
        done(out)
        comm.bcast(ptr(mine), N, f, root, 0)
        done(mine)
        assert (out == root + 1).all() and (mine == root + 1).all()
    mine, gathered = np.full(N, rank + 1, np.float32), np.zeros(nranks * N, np.float32)
    comm.allGather(ptr(mine), ptr(gathered), N, f, 0)
    done(gathered)
    assert (gathered == np.repeat([1, 2, 3], N)).all()
    comm.reduceScatter(ptr(gathered), ptr(mine), N, f, nccl.NCCL_PROD, 0)
    done(mine)
    nccl.groupStart()
    comm.send(ptr(mine), N, f, (rank + 1) % nranks, 0)
    comm.recv(ptr(gathered), N, f, (rank - 1) % nranks, 0)
    nccl.groupEnd()
    done(gathered)
    # Each rank has had the same number in the place of the product's part.
    assert (mine == (rank + 1) ** 3).all() and (gathered[:N] == ((rank - 1) % nranks + 1) ** 3).all()
    # And without a group, along a line.
    if rank:
        comm.recv(ptr(gathered), N, f, rank - 1, 0)
    if rank + 1 < nranks:
        comm.send(ptr(mine), N, f, rank + 1, 0)
    done(gathered)
    assert (gathered[:N] == (rank or nranks) ** 3).all()
    comm.destroy()
    return results


@needs_cupy
def test_every_call() -> None:
    same(3, movements)


def splits(rank: int, nranks: int, whose: str, uid_file: str) -> list[Any]:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file, config=nccl.NcclConfig(split_share=1))
    found: list[Any] = [nccl.NcclConfig().split_share, nccl.NcclConfig(1).split_share]
    for config in (None, nccl.NcclConfig(), nccl.NcclConfig(split_share=1)):
        child = comm.commSplit(color=rank % 2 - 1, key=-rank, config=config)
        if child is None:
            found.append(None)
            continue
        array = np.full(N, rank, np.float64)
        child.allReduce(ptr(array), ptr(array), N, nccl.NCCL_DOUBLE, nccl.NCCL_SUM, 0)
        wait(child)
        found.append((child.size(), child.rank_id(), array[0]))
        child.destroy()
    comm.destroy()
    return found


@needs_cupy
def test_split() -> None:
    results = same(4, splits)
    assert results[0] == [0, 1, None, None, None]
    assert results[3] == [0, 1] + 3 * [(2, 0, 4.0)]


def one_process(rank: int, nranks: int, whose: str, uid_file: str, devices: Any) -> list[Any]:
    nccl = binding(whose)
    comms = nccl.NcclCommunicator.initAll(devices)
    arrays = [np.full(N, i + 1, np.float32) for i in range(len(comms))]
    nccl.groupStart()
    for comm, array in zip(comms, arrays, strict=True):
        comm.allReduce(ptr(array), ptr(array), N, nccl.NCCL_FLOAT, nccl.NCCL_SUM, 0)
    nccl.groupEnd()
    found = []
    for comm, array in zip(comms, arrays, strict=True):
        wait(comm)
        found.append((comm.rank_id(), comm.size(), comm.device_id(), array[0]))
        comm.destroy()
    return found


@needs_cupy
@pytest.mark.parametrize("devices", [3, [2, 0, 1]])
def test_init_all(devices: Any) -> None:
    (found,) = same(1, one_process, devices)
    places = devices if isinstance(devices, list) else list(range(devices))
    assert found == [(i, 3, place, 6.0) for i, place in enumerate(places)]


def refusals(rank: int, nranks: int, whose: str, uid_file: str) -> list[Any]:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file)
    array = np.zeros(N, np.float32)
    a, f, total, found = ptr(array), nccl.NCCL_FLOAT, nccl.NCCL_SUM, []
    for function, *args in (
        (comm.reduce, a, a, N, f, total, nranks, 0),
        (comm.allReduce, a, a, N, 99, total, 0),
        (comm.send, a, N, f, -1, 0),
        (comm.allReduce, a, a, -1, f, total, 0),
        (comm.allReduce, a, a, "1", f, total, 0),
        (comm.allReduce, a, a),
        (nccl.NcclCommunicator, 1, None, 0),
        (nccl.NcclCommunicator, 1, (1, 2, 3), 0),
        (nccl.NcclCommunicator, 1, b"1234567890", 0),
        (nccl.NcclCommunicator, 1, bytes(128), 1),
        (nccl.NcclCommunicator, 1, bytes(128), 0, "config"),
        (nccl.NcclCommunicator.initAll, 2.5),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            function(*args)
        kind = next(cls for cls in type(caught.value).__mro__ if cls.__module__ == "builtins")
        found.append((kind.__name__, getattr(caught.value, "status", None)))
        if getattr(caught.value, "status", None) is not None:
            again = pickle.loads(pickle.dumps(caught.value))
            assert (str(again), again.args, again.status) == (
                str(caught.value), caught.value.args, caught.value.status,
            )  # fmt: skip
            assert str(again).startswith("NCCL_ERROR_INVALID_ARGUMENT: ")
    comm.check_async_error()
    comm.destroy()
    return found


@needs_cupy
def test_errors() -> None:
    (found, _) = same(2, refusals)
    assert [kind for kind, status in found] == [
        *3 * ["RuntimeError"], "OverflowError", *4 * ["TypeError"], "ValueError", "RuntimeError", "TypeError",
        "ValueError",
    ]  # fmt: skip


@on_ranks(1, timeout=50)
def test_arguments_that_are_no_ints(rank: int, nranks: int) -> None:
    comm, x = ours.NcclCommunicator(1, ours.get_unique_id(), 0), np.ones(4, np.float32)
    at = x.ctypes.data
    for args, name in (((x, at, 4), "sendbuf"), ((at, x, 4), "recvbuf"), ((at, at, "4"), "count")):
        with pytest.raises(TypeError, match=rf"^{name} is of type \w+; expected an int"):
            comm.allReduce(*args, ours.NCCL_FLOAT32, ours.NCCL_SUM, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^root is of type str; expected an int"):
        comm.reduce(at, at, 4, ours.NCCL_FLOAT32, ours.NCCL_SUM, "x", 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^op is of type ndarray; expected an int"):
        comm.allReduce(at, at, 4, ours.NCCL_FLOAT32, x, 0)  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="^count is -1; expected an int that fits"):
        comm.allReduce(at, at, -1, ours.NCCL_FLOAT32, ours.NCCL_SUM, 0)
    comm.destroy()
    with pytest.raises(TypeError, match="^ndev is of type str; expected an int"):
        ours.NcclCommunicator("a", bytes(128), 0)  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match=f"^ndev is {2**40}; expected an int that fits"):
        ours.NcclCommunicator(2**40, bytes(128), 7)


@needs_cupy
def test_signatures() -> None:
    """Compare parameter names and their order with what CuPy's docstrings say."""

    def parameters(text: str) -> list[str]:
        inside = re.search(r"\((.*)\)", text)
        assert inside is not None
        words = [part.partition("=")[0].split()[-1] for part in inside[1].split(",") if part.strip()]
        return [word for word in words if word != "self"]

    docs = through("theirs", 1, their_docs)[0]
    assert set(docs) >= {"NcclCommunicator", "allReduce", "commSplit", "groupEnd", "get_unique_id"}
    for name, doc in docs.items():
        function = getattr(ours, name, None) or getattr(ours.NcclCommunicator, name)
        mine = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert mine == parameters(doc), name


def their_docs(rank: int, nranks: int, whose: str, uid_file: str) -> dict[str, str]:
    """Return the first line of each docstring, in which Cython puts the signature."""
    nccl = binding(whose)
    functions = [
        "get_unique_id",
        "get_version",
        "get_build_version",
        "groupStart",
        "groupEnd",
        "check_status",
    ]
    methods = [name for name in dir(nccl.NcclCommunicator) if name != "comm" and not name.startswith("__")]
    found = [getattr(nccl, name) for name in (*functions, "NcclCommunicator", "NcclConfig")]
    found += [getattr(nccl.NcclCommunicator, name) for name in methods]
    return {one.__name__: one.__doc__.strip().splitlines()[0] for one in found}


# --- what CuPy's own lacks ----------------------------------------------------------------------------------


def test_every_status_has_an_error() -> None:
    for status, name in ((1, "UNHANDLED_CUDA_ERROR"), (7, "IN_PROGRESS"), (8, "TIMEOUT"), (99, "99")):
        with pytest.raises(ours.NcclError, match=f"NCCL_ERROR_{name}: .+") as caught:
            ours.check_status(status)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.status, again.result, str(again)) == (status, status, str(caught.value))
        assert isinstance(again, pynccl.NcclError) and isinstance(again, ours.NcclError)
    ours.check_status(0)


def collected(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    comm = connect(ours, rank, nranks, uid_file)
    handle, done = comm.comm, Path(uid_file + ".done")
    all_are_here(rank, nranks, uid_file)
    if rank == 0:
        # The other rank destroys nothing: a destroy from here would wait for it.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del comm
            gc.collect()
        assert ["never destroyed or aborted" in str(warning.message) for warning in caught] == [True]
        assert capi.ncclCommCount(handle) == nranks
        done.touch()
    until(done.exists)
    if rank:
        comm.abort()
        assert comm.comm == 0


def test_collection_warns_and_calls_nothing() -> None:
    through("ours", 2, collected)


def left_over(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    globals()["kept"] = connect(ours, rank, nranks, uid_file)
    # Nobody ends before everybody has a communicator.
    all_are_here(rank, nranks, uid_file)


def test_exit_aborts_what_is_left() -> None:
    start = time.monotonic()
    through("ours", 2, left_over)
    assert time.monotonic() - start < 30


def forked(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    comm = connect(ours, rank, nranks, uid_file)
    child = os.fork()
    if child == 0:
        os._exit(0 if comm.comm == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert comm.size() == nranks
    comm.destroy()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_none() -> None:
    through("ours", 2, forked)


def not_blocking(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    test = connect(ours, rank, nranks, uid_file)
    array = np.full(N, rank + 1, np.float32)
    ours.groupStart()
    for _ in range(3):
        test.allReduce(ptr(array), ptr(array), N, ours.NCCL_FLOAT, ours.NCCL_SUM, 0)
    ours.groupEnd()
    test.check_async_error()
    wait(test)
    assert (array == 12).all()
    assert test.commSplit(-1, 0) is None
    child = test.commSplit(0, -rank)
    assert (child.rank_id(), child.size()) == (nranks - 1 - rank, nranks)
    child.destroy()
    test.destroy()


def test_non_blocking_communicators_are_waited_for() -> None:
    through("ours", 2, not_blocking, NCCL_COMM_BLOCKING="0")


def grouped_creation(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    uid = ours.get_unique_id()
    ours.groupStart()
    comms = []
    for i in range(2):
        capi.pyncclCpuSetDevice(i)
        comms.append(ours.NcclCommunicator(2, uid, i))
    ours.groupEnd()
    assert [comm.rank_id() for comm in comms] == [0, 1]
    ours.groupStart()
    comms += [comm.commSplit(0, -comm.rank_id()) for comm in comms]
    ours.groupEnd()
    assert [comm.rank_id() for comm in comms] == [0, 1, 1, 0]
    for comm in comms:
        comm.abort()


def ended_in_its_group(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    ours.groupStart()
    comm = ours.NcclCommunicator(1, ours.get_unique_id(), 0)
    for method in (comm.destroy, comm.abort):
        with pytest.raises(
            ours.NcclError, match="that this group creates; expected it after groupEnd"
        ) as caught:
            method()
        assert caught.value.status == 5
    ours.groupEnd()
    assert comm.size() == 1
    comm.destroy()
    assert comm.comm == 0
    # A group that failed has made nothing.
    ours.groupStart()
    uid = ours.get_unique_id()
    comms = [ours.NcclCommunicator(2, uid, 0) for _ in range(2)]
    with pytest.raises(ours.NcclError):
        ours.groupEnd()
    for comm in comms:
        comm.destroy()


def test_a_communicator_cannot_end_in_the_group_that_makes_it() -> None:
    through("ours", 1, ended_in_its_group)


def test_communicators_made_inside_a_group() -> None:
    through("ours", 1, grouped_creation)


def test_without_a_library(run_python: Run) -> None:
    run_python(
        """
        from pynccl.compat import cupy as nccl
        from pynccl import LibraryNotFoundError
        assert nccl.available is False
        try:
            nccl.get_version()
        except LibraryNotFoundError:
            pass
        else:
            raise SystemExit("no error")
        """.replace("\n        ", "\n"),
        PYNCCL_LIBRARY="/nonexistent/libnccl.so.2",
        PYTHONPATH=str(ROOT),
    )


def test_import_takes_no_cupy(run_python: Run) -> None:
    run_python(
        "import sys, pynccl.compat.cupy, pynccl.compat.cupyx\n"
        "assert not {'cupy', 'cupyx'} & set(sys.modules)",
        PYTHONPATH=str(ROOT),
    )


# --- the flight recorder, time-outs and check mode ----------------------------------------------------------


def recorded(rank: int, nranks: int, whose: str, uid_file: str) -> list[dict[str, Any]]:
    nccl = binding(whose)
    comm = connect(nccl, rank, nranks, uid_file)
    x, y = np.full(2 * N, rank + 1, np.float32), np.zeros(2 * N, np.float32)
    comm.allReduce(ptr(x), ptr(y), N, nccl.NCCL_FLOAT, nccl.NCCL_MAX, 0)
    ours.groupStart()
    ours.groupStart()
    comm.send(ptr(x), 5, nccl.NCCL_INT32, (rank + 1) % nranks, 0)
    ours.groupEnd()
    comm.recv(ptr(y), 5, nccl.NCCL_INT32, (rank - 1) % nranks, 0)
    ours.groupEnd()
    comm.bcast(ptr(x), 7, nccl.NCCL_DOUBLE, 1, 0)
    child = comm.commSplit(0, 0)
    child.reduceScatter(ptr(x), ptr(y), 9, nccl.NCCL_UINT8, nccl.NCCL_SUM, 0)
    wait(comm)
    wait(child)
    pynccl.dump_trace(f"{uid_file}.{rank}")
    child.destroy()
    comm.destroy()
    lines = Path(f"{uid_file}.{rank}").read_text().splitlines()
    return [record for line in lines if "call" in (record := json.loads(line))]


def test_the_flight_recorder_has_the_calls() -> None:
    for rank, records in enumerate(through("ours", 3, recorded)):
        kinds = ("all_reduce", "send", "recv", "broadcast", "split", "reduce_scatter")
        reduced, sent, received, copied, split, scattered = (
            next(record for record in records if record["call"] == kind) for kind in kinds
        )
        assert (reduced["count"], reduced["dtype"], reduced["op"], reduced["seq"]) == (N, "float32", "max", 1)
        assert (sent["peer"], received["peer"]) == ((rank + 1) % 3, (rank - 1) % 3)
        assert sent["group"] == received["group"] is not None
        assert (copied["count"], copied["dtype"], copied["root"]) == (7, "float64", 1)
        assert scattered["dtype"] == "uint8"
        assert (scattered["seq"], split["seq"] > 1) == (1, True)


def read_at_once(rank: int, nranks: int, whose: str, uid_file: str) -> None:
    comm = connect(ours, rank, nranks, uid_file)
    n, stream = 1 << 20, capi.pyncclCpuStreamCreate()
    x, y, z = np.full(n, rank + 1.0), np.zeros(n), np.zeros(n)
    for _ in range(5):
        comm.allReduce(ptr(x), ptr(y), n, ours.NCCL_DOUBLE, ours.NCCL_SUM, 0)
        assert (y == 3).all()
        y[:] = 0
        ours.groupStart()
        comm.send(ptr(x), n, ours.NCCL_DOUBLE, 1 - rank, 0)
        comm.recv(ptr(y), n, ours.NCCL_DOUBLE, 1 - rank, 0)
        ours.groupEnd()
        assert (y == 2 - rank).all()
    if rank:
        until(Path(f"{uid_file}.0").exists)
    # Rank 1 makes its call later; rank 0 returns from its own and says so.
    comm.allReduce(ptr(x), ptr(z), n, ours.NCCL_DOUBLE, ours.NCCL_SUM, stream)
    all_are_here(rank, nranks, uid_file)
    assert capi.pyncclCpuStreamSynchronize(comm.comm, stream, 20_000) == 0
    assert (z == 3).all()
    comm.destroy()


@pytest.mark.parametrize("timeout", ["", "20"])
def test_calls_on_stream_0_are_complete_when_they_return(timeout: str) -> None:
    through("ours", 2, read_at_once, PYNCCL_TIMEOUT=timeout)


def killed(rank: int, nranks: int, whose: str, uid_file: str) -> tuple[Any, ...]:
    comm = connect(ours, rank, nranks, uid_file)
    x = np.full(N, rank + 1.0, np.float32)
    place = (ptr(x), ptr(x), N, ours.NCCL_FLOAT, ours.NCCL_SUM, 0)
    comm.allReduce(*place)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for call in (comm.allReduce, comm.allReduce):
        with pytest.raises(ours.NcclError) as caught:
            call(*place)
        assert isinstance(caught.value, pynccl.RankFailedError)
        again = pickle.loads(pickle.dumps(caught.value))
        found.append((again.ranks, again.status))
        assert "rank 1 died" in str(again)
    with pytest.raises(pynccl.RankFailedError):
        comm.check_async_error()
    comm.destroy()
    return x[0], *found


def test_a_killed_rank_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        env = {"PYNCCL_TIMEOUT": "20"}
        results = testing.run(
            3, killed, "ours", f"{folder}/uid", backend="cpu", timeout=50, env=env, check=False
        )
    assert [results[0], results[2]] == [(6.0, ([1], 6), ([1], 6))] * 2


def mismatched(rank: int, nranks: int, whose: str, uid_file: str) -> str:
    comm = connect(ours, rank, nranks, uid_file)
    x, y = np.full(N, rank + 1, np.float32), np.zeros(N, np.float32)
    # Of a ring in a group, no two calls are the same.
    ours.groupStart()
    comm.send(ptr(x), N, ours.NCCL_FLOAT, (rank + 1) % nranks, 0)
    comm.recv(ptr(y), N, ours.NCCL_FLOAT, (rank - 1) % nranks, 0)
    ours.groupEnd()
    wait(comm)
    assert (y == (rank - 1) % nranks + 1).all()
    with pytest.raises(ours.NcclError) as caught:
        comm.allReduce(ptr(x), ptr(x), N - rank, ours.NCCL_FLOAT, ours.NCCL_SUM, 0)
    assert isinstance(caught.value.__cause__, pynccl.CollectiveMismatchError)
    assert caught.value.status == 5
    comm.abort()
    return str(caught.value)


def test_check_mode_compares_the_calls() -> None:
    for text in through("ours", 3, mismatched, PYNCCL_CHECK="1", PYNCCL_TIMEOUT="20"):
        for rank in range(3):
            assert re.search(
                rf"rank {rank}: all_reduce\(float32, {N - rank}, sum\) at \S*test_compat_cupy", text
            )


def one_late(rank: int, nranks: int, whose: str, uid_file: str) -> Any:
    """Create as Ray does: in a group of this process's devices, of which there is one."""
    path = Path(uid_file)
    if rank == 0:
        publish(path, ours.get_unique_id())
    until(path.exists)
    ours.groupStart()
    comm = ours.NcclCommunicator(nranks, path.read_bytes(), rank)
    ours.groupEnd()
    all_are_here(rank, nranks, uid_file)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pynccl.RankFailedError) as caught:
        comm.allReduce(ptr(x := np.ones(N)), ptr(x), N, ours.NCCL_DOUBLE, ours.NCCL_SUM, 0)
    return caught.value.ranks


def test_a_communicator_made_in_a_group_is_watched() -> None:
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        env = {"PYNCCL_TIMEOUT": "20"}
        place = f"{folder}/uid"
        found = testing.run(2, one_late, "ours", place, backend="cpu", timeout=50, env=env, check=False)
    assert found[0] == [1]


def refused_before_the_library(rank: int, nranks: int, whose: str, uid_file: str) -> list[str]:
    comm = connect(ours, rank, nranks, uid_file)
    x = np.zeros(N, np.float32)
    found = []
    for call, *args in (
        (comm.bcast, ptr(x), N, ours.NCCL_FLOAT, 2, 0),
        (comm.recv, ptr(x), N, ours.NCCL_FLOAT, 5, 0),
        (comm.allReduce, ptr(x), ptr(x) + 4, N - 1, ours.NCCL_FLOAT, ours.NCCL_SUM, 0),
        (comm.bcast, ptr(x), N, 99, 0, 0),
        (ours.groupEnd,),
    ):
        with pytest.raises(ours.NcclError) as caught:
            call(*args)
        found.append(str(caught.value))
    ours.groupStart()
    comm.bcast(ptr(x), N, ours.NCCL_FLOAT, 0, 0)
    with pytest.raises(ours.NcclError) as caught:
        comm.commSplit(0, 0)
    found.append(str(caught.value))
    ours.groupEnd()
    wait(comm)
    comm.destroy()
    with pytest.raises(ours.NcclError) as caught:
        comm.bcast(ptr(x), N, ours.NCCL_FLOAT, 0, 0)
    return [*found, str(caught.value)]


def test_what_is_refused_before_the_library() -> None:
    texts = [
        "NCCL_ERROR_INVALID_ARGUMENT: ncclBroadcast: root is 2; expected 0 <= root < 2",
        "NCCL_ERROR_INVALID_ARGUMENT: ncclRecv: peer is 5; expected 0 <= peer < 2",
        "NCCL_ERROR_INVALID_ARGUMENT: ncclAllReduce: send and recv overlap",
        "NCCL_ERROR_INVALID_ARGUMENT: ncclBroadcast: datatype is 99; expected one of NCCL's: 0, 1, 2",
        "NCCL_ERROR_INVALID_USAGE: ncclGroupEnd without ncclGroupStart in this thread",
        "NCCL_ERROR_INVALID_USAGE: a communicator is created in a group after other calls",
        "NCCL_ERROR_INVALID_ARGUMENT: ncclBroadcast: <pynccl.Communicator rank",
    ]
    for found in through("ours", 2, refused_before_the_library):
        assert [text in one for text, one in zip(texts, found, strict=True)] == [True] * len(texts), found


# --- under CuPy's name --------------------------------------------------------------------------------------

INSTALLED = """
import sys
import warnings
warnings.simplefilter("ignore")
from pynccl.compat import cupy as ours
if "imported" in sys.argv:
    import cupy.cuda.nccl
    assert cupy.cuda.nccl.available is False
if "used" in sys.argv:
    import cupyx.distributed
ours.install()
ours.install()
import cupy.cuda.nccl
from cupy.cuda import nccl
from cupyx.distributed import _init
assert cupy.cuda.nccl is nccl is _init.nccl
assert nccl.NcclCommunicator is ours.NcclCommunicator and nccl.available
del nccl, cupy.cuda.nccl
ours.uninstall()
ours.uninstall()
import cupy.cuda.nccl
assert not cupy.cuda.nccl.available
"""


@needs_cupy
@pytest.mark.parametrize("before", [[], ["imported"]], ids=["first", "imported"])
def test_under_the_name_of_cupys(run_python: Run, before: list[str]) -> None:
    code = ["-W", "ignore", "-c", INSTALLED, *before]
    run_python(args=code, PYTHONPATH=str(ROOT), PYNCCL_LIBRARY="cpu")


def test_without_cupy(run_python: Run) -> None:
    """The name is one inside CuPy."""
    code = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'cupy' else find(name, *rest)\n"
        "from pynccl.compat import cupy\n"
        "cupy.install()\n"
    )
    done = run_python(code, fails=True, PYTHONPATH=str(ROOT), PYNCCL_LIBRARY="cpu")
    assert "ImportError: cupy.cuda.nccl needs CuPy, which is not installed" in done.stderr
    assert "from pynccl.compat import cupy as nccl" in done.stderr


@needs_cupy
def test_not_while_cupys_own_is_used(run_python: Run) -> None:
    code = ["-W", "ignore", "-c", INSTALLED, "imported", "used"]
    done = run_python(args=code, fails=True, PYTHONPATH=str(ROOT), PYNCCL_LIBRARY="cpu")
    used = "is used by cupyx.distributed._init, cupyx.distributed._nccl_comm; expected install() before"
    assert f"RuntimeError: cupy.cuda.nccl was imported before, and {used}" in done.stderr
