"""Calls that were checked and packed once, and run by one call of C."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec

from pynccl._comm.core import INTERRUPTED
from pynccl._comm.operations import Operations
from pynccl._comm.recording import Recording
from pynccl._device import streams
from pynccl._library.binding import fastcall, lib

P = ParamSpec("P")


class _Run(fastcall.Call):
    """What runs a recording."""

    __slots__ = ("_recording", "_stream", "result")

    def __init__(self, recording: Recording, result: Any, stream: Any) -> None:
        super().__init__(recording.address, result, _finish)
        lib.pynccl_list_digest(recording.calls)
        self._recording = recording
        self._stream = stream
        self.result = result

    @property
    def stream(self) -> Any:
        """The stream as it was given; assigning another one moves the calls there."""
        return self._stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        if stream is None:
            raise TypeError("stream is None; expected a stream: prepare the call again for the current one")
        self._recording.set_stream(streams.handle_of(stream))
        self._stream = stream

    def __len__(self) -> int:
        return int(self._recording.calls.count)


def _finish(run: _Run, result: int) -> None:
    if result == INTERRUPTED:
        run._recording.let_go()
    else:
        run._recording.finish(result)


class Prepared(_Run):
    """A call whose arguments were checked once: `op()` runs it, as often as needed, and returns the result.

    It holds its buffers, and `stream=None` means the stream that was current when it was prepared. Running it
    allocates and asks nothing, so it may be captured in a CUDA graph. Inside `group()` it joins the group.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<pynccl.Prepared {self._recording.name()}>"


class Plan(_Run):
    """Prepared calls, and other plans, run as one group by one call: `plan()` returns their results.

    The calls are as they are now: changing a prepared call's stream later does not change the plan.
    """

    __slots__ = ()

    def __init__(self, calls: Iterable[Prepared | Plan]) -> None:
        if isinstance(calls, _Run):
            raise TypeError(f"calls is {calls!r}; expected a list of them")
        recording = Recording()
        recording.calls.grouped = 1
        results = []
        for index, call in enumerate(calls):
            if not isinstance(call, _Run):
                raise TypeError(f"calls[{index}] is {call!r}; expected what comm.prepare returned, or a Plan")
            if lib.pynccl_list_extend(recording.calls, call._recording.calls):
                raise MemoryError
            recording.kept.append(call)
            results.append(call.result)
        super().__init__(recording, tuple(results), None)

    def __repr__(self) -> str:
        return f"<pynccl.Plan of {len(self)} calls>"


def _preparing(
    method: Callable[Concatenate[Operations, P], Any],
) -> Callable[Concatenate[Prepare, P], Prepared]:
    def prepare(self: Prepare, /, *args: P.args, **kwargs: P.kwargs) -> Prepared:
        with Recording() as recording:
            result = method(self._operations, *args, **kwargs)
        recording.kept.append(self._operations)
        recording.calls.grouped = recording.calls.count != 1
        return Prepared(recording, result, kwargs.get("stream"))

    prepare.__name__ = prepare.__qualname__ = method.__name__
    prepare.__doc__ = f"Prepare what Communicator.{method.__name__} does, and return it as a callable."
    return prepare


class Prepare:
    """A communicator's operations, prepared instead of run; the arguments are theirs."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    all_reduce = _preparing(Operations.all_reduce)
    reduce = _preparing(Operations.reduce)
    broadcast = _preparing(Operations.broadcast)
    all_gather = _preparing(Operations.all_gather)
    reduce_scatter = _preparing(Operations.reduce_scatter)
    all_to_all = _preparing(Operations.all_to_all)
    gather = _preparing(Operations.gather)
    scatter = _preparing(Operations.scatter)
    all_gather_v = _preparing(Operations.all_gather_v)
    reduce_scatter_v = _preparing(Operations.reduce_scatter_v)
    gather_v = _preparing(Operations.gather_v)
    scatter_v = _preparing(Operations.scatter_v)
    all_to_all_v = _preparing(Operations.all_to_all_v)
    send = _preparing(Operations.send)
    recv = _preparing(Operations.recv)
    send_recv = _preparing(Operations.send_recv)
