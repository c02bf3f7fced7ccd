"""The arguments of a call: arrays, ranks and counts resolved and checked, before anything is issued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import (
    ANYWHERE,
    FORTRAN,
    HOST,
    READ_ONLY,
    RECORDED_BY_AUTOGRAD,
    Span,
    kind_of,
    shape_of,
    spans,
)
from pynccl._base.values import as_index, check_rank, shown
from pynccl._comm.core import Core
from pynccl._library.binding import lib
from pynccl._library.generated.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)

# Checked arguments: address of the input, address of the output, NCCL's count, dtype code, the array with the
# result. A plain tuple for speed: every call makes one.
Checked = tuple[int, int, int, int, Any]


def require_array_or_none(value: Any, name: str) -> None:
    """Raise TypeError unless an argument that this rank does not use would fit where it is used."""
    if value is not None:
        kind_of(value, name)


class Arguments:
    """Checks of the arguments of one communicator's calls."""

    def __init__(self, core: Core) -> None:
        self._rank, self._size, self._device = core.rank, core.size, core.device
        self._place, self._waits = core.place, core.waits

    def check(self, kind: int, send: Any, recv: Any, root: int) -> Checked:
        """Check the arrays of a call and its root or peer."""
        return _CHECKS[kind](self, send, recv, root)

    def span(self, array: Any, name: str, *, split: bool = False) -> Span:
        """Resolve an array; raise ValueError if the communicator's device cannot reach its memory."""
        span = spans[type(array)](array, name)
        _, count, _, where, flags = span
        if where not in (self._place, ANYWHERE):
            self._misplaced(name, where, count)
        if flags & FORTRAN and split:
            raise ValueError(
                f"{name} is in Fortran order; expected C order, since the first axis is split or joined"
            )
        return span

    def _misplaced(self, name: str, where: int, count: int) -> None:
        if self._waits:
            raise ValueError(
                f"{name} is memory of device {where}; expected host memory, since the CPU library is loaded"
            )
        if where != HOST:
            raise ValueError(
                f"{name} is memory of device {where}; expected the communicator's device {self._device}"
            )
        if count:
            raise ValueError(
                f"{name} is host memory; expected device memory, since NVIDIA's NCCL is loaded "
                "(PYNCCL_LIBRARY=cpu works on host memory)"
            )

    def output(self, array: Any, name: str, *, split: bool = False, in_place: bool = False) -> Span:
        """Resolve an array that receives the result."""
        span = self.span(array, name, split=split)
        if span[4] & READ_ONLY and span[1]:
            if in_place:
                raise ValueError(
                    f"{name} (in place) is read-only; expected a writable array, or recv=, one for the result"
                )
            raise ValueError(f"{name} is read-only; expected a writable array")
        _refuse_recorded(span, f"{name} (in place)" if in_place else name)
        return span

    def rank_in(self, value: Any, name: str) -> None:
        """Raise TypeError or ValueError unless the value is a rank of the communicator."""
        if type(value) is int and 0 <= value < self._size:
            return
        check_rank(value, name, self._size)

    def _part(self, span: Span) -> int:
        """Return NCCL's count of each rank's part of `send`."""
        if _elements(span) % self._size:
            raise ValueError(
                f"send has {_elements(span)} elements; expected a multiple of the {self._size} ranks"
            )
        return span[1] // self._size

    def _new(self, send: Any, shape: tuple[int, ...]) -> Any:
        """Return a new array for the result, of the same kind as `send`."""
        return kind_of(send, "send").empty(send, shape)

    def _first_axis(self, array: Any) -> tuple[int, ...]:
        shape = shape_of(array)
        if not shape or shape[0] % self._size:
            raise ValueError(
                f"send has shape {shape}; expected a first axis that is a multiple of the {self._size} ranks"
            )
        return shape[0] // self._size, *shape[1:]

    def _check_elementwise(self, send: Any, recv: Any, root: int) -> Checked:
        if recv is None:
            span = self.output(send, "send", in_place=True)
            return span[0], span[0], span[1], span[2], send
        source, target = self.span(send, "send"), self.output(recv, "recv")
        _require_alike(source, target)
        _require_shape(send, recv)
        return source[0], target[0], source[1], source[2], recv

    def _check_reduce(self, send: Any, recv: Any, root: int) -> Checked:
        self.rank_in(root, "root")
        if root == self._rank:
            return self._check_elementwise(send, recv, root)
        require_array_or_none(recv, "recv")
        source = self.span(send, "send")
        return source[0], 0, source[1], source[2], None

    def _check_broadcast(self, send: Any, recv: Any, root: int) -> Checked:
        self.rank_in(root, "root")
        if send is None and (recv is None or root == self._rank):
            where = ": this rank is the root" if root == self._rank else " for send or recv"
            raise TypeError(f"send is None; expected an array{where}")
        if root != self._rank:
            span = self.output(send, "send", in_place=True) if recv is None else self.output(recv, "recv")
            return span[0], span[0], span[1], span[2], send if recv is None else recv
        source = self.span(send, "send")
        if recv is None:
            # The other ranks refuse it, and the root would wait for them.
            _refuse_recorded(source, "send (in place)")
            return source[0], source[0], source[1], source[2], send
        return self._check_elementwise(send, recv, root)

    def _check_all_gather(self, send: Any, recv: Any, root: int) -> Checked:
        source = self.span(send, "send", split=True)
        if recv is None:
            recv = self._new(send, (self._size, *shape_of(send)))
        target = self.output(recv, "recv", split=True)
        swapped = self._size > 1 and _elements(source) == self._size * _elements(target)
        why = "every rank's send (the order is send, recv)" if swapped else "every rank's send"
        _require_total(source, target, self._size * _elements(source), why)
        self._require_joined(send, recv, recv)
        return source[0], target[0], source[1], source[2], recv

    def _check_reduce_scatter(self, send: Any, recv: Any, root: int) -> Checked:
        source = self.span(send, "send", split=True)
        if recv is None:
            recv = self._new(send, self._first_axis(send))
        count = self._part(source)
        target = self.output(recv, "recv", split=True)
        _require_total(source, target, _elements(source) // self._size, "one part of send")
        self._require_joined(recv, send, recv)
        return source[0], target[0], count, source[2], recv

    def _check_all_to_all(self, send: Any, recv: Any, root: int) -> Checked:
        source = self.span(send, "send", split=True)
        if recv is None:
            self._first_axis(send)
            recv = self._new(send, shape_of(send))
        count = self._part(source)
        target = self.output(recv, "recv", split=True)
        _require_alike(source, target)
        _require_shape(send, recv)
        return source[0], target[0], count, source[2], recv

    def _check_gather(self, send: Any, recv: Any, root: int) -> Checked:
        self.rank_in(root, "root")
        if root == self._rank:
            return self._check_all_gather(send, recv, root)
        require_array_or_none(recv, "recv")
        source = self.span(send, "send", split=True)
        return source[0], 0, source[1], source[2], None

    def of_root(self, send: Any) -> Any:
        """Return the root's array; raise TypeError for None."""
        if send is None:
            raise TypeError("send is None; expected an array: this rank is the root")
        return send

    def _check_scatter(self, send: Any, recv: Any, root: int) -> Checked:
        self.rank_in(root, "root")
        if root == self._rank:
            return self._check_reduce_scatter(self.of_root(send), recv, root)
        if recv is None:
            if send is None:
                raise TypeError(
                    "send and recv are None; expected recv=, an array for the part of this rank, which is "
                    "not the root"
                )
            recv = self._new(send, self._first_axis(send))
        target = self.output(recv, "recv", split=True)
        return 0, target[0], target[1], target[2], recv

    def _check_send(self, send: Any, recv: Any, root: int) -> Checked:
        self._message_to(root)
        source = self.span(send, "buf")
        return source[0], 0, source[1], source[2], None

    def _check_recv(self, send: Any, recv: Any, root: int) -> Checked:
        self._message_to(root)
        target = self.output(recv, "buf")
        return 0, target[0], target[1], target[2], recv

    def _message_to(self, peer: Any) -> None:
        self.rank_in(peer, "peer")
        if peer == self._rank and not lib.pynccl_group_depth():
            raise ValueError(
                f"peer is {peer}, this rank itself; expected another rank, or both the send and the receive "
                "in one pynccl.group()"
            )

    def _require_joined(self, part: Any, whole: Any, recv: Any) -> None:
        """Require the shape of the joined parts: along a new first axis, or along the existing one."""
        one, all_ = _shape(part), _shape(whole)
        if one is None or all_ is None or all_ == (self._size, *one):
            return
        if one and all_ == (self._size * one[0], *one[1:]):
            return
        if recv is whole:
            fitting = [(self._size, *one), *([(self._size * one[0], *one[1:])] if one else [])]
        else:
            fitting = [all_[1:]] if all_ and all_[0] == self._size else []
            fitting += [(all_[0] // self._size, *all_[1:])] if all_ and all_[0] % self._size == 0 else []
        text = " or ".join(map(str, fitting)) or f"a send whose first axis is divisible by {self._size}"
        raise ValueError(f"recv has shape {_shape(recv)}; expected {text} (a view made by reshape is enough)")

    # --- counts per rank ---

    def counts(self, counts: Any, name: str, order: str = "; the order is send, recv, counts") -> list[int]:
        """Return the element counts as a list: one int for each rank."""
        try:
            # A set has no order.
            if isinstance(counts, str | bytes | bytearray | Mapping | Set):
                raise TypeError
            values = [as_index(count) for count in counts]
        except TypeError:
            # An array is probably the result's, without values yet.
            what = f"an array of {counts.dtype}" if hasattr(counts, "dtype") else shown(counts)
            raise TypeError(f"{name} is {what}; expected a sequence of {self._size} ints{order}") from None
        if len(values) != self._size:
            raise ValueError(f"{name} has {len(values)} entries; expected {self._size}, one for each rank")
        if min(values) < 0 or sum(values) > dtypes.MOST_ELEMENTS:
            most = " with a sum below 2**59" if min(values) >= 0 else ""
            raise ValueError(f"{name} is {shown(values)}; expected whole numbers, 0 or more{most}")
        return values

    def require_own(self, span: Span, name: str, counts: list[int]) -> None:
        """Require the number of elements that the counts give this rank."""
        require_count(span, name, counts[self._rank], f"counts[{self._rank}], in elements")

    def both_counts(self, send_counts: Any, recv_counts: Any) -> tuple[list[int], list[int]]:
        """Return the element counts of all_to_all_v."""
        try:
            return self.counts(send_counts, "send_counts", ""), self.counts(recv_counts, "recv_counts", "")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; the order is send, send_counts, recv, recv_counts") from None

    def require_equal_own(self, out: list[int], into: list[int]) -> None:
        """Require that this rank sends itself what it receives from itself."""
        mine = self._rank
        if out[mine] != into[mine]:
            raise ValueError(
                f"send_counts[{mine}] is {out[mine]} and recv_counts[{mine}] is {into[mine]}; expected them "
                "equal, for the elements that this rank sends to itself"
            )

    def room(self, send: Any, recv: Any, counts: Any, name: str, rank: int | None = None) -> Any:
        """Return `recv`, or a new array for the counts: for all of them, or for that of one rank."""
        if recv is not None:
            return recv
        if send is None:
            raise TypeError("send and recv are None; expected recv where send is None")
        each = self.counts(counts, name)
        return self._new(send, (sum(each) if rank is None else each[rank],))

    def parts(
        self, other: Span, whole: Span, name: str, counts: list[int], why: str
    ) -> list[tuple[int, int, int]]:
        """Return dtype code, address and length of each rank's part of `whole`; `other` has its dtype."""
        _require_dtype(*((other, whole) if name == "recv" else (whole, other)))
        require_count(whole, name, sum(counts), f"{why}, in elements")
        travel, address, parts = dtypes.traveller(whole[2]), whole[0], []
        for count in counts:
            length = count * (travel.factor if travel else 1)
            parts.append((whole[2], address, length))
            address += length * dtypes.itemsize(whole[2])
        return parts


def _elements(span: Span) -> int:
    """Return the number of elements in the array's own dtype."""
    travel = dtypes.traveller(span[2])
    return span[1] // travel.factor if travel else span[1]


def _require_dtype(send: Span, recv: Span) -> None:
    if send[2] != recv[2]:
        names = dtypes.name_of(recv[2]), dtypes.name_of(send[2])
        raise TypeError(f"recv has dtype {names[0]}; expected the dtype of send, {names[1]}")


def _refuse_recorded(span: Span, name: str) -> None:
    if span[4] & RECORDED_BY_AUTOGRAD:
        raise ValueError(
            f"{name} requires grad, and autograd would miss the change of its elements; expected a "
            "tensor without requires_grad, a call under torch.no_grad(), or a new tensor for the result"
        )


def _require_alike(send: Span, recv: Span) -> None:
    """Require an output with the dtype, count and order of the input."""
    _require_total(send, recv, _elements(send), "as many as send")
    if (send[4] ^ recv[4]) & FORTRAN:
        orders = ("C", "Fortran") if recv[4] & FORTRAN == 0 else ("Fortran", "C")
        raise ValueError(f"recv is in {orders[0]} order; expected the order of send, {orders[1]} order")


def _require_total(send: Span, recv: Span, count: int, why: str) -> None:
    _require_dtype(send, recv)
    require_count(recv, "recv", count, why)


def require_count(span: Span, name: str, count: int, why: str) -> None:
    """Require an array of `count` elements."""
    if _elements(span) != count:
        raise ValueError(f"{name} has {_elements(span)} elements; expected {count}, {why}")


def _shape(array: Any) -> tuple[int, ...] | None:
    """Return an array's shape; None for a Buffer, which only has a count."""
    shape = getattr(array, "shape", None)
    return None if shape is None else tuple(shape)


def _require_shape(send: Any, recv: Any) -> None:
    if getattr(send, "shape", None) == getattr(recv, "shape", None):
        return
    one, other = _shape(send), _shape(recv)
    if one != other and one is not None and other is not None:
        raise ValueError(
            f"recv has shape {other}; expected the shape of send, {one} (a view made by reshape is enough)"
        )


def apart(one: Span, two: Span) -> bool:
    """Tell whether two arrays share no memory."""
    ends = [span[0] + span[1] * dtypes.itemsize(span[2]) for span in (one, two)]
    return not one[1] or not two[1] or one[0] >= ends[1] or two[0] >= ends[0]


_CHECKS: dict[int, Callable[[Arguments, Any, Any, int], Checked]] = {
    ALL_REDUCE: Arguments._check_elementwise,
    REDUCE: Arguments._check_reduce,
    BROADCAST: Arguments._check_broadcast,
    ALL_GATHER: Arguments._check_all_gather,
    REDUCE_SCATTER: Arguments._check_reduce_scatter,
    ALL_TO_ALL: Arguments._check_all_to_all,
    GATHER: Arguments._check_gather,
    SCATTER: Arguments._check_scatter,
    SEND: Arguments._check_send,
    RECV: Arguments._check_recv,
}
