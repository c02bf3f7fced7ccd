"""The path of a call: resolve the arrays, check them, issue it, and see what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pynccl._arrays import buffers, dtypes
from pynccl._arrays.buffers import (
    ANYWHERE,
    FORTRAN,
    HOST,
    READ_ONLY,
    RECORDED_BY_AUTOGRAD,
    kind_of,
    shape_of,
    spans,
)
from pynccl._comm.groups import Group
from pynccl._comm.recording import BUSY, CLOSED, NO_MEMORY, OVERLAP, RECORDED, STOPPED, WAITING, function_name
from pynccl._comm.reductions import PreMulSum, op_code
from pynccl._device import streams
from pynccl._errors import NcclInvalidUsage
from pynccl._library import cuda
from pynccl._library.binding import address_of, fastcall, ffi, lib
from pynccl._library.fields import pack
from pynccl._library.generated.structs import CollConfig
from pynccl._library.status import IN_PROGRESS, check
from pynccl._types import RedOp
from pynccl._watch import check_mode

if TYPE_CHECKING:
    from pynccl._arrays.buffers import Kind, Span

PerCall = CollConfig | Mapping[str, Any] | None

ALL_REDUCE, REDUCE, BROADCAST = lib.PYNCCL_ALL_REDUCE, lib.PYNCCL_REDUCE, lib.PYNCCL_BROADCAST
ALL_GATHER, REDUCE_SCATTER = lib.PYNCCL_ALL_GATHER, lib.PYNCCL_REDUCE_SCATTER
ALL_TO_ALL, GATHER, SCATTER = lib.PYNCCL_ALL_TO_ALL, lib.PYNCCL_GATHER, lib.PYNCCL_SCATTER
SEND, RECV = lib.PYNCCL_SEND, lib.PYNCCL_RECV
_REDUCING = (ALL_REDUCE, REDUCE, REDUCE_SCATTER)
_ROOTED = (REDUCE, BROADCAST, GATHER, SCATTER)
keep_recorded = fastcall.keep

# A call whose arguments are right: addresses of input and output, elements as NCCL is told them, dtype code,
# the array with the result. A plain tuple, since one is made for every call.
Checked = tuple[int, int, int, int, Any]


class Piece(NamedTuple):
    """One call of several that together are one operation."""

    kind: int
    code: int
    source: int
    target: int
    elements: int
    root: int


class Calls:
    """What every operation of a communicator goes through."""

    _c: Any
    _handle: int
    _rank: int
    _size: int
    _device: int
    # Where arrays have to be: the device's ordinal, or HOST.
    _place: int
    # 1 where calls without a stream wait: for the CPU library.
    _waits: int
    # There is no stream but those that are given.
    _streamless: bool
    # Of calls without a stream, where arrays have none either.
    _own_stream: int
    # What is the same in many calls; of all_reduce by operation and NumPy dtype, and for "sum".
    _templates: dict[tuple[int, int, int, int], fastcall.Template]
    _quick: dict[Any, dict[Any, fastcall.Template]]
    _sums: dict[Any, fastcall.Template]
    _why: str

    if TYPE_CHECKING:

        def _keep(self, stream: int, arrays: Any) -> None: ...
        def _wait(self, stream: int, what: str, timeout: float | None) -> None: ...
        def _settle(self, what: str) -> None: ...
        def _alone(self) -> AbstractContextManager[None]: ...
        def _raise_verdict(self, result: int) -> None: ...

    def _settle_place(self, device: int, on_cpu: bool) -> None:
        """Decide where arrays have to be, and on which stream calls without one go."""
        driver = not on_cpu and cuda.available()
        self._waits, self._streamless = int(on_cpu), not driver
        self._place = HOST if on_cpu else device if driver else ANYWHERE
        # Not the default stream: host arrays know nothing of streams, and calls of two threads on two
        # communicators must not wait for each other.
        self._own_stream = streams.cpu_stream() if on_cpu else 0

    # --- one call ---

    def _run(
        self, kind: int, send: Any, recv: Any, op: Any, root: int, stream: Any, config: PerCall = None
    ) -> Any:
        try:
            source, target, count, dtype, result = _CHECKS[kind](self, send, recv, root)
            code = op_code(self, op, dtype) if kind in _REDUCING else 0
            handle, wait = self._stream(stream, send, result)
        except (TypeError, ValueError) as error:
            raise self._located(error, _meant(kind, recv)) from error
        template, packed = self._template(kind, dtype & 255, code, root, config)
        keep = (self, send, result, op, template, packed)
        if kind != BROADCAST or recv is not None or root != self._rank:
            _tell_changed(result)
        answer = self._issue(template, source, target, count, handle, wait, kind, keep)
        if not answer and kind == ALL_REDUCE and packed is None:
            self._remember(template, send, op, dtype)
        return result

    def _issue(
        self,
        template: fastcall.Template,
        source: int,
        target: int,
        count: int,
        stream: int,
        wait: int,
        kind: int,
        keep: tuple[Any, ...],
    ) -> int:
        """Issue a call, and do what is left to do after one that did not simply succeed."""
        answer = None
        try:
            answer = template(source, target, count, stream, wait)
            if answer:
                self._after(answer, kind, stream, wait, keep, bool(keep[-1]))
        except BaseException:
            if answer is None or answer == WAITING:
                self._let_go(stream, keep)
            raise
        return answer

    def _remember(self, template: fastcall.Template, send: Any, op: Any, dtype: int) -> None:
        """Let the next all_reduce like this one go the short way."""
        if type(send) is buffers.cupy_array and type(op) is str and dtype < 256:
            self._quick.setdefault(op, {})[send.dtype] = template

    def _template(
        self, kind: int, datatype: int, op: int, root: int, config: PerCall = None
    ) -> tuple[fastcall.Template, Any]:
        """Return what issues such calls, and what it needs alive."""
        key = kind, datatype, op, root
        template = self._templates.get(key) if config is None else None
        if template is not None:
            return template, None
        made = {"comm": self._c, "kind": kind, "datatype": datatype, "op": op, "root": root}
        packed = None if config is None else pack(CollConfig, config)
        call = ffi.new("pynccl_call*", made if packed is None else made | {"config": packed})
        template = fastcall.Template(address_of(call), call)
        if packed is None:
            self._templates[key] = template
        return template, packed

    def _stream(self, stream: Any, send: Any, result: Any) -> tuple[int, int]:
        """Return a call's stream, ordered behind who still writes the arrays, and whether to wait for it."""
        if self._streamless:
            if stream is None:
                return self._own_stream, self._waits
            handle = streams.handle_of(stream)
            if self._waits:
                self._keep(handle, (send, result, stream))
            return handle, 0
        first = result if send is None else send
        kind = kind_of(first)
        handle = kind.current(first) if stream is None else streams.handle_of(stream)
        if kind.order is not None:
            self._order(kind, first, handle)
        if result is not None and result is not first:
            other = kind_of(result)
            if other.order is not None:
                self._order(other, result, handle)
        # Host memory has no allocator that knows of streams; a device's has one, for the current stream.
        if stream is not None and handle != kind.current(first):
            self._keep(handle, (send, result, stream))
        return handle, 0

    def _order(self, kind: Kind, array: Any, stream: int) -> None:
        """Have a stream wait for who still writes an array."""
        assert kind.order is not None
        with cuda.using_device(self._device):
            kind.order(array, stream)

    def _after(
        self, answer: int, kind: int, stream: int, wait: int, keep: Any, configured: bool = False
    ) -> None:
        """Do what is left to do; where that raises after WAITING, `_let_go` is due."""
        if answer == RECORDED:
            keep_recorded(keep)
        elif answer == WAITING:
            self._wait(stream, function_name(kind, configured), None)
            lib.pynccl_leave(self._c)
        elif answer == IN_PROGRESS:
            self._complete(function_name(kind, configured), stream, wait, keep)
        elif answer == OVERLAP:
            in_place = (
                "separate: it is never in place" if kind == ALL_TO_ALL else "the same memory, or separate"
            )
            raise self._located(ValueError(f"send and recv overlap; expected {in_place}"))
        else:
            handle = int(self._c.handle)
            self._refuse(answer)
            check(answer, function_name(kind, configured), handle)

    def _complete(self, name: str, stream: int, wait: int, keep: Any) -> None:
        try:
            with self._alone():
                self._settle(name)
                if not wait:
                    lib.pynccl_watch_issued(self._c, stream)
                elif not lib.pynccl_group_depth():
                    self._wait(stream, name, None)
        except BaseException:
            # The library may still be at it.
            if self._handle:
                self._keep(stream, keep)
            raise

    def _let_go(self, stream: int, keep: Any) -> bool:
        """Leave the communicator where an exception has kept a call from doing so, and keep its arrays."""
        mine = bool(lib.pynccl_leave_mine(self._c))
        if mine and self._handle:
            self._keep(stream, keep)
        return mine

    def _refuse(self, answer: int) -> None:
        """Raise where an answer is the call path's own, and about this communicator."""
        if answer == BUSY:
            raise NcclInvalidUsage(
                f"{self!r} is in use by another thread; a communicator is for one at a time"
            )
        if answer == STOPPED:
            raise check_mode.interrupted()
        if answer == CLOSED and not self._handle:
            raise NcclInvalidUsage(f"{self!r} cannot be used: {self._why}", rank=self._rank)
        if self._c.watch and answer not in (RECORDED, OVERLAP, NO_MEMORY):
            self._raise_verdict(answer)
        if answer == NO_MEMORY:
            raise MemoryError

    def _located(self, error: Exception, hint: str = "") -> Exception:
        return type(error)(f"{error}{hint} (rank {self._rank} of {self._size})")

    # --- several calls that are one ---

    def _in_pieces(
        self, check_all: Callable[[], Iterable[Piece]], op: Any, stream: Any, send: Any, result: Any
    ) -> Any:
        """Issue calls as one group, after all of them were checked."""
        try:
            pieces = list(check_all())
            handle, wait = self._stream(stream, send, result)
            codes = [op_code(self, op, p.code) if p.kind in _REDUCING else 0 for p in pieces]
        except (TypeError, ValueError) as error:
            raise self._located(error) from error
        keep = (self, send, result, op, None)
        _tell_changed(result)
        with Group():
            for piece, code in zip(pieces, codes, strict=True):
                template, _ = self._template(piece.kind, piece.code & 255, code, piece.root)
                part = piece.source, piece.target, piece.elements
                self._issue(template, *part, handle, wait, piece.kind, keep)
        return result

    # --- what is right ---

    def _span(self, array: Any, name: str, *, split: bool = False) -> Span:
        """Resolve an array; refuse memory that the library cannot reach from the communicator's device."""
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
                f"{name} is memory of device {where}; the CPU library is loaded, which works on host memory"
            )
        if where != HOST:
            raise ValueError(
                f"{name} is memory of device {where}; expected the communicator's device {self._device}"
            )
        if count:
            raise ValueError(
                f"{name} is host memory; NVIDIA's NCCL is loaded, which works on device memory "
                "(PYNCCL_LIBRARY=cpu works on host memory)"
            )

    def _output(self, array: Any, name: str, *, split: bool = False, in_place: bool = False) -> Span:
        span = self._span(array, name, split=split)
        if span[4] & READ_ONLY and span[1]:
            name = f"{name} (in place)" if in_place else name
            raise ValueError(f"{name} is read-only; expected a writable array, since the result goes there")
        if span[4] & RECORDED_BY_AUTOGRAD:
            name = f"{name} (in place)" if in_place else name
            raise ValueError(
                f"{name} requires grad, and autograd would not know that its elements change; expected a "
                "tensor that does not, the call under torch.no_grad(), or a new tensor for the result"
            )
        return span

    def _rank_in(self, value: Any, name: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}; expected an int, 0 <= {name} < {self._size}")
        if not 0 <= value < self._size:
            raise ValueError(f"{name} is {value}; expected 0 <= {name} < {self._size}")

    def _part(self, span: Span, name: str) -> int:
        """Return the elements of each rank's part of an array, as NCCL is told them."""
        if _elements(span) % self._size:
            raise ValueError(
                f"{name} has {_elements(span)} elements; expected a multiple of the {self._size} ranks"
            )
        return span[1] // self._size

    def _new(self, send: Any, shape: tuple[int, ...]) -> Any:
        """Return a new array for the result, of the sender's kind."""
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
            span = self._output(send, "send", in_place=True)
            return span[0], span[0], span[1], span[2], send
        source, target = self._span(send, "send"), self._output(recv, "recv")
        _require_alike(source, target)
        _require_shape(send, recv)
        return source[0], target[0], source[1], source[2], recv

    def _check_reduce(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "root")
        if root == self._rank:
            return self._check_elementwise(send, recv, root)
        source = self._span(send, "send")
        return source[0], 0, source[1], source[2], None

    def _check_broadcast(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "root")
        if send is None and (recv is None or root == self._rank):
            where = ", which the root sends" if root == self._rank else ", or recv"
            raise TypeError(f"send is None; expected an array{where}")
        if root != self._rank:
            span = self._output(send, "send", in_place=True) if recv is None else self._output(recv, "recv")
            return span[0], span[0], span[1], span[2], send if recv is None else recv
        source = self._span(send, "send")
        if recv is None:
            return source[0], source[0], source[1], source[2], send
        return self._check_elementwise(send, recv, root)

    def _check_all_gather(self, send: Any, recv: Any, root: int) -> Checked:
        source = self._span(send, "send", split=True)
        if recv is None:
            recv = self._new(send, (self._size, *shape_of(send)))
        target = self._output(recv, "recv", split=True)
        _require_total(source, target, self._size * _elements(source), "every rank's send")
        self._require_joined(send, recv, recv)
        return source[0], target[0], source[1], source[2], recv

    def _check_reduce_scatter(self, send: Any, recv: Any, root: int) -> Checked:
        source = self._span(send, "send", split=True)
        if recv is None:
            recv = self._new(send, self._first_axis(send))
        count = self._part(source, "send")
        target = self._output(recv, "recv", split=True)
        _require_total(source, target, _elements(source) // self._size, "one part of send")
        self._require_joined(recv, send, recv)
        return source[0], target[0], count, source[2], recv

    def _check_all_to_all(self, send: Any, recv: Any, root: int) -> Checked:
        source = self._span(send, "send", split=True)
        if recv is None:
            self._first_axis(send)
            recv = self._new(send, shape_of(send))
        count = self._part(source, "send")
        target = self._output(recv, "recv", split=True)
        _require_alike(source, target)
        _require_shape(send, recv)
        return source[0], target[0], count, source[2], recv

    def _check_gather(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "root")
        if root == self._rank:
            return self._check_all_gather(send, recv, root)
        source = self._span(send, "send", split=True)
        return source[0], 0, source[1], source[2], None

    def _check_scatter(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "root")
        if root == self._rank:
            if send is None:
                raise TypeError("send is None; expected an array, which the root sends")
            return self._check_reduce_scatter(send, recv, root)
        if recv is None:
            if send is None:
                raise TypeError("send and recv are None; expected recv, or a send to make it from")
            recv = self._new(send, self._first_axis(send))
        target = self._output(recv, "recv", split=True)
        return 0, target[0], target[1], target[2], recv

    def _check_send(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "peer")
        source = self._span(send, "buf")
        return source[0], 0, source[1], source[2], None

    def _check_recv(self, send: Any, recv: Any, root: int) -> Checked:
        self._rank_in(root, "peer")
        target = self._output(recv, "buf")
        return 0, target[0], target[1], target[2], recv

    def _require_joined(self, part: Any, whole: Any, recv: Any) -> None:
        """Refuse a recv of another shape: parts are joined along an axis of their own, or the first."""
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
        text = " or ".join(map(str, fitting)) or f"a send whose first axis {self._size} ranks can share"
        raise ValueError(
            f"recv has shape {_shape(recv)}; expected {text} (a view of it, as reshape gives, will do)"
        )

    # --- counts of one's own ---

    def _counts(self, counts: Any, name: str) -> list[int]:
        """Return the elements of each rank, from a sequence of as many ints as there are ranks."""
        try:
            if isinstance(counts, str | bytes | bytearray):
                raise TypeError
            values = [index(count) for count in counts]
        except TypeError:
            raise TypeError(f"{name} is {counts!r}; expected a sequence of {self._size} ints") from None
        if len(values) != self._size:
            raise ValueError(f"{name} has {len(values)} entries; expected one a rank, {self._size}")
        if min(values) < 0:
            raise ValueError(f"{name} is {values}; expected whole numbers, 0 or more")
        return values

    def _parts(
        self, other: Span, whole: Span, name: str, counts: list[int], why: str
    ) -> list[tuple[int, int, int]]:
        """Return dtype code, address and length of each rank's part of `whole`; `other` has its dtype."""
        _require_dtype(*((other, whole) if name == "recv" else (whole, other)))
        require_count(whole, name, sum(counts), why)
        travel, address, parts = dtypes.traveller(whole[2]), whole[0], []
        for count in counts:
            length = count * (travel.factor if travel else 1)
            parts.append((whole[2], address, length))
            address += length * dtypes.itemsize(whole[2])
        return parts


def _tell_changed(result: Any) -> None:
    if result is not None and (changed := kind_of(result).changed) is not None:
        changed(result)


def _meant(kind: int, recv: Any) -> str:
    """Return what was probably meant by what stands where recv belongs, as the end of an error's text."""
    if kind in _REDUCING and isinstance(recv, str | RedOp | PreMulSum):
        meant = f"op=RedOp.{recv.name}" if isinstance(recv, RedOp) else f"op={recv!r}"
    elif kind in _ROOTED and isinstance(recv, int | np.integer):
        meant = f"root={recv}"
    elif isinstance(recv, streams.Stream) or hasattr(recv, "__cuda_stream__"):
        meant = f"stream={recv!r}"
    else:
        return ""
    return f"; recv comes second, so write {meant}"


def _elements(span: Span) -> int:
    """Return the elements of an array as its owner counts them."""
    travel = dtypes.traveller(span[2])
    return span[1] // travel.factor if travel else span[1]


def _require_dtype(send: Span, recv: Span) -> None:
    if send[2] != recv[2]:
        names = dtypes.name_of(recv[2]), dtypes.name_of(send[2])
        raise TypeError(f"recv has dtype {names[0]}; expected that of send, {names[1]}")


def _require_alike(send: Span, recv: Span) -> None:
    """Refuse an output that differs from the input in dtype, count or order."""
    _require_total(send, recv, _elements(send), "as many as send")
    if (send[4] ^ recv[4]) & FORTRAN:
        orders = ("C", "Fortran") if recv[4] & FORTRAN == 0 else ("Fortran", "C")
        raise ValueError(f"recv is in {orders[0]} order; expected that of send, {orders[1]} order")


def _require_total(send: Span, recv: Span, count: int, why: str) -> None:
    _require_dtype(send, recv)
    require_count(recv, "recv", count, why)


def require_count(span: Span, name: str, count: int, why: str) -> None:
    """Refuse an array of another length than its counts say."""
    if _elements(span) != count:
        raise ValueError(f"{name} has {_elements(span)} elements; expected {count}, {why}")


def _shape(array: Any) -> tuple[int, ...] | None:
    """Return an array's shape; None for what is only counted, as a Buffer."""
    shape = getattr(array, "shape", None)
    return None if shape is None else tuple(shape)


def _require_shape(send: Any, recv: Any) -> None:
    if getattr(send, "shape", None) == getattr(recv, "shape", None):
        return
    one, other = _shape(send), _shape(recv)
    if one != other and one is not None and other is not None:
        raise ValueError(
            f"recv has shape {other}; expected that of send, {one} (a view of it, as reshape gives, will do)"
        )


def apart(one: Span, two: Span) -> bool:
    """Tell whether two arrays share no memory."""
    ends = [span[0] + span[1] * dtypes.itemsize(span[2]) for span in (one, two)]
    return not one[1] or not two[1] or one[0] >= ends[1] or two[0] >= ends[0]


_CHECKS: dict[int, Callable[[Calls, Any, Any, int], Checked]] = {
    ALL_REDUCE: Calls._check_elementwise,
    REDUCE: Calls._check_reduce,
    BROADCAST: Calls._check_broadcast,
    ALL_GATHER: Calls._check_all_gather,
    REDUCE_SCATTER: Calls._check_reduce_scatter,
    ALL_TO_ALL: Calls._check_all_to_all,
    GATHER: Calls._check_gather,
    SCATTER: Calls._check_scatter,
    SEND: Calls._check_send,
    RECV: Calls._check_recv,
}
