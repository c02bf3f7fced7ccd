"""Random programs of groups, splits, streams and point-to-point graphs, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .programs import (
    NRANKS,
    REGISTERS,
    STREAMS,
    Collective,
    Either,
    Group,
    Handover,
    PointToPoint,
    Program,
    Split,
    Sync,
    run_program,
    units,
)
from .ranks import Pool, RanksFailed

DTYPES = ["int32", "float32", "float16", "uint8"]
FUNCTIONS = [
    "AllReduce", "Reduce", "ReduceScatter", "Broadcast", "AllGather", "AlltoAll", "Gather", "Scatter"
]  # fmt: skip
OPS = ["sum", "prod", "max", "min", "avg"]
CAPACITY = 96


class Author:
    """Draws one legal program."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.families = 1
        # Two streams may share a datatype; a step needs a pair of registers of one datatype and stream.
        pairs = [draw(st.sampled_from(DTYPES)) for _ in range(REGISTERS // 2)]
        self.dtypes = [name for name in pairs for _ in range(2)] + [pairs[0]]
        self.owner = [index // 2 % STREAMS for index in range(REGISTERS)]
        self.first_owner = list(self.owner)

    def program(self) -> tuple[Program, list[int]]:
        steps: list[Any] = []
        for _ in range(self.draw(st.integers(1, 10))):
            steps += self.step()
        scale = self.draw(st.sampled_from([1, 1, 1, 300]))
        program = Program(tuple(self.dtypes), tuple(steps), scale, self.draw(st.integers(0, 1000)))
        return program, self.first_owner

    def step(self) -> list[Any]:
        kind = self.draw(
            st.sampled_from(["call", "call", "group", "group", "split", "either", "handover", "sync"])
        )
        if kind == "split" and self.families < 5:
            return [self.split()]
        if kind == "group":
            return [self.group(set(), depth=0)]
        if kind == "either" and self.families > 1:
            return self.either()
        if kind == "handover":
            register, stream = (
                self.draw(st.integers(0, REGISTERS - 1)),
                self.draw(st.integers(0, STREAMS - 1)),
            )
            self.owner[register] = stream
            return [Handover(register, stream)]
        if kind == "sync":
            return [Sync(self.draw(st.integers(0, STREAMS - 1)))]
        return self.call(set())

    def split(self) -> Split:
        colors = tuple(self.draw(st.integers(-1, 2)) for _ in range(NRANKS))
        keys = tuple(self.draw(st.integers(-2, 2)) for _ in range(NRANKS))
        step = Split(self.draw(st.integers(0, self.families - 1)), colors, keys)
        self.families += 1
        return step

    def group(self, used: set[int], depth: int) -> Group:
        steps: list[Any] = []
        for _ in range(self.draw(st.integers(0, 3))):
            if depth < 2 and self.draw(st.integers(0, 3)) == 0:
                steps.append(self.group(used, depth + 1))
            else:
                steps += self.call(used)
        return Group(tuple(steps))

    def either(self) -> list[Any]:
        used: set[int] = set()
        both = self.call(used) + self.call(used)
        if len(both) < 2:
            return both
        first, second = both
        streams = {self.owner[first.send], self.owner[second.send]}
        # Stream 0 is CUDA's legacy default stream, which keeps the order with the others.
        if first.family == second.family or len(streams) < 2 or 0 in streams:
            return both
        return [Either(first, second)]

    def pairs(self, used: set[int]) -> list[tuple[int, int]]:
        """Return the pairs of registers that one step can use; a register with itself is in place."""
        free = [register for register in range(REGISTERS) if register not in used]
        kind = [(self.dtypes[register], self.owner[register]) for register in range(REGISTERS)]
        return [(a, b) for a in free for b in free if kind[a] == kind[b]]

    def call(self, used: set[int]) -> list[Any]:
        family = self.draw(st.integers(0, self.families - 1))
        if self.draw(st.integers(0, 3)) == 0:
            return self.point_to_point(family, used)
        function = self.draw(st.sampled_from(FUNCTIONS))
        pairs = [pair for pair in self.pairs(used) if function != "AlltoAll" or pair[0] != pair[1]]
        if not pairs:
            return []
        send, receive = self.draw(st.sampled_from(pairs))
        used |= {send, receive}
        most = CAPACITY // max(units(function, NRANKS))
        count = self.draw(st.sampled_from([0, 1, 3, most - 1, most]))
        op, root = self.draw(st.sampled_from(OPS)), self.draw(st.integers(0, NRANKS - 1))
        return [Collective(family, function, op, send, receive, count, root)]

    def point_to_point(self, family: int, used: set[int]) -> list[Any]:
        pairs = [pair for pair in self.pairs(used) if pair[0] != pair[1]]
        if not pairs:
            return []
        send, receive = self.draw(st.sampled_from(pairs))
        used |= {send, receive}
        ranks, count = st.integers(0, NRANKS - 1), st.sampled_from([0, 1, 5, 12])
        edges = self.draw(st.lists(st.tuples(ranks, ranks, count), max_size=10))
        return [PointToPoint(family, tuple(edges), send, receive)]


@st.composite
def programs(draw: Any) -> tuple[Program, list[int]]:
    return Author(draw).program()


def check(pool: Pool, transport: str, examples: int, phases: list[Phase]) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(case: tuple[Program, list[int]]) -> None:
        program, owner = case
        # In pairs, on two machines in turn (ranks.py, backend.py).
        hosts = [rank // 2 % 2 if transport == "mixed" else 0 for rank in range(NRANKS)]
        try:
            results = pool.get(NRANKS, transport).call(run_program, program, owner, hosts, timeout=20)
        except RanksFailed as error:
            pytest.fail(f"{program}\n{error}")
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(results) if text]
        assert not wrong, f"{program}\n{wrong}"

    run()


# Shrinking a program that hangs takes longer than a quick run may.
QUICK = [Phase.explicit, Phase.generate]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("direct", marks=pytest.mark.slow),
        pytest.param("shm", marks=pytest.mark.slow),
        "tcp",
        pytest.param("threads", marks=pytest.mark.slow),
        "mixed",
    ],
)
def test_random_programs(pool: Pool, transport: str) -> None:
    check(pool, transport, 60, QUICK)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["direct", "shm", "tcp", "threads", "mixed"])
def test_many_random_programs(pool: Pool, transport: str) -> None:
    check(pool, transport, 1000, [*QUICK, Phase.shrink])
