"""The communicator: its creation, waiting for it, and its end."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from pynccl import _checks, _cuda, _library, _lifetime, _recorder, _streams, _watchdog, capi
from pynccl._binding import address_of, ffi, lib
from pynccl._devices import device_to_use, on_device
from pynccl._ended import Process
from pynccl._errors import NcclError, NcclInvalidUsage, NcclTimeoutError, RankFailedError
from pynccl._kept import CpuEvents, CudaEvents, Kept
from pynccl._lifetime import ABORT_SECONDS, bounded, with_outside
from pynccl._prepared import Prepare
from pynccl._recorder import TraceRecord, recorded
from pynccl._recording import BUSY, communicators
from pynccl._relatives import ConfigLike, Relatives, abort_if_made
from pynccl._structs import CommProperties
from pynccl._timeouts import check_timeout, resolve_timeout
from pynccl._types import DataType, RedOp, UniqueId, to_unique_id

T = TypeVar("T")
_LOOK = 0.01
_ABORT = "ncclCommAbort (a captured CUDA graph that uses the communicator holds it: drop graphs first)"


@_recorder.with_callers("split", "shrink", "grow", "barrier", "finalize", "destroy", "suspend", "resume")
class Communicator(Relatives):
    """One rank of a group of processes; with the other ranks it makes collective calls on arrays.

    A communicator is for one thread at a time: used by two, or after it was closed, it raises
    NcclInvalidUsage. As a context manager it is finalized and destroyed at the end, and aborted when an
    exception leaves the body. What is made of it (split, shrink, grow) is aborted with it.
    """

    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes | Sequence[UniqueId | bytes],
        rank: int,
        *,
        config: ConfigLike = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join the group of `nranks` that shares the unique id (or several, for large groups).

        `timeout` bounds the creation and every later wait, in seconds.
        """
        self._prepare(timeout)
        _require_place(nranks, rank)
        ids = _ids(unique_id)
        _library.load()
        place = device_to_use(device)
        self._identity = _recorder.numbered("id", *ids)
        _recorder.open_trace(self._c, self._identity, int(rank), int(nranks), "init", name=_name_in(config))

        def create() -> int:
            if len(ids) > 1:
                return capi.ncclCommInitRankScalable(nranks, rank, len(ids), ids, config)
            if config is not None:
                return capi.ncclCommInitRankConfig(nranks, ids[0], rank, config)
            return capi.ncclCommInitRank(nranks, ids[0], rank)

        self._create(f"creating the communicator of rank {rank} of {nranks}", create, place)

    @classmethod
    def join(
        cls,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        *,
        config: ConfigLike = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> Communicator:
        """Join a communicator that its ranks grow to `nranks`, as a new rank.

        `unique_id` is what one of its ranks got from `get_unique_id` and grows with.
        """
        self = cls.__new__(cls)
        self._prepare(timeout)
        _require_place(nranks, rank)
        uid = bytes(to_unique_id(unique_id))
        _library.load()
        place = device_to_use(device)
        what = f"joining a communicator as rank {rank} of {nranks}"
        self._identity = _recorder.numbered("id", uid)
        _recorder.open_trace(self._c, self._identity, int(rank), int(nranks), "join")

        def create() -> int:
            if lib.nccl_api_find(b"ncclCommGrow"):
                return capi.ncclCommGrow(0, nranks, uid, rank, config)
            return capi.ncclCommInitRankConfig(nranks, bytes(uid), rank, config)

        self._create(what, create, place)
        return self

    @classmethod
    def from_handle(cls, handle: int) -> Communicator:
        """Use a communicator that somebody else made and will destroy, given as its ncclComm_t.

        It has to be the loaded library's.
        """
        if isinstance(handle, bool) or not isinstance(handle, int) or handle <= 0:
            raise ValueError(f"handle is {handle!r}; expected an ncclComm_t as a positive int")
        _library.load()
        self = cls.__new__(cls)
        self._prepare(None)
        self._identity = _recorder.numbered("handle")
        self._take(handle, owned=False)
        return self

    def _prepare(self, timeout: float | None) -> None:
        # First of all, so that an object whose creation failed can be collected.
        self._handle = 0
        self._owned = False
        self._why = "was never created"
        self._identity = self._origin = self._also = ""
        self._made = Counter[str]()
        self._timeout = resolve_timeout(timeout)
        self._c = ffi.gc(lib.pynccl_comm_new(), lib.pynccl_comm_release)
        self._kept: dict[int, Kept] = {}
        self._own_stream = 0
        self._templates = {}
        self._sums = {}
        self._quick = {"sum": self._sums}
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        # Alive as long as its children: an abort finds them through it.
        self._parent: Communicator | None = None
        self._processes: Sequence[Process] = ()
        self._visible: Sequence[bool] = ()
        self._attempts = 0
        # By when its creation is over.
        self._until: float | None = None
        self._scratch: tuple[int, int] | None = None
        self._token = np.zeros(1, np.uint8)

    def _create(
        self,
        what: str,
        create: Callable[[], int],
        place: int | None,
        look: Callable[[], object] | None = None,
    ) -> None:
        def on_its_device() -> int:
            with on_device(place):
                return create()

        self._until = self._until or self._deadline(None)[1]
        left = None if self._until is None else max(0.1, self._until - time.monotonic())
        with recorded(self._c, lib.PYNCCL_INIT):
            handle = bounded(on_its_device, left, what, abort_if_made, with_outside(look))
            self._take(handle, True, look=look)

    def _take(
        self,
        handle: int,
        owned: bool,
        with_channel: bool = True,
        look: Callable[[], object] | None = None,
    ) -> None:
        self._handle, self._owned = handle, owned
        if owned:
            _lifetime.own(int(handle))
        _lifetime.living.add(self)
        try:
            self._waits = int(_library.backend() == "cpu")
            self._settle("creating the communicator", look)
            self._rank = capi.ncclCommUserRank(handle)
            self._size = capi.ncclCommCount(handle)
            self._device = capi.ncclCommCuDevice(handle)
            self._settle_place(self._device, bool(self._waits))
            self._c.handle, self._c.rank, self._c.size = int(handle), self._rank, self._size
            self._c.waits, self._c.stream = self._waits, self._own_stream
            communicators[address_of(self._c)] = self
            _recorder.open_trace(
                self._c, self._identity, self._rank, self._size, self._origin, also=self._also
            )
            if owned and (self._timeout is not None or _checks.enabled()):
                _watchdog.start(self, with_channel, look)
                if _checks.enabled():
                    _checks.start(self)
        except BaseException:
            # The other ranks may have it, and wait in it.
            self.abort()
            raise
        self._until = None

    # --- what it is ---

    @property
    def handle(self) -> int:
        """The ncclComm_t as an int, for pynccl.capi and other libraries."""
        return int(self._open())

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def device(self) -> int:
        """The device that this rank computes on."""
        return self._device

    @property
    def closed(self) -> bool:
        """True once it was destroyed or aborted."""
        return not self._handle

    @property
    def properties(self) -> CommProperties:
        """What the library says of itself and the machine (ncclCommQueryProperties, NCCL >= 2.29)."""
        return capi.ncclCommQueryProperties(self.handle)

    @property
    def prepare(self) -> Prepare:
        """The same operations, checked and packed now, run later: `op = comm.prepare.all_reduce(x); op()`."""
        return Prepare(self)

    def __repr__(self) -> str:
        place = (
            f"rank {self._rank} of {self._size} on device {self._device}"
            if hasattr(self, "_device")
            else "no rank"
        )
        return f"<pynccl.Communicator {place}{'' if self._handle else ', closed'}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to its process and cannot be pickled")

    def _open(self) -> int:
        """Return the handle, or say why there is none any more."""
        if not self._handle:
            raise NcclInvalidUsage(f"{self!r} cannot be used: {self._why}", rank=getattr(self, "_rank", None))
        return self._handle

    def _live(self) -> int:
        """Return the handle; raise when the watchdog has found trouble."""
        _watchdog.raise_verdict(self)
        return self._open()

    def _raise_verdict(self, result: int) -> None:
        known = NcclError("", result=result)
        found = _watchdog.cause(self, known)
        if found is not known:
            found.__cause__ = None
            raise found

    def _bounded(
        self, call: Callable[[], T], what: str, if_abandoned: Callable[[T], object] | None = None
    ) -> T:
        """Make a blocking call that ends with the time-out, and with the watchdog's verdict."""
        try:
            return bounded(call, self._timeout, what, if_abandoned, lambda: _watchdog.raise_verdict(self))
        except NcclTimeoutError as error:
            raise _watchdog.expire(self, str(error), True) or error from None
        except NcclError as error:
            raise _watchdog.cause(self, error) from error.__cause__

    def _outside_groups(self, what: str) -> None:
        if lib.pynccl_is_recording():
            raise NcclInvalidUsage(
                f"{what} inside pynccl.group() or prepare: expected it outside", function=what
            )

    def trace(self) -> list[TraceRecord]:
        """Return the newest calls, as many as PYNCCL_TRACE_SIZE says, oldest first."""
        return _recorder.trace(self._c)

    # --- waiting ---

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has reached this.

        After `timeout` seconds NcclTimeoutError; the barrier stays outstanding, and the communicator usable.
        """
        check_timeout(timeout)
        self._outside_groups("barrier")
        wait = self._waits if timeout is None else 0
        pointer, stream = (
            (self._token.ctypes.data, self._own_stream) if self._waits else self._device_scratch()
        )
        template, _ = self._template(lib.PYNCCL_BARRIER, int(DataType.UINT8), int(RedOp.MAX), 0)
        self._issue(template, pointer, pointer, 1, stream, wait, lib.PYNCCL_BARRIER, (self, None))
        if not wait:
            with self._alone():
                self._wait(stream, "barrier", timeout)

    def synchronize(self, stream: Any = None, timeout: float | None = None) -> None:
        """Wait for a stream, or for every stream that this communicator has used."""
        self._open()
        timeout = check_timeout(timeout, zero=True)
        given = None if stream is None else _streams.handle_of(stream)
        with self._alone():
            used = [int(self._c.used[i]) for i in range(self._c.used_count)]
            for handle in used if given is None else [given]:
                self._wait(handle, "synchronize", timeout)

    def async_error(self) -> NcclError | None:
        """Return what has gone wrong in the background, None when nothing has."""
        handle = self._open()
        found = _watchdog.verdict(self)
        if found is not None:
            return found
        try:
            _streams.raise_async_error(handle)
        except NcclError as error:
            return error
        return None

    def _keep(self, stream: int, arrays: Any) -> None:
        """Hold on to the arrays of a call until its stream is known to be done with them."""
        kept = self._kept.get(stream)
        if kept is None:
            events = CpuEvents(int(self._handle)) if self._waits else CudaEvents(self._device)
            kept = self._kept[stream] = Kept(events, stream)
        kept.add(arrays)

    @contextmanager
    def _alone(self, anyway: bool = False) -> Iterator[None]:
        """Be the only one to use the communicator; `anyway`: also when it is in trouble."""
        answer = None
        try:
            answer = (lib.pynccl_enter_anyway if anyway else lib.pynccl_enter)(self._c)
            if not answer:
                yield
        finally:
            # None: an exception came between the call and its answer.
            if not answer:
                lib.pynccl_leave_mine(self._c)
        if answer:
            self._refuse(answer)

    def _deadline(self, timeout: float | None) -> tuple[float | None, float | None]:
        seconds = self._timeout if timeout is None else timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        return seconds, deadline if deadline is None or self._until is None else min(deadline, self._until)

    def _wait(self, stream: int, what: str, timeout: float | None) -> None:
        """Wait for a stream, and let go of the arrays that were kept for it."""
        seconds, deadline = self._deadline(timeout)
        try:
            if self._waits:
                done = _streams.wait_cpu(self._live, stream, deadline)
            else:
                # Handles up to 2 mean the current device's default streams.
                with _cuda.using_device(self._device):
                    done = _streams.wait_cuda(self._live, stream, deadline)
        except NcclError as error:
            found = _watchdog.cause(self, error)
            # Of what waits for a rank that does not come, it is told that it waits.
            if not isinstance(found, RankFailedError | NcclTimeoutError):
                lib.pynccl_comm_failed(self._c, stream, found.result or 1)
            raise found from error.__cause__
        if not done:
            where = "" if self._waits and stream == self._own_stream else f" on stream {stream:#x}"
            raise self._late(what, seconds, where, timeout is None)
        if stream in self._kept:
            self._kept.pop(stream).clear()
        lib.pynccl_comm_forget(self._c, stream)

    def _settle(self, what: str, look: Callable[[], object] | None = None) -> None:
        """Wait until a non-blocking communicator has taken the last call."""
        seconds, deadline = self._deadline(None)

        def live() -> int:
            if look is not None:
                look()
            return self._live()

        try:
            ready = _streams.wait_ready(live, deadline)
        except NcclError as error:
            raise _watchdog.cause(self, error) from error.__cause__
        if not ready:
            raise self._late(what, seconds, "", True)

    def _late(self, what: str, seconds: float | None, where: str, condemn: bool) -> NcclError:
        """Return the error of a wait in vain; `condemn`: it was the communicator's own time-out."""
        rank, size = getattr(self, "_rank", None), getattr(self, "_size", None)
        text = f"{what} did not complete{where} within {seconds:g} s ({self!r})"
        error = _watchdog.expire(self, text, condemn)
        if error is None or not condemn:
            _recorder.dump_because("timeout", text)
        return error or NcclTimeoutError(text, function=what, rank=rank, size=size)

    def _device_scratch(self) -> tuple[int, int]:
        """Return a byte of device memory and a stream of its own, for the barrier."""
        if self._scratch is None:
            with _cuda.using_device(self._device):
                self._scratch = _cuda.memory_allocate(1), _cuda.stream_create()
        return self._scratch

    # --- the end ---

    def finalize(self) -> None:
        """Complete the outstanding calls of all ranks; the communicator can then only be destroyed."""
        self._bounded_call("finalize", lambda: capi.ncclCommFinalize(self.handle), checked=True)

    def destroy(self) -> None:
        """Finalize where that was not done, and give everything back; harmless when already closed."""
        if not self._handle:
            return
        if _watchdog.verdict(self) is not None:
            # A communicator that was revoked is not finalized any more, which a destroy would do.
            self.abort()
            lib.pynccl_trace_mark(self._c.trace, lib.PYNCCL_DESTROY)
            return
        with self._alone(), recorded(self._c, lib.PYNCCL_DESTROY):
            handle = self._close("it was destroyed")
            # Before the call: when it does not return, an abort at exit would only meet it halfway.
            _lifetime.disown(handle)
            if handle and _watchdog.claim(self):
                try:
                    self._bounded(lambda: capi.ncclCommDestroy(handle), "ncclCommDestroy")
                except BaseException:
                    lib.pynccl_watch_stop(self._c, lib.PYNCCL_ABORTS_TOO)
                    _lifetime.orphans.append(self._kept)
                    raise
            self._release()
        lib.pynccl_trace_mark(self._c.trace, lib.PYNCCL_DESTROY)

    def abort(self) -> None:
        """Give everything back at once, without the other ranks; any thread may call it, at any time.

        What was made of this communicator is aborted with it.
        """
        family = [self, *self._descendants()]
        if self._handle:
            _recorder.dump_because("abort", f"{self!r} is aborted")
        handles = []
        for comm in family:
            if comm._handle:
                lib.pynccl_trace_mark(comm._c.trace, lib.PYNCCL_ABORT)
            # Said first, so that the others do not take the end of a connection for a death.
            lib.pynccl_watch_stop(comm._c, _watchdog.goodbye(comm))
            handle = comm._close("it was aborted")
            if handle:
                _lifetime.disown(handle)
                if _watchdog.claim(comm):
                    handles.append(handle)
        try:
            if handles:
                bounded(lambda: _abort_all(handles), ABORT_SECONDS, _ABORT)
        except BaseException:
            _lifetime.orphans += [comm._kept for comm in family]
            raise
        for comm in family:
            comm._release()

    def _take_from_watchdog(self, goodbye: Any) -> bool:
        """Stop watching; False where the watchdog has given the handle back."""
        lib.pynccl_watch_stop(self._c, goodbye)
        return bool(lib.pynccl_watch_claim(self._c, 1000))

    def _leave_at_exit(self, deadline: float | None) -> bool:
        """Complete what was issued and leave; False where that failed, or None was given: an abort is due."""
        completed = deadline is not None and self._complete_issued(deadline)
        if not self._take_from_watchdog(lib.PYNCCL_ENDS if completed else lib.PYNCCL_STAYS):
            _lifetime.disown(int(self._handle))
        return completed

    def _complete_issued(self, deadline: float) -> bool:
        if not self._owned or not self._handle:
            return True
        warnings.warn(f"{self!r} was never destroyed or aborted", ResourceWarning, source=self, stacklevel=2)
        # A daemon thread may be in a call, which goes on until the interpreter ends.
        while (answer := lib.pynccl_enter(self._c)) == BUSY and time.monotonic() < deadline:
            time.sleep(_LOOK)
        if not answer:
            lib.pynccl_leave_mine(self._c)
        try:
            self.synchronize(timeout=max(0.0, deadline - time.monotonic()))
        except (NcclError, ValueError):
            return False
        return True

    def _descendants(self) -> Iterator[Communicator]:
        for child in list(self._children):
            yield child
            yield from child._descendants()

    def revoke(self) -> None:
        """End outstanding calls on this rank without closing the communicator (ncclCommRevoke, NCCL >= 2.28).

        It can then be shrunk, split or closed, on all ranks alike.
        """
        handle = self._open()
        lib.pynccl_trace_mark(self._c.trace, lib.PYNCCL_REVOKE)
        self._bounded(lambda: capi.ncclCommRevoke(handle, capi.NCCL_REVOKE_DEFAULT), "ncclCommRevoke")

    def suspend(self) -> None:
        """Give the communicator's device memory back until `resume` (ncclCommSuspend, NCCL >= 2.29)."""
        self._bounded_call("suspend", lambda: capi.ncclCommSuspend(self.handle, capi.NCCL_SUSPEND_MEM))

    def resume(self) -> None:
        """Take the memory back that `suspend` gave (ncclCommResume, NCCL >= 2.29)."""
        self._bounded_call("resume", lambda: capi.ncclCommResume(self.handle))

    def _bounded_call(self, how: str, call: Callable[[], int], checked: bool = False) -> None:
        self._open()
        name, kind = f"ncclComm{how.capitalize()}", getattr(lib, f"PYNCCL_{how.upper()}")
        with self._alone():
            if checked:
                self._check(kind)
            with recorded(self._c, kind):
                self._bounded(call, name)
                self._settle(name)

    def _close(self, why: str) -> int:
        """Mark it as closed; return the handle if it is to be given back."""
        handle, owned = int(self._handle), self._owned
        self._forget(why)
        return handle if owned else 0

    def _forget(self, why: str) -> None:
        if self._handle:
            self._handle, self._why = 0, why
            self._c.handle = 0

    def _leave_to_parent(self) -> None:
        """In a forked child: nothing that it has is this process's to give back."""
        self._forget("it belongs to the parent of this forked process; make a new one here")
        self._kept.clear()
        self._own_stream, self._scratch = 0, None

    def _release(self) -> None:
        lib.pynccl_watch_stop(self._c, lib.PYNCCL_CLOSES)
        while self._kept:
            self._kept.popitem()[1].clear()
        own, self._own_stream = self._own_stream, 0
        if own:
            capi.pyncclCpuStreamDestroy(own)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with _cuda.using_device(self._device):
                _cuda.memory_free(scratch[0])
                _cuda.stream_destroy(scratch[1])

    def __enter__(self) -> Communicator:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handle:
            return
        if kind is not None or not self._owned:
            if kind is not None:
                _recorder.dump_because("exception", f"{kind.__name__}: {error}")
            self.abort()
            return
        try:
            self.finalize()
            self.destroy()
        except BaseException:
            self.abort()
            raise

    def __del__(self) -> None:
        # Never a collective call from here: the other ranks' collectors run at other times.
        if getattr(self, "_handle", 0) and self._owned:
            _lifetime.orphans.append(self._kept)
            if not self._take_from_watchdog(lib.PYNCCL_STAYS):
                _lifetime.disown(self._handle)
            warnings.warn(
                f"{self!r} was never destroyed or aborted", ResourceWarning, source=self, stacklevel=2
            )


