"""Contiguous memory for data that NCCL cannot send, receive or reduce in place.

Datatypes with gaps are packed before a call and unpacked after it, by sends of a rank to itself. This works
on the array's stream, with every library, and without kernels of pynccl's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np

from pynccl._arrays.buffers import kind_of, spans
from pynccl._errors import NotSupportedError
from pynccl._library import loader
from pynccl._library.binding import lib
from pynccl.mpi._messages import Message, Region, part_of

# The most copies in one group: the cost of a group grows faster than its number of calls.
_BATCH = 256
# The largest numbers of dtypes without infinities.
_LARGEST = {"float8_e4m3fn": 448.0}


class Staging:
    """The temporary memory of one call; received data are unpacked from it at the end."""

    def __init__(self, calls: Any, group: Callable[[], AbstractContextManager[Any]]) -> None:
        self._calls, self._group = calls, group
        self._unpack: list[tuple[Any, Any]] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._copy(self._unpack)

    def sends(self, message: Message, *, apart: bool = False) -> list[Any]:
        """Return the memory to send each region from; `apart`: a copy, since the call writes the region."""
        copies: list[tuple[Any, Any]] = []
        parts = [self._part(message, region, apart, copies, 0) for region in message.regions]
        self._copy(copies)
        return parts

    def recvs(self, message: Message, *, apart: bool = False) -> list[Any]:
        """Return the memory to receive each region into; `apart`: not in place, since the call reads it."""
        return [self._part(message, region, apart, self._unpack, 1) for region in message.regions]

    def send(self, message: Message, *, apart: bool = False) -> Any:
        """Return the memory to send an argument with one region from."""
        return self.sends(message, apart=apart)[0]

    def recv(self, message: Message, *, apart: bool = False) -> Any:
        """Return the memory to receive an argument with one region into."""
        return self.recvs(message, apart=apart)[0]

    def _part(
        self, message: Message, region: Region, apart: bool, copies: list[tuple[Any, Any]], packed: int
    ) -> Any:
        if (region.layout.dense and not apart) or not region.nbytes:
            return message.buffer(region)
        if lib.pynccl_group_depth():
            raise NotSupportedError(
                f"{message.name} must be copied before the call, which is impossible inside pynccl.group()"
            )
        scratch = _scratch(message, region.nbytes)
        pointer = spans[type(scratch)](scratch, message.name)[0]
        start = pointer
        for piece in message.blocks(region):
            there = part_of(scratch, start, piece.count, None)
            copies.append((there, piece) if packed else (piece, there))
            start += piece.count
        return part_of(scratch, pointer, region.nbytes, region.layout.dtype)

    def _copy(self, copies: list[tuple[Any, Any]]) -> None:
        me = self._calls.rank
        for start in range(0, len(copies), _BATCH):
            with self._group():
                for source, target in copies[start : start + _BATCH]:
                    self._calls.send(source, me)
                    self._calls.recv(target, me)


def neutral(message: Message, op: str) -> Any:
    """Return a message's number of neutral elements of a reduction."""
    (region,) = message.regions
    array = _empty(message, region.entries)
    array[:] = _neutral(str(message.dtype), op)
    return array


def _neutral(dtype: str, op: str) -> Any:
    if op == "prod":
        return 1
    if op == "sum":
        # -0.0 is neutral: 0.0 would turn -0.0 into 0.0.
        return 0 if "int" in dtype else -0.0
    if "int" in dtype:
        return np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max
    largest = _LARGEST.get(dtype, np.inf)
    return -largest if op == "max" else largest


def _scratch(message: Message, nbytes: int) -> Any:
    if _on_cpu():
        return np.empty(nbytes, np.uint8)
    return _empty(message, -(-nbytes // message.memory.itemsize))


def _on_cpu() -> bool:
    library = loader.loaded()
    return library is not None and library.backend == "cpu"


def _empty(message: Message, count: int) -> Any:
    """Return a new array with the kind and dtype of a message's array."""
    array = message.memory.array
    if _on_cpu():
        dtype = getattr(array, "dtype", None)
        if not isinstance(dtype, np.dtype):
            dtype = np.dtype(array.__cuda_array_interface__["typestr"])
        return np.empty(count, dtype)
    try:
        return kind_of(array).empty(array, (count,))
    except TypeError:
        raise NotSupportedError(
            f"{message.name} needs a temporary array, but pynccl cannot make a "
            f"{type(array).__qualname__}; expected a CuPy array, a torch tensor or a Numba array"
        ) from None
