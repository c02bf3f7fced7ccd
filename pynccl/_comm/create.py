"""The creation of a communicator: the library's call, then the set-up around its handle."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pynccl import capi
from pynccl._base.values import rank_list
from pynccl._comm import lifetime
from pynccl._comm.core import Core, hinting
from pynccl._comm.end import abort, abort_if_made
from pynccl._comm.recording import cores
from pynccl._device.blocking import bounded, with_outside
from pynccl._device.devices import on_device
from pynccl._errors import NcclError, NcclInvalidArgument, NcclRemoteError, NcclTimeoutError, RankFailedError
from pynccl._library import loader
from pynccl._library.binding import address_of, lib
from pynccl._library.generated import kinds
from pynccl._library.generated.api import pyncclCpuDied
from pynccl._library.generated.structs import Config
from pynccl._trace import recorder
from pynccl._watch import check_mode
from pynccl._watch.watchdog import DEATH_MS, Look

# Seconds for the answer of the CPU library after the time-out.
_ANSWER = 0.5
# The process that made the id tells its time-out, and who is missing, to the ranks that have come.
_NO_ANSWER = (
    "the process that made the unique id does not respond: it is stopped, or its machine is overloaded"
)


def create(
    core: Core, what: str, call: Callable[[], int], device: int | None, look: Look | None = None
) -> None:
    """Create the library's communicator by a blocking call on a device, and set up `core` with it."""

    seconds, until = core.deadline(None)
    if core.until is None:
        core.until = until
    else:
        seconds = core.until - time.monotonic()
    left = None if seconds is None else max(0.1, seconds)
    # The CPU library's own time-out names the missing ranks.
    by_library = left is not None and bool(lib.cpu_api_find(b"pyncclCpuCreationTimeout"))

    def on_its_device() -> int:
        with on_device(device), _limited(left if by_library else None):
            return call()

    grace = _ANSWER if by_library else 0.0
    within = None if left is None else left + grace
    look = with_outside(look)
    if left is None:
        expected = "expected all of them in the call, with the same unique id"
        look = hinting(look, lambda: f"{what} waits for other ranks; {expected}")
    with recorder.recorded(core.c, kinds.INIT):
        try:
            handle = bounded(on_its_device, within, what, abort_if_made, look)
        except NcclTimeoutError as error:
            if error.detail:
                recorder.dump_because("timeout", str(error))
            elif by_library and not error.ranks:
                error.args = (f"{error}; {_NO_ANSWER}",)
            raise
        take(core, handle, look=look, grace=grace)


def init_rank(nranks: int, ids: list[bytes], rank: int, config: Config | Mapping[str, Any] | None) -> int:
    """Call the library's function that creates a rank by these unique ids and this configuration."""
    if len(ids) > 1:
        return capi.ncclCommInitRankScalable(nranks, rank, len(ids), ids, config)
    if config is not None:
        return capi.ncclCommInitRankConfig(nranks, ids[0], rank, config)
    return capi.ncclCommInitRank(nranks, ids[0], rank)


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Limit the creations of this thread by the CPU library."""
    if seconds is None:
        yield
        return
    capi.pyncclCpuCreationTimeout(math.ceil(seconds * 1000))
    try:
        yield
    finally:
        capi.pyncclCpuCreationTimeout(-1)


def take(
    core: Core,
    handle: int,
    *,
    owned: bool = True,
    with_channel: bool = True,
    look: Look | None = None,
    explain: Callable[[NcclTimeoutError], NcclError] | None = None,
    grace: float = 0.0,
) -> None:
    """Set up `core` with the library's communicator; abort the communicator if that fails.

    A derived communicator's parent knows which ranks have died. To this communicator, a rank that
    aborts it after the death of another rank looks dead. `explain` returns the parent's error for an
    NcclTimeoutError; both have the parent's numbers of the ranks.
    """
    core.handle, core.owned = handle, owned
    lifetime.living.add(core)
    try:
        _set_up(core, handle, owned, with_channel, look, grace)
    except BaseException as error:
        found: NcclError | None = None
        if explain is None:
            found = _death(core, error)
        elif isinstance(error, NcclTimeoutError):
            error.ranks = _in_parent(handle, error.ranks)
            # The abort ends the waits of other ranks, which then no longer know for whom they waited.
            found = explain(error)
        # Other ranks may have succeeded, and wait for this rank: the abort tells them.
        abort(core)
        if found is None or found is error:
            raise
        raise found from (error if explain is None else None)
    core.until = None


def _in_parent(handle: int, ranks: list[int]) -> list[int]:
    """Return the numbers of these ranks in the parent; only the CPU library tells them."""
    if not lib.cpu_api_find(b"pyncclCpuParentRank"):
        return []
    return sorted(capi.pyncclCpuParentRank(handle, rank) for rank in ranks)


def _set_up(
    core: Core, handle: int, owned: bool, with_channel: bool, look: Look | None, grace: float
) -> None:
    if owned:
        lifetime.own(int(handle))
    on_cpu = loader.backend() == "cpu"
    if not on_cpu:
        # This warns of another libnccl, which the program may have loaded since the last communicator.
        loader.library_info()
    core.waits = int(on_cpu)
    core.settle("creating the communicator", look, grace)
    rank, size = capi.ncclCommUserRank(handle), capi.ncclCommCount(handle)
    core.locate(capi.ncclCommCuDevice(handle), on_cpu)
    core.rank, core.size = rank, size
    core.c.handle, core.c.rank, core.c.size = int(handle), rank, size
    core.c.waits, core.c.stream = core.waits, core.own_stream
    cores[address_of(core.c)] = core
    recorder.open_trace(core.c, core.identity, rank, size, core.origin, also=core.also)
    if on_cpu:
        lib.pynccl_trace_algorithms(core.c.trace, core.c.handle)
    if owned and (core.timeout is not None or check_mode.enabled()):
        core.watch.start(core.open, core.device, core.until, look, with_channel=with_channel)
        if check_mode.enabled():
            core.checks = check_mode.start(core.c)


def _death(core: Core, error: BaseException) -> RankFailedError | None:
    """Return the error that names the ranks that died or were late during the creation, if they are known."""
    if isinstance(error, NcclTimeoutError):
        found = core.watch.verdict()
        return found if isinstance(found, RankFailedError) else None
    if not core.waits or not isinstance(error, NcclRemoteError) or isinstance(error, RankFailedError):
        return None
    fates: list[int] = []
    until = time.monotonic() + DEATH_MS / 1000
    # A report of another rank can come before the CPU library sees the death.
    while core.handle and pyncclCpuDied not in fates and time.monotonic() < until:
        fates = _fates(core.handle)
        time.sleep(0 if pyncclCpuDied in fates else 0.01)
    dead = [rank for rank, fate in enumerate(fates) if fate == pyncclCpuDied]
    text = f"{rank_list(dead)} of {len(fates)} died while the communicator was created"
    return RankFailedError(text, ranks=dead, rank=core.known_rank, size=len(fates)) if dead else None


def _fates(handle: int) -> list[int]:
    """Return what the CPU library knows of each rank; a failed communicator no longer tells its size."""
    fates: list[int] = []
    with suppress(NcclInvalidArgument):
        while True:
            fates.append(capi.pyncclCpuIsGone(handle, len(fates)))
    return fates
