"""A model of the survivors' agreement: every order of messages, deaths and cuts, for a few ranks.

The model runs the very steps that shrink runs (pynccl/_watch/agreement.py). A rank may die at any point; of
what it has sent, any beginning arrives at each other rank before that sees the connection end. A cut ends the
connection between two ranks that live on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pynccl._watch import agreement as agreement
from pynccl._watch.agreement import DERIVE, MADE, Message, State, View, members, ranks_in, set_of

# Instead of a message.
END, PROOF = -1, -2
# A machine's part is interned, so that the states of the whole are small tuples of numbers.
Whole = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], int, int]


class Model:
    """All that can happen to `size` ranks; `dead` are those that have died before, `lost` who knows of that.

    `proven`: whoever sees the end of a connection has the proof of a death; "late": that comes later.
    `newest`: a rank takes all that has come before it says something.
    """

    def __init__(
        self,
        size: int,
        *,
        deaths: int = 0,
        cuts: int = 0,
        proven: bool | str = False,
        quorum: bool = False,
        dead: int = 0,
        lost: dict[int, int] | None = None,
        excluded: dict[int, int] | None = None,
        refuses: int | None = None,
        newest: bool = False,
    ) -> None:
        assert not cuts or proven is not True, "the end of a connection that is cut proves nothing"
        self.size, self.deaths, self.cuts = size, deaths, cuts
        self.proven, self.quorum, self.newest = proven, quorum, newest
        self.lost, self.excluded, self.refuses = lost or {}, excluded or {}, refuses
        self.dead = dead
        self.known_dead = dead
        for rank in range(size):
            if not dead >> rank & 1:
                self.known_dead &= self.lost.get(rank, 0)
        self.machines: list[State] = []
        self.number_of: dict[State, int] = {}
        self.messages: list[Message] = []
        self.message_of: dict[Message, int] = {}
        self.steps: dict[tuple[int, int, int], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self.pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.channel_of = {pair: i for i, pair in enumerate(self.pairs)}
        self.edges = list(itertools.combinations(range(size), 2))
        self.seen: set[Whole] = set()
        self.ends = 0
        self.sets: set[int] = set()

    def _machine(self, state: State) -> int:
        number = self.number_of.setdefault(state, len(self.machines))
        if number == len(self.machines):
            self.machines.append(state)
        return number

    def _message(self, message: Message) -> int:
        number = self.message_of.setdefault(message, len(self.messages))
        if number == len(self.messages):
            self.messages.append(message)
        return number

    def _step(self, machine: int, sender: int, message: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Take a message, or that the connection to the sender has ended, or the proof of its death."""
        key = machine, sender, message
        if key not in self.steps:
            state = self.machines[machine]
            bit = 1 << sender
            if message >= 0:
                after, out = agreement.hear(state, sender, self.messages[message])
            elif message == PROOF or self.proven is True:
                after, out = agreement.lose(state, 0, bit)
            else:
                after, out = agreement.lose(state, bit)
            self._once(state, after)
            if after.decision is not None:
                # Nothing else of it matters any more.
                after = after._replace(view=after.decision, same=0, said=(), deciders=0)
            self.steps[key] = self._machine(after), tuple((to, self._message(what)) for to, what in out)
        return self.steps[key]

    @staticmethod
    def _once(before: State, after: State) -> None:
        assert before.decision is None or after.decision == before.decision, "decided twice"

    def _first(self) -> Whole:
        machines, channels = [], [()] * len(self.pairs)
        dead = self.dead
        for rank in range(self.size):
            lost = self.lost.get(rank, 0)
            state, out = agreement.start(
                rank,
                self.size,
                lost=0 if self.proven is True else lost,
                ended=lost if self.proven is True else 0,
                excluded=self.excluded.get(rank, 0),
                flags=0 if rank == self.refuses else MADE,
                quorum=self.quorum,
            )
            machines.append(self._machine(state))
            for to, what in out:
                if not (dead >> rank | dead >> to) & 1:
                    channels[self.channel_of[rank, to]] += (self._message(what),)
            for other in ranks_in(lost):
                channels[self.channel_of[other, rank]] = None
        return tuple(machines), tuple(channels), dead, 0

    def explore(self) -> None:
        first = self._settled(self._first())
        self.seen, stack = {first}, [first]
        while stack:
            now = stack.pop()
            quiet = True
            for fresh, by_fate in self._next(now):
                quiet = quiet and by_fate
                after = self._settled(fresh)
                if after not in self.seen:
                    self._check(after)
                    self.seen.add(after)
                    stack.append(after)
            if quiet:
                self.ends += 1
                self._check_end(now)

    def _next(self, now: Whole) -> Iterator[tuple[Whole, bool]]:
        """Yield what may come next, and whether that is a new fault."""
        machines, channels, dead, cut = now
        for i, (a, b) in enumerate(self.pairs):
            if dead >> b & 1:
                continue
            if channels[i] is None:
                state = self.machines[machines[b]]
                unknown = state.decision is None and not state.view.ended >> a & 1
                if self.proven == "late" and dead >> a & 1 and unknown:
                    yield self._deliver(now, i, PROOF, None), False
                continue
            if channels[i]:
                yield self._deliver(now, i, channels[i][0], channels[i][1:]), False
            if dead >> a & 1 or cut >> self._edge(a, b) & 1:
                # What was still on its way is lost; None: the end has been seen.
                yield self._deliver(now, i, END, None), False
        if (dead & ~self.dead).bit_count() < self.deaths:
            for rank in range(self.size):
                # Somebody is left.
                if not dead >> rank & 1 and dead.bit_count() < self.size - 1:
                    yield (machines, self._without(channels, rank), dead | 1 << rank, cut), True
        if cut.bit_count() < self.cuts:
            for i in range(len(self.edges)):
                if not cut >> i & 1:
                    yield (machines, channels, dead, cut | 1 << i), True

    def _settled(self, now: Whole) -> Whole:
        """Take what changes nothing, now or later: an older view, and what is told to who has decided."""
        machines, channels, dead, cut = now
        fresh = list(channels)
        for i, (a, b) in enumerate(self.pairs):
            state = self.machines[machines[b]]
            while fresh[i]:
                message = self.messages[fresh[i][0]]
                older = not message.decided and message.view != state.view
                if not (older and self._step(machines[b], a, fresh[i][0]) == (machines[b], ())) and (
                    state.decision is None or (message.decided and self.cuts)
                ):
                    break
                fresh[i] = fresh[i][1:]
            if state.decision is not None and not fresh[i] and (dead >> a & 1 or not self.cuts):
                fresh[i] = None
        return machines, tuple(fresh), dead, cut

    def _without(self, channels: Any, rank: int) -> Any:
        """Nobody reads what is sent to the dead."""
        return tuple(() if b == rank else one for (_, b), one in zip(self.pairs, channels, strict=True))

    def _edge(self, a: int, b: int) -> int:
        return self.edges.index((min(a, b), max(a, b)))

    def _deliver(self, now: Whole, channel: int, message: int, left: Any) -> Whole:
        machines, channels, dead, cut = now
        sender, rank = self.pairs[channel]
        after, out = self._step(machines[rank], sender, message)
        fresh = list(channels)
        fresh[channel] = left
        for to, what in out:
            at = self.channel_of[rank, to]
            reaches = not dead >> to & 1 and not cut >> self._edge(rank, to) & 1
            if reaches and fresh[at] is not None:
                fresh[at] = self._sent(fresh[at], what)
        return (*machines[:rank], after, *machines[rank + 1 :]), tuple(fresh), dead, cut

    def _sent(self, channel: tuple[int, ...], what: int) -> tuple[int, ...]:
        """Send; where only the newest is sent, what it takes the place of has never been said."""
        if (
            self.newest
            and channel
            and not (self.messages[what].decided or self.messages[channel[-1]].decided)
        ):
            return (*channel[:-1], what)
        return (*channel, what)

    # --- what has to hold ---

    def _living(self, now: Whole) -> list[State]:
        return [self.machines[m] for r, m in enumerate(now[0]) if not now[2] >> r & 1]

    def _check(self, now: Whole) -> None:
        decided = [state for state in self._living(now) if state.decision is not None]
        if not decided:
            return
        if not self.cuts:
            assert len({state.decision for state in decided}) == 1, "survivors have decided differently"
        sets = {self._set_of(state) for state in decided}
        self.sets |= sets
        for one in sets:
            assert not one & self.known_dead, "somebody who was known to be dead goes on"
        everybody = {rank: self._set_of(state) for state in decided for rank in [state.rank]}
        whole = [one for one in sets if all(everybody.get(rank) == one for rank in ranks_in(one))]
        assert len(whole) <= 1 or not self.quorum, "two parts go on"

    @staticmethod
    def _set_of(state: State) -> int:
        assert state.decision is not None
        return members(state.decision, state.rank)

    def _check_end(self, now: Whole) -> None:
        for state in self._living(now):
            if state.decision is not None:
                assert members(state.decision, state.rank) >> state.rank & 1 or self.cuts or self.excluded
                if not self.cuts and not self.excluded:
                    alive = set_of(state.rank for state in self._living(now))
                    assert not alive & ~self._set_of(state), "somebody who lives is left out"
                continue
            # Who cannot decide knows why: there are not enough, or the others go on without it.
            assert self.quorum, "a survivor waits for ever"
            assert not agreement.may_go_on(state), "a survivor waits for ever"


