"""The operations of a communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from pynccl._arrays.buffers import Array
from pynccl._comm.arguments import apart, require_array_or_none
from pynccl._comm.calls import Calls, PerCall, Piece
from pynccl._comm.one_sided import OneSided
from pynccl._comm.reductions import Op, PreMulSum
from pynccl._comm.work import Work
from pynccl._library.binding import fastcall
from pynccl._library.generated.kinds import (
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
from pynccl._memory.window import Window
from pynccl._trace.ranges import with_ranges
from pynccl._trace.recorder import with_callers

if TYPE_CHECKING:
    from numpy.typing import NDArray

A = TypeVar("A", bound=Array)
R = TypeVar("R", bound=Array)
S = TypeVar("S", bound=np.generic)


_NAMES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    *("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v", "all_to_all_v"),
    *("send", "recv", "send_recv", "barrier", "put_signal", "signal", "wait_signal"),
)


# The caller is the frame above the outermost of the two.
@with_callers(attrgetter("_calls.core.c"), *_NAMES)
@with_ranges(*_NAMES)
class Operations:
    """The operations of a communicator: each resolves its arrays, makes one call, and returns.

    `stream` is a stream handle as an int, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`. With
    a stream the call returns immediately; synchronize the stream before you read the result. `stream=None`
    is the current stream of the array's own library. Host arrays have no current stream: the call then
    returns when the result is complete. `recv=None` means in place for all_reduce, reduce and broadcast, and
    elsewhere a new array of the same kind as `send`. Every call returns the array with the result, or None.

    Arrays must be contiguous: in C order, or for elementwise operations in Fortran order on all ranks. If
    both arrays have a shape, the shape of `send` determines that of `recv` (docs/communicator.md, Arrays).
    `config` needs NCCL >= 2.31.

    `wait=False` returns a Work immediately: wait for it, or await it, and it returns what the operation would
    have returned.

    Wrong arguments raise TypeError or ValueError before anything is called; a failed call raises NcclError.
    """

    __slots__ = (
        "__weakref__",
        "_all_reduce",
        "_arguments",
        "_calls",
        "_one_sided",
        "_run",
        "_run_in_pieces",
    )

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._arguments = calls.arguments
        self._run, self._run_in_pieces = calls.run, calls.run_in_pieces
        self._all_reduce = calls.usual_all_reduce()
        self._one_sided = OneSided(calls)

    # --- the collectives ---

    @overload
    def all_reduce(
        self,
        send: A,
        recv: None = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def all_reduce(
        self,
        send: Array,
        recv: R,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> R: ...
    @overload
    def all_reduce(
        self,
        send: A,
        recv: None = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A]: ...
    @overload
    def all_reduce(
        self,
        send: Array,
        recv: R,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[R]: ...
    @fastcall.Method
    def all_reduce(
        self,
        send: Any,
        recv: Any = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Reduce the arrays of all ranks, element by element; every rank gets the result (ncclAllReduce).

        In place without `recv`: the result replaces the content of `send`. Otherwise the result goes to
        `recv`, an array with the dtype and shape of `send`. Returns the array with the result. `op` is "sum",
        "prod", "max", "min" or "avg", a RedOp, or the result of `pre_mul_sum`.

        `stream=None` is the current stream of the array's own library. Host arrays have no current stream:
        the call then returns when the result is complete. With a stream the call returns immediately; call
        `synchronize` before you read the result. `wait=False` returns a `Work` in every case. `config` has
        the options of this call (ncclAllReduceConfig).

        Raises TypeError or ValueError, before anything is called, if an argument is wrong; NcclInvalidUsage
        if the communicator is closed or in use by another thread; CollectiveMismatchError if the ranks made
        different calls; with a time-out RankFailedError or NcclTimeoutError, which name the ranks that died
        or are missing; and NcclError of another class if the library reports another error.
        """
        return self._all_reduce(send, recv, op, stream, config, wait)

    @overload
    def reduce(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A | None: ...
    @overload
    def reduce(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A | None]: ...
    def reduce(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Reduce the arrays of all ranks to the root's `recv`, or in place (ncclReduce).

        Returns None on the other ranks.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(REDUCE, send, recv, op, root, stream, config, wait)

    @overload
    def broadcast(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def broadcast(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A]: ...
    def broadcast(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Copy the root's `send` to every rank's `recv`, or in place (ncclBroadcast).

        On other ranks than the root, `send` may be None if `recv` is given.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(BROADCAST, send, recv, 0, root, stream, config, wait)

    @overload
    def all_gather(
        self,
        send: NDArray[S],
        recv: None = None,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> NDArray[S]: ...
    @overload
    def all_gather(
        self,
        send: A,
        recv: None = None,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def all_gather(
        self, send: Array, recv: R, stream: Any = None, *, config: PerCall = None, wait: Literal[True] = True
    ) -> R: ...
    @overload
    def all_gather(
        self,
        send: NDArray[S],
        recv: None = None,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[NDArray[S]]: ...
    @overload
    def all_gather(
        self, send: A, recv: None = None, stream: Any = None, *, config: PerCall = None, wait: Literal[False]
    ) -> Work[A]: ...
    @overload
    def all_gather(
        self, send: Array, recv: R, stream: Any = None, *, config: PerCall = None, wait: Literal[False]
    ) -> Work[R]: ...
    def all_gather(
        self, send: Any, recv: Any = None, stream: Any = None, *, config: PerCall = None, wait: bool = True
    ) -> Any:
        """Collect every rank's array on every rank, in rank order: `(size, *shape)` (ncclAllGather).

        In place if `send` is this rank's part of `recv`.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(ALL_GATHER, send, recv, 0, 0, stream, config, wait)

    @overload
    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A]: ...
    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        op: Op = "sum",
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Reduce the arrays of all ranks; rank i gets the i-th part of the result (ncclReduceScatter).

        A new `recv` has the first axis of `send` divided by the number of ranks. In place if `recv` is this
        rank's part of `send`.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(REDUCE_SCATTER, send, recv, op, 0, stream, config, wait)

    @overload
    def all_to_all(
        self,
        send: A,
        recv: A | None = None,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        send: A,
        recv: A | None = None,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A]: ...
    def all_to_all(
        self, send: A, recv: A | None = None, stream: Any = None, *, config: PerCall = None, wait: bool = True
    ) -> Any:
        """Send the i-th part of the array to rank i, for every i; parts arrive in rank order (ncclAlltoAll).

        Never in place. Before NCCL 2.28 it makes grouped sends and receives.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(ALL_TO_ALL, send, recv, 0, 0, stream, config, wait)

    @overload
    def gather(
        self,
        send: NDArray[S],
        recv: None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> NDArray[S] | None: ...
    @overload
    def gather(
        self,
        send: A,
        recv: None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A | None: ...
    @overload
    def gather(
        self,
        send: Array,
        recv: R,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> R | None: ...
    @overload
    def gather(
        self,
        send: NDArray[S],
        recv: None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[NDArray[S] | None]: ...
    @overload
    def gather(
        self,
        send: A,
        recv: None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A | None]: ...
    @overload
    def gather(
        self,
        send: Array,
        recv: R,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[R | None]: ...
    def gather(
        self,
        send: Any,
        recv: Any = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Collect every rank's array on the root, in rank order (ncclGather).

        The root gets `(size, *shape)`, the other ranks get None. Before NCCL 2.28 it makes grouped sends and
        receives.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(GATHER, send, recv, 0, root, stream, config, wait)

    @overload
    def scatter(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def scatter(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: Literal[False],
    ) -> Work[A]: ...
    def scatter(
        self,
        send: A | None,
        recv: A | None = None,
        root: int = 0,
        stream: Any = None,
        *,
        config: PerCall = None,
        wait: bool = True,
    ) -> Any:
        """Send the i-th part of the root's array to rank i (ncclScatter).

        On other ranks than the root, `send` may be None if `recv` is given. A new `recv` has the first axis
        of `send` divided by the number of ranks. Before NCCL 2.28 it makes grouped sends and receives.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(SCATTER, send, recv, 0, root, stream, config, wait)

    # --- point to point ---

    @overload
    def send(self, buf: Array, peer: int, stream: Any = None, *, wait: Literal[True] = True) -> None: ...
    @overload
    def send(self, buf: Array, peer: int, stream: Any = None, *, wait: Literal[False]) -> Work[None]: ...
    def send(self, buf: Array, peer: int, stream: Any = None, *, wait: bool = True) -> Any:
        """Send an array to a rank, which must call recv with the same number of elements (ncclSend).

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(SEND, buf, None, 0, peer, stream, None, wait)

    @overload
    def recv(self, buf: A, peer: int, stream: Any = None, *, wait: Literal[True] = True) -> A: ...
    @overload
    def recv(self, buf: A, peer: int, stream: Any = None, *, wait: Literal[False]) -> Work[A]: ...
    def recv(self, buf: A, peer: int, stream: Any = None, *, wait: bool = True) -> Any:
        """Receive an array from a rank, which must call send with the same number of elements (ncclRecv).

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._run(RECV, None, buf, 0, peer, stream, None, wait)

    @overload
    def send_recv(
        self, send: Array, dest: int, recv: A, source: int, stream: Any = None, *, wait: Literal[True] = True
    ) -> A: ...
    @overload
    def send_recv(
        self, send: Array, dest: int, recv: A, source: int, stream: Any = None, *, wait: Literal[False]
    ) -> Work[A]: ...
    def send_recv(
        self, send: Array, dest: int, recv: A, source: int, stream: Any = None, *, wait: bool = True
    ) -> Any:
        """Send to one rank while receiving from another rank or the same one.

        The two arrays must not overlap.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """

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

        return self._run_in_pieces(pieces, 0, stream, send, recv, wait)

    # --- with a count of elements for each rank ---

    @overload
    def all_gather_v(
        self, send: A, recv: None, counts: Sequence[int], stream: Any = None, *, wait: Literal[True] = True
    ) -> A: ...
    @overload
    def all_gather_v(
        self, send: Array, recv: R, counts: Sequence[int], stream: Any = None, *, wait: Literal[True] = True
    ) -> R: ...
    @overload
    def all_gather_v(
        self, send: A, recv: None, counts: Sequence[int], stream: Any = None, *, wait: Literal[False]
    ) -> Work[A]: ...
    @overload
    def all_gather_v(
        self, send: Array, recv: R, counts: Sequence[int], stream: Any = None, *, wait: Literal[False]
    ) -> Work[R]: ...
    def all_gather_v(
        self, send: Any, recv: Any, counts: Sequence[int], stream: Any = None, *, wait: bool = True
    ) -> Any:
        """Collect `counts[i]` elements of each rank i on every rank, in rank order.

        Counts are elements, not rows, and a new `recv` has one axis, here and in the other operations with
        counts. It makes grouped broadcasts. In place if `send` is this rank's part of `recv`.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """

        with self._calls.locating():
            recv = self._arguments.room(send, recv, counts, "counts")

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            check.require_own(source, "send", each)
            parts = check.parts(source, target, "recv", each, "the sum of counts")
            return [
                Piece(
                    BROADCAST, code, source[0] if root == self._calls.core.rank else part, part, count, root
                )
                for root, (code, part, count) in enumerate(parts)
            ]

        return self._run_in_pieces(pieces, 0, stream, send, recv, wait)

    @overload
    def reduce_scatter_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        op: Op = "sum",
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def reduce_scatter_v(
        self,
        send: Array,
        recv: R,
        counts: Sequence[int],
        op: Op = "sum",
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> R: ...
    @overload
    def reduce_scatter_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        op: Op = "sum",
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[A]: ...
    @overload
    def reduce_scatter_v(
        self,
        send: Array,
        recv: R,
        counts: Sequence[int],
        op: Op = "sum",
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[R]: ...
    def reduce_scatter_v(
        self,
        send: Any,
        recv: Any,
        counts: Sequence[int],
        op: Op = "sum",
        stream: Any = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Reduce the arrays of all ranks; rank i gets the next `counts[i]` elements of the result.

        It makes grouped reductions.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """

        with self._calls.locating():
            recv = self._arguments.room(send, recv, counts, "counts", self._calls.core.rank)

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            check.require_own(target, "recv", each)
            parts = check.parts(target, source, "send", each, "the sum of counts")
            return [
                Piece(REDUCE, code, part, target[0] if root == self._calls.core.rank else 0, count, root)
                for root, (code, part, count) in enumerate(parts)
            ]

        return self._run_in_pieces(pieces, op, stream, send, recv, wait)

    @overload
    def gather_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> A | None: ...
    @overload
    def gather_v(
        self,
        send: Array,
        recv: R,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> R | None: ...
    @overload
    def gather_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[A | None]: ...
    @overload
    def gather_v(
        self,
        send: Array,
        recv: R,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[R | None]: ...
    def gather_v(
        self,
        send: Any,
        recv: Any,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Collect `counts[i]` elements of each rank i on the root, in rank order.

        Returns None on the other ranks.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        with self._calls.locating():
            self._arguments.rank_in(root, "root")
        here = root == self._calls.core.rank

        if here:
            with self._calls.locating():
                recv = self._arguments.room(send, recv, counts, "counts")

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            source = check.span(send, "send", split=True)
            check.require_own(source, "send", each)
            pieces = [Piece(SEND, source[2], source[0], 0, source[1], root)]
            if here:
                target = check.output(recv, "recv", split=True)
                parts = check.parts(source, target, "recv", each, "the sum of counts")
                pieces += [Piece(RECV, code, 0, part, n, peer) for peer, (code, part, n) in enumerate(parts)]
            else:
                require_array_or_none(recv, "recv")
            return pieces

        return self._run_in_pieces(pieces, 0, stream, send, recv if here else None, wait)

    @overload
    def scatter_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def scatter_v(
        self,
        send: Array | None,
        recv: R,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> R: ...
    @overload
    def scatter_v(
        self,
        send: A,
        recv: None,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[A]: ...
    @overload
    def scatter_v(
        self,
        send: Array | None,
        recv: R,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[R]: ...
    def scatter_v(
        self,
        send: Any,
        recv: Any,
        counts: Sequence[int],
        root: int = 0,
        stream: Any = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Send `counts[i]` elements of the root's array to each rank i.

        On other ranks than the root, `send` may be None.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """
        with self._calls.locating():
            self._arguments.rank_in(root, "root")
            recv = self._arguments.room(send, recv, counts, "counts", self._calls.core.rank)
        here = root == self._calls.core.rank

        def pieces() -> list[Piece]:
            check = self._arguments
            each = check.counts(counts, "counts")
            target = check.output(recv, "recv", split=True)
            check.require_own(target, "recv", each)
            pieces = [Piece(RECV, target[2], 0, target[0], target[1], root)]
            if here:
                source = check.span(check.of_root(send), "send", split=True)
                parts = check.parts(target, source, "send", each, "the sum of counts")
                pieces += [Piece(SEND, code, part, 0, n, peer) for peer, (code, part, n) in enumerate(parts)]
            return pieces

        return self._run_in_pieces(pieces, 0, stream, send if here else None, recv, wait)

    @overload
    def all_to_all_v(
        self,
        send: A,
        send_counts: Sequence[int],
        recv: None,
        recv_counts: Sequence[int],
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> A: ...
    @overload
    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: R,
        recv_counts: Sequence[int],
        stream: Any = None,
        *,
        wait: Literal[True] = True,
    ) -> R: ...
    @overload
    def all_to_all_v(
        self,
        send: A,
        send_counts: Sequence[int],
        recv: None,
        recv_counts: Sequence[int],
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[A]: ...
    @overload
    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: R,
        recv_counts: Sequence[int],
        stream: Any = None,
        *,
        wait: Literal[False],
    ) -> Work[R]: ...
    def all_to_all_v(
        self,
        send: Any,
        send_counts: Sequence[int],
        recv: Any,
        recv_counts: Sequence[int],
        stream: Any = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Send `send_counts[i]` elements to each rank i and receive `recv_counts[i]` from it, in rank order.

        The two arrays must not overlap.

        Raises as `all_reduce` does: TypeError, ValueError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, NcclTimeoutError, or another NcclError.
        """

        with self._calls.locating():
            recv = self._arguments.room(send, recv, recv_counts, "recv_counts")

        def pieces() -> list[Piece]:
            check = self._arguments
            out, into = check.both_counts(send_counts, recv_counts)
            source, target = check.span(send, "send", split=True), check.output(recv, "recv", split=True)
            sends = check.parts(target, source, "send", out, "the sum of send_counts")
            recvs = check.parts(source, target, "recv", into, "the sum of recv_counts")
            check.require_equal_own(out, into)
            if not apart(source, target):
                raise ValueError(
                    "send and recv overlap; expected separate memory, since it is never in place"
                )
            return [Piece(SEND, code, part, 0, n, peer) for peer, (code, part, n) in enumerate(sends)] + [
                Piece(RECV, code, 0, part, n, peer) for peer, (code, part, n) in enumerate(recvs)
            ]

        return self._run_in_pieces(pieces, 0, stream, send, recv, wait)

    @overload
    def barrier(self, *, timeout: float | None = None, wait: Literal[True] = True) -> None: ...
    @overload
    def barrier(self, *, timeout: float | None = None, wait: Literal[False]) -> Work[None]: ...
    def barrier(self, *, timeout: float | None = None, wait: bool = True) -> Any:
        """Return when every rank has called barrier.

        Raises NcclTimeoutError after `timeout` seconds: the barrier then stays outstanding, and the
        communicator stays usable. Otherwise raises as `all_reduce` does: NcclInvalidUsage,
        CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._calls.barrier(timeout, wait)

    # --- one-sided ---

    @overload
    def put_signal(
        self,
        array: Array,
        peer: int,
        window: Window,
        offset: int = 0,
        signal: int = 0,
        *,
        byte_offset: int | None = None,
        context: int = 0,
        stream: Any = None,
        wait: Literal[True] = True,
    ) -> None: ...
    @overload
    def put_signal(
        self,
        array: Array,
        peer: int,
        window: Window,
        offset: int = 0,
        signal: int = 0,
        *,
        byte_offset: int | None = None,
        context: int = 0,
        stream: Any = None,
        wait: Literal[False],
    ) -> Work[None]: ...
    def put_signal(
        self,
        array: Array,
        peer: int,
        window: Window,
        offset: int = 0,
        signal: int = 0,
        *,
        byte_offset: int | None = None,
        context: int = 0,
        stream: Any = None,
        wait: bool = True,
    ) -> Any:
        """Write an array into a rank's part of a window, then increment its signal (ncclPutSignal).

        The rank makes no matching call: it waits with `wait_signal`, and then sees the data. `offset` counts
        elements of the window, whose dtype the array must have; `byte_offset` counts bytes, for any dtype.
        Puts and signals to one rank take effect in their order. When the call is complete, `array` may be
        reused. Needs NCCL >= 2.29.2. NVIDIA's NCCL wants both arrays in symmetric windows, and only signal 0
        of context 0.

        Raises TypeError or ValueError if the put does not fit into the window of `peer`, NcclInvalidUsage if
        the window is closed, NotSupportedError with an older library, and otherwise as `all_reduce` does:
        CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
        """
        return self._one_sided.put(array, peer, window, offset, byte_offset, signal, context, stream, wait)

    @overload
    def signal(
        self, peer: int, signal: int = 0, *, context: int = 0, stream: Any = None, wait: Literal[True] = True
    ) -> None: ...
    @overload
    def signal(
        self, peer: int, signal: int = 0, *, context: int = 0, stream: Any = None, wait: Literal[False]
    ) -> Work[None]: ...
    def signal(
        self, peer: int, signal: int = 0, *, context: int = 0, stream: Any = None, wait: bool = True
    ) -> Any:
        """Increment a signal of a rank, after the earlier puts to it (ncclSignal, NCCL >= 2.29.2).

        On a GPU `stream=None` is the current stream of the library of the newest window's array.

        Raises NotSupportedError with an older library, and otherwise as `all_reduce` does: TypeError,
        ValueError, NcclInvalidUsage, CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another
        NcclError.
        """
        return self._one_sided.signal(peer, signal, context, stream, wait)

    @overload
    def wait_signal(
        self,
        peer: int | Mapping[int, int],
        count: int = 1,
        signal: int = 0,
        *,
        context: int = 0,
        stream: Any = None,
        wait: Literal[True] = True,
    ) -> None: ...
    @overload
    def wait_signal(
        self,
        peer: int | Mapping[int, int],
        count: int = 1,
        signal: int = 0,
        *,
        context: int = 0,
        stream: Any = None,
        wait: Literal[False],
    ) -> Work[None]: ...
    def wait_signal(
        self,
        peer: int | Mapping[int, int],
        count: int = 1,
        signal: int = 0,
        *,
        context: int = 0,
        stream: Any = None,
        wait: bool = True,
    ) -> Any:
        """Wait until `peer` has incremented a signal of this rank `count` times (ncclWaitSignal).

        `peer` may be a dict of ranks and their counts; an empty one waits for nothing. A wait takes the
        increments: the next wait for the same signal needs as many again. Later calls on the stream see the
        data of the puts. Needs NCCL >= 2.29.2.

        With a time-out it raises NcclTimeoutError, which names the rank, the signal and the expected number
        of increments; on the CPU library also the number that has arrived. Otherwise it raises as `signal`
        does: TypeError, ValueError, NotSupportedError, NcclInvalidUsage, CollectiveMismatchError,
        RankFailedError, or another NcclError.
        """
        return self._one_sided.wait(peer, count, signal, context, stream, wait)

    # --- reductions ---

    def pre_mul_sum(self, factor: Any) -> PreMulSum:
        """Return an operation that multiplies this rank's elements by a factor, then sums.

        A Python or NumPy number is converted to the dtype of the reduced arrays. An array of one element on
        the device must have this dtype; NCCL reads the element when the reduction runs. Needs NCCL >= 2.11
        (ncclRedOpCreatePreMulSum). Raises TypeError or ValueError for a wrong factor; the first call that
        uses the operation raises them if the dtype does not fit, and NotSupportedError with an older library.
        """
        return PreMulSum(self._calls.core, self._arguments.span, factor)


# Python's own errors about arguments name the public class.
for _name, _method in list(vars(Operations).items()):
    if not _name.startswith("_"):
        _method.__qualname__ = f"Communicator.{_name}"
