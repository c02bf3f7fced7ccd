"""An mpi4py-shaped communicator: NCCL for device arrays, MPI for everything else.

    comm = pynccl.mpi.Comm(MPI.COMM_WORLD)
    comm.Allreduce(x, y, op=MPI.SUM)      # x, y: CuPy arrays by NCCL, NumPy arrays by MPI

The methods have mpi4py's signatures. On device arrays they go to the current stream of the array's library,
as CuPy's own operations do: what comes after them on that stream sees the result. On the CPU library, CuPy
arrays and other objects with `__cuda_array_interface__` take NCCL's way too, and the call returns when the
result is there. What NCCL cannot do (tags, ANY_SOURCE, logical and user operations, derived types) raises
NotSupportedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pynccl import _dtypes
from pynccl._buffers import Buffer, spans
from pynccl._communicator import Communicator
from pynccl._errors import NotSupportedError
from pynccl._group import Group
from pynccl._ops import OpName
from pynccl.bootstrap._init import init

__all__ = ["Comm"]

# A list, since MPI.Op has no hash.
_OPS: list[tuple[MPI.Op, OpName]] = [(MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min")]


class _Device(NamedTuple):
    """A device array in a call of mpi4py's, and what was said with it."""

    array: Any
    counts: list[int] | None = None
    displacements: list[int] | None = None

    def part(self, start: int, count: int) -> Buffer:
        """Return some of its elements."""
        pointer, _, code, _, flags = spans[type(self.array)](self.array, "buffer")
        travel = _dtypes.traveller(code)
        step = _dtypes.itemsize(code) * (travel.factor if travel else 1)
        return Buffer(
            pointer + start * step, count, _dtypes.name_of(code), owner=self.array, readonly=bool(flags & 1)
        )

    def length(self) -> int:
        """Return the number of elements."""
        _, count, code, _, _ = spans[type(self.array)](self.array, "buffer")
        travel = _dtypes.traveller(code)
        return count // travel.factor if travel else count

    def parts(self, size: int) -> list[Buffer]:
        """Return what each rank gets or gives: by its counts, or an equal share."""
        if self.counts is None:
            share, rest = divmod(self.length(), size)
            if rest:
                raise ValueError(f"the buffer has {self.length()} elements; expected a multiple of {size}")
            return [self.part(rank * share, share) for rank in range(size)]
        if len(self.counts) != size:
            raise ValueError(f"counts has {len(self.counts)} entries; expected one a rank, {size}")
        starts = self.displacements or [sum(self.counts[:rank]) for rank in range(size)]
        for rank, (start, count) in enumerate(zip(starts, self.counts, strict=True)):
            if start < 0 or count < 0 or start + count > self.length():
                raise ValueError(
                    f"rank {rank} has {count} elements from {start}; expected them within {self.length()}"
                )
        return [self.part(start, count) for start, count in zip(starts, self.counts, strict=True)]


def _is_device(array: Any) -> bool:
    """Tell whether an array is a device's, or on the CPU library takes the place of one."""
    kind = type(array)
    if kind.__module__.partition(".")[0] == "cupy" or hasattr(kind, "__cuda_array_interface__"):
        # torch has the interface on every tensor, and an error in it for those on the CPU.
        return getattr(getattr(array, "device", None), "type", "cuda") == "cuda"
    return hasattr(array, "__cuda_array_interface__") if kind is not np.ndarray else False


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


def _device(spec: Any, name: str) -> _Device | None:
    """Return the device array of one of mpi4py's buffer arguments, None for one that is MPI's."""
    if spec is None or spec is MPI.IN_PLACE or isinstance(spec, int):
        return None
    if not isinstance(spec, list | tuple):
        return _Device(spec) if _is_device(spec) else None
    if not spec or not _is_device(spec[0]):
        return None
    array, *more = spec
    if more and isinstance(more[-1], MPI.Datatype | str):
        _require_plain(more.pop(), array, name)
    if not more or more[0] is None:
        return _Device(array)
    counts = more[0]
    if isinstance(counts, int | np.integer):
        return _Device(_Device(array).part(0, int(counts)))
    if len(counts) == 2 and not isinstance(counts[0], int | np.integer):
        return _Device(array, _ints(counts[0]), _ints(counts[1]))
    return _Device(array, _ints(counts), _ints(more[1]) if len(more) > 1 and more[1] is not None else None)


def _require_plain(datatype: Any, array: Any, name: str) -> None:
    if isinstance(datatype, MPI.Datatype) and not datatype.is_predefined:
        raise NotSupportedError(f"{name} has a derived MPI datatype; on device arrays NCCL has no such thing")
    code = datatype if isinstance(datatype, str) else datatype.tocode()
    dtype = getattr(array, "dtype", None)
    if isinstance(dtype, np.dtype) and code and np.dtype(code) != dtype:
        raise TypeError(f"{name} has MPI datatype {code!r}; expected that of the array, {dtype}")


