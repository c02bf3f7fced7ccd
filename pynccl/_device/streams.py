"""From a stream argument to a handle, and waits for a stream that Ctrl-C can interrupt."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pynccl import capi
from pynccl._base.timeouts import check_timeout, rounded
from pynccl._base.values import is_int, refuse_copy, shown
from pynccl._device.blocking import another_thread_may_call
from pynccl._device.devices import device_to_use, on_device
from pynccl._errors import NcclError, NcclInvalidArgument, NcclInvalidUsage, NcclTimeoutError
from pynccl._library import cuda, loader
from pynccl._library.binding import fastcall, lib
from pynccl._library.hinting import Hinting
from pynccl._library.status import IN_PROGRESS, check
from pynccl._trace.recorder import dump_because

if TYPE_CHECKING:
    from typing_extensions import Self

# Milliseconds of one slice of a wait: Python handles signals between slices, and the CPU library uses the
# waiting thread within them.
_SLICE_MS = lib.PYNCCL_SLICE_MS
_LONGEST_SLEEP = 0.001
# The default streams are 0, cudaStreamLegacy (1) and cudaStreamPerThread (2).
_LAST_DEFAULT = 2


class User(Protocol):
    """What issues calls on streams and wants to know when the program has waited for them."""

    told: bool
    """Whether the program knows of a failure, or has aborted."""

    def newest_call(self, stream: int) -> int:
        """Return the number of the newest call on a stream that nobody has waited for; 0 if there is none."""

    def waited_for(self, stream: int, number: int) -> None:
        """Learn that the program has waited for a stream's calls up to this number."""

    def keep(self, stream: int, arrays: Iterable[Any]) -> None:
        """Keep objects alive until somebody has waited for a stream's calls."""

    def failed_on(self, stream: int) -> NcclError | None:
        """Learn that calls on a stream may have failed; return their error."""

    def failure_on(self, stream: int) -> NcclError | None:
        """Return the error of failed calls on a stream; None if none has failed."""


# A dict, since another thread may add one while this one makes a tuple of it.
_users: dict[weakref.ref[User], None] = {}

# Calls on other streams that a stream waits for by events.
_awaited: dict[int, tuple[_Calls, ...]] = {}


def add_user(user: User) -> None:
    """Tell an object of the program's waits for streams, as long as it lives."""
    _users[weakref.ref(user, lambda dead: _users.pop(dead, None))] = None


class _Calls(NamedTuple):
    """The calls of a user on a stream up to a number, for which nobody has waited."""

    user: weakref.ref[User]
    stream: int
    number: int


def _calls_on(stream: int) -> list[_Calls]:
    """Return the calls on a stream, and those on other streams that it waits for by events."""
    # The calls of an open group are not on the stream yet.
    if lib.pynccl_group_depth():
        return [*_awaited.get(stream, ())]
    users = ((ref, user) for ref in tuple(_users) if (user := ref()) is not None)
    own = [_Calls(ref, stream, number) for ref, user in users if (number := user.newest_call(stream))]
    return [*own, *_awaited.get(stream, ())]


def _outstanding(calls: Sequence[_Calls]) -> tuple[_Calls, ...]:
    """Return the newest calls of each user on each stream, unless somebody has waited for them since."""
    newest = {(one.user, one.stream): one for one in sorted(calls, key=lambda one: one.number)}
    users = ((one, one.user()) for one in newest.values())
    return tuple(one for one, user in users if user is not None and user.newest_call(one.stream))


def _complete(ask: Callable[[], bool], calls: Sequence[_Calls]) -> bool:
    """Return the answer to whether calls have completed; raise the error of a failed communicator."""
    users = [(user, stream, number) for ref, stream, number in calls if (user := ref()) is not None]
    try:
        done = ask()
    except NcclError as error:
        found = [user.failed_on(stream) for user, stream, _ in users]
        raise next(filter(None, found), error) from error.__cause__
    if done:
        for user, stream, _ in users:
            if failed := user.failure_on(stream):
                raise failed
        for user, stream, number in users:
            user.waited_for(stream, number)
    return done


def handle_of(stream: Any, *, optional: bool = True) -> int:
    """Return the handle of a stream argument: an int, or an object with a stream attribute.

    A message says whether the caller also takes None.
    """
    handle: Any = stream
    if not isinstance(stream, int) or not is_int(stream):
        handle = _shown_handle(stream)
    if not is_int(handle) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        none = "None, " if optional else ""
        raise TypeError(
            f"stream is {shown(stream)}; expected {none}a stream handle as an int, 0 or more, or an object "
            "with __cuda_stream__, ptr or cuda_stream"
        )
    return handle


