"""What vLLM's and SGLang's PyNcclCommunicator have in common, over pynccl.Communicator."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from pynccl import capi
from pynccl._arrays import dtypes
from pynccl._arrays.buffers import kind_of, shape_of
from pynccl._base.values import shown
from pynccl._comm.communicator import Communicator
from pynccl._comm.groups import Group
from pynccl._device.devices import on_device
from pynccl._errors import NcclInvalidUsage
from pynccl._library import loader
from pynccl._memory.creation import zeros
from pynccl.compat._wrapper import NCCLLibrary, Pointer, id_bytes, ncclComm_t, ncclUniqueId

if TYPE_CHECKING:
    from typing_extensions import Self


class _Nest:
    """The groups of one thread, one inside another or overlapping; NCCL issues their calls as one."""

    def __init__(self) -> None:
        self.depth, self.group = 0, Group()
        self.group.__enter__()


class _Here(threading.local):
    """This thread's open groups, which the engines that have begun them own."""

    _open: weakref.ref[_Nest] | None = None

    def open(self) -> _Nest | None:
        nest = self._open and self._open()
        return nest if nest and nest.depth else None

    def nest(self) -> _Nest:
        """Return the open groups, or new ones."""
        nest = self.open()
        if nest is None:
            nest = _Nest()
            self._open = weakref.ref(nest)
        return nest


_here = _Here()


