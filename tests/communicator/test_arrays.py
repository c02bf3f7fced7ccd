"""What every operation refuses, and how it says so: argument, value, expectation and rank."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pynccl
from arrays import KINDS, cupy_over, device_over, dtype_of, torch_over
from device_arrays import Device, Exporter
from pynccl import Buffer, Communicator, DataType, RedOp
from ranks import on_ranks

N = 2
Refusal = tuple[Callable[[], Any], type[Exception], str]


def refused(comm: Communicator, refusals: list[Refusal]) -> None:
    """Check each message to its end, the rank, and that nothing reached the library."""
    for index, (call, error, words) in enumerate(refusals):
        try:
            call()
        except (TypeError, ValueError) as caught:
            kind, text = type(caught), str(caught)
        else:
            raise AssertionError(f"{index}: nothing raised; expected {error.__name__}: {words}")
        assert kind is error, (index, words, text)
        assert re.search(words, text), (index, words, text)
        assert text.endswith(f"(rank {comm.rank} of {comm.size})"), (index, text)
    # Had one rank issued anything, this would not be the ranks' first call in common.
    assert (comm.all_reduce(np.ones(2)) == comm.size).all()
    assert comm.async_error() is None


def takes(comm: Communicator) -> dict[str, Callable[[Any], Any]]:
    """Return every argument that takes an array, as a call with that argument alone to be given."""
    n, me = comm.size, comm.rank
    other = (me + 1) % n
    f, whole = np.zeros(4 * n, np.float32), np.zeros(4 * n * n, np.float32)
    each = [4] * n
    return {
        "all_reduce send": lambda x: comm.all_reduce(x, f),
        "all_reduce recv": lambda x: comm.all_reduce(f, x),
        "reduce send": lambda x: comm.reduce(x, f, root=me),
        "reduce recv": lambda x: comm.reduce(f, x, root=me),
        "broadcast send": lambda x: comm.broadcast(x, f, root=me),
        "broadcast recv": lambda x: comm.broadcast(f, x, root=me),
        "all_gather send": lambda x: comm.all_gather(x, whole),
        "all_gather recv": lambda x: comm.all_gather(f[:2], x),
        "reduce_scatter send": lambda x: comm.reduce_scatter(x, f[:4]),
        "reduce_scatter recv": lambda x: comm.reduce_scatter(np.zeros(4 * n * n, np.float32), x),
        "all_to_all send": lambda x: comm.all_to_all(x, f),
        "all_to_all recv": lambda x: comm.all_to_all(f, x),
        "gather send": lambda x: comm.gather(x, whole, root=me),
        "gather recv": lambda x: comm.gather(f[:2], x, root=me),
        "scatter send": lambda x: comm.scatter(x, f[:4], root=me),
        "scatter recv": lambda x: comm.scatter(np.zeros(4 * n * n, np.float32), x, root=me),
        "send buf": lambda x: comm.send(x, other),
        "recv buf": lambda x: comm.recv(x, other),
        "send_recv send": lambda x: comm.send_recv(x, me, f, me),
        "send_recv recv": lambda x: comm.send_recv(f, me, x, me),
        "all_gather_v send": lambda x: comm.all_gather_v(x, whole, [4 * n] * n),
        "all_gather_v recv": lambda x: comm.all_gather_v(f[:4], x, each),
        "reduce_scatter_v send": lambda x: comm.reduce_scatter_v(x, f[:4], each),
        "reduce_scatter_v recv": lambda x: comm.reduce_scatter_v(whole, x, [4 * n] * n),
        "gather_v send": lambda x: comm.gather_v(x, whole, [4 * n] * n, root=me),
        "gather_v recv": lambda x: comm.gather_v(f[:4], x, each, root=me),
        "scatter_v send": lambda x: comm.scatter_v(x, f[:4], each, root=me),
        "scatter_v recv": lambda x: comm.scatter_v(whole, x, [4 * n] * n, root=me),
        "all_to_all_v send": lambda x: comm.all_to_all_v(x, each, f, each),
        "all_to_all_v recv": lambda x: comm.all_to_all_v(f, each, x, each),
    }


@pytest.mark.torch
@on_ranks(N)
def test_every_argument(rank: int, nranks: int) -> None:
    """Each argument of each operation is looked at in the same way, and called by its name."""
    with pynccl.init(timeout=30) as comm:
        n = nranks
        wide = np.zeros((4 * n, 2), np.float32)
        frozen = np.zeros(4 * n, np.float32)
        frozen.flags.writeable = False
        for what, call in takes(comm).items():
            name = what.split()[1]
            written = name == "recv" or what == "recv buf"
            refusals: list[Refusal] = [
                (lambda c=call: c(wide[:, 0]), ValueError,
                 rf"^{name} is not contiguous \(shape \({4 * n},\), strides \(8,\)\); nothing is copied "
                 "silently: expected a contiguous array .see ascontiguousarray and .contiguous"),
                (lambda c=call: c(torch_over(wide)[:, 0]), ValueError, rf"^{name} is not contiguous"),
                (lambda c=call: c(Device(wide[:, 0])), ValueError, rf"^{name} is not contiguous"),
                (lambda c=call: c(Exporter(wide[:, 0])), ValueError, rf"^{name} is not contiguous"),
                (lambda c=call: c([1.0] * 8), TypeError,
                 rf"^{name} is of type list; expected a NumPy or CuPy array, such as numpy.array.{name}."),
                (lambda c=call: c(np.ndarray), TypeError, rf"^{name} is the type ndarray; expected an array"),
                (lambda c=call: c(np.zeros(4 * n, "M8[s]")), TypeError,
                 rf"^{name} has dtype datetime64.*; expected one of int8, uint8"),
                (lambda c=call: c(np.zeros(4 * n, ml_dtypes.float8_e4m3)), TypeError,
                 rf"^{name} has dtype float8_e4m3 \(it has infinities"),
                (lambda c=call: c(np.zeros(4 * n, ">f4" if sys.byteorder == "little" else "<f4")), TypeError,
                 rf"^{name} has dtype .f4; expected this machine's byte order"),
                (lambda c=call: c(np.ma.zeros(4 * n)), TypeError, rf"^{name} is a masked array"),
            ]  # fmt: skip
            if written:
                refusals += [
                    (
                        lambda c=call: c(frozen),
                        ValueError,
                        f"^{name} is read-only; expected a writable array",
                    ),
                    (lambda c=call: c(device_over(frozen)), ValueError, f"^{name} is read-only"),
                    (lambda c=call: c(bytes(16 * n)), ValueError, f"^{name} is read-only"),
                ]
            if what.split()[0] not in ("send", "recv", "send_recv"):
                other = "recv" if name == "recv" else "send"
                refusals.append(
                    (lambda c=call: c(np.zeros(4 * n, np.int8)), TypeError,
                     "^recv has dtype (int8|float32); expected the dtype of send, (int8|float32)")
                )  # fmt: skip
                refusals.append(
                    (lambda c=call: c(np.zeros(4 * n + 1, np.float32)), ValueError,
                     rf"^({other}|recv|send) has \d+ elements; expected (\d+|a multiple of the {n} ranks)")
                )  # fmt: skip
            refused_here(comm, what, refusals)


def refused_here(comm: Communicator, what: str, refusals: list[Refusal]) -> None:
    try:
        refused(comm, refusals)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


@on_ranks(N)
def test_orders_and_counts(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        n, me = nranks, rank
        c, f = np.zeros((4, 3)), np.zeros((4, 3), order="F")
        joined = "in Fortran order; expected C order, since the first axis is split or joined"
        refused(comm, [
            (lambda: comm.all_reduce(c, f), ValueError,
             "^recv is in Fortran order; expected the order of send, C order"),
            (lambda: comm.all_reduce(f, c), ValueError,
             "^recv is in C order; expected the order of send, Fortran order"),
            (lambda: comm.reduce(c, f, root=me), ValueError, "^recv is in Fortran order"),
            (lambda: comm.broadcast(f, c, root=me), ValueError, "^recv is in C order"),
            (lambda: comm.all_gather(f), ValueError, f"^send is {joined}"),
            (lambda: comm.all_gather(c, np.zeros((8, 3), order="F")), ValueError, f"^recv is {joined}"),
            (lambda: comm.reduce_scatter(f), ValueError, f"^send is {joined}"),
            (lambda: comm.reduce_scatter(c, np.zeros((2, 3), order="F")), ValueError, f"^recv is {joined}"),
            (lambda: comm.all_to_all(f), ValueError, f"^send is {joined}"),
            (lambda: comm.gather(f, root=me), ValueError, f"^send is {joined}"),
            (lambda: comm.gather(f, root=1 - me), ValueError, f"^send is {joined}"),
            (lambda: comm.scatter(f, root=me), ValueError, f"^send is {joined}"),
            (lambda: comm.all_gather_v(f, np.zeros(24), [12, 12]), ValueError, f"^send is {joined}"),
            (lambda: comm.all_to_all_v(c, [6, 6], f, [6, 6]), ValueError, f"^recv is {joined}"),
            # counts
            (lambda: comm.all_reduce(c, np.zeros(11)), ValueError,
             "^recv has 11 elements; expected 12, as many as send"),
            (lambda: comm.all_gather(c, np.zeros(12)), ValueError,
             "^recv has 12 elements; expected 24, every rank's send"),
            (lambda: comm.all_gather(c, np.zeros(6)), ValueError,
             r"^recv has 6 elements; expected 24, every rank's send \(the order is send, recv\)"),
            (lambda: comm.gather(c, np.zeros(23), root=me), ValueError,
             "^recv has 23 elements; expected 24, every rank's send"),
            (lambda: comm.reduce_scatter(np.zeros(9), np.zeros(4)), ValueError,
             "^send has 9 elements; expected a multiple of the 2 ranks"),
            (lambda: comm.reduce_scatter(np.zeros((3, 4))), ValueError,
             r"^send has shape \(3, 4\); expected a first axis that is a multiple of the 2 ranks"),
            (lambda: comm.reduce_scatter(np.zeros(())), ValueError, r"^send has shape \(\); expected a"),
            (lambda: comm.reduce_scatter(c, np.zeros(7)), ValueError,
             "^recv has 7 elements; expected 6, one part of send"),
            (lambda: comm.all_to_all(np.zeros(9), np.zeros(9)), ValueError,
             "^send has 9 elements; expected a multiple of the 2 ranks"),
            (lambda: comm.all_to_all(np.zeros((3, 4))), ValueError, r"^send has shape \(3, 4\)"),
            (lambda: comm.all_to_all(c, np.zeros(10)), ValueError,
             "^recv has 10 elements; expected 12, as many as send"),
            (lambda: comm.scatter(np.zeros(9), np.zeros(4), root=me), ValueError,
             "^send has 9 elements; expected a multiple of the 2 ranks"),
            (lambda: comm.scatter(np.zeros((5, 2)), root=me), ValueError, r"^send has shape \(5, 2\)"),
            (lambda: comm.scatter(np.zeros((5, 2)), root=1 - me), ValueError, r"^send has shape \(5, 2\)"),
            # complex numbers and what goes as bytes are counted as the caller counts them
            (lambda: comm.all_reduce(np.zeros(4, "c8"), np.zeros(5, "c8")), ValueError,
             "^recv has 5 elements; expected 4"),
            (lambda: comm.reduce_scatter(np.zeros(5, "c16"), np.zeros(2, "c16")), ValueError,
             "^send has 5 elements; expected a multiple"),
            (lambda: comm.all_gather(np.zeros(3, "i2"), np.zeros(5, "i2")), ValueError,
             "^recv has 5 elements; expected 6"),
            (lambda: comm.all_gather(np.zeros(3, "i2"), np.zeros(12, "u1")), TypeError,
             "^recv has dtype uint8; expected the dtype of send, int16"),
            (lambda: comm.all_reduce(np.zeros(4, "c8"), np.zeros(8, "f4")), TypeError,
             "^recv has dtype float32; expected the dtype of send, complex64"),
        ])  # fmt: skip
        data, counts = np.zeros(4), [2, 2]
        refused(comm, [
            (lambda: comm.all_gather_v(data, np.zeros(8), [4]), ValueError,
             "^counts has 1 entries; expected 2, one for each rank"),
            (lambda: comm.all_gather_v(data, np.zeros(8), [4, 4, 4]), ValueError, "^counts has 3 entries"),
            (lambda: comm.all_to_all_v(data, data.copy(), counts, counts), TypeError,
             "^send_counts is .* the order is send, send_counts, recv, recv_counts"),
            (lambda: comm.all_to_all_v(data, [me, 4 - me], data.copy(), [2, 2]), ValueError,
             rf"^send_counts\[{me}\] is {[0, 3][me]} and recv_counts\[{me}\] is 2; expected them equal"),
            (lambda: comm.all_gather_v(data, np.zeros(8), [4, -4]), ValueError,
             r"^counts is \[4, -4\]; expected whole numbers, 0 or more"),
            (lambda: comm.all_gather_v(data, None, [2**63, 1]), ValueError,
             r"^counts is \[9223372036854775808, 1\]; expected whole numbers, 0 or more with"),
            (lambda: comm.all_gather_v(data, np.zeros(8), [4.0, 4.0]), TypeError, "^counts is .*sequence"),
            (lambda: comm.all_gather_v(data, np.zeros(8), None), TypeError,
             "^counts is None; expected a sequence of 2 ints"),
            (lambda: comm.scatter_v(data, [2, 2], data[:2].copy()), TypeError,
             "^counts is an array of float64; expected a sequence of 2 ints; the order is send, recv, c"),
            (lambda: comm.all_gather_v(data, np.zeros(8), 4), TypeError, "^counts is 4; expected a sequence"),
            (lambda: comm.all_gather_v(data, np.zeros(8), ["a", "b"]), TypeError, "^counts is .*sequence"),
            (lambda: comm.all_gather_v(data, np.zeros(8), [5, 5]), ValueError,
             rf"^send has 4 elements; expected 5, counts\[{me}\], in elements"),
            (lambda: comm.all_gather_v(data, np.zeros(9), [4, 4]), ValueError,
             "^recv has 9 elements; expected 8, the sum of counts"),
            (lambda: comm.reduce_scatter_v(data, np.zeros(3), counts), ValueError,
             rf"^recv has 3 elements; expected 2, counts\[{me}\]"),
            (lambda: comm.reduce_scatter_v(np.zeros(5), np.zeros(2), counts), ValueError,
             "^send has 5 elements; expected 4, the sum of counts"),
            (lambda: comm.gather_v(data, np.zeros(8), counts, me), ValueError, r"^send has 4 .*2, counts"),
            (lambda: comm.gather_v(data, np.zeros(7), [4, 4], me), ValueError, "^recv has 7 .*8, the sum"),
            (lambda: comm.gather_v(data, None, [4, 4.5], me), TypeError, r"^counts is \[4, 4\.5\]"),
            (lambda: comm.scatter_v(None, None, [4, 4], 1 - me), TypeError, "^send and recv are None"),
            (lambda: comm.scatter_v(np.zeros(8), data, [3, 3], me), ValueError, "^recv has 4 .*3, counts"),
            (lambda: comm.scatter_v(np.zeros(7), data, [4, 4], me), ValueError, "^send has 7 .*8, the sum"),
            (lambda: comm.scatter_v(None, data, [4, 4], me), TypeError, "^send is None; expected an arr"),
            (lambda: comm.all_to_all_v(data, [4], data, counts), ValueError, "^send_counts has 1 entries"),
            (lambda: comm.all_to_all_v(data, counts, data, [4]), ValueError, "^recv_counts has 1 entries"),
            (lambda: comm.all_to_all_v(data, [3, 3], np.zeros(4), counts), ValueError,
             "^send has 4 elements; expected 6, the sum of send_counts"),
            (lambda: comm.all_to_all_v(data, counts, np.zeros(4), [1, 2]), ValueError,
             "^recv has 4 elements; expected 3, the sum of recv_counts"),
        ])  # fmt: skip
        assert n == 2


@pytest.mark.torch
@on_ranks(2)
def test_shapes(rank: int, nranks: int) -> None:
    """A result has the shape that follows from the input; what has no shape is counted."""
    with pynccl.init(timeout=30) as comm:
        n, me = nranks, rank
        flat, square = np.ones(4), np.zeros((2, 2))

        def zeros(*shape: int) -> Any:
            return np.zeros(shape)

        wrap: Any
        for wrap in (lambda a: a, torch_over, cupy_over, memoryview):
            refused(comm, [
                (lambda w=wrap: comm.all_reduce(w(flat), w(square)), ValueError,
                 r"^recv has shape \(2, 2\); expected the shape of send, \(4,\) \(a view made by reshape"),
                (lambda w=wrap: comm.reduce(w(flat), w(zeros(4, 1)), root=me), ValueError, r"shape \(4, 1\)"),
                (lambda w=wrap: comm.broadcast(w(square), w(zeros(4)), root=me), ValueError, r"shape \(4,\)"),
                (lambda w=wrap: comm.all_to_all(w(zeros(n, 2)), w(zeros(2 * n))), ValueError, r"\(4,\)"),
                (lambda w=wrap: comm.all_gather(w(square), w(zeros(4 * n))), ValueError,
                 rf"^recv has shape \(8,\); expected \({n}, 2, 2\) or \({2 * n}, 2\)"),
                (lambda w=wrap: comm.gather(w(flat), w(zeros(4, n)), root=me), ValueError, r"shape \(4, 2\)"),
                (lambda w=wrap: comm.reduce_scatter(w(zeros(2 * n, 2)), w(zeros(4))), ValueError,
                 r"^recv has shape \(4,\); expected \(2, 2\) \("),
                (lambda w=wrap: comm.reduce_scatter(w(zeros(n, 2)), w(zeros(2, 1))), ValueError,
                 r"^recv has shape \(2, 1\); expected \(2,\) or \(1, 2\)"),
                (lambda w=wrap: comm.scatter(w(zeros(n, 4)), w(square), root=me), ValueError, r"\(2, 2\)"),
            ])  # fmt: skip
            # The first call of a kind checks what the later, shorter ones do, too.
            comm.all_reduce(wrap(flat.copy()), wrap(zeros(4)))
            refused(comm, [(lambda w=wrap: comm.all_reduce(w(flat), w(square)), ValueError, "has shape")])
        # A view of it, and what is counted.
        assert (comm.all_reduce(flat, square.reshape(4)) == n).all() and (square == n).all()
        assert (comm.all_reduce(flat.reshape(2, 2), zeros(2, 2)) == n).all()
        comm.all_reduce(flat, pynccl.Buffer(square.ctypes.data, 4, "float64"))
        comm.all_reduce(flat, array("d", [0] * 4))
        for shape in ((n, 2, 2), (2 * n, 2)):
            comm.all_gather(square, zeros(*shape))
            comm.reduce_scatter(zeros(*shape), square)
        comm.all_gather(np.array(1.0), zeros(n))
        comm.reduce_scatter(zeros(n), np.array(1.0))
        comm.reduce_scatter(zeros(n), zeros(1))
        comm.all_gather_v(flat, zeros(2, 2 * n), [4] * n)
        # Ranks may disagree: each has its own arrays.
        comm.all_reduce(zeros(4) if rank else zeros(2, 2))
        comm.send_recv(zeros(4), 1 - me, zeros(2, 2), 1 - me)


@on_ranks(1)
def test_constants_of_mpi(rank: int, nranks: int) -> None:
    mpi = pytest.importorskip("mpi4py.MPI")
    with pynccl.Communicator(1, pynccl.get_unique_id(), 0) as comm:
        text = "^send is MPI.IN_PLACE; expected an array: a call without recv is in place"
        for call in (
            lambda: comm.all_reduce(mpi.IN_PLACE, np.ones(1)),
            lambda: comm.all_gather(mpi.IN_PLACE),
        ):
            with pytest.raises(TypeError, match=text):
                call()
        with pytest.raises(TypeError, match=r"^recv is MPI\.BOTTOM"):
            comm.all_reduce(np.ones(1), mpi.BOTTOM)


@on_ranks(N)
def test_the_root_in_place_of_recv(rank: int, nranks: int) -> None:
    """Every rank refuses it: the root alone would leave the others in the call."""
    with pynccl.init(timeout=30) as comm:
        x: Any = np.zeros(4)
        counts = [4] * nranks
        calls: list[Callable[[], Any]] = [
            lambda: comm.reduce(x, 0),
            lambda: comm.gather(x, 0),
            lambda: comm.gather_v(x, 0, counts),
            lambda: comm.broadcast(x, 0),
            lambda: comm.scatter(x, 0),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="recv is (0|of type int)"):
                call()
        comm.barrier()


@on_ranks(N)
def test_roots_and_overlaps(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        me = rank
        x, y = np.zeros(4), np.zeros(8)
        ranks: Any
        for ranks, error in ((2, ValueError), (-1, ValueError), (None, TypeError), ("0", TypeError),
                             (True, TypeError), (0.0, TypeError)):  # fmt: skip
            shown = re.escape(repr(ranks))
            calls: list[tuple[str, Callable[..., Any]]] = [
                ("root", lambda r: comm.reduce(x, root=r)),
                ("root", lambda r: comm.broadcast(x, root=r)),
                ("root", lambda r: comm.gather(x, root=r)),
                ("root", lambda r: comm.scatter(x, root=r)),
                ("root", lambda r: comm.gather_v(x, y, [4, 4], r)),
                ("root", lambda r: comm.scatter_v(y, x, [4, 4], r)),
                ("peer", lambda r: comm.send(x, r)),
                ("peer", lambda r: comm.recv(x, r)),
                ("dest", lambda r: comm.send_recv(x, r, np.zeros(4), me)),
                ("source", lambda r: comm.send_recv(x, me, np.zeros(4), r)),
            ]
            refused(comm, [
                (lambda c=call, r=ranks: c(r), error, rf"^{name} is {shown}; expected .*0 <= {name} < 2")
                for name, call in calls
            ])  # fmt: skip
        big = np.zeros(16)
        overlap = "^send and recv overlap; expected "
        refused(comm, [
            (lambda: comm.all_reduce(big[:8], big[4:12]), ValueError, overlap),
            (lambda: comm.reduce(big[:8], big[1:9], root=me), ValueError, overlap),
            (lambda: comm.broadcast(big[:8], big[1:9], root=me), ValueError, overlap),
            (lambda: comm.all_gather(big[4 * (1 - me) : 4 * (1 - me) + 4], big[:8]), ValueError, overlap),
            (lambda: comm.all_gather(big[1:5], big[:8]), ValueError, overlap + "send to be this rank"),
            (lambda: comm.reduce_scatter(big[:8], big[4 * (1 - me) : 4 * (1 - me) + 4]), ValueError, overlap),
            (lambda: comm.reduce_scatter(big[:8], big[1:5]), ValueError, overlap + "recv to be this rank"),
            (lambda: comm.all_to_all(big[:8], big[:8]), ValueError, overlap + ".* never in place"),
            (lambda: comm.all_to_all(big[:8], big[4:12]), ValueError, overlap),
            (lambda: comm.gather(big[1:5], big[:8], root=me), ValueError, overlap),
            (lambda: comm.scatter(big[:8], big[1:5], root=me), ValueError, overlap),
            (lambda: comm.send_recv(big[:8], me, big[7:12], me), ValueError, overlap),
            (lambda: comm.all_to_all_v(big[:8], [4, 4], big[7:15], [4, 4]), ValueError, overlap),
            (lambda: comm.all_gather_v(big[1:5], big[:8], [4, 4]), ValueError, overlap),
            (lambda: comm.reduce_scatter_v(big[:8], big[1:5], [4, 4]), ValueError, overlap),
        ])  # fmt: skip
        # Side by side is no overlap, and what lies elsewhere is not looked at.
        comm.all_reduce(big[:8], big[8:])
        comm.reduce(big[:8], big[4:12], root=0) if rank else comm.reduce(big[:8], big[8:], root=0)


@on_ranks(N)
def test_other_arguments(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        me, x = rank, np.zeros(4)
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        refusals: list[Refusal] = [
            (lambda: comm.broadcast(None, root=me), TypeError,
             "^send is None; expected an array: this rank is the root"),
            (lambda: comm.broadcast(None, x, root=me), TypeError, "^send is None; expected an array: this"),
            (lambda: comm.broadcast(None, root=1 - me), TypeError, "^send is None; .* for send or recv"),
            (lambda: comm.scatter(None, x, root=me), TypeError,
             "^send is None; expected an array: this rank is the root"),
            (lambda: comm.scatter(None, root=1 - me), TypeError,
             "^send and recv are None; expected recv=, an array for the part of this rank"),
            (lambda: comm.all_reduce(None), TypeError, "^send is of type NoneType"),
            (lambda: comm.broadcast({}), TypeError, r"^send is of type dict; .* bytearray.pickle.dumps"),
            (lambda: comm.all_reduce(frozen), ValueError,
             r"^send \(in place\) is read-only; expected a writable array, or recv=, one for the result"),
            (lambda: comm.reduce(frozen, root=me), ValueError, r"^send \(in place\) is read-only"),
            (lambda: comm.broadcast(frozen, root=1 - me), ValueError, r"^send \(in place\) is read-only"),
            (lambda: comm.all_reduce(b"1234"), ValueError, r"^send \(in place\) is read-only"),
        ]  # fmt: skip
        for op, hint in (("median", ""), ("SUM", "pynccl's name is 'sum'; "), ("", "")):
            refusals += [
                (lambda op=op: comm.all_reduce(x, op=op), ValueError,
                 f"^op is '{op}'; {hint}expected one of sum, prod, max, min, avg, a RedOp or a PreMulSum"),
                (lambda op=op: comm.reduce(x, op=op), ValueError, f"^op is '{op}'"),
                (lambda op=op: comm.reduce_scatter(x, op=op), ValueError, f"^op is '{op}'"),
                (lambda op=op: comm.reduce_scatter_v(x, np.zeros(2), [2, 2], op), ValueError, "^op is '"),
            ]  # fmt: skip
        wrong: Any
        for wrong in (None, True, 1.5, [0]):
            refusals.append(
                (
                    lambda op=wrong: comm.all_reduce(x, op=op),
                    TypeError,
                    "^op is .*; expected one of sum, prod",
                )
            )
        for dtype in ("complex64", "complex128"):
            for op in ("prod", "max", "min", pynccl.RedOp.MAX):
                refusals.append(
                    (lambda d=dtype, op=op: comm.all_reduce(np.zeros(4, d), op=op), TypeError,
                     f"^op is .* and the arrays have dtype {dtype}; NCCL reduces it by sum and avg only")
                )  # fmt: skip
        for dtype, wider in (("bool", "int32"), ("int16", "int32"), ("uint16", "uint32")):
            for op in ("sum", "avg", "max", "prod"):
                refusals += [
                    (lambda d=dtype, op=op: comm.all_reduce(np.zeros(4, d), op=op), TypeError,
                     f"dtype {dtype}; NCCL cannot reduce it, only move it: convert it to {wider} "),
                    (lambda d=dtype, op=op: comm.reduce_scatter(np.zeros(4, d), op=op), TypeError, dtype),
                ]  # fmt: skip
        stream: Any
        for stream in ("s", -1, True, 1.5, 1 << 64, object(), pynccl.Stream):
            refusals += [
                (lambda s=stream: comm.all_reduce(x, stream=s), TypeError,
                 "^stream is .*; expected None, a stream handle as an int, 0 or more, or an object with"),
                (lambda s=stream: comm.all_to_all_v(x, [2, 2], np.zeros(4), [2, 2], s), TypeError, "^stre"),
            ]  # fmt: skip
        # What cannot make a result of its own kind says so.
        for kind in KINDS:
            if kind.creates:
                continue
            made = "a new (Buffer|Device|Exporter); expected an array of shape"
            refusals += [
                (lambda k=kind: comm.all_gather(k.wrap(x)), TypeError,
                 rf"^recv is None, and pynccl cannot make {made} \(2, 4\) for the result"),
                (lambda k=kind: comm.reduce_scatter(k.wrap(x)), TypeError, rf"^recv.*{made} \(2,\)"),
                (lambda k=kind: comm.all_to_all(k.wrap(x)), TypeError, rf"^recv is None.*{made} \(4,\)"),
                (lambda k=kind: comm.gather(k.wrap(x), root=me), TypeError, rf"^recv.*{made} \(2, 4\)"),
                (lambda k=kind: comm.scatter(k.wrap(x), root=me), TypeError, rf"^recv.*{made} \(2,\)"),
            ]  # fmt: skip
        refused(comm, refusals)
        # Only what a rank uses is looked at: here the other rank is the root.
        source = np.arange(4)
        source.flags.writeable = rank != 0
        assert (comm.broadcast(source, root=0) == np.arange(4)).all()
        assert comm.reduce(x, None, root=0) is (x if rank == 0 else None)
        with pytest.raises(TypeError, match="ncclCollConfig_t has no field minCTA"):
            comm.all_reduce(x, config={"minCTA": 1})
        config: Any = 3
        with pytest.raises(
            TypeError, match="config is of type int; expected a CollConfig or a dict of its fields"
        ):
            comm.all_reduce(x, config=config)
        assert (comm.all_reduce(np.ones(2), config={"minCTAs": 1}) == 2).all()


# --- particular kinds ---


@pytest.mark.torch
@on_ranks(N)
def test_torch(rank: int, nranks: int) -> None:
    import torch

    with pynccl.init(timeout=30) as comm:
        refused(comm, [
            (lambda: comm.all_reduce(torch.zeros(4).to_sparse()), TypeError,
             r"^send is a tensor with layout torch.sparse_coo; expected a strided one: \.to_dense"),
            (lambda: comm.all_reduce(torch.zeros(4, dtype=torch.complex64).conj()), TypeError,
             r"^send is a tensor with a pending conjugation; expected one without: \.resolve_conj"),
            (lambda: comm.all_reduce(torch.zeros(4, dtype=torch.complex64).conj().imag), TypeError,
             r"^send is a tensor with a pending negation; expected one without: \.resolve_neg"),
            (lambda: comm.all_reduce(torch.nested.nested_tensor([torch.ones(2)])), TypeError,
             r"^send is a nested tensor; expected a plain one, such as its \.values\(\)"),
            (lambda: comm.all_reduce(torch.zeros(4, device="meta")), TypeError,
             "^send is a tensor on meta; expected a tensor on the CPU or on a CUDA device"),
            (lambda: comm.all_reduce(torch.zeros(3, 4).t()), ValueError, "^send is not contiguous"),
            (lambda: comm.all_reduce(torch.zeros(4, dtype=torch.float8_e4m3fnuz)), TypeError,
             "^send has dtype float8_e4m3fnuz; expected one of"),
        ])  # fmt: skip
        parameter = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            assert comm.all_reduce(parameter) is parameter
        assert parameter.tolist() == [2, 2, 2]
        gathered = comm.all_gather(torch.full((2, 3), float(rank), dtype=torch.bfloat16))
        assert type(gathered) is torch.Tensor
        assert gathered.dtype == torch.bfloat16
        assert gathered.shape == (2, 2, 3)
        assert gathered[1].float().tolist() == [[1] * 3] * 2


class JaxLike:
    """An immutable array of jaxlib's, as far as can be seen from outside."""

    __module__ = "jaxlib._jax"

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@on_ranks(N)
def test_jax_arrays_can_be_sent_only(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        x = np.full(4, rank + 1.0)
        array, recv = JaxLike(x), np.zeros(4)
        comm.all_reduce(array, recv)
        assert (recv == 3).all()
        comm.send_recv(array, 1 - rank, recv, 1 - rank)
        assert (recv == 2 - rank).all()
        comm.all_gather(array, np.zeros(8))
        assert (x == rank + 1).all()
        read_only = "is read-only; expected a writable array"
        refused(comm, [
            (lambda: comm.all_reduce(array), ValueError, rf"^send \(in place\) {read_only}"),
            (lambda: comm.all_reduce(recv, array), ValueError, f"^recv {read_only}"),
            (lambda: comm.recv(array, 1 - rank), ValueError, f"^buf {read_only}"),
            (lambda: comm.all_gather(array), TypeError, "^recv is None, .* cannot make a new JaxLike"),
        ])  # fmt: skip


@on_ranks(N)
def test_cupy_over_host_memory(rank: int, nranks: int) -> None:
    import cupy

    with pynccl.init(timeout=30) as comm:
        # Results are over host memory, which they keep alive.
        gathered = comm.all_gather(cupy_over(np.full((2, 2), float(rank))))
        assert type(gathered) is cupy.ndarray
        assert (gathered.shape, gathered.dtype) == ((2, 2, 2), np.float64)
        pointer = gathered.data.ptr
        assert np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 8).from_address(pointer)).tolist() == [
            *[0.0] * 4,
            *[1.0] * 4,
        ]
        x, short = cupy_over(np.zeros((4, 4))), cupy_over(np.zeros(4, np.float32))
        strided = cupy.ndarray((4,), np.float64, memptr=x.data, strides=(32,))
        refused(comm, [
            (lambda: comm.all_reduce(strided), ValueError, "^send is not contiguous"),
            (lambda: comm.all_reduce(x, strided), ValueError, "^recv is not contiguous"),
            (lambda: comm.all_reduce(x, short), TypeError, "^recv has dtype float32; expected the dtype of"),
            (lambda: comm.all_reduce(x, cupy_over(np.zeros(15))), ValueError, "^recv has 15 elements"),
            (lambda: comm.all_reduce(x, op="median"), ValueError, "^op is 'median'"),
            (lambda: comm.all_reduce(cupy_over(np.zeros(4, bool))), TypeError, "dtype bool; NCCL cannot"),
            (lambda: comm.all_reduce(x, cupy.ndarray((4, 4), np.float64, memptr=x.data + 8)), ValueError,
             "^send and recv overlap"),
        ])  # fmt: skip


