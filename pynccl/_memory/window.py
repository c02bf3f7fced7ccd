"""Windows: memory of every rank of a communicator that the other ranks put into (ncclCommWindowRegister)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from pynccl import capi
from pynccl._arrays import dtypes
from pynccl._arrays.buffers import Span, held, shape_of
from pynccl._base.values import check_rank, refuse_copy, shown
from pynccl._errors import CollectiveMismatchError, NcclInvalidUsage
from pynccl._library import loader
from pynccl._library.binding import fastcall, ffi, lib
from pynccl._library.generated import kinds
from pynccl._library.hinting import Hinting
from pynccl._library.status import check, remember_late
from pynccl._memory import creation
from pynccl._memory.owner import MemoryOwner, complete, refuse_unless_idle
from pynccl._trace import recorder
from pynccl._trace.callers import caller_line

_REGISTER, _DEREGISTER = kinds.FUNCTIONS[kinds.WINDOW], kinds.FUNCTIONS[kinds.CLOSE_WINDOW]
# Gather a few numbers of every rank of a communicator, as a collective call of this kind: an int64 array with
# one row per rank. The communicator holds this function, so the function must not hold the communicator.
Exchange = Callable[[Any, int, Sequence[int]], Any]


class Owner(MemoryOwner, Protocol):
    """A communicator with its windows."""

    windows: Windows


class Place(NamedTuple):
    """A rank's part of a window."""

    nbytes: int  # of the rank's array
    before: int  # bytes of the library's window before the array, since that window begins at a page


class Entry:
    """One ncclCommWindowRegister."""

    def __init__(self, number: int, span: Span, symmetric: bool, array: Any) -> None:
        self.number, self.symmetric, self.code = number, symmetric, span[2]
        self.begin, self.nbytes = span[0], span[1] * dtypes.itemsize(span[2])
        self.before = self.begin % capi.NCCL_WIN_REQUIRED_ALIGNMENT
        travel = dtypes.traveller(self.code)
        # The bytes of an element of the array.
        self.itemsize = dtypes.itemsize(self.code) * (travel.factor if travel else 1)
        self.places: list[Place] = []
        self.array = array
        # Holds the memory until the window is deregistered.
        self.kept = held([array])
        # The ncclWindow_t; 0 once closed. Prepared calls refer to this cell.
        self.cell = ffi.new("uintptr_t*")
        self.live = False
        # The packed puts into this window, as in Calls.
        self.templates: dict[tuple[int, int, int], Any] = {}
        self.line = caller_line()

    @property
    def handle(self) -> int:
        """The ncclWindow_t."""
        return int(self.cell[0])

    def contains(self, begin: int, nbytes: int) -> bool:
        """Tell whether a range of memory is part of this rank's array."""
        return self.begin <= begin and begin + nbytes <= self.begin + self.nbytes


class Windows:
    """The windows of one communicator."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._left: list[str] = []
        # How many registrations this rank has begun; equal on all ranks.
        self.begun = 0
        self.exchange: Exchange | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Add a window that the library has made."""
        self._entries.append(entry)

    def pop(self, entry: Entry) -> int:
        """Remove a window and return its handle."""
        handle, entry.cell[0] = entry.handle, 0
        entry.live, entry.array, entry.kept = False, None, []
        # An abort, in any thread, may have removed it.
        with suppress(ValueError):
            self._entries.remove(entry)
        return handle

    def entries(self) -> Iterator[Entry]:
        """Return all windows, the newest first."""
        return iter(self._entries[::-1])

    def symmetric_at(self, begin: int, nbytes: int) -> Entry | None:
        """Return a symmetric window of this rank that shares memory with a range."""
        for e in self._entries:
            if e.symmetric and e.begin < begin + nbytes and begin < e.begin + e.nbytes:
                return e
        return None

    def kept(self) -> list[Any]:
        """Return what holds the memory of all windows."""
        return [(entry.kept, entry.cell) for entry in self._entries]

    def forget(self) -> None:
        """Drop all windows without a call: the library has released them, or is another process's."""
        for entry in self.entries():
            self.pop(entry)

    def note_left(self) -> None:
        """Note the windows that the program has not closed, for `warn`."""
        self._left += [entry.line for entry in self._entries]

    def warn(self, owner: object) -> None:
        """Warn of each window that was left open, with the line that made it."""
        left, self._left = self._left, []
        for line in left:
            warnings.warn(f"{owner!r}: the window made at {line} was never closed", ResourceWarning, 5)


class _PeerMemory:
    """A rank's part of a window, mapped as long as an array over it exists."""

    __slots__ = ("__weakref__", "_hold", "device", "nbytes", "ptr")

    def __init__(self, entry: Entry, ptr: int, nbytes: int, device: int | None) -> None:
        self.ptr, self.nbytes, self.device = ptr, nbytes, device
        self._hold = _held(capi.pyncclCpuWindowHold(entry.cell[0])) if device is None else None


