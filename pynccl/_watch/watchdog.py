"""The Python side of the watchdog (native/watchdog.h): start it, and raise its verdicts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pynccl import capi
from pynccl._base.values import rank_list
from pynccl._device import streams
from pynccl._device.blocking import THREAD_LIMITS, deadline_of, look_outside
from pynccl._errors import (
    CollectiveMismatchError,
    NcclError,
    NcclSystemError,
    NcclTimeoutError,
    RankFailedError,
    error_class,
)
from pynccl._library import cuda
from pynccl._library.binding import ffi, lib
from pynccl._library.generated.api import (
    ncclInternalError,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclSystemError,
    ncclTimeout,
    ncclUnhandledCudaError,
    pyncclCpuCallsDiffer,
    pyncclCpuOpenChannel,
)
from pynccl._library.status import mismatch
from pynccl._secure.handshake import load_noise
from pynccl._types import DataType
from pynccl._watch import channel
from pynccl._watch.ended import Process

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

# Results of the library that a death may have caused.
BY_DEATH = (ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclRemoteError)
# Milliseconds to wait, after an error of the library, for the report of a death or of another rank.
DEATH_MS, _REPORT_MS = 1500, 400
_BY_REPORT = (ncclInvalidUsage, ncclTimeout)
# Seconds after an error within which another rank's abort may have caused it.
_OWN_ABORT = DEATH_MS / 2000
_CLAIM_MS = 5000

Look = Callable[[], object]
Handle = Callable[[], int]


def _called_else(error: NcclError, comm: int) -> bool:
    return mismatch(int(error.result or 0), comm) == pyncclCpuCallsDiffer


def _not_started(code: int) -> NcclSystemError:
    limits = f" ({THREAD_LIMITS})" if code in (errno.EAGAIN, errno.ENOMEM) else ""
    return NcclSystemError(f"the watchdog cannot be started: {os.strerror(code)}{limits}")


@contextmanager
def _thread() -> Iterator[NcclSystemError | None]:
    """Have the watchdog's thread run; yield the error if it cannot be started."""
    code = lib.pynccl_watch_reserve()
    try:
        yield _not_started(code) if code else None
    finally:
        if not code:
            lib.pynccl_watch_unreserve()


def awaited_ranks(comm: int, size: int) -> list[int]:
    """Return the ranks of a communicator of the CPU library for which its calls wait."""
    return [rank for rank in range(size) if capi.pyncclCpuIsAwaited(comm, rank)]


