"""Plans of broadcasts: each moves the tensors of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pynccl._comm.communicator import Communicator
from pynccl._comm.prepared import Plan
from pynccl.transfer._agreement import Announcement
from pynccl.transfer._tensors import Tensor

# The tensors of a bucket, however small they are.
_MOST_CALLS = 1024


class Moves(NamedTuple):
    """The arrays of a transfer, and the plans that move them."""

    arrays: dict[str, Any]
    plans: list[Plan]
    nbytes: int

    def run(self) -> None:
        """Move all elements."""
        for plan in self.plans:
            plan()


def prepare(
    comm: Communicator, arrays: Mapping[str, Any], announcement: Announcement, root: int, argument: str
) -> Moves:
    """Return the plans for announced tensors; raise for an array that the communicator cannot move."""
    plans = [
        Plan([_prepared(comm, arrays[name], root, f"{argument}[{name!r}]") for name in bucket])
        for bucket in buckets(announcement.tensors, announcement.bucket_bytes)
    ]
    total = sum(tensor.nbytes for tensor in announcement.tensors.values())
    return Moves({name: arrays[name] for name in announcement.tensors}, plans, total)


def _prepared(comm: Communicator, array: Any, root: int, name: str) -> Any:
    try:
        return comm.prepare.broadcast(array, root=root)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def buckets(tensors: Mapping[str, Tensor], most: int) -> Iterator[list[str]]:
    """Yield the names of each bucket, in order; tensors without elements are in none."""
    bucket: list[str] = []
    room = most
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if not nbytes:
            continue
        if bucket and (nbytes > room or len(bucket) == _MOST_CALLS):
            yield bucket
            bucket, room = [], most
        bucket.append(name)
        room -= nbytes
    if bucket:
        yield bucket