def _held(hold: int) -> object:
    try:
        return fastcall.own_hold(hold)
    except MemoryError:
        capi.pyncclCpuWindowRelease(hold)
        raise


@recorder.with_callers(lambda window: window._owner.c, "close")
class Window(Hinting):
    """Memory of every rank of a communicator that the other ranks put into; from `Communicator.window`.

    As a context manager it is closed at the end of the body. It keeps its array alive until then.
    """

    __slots__ = ("_entry", "_owner")

    def __init__(self, owner: Owner, entry: Entry) -> None:
        self._owner, self._entry = owner, entry

    @property
    def array(self) -> Any:
        """This rank's array; None once closed."""
        return self._entry.array

    @property
    def closed(self) -> bool:
        """True after `close`, and once the communicator is closed."""
        return not self._entry.live

    @property
    def symmetric(self) -> bool:
        """Whether the window is registered with NCCL_WIN_COLL_SYMMETRIC."""
        return self._entry.symmetric

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of every rank's array."""
        return tuple(place.nbytes // self._entry.itemsize for place in self._entry.places)

    @property
    def handle(self) -> int:
        """The ncclWindow_t as an int, for pynccl.capi and kernels; NcclInvalidUsage once closed.

        The library's window begins at the array's address, rounded down to a multiple of 4,096.
        """
        return self._live().handle

    def _live(self) -> Entry:
        if self.closed:
            raise NcclInvalidUsage(f"{self!r} cannot be used: it was closed")
        return self._entry

    def peer(self, rank: int) -> Any:
        """Return an array over a rank's part of the window (ncclGetPeerDevicePointer, NCCL >= 2.29).

        Loads and stores reach the other rank's memory. The array is of the library of this rank's array; it
        has that array's shape if the two have as many elements, else one axis. With the CPU library it stays
        valid after the window is closed. On a GPU do not use it after that.

        Raises ValueError if this process cannot reach the memory: the rank is on another host, or with the
        CPU library its array is not from `pynccl.empty`, or that process lacked a file descriptor when it
        made the array. Also raises TypeError or ValueError for a wrong
        rank, NotSupportedError with an older library, NcclInvalidUsage once the window is closed, and
        NcclSystemError if this process lacked a file descriptor or memory when it registered the window.
        """
        entry = self._live()
        size = self._owner.size
        check_rank(rank, "rank", size)
        place = entry.places[rank]
        ptr = capi.ncclGetPeerDevicePointer(entry.handle, place.before, int(rank))
        if not ptr:
            raise ValueError(
                f"the memory of rank {rank} in {self!r} cannot be reached by loads and stores; expected "
                "a rank of this host whose array is from pynccl.empty, made while its process had file "
                "descriptors to spare: use put_signal"
            )
        on_cpu = loader.backend() == "cpu"
        memory = _PeerMemory(entry, ptr, place.nbytes, None if on_cpu else self._owner.device)
        same = place.nbytes == entry.places[self._owner.rank].nbytes
        shape = shape_of(entry.array) if same else (place.nbytes // entry.itemsize,)
        return creation.over(memory, shape, entry.code, entry.array)

    def close(self) -> None:
        """Deregister the window (ncclCommWindowDeregister); every rank must call it.

        It waits for this rank's calls in flight, and for the other ranks: no rank may put into memory that
        another has deregistered. A signal that was put before is still counted. No effect if it is closed.

        Raises CollectiveMismatchError if the ranks close different windows, and otherwise the errors of
        `Communicator.barrier`, also after a failure of the communicator: its abort then closes the window.
        Raises NcclInvalidUsage in a group, during a graph capture, or while another thread uses the
        communicator.
        """
        if not self.closed:
            # After a failure the abort of the communicator releases the window.
            self._owner.live()
            refuse_unless_idle(self._owner, _DEREGISTER, self._entry.array)
            self._owner.together(self._close, _DEREGISTER, same=(_DEREGISTER, self._entry.number))

    def _close(self) -> None:
        _leave(self._owner, self._entry.number)
        with self._owner.alone():
            _deregister(self._owner, self._entry)

    __reduce__ = refuse_copy

    def __enter__(self) -> Window:
        self._live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Other ranks may not come: after an exception the end of the communicator closes the window.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        kind = "symmetric " if self.symmetric else ""
        state = ", closed" if self.closed else ""
        where = f"{dtypes.name_of(self._entry.code)}, made at {self._entry.line}"
        return f"<pynccl.Window {self._entry.number}, {kind}{where}{state}>"


def register(owner: Owner, array: Any, span: Span, symmetric: bool, exchange: Exchange) -> Window:
    """Register the arrays of all ranks as a window."""
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric is {shown(symmetric)}; expected True or False")
    if not span[1]:
        raise ValueError("array has no elements; expected one or more, on every rank")
    if not lib.nccl_api_find(_REGISTER.encode()):
        check(lib.PYNCCL_NOT_FOUND, _REGISTER)
    owner.live()
    refuse_unless_idle(owner, _REGISTER, array)
    same = _REGISTER, span, symmetric, id(array)
    return owner.together(lambda: _register(owner, array, span, symmetric, exchange), _REGISTER, same=same)


def _register(owner: Owner, array: Any, span: Span, symmetric: bool, exchange: Exchange) -> Window:
    windows = owner.windows
    entry = Entry(windows.begun + 1, span, symmetric, array)
    other = windows.symmetric_at(entry.begin, entry.nbytes) if symmetric else None
    if other is not None:
        raise ValueError(
            f"array shares memory with the symmetric window made at {other.line}; expected memory of no "
            "other symmetric window of this communicator"
        )
    table = exchange(owner, kinds.WINDOW, (entry.number, entry.code, symmetric, entry.nbytes, entry.before))
    windows.begun, windows.exchange = entry.number, exchange
    _require_same(owner, table.tolist())
    entry.places = [Place(int(row[3]), int(row[4])) for row in table]
    with owner.alone():
        _make(owner, entry)
    windows.add(entry)
    return Window(owner, entry)


def _make(owner: Owner, entry: Entry) -> None:
    comm = owner.live()
    flags = capi.NCCL_WIN_COLL_SYMMETRIC if entry.symmetric else capi.NCCL_WIN_DEFAULT
    begin, nbytes = entry.begin - entry.before, entry.before + entry.nbytes

    def call() -> None:
        check(lib.ncclCommWindowRegister(comm, begin, nbytes, entry.cell, flags), _REGISTER, comm)

    # A non-blocking communicator writes the cell later.
    remember_late(comm, entry.cell)
    owner.change(call, _REGISTER)
    entry.live = True


def _require_same(owner: Owner, table: list[list[int]]) -> None:
    """Raise, the same on every rank, unless the ranks register windows that fit together."""
    # Sizes may differ unless the window is symmetric.
    if len({tuple(row if row[2] else row[:3]) for row in table}) > 1:
        said = [
            f"window {number} ({dtypes.name_of(code)}, {nbytes:,} bytes{_PAGE % before if before else ''}"
            f"{', symmetric' if symmetric else ''})"
            for number, code, symmetric, nbytes, before in table
        ]
        raise _mismatch(owner, _REGISTER, "registered", said)


_PAGE = " from byte %d of a page"


def _mismatch(owner: Owner, what: str, verb: str, said: list[str]) -> CollectiveMismatchError:
    lines = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(said))
    text = f"{what}: the ranks {verb} different windows:{lines}"
    return CollectiveMismatchError(text, function=what, rank=owner.rank, size=owner.size)


def close_all(owner: Owner) -> None:
    """Deregister all windows before the communicator is finalized or destroyed; every rank must call it."""
    if owner.windows:
        _leave(owner, 0)
        owner.windows.note_left()
        with owner.alone():
            for entry in owner.windows.entries():
                _deregister(owner, entry)


def _leave(owner: Owner, number: int) -> None:
    """Wait for this rank's calls, and until all ranks close the same window; 0: all of them."""
    with owner.alone():
        complete(owner, _DEREGISTER)
    assert owner.windows.exchange is not None
    numbers = owner.windows.exchange(owner, kinds.CLOSE_WINDOW, (number,))[:, 0].tolist()
    if len(set(numbers)) > 1:
        said = [f"window {n}" if n else "all windows, at the end of the communicator" for n in numbers]
        raise _mismatch(owner, _DEREGISTER, "closed", said)
    if loader.backend() == "cpu":
        # Between hosts a put that has completed on its rank may still be on its way.
        comm = owner.live()
        with owner.alone():
            owner.change(lambda: check(lib.pyncclCpuQuiet(comm), _DEREGISTER, comm), _DEREGISTER)


def _deregister(owner: Owner, entry: Entry) -> None:
    kept = entry.kept  # the memory, until it is deregistered
    handle = owner.windows.pop(entry)
    if handle and owner.handle:
        capi.ncclCommWindowDeregister(owner.handle, handle)
    del kept


def entry_of(window: Any, owner: Owner) -> Entry:
    """Return the registration of an open window of a communicator; raise for anything else."""
    if not isinstance(window, Window):
        what = "None" if window is None else f"of type {type(window).__qualname__}"
        raise TypeError(f"window is {what}; expected a Window, as Communicator.window returns it")
    if window._owner is not owner:
        raise ValueError(f"window is {shown(window)}, of another communicator; expected one of {owner!r}")
    return window._live()
