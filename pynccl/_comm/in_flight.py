"""Arrays of asynchronous calls, kept alive until their stream has finished with them."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from pynccl import capi
from pynccl._device import streams
from pynccl._library import cuda
from pynccl._library.binding import fastcall, lib
from pynccl._library.status import IN_PROGRESS

# The number of calls that share one event.
_BATCH = 64


class Events(Protocol):
    """The event functions of a library that InFlight uses."""

    def record(self, stream: int) -> int | None:
        """Return a new event after the present work of a stream; None during a graph capture."""

    def result(self, event: int) -> int:
        """Return the result of the calls before an event, or IN_PROGRESS."""

    def wait(self, event: int, milliseconds: int) -> None:
        """Wait for an event."""

    def notify(self, event: int, descriptor: int) -> bool:
        """Let an eventfd become readable when an event has completed; False if the library cannot."""

    def destroy(self, event: int) -> None:
        """Destroy an event."""


class CpuEvents:
    """Events of the CPU library."""

    def __init__(self, comm: int) -> None:
        self._comm = comm

    def record(self, stream: int) -> int | None:
        event = capi.pyncclCpuEventCreate()
        capi.pyncclCpuEventRecord(self._comm, event, stream)
        return event

    def result(self, event: int) -> int:
        return lib.pyncclCpuEventQuery(event)

    def wait(self, event: int, milliseconds: int) -> None:
        lib.pyncclCpuEventSynchronize(event, milliseconds)

    def notify(self, event: int, descriptor: int) -> bool:
        # It has none without a free descriptor.
        return not lib.pyncclCpuEventNotify(event, descriptor)

    def destroy(self, event: int) -> None:
        capi.pyncclCpuEventDestroy(event)


class CudaEvents:
    """Events of a CUDA device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def record(self, stream: int) -> int | None:
        # In a thread without a context the driver knows no default stream.
        with cuda.using_device(self._device):
            # Recording an event would add it to the graph; querying one would invalidate the capture.
            if cuda.stream_is_capturing(stream):
                return None
            event = cuda.event_create()
            cuda.event_record(event, stream)
        return event

    def result(self, event: int) -> int:
        return 0 if cuda.event_query(event) else IN_PROGRESS

    def wait(self, event: int, milliseconds: int) -> None:
        streams.poll(lambda: cuda.event_query(event), time.monotonic() + milliseconds / 1000)

    def notify(self, event: int, descriptor: int) -> bool:
        return False

    def destroy(self, event: int) -> None:
        cuda.event_destroy(event)


class Mark:
    """An event that was recorded in a stream; dropping the last reference destroys it."""

    __slots__ = ("_event", "_events", "_pid")

    def __init__(self, events: Events, event: int) -> None:
        self._events, self._event, self._pid = events, event, os.getpid()

    def result(self) -> int:
        """Return the result of the calls before the mark, or IN_PROGRESS."""
        return self._events.result(self._event)

    def wait(self, milliseconds: int) -> None:
        """Wait until the calls before the mark are complete, or this time has passed."""
        self._events.wait(self._event, milliseconds)

    def notify(self, descriptor: int) -> bool:
        """Let an eventfd become readable when the calls are complete; False if the library cannot."""
        return self._events.notify(self._event, descriptor)

    @fastcall.finalizer
    def __del__(self) -> None:
        # The events of a forked child are its parent's, and at the interpreter's exit the driver may be gone.
        # Nor has one whose creation was interrupted all of its fields.
        with suppress(Exception):
            if self._pid == os.getpid():
                event, self._event = self._event, 0
                if event:
                    self._events.destroy(event)


class InFlight:
    """The arrays that one stream still needs: batches, each with the mark that frees it."""

    def __init__(self, events: Events, stream: int) -> None:
        self._events, self._stream = events, stream
        self._batch: list[Any] = []
        self._pending: deque[tuple[Mark, list[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._batch) + sum(len(batch) for _, batch in self._pending)

    def add(self, arrays: Any) -> None:
        """Keep the arrays of a call that is about to be issued."""
        # In an open group the calls are not on the stream yet, so an event would precede them.
        if len(self._batch) >= _BATCH and not lib.pynccl_group_depth():
            self.mark()
        self._batch.append(arrays)

    def mark(self) -> Mark | None:
        """Mark the present end of the stream; None during a graph capture."""
        event = self._events.record(self._stream)
        if event is None:
            return None
        mark = Mark(self._events, event)
        self._pending.append((mark, self._batch))
        self._batch = []
        self.drop_completed()
        return mark

    def clear(self) -> None:
        """Release all arrays: the stream has completed."""
        self._batch = []
        self._pending.clear()

    def drop_completed(self) -> None:
        """Release the arrays of calls that have completed; several threads may do so at a time."""
        with suppress(IndexError):
            while (entry := self._pending[0])[0].result() != IN_PROGRESS:
                # Another thread may have removed it.
                with suppress(ValueError):
                    self._pending.remove(entry)
