"""One-sided calls: put into another rank's window, signal, and wait for signals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import Span, kind_of
from pynccl._base.values import as_index, shown
from pynccl._comm.calls import Calls
from pynccl._comm.groups import Group
from pynccl._comm.recording import function_name
from pynccl._comm.work import Work, issued_later
from pynccl._device import streams
from pynccl._library.binding import address_of, fastcall, ffi, lib
from pynccl._library.generated.kinds import PUT_SIGNAL, SIGNAL, WAIT_SIGNAL
from pynccl._memory.window import Entry, entry_of
from pynccl._types import DataType

_BITS: Any = lib.PYNCCL_SIGNAL_BITS
_MOST_SIGNALS = (1 << 31) - 1


class OneSided:
    """Issues the one-sided calls of one communicator."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._core, self._arguments = calls, calls.core, calls.arguments

    def put(
        self,
        array: Any,
        peer: int,
        window: Any,
        offset: int,
        byte_offset: int | None,
        signal: int,
        context: int,
        stream: Any,
        wait: Any,
    ) -> Work[None] | None:
        """Check and issue a put."""
        later = wait is not True and issued_later(wait, self._core)
        try:
            entry = entry_of(window, self._core)
            self._arguments.rank_in(peer, "peer")
            span = self._arguments.span(array, "array")
            number = _signal(signal, context)
            begin = _place(entry, span, peer, offset, byte_offset)
            if not self._core.waits:
                self._require_symmetric(window, entry, span)
            handle, blocks = self._calls.stream_for(stream, array, None, later)
        except (TypeError, ValueError) as error:
            raise self._calls.located(error) from error.__cause__
        template = _template(self._core.c, entry, span[2] & 255, int(peer), number)
        keep = (self._core, array, entry, template, None)
        self._calls.issue(template, span[0], begin, span[1], handle, blocks, PUT_SIGNAL, keep)
        return self._calls.work(function_name(PUT_SIGNAL), handle, None) if later else None

    def signal(self, peer: int, signal: int, context: int, stream: Any, wait: Any) -> Work[None] | None:
        """Check and issue a signal."""
        later = wait is not True and issued_later(wait, self._core)
        try:
            self._arguments.rank_in(peer, "peer")
            number = _signal(signal, context)
            handle, blocks = self._stream(stream, later)
        except (TypeError, ValueError) as error:
            raise self._calls.located(error) from error.__cause__
        self._issue(SIGNAL, int(peer), 0, number, handle, blocks)
        return self._calls.work(function_name(SIGNAL), handle, None) if later else None

    def wait(
        self, peer: Any, count: int, signal: int, context: int, stream: Any, wait: Any
    ) -> Work[None] | None:
        """Check and issue waits for one rank or several."""
        later = wait is not True and issued_later(wait, self._core)
        try:
            counts = _counts(peer, count)
            waits = [(self._peer(each), _count(number, each)) for each, number in counts]
            number = _signal(signal, context)
            handle, blocks = self._stream(stream, later)
        except (TypeError, ValueError) as error:
            raise self._calls.located(error) from error.__cause__
        if len(waits) == 1:
            self._issue(WAIT_SIGNAL, *waits[0], number, handle, blocks)
        elif waits:
            with Group():
                for each, expected in waits:
                    self._issue(WAIT_SIGNAL, each, expected, number, handle, blocks)
        return self._calls.work(function_name(WAIT_SIGNAL), handle, None) if later else None

    def _peer(self, peer: Any) -> int:
        self._arguments.rank_in(peer, "peer")
        return int(peer)

    def _issue(self, kind: int, peer: int, count: int, number: int, stream: int, wait: int) -> None:
        template, _ = self._calls.template_for(kind, int(DataType.UINT8), number, peer)
        self._calls.issue(template, 0, 0, count, stream, wait, kind, (self._core, None))

    def _stream(self, stream: Any, later: bool) -> tuple[int, int]:
        """Return the stream of a call without arrays: that of the arrays of the newest window."""
        if self._core.streamless:
            return self._calls.stream_for(stream, None, None, later)
        handle = self._newest_stream() if stream is None else streams.handle_of(stream)
        if later:
            self._core.outside_captures("wait=False", [handle])
            self._core.keep(handle, ())
        return handle, 0

    def _newest_stream(self) -> int:
        newest = next(self._core.windows.entries(), None)
        if newest is None:
            raise TypeError(
                "stream is None; expected a stream: the communicator has no window whose array has a current "
                "stream"
            )
        return kind_of(newest.array).current(newest.array)

    def _require_symmetric(self, window: Any, entry: Entry, span: Span) -> None:
        """Require what NVIDIA's NCCL requires: both ends of a put lie in symmetric windows."""
        if not entry.symmetric:
            raise ValueError(
                f"window is {shown(window)}; expected a symmetric one, since NVIDIA's NCCL puts only into "
                "those: comm.window(array, symmetric=True)"
            )
        begin, nbytes = span[0], span[1] * dtypes.itemsize(span[2])
        source = self._core.windows.symmetric_at(begin, nbytes)
        if nbytes and (source is None or not source.contains(begin, nbytes)):
            raise ValueError(
                "array is in no symmetric window of this communicator; expected memory of one, since "
                "NVIDIA's NCCL puts only from symmetric windows: comm.window(array, symmetric=True)"
            )


