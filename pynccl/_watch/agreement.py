"""The agreement of a communicator's survivors on their ranks: a state machine without sockets and time.

Every rank sends its view to all others, and sends it again after every change. A view only
grows. A rank decides when all ranks that its view keeps have sent exactly the
same view. It sends its decision before it does anything else. A rank that receives a decision adopts it and
forwards it. So the decision of one survivor binds the others, as in ULFM's agreement.

Messages between two ranks arrive in order, before the end of their connection. A set of ranks is an
int with one bit for each rank.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

# Bits of View.flags. HEARD: no excluded rank can take this rank's end for a death. WELL: no call has failed.
DERIVE, MADE, HEARD, WELL = 1, 2, 4, 8
# The most steps of the search for the largest set of ranks that can all reach each other.
_STEPS = 2000
_HEAD = struct.Struct("!BBH")


class View(NamedTuple):
    """The knowledge of one rank."""

    # The flags that all ranks heard so far have set.
    flags: int
    # The ranks that the program excludes.
    excluded: int
    # The ranks that are proven to have ended.
    ended: int
    # For every rank, the ranks that it cannot reach.
    lost: tuple[int, ...]


class Message(NamedTuple):
    """A message between two ranks: a view or a decision."""

    decided: bool
    view: View


class State(NamedTuple):
    """One rank's part in an agreement."""

    rank: int
    quorum: bool
    # The ranks that receive this rank's messages.
    others: int
    view: View
    # The ranks that have sent exactly this view.
    same: int
    # The views that this rank has sent, oldest first.
    said: tuple[View, ...] = ()
    decision: View | None = None
    # The ranks that have sent this decision.
    deciders: int = 0
    # True if other ranks decided without this rank after it had decided with them.
    overruled: bool = False


# Messages to send: a set of receivers, and the message.
Output = tuple[tuple[int, Message], ...]
Step = tuple[State, Output]


def ranks_in(bits: int) -> Iterator[int]:
    """Yield the ranks of a set, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def set_of(ranks: Iterable[int]) -> int:
    """Return ranks as a set."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


# --- conclusions from a view  -------------------------------------------------------------------------------


def rest(view: View) -> int:
    """Return the ranks that are neither excluded nor proven to have ended."""
    return (1 << len(view.lost)) - 1 & ~(view.excluded | view.ended)


@lru_cache(maxsize=4096)
def members(view: View, rank: int) -> int:
    """Return the survivors: the largest set of ranks with this one that can all reach each other.

    Among equally large sets, prefer the one whose members the fewest ranks have lost, then the lowest ranks.
    """
    left = rest(view)
    apart = {r: view.lost[r] & left for r in ranks_in(left)}
    for r in ranks_in(left):
        for other in ranks_in(view.lost[r] & left):
            apart[other] |= 1 << r
    around = 1 << rank & left
    fresh = around
    while fresh:
        near = 0
        for r in ranks_in(fresh):
            near |= left & ~view.lost[r]
        fresh = near & ~around
        around |= fresh
    return _Search(view, apart, around).best


class _Search:
    """A search for the fewest ranks to leave out so that the others can all reach each other."""

    def __init__(self, view: View, apart: dict[int, int], around: int) -> None:
        self.view, self.apart, self.around = view, apart, around
        self.best, self.steps = 0, _STEPS
        self._go(around)

    def _go(self, left: int) -> None:
        self.steps -= 1
        if left.bit_count() < self.best.bit_count() or (self.steps < 0 and self.best):
            return
        worst = max(ranks_in(left), key=lambda r: ((self.apart[r] & left).bit_count(), r), default=None)
        if worst is None or not self.apart[worst] & left:
            if not self.best or self._rank(left) > self._rank(self.best):
                self.best = left
            return
        self._go(left & ~(1 << worst))
        self._go(left & ~self.apart[worst])

    def _rank(self, chosen: int) -> tuple[int, int, list[int]]:
        held = sum((self.view.lost[r] & chosen).bit_count() for r in ranks_in(self.around))
        return chosen.bit_count(), -held, [-r for r in ranks_in(chosen)]


def has_quorum(view: View, chosen: int) -> bool:
    """Tell whether these ranks are a majority: more than half, or half including the lowest rank."""
    left = rest(view)
    twice, all_of_it = 2 * chosen.bit_count(), left.bit_count()
    return twice > all_of_it or (twice == all_of_it and bool(chosen & left & -left))


def may_go_on(state: State) -> bool:
    """Tell whether the survivors have a quorum."""
    return not state.quorum or has_quorum(state.view, members(state.view, state.rank))


def awaited(state: State) -> int:
    """Return the survivors that have not sent the same view yet."""
    return members(state.view, state.rank) & ~state.same


# --- steps --------------------------------------------------------------------------------------------------


