"""Every operation with every kind of array, dtype and reduction, in groups of one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    MOVED,
    OPS,
    Array,
    Kind,
    dtype_of,
    factor_of,
    reduced,
    values,
)
from pynccl import Communicator, DataType, NcclError, RedOp, testing
from ranks import on_ranks


@contextmanager
def labelled(*label: Any) -> Iterator[None]:
    """Say which case of many it was."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error


class Cases:
    """The operations on arrays of one kind and dtype."""

    def __init__(self, comm: Communicator, kind: Kind, dtype: str) -> None:
        self.comm, self.kind, self.name = comm, kind, dtype
        self.dtype, self.n, self.me = dtype_of(dtype), comm.size, comm.rank

    def inputs(self, shape: Any, seed: int = 0) -> list[Array]:
        return [values(self.name, 100 * seed + rank, shape) for rank in range(self.n)]

    def check(self, got: Any, want: Array | None) -> None:
        if want is None:
            assert got is None
            return
        host = self.kind.read(got)
        assert host.dtype == want.dtype
        assert host.shape == want.shape, (host.shape, want.shape)
        assert (host == want).all(), (host, want)

    def both(self, call: Callable[[Any, Any], Any], mine: Array, want: Array | None, shape: Any) -> None:
        """Check a call with `recv` given, and without where a result can be made."""
        send = self.kind.wrap(mine.copy())
        recv = self.kind.wrap(np.zeros(shape, self.dtype)) if want is not None else None
        got = call(send, recv)
        assert got is recv
        self.check(got, want)
        assert (self.kind.read(send) == mine).all()
        if self.kind.creates:
            got = call(send, None)
            self.check(got, want)
            if want is not None:
                assert got is not send
                assert isinstance(got, np.ndarray if self.kind.name == "memoryview" else type(send))

    def all(self) -> None:
        ops: tuple[str, ...] = ()
        if self.name not in MOVED:
            ops = ("sum", "avg", "premulsum") if self.name in COMPLEX else (*OPS, "premulsum")
        for op in ops:
            with labelled(self.kind.name, self.name, op):
                self.reductions(op)
        for case in (self.broadcast, self.gathers, self.scatters, self.pairs, self.v_forms):
            with labelled(self.kind.name, self.name, case.__name__):
                case()

    def reductions(self, op: str) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2 * n, 3))
        want, mine = reduced(op, inputs), inputs[me]
        how: Any = op
        if op == "premulsum":
            how = comm.pre_mul_sum(factor_of(self.name, me))
        recv = self.kind.wrap(np.zeros_like(mine))
        send = self.kind.wrap(mine.copy())
        assert comm.all_reduce(send, recv, how) is recv
        self.check(recv, want)
        assert (self.kind.read(send) == mine).all()
        assert comm.all_reduce(send, op=how) is send
        self.check(send, want)
        self.both(
            lambda send, recv: comm.reduce_scatter(send, recv, how), mine, want[2 * me : 2 * me + 2], (2, 3)
        )
        for root in {0, n - 1}:
            send, recv = self.kind.wrap(mine.copy()), self.kind.wrap(np.zeros_like(mine))
            got = comm.reduce(send, recv if me == root else None, how, root)
            assert got is (recv if me == root else None)
            self.check(got, want if me == root else None)
            got = comm.reduce(send, op=how, root=root)
            self.check(got, want if me == root else None)
            assert got is (send if me == root else None)
            # Elsewhere in place leaves the input as it was.
            assert me == root or (self.kind.read(send) == mine).all()
        counts = [2 * rank % 5 for rank in range(n)]
        inputs = self.inputs((sum(counts),), seed=1)
        want, start = reduced(op, inputs), sum(counts[:me])
        recv = self.kind.wrap(np.zeros(counts[me], self.dtype))
        got = comm.reduce_scatter_v(self.kind.wrap(inputs[me].copy()), recv, counts, how)
        assert got is recv
        self.check(got, want[start : start + counts[me]])

    def broadcast(self) -> None:
        for root in range(self.n):
            inputs = self.inputs((3, 2))
            buffer = self.kind.wrap(inputs[self.me].copy())
            assert self.comm.broadcast(buffer, root=root) is buffer
            self.check(buffer, inputs[root])
            send = self.kind.wrap(inputs[root].copy()) if self.me == root else None
            recv = self.kind.wrap(np.zeros((3, 2), self.dtype))
            assert self.comm.broadcast(send, recv, root) is recv
            self.check(recv, inputs[root])

    def gathers(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2, 3))
        want = np.stack(inputs)
        self.both(comm.all_gather, inputs[me], want, want.shape)
        for root in {0, n - 1}:
            there = want if me == root else None
            self.both(lambda s, r, root=root: comm.gather(s, r, root), inputs[me], there, want.shape)

    def scatters(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2 * n, 3))
        want = np.concatenate([one[2 * me : 2 * me + 2] for one in inputs])
        self.both(comm.all_to_all, inputs[me], want, want.shape)
        for root in {0, n - 1}:
            want = inputs[root][2 * me : 2 * me + 2]
            self.both(lambda s, r, root=root: comm.scatter(s, r, root), inputs[me], want, (2, 3))
            recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
            send = self.kind.wrap(inputs[me].copy()) if me == root else None
            assert comm.scatter(send, recv, root) is recv
            self.check(recv, want)

    def pairs(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2, 3))
        recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
        send = self.kind.wrap(inputs[me].copy())
        assert comm.send_recv(send, (me + 1) % n, recv, (me - 1) % n) is recv
        self.check(recv, inputs[me - 1])
        if n == 1:
            return
        recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
        if me % 2 == 0:
            assert comm.send(send, me + 1) is None
        else:
            assert comm.recv(recv, me - 1) is recv
            self.check(recv, inputs[me - 1])

    def v_forms(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        counts = [2 * rank % 5 for rank in range(n)]
        inputs = [values(self.name, rank, (count,)) for rank, count in enumerate(counts)]
        want, mine = np.concatenate(inputs), self.kind.wrap(inputs[me].copy())
        recv = self.kind.wrap(np.zeros(want.shape, self.dtype))
        assert comm.all_gather_v(mine, recv, counts) is recv
        self.check(recv, want)
        for root in {0, n - 1}:
            recv = self.kind.wrap(np.zeros(want.shape, self.dtype)) if me == root else None
            assert comm.gather_v(mine, recv, counts, root) is recv
            self.check(recv, want if me == root else None)
            part = self.kind.wrap(np.zeros(counts[me], self.dtype))
            whole = self.kind.wrap(want.copy()) if me == root else None
            assert comm.scatter_v(whole, part, counts, root) is part
            self.check(part, inputs[me])
        # Rank i sends (i + 2 j) % 4 elements to rank j.
        table = [[(i + 2 * j) % 4 for j in range(n)] for i in range(n)]
        outs = [[values(self.name, 10 * i + j, (table[i][j],)) for j in range(n)] for i in range(n)]
        into = [table[i][me] for i in range(n)]
        recv = self.kind.wrap(np.zeros(sum(into), self.dtype))
        send = self.kind.wrap(np.concatenate(outs[me]))
        assert comm.all_to_all_v(send, table[me], recv, into) is recv
        self.check(recv, np.concatenate([outs[i][me] for i in range(n)]))


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
        for dtype in ("float64", "bfloat16"):
            with pytest.raises(ValueError, match=f"op has the factor 1000.*; expected a value of {dtype}"):
                comm.all_reduce(np.ones(2, dtype_of(dtype)), op=comm.pre_mul_sum(10**400))
        for factor in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"op has the factor {factor}; expected a value of int32"):
                comm.all_reduce(np.ones(2, np.int32), op=comm.pre_mul_sum(factor))
        with pytest.raises(ValueError, match=rf"op was made by another .*rank 0 of 1.*; expected .*{where}"):
            comm.all_reduce(np.ones(2), op=other.pre_mul_sum(2))
        with pytest.raises(TypeError, match=r"dtype bool; NCCL cannot reduce it"):
            comm.all_reduce(np.ones(2, bool), op=comm.pre_mul_sum(2))
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


