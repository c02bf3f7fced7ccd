"""The interface of cupy.cuda.nccl over pynccl, without CuPy: `from pynccl.compat import cupy as nccl`.

Differences from CuPy:

- Every result is checked, including those of destroy and abort, and every code has an exception.
- Garbage collection makes no collective call: it warns, and the end of the process aborts open communicators.
- The loaded library decides which functions are available, not the library of CuPy's build.
- Calls on a non-blocking communicator (NCCL_COMM_BLOCKING=0) wait until it is ready.
- Calls in a group are issued by groupEnd, which raises their errors.
- On the CPU library a call on stream 0, or the groupEnd after it, returns when the call is complete.
- The flight recorder, time-outs (PYNCCL_TIMEOUT) and check mode (PYNCCL_CHECK=1) work as for a
  pynccl.Communicator. Dead ranks are a RankFailedError of this module, an NcclError too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pynccl import _errors as _base
from pynccl import capi
from pynccl._base.values import shown
from pynccl._comm import create as _create
from pynccl._comm import derive as _derive
from pynccl._comm import end as _end
from pynccl._comm.calls import Calls as _Calls
from pynccl._comm.core import Core as _Core
from pynccl._comm.groups import Group as _Group
from pynccl._device.devices import device_to_use as _device_to_use
from pynccl._library.binding import ffi as _ffi
from pynccl._library.c_arguments import argument_error as _argument_error
from pynccl._library.generated import kinds as _kinds
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
from pynccl._library.results import result_name as _result_name
from pynccl._trace import recorder as _recorder
from pynccl._types import DataType as _DataType
from pynccl.compat._import import StandIn as _StandIn

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


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "available":
            try:
                _load()
            except _base.LibraryNotFoundError:
                return False
            return True
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_stand_in = _StandIn("cupy.cuda.nccl", __name__)


def install() -> None:
    """Put this module under the name cupy.cuda.nccl in this process, for programs that import that one.

    Raises RuntimeError if a module uses CuPy's own already: call it before the import of these. Raises
    ImportError without CuPy, since Python imports cupy and cupy.cuda first.
    """
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        raise ImportError(
            "cupy.cuda.nccl needs CuPy, which is not installed; expected CuPy (pip install cupy-cuda12x), or "
            "in the program: from pynccl.compat import cupy as nccl"
        )
    _stand_in.install()


def uninstall() -> None:
    """Undo `install` for later imports; modules that have imported this one keep it."""
    _stand_in.uninstall()


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


class RankFailedError(NcclError, _base.RankFailedError):
    """Report which ranks of the communicator died, with a time-out; status 6."""

    def __init__(self, cause: _base.RankFailedError) -> None:
        NcclError.__init__(self, 6, cause)
        self.ranks = cause.ranks


def _meaning(status: int) -> str:
    try:
        return capi.ncclGetErrorString(status)
    except _base.LibraryNotFoundError:
        return _result_name(status)


def _restored(args: tuple[Any, ...], state: dict[str, Any]) -> NcclError:
    # Without __init__, which would ask the library for the text again.
    error = NcclError.__new__(NcclError, *args)
    error.__dict__.update(state)
    return error


def check_status(status: int) -> None:
    """Raise the NcclError of a result code; none for 0."""
    if status:
        raise NcclError(status)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except _base.NcclError as error:
        raise _translated(error) from error


def _translated(error: _base.NcclError) -> _base.NcclError:
    if isinstance(error, _base.RankFailedError):
        return RankFailedError(error)
    # An error without a code never reached the library, for example a missing function.
    return error if error.result is None else NcclError(error.result, error)


def get_build_version() -> int:
    """Return the loaded version, in place of the version of the build; raises as get_version does."""
    return get_version()


def get_version() -> int:
    """Return the loaded library's version, such as 23203 for 2.32.3.

    Raises pynccl.LibraryNotFoundError if no library can be loaded.
    """
    return int(_call(capi.ncclGetVersion))


def get_unique_id() -> bytes:
    """Return the 128 bytes that the ranks of one communicator share.

    Raises NcclError if NCCL fails, and pynccl.LibraryNotFoundError if no library can be loaded.
    """
    return bytes(_call(capi.ncclGetUniqueId))


class _Grouped(threading.local):
    """What groupStart has opened in this thread."""

    def __init__(self) -> None:
        self.depth = 0
        # The calls so far, to be issued together; None in a group of creations.
        self.calls: _Group | None = None
        self.used = False
        # What NCCL makes at the end of a group of creations.
        self.late: list[NcclCommunicator] = []

    def open(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.calls, self.used = _Group(), False
            _call(self.calls.__enter__)

    def close(self) -> None:
        if not self.depth:
            text = "ncclGroupEnd without ncclGroupStart in this thread"
            raise NcclError(5, _base.NcclInvalidUsage(text, function="ncclGroupEnd"))
        self.depth -= 1
        if self.depth:
            return
        calls, self.calls = self.calls, None
        if calls is not None:
            _call(calls.__exit__, None, None, None)
            return
        late, self.late = self.late, []
        try:
            _call(capi.ncclGroupEnd)
        except BaseException:
            for comm in late:
                comm._late = 0
            raise
        for comm in late:
            # Several ranks of one thread cannot open their control channels one after another.
            comm._take(with_channel=len(late) == 1)

    def add(self, comm: NcclCommunicator) -> None:
        """Await a communicator that NCCL makes at the end of the group."""
        self.late.append(comm)

    def for_creation(self) -> bool:
        """Tell whether a group is open; make it one of creations, which pynccl does not record."""
        if not self.depth:
            return False
        if self.used:
            text = "a communicator is created in a group after other calls; expected a group of its own"
            raise NcclError(5, _base.NcclInvalidUsage(text))
        if self.calls is not None:
            # Empty; the exception drops it.
            self.calls.__exit__(NcclError, None, None)
            self.calls = None
            _call(capi.ncclGroupStart)
        return True


_grouped = _Grouped()


def groupStart() -> None:
    """Begin a group of calls; raises pynccl.LibraryNotFoundError if no library can be loaded."""
    _grouped.open()


def groupEnd() -> None:
    """End a group of calls, and start them.

    Raises NcclError without groupStart, or of the call that failed, and RankFailedError if ranks died.
    """
    _grouped.close()


class NcclConfig:
    """Hold the options of a new communicator."""

    def __init__(self, split_share: int = 0) -> None:
        self._config = _Config(splitShare=split_share)

    @property
    def split_share(self) -> int:
        """Whether children of a split share the parent's resources."""
        return int(self._config.splitShare or 0)


