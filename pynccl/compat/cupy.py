"""The interface of cupy.cuda.nccl over pynccl, without CuPy: `from pynccl.compat import cupy as nccl`.

Differences from CuPy:

- Every result is checked, including those of destroy and abort, and every code has an exception.
- Garbage collection makes no collective call: it warns, and the end of the process aborts open communicators.
- The loaded library decides which functions are available, not the library of CuPy's build.
- Calls on a non-blocking communicator (NCCL_COMM_BLOCKING=0) wait until it is ready.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from pynccl import _errors as _base
from pynccl import capi
from pynccl._comm import lifetime
from pynccl._device.streams import wait_ready as _wait_ready
from pynccl._library.binding import lib as _lib
from pynccl._library.generated.api import (
    ncclAvg,
    ncclBfloat16,
    ncclFloat16,
    ncclFloat32,
    ncclFloat64,
    ncclInt8,
    ncclInt32,
    ncclInt64,
    ncclMax,
    ncclMin,
    ncclProd,
    ncclSum,
    ncclUint8,
    ncclUint32,
    ncclUint64,
)
from pynccl._library.generated.structs import Config as _Config
from pynccl._library.loader import load as _load
from pynccl._library.status import IN_PROGRESS as _IN_PROGRESS
from pynccl._library.status import check as _check

NCCL_INT8 = NCCL_CHAR = ncclInt8
NCCL_UINT8 = ncclUint8
NCCL_INT32 = NCCL_INT = ncclInt32
NCCL_UINT32 = ncclUint32
NCCL_INT64 = ncclInt64
NCCL_UINT64 = ncclUint64
NCCL_FLOAT16 = NCCL_HALF = ncclFloat16
NCCL_FLOAT32 = NCCL_FLOAT = ncclFloat32
NCCL_FLOAT64 = NCCL_DOUBLE = ncclFloat64
NCCL_BFLOAT16 = ncclBfloat16
NCCL_SUM = ncclSum
NCCL_PROD = ncclProd
NCCL_MAX = ncclMax
NCCL_MIN = ncclMin
NCCL_AVG = ncclAvg

# Called directly for speed: a program makes these calls in every step.
_ncclAllGather = _lib.ncclAllGather
_ncclAllReduce = _lib.ncclAllReduce
_ncclBcast = _lib.ncclBcast
_ncclBroadcast = _lib.ncclBroadcast
_ncclRecv = _lib.ncclRecv
_ncclReduce = _lib.ncclReduce
_ncclReduceScatter = _lib.ncclReduceScatter
_ncclSend = _lib.ncclSend

_NAMES = {
    0: "SUCCESS",
    1: "UNHANDLED_CUDA_ERROR",
    2: "SYSTEM_ERROR",
    3: "INTERNAL_ERROR",
    4: "INVALID_ARGUMENT",
    5: "INVALID_USAGE",
    6: "REMOTE_ERROR",
    7: "IN_PROGRESS",
    8: "TIMEOUT",
}
available: bool


def __getattr__(name: str) -> Any:
    if name == "available":
        try:
            _load()
        except _base.LibraryNotFoundError:
            return False
        return True
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class NcclError(_base.NcclError):
    """Report a result code, `status`; a pynccl.NcclError too."""

    def __init__(self, status: int, cause: _base.NcclError | None = None) -> None:
        text = str(cause) if cause else _meaning(status)
        super().__init__(
            f"NCCL_ERROR_{_NAMES.get(status, status)}: {text}",
            result=status,
            function=cause.function if cause else "",
            detail=cause.detail if cause else "",
        )
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.args, self.__dict__)


def _meaning(status: int) -> str:
    try:
        return capi.ncclGetErrorString(status)
    except _base.LibraryNotFoundError:
        return _base.result_name(status)


def _restored(args: tuple[Any, ...], state: dict[str, Any]) -> NcclError:
    # Without __init__, which would ask the library for the text again.
    error = NcclError.__new__(NcclError, *args)
    error.__dict__.update(state)
    return error


def check_status(status: int) -> None:
    """Raise the exception of a result code."""
    if status:
        raise NcclError(status)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except _base.NcclError as error:
        # An error without a code never reached the library, for example a missing function.
        if error.result is None:
            raise
        raise NcclError(error.result, error) from error


def get_build_version() -> int:
    """Return the loaded version, in place of the version of the build."""
    return get_version()


def get_version() -> int:
    """Return the loaded library's version, such as 23203 for 2.32.3."""
    return int(_call(capi.ncclGetVersion))


