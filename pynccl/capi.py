"""NCCL's C API, one to one: same names and argument order; out-pointers are return values.

Pointers, handles and streams are ints, a unique id is 128 bytes, strings are str. A result other than success
raises, except ncclInProgress: functions with out-values return them, the others return the result (0 or 7).
The first call loads the library. FUNCTIONS has the first NCCL version of each function; the CPU library
adds CPU_FUNCTIONS. On the CPU library, as on a GPU, a call has completed only after a wait for its stream:
`pyncclCpuStreamSynchronize`, or PYNCCL_CPU_BLOCKING=1.

If NCCL writes a handle at the end of the group, or in the background of a non-blocking communicator, the
function returns a LateHandle, which every function accepts in place of the handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pynccl._base.values import MOST_DEVICES as _MOST_DEVICES
from pynccl._base.values import check_text as _check_text
from pynccl._base.values import is_int as _is_int
from pynccl._base.values import shown
from pynccl._library.binding import ffi as _ffi
from pynccl._library.binding import lib as _lib
from pynccl._library.c_arguments import argument_error as _argument_error
from pynccl._library.device_api import *
from pynccl._library.fields import pack as _pack
from pynccl._library.generated.api import *
from pynccl._library.generated.capi import *
from pynccl._library.generated.capi_cpu import *
from pynccl._library.generated.structs import CollConfig as CollConfig
from pynccl._library.generated.structs import CommProperties as CommProperties
from pynccl._library.generated.structs import Config as Config
from pynccl._library.generated.structs import EncryptionConfig as EncryptionConfig
from pynccl._library.generated.structs import SimInfo as SimInfo
from pynccl._library.generated.structs import Team as Team
from pynccl._library.loader import functions as _library
from pynccl._library.status import NOT_FOUND as _NOT_FOUND
from pynccl._library.status import check as _check
from pynccl._library.status import forget as _forget
from pynccl._library.status import remember as _remember
from pynccl._library.status import remember_late as _remember_late
from pynccl._library.status import text as _text
from pynccl._types import LateHandle as LateHandle
from pynccl._types import to_unique_id as _to_unique_id

_ConfigLike = Config | Mapping[str, Any] | None


def _handle(cell: Any, keep: Any = None, place: tuple[int, int] | None = None, parent: int = 0) -> int:
    """Return the communicator or window in the cell, or a LateHandle if NCCL will write it later.

    NCCL writes it later in a group and on a non-blocking parent, even if it returns ncclSuccess
    (src/init.cc: ncclCommInitChildComm).
    """
    value = int(cell[0])
    if value:
        if place is not None or keep is not None:
            _remember(value, place, (cell, keep))
        return value
    if parent:
        # NCCL writes the cell in the background, even if the caller has dropped the handle.
        _remember_late(parent, cell)
    return cast(int, LateHandle(cell, keep))


def _id(data: bytes) -> bytes:
    return bytes(_to_unique_id(data, "the unique id"))


def _ints(values: Sequence[int], count: int, name: str) -> Any:
    try:
        cells = _ffi.new("int[]", list(values))
    except (TypeError, OverflowError) as error:
        raise type(error)(f"{name} is {shown(values)}; expected {count} ints: {error}") from None
    if len(cells) < count:
        raise ValueError(f"{name} has {len(cells)} entries; expected {count}")
    return cells


# --- communicators ------------------------------------------------------------------------------------------


def ncclCommInitRank(nranks: int, commId: bytes, rank: int) -> int:
    cell, uid = _ffi.new("uintptr_t*"), _id(commId)
    try:
        if r := _library.ncclCommInitRank(cell, nranks, uid, rank):
            _check(r, "ncclCommInitRank")
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "int, int", nranks=nranks, rank=rank) from None
    return _handle(cell, uid, (rank, nranks))


def ncclCommInitRankConfig(nranks: int, commId: bytes, rank: int, config: _ConfigLike = None) -> int:
    cell, uid, options = _ffi.new("uintptr_t*"), _id(commId), _pack(Config, config)
    try:
        if r := _library.ncclCommInitRankConfig(cell, nranks, uid, rank, options):
            _check(r, "ncclCommInitRankConfig")
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "int, int", nranks=nranks, rank=rank) from None
    return _handle(cell, options, (rank, nranks))


def ncclCommInitRankScalable(
    nranks: int, myrank: int, nId: int, commIds: Sequence[bytes], config: _ConfigLike = None
) -> int:
    if len(commIds) < nId:
        raise ValueError(f"commIds has {len(commIds)} entries; expected {nId}")
    cell, uids, options = _ffi.new("uintptr_t*"), b"".join(map(_id, commIds)), _pack(Config, config)
    try:
        if r := _library.ncclCommInitRankScalable(cell, nranks, myrank, nId, uids, options):
            _check(r, "ncclCommInitRankScalable")
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "int, int, int", nranks=nranks, myrank=myrank, nId=nId) from None
    return _handle(cell, (uids, options), (myrank, nranks))


def ncclCommInitAll(ndev: int, devlist: Sequence[int] | None = None) -> list[int]:
    if _is_int(ndev) and ndev > _MOST_DEVICES:
        raise ValueError(f"ndev is {ndev}; expected the number of devices, at most {_MOST_DEVICES}")
    devices = _ffi.NULL if devlist is None else _ints(devlist, ndev, "devlist")
    try:
        cells = _ffi.new("uintptr_t[]", max(ndev, 1))
        if r := _library.ncclCommInitAll(cells, ndev, devices):
            _check(r, "ncclCommInitAll")
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "int", ndev=ndev) from None
    comms = [int(comm) for comm in cells][:ndev]
    for rank, comm in enumerate(comms):
        _remember(comm, (rank, ndev), cells)
    return comms


def ncclCommSplit(comm: int, color: int, key: int, config: _ConfigLike = None) -> int:
    cell, options = _ffi.new("uintptr_t*"), _pack(Config, config)
    try:
        if r := _library.ncclCommSplit(comm, color, key, cell, options):
            _check(r, "ncclCommSplit", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t, int, int", comm=comm, color=color, key=key) from None
    return 0 if color == NCCL_SPLIT_NOCOLOR else _handle(cell, (options,), parent=comm)


def ncclCommShrink(
    comm: int,
    excludeRanksList: Sequence[int],
    excludeRanksCount: int,
    config: _ConfigLike = None,
    shrinkFlags: int = NCCL_SHRINK_DEFAULT,
) -> int:
    cell, options = _ffi.new("uintptr_t*"), _pack(Config, config)
    ranks = _ints(excludeRanksList, excludeRanksCount, "excludeRanksList")
    try:
        if r := _library.ncclCommShrink(comm, ranks, excludeRanksCount, cell, options, shrinkFlags):
            _check(r, "ncclCommShrink", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(
            error,
            "uintptr_t, int, int",
            comm=comm,
            excludeRanksCount=excludeRanksCount,
            shrinkFlags=shrinkFlags,
        ) from None
    return _handle(cell, (options, ranks), parent=comm)


def ncclCommGrow(
    comm: int, nRanks: int, uniqueId: bytes | None = None, rank: int = -1, config: _ConfigLike = None
) -> int:
    cell, options = _ffi.new("uintptr_t*"), _pack(Config, config)
    uid = _ffi.NULL if uniqueId is None else _id(uniqueId)
    try:
        if r := _library.ncclCommGrow(comm, nRanks, uid, rank, cell, options):
            _check(r, "ncclCommGrow", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t, int, int", comm=comm, nRanks=nRanks, rank=rank) from None
    return _handle(cell, (options, uid), parent=comm)


def ncclCommDestroy(comm: int) -> int:
    try:
        if r := _library.ncclCommDestroy(comm):
            _check(r, "ncclCommDestroy", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t", comm=comm) from None
    _forget(comm)
    return r


def ncclCommAbort(comm: int) -> int:
    try:
        if r := _library.ncclCommAbort(comm):
            _check(r, "ncclCommAbort", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t", comm=comm) from None
    _forget(comm)
    return r


def ncclCommQueryProperties(comm: int) -> CommProperties:
    cell = CommProperties().pack()
    try:
        if r := _library.ncclCommQueryProperties(comm, cell):
            _check(r, "ncclCommQueryProperties", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t", comm=comm) from None
    return CommProperties.unpack(cell)


def ncclCommWindowRegister(comm: int, buff: int, size: int, winFlags: int = NCCL_WIN_DEFAULT) -> int:
    cell = _ffi.new("uintptr_t*")
    try:
        if r := _library.ncclCommWindowRegister(comm, buff, size, cell, winFlags):
            _check(r, "ncclCommWindowRegister", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(
            error, "uintptr_t, uintptr_t, size_t, int", comm=comm, buff=buff, size=size, winFlags=winFlags
        ) from None
    return _handle(cell, parent=comm)


# --- groups and signals -------------------------------------------------------------------------------------


def ncclGroupSimulateEnd(simInfo: SimInfo | Mapping[str, Any] | None = None) -> SimInfo:
    cell = _pack(SimInfo, SimInfo() if simInfo is None else simInfo)
    if r := _library.ncclGroupSimulateEnd(cell):
        _check(r, "ncclGroupSimulateEnd")
    return SimInfo.unpack(cell)


def ncclWaitSignal(
    nDesc: int, signalDescs: Sequence[tuple[int, int, int, int]], comm: int, stream: int
) -> int:
    """Take each descriptor as (opCnt, peer, sigIdx, ctx)."""
    if len(signalDescs) < nDesc:
        raise ValueError(f"signalDescs has {len(signalDescs)} entries; expected {nDesc}")
    cells = _ffi.new("ncclWaitSignalDesc_t[]", list(signalDescs))
    try:
        if r := _library.ncclWaitSignal(nDesc, cells, comm, stream):
            _check(r, "ncclWaitSignal", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(
            error, "int, uintptr_t, uintptr_t", nDesc=nDesc, comm=comm, stream=stream
        ) from None
    return r


# --- text ---------------------------------------------------------------------------------------------------


def _require(function: str) -> None:
    """Raise if a function that returns text is missing, since it has no result code."""
    getattr(_library, function)
    if not _lib.nccl_api_find(function.encode()):
        _check(_NOT_FOUND, function)


def ncclGetErrorString(result: int) -> str:
    _require("ncclGetErrorString")
    try:
        return _text(_library.ncclGetErrorString(result))
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "int", result=result) from None


def ncclGetLastError(comm: int = 0) -> str:
    _require("ncclGetLastError")
    try:
        return _text(_library.ncclGetLastError(comm))
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t", comm=comm) from None


# --- parameters, encryption ---------------------------------------------------------------------------------


def ncclSetEncryption(config: EncryptionConfig | Mapping[str, Any] | None) -> int:
    cell = _pack(EncryptionConfig, config)
    if r := _library.ncclSetEncryption(cell):
        _check(r, "ncclSetEncryption")
    return r


def ncclParamGet(h: int, maxLen: int) -> bytes:
    out, length = _ffi.new("char[]", max(maxLen, 1)), _ffi.new("int*")
    address = int(_ffi.cast("uintptr_t", out))
    try:
        if r := _library.ncclParamGet(h, address, maxLen, length):
            _check(r, "ncclParamGet")
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t, int", h=h, maxLen=maxLen) from None
    return bytes(_ffi.buffer(out, min(length[0], maxLen)))


def ncclParamGetParameter(key: str) -> str:
    out, length = _ffi.new("char**"), _ffi.new("int*")
    if r := _library.ncclParamGetParameter(_check_text(key, "key").encode(), out, length):
        _check(r, "ncclParamGetParameter")
    return _text(out[0])


def ncclParamGetAllParameterKeys() -> list[str]:
    table, length = _ffi.new("char***"), _ffi.new("int*")
    if r := _library.ncclParamGetAllParameterKeys(table, length):
        _check(r, "ncclParamGetAllParameterKeys")
    return [_text(table[0][i]) for i in range(length[0])]


def pyncclCpuGetAlgorithm(comm: int, collective: str, size: int) -> tuple[str, int]:
    out, most = _ffi.new("char**"), _ffi.new("size_t*")
    try:
        name = _check_text(collective, "collective").encode()
        if r := _library.pyncclCpuGetAlgorithm(comm, name, size, out, most):
            _check(r, "pyncclCpuGetAlgorithm", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t, size_t", comm=comm, size=size) from None
    return _text(out[0]), most[0]


def pyncclCpuGetErrorPrefix(comm: int) -> tuple[int, int]:
    function, place = _ffi.new("int*"), _ffi.new("int*")
    try:
        if r := _library.pyncclCpuGetErrorPrefix(comm, function, place):
            _check(r, "pyncclCpuGetErrorPrefix", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(error, "uintptr_t", comm=comm) from None
    return function[0], place[0]


def pyncclCpuRefuseToGrow(
    comm: int, uniqueId: bytes | None, result: int, why: str, lateRanks: Sequence[int], lateRanksCount: int
) -> int:
    uid = _ffi.NULL if uniqueId is None else _id(uniqueId)
    ranks = _ints(lateRanks, lateRanksCount, "lateRanks")
    try:
        text = _check_text(why, "why").encode()
        if r := _library.pyncclCpuRefuseToGrow(comm, uid, result, text, ranks, lateRanksCount):
            _check(r, "pyncclCpuRefuseToGrow", comm)
    except (TypeError, OverflowError) as error:
        raise _argument_error(
            error, "uintptr_t, int, int", comm=comm, result=result, lateRanksCount=lateRanksCount
        ) from None
    return r
