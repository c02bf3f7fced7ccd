"""Shrink and grow: after an agreement over the control channel if there is one, else by NCCL's call alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Literal

from pynccl import capi
from pynccl._base.values import check_list, is_int, shown
from pynccl._comm.core import Core
from pynccl._comm.create import create
from pynccl._comm.derive import GROW, SHRINK, ConfigLike, derive, new_child
from pynccl._comm.end import abort, adopt
from pynccl._device import streams
from pynccl._errors import NcclError, NcclRemoteError, NcclTimeoutError, RankFailedError
from pynccl._library.binding import lib
from pynccl._library.generated.api import ncclRemoteError
from pynccl._library.status import IN_PROGRESS, check
from pynccl._memory.owner import used_streams
from pynccl._trace import recorder
from pynccl._types import UniqueId
from pynccl._watch.agreement import DERIVE, MADE, WELL, View, set_of
from pynccl._watch.survivors import GROWING, LEAVING_OUT, SECONDS, SHRINKING, Survivors, share_id
from pynccl._watch.watchdog import DEATH_MS

Quorum = Literal["majority"] | None
_OUTSTANDING = "calls are outstanding; use shrink(exclude, abort=True), which does not wait for them"
# Seconds between the time-outs of ranks that call the same function.
_MOMENT = 0.5


# --- shrink ---


def ranks_to_exclude(exclude: object, size: int) -> list[int]:
    """Return the argument of `shrink` as a list of ranks; raise TypeError or ValueError if it is not one."""
    if isinstance(exclude, str | bytes) or not isinstance(exclude, Iterable):
        raise TypeError(f"exclude is {shown(exclude)}; expected a list of ranks")
    ranks = check_list(exclude, "exclude", "a list of ranks")
    for rank in ranks:
        if not is_int(rank):
            raise TypeError(
                f"exclude is {shown(ranks)}, with {rank!r}; expected ints, the ranks to leave out"
            )
        if not 0 <= rank < size:
            raise ValueError(f"exclude is {shown(ranks)}, with {rank}; expected ranks from 0 to {size - 1}")
    return ranks


def shrink(core: Core, exclude: Sequence[int], ends: bool, config: ConfigLike, quorum: Quorum) -> Core:
    """Derive a communicator without some ranks; `ends` closes this one, even with outstanding calls."""
    if core.rank in exclude and ends and (verdict := core.watch.verdict()):
        # This rank itself was found to have failed or to be late.
        raise _of_excluded(verdict, core.rank)
    if core.rank in exclude or not exclude:
        raise ValueError(
            f"exclude is {shown(exclude)}; expected at least one rank, and not this rank, {core.rank}"
        )
    same = SHRINK.function, frozenset(exclude), ends, quorum, repr(config)
    if core.interrupted is None or core.interrupted.same != same:
        core.open()
        core.end_interrupted(anyway=ends)
    core.outside_groups(SHRINK.function)

    def make() -> Core:
        try:
            if core.watch.connected:
                return _shrink_by_agreement(core, set(exclude), ends, config, quorum)
            return _shrink_alone(core, sorted(exclude), ends, config)
        except NcclTimeoutError as error:
            if not ends and used_streams(core.c):
                error.args = (f"{error}; {_OUTSTANDING}",)
            raise

    return core.together(make, SHRINK.function, abort, same)


def _shrink_alone(core: Core, excluded: list[int], ends: bool, config: ConfigLike) -> Core:
    if not ends and (failed := core.failure()):
        raise _needs_abort(failed)
    child = derive(core, SHRINK, excluded, lambda: _shrink_by_library(core, excluded, ends, config))
    assert child is not None
    if ends:
        core.children.discard(child)
        abort(core)
    return child


def _shrink_by_library(core: Core, excluded: list[int], ends: bool, config: ConfigLike) -> int:
    flags = capi.NCCL_SHRINK_ABORT if ends else capi.NCCL_SHRINK_DEFAULT
    return capi.ncclCommShrink(core.open(), excluded, len(excluded), config, flags)


def _of_excluded(verdict: NcclError, rank: int) -> NcclError:
    error = copy(verdict)
    error.args = (f"{verdict}; the other ranks go on without this rank, {rank}, if they exclude it too",)
    return error


def _needs_abort(failed: NcclError) -> NcclError:
    error = copy(failed)
    error.args = (f"{failed}; after a failed call only shrink(exclude, abort=True) goes on",)
    return error


def _shrink_by_agreement(
    core: Core, excluded: set[int], ends: bool, config: ConfigLike, quorum: Quorum
) -> Core:
    """Shrink after the survivors have agreed on their ranks; repeat when another rank dies meanwhile."""
    native = bool(lib.nccl_api_find(b"ncclCommShrink"))
    with core.alone(anyway=True), recorder.recorded(core.c, SHRINK.kind), _suspecting(core):
        # The watchdog may still be ending the outstanding calls.
        by_library = core.watch.settle() and native and not core.out_of_step
        # NCCL derives nothing from a finalized or suspended communicator, and resumes it only on all ranks.
        by_library = by_library and not (ends and (core.finalized or core.suspended))
        failed = None if ends else core.failure()
        survivors = _survivors(core, excluded, ends, quorum)
        if failed:
            # Another rank may have begun before it could know of the failure.
            survivors.refuse()
            raise _needs_abort(failed)
        view = _begin(core, survivors, (DERIVE if by_library else 0) | (0 if ends else WELL))
        by_library = bool(view.flags & DERIVE)
        if not ends:
            _require_all(core, survivors, set_of(range(core.size)) & ~set_of(excluded))
        while True:
            child, failure = _try(core, survivors, by_library, ends, config)
            wanted = survivors.decided
            try:
                all_made = bool(survivors.agree(MADE if child is not None else 0).flags & MADE)
                # A decision can be that of ranks which have gone on without this one.
                if all_made and survivors.decided == wanted and child is not None:
                    break
                if not ends:
                    _require_all(core, survivors, wanted)
                if not ends or survivors.decided == wanted:
                    failure = failure or survivors.other_failure()
                    # A rank may have died since the beginning.
                    raise failure if ends else core.watch.cause(failure)
            except BaseException:
                if child is not None:
                    abort(child)
                raise
            if child is not None:
                abort(child)
            core.out_of_step, by_library = True, False
        survivors.linger()
    assert child is not None
    if ends:
        # An excluded rank that is alive must not take this abort for a death.
        core.goes_on = True
        abort(core)
    else:
        adopt(core, child)
    return child


def _begin(core: Core, survivors: Survivors, flags: int) -> View:
    """Agree on the survivors; if a rank has refused, raise the failure of the communicator."""
    try:
        return survivors.agree(flags)
    except RankFailedError:
        raise
    except NcclRemoteError as error:
        raise core.watch.cause(error) from None


def _survivors(core: Core, excluded: set[int], ends: bool, quorum: Quorum) -> Survivors:
    """Return this rank's part in the agreement."""
    kind = SHRINKING if ends else LEAVING_OUT
    core.attempts[kind] += 1
    return Survivors(
        core.watch, core.not_aborted, excluded, quorum is not None, kind, core.attempts[kind], final=ends
    )


