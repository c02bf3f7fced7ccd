"""What is made of a communicator: split, shrink, grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload
from weakref import WeakSet

import numpy as np

from pynccl import _recorder, _recovery, _watchdog, capi
from pynccl._binding import lib
from pynccl._collectives import Collectives
from pynccl._devices import on_device
from pynccl._ended import Process
from pynccl._errors import NcclError, NcclTimeoutError
from pynccl._recorder import recorded
from pynccl._structs import Config
from pynccl._types import UniqueId, to_unique_id

if TYPE_CHECKING:
    from pynccl._communicator import Communicator

T = TypeVar("T")
ConfigLike = Config | Mapping[str, Any] | None


class Relatives(Collectives):
    """The calls that make one communicator of another."""

    _identity: str
    _made: Counter[str]
    _timeout: float | None
    _children: WeakSet[Communicator]
    # The ranks' processes, which of them this one can see, and how often they have been shrunk.
    _processes: Sequence[Process]
    _visible: Sequence[bool]
    _attempts: int

    if TYPE_CHECKING:
        # The communicator's.
        @property
        def handle(self) -> int: ...
        def abort(self) -> None: ...
        def _open(self) -> int: ...
        def _outside_groups(self, what: str) -> None: ...
        def _settle(self, what: str, look: Callable[[], object] | None = None) -> None: ...
        def _deadline(self, timeout: float | None) -> tuple[float | None, float | None]: ...
        def _alone(self, anyway: bool = False) -> AbstractContextManager[None]: ...
        def _bounded(
            self, call: Callable[[], T], what: str, if_abandoned: Callable[[T], object] | None = None
        ) -> T: ...

    @overload
    def split(self, color: int, key: int = 0, *, config: ConfigLike = None) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0, *, config: ConfigLike = None) -> None: ...
    @overload
    def split(self, color: int | None, key: int = 0, *, config: ConfigLike = None) -> Communicator | None: ...
    def split(self, color: int | None, key: int = 0, *, config: ConfigLike = None) -> Communicator | None:
        """Make a communicator of the ranks with the same color, ordered by key (ncclCommSplit, NCCL >= 2.18).

        Every rank has to call it. `color=None`: this rank joins none, and gets None.
        """
        if color is not None and (isinstance(color, bool) or not isinstance(color, int | np.integer)):
            raise TypeError(f"color is {color!r}; expected an int, or None to join no communicator")
        if color is not None and not 0 <= color < 1 << 31:
            raise ValueError(f"color is {color}; expected 0 <= color < 2**31, or None")
        if isinstance(key, bool) or not isinstance(key, int | np.integer):
            raise TypeError(f"key is {key!r}; expected an int, by which the ranks are ordered")
        if not -1 << 31 <= key < 1 << 31:
            raise ValueError(f"key is {key}; expected -2**31 <= key < 2**31")
        number = capi.NCCL_SPLIT_NOCOLOR if color is None else int(color)
        return self._child(
            "split",
            number,
            lambda: capi.ncclCommSplit(self.handle, number, int(key), config),
            color is not None,
        )

    def shrink(
        self,
        exclude: Iterable[int],
        abort: bool = False,
        *,
        config: ConfigLike = None,
        quorum: _recovery.Quorum = "majority",
    ) -> Communicator:
        """Make a communicator without some ranks, which do not call this (ncclCommShrink, NCCL >= 2.27).

        `abort=True`, for ranks that have failed, ends what is outstanding and closes this communicator. With
        a time-out the survivors first agree on who they are, and do without the library's help before 2.27.
        They raise RankFailedError where they are not more than half of the ranks that are not proven to have
        ended, since the others may go on by themselves; `quorum=None` goes on all the same.
        """
        if quorum not in ("majority", None):
            raise ValueError(f"quorum is {quorum!r}; expected 'majority' or None")
        if isinstance(exclude, str | bytes) or not isinstance(exclude, Iterable):
            raise TypeError(f"exclude is {exclude!r}; expected a list of ranks")
        ranks = list(exclude)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
                raise TypeError(f"exclude is {ranks!r}, with {rank!r}; expected ints, the ranks to leave out")
            if not 0 <= rank < self._size:
                raise ValueError(
                    f"exclude is {ranks}, with {rank}; expected ranks from 0 to {self._size - 1}"
                )
        if self._rank in ranks and abort:
            # The error that names the others may name this rank.
            _watchdog.raise_verdict(self._whole())
        if self._rank in ranks or not ranks:
            raise ValueError(
                f"exclude is {ranks}; expected other ranks than this one, {self._rank}, at least one"
            )
        self._outside_groups("ncclCommShrink")
        if _recovery.can_agree(self._whole()):
            return _recovery.shrink(self._whole(), set(ranks), abort, config, quorum)
        child = self._child("shrink", sorted(ranks), lambda: self._native_shrink(ranks, abort, config))
        assert child is not None
        if abort:
            self._children.discard(child)
            self.abort()
        return child

    def _native_shrink(self, ranks: Iterable[int], abort: bool, config: ConfigLike) -> int:
        flags = capi.NCCL_SHRINK_ABORT if abort else capi.NCCL_SHRINK_DEFAULT
        excluded = sorted(ranks)
        return capi.ncclCommShrink(self._open(), excluded, len(excluded), config, flags)

    def get_unique_id(self) -> UniqueId:
        """Return the id with which new ranks join this communicator when it grows; on one rank only."""
        if not lib.nccl_api_find(b"ncclCommGrow"):
            return UniqueId(capi.ncclGetUniqueId())
        return UniqueId(capi.ncclCommGetUniqueId(self.handle))

    def grow(
        self, nranks: int, unique_id: UniqueId | bytes | None = None, *, config: ConfigLike = None
    ) -> Communicator:
        """Make a communicator of these ranks and new ones, `nranks` in all.

        As ncclCommGrow, and before NCCL 2.29 by a new rendezvous. Every rank has to call it: `unique_id` on
        the one that got it from the communicator's `get_unique_id`, None elsewhere. The new ranks call
        `Communicator.join` with it.
        """
        if not isinstance(nranks, int) or nranks <= self._size:
            raise ValueError(f"nranks is {nranks}; expected more than the present {self._size}")
        uid = None if unique_id is None else bytes(to_unique_id(unique_id))

        def create() -> int:
            return capi.ncclCommGrow(self.handle, nranks, uid, -1, config)

        if not lib.nccl_api_find(b"ncclCommGrow"):
            self._outside_groups("grow")
            with self._alone():
                shared = bytes(_recovery.share_id(self._whole(), uid))

            def create() -> int:
                return capi.ncclCommInitRankConfig(nranks, shared, self._rank, config)

        also = "" if uid is None else _recorder.identify("id", uid)
        if _recovery.can_agree(self._whole()):
            return self._grown(nranks, create, also)
        child = self._child("grow", nranks, create, also=also)
        assert child is not None
        return child

    def _grown(self, nranks: int, create: Callable[[], int], also: str) -> Communicator:
        """Grow, or leave this communicator as it was: on all ranks alike."""
        self._outside_groups("ncclCommGrow")
        child = self._relative("grow", nranks, also)
        with self._alone():
            self._check(lib.PYNCCL_GROW)
            kind: Any = lib.PYNCCL_GROW
            with recorded(self._c, kind, nranks):
                _recovery.grow(self._whole(), child, nranks, create)
        self._adopt(child)
        return child

    def _child(
        self, how: str, detail: object, create: Callable[[], int], joins: bool = True, also: str = ""
    ) -> Communicator | None:
        what, kind = f"ncclComm{how.capitalize()}", getattr(lib, f"PYNCCL_{how.upper()}")
        self._outside_groups(what)
        child = self._relative(how, detail, also)
        with self._alone():
            if how != "shrink":
                # Those that are excluded do not call it.
                self._check(kind)

            def on_its_device() -> int:
                with on_device(self._device):
                    return create()

            with recorded(self._c, kind, detail if isinstance(detail, int) else 0):
                child._until = self._deadline(None)[1]
                handle = self._bounded(on_its_device, what, abort_if_made)
                self._settle(what)
                if not joins:
                    return None
                self._have_taken(child, handle)
        self._adopt(child)
        return child

    def _have_taken(self, child: Communicator, handle: int) -> None:
        """Complete what the library has made; of a rank that fails meanwhile this communicator knows more."""
        try:
            child._take(handle, True, look=lambda: _watchdog.raise_verdict(self._whole()))
        except NcclTimeoutError as error:
            raise _watchdog.expire(self._whole(), str(error), True) or error from None
        except NcclError as error:
            raise _watchdog.cause(self._whole(), error) from error.__cause__

    def _check(self, kind: Any) -> None:
        """In check mode, compare with the other ranks that they are about to do the same."""
        answer = lib.pynccl_check_other(self._c, kind)
        if answer:
            self._refuse(answer)

    def _relative(self, how: str, detail: object, also: str = "") -> Communicator:
        """Return a communicator that is still to be made of this one, named alike on all ranks."""
        child = type(self._whole()).__new__(type(self._whole()))
        child._prepare(self._timeout)
        self._made[how] += 1
        child._identity = _recorder.identify(self._identity, how, self._made[how], detail)
        child._origin, child._also = f"{how} {detail} of {self._identity}", also
        return child

    def _adopt(self, child: Communicator) -> None:
        child._parent = self._whole()
        self._children.add(child)

    def _whole(self) -> Communicator:
        return cast("Communicator", self)


def abort_if_made(handle: int) -> None:
    """Give up what a call has made after nobody waited for it any more."""
    if handle:
        capi.ncclCommAbort(handle)
