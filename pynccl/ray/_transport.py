"""A tensor transport for Ray's direct transport (RDT): actors send tensors to each other in pairs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import ray
import torch
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)

from pynccl._comm.communicator import Communicator
from pynccl._comm.groups import Group as CallGroup
from pynccl._errors import NcclError, NcclRemoteError
from pynccl._library import loader
from pynccl.ray._meeting import connect

TRANSPORT = "PYNCCL"
_REMEMBERED = 1024

M = TypeVar("M")
# An object and the name of a pair.
_Key = tuple[str, str]


@dataclass
class _Pair(CommunicatorMetadata):
    """Who sends to whom: a name that both know, and their ranks in a communicator of the two."""

    name: str = ""
    source: int = 0
    target: int = 1


@dataclass
class _Described(TensorTransportMetadata):
    """What travels: the tensors, and the object that they belong to."""

    obj_id: str = ""


class _Line:
    """This actor's end of a pair; its communicator is made by the first transfer and after a failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actors = [f"actor {actor}" for actor in name.split("-")]
        self.comm: Communicator | None = None
        self.aborted = threading.Event()
        self._named = WeakSet[NcclError]()

    def open(self, rank: int) -> Communicator:
        if self.comm is None:
            path = "transport", self.name
            self.comm = connect(rank, 2, *path, live=self._live)
            self._live()
        return self.comm

    @property
    def what(self) -> str:
        return f"the transfer between {' and '.join(self.actors)}"

    def name_actors(self, error: NcclError) -> None:
        """Say in an error, once, who the ranks are: the program has not made this communicator."""
        if error not in self._named:
            ranks = " and ".join(f"rank {rank} is {actor}" for rank, actor in enumerate(self.actors))
            error.args = (f"{self.what}: {error}; {ranks}",)
            self._named.add(error)

    def _live(self) -> None:
        if self.aborted.is_set():
            raise _aborted_by_ray()

    def abort(self) -> None:
        self.aborted.set()
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.abort()


def _aborted_by_ray() -> NcclRemoteError:
    return NcclRemoteError("Ray has aborted the transfer: the other actor failed, or did not come in time")


class TensorTransport(TensorTransportManager):
    """Two-sided transfers of torch tensors between any two actors, without a group.

    Each pair of actors has a communicator of its own, so a failure concerns no other pair, and an actor may
    use groups at the same time.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._lock = threading.Lock()
        # By object and pair: what Ray has aborted before it began here, and what has failed here before that.
        self._aborted = deque[_Key](maxlen=_REMEMBERED)
        self._failed = deque[_Key](maxlen=_REMEMBERED)

    def tensor_transport_backend(self) -> str:
        """Return the name of the transport."""
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """Return False: both actors take part."""
        return False

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: Ray need not kill the actors of a failed transfer."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Tell whether an actor can load a library."""
        asked = actor.__ray_call__.options(concurrency_group="_ray_system").remote(_has_library)
        return bool(ray.get(asked))

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[Any]
    ) -> TensorTransportMetadata:
        """Describe tensors, which must be on one kind of device."""
        kinds = {tensor.device.type for tensor in rdt_object}
        if len(kinds) > 1:
            raise ValueError(
                f"the tensors of one object are on {', '.join(sorted(kinds))}; expected one kind"
            )
        described = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return _Described(described, next(iter(kinds), None), obj_id)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> _Pair:
        """Name the pair; the same in both directions."""
        source, target = (actor._ray_actor_id.hex() for actor in (src_actor, dst_actor))
        lower, higher = sorted((source, target))
        return _Pair(f"{lower}-{higher}", int(source != lower), int(target != lower))

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Send tensors, as one group of calls."""
        pair, what = _checked(communicator_metadata, _Pair), _checked(tensor_transport_metadata, _Described)
        # What was returned by an actor may be a view; NCCL sends contiguous memory.
        whole = [tensor.contiguous() for tensor in tensors]
        key = what.obj_id, pair.name
        self._transfer(key, pair.source, whole, lambda comm, tensor: comm.send(tensor, pair.target))

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Receive tensors, as one group of calls, into given or into new memory."""
        pair, device = _checked(communicator_metadata, _Pair), tensor_transport_metadata.tensor_device
        described: list[Any] = tensor_transport_metadata.tensor_meta
        tensors = target_buffers or [torch.empty(s, dtype=d, device=device) for s, d in described]
        key = obj_id, pair.name
        self._transfer(key, pair.target, tensors, lambda comm, tensor: comm.recv(tensor, pair.source))
        return tensors

    def _transfer(self, key: _Key, rank: int, tensors: Sequence[Any], call: Any) -> None:
        if not tensors:
            return
        line = self._begin(key)
        try:
            comm = line.open(rank)
            with CallGroup():
                for tensor in tensors:
                    call(comm, tensor)
            comm.synchronize()
        except NcclError as error:
            line.name_actors(error)
            self._fail(key, line)
            raise

    def _begin(self, key: _Key) -> _Line:
        with self._lock:
            if key in self._aborted:
                self._aborted.remove(key)
                raise _aborted_by_ray()
            return self._lines.setdefault(key[1], _Line(key[1]))

    def _fail(self, key: _Key, line: _Line) -> None:
        with self._lock:
            if key in self._aborted:
                self._aborted.remove(key)
            else:
                self._failed.append(key)
            # The next transfer of the pair makes a new communicator.
            if self._lines.get(key[1]) is line:
                del self._lines[key[1]]
        line.abort()

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """Do nothing: no memory was registered."""

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """End the transfers of a pair in this actor; Ray calls it in another thread."""
        key = obj_id, _checked(communicator_metadata, _Pair).name
        with self._lock:
            if key in self._failed:
                self._failed.remove(key)
                return
            self._aborted.append(key)
            line = self._lines.pop(key[1], None)
        if line is not None:
            line.abort()


def _checked(metadata: Any, kind: type[M]) -> M:
    if not isinstance(metadata, kind):
        raise TypeError(
            f"metadata is a {type(metadata).__name__}; expected what the transport {TRANSPORT} made"
        )
    return metadata


def _has_library(_: Any) -> bool:
    loader.load()
    return True


def register_transport() -> None:
    """Make `tensor_transport="pynccl"` known to Ray; call it in the driver before it creates actors."""
    register_tensor_transport(TRANSPORT, ["cpu", "cuda"], TensorTransport, torch.Tensor)
