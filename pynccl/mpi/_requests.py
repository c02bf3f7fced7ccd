"""Persistent requests: calls that `*_init` prepares, and that every `Start` runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from pynccl._arrays.buffers import kind_of
from pynccl._base.values import check_list, shown
from pynccl._comm.communicator import Communicator
from pynccl._comm.groups import Group
from pynccl._comm.prepared import Plan, Prepared
from pynccl._device.streams import Event, Stream
from pynccl._errors import NcclInvalidUsage, NotSupportedError
from pynccl._library import loader
from pynccl.mpi._messages import is_device

Run = Prepared | Plan


class Lane:
    """What a communicator has under way: the requests that were started, and the puts into its windows."""

    def __init__(self, nccl: Communicator) -> None:
        self.nccl = nccl
        # Messages that were started one after the other. NCCL runs the calls of a communicator in order, so
        # that a send would wait forever before a receive: they are issued as one group.
        self.messages: list[Prequest] = []
        # How many puts this rank has made into each rank's windows since the last fence of any of them.
        self.puts = [0] * nccl.size
        self._own: Stream | None = None
        self._waiter: Stream | None = None
        # The last request on each stream.
        self._last: dict[int, Event] = {}

    def stream_for(self, specs: Sequence[Any]) -> int:
        """Return the stream for a request with these arguments."""
        if loader.backend() == "cpu":
            if self._own is None:
                self._own = Stream()
            return self._own.handle
        datas = [spec[0] if isinstance(spec, list | tuple) and spec else spec for spec in specs]
        arrays = [data for data in datas if is_device(data)]
        # Without device arrays the request is MPI's.
        return kind_of(arrays[0]).current(arrays[0]) if arrays else 0

    def issue(self) -> None:
        """Issue the messages that were started; no effect without any."""
        if self.messages:
            with self.joining():
                pass

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Issue the messages that were started in one group with the calls of the body."""
        messages, self.messages = self.messages, []
        for request in messages:
            request.run_before()
        with Group():
            for request in messages:
                request.run_message()
            yield
        for request in messages:
            request.run_after()

    def record(self, event: Event, stream: int) -> None:
        """Record the end of a request on its stream."""
        event.record(stream)
        self._last[stream] = event

    def wait(self, event: Event, stream: int) -> None:
        """Wait for the end of a request, at most for the communicator's time-out."""
        if self._last.get(stream) is event:
            self.nccl.synchronize(stream)
            return
        # Later requests on the stream may wait for what this rank does only after this wait.
        if self._waiter is None:
            self._waiter = Stream()
        self._waiter.wait_event(event)
        self.nccl.synchronize(self._waiter)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the communicator's asynchronous error."""
        error = self.nccl.async_error()
        if error is not None:
            raise error


class Steps:
    """A communicator's operations, prepared one after the other; those of a group as one plan."""

    def __init__(self, nccl: Communicator, stream: int) -> None:
        self.rank, self.runs = nccl.rank, list[Run]()
        self._prepare, self._stream = nccl.prepare, stream
        self._group: list[Prepared] | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        prepare = getattr(self._prepare, name)

        def step(*args: Any, **kwargs: Any) -> None:
            call = prepare(*args, **kwargs, stream=self._stream)
            (self.runs if self._group is None else self._group).append(call)

        return step

    @contextmanager
    def group(self) -> Iterator[None]:
        """Make the calls of the body one step."""
        calls: list[Prepared] = []
        self._group = calls
        try:
            yield
        finally:
            self._group = None
        if calls:
            self.runs.append(Plan(calls))


class HostCalls:
    """MPI's communicator, whose call is prepared instead of made, by its method `prepares`."""

    def __init__(self, mpi: MPI.Comm, prepares: Callable[..., MPI.Prequest], *info: MPI.Info) -> None:
        self._mpi, self._prepares, self._info = mpi, prepares, info
        self.request: MPI.Prequest | None = None

    def __getattr__(self, name: str) -> Any:
        if name[:1].islower():
            return getattr(self._mpi, name)

        def init(*args: Any) -> None:
            # Recv_init has no status.
            given = args[:3] if name == "Recv" else args
            self.request = self._prepares(*given, *self._info)

        return init


