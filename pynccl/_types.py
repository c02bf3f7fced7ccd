"""Small types of the API: unique id, datatypes, reductions, and handles that NCCL writes late."""

from __future__ import annotations

from typing import Any

from pynccl._base.values import Code
from pynccl._library.generated import api, capi


class DataType(Code):
    """NCCL's datatypes."""

    INT8 = api.ncclInt8
    UINT8 = api.ncclUint8
    INT32 = api.ncclInt32
    UINT32 = api.ncclUint32
    INT64 = api.ncclInt64
    UINT64 = api.ncclUint64
    FLOAT16 = api.ncclFloat16
    FLOAT32 = api.ncclFloat32
    FLOAT64 = api.ncclFloat64
    BFLOAT16 = api.ncclBfloat16
    FLOAT8E4M3 = api.ncclFloat8e4m3
    FLOAT8E5M2 = api.ncclFloat8e5m2


class RedOp(Code):
    """NCCL's built-in reductions."""

    SUM = api.ncclSum
    PROD = api.ncclProd
    MAX = api.ncclMax
    MIN = api.ncclMin
    AVG = api.ncclAvg


class UniqueId:
    """The id that the ranks of one communicator share: 128 immutable bytes that include a secret.

    Raises TypeError or ValueError for anything but 128 bytes.
    """

    __slots__ = ("_data",)
    _data: bytes
    SIZE = api.NCCL_UNIQUE_ID_BYTES

    def __init__(self, data: bytes | bytearray | memoryview | UniqueId) -> None:
        object.__setattr__(self, "_data", _id_bytes(data, "data"))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"UniqueId is immutable, {name} cannot be set")

    def __bytes__(self) -> bytes:
        return self._data

    def __eq__(self, other: object) -> bool:
        return self._data == other._data if isinstance(other, UniqueId) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._data)

    def __reduce__(self) -> tuple[Any, ...]:
        return UniqueId, (self._data,)

    def __repr__(self) -> str:
        # The bytes allow joining, so logs show a digest, which still distinguishes ids.
        import hashlib

        return f"<UniqueId {hashlib.sha256(self._data).hexdigest()[:12]}>"


def to_unique_id(value: Any, name: str = "unique_id") -> UniqueId:
    """Return the unique id that an argument of that name is, or has the bytes of."""
    return value if isinstance(value, UniqueId) else UniqueId(_id_bytes(value, name))


def _id_bytes(value: Any, name: str) -> bytes:
    # The bytes are a secret, which no error shows.
    if not isinstance(value, bytes | bytearray | memoryview | UniqueId):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; expected a UniqueId or its {UniqueId.SIZE} bytes"
        )
    data = bytes(value)
    if len(data) != UniqueId.SIZE:
        raise ValueError(f"{name} has {len(data)} bytes; expected the {UniqueId.SIZE} of a UniqueId")
    return data


class LateHandle:
    """A handle that NCCL writes after the call: its int() is 0 until the group or the creation completes.

    Every function of pynccl.capi accepts it in place of the handle.
    """

    __slots__ = ("_cell", "_keep")
    __hash__ = None  # type: ignore[assignment]  # its value changes

    def __init__(self, cell: Any, keep: Any = None) -> None:
        self._cell = cell
        self._keep = keep

    def __int__(self) -> int:
        return int(self._cell[0])

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self._cell[0])

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other) if isinstance(other, int | LateHandle) else NotImplemented

    def __repr__(self) -> str:
        return f"<LateHandle {int(self):#x}>"


def get_unique_id() -> UniqueId:
    """Make the id of a new communicator on one rank; pass it to the other ranks.

    Raises LibraryNotFoundError if no library can be loaded.
    """
    return UniqueId(capi.ncclGetUniqueId())
