"""Communicator, the public class: creation, properties, and its calls by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import attrgetter
from types import TracebackType
from typing import Any, overload

import numpy as np

from pynccl import capi
from pynccl._arrays.buffers import Array
from pynccl._base.hints import add_hint, hints_keywords
from pynccl._base.timeouts import check_timeout
from pynccl._base.values import INT, MOST_DEVICES, check_int, check_list, refuse_copy, shown
from pynccl._comm import create, derive, end, lifetime, recovery
from pynccl._comm.calls import Calls
from pynccl._comm.core import Core
from pynccl._comm.derive import ConfigLike
from pynccl._comm.memory import Memory
from pynccl._comm.operations import Operations
from pynccl._comm.prepared import Prepare
from pynccl._comm.recovery import Quorum
from pynccl._device.blocking import bounded
from pynccl._device.devices import device_to_use
from pynccl._errors import NcclError, NcclTimeoutError
from pynccl._library import loader
from pynccl._library.binding import lib
from pynccl._library.generated.structs import CommProperties
from pynccl._library.hinting import Hinting
from pynccl._memory import statistics
from pynccl._memory.registration import Registration
from pynccl._memory.statistics import MemoryStats
from pynccl._memory.window import Window
from pynccl._trace import recorder
from pynccl._trace.recorder import TraceRecord
from pynccl._types import UniqueId, to_unique_id


@recorder.with_callers(
    attrgetter("_core.c"), "window", "split", "shrink", "grow", "finalize", "destroy", "suspend", "resume"
)
class Communicator(Operations, Hinting):
    """One rank of a group of processes that make collective calls on arrays.

    One thread at a time may use a communicator. A concurrent use, or a use after the communicator was closed,
    raises NcclInvalidUsage. As a context manager it is finalized and destroyed at the end, or aborted when an
    exception leaves the body. An abort also aborts the communicators made by split, shrink and grow.
    """

    # A misspelt property that is set, `comm.timeout = 3` for example, raises AttributeError.
    __slots__ = ("_core", "_memory")

    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes | Sequence[UniqueId | bytes],
        rank: int,
        *,
        config: ConfigLike = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join the group of `nranks` that shares the unique id (or several ids, for large groups).

        `timeout` bounds the creation and every later wait, in seconds. Wrong arguments raise TypeError or
        ValueError; a creation that fails raises NcclError, and NcclTimeoutError after `timeout`.
        """
        self._core = core = Core(timeout)
        _require_place(nranks, rank)
        ids = _ids(unique_id)
        loader.load()
        place = device_to_use(device)
        core.identity = recorder.numbered("id", *ids, rank=int(rank))
        recorder.open_trace(core.c, core.identity, int(rank), int(nranks), "init", name=_name_in(config))

        def call() -> int:
            return create.init_rank(nranks, ids, rank, config)

        try:
            create.create(core, f"creating the communicator of rank {rank} of {nranks}", call, place)
        except NcclTimeoutError as error:
            if not core.size:
                error.args = (f"{error}; expected all {nranks} ranks in the call, with the same unique id",)
            raise
        self._equip(core)

    @classmethod
    def join(
        cls,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        *,
        config: ConfigLike = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> Communicator:
        """Join, as a new rank, a communicator that its ranks grow to `nranks`.

        `unique_id` comes from `get_unique_id` on one of these ranks. `device` is by default the current
        device: LOCAL_RANK has no effect. Raises as the constructor does.
        """
        core = Core(timeout)
        _require_place(nranks, rank)
        uid = bytes(to_unique_id(unique_id))
        loader.load()
        place = device_to_use(device)
        core.identity = recorder.numbered("id", uid, rank=int(rank))
        recorder.open_trace(core.c, core.identity, int(rank), int(nranks), "join")

        def call() -> int:
            if lib.nccl_api_find(b"ncclCommGrow"):
                return capi.ncclCommGrow(0, nranks, uid, rank, config)
            return capi.ncclCommInitRankConfig(nranks, uid, rank, config)

        create.create(core, f"joining a communicator as rank {rank} of {nranks}", call, place)
        return cls._of(core)

    @classmethod
    def from_handle(cls, handle: int) -> Communicator:
        """Wrap an ncclComm_t of the loaded library; its creator stays responsible for destroying it.

        Raises TypeError or ValueError unless the handle is a positive int, and NcclError if NCCL refuses it.
        """
        handle = check_int(handle, "handle", 1, 1 << 64, "an ncclComm_t as a positive int")
        loader.load()
        core = Core(None)
        core.identity = recorder.numbered("handle")
        create.take(core, handle, owned=False)
        return cls._of(core)

    @classmethod
    def _of(cls, core: Core) -> Communicator:
        self = cls.__new__(cls)
        self._equip(core)
        return self

    def _equip(self, core: Core) -> None:
        self._core, calls = core, Calls(core)
        self._memory = Memory(calls)
        Operations.__init__(self, calls)

    # --- properties ---

    @property
    def handle(self) -> int:
        """The ncclComm_t as an int, for pynccl.capi and other libraries; NcclInvalidUsage once closed."""
        return int(self._core.open())

    @property
    def rank(self) -> int:
        """The rank of this process in the group, counted from 0."""
        return self._core.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._core.size

    @property
    def device(self) -> int:
        """The ordinal of this rank's device."""
        return self._core.device

    @property
    def closed(self) -> bool:
        """True after destroy or abort."""
        return not self._core.handle

    @property
    def properties(self) -> CommProperties:
        """The library's description of this communicator (ncclCommQueryProperties, NCCL >= 2.29).

        Raises NotSupportedError with an older library.
        """
        return capi.ncclCommQueryProperties(self.handle)

    @property
    def prepare(self) -> Prepare:
        """The operations, checked and packed now and run later: `op = comm.prepare.all_reduce(x); op()`."""
        return Prepare(self, self._core)

    def __repr__(self) -> str:
        return repr(self._core)

    __reduce__ = refuse_copy

    def trace(self) -> list[TraceRecord]:
        """Return the newest calls, oldest first; PYNCCL_TRACE_SIZE is the maximum number."""
        return recorder.trace(self._core.c)

    # --- memory ---

    def register(self, array: Array) -> Registration:
        """Register an array's memory with this communicator (ncclCommRegister, NCCL >= 2.19).

        NCCL can then move the memory without copies. Every rank registers its own memory; no rank waits for
        another. Memory that is registered twice is registered until the last registration is closed. A
        registration keeps its array alive. Closing the communicator closes its registrations; `destroy` warns
        (ResourceWarning) of those that were left open.

        Raises TypeError or ValueError for a wrong array, NotSupportedError with an older library, and
        NcclInvalidUsage in a group, during a graph capture, and once the communicator is closed.
        """
        return self._memory.register(array)

    def registered(self, array: Array) -> bool:
        """Tell whether a registration contains the array's memory.

        Raises TypeError or ValueError for a wrong array, and NcclInvalidUsage once the communicator is
        closed.
        """
        return self._memory.registered(array)

    def window(self, array: Array, *, symmetric: bool = False) -> Window:
        """Make the arrays of all ranks a window, which the other ranks put into (ncclCommWindowRegister).

        Every rank must call it, with an array of the same dtype; the sizes may differ. `symmetric=True` sets
        NCCL_WIN_COLL_SYMMETRIC, needs arrays of the same size, and with NVIDIA's NCCL is needed for puts.
        Use arrays from `pynccl.empty`. The window keeps its array alive. Closing the communicator closes its
        windows; `destroy` warns (ResourceWarning) of those that were left open. Needs NCCL >= 2.27.

        Raises CollectiveMismatchError if the arrays differ between the ranks, TypeError or ValueError for a
        wrong array, NotSupportedError with an older library, NcclInvalidUsage in a group, during a graph
        capture and once the communicator is closed; and otherwise as `all_reduce` does.
        """
        return self._memory.window(array, symmetric)

    def memory_stats(self) -> MemoryStats:
        """Return how much device memory the library has allocated (ncclCommMemStats, NCCL >= 2.29.7).

        Raises NotSupportedError with an older library, and NcclInvalidUsage once the communicator is closed.
        """
        return statistics.read(self.handle)

    # --- waiting ---

    def synchronize(self, stream: Any = None, timeout: float | None = None) -> None:
        """Wait for a stream, or for every stream that this communicator has used.

        Raises the NcclError of the calls on the stream, NcclTimeoutError after `timeout` seconds, and
        TypeError or ValueError for wrong arguments.
        """
        self._core.synchronize(stream, timeout)

    def async_error(self) -> NcclError | None:
        """Return, without raising, the error that occurred in the background, or None.

        Raises NcclInvalidUsage once the communicator is closed.
        """
        return self._core.async_error()

    # --- derived communicators ---

    @overload
    def split(self, color: int, key: int = 0, *, config: ConfigLike = None) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0, *, config: ConfigLike = None) -> None: ...
    @overload
    def split(self, color: int | None, key: int = 0, *, config: ConfigLike = None) -> Communicator | None: ...
    @hints_keywords
    def split(self, color: int | None, key: int = 0, *, config: ConfigLike = None) -> Communicator | None:
        """Make a communicator of the ranks with the same color, ordered by key (ncclCommSplit, NCCL >= 2.18).

        Every rank must call it. With `color=None` this rank joins no communicator and gets None.

        Raises TypeError or ValueError for wrong arguments, NotSupportedError with an older library,
        NcclInvalidUsage in a group, during a graph capture and once the communicator is closed; and otherwise
        as `all_reduce` does, RankFailedError or NcclTimeoutError for example.
        """
        child = derive.split(self._core, color, key, config)
        return None if child is None else self._of(child)

    @hints_keywords
    def shrink(
        self,
        exclude: Iterable[int],
        abort: bool = False,
        *,
        config: ConfigLike = None,
        quorum: Quorum = "majority",
    ) -> Communicator:
        """Make a communicator without the ranks in `exclude` (ncclCommShrink, NCCL >= 2.27).

        Excluded ranks do not call this. `abort=True`, for failed ranks, ends outstanding calls and closes
        this communicator. With a time-out the survivors first agree on their ranks; this also works before
        NCCL 2.27. The survivors raise RankFailedError unless they are more than half of the ranks that are
        not proven to have ended, since the others may continue on their own; `quorum=None` drops this
        condition.

        Also raises TypeError or ValueError for wrong arguments, NcclTimeoutError if it takes too long, and
        another NcclError if the creation fails.
        """
        # An array compares by elements.
        if quorum is not None and not (isinstance(quorum, str) and quorum == "majority"):
            raise ValueError(f"quorum is {shown(quorum)}; expected 'majority' or None")
        if not isinstance(abort, bool):
            raise TypeError(f"abort is {shown(abort)}; expected True or False")
        ranks = recovery.ranks_to_exclude(exclude, self.size)
        return self._of(recovery.shrink(self._core, ranks, abort, config, quorum))

    def get_unique_id(self) -> UniqueId:
        """Return the id by which new ranks join when this communicator grows; call it on one rank only.

        Until `grow` begins, it is the same id.
        Raises NcclInvalidUsage once the communicator is closed, and NcclError if the library refuses.
        """
        return recovery.unique_id_to_grow(self._core)

    @hints_keywords
    def grow(
        self, nranks: int, unique_id: UniqueId | bytes | None = None, *, config: ConfigLike = None
    ) -> Communicator:
        """Make a communicator of these ranks and new ones, `nranks` in all.

        It calls ncclCommGrow, or before NCCL 2.29 makes a new rendezvous. Every rank must call it: with
        `unique_id` on the rank that called `get_unique_id`, with None elsewhere. The new ranks call
        `Communicator.join`. Raises ValueError for wrong arguments, NcclTimeoutError if a new rank does not
        join in time, RankFailedError if a rank dies, and NcclError if the creation fails otherwise.
        """
        more = f"more than the present {self.size} ranks, an int below 2**31"
        nranks = check_int(nranks, "nranks", self.size + 1, INT, more)
        uid = None if unique_id is None else bytes(to_unique_id(unique_id))
        return self._of(recovery.grow(self._core, nranks, uid, config))

    # --- end ---

    def finalize(self) -> None:
        """Complete the outstanding calls of all ranks; afterwards the communicator can only be destroyed.

        Raises RankFailedError or NcclTimeoutError if a rank fails, and NcclInvalidUsage once closed.
        """
        end.finalize(self._core)

    def destroy(self) -> None:
        """Complete this rank's calls, then release all resources; no effect on a closed communicator.

        A message that no rank receives is an error of `finalize`, which the end of a `with` block calls too.
        Raises RankFailedError or NcclTimeoutError if a rank fails meanwhile.
        """
        end.destroy(self._core)

    def abort(self) -> None:
        """Release all resources immediately, without the other ranks; any thread may call it at any time.

        Communicators that were derived from this one are aborted too. Raises NcclTimeoutError if the library
        does not return.
        """
        end.abort(self._core)

    def revoke(self) -> None:
        """End calls on this rank without closing the communicator (ncclCommRevoke, NCCL >= 2.28.7).

        Afterwards this rank can shrink, split or close it, and so can every rank that has revoked it too; the
        calls of the others raise errors. With a time-out, if the revoke of another rank has ended calls of
        this rank, the communicator counts as failed here, and only `shrink(..., abort=True)` goes on from
        there. Raises NotSupportedError with an older library.
        """
        end.revoke(self._core)

    def suspend(self) -> None:
        """Release the communicator's device memory until `resume` (ncclCommSuspend, NCCL >= 2.29.7).

        Every rank must call it. Raises NotSupportedError with an older library, NcclInvalidUsage in a group,
        during a graph capture and once the communicator is closed; and otherwise as `all_reduce` does,
        CollectiveMismatchError, RankFailedError or NcclTimeoutError for example.
        """
        end.suspend(self._core)

    def resume(self) -> None:
        """Allocate the device memory again that `suspend` released (ncclCommResume, NCCL >= 2.29.7).

        Every rank must call it. Raises as `suspend` does.
        """
        end.resume(self._core)

    def __enter__(self) -> Communicator:
        self._core.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is TypeError:
            # Only here, since a check of the keywords in each call would slow all calls.
            add_hint(error, Communicator)
        if not self._core.handle:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0):
            # The program ends itself without a failure: its exit ends the communicator (_comm/lifetime.py).
            return
        if kind is not None or not self._core.owned:
            if kind is not None:
                recorder.dump_because("exception", f"{kind.__name__}: {error}")
                end.report(error)
            self.abort()
            return
        try:
            self.finalize()
            self.destroy()
        except BaseException:
            self.abort()
            raise


