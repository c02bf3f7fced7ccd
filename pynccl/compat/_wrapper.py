"""The names of vLLM's and SGLang's pynccl_wrapper.py: ctypes values, enums, NCCLLibrary."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

from pynccl import capi
from pynccl._arrays.buffers import code_of
from pynccl._base.values import shown
from pynccl._comm import lifetime
from pynccl._device.streams import wait_ready
from pynccl._errors import NcclError, NcclInvalidUsage, error_class
from pynccl._library import loader
from pynccl._library.binding import lib
from pynccl._library.generated import api
from pynccl._library.generated.structs import Config
from pynccl._library.status import IN_PROGRESS
from pynccl._types import RedOp, to_unique_id

__all__ = [
    "NCCL_UNIQUE_ID_BYTES",
    "NCCLLibrary",
    "buffer_type",
    "cudaStream_t",
    "ncclComm_t",
    "ncclConfig_t",
    "ncclDataTypeEnum",
    "ncclDataType_t",
    "ncclRedOpTypeEnum",
    "ncclRedOp_t",
    "ncclResult_t",
    "ncclUniqueId",
    "ncclWindow_t",
]

ncclResult_t = ncclDataType_t = ncclRedOp_t = ctypes.c_int
ncclComm_t = ncclWindow_t = cudaStream_t = buffer_type = ctypes.c_void_p

# A pointer, handle or stream, as the callers pass it.
Pointer = ctypes.c_void_p | int | None


class ncclUniqueId(ctypes.Structure):
    """Hold the 128 bytes that the ranks of one communicator share."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


NCCL_UNIQUE_ID_BYTES = ctypes.sizeof(ncclUniqueId)


class ncclConfig_t(Config):
    """Hold a communicator's options, laid out for the loaded library."""

    @classmethod
    def create(cls) -> ncclConfig_t:
        """Return options that leave everything at NCCL's defaults."""
        return cls()


class ncclDataTypeEnum:
    """NCCL's data types."""

    ncclInt8 = ncclChar = api.ncclInt8
    ncclUint8 = api.ncclUint8
    ncclInt32 = ncclInt = api.ncclInt32
    ncclUint32 = api.ncclUint32
    ncclInt64 = api.ncclInt64
    ncclUint64 = api.ncclUint64
    ncclFloat16 = ncclHalf = api.ncclFloat16
    ncclFloat32 = ncclFloat = api.ncclFloat32
    ncclFloat64 = ncclDouble = api.ncclFloat64
    ncclBfloat16 = api.ncclBfloat16
    ncclFloat8e4m3 = api.ncclFloat8e4m3
    ncclFloat8e5m2 = api.ncclFloat8e5m2
    ncclNumTypes = api.ncclNumTypes

    @classmethod
    def from_torch(cls, dtype: Any) -> int:
        """Return the data type of a torch or NumPy dtype; raise ValueError if NCCL has none."""
        try:
            code = code_of(dtype, "dtype")
        except TypeError as error:
            raise ValueError(str(error)) from None
        if code >= cls.ncclNumTypes:
            raise ValueError(f"dtype is {dtype}; expected one of NCCL's own, since it has no such data type")
        return code

    @classmethod
    def supports_torch_dtype(cls, dtype: Any) -> bool:
        """Tell whether NCCL has a data type for this dtype."""
        try:
            cls.from_torch(dtype)
        except ValueError:
            return False
        return True


def op_of(op: Any) -> RedOp:
    """Return the operation that torch's ReduceOp, a RedOp, NCCL's number or a name means."""
    if isinstance(op, int) and not isinstance(op, bool) and op in range(ncclRedOpTypeEnum.ncclNumOps):
        return RedOp(op)
    # torch's ReduceOp(ReduceOp.SUM) holds ReduceOp.SUM.
    meant = getattr(op, "op", op)
    name = str(getattr(meant, "name", meant)).upper()
    try:
        return RedOp["PROD" if name == "PRODUCT" else name]
    except KeyError:
        raise ValueError(f"op is {shown(op)}; expected sum, prod, max, min or avg") from None


class ncclRedOpTypeEnum:
    """NCCL's reduction operations."""

    ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg = range(5)
    ncclNumOps = 5

    @classmethod
    def from_torch(cls, op: Any) -> int:
        """Return the operation of torch's ReduceOp; raise ValueError if NCCL has none."""
        return int(op_of(op))


def _address(value: Any, name: str) -> int:
    """Return a pointer, handle or stream as an int."""
    if isinstance(value, ctypes.c_void_p):
        value = value.value
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {shown(value)}; expected an int or a ctypes.c_void_p")
    return value


