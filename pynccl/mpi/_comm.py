"""The mpi4py-shaped communicator, and the rules by which its calls go to NCCL or to MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mpi4py import MPI

from pynccl._arrays import dtypes
from pynccl._base.values import shown
from pynccl._comm.communicator import Communicator
from pynccl._comm.groups import Group
from pynccl._comm.reductions import OpName
from pynccl._errors import NotSupportedError
from pynccl.bootstrap._init import init
from pynccl.mpi._messages import (
    Message,
    each_its_own,
    in_place,
    on_device,
    one,
    part_of,
    require_alike,
    require_apart,
    same,
    several,
    wholes,
)
from pynccl.mpi._persistent import Persistent
from pynccl.mpi._requests import HostCalls, Lane, Steps, require_no_status
from pynccl.mpi._staging import Staging, neutral

# A list, since MPI.Op has no hash.
_OPS: list[tuple[MPI.Op, OpName]] = [(MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min")]
# Methods that make a communicator without a call on every rank of this one.
_NOT_BY_ALL = ("Create_group", "Create_from_group", "Shrink")
# Methods that return a communicator before it is complete.
_LATER = ("Idup", "Idup_with_info", "Ishrink")


def _instead(name: str) -> str:
    """Return a hint with the methods that take device arrays in place of one such as Isend."""
    if not name.startswith("I"):
        return ""
    blocking = name[1:].capitalize()
    if blocking in ("Send", "Recv"):
        return f"; expected Sendrecv, {blocking}_init, or {blocking} in a pynccl.group()"
    ours = [method for method in (blocking, f"{blocking}_init") if hasattr(Comm, method)]
    return f"; expected {' or '.join(ours)}" if ours else ""


def _op(op: Any, message: Message) -> OpName:
    """Return pynccl's name of a reduction; raise unless NCCL has it for the argument's datatype."""
    name = next((name for known, name in _OPS if op == known), None)
    if name is None:
        raise NotSupportedError(
            f"op is {_op_text(op)}; expected MPI.SUM, PROD, MAX or MIN: NCCL has no other for device arrays"
        )
    dtype, derived = message.dtype, message.regions[0].layout.derived
    travel = None if dtype is None else dtypes.traveller(dtypes.CODES[dtype])
    if dtype is None or derived or (travel and not travel.adds):
        what = "a derived datatype" if derived else dtype or "a datatype"
        raise NotSupportedError(f"{message.name} has {what}, which NCCL cannot reduce")
    if travel and name != "sum":
        raise NotSupportedError(
            f"{message.name} has {dtype} and op is {name}; expected sum, the only reduction for it"
        )
    return name


def _op_text(op: Any) -> str:
    """Return an operation as a program writes it."""
    if not isinstance(op, MPI.Op):
        return repr(op)
    known = (name for name in dir(MPI) if isinstance(getattr(MPI, name), MPI.Op) and getattr(MPI, name) == op)
    return next((f"MPI.{name}" for name in known), "one that MPI.Op.Create made")


def _require_no_tag(tag: int, name: str, neutral: Sequence[int]) -> None:
    if tag not in neutral:
        raise NotSupportedError(f"{name} is {tag}; expected 0: NCCL has no tags for device arrays")


def _reduced(sendbuf: Any, recvbuf: Any) -> tuple[Message, Message]:
    """Read the arguments of a reduction; in place both are the same."""
    recv = one(recvbuf, "recvbuf", writes=True)
    if in_place(sendbuf):
        return recv, recv
    send = one(sendbuf, "sendbuf")
    require_alike(send, recv)
    return send, recv


class Comm(Persistent):
    """An mpi4py communicator that sends device arrays by NCCL; every rank must create one.

    `mpi` is the mpi4py communicator, `nccl` the pynccl one. All other attributes are mpi4py's own.

    Every operation raises, on device arrays, as `Communicator.all_reduce` does: TypeError, ValueError,
    NcclInvalidUsage, CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError; and
    NotSupportedError for what NCCL lacks, such as a tag, a status, or a reduction of this kind. On host
    memory it raises MPI.Exception, as mpi4py does, and TypeError if some of its arrays are on a device.
    """

    def __init__(
        self, mpi: MPI.Comm = MPI.COMM_WORLD, *, nccl: Communicator | None = None, **options: Any
    ) -> None:
        if not isinstance(mpi, MPI.Comm) or mpi == MPI.COMM_NULL or mpi.Is_inter():
            given = "MPI.COMM_NULL" if mpi == MPI.COMM_NULL else shown(mpi)
            raise TypeError(f"mpi is {given}; expected an mpi4py intracommunicator")
        self._options = options
        self._over(mpi, init(mpi, **options) if nccl is None else nccl)

    def _over(self, mpi: MPI.Comm, nccl: Communicator) -> None:
        lane = Lane(nccl)
        Persistent.__init__(self, mpi, nccl, lane, partial(self._recording, nccl, lane))
        # One that prepares persistent calls has others.
        self._calls: Any = nccl
        self._group: Callable[[], AbstractContextManager[Any]] = Group

    @classmethod
    def _recording(cls, nccl: Communicator, lane: Lane, host: HostCalls, steps: Steps) -> Comm:
        """Return a Comm whose calls are prepared instead of made."""
        self = cls.__new__(cls)
        self.mpi, self.nccl, self.lane = host, nccl, lane  # type: ignore[assignment]
        self._calls, self._group = steps, steps.group
        return self

    def _stage(self, *, messages: bool = False) -> Staging:
        """Return the memory of a call; `messages`: the messages that were started join the call's group."""
        if not messages and self._calls is self.nccl:
            self.lane.issue()
        return Staging(self._calls, self._group)

    def _messages(self) -> AbstractContextManager[Any]:
        """Return a group that the messages that were started join."""
        return self.lane.joining() if self._calls is self.nccl and self.lane.messages else self._group()

    @property
    def rank(self) -> int:
        """The rank of this process, counted from 0."""
        return self.nccl.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.nccl.size

    def __repr__(self) -> str:
        return f"<pynccl.mpi.Comm {self.nccl!r}>"

    def __getattr__(self, name: str) -> Any:
        if name in ("mpi", "nccl"):
            # The object was never initialized.
            raise AttributeError(name)
        try:
            value = getattr(self.mpi, name)
        except AttributeError as error:
            where = f"comm.nccl.{name}" if hasattr(self.nccl, name) else "mpi4py's methods, and .nccl"
            raise AttributeError(f"pynccl.mpi.Comm has no attribute {name!r}; expected {where}") from error
        if not name[:1].isupper() or not callable(value):
            return value

        def on_host(*args: Any, **kwargs: Any) -> Any:
            if name in _LATER:
                raise NotSupportedError(f"{name}: NCCL has no non-blocking creation; expected Dup or Shrink")
            if any(on_device(buf=arg) for arg in (*args, *kwargs.values())):
                raise NotSupportedError(
                    f"{name} of device arrays: NCCL has no such operation{_instead(name)}"
                )
            made = value(*args, **kwargs)
            if isinstance(made, MPI.Intracomm):
                return self._relative(made, by_all=name not in _NOT_BY_ALL)
            return made

        return on_host

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *error: Any) -> None:
        self.nccl.__exit__(*error)

    # --- collectives ---

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce to every rank; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Allreduce(sendbuf, recvbuf, op)
            return
        send, recv = _reduced(sendbuf, recvbuf)
        with self._stage() as stage:
            self._calls.all_reduce(stage.send(send), stage.recv(recv), _op(op, recv))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Reduce to the root; MPI.IN_PLACE as its sendbuf."""
        here = self.rank == root
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf if here else None):
            self.mpi.Reduce(sendbuf, recvbuf, op, root)
            return
        send, recv = _reduced(sendbuf, recvbuf) if here else (one(sendbuf, "sendbuf"), None)
        with self._stage() as stage:
            target = None if recv is None else stage.recv(recv)
            self._calls.reduce(stage.send(send), target, _op(op, send), root)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to every rank."""
        if not on_device(buf=buf):
            self.mpi.Bcast(buf, root)
            return
        here = self.rank == root
        message = one(buf, "buf", writes=not here)
        with self._stage() as stage:
            self._calls.broadcast(stage.send(message) if here else stage.recv(message), root=root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect equal parts on every rank; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Allgather(sendbuf, recvbuf)
            return
        recv = one(recvbuf, "recvbuf", self.size, writes=True)
        send = recv.share(self.rank) if in_place(sendbuf) else one(sendbuf, "sendbuf")
        require_alike(send, recv.share(self.rank))
        with self._stage() as stage:
            self._calls.all_gather(stage.send(send), stage.recv(recv))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect parts of any length on every rank; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Allgatherv(sendbuf, recvbuf)
            return
        recv = several(recvbuf, "recvbuf", self.size, writes=True)
        send = self._own(sendbuf, "sendbuf", recv)
        with self._stage() as stage:
            mine, parts = stage.send(send), stage.recvs(recv)
            with self._group():
                for root, part in enumerate(parts):
                    self._calls.broadcast(mine if root == self.rank else None, part, root)

    def _own(self, spec: Any, name: str, parts: Message, writes: bool = False) -> Message:
        """Read the argument for this rank's part; MPI.IN_PLACE means the part of the other argument."""
        part = parts.of(self.rank)
        if in_place(spec):
            return part
        own = one(spec, name, writes=writes)
        require_alike(own, part)
        if not same(own, part):
            require_apart(own, parts)
        return own

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect equal parts on the root; MPI.IN_PLACE as its sendbuf."""
        here = self.rank == root
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf if here else None):
            self.mpi.Gather(sendbuf, recvbuf, root)
            return
        with self._stage() as stage:
            if not here:
                self._calls.gather(stage.send(one(sendbuf, "sendbuf")), None, root)
                return
            recv = one(recvbuf, "recvbuf", self.size, writes=True)
            send = recv.share(root) if in_place(sendbuf) else one(sendbuf, "sendbuf")
            require_alike(send, recv.share(root))
            self._calls.gather(stage.send(send), stage.recv(recv), root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect parts of any length on the root; MPI.IN_PLACE as its sendbuf."""
        here = self.rank == root
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf if here else None):
            self.mpi.Gatherv(sendbuf, recvbuf, root)
            return
        with self._stage() as stage:
            if not here:
                self._calls.send(stage.send(one(sendbuf, "sendbuf")), root)
                return
            recv = several(recvbuf, "recvbuf", self.size, writes=True)
            send = self._own(sendbuf, "sendbuf", recv)
            peers, stays = self._peers(send, recv)
            mine, parts = None if stays else stage.send(send), stage.recvs(recv.of(*peers))
            with self._group():
                if mine is not None:
                    self._calls.send(mine, root)
                for peer, part in zip(peers, parts, strict=True):
                    self._calls.recv(part, peer)

    def _peers(self, own: Message, parts: Message) -> tuple[list[int], bool]:
        """Return the ranks to exchange parts with, and whether this rank's own part stays in place."""
        stays = same(own, parts.of(self.rank))
        return [peer for peer in range(self.size) if peer != self.rank or not stays], stays

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send equal parts of the root's buffer to the ranks; MPI.IN_PLACE as its recvbuf."""
        here = self.rank == root
        if not on_device(sendbuf=sendbuf if here else None, recvbuf=recvbuf):
            self.mpi.Scatter(sendbuf, recvbuf, root)
            return
        with self._stage() as stage:
            if not here:
                self._calls.scatter(None, stage.recv(one(recvbuf, "recvbuf", writes=True)), root)
                return
            send = one(sendbuf, "sendbuf", self.size)
            recv = send.share(root) if in_place(recvbuf) else one(recvbuf, "recvbuf", writes=True)
            require_alike(recv, send.share(root))
            self._calls.scatter(stage.send(send), stage.recv(recv), root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send parts of any length of the root's buffer to the ranks; MPI.IN_PLACE as its recvbuf."""
        here = self.rank == root
        if not on_device(sendbuf=sendbuf if here else None, recvbuf=recvbuf):
            self.mpi.Scatterv(sendbuf, recvbuf, root)
            return
        with self._stage() as stage:
            if not here:
                self._calls.recv(stage.recv(one(recvbuf, "recvbuf", writes=True)), root)
                return
            send = several(sendbuf, "sendbuf", self.size)
            recv = self._own(recvbuf, "recvbuf", send, writes=True)
            peers, stays = self._peers(recv, send)
            parts, mine = stage.sends(send.of(*peers)), None if stays else stage.recv(recv)
            with self._group():
                for peer, part in zip(peers, parts, strict=True):
                    self._calls.send(part, peer)
                if mine is not None:
                    self._calls.recv(mine, root)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange equal parts between all ranks; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Alltoall(sendbuf, recvbuf)
            return
        recv = one(recvbuf, "recvbuf", self.size, writes=True)
        send = recv if in_place(sendbuf) else one(sendbuf, "sendbuf", self.size)
        require_alike(send, recv)
        with self._stage() as stage:
            self._calls.all_to_all(stage.send(send, apart=in_place(sendbuf)), stage.recv(recv))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange parts of any length between all ranks; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Alltoallv(sendbuf, recvbuf)
            return
        self._exchange(several, sendbuf, recvbuf)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange parts of any length and datatype between all ranks; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Alltoallw(sendbuf, recvbuf)
            return
        self._exchange(each_its_own, sendbuf, recvbuf)

    def _exchange(self, read: Callable[..., Message], sendbuf: Any, recvbuf: Any) -> None:
        stays = in_place(sendbuf)
        recv = read(recvbuf, "recvbuf", self.size, writes=True)
        send = recv if stays else read(sendbuf, "sendbuf", self.size)
        require_alike(send.of(self.rank), recv.of(self.rank))
        if not stays:
            require_apart(send, recv)
        with self._stage() as stage:
            sends, recvs = stage.sends(send, apart=stays), stage.recvs(recv)
            with self._group():
                for peer, part in enumerate(sends):
                    self._calls.send(part, peer)
                for peer, part in enumerate(recvs):
                    self._calls.recv(part, peer)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: MPI.Op = MPI.SUM
    ) -> None:
        """Reduce, and give rank i `recvcounts[i]` elements of the result."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Reduce_scatter(sendbuf, recvbuf, recvcounts, op)
            return
        recv = one(recvbuf, "recvbuf", writes=True)
        if recvcounts is None and not in_place(sendbuf):
            counts = self.mpi.allgather(recv.entries)
        else:
            counts = wholes(recvcounts, "recvcounts", self.size)
        if in_place(sendbuf):
            send, recv = recv, recv._replace(entries=counts[self.rank]).share(0)
        else:
            send = one(sendbuf, "sendbuf")
        self._scatter_reduced(send, recv, counts, op, apart=in_place(sendbuf))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce, and give every rank an equal part; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Reduce_scatter_block(sendbuf, recvbuf, op)
            return
        if in_place(sendbuf):
            send = one(recvbuf, "recvbuf", self.size, writes=True)
            recv = send.share(0)
        else:
            recv, send = one(recvbuf, "recvbuf", writes=True), one(sendbuf, "sendbuf", self.size)
        self._scatter_reduced(send, recv, [send.entries] * self.size, op, apart=in_place(sendbuf))

    def _scatter_reduced(
        self, send: Message, recv: Message, counts: list[int], op: MPI.Op, apart: bool
    ) -> None:
        name = _op(op, send)
        (given,) = send.regions
        if given.entries != sum(counts):
            raise ValueError(
                f"{send.name} has {given.entries} elements; expected {sum(counts)}, all ranks' counts"
            )
        require_alike(recv, send._replace(regions=[given._replace(entries=counts[self.rank])]))
        if not apart:
            require_apart(send, recv)
        with self._stage() as stage:
            source, target = stage.send(send), stage.recv(recv, apart=apart)
            if len(set(counts)) == 1:
                self._calls.reduce_scatter(source, target, name)
            else:
                if not counts[self.rank]:
                    target = part_of(None, 0, 0, send.dtype)
                self._calls.reduce_scatter_v(source, target, counts, name)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce the ranks up to this one; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Scan(sendbuf, recvbuf, op)  # type: ignore[attr-defined]
            return
        self._scan(sendbuf, recvbuf, op, 0)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Reduce the ranks before this one, on all but the first; MPI.IN_PLACE as sendbuf."""
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Exscan(sendbuf, recvbuf, op)  # type: ignore[attr-defined]
            return
        self._scan(sendbuf, recvbuf, op, 1)

    def _scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op, first: int) -> None:
        send, recv = _reduced(sendbuf, recvbuf)
        stays, reduction = send is recv, _op(op, send)
        if send.memory.dtype != send.dtype:
            raise NotSupportedError(
                f"{send.name} has {send.dtype} in an array of {send.memory.dtype}; expected an array of it"
            )
        if not stays:
            require_apart(send, recv)
        # One reduction for each rank, to which higher ranks contribute neutral elements.
        with self._stage() as stage:
            source = stage.send(send)
            target = stage.recv(recv, apart=stays) if self.rank >= first else None
            nothing = neutral(send, reduction) if send.entries else source
            with self._group():
                for root in range(first, self.size):
                    mine = source if self.rank <= root - first else nothing
                    self._calls.reduce(mine, target if root == self.rank else None, reduction, root)

    def Barrier(self) -> None:
        """Return when every rank has called Barrier, which is MPI's.

        Raises MPI.Exception, and the NcclError of messages that `Start` has left to this call.
        """
        self.lane.issue()
        self.mpi.Barrier()

    # --- point to point ---

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer to a rank, which must receive the same number of bytes."""
        if not on_device(buf=buf):
            self.mpi.Send(buf, dest, tag)
            return
        _require_no_tag(tag, "tag", (0,))
        if dest != MPI.PROC_NULL:
            with self._stage(messages=True) as stage:
                part = stage.send(one(buf, "buf"))
                with self._messages():
                    self._calls.send(part, dest)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        """Receive from a rank the number of bytes that it sends; device arrays need a source."""
        if not on_device(buf=buf):
            self.mpi.Recv(buf, source, tag, status)
            return
        self._require_source(source, tag, status)
        if source != MPI.PROC_NULL:
            with self._stage(messages=True) as stage:
                part = stage.recv(one(buf, "buf", writes=True))
                with self._messages():
                    self._calls.recv(part, source)

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
        if not on_device(sendbuf=sendbuf, recvbuf=recvbuf):
            self.mpi.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
            return
        _require_no_tag(sendtag, "sendtag", (0,))
        self._require_source(source, recvtag, status)
        send = None if dest == MPI.PROC_NULL else one(sendbuf, "sendbuf")
        recv = None if source == MPI.PROC_NULL else one(recvbuf, "recvbuf", writes=True)
        if send and recv:
            require_apart(send, recv)
        self._swap(send, dest, recv, source)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Send a buffer to one rank, and receive into it from another."""
        if not on_device(buf=buf):
            self.mpi.Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)
            return
        _require_no_tag(sendtag, "sendtag", (0,))
        self._require_source(source, recvtag, status)
        message = one(buf, "buf", writes=True)
        send = None if dest == MPI.PROC_NULL else message
        self._swap(send, dest, None if source == MPI.PROC_NULL else message, source)

    def _swap(self, send: Message | None, dest: int, recv: Message | None, source: int) -> None:
        with self._stage(messages=True) as stage:
            out = None if send is None else stage.send(send, apart=send is recv)
            into = None if recv is None else stage.recv(recv)
            with self._messages():
                if out is not None:
                    self._calls.send(out, dest)
                if into is not None:
                    self._calls.recv(into, source)

    def _require_source(self, source: int, tag: int, status: MPI.Status | None) -> None:
        if source == MPI.ANY_SOURCE:
            raise NotSupportedError("source is ANY_SOURCE; expected a rank, since NCCL needs the sender")
        _require_no_tag(tag, "tag", (0, MPI.ANY_TAG))
        require_no_status(status)

    # --- derived communicators and the end ---

    def Split(self, color: int = 0, key: int = 0) -> Comm | MPI.Comm:
        """Make a communicator of the ranks with the same color; MPI.COMM_NULL for MPI.UNDEFINED.

        Raises as `Communicator.split` does, NcclTimeoutError for example, or MPI.Exception.
        """
        return self._relative(self.mpi.Split(color, key))

    def Dup(self, info: MPI.Info | None = None) -> Comm:
        """Make another communicator of the same ranks; raises as Split does."""
        copy = self._relative(self.mpi.Dup(info))
        assert isinstance(copy, Comm)
        return copy

    def _relative(self, mpi: MPI.Comm, by_all: bool = True) -> Comm | MPI.Comm:
        """Return a Comm for a communicator that MPI made of this one, by a call of all ranks or not."""
        joins = mpi != MPI.COMM_NULL
        if not by_all:
            return type(self)(mpi, **self._options) if joins else mpi
        first = mpi.group.Translate_ranks([0], self.mpi.group)[0] if joins else None
        nccl = self.nccl.split(first, mpi.rank if joins else 0)
        if nccl is None:
            return mpi
        relative = type(self)(mpi, nccl=nccl)
        relative._options = self._options
        return relative

    def Free(self) -> None:
        """Destroy the NCCL communicator, and free the MPI one unless it is MPI's own.

        Raises as `Communicator.destroy` does, RankFailedError for example, or MPI.Exception.
        """
        self.nccl.destroy()
        if self.mpi not in (MPI.COMM_WORLD, MPI.COMM_SELF):
            self.mpi.Free()

    def Disconnect(self) -> None:
        """Destroy the NCCL communicator, and disconnect the MPI one unless it is MPI's own.

        Raises as Free does.
        """
        self.nccl.destroy()
        if self.mpi not in (MPI.COMM_WORLD, MPI.COMM_SELF):
            self.mpi.Disconnect()
