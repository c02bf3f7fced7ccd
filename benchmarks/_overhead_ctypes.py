"""A ctypes wrapper in the manner of the private ones that inference engines carry.

A class loads the library, sets argtypes, and checks each result through one method; a communicator above it
takes arrays, looks up the datatype, and wraps every pointer in its ctypes type for the call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_RESULT = ctypes.c_int
_COMM = ctypes.c_void_p
_BUFFER = ctypes.c_void_p
_STREAM = ctypes.c_void_p
_NAMES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8}
_DTYPES = {np.dtype(name): code for name, code in _NAMES.items()}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Library:
    """The functions of one libnccl."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        signatures: dict[str, list[Any]] = {
            "ncclCommInitRank": [ctypes.POINTER(_COMM), ctypes.c_int, _UniqueId, ctypes.c_int],
            "ncclAllReduce": [_BUFFER, _BUFFER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMM, _STREAM],
            "ncclCommDestroy": [_COMM],
        }
        self._functions: dict[str, Any] = {}
        for name, argtypes in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = _RESULT, argtypes
            self._functions[name] = function
        self._error_string = library.ncclGetErrorString
        self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, [_RESULT]

    def check(self, result: int) -> None:
        """Raise for a result other than success."""
        if result != 0:
            raise RuntimeError(f"NCCL error: {self._error_string(result).decode()}")

    def comm_init_rank(self, nranks: int, unique_id: _UniqueId, rank: int) -> ctypes.c_void_p:
        """Create a communicator."""
        comm = _COMM()
        self.check(self._functions["ncclCommInitRank"](ctypes.byref(comm), nranks, unique_id, rank))
        return comm

    def all_reduce(
        self, send: Any, recv: Any, count: int, datatype: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Call ncclAllReduce."""
        self.check(self._functions["ncclAllReduce"](send, recv, count, datatype, op, comm, stream))

    def comm_destroy(self, comm: ctypes.c_void_p) -> None:
        """Destroy a communicator."""
        self.check(self._functions["ncclCommDestroy"](comm))


class Communicator:
    """A communicator over CuPy arrays."""

    def __init__(self, library: Library, nranks: int, rank: int, device: int) -> None:
        self.library, self.device = library, device
        self.comm = library.comm_init_rank(nranks, _UniqueId(), rank)

    def all_reduce(self, send: Any, recv: Any, op: str = "sum", stream: Any = None) -> Any:
        """Reduce an array into another."""
        assert send.data.device_id == self.device
        self.library.all_reduce(
            _BUFFER(send.data.ptr),
            _BUFFER(recv.data.ptr),
            send.size,
            _DTYPES[send.dtype],
            _OPS[op],
            self.comm,
            _STREAM(stream.ptr),
        )
        return recv

    def destroy(self) -> None:
        """Give the communicator back."""
        self.library.comm_destroy(self.comm)
