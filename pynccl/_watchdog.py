"""What Python does about the watchdog (native/watchdog.h): start it, and raise its verdicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pynccl import _channel, _cuda, _streams, capi
from pynccl._binding import ffi, lib
from pynccl._errors import (
    CollectiveMismatchError,
    NcclError,
    NcclSystemError,
    NcclTimeoutError,
    RankFailedError,
    error_class,
)
from pynccl._handshake import load_noise
from pynccl._lifetime import deadline_of, look_outside
from pynccl._types import DataType

if TYPE_CHECKING:
    from pynccl._communicator import Communicator
    from pynccl._noise import Session

# Results of the library that a death may be behind.
BY_DEATH = (1, 2, 3, 6)
# After an error of the library: so long until the death behind it is known, or another rank's report is here.
_DEATH_MS, _REPORT_MS = 1500, 400
_BY_REPORT = (5, 8)
_CLAIM_MS = 5000


def start(comm: Communicator, with_channel: bool, look: Callable[[], object] | None) -> None:
    """Watch a new communicator; collective, where there is a channel. `look` is called while it waits."""
    timeout = comm._timeout
    deadline = deadline_of(timeout)
    if deadline is not None and comm._until is not None:
        deadline = min(deadline, comm._until)
    sockets, processes = ffi.NULL, []
    gone, sealing = False, _Sealing({}, 0)
    context = 0 if comm._waits or not _cuda.available() else _cuda.primary_context(comm.device)
    if with_channel and comm.size > 1:
        channel = _connect(comm, deadline, look)
        sockets, gone = ffi.new("int[]", channel.sockets), _channel.GONE in channel.sockets
        processes, sealing = channel.processes, _Sealing(channel.sessions, comm.size)
    milliseconds = 0 if timeout is None else max(1, int(timeout * 1000))
    code = lib.pynccl_watch_start(comm._c, sockets, milliseconds, _cure(), context, sealing.given)
    if code:
        raise NcclSystemError(f"the watchdog cannot be started: {os.strerror(code)}")
    if processes:
        pids = [process.pid if process.start else 0 for process in processes]
        lib.pynccl_watch_processes(comm._c, pids, [process.start for process in processes])
        comm._visible = [bool(pid) for pid in pids]
    if gone:
        raise_verdict(comm, _DEATH_MS)


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


def _connect(
    comm: Communicator, deadline: float | None, look: Callable[[], object] | None
) -> _channel.Channel:
    def look_twice() -> None:
        look_outside()
        _streams.raise_async_error(comm.handle)
        if look is not None:
            look()

    def share(mine: bytes) -> list[bytes]:
        return gather(comm, mine, deadline, look)

    try:
        return _channel.connect(comm.rank, comm.size, share, deadline, look_twice)
    except NcclTimeoutError as error:
        raise NcclTimeoutError(
            f"{error}. Time-outs and check mode are for all ranks of a communicator, or for none",
            rank=comm.rank,
            size=comm.size,
        ) from None


def gather(
    comm: Communicator, mine: bytes, deadline: float | None, look: Callable[[], object] | None = None
) -> list[bytes]:
    """Collect as many bytes of every rank through the library."""
    size = len(mine)
    data = np.zeros((comm.size, size), np.uint8)
    data[comm.rank] = np.frombuffer(mine, np.uint8)

    def live() -> int:
        look_outside()
        if look is not None:
            look()
        return comm.handle

    if comm._waits:
        _all_gather(comm, data.ctypes.data, size, comm._own_stream, deadline, live)
    else:
        with _cuda.using_device(comm.device):
            pointer, stream = _cuda.memory_allocate(data.nbytes), _cuda.stream_create()
            try:
                _cuda.copy_to_device(pointer, data.ctypes.data, data.nbytes)
                _all_gather(comm, pointer, size, stream, deadline, live)
                _cuda.copy_to_host(data.ctypes.data, pointer, data.nbytes)
            finally:
                _cuda.memory_free(pointer)
                _cuda.stream_destroy(stream)
    return [bytes(row) for row in data]


def _all_gather(
    comm: Communicator,
    pointer: int,
    size: int,
    stream: int,
    deadline: float | None,
    live: Callable[[], int],
) -> None:
    mine = pointer + comm.rank * size
    capi.ncclAllGather(mine, pointer, size, int(DataType.UINT8), comm.handle, stream)
    wait = _streams.wait_cpu if comm._waits else _streams.wait_cuda
    if not (_streams.wait_ready(live, deadline) and wait(live, stream, deadline)):
        raise NcclTimeoutError(
            f"rank {comm.rank} of {comm.size} waited in vain for the others to open the control channel"
        )


def verdict(comm: Communicator, wait_ms: int = 0) -> NcclError | None:
    """Return the watchdog's verdict on a communicator as an exception, None while there is none."""
    if not lib.pynccl_watch_verdict(comm._c, ffi.NULL, wait_ms):
        return None
    found = ffi.new("pynccl_verdict*")
    lib.pynccl_watch_verdict(comm._c, found, 0)
    return _exception(comm, found)


