"""How actors make a communicator: they meet in Ray's key-value store."""

from __future__ import annotations

from collections.abc import Callable

import ray

from pynccl._base.timeouts import resolve_timeout, rounded
from pynccl._comm.communicator import Communicator
from pynccl._errors import BootstrapError
from pynccl.bootstrap._init import init
from pynccl.bootstrap._rounds import meet
from pynccl.ray._keys import Keys

# Seconds without PYNCCL_TIMEOUT. Without a time-out no rank would learn which actor has died.
DEFAULT_TIMEOUT = 600.0


def connect(
    rank: int,
    size: int,
    *path: str,
    what: str = "",
    live: Callable[[], None] | None = None,
) -> Communicator:
    """Make the communicator of `size` actors that call this with the same path.

    `what` is for messages. The same path can be used again, also after actors have died. `live` may raise to
    end the wait for others.
    """
    seconds = resolve_timeout(None) or DEFAULT_TIMEOUT
    keys = Keys(*path, live=live)

    def late(missing: list[int]) -> Exception:
        job = ray.get_runtime_context().get_job_id()
        late = ", ".join(map(str, missing))
        return BootstrapError(
            f"{what and f'{what}: '}rank {rank} of {size} waited {rounded(seconds)} s in Ray's key-value "
            f"store; ranks that never arrived: {late} ({len(missing)} of {size}). Every actor must come, in "
            f"Ray job {job}"
        )

    if size == 1:
        return init(rank=0, world_size=1, timeout=seconds)
    meeting = keys.below(str(meet(keys, rank, size, seconds, late)))
    comm = init(meeting, rank=rank, world_size=size, timeout=seconds)
    if rank == 0:
        meeting.clear()
    return comm