def _name_in(config: ConfigLike) -> str:
    known = config.get("commName") if isinstance(config, Mapping) else getattr(config, "commName", None)
    return str(known or "")


def _ids(unique_id: UniqueId | bytes | Sequence[UniqueId | bytes]) -> list[bytes]:
    if isinstance(unique_id, str | bytes | bytearray | memoryview) or not isinstance(unique_id, Iterable):
        return [bytes(to_unique_id(unique_id))]
    try:
        several = list(unique_id)
    except TypeError:
        raise TypeError(f"unique_id is {shown(unique_id)}; expected a UniqueId or its 128 bytes") from None
    ids = [bytes(to_unique_id(one, f"unique_id[{i}]")) for i, one in enumerate(several)]
    if not ids:
        raise ValueError("unique_id is an empty sequence; expected at least one id")
    return ids


def _require_place(nranks: int, rank: int) -> None:
    check_int(nranks, "nranks", 1, INT, "an int, 1 <= nranks < 2**31")
    if check_int(rank, "rank", -INT, INT, "an int, 0 <= rank < nranks") not in range(nranks):
        raise ValueError(f"rank is {rank} and nranks {nranks}; expected 0 <= rank < nranks")


@hints_keywords
def init_all(devices: int | Sequence[int], *, timeout: float | None = None) -> list[Communicator]:
    """Make a communicator with one rank for each device of this process (ncclCommInitAll); return the ranks.

    `devices` is a number of devices or their ordinals. Put the calls of one thread on several ranks into a
    `group()`. Raises TypeError or ValueError for wrong devices, and NcclError if the creation fails.
    """
    ordinals = _ordinals(devices)
    timeout = check_timeout(timeout)
    loader.load()
    handles = bounded(
        lambda: capi.ncclCommInitAll(len(ordinals), ordinals),
        timeout,
        "ncclCommInitAll",
        if_abandoned=end.abort_all,
    )
    ranks = []
    identity = recorder.numbered("all", os.uname().nodename, os.getpid())
    for handle in handles:
        core = Core(timeout)
        core.identity, core.origin = identity, "init_all"
        # No control channel: the ranks of one process die together.
        create.take(core, handle, with_channel=False)
        ranks.append(around(core))
    return ranks


def around(core: Core) -> Communicator:
    """Return the communicator of a core that is set up."""
    return Communicator._of(core)


def _ordinals(devices: Any) -> list[int]:
    """Return the ordinals of a number of devices, or those of a list."""
    expected = f"a number of devices from 1 to {MOST_DEVICES} or a list of their ordinals"
    if isinstance(devices, int | np.integer):
        return list(range(check_int(devices, "devices", 1, MOST_DEVICES, expected)))
    if isinstance(devices, str | bytes | Mapping | Set) or not isinstance(devices, Iterable):
        raise TypeError(f"devices is {shown(devices)}; expected {expected}")
    given = check_list(devices, "devices", expected)
    ordinals = [
        check_int(d, f"devices[{i}]", 0, INT, f"an ordinal from 0 to {INT}") for i, d in enumerate(given)
    ]
    if not ordinals:
        raise ValueError(f"devices is {shown(devices)}; expected {expected}")
    return ordinals


lifetime.hint_by(lambda error: add_hint(error, Communicator))
