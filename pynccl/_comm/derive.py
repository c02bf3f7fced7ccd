"""Derived communicators: the common part of split, shrink and grow, and split itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pynccl import capi
from pynccl._base.timeouts import rounded
from pynccl._base.values import is_int, shown
from pynccl._comm.core import Core
from pynccl._comm.create import take
from pynccl._comm.end import abort, abort_if_made, adopt
from pynccl._device.blocking import LINGER
from pynccl._device.devices import on_device
from pynccl._errors import NcclError, NcclRemoteError, NcclTimeoutError
from pynccl._library.generated import kinds
from pynccl._library.generated.structs import Config
from pynccl._trace import recorder

ConfigLike = Config | Mapping[str, Any] | None


class How(NamedTuple):
    """One way to derive a communicator."""

    kind: int
    # Every rank makes the call, so check mode can compare.
    by_all: bool = True

    @property
    def name(self) -> str:
        """What messages call it."""
        return kinds.NAMES[self.kind]

    @property
    def function(self) -> str:
        """The C function."""
        return kinds.FUNCTIONS[self.kind]


# Seconds for a communicator to notice a death after the one derived from it, and between two looks.
_NOTICE, _STEP = 0.5, 0.01

SPLIT = How(kinds.SPLIT)
GROW = How(kinds.GROW)
SHRINK = How(kinds.SHRINK, by_all=False)


def new_child(core: Core, how: How, detail: object, also: str = "") -> Core:
    """Return the core of a communicator to be derived; its name is the same on all ranks.

    First a grow that was given up ends: the library matches the ranks' calls in their order.
    """
    if core.grown is not None:
        # NCCL's own calls may go on for long.
        core.grown.wait(LINGER)
        core.grown = None
    child = Core(core.timeout)
    core.derived[how.name] += 1
    child.identity = recorder.identify(core.identity, how.name, core.derived[how.name], detail)
    child.origin, child.also = f"{how.name} {detail} of {core.identity}", also
    return child


def derive(
    core: Core, how: How, detail: object, call: Callable[[], int], *, joins: bool = True, also: str = ""
) -> Core | None:
    """Derive a communicator by a call of the library; None if this rank does not join it.

    This is the body of a `Core.together`.
    """

    def on_its_device() -> int:
        with on_device(core.device):
            return call()

    child = new_child(core, how, detail, also)
    with core.alone(), core.announced(how.kind, detail if isinstance(detail, int) else 0, how.by_all):
        child.until = core.deadline(None)[1]
        handle = core.change(on_its_device, how.function, abort_if_made)
        if not joins:
            return None
        _take(core, child, handle, how.function)
    adopt(core, child)
    return child


def abort_child(child: Core | None) -> None:
    """Abort the derived communicator of a call that Ctrl-C has interrupted."""
    if child is not None:
        abort(child)


def _take(core: Core, child: Core, handle: int, what: str) -> None:
    """Set up the derived communicator; report failed ranks by the parent's watchdog."""
    late: NcclError | None = None

    def explain(error: NcclTimeoutError) -> NcclError:
        nonlocal late
        core.watch.hear()
        text = f"{what} took longer than {rounded(core.timeout)} s on rank {core.rank}"
        late = core.watch.expire(text, error.ranks) or error
        return late

    try:
        take(child, handle, look=core.watch.raise_verdict, explain=explain)
    except NcclError as error:
        # A rank that has raised its error of an agreed failure may abort, which explains nothing here.
        if error is late or error.agreed:
            raise
        found = core.watch.cause(error)
        if found is error:
            # Another rank may have timed out, and still find out who is late.
            core.watch.hear()
            found = core.watch.verdict() or core.watch.who_left(str(error)) or _failure_of_parent(core, error)
        raise found from error.__cause__


def _failure_of_parent(core: Core, error: NcclError) -> NcclError:
    """Return the parent's failure, whose ranks the caller knows; without one the error itself.

    A watchdog has found none.
    """
    until = time.monotonic() + _NOTICE
    while isinstance(error, NcclRemoteError) and not core.watch.connected and time.monotonic() < until:
        # The derived communicator may notice a death first.
        if (failure := core.failure()) is not None:
            return failure
        time.sleep(_STEP)
    error.args = (f"in the new communicator: {error}",)
    return error


def split(core: Core, color: int | None, key: int, config: ConfigLike) -> Core | None:
    """Derive a communicator of the ranks with the same color, ordered by key; None if color is None."""
    if color is not None and not is_int(color):
        raise TypeError(
            f"color is {shown(color)}; expected an int that the ranks of one communicator share, such as a "
            "number of their node, or None to join no communicator"
        )
    if color is not None and not 0 <= color < 1 << 31:
        raise ValueError(f"color is {shown(color)}; expected 0 <= color < 2**31, or None")
    if not is_int(key):
        raise TypeError(f"key is {shown(key)}; expected an int that orders the ranks")
    if not -1 << 31 <= key < 1 << 31:
        raise ValueError(f"key is {shown(key)}; expected -2**31 <= key < 2**31")
    number = capi.NCCL_SPLIT_NOCOLOR if color is None else int(color)

    def call() -> int:
        return capi.ncclCommSplit(core.open(), number, int(key), config)

    def make() -> Core | None:
        return derive(core, SPLIT, number, call, joins=color is not None)

    core.outside_groups(SPLIT.function)
    return core.together(make, SPLIT.function, abort_child)