@pytest.mark.parametrize("name", ["bool", "int16", "uint16", "complex64", "complex128", "float16"])
def test_dlpack_of_every_dtype(name: str) -> None:
    """DLPack's names for what NCCL carries only as another type."""
    from pynccl._arrays.buffers import spans

    data = np.zeros(3, name)
    assert spans[Exporter](Exporter(data), "send") == spans[np.ndarray](data, "send")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float32"),
        (np.float32, "float32"),
        (np.dtype("int64"), "int64"),
        (DataType.BFLOAT16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        (dtype_of("float8_e5m2"), "float8_e5m2"),
        ("complex64", "complex64"),
        (bool, "bool"),
    ],
)
def test_buffer(dtype: Any, name: str) -> None:
    buffer = Buffer(0x1000, 3, dtype)
    assert (buffer.ptr, buffer.count, buffer.dtype) == (0x1000, 3, dtype)
    assert repr(buffer) == f"<pynccl.Buffer 0x1000, 3 of {name}>"


def test_buffer_of_a_torch_dtype() -> None:
    import torch

    assert repr(Buffer(0x1000, 3, torch.bfloat16)) == "<pynccl.Buffer 0x1000, 3 of bfloat16>"


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((-1, 3, "int8"), ValueError, r"ptr is -1; expected 0 <= ptr < 2\*\*63"),
        ((1 << 63, 3, "int8"), ValueError, r"expected 0 <= ptr < 2\*\*63"),
        ((1, -3, "int8"), ValueError, "count is -3; expected 0 <= count"),
        ((1, 1 << 60, "float64"), ValueError, r"expected fewer than 2\*\*63 bytes"),
        ((0, 3, "int8"), ValueError, "ptr is 0; expected the address of 3 elements"),
        ((1.5, 3, "int8"), TypeError, "ptr is 1.5; expected an int"),
        ((1, None, "int8"), TypeError, "count is None; expected an int"),
        ((1, True, "int8"), TypeError, "count is True; expected an int"),
        ((1, 3, "float7"), TypeError, "dtype is 'float7'; expected a dtype that NCCL can carry"),
        ((1, 3, "U4"), TypeError, "dtype is 'U4'; expected a dtype that NCCL can carry"),
        ((1, 3, None), TypeError, "dtype is None; expected a dtype"),
    ],
)
def test_wrong_buffers(args: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Buffer(*args)


@on_ranks(N)
def test_buffers_in_calls(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        data = np.full(4, rank + 1.0, np.float32)
        frozen = Buffer(data.ctypes.data, 4, "float32", owner=data, readonly=True)
        recv = np.zeros(4, np.float32)
        comm.all_reduce(frozen, Buffer(recv.ctypes.data, 4, DataType.FLOAT32))
        assert (recv == 3).all()
        refused(comm, [(lambda: comm.all_reduce(frozen), ValueError, r"^send \(in place\) is read-only")])
        assert comm.all_reduce(Buffer(0, 0, "float32")).count == 0
        number = bytearray([rank])
        comm.all_reduce(np.frombuffer(bytes([rank + 1]), np.uint8), number)
        assert number == bytearray([3])


def test_importing_imports_no_array_library(run_python: Any) -> None:
    run_python(
        "import sys, pynccl\nassert not {'cupy', 'torch', 'ml_dtypes', 'jax', 'numba'} & set(sys.modules)\n"
        "comm = pynccl.Communicator(1, pynccl.get_unique_id(), 0)\nimport numpy as np\n"
        "comm.all_reduce(np.ones(3, 'c8')); comm.abort()\n"
        "assert not {'cupy', 'torch', 'ml_dtypes', 'jax', 'numba'} & set(sys.modules)",
        PYNCCL_LIBRARY="cpu",
        PYTHONPATH=str(__import__("pathlib").Path(pynccl.__file__).parents[1]),
    )


@on_ranks(2)
def test_codes_are_no_numbers(rank: int, nranks: int) -> None:
    """A DataType is no operation, no rank and no count; a RedOp is no dtype."""
    code: Any = DataType.INT8
    other: Any = RedOp.PROD
    x = np.ones(2, np.int32)
    with pynccl.init(timeout=20) as comm:
        for call, name in (
            (lambda: comm.all_reduce(x, op=code), "op"),
            (lambda: comm.prepare.all_reduce(x, op=code), "op"),
            (lambda: comm.broadcast(x, root=code), "root"),
            (lambda: comm.send(x, code), "peer"),
            (lambda: comm.all_reduce(x, stream=code), "stream"),
            (lambda: comm.split(code), "color"),
            (lambda: comm.split(0, code), "key"),
            (lambda: comm.wait_signal(code), "peer"),
            (lambda: comm.signal(1 - rank, signal=code), "signal"),
            (lambda: comm.all_gather_v(x, np.ones(2, np.int32), [code, 1]), "counts"),
            (lambda: comm.grow(code), "nranks"),
            (lambda: Buffer(code, 0, "int8"), "ptr"),
            (lambda: pynccl.empty(1, other), "dtype"),
            (lambda: pynccl.set_device(other), "device"),
        ):
            with pytest.raises(TypeError, match=f"{name} is .*; expected"):
                call()
        comm.all_reduce(x, op=RedOp.MAX)
        comm.all_reduce(x, op=2)
    assert (x == 1).all()


@on_ranks(1)
def test_wrong_arguments(rank: int, nranks: int) -> None:
    """What is not of the expected type is named."""
    x, several, no = np.ones(4, np.int32), np.zeros(3), "no"
    wrong: Any = several
    with pynccl.init() as comm:
        for call, words in (
            (lambda: comm.gather_v(x, x, [4], root=wrong), "root is array"),
            (lambda: comm.scatter_v(x, x, [4], root=wrong), "root is array"),
            (lambda: pynccl.init_all(1, timeout="x"), "timeout is 'x'"),  # type: ignore[arg-type]
            (lambda: pynccl.init_all(np.array(0)), r"devices is array\(0\)"),  # type: ignore[arg-type]
            (lambda: pynccl.init(wrong), "method is array"),
            (lambda: pynccl.Stream().wait_event(None), "event is None"),  # type: ignore[arg-type]
            (lambda: pynccl.Event().record(None), "stream is None"),
            (lambda: pynccl.dump_trace(None), "path is None"),  # type: ignore[arg-type]
            (lambda: pynccl.dump_trace(b""), "path is b''"),  # type: ignore[arg-type]
            (lambda: Buffer(x.ctypes.data, 4, "i4", readonly=wrong), "readonly is array"),
            (lambda: Buffer(x.ctypes.data, 4, "i4", readonly=no), "readonly is 'no'"),  # type: ignore[arg-type]
            (lambda: pynccl.group(simulate=wrong), "simulate is array"),
            (lambda: pynccl.group(simulate=no), "simulate is 'no'"),  # type: ignore[arg-type]
            (lambda: pynccl.capi.ncclCommInitAll(2147483647), "ndev is 2147483647"),
            (lambda: pynccl.capi.ncclParamGetParameter(5), "key is 5"),  # type: ignore[arg-type]
            (lambda: pynccl.capi.ncclParamBind(5), "key is 5"),  # type: ignore[arg-type]
        ):
            with pytest.raises((TypeError, ValueError), match=f"{words}.*; expected"):
                call()
