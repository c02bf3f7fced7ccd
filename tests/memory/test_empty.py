"""Arrays in memory from NCCL: their kinds, their values, and how long their memory lives."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import pynccl
from allocations import is_freed
from arrays import DTYPES, NARROW, cupy_over, dtype_of, host_of_cupy, host_of_torch, reduced, values
from conftest import ROOT
from meeting import hear, tell
from processes import completed
from ranks import on_ranks

pytestmark = pytest.mark.usefixtures("cpu")

# CuPy is imported when it is needed: that takes long, on every rank.
LIKE: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.zeros(1),
    "torch": lambda: torch.zeros(1),
    "cupy": lambda: cupy_over(np.zeros(1)),
}
READ: dict[str, Any] = {"numpy": lambda array: array, "torch": host_of_torch, "cupy": host_of_cupy}


@pytest.mark.parametrize("kind", LIKE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (2, 0, 3)])
def test_kinds(kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    like = LIKE[kind]()
    array = pynccl.zeros(shape, dtype, like=like)
    assert type(array) is type(like)
    data = READ[kind](array)
    assert data.shape == shape
    assert data.dtype == dtype_of(dtype)
    assert not data.view(np.uint8).any() if data.ndim else not data.tobytes().strip(b"\0")


def test_dtypes_in_every_notation() -> None:
    for dtype in ("bfloat16", ml_dtypes.bfloat16, torch.bfloat16, pynccl.DataType.BFLOAT16):
        assert pynccl.empty(3, dtype).dtype == ml_dtypes.bfloat16
    assert pynccl.empty(3).dtype == np.float64
    assert pynccl.empty(3, like=np.zeros(2, np.int8)).dtype == np.int8
    assert pynccl.empty(3, np.float16, like=torch.zeros(2)).dtype == torch.float16
    assert pynccl.empty([np.int64(2), 3], "f").shape == (2, 3)
    for narrow in NARROW:
        assert pynccl.empty(3, like=pynccl.empty(1, narrow)).dtype == dtype_of(narrow)


def test_wrong_arguments() -> None:
    wrong: list[tuple[type[Exception], str, Any, Any, Any]] = [
        (ValueError, r"shape is \(2, -1\); expected no negative axis", (2, -1), "f", None),
        (ValueError, "shape is -1; expected no negative axis", -1, "f", None),
        (TypeError, r"shape is 2.5; expected an int or a sequence of ints", 2.5, "f", None),
        (TypeError, r"shape is \{\}; expected an int or a sequence of ints", {}, "f", None),
        (TypeError, r"shape is \{2\}; expected an int or a sequence of ints", {2}, "f", None),
        (TypeError, "shape is '22'; expected", "22", "f", None),
        (TypeError, "shape is True; expected", True, "f", None),
        (ValueError, r"shape is \(4611686018427387904, 4\); expected fewer than", (2**62, 4), "f", None),
        (ValueError, r"shape is \(0, 4611686018427387904\); expected fewer than", (0, 2**62), "f", None),
        (ValueError, r"shape is \(1, 1, .* and at most", (1,) * 70, "f", None),
        (TypeError, "like is of type list; expected a NumPy or CuPy array", 3, None, [1]),
        (TypeError, "dtype has dtype object", 3, object, None),
        (TypeError, "dtype has dtype >f4; expected this machine's byte order", 3, ">f4", None),
        (TypeError, "like is of type list; expected a NumPy or CuPy array or a torch tensor", 3, "f", [1]),
        (
            ValueError,
            "like is a tensor on meta; expected one on a cpu",
            3,
            "f",
            torch.zeros(1, device="meta"),
        ),
    ]
    for kind, text, shape, dtype, like in wrong:
        with pytest.raises(kind, match=text):
            pynccl.empty(shape, dtype, like=like)
    with pytest.raises(pynccl.NcclError, match="ncclMemAlloc"):
        pynccl.empty(1 << 58, np.int8)


def test_no_library(tmp_path: Any) -> None:
    code = "import pynccl\ntry: pynccl.empty(3, 'f')\nexcept pynccl.LibraryNotFoundError as e: print(e)"
    missing = str(tmp_path / "libnccl.so.2")
    environment = os.environ | {"PYNCCL_LIBRARY": missing, "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", code], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"PYNCCL_LIBRARY names {missing}, which does not exist" in done.stdout


@pytest.mark.parametrize("kind", LIKE)
def test_views_keep_the_memory(kind: str) -> None:
    array = pynccl.zeros((4, 4), np.float32, like=LIKE[kind]())
    ptr = READ[kind](array).ctypes.data
    view = array[1:].reshape(-1)[2:]
    del array
    gc.collect()
    data = READ[kind](view)
    data[:] = 7
    assert (data == 7).all()
    del view, data
    assert is_freed(ptr)


def test_a_finalizer_of_another_thread() -> None:
    arrays = [pynccl.empty(100, np.float32) for _ in range(50)]
    pointers = [array.ctypes.data for array in arrays]
    circle: list[Any] = [arrays]
    circle.append(circle)
    del arrays, circle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert all(is_freed(ptr) for ptr in pointers)


def test_threads_that_allocate_and_free() -> None:
    seen: list[int] = []

    def work(seed: int) -> None:
        for size in np.random.default_rng(seed).integers(1, 1 << 16, 100):
            array = pynccl.empty(int(size), np.uint8)
            array[:] = seed
            seen.append(int(array.ctypes.data))
            assert (array == seed).all()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 400
    assert all(is_freed(ptr) for ptr in set(seen))


@on_ranks(2)
def test_calls_use_it(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        inputs = [values("float32", each, (3, 5)) for each in range(nranks)]
        for kind in ("numpy", "torch"):
            array = pynccl.empty((3, 5), np.float32, like=LIKE[kind]())
            READ[kind](array)[...] = inputs[rank]
            comm.all_reduce(array)
            assert (READ[kind](array) == reduced("sum", inputs)).all()


@on_ranks(2)
def test_calls_in_flight_keep_it(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        array = pynccl.zeros(1 << 16, np.float32)
        ptr = array.ctypes.data
        if rank == 0:
            # The other rank receives only after the array has no name here any more.
            comm.send(array, 1, stream)
            del array
            gc.collect()
            tell("dropped")
        else:
            hear("dropped")
            comm.recv(array, 0)
        comm.synchronize()
        assert rank or is_freed(ptr)


@on_ranks(2)
def test_prepared_calls_and_plans_keep_it(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        array = pynccl.zeros(100, np.float32)
        ptr = array.ctypes.data
        array[:] = rank + 1
        op = comm.prepare.all_reduce(array)
        plan = pynccl.Plan([op])
        del array, op
        gc.collect()
        (result,) = plan()
        assert (result == 3).all()
        del plan, result
        gc.collect()
        assert is_freed(ptr)


def test_a_forked_child_frees_nothing() -> None:
    array = pynccl.zeros(100, np.float32)
    array[:] = 5
    child = os.fork()
    if not child:
        code = 1
        try:
            mine = bool((array == 5).all())
            del array
            gc.collect()
            again = pynccl.zeros(10)
            code = 0 if mine and not again.any() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    array[:] += 1
    assert (array == 6).all()


EXIT = """
import os, sys, threading, numpy as np, pynccl
held = pynccl.zeros(1000, np.float32)
held[:] = 1
circle = [pynccl.zeros(10)]; circle.append(circle)
class Late:
    def __del__(self, last=lambda: os.write(1, bytes([48 + int(held[0])]))): last()
late = Late(); late.memory = pynccl.zeros(3)
sys.modules["keeps_it"] = late
threading.Thread(target=lambda: pynccl.zeros(5)).start()
"""


def test_exit() -> None:
    environment = os.environ | {"PYNCCL_LIBRARY": "cpu", "PYTHONPATH": str(ROOT), "PYTHONDEVMODE": "1"}
    done = completed([sys.executable, "-c", EXIT], env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1", "")
