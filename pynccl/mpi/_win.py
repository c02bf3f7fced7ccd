"""MPI's windows over pynccl's: puts, gets and fences on device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from pynccl._arrays.buffers import spans
from pynccl._base.values import is_int, shown
from pynccl._comm.groups import Group
from pynccl._errors import NcclInvalidUsage, NotSupportedError
from pynccl._library import loader
from pynccl._memory import creation
from pynccl._memory.window import Window
from pynccl.mpi._comm import Comm
from pynccl.mpi._messages import Block, Message, Region, one, part_of, place_of, target_of, whole

# The most copies in one group, as in _staging.
_BATCH = 256
# By method: why NCCL cannot express it.
_ACCUMULATES = "NCCL puts bytes into the memory of others, and reduces in collective calls only"
_PASSIVE = (
    "NCCL tells only the target that a put has arrived, by a signal that the target waits for; expected Fence"
)
_REFUSED = {
    **dict.fromkeys(("Accumulate", "Get_accumulate", "Raccumulate", "Rget_accumulate"), _ACCUMULATES),
    **dict.fromkeys(("Fetch_and_op", "Compare_and_swap"), _ACCUMULATES),
    **dict.fromkeys(("Lock", "Unlock", "Lock_all", "Unlock_all"), _PASSIVE),
    **dict.fromkeys(("Flush", "Flush_all", "Flush_local", "Flush_local_all", "Sync"), _PASSIVE),
    **dict.fromkeys(("Post", "Start", "Complete", "Wait", "Test"), "expected Fence, which all ranks call"),
    **dict.fromkeys(("Rput", "Rget"), "there is no MPI.Request for it; expected Put or Get, and Fence"),
    **dict.fromkeys(("Attach", "Detach"), "NCCL registers the memory of all ranks together; expected Create"),
    "Shared_query": "expected comm.nccl.window, and Window.peer, for arrays over the memory of others",
}
_HOW_MADE = "a window's memory is fixed in NCCL; expected Win.Create or Win.Allocate"


class Win:
    """An MPI window on device memory, over `Communicator.window`; from `Win.Create` or `Win.Allocate`.

    `comm` is the `Comm` of the window, `memory` this rank's array. Puts take signal 0 of context 0 of
    `comm.nccl`: other calls must not use this signal while windows exist.

    Every operation raises TypeError or ValueError for wrong arguments, NcclInvalidUsage once the window is
    freed, and NotSupportedError for what NCCL lacks; otherwise as `Communicator.window` and `put_signal` do,
    RankFailedError or NcclTimeoutError for example, or MPI.Exception, since it also calls MPI.
    """

    def __init__(self, comm: Comm, memory: Any, disp_unit: int, flavor: int) -> None:
        self.comm, self.memory, self.flavor, self.name = comm, memory, flavor, ""
        self._own = one([memory, MPI.BYTE], "memory", writes=True).memory if memory is not None else None
        nbytes = 0 if self._own is None else self._own.nbytes
        if not is_int(disp_unit):
            raise TypeError(f"disp_unit is {shown(disp_unit)}; expected an int")
        if disp_unit < 1:
            raise ValueError(f"disp_unit is {shown(disp_unit)}; expected 1 or more")
        # The bytes of every rank's memory, and its unit of displacements.
        self._places: list[tuple[int, int]] = comm.mpi.allgather((nbytes, disp_unit))
        self._peers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._window: Window | None = self._register(nbytes)

    def _register(self, nbytes: int) -> Window:
        if nbytes:
            assert self._own is not None
            array = part_of(self.memory, self._own.pointer, nbytes, None)
        else:
            # NCCL has no windows without memory.
            array = creation.empty(1, "uint8")
        # NVIDIA's NCCL puts into symmetric windows only; their sizes must be equal.
        return self.comm.nccl.window(array, symmetric=loader.backend() != "cpu")

    @classmethod
    def Create(
        cls, memory: Any, disp_unit: int = 1, info: MPI.Info = MPI.INFO_NULL, comm: Comm | None = None
    ) -> Win | MPI.Win:
        """Make a window of the ranks' arrays, None on a rank without one; every rank of `comm` calls it.

        Host memory makes mpi4py's own window. On the CPU library other ranks can get from memory of
        `pynccl.empty`; on a GPU the arrays must be of it, and of equal size.
        """
        comm = _comm(comm)
        spec = None if isinstance(memory, type(MPI.BOTTOM)) else memory
        places = comm.mpi.allgather(place_of(spec))
        if False in places and True in places:
            rank = places.index(False)
            raise TypeError(
                f"memory is host memory on rank {rank}, and device memory on others; expected one kind"
            )
        if True not in places:
            assert isinstance(comm.mpi, MPI.Intracomm)
            return MPI.Win.Create(memory, disp_unit, info, comm.mpi)
        return cls(comm, spec, disp_unit, MPI.WIN_FLAVOR_CREATE)

    @classmethod
    def Allocate(
        cls, size: int, disp_unit: int = 1, info: MPI.Info = MPI.INFO_NULL, comm: Comm | None = None
    ) -> Win:
        """Make a window of new memory, `size` bytes on this rank, from `pynccl.empty`; `memory` has it."""
        comm = _comm(comm)
        memory = creation.empty(size, "uint8") if whole(size, "size") else None
        return cls(comm, memory, disp_unit, MPI.WIN_FLAVOR_ALLOCATE)

    @classmethod
    def Create_dynamic(cls, info: MPI.Info = MPI.INFO_NULL, comm: Comm | None = None) -> Win:
        """Raise NotSupportedError."""
        raise NotSupportedError(f"Create_dynamic: {_HOW_MADE}")

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: MPI.Info = MPI.INFO_NULL, comm: Comm | None = None
    ) -> Win:
        """Raise NotSupportedError."""
        raise NotSupportedError("Allocate_shared: NCCL has no such windows; expected Win.Allocate and Get")

    def __getattr__(self, name: str) -> Any:
        if name not in _REFUSED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotSupportedError(f"{name} on device memory: {_REFUSED[name]}")

    def __repr__(self) -> str:
        return f"<pynccl.mpi.Win {self._window!r}>"

    def _live(self) -> Window:
        if self._window is None:
            raise NcclInvalidUsage("the window cannot be used: it was freed")
        return self._window

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write into a rank's memory; it is there after the next Fence.

        `target` is a displacement in the units of the target, `(displacement, count)`, or `(displacement,
        count, datatype)`; by default 0, and the count and datatype of `origin`. ValueError beyond the
        target's memory.
        """
        window, message = self._live(), one(origin, "origin")
        if target_rank == MPI.PROC_NULL:
            return
        comm, calls = self.comm, list(self._pairs(message, target_rank, target))
        memory = message.memory
        for batch in _batches(calls):
            with Group():
                for here, there, nbytes in batch:
                    part = part_of(memory.array, memory.pointer + here, nbytes, None, memory.readonly)
                    comm.nccl.put_signal(part, target_rank, window, byte_offset=there)
            comm.lane.puts[target_rank] += len(batch)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read a rank's memory, as it was at the last Fence; arguments as in `Put`.

        ValueError if loads cannot reach the memory: see `Window.peer`.
        """
        self._live()
        message = one(origin, "origin", writes=True)
        if target_rank == MPI.PROC_NULL:
            return
        calls, memory, comm = list(self._pairs(message, target_rank, target)), message.memory, self.comm
        base = self._address(target_rank) if calls else 0
        for batch in _batches(calls):
            with Group():
                for here, there, nbytes in batch:
                    comm.nccl.send(part_of(memory.array, base + there, nbytes, None), comm.rank)
                    comm.nccl.recv(part_of(memory.array, memory.pointer + here, nbytes, None), comm.rank)

    def _pairs(self, origin: Message, rank: Any, spec: Any) -> Iterator[tuple[int, int, int]]:
        """Return the offsets of each piece in the origin's and the target's memory, and its length."""
        if not is_int(rank):
            raise TypeError(f"target_rank is {shown(rank)}; expected an int")
        if not 0 <= rank < self.comm.size:
            raise ValueError(f"target_rank is {shown(rank)}; expected 0 <= target_rank < {self.comm.size}")
        region = target_of(spec, origin, *self._places[rank], int(rank))
        return _common(origin.regions[0], region)

    def _address(self, rank: int) -> int:
        """Return the address of a rank's memory in this process."""
        if rank not in self._peers:
            if rank == self.comm.rank and self._own is not None:
                self._peers[rank] = self._own.pointer
            else:
                array = self._live().peer(rank)
                self._kept.append(array)
                self._peers[rank] = spans[type(array)](array, "memory")[0]
        return self._peers[rank]

    def Fence(self, assertion: int = 0) -> None:
        """End an epoch and begin the next; every rank calls it, and sees all puts of the epoch afterwards.

        It also completes the puts into other windows of the communicator. Assertions are ignored.
        """
        self._live()
        whole(assertion, "assertion")
        comm = self.comm
        comm.lane.issue()
        # NCCL counts the signals of a pair of ranks, not of a window.
        puts, comm.lane.puts = comm.lane.puts, [0] * comm.size
        arrived = dict(enumerate(comm.mpi.alltoall(puts)))
        expected = {rank: count for rank, count in arrived.items() if count}
        if expected:
            comm.nccl.wait_signal(expected)
        comm.nccl.synchronize()
        # A rank may then get from a third one what others have put there.
        comm.mpi.Barrier()

    def Free(self) -> None:
        """End the epoch as Fence does, and release the memory; every rank calls it."""
        window = self._live()
        self.Fence()
        self._kept.clear()
        window.close()
        self._window = self._own = self.memory = None

    free = Free

    def tomemory(self) -> Any:
        """Return this rank's array; bytes for `Allocate`."""
        return self.memory

    @property
    def attrs(self) -> tuple[int, int, int]:
        """The address, the bytes and the displacement unit of this rank's memory."""
        return (0 if self._own is None else self._own.pointer, *self._places[self.comm.rank])

    @property
    def model(self) -> int:
        """MPI.WIN_SEPARATE: a rank sees puts after a fence."""
        return MPI.WIN_SEPARATE

    @property
    def group(self) -> MPI.Group:
        """The ranks, as an MPI group."""
        return self.comm.mpi.Get_group()

    def Get_group(self) -> MPI.Group:
        """Return the ranks, as an MPI group."""
        return self.group

    def Get_attr(self, keyval: int) -> int | None:
        """Return MPI.WIN_BASE, WIN_SIZE, WIN_DISP_UNIT, WIN_CREATE_FLAVOR or WIN_MODEL; None for others."""
        base, size, unit = self.attrs
        known = [(MPI.WIN_BASE, base), (MPI.WIN_SIZE, size), (MPI.WIN_DISP_UNIT, unit)]
        known += [(MPI.WIN_CREATE_FLAVOR, self.flavor), (MPI.WIN_MODEL, self.model)]
        return dict(known).get(keyval)

    def Get_name(self) -> str:
        """Return the name of the window."""
        return self.name

    def Set_name(self, name: str) -> None:
        """Name the window."""
        self.name = name


def _comm(comm: Any) -> Comm:
    if not isinstance(comm, Comm):
        raise TypeError(f"comm is {shown(comm)}; expected a pynccl.mpi.Comm")
    return comm


def _common(origin: Region, target: Region) -> Iterator[tuple[int, int, int]]:
    """Return the pieces that are contiguous in two regions of the same number of bytes."""
    sources, places = _pieces(origin), _pieces(target)
    here, there, given, room = 0, 0, 0, 0
    while True:
        if not given:
            here, given = next(sources, (0, 0))
        if not room:
            there, room = next(places, (0, 0))
        nbytes = min(given, room)
        if not nbytes:
            return
        yield here, there, nbytes
        here, there, given, room = here + nbytes, there + nbytes, given - nbytes, room - nbytes


def _pieces(region: Region) -> Iterator[Block]:
    return (block for block in region.blocks() if block[1])


def _batches(calls: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    for start in range(0, len(calls), _BATCH):
        yield calls[start : start + _BATCH]
