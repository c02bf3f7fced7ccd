"""The agreement of all ranks on what is to move, before it moves.

Every rank says in numbers what it calls; the sender's announcement follows, then every rank's answer:
nothing, or the text of what it refuses. All ranks see all answers. So each rank raises when one of them does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from pynccl._arrays import dtypes
from pynccl._comm.communicator import Communicator
from pynccl._errors import CollectiveMismatchError
from pynccl.transfer import _tensors
from pynccl.transfer._host import broadcast_bytes, gather_bytes, gather_numbers
from pynccl.transfer._tensors import Tensor

P = TypeVar("P")

# What a rank calls, and which form of the announcement it knows.
_RECEIVES, _SENDS, _REFUSES = 0, 1, 2
_FORM = 1


class Announcement(NamedTuple):
    """The tensors that the sender is about to send, in its order, and the size of a bucket."""

    tensors: dict[str, Tensor]
    bucket_bytes: int


def send(comm: Communicator, describe: Callable[[], Announcement], prepare: Callable[[Announcement], P]) -> P:
    """Announce what `describe` returns; return what was prepared for it, once every rank agrees."""
    failed, data, made = None, b"", None
    try:
        announcement = describe()
        data, made = _packed(announcement), prepare(announcement)
    except Exception as error:
        failed, data = error, b""
    _meet(comm, _SENDS, comm.rank, len(data), failed)
    if data:
        broadcast_bytes(comm, data, len(data), comm.rank)
    _answer(comm, failed)
    assert made is not None
    return made


def receive(
    comm: Communicator,
    root: int,
    expect: Callable[[], Mapping[str, Tensor] | None],
    prepare: Callable[[Announcement], P],
) -> P:
    """Compare the announcement of `root` with what `expect` returns; return what was prepared for it."""
    length = _meet(comm, _RECEIVES, root, 0)
    data, made = None, None
    failed: Exception | None = None
    try:
        data = broadcast_bytes(comm, b"", length, root) if length else None
    except MemoryError as error:
        failed = error
    try:
        expected = expect()
        if data is not None:
            made = prepare(_checked(_unpacked(data), expected, root))
    except Exception as error:
        failed = error
    _answer(comm, failed)
    assert made is not None
    return made


def refuse(comm: Communicator, error: Exception) -> NoReturn:
    """Raise an error for which this rank cannot name its part, and let all other ranks raise, too."""
    _meet(comm, _REFUSES, comm.rank, 0, error)
    raise error


def _meet(comm: Communicator, role: int, root: int, length: int, failed: Exception | None = None) -> int:
    """Raise on every rank unless one rank sends and all others receive from it; return what it announces."""
    said = gather_numbers(comm, (_FORM, role, root, length))
    forms = sorted({form for form, *_ in said})
    if forms != [_FORM]:
        raise CollectiveMismatchError(
            f"the ranks use formats {forms} to announce tensors; expected one version of pynccl"
        )
    if any(does == _REFUSES for _, does, *_ in said):
        _answer(comm, failed)
    senders = [rank for rank, (_, does, _, _) in enumerate(said) if does == _SENDS]
    roots = sorted({root for _, does, root, _ in said if does == _RECEIVES})
    if len(senders) != 1 or roots != senders:
        sending = f"ranks {senders} call send_tensors" if senders else "no rank calls send_tensors"
        named = ", ".join(map(str, roots))
        others = "the others" if senders else "all ranks"
        receiving = f"{others} recv_tensors with root {named}" if roots else "no rank calls recv_tensors"
        raise CollectiveMismatchError(
            f"{sending}, and {receiving}; "
            "expected send_tensors on one rank, and recv_tensors with root= that rank on all others"
        )
    return int(said[senders[0]][3])


def _answer(comm: Communicator, failed: Exception | None) -> None:
    """Tell all ranks whether this one goes on; raise if one does not: its own error, or what it says."""
    answers = gather_bytes(comm, _text_of(failed).encode(errors="backslashreplace"))
    if failed is not None:
        raise failed
    refusals = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]
    if refusals:
        raise CollectiveMismatchError("no tensors were sent; " + "; ".join(refusals))


def _text_of(failed: Exception | None) -> str:
    if failed is None:
        return ""
    name = type(failed).__name__
    try:
        text = str(failed)
    except Exception:
        return name
    return text if isinstance(failed, CollectiveMismatchError) else f"{name}: {text}"


def _packed(announcement: Announcement) -> bytes:
    tensors = [[name, *tensor] for name, tensor in announcement.tensors.items()]
    return json.dumps({"tensors": tensors, "bucket_bytes": announcement.bucket_bytes}).encode()


def _unpacked(data: bytes) -> Announcement:
    """Read an announcement; raise CollectiveMismatchError for one that this rank cannot understand."""
    try:
        said: dict[str, Any] = json.loads(data)
        tensors = {
            str(name): Tensor(str(dtype), tuple(map(int, shape)), shares)
            for name, dtype, shape, shares in said["tensors"]
        }
        size = int(said["bucket_bytes"])
    except (ValueError, TypeError, KeyError) as error:
        raise CollectiveMismatchError(f"the announcement cannot be read: {error!r}") from error
    unknown = sorted({tensor.dtype for tensor in tensors.values()} - set(dtypes.CODES))
    if unknown or size < 1 or any(axis < 0 for tensor in tensors.values() for axis in tensor.shape):
        raise CollectiveMismatchError(
            f"the announcement cannot be read: dtypes {unknown}, bucket_bytes {size}"
        )
    return Announcement(tensors, size)


def _checked(announcement: Announcement, expected: Mapping[str, Tensor] | None, root: int) -> Announcement:
    found = "" if expected is None else _tensors.differences(expected, announcement.tensors)
    if found:
        raise CollectiveMismatchError(f"the tensors of rank {root} are not those expected: {found}")
    return announcement