def _op(op: Any) -> OpName:
    for known, name in _OPS:
        if op == known:
            return name
    raise NotSupportedError("op is none of SUM, PROD, MAX, MIN, which is what NCCL has for device arrays")


def _require_no_tag(tag: int, name: str, neutral: Sequence[int]) -> None:
    if tag not in neutral:
        raise NotSupportedError(f"{name} is {tag}; expected 0: NCCL has no tags for device arrays")


class Comm:
    """An mpi4py communicator whose device arrays travel by NCCL; every rank of it has to make one.

    `mpi` is the mpi4py communicator, `nccl` the pynccl one. What is not defined here is mpi4py's own.
    """

    def __init__(
        self, mpi: MPI.Comm = MPI.COMM_WORLD, *, nccl: Communicator | None = None, **options: Any
    ) -> None:
        if not isinstance(mpi, MPI.Comm):
            raise TypeError(f"mpi is {mpi!r}; expected an mpi4py communicator")
        self.mpi = mpi
        self.nccl = init(mpi, **options) if nccl is None else nccl

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.nccl.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.nccl.size

    def __repr__(self) -> str:
        return f"<pynccl.mpi.Comm {self.nccl!r}>"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.mpi, name)
        if not name[:1].isupper() or not callable(value):
            return value

        def on_host(*args: Any, **kwargs: Any) -> Any:
            if any(_device(arg, name) for arg in (*args, *kwargs.values())):
                raise NotSupportedError(f"{name} of device arrays: NCCL has no such operation")
            return value(*args, **kwargs)

        return on_host

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *error: Any) -> None:
        self.nccl.__exit__(*error)

    def _both(self, send: Any, recv: Any) -> tuple[_Device | None, _Device | None]:
        """Return the device arrays of a call; None twice where it is MPI's."""
        one, two = _device(send, "sendbuf"), _device(recv, "recvbuf")
        for device, other, name in ((one, recv, "recvbuf"), (two, send, "sendbuf")):
            if device is not None and other is not None and other is not MPI.IN_PLACE and not (one and two):
                raise TypeError(f"{name} is host memory, the other buffer a device's; expected both alike")
        return one, two

    # --- collectives ---

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce to every rank; MPI.IN_PLACE as sendbuf."""
        send, recv = self._both(sendbuf, recvbuf)
        if recv is None:
            self.mpi.Allreduce(sendbuf, recvbuf, op)
            return
        self.nccl.all_reduce((send or recv).array, recv.array, _op(op))

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to every rank."""
        device = _device(buf, "buf")
        if device is None:
            self.mpi.Bcast(buf, root)
            return
        self.nccl.broadcast(device.array, root=root)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Reduce to the root; MPI.IN_PLACE as its sendbuf."""
        send, recv = self._both(sendbuf, recvbuf)
        source = send or recv
        if source is None:
            self.mpi.Reduce(sendbuf, recvbuf, op, root)
            return
        self.nccl.reduce(source.array, recv.array if recv and self.rank == root else None, _op(op), root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect equal parts on every rank."""
        self._all_gather("Allgather", sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect parts of any length on every rank."""
        self._all_gather("Allgatherv", sendbuf, recvbuf)

    def _all_gather(self, name: str, sendbuf: Any, recvbuf: Any) -> None:
        send, recv = self._both(sendbuf, recvbuf)
        if recv is None:
            getattr(self.mpi, name)(sendbuf, recvbuf)
            return
        parts = recv.parts(self.size)
        mine = parts[self.rank] if send is None else send.array
        with Group():
            for root, part in enumerate(parts):
                self.nccl.broadcast(mine if root == self.rank else None, part, root)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect equal parts on the root."""
        self._gather("Gather", sendbuf, recvbuf, root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect parts of any length on the root."""
        self._gather("Gatherv", sendbuf, recvbuf, root)

    def _gather(self, name: str, sendbuf: Any, recvbuf: Any, root: int) -> None:
        send, recv = self._both(sendbuf, recvbuf if self.rank == root else None)
        if send is None and recv is None:
            getattr(self.mpi, name)(sendbuf, recvbuf, root)
            return
        parts = recv.parts(self.size) if recv and self.rank == root else []
        with Group():
            if send is not None:
                self.nccl.send(send.array, root)
            for peer, part in enumerate(parts):
                if send is not None or peer != self.rank:
                    self.nccl.recv(part, peer)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send equal parts of the root's buffer to the ranks."""
        self._scatter("Scatter", sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send parts of any length of the root's buffer to the ranks."""
        self._scatter("Scatterv", sendbuf, recvbuf, root)

    def _scatter(self, name: str, sendbuf: Any, recvbuf: Any, root: int) -> None:
        send, recv = self._both(sendbuf if self.rank == root else None, recvbuf)
        if send is None and recv is None:
            getattr(self.mpi, name)(sendbuf, recvbuf, root)
            return
        parts = send.parts(self.size) if send and self.rank == root else []
        with Group():
            for peer, part in enumerate(parts):
                if recv is not None or peer != self.rank:
                    self.nccl.send(part, peer)
            if recv is not None:
                self.nccl.recv(recv.array, root)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange equal parts between all ranks."""
        self._all_to_all("Alltoall", sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange parts of any length between all ranks."""
        self._all_to_all("Alltoallv", sendbuf, recvbuf)

    def _all_to_all(self, name: str, sendbuf: Any, recvbuf: Any) -> None:
        send, recv = self._both(sendbuf, recvbuf)
        if recv is None:
            getattr(self.mpi, name)(sendbuf, recvbuf)
            return
        if send is None:
            raise NotSupportedError(f"{name} in place: NCCL needs separate device arrays")
        with Group():
            for peer, part in enumerate(send.parts(self.size)):
                self.nccl.send(part, peer)
            for peer, part in enumerate(recv.parts(self.size)):
                self.nccl.recv(part, peer)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: MPI.Op = MPI.SUM
    ) -> None:
        """Reduce, and give every rank its part: `recvcounts[i]` elements to rank i."""
        send, recv = self._both(sendbuf, recvbuf)
        if recv is None:
            self.mpi.Reduce_scatter(sendbuf, recvbuf, recvcounts, op)
            return
        if send is None:
            raise NotSupportedError("Reduce_scatter in place: NCCL needs separate device arrays")
        parts = _Device(send.array, None if recvcounts is None else _ints(recvcounts)).parts(self.size)
        with Group():
            for root, part in enumerate(parts):
                self.nccl.reduce(part, recv.array if root == self.rank else None, _op(op), root)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce, and give every rank an equal part."""
        _, recv = self._both(sendbuf, recvbuf)
        if recv is None:
            self.mpi.Reduce_scatter_block(sendbuf, recvbuf, op)
            return
        self.Reduce_scatter(sendbuf, recvbuf, None, op)

    def Barrier(self) -> None:
        """Return when every rank has reached this."""
        self.mpi.Barrier()

    # --- point to point ---

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer to a rank."""
        device = _device(buf, "buf")
        if device is None:
            self.mpi.Send(buf, dest, tag)
            return
        _require_no_tag(tag, "tag", (0,))
        if dest != MPI.PROC_NULL:
            self.nccl.send(device.array, dest)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        """Receive from a rank; device arrays need to say from which."""
        device = _device(buf, "buf")
        if device is None:
            self.mpi.Recv(buf, source, tag, status)
            return
        self._require_source(source, tag, status)
        if source != MPI.PROC_NULL:
            self.nccl.recv(device.array, source)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Send to one rank while receiving from another."""
        send, recv = self._both(sendbuf, recvbuf)
        if send is None and recv is None:
            self.mpi.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
            return
        _require_no_tag(sendtag, "sendtag", (0,))
        self._require_source(source, recvtag, status)
        with Group():
            if send is not None and dest != MPI.PROC_NULL:
                self.nccl.send(send.array, dest)
            if recv is not None and source != MPI.PROC_NULL:
                self.nccl.recv(recv.array, source)

    def _require_source(self, source: int, tag: int, status: MPI.Status | None) -> None:
        if source == MPI.ANY_SOURCE:
            raise NotSupportedError("source is ANY_SOURCE; expected a rank: NCCL receives from a known one")
        _require_no_tag(tag, "tag", (0, MPI.ANY_TAG))
        if status is not None:
            raise NotSupportedError("status is given; expected None: NCCL tells nothing of a message")

    # --- relatives and the end ---

    def Split(self, color: int = 0, key: int = 0) -> Comm | MPI.Comm:
        """Make a communicator of the ranks with the same color; MPI.COMM_NULL for MPI.UNDEFINED."""
        mpi = self.mpi.Split(color, key)
        nccl = self.nccl.split(None if color == MPI.UNDEFINED else color, key)
        return mpi if nccl is None else Comm(mpi, nccl=nccl)

    def Dup(self) -> Comm:
        """Make another communicator of the same ranks."""
        copy = self.Split(0, self.rank)
        assert isinstance(copy, Comm)
        return copy

    def Free(self) -> None:
        """Destroy the NCCL communicator, and free the MPI one unless it is MPI's own."""
        self.nccl.destroy()
        if self.mpi not in (MPI.COMM_WORLD, MPI.COMM_SELF):
            self.mpi.Free()
