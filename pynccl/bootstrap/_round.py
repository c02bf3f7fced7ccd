"""One exchange of a unique id through a store: every rank arrives, rank 0 answers, everybody leaves.

What arrives and what is answered are results, not only ids: whoever fails, all ranks learn of it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pynccl import capi
from pynccl._errors import BootstrapError, NcclError, RankFailedError
from pynccl._types import UniqueId
from pynccl.bootstrap._store import Store

T = TypeVar("T")

# Whoever waits for rank 0's answer gives it this much longer to say who is missing.
_MARGIN = 0.5
# So long rank 0 stays after a failure, where it is the store's home, for the others to read what it was.
_LINGER = 5.0
_MOST_NAMED = 32
# Results of the library that a dead rank may be behind.
_BY_DEATH = (1, 2, 3, 6)
_LONGEST_TEXT = 4096
# Whether it went well, and the world size; then the id, or the text of the error.
_RESULT = struct.Struct("!?I")


class Round:
    """This rank's part in one exchange."""

    def __init__(self, store: Store, number: int, rank: int, size: int, deadline: float) -> None:
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        self.prefix = f"init/{number}/"

    def exchange(self, prepare: Callable[[], T], lingers: bool) -> tuple[UniqueId, T]:
        """Return rank 0's unique id and what `prepare` made; a failure anywhere is raised on every rank."""
        if self.store.add(f"{self.prefix}times/{self.rank}", 1) > 1:
            raise BootstrapError(
                f"rank {self.rank} of {self.size} arrived twice; two processes have the same RANK"
            )
        try:
            prepared = prepare()
        except Exception as error:
            self._arrive(_failure(self.size, error))
            self._give_up(error, lingers)
            raise
        self._arrive(_RESULT.pack(True, self.size))
        if self.rank != 0:
            return self._follow(), prepared
        try:
            uid = self._lead()
        except BaseException as error:
            self._give_up(error, lingers)
            raise
        return uid, prepared

    def tie(self) -> None:
        """Have the store tell the others when this rank dies."""
        self.store.tie(self.prefix + "lost", b"%d" % self.rank)

    def guard(self, create: Callable[[Callable[[], None]], T], lingers: bool) -> T:
        """Create a communicator while the store tells which rank dies over it.

        `create` gets what it has to call now and then, which raises.
        """
        try:
            made = create(self._look)
        except RankFailedError:
            raise
        except NcclError as error:
            # What the library says may be the consequence of a death that the store is about to notice.
            self._look(_MARGIN if error.result in _BY_DEATH else 0)
            raise
        finally:
            with suppress(BootstrapError):
                self.store.tie(self.prefix + "lost", b"")
        self._leave_made(lingers)
        return made

    def _look(self, wait: float = 0) -> None:
        try:
            lost = int(self.store.get(self.prefix + "lost", wait))
        except TimeoutError:
            return
        except BootstrapError:
            # The store was rank 0's, or the launcher's, which takes everybody with it.
            lost = 0
        raise RankFailedError(
            f"rank {lost} died while the communicator of {self.size} ranks was created",
            ranks=[lost],
            rank=self.rank,
            size=self.size,
        )

    def _leave_made(self, lingers: bool) -> None:
        """Say that this rank has its communicator; where it is the store's home, wait for the others."""
        with suppress(BootstrapError, TimeoutError):
            if self.store.add(self.prefix + "made", 1) == self.size:
                self.store.set(self.prefix + "all made", b"")
            elif lingers:
                self.store.get(self.prefix + "all made", min(_LINGER, self._left()))

    def _arrive(self, result: bytes) -> None:
        self.store.set(self._arrival(self.rank), result)

    def _arrival(self, rank: int) -> str:
        return f"{self.prefix}arrival/{rank}"

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _lead(self) -> UniqueId:
        uid = UniqueId(capi.ncclGetUniqueId())
        for other in range(self.size):
            try:
                ok, size, rest = _unpack(self.store.get(self._arrival(other), self._left()))
            except TimeoutError:
                raise self._absent() from None
            if not ok:
                raise BootstrapError(f"rank {other} of {size} failed: {rest.decode(errors='replace')}")
            if size != self.size:
                raise BootstrapError(f"rank {other} has world_size {size}, rank 0 has {self.size}")
        self.store.set(self.prefix + "answer", _RESULT.pack(True, self.size) + bytes(uid))
        self._leave()
        try:
            self.store.get(self.prefix + "all left", self._left() + _MARGIN)
        except TimeoutError:
            raise BootstrapError(
                f"rank 0 of {self.size}: not every rank took the unique id in time"
            ) from None
        return uid

    def _give_up(self, error: BaseException, lingers: bool) -> None:
        """Tell the others of a failure; only rank 0's word counts, the others have said theirs on arrival."""
        self._leave()
        if self.rank != 0:
            return
        self.store.set(self.prefix + "answer", _failure(self.size, error))
        if lingers:
            with suppress(TimeoutError):
                self.store.get(self.prefix + "all left", min(_LINGER, self._left() + _MARGIN))

    def _follow(self) -> UniqueId:
        try:
            ok, size, rest = _unpack(self.store.get(self.prefix + "answer", self._left() + _MARGIN))
        except TimeoutError:
            raise self._absent() from None
        self._leave()
        if not ok:
            raise BootstrapError(f"rank 0 of {size} failed: {rest.decode(errors='replace')}")
        if size != self.size:
            raise BootstrapError(f"rank {self.rank} has world_size {self.size}, rank 0 has {size}")
        return UniqueId(rest)

    def _leave(self) -> None:
        if self.store.add(self.prefix + "left", 1) == self.size:
            self.store.set(self.prefix + "all left", b"")

    def _absent(self) -> BootstrapError:
        missing = [other for other in range(self.size) if not self._has_arrived(other)]
        names = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        who = (
            f"ranks that never arrived: {names} ({len(missing)} of {self.size})"
            if missing
            else "rank 0 is silent"
        )
        return BootstrapError(
            f"rank {self.rank} of {self.size} waited in vain at {self.store.address}; {who}"
        )

    def _has_arrived(self, rank: int) -> bool:
        try:
            self.store.get(self._arrival(rank), 0)
        except TimeoutError:
            return False
        return True


def _failure(size: int, error: BaseException) -> bytes:
    return _RESULT.pack(False, size) + f"{type(error).__name__}: {error}".encode()[:_LONGEST_TEXT]


def _unpack(data: bytes) -> tuple[bool, int, bytes]:
    ok, size = _RESULT.unpack_from(data)
    return ok, size, data[_RESULT.size :]