SMALL: list[dict[str, Any]] = [
    {"size": 3, "deaths": 2, "proven": True},
    {"size": 3, "deaths": 2},
    {"size": 3, "deaths": 2, "proven": "late"},
    {"size": 3, "deaths": 2, "proven": "late", "quorum": True},
    {"size": 3, "deaths": 2, "refuses": 1},
    {"size": 3, "cuts": 2, "quorum": True},
    {"size": 3, "cuts": 1, "deaths": 1, "proven": "late", "quorum": True},
    # One has died; who knows of it, and who dies meanwhile.
    {"size": 4, "dead": 1, "deaths": 2, "lost": {2: 1}, "proven": True},
    {"size": 4, "dead": 2, "deaths": 1, "lost": {0: 2, 3: 2}, "newest": True},
]
LARGE: list[dict[str, Any]] = [
    {"size": 4, "dead": 8, "deaths": 2, "lost": {0: 8, 1: 8, 2: 8}},
    {"size": 4, "dead": 8, "deaths": 2, "lost": {0: 8, 2: 8}},
    {"size": 3, "cuts": 3, "deaths": 1, "quorum": True},
    {"size": 4, "deaths": 1, "newest": True},
    {"size": 4, "deaths": 2, "proven": True, "newest": True},
]
# Minutes each.
HUGE: list[dict[str, Any]] = [
    {"size": 4, "deaths": 2},
    {"size": 4, "deaths": 3, "proven": True},
    {"size": 4, "cuts": 1, "quorum": True, "newest": True},
    {"size": 4, "deaths": 1, "proven": "late", "quorum": True, "newest": True},
]