def get_unique_id() -> bytes:
    """Return the 128 bytes that the ranks of one communicator share."""
    return bytes(_call(capi.ncclGetUniqueId))


def groupStart() -> None:
    """Begin a group of calls."""
    _call(capi.ncclGroupStart)


def groupEnd() -> None:
    """End a group of calls, and start them."""
    busy = _call(capi.ncclGroupEnd) == _IN_PROGRESS
    if _lib.pynccl_group_depth():
        return
    late = [comm for comm in _late if comm._comm]
    for comm in late:
        _late.remove(comm)
        comm._own(int(comm._comm))
    for comm in list(_living) if busy else ():
        comm._settle()


class NcclConfig:
    """Hold the options of a new communicator."""

    def __init__(self, split_share: int = 0) -> None:
        self._config = _Config(splitShare=split_share)

    @property
    def split_share(self) -> int:
        """Whether children of a split share the parent's resources."""
        return int(self._config.splitShare or 0)


class NcclCommunicator:
    """Take part, as `rank` of `ndev`, in the communicator of a unique id; buffers and streams are ints."""

    _comm: int = 0

    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:
        if not isinstance(commId, bytes):
            raise TypeError(f"commId is of type {type(commId).__name__}; expected bytes")
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        options = _options(config)
        if options is None:
            self._own(_call(capi.ncclCommInitRank, ndev, commId, rank))
        else:
            self._own(_call(capi.ncclCommInitRankConfig, ndev, commId, rank, options))

    def _own(self, comm: int) -> None:
        self._comm = comm
        _living.add(self)
        if _lib.pynccl_group_depth():
            # NCCL may write the handle only at the end of the group.
            _late.append(self)
            return
        lifetime.own(comm)
        self._settle()

    def _settle(self) -> None:
        """Wait until a non-blocking communicator has completed the last call."""
        _call(_wait_ready, lambda: self._comm, None)

    def _after(self, result: int, function: str) -> None:
        """Raise the error of a call, or wait until the call has completed."""
        _call(_check, result, function, self._comm)
        if not _lib.pynccl_group_depth():
            self._settle()

    def __del__(self) -> None:
        if self._comm:
            warnings.warn(
                f"{self!r} was never destroyed or aborted", ResourceWarning, source=self, stacklevel=2
            )

    @property
    def comm(self) -> int:
        """The ncclComm_t as an int, 0 after destroy or abort."""
        return int(self._comm)

    @staticmethod
    def initAll(devices: int | list[int]) -> list[NcclCommunicator]:
        """Return communicators of several devices in this process; a number means the first devices."""
        if isinstance(devices, list):
            devlist = devices
        elif isinstance(devices, int):
            devlist = list(range(devices))
        else:
            raise ValueError('"devices" should be an int or a list of int.')
        comms = [NcclCommunicator.__new__(NcclCommunicator) for _ in devlist]
        NcclCommunicator._initAll(comms, len(devlist), devlist)
        return comms

    @staticmethod
    def _initAll(comms: list[NcclCommunicator], ndev: int, devlist: list[int] | None = None) -> None:
        # Separate from initAll for subclasses that make the objects themselves.
        for comm, handle in zip(comms, _call(capi.ncclCommInitAll, ndev, devlist), strict=True):
            comm._own(handle)

    def destroy(self) -> None:
        """Release all resources, together with the other ranks; no effect if repeated."""
        self._end(capi.ncclCommDestroy)

    def abort(self) -> None:
        """Release all resources immediately, without the other ranks."""
        self._end(capi.ncclCommAbort)

    def _end(self, function: Callable[[int], int]) -> None:
        comm, self._comm = self._comm, 0
        if comm:
            # Before the call: if it does not return, an abort at exit would run concurrently with it.
            lifetime.disown(comm)
            _call(function, comm)

    def device_id(self) -> int:
        """Return the ordinal of this rank's device."""
        return int(_call(capi.ncclCommCuDevice, self._comm))

    def rank_id(self) -> int:
        """Return this rank."""
        return int(_call(capi.ncclCommUserRank, self._comm))

    def size(self) -> int:
        """Return the number of ranks."""
        return int(_call(capi.ncclCommCount, self._comm))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Reduce the buffers of all ranks to every rank."""
        if result := _ncclAllReduce(sendbuf, recvbuf, count, datatype, op, self._comm, stream):
            self._after(result, "ncclAllReduce")

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        """Reduce the buffers of all ranks to the root."""
        if result := _ncclReduce(sendbuf, recvbuf, count, datatype, op, root, self._comm, stream):
            self._after(result, "ncclReduce")

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        """Copy the root's buffer to every rank."""
        if result := _ncclBroadcast(sendbuff, recvbuff, count, datatype, root, self._comm, stream):
            self._after(result, "ncclBroadcast")

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Copy the root's buffer to every rank, in place."""
        if result := _ncclBcast(buff, count, datatype, root, self._comm, stream):
            self._after(result, "ncclBcast")

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        """Reduce the buffers of all ranks; each rank gets its part."""
        if result := _ncclReduceScatter(sendbuf, recvbuf, recvcount, datatype, op, self._comm, stream):
            self._after(result, "ncclReduceScatter")

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """Concatenate the buffers of all ranks on every rank."""
        if result := _ncclAllGather(sendbuf, recvbuf, count, datatype, self._comm, stream):
            self._after(result, "ncclAllGather")

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send a buffer to one rank, which receives it."""
        if result := _ncclSend(sendbuf, count, datatype, peer, self._comm, stream):
            self._after(result, "ncclSend")

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Receive a buffer from one rank, which sends it."""
        if result := _ncclRecv(recvbuf, count, datatype, peer, self._comm, stream):
            self._after(result, "ncclRecv")

    def check_async_error(self) -> None:
        """Raise the error that occurred in the background, if any."""
        state = _call(capi.ncclCommGetAsyncError, self._comm)
        if state != _IN_PROGRESS:
            check_status(state)

    def commSplit(self, color: int, key: int, config: NcclConfig | None = None) -> NcclCommunicator | None:
        """Return a communicator of the ranks with the same color, in the order of their keys; None for -1."""
        handle = _call(capi.ncclCommSplit, self._comm, color, key, _options(config))
        if not _lib.pynccl_group_depth():
            # A non-blocking communicator writes the handle when the split has completed.
            self._settle()
            handle = int(handle)
        if color == capi.NCCL_SPLIT_NOCOLOR:
            return None
        child = NcclCommunicator.__new__(NcclCommunicator)
        child._own(handle)
        return child


_living: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()
_late: list[NcclCommunicator] = []


@atexit.register
def _forget() -> None:
    """Register the handles with lifetime, which aborts them at exit, but not in a forked child."""
    for comm in list(_living):
        comm._comm = 0


os.register_at_fork(after_in_child=_forget)


def _options(config: NcclConfig | None) -> _Config | None:
    if config is not None and not isinstance(config, NcclConfig):
        raise TypeError(f"config is of type {type(config).__name__}; expected NcclConfig or None")
    return None if config is None else config._config