@contextmanager
def _suspecting(core: Core) -> Iterator[None]:
    """Remember a failure, and the ranks that it names: they may be alive, and shrink without this rank."""
    try:
        yield
    except BaseException as error:
        # NCCL counts derived communicators, and after a failure the counts may differ between ranks.
        core.out_of_step = True
        if not isinstance(error, RankFailedError):
            raise
        core.watch.suspects |= set_of(rank for rank in error.ranks if rank != core.rank)
        raise


def _require_all(core: Core, survivors: Survivors, wanted: int) -> None:
    """Raise the failure of a rank that is not there."""
    if survivors.decided != wanted:
        survivors.tell_all()
        if survivors.lack(wanted):
            core.watch.raise_verdict(DEATH_MS)
        raise survivors.missing(wanted)


def _try(
    core: Core, survivors: Survivors, by_library: bool, ends: bool, config: ConfigLike
) -> tuple[Core | None, NcclError | None]:
    try:
        return _create(core, survivors, by_library, ends, config), None
    except NcclError as error:
        survivors.wait_for_losses()
        return None, error


def _create(core: Core, survivors: Survivors, by_library: bool, ends: bool, config: ConfigLike) -> Core:
    ranks = survivors.ranks()
    excluded = [rank for rank in range(core.size) if rank not in ranks]
    child = new_child(core, SHRINK, excluded)
    uid = b"" if by_library else bytes(survivors.unique_id())

    def call() -> int:
        if by_library:
            return _when_made(core, _shrink_by_library(core, excluded, ends, config))
        with _renumbered(ranks):
            return capi.ncclCommInitRankConfig(len(ranks), uid, ranks.index(core.rank), config)

    create(child, SHRINK.function, call, core.device, survivors.look)
    return child


@contextmanager
def _renumbered(ranks: Sequence[int]) -> Iterator[None]:
    """Give an error the numbers that the new communicator's ranks have in the parent."""
    try:
        yield
    except (NcclTimeoutError, RankFailedError) as error:
        error.ranks = [ranks[rank] for rank in error.ranks]
        raise


def _when_made(core: Core, handle: int) -> int:
    """Wait for the handle that the library writes later if the parent is non-blocking."""

    def done() -> bool:
        # First the state, which shows the end only after the handle is written.
        state = capi.ncclCommGetAsyncError(core.open())
        if not handle:
            check(state, SHRINK.function, core.handle)
        return bool(handle) and state != IN_PROGRESS

    streams.poll(done, None)
    return int(handle)


# --- grow ---


