"""Send named tensors from one rank to all others: announced, checked, then moved in buckets.

A trainer sends a model's weights to inference processes. The sender first announces the name, the dtype and
the shape of every tensor. Every receiver compares the announcement with what it expects. Elements move only
if all agree; otherwise every rank raises, and the communicator stays usable.

Imported by `pynccl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pynccl._arrays.buffers import Array
from pynccl._base.values import check_int, shown
from pynccl._comm.communicator import Communicator
from pynccl._comm.core import refuse_recording
from pynccl.transfer import _agreement, _buckets, _tensors
from pynccl.transfer._agreement import Announcement

__all__ = ["BUCKET_BYTES", "recv_tensors", "send_tensors"]

# Bytes of the tensors that one plan moves.
BUCKET_BYTES = 256 << 20
_MOST_BYTES = 1 << 62


def send_tensors(
    comm: Communicator, tensors: Mapping[str, Array], *, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Send named tensors to all other ranks, which call `recv_tensors`; return the number of bytes.

    `tensors` are contiguous arrays in C order, of any kind and dtype that pynccl's calls take; nothing is
    copied. They move in buckets of about `bucket_bytes`, a `pynccl.Plan` each, on the arrays' current stream.

    Raises CollectiveMismatchError if a receiver expects other tensors: then nothing has moved, and the
    communicator stays usable. A wrong tensor raises TypeError or ValueError, and CollectiveMismatchError on
    the receivers. Otherwise raises as `Communicator.broadcast` does.
    """
    _require_peers(comm, "send_tensors")

    def describe() -> Announcement:
        expected = "a positive number of bytes"
        size = check_int(bucket_bytes, "bucket_bytes", 1, _MOST_BYTES, expected)
        return Announcement(_tensors.described(tensors, "tensors"), size)

    def prepare(announcement: Announcement) -> _buckets.Moves:
        return _buckets.prepare(comm, dict(tensors), announcement, comm.rank, "tensors")

    moves = _agreement.send(comm, describe, prepare)
    moves.run()
    return moves.nbytes


def recv_tensors(
    comm: Communicator, into: Mapping[str, Array] | None = None, *, root: int = 0, like: Any = None
) -> dict[str, Any]:
    """Receive the tensors that rank `root` sends by `send_tensors`; return them by name, in root's order.

    `into` are the arrays to write, whose names, dtypes and shapes must be the announced ones. Without it new
    arrays are made: of the library of `like`, an array, and on its device; else NumPy arrays with the CPU
    library and CuPy arrays with NVIDIA's. When a rank dies meanwhile, arrays of `into` are partly written.

    Raises CollectiveMismatchError if a rank expects other tensors or the ranks make different calls: then
    nothing was written, and the communicator stays usable. An array that cannot be written raises TypeError
    or ValueError, and CollectiveMismatchError on the other ranks. Otherwise raises as
    `Communicator.broadcast` does.
    """
    _require_peers(comm, "recv_tensors")
    try:
        root = check_int(root, "root", 0, comm.size, f"a rank from 0 to {comm.size - 1}, other than this one")
    except (TypeError, ValueError) as error:
        _agreement.refuse(comm, error)

    def expect() -> dict[str, _tensors.Tensor] | None:
        return None if into is None else _tensors.described(into, "into", written=True)

    def prepare(announcement: Announcement) -> _buckets.Moves:
        arrays = dict(into) if into is not None else _tensors.made(announcement.tensors, like)
        return _buckets.prepare(comm, arrays, announcement, root, "into")

    moves = _agreement.receive(comm, root, expect, prepare)
    moves.run()
    return moves.arrays


def _require_peers(comm: Any, what: str) -> None:
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm is {shown(comm)}; expected a pynccl.Communicator")
    refuse_recording(what)
    if comm.size < 2:
        raise ValueError("comm has one rank; expected a sender and at least one receiver")
