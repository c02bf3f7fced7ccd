"""Every operation with every kind of array, dtype and reduction, in groups of one, two and four ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pynccl
from arrays import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    KINDS,
    OPS,
    dtype_of,
    reduced,
    values,
)
from operation_cases import Cases, labelled
from pynccl import (
    CollectiveMismatchError,
    Communicator,
    DataType,
    NcclError,
    NcclInvalidUsage,
    RedOp,
    testing,
)
from ranks import on_ranks


def in_place(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    inputs = [values("float32", rank, (2 * n, 3)) for rank in range(n)]
    total = reduced("sum", inputs)

    whole = np.zeros((n, 2 * n, 3), np.float32)
    whole[me] = inputs[me]
    assert comm.all_gather(whole[me], whole) is whole
    assert (whole == np.stack(inputs)).all()

    whole = inputs[me].copy()
    mine = whole[2 * me : 2 * me + 2]
    assert comm.reduce_scatter(whole, mine) is mine
    assert (mine == total[2 * me : 2 * me + 2]).all()

    for root in range(n):
        whole = np.zeros((n, 2 * n, 3), np.float32)
        whole[me] = inputs[me]
        comm.gather(whole[me], whole if me == root else None, root)
        assert me != root or (whole == np.stack(inputs)).all()
        whole = inputs[me].copy()
        mine = whole[2 * me : 2 * me + 2]
        assert comm.scatter(whole if me == root else None, mine, root) is mine
        assert (mine == inputs[root][2 * me : 2 * me + 2]).all()

    counts = [rank + 1 for rank in range(n)]
    starts = np.cumsum([0, *counts])
    whole = np.zeros(starts[-1], np.float32)
    part = whole[starts[me] : starts[me + 1]]
    part[:] = me + 1
    comm.all_gather_v(part, whole, counts)
    assert (whole == np.repeat(np.arange(n) + 1, counts)).all()


def fortran_order(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    named = ("numpy", "cupy", "cuda_array_interface", "dlpack")
    for wrap in (kind for kind in KINDS if kind.name in named):
        with labelled(wrap.name):
            inputs = [np.asfortranarray(values("int32", rank, (3, 4))) for rank in range(n)]
            send, recv = inputs[me].copy(order="F"), np.zeros((3, 4), np.int32, order="F")
            comm.all_reduce(wrap.wrap(send), wrap.wrap(recv))
            assert (recv == reduced("sum", inputs)).all()
            comm.reduce(wrap.wrap(send), wrap.wrap(recv), "max")
            assert me != 0 or (recv == reduced("max", inputs)).all()
            comm.broadcast(wrap.wrap(send) if me == 0 else None, wrap.wrap(recv))
            assert (recv == inputs[0]).all()
            comm.send_recv(wrap.wrap(send), (me + 1) % n, wrap.wrap(recv), (me - 1) % n)
            assert (recv == inputs[me - 1]).all()


def nothing_at_all(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    empty = np.zeros(0, np.float32)
    assert comm.all_reduce(empty) is empty
    assert comm.all_reduce(empty, np.zeros(0, np.float32)).size == 0
    assert comm.all_gather(empty).shape == (n, 0)
    assert comm.reduce_scatter(empty).shape == (0,)
    assert comm.all_to_all(empty).shape == (0,)
    assert comm.scatter(empty).shape == (0,)
    gathered = comm.gather(empty)
    assert (gathered is None) == (me != 0)
    comm.send_recv(empty, (me + 1) % n, np.zeros(0, np.float32), (me - 1) % n)
    zero = [0] * n
    comm.all_gather_v(empty, empty.copy(), zero)
    comm.reduce_scatter_v(empty, empty.copy(), zero)
    comm.all_to_all_v(empty, zero, empty.copy(), zero)
    comm.gather_v(empty, empty.copy(), zero)
    comm.scatter_v(empty, empty.copy(), zero)


def ops_by_any_name(comm: Communicator) -> None:
    n = comm.size
    for op in RedOp:
        for how in (op, int(op), op.name.lower()):
            data = np.full(3, 2.0)
            want = {RedOp.SUM: 2 * n, RedOp.PROD: 2**n}.get(op, 2)
            assert (comm.all_reduce(data, op=how) == want).all(), how


def one_number(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    scalar = np.array(me + 1.0)
    assert scalar.shape == ()
    assert comm.all_reduce(scalar) is scalar
    assert scalar == n * (n + 1) / 2
    assert comm.all_gather(np.array(float(me))).tolist() == list(range(n))


def on_streams(comm: Communicator) -> None:
    """A stream may be given to every call; results are there when it was waited for."""
    n, me = comm.size, comm.rank
    with pynccl.Stream() as stream:
        x = np.full((n, 2), float(me))
        results = [
            comm.all_reduce(x.copy(), stream=stream),
            comm.reduce(x, np.zeros_like(x), root=0, stream=stream.handle),
            comm.broadcast(x.copy(), stream=stream),
            comm.all_gather(x, stream=stream),
            comm.reduce_scatter(x, stream=stream),
            comm.all_to_all(x, stream=stream),
            comm.gather(x, stream=stream),
            comm.scatter(x, stream=stream),
            comm.send_recv(x, (me + 1) % n, np.zeros_like(x), (me - 1) % n, stream=stream),
            comm.all_gather_v(x, np.zeros((n, n, 2)), [2 * n] * n, stream=stream),
            comm.reduce_scatter_v(x, np.zeros(2), [2] * n, stream=stream),
            comm.gather_v(x, np.zeros((n, n, 2)), [2 * n] * n, stream=stream),
            comm.scatter_v(x, np.zeros(2), [2] * n, stream=stream),
            comm.all_to_all_v(x, [2] * n, np.zeros_like(x), [2] * n, stream=stream),
        ]
        comm.synchronize(stream)
        total = n * (n - 1) / 2
        ranks = np.arange(n)[:, None] * np.ones(2)
        each = np.arange(n)[:, None, None] * np.ones((n, 2))
        for index, (got, want) in enumerate(
            zip(
                results,
                [
                    total, total if me == 0 else None, 0, each, total, ranks, each if me == 0 else None, 0,
                    (me - 1) % n, each, total, each if me == 0 else None, 0, ranks,
                ],
                strict=True,
            )
        ):  # fmt: skip
            assert (got is None) == (want is None), index
            assert want is None or (got == want).all(), (index, got, want)


def every_case(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=40) as comm:
        for kind in KINDS:
            for dtype in DTYPES:
                if dtype not in kind.lacks:
                    Cases(comm, kind, dtype).all()
        for case in (in_place, fortran_order, nothing_at_all, ops_by_any_name, one_number, on_streams):
            with labelled(case.__name__):
                case(comm)


@pytest.mark.torch
@pytest.mark.parametrize("nranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.timeout(180)
def test_every_operation(nranks: int) -> None:
    testing.run(nranks, every_case, backend="cpu", timeout=170)


# --- numbers that are not exact ---


@on_ranks(3)
def test_averages_of_three(rank: int, nranks: int) -> None:
    """A third is not exact: an average multiplies each input by it, or divides a whole sum."""
    with pynccl.init(timeout=30) as comm:
        for name in INTEGERS:
            signs = (-1, 1) if name.startswith("i") else (1,)
            data = [np.array([7 * s * (r + 1) for s in signs] + [r], name) for r in range(nranks)]
            want = reduced("avg", data)
            assert (comm.all_reduce(data[rank].copy(), op="avg") == want).all(), name
            # -1 - 1 + 0 is -2: truncated to 0, not floored to -1.
            if len(signs) == 2:
                small = np.array([-1 if rank else 0], name)
                assert comm.all_reduce(small, op="avg")[0] == 0
        for name in (*FLOATS, *COMPLEX):
            dtype = dtype_of(name)
            random = np.random.default_rng(5)
            wide = random.uniform(0.5, 2, (nranks, 50))
            data = [wide[r].astype(dtype) for r in range(nranks)]
            exact = np.mean([one.astype(np.complex128 if dtype.kind == "c" else float) for one in data], 0)
            got = comm.all_reduce(data[rank].copy(), op="avg")
            steps = {"float8_e5m2": 2, "float8_e4m3fn": 3, "bfloat16": 7, "float16": 10}.get(name)
            if steps is None:
                steps = 22 if name in ("float32", "complex64") else 51
            error = abs(got.astype(exact.dtype) - exact) / abs(exact)
            assert error.max() <= 3 * 2.0**-steps, (name, error.max())
            again = comm.all_gather(got)
            assert (again == again[0]).all(), "the ranks disagree"


@on_ranks(2)
def test_extremes(rank: int, nranks: int) -> None:
    """64-bit integers keep all their bits, and sums wrap as in C."""
    with pynccl.init(timeout=30) as comm:
        for name in ("int64", "uint64"):
            limits = np.iinfo(name)
            data = np.array([limits.max - rank, limits.min + rank], name)
            assert comm.all_gather(data)[1].tolist() == [limits.max - 1, limits.min + 1]
            assert comm.all_reduce(data.copy(), op="max").tolist() == [limits.max, limits.min + 1]
            assert comm.all_reduce(data.copy(), op="min").tolist() == [limits.max - 1, limits.min]
        wrapped = comm.all_reduce(np.full(2, 200, np.uint8))
        assert wrapped.tolist() == [144, 144]


# --- PreMulSum ---


@on_ranks(2)
def test_factors(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        # Every kind of number is converted to the dtype of the arrays, never read as its bytes.
        numbers = [3, 3.0, *(np.dtype(name).type(3) for name in (*INTEGERS, "int16", "float16", "float32"))]
        numbers += [np.float64(3), np.longdouble(3), *(dtype_of(name).type(3) for name in FLOATS[3:])]
        for number in numbers:
            op = comm.pre_mul_sum(number)
            for name in (*INTEGERS, *FLOATS):
                with labelled(type(number), name):
                    dtype = dtype_of(name)
                    got = comm.all_reduce(np.ones(4).astype(dtype), op=op)
                    assert (got == np.full(4, 3 * nranks).astype(dtype)).all(), got
            op.destroy()
        half = comm.pre_mul_sum(0.5)
        for name in (*FLOATS, *COMPLEX):
            dtype = dtype_of(name)
            got = comm.all_reduce(np.full(4, 2).astype(dtype), op=half)
            assert (got == np.full(4, nranks).astype(dtype)).all(), name
        # The factor of bfloat16 is rounded to the nearest, not cut off.
        fine = comm.pre_mul_sum(1 + 2**-8 + 2**-12)
        got = comm.all_reduce(
            np.ones(1).astype(dtype_of("bfloat16")), np.zeros(1, dtype_of("bfloat16")), fine
        )
        assert float(got[0]) == nranks * (1 + 2**-7)
        # Each rank has its own.
        mine = comm.pre_mul_sum(10**rank)
        assert comm.all_reduce(np.ones(2), op=mine).tolist() == [sum(10**r for r in range(nranks))] * 2
        recv = np.zeros(1)
        comm.reduce(np.ones(1), recv, mine, root=1)
        assert recv[0] == (sum(10**r for r in range(nranks)) if rank == 1 else 0)
        # It keeps to one rank alone, too, and to float64 that no float32 holds.
        third = comm.pre_mul_sum(1 / 3)
        assert comm.all_reduce(np.full(1, 3.0), op=third)[0] == nranks * (3 * (1 / 3))
        for op in (half, fine, mine, third):
            op.destroy()
            op.destroy()


@pytest.mark.torch
@on_ranks(2)
def test_factors_in_memory(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        for kind in KINDS:
            with labelled(kind.name):
                place = np.full(1, 2.0, np.float32)
                op = comm.pre_mul_sum(kind.wrap(place))
                assert (comm.all_reduce(np.ones(3, np.float32), op=op) == 2 * nranks).all()
                # Read when the reduction runs, not when the operation is made.
                place[0] = 5
                assert (comm.all_reduce(np.ones(3, np.float32), op=op) == 5 * nranks).all()
                assert (comm.all_reduce(np.ones(3, np.complex64), op=op) == 5 * nranks).all()
                with pytest.raises(TypeError, match="op has a factor of float32 .*arrays, float64"):
                    comm.all_reduce(np.ones(3), op=op)


@on_ranks(2)
def test_wrong_factors(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Communicator(1, pynccl.get_unique_id(), 0) as other:
        for factor, words in (
            (1j, "factor is 1j; expected a real number"),
            (np.complex64(1), "expected a real number"),
            ("2", "factor is '2'; expected a real number"),
            (b"2", "factor is b'2'; expected a real number"),
            (None, "factor is None; expected a real number"),
            (True, "factor is True; expected a real number"),
            (np.True_, "expected a real number"),
            ([2.0], "factor is of type list"),
        ):
            with pytest.raises(TypeError, match=words):
                comm.pre_mul_sum(factor)
        for array, words in (
            (np.ones(2), "factor has 2 elements of float64; expected one real number"),
            (np.ones(1, np.complex64), "complex64; expected one real number"),
            (np.ones(1, np.int16), "int16; expected one real number"),
        ):
            with pytest.raises(ValueError, match=words):
                comm.pre_mul_sum(array)
        where = rf"\(rank {rank} of {nranks}\)$"
        for factor, dtype in (
            (0.5, "int32"),
            (-1, "uint8"),
            (300, "int8"),
            (2**70, "int64"),
            (70000, "float16"),
        ):
            op = comm.pre_mul_sum(factor)
            with pytest.raises(
                ValueError, match=rf"op has the factor {factor}; expected a value of {dtype}, .*{where}"
            ):
                comm.all_reduce(np.ones(2, dtype), op=op)
        with pytest.raises(ValueError, match="op has the factor inf; .* float8_e4m3fn.* -448 to 448 "):
            comm.all_reduce(np.ones(2, dtype_of("float8_e4m3fn")), op=comm.pre_mul_sum(float("inf")))
        for factor in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"op has the factor {factor}; expected a value of int32"):
                comm.all_reduce(np.ones(2, np.int32), op=comm.pre_mul_sum(factor))
        with pytest.raises(ValueError, match=rf"op was made by another .*rank 0 of 1.*; expected .*{where}"):
            comm.all_reduce(np.ones(2), op=other.pre_mul_sum(2))
        with pytest.raises(TypeError, match=r"dtype bool; NCCL cannot reduce it"):
            comm.all_reduce(np.ones(2, bool), op=comm.pre_mul_sum(2))
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


# By dtype: the largest number, a factor that is rounded to it, a factor beyond, and the range in words.
LIMITS: dict[str, tuple[float, float, float, str]] = {
    "int8": (127, 127, 128, "an integer from -128 to 127"),
    "uint64": (2**64 - 1, 2**64 - 1, 2**64, "an integer from 0 to 18446744073709551615"),
    "float8_e4m3fn": (448, 464, 465, "from -448 to 448"),
    "float8_e5m2": (57344, 61439, 61440, "from -57344 to 57344"),
    "float16": (65504, 65519, 65520, "from -65504 to 65504"),
    "bfloat16": (3.3895314e38, 3.396e38, 3.397e38, "from -3.3895314e+38 to 3.3895314e+38"),
    "float32": (3.4028234664e38, 3.4028235e38, 3.4028236e38, "from -3.4028235e+38 to 3.4028235e+38"),
    "float64": (2**1024 - 2**971, 2**1024 - 2**971, 2**1024, "from -1.7976931e+308 to 1.7976931e+308"),
}


@pytest.mark.parametrize("name", LIMITS)
@on_ranks(1)
def test_the_largest_factors(rank: int, nranks: int, name: str) -> None:
    largest, rounded, beyond, limits = LIMITS[name]
    dtype = dtype_of(name)
    with pynccl.init() as comm:
        assert comm.all_reduce(np.ones(1, dtype), op=comm.pre_mul_sum(rounded))[0] == dtype.type(largest)
        for factor in (beyond, -beyond - 1, 10**400, np.longdouble("1e400")):
            words = (
                f"op has the factor {factor!r:.40}",
                f"; expected a value of {name}, the dtype of the arrays: {limits} ",
            )
            with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
                comm.all_reduce(np.ones(1, dtype), op=comm.pre_mul_sum(factor))


def test_the_table_of_dtypes_is_complete() -> None:
    """Nothing that NCCL has is missing from the cases."""
    assert len(INTEGERS) + len(FLOATS) == len(DataType)
    assert set(OPS) == {op.name.lower() for op in RedOp}


@pytest.mark.parametrize("how", ["revoked", "the communicator failed earlier: .*called different things"])
@on_ranks(2)
def test_after_a_failure(rank: int, nranks: int, how: str) -> None:
    """A communicator that has failed or was revoked refuses every call, also one that would do nothing."""
    comm = pynccl.init()
    x, y = np.ones(4, np.int32), np.ones(8, np.int32)
    prepared = comm.prepare.all_reduce(x)
    prepared()
    if how == "revoked":
        comm.revoke()
    else:
        with pytest.raises(CollectiveMismatchError):
            comm.all_reduce(np.ones(3 + rank))
    calls: list[Callable[[], Any]] = [
        prepared,
        lambda: comm.all_reduce(x),
        lambda: comm.reduce(x),
        lambda: comm.broadcast(x),
        lambda: comm.all_gather(x, y),
        lambda: comm.reduce_scatter(y, x),
        lambda: comm.gather(x, y),
        lambda: comm.scatter(y, x),
        lambda: comm.all_reduce(x, np.empty_like(x)),
        comm.barrier,
    ]
    for call in calls:
        with pytest.raises(NcclError, match=how):
            call()
    comm.abort()


@on_ranks(2)
def test_messages_to_itself_that_do_not_match(rank: int, nranks: int) -> None:
    """They are refused before anything is issued, as in NCCL: the communicator goes on."""
    x, y, other = np.full(4, 7.0), np.zeros(4), np.zeros(3)

    def alone(call: Callable[[], object]) -> None:
        with pynccl.group():
            comm.send(x, 1 - rank)
            comm.recv(y, 1 - rank)
            call()

    with pynccl.init() as comm:
        for call, why in (
            (
                lambda: alone(lambda: comm.send(x, rank)),
                f"rank {rank} issued 1 sends to itself and 0 receives",
            ),
            (
                lambda: alone(lambda: comm.recv(y, rank)),
                f"rank {rank} issued 0 sends to itself and 1 receives",
            ),
            (lambda: comm.send_recv(x, rank, other, rank), f"rank {rank} sends itself "),
        ):
            with pytest.raises(NcclInvalidUsage, match=why):
                call()
        assert (y == 0).all()
        mine = np.zeros(4)
        alone(lambda: comm.send_recv(x, rank, mine, rank))
        assert (y == 7).all() and (mine == 7).all() and (comm.all_reduce(x) == 14).all()
