"""The backend of ray.util.collective: one communicator for each group."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import ray.util.collective as collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from pynccl._arrays.buffers import kind_of, shape_of
from pynccl._base.values import shown
from pynccl._comm.communicator import Communicator
from pynccl._comm.reductions import OpName
from pynccl._errors import NcclError
from pynccl.ray._meeting import connect

BACKEND = "PYNCCL"

# Ray's reductions by their names: it has two enums of them.
_OPS: dict[str, OpName] = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}

log = logging.getLogger("pynccl")


def op_name(op: Any) -> OpName:
    """Return pynccl's name of one of Ray's reductions."""
    name = getattr(op, "name", None)
    if name not in _OPS:
        raise ValueError(f"op is {shown(op)}; expected a ReduceOp of Ray: {', '.join(_OPS)}")
    return _OPS[name]


class Group(BaseGroup):
    """One actor's part in a group of ray.util.collective.

    Arrays are NumPy or CuPy arrays or torch tensors. Calls on device arrays use the current stream of the
    array's library. Calls on host arrays, which need the CPU library, return when the result is there.

    Every operation raises as `Communicator.all_reduce` does: TypeError, ValueError, NcclInvalidUsage,
    CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Join the group; every actor of the group must do so within PYNCCL_TIMEOUT, by default 600 s."""
        super().__init__(world_size, rank, group_name)
        self.communicator = connect(rank, world_size, "group", group_name, what=f"group {group_name!r}")

    @classmethod
    def backend(cls) -> str:
        """Return the backend's name."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the driver asks too, and needs no library. An actor without one raises as it joins."""
        return True

    def shrink(self, exclude: Iterable[int]) -> Communicator:
        """Leave out failed ranks; the others are numbered anew, in their order.

        Raises as `Communicator.shrink` does.
        """
        self.communicator = self.communicator.shrink(exclude, abort=True)
        self._rank, self._world_size = self.communicator.rank, self.communicator.size
        return self.communicator

    def destroy_group(self) -> None:
        """Destroy the communicator, or abort it and log the NcclError if another rank has failed."""
        try:
            self.communicator.destroy()
        except NcclError as error:
            log.warning("group %r: %s", self.group_name, error)
        finally:
            self.communicator.abort()

    def allreduce(self, tensor: list[Any], allreduce_options: AllReduceOptions | None = None) -> None:
        """Reduce the tensors of all ranks, in place."""
        options = allreduce_options or AllReduceOptions()
        self.communicator.all_reduce(_only(tensor), op=op_name(options.reduceOp))

    def barrier(self, barrier_options: BarrierOptions | None = None) -> None:
        """Wait for every rank."""
        self.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: ReduceOptions | None = None) -> None:
        """Reduce the tensors of all ranks to the root's; the others stay as they are."""
        options = reduce_options or ReduceOptions()
        _require_first(options.root_tensor, "dst_tensor")
        self.communicator.reduce(_only(tensor), op=op_name(options.reduceOp), root=options.root_rank)

    def broadcast(self, tensor: list[Any], broadcast_options: BroadcastOptions | None = None) -> None:
        """Copy the root's tensor to the others."""
        options = broadcast_options or BroadcastOptions()
        _require_first(options.root_tensor, "src_tensor")
        self.communicator.broadcast(_only(tensor), root=options.root_rank)

    def allgather(
        self,
        tensor_list: list[list[Any]],
        tensor: list[Any],
        allgather_options: AllGatherOptions | None = None,
    ) -> None:
        """Copy the tensor of each rank to its place in the list."""
        mine, outputs = _only(tensor), _only(tensor_list)
        self._require_like(outputs, mine)
        for output, part in zip(outputs, self.communicator.all_gather(mine), strict=True):
            output[...] = part

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: ReduceScatterOptions | None = None,
    ) -> None:
        """Reduce the lists of all ranks; each rank gets the tensor at its place."""
        options = reducescatter_options or ReduceScatterOptions()
        output, inputs = _only(tensor), _only(tensor_list)
        self._require_like(inputs, output)
        packed = kind_of(output).empty(output, (self.world_size, *shape_of(output)))
        for place, part in zip(packed, inputs, strict=True):
            place[...] = part
        self.communicator.reduce_scatter(packed.reshape(-1), output.reshape(-1), op=op_name(options.reduceOp))

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        """Send a tensor, or its first `n_elements`, to a rank."""
        _require_first(send_options.dst_gpu_index, "dst_gpu_index")
        self.communicator.send(_first(_only(tensor), send_options.n_elements), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: RecvOptions) -> None:
        """Receive a tensor, or its first `n_elements`, from a rank."""
        _require_first(recv_options.src_gpu_index, "src_gpu_index")
        self.communicator.recv(_first(_only(tensor), recv_options.n_elements), recv_options.src_rank)

    def _require_like(self, tensors: Sequence[Any], model: Any) -> None:
        """Raise unless these are one for each rank, of the model's type, shape and dtype."""
        if len(tensors) != self.world_size:
            raise ValueError(
                f"tensor_list has {len(tensors)} tensors; expected {self.world_size}, one for each rank"
            )
        wanted = type(model), tuple(model.shape), model.dtype
        for i, tensor in enumerate(tensors):
            found = type(tensor), tuple(tensor.shape), tensor.dtype
            if found != wanted:
                raise ValueError(
                    f"tensor_list[{i}] is {_shown(*found)}; expected {_shown(*wanted)}, as tensor is"
                )


