"""MPI's persistent calls: each prepares what the method without `_init` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from pynccl._comm.communicator import Communicator
from pynccl.mpi._requests import HostCalls, Lane, Prequest, Steps

AnyRequest = Prequest | MPI.Prequest
Call = Callable[[Any], None]
_NO_INFO = MPI.INFO_NULL


class Persistent:
    """The `*_init` methods of Comm; their requests are mpi4py's own for host memory. Hints are ignored.

    `preparing` returns a communicator with mpi4py's methods, whose calls MPI prepares on the host, and on the
    device become steps.

    Every operation raises for its arguments what the method without `_init` does: TypeError, ValueError,
    NotSupportedError, or NcclInvalidUsage once the communicator is closed; on host memory MPI.Exception.
    """

    def __init__(
        self, mpi: MPI.Comm, nccl: Communicator, lane: Lane, preparing: Callable[[HostCalls, Steps], Any]
    ) -> None:
        self.mpi, self.nccl, self._preparing = mpi, nccl, preparing
        # For the requests and windows of this communicator, not for programs.
        self.lane = lane

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Allreduce."""
        return self._init(
            self.mpi.Allreduce_init, info, lambda comm: comm.Allreduce(sendbuf, recvbuf, op), sendbuf, recvbuf
        )

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Reduce."""
        return self._init(
            self.mpi.Reduce_init, info, lambda comm: comm.Reduce(sendbuf, recvbuf, op, root), sendbuf, recvbuf
        )

    def Bcast_init(self, buf: Any, root: int = 0, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Bcast."""
        return self._init(self.mpi.Bcast_init, info, lambda comm: comm.Bcast(buf, root), buf)

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Allgather."""
        return self._init(
            self.mpi.Allgather_init, info, lambda comm: comm.Allgather(sendbuf, recvbuf), sendbuf, recvbuf
        )

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Allgatherv."""
        return self._init(
            self.mpi.Allgatherv_init, info, lambda comm: comm.Allgatherv(sendbuf, recvbuf), sendbuf, recvbuf
        )

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Gather."""
        return self._init(
            self.mpi.Gather_init, info, lambda comm: comm.Gather(sendbuf, recvbuf, root), sendbuf, recvbuf
        )

    def Gatherv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Gatherv."""
        return self._init(
            self.mpi.Gatherv_init, info, lambda comm: comm.Gatherv(sendbuf, recvbuf, root), sendbuf, recvbuf
        )

    def Scatter_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scatter."""
        return self._init(
            self.mpi.Scatter_init, info, lambda comm: comm.Scatter(sendbuf, recvbuf, root), sendbuf, recvbuf
        )

    def Scatterv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scatterv."""
        return self._init(
            self.mpi.Scatterv_init, info, lambda comm: comm.Scatterv(sendbuf, recvbuf, root), sendbuf, recvbuf
        )

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoall."""
        return self._init(
            self.mpi.Alltoall_init, info, lambda comm: comm.Alltoall(sendbuf, recvbuf), sendbuf, recvbuf
        )

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoallv."""
        return self._init(
            self.mpi.Alltoallv_init, info, lambda comm: comm.Alltoallv(sendbuf, recvbuf), sendbuf, recvbuf
        )

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoallw."""
        return self._init(
            self.mpi.Alltoallw_init, info, lambda comm: comm.Alltoallw(sendbuf, recvbuf), sendbuf, recvbuf
        )

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = _NO_INFO,
    ) -> AnyRequest:
        """Prepare Reduce_scatter."""
        return self._init(
            self.mpi.Reduce_scatter_init,
            info,
            lambda comm: comm.Reduce_scatter(sendbuf, recvbuf, recvcounts, op),
            sendbuf,
            recvbuf,
        )

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Reduce_scatter_block."""
        return self._init(
            self.mpi.Reduce_scatter_block_init,
            info,
            lambda comm: comm.Reduce_scatter_block(sendbuf, recvbuf, op),
            sendbuf,
            recvbuf,
        )

    def Scan_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scan."""
        return self._init(
            # Looked up for host memory only: MPI.Comm's class lacks it.
            lambda *args: self.mpi.Scan_init(*args),  # type: ignore[attr-defined]
            info,
            lambda comm: comm.Scan(sendbuf, recvbuf, op),
            sendbuf,
            recvbuf,
        )

    def Exscan_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Exscan."""
        return self._init(
            # Looked up for host memory only: MPI.Comm's class lacks it.
            lambda *args: self.mpi.Exscan_init(*args),  # type: ignore[attr-defined]
            info,
            lambda comm: comm.Exscan(sendbuf, recvbuf, op),
            sendbuf,
            recvbuf,
        )

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> AnyRequest:
        """Prepare Send; see `Recv_init`."""
        return self._message(self.mpi.Send_init, lambda comm: comm.Send(buf, dest, tag), buf, last=True)

    def Recv_init(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> AnyRequest:
        """Prepare Recv; device arrays need a source.

        Messages that are started one after the other are issued as one group, so that they may be in any
        order. This happens at the next wait, test or other call of this communicator on device arrays.
        """
        return self._message(self.mpi.Recv_init, lambda comm: comm.Recv(buf, source, tag), buf, last=False)

    def _message(self, on_host: Callable[..., MPI.Prequest], call: Call, buf: Any, last: bool) -> AnyRequest:
        request = self._prepared(HostCalls(self.mpi, on_host), call, (buf,))
        if isinstance(request, Prequest):
            # What a send packs comes before it, what a receive unpacks after it.
            request.become_message(last=last)
        return request

    def _init(
        self, on_host: Callable[..., MPI.Prequest], info: MPI.Info, call: Call, *bufs: Any
    ) -> AnyRequest:
        return self._prepared(HostCalls(self.mpi, on_host, info), call, bufs)

    def _prepared(self, host: HostCalls, call: Call, bufs: tuple[Any, ...]) -> AnyRequest:
        """Have a communicator make the call that prepares instead."""
        stream = self.lane.stream_for(bufs)
        steps = Steps(self.nccl, stream)
        call(self._preparing(host, steps))
        return host.request or Prequest(self.lane, steps.runs, stream)
