"""The core of a communicator: its C struct, and the steps of every use: enter, leave, wait, settle, keep."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from pynccl import capi
from pynccl._arrays.buffers import ANYWHERE, HOST, held
from pynccl._base.timeouts import check_timeout, resolve_timeout
from pynccl._base.values import rank_list
from pynccl._comm import lifetime
from pynccl._comm.in_flight import CpuEvents, CudaEvents, InFlight, Mark
from pynccl._device import streams
from pynccl._device.blocking import LINGER, NoThreadError, Running, bounded
from pynccl._device.devices import on_device
from pynccl._errors import (
    NcclError,
    NcclInvalidArgument,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclTimeoutError,
    NcclUnhandledCudaError,
    RankFailedError,
)
from pynccl._library import cuda
from pynccl._library.binding import address_of, fastcall, ffi, lib
from pynccl._library.status import IN_PROGRESS, note_dropped
from pynccl._memory.owner import used_streams
from pynccl._memory.registration import Registrations
from pynccl._memory.window import Windows
from pynccl._trace import recorder
from pynccl._trace.callers import Place, called_from, caller, caller_line
from pynccl._watch import check_mode
from pynccl._watch.watchdog import Look, Watch, awaited_ranks

T = TypeVar("T")

# Results of the C call path that are not NCCL's.
RECORDED, WAITING, BUSY = lib.PYNCCL_RECORDED, lib.PYNCCL_WAITING, lib.PYNCCL_BUSY
CLOSED, OVERLAP, NO_MEMORY = lib.PYNCCL_CLOSED, lib.PYNCCL_OVERLAP, lib.PYNCCL_NO_MEMORY
NO_WINDOW, CAPTURED = lib.PYNCCL_NO_WINDOW, lib.PYNCCL_CAPTURED
STOPPED, TOO_LATE, INTERRUPTED = lib.PYNCCL_STOPPED, lib.PYNCCL_TOO_LATE, lib.PYNCCL_INTERRUPTED

# Seconds of a wait without a time-out after which a rank says which others it waits for: in a call that all
# ranks must make, and in any call of init_all.
LONG = 10.0
# Seconds between two attempts to enter a communicator that another thread uses.
_PAUSE = 0.01


log = logging.getLogger("pynccl")


class Interrupted(NamedTuple):
    """A call of all ranks that goes on after an exception, such as Ctrl-C, has ended this rank's wait."""

    what: str
    running: Running[Any]
    # The same call takes the result.
    same: Hashable

    def end(self) -> None:
        """Wait for the end of the call, and drop its result."""
        # An exception may have come before its start.
        self.running.start()
        self.running.wait()
        self.running.drop()


def _reserved(cores: Sequence[Core], call: Callable[[], T], place: Place) -> T:
    """Make a call that the program makes at this place; let no other thread in."""
    reserved = []
    try:
        for core in cores:
            if answer := lib.pynccl_reserve(core.c):
                core.refuse(answer)
            reserved.append(core)
        with called_from(place), on_device(None if cores[0].streamless else cores[0].device):
            return call()
    finally:
        for core in reserved:
            core.c.reserved = 0


def go_on(cores: Sequence[Core], call: Callable[[], object], what: str, *, announced: bool = True) -> None:
    """Make a thread go on with a call whose comparison was interrupted, or took too long.

    An earlier call that goes on comes first. The next call of each communicator waits for this one. No effect
    in such a thread. `announced`: the call has begun, and is not recorded or announced again.
    """
    if cores[0].is_reserved_here():
        return
    place, limited = caller(), cores[0].timeout is not None
    earlier = [core.interrupted for core in cores]

    def resume() -> None:
        for core in cores:
            lib.pynccl_check_resume(core.c, announced)
        try:
            call()
        finally:
            for core in cores:
                lib.pynccl_check_resume(core.c, 0)

    def make() -> None:
        for one in earlier:
            if one is not None:
                one.end()
        told = [core.told for core in cores]
        try:
            _reserved(cores, resume, place)
        except BaseException:
            # The program has not got this error.
            for core, before in zip(cores, told, strict=True):
                core.told = before
            raise

    running = Running(make, what, limited=limited)
    for core in cores:
        core.interrupted = Interrupted(what, running, None)
        core.usual.clear()
    try:
        for core in cores:
            core.leave(running, drop=True)
    except NoThreadError as error:
        # The next call drops what was announced.
        log.warning("%s was interrupted; other ranks may wait for it, since %s", what, error)
        for core, one in zip(cores, earlier, strict=True):
            core.interrupted = one