class Watch:
    """The watchdog of one communicator, given by its C struct and its device.

    An argument `handle` is a callable that returns the ncclComm_t, or raises once the communicator is closed.
    """

    def __init__(self, c: Any, owner: object, timeout: float | None) -> None:
        self.c, self.timeout = c, timeout
        self._owner = owner  # of the struct
        self.device = 0
        # The processes of all ranks, and for each whether it is visible to this one.
        self.processes: Sequence[Process] = ()
        self.visible: Sequence[bool] = ()
        # The ranks that failed shrinks have named, as a set of bits.
        self.suspects = 0
        # By kind of agreement and rank, the number of the newest attempt that the rank has begun, with a
        # minus if it has given it up.
        self.begun: dict[tuple[int, int], int] = {}

    @property
    def rank(self) -> int:
        """The communicator's rank."""
        return int(self.c.rank)

    @property
    def size(self) -> int:
        """The communicator's number of ranks."""
        return int(self.c.size)

    @property
    def connected(self) -> bool:
        """True if the ranks have a control channel."""
        return bool(lib.pynccl_watch_connected(self.c))

    def start(
        self, handle: Handle, device: int, until: float | None, look: Look | None, *, with_channel: bool
    ) -> None:
        """Watch a new communicator; a collective call if there is a channel.

        `look` is called during waits, which end at the deadline `until`.
        """
        self.device = device
        deadline = deadline_of(self.timeout)
        if deadline is not None and until is not None:
            deadline = min(deadline, until)
        connections, number, mesh = ffi.NULL, 0, 0
        lines = None
        late: list[int] = []
        lost = False
        sealing = _Sealing({}, 0)
        context = 0 if self.c.waits or not cuda.available() else cuda.primary_context(device)
        milliseconds = 0 if self.timeout is None else max(1, int(self.timeout * 1000))
        with _thread() as no_thread:
            if with_channel and self.size > 1:
                opened = self._connect(handle, no_thread, channel.time_for_a_step(deadline), look)
                lines, mesh = opened.lines, opened.mesh
                connections, number = lines.connections, lines.number
                late = opened.late
                lost = bool(late) or any(each.socket == lib.PYNCCL_LINE_GONE for each in connections)
                self.processes, self.visible = opened.processes, opened.visible
                sealing = _Sealing(opened.sessions, self.size)
            if no_thread is not None:
                raise no_thread
            end = _end_action()
            with channel.handing_over(lines):
                code = lib.pynccl_watch_start(
                    self.c, connections, number, mesh, milliseconds, end, context, sealing.given
                )
        if code:
            raise _not_started(code)
        if self.visible:
            pids = [process.pid * seen for process, seen in zip(self.processes, self.visible, strict=True)]
            lib.pynccl_watch_processes(self.c, pids, [process.start for process in self.processes])
        # A rank that is connected to all others must hear why this one is not.
        found = self.verdict(DEATH_MS) if lost else None
        if late:
            raise NcclTimeoutError(
                f"rank {self.rank} of {self.size} opened the control channel, and {rank_list(late)} did not "
                "connect in time",
                ranks=late,
                rank=self.rank,
                size=self.size,
            ) from found
        if found is not None:
            raise found

    def _connect(
        self, handle: Handle, failure: NcclError | None, deadline: float | None, look: Look | None
    ) -> channel.Channel:
        def look_twice() -> None:
            look_outside()
            streams.raise_async_error(handle())
            if look is not None:
                look()

        def share(mine: bytes) -> list[bytes]:
            return self.gather(handle, mine, deadline, look)

        try:
            return channel.connect(self.rank, self.size, share, failure, deadline, look_twice)
        except NcclTimeoutError as error:
            raise NcclTimeoutError(
                f"{error}: a rank is late, or has no time-out and no check mode, which are set on all ranks "
                "of a communicator, or on none",
                ranks=error.ranks,
                rank=self.rank,
                size=self.size,
            ) from None

    def send(self, to: int, tag: int, data: bytes) -> None:
        """Send a message to a set of ranks, given by its bits."""
        words = ffi.from_buffer("uint64_t[]", to.to_bytes((self.size + 63) // 64 * 8, "little"))
        lib.pynccl_watch_send(self.c, words, tag, data, len(data))

    # --- verdicts ---

    def verdict(self, wait_ms: int = 0) -> NcclError | None:
        """Return the watchdog's verdict as an exception, or None."""
        if not lib.pynccl_watch_verdict(self.c, ffi.NULL, wait_ms):
            return None
        found = ffi.new("pynccl_verdict*")
        lib.pynccl_watch_verdict(self.c, found, 0)
        return self._exception(found)

    def raise_verdict(self, wait_ms: int = 0) -> None:
        """Raise the watchdog's verdict if there is one within `wait_ms` milliseconds."""
        error = self.verdict(wait_ms)
        if error is not None:
            raise error

    def patience(self, error: NcclError) -> int:
        """Return how many milliseconds after an error of the library its verdict may come."""
        if not self.c.watch:
            return 0
        wait = DEATH_MS if error.result in BY_DEATH else _REPORT_MS if error.result in _BY_REPORT else 0
        # The losses of many ranks take longer to reach all of them.
        return wait * -(-self.size // lib.PYNCCL_FAST_RANKS)

    def may_explain(self, error: NcclError, since: float) -> bool:
        """Tell whether a verdict may still come for an error of the library at a time of time.monotonic()."""
        waited, patience = (time.monotonic() - since) * 1000, self.patience(error)
        return waited < patience or bool(waited < 4 * patience and lib.pynccl_watch_decides(self.c))

    def cause(self, error: NcclError, wait_ms: int | None = None) -> NcclError:
        """Return the verdict that explains an error of the library, or the error itself."""
        since = time.monotonic()
        found = self.verdict(self.patience(error) if wait_ms is None else wait_ms)
        if found is None:
            lib.pynccl_watch_library_failed(self.c)
            found = self.verdict()
            if not isinstance(found, RankFailedError):
                return error
        # The end of a rank is no reason why its last message differs.
        if isinstance(found, RankFailedError) and _called_else(error, int(self.c.handle)):
            return error
        # A rank that has waited in vain for the cause of the same error may abort.
        if time.monotonic() - since > _OWN_ABORT and self._have_aborted(found):
            return error
        found.__cause__ = error
        return found

    def _have_aborted(self, found: NcclError) -> bool:
        ranks, departures = found.ranks if isinstance(found, RankFailedError) else [], self._departures()
        return bool(ranks) and all(departures[rank] == lib.PYNCCL_ABORTS_FIRST for rank in ranks)

    def _departures(self) -> list[Any]:
        """Return for each rank the reason with which it has left, if it has."""
        fates = ffi.new("unsigned char[]", self.size)
        lib.pynccl_watch_fates(self.c, fates)
        return [fate & lib.PYNCCL_DEPARTURE for fate in ffi.buffer(fates)[:]]

    def who_left(self, what: str) -> NcclError | None:
        """If ranks have left without closing the communicator, make that the verdict, and return it."""
        return self.expire(what) if lib.PYNCCL_ENDS in self._departures() else None

    def waits(self, waited: float, limit: float) -> None:
        """Tell how long a wait has lasted: shortly before its time-out it asks the other ranks to respond."""
        lib.pynccl_watch_waits(self.c, int(waited * 1e9), int(limit * 1e9))

    def hear(self) -> None:
        """At a time-out, hear whether the other ranks respond."""
        lib.pynccl_watch_hear(self.c)

    def expire(self, what: str, awaited: Sequence[int] = ()) -> NcclError | None:
        """Make the reason of a time-out the verdict, and return it; `hear` comes before.

        `awaited` has the ranks that are late, if the caller knows them.
        """
        return self._reason(what, True, awaited)

    def explain(self, what: str) -> NcclError | None:
        """Return the verdict, or the error of a wait that was too short, with what the ranks do."""
        error = self.verdict() or self._reason(what, False)
        if isinstance(error, RankFailedError) and not self.verdict():
            # Nothing has failed yet: the call goes on.
            error = NcclTimeoutError(str(error), ranks=error.ranks, rank=self.rank, size=self.size)
        return error

    def _reason(self, what: str, publish: bool, awaited: Sequence[int] = ()) -> NcclError | None:
        found = ffi.new("pynccl_verdict*")
        text = what.encode()[:500]
        if not lib.pynccl_watch_expire(self.c, text, awaited, len(awaited), publish, found):
            return None
        return self._exception(found)

    def _exception(self, found: Any) -> NcclError:
        text = ffi.string(found.text).decode(errors="replace")
        if found.reporter:
            text = text[found.place :]
            # Else the text names its first author.
            if not found.relayed:
                text = f"rank {found.reporter - 1} reports: {text}"
        elif found.trouble == lib.PYNCCL_LIBRARY_FAILED:
            text = f"the library reports: {text}"
        place: dict[str, Any] = {"rank": self.rank, "size": self.size}
        ranks = [int(rank) for rank in found.ranks[0 : found.count]]
        if found.trouble == lib.PYNCCL_RANKS_FAILED:
            return RankFailedError(text, ranks=ranks, **place)
        if found.trouble == lib.PYNCCL_MISMATCHED:
            return CollectiveMismatchError(text, **place)
        if found.trouble == lib.PYNCCL_LIBRARY_FAILED:
            # What the library reports may be the abort of the ranks that went on.
            if left := self.left_behind():
                return left
            return error_class(found.result)(text, result=int(found.result), **place)
        return NcclTimeoutError(text, ranks=ranks, **place)

    def left_behind(self) -> RankFailedError | None:
        """Return an error if other ranks have replaced the communicator by one without this rank."""
        if lib.PYNCCL_GOES_ON not in self._departures():
            return None
        text = f"the other ranks went on without this one, {self.rank} of {self.size}"
        return RankFailedError(text, ranks=[self.rank], rank=self.rank, size=self.size)

    # --- the library's communicator, which the watchdog may end ---

    def claim(self, wait_ms: int = _CLAIM_MS) -> bool:
        """Take the library's communicator from the watchdog; False if the watchdog has released it."""
        return bool(lib.pynccl_watch_claim(self.c, wait_ms))

    def settle(self) -> bool:
        """Wait until the watchdog has handled a failure; False if it has released the handle."""
        return bool(lib.pynccl_watch_settle(self.c, _CLAIM_MS))

    def stop(self, reason: Any) -> None:
        """Stop watching, and tell the other ranks the reason."""
        lib.pynccl_watch_stop(self.c, reason)

    # --- through the library ---

    def gather(
        self, handle: Handle, mine: bytes, deadline: float | None, look: Look | None = None
    ) -> list[bytes]:
        """Exchange bytes of equal length between all ranks through the library."""
        # In numbers of 64 bits.
        size = -len(mine) % 8 + len(mine)
        data = np.zeros((self.size, size), np.uint8)
        data[self.rank, : len(mine)] = np.frombuffer(mine, np.uint8)

        def live() -> int:
            look_outside()
            if look is not None:
                look()
            return handle()

        if self.c.waits:
            self._all_gather(data.ctypes.data, size, int(self.c.stream), deadline, live)
        else:
            with cuda.using_device(self.device):
                pointer, stream = cuda.memory_allocate(data.nbytes), cuda.stream_create()
                try:
                    cuda.copy_to_device(pointer, data.ctypes.data, data.nbytes)
                    self._all_gather(pointer, size, stream, deadline, live)
                    cuda.copy_to_host(data.ctypes.data, pointer, data.nbytes)
                finally:
                    cuda.memory_free(pointer)
                    cuda.stream_destroy(stream)
        return [bytes(row[: len(mine)]) for row in data]

    def _all_gather(self, pointer: int, size: int, stream: int, deadline: float | None, live: Handle) -> None:
        mine = pointer + self.rank * size
        if self.c.waits:
            # A mismatch then names the control channel.
            capi.pyncclCpuExchange(mine, pointer, size // 8, pyncclCpuOpenChannel, live(), stream)
        else:
            capi.ncclAllGather(mine, pointer, size, int(DataType.UINT8), live(), stream)
        wait = streams.wait_cpu if self.c.waits else streams.wait_cuda

        def over() -> bool:
            return streams.wait_ready(live, deadline) and wait(live, stream, deadline)

        if over():
            return
        late = awaited_ranks(live(), self.size) if self.c.waits else []
        # Meanwhile the last rank may have come, or another one have given up.
        if late or not over():
            who = rank_list(late) if late else "the other ranks"
            raise NcclTimeoutError(
                f"rank {self.rank} of {self.size} timed out while it waited for {who} to open the control "
                "channel",
                ranks=late,
            )


class _Sealing:
    """The keys with which native code encrypts its frames; it keeps a copy."""

    def __init__(self, sessions: Mapping[int, Session], size: int) -> None:
        self.given = ffi.NULL
        if not sessions:
            return
        self._outgoing, self._incoming = (ffi.new("pynccl_cipher[]", size) for _ in range(2))
        for rank, session in sessions.items():
            for given, cipher in zip((self._outgoing, self._incoming), session, strict=True):
                given[rank] = {"key": cipher.key, "count": cipher.count}
        functions = load_noise().native_functions()
        self.given = ffi.new("pynccl_sealing*", (*functions, self._outgoing, self._incoming))


def _end_action() -> Any:
    """Return how the watchdog ends outstanding calls: by a revoke, by an abort, or not at all.

    Without ncclCommRevoke only an abort ends calls, but ncclCommShrink needs an open parent.
    """
    if lib.nccl_api_find(b"ncclCommRevoke"):
        return lib.PYNCCL_ON_FAILURE_REVOKE
    return lib.PYNCCL_ON_FAILURE_MARK if lib.nccl_api_find(b"ncclCommShrink") else lib.PYNCCL_ON_FAILURE_ABORT