class Prequest:
    """A persistent request on device arrays, as the `*_init` methods of `Comm` return it.

    On the CPU library `Start` returns at once, and `Wait` waits for the result. On a GPU the work is on the
    stream that was current at `*_init`, and `Wait` makes the host wait for it. `Startall`, `Waitall` and
    `Testall` also accept requests of mpi4py among these.

    Every operation raises NcclInvalidUsage once the request is freed, NotSupportedError for a status,
    TypeError for what is no request, and the errors of the call as `Communicator.all_reduce` does,
    RankFailedError or NcclTimeoutError for example.
    """

    def __init__(self, lane: Lane, runs: Sequence[Run], stream: int) -> None:
        self._lane, self._runs, self._stream = lane, list(runs), stream
        # Which of the runs is a send or receive; the others copy. None for a collective call.
        self._message: int | None = None
        self._event: Event | None = Event()
        self._active = False

    def __repr__(self) -> str:
        state = "freed" if self._event is None else "active" if self._active else "inactive"
        return f"<pynccl.mpi.Prequest of {len(self._runs)} calls, {state}>"

    def _live(self) -> Event:
        if self._event is None:
            raise NcclInvalidUsage("the request cannot be used: it was freed")
        return self._event

    def Start(self) -> None:
        """Start the call with the present contents of its buffers; NcclInvalidUsage while it is active."""
        event = self._live()
        if self._active:
            raise NcclInvalidUsage("the request cannot be started: it is active; expected Wait before Start")
        if self._message is not None:
            self._lane.messages.append(self)
        else:
            self._lane.issue()
            for run in self._runs:
                run()
            self._lane.record(event, self._stream)
        self._active = True

    def become_message(self, *, last: bool) -> None:
        """Say that the last or the first of the calls sends or receives."""
        self._message = max(0, len(self._runs) - 1) if last else 0

    def run_before(self) -> None:
        """Copy what a message sends."""
        for run in self._runs[: self._message]:
            run()

    def run_message(self) -> None:
        """Send or receive; a message to MPI.PROC_NULL has no calls."""
        for run in self._runs[self._message : self._next()]:
            run()

    def run_after(self) -> None:
        """Copy what a message has received, and record its end."""
        for run in self._runs[self._next() :]:
            run()
        self._lane.record(self._live(), self._stream)

    def _next(self) -> int:
        assert self._message is not None
        return self._message + 1

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait for the call that was started; return True, at once if the request is inactive."""
        event = self._live()
        require_no_status(status)
        if self._active:
            self._lane.issue()
            self._lane.wait(event, self._stream)
            self._active = False
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Tell whether the call that was started is complete; True if the request is inactive."""
        event = self._live()
        require_no_status(status)
        if self._active:
            self._lane.issue()
            if not event.query():
                self._lane.raise_error()
                return False
        return self.Wait()

    def Free(self) -> None:
        """Release the buffers; a request that is active completes first."""
        self.Wait()
        self._runs.clear()
        event, self._event = self._event, None
        assert event is not None
        event.destroy()

    free = Free

    def Cancel(self) -> None:
        """Raise NotSupportedError: NCCL has no call to cancel one call."""
        raise NotSupportedError("Cancel of a request on device arrays: NCCL cannot cancel a call")

    @classmethod
    def Startall(cls, requests: Sequence[Prequest | MPI.Prequest]) -> None:
        """Start all requests."""
        for request in _checked(requests, Prequest | MPI.Prequest):
            request.Start()

    @classmethod
    def Waitall(cls, requests: Sequence[Prequest | MPI.Request], statuses: Any = None) -> bool:
        """Wait for all requests; return True."""
        require_no_status(statuses)
        for request in _checked(requests):
            request.Wait()
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Prequest | MPI.Request], statuses: Any = None) -> bool:
        """Tell whether all requests are complete."""
        require_no_status(statuses)
        # Every request makes progress by its own test.
        done = [request.Test() for request in _checked(requests)]
        return all(done)


def _checked(requests: Any, kind: Any = Prequest | MPI.Request) -> list[Any]:
    found = check_list(requests, "requests", "a list of requests")
    for index, request in enumerate(found):
        if not isinstance(request, kind):
            raise TypeError(f"requests[{index}] is {shown(request)}; expected a request")
    return found


def require_no_status(status: Any) -> None:
    """Raise for a status, which NCCL could not fill."""
    if status is not None:
        raise NotSupportedError("status is given; expected None, since NCCL reports no status")
