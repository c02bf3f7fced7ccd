"""Arrays of asynchronous calls, kept alive until their stream has finished with them."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from pynccl import capi
from pynccl._library import cuda
from pynccl._library.binding import lib

# The number of calls that share one event.
_BATCH = 64


class Events(Protocol):
    """The event functions of a library that InFlight uses."""

    def record(self, stream: int) -> int | None:
        """Return a new event after the present work of a stream; None during a graph capture."""

    def done(self, event: int) -> bool:
        """Tell whether an event has completed."""

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

    def done(self, event: int) -> bool:
        return capi.pyncclCpuEventQuery(event) == 0

    def destroy(self, event: int) -> None:
        capi.pyncclCpuEventDestroy(event)


class CudaEvents:
    """Events of a CUDA device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def record(self, stream: int) -> int | None:
        # Recording an event would add it to the graph; querying one would invalidate the capture.
        if cuda.stream_is_capturing(stream):
            return None
        with cuda.using_device(self._device):
            event = cuda.event_create()
            cuda.event_record(event, stream)
        return event

    def done(self, event: int) -> bool:
        return cuda.event_query(event)

    def destroy(self, event: int) -> None:
        cuda.event_destroy(event)


class InFlight:
    """The arrays that one stream still needs: batches, each with the event that frees it."""

    def __init__(self, events: Events, stream: int) -> None:
        self._events, self._stream = events, stream
        self._batch: list[Any] = []
        self._pending: deque[tuple[int, list[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._batch) + sum(len(batch) for _, batch in self._pending)

    def add(self, arrays: Any) -> None:
        """Keep the arrays of a call that is about to be issued."""
        # In an open group the calls are not on the stream yet, so an event would precede them.
        if len(self._batch) >= _BATCH and not lib.pynccl_group_depth():
            event = self._events.record(self._stream)
            if event is not None:
                self._pending.append((event, self._batch))
                self._batch = []
                self._drop(all_done=False)
        self._batch.append(arrays)

    def clear(self) -> None:
        """Release all arrays: the stream has completed."""
        self._batch = []
        self._drop(all_done=True)

    def _drop(self, all_done: bool) -> None:
        while self._pending and (all_done or self._events.done(self._pending[0][0])):
            event, _ = self._pending.popleft()
            self._events.destroy(event)