def named(what: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in what.items())


@pytest.mark.parametrize(
    "what",
    [
        *SMALL,
        *(pytest.param(one, marks=[pytest.mark.slow, pytest.mark.timeout(300)]) for one in LARGE),
        *(pytest.param(one, marks=[pytest.mark.full, pytest.mark.timeout(1200)]) for one in HUGE),
    ],
    ids=named,
)
def test_every_order(what: dict[str, Any]) -> None:
    """All survivors decide the same, once, on all who live; nobody waits for ever; no two parts go on."""
    model = Model(**what)
    model.explore()
    assert model.ends
    everybody = (1 << model.size) - 1
    # It is not always the same that comes out.
    assert len(model.sets) > 1
    assert everybody & ~model.dead in model.sets


def test_the_model_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agreement in which decisions are not told on, and one that takes them from anybody."""
    decide, heard = agreement._decide, agreement._hear_decision

    def silently(state: State, view: View) -> agreement.Step:
        return decide(state, view)[0], ()

    def credulously(state: State, sender: int, view: View) -> agreement.Step:
        return decide(state, view) if state.decision is None else heard(state, sender, view)

    model = {"size": 4, "dead": 8, "deaths": 1, "lost": {0: 8, 2: 8}}
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "_decide", silently)
        with pytest.raises(AssertionError, match="differently|for ever"):
            Model(**model).explore()
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "_hear_decision", credulously)
        with pytest.raises(AssertionError, match="differently"):
            Model(**model).explore()


def test_flags_hold_where_all_have_them() -> None:
    model = Model(3, refuses=2)
    model.explore()
    assert {state.decision.flags for state in model.machines if state.decision is not None} == {0}


# --- who goes on --------------------------------------------------------------------------------------------


def view(size: int, edges: dict[int, list[int]], excluded: int = 0, ended: int = 0) -> View:
    return View(0, excluded, ended, tuple(set_of(edges.get(rank, [])) for rank in range(size)))


@pytest.mark.parametrize(
    ("size", "edges", "goes_on"),
    [
        pytest.param(4, {}, [0, 1, 2, 3], id="all"),
        pytest.param(4, {1: [3]}, [0, 1, 2], id="who is missed"),
        pytest.param(3, {1: [2], 2: [1]}, [0, 1], id="the lowest"),
        pytest.param(5, {0: [3, 4], 3: [0], 4: [0]}, [1, 2, 3, 4], id="the most"),
        pytest.param(6, {r: [3, 4, 5] for r in (0, 1, 2)}, [0, 1, 2], id="this side"),
        pytest.param(6, {0: [3, 4, 5], 1: [4, 5], 2: [3, 4, 5]}, [0, 1, 2], id="with a bridge"),
    ],
)
def test_members(size: int, edges: dict[int, list[int]], goes_on: list[int]) -> None:
    for rank in goes_on:
        assert list(ranks_in(members(view(size, edges), rank))) == goes_on


def test_members_of_many_ranks_that_miss_each_other_at_random() -> None:
    """The search is bounded, and what it finds can reach each other."""
    random = Random(1)
    edges = {r: [o for o in range(300) if o != r and random.random() < 0.1] for r in range(300)}
    found = members(view(300, edges), 7)
    assert found
    assert not any(set(edges[r]) & set(ranks_in(found)) for r in ranks_in(found))


@pytest.mark.parametrize(
    ("ended", "excluded", "chosen", "enough"),
    [
        (0, 0, 0b0011, True),
        (0, 0, 0b1100, False),
        (0, 0, 0b1110, True),
        (0b1000, 0, 0b0100, False),
        (0b0001, 0, 0b1100, True),
        (0b0111, 0, 0b1000, True),
        (0, 0b0011, 0b1000, False),
        (0, 0b0011, 0b0100, True),
    ],
)
def test_quorum(ended: int, excluded: int, chosen: int, enough: bool) -> None:
    assert agreement.has_quorum(view(4, {}, excluded, ended), chosen) == enough


def test_messages_on_the_wire() -> None:
    random = Random(2)
    for size in (1, 2, 8, 9, 300):
        for _ in range(20):
            lost = [random.choice((0, 1, random.getrandbits(size))) for _ in range(size)]
            known = View(random.choice((0, DERIVE, MADE)), random.getrandbits(size), 0, tuple(lost))
            message = Message(random.random() < 0.5, known)
            data = agreement.pack(message)
            assert agreement.unpack(data + bytes(100), size) == message
    # A thousand ranks that have all lost the same fit into a few frames.
    assert len(agreement.pack(Message(False, view(1000, {r: [5] for r in range(1000)})))) < 600