def refuse_recording(what: str) -> None:
    """Raise inside group() or prepare."""
    if lib.pynccl_is_recording():
        raise NcclInvalidUsage(f"{what} inside pynccl.group() or prepare: expected it outside", function=what)


# When this process printed its last hints. Of many ranks that wait, this many say so within LONG seconds.
_MOST_HINTS = 4
_hints: deque[float] = deque(maxlen=_MOST_HINTS)


def _hint(text: str) -> bool:
    now = time.monotonic()
    few = len(_hints) < _MOST_HINTS or _hints[0] < now - LONG
    if text and few:
        _hints.append(now)
        print(f"pynccl: {text}", file=sys.stderr, flush=True)
    return bool(text)


def hinting(look: Look, text: Callable[[], str]) -> Look:
    """Return a look that also prints a text, once, after LONG seconds."""
    since: float | None = time.monotonic()

    def both() -> None:
        nonlocal since
        look()
        if since is not None and time.monotonic() > since + LONG:
            since = None
            _hint(text())

    return both


class Core:
    """One rank of a communicator, as the modules of this package see it.

    `handle` is the ncclComm_t, or 0 once closed. `c` is the pynccl_comm, the struct of the C call path.
    """

    def __init__(self, timeout: float | None) -> None:
        # Set first: __del__ reads them even if the creation failed.
        self.handle = 0
        self.owned = False
        self.why = "was never created"
        # The line of the program that made it.
        self.line = caller_line()
        self.timeout = resolve_timeout(timeout)
        # Deadline of the creation, in seconds of time.monotonic(); None once created.
        self.until: float | None = None
        # Its name in the trace, how it was created, and the name that other ranks may use for it.
        self.identity = self.origin = self.also = ""
        self.c: Any = lib.pynccl_comm_new()
        self._owner = fastcall.own_comm(address_of(self.c))
        self.watch = Watch(self.c, self._owner, self.timeout)
        self.rank, self.size, self.device = -1, 0, -1
        # Where arrays must be: the device's ordinal, HOST or ANYWHERE.
        self.place = ANYWHERE
        # 1 if calls without a stream wait for their result (CPU library), else 0.
        self.waits = 0
        # True without a CUDA driver: arrays then have no current stream.
        self.streamless = False
        # The stream of calls that name none, where arrays have no current stream.
        self.own_stream = 0
        # Arrays that calls still use, by stream.
        self.in_flight: dict[int, InFlight] = {}
        self.registrations = Registrations()
        self.windows = Windows()
        self._scratch: tuple[int, int] | None = None
        # The number of derived communicators by method, and of the agreements on them by kind.
        self.derived = Counter[str]()
        self.attempts = Counter[int]()
        # The id for the next grow, if it was made: the library makes no other one before that.
        self.grow_id: bytes | None = None
        # Set at the end of the library's call of the last grow, which may have been given up.
        self.grown: threading.Event | None = None
        # True after a failed shrink: later ones use a unique id in place of the library's call.
        self.out_of_step = False
        # The call of a non-blocking communicator that an exception, such as Ctrl-C, interrupted before the
        # library had accepted it. The library takes no other call until then.
        self.unsettled: str | None = None
        self.interrupted: Interrupted | None = None
        # By array type, op and dtype the templates of all_reduce that C finds itself; none after an exception
        # has interrupted a call that the next one must wait for.
        self.usual: dict[type, dict[str, dict[Any, fastcall.Template]]] = {}
        # Check mode compares its calls.
        self.checks = False
        # From the beginning of `suspend` to the end of `resume`, both of which need all ranks.
        self.suspended = False
        # From the beginning of `finalize`.
        self.finalized = False
        # Seconds in `wait`, by what was waited for.
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.children: weakref.WeakSet[Core] = weakref.WeakSet()
        # True once the program has got an error of this communicator or aborted it: its end reports no other.
        self.told = False
        # Whether the hint at a group was printed.
        self.hinted = False
        # Streams of the CPU library with failed calls. The library reports their error once.
        self.failed: set[int] = set()
        # The error of a call that nobody had waited for at the destroy.
        self.failed_at_end: NcclError | None = None
        # True from the beginning of an abort.
        self.aborted = False
        # True: an abort tells the other ranks that this rank goes on with another communicator.
        self.goes_on = False
        # Children keep their parent alive: an abort of the grandparent finds them through it.
        self.parent: Core | None = None
        streams.add_user(self)

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size} on device {self.device}" if self.size else "no rank"
        return f"<pynccl.Communicator {place}{'' if self.handle else ', closed'}>"

    def locate(self, device: int, on_cpu: bool) -> None:
        """Decide where arrays must be, and which stream calls use that name none."""
        driver = not on_cpu and cuda.available()
        self.device, self.waits, self.streamless = device, int(on_cpu), not driver
        self.place = HOST if on_cpu else device if driver else ANYWHERE
        # Not the default stream: calls of two threads on two communicators must not wait for each other.
        self.own_stream = streams.cpu_stream() if on_cpu else 0

    # --- the handle ---

    def open(self) -> int:
        """Return the handle; raise NcclInvalidUsage with the reason once the communicator is closed."""
        if not self.handle:
            raise self._unusable(self.why)
        return self.handle

    def _unusable(self, why: str) -> NcclInvalidUsage:
        return NcclInvalidUsage(f"{self!r} cannot be used: {why}", rank=self.known_rank)

    def not_aborted(self) -> None:
        """Raise if an abort has begun, perhaps in another thread."""
        if self.aborted:
            raise self._unusable("it was aborted")

    def incomplete(self, name: str) -> NcclError:
        """Return the error of a call that had not completed when the communicator was closed."""
        self.watch.raise_verdict()
        if self.aborted:
            return self._unusable(self.why)
        return self.failed_at_end or NcclRemoteError(
            f"{name} did not complete: the communicator was destroyed before all ranks had made the call",
            function=name,
            rank=self.known_rank,
            size=self.size or None,
        )

    def live(self) -> int:
        """Return the handle; raise the watchdog's error if it has found one."""
        self.watch.raise_verdict()
        return self.open()

    @property
    def known_rank(self) -> int | None:
        """The rank; None before the creation has completed."""
        return self.rank if self.size else None

    def close(self, why: str) -> int:
        """Mark the communicator as closed; return its handle if this process must release it, else 0."""
        handle, owned = int(self.handle), self.owned
        self.forget(why)
        return handle if owned else 0

    def forget(self, why: str) -> None:
        """Stop using the handle; `why` ends the message of later errors."""
        if self.handle:
            self.handle, self.why = 0, why
            self.c.handle = 0

    def family(self) -> list[Core]:
        """Return this communicator and all that were derived from it."""
        found = [self]
        for one in found:
            found += list(one.children)
        return found

    def adopt(self, child: Core) -> None:
        """Register a communicator that was derived from this one."""
        child.parent = self
        self.children.add(child)

    def _leave_family(self) -> None:
        """Hand the derived communicators over to the parent; they would keep this one alive."""
        parent, self.parent = self.parent, None
        for child in list(self.children):
            child.parent = parent
            if parent is not None:
                parent.children.add(child)
        self.children.clear()
        if parent is not None:
            parent.children.discard(self)

    # --- calls ---

    @contextmanager
    def alone(self, anyway: bool = False) -> Iterator[None]:
        """Reserve the communicator for this thread; `anyway`: even after the watchdog has found an error."""
        self.end_interrupted(anyway)
        answer = None
        try:
            answer = (lib.pynccl_enter_anyway if anyway else lib.pynccl_enter)(self.c)
            if not answer:
                if self.unsettled is not None and not anyway:
                    self.settle(self.unsettled)
                yield
        finally:
            # None: a signal handler raised before the answer was stored.
            if not answer:
                lib.pynccl_leave_mine(self.c)
        if answer:
            self.refuse(answer)
            # A creation that an exception interrupted leaves a handle that C has not opened.
            raise self._unusable(self.why)

    def refuse(self, answer: int) -> None:
        """Raise the error of an answer that the C call path gave for this communicator."""
        if answer == BUSY:
            self._refuse_if_interrupted()
            raise NcclInvalidUsage(
                f"{self!r} is in use by another thread, or by the call that a signal has interrupted; "
                "expected one call at a time"
            )
        if answer == STOPPED:
            raise check_mode.interrupted()
        if answer == CAPTURED:
            raise NcclInvalidUsage(
                f"{self!r}: check mode cannot compare the calls of a graph; expected check mode off during "
                "the capture"
            )
        if answer == CLOSED and not self.handle:
            self.open()
        if self.c.watch and answer not in (RECORDED, OVERLAP, NO_MEMORY):
            self._raise_verdict(answer)
        if answer == NO_MEMORY:
            raise MemoryError
        self._refuse_if_interrupted()

    def _refuse_if_interrupted(self) -> None:
        """Raise for a prepared call; other calls wait for the interrupted one."""
        what = self.unsettled if self.interrupted is None else self.interrupted.what
        if what is not None:
            raise NcclInvalidUsage(
                f"{self!r} still makes {what}, which an exception has interrupted; expected "
                "synchronize() before this call"
            )

    def _raise_verdict(self, result: int) -> None:
        known, told, self.told = NcclError("", result=result), self.told, True
        found = self.watch.cause(known)
        if found is not known:
            found.__cause__ = None
            # A verdict on ranks explains every call; other verdicts describe the call that failed first.
            if told and not isinstance(found, RankFailedError):
                found.args = (f"the communicator failed earlier: {found}",)
            raise found

    def outside_groups(self, what: str, *streams: int) -> None:
        """Raise inside group() or prepare, and during a graph capture: they cannot record the call."""
        refuse_recording(what)
        self.outside_captures(what, {*streams, *used_streams(self.c)})

    def outside_captures(self, what: str, streams: Iterable[int]) -> None:
        """Raise while a graph captures one of these streams."""
        if self.waits or self.streamless:
            return
        with cuda.using_device(self.device):
            for stream in streams:
                if _is_captured(stream):
                    raise NcclInvalidUsage(
                        f"{what} during the graph capture of stream {stream:#x}: expected it before or after "
                        "the capture, since a graph cannot replay it",
                        function=what,
                    )

    @contextmanager
    def announced(self, kind: int, detail: int = 0, by_all: bool = True) -> Iterator[None]:
        """Record a call; if every rank makes it, check mode requires that all are about to."""
        with recorder.recorded(self.c, kind, detail):
            answer = lib.pynccl_check_other(self.c, kind) if by_all else 0
            if answer:
                self.refuse(answer)
            yield

    def bounded(
        self,
        call: Callable[[], T],
        what: str,
        if_abandoned: Callable[[T], object] | None = None,
        linger: float = 0.0,
    ) -> T:
        """Make a blocking call that ends at the time-out or with the watchdog's verdict.

        The error of either waits `linger` seconds for the end of the call. A call with `linger` that ends
        while this rank asks who is late has succeeded, as it has on the other ranks.
        """
        look: Look = self.watch.raise_verdict
        if self.waits and self.timeout is None:
            look = hinting(look, lambda: self._who_is_late(what, "; expected the same call on every rank"))
        try:
            at_timeout = self.watch.hear if linger else None
            return bounded(call, self.timeout, what, if_abandoned, look, linger, at_timeout)
        except NcclTimeoutError as error:
            # The counts of calls that follow do not show who is in this one.
            where = "" if self.known_rank is None else f" on rank {self.known_rank}"
            error.args = (f"{error}{where}{self._in_turn()}",)
            if not linger:
                self.watch.hear()
            raise self.watch.expire(str(error)) or error from None
        except NcclError as error:
            raise self.watch.cause(error) from error.__cause__

    # --- waiting ---

    def deadline(self, timeout: float | None) -> tuple[float | None, float | None]:
        """Return the seconds that a wait may take, and its deadline by time.monotonic()."""
        seconds = self.timeout if timeout is None else timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        return seconds, deadline if deadline is None or self.until is None else min(deadline, self.until)

    def wait(self, stream: int, what: str, timeout: float | None) -> None:
        """Wait for a stream, then release the arrays that were kept for it."""
        begin = time.perf_counter()
        try:
            self._wait(stream, what, timeout)
        finally:
            self.waited[what] += time.perf_counter() - begin

    def _wait(self, stream: int, what: str, timeout: float | None) -> None:
        seconds, deadline = self.deadline(timeout)
        try:
            if self.waits:
                if deadline is None and self.origin == "init_all" and not self.hinted:
                    self._hint_at_a_group(stream, what)
                done = streams.wait_cpu(self._waiting(seconds, deadline), stream, deadline, what)
            else:
                # Handles 0 to 2 are the default streams of the current device.
                with cuda.using_device(self.device):
                    done = streams.wait_cuda(self.live, stream, deadline)
        except NcclError as error:
            if streams.is_destroyed(stream, bool(self.waits)):
                # An abort in another thread destroys the communicator's own stream.
                self.not_aborted()
                raise self._forget_destroyed(stream, what) from None
            found = self.watch.cause(error)
            self.told = True
            self.failed.add(stream)
            # In the trace, a call that waits for a missing rank stays outstanding.
            if not isinstance(found, RankFailedError | NcclTimeoutError):
                lib.pynccl_comm_failed(self.c, stream, found.result or 1)
            raise found from error.__cause__
        if not done:
            where = "" if self.waits and stream == self.own_stream else f" on stream {stream:#x}"
            self.late(what, seconds, where, timeout is None, lambda: self._is_complete(stream))
        if stream in self.failed and (failed := self.failure()):
            raise failed
        if stream in self.in_flight:
            self.in_flight.pop(stream).clear()
        lib.pynccl_comm_forget(self.c, stream)

    def _waiting(self, seconds: float | None, deadline: float | None) -> Callable[[], int]:
        """Return `live`, which with a deadline also tells the watchdog how long the wait has lasted."""
        if seconds is None or deadline is None:
            return self.live

        def live() -> int:
            self.watch.waits(seconds - (deadline - time.monotonic()), seconds)
            return self.live()

        return live

    def _hint_at_a_group(self, stream: int, what: str) -> None:
        """Say so if a wait is long and may be for calls that this thread itself makes after it."""
        if not streams.wait_cpu(self.live, stream, time.monotonic() + LONG, what):
            self.hinted = _hint(self._who_is_late(what, self._in_turn()))

    def _who_is_late(self, what: str, expected: str) -> str:
        # The library does not tell of a communicator that it is destroying.
        late = self._awaited() if self.handle else "other ranks"
        return f"{self!r} has waited {LONG:g} s in {what} for {late}{expected}" if late else ""

    def _awaited(self) -> str:
        """Return the ranks for which calls of this rank wait; "" if the library does not tell."""
        if not self.waits:
            return ""
        late = awaited_ranks(self.live(), self.size)
        return rank_list(late) if late else ""

    def _wait_for_all(self, timeout: float | None) -> None:
        """Wait for every stream in use; then raise the error of one that was destroyed."""
        destroyed: NcclInvalidArgument | None = None
        for stream in used_streams(self.c):
            try:
                self.wait(stream, "synchronize", timeout)
            except NcclInvalidArgument as error:
                destroyed = destroyed or error
        if destroyed is not None:
            raise destroyed

    def _forget_destroyed(self, stream: int, what: str) -> NcclInvalidArgument:
        place: dict[str, Any] = {"function": what, "rank": self.known_rank, "size": self.size or None}
        if stream not in self.in_flight and stream not in used_streams(self.c):
            text = f"stream is {stream:#x}, which was destroyed or never created; expected one that exists"
            return NcclInvalidArgument(text, **place)
        if stream in self.in_flight:
            # The calls may still run; no stream has this number.
            self.in_flight[min([0, *self.in_flight]) - 1] = self.in_flight.pop(stream)
        lib.pynccl_comm_abandon(self.c, stream)
        return NcclInvalidArgument(
            f"stream {stream:#x} was destroyed with calls of {self!r} that nobody has waited for: "
            "their arrays are kept until the communicator ends",
            **place,
        )

    def settle(self, what: str, look: Look | None = None, grace: float = 0.0) -> None:
        """Wait until a non-blocking communicator has accepted the last call.

        For `grace` seconds after the deadline the library can still say why it has not. After an exception,
        such as Ctrl-C, the next call waits first.
        """
        seconds, deadline = self.deadline(None)
        deadline = None if deadline is None else deadline + grace

        def live() -> int:
            if look is not None:
                look()
            return self.live()

        self.unsettled = what
        try:
            ready = streams.wait_ready(live, deadline)
        except NcclError as error:
            self.unsettled = None
            raise self.watch.cause(error) from error.__cause__
        except BaseException:
            self.usual.clear()
            raise
        self.unsettled = None
        if not ready:
            self.late(what, seconds, "", True, lambda: False)

    def change(
        self,
        call: Callable[[], T],
        what: str,
        drop: Callable[[T], object] = lambda result: None,
        linger: float = 0.0,
    ) -> T:
        """Make a blocking call that changes the communicator; wait until a non-blocking one has accepted it.

        `drop` gets the result of a call that fails after it has returned.
        """
        result = self.bounded(call, what, drop, linger)
        try:
            self.settle(what)
        except NcclError:
            drop(result)
            raise
        return result

    def together(
        self,
        call: Callable[[], T],
        what: str,
        drop: Callable[[T], object] = lambda result: None,
        same: Hashable = None,
    ) -> T:
        """Make a call of all ranks, for which the others wait, in a thread of its own.

        After an exception, such as Ctrl-C, the call goes on, and this communicator's next call waits for it.
        If that has the same `same`, it takes the result; otherwise `drop` does.
        """
        running: Running[T] | None = self._take_over(same)
        if running is None:
            place, limited = caller(), self.timeout is not None
            running = Running(lambda: _reserved([self], call, place), what, drop, limited=limited)
        one = Interrupted(what, running, same)
        try:
            running.start()
            running.wait()
        except NoThreadError:
            # An exiting interpreter starts no thread, and a thread needs memory.
            return call()
        except BaseException:
            # First: a second exception may come between any two calls.
            self.interrupted = one
            self.usual.clear()
            self.leave(running, same is None)
            raise
        self.interrupted = None
        if running.has_failed():
            # An abort in another thread has abandoned it.
            self.not_aborted()
        return running.result()

    def leave(self, running: Running[Any], drop: bool) -> None:
        """Let an interrupted call go on; return when no prepared call can come before it."""
        running.start()
        if drop:
            running.drop()
        while not self.c.reserved and not running.wait(time.monotonic() + _PAUSE):
            pass

    def _take_over(self, same: Hashable) -> Running[Any] | None:
        """Return the interrupted call if it is the same as a new one, and has not failed; else end it."""
        one = self.interrupted
        if same is not None and one is not None and one.same == same and not one.running.has_failed():
            return one.running
        self.end_interrupted()
        return None

    def end_interrupted(self, anyway: bool = False) -> None:
        """Wait for the interrupted call, and drop its result; `anyway`: abandon it.

        Its errors are those of a call that nobody waits for. If the communicator has failed, so do its calls.
        """
        one = self.interrupted
        if one is None or self.is_reserved_here():
            return
        if anyway:
            one.running.abandon()
            one.running.wait(time.monotonic() + LINGER)
        else:
            one.end()
        self.interrupted = None

    def is_reserved_here(self) -> bool:
        """Tell whether this thread goes on with an interrupted call, or makes one of all ranks."""
        return int(self.c.reserved) == threading.get_ident()

    def wait_for_interrupted(self, timeout: float | None) -> bool:
        """Wait for an interrupted call; return False if it goes on for longer than `timeout` seconds."""
        if self.interrupted is None or timeout is None:
            return True
        self.interrupted.running.start()
        return self.interrupted.running.wait(time.monotonic() + timeout)

    def _is_complete(self, stream: int) -> bool:
        with suppress(NcclError):
            if self.waits:
                return capi.pyncclCpuStreamQuery(self.open(), stream) != IN_PROGRESS
            with cuda.using_device(self.device):
                return cuda.stream_query(stream)
        return False

    def late(
        self, what: str, seconds: float | None, where: str, fatal: bool, ended: Callable[[], bool]
    ) -> None:
        """Raise the error of a wait that timed out, unless the call ends while the other ranks are heard.

        `fatal`: at the communicator's own time-out.
        """
        # With a channel, the watchdog tells which ranks are late.
        late = "" if self.watch.connected else self._awaited()
        end = f"{self._signals()}{f'; it waits for {late}' if late else ''}{self._in_turn()}"
        text = f"{what} did not complete{where} within {seconds:g} s ({self!r}){end}"
        if fatal:
            self.watch.hear()
            if ended():
                return
        error = self.watch.expire(text) if fatal else self.watch.explain(text)
        if error is None or not fatal:
            recorder.dump_because("timeout", text)
        self.told = self.told or fatal
        size = self.size or None
        raise error or NcclTimeoutError(text, function=what, rank=self.known_rank, size=size)

    def _in_turn(self) -> str:
        """Return, for the end of a message, how one thread calls several ranks."""
        if self.origin != "init_all" or self.size == 1:
            return ""
        return (
            "; expected a call of every rank: one thread puts the calls of several ranks of init_all into "
            "pynccl.group(), or starts a thread for each"
        )

    def _signals(self) -> str:
        """Return the signals that outstanding calls wait for, for the end of a message."""
        text = ffi.new("char[]", 512)
        lib.pynccl_say_signals(self.c, text, len(text))
        return str(ffi.string(text).decode())

    def synchronize(self, stream: Any = None, timeout: float | None = None) -> None:
        """Wait for a stream, or for every stream that this communicator has used."""
        self.open()
        timeout = check_timeout(timeout, zero=True)
        refuse_recording("synchronize")
        given = None if stream is None else streams.handle_of(stream)
        self.outside_captures("synchronize", used_streams(self.c) if given is None else [given])
        if not self.wait_for_interrupted(timeout):
            self.late("synchronize", timeout, "", fatal=False, ended=lambda: False)
        with self.alone():
            try:
                if given is None:
                    self._wait_for_all(timeout)
                else:
                    self.wait(given, "synchronize", timeout)
            finally:
                self._release_waited()
        # Another wait for the stream may have got the error.
        if failed := self.failure():
            raise failed

    def async_error(self) -> NcclError | None:
        """Return the error that occurred in the background, or None."""
        handle = self.open()
        found = self.watch.verdict()
        if found is not None:
            return found
        try:
            streams.raise_async_error(handle)
        except NcclError as error:
            return error
        return None

    # --- memory ---

    def keep(self, stream: int, arrays: Iterable[Any]) -> None:
        """Keep the arrays of a call alive until its stream has finished with them."""
        in_flight = self.in_flight.get(stream)
        if in_flight is None:
            self.keep_on([stream], arrays)
        else:
            in_flight.add(held(arrays))

    def keep_on(self, used: Sequence[int], arrays: Iterable[Any]) -> None:
        """Keep the arrays of calls on several streams that are about to be issued together."""
        if any(stream not in self.in_flight for stream in used):
            # A program may make a stream for every step.
            self.release_waited()
        for stream in used:
            in_flight = self.in_flight.get(stream)
            if in_flight is None:
                events = CpuEvents(int(self.handle)) if self.waits else CudaEvents(self.device)
                in_flight = self.in_flight[stream] = InFlight(events, stream)
            in_flight.add(held(arrays))

    def release_waited(self) -> None:
        """Release the arrays of streams that the program has waited for, as by `Stream.synchronize`.

        The caller is between two calls: no call has kept arrays that it has yet to issue.
        """
        answer = None
        try:
            answer = lib.pynccl_enter_anyway(self.c)
            if not answer:
                self._release_waited()
        finally:
            # None: a signal handler raised before the answer was stored.
            if not answer:
                lib.pynccl_leave_mine(self.c)

    def _release_waited(self) -> None:
        # The calls of an open group are not on their streams yet.
        if lib.pynccl_group_depth():
            return
        lib.pynccl_comm_settle(self.c)
        if not self.c.unlisted:
            # Negative numbers stand for destroyed streams whose calls may still run.
            done = self.in_flight.keys() - used_streams(self.c)
            for stream in [stream for stream in done if stream >= 0]:
                self.in_flight.pop(stream).clear()

    # As a streams.User.

    def newest_call(self, stream: int) -> int:
        """Return the number of the newest call on a stream that nobody has waited for; 0 if there is none."""
        return int(lib.pynccl_comm_newest(self.c, stream))

    def waited_for(self, stream: int, number: int) -> None:
        """Learn that the program has waited for a stream's calls up to this number."""
        lib.pynccl_comm_waited(self.c, stream, number)

    def failed_on(self, stream: int) -> NcclError | None:
        """Learn that calls on a stream may have failed; return their error."""
        self.failed.add(stream)
        return self.failure()

    def failure_on(self, stream: int) -> NcclError | None:
        """Return the error of failed calls on a stream; None if none has failed."""
        # CUDA completes the work of a communicator that has failed.
        return self.failure() if stream in self.failed or not self.waits else None

    def failure(self) -> NcclError | None:
        """Return the error that calls end with; None if the communicator has not failed."""
        found = self.async_error() if self.handle else None
        if found is not None:
            found = self.watch.cause(found)
            self.told = True
        return found

    def drop_completed(self, stream: int) -> None:
        """Release the arrays of a stream's completed calls."""
        in_flight = self.in_flight.get(stream)
        if in_flight is not None:
            in_flight.drop_completed()

    def mark(self, stream: int) -> Mark:
        """Mark the present end of a stream, for which arrays are kept."""
        mark = self.in_flight[stream].mark()
        if mark is None:
            raise NcclInvalidUsage(f"stream {stream:#x} is captured by a graph; expected no capture")
        return mark

    def device_scratch(self) -> tuple[int, int]:
        """Return the barrier's byte of device memory and its stream."""
        if self._scratch is None:
            with cuda.using_device(self.device):
                self._scratch = cuda.memory_allocate(1), cuda.stream_create()
        return self._scratch

    def release(self) -> None:
        """Release everything that belongs to the communicator except the ncclComm_t."""
        self._leave_family()
        self.watch.stop(lib.PYNCCL_CLOSES)
        while self.in_flight:
            self.in_flight.popitem()[1].clear()
        self.registrations.forget()
        self.windows.forget()
        own, self.own_stream = self.own_stream, 0
        if own:
            capi.pyncclCpuStreamDestroy(own)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with cuda.using_device(self.device):
                cuda.memory_free(scratch[0])
                cuda.stream_destroy(scratch[1])

    # --- the end of the process, and of the object ---

    def leave_at_exit(self, deadline: float | None) -> bool:
        """Complete the issued calls; False if that failed or `deadline` is None: then abort."""
        completed = deadline is not None and self._complete_issued(deadline)
        reason = lib.PYNCCL_ENDS if completed else self._departure(aborts=deadline is None)
        if not self._take_from_watchdog(reason):
            lifetime.disown(int(self.handle))
        return completed

    def _complete_issued(self, deadline: float) -> bool:
        if not self.owned or not self.handle:
            return True
        if not self.size:
            # Another thread still creates it: it has no calls, and the other ranks wait for it.
            return False
        try:
            self._warn()
        except ResourceWarning as error:
            # A filter makes it an error, which would keep other communicators from their ends.
            print(f"ResourceWarning: {error}", file=sys.stderr)
        if self.interrupted is not None and not self.interrupted.running.wait(deadline):
            return False
        # A daemon thread may be in a call until the interpreter ends.
        while (answer := lib.pynccl_enter(self.c)) == BUSY and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if not answer:
            lib.pynccl_leave_mine(self.c)
        told = self.told
        try:
            if self.unsettled is not None and not streams.wait_ready(self.live, deadline):
                return False
            with self.alone():
                self._wait_for_all(max(0.0, deadline - time.monotonic()))
        except (NcclError, ValueError) as error:
            if not told and not isinstance(error, NcclTimeoutError | NcclRemoteError):
                print(f"pynccl: a call that nobody waited for has failed: {error}", file=sys.stderr)
            return False
        return True

    def unheard(self) -> NcclError | None:
        """Return the error of calls that nobody has waited for, unless the program has got an error."""
        found = None if self.told or not used_streams(self.c) else self.failure()
        # The program need not hear that others have ended.
        return None if isinstance(found, NcclRemoteError) else found

    def _departure(self, aborts: bool) -> Any:
        """Return what the other ranks hear: `aborts` if this end, and no call of theirs, is the failure."""
        if self.watch.verdict() is not None:
            return lib.PYNCCL_ABORTS_TOO
        return lib.PYNCCL_ABORTS_FIRST if aborts else lib.PYNCCL_STAYS

    def _take_from_watchdog(self, reason: Any) -> bool:
        """Stop watching; False if the watchdog has released the handle already."""
        self.watch.stop(reason)
        return self.watch.claim(1000)

    def leave_to_parent(self) -> None:
        """In a forked child: release nothing; the resources are the parent's."""
        lib.pynccl_leave(self.c)
        self.c.reserved, self.interrupted, self.unsettled = 0, None, None
        self.forget("it belongs to the parent of this forked process; make a new one here")
        self.failed_at_end = self._unusable(self.why)
        self.in_flight.clear()
        self.registrations.forget()
        self.windows.forget()
        self.own_stream, self._scratch = 0, None

    @property
    def holdings(self) -> object:
        """What the library may use until the communicator has ended."""
        return self.in_flight, self.registrations, self.windows

    def _warn(self) -> None:
        text = f"{self!r}, made at {self.line}, was never destroyed or aborted"
        # The line that dropped it, behind __del__; at the exit a line of this package.
        warnings.warn(text, ResourceWarning, source=self, stacklevel=3)
        for memory in (self.windows, self.registrations):
            memory.note_left()
            memory.warn(self)

    @fastcall.finalizer
    def __del__(self) -> None:
        # No collective call here: garbage collection runs at other times on other ranks.
        if getattr(self, "handle", 0) and self.owned:
            lifetime.keep_to_the_end([self.holdings])
            # Only a rank that waits for a further call of this one may notice.
            known = self.watch.verdict() is not None
            if self._take_from_watchdog(lib.PYNCCL_ABORTS_TOO if known else lib.PYNCCL_ENDS):
                note_dropped(int(self.handle))
                if self.waits:
                    # A communicator that has failed or was never complete has nobody to tell.
                    with suppress(NcclError):
                        capi.pyncclCpuLeave(int(self.handle))
            else:
                lifetime.disown(self.handle)
            self._warn()


def _is_captured(stream: int) -> bool:
    try:
        return cuda.stream_is_capturing(stream)
    except NcclUnhandledCudaError:
        # It was destroyed; a wait for it says so.
        return False
