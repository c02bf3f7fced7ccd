"""The torch.distributed backend "pynccl": NCCL for cuda tensors, the CPU library for cpu tensors.

Importing this module registers it; then `torch.distributed.init_process_group("pynccl")`. torch 2.14 and
newer import it by themselves, through the entry point `torch.distributed.backends`.

Imported by no other room.
"""

from __future__ import annotations

import atexit
import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pynccl._base.values import shown
from pynccl._comm import lifetime
from pynccl.bootstrap._rounds import meet
from pynccl.torch import _build, _provider, _reconfigure

if not dist.is_available():
    raise ImportError("pynccl.torch needs a torch built with torch.distributed")


def register() -> None:
    """Register the backend, which the import of this module has done: what torch's entry point calls."""


def _register() -> Any:
    extension = _build.load()
    extension.set_provider(_provider.provide)
    extension.set_allocator(_provider.allocates, _provider.allocate)
    extension.set_meeting(_reconfigure.serve, _reconfigure.join)
    atexit.register(_at_exit, extension)
    dist.Backend.register_backend("pynccl", _create, extended_api=True, devices=["cpu", "cuda"])
    return extension


def _at_exit(extension: Any) -> None:
    """End the groups before Python does: after that, a thread that runs callbacks would end the process."""
    if dist.is_initialized():
        # Before the other ranks learn of it, and perhaps exit sooner.
        lifetime.tell_launcher()
    extension.end_all(lifetime.raised())


def _runs_the_command() -> bool:
    """Tell whether Python imports this for `python -m pynccl.torch`, which compiles by itself."""
    named = ("-m", __name__) in pairwise(sys.orig_argv) or f"-m{__name__}" in sys.orig_argv
    return sys.argv[:1] == ["-m"] and named


def process_group(
    store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30), name: str = ""
) -> dist.ProcessGroup:
    """Make a process group that torch.distributed does not register, for programs that keep their own.

    Every rank calls it with the same store, which may outlive the group. `name` is for errors.
    `group.abort()` and `group.shutdown()` end it.
    """
    if not isinstance(store, dist.Store):  # type: ignore[attr-defined, unused-ignore]
        raise TypeError(f"store is {shown(store)}; expected a torch.distributed.Store")
    for what, number in (("rank", rank), ("size", size)):
        if not isinstance(number, int):
            raise TypeError(f"{what} is {shown(number)}; expected an int")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} and size {size}; expected 0 <= rank < size")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is {shown(timeout)}; expected a timedelta")
    backend, kind = _make(store, rank, size, timeout, name), dist.ProcessGroup.BackendType.CUSTOM
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group  # type: ignore[no-any-return, unused-ignore]


def _create(options: Any, chosen: Any) -> Any:
    """Make the backend of one process group from torch's options and `pg_options`.

    Those of another backend are accepted, too: a program may pass ProcessGroupNCCL's.
    """
    from torch._C._distributed_c10d import Backend

    if chosen is not None and not isinstance(chosen, Backend.Options):
        raise TypeError(f"pg_options is {shown(chosen)}; expected pynccl.torch.Options")
    ranks = list(options.global_ranks_in_group)
    place = options.group_rank, options.group_size
    high_priority = bool(getattr(chosen, "is_high_priority_stream", False))
    # torch has the option since 2.15. The group gets members, and their store, from reconfigure.
    store = None if getattr(options, "enable_reconfigure", False) else options.store
    return _make(store, *place, options.timeout, options.group_id, ranks, high_priority)


def _make(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    group: str,
    ranks: list[int] | None = None,
    high_priority: bool = False,
) -> Any:
    """Make the backend of one process group; `ranks` are the global ranks of its members.

    Without a store it has no members yet.
    """
    seconds = timeout.total_seconds()
    if seconds <= 0:
        raise ValueError(f"timeout is {timeout}; expected a positive timedelta")
    ranks = ranks or list(range(size))

    def name(rank: int) -> str:
        of = f"rank {rank} of group {group!r}"
        return of if ranks[rank] == rank else f"{of} (global rank {ranks[rank]})"

    def late(missing: list[int]) -> Exception:
        return dist.DistBackendError(
            f"pynccl: the process group was not created in {seconds:g} s: {name(rank)} "
            f"made it, and has waited for {', '.join(map(name, missing))}"
        )

    if store is not None:
        number = meet(store, rank, size, seconds, late)
        store = dist.PrefixStore(f"group {number}", store)  # type: ignore[attr-defined, unused-ignore]
    return _extension.Backend(
        store,
        rank,
        size,
        timedelta(milliseconds=max(1, round(seconds * 1000))),
        not torch.cuda.is_available(),
        group,
        ranks,
        high_priority,
    )


_extension: Any = None if _runs_the_command() else _register()
Options: Any = _extension.Backend.Options if _extension else None
"""What `pg_options` takes: `Options(is_high_priority_stream=True)`. The time-out is the group's."""
