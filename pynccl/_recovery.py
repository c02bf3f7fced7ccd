"""Going on after a rank has failed: who is left, and a new rendezvous among them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pynccl import _watchdog, capi
from pynccl._binding import ffi, lib
from pynccl._errors import NcclError, NcclRemoteError, NcclTimeoutError, RankFailedError
from pynccl._recorder import recorded
from pynccl._types import UniqueId

if TYPE_CHECKING:
    from pynccl._communicator import Communicator

# Where the communicator has no time-out of its own.
_SECONDS = 60.0
_SLICE_MS = 100
_LATE = 1.0
_ETIMEDOUT, _ECONNRESET = 110, 104
# What messages are about. Between two ranks they come in order, so that they need no numbers.
_AGREE, _ID, _MADE = 1, 2, 3
_TEXT: Any = lib.PYNCCL_FRAME_TEXT
_SHRINK: Any = lib.PYNCCL_SHRINK


def dead(comm: Communicator) -> set[int]:
    """Return the ranks whose connection ended without a goodbye."""
    ranks = ffi.new("int[]", comm.size)
    return {int(rank) for rank in ranks[0 : lib.pynccl_watch_dead(comm._c, ranks)]}


class Survivors:
    """Agrees with the other ranks of a failed communicator on who is left, over the control channel."""

    def __init__(self, comm: Communicator, excluded: set[int], derive: bool, final: bool) -> None:
        self.comm, self.excluded, self.derive, self.final = comm, excluded, derive, final
        self.deadline = time.monotonic() + (comm._timeout or _SECONDS)

    def ranks(self) -> list[int]:
        """Return who is left, in order."""
        return [rank for rank in range(self.comm.size) if rank not in self.excluded]

    def look(self) -> None:
        """Raise when one of them has died."""
        fresh = dead(self.comm) - self.excluded
        if fresh:
            raise RankFailedError(
                f"ranks {sorted(fresh)} died while the others shrank the communicator",
                ranks=self.excluded | fresh,
                rank=self.comm.rank,
                size=self.comm.size,
            )

    def agree(self) -> None:
        """Exclude everybody whom any survivor excludes, and whoever dies meanwhile.

        The ranks tell each other, until all have said the same. `derive` stays true where all want it.
        """
        size, me = self.comm.size, self.comm.rank
        while True:
            said = self._pack()
            # Who is excluded is told too, if it is there and this is the communicator's end.
            for rank in range(size):
                if rank != me and (self.final or rank not in self.excluded):
                    lib.pynccl_watch_send(self.comm._c, rank, _AGREE, said, len(said))
            heard = {said}
            for rank in self.ranks():
                if rank == me:
                    continue
                data = self._receive(rank, _AGREE, len(said))
                if data is None:
                    # Who goes on without this rank says so first: who leaves without a word has given up.
                    self.excluded.add(rank if self.final or rank in dead(self.comm) else me)
                    heard.add(b"")
                    continue
                heard.add(data)
                self.derive = self.derive and bool(data[0])
                self.excluded |= {r for r in range(size) if data[1 + r // 8] >> r % 8 & 1}
            if me in self.excluded:
                raise RankFailedError(
                    f"the other ranks excluded this one, {me} of {size}", ranks=[me], rank=me, size=size
                )
            if heard == {said}:
                return

    def _pack(self) -> bytes:
        bits = bytearray((self.comm.size + 7) // 8)
        for rank in self.excluded:
            bits[rank // 8] |= 1 << rank % 8
        return bytes([self.derive]) + bytes(bits)

    def _receive(self, rank: int, tag: int, size: int) -> bytes | None:
        """Return a message, None where its sender is gone."""
        data = ffi.new("char[]", size)
        while True:
            code = lib.pynccl_watch_receive(self.comm._c, rank, tag, data, size, _SLICE_MS)
            if code == 0:
                return bytes(ffi.buffer(data, size))
            if code != _ETIMEDOUT:
                return None
            if time.monotonic() >= self.deadline:
                raise self._late(rank)

    def _late(self, rank: int) -> NcclTimeoutError:
        return NcclTimeoutError(
            f"shrinking the communicator: rank {rank} did not take part in time",
            function="shrink",
            rank=self.comm.rank,
            size=self.comm.size,
        )

    def unique_id(self) -> UniqueId:
        """Return an id that the first survivor made."""
        ranks, me = self.ranks(), self.comm.rank
        if me != ranks[0]:
            data = self._receive(ranks[0], _ID, 128)
            if data is None:
                self.look()
                raise self._late(ranks[0])
            return UniqueId(data)
        made = UniqueId(capi.ncclGetUniqueId())
        for rank in ranks[1:]:
            lib.pynccl_watch_send(self.comm._c, rank, _ID, bytes(made), 128)
        return made

    def all_made(self, made: bool) -> bool:
        """Tell whether all survivors have made the new communicator; who has died since counts as one."""
        others = [rank for rank in self.ranks() if rank != self.comm.rank]
        for rank in others:
            lib.pynccl_watch_send(self.comm._c, rank, _MADE, bytes([made]), 1)
        answers = [self._receive(rank, _MADE, 1) for rank in others]
        return made and b"\0" not in answers

    def note_deaths(self) -> bool:
        """Exclude who has died; tell whether anybody has. A death may be noticed a little late."""
        deadline = time.monotonic() + _LATE
        while not (fresh := dead(self.comm) - self.excluded):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        self.excluded |= fresh
        return True


def shrink(comm: Communicator, excluded: set[int], abort: bool, config: Any) -> Communicator:
    """Shrink after the survivors have agreed on who they are; again, when one more dies meanwhile."""
    native = bool(lib.nccl_api_find(b"ncclCommShrink"))
    survivors = Survivors(comm, excluded, native, final=abort)
    if not abort:
        comm._live()
    with comm._alone(anyway=abort), recorded(comm._c, _SHRINK):
        # The watchdog may still be at ending what was outstanding.
        survivors.derive = _watchdog.settle(comm) and native
        while True:
            survivors.agree()
            child, failure = None, None
            try:
                child = _create(comm, survivors, abort, config)
            except NcclError as error:
                failure = error
            if survivors.all_made(child is not None):
                break
            if child is not None:
                child.abort()
            if not (abort and survivors.note_deaths()):
                raise failure or NcclRemoteError(
                    "another rank could not shrink the communicator", rank=comm.rank, size=comm.size
                )
            # The library counts its derived communicators, and no longer alike on all ranks.
            survivors.derive = False
    assert child is not None
    if abort:
        comm.abort()
    else:
        comm._adopt(child)
    return child


def _create(comm: Communicator, survivors: Survivors, abort: bool, config: Any) -> Communicator:
    ranks, excluded = survivors.ranks(), survivors.excluded
    child = comm._relative("shrink", sorted(excluded))
    uid = b"" if survivors.derive else bytes(survivors.unique_id())

    def create() -> int:
        if survivors.derive:
            return comm._native_shrink(excluded, abort, config)
        return capi.ncclCommInitRankConfig(len(ranks), uid, ranks.index(comm._rank), config)

    child._create("ncclCommShrink", create, comm._device, survivors.look)
    return child


def can_agree(comm: Communicator) -> bool:
    """Tell whether the ranks have a channel, and fit into a message."""
    return bool(lib.pynccl_watch_connected(comm._c) and comm.size <= 8 * (_TEXT - 1))


def share_id(comm: Communicator, unique_id: bytes | None) -> UniqueId:
    """Return the unique id that one rank has to all ranks of a healthy communicator, through it."""
    timeout = comm._timeout
    deadline = None if timeout is None else time.monotonic() + timeout
    mine = bytes([unique_id is not None]) + (unique_id or bytes(128))
    given = [one[1:] for one in _watchdog.gather(comm, mine, deadline) if one[0]]
    if len(given) != 1:
        raise ValueError(f"{len(given)} ranks gave a unique_id to grow with; expected one")
    return UniqueId(given[0])