def _shown_handle(stream: Any) -> Any:
    # Faster than the protocol.
    if isinstance(stream, Stream):
        return stream.handle
    if isinstance(stream, type):
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # (version, handle): a method now, an attribute in the first version of the protocol.
        version, handle = protocol() if callable(protocol) else protocol
        return handle if version == 0 else None
    return getattr(stream, "ptr", getattr(stream, "cuda_stream", None))


def cpu_stream() -> int:
    """Create a stream of the CPU library."""
    return capi.pyncclCpuStreamCreateWithFlags(cuda.STREAM_NON_BLOCKING)


def is_destroyed(stream: int, on_cpu: bool) -> bool:
    """Tell whether the library does not know a stream any more."""
    if not on_cpu:
        return not cuda.is_stream(stream)
    # The library asks a communicator for its default streams.
    if stream <= _LAST_DEFAULT:
        return False
    try:
        capi.pyncclCpuStreamQuery(0, stream)
    except NcclError as error:
        # Else it is the error of a call on the stream.
        return isinstance(error, NcclInvalidArgument)
    return False


def wait_cpu(
    comm: Callable[[], int], stream: int, deadline: float | None, what: str = "pyncclCpuStreamSynchronize"
) -> bool:
    """Wait for a stream of the CPU library; return False after the deadline. Errors name `what` waits."""
    wait = lib.pyncclCpuStreamAwait if deadline is None else lib.pyncclCpuStreamSynchronize
    while True:
        left = _SLICE_MS if deadline is None else (deadline - time.monotonic()) * 1000
        slice_ms = max(0, min(_SLICE_MS, int(left) + 1))
        handle = comm()
        result = wait(handle, stream, slice_ms)
        check(result, what, handle)
        if result != IN_PROGRESS:
            return True
        if left <= 0:
            return False
        if another_thread_may_call():
            wait = lib.pyncclCpuStreamSynchronize


def wait_cuda(comm: Callable[[], int], stream: int, deadline: float | None) -> bool:
    """Wait for a CUDA stream or an error of the communicator; return False after the deadline."""

    def done() -> bool:
        if cuda.stream_query(stream):
            return True
        raise_async_error(comm())
        return False

    return poll(done, deadline)


def wait_ready(comm: Callable[[], int], deadline: float | None) -> bool:
    """Wait until a non-blocking communicator is ready; return False after the deadline."""
    return poll(lambda: raise_async_error(comm()) != IN_PROGRESS, deadline)


def poll(done: Callable[[], bool], deadline: float | None) -> bool:
    """Ask until the answer is True; return False after the deadline."""
    pause = 0.0
    while not done():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(_LONGEST_SLEEP, 1.5 * pause + 1e-6)
    return True


def raise_async_error(comm: int) -> int:
    """Raise a communicator's asynchronous error; return 0, or 7 while it is still busy."""
    state = capi.ncclCommGetAsyncError(comm)
    check(state, "ncclCommGetAsyncError", comm)
    return state


# What creates a stream or an event, and what ends it.
_Functions = tuple[Callable[[], int], Callable[[int], Any]]


class _Owned(Hinting):
    """A stream or event of the current CUDA device or of the CPU library."""

    _handle = 0  # set for __del__, in case the creation fails

    def __init__(self, on_cpu: _Functions, on_cuda: _Functions) -> None:
        self._pid = os.getpid()
        self._cpu = loader.backend() == "cpu"
        create, self._end = on_cpu if self._cpu else on_cuda
        with on_device(device_to_use(None)):
            self._handle = create()

    def _live(self) -> int:
        if not self._handle:
            raise ValueError(
                f"this {type(self).__name__.lower()} was destroyed, by destroy() or at the end of its `with` "
                "block; expected a live one"
            )
        return self._handle

    def destroy(self) -> None:
        """Destroy it; no effect if repeated, or in a forked child, since the parent owns it."""
        handle, self._handle = self._handle, 0
        if handle and self._pid == os.getpid():
            self._end(handle)

    @fastcall.finalizer
    def __del__(self) -> None:
        # At the interpreter's exit the driver may be gone.
        # Nor is there a contextlib.suppress any more.
        try:  # noqa: SIM105
            self.destroy()
        except Exception:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    __reduce__ = refuse_copy

    def __repr__(self) -> str:
        return f"<pynccl.{type(self).__name__} {self._handle:#x}>"