def test_the_table_of_dtypes_is_complete() -> None:
    """Nothing that NCCL has is missing from the cases."""
    assert len(INTEGERS) + len(FLOATS) == len(DataType)
    assert set(OPS) == {op.name.lower() for op in RedOp}


@pytest.mark.parametrize("how", ["revoked", "the communicator failed earlier: rank 0 sends itself"])
@on_ranks(1)
def test_after_a_failure(rank: int, nranks: int, how: str) -> None:
    """A communicator that has failed or was revoked refuses every call, also one that would do nothing."""
    comm = pynccl.init()
    x = np.ones(4, np.int32)
    prepared = comm.prepare.all_reduce(x)
    prepared()
    if how == "revoked":
        comm.revoke()
    else:
        with pytest.raises(NcclError, match="rank 0 sends itself"):
            comm.send_recv(x, 0, np.zeros(3), 0)
    calls: list[Callable[[], Any]] = [
        prepared,
        lambda: comm.all_reduce(x),
        lambda: comm.reduce(x),
        lambda: comm.broadcast(x),
        lambda: comm.all_gather(x, x),
        lambda: comm.reduce_scatter(x, x),
        lambda: comm.gather(x, x),
        lambda: comm.scatter(x, x),
        lambda: comm.all_reduce(x, np.empty_like(x)),
        comm.barrier,
    ]
    for call in calls:
        with pytest.raises(NcclError, match=how):
            call()
    comm.abort()
