"""The path of a call: resolve and check the arrays, issue the call, handle its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pynccl._arrays import buffers
from pynccl._arrays.buffers import Kind, held, kind_of
from pynccl._base.timeouts import check_timeout
from pynccl._base.values import shown
from pynccl._comm.arguments import Arguments
from pynccl._comm.core import (
    INTERRUPTED,
    NO_WINDOW,
    OVERLAP,
    RECORDED,
    STOPPED,
    TOO_LATE,
    WAITING,
    Core,
    go_on,
)
from pynccl._comm.groups import Group
from pynccl._comm.recording import closed_window, function_name
from pynccl._comm.reductions import PreMulSum, op_code
from pynccl._comm.work import Work, issued_later, part
from pynccl._device import streams
from pynccl._library import cuda
from pynccl._library.binding import address_of, fastcall, ffi, lib
from pynccl._library.fields import pack
from pynccl._library.generated.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE_SCATTER,
    REDUCING,
    ROOTED,
    SCATTER,
)
from pynccl._library.generated.structs import CollConfig
from pynccl._library.status import IN_PROGRESS, check
from pynccl._types import DataType, RedOp

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What "in place" means, where it is not the same memory.

_SEND_IN_RECV = "send to be this rank's part of recv, or "
_RECV_IN_SEND = "recv to be this rank's part of send, or "
_IN_PLACE = {
    ALL_GATHER: _SEND_IN_RECV,
    ALL_TO_ALL: "",
    GATHER: _SEND_IN_RECV,
    REDUCE_SCATTER: _RECV_IN_SEND,
    SCATTER: _RECV_IN_SEND,
}

PerCall = CollConfig | Mapping[str, Any] | None


class Piece(NamedTuple):
    """One of the calls that an operation is made of."""

    kind: int
    code: int
    source: int
    target: int
    elements: int
    root: int


class Calls:
    """Issues the calls of one communicator."""

    def __init__(self, core: Core) -> None:
        self.core, self.arguments = core, Arguments(core)
        # Packed calls by kind, dtype, op and root; those of all_reduce also by array type, op and dtype.
        self._templates: dict[tuple[int, int, int, int], fastcall.Template] = {}
        # The byte that a barrier reduces on the CPU library.
        self._token = np.zeros(1, np.uint8)

    # --- one call ---

    def run(
        self,
        kind: int,
        send: Any,
        recv: Any,
        op: Any,
        root: int,
        stream: Any,
        config: PerCall = None,
        wait: Any = True,
    ) -> Any:
        """Check and issue a call; return the array with the result, or a Work with it."""
        later = wait is not True and issued_later(wait, self.core)
        try:
            source, target, count, dtype, result = self.arguments.check(kind, send, recv, root)
            code = op_code(self.core, op, dtype) if kind in REDUCING else 0
            handle, blocks = self.stream_for(stream, send, result, later)
        except (TypeError, ValueError) as error:
            raise self.located(_meant(kind, recv) or error) from error.__cause__
        template, packed = self.template_for(kind, dtype & 255, code, root, config)
        keep = (self.core, send, result, op, template, packed)
        if kind != BROADCAST or recv is not None or root != self.core.rank:
            _tell_changed(result)
        answer = self.issue(template, source, target, count, handle, blocks, kind, keep)
        if later:
            return self.work(function_name(kind, packed is not None), handle, result)
        if not answer and kind == ALL_REDUCE and packed is None:
            self._remember(template, send, op, dtype)
        return result

    def work(self, name: str, stream: int, result: Any) -> Work[Any]:
        """Return the Work of the calls that were issued on a stream up to now."""
        return Work(name, [part(self.core, stream)], result)

    def all_reduce(self, send: Any, recv: Any, op: Any, stream: Any, config: PerCall, wait: Any) -> Any:
        """Run an all_reduce; `usual_all_reduce` is faster for a repeated array type, op and dtype."""
        return self.run(ALL_REDUCE, send, recv, op, 0, stream, config, wait)

    def usual_all_reduce(self) -> fastcall.Usual:
        """Return the callable that runs all_reduce with (send, recv, op, stream, config, wait)."""
        core = self.core
        stream = None if core.streamless else buffers.cupy_stream
        return fastcall.Usual(core.usual, stream, core.device, self._after_usual, self.all_reduce)

    def _after_usual(self, answer: int, send: Any, recv: Any) -> None:
        if answer == INTERRUPTED:
            self._let_go(self.core.own_stream, (send, recv))
        else:
            self.after(answer, ALL_REDUCE, *self.stream_for(None, send, recv), (self.core, send, recv))

    def barrier(self, timeout: float | None, wait: Any) -> Work[None] | None:
        """Return when every rank has called barrier; raise NcclTimeoutError after `timeout` seconds."""
        core, timeout = self.core, check_timeout(timeout)
        later = wait is not True and issued_later(wait, core)
        if later and timeout is not None:
            raise ValueError(f"timeout is {timeout:g} with wait=False; expected it in Work.wait")
        core.outside_groups("barrier")
        blocks = core.waits if timeout is None and not later else 0
        if core.waits:
            pointer, stream = self._token.ctypes.data, core.own_stream
        else:
            pointer, stream = core.device_scratch()
        template, _ = self.template_for(BARRIER, int(DataType.UINT8), int(RedOp.MAX), 0)
        if later:
            core.keep(stream, ())
        issue = partial(self.issue, template, pointer, pointer, 1, stream, blocks, BARRIER, (core, None))
        if timeout is None:
            issue()
        else:
            self._issue_within(timeout, issue, "barrier")
        if later:
            return self.work("barrier", stream, None)
        if not blocks:
            with core.alone():
                core.wait(stream, "barrier", timeout)
        return None

    def _issue_within(self, seconds: float, issue: Callable[[], int], what: str) -> None:
        """Issue a call; after `seconds` let it go on, and raise NcclTimeoutError."""
        core, until = self.core, time.monotonic() + seconds
        if not core.wait_for_interrupted(seconds):
            go_on([core], issue, what, announced=False)
        else:
            left = max(0.0, until - time.monotonic())
            lib.pynccl_check_limit(core.c, math.ceil(left * 1000) + 1)
            try:
                if issue() != TOO_LATE:
                    return
            finally:
                lib.pynccl_check_limit(core.c, 0)
        core.late(what, seconds, "", fatal=False, ended=lambda: False)

    def exchange(self, kind: int, words: Sequence[int]) -> NDArray[np.int64]:
        """Gather numbers of every rank, by a call of this kind, before a window is registered or closed."""
        core = self.core
        mine, table = np.array(words, np.int64), np.empty((core.size, len(words)), np.int64)
        template, _ = self.template_for(kind, int(DataType.INT64), 0, 0)
        if core.waits:
            sides, stream = (mine.ctypes.data, table.ctypes.data), core.own_stream
            self.issue(template, *sides, len(words), stream, 1, kind, (core, mine, table, None))
            return table
        with cuda.using_device(core.device):
            stream = core.device_scratch()[1]
            memory = cuda.memory_allocate(mine.nbytes + table.nbytes)
            cuda.copy_to_device(memory, mine.ctypes.data, mine.nbytes)
        sides = memory, memory + mine.nbytes
        self.issue(template, *sides, len(words), stream, 0, kind, (core, None))
        with core.alone():
            core.wait(stream, function_name(kind), None)
        # After a failure the library may still write it.
        with cuda.using_device(core.device):
            cuda.copy_to_host(table.ctypes.data, sides[1], table.nbytes)
            cuda.memory_free(memory)
        return table

    def issue(
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
        """Issue a call; unless it has completed, wait for it, keep its arrays or raise."""
        answer = None
        if self.core.interrupted is not None or self.core.unsettled is not None:
            with self.core.alone():
                pass
        try:
            answer = template(source, target, count, stream, wait)
            if answer in (STOPPED, TOO_LATE):
                again = partial(self.issue, template, source, target, count, stream, wait, kind, keep)
                go_on([self.core], again, function_name(kind, bool(keep[-1])))
            if answer and answer != TOO_LATE:
                self.after(answer, kind, stream, wait, keep, bool(keep[-1]))
        except BaseException:
            if answer is None or answer == WAITING:
                self._let_go(stream, keep)
            raise
        return answer

    def _remember(self, template: fastcall.Template, send: Any, op: Any, dtype: int) -> None:
        """Let the C fast path run the next all_reduce with this array type, op and dtype."""
        if type(send) is buffers.cupy_array and type(op) is str and dtype < 256 and not self.core.checks:
            self.core.usual.setdefault(type(send), {}).setdefault(op, {})[send.dtype] = template

    def template_for(
        self, kind: int, datatype: int, op: int, root: int, config: PerCall = None
    ) -> tuple[fastcall.Template, Any]:
        """Return the callable that issues such calls, and the packed config that must stay alive for it."""
        key = kind, datatype, op, root
        template = self._templates.get(key) if config is None else None
        if template is not None:
            return template, None
        made = {"comm": self.core.c, "kind": kind, "datatype": datatype, "op": op, "root": root}
        packed = None if config is None else pack(CollConfig, config)
        call = ffi.new("pynccl_call*", made if packed is None else made | {"config": packed})
        template = fastcall.Template(address_of(call), call)
        if packed is None:
            self._templates[key] = template
        return template, packed

    def stream_for(self, stream: Any, send: Any, result: Any = None, later: bool = False) -> tuple[int, int]:
        """Return a call's stream, ordered after pending writes to the arrays, and whether to wait for it.

        `later`: keep the arrays, since the call returns a Work.
        """
        if self.core.streamless:
            if stream is None and not later:
                return self.core.own_stream, self.core.waits
            handle = self.core.own_stream if stream is None else streams.handle_of(stream)
            if self.core.waits:
                self.core.keep(handle, (send, result, stream))
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
        if later:
            self.core.outside_captures("wait=False", [handle])
        # Allocators order the reuse of memory by the current stream only; on another stream keep the arrays.
        if later or (stream is not None and handle != kind.current(first)):
            self.core.keep(handle, (send, result, stream))
        return handle, 0

    def _order(self, kind: Kind, array: Any, stream: int) -> None:
        """Make a stream wait for pending writes to an array."""
        assert kind.order is not None
        with cuda.using_device(self.core.device):
            kind.order(array, stream)

    def after(
        self, answer: int, kind: int, stream: int, wait: int, keep: Any, configured: bool = False
    ) -> None:
        """Complete a call that returned `answer`; the caller calls `_let_go` if this raises after WAITING."""
        if answer == RECORDED:
            fastcall.keep(held(keep))
        elif answer == WAITING:
            keep = held(keep)
            self.core.wait(stream, function_name(kind, configured), None)
            lib.pynccl_leave(self.core.c)
        elif answer == IN_PROGRESS:
            self._complete(function_name(kind, configured), stream, wait, keep)
        elif answer == NO_WINDOW:
            raise closed_window(function_name(kind))
        elif answer == OVERLAP:
            in_place = _IN_PLACE.get(kind, "the same memory, or ")
            never = ", since it is never in place" if kind == ALL_TO_ALL else ""
            raise self.located(
                ValueError(f"send and recv overlap; expected {in_place}separate memory{never}")
            )
        else:
            handle = int(self.core.c.handle)
            self.core.refuse(answer)
            check(answer, function_name(kind, configured), handle)

    def _complete(self, name: str, stream: int, wait: int, keep: Any) -> None:
        try:
            with self.core.alone():
                self.core.settle(name)
                if not wait:
                    # Only now the call is on the stream.
                    lib.pynccl_comm_use(self.core.c, stream)
                    lib.pynccl_watch_issued(self.core.c, stream)
                elif not lib.pynccl_group_depth():
                    self.core.wait(stream, name, None)
        except BaseException:
            # The library may still use the arrays.
            if self.core.handle:
                self.core.keep(stream, keep)
            raise

    def _let_go(self, stream: int, keep: Any) -> bool:
        """Leave the communicator after an exception interrupted a call, and keep the call's arrays."""
        mine = bool(lib.pynccl_leave_mine(self.core.c))
        if mine and self.core.handle:
            self.core.keep(stream, keep)
        return mine

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Name the rank in errors of wrong arguments."""
        try:
            yield
        except (TypeError, ValueError) as error:
            raise self.located(error) from error.__cause__

    def located(self, error: Exception) -> Exception:
        if type(error) not in (TypeError, ValueError):
            # An array library's own, such as JAX's for a traced array, may need other arguments.
            return error
        return type(error)(f"{error} (rank {self.core.rank} of {self.core.size})")

    # --- operations of several calls ---

    def run_in_pieces(
        self,
        check_all: Callable[[], Iterable[Piece]],
        op: Any,
        stream: Any,
        send: Any,
        result: Any,
        wait: Any = True,
    ) -> Any:
        """Check all calls, then issue them as one group; return the array with the result, or a Work."""
        later = wait is not True and issued_later(wait, self.core)
        try:
            pieces = list(check_all())
            handle, blocks = self.stream_for(stream, send, result, later)
            codes = [op_code(self.core, op, p.code) if p.kind in REDUCING else 0 for p in pieces]
        except (TypeError, ValueError) as error:
            raise self.located(error) from error.__cause__
        keep = (self.core, send, result, op, None)
        _tell_changed(result)
        with Group():
            for piece, code in zip(pieces, codes, strict=True):
                template, _ = self.template_for(piece.kind, piece.code & 255, code, piece.root)
                place = piece.source, piece.target, piece.elements
                self.issue(template, *place, handle, blocks, piece.kind, keep)
        return self.work(f"a group of {len(pieces)} calls", handle, result) if later else result


def _tell_changed(result: Any) -> None:
    if result is not None and (changed := kind_of(result).changed) is not None:
        changed(result)


def _meant(kind: int, recv: Any) -> TypeError | None:
    """Return the error of a value passed as recv that looks like another argument, or None."""
    if kind in REDUCING and isinstance(recv, str | RedOp | PreMulSum):
        meant = f"op=RedOp.{recv.name}" if isinstance(recv, RedOp) else f"op={recv!r}"
    elif kind in ROOTED and isinstance(recv, int | np.integer):
        meant = f"root={recv}"
    elif isinstance(recv, streams.Stream) or hasattr(recv, "__cuda_stream__"):
        meant = f"stream={recv!r}"
    else:
        return None
    return TypeError(f"recv is {shown(recv)}; the second argument is recv: write {meant}")