class Stream(_Owned):
    """A stream of the current device or of the CPU library; the work of a stream runs in order.

    The end of its `with` block waits for its work, unless an exception ends the block, and destroys it. An
    exception in that wait, such as Ctrl-C, leaves it alive until somebody has waited for its calls. Inside
    `pynccl.group()`, which issues its calls later, the end of the block raises NcclInvalidUsage. `destroy`
    does not wait, as in CUDA: the work goes on, and its results come later. A destroyed stream raises
    ValueError. `with` does not make it the current stream.
    """

    # Python's error for an argument names the class that defines this method.
    def __init__(self) -> None:
        super().__init__((cpu_stream, capi.pyncclCpuStreamDestroy), (cuda.stream_create, cuda.stream_destroy))

    @property
    def handle(self) -> int:
        """The cudaStream_t as an int."""
        return self._live()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def query(self) -> bool:
        """Tell whether all work of the stream has completed.

        Raises the error of a communicator whose calls on the stream have failed.
        """
        return self._complete(self._query)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all work of the stream has completed; raise NcclTimeoutError after `timeout` seconds.

        Raises the error of a communicator whose calls on the stream have failed.
        """

        def wait(deadline: float | None) -> bool:
            return self._complete(lambda: self._wait(deadline))

        _wait_for(wait, timeout, "Stream.synchronize")

    def _complete(self, ask: Callable[[], bool]) -> bool:
        awaited = _awaited.get(self.handle)
        done = _complete(ask, _calls_on(self.handle))
        # Another thread may have added an event.
        if done and awaited is not None and _awaited.get(self.handle) is awaited:
            del _awaited[self.handle]
        return done

    def _query(self) -> bool:
        if self._cpu:
            return capi.pyncclCpuStreamQuery(0, self.handle) != IN_PROGRESS
        return cuda.stream_query(self.handle)

    def _wait(self, deadline: float | None) -> bool:
        if self._cpu:
            return wait_cpu(lambda: 0, self.handle, deadline)
        return poll(self._query, deadline)

    def wait_event(self, event: Event) -> None:
        """Make the later work of this stream wait for an event."""
        if not isinstance(event, Event):
            raise TypeError(f"event is {shown(event)}; expected a pynccl.Event")
        if self._cpu:
            capi.pyncclCpuStreamWaitEvent(0, self.handle, event.handle)
        else:
            cuda.stream_wait_event(self.handle, event.handle)
        _awaited[self.handle] = _outstanding([*_awaited.get(self.handle, ()), *event.calls])

    def destroy(self) -> None:
        """Destroy it without a wait; no effect if repeated, or in a forked child: the parent owns it."""
        _awaited.pop(self._handle, None)
        super().destroy()

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self._handle and self._pid == os.getpid():
            self._finish()
        self.destroy()

    def _finish(self) -> None:
        """Wait for the work; raise an error of which the program has not been told."""
        if lib.pynccl_group_depth():
            self.destroy()
            raise NcclInvalidUsage(
                "the `with` block of a stream ends inside pynccl.group(), which issues its calls later; "
                "expected group() inside the block"
            )
        users = [user for ref, _, _ in _calls_on(self._handle) if (user := ref()) is not None]
        untold = any(not user.told for user in users)
        try:
            self.synchronize()
        except NcclError:
            if untold:
                self.destroy()
                raise
        except BaseException:
            # Such as Ctrl-C: the calls go on.
            for user in users:
                user.keep(self._handle, [self])
            raise


class Event(_Owned):
    """A point in the work of a stream that other streams and the host can wait for."""

    # The calls before the last record.
    calls: tuple[_Calls, ...] = ()

    def __init__(self) -> None:
        on_cpu = capi.pyncclCpuEventCreate, capi.pyncclCpuEventDestroy
        super().__init__(on_cpu, (cuda.event_create, cuda.event_destroy))

    @property
    def handle(self) -> int:
        """The cudaEvent_t as an int."""
        return self._live()

    def record(self, stream: Any) -> None:
        """Record the event after the present work of a stream."""
        handle = handle_of(stream, optional=False)
        calls = tuple(_calls_on(handle))
        if self._cpu:
            capi.pyncclCpuEventRecord(0, self.handle, handle)
        else:
            cuda.event_record(self.handle, handle)
        self.calls = calls

    def query(self) -> bool:
        """Tell whether the event has completed; True if it was never recorded.

        Raises the error of a communicator whose calls before the record have failed.
        """
        return _complete(self._query, self.calls)

    def _query(self) -> bool:
        if self._cpu:
            return capi.pyncclCpuEventQuery(self.handle) != IN_PROGRESS
        return cuda.event_query(self.handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the event has completed; raise NcclTimeoutError after `timeout` seconds.

        Raises the error of a communicator whose calls before the record have failed.
        """
        _wait_for(lambda deadline: poll(self.query, deadline), timeout, "Event.synchronize")


def _wait_for(wait: Callable[[float | None], bool], timeout: float | None, what: str) -> None:
    timeout = check_timeout(timeout, zero=True)
    deadline = None if timeout is None else time.monotonic() + timeout
    if not wait(deadline):
        text = f"{what} took longer than {rounded(timeout)} s"
        text += "; Communicator.synchronize names the ranks that are late"
        dump_because("timeout", text)
        raise NcclTimeoutError(text, function=what)
