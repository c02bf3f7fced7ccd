"""The operations of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from pynccl._arrays.buffers import Array
from pynccl._comm.arguments import apart, require_count
from pynccl._comm.calls import Calls, PerCall, Piece
from pynccl._comm.core import Core
from pynccl._comm.kinds import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)
from pynccl._comm.reductions import Op, PreMulSum
from pynccl._trace.recorder import with_callers

if TYPE_CHECKING:
    from numpy.typing import NDArray

A = TypeVar("A", bound=Array)
R = TypeVar("R", bound=Array)
S = TypeVar("S", bound=np.generic)


@with_callers(
    attrgetter("_core.c"),
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    *("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v", "all_to_all_v"),
    *("send", "recv", "send_recv", "barrier"),
)
class Operations:
    """The operations of a communicator: each resolves its arrays, makes one call, and returns.

    `stream=None` is the current stream of the array's own library; for host arrays, which have none, the call
    returns when the result is there. Otherwise a stream handle as an int, or an object with
    `__cuda_stream__`, `.ptr` or `.cuda_stream`: then the call returns at once, and whoever reads the result
    waits for that stream. `recv=None` means in place for all_reduce, reduce and broadcast, and elsewhere a
    new array of the sender's kind. Every call returns the array with the result, None where there is none.

    Arrays are contiguous: in C order, or for what works element by element in Fortran order on all ranks.
    Where both have a shape, that of the result follows from the input's (docs/communicator.md, Arrays).
    Wrong arguments raise TypeError or ValueError before anything is called; `config` needs NCCL >= 2.31.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._calls = calls = Calls(core)
        self._arguments = calls.arguments
        self._run, self._run_in_pieces = calls.run, calls.run_in_pieces
        self._all_reduce = calls.usual_all_reduce()

    # --- the collectives ---

    @overload
    def all_reduce(
        self, send: A, recv: None = None, op: Op = "sum", stream: Any = None, *, config: PerCall = None
    ) -> A: ...
    @overload
    def all_reduce(
        self, send: Array, recv: R, op: Op = "sum", stream: Any = None, *, config: PerCall = None
    ) -> R: ...
    def all_reduce(
        self, send: Any, recv: Any = None, op: Op = "sum", stream: Any = None, *, config: PerCall = None
    ) -> Any:
        """Reduce the arrays of all ranks, element by element; every rank gets the result (ncclAllReduce).

        In place without `recv`: `send` is written to. Else `recv` is, an array of send's dtype and shape.
        Returns the array that was written to. `op` is "sum", "prod", "max", "min" or "avg", a RedOp, or what
        `pre_mul_sum` returned.

        `stream=None` is the current stream of the array's own library; host arrays have none, and the call
        returns when the result is there. With a stream it returns at once, and whoever reads the result waits
        for that stream, as `synchronize` does.

        TypeError and ValueError, before anything is called, name the argument that is wrong. NcclError says
        what came of the call: CollectiveMismatchError where ranks called different things, with a time-out
        RankFailedError or NcclTimeoutError, which name the ranks that failed or did not come.
        """
        return self._all_reduce(send, recv, op, stream, config)

    def reduce(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
    ) -> A | None:
        """Reduce the arrays of all ranks to the root's `recv`, or in place; None elsewhere (ncclReduce)."""
        return self._run(REDUCE, send, recv, op, root, stream, config)

    def broadcast(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
    ) -> A:
        """Copy the root's `send` to every rank's `recv`, or in place (ncclBroadcast).

        Off the root `send` may be None when `recv` is given.
        """
        return self._run(BROADCAST, send, recv, 0, root, stream, config)

    @overload
    def all_gather(
        self, send: NDArray[S], recv: None = None, stream: Any = None, *, config: PerCall = None
    ) -> NDArray[S]: ...
    @overload
    def all_gather(self, send: A, recv: None = None, stream: Any = None, *, config: PerCall = None) -> A: ...
    @overload
    def all_gather(self, send: Array, recv: R, stream: Any = None, *, config: PerCall = None) -> R: ...
    def all_gather(self, send: Any, recv: Any = None, stream: Any = None, *, config: PerCall = None) -> Any:
        """Collect every rank's array on every rank, in rank order: `(size, *shape)` (ncclAllGather).

        In place when `send` is this rank's part of `recv`.
        """
        return self._run(ALL_GATHER, send, recv, 0, 0, stream, config)

    def reduce_scatter(
        self, send: A, recv: A | None = None, op: Op = "sum", stream: Any = None, *, config: PerCall = None
    ) -> A:
        """Reduce the arrays of all ranks; rank i gets the i-th part of the result (ncclReduceScatter).

        A new `recv` has the first axis divided by the number of ranks. In place when `recv` is this rank's
        part of `send`.
        """
        return self._run(REDUCE_SCATTER, send, recv, op, 0, stream, config)

    def all_to_all(self, send: A, recv: A | None = None, stream: Any = None, *, config: PerCall = None) -> A:
        """Send the i-th part of the array to rank i, for every i; parts arrive in rank order (ncclAlltoAll).

        Never in place. Before NCCL 2.28 as grouped sends and receives.
        """
        return self._run(ALL_TO_ALL, send, recv, 0, 0, stream, config)

    @overload
    def gather(
        self,
        send: NDArray[S],
        recv: None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
    ) -> NDArray[S] | None: ...
    @overload
    def gather(
        self, send: A, recv: None = None, root: int = 0, stream: Any = None, *, config: PerCall = None
    ) -> A | None: ...
    @overload
    def gather(
        self, send: Array, recv: R, root: int = 0, stream: Any = None, *, config: PerCall = None
    ) -> R | None: ...
    def gather(
        self, send: Any, recv: Any = None, root: int = 0, stream: Any = None, *, config: PerCall = None
    ) -> Any:
        """Collect every rank's array on the root, in rank order (ncclGather).

        The root gets `(size, *shape)`, the others None. Before NCCL 2.28 as grouped sends and receives.
        """
        return self._run(GATHER, send, recv, 0, root, stream, config)

    def scatter(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
    ) -> A:
        """Send the i-th part of the root's array to rank i (ncclScatter).

        Off the root `send` may be None when `recv` is given. A new `recv` has the first axis divided by the
        number of ranks. Before NCCL 2.28 as grouped sends and receives.
        """
        return self._run(SCATTER, send, recv, 0, root, stream, config)

    # --- point to point ---

    def send(self, buf: Array, peer: int, stream: Any = None) -> None:
        """Send an array to a rank, which has to call recv with as many elements (ncclSend)."""
        self._run(SEND, buf, None, 0, peer, stream, None)

    def recv(self, buf: A, peer: int, stream: Any = None) -> A:
        """Receive an array from a rank, which has to call send with as many elements (ncclRecv)."""
        return self._run(RECV, None, buf, 0, peer, stream, None)

    def send_recv(self, send: Array, dest: int, recv: A, source: int, stream: Any = None) -> A:
        """Send to one rank while receiving from another, or the same; the two arrays must not overlap."""

        def pieces() -> list[Piece]:
            check = self._arguments
            check.rank_in(dest, "dest")
            check.rank_in(source, "source")
            out, into = check.span(send, "send"), check.output(recv, "recv")
            if not apart(out, into):
                raise ValueError("send and recv overlap; expected separate memory")
            return [
                Piece(SEND, out[2], out[0], 0, out[1], dest),
                Piece(RECV, into[2], 0, into[0], into[1], source),
            ]

        return self._run_in_pieces(pieces, 0, stream, send, recv)

    # --- with counts, in elements, of every rank's own ---

    def all_gather_v(self, send: Array, recv: R, counts: Sequence[int], stream: Any = None) -> R:
        """Collect `counts[i]` elements of each rank i on every rank, in rank order.

        As grouped broadcasts. In place when `send` is this rank's part of `recv`.
        """

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            require_count(source, "send", each[self._core.rank], f"counts[{self._core.rank}]")
            parts = check.parts(source, target, "recv", each, "the sum of counts")
            return [
                Piece(BROADCAST, code, source[0] if root == self._core.rank else part, part, count, root)
                for root, (code, part, count) in enumerate(parts)
            ]

        return self._run_in_pieces(pieces, 0, stream, send, recv)

    def reduce_scatter_v(
        self, send: Array, recv: R, counts: Sequence[int], op: Op = "sum", stream: Any = None
    ) -> R:
        """Reduce the arrays of all ranks; rank i gets the next `counts[i]` elements of the result.

        As grouped reductions.
        """

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            require_count(target, "recv", each[self._core.rank], f"counts[{self._core.rank}]")
            parts = check.parts(target, source, "send", each, "the sum of counts")
            return [
                Piece(REDUCE, code, part, target[0] if root == self._core.rank else 0, count, root)
                for root, (code, part, count) in enumerate(parts)
            ]

        return self._run_in_pieces(pieces, op, stream, send, recv)

    def gather_v(
        self, send: Array, recv: R | None, counts: Sequence[int], root: int = 0, stream: Any = None
    ) -> R | None:
        """Collect `counts[i]` elements of each rank i on the root, in rank order; None elsewhere."""
        here = root == self._core.rank

        def pieces() -> list[Piece]:
            check = self._arguments
            check.rank_in(root, "root")
            each = check.counts(counts, "counts")
            source = check.span(send, "send", split=True)
            require_count(source, "send", each[self._core.rank], f"counts[{self._core.rank}]")
            pieces = [Piece(SEND, source[2], source[0], 0, source[1], root)]
            if here:
                target = check.output(recv, "recv", split=True)
                parts = check.parts(source, target, "recv", each, "the sum of counts")
                pieces += [Piece(RECV, code, 0, part, n, peer) for peer, (code, part, n) in enumerate(parts)]
            return pieces

        return self._run_in_pieces(pieces, 0, stream, send, recv if here else None)

    def scatter_v(
        self, send: Array | None, recv: R, counts: Sequence[int], root: int = 0, stream: Any = None
    ) -> R:
        """Send `counts[i]` elements of the root's array to each rank i; off the root `send` may be None."""
        here = root == self._core.rank

        def pieces() -> list[Piece]:
            check = self._arguments
            check.rank_in(root, "root")
            each = check.counts(counts, "counts")
            target = check.output(recv, "recv", split=True)
            require_count(target, "recv", each[self._core.rank], f"counts[{self._core.rank}]")
            pieces = [Piece(RECV, target[2], 0, target[0], target[1], root)]
            if here:
                source = check.span(send, "send", split=True)
                parts = check.parts(target, source, "send", each, "the sum of counts")
                pieces += [Piece(SEND, code, part, 0, n, peer) for peer, (code, part, n) in enumerate(parts)]
            return pieces

        return self._run_in_pieces(pieces, 0, stream, send if here else None, recv)

    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: R,
        recv_counts: Sequence[int],
        stream: Any = None,
    ) -> R:
        """Send `send_counts[i]` elements to each rank i and receive `recv_counts[i]` from it, in rank order.

        The two arrays must not overlap.
        """

        def pieces() -> list[Piece]:
            check = self._arguments
            out, into = check.counts(send_counts, "send_counts"), check.counts(recv_counts, "recv_counts")
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            sends = check.parts(target, source, "send", out, "the sum of send_counts")
            recvs = check.parts(source, target, "recv", into, "the sum of recv_counts")
            if not apart(source, target):
                raise ValueError("send and recv overlap; expected separate memory")
            return [Piece(SEND, code, part, 0, n, peer) for peer, (code, part, n) in enumerate(sends)] + [
                Piece(RECV, code, 0, part, n, peer) for peer, (code, part, n) in enumerate(recvs)
            ]

        return self._run_in_pieces(pieces, 0, stream, send, recv)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has reached this.

        After `timeout` seconds NcclTimeoutError; the barrier stays outstanding, and the communicator usable.
        """
        self._calls.barrier(timeout)

    # --- reductions ---

    def pre_mul_sum(self, factor: Any) -> PreMulSum:
        """Return an operation that multiplies this rank's elements by a factor, then sums.

        A Python or NumPy number is converted to the dtype of the arrays it is used with; an array of one
        element on the device is read there when the reduction runs, and has to have their dtype. As
        ncclRedOpCreatePreMulSum (NCCL >= 2.11).
        """
        return PreMulSum(self._core, self._arguments.span, factor)