def _shown(kind: type, shape: tuple[int, ...], dtype: Any) -> str:
    return f"a {kind.__module__.partition('.')[0]}.{kind.__qualname__} of shape {shape} and dtype {dtype}"


def _only(tensors: list[Any]) -> Any:
    """Return the tensor of Ray's list, which has one for each device of an actor."""
    if len(tensors) != 1:
        raise ValueError(
            f"{len(tensors)} tensors are given; expected one: an actor has one device in a group"
        )
    return tensors[0]


def _require_first(index: int, name: str) -> None:
    if index != 0:
        raise ValueError(f"{name} is {index}; expected 0: an actor has one device in a group")


def _first(tensor: Any, count: int) -> Any:
    """Return the first elements of a tensor; all of them for 0."""
    if not count:
        return tensor
    if count > tensor.size if isinstance(tensor.size, int) else count > tensor.numel():
        raise ValueError(
            f"n_elements is {count}; expected at most the elements of the tensor, {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1)[:count]


def register() -> None:
    """Make the backend "pynccl" known to ray.util.collective in this process; importing pynccl.ray does so.

    Every actor of a group needs it, and `runtime_env={"worker_process_setup_hook": pynccl.ray.register}`, an
    argument of ray.init, calls it in each.
    """
    if not collective.is_backend_available(BACKEND):
        register_collective_backend(BACKEND, Group)


def communicator(group_name: str = "default") -> Communicator:
    """Return the communicator of this actor's group, for what ray.util.collective lacks.

    Raises RuntimeError if this actor is in no such group, and TypeError if it has another backend.
    """
    return _group(group_name).communicator


def shrink(exclude: Iterable[int], group_name: str = "default") -> Communicator:
    """Continue a group without failed ranks, as `Communicator.shrink` with `abort=True`.

    Every surviving actor calls it, with the `ranks` of its RankFailedError. The group goes on under its name,
    with new ranks and a smaller size. Raises as `communicator` and `Communicator.shrink` do.
    """
    return _group(group_name).shrink(exclude)


def _group(group_name: str) -> Group:
    group = collective.get_group_handle(group_name)
    if not isinstance(group, Group):
        raise TypeError(f"group {group_name!r} has the backend {group.backend()}; expected {BACKEND}")
    return group
