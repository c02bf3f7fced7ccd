"""Prepared calls and plans: checked and packed once, run by one C call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, overload

from pynccl._base.hints import meant
from pynccl._base.values import check_list, refuse_copy, shown
from pynccl._comm.core import INTERRUPTED, Core
from pynccl._comm.operations import Operations
from pynccl._comm.recording import Recording
from pynccl._comm.work import Work, issued_later, part
from pynccl._device import streams
from pynccl._library.binding import fastcall, lib
from pynccl._library.hinting import Hinting

P = ParamSpec("P")


class _Run(fastcall.Call, Hinting):
    """A callable that runs a recording."""

    __slots__ = ("_recording", "_stream", "result")
    __reduce__ = refuse_copy

    def __init__(self, recording: Recording, result: Any, stream: Any) -> None:
        super().__init__(recording.address, result, _finish)
        lib.pynccl_list_digest(recording.calls)
        self._recording = recording
        self._stream = stream
        self.result = result

    # C calls `_call_with` with the arguments.
    if TYPE_CHECKING:

        @overload
        def __call__(self, *, wait: Literal[True] = True) -> Any: ...
        @overload
        def __call__(self, *, wait: Literal[False]) -> Work[Any]: ...
        def __call__(self, *, wait: bool = True) -> Any: ...

    def _call_with(self, *args: object, wait: object = True, **others: object) -> Any:
        """Run with arguments: the C call path takes none."""
        if args or others:
            given = repr(args[0]) if args else next(iter(others))
            raise TypeError(f"{self!r} got the argument {given}; expected none but wait")
        return self._run_later() if issued_later(wait, *self._recording.cores()) else self()

    def _run_later(self) -> Work[Any]:
        """Run without waiting."""
        recording, uses = self._recording, self._recording.streams()
        for core in recording.cores():
            on = [stream for used, stream in uses if used is core]
            core.outside_captures("wait=False", on)
            core.keep_on(on, (self,))
        answer = None
        try:
            answer = lib.pynccl_list_run(recording.calls, 0)
            recording.finish(answer, later=True)
        except BaseException:
            if answer is None:
                recording.let_go()
            raise
        return Work(recording.name(), [part(core, stream) for core, stream in uses], self.result)

    @property
    def stream(self) -> Any:
        """The stream argument; assigning another stream moves the calls to it.

        Assigning anything but a stream raises TypeError; assigning during a run in another thread raises
        NcclInvalidUsage.
        """
        return self._stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        if stream is None:
            raise TypeError("stream is None; expected a stream: prepare again to use the current stream")
        self._recording.set_stream(streams.handle_of(stream, optional=False))
        self._stream = stream

    def __len__(self) -> int:
        return int(self._recording.calls.count)


def _finish(result: int, run: _Run) -> None:
    if result == INTERRUPTED:
        run._recording.let_go()
    else:
        run._recording.finish(result)


class Prepared(_Run):
    """A call whose arguments were checked once: each `op()` runs the call and returns the result.

    The object keeps its arrays alive. `stream=None` means the stream that was current at preparation. A run
    allocates nothing and queries nothing, so a CUDA graph can capture it. Inside `group()` it joins the
    group. A run raises the NcclError that the operation itself would raise.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<pynccl.Prepared {self._recording.name()}>"


class Plan(_Run):
    """Prepared calls and other plans that run as one group: `plan()` returns their results.

    The plan copies the calls: a later change of a prepared call's stream does not change the plan. An
    argument that is neither raises TypeError; a run raises the NcclError of the call that failed.
    """

    __slots__ = ()

    def __init__(self, calls: Iterable[Prepared | Plan]) -> None:
        expected = "a list of prepared calls and plans"
        if isinstance(calls, _Run):
            raise TypeError(f"calls is {shown(calls)}; expected {expected}")
        recording = Recording()
        recording.calls.grouped = 1
        results = []
        for index, call in enumerate(check_list(calls, "calls", expected)):
            if not isinstance(call, _Run):
                raise TypeError(f"calls[{index}] is {shown(call)}; expected a Prepared or a Plan")
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
        recording = Recording()
        self._core.release_waited()
        opened = recording.begin(nested=True)
        assert opened is not None
        try:
            result = method(self._operations, *args, **kwargs)
        finally:
            fastcall.end(False, opened, recording.kept)
        recording.kept.append(self._operations)
        recording.calls.grouped = recording.calls.count != 1
        return Prepared(recording, result, kwargs.get("stream"))

    prepare.__name__ = prepare.__qualname__ = method.__name__
    prepare.__doc__ = (
        f"Return Communicator.{method.__name__} as a callable with these arguments.\n\n"
        "Raises TypeError or ValueError for wrong arguments."
    )
    return prepare


class Prepare(Hinting):
    """A communicator's operations, prepared instead of run; each takes the operation's own arguments.

    A barrier cannot be prepared.
    """

    def __init__(self, operations: Operations, core: Core) -> None:
        self._operations, self._core = operations, core

    # For type checkers every name would exist.
    if not TYPE_CHECKING:

        def __explain__(self, name: str) -> None:
            if hasattr(Operations, name):
                raise AttributeError(f"comm.prepare has no {name}: expected an operation on arrays")
            super().__explain__(name)

        def __call__(self, operation: Any = None, *_: object, **__: object) -> Any:
            name = operation if isinstance(operation, str) else getattr(operation, "__name__", "")
            ours = name if hasattr(Prepare, name) else meant(Prepare, name) or "all_reduce"
            raise TypeError(f"comm.prepare is no function; expected comm.prepare.{ours}(...)")

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
    put_signal = _preparing(Operations.put_signal)
    signal = _preparing(Operations.signal)
    wait_signal = _preparing(Operations.wait_signal)