def start(
    rank: int,
    size: int,
    *,
    excluded: int = 0,
    ended: int = 0,
    lost: int = 0,
    flags: int = 0,
    quorum: bool = True,
    tell_excluded: bool = True,
) -> Step:
    """Begin; this rank cannot reach the ranks in `lost`, and the program excludes those in `excluded`."""
    rows = tuple(lost if r == rank else 0 for r in range(size))
    others = (1 << size) - 1 & ~(1 << rank) & ~(0 if tell_excluded else excluded)
    view = _plain(View(flags, excluded, ended, rows))
    return _say(State(rank, quorum, others, view, 1 << rank))


def hear(state: State, sender: int, message: Message) -> Step:
    """Handle a message."""
    if message.decided:
        return _hear_decision(state, sender, message.view)
    gone = state.view.excluded | state.view.ended | state.view.lost[state.rank]
    if state.decision is not None or gone >> sender & 1:
        return state, ()
    return _learn(state, message.view, sender)


def _hear_decision(state: State, sender: int, view: View) -> Step:
    state = state._replace(deciders=state.deciders | 1 << sender)
    without_this = not members(view, sender) >> state.rank & 1
    if state.decision is not None:
        return state._replace(overruled=state.overruled or (without_this and view != state.decision)), ()
    return _decide(state, view) if without_this or _binds(state, sender, view) else (state, ())


def _binds(state: State, sender: int, view: View) -> bool:
    """Tell whether a decision can be adopted.

    It cannot after this rank has sent a view without the sender: other ranks may have decided by that view.
    """
    later = state.said[state.said.index(view) + 1 :] if view in state.said else state.said
    return all(members(one, state.rank) >> sender & 1 for one in later)


def lose(state: State, lost: int, ended: int = 0) -> Step:
    """Record ranks that cannot be reached any more, or that have ended."""
    if state.decision is not None:
        return state, ()
    rows = tuple(lost if r == state.rank else 0 for r in range(len(state.view.lost)))
    return _learn(state, View(state.view.flags, 0, ended, rows), None)


def _learn(state: State, more: View, sender: int | None) -> Step:
    view = state.view
    merged = _plain(
        View(
            view.flags & more.flags,
            view.excluded | more.excluded,
            view.ended | more.ended,
            tuple(a | b for a, b in zip(view.lost, more.lost, strict=True)),
        )
    )
    agrees = 0 if sender is None or more != merged else 1 << sender
    if merged == view:
        return _look(state._replace(same=state.same | agrees), ())
    return _say(state._replace(view=merged, same=1 << state.rank | agrees))


def _plain(view: View) -> View:
    """Drop the losses of and by ranks that are excluded or have ended."""
    left = rest(view)
    rows = tuple(row & left if left >> rank & 1 else 0 for rank, row in enumerate(view.lost))
    return view._replace(lost=rows)


def _say(state: State) -> Step:
    state = state._replace(said=(*state.said, state.view))
    return _look(state, tuple((other, Message(False, state.view)) for other in ranks_in(state.others)))


def _look(state: State, said: Output) -> Step:
    """Decide if all survivors have sent the same view."""
    chosen = members(state.view, state.rank)
    if not chosen >> state.rank & 1 or chosen & ~state.same or not may_go_on(state):
        return state, said
    decided, told = _decide(state, state.view)
    return decided, said + told


def _decide(state: State, view: View) -> Step:
    told = tuple((other, Message(True, view)) for other in ranks_in(state.others))
    return state._replace(decision=view), told


def newest_of(state: State) -> Message:
    """Return what this rank has said last."""
    return Message(False, state.view) if state.decision is None else Message(True, state.decision)


def newest(out: Output) -> Output:
    """Drop outdated messages before they are sent."""
    last = {(to, message.decided): message for to, message in out}
    return tuple((to, message) for (to, _), message in sorted(last.items(), key=lambda one: one[0]))


# --- on the wire --------------------------------------------------------------------------------------------


def pack(message: Message) -> bytes:
    """Return a message as bytes; equal sets of lost ranks are written once."""
    view = message.view
    width = (len(view.lost) + 7) // 8
    rows: dict[int, int] = {}
    for rank, row in enumerate(view.lost):
        if row:
            rows[row] = rows.get(row, 0) | 1 << rank
    head = _HEAD.pack(message.decided, view.flags, len(rows))
    sets = [view.excluded, view.ended, *(part for pair in rows.items() for part in pair)]
    return head + b"".join(one.to_bytes(width, "little") for one in sets)


def unpack(data: bytes, size: int) -> Message:
    """Return the message in these bytes, for a communicator of `size` ranks."""
    width = (size + 7) // 8
    decided, flags, count = _HEAD.unpack_from(data)
    at = range(_HEAD.size, _HEAD.size + (2 + 2 * count) * width, width)
    excluded, ended, *pairs = (int.from_bytes(data[i : i + width], "little") for i in at)
    lost = [0] * size
    for row, owners in zip(pairs[::2], pairs[1::2], strict=True):
        for rank in ranks_in(owners):
            lost[rank] = row
    return Message(bool(decided), View(flags, excluded, ended, tuple(lost)))
