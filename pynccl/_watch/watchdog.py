"""What Python does about the watchdog (native/watchdog.h): start it, and raise its verdicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pynccl import capi
from pynccl._device import streams
from pynccl._device.blocking import deadline_of, look_outside
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
from pynccl._secure.handshake import load_noise
from pynccl._types import DataType
from pynccl._watch import channel
from pynccl._watch.ended import Process

if TYPE_CHECKING:
    from pynccl._secure.noise import Session

# Results of the library that a death may be behind.
BY_DEATH = (1, 2, 3, 6)
# After an error of the library: so long until the death behind it is known, or another rank's report is here.
DEATH_MS, _REPORT_MS = 1500, 400
_BY_REPORT = (5, 8)
_CLAIM_MS = 5000

Look = Callable[[], object]
Handle = Callable[[], int]


class Watch:
    """The watchdog of one communicator, which it knows as its C struct and its device.

    Where a method takes `handle`, that returns the ncclComm_t, and raises where there is none any more.
    """

    def __init__(self, c: Any, timeout: float | None) -> None:
        self.c, self.timeout = c, timeout
        self.device = 0
        # The ranks' processes, and which of them this one can see.
        self.processes: Sequence[Process] = ()
        self.visible: Sequence[bool] = ()

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
        """Tell whether the ranks have a control channel."""
        return bool(lib.pynccl_watch_connected(self.c))

    def start(
        self, handle: Handle, device: int, until: float | None, look: Look | None, *, with_channel: bool
    ) -> None:
        """Watch a new communicator; collective, where there is a channel.

        `look` is called while it waits, until `until` at the latest.
        """
        self.device = device
        deadline = deadline_of(self.timeout)
        if deadline is not None and until is not None:
            deadline = min(deadline, until)
        sockets = ffi.NULL
        gone, sealing = False, _Sealing({}, 0)
        context = 0 if self.c.waits or not cuda.available() else cuda.primary_context(device)
        if with_channel and self.size > 1:
            opened = self._connect(handle, deadline, look)
            sockets, gone = ffi.new("int[]", opened.sockets), channel.GONE in opened.sockets
            self.processes, self.visible = opened.processes, opened.visible
            sealing = _Sealing(opened.sessions, self.size)
        milliseconds = 0 if self.timeout is None else max(1, int(self.timeout * 1000))
        code = lib.pynccl_watch_start(self.c, sockets, milliseconds, _cure(), context, sealing.given)
        if code:
            raise NcclSystemError(f"the watchdog cannot be started: {os.strerror(code)}")
        if self.visible:
            pids = [process.pid * seen for process, seen in zip(self.processes, self.visible, strict=True)]
            lib.pynccl_watch_processes(self.c, pids, [process.start for process in self.processes])
        if gone:
            self.raise_verdict(DEATH_MS)

    def _connect(self, handle: Handle, deadline: float | None, look: Look | None) -> channel.Channel:
        def look_twice() -> None:
            look_outside()
            streams.raise_async_error(handle())
            if look is not None:
                look()

        def share(mine: bytes) -> list[bytes]:
            return self.gather(handle, mine, deadline, look)

        try:
            return channel.connect(self.rank, self.size, share, deadline, look_twice)
        except NcclTimeoutError as error:
            raise NcclTimeoutError(
                f"{error}. Time-outs and check mode are for all ranks of a communicator, or for none",
                rank=self.rank,
                size=self.size,
            ) from None

    # --- verdicts ---

    def verdict(self, wait_ms: int = 0) -> NcclError | None:
        """Return the watchdog's verdict as an exception, None while there is none."""
        if not lib.pynccl_watch_verdict(self.c, ffi.NULL, wait_ms):
            return None
        found = ffi.new("pynccl_verdict*")
        lib.pynccl_watch_verdict(self.c, found, 0)
        return self._exception(found)

    def raise_verdict(self, wait_ms: int = 0) -> None:
        """Raise the watchdog's verdict, if there is one within so many milliseconds."""
        error = self.verdict(wait_ms)
        if error is not None:
            raise error

    def cause(self, error: NcclError) -> NcclError:
        """Return the verdict behind an error of the library, or that error where there is none."""
        wait = DEATH_MS if error.result in BY_DEATH else _REPORT_MS if error.result in _BY_REPORT else 0
        found = self.verdict(wait)
        if found is None:
            lib.pynccl_watch_blame_library(self.c)
            found = self.verdict()
            if not isinstance(found, RankFailedError):
                return error
        found.__cause__ = error
        return found

    def expire(self, what: str, fatal: bool) -> NcclError | None:
        """Return why something took too long; with `fatal` the communicator is in trouble from now on."""
        found = ffi.new("pynccl_verdict*")
        if not lib.pynccl_watch_expire(self.c, what.encode()[:500], fatal, found):
            return None
        return self._exception(found)

    def _exception(self, found: Any) -> NcclError:
        text = ffi.string(found.text).decode(errors="replace")
        place: dict[str, Any] = {"rank": self.rank, "size": self.size}
        if found.trouble == lib.PYNCCL_RANKS_FAILED:
            return RankFailedError(text, ranks=[int(rank) for rank in found.ranks[0 : found.count]], **place)
        if found.trouble == lib.PYNCCL_MISMATCHED:
            return CollectiveMismatchError(text, **place)
        if found.trouble == lib.PYNCCL_LIBRARY_FAILED:
            return error_class(found.result)(text, result=int(found.result), **place)
        return NcclTimeoutError(text, **place)

    # --- the library's communicator, which the watchdog may end ---

    def claim(self, wait_ms: int = _CLAIM_MS) -> bool:
        """Keep the watchdog from the library's communicator; False where it has given that back already."""
        return bool(lib.pynccl_watch_claim(self.c, wait_ms))

    def settle(self) -> bool:
        """Wait until the watchdog is done with a failed communicator; False where it gave its handle back."""
        return bool(lib.pynccl_watch_settle(self.c, _CLAIM_MS))

    def stop(self, goodbye: Any) -> None:
        """Stop watching, and tell the other ranks why."""
        lib.pynccl_watch_stop(self.c, goodbye)

    # --- through the library ---

    def gather(
        self, handle: Handle, mine: bytes, deadline: float | None, look: Look | None = None
    ) -> list[bytes]:
        """Collect as many bytes of every rank through the library."""
        size = len(mine)
        data = np.zeros((self.size, size), np.uint8)
        data[self.rank] = np.frombuffer(mine, np.uint8)

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
        return [bytes(row) for row in data]

    def _all_gather(self, pointer: int, size: int, stream: int, deadline: float | None, live: Handle) -> None:
        mine = pointer + self.rank * size
        capi.ncclAllGather(mine, pointer, size, int(DataType.UINT8), live(), stream)
        wait = streams.wait_cpu if self.c.waits else streams.wait_cuda
        if not (streams.wait_ready(live, deadline) and wait(live, stream, deadline)):
            raise NcclTimeoutError(
                f"rank {self.rank} of {self.size} waited in vain for the others to open the control channel"
            )


class _Sealing:
    """What native code gets to seal its frames with; it keeps a copy."""

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


def _cure() -> Any:
    """Return what the watchdog may do to the library's communicator.

    Before ncclCommRevoke an abort is all there is, but ncclCommShrink needs its parent alive.
    """
    if lib.nccl_api_find(b"ncclCommRevoke"):
        return lib.PYNCCL_CURE_REVOKE
    return lib.PYNCCL_CURE_MARK if lib.nccl_api_find(b"ncclCommShrink") else lib.PYNCCL_CURE_ABORT