@_recorder.with_callers(
    attrgetter("_core.c"),
    *("allReduce", "reduce", "broadcast", "bcast", "reduceScatter", "allGather", "send", "recv"),
    *("commSplit", "destroy"),
)
class NcclCommunicator:
    """Take part, as `rank` of `ndev`, in the communicator of a unique id; buffers and streams are ints.

    With PYNCCL_TIMEOUT its ranks watch each other, PYNCCL_CHECK=1 compares their calls, and the flight
    recorder has them.

    Every operation raises this module's NcclError with NCCL's status, with PYNCCL_TIMEOUT its RankFailedError
    if ranks died, TypeError, OverflowError or ValueError for a wrong argument, and pynccl.NotSupportedError
    if the loaded library lacks the function.
    """

    _core: _Core
    # The ncclComm_t until the end of the group that creates it.
    _late: Any = 0

    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:
        if not isinstance(commId, bytes):
            raise TypeError(f"commId is of type {type(commId).__name__}; expected bytes")
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        options = _options(config)
        _require_ints(ndev=ndev, rank=rank)
        in_group = _grouped.for_creation()
        self._prepare(_Core(None))
        self._core.identity = _recorder.numbered("id", commId, rank=rank)

        def make() -> int:
            if options is None:
                return capi.ncclCommInitRank(ndev, commId, rank)
            return capi.ncclCommInitRankConfig(ndev, commId, rank, options)

        if in_group:
            self._expect(_call(make))
            return
        _call(_load)
        what = f"creating the communicator of rank {rank} of {ndev}"
        # NCCL itself refuses other numbers.
        if 0 <= rank < ndev:
            _recorder.open_trace(self._core.c, self._core.identity, rank, ndev, "init")
        _call(_create.create, self._core, what, make, _device_to_use(None))

    def _prepare(self, core: _Core) -> None:
        self._core, self._calls = core, _Calls(core)
        self._templates: dict[tuple[int, int, int, int], Any] = {}
        self._kept = core, None

    def _expect(self, handle: Any) -> None:
        """Await the handle, which NCCL may write only at the end of the group."""
        self._late = handle
        _grouped.add(self)

    def _take(self, *, with_channel: bool) -> None:
        handle, self._late = self._late, 0
        self._core.until = self._core.deadline(None)[1]
        _call(lambda: _create.take(self._core, int(handle), with_channel=with_channel))

    def _require_made(self, method: str) -> None:
        """Raise in the group that creates this communicator, whose handle is not known yet."""
        if self in _grouped.late:
            text = f"{method} of a communicator that this group creates; expected it after groupEnd"
            raise NcclError(5, _base.NcclInvalidUsage(text))

    @property
    def comm(self) -> int:
        """The ncclComm_t as an int, 0 after destroy or abort."""
        return int(self._core.handle or self._late)

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
        identity = _recorder.numbered("all", os.uname().nodename, os.getpid())
        for comm, handle in zip(comms, _call(capi.ncclCommInitAll, ndev, devlist), strict=True):
            comm._prepare(_Core(None))
            comm._core.identity, comm._core.origin = identity, "init_all"
            comm._late = handle
            # No control channel: the ranks of one process die together.
            comm._take(with_channel=False)

    def destroy(self) -> None:
        """Release all resources, together with the other ranks; no effect if repeated."""
        self._require_made("destroy")
        _call(_end.destroy, self._core)

    def abort(self) -> None:
        """Release all resources immediately, without the other ranks."""
        self._require_made("abort")
        _call(_end.abort, self._core)

    def device_id(self) -> int:
        """Return the ordinal of this rank's device."""
        return int(_call(capi.ncclCommCuDevice, self.comm))

    def rank_id(self) -> int:
        """Return this rank."""
        return int(_call(capi.ncclCommUserRank, self.comm))

    def size(self) -> int:
        """Return the number of ranks."""
        return int(_call(capi.ncclCommCount, self.comm))

    def _issue(
        self, kind: int, datatype: int, op: int, root: int, send: int, recv: int, count: int, stream: int
    ) -> None:
        # No program for CuPy can wait for the CPU library's stream 0.
        wait = 0 if stream else self._core.waits
        try:
            template = self._templates.get((kind, datatype, op, root))
            if template is None:
                template = self._template(kind, datatype, op, root)
            if self._calls.issue(template, send, recv, count, stream, wait, kind, self._kept):
                _grouped.used = True
        except (TypeError, OverflowError) as error:
            numbers = {"count": count, "datatype": datatype, "op": op, _root_name(kind): root}
            types = "uintptr_t, uintptr_t, size_t, int, int, int, uintptr_t"
            raise _argument_error(
                error, types, sendbuf=send, recvbuf=recv, **numbers, stream=stream
            ) from None
        except NcclError:
            raise
        except ValueError as error:
            # Buffers overlap.
            raise _refused(kind, str(error)) from error
        except _base.NcclError as error:
            if not self._core.handle and self._core.watch.verdict() is None:
                # As NCCL answers to the handle 0.
                raise _refused(kind, str(error)) from error
            raise _translated(error) from error

    def _template(self, kind: int, datatype: int, op: int, root: int) -> Any:
        if datatype not in _DATATYPES:
            numbers = ", ".join(map(str, _DATATYPES))
            raise _refused(kind, f"datatype is {shown(datatype)}; expected one of NCCL's: {numbers}")
        if self._core.handle and not 0 <= root < self._core.size:
            name = _root_name(kind)
            raise _refused(kind, f"{name} is {root}; expected 0 <= {name} < {self._core.size}")
        template, _ = self._calls.template_for(kind, datatype, op, root)
        self._templates[kind, datatype, op, root] = template
        return template

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Reduce the buffers of all ranks to every rank."""
        self._issue(_kinds.ALL_REDUCE, datatype, op, 0, sendbuf, recvbuf, count, stream)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        """Reduce the buffers of all ranks to the root."""
        self._issue(_kinds.REDUCE, datatype, op, root, sendbuf, recvbuf, count, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        """Copy the root's buffer to every rank."""
        self._issue(_kinds.BROADCAST, datatype, 0, root, sendbuff, recvbuff, count, stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Copy the root's buffer to every rank, in place."""
        self._issue(_kinds.BROADCAST, datatype, 0, root, buff, buff, count, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        """Reduce the buffers of all ranks; each rank gets its part."""
        self._issue(_kinds.REDUCE_SCATTER, datatype, op, 0, sendbuf, recvbuf, recvcount, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """Concatenate the buffers of all ranks on every rank."""
        self._issue(_kinds.ALL_GATHER, datatype, 0, 0, sendbuf, recvbuf, count, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send a buffer to one rank, which receives it."""
        self._issue(_kinds.SEND, datatype, 0, peer, sendbuf, 0, count, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Receive a buffer from one rank, which sends it."""
        self._issue(_kinds.RECV, datatype, 0, peer, 0, recvbuf, count, stream)

    def check_async_error(self) -> None:
        """Raise the error that occurred in the background, if any."""
        error = _call(self._core.async_error)
        if error is not None:
            raise _translated(error) from error

    def commSplit(self, color: int, key: int, config: NcclConfig | None = None) -> NcclCommunicator | None:
        """Return a communicator of the ranks with the same color, in the order of their keys; None for -1."""
        options = _options(config)
        if _grouped.for_creation():
            return self._split_later(color, key, options)
        core = _call(
            _derive.split, self._core, None if color == capi.NCCL_SPLIT_NOCOLOR else color, key, options
        )
        if core is None:
            return None
        child = NcclCommunicator.__new__(NcclCommunicator)
        child._prepare(core)
        return child

    def _split_later(self, color: int, key: int, options: _Config | None) -> NcclCommunicator | None:
        handle = _call(capi.ncclCommSplit, self.comm, color, key, options)
        if color == capi.NCCL_SPLIT_NOCOLOR:
            return None
        child = NcclCommunicator.__new__(NcclCommunicator)
        child._prepare(_derive.new_child(self._core, _derive.SPLIT, color))
        child._expect(handle)
        return child


def _root_name(kind: int) -> str:
    return "root" if kind in _kinds.ROOTED else "peer"


def _refused(kind: int, text: str) -> NcclError:
    """Return the error of an argument that must not reach the library."""
    function = _kinds.FUNCTIONS[kind]
    return NcclError(4, _base.NcclInvalidArgument(f"{function}: {text}", function=function))


_DATATYPES = tuple(int(each) for each in _DataType)


def _require_ints(**values: int) -> None:
    """Raise unless each value is an int that C's int holds."""
    for name, value in values.items():
        try:
            _ffi.new("int*", value)
        except (TypeError, OverflowError) as error:
            raise _argument_error(error, "int", **{name: value}) from None


def _options(config: NcclConfig | None) -> _Config | None:
    if config is not None and not isinstance(config, NcclConfig):
        raise TypeError(f"config is of type {type(config).__name__}; expected NcclConfig or None")
    return None if config is None else config._config