class Engine:
    """One rank of an engine's group; its tensors are whatever pynccl's calls take.

    With one rank it is disabled, as in the engines: its calls do nothing and return None.

    Every operation raises as `Communicator.all_reduce` does: TypeError, ValueError, NcclInvalidUsage,
    CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
    """

    # None without a process group.
    group: Any
    rank: int
    world_size: int
    available = False
    disabled = True
    nccl: NCCLLibrary
    nccl_version: int
    unique_id: ncclUniqueId
    # As it was given; a torch.device where torch is imported.
    device: Any

    _own: Communicator | None = None
    # Whether calls do nothing until `change_state` enables them.
    begins_disabled = False

    @classmethod
    def from_unique_id_bytes(
        cls,
        unique_id_bytes: bytes,
        rank: int,
        world_size: int,
        device: Any,
        library_path: str | None = None,
        *,
        timeout: float | None = None,
    ) -> Self:
        """Join the communicator of an id of 128 bytes, which all ranks have got in some way.

        The first call of every rank is an all_reduce of one float32, as in vLLM. SGLang's own class lacks
        this method.
        """
        self = cls.__new__(cls)
        self.group, self.rank, self.world_size = None, rank, world_size
        uid = id_bytes(unique_id_bytes)
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not isinstance(value, SupportsIndex):
                raise TypeError(
                    f"{name} is {shown(value)}, of type {type(value).__qualname__}; expected an int"
                )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} and world_size {world_size}; expected 0 <= rank < world_size")
        if world_size > 1:
            self.nccl = NCCLLibrary(library_path)
            self._join(uid, device, timeout=timeout)
        return self

    def __init__(self, group: Any, library_path: str | None, device: Any, **options: Any) -> None:
        """Join the communicator of a process group, whose rank 0 makes the id."""
        self.group = group
        self.rank, self.world_size = _place_in(group)
        if self.world_size == 1:
            return
        self.nccl = NCCLLibrary(library_path)
        mine = self.nccl.ncclGetUniqueId() if self.rank == 0 else None
        self._join(_shared_id(group, mine), device, **options)

    def _join(self, uid: bytes, device: Any, **options: Any) -> None:
        self.nccl_version = self.nccl.ncclGetRawVersion()
        self.unique_id = self.nccl.unique_id_from_bytes(uid)
        self.device, ordinal = _device(device)
        self._own = Communicator(self.world_size, uid, self.rank, device=ordinal, **options)
        self._groups: list[_Nest] = []
        self.available, self.disabled = True, self.begins_disabled
        # The engines' own classes do so, and either kind of rank may be on the other side.
        self.communicator.all_reduce(_one_zero(self.device, ordinal))
        self.communicator.synchronize()

    @property
    def communicator(self) -> Communicator:
        """The communicator of pynccl; raises NcclInvalidUsage once it is closed."""
        if self._own is None:
            raise NcclInvalidUsage(f"the communicator of rank {self.rank} of {self.world_size} is closed")
        return self._own

    @property
    def comm(self) -> ctypes.c_void_p:
        """The ncclComm_t, for NCCLLibrary."""
        return ncclComm_t(self.communicator.handle)

    def destroy(self) -> None:
        """Release everything at once, without the other ranks; no effect if repeated."""
        own, self._own = self._own, None
        self.available, self.disabled = False, True
        if own is not None:
            # Also groups of other threads: without an owner a group drops its calls.
            while self._groups:
                self._groups.pop().depth -= 1
            own.abort()

    @contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        """Enable or disable the calls of a `with` body; None enables them where there is a communicator."""
        before, self.disabled = self.disabled, not (self.available if enable is None else enable)
        try:
            yield
        finally:
            self.disabled = before

    # --- one rank to another, and one to all ---

    def send(self, tensor: Any, dst: int, stream: Any = None) -> None:
        """Send a tensor to one rank, which receives it."""
        if not self.disabled:
            self.communicator.send(_movable(tensor), dst, stream)

    def recv(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Receive a tensor from one rank, which sends it."""
        if not self.disabled:
            self.communicator.recv(_movable(tensor), src, stream)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Copy a tensor of one rank to all others."""
        if not self.disabled:
            self.communicator.broadcast(tensor, root=src, stream=stream)

    # --- groups ---

    def group_start(self) -> None:
        """Begin a group of this thread: the calls up to the end of its outermost group are issued as one."""
        if self.disabled:
            return
        nest = _here.nest()
        nest.depth += 1
        self._groups.append(nest)

    def group_end(self) -> None:
        """End a group of this thread; the end of the outermost one issues the calls."""
        if self.disabled:
            return
        nest = _here.open()
        if nest is None or nest not in self._groups:
            raise NcclInvalidUsage(
                "group_end without a group of this thread; expected group_start before it, in the same thread"
            )
        self._groups.remove(nest)
        nest.depth -= 1
        if not nest.depth:
            nest.group.__exit__(None, None, None)

    # --- windows ---

    def register_comm_window_raw(self, ptr: int, size: int) -> ctypes.c_void_p:
        """Make memory of every rank a symmetric window; every rank calls it. Return the window's handle."""
        return self.nccl.ncclCommWindowRegister(self.comm, ptr, size, capi.NCCL_WIN_COLL_SYMMETRIC)

    def deregister_comm_window(self, window: Pointer) -> None:
        """Release a window; its memory stays."""
        self.nccl.ncclCommWindowDeregister(self.comm, window)


def rows(array: Any, sizes: Sequence[int], name: str, size: int) -> list[int]:
    """Return the elements of each rank's rows; raise unless `sizes` counts all rows of the array."""
    shape, counts = shape_of(array), one_each(sizes, size)
    if not shape or sum(counts) != shape[0]:
        raise ValueError(f"sizes is {counts}, {sum(counts)} rows; expected those of {name}, {shape}")
    return [count * width_of(array) for count in counts]


def one_each(sizes: Sequence[int], size: int) -> list[int]:
    """Return `sizes` as ints; raise unless there is one for each rank."""
    try:
        counts = [index(count) for count in sizes]
    except TypeError:
        raise TypeError(f"sizes is {shown(sizes)}; expected {size} ints, one for each rank") from None
    if len(counts) != size:
        raise ValueError(f"sizes has {len(counts)} entries; expected {size}, one for each rank")
    return counts


def like(array: Any) -> Any:
    """Return a new array of the same kind, shape and dtype."""
    return kind_of(array).empty(array, shape_of(array))


def width_of(array: Any) -> int:
    """Return the number of elements of a row."""
    return int(np.prod(shape_of(array)[1:], dtype=np.int64))


def memory_of(array: Any) -> tuple[int, int]:
    """Return an array's address and size in bytes."""
    pointer, count, code, _, _ = kind_of(array, "tensor").span(array, "tensor")
    return pointer, count * dtypes.itemsize(code)


def send_and_receive(
    p2p_ops: Iterable[Any], send: Callable[[Any, int], None], recv: Callable[[Any, int], None]
) -> None:
    """Issue torch's P2POps as one group."""
    import torch.distributed as dist

    if not isinstance(p2p_ops, Iterable):
        raise TypeError(f"p2p_ops is {p2p_ops!r}; expected torch.distributed.P2POps")
    with Group():
        for i, op in enumerate(p2p_ops):
            if not all(hasattr(op, name) for name in ("op", "tensor", "group_peer")):
                raise TypeError(f"p2p_ops[{i}] is {shown(op)}; expected a torch.distributed.P2POp")
            if op.op not in (dist.isend, dist.irecv):
                raise ValueError(f"op is {shown(op.op)}; expected torch.distributed.isend or irecv")
            (send if op.op is dist.isend else recv)(op.tensor, op.group_peer)


def _movable(tensor: Any) -> Any:
    """Return a float8 tensor as bytes, since the engines move it so; any other tensor as it is."""
    if "float8" not in str(getattr(tensor, "dtype", "")):
        return tensor
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.view(torch.uint8)
    return tensor.view("uint8") if isinstance(tensor, np.ndarray) else tensor


# --- how the ranks meet -------------------------------------------------------------------------------------


def _place_in(group: Any) -> tuple[int, int]:
    """Return the rank and the size of a process group, torch's or one with broadcast_obj."""
    if hasattr(group, "broadcast_obj"):
        return int(group.rank), int(group.world_size)
    import torch.distributed as dist

    if not dist.is_initialized():
        raise NcclInvalidUsage(
            f"group is {shown(group)}, and torch.distributed is not initialized; expected its process group, "
            "or an object with rank, world_size and broadcast_obj"
        )
    if "nccl" in str(dist.get_backend(group)).split(","):
        raise ValueError("group is of torch's backend nccl; expected another one, such as gloo, for the id")
    return dist.get_rank(group), dist.get_world_size(group)


def _shared_id(group: Any, mine: ncclUniqueId | None) -> bytes:
    """Return the id of rank 0 on every rank."""
    if hasattr(group, "broadcast_obj"):
        return id_bytes(group.broadcast_obj(mine, src=0))
    import torch
    import torch.distributed as dist

    data = torch.tensor(list(bytes(128) if mine is None else id_bytes(mine)), dtype=torch.uint8)
    dist.broadcast(data, src=dist.get_process_group_ranks(group)[0], group=group)
    return bytes(data.tolist())


def _device(device: Any) -> tuple[Any, int | None]:
    """Return a device as a torch.device where torch is imported, and its ordinal if it has one."""
    on_cpu = loader.backend() == "cpu"
    torch = sys.modules.get("torch")
    if isinstance(device, int) and not isinstance(device, bool):
        return (torch.device("cpu" if on_cpu else f"cuda:{device}") if torch else device), device
    kind, _, ordinal = str(device).partition(":")
    expected = "an ordinal, 'cuda:N' or a torch.device" + (", or 'cpu'" if on_cpu else "")
    if kind not in (("cpu", "cuda") if on_cpu else ("cuda",)) or not (ordinal.isdigit() or not ordinal):
        raise ValueError(f"device is {shown(device)}; expected {expected}")
    return (torch.device("cpu" if on_cpu else device) if torch else device), int(ordinal) if ordinal else None


def _one_zero(device: Any, ordinal: int | None) -> Any:
    """Return an array of one float32 on a communicator's device."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.zeros(1, dtype=torch.float32, device=device)
    with on_device(ordinal):
        return zeros(1, "float32")
