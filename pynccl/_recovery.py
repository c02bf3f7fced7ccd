"""Going on after a rank has failed: who is left, and a new rendezvous among them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pynccl import _watchdog, capi
from pynccl._binding import ffi, lib
from pynccl._errors import NcclTimeoutError, RankFailedError
from pynccl._types import UniqueId

if TYPE_CHECKING:
    from pynccl._communicator import Communicator

# Where the communicator has no time-out of its own.
_SECONDS = 60.0
_SLICE_MS = 100
_ETIMEDOUT, _ECONNRESET = 110, 104
# What messages are about, in the upper half of their tags.
_AGREE, _ID = 1 << 32, 2 << 32
_TEXT: Any = lib.PYNCCL_FRAME_TEXT


def dead(comm: Communicator) -> set[int]:
    """Return the ranks whose connection ended without a goodbye."""
    ranks = ffi.new("int[]", comm.size)
    return {int(rank) for rank in ranks[0 : lib.pynccl_watch_dead(comm._c, ranks)]}


class Survivors:
    """Agrees with the other ranks of a failed communicator on who is left, over the control channel."""

    def __init__(self, comm: Communicator, excluded: set[int], derive: bool) -> None:
        self.comm, self.excluded, self.derive = comm, excluded, derive
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
            number = self.comm._agreements = self.comm._agreements + 1
            said = self._pack()
            # Who is excluded is told too, if it is there.
            for rank in range(size):
                if rank != me:
                    lib.pynccl_watch_send(self.comm._c, rank, _AGREE | number, said, len(said))
            heard = {said}
            for rank in self.ranks():
                if rank == me:
                    continue
                data = self._receive(rank, _AGREE | number, len(said))
                if data is None:
                    # Who has left by itself has gone on, without this rank.
                    self.excluded.add(rank if rank in dead(self.comm) else me)
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
        tag = _ID | self.comm._agreements
        if me != ranks[0]:
            data = self._receive(ranks[0], tag, 128)
            if data is None:
                self.look()
                raise self._late(ranks[0])
            return UniqueId(data)
        made = UniqueId(capi.ncclGetUniqueId())
        for rank in ranks[1:]:
            lib.pynccl_watch_send(self.comm._c, rank, tag, bytes(made), 128)
        return made


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
