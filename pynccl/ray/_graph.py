"""Communicators for Ray's Compiled Graphs: of actors with GPUs, and of actors without."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.experimental.channel import accelerator_context
from ray.experimental.channel.communicator import Communicator as GraphCommunicator
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.util.types import ReduceOp

from pynccl._base.values import shown
from pynccl._comm.communicator import Communicator
from pynccl.ray._group import op_name
from pynccl.ray._meeting import connect

# By the names of their graphs' communicators: Ray copies these for every node of a graph.
_connected: dict[str, Communicator] = {}


class _Collectives:
    """The collectives of both kinds, over a communicator that the first one makes."""

    def __init__(self, name: str, actors: list[Any]) -> None:
        self._name, self._actors = name, actors
        self._own_rank: int | None = None

    def initialize(self, rank: int) -> None:
        """Join, as this rank; Ray calls it in each actor."""
        self._own_rank = rank
        self._join()

    def get_actor_handles(self) -> list[Any]:
        """Return the actors in the order of their ranks."""
        return self._actors

    def get_rank(self, actor: Any) -> int:
        """Return an actor's rank; raise ValueError if it is not among these."""
        if actor not in self._actors:
            raise ValueError(
                f"actor is {shown(actor)}; expected one of this communicator's {len(self._actors)}"
            )
        return self._actors.index(actor)

    def get_self_rank(self) -> int | None:
        """Return this actor's rank; None in the driver."""
        return self._own_rank

    def get_world_size(self) -> int:
        """Return the number of actors."""
        return len(self._actors)

    def allgather(self, send_buf: Any, recv_buf: Any) -> None:
        """Concatenate the tensors of all ranks along the first axis."""
        comm = self._join()
        comm.all_gather(send_buf.reshape(-1), recv_buf.reshape(comm.size, -1))
        self._complete(comm, send_buf)

    def allreduce(self, send_buf: Any, recv_buf: Any, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce the tensors of all ranks."""
        comm = self._join()
        comm.all_reduce(send_buf, recv_buf, op_name(op))
        self._complete(comm, send_buf)

    def reducescatter(self, send_buf: Any, recv_buf: Any, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce the tensors of all ranks; each rank gets its part of the first axis."""
        comm = self._join()
        comm.reduce_scatter(send_buf.reshape(-1), recv_buf.reshape(-1), op_name(op))
        self._complete(comm, send_buf)

    def destroy(self) -> None:
        """End the communicator, without the other actors; in the driver, that of every actor."""
        if ray.get_runtime_context().get_actor_id() is None:
            ends = [actor.__ray_call__.remote(_end, self._name) for actor in self._actors]
            ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        else:
            _end(None, self._name)

    def _join(self) -> Communicator:
        comm = _connected.get(self._name)
        if comm is None:
            rank = self._own_rank
            if rank is None:
                rank = self._own_rank = self.get_rank(ray.get_runtime_context().current_actor)
            what = f"the communicator of {len(self._actors)} actors of a graph"
            comm = _connected[self._name] = connect(rank, len(self._actors), "graph", self._name, what=what)
        return comm

    def _complete(self, comm: Communicator, tensor: Any) -> None:
        """Wait for a call on a device: with a failed rank the result is undefined, and Ray does not ask."""
        if tensor.is_cuda:
            comm.synchronize()

    @classmethod
    def generate_communicator_id(cls) -> str:
        """Return a name for a new communicator."""
        return uuid.uuid4().hex


# Seconds for actors to end their communicators; dead actors do not.
_END_SECONDS = 30.0


def _end(_: Any, name: str) -> None:
    comm = _connected.pop(name, None)
    if comm is not None:
        comm.abort()


class HostCommunicator(_Collectives, CPUCommunicator):
    """The actors of a Compiled Graph, whose collectives on tensors in host memory go through the CPU library.

    Pass it as `transport` to `allreduce.bind` and the other collectives of ray.experimental.collective. Ray
    itself moves tensors from one actor to another through its shared memory.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        """Take part with these actors, in the order of their ranks."""
        _Collectives.__init__(self, self.generate_communicator_id(), _checked(actors))
        CPUCommunicator.__init__(self, len(actors), _checked(actors))


class DeviceCommunicator(_Collectives, GraphCommunicator):
    """The actors of a Compiled Graph, each with a GPU, which send and reduce tensors through NCCL.

    `register_graphs` makes Ray create it; `DeviceCommunicator.of(actors)` is one to pass as `transport`.
    """

    def __init__(
        self,
        world_size: int,
        comm_id: str,
        rank: int | None,
        actor_handles: Sequence[Any],
        stream: Any = None,
        use_communication_streams: bool = False,
    ) -> None:
        """Join as Ray does; the arguments are those of Ray's own."""
        actors = _checked(actor_handles)
        if world_size != len(actors):
            raise ValueError(f"world_size is {world_size}; expected {len(actors)}, the number of actors")
        super().__init__(str(comm_id), actors)
        self._streams = use_communication_streams
        self._send_to: Any = None
        self._receive_on: Any = None
        if rank is not None:
            self.initialize(rank)

    @classmethod
    def of(cls, actors: Sequence[Any]) -> DeviceCommunicator:
        """Return a communicator of these actors, in the order of their ranks, which Ray initializes."""
        return cls(len(actors), cls.generate_communicator_id(), None, actors)

    def initialize(self, rank: int) -> None:
        """Join, as this rank; Ray calls it in each actor."""
        super().initialize(rank)
        if self._streams:
            import torch

            stream: Any = torch.cuda.Stream
            self._send_to, self._receive_on = stream(), stream()

    def send(self, value: Any, peer_rank: int) -> None:
        """Send a tensor to a rank; on a device the call returns before the tensor has left."""
        self._join().send(value, peer_rank, self._send_to)

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        """Receive a tensor from a rank, into memory of the allocator."""
        if allocator is None:
            raise ValueError("allocator is None; expected a function of a shape and a dtype")
        comm, tensor = self._join(), allocator(shape, dtype)
        comm.recv(tensor, peer_rank, self._receive_on)
        if not self._streams:
            self._complete(comm, tensor)
        return tensor

    @property
    def recv_stream(self) -> AbstractContextManager[Any]:
        """A context in which torch's current stream is that of received tensors."""
        return _on(self._receive_on)

    @property
    def send_stream(self) -> AbstractContextManager[Any]:
        """A context in which torch's current stream is that of sent tensors."""
        return _on(self._send_to)

    def get_transport_name(self) -> str:
        """Return the name of Ray's transport."""
        return "accelerator"


def _on(stream: Any) -> AbstractContextManager[Any]:
    import torch

    context: AbstractContextManager[Any] = torch.cuda.StreamContext(stream or torch.cuda.current_stream())
    return context


def _checked(actors: Sequence[Any]) -> list[Any]:
    found = list(actors)
    for i, actor in enumerate(found):
        if not isinstance(actor, ray.actor.ActorHandle):
            raise TypeError(f"actors[{i}] is {shown(actor)}; expected the handle of an actor")
    if not found or len(set(found)) != len(found):
        raise ValueError(f"actors has {len(found)}, {len(set(found))} different ones; expected each once")
    return found


def register_graphs() -> None:
    """Make Ray create a DeviceCommunicator wherever a Compiled Graph needs a communicator.

    Call it in the driver and in the actors, as a `worker_process_setup_hook`.
    """
    accelerator_context.register_accelerator_context("cuda", DeviceCommunicator)
