"""Calls that were issued without waiting for their results."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from pynccl._base.timeouts import check_timeout
from pynccl._base.values import refuse_copy, shown
from pynccl._comm.core import Core
from pynccl._comm.in_flight import Mark
from pynccl._device import streams
from pynccl._errors import NcclError, NcclInvalidUsage, NcclTimeoutError, RankFailedError
from pynccl._library.binding import lib
from pynccl._library.hinting import Hinting
from pynccl._library.status import IN_PROGRESS, check

T_co = TypeVar("T_co", covariant=True)

# Milliseconds between two looks for the watchdog's verdict in a wait.
_SLICE_MS = lib.PYNCCL_SLICE_MS
# Seconds between two looks for the cause of an error.
_PAUSE = 0.001


class Part(NamedTuple):
    """The calls of a Work on one communicator and stream."""

    core: Core
    stream: int
    mark: Mark
    # The position after their records in the trace.
    position: int


def part(core: Core, stream: int) -> Part:
    """Return the calls that were issued on a stream up to now."""
    return Part(core, stream, core.mark(stream), lib.pynccl_comm_position(core.c))


def issued_later(wait: object, *cores: Core) -> bool:
    """Check the argument `wait` of a call on communicators; tell whether the call returns a Work."""
    if not isinstance(wait, bool):
        raise TypeError(f"wait is {shown(wait)}; expected True or False")
    if wait:
        return False
    if any(core.streamless and not core.waits for core in cores):
        raise NcclInvalidUsage("wait=False without a CUDA driver: expected one, or the CPU library")
    if lib.pynccl_group_depth():
        raise NcclInvalidUsage(
            "wait=False inside pynccl.group() or prepare: expected it outside; a Plan can be called with "
            "wait=False"
        )
    return True


class Work(Hinting, Generic[T_co]):
    """A call that runs in the background, the result of an operation with `wait=False`.

    `wait` blocks, `await` lets other coroutines run; both return what the operation returns. The arrays must
    not be changed before that. They stay alive until the call has ended, also if the Work is dropped.
    """

    __slots__ = ("_core", "_error", "_failed", "_name", "_parts", "_result")

    __reduce__ = refuse_copy

    def __init__(self, name: str, parts: Sequence[Part], result: T_co) -> None:
        self._name, self._parts, self._result = name, tuple(parts), result
        self._error: NcclError | None = None
        # The communicator of the error.
        self._core: Core | None = None
        # When an error was seen for which the verdict may still come, and the error.
        self._failed: tuple[float, NcclError] | None = None
        # The library starts now, instead of leaving the work to a caller that waits.
        self.done()

    def done(self) -> bool:
        """Tell whether the call has ended, with or without an error; never blocks."""
        # Another thread may ask meanwhile.
        while parts := self._parts:
            last = parts[-1]
            try:
                if not _is_complete(last, self._name):
                    return False
            except NcclError as error:
                return self._has_failed(last, error)
            lib.pynccl_comm_reached(last.core.c, last.stream, last.position)
            last.core.drop_completed(last.stream)
            self._parts = parts[:-1]
        return True

    def exception(self) -> NcclError | None:
        """Return the error with which the call has ended; None if it succeeded or has not ended yet."""
        self.done()
        self._tell()
        return self._error

    def _tell(self) -> None:
        """Note that the program gets the error, if there is one."""
        if self._core is not None:
            self._core.told = True

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait until the call has ended, and return its result.

        Raises NcclTimeoutError after `timeout` seconds: the call then stays outstanding, and the communicator
        stays usable. Without `timeout` the communicator's own time-out holds. Its expiry is final, whatever
        `timeout` says: the watchdog ends a call that is late by it. Raises the errors of the operation.
        """
        timeout = check_timeout(timeout, zero=True)
        if parts := self._parts:
            self._wait(parts[0].core, timeout)
        if self._error is not None:
            self._tell()
            raise self._error
        return self._result

    def _wait(self, core: Core, timeout: float | None) -> None:
        begin = time.perf_counter()
        seconds, deadline = core.deadline(timeout)
        try:
            while not self.done():
                left = _SLICE_MS if deadline is None else int((deadline - time.monotonic()) * 1000) + 1
                if left <= 0:
                    core.late(self._name, seconds, "", timeout is None, self.done)
                    return
                if self._failed:
                    time.sleep(_PAUSE)
                elif parts := self._parts:
                    parts[-1].mark.wait(min(left, _SLICE_MS))
        finally:
            core.waited[self._name] += time.perf_counter() - begin

    def __await__(self) -> Generator[Any, None, T_co]:
        from pynccl._comm import awaiting

        while not self.done():
            parts = self._parts
            last = None if self._failed or not parts else parts[-1].mark
            yield from awaiting.pause(last).__await__()
        return self.wait()

    def _has_failed(self, failed: Part, error: NcclError) -> bool:
        """Record the error; False while the watchdog may still find its cause."""
        core = failed.core
        if core.handle and core.watch.verdict() is None:
            self._failed = since, first = self._failed or (time.monotonic(), error)
            if core.watch.may_explain(first, since):
                return False
        found = core.watch.cause(error, 0)
        found.__cause__ = error.__cause__
        # In the trace, a call that waits for a missing rank stays outstanding.
        if not isinstance(found, RankFailedError | NcclTimeoutError):
            lib.pynccl_comm_failed(core.c, failed.stream, found.result or 1)
        self._core, self._error, self._parts = core, found, ()
        return True

    def __repr__(self) -> str:
        state = "running" if not self.done() else "done" if self._error is None else "failed"
        return f"<pynccl.Work {self._name}, {state}>"


def _is_complete(part: Part, name: str) -> bool:
    """Tell whether a part has completed; raise the error with which it has ended."""
    core, result = part.core, part.mark.result()
    if result == IN_PROGRESS:
        streams.raise_async_error(core.live())
        return False
    if result and not core.handle:
        raise core.incomplete(name)
    if not core.waits:
        # The end of an aborted kernel looks like its success.
        core.watch.raise_verdict()
        if core.aborted:
            core.open()
    check(result, name, core.handle)
    return True