def grow(core: Core, nranks: int, unique_id: bytes | None, config: ConfigLike) -> Core:
    """Derive a communicator of these ranks and new ones, on all ranks or on none."""
    core.outside_groups(GROW.function)
    return core.together(lambda: _grow(core, nranks, unique_id, config), GROW.function, abort)


def _grow(core: Core, nranks: int, unique_id: bytes | None, config: ConfigLike) -> Core:
    # Also if the ranks do not agree: the new ranks hear that they cannot join with this id.
    core.grow_id = None
    if lib.nccl_api_find(b"ncclCommGrow"):

        def call() -> int:
            return capi.ncclCommGrow(core.open(), nranks, unique_id, -1, config)

    else:
        with core.alone():
            shared = bytes(share_id(core.watch, core.open, unique_id))

        def call() -> int:
            return capi.ncclCommInitRankConfig(nranks, shared, core.rank, config)

    also = "" if unique_id is None else recorder.identify("id", unique_id)
    # One rank agrees with itself: a new rank that does not come must not end this communicator.
    if not core.watch.connected and (core.size > 1 or core.timeout is None):
        child = derive(core, GROW, nranks, call, also=also)
        assert child is not None
        return child
    child = new_child(core, GROW, nranks, also)
    with core.alone(), core.announced(GROW.kind, nranks):
        _grow_by_agreement(core, child, nranks, unique_id, call)
    adopt(core, child)
    return child


def _grow_by_agreement(
    core: Core, child: Core, nranks: int, unique_id: bytes | None, call: Callable[[], int]
) -> None:
    """Create `child` on all ranks or on none; `core` does not change."""
    core.attempts[GROWING] += 1
    number = core.attempts[GROWING]
    old = Survivors(core.watch, core.not_aborted, (), False, GROWING, number, final=False, doing="growing")
    everybody = (1 << core.size) - 1
    child.until = time.monotonic() + (core.timeout or SECONDS)
    with _telling_new_ranks(core, unique_id):
        old.agree(0)
        _require_all(core, old, everybody)
    # All old ranks are here; from now on they wait for the new ranks.
    failure: NcclError | None = None
    core.grown = ended = threading.Event()

    def whole_call() -> int:
        try:
            return call()
        finally:
            ended.set()

    # If a rank fails, the old ranks keep their communicator; the new ranks must not go on by themselves.
    child.goes_on = True
    try:
        create(child, GROW.function, whole_call, core.device, old.look)
    except NcclError as error:
        # The time-outs of the old ranks end within a moment; one of them hears of another's.
        late = not isinstance(error, RankFailedError) and time.monotonic() > child.until - _MOMENT
        behind = error.ranks if isinstance(error, NcclTimeoutError) else []
        late = late and all(rank >= core.size for rank in behind)
        failure = _not_come(core, nranks, behind) if late else error
        old.lose_silent()
        old.leave_out(behind)
    made = old.agree(0 if failure else MADE).flags & MADE
    old.linger()
    if made and old.decided == everybody:
        child.goes_on = False
        return
    if failure is None:
        abort(child)
    _require_all(core, old, everybody)
    raise failure or old.other_failure()


@contextmanager
def _telling_new_ranks(core: Core, unique_id: bytes | None) -> Iterator[None]:
    """Tell an error to the new ranks, which wait for ranks that then do not call ncclCommGrow."""
    try:
        yield
    except NcclError as error:
        ranks = error.ranks if isinstance(error, RankFailedError) else []
        if lib.cpu_api_find(b"pyncclCpuRefuseToGrow"):
            # Another thread may have aborted the communicator.
            with suppress(NcclError):
                capi.pyncclCpuRefuseToGrow(
                    core.open(), unique_id, ncclRemoteError, str(error), ranks, len(ranks)
                )
        raise


def _not_come(core: Core, nranks: int, missing: Sequence[int]) -> NcclTimeoutError:
    """Return the error for new ranks of which some are missing; only the CPU library tells which."""
    fresh = range(core.size, nranks)
    known = missing or (fresh if len(fresh) == 1 else ())
    some = f"rank {known[0]}" if len(known) == 1 else f"ranks {list(known or fresh)}"
    who = f"new {some} did not join" if known else f"not all of the new {some} joined"
    return NcclTimeoutError(
        f"growing the communicator: {who} within {core.timeout or SECONDS:g} s",
        ranks=known,
        function=GROW.function,
        rank=core.rank,
        size=core.size,
    )


def unique_id_to_grow(core: Core) -> UniqueId:
    """Return the id by which new ranks join; before NCCL 2.29 the id of a new rendezvous."""
    if not lib.nccl_api_find(b"ncclCommGrow"):
        return UniqueId(capi.ncclGetUniqueId())
    handle = core.open()
    if core.grow_id is None:
        core.grow_id = bytes(capi.ncclCommGetUniqueId(handle))
    return UniqueId(core.grow_id)
