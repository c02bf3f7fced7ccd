"""Memory that a communicator has registered (ncclCommRegister), counted by allocation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol

from pynccl import capi
from pynccl._arrays.buffers import Buffer, Span, held
from pynccl._arrays.dtypes import itemsize
from pynccl._base.values import refuse_copy
from pynccl._errors import NcclError, NcclInvalidUsage
from pynccl._memory.owner import MemoryOwner, complete, refuse_unless_idle
from pynccl._trace.callers import caller_line


class Owner(MemoryOwner, Protocol):
    """A communicator with its registrations."""

    registrations: Registrations


class Segment(Buffer):
    """Memory of an allocator's pool, which the allocator registers and not the program."""

    __slots__ = ()


class _Entry:
    """One ncclCommRegister: its memory, and the lines that asked for it and have not closed it."""

    def __init__(self, begin: int, nbytes: int, handle: int, array: Any) -> None:
        self.begin, self.end, self.handle = begin, begin + nbytes, handle
        # Holds the memory until it is deregistered.
        self.kept = held([array])
        self.made: list[str] = []
        # False once the library has no such registration any more.
        self.live = True


class Registrations:
    """The registrations of one communicator."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._left: list[str] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, begin: int, nbytes: int) -> _Entry | None:
        """Return the registration that contains this memory."""
        return next((e for e in self._entries if e.begin <= begin and begin + nbytes <= e.end), None)

    def add(self, entry: _Entry) -> None:
        """Add a registration that the library has made."""
        self._entries.append(entry)

    def pop(self, entry: _Entry) -> None:
        """Remove a registration that the library is about to remove."""
        entry.live, entry.kept = False, []
        # An abort, in any thread, may have removed it.
        with suppress(ValueError):
            self._entries.remove(entry)

    def entries(self) -> Iterator[_Entry]:
        """Return all registrations, the newest first."""
        return iter(self._entries[::-1])

    def kept(self) -> list[Any]:
        """Return what holds the memory of all registrations."""
        return [entry.kept for entry in self._entries]

    def forget(self) -> None:
        """Drop all registrations without a call: the library has released them, or is another process's."""
        for entry in self.entries():
            self.pop(entry)

    def note_left(self) -> None:
        """Note the registrations that the program has not closed, for `warn`."""
        self._left += [line for entry in self._entries for line in entry.made if line]

    def warn(self, owner: object) -> None:
        """Warn of each registration that was left open, with the line that made it."""
        left, self._left = self._left, []
        for line in left:
            warnings.warn(f"{owner!r}: the registration made at {line} was never closed", ResourceWarning, 5)


class Registration:
    """Memory registered with a communicator; made by `Communicator.register`.

    As a context manager it is closed at the end. It keeps its array alive until then.
    """

    __slots__ = ("_entry", "_line", "_owner", "array")
    __reduce__ = refuse_copy

    def __init__(self, owner: Owner, entry: _Entry, array: Any, line: str) -> None:
        self._owner, self._line = owner, line
        self._entry: _Entry | None = entry
        self.array = array
        entry.made.append(line)

    @property
    def closed(self) -> bool:
        """True after `close`, and once the communicator is closed."""
        return self._entry is None or not self._entry.live

    @property
    def nbytes(self) -> int:
        """The bytes that the library has registered, 0 once closed."""
        return 0 if self._entry is None or not self._entry.live else self._entry.end - self._entry.begin

    def close(self) -> None:
        """Deregister the memory (ncclCommDeregister), unless another registration of it is open.

        It first waits for the communicator's calls in flight, which may use the memory. No effect if it is
        closed. Raises NcclInvalidUsage in a group, during a graph capture, or while another thread uses the
        communicator.
        """
        entry = self._entry
        if entry is None or not entry.live:
            self._drop()
            return
        if len(entry.made) > 1:
            entry.made.remove(self._line)
        elif self._owner.watch.verdict() is not None:
            # The communicator has failed; its abort releases the memory.
            entry.made.clear()
        else:
            refuse_unless_idle(self._owner, "ncclCommDeregister", self.array)
            with self._owner.alone():
                _deregister(self._owner, entry)
                entry.made.clear()
        self._drop()

    def _drop(self) -> None:
        self._entry = self.array = None

    def __enter__(self) -> Registration:
        if self.closed:
            raise NcclInvalidUsage(f"{self!r} cannot be used: it was closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The program's own exception matters more than that of a communicator that has failed with it.
        with nullcontext() if kind is None else suppress(NcclError):
            self.close()

    def __repr__(self) -> str:
        if self._entry is None or not self._entry.live:
            return f"<pynccl.Registration made at {self._line}, closed>"
        return f"<pynccl.Registration of {self.nbytes} bytes at {self._entry.begin:#x}, made at {self._line}>"


def register(owner: Owner, array: Any, span: Span) -> Registration:
    """Register the memory of an array that the communicator can use."""
    nbytes = span[1] * itemsize(span[2])
    if not nbytes:
        raise ValueError("array has no elements; expected memory to register")
    owner.live()
    refuse_unless_idle(owner, "ncclCommRegister", array)
    return _add(owner, array, span[0], nbytes)


def _add(owner: Owner, array: Any, begin: int, nbytes: int) -> Registration:
    with owner.alone():
        entry = owner.registrations.find(begin, nbytes)
        if entry is None:
            entry = _Entry(begin, nbytes, capi.ncclCommRegister(owner.live(), begin, nbytes), array)
            owner.registrations.add(entry)
        return Registration(owner, entry, array, "" if isinstance(array, Segment) else caller_line())


def registered(owner: Owner, span: Span) -> bool:
    """Tell whether a registration contains the memory of an array."""
    nbytes = span[1] * itemsize(span[2])
    return nbytes > 0 and owner.registrations.find(span[0], nbytes) is not None


def close_all(owner: Owner, timeout: float | None = None) -> None:
    """Deregister all memory before the communicator is finalized or destroyed; the caller has reserved it."""
    if not owner.registrations:
        return
    complete(owner, "ncclCommDeregister", timeout)
    owner.registrations.note_left()
    for entry in owner.registrations.entries():
        _remove(owner, entry)


def _deregister(owner: Owner, entry: _Entry) -> None:
    complete(owner, "ncclCommDeregister")
    _remove(owner, entry)


def _remove(owner: Owner, entry: _Entry) -> None:
    kept = entry.kept  # the memory, until it is deregistered
    owner.registrations.pop(entry)
    # NCCL gives no handle if NCCL_LOCAL_REGISTER=0 turns registration off.
    if entry.handle and owner.handle:
        capi.ncclCommDeregister(owner.handle, entry.handle)
    del kept
