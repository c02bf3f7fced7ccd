"""The records of a rank as columns: as objects, those of a thousand ranks would take gigabytes.

Calls that are alike have one kind: their record without the numbers that differ from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from pynccl._library.binding import ffi, lib
from pynccl._trace.recorder import TraceRecord

# The numbers of a record that are columns, as native/scan.h has them.
_NUMBERS = ("seq", "peer_seq", "group", "send", "recv", "offset", "time_ns", "end_ns")
_SCANNED = np.dtype([("kind", np.int64), ("at", np.int64), *((name, np.int64) for name in _NUMBERS)])
_NONE = -(1 << 63)
_DAMAGED = -1
# Records that are read in one call.
_MOST = 4096

Rows = npt.NDArray[Any]
Test = Callable[[TraceRecord], bool]
K = TypeVar("K")


class Records(Sequence[TraceRecord]):
    """The records of one rank, or some of them, oldest first."""

    def __init__(self, kinds: Sequence[TraceRecord], rows: Rows) -> None:
        self._kinds, self._rows = kinds, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TraceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> TraceRecord | Records:
        if isinstance(index, slice):
            return Records(self._kinds, self._rows[index])
        return self._record(self._rows[index].item())

    def __iter__(self) -> Iterator[TraceRecord]:
        return map(self._record, self._rows.tolist())

    def _record(self, row: tuple[int, ...]) -> TraceRecord:
        pairs = zip(_NUMBERS, row[2:], strict=True)
        numbers: dict[str, Any] = {name: value for name, value in pairs if value != _NONE}
        return replace(self._kinds[row[0]], **numbers)

    @property
    def _kind_of_each(self) -> npt.NDArray[np.int64]:
        column: npt.NDArray[np.int64] = self._rows["kind"]
        return column

    @cached_property
    def kinds(self) -> list[TraceRecord]:
        """The kinds of these records, without their numbers and times."""
        return [self._kinds[kind] for kind in np.unique(self._kind_of_each)]

    def labels(self, label: Callable[[TraceRecord], int | bool]) -> npt.NDArray[np.int64]:
        """Return a number for each record; `label` sees each kind once."""
        numbers = np.array([int(label(kind)) for kind in self._kinds], np.int64)
        return numbers[self._kind_of_each]

    def some(self, test: Test) -> Records:
        """Return the records whose kind passes a test."""
        return Records(self._kinds, self._rows[self.labels(test) != 0])

    def by(self, key: Callable[[TraceRecord], K]) -> dict[K, Records]:
        """Return the records by a key of their kinds."""
        keys: dict[K, int] = {}
        labels = self.labels(lambda kind: keys.setdefault(key(kind), len(keys)))
        order = np.argsort(labels, kind="stable")
        ends = np.searchsorted(labels[order], np.arange(len(keys) + 1))
        parts = {k: self._rows[order[ends[label] : ends[label + 1]]] for k, label in keys.items()}
        return {k: Records(self._kinds, rows) for k, rows in parts.items() if len(rows)}

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """Return each record's number of this name, below 0 where it has none."""
        column: npt.NDArray[np.int64] = self._rows[name]
        return column

    def numbered(self, name: str, number: int) -> Records:
        """Return the records with this number."""
        # NumPy refuses to compare with what a column cannot hold.
        which = self._rows[name] == number if number < -_NONE else slice(0)
        return Records(self._kinds, self._rows[which])

    def since(self, name: str, number: int) -> Records:
        """Return the records with this number or a higher one."""
        return Records(self._kinds, self._rows[self._rows[name] >= number])

    def ordered(self, name: str) -> Records:
        """Return the records with such a number, 1 or more, in its order; of equal ones the last."""
        rows = self._rows[self._rows[name] > 0]
        _, last = np.unique(rows[name][::-1], return_index=True)
        return Records(self._kinds, rows[::-1][last])


def nothing() -> Records:
    """Return no records."""
    return Records([], np.empty(0, _SCANNED))


class Reading:
    """Collects the records of one rank from the lines of its dump."""

    def __init__(self, check: Callable[[bytes], TraceRecord | None]) -> None:
        # Returns the record of a line; None if the line is damaged.
        self._check = check
        self._kinds: list[TraceRecord] = []
        self._index: dict[TraceRecord, int] = {}
        # By the number that the scan gives a kind.
        self._scanned: dict[int, int] = {}
        self._rows: list[Rows] = []

    def add(self, text: bytes, rows: Rows) -> list[int]:
        """Add scanned lines; return which of them are damaged."""
        scanned, first, inverse = np.unique(rows["kind"], return_index=True, return_inverse=True)
        for number, at in zip(scanned.tolist(), rows["at"][first].tolist(), strict=True):
            if number not in self._scanned:
                record = self._check(text[at : text.index(b"\n", at)])
                self._scanned[number] = _DAMAGED if record is None else self._kind_of(record)[0]
        kinds = np.array([self._scanned[number] for number in scanned.tolist()], np.int64)[inverse]
        sound = rows[kinds != _DAMAGED]
        sound["kind"] = kinds[kinds != _DAMAGED]
        self._rows.append(sound)
        return [int(line) for line in np.flatnonzero(kinds == _DAMAGED)]

    def add_line(self, line: bytes) -> bool:
        """Add a line that the scan has left; tell whether it is a record."""
        record = self._check(line)
        if record is None:
            return False
        kind, numbers = self._kind_of(record)
        row = np.full(2 + len(_NUMBERS), _NONE, np.int64).view(_SCANNED)
        row["kind"] = kind
        for name, value in numbers.items():
            row[name] = value
        self._rows.append(row)
        return True

    def _kind_of(self, record: TraceRecord) -> tuple[int, dict[str, int]]:
        """Return the index of a kind, and the numbers; one that no column holds stays in the kind."""
        numbers = {name: getattr(record, name) for name in _NUMBERS}
        numbers = {name: n for name, n in numbers.items() if n is not None and _NONE < n < -_NONE}
        without: dict[str, Any] = {name: 0 if name == "time_ns" else None for name in numbers}
        kind = replace(record, **without)
        index = self._index.setdefault(kind, len(self._kinds))
        if index == len(self._kinds):
            self._kinds.append(kind)
        return index, numbers

    def records(self) -> Records:
        """Return the records that were added."""
        return Records(self._kinds, np.concatenate(self._rows)) if self._rows else nothing()


def scan(text: bytes, at: int) -> tuple[Rows, int]:
    """Return the records in the lines from `at` on, and the place of the first line that is none."""
    rows = np.empty(_MOST, _SCANNED)
    end = ffi.new("int64_t*")
    found = ffi.cast("pynccl_scanned*", ffi.from_buffer(rows))
    count = lib.pynccl_scan(ffi.from_buffer(text), len(text), at, found, _MOST, end)
    return rows[:count], int(end[0])
