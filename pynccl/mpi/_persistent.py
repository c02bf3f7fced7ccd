"""MPI's persistent calls: each prepares what the method without `_init` does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from pynccl._comm.communicator import Communicator
from pynccl.mpi._requests import HostCalls, Lane, Prequest, Steps

AnyRequest = Prequest | MPI.Prequest
_NO_INFO = MPI.INFO_NULL


class Persistent:
    """The `*_init` methods of Comm; their requests are mpi4py's own for host memory. Hints are ignored."""

    mpi: MPI.Comm
    nccl: Communicator
    _calls: Any
    _group: Any
    lane: Lane

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Allreduce."""
        return self._init("Allreduce", "Allreduce_init", info, sendbuf, recvbuf, op)

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Reduce."""
        return self._init("Reduce", "Reduce_init", info, sendbuf, recvbuf, op, root)

    def Bcast_init(self, buf: Any, root: int = 0, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Bcast."""
        return self._init("Bcast", "Bcast_init", info, buf, root)

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Allgather."""
        return self._init("Allgather", "Allgather_init", info, sendbuf, recvbuf)

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Allgatherv."""
        return self._init("Allgatherv", "Allgatherv_init", info, sendbuf, recvbuf)

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Gather."""
        return self._init("Gather", "Gather_init", info, sendbuf, recvbuf, root)

    def Gatherv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Gatherv."""
        return self._init("Gatherv", "Gatherv_init", info, sendbuf, recvbuf, root)

    def Scatter_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scatter."""
        return self._init("Scatter", "Scatter_init", info, sendbuf, recvbuf, root)

    def Scatterv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scatterv."""
        return self._init("Scatterv", "Scatterv_init", info, sendbuf, recvbuf, root)

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoall."""
        return self._init("Alltoall", "Alltoall_init", info, sendbuf, recvbuf)

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoallv."""
        return self._init("Alltoallv", "Alltoallv_init", info, sendbuf, recvbuf)

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = _NO_INFO) -> AnyRequest:
        """Prepare Alltoallw."""
        return self._init("Alltoallw", "Alltoallw_init", info, sendbuf, recvbuf)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = _NO_INFO,
    ) -> AnyRequest:
        """Prepare Reduce_scatter."""
        return self._init("Reduce_scatter", "Reduce_scatter_init", info, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Reduce_scatter_block."""
        return self._init("Reduce_scatter_block", "Reduce_scatter_block_init", info, sendbuf, recvbuf, op)

    def Scan_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Scan."""
        return self._init("Scan", "Scan_init", info, sendbuf, recvbuf, op)

    def Exscan_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = _NO_INFO
    ) -> AnyRequest:
        """Prepare Exscan."""
        return self._init("Exscan", "Exscan_init", info, sendbuf, recvbuf, op)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> AnyRequest:
        """Prepare Send; see `Recv_init`."""
        return self._message("Send", "Send_init", buf, dest, tag)

    def Recv_init(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> AnyRequest:
        """Prepare Recv; device arrays need a source.

        Messages that are started one after the other are issued as one group, so that they may be in any
        order. This happens at the next wait, test or other call of this communicator on device arrays.
        """
        return self._message("Recv", "Recv_init", buf, source, tag)

    def _message(self, name: str, on_host: str, buf: Any, peer: int, tag: int) -> AnyRequest:
        request = self._prepared(name, HostCalls(self.mpi, on_host), (buf, peer, tag))
        if isinstance(request, Prequest):
            # What a send packs comes before it, what a receive unpacks after it.
            request.become_message(last=name == "Send")
        return request

    def _init(self, name: str, on_host: str, info: MPI.Info, *args: Any) -> AnyRequest:
        return self._prepared(name, HostCalls(self.mpi, on_host, info), args)

    def _prepared(self, name: str, host: HostCalls, args: tuple[Any, ...]) -> AnyRequest:
        """Have a copy of this communicator make the call, which prepares instead."""
        stream = self.lane.stream_for(args)
        steps, copied = Steps(self.nccl, stream), copy.copy(self)
        copied.mpi, copied._calls, copied._group = host, steps, steps.group  # type: ignore[assignment]
        getattr(copied, name)(*args)
        return host.request or Prequest(self.lane, steps.runs, stream)
