"""Random programs of puts, signals and waits, with collectives, groups, streams and splits, against NumPy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import pynccl
from pynccl.testing import run
from ranks import reach_by

DTYPES = ("float32", "int64", "uint8", "bool", "int16", "complex64")
SIGNALS, CONTEXTS = 3, 2
OPTIONS = {"numRmaCtx": CONTEXTS, "numRmaSig": SIGNALS}


@dataclass(frozen=True)
class Put:
    """A put, or without a window a signal alone; `wave` numbers the group in which its rank issues it."""

    source: int
    peer: int
    window: int | None
    offset: int
    count: int
    value: int
    signal: int
    context: int
    wave: int


@dataclass(frozen=True)
class Made:
    """A window: a dtype, the sizes of all ranks, how the memory is made, and of which communicator it is."""

    dtype: str
    sizes: tuple[int, ...]
    from_nccl: bool
    of_half: bool


@dataclass(frozen=True)
class Program:
    """What all ranks do: windows, then epochs of puts; every rank waits for all that an epoch puts to it."""

    windows: tuple[Made, ...]
    epochs: tuple[tuple[Put, ...], ...]
    # How each epoch is issued: in groups, on a stream of its own, prepared, with collectives in between.
    grouped: tuple[bool, ...]
    streamed: tuple[bool, ...]
    prepared: tuple[bool, ...]
    collective: tuple[bool, ...]


def half_of(rank: int, nranks: int) -> list[int]:
    """Return the ranks of the split communicator that a rank is in: even ones, and odd ones."""
    return [other for other in range(nranks) if other % 2 == rank % 2]


@st.composite
def programs(draw: Any, nranks: int) -> Program:
    sizes = st.tuples(*[st.integers(1, 40)] * nranks)
    made = st.builds(Made, st.sampled_from(DTYPES), sizes, st.booleans(), st.booleans())
    windows = tuple(draw(st.lists(made, min_size=1, max_size=3)))
    ranks = st.integers(0, nranks - 1)
    epochs = []
    for _ in range(draw(st.integers(1, 4))):
        # Each place of an epoch belongs to the rank that puts there first: others would race with it.
        owners: dict[tuple[int, int, int], int] = {}
        puts = []
        for _ in range(draw(st.integers(0, 12))):
            source, peer = draw(ranks), draw(ranks)
            number = draw(st.sampled_from([None, *range(len(windows))]))
            offset = count = 0
            if number is not None:
                if windows[number].of_half:
                    peer = draw(st.sampled_from(half_of(source, nranks)))
                offset = draw(st.integers(0, windows[number].sizes[peer] - 1))
                count = draw(st.integers(0, windows[number].sizes[peer] - offset))
                places = [(number, peer, at) for at in range(offset, offset + count)]
                if any(owners.get(place, source) != source for place in places):
                    continue
                owners |= dict.fromkeys(places, source)
            signal, context = draw(st.integers(0, SIGNALS - 1)), draw(st.integers(0, CONTEXTS - 1))
            value, wave = draw(st.integers(0, 100)), draw(st.integers(0, 2))
            puts.append(Put(source, peer, number, offset, count, value, signal, context, wave))
        epochs.append(tuple(sorted(puts, key=lambda put: put.wave)))
    flags = st.lists(st.booleans(), min_size=len(epochs), max_size=len(epochs)).map(tuple)
    return Program(windows, tuple(epochs), draw(flags), draw(flags), draw(flags), draw(flags))


def data_of(put: Put, dtype: str) -> np.ndarray:
    return (np.arange(put.count) * 3 + put.value).astype(dtype)


class Player:
    """One rank of a program."""

    def __init__(self, comm: pynccl.Communicator, half: pynccl.Communicator, program: Program) -> None:
        self.comm, self.half, self.program = comm, half, program
        self.members = half_of(comm.rank, comm.size)
        self.arrays = [self._array(made) for made in program.windows]
        self.windows = [
            (half if made.of_half else comm).window(array)
            for made, array in zip(program.windows, self.arrays, strict=True)
        ]
        self.expected = [array.copy() for array in self.arrays]
        self.stream = pynccl.Stream()

    def _array(self, made: Made) -> np.ndarray:
        size = made.sizes[self.comm.rank]
        return pynccl.zeros(size, made.dtype) if made.from_nccl else np.zeros(size, made.dtype)

    def play(self) -> str:
        """Return what is wrong, or ""."""
        for number, epoch in enumerate(self.program.epochs):
            stream = self.stream if self.program.streamed[number] else None
            self._issue(number, [put for put in epoch if put.source == self.comm.rank], stream)
            self._wait(number, [put for put in epoch if put.peer == self.comm.rank], stream)
            self.comm.synchronize()
            self.half.synchronize()
            for index, (array, expected) in enumerate(zip(self.arrays, self.expected, strict=True)):
                if not np.array_equal(array, expected):
                    return f"epoch {number}, window {index}: {array} instead of {expected}"
            self.comm.barrier()
        for window in self.windows:
            window.close()
        return ""

    def _issue(self, number: int, puts: list[Put], stream: Any) -> None:
        total = np.ones(3, np.int64)
        for _, wave in groupby(puts, lambda put: put.wave):
            with pynccl.group() if self.program.grouped[number] else nullcontext():
                for put in wave:
                    self._put(put, stream, self.program.prepared[number])
        if self.program.collective[number]:
            self.comm.all_reduce(total)
            assert (total == self.comm.size).all()

    def _put(self, put: Put, stream: Any, prepared: bool) -> None:
        in_half = put.window is not None and self.program.windows[put.window].of_half
        comm = self.half if in_half else self.comm
        calls = comm.prepare if prepared else comm
        peer = self.members.index(put.peer) if in_half else put.peer
        if put.window is None:
            made = calls.signal(peer, put.signal, context=put.context, stream=stream)
        else:
            data = data_of(put, self.program.windows[put.window].dtype)
            where = self.windows[put.window], put.offset, put.signal
            made = calls.put_signal(data, peer, *where, context=put.context, stream=stream)
        if prepared:
            made()

    def _wait(self, number: int, puts: list[Put], stream: Any) -> None:
        counts: dict[tuple[bool, int, int], dict[int, int]] = {}
        for put in puts:
            in_half = put.window is not None and self.program.windows[put.window].of_half
            source = self.members.index(put.source) if in_half else put.source
            of_signal = counts.setdefault((in_half, put.signal, put.context), {})
            of_signal[source] = of_signal.get(source, 0) + 1
            if put.window is not None:
                data = data_of(put, self.program.windows[put.window].dtype)
                self.expected[put.window][put.offset : put.offset + put.count] = data
        for (in_half, signal, context), peers in sorted(counts.items()):
            comm = self.half if in_half else self.comm
            first = {peer: count - 1 for peer, count in peers.items() if count > 1}
            # Some counts in two waits, of which one is for several ranks.
            if first:
                comm.wait_signal(first, signal=signal, context=context, stream=stream)
            for peer, count in peers.items():
                comm.wait_signal(peer, count - first.get(peer, 0), signal, context=context, stream=stream)


def play_all(rank: int, nranks: int, transport: str, listed: list[Program]) -> None:
    reach_by(transport, rank)
    with pynccl.init(timeout=30, config=OPTIONS) as comm, comm.split(rank % 2, config=OPTIONS) as half:
        for program in listed:
            wrong = Player(comm, half, program).play()
            assert not wrong, f"{program}\n{wrong}"


def drawn(nranks: int, count: int) -> list[Program]:
    """Return random programs, the same ones at each call."""
    found: list[Program] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(nranks))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


@pytest.mark.parametrize("transport", ["direct", "shm", "tcp", "mixed"])
@pytest.mark.parametrize("nranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_random_programs(nranks: int, transport: str) -> None:
    run(nranks, play_all, transport, drawn(nranks, 15), backend="cpu")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["direct", "shm", "tcp", "mixed"])
@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_many_random_programs(nranks: int, transport: str) -> None:
    run(nranks, play_all, transport, drawn(nranks, 400), backend="cpu", timeout=1700)