# Communicators that NCCLLibrary has made and nobody has released.
_comms: set[int] = set()


class NCCLLibrary:
    """The functions of the loaded libnccl, over pynccl.capi; what fails raises a pynccl.NcclError.

    Every object stands for the library of the process: `so_file` is what `pynccl.load` takes.
    """

    def __init__(self, so_file: str | None = None) -> None:
        loader.load(so_file)

    def has_symbol(self, name: str) -> bool:
        """Tell whether the loaded library has a function."""
        return name in api.FUNCTIONS and bool(lib.nccl_api_find(name.encode()))

    def NCCL_CHECK(self, result: int) -> None:
        """Raise the exception of a result code."""
        if result:
            kind = error_class(result)
            raise kind(f"NCCL error: {self.ncclGetErrorString(result)}", result=result)

    def ncclGetErrorString(self, result: int) -> str:
        """Return what a result code means."""
        return capi.ncclGetErrorString(result)

    def ncclGetRawVersion(self) -> int:
        """Return the version as NCCL's code, such as 23203 for 2.32.3."""
        return capi.ncclGetVersion()

    def ncclGetVersion(self) -> str:
        """Return the version, such as 2.32.3."""
        return loader.version_text(loader.decode_version(capi.ncclGetVersion()))

    # --- communicators ---

    def ncclGetUniqueId(self) -> ncclUniqueId:
        """Return a new id, which the ranks of one communicator share."""
        return self.unique_id_from_bytes(capi.ncclGetUniqueId())

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        """Return the id of 128 bytes; raise ValueError for another number of bytes."""
        return ncclUniqueId.from_buffer_copy(bytes(to_unique_id(data, "data")))

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> ctypes.c_void_p:
        """Join the communicator of an id; return the handle."""
        return self._new(capi.ncclCommInitRank, world_size, id_bytes(unique_id), rank)

    def ncclCommInitRankConfig(
        self, world_size: int, unique_id: ncclUniqueId, rank: int, config: Config | None = None
    ) -> ctypes.c_void_p:
        """Join the communicator of an id with these options; return the handle."""
        return self._new(capi.ncclCommInitRankConfig, world_size, id_bytes(unique_id), rank, config)

    def _new(self, function: Callable[..., int], *args: Any) -> ctypes.c_void_p:
        if lib.pynccl_group_depth():
            raise NcclInvalidUsage(f"{function.__name__} in a group; expected it outside of groups")
        handle = int(function(*args))
        _comms.add(handle)
        lifetime.own(handle)
        _settle(handle)
        return ncclComm_t(handle)

    def ncclCommDestroy(self, comm: Pointer) -> None:
        """Release a communicator, together with the other ranks."""
        self._end(capi.ncclCommDestroy, comm)

    def ncclCommAbort(self, comm: Pointer) -> None:
        """Release a communicator at once, without the other ranks."""
        self._end(capi.ncclCommAbort, comm)

    def _end(self, function: Callable[[int], int], comm: Pointer) -> None:
        handle = _address(comm, "comm")
        # Before the call: if it does not return, an abort at exit would run concurrently with it.
        _comms.discard(handle)
        lifetime.disown(handle)
        function(handle)

    def ncclCommSuspend(self, comm: Pointer, flags: int) -> None:
        """Release a communicator's device memory until it is resumed."""
        self._on(capi.ncclCommSuspend, comm, (_address(comm, "comm"), flags))

    def ncclCommResume(self, comm: Pointer) -> None:
        """Allocate the memory again that ncclCommSuspend has released."""
        self._on(capi.ncclCommResume, comm, (_address(comm, "comm"),))

    # --- operations ---

    def ncclAllReduce(
        self,
        sendbuff: Pointer,
        recvbuff: Pointer,
        count: int,
        datatype: int,
        op: int,
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        """Reduce the buffers of all ranks to every rank."""
        self._run(capi.ncclAllReduce, sendbuff, recvbuff, (count, datatype, op), comm, stream)

    def ncclReduce(
        self,
        sendbuff: Pointer,
        recvbuff: Pointer,
        count: int,
        datatype: int,
        op: int,
        root: int,
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        """Reduce the buffers of all ranks to the root."""
        self._run(capi.ncclReduce, sendbuff, recvbuff, (count, datatype, op, root), comm, stream)

    def ncclReduceScatter(
        self,
        sendbuff: Pointer,
        recvbuff: Pointer,
        count: int,
        datatype: int,
        op: int,
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        """Reduce the buffers of all ranks; each rank gets its part of `count` elements."""
        self._run(capi.ncclReduceScatter, sendbuff, recvbuff, (count, datatype, op), comm, stream)

    def ncclAllGather(
        self, sendbuff: Pointer, recvbuff: Pointer, count: int, datatype: int, comm: Pointer, stream: Pointer
    ) -> None:
        """Concatenate the buffers of all ranks on every rank."""
        self._run(capi.ncclAllGather, sendbuff, recvbuff, (count, datatype), comm, stream)

    def ncclBroadcast(
        self,
        sendbuff: Pointer,
        recvbuff: Pointer,
        count: int,
        datatype: int,
        root: int,
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        """Copy the root's buffer to every rank."""
        self._run(capi.ncclBroadcast, sendbuff, recvbuff, (count, datatype, root), comm, stream)

    def ncclSend(
        self, sendbuff: Pointer, count: int, datatype: int, dest: int, comm: Pointer, stream: Pointer
    ) -> None:
        """Send a buffer to one rank, which receives it."""
        self._run_one(capi.ncclSend, sendbuff, "sendbuff", (count, datatype, dest), comm, stream)

    def ncclRecv(
        self, recvbuff: Pointer, count: int, datatype: int, src: int, comm: Pointer, stream: Pointer
    ) -> None:
        """Receive a buffer from one rank, which sends it."""
        self._run_one(capi.ncclRecv, recvbuff, "recvbuff", (count, datatype, src), comm, stream)

    def _run(
        self,
        function: Callable[..., int],
        sendbuff: Pointer,
        recvbuff: Pointer,
        values: tuple[int, ...],
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        buffers = _address(sendbuff, "sendbuff"), _address(recvbuff, "recvbuff")
        place = _address(comm, "comm"), _address(stream, "stream")
        self._on(function, comm, (*buffers, *values, *place))

    def _run_one(
        self,
        function: Callable[..., int],
        buffer: Pointer,
        name: str,
        values: tuple[int, ...],
        comm: Pointer,
        stream: Pointer,
    ) -> None:
        place = _address(comm, "comm"), _address(stream, "stream")
        self._on(function, comm, (_address(buffer, name), *values, *place))

    def _on(self, function: Callable[..., int], comm: Pointer, args: tuple[int, ...]) -> None:
        """Call a function of a communicator; wait until a non-blocking one has completed it."""
        if function(*args) == IN_PROGRESS and not lib.pynccl_group_depth():
            _settle(_address(comm, "comm"))

    # --- groups ---

    def ncclGroupStart(self) -> None:
        """Begin a group of calls."""
        capi.ncclGroupStart()

    def ncclGroupEnd(self) -> None:
        """End a group of calls, and start them."""
        if capi.ncclGroupEnd() == IN_PROGRESS:
            for comm in sorted(_comms):
                _settle(comm)

    # --- memory ---

    def ncclMemAlloc(self, size: int) -> int:
        """Return the address of new memory that NCCL can move without copies."""
        return capi.ncclMemAlloc(size)

    def ncclMemFree(self, ptr: Pointer) -> None:
        """Release memory from ncclMemAlloc."""
        capi.ncclMemFree(_address(ptr, "ptr"))

    def ncclCommWindowRegister(
        self, comm: Pointer, buff: Pointer, size: int, win_flags: int
    ) -> ctypes.c_void_p:
        """Make the memory of all ranks a window; every rank calls it. Return the window's handle."""
        if lib.pynccl_group_depth():
            raise NcclInvalidUsage("ncclCommWindowRegister in a group; expected it outside of groups")
        handle = _address(comm, "comm")
        window = capi.ncclCommWindowRegister(handle, _address(buff, "buff"), size, win_flags)
        _settle(handle)
        return ncclWindow_t(int(window))

    def ncclCommWindowDeregister(self, comm: Pointer, window: Pointer) -> None:
        """Release a window; its memory stays."""
        self._on(capi.ncclCommWindowDeregister, comm, (_address(comm, "comm"), _address(window, "window")))


def _settle(comm: int) -> None:
    """Wait until a communicator has completed what it does in the background."""
    wait_ready(lambda: comm, None)


def id_bytes(unique_id: Any) -> bytes:
    """Return the 128 bytes of an id: a ncclUniqueId, of any module, a pynccl.UniqueId or bytes."""
    internal = getattr(unique_id, "internal", None)
    return bytes(to_unique_id(unique_id if internal is None else bytes(internal), "unique_id"))


def replace(module: str, by: types.ModuleType) -> None:
    """Make later imports of a module return another one; raise if it was imported already."""
    present = sys.modules.get(module)
    if present is not None and present is not by:
        raise NcclError(f"{module} is imported already; expected {by.__name__}.install() before it is")
    sys.modules[module] = by