def _template(comm: Any, entry: Entry, datatype: int, peer: int, number: int) -> fastcall.Template:
    """Return the callable that issues such puts."""
    key = datatype, peer, number
    template: fastcall.Template | None = entry.templates.get(key)
    if template is None:
        made = {"kind": PUT_SIGNAL, "datatype": datatype, "op": number, "root": peer, "window": entry.cell}
        call = ffi.new("pynccl_call*", {"comm": comm, **made})
        template = entry.templates[key] = fastcall.Template(address_of(call), (call, entry.cell))
    return template


def _counts(peer: Any, count: Any) -> Iterable[tuple[Any, Any]]:
    """Return the ranks to wait for, and how many signals of each."""
    if isinstance(peer, list | tuple):
        raise TypeError(f"peer is {shown(peer)}; expected a rank, or a dict of ranks and their counts")
    if not isinstance(peer, Mapping):
        return [(peer, count)]
    if count != 1:
        raise TypeError(f"count is {shown(count)}; expected none, since peer gives the counts")
    return peer.items()


def _signal(signal: Any, context: Any) -> int:
    """Return the number that stands for a signal of a context."""
    limit = 1 << _BITS - 1
    if type(signal) is type(context) is int and 0 <= signal < limit and 0 <= context < limit:
        return int(signal | context << _BITS)
    for value, name in ((signal, "signal"), (context, "context")):
        if not 0 <= _integer(value, name) < limit:
            raise ValueError(f"{name} is {shown(value)}; expected 0 <= {name} < {limit}")
    number: int = int(signal) | int(context) << _BITS
    return number


def _count(value: Any, peer: Any) -> int:
    if type(value) is int and 0 < value <= _MOST_SIGNALS:
        return value
    if not 0 < _integer(value, "count") <= _MOST_SIGNALS:
        raise ValueError(f"count is {value} for rank {peer}; expected 1 <= count < 2**31")
    return int(value)


def _integer(value: Any, name: str) -> int:
    if type(value) is int:
        return value
    try:
        return as_index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; expected an int") from None


def _place(entry: Entry, span: Span, peer: int, offset: Any, byte_offset: Any) -> int:
    """Return where a put begins, in bytes of the peer's window as the library counts them."""
    place, size = entry.places[peer], entry.itemsize
    nbytes = span[1] * dtypes.itemsize(span[2])
    if byte_offset is None:
        if span[2] != entry.code:
            names = dtypes.name_of(span[2]), dtypes.name_of(entry.code)
            raise TypeError(
                f"array has dtype {names[0]}; expected the dtype of the window, {names[1]}, or byte_offset="
            )
        if not 0 <= _integer(offset, "offset") * size <= place.nbytes - nbytes:
            raise ValueError(
                f"offset is {offset} for {nbytes // size:,} elements; the window of rank {peer} has "
                f"{place.nbytes // size:,} elements"
            )
        return place.before + int(offset) * size
    if offset:
        raise TypeError(f"offset is {shown(offset)} and byte_offset {byte_offset!r}; expected one of them")
    if not 0 <= _integer(byte_offset, "byte_offset") <= place.nbytes - nbytes:
        raise ValueError(
            f"byte_offset is {byte_offset} for {nbytes:,} bytes; the window of rank {peer} has "
            f"{place.nbytes:,} bytes"
        )
    return place.before + int(byte_offset)