def raise_verdict(comm: Communicator, wait_ms: int = 0) -> None:
    """Raise the watchdog's verdict, if there is one within so many milliseconds."""
    error = verdict(comm, wait_ms)
    if error is not None:
        raise error


def cause(comm: Communicator, error: NcclError) -> NcclError:
    """Return the verdict behind an error of the library, or that error where there is none."""
    wait = _DEATH_MS if error.result in BY_DEATH else _REPORT_MS if error.result in _BY_REPORT else 0
    found = verdict(comm, wait)
    if found is None:
        lib.pynccl_watch_blame_library(comm._c)
        found = verdict(comm)
        if not isinstance(found, RankFailedError):
            return error
    found.__cause__ = error
    return found


def goodbye(comm: Communicator) -> Any:
    """Return how an abort is told to the other ranks: as the trouble, or as a consequence of it."""
    if verdict(comm) is None and comm._handle:
        # What the program aborts for may not have come through here.
        error = comm.async_error()
        if error is not None and error.result in BY_DEATH:
            cause(comm, error)
    return lib.PYNCCL_ABORTS_FIRST if verdict(comm) is None else lib.PYNCCL_ABORTS_TOO


def expire(comm: Communicator, what: str, condemn: bool) -> NcclError | None:
    """Return why something took too long; with `condemn` the communicator is in trouble from now on."""
    found = ffi.new("pynccl_verdict*")
    if not lib.pynccl_watch_expire(comm._c, what.encode()[:500], condemn, found):
        return None
    return _exception(comm, found)


def _exception(comm: Communicator, found: Any) -> NcclError:
    text = ffi.string(found.text).decode(errors="replace")
    place: dict[str, Any] = {"rank": int(comm._c.rank), "size": int(comm._c.size)}
    if found.trouble == lib.PYNCCL_RANKS_FAILED:
        return RankFailedError(text, ranks=[int(rank) for rank in found.ranks[0 : found.count]], **place)
    if found.trouble == lib.PYNCCL_MISMATCHED:
        return CollectiveMismatchError(text, **place)
    if found.trouble == lib.PYNCCL_LIBRARY_FAILED:
        return error_class(found.result)(text, result=int(found.result), **place)
    return NcclTimeoutError(text, **place)


def claim(comm: Communicator) -> bool:
    """Keep the watchdog from the library's communicator; False where it has given that back already."""
    return bool(lib.pynccl_watch_claim(comm._c, _CLAIM_MS))


def settle(comm: Communicator) -> bool:
    """Wait until the watchdog is done with a failed communicator; False where it gave its handle back."""
    return bool(lib.pynccl_watch_settle(comm._c, _CLAIM_MS))