def _name_in(config: ConfigLike) -> str:
    known = config.get("commName") if isinstance(config, Mapping) else getattr(config, "commName", None)
    return str(known or "")


def _ids(unique_id: UniqueId | bytes | Sequence[UniqueId | bytes]) -> list[bytes]:
    if isinstance(unique_id, str | bytes | bytearray | memoryview) or not isinstance(unique_id, Iterable):
        return [bytes(to_unique_id(unique_id))]
    ids = [bytes(to_unique_id(one, f"unique_id[{i}]")) for i, one in enumerate(unique_id)]
    if not ids:
        raise ValueError("unique_id is an empty sequence; expected at least one id")
    return ids


def _require_place(nranks: int, rank: int) -> None:
    for name, value in (("nranks", nranks), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}; expected an int")
    if nranks < 1 or not 0 <= rank < nranks:
        raise ValueError(f"rank is {rank} and nranks {nranks}; expected 0 <= rank < nranks")


def _abort_all(handles: list[int]) -> None:
    # Together, since communicators that share resources wait for each other's abort.
    if len(handles) > 1:
        capi.ncclGroupStart()
    for handle in reversed(handles):
        capi.ncclCommAbort(handle)
    if len(handles) > 1:
        capi.ncclGroupEnd()


def init_all(devices: int | Sequence[int], *, timeout: float | None = None) -> list[Communicator]:
    """Make a communicator of one process with a rank on each device, and return its ranks (ncclCommInitAll).

    `devices` is their number or their ordinals. Calls of one thread on several ranks belong in a `group()`.
    """
    ordinals = list(range(devices)) if isinstance(devices, int) else [int(d) for d in devices]
    if not ordinals or isinstance(devices, bool):
        raise ValueError(f"devices is {devices!r}; expected a positive number, or ordinals")
    _library.load()
    handles = bounded(
        lambda: capi.ncclCommInitAll(len(ordinals), ordinals),
        timeout,
        "ncclCommInitAll",
        if_abandoned=_abort_all,
    )
    ranks = []
    identity = _recorder.numbered("all", os.uname().nodename, os.getpid())
    for handle in handles:
        comm = Communicator.__new__(Communicator)
        comm._prepare(timeout)
        comm._identity, comm._origin = identity, "init_all"
        # The ranks of one process cannot outlive each other.
        comm._take(handle, owned=True, with_channel=False)
        ranks.append(comm)
    return ranks
