"""The matrix: which calls are made, and how many of them a quick run makes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .oracle import DATATYPES, OPS

BIG = 2**20 + 1
COUNTS = [0, 1, 3, 17, 1023, BIG]
NRANKS = [1, 2, 3, 4, 8]
# "shown": up to 1 MiB the ranks share the work on data that they show. "mixed": pairs of threads in processes
# that are on two machines in turn. "hosts" and "flat": the same, and the algorithm is forced, by hosts or
# between pairs of ranks, for every size.
TRANSPORTS = ["direct", "shm", "shown", "tcp", "threads", "mixed", "hosts", "flat"]

# Larger groups, odd ones too, with each algorithm by choice and by force. "scattered": processes of one to
# three threads on three hosts, whose ranks are neither neighbours nor equally many.
MANY = [5, 7, 16, 17, 33]
NO_HEADERS = {"PYNCCL_CPU_INLINE_BYTES": "0"}
IN_PAIRS = NO_HEADERS | {"PYNCCL_CPU_SHOWN_BYTES": "0"}
# In pieces of at most so many bytes.
IN_PIECES = NO_HEADERS | {"PYNCCL_CPU_SHOWN_BYTES": "65536"}
FORCES: dict[str, dict[str, str]] = {
    "chosen": {},
    "shown": NO_HEADERS,
    "not shown": {"PYNCCL_CPU_SHOWN_BYTES": "0"},
    "pairs": IN_PAIRS,
    "pieces": IN_PIECES,
    "hosts": NO_HEADERS,
    "flat": IN_PAIRS | {"PYNCCL_CPU_BY_HOSTS": "0"},
}
ONE_HOST, SEVERAL_HOSTS = ("direct", "shm"), ("scattered", "tcp")
PLACES = [
    *((layout, force) for layout in ONE_HOST for force in ("chosen", "shown", "not shown", "pairs")),
    ("shm", "pieces"),
    *((layout, force) for layout in SEVERAL_HOSTS for force in ("chosen", "hosts", "flat")),
]

REDUCTIONS = ["AllReduce", "Reduce", "ReduceScatter"]
MOVES = ["Broadcast", "AllGather", "AlltoAll", "Gather", "Scatter"]
# Point-to-point: a ring in one group; every pair in one group, with sizes of its own; pairs without a group.
POINT_TO_POINT = ["Ring", "Exchange", "Chain"]
FUNCTIONS = [
    *(name + suffix for name in REDUCTIONS + MOVES for suffix in ("", "Config")),
    "Bcast",
    *POINT_TO_POINT,
]
ROOTED = {"Reduce", "Broadcast", "Bcast", "Gather", "Scatter"}


@dataclass(frozen=True)
class Case:
    """One call on every rank."""

    function: str
    dtype: str
    op: str | None
    in_place: bool
    count: int
    # Picks the root, the data, the alignment, the stream, and NULL or a pointer where NCCL looks at neither.
    seed: int = 0

    @property
    def collective(self) -> str:
        """Return the function without its Config."""
        return self.function.removesuffix("Config")

    def root(self, nranks: int) -> int:
        """Return the root, for functions that have one."""
        return self.seed % nranks

    def __str__(self) -> str:
        place = "in place" if self.in_place else "out of place"
        return f"{self.function} {self.dtype} {self.op or ''} {place} count={self.count} seed={self.seed}"


def is_valid(case: Case) -> bool:
    """Return whether NCCL has such a call: some have no in-place form, and Bcast has no other."""
    if (case.op is not None) != (case.collective in REDUCTIONS):
        return False
    if case.collective == "Bcast":
        return case.in_place
    return not (case.in_place and case.collective in ("AlltoAll", *POINT_TO_POINT))


def all_cases() -> list[Case]:
    """Return the complete matrix for one group of ranks."""
    axes = itertools.product(FUNCTIONS, DATATYPES, [None, *OPS], [False, True], COUNTS)
    valid = [case for case in (Case(*values) for values in axes) if is_valid(case)]
    return [replace(case, seed=index) for index, case in enumerate(valid)]


def small_cases() -> list[Case]:
    """Return every function, datatype and operation once, with little data."""
    return [
        case
        for case in all_cases()
        if case.count == 17 and case.in_place == (case.seed % 2 == 0 or case.function == "Bcast")
    ]


def cases_of_many(nranks: int) -> list[Case]:
    """Return every function with few, some and many bytes; the other values change from case to case."""
    rng, cases = random.Random(nranks), []
    for function in FUNCTIONS:
        whole = function.removesuffix("Config") in ("AllReduce", "Reduce", "Broadcast", "Bcast")
        for total in (17 * nranks, 20_011, 300_007):
            count = total if whole else total // nranks
            draws = (_drawn(rng, function, count) for _ in itertools.count())
            cases.append(next(filter(is_valid, draws)))
    return cases


def _drawn(rng: random.Random, function: str, count: int) -> Case:
    op, in_place = rng.choice([None, *OPS]), rng.random() < 0.5
    return Case(function, rng.choice(list(DATATYPES)), op, in_place, count, rng.randrange(10_000))


Row = tuple[str, str, str | None, bool, int, int, str]


def covering_rows(rng: random.Random) -> Iterator[Row]:
    """Give rows in which every pair of values of two axes occurs that can occur."""
    axes: list[list[object]] = [
        list(FUNCTIONS), list(DATATYPES), [None, *OPS], [False, True],
        list(COUNTS), list(NRANKS), list(TRANSPORTS),
    ]  # fmt: skip
    uncovered = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(axes[i], axes[j])
        if _can_occur(axes, {i: a, j: b})
    }
    while uncovered:
        i, a, j, b = min(uncovered, key=repr)
        row = {i: a, j: b}
        for axis in rng.sample(range(len(axes)), len(axes)):
            if axis not in row:
                row[axis] = _best(axes, row, axis, uncovered, rng)
        values = tuple(row[axis] for axis in range(len(axes)))
        uncovered -= {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(axes)), 2)}
        yield values  # type: ignore[misc]


def _best(
    axes: list[list[object]],
    row: dict[int, object],
    axis: int,
    uncovered: set[tuple[int, object, int, object]],
    rng: random.Random,
) -> object:
    """Return the value that covers most new pairs with those already chosen."""

    def gain(value: object) -> float:
        pairs = ((i, a, axis, value) if i < axis else (axis, value, i, a) for i, a in row.items())
        return sum(pair in uncovered for pair in pairs) + rng.random() / 2

    return max((value for value in axes[axis] if _can_occur(axes, row | {axis: value})), key=gain)


def _can_occur(axes: list[list[object]], row: dict[int, object]) -> bool:
    """Return whether a row that is only partly chosen can be completed."""
    choices = [[row[axis]] if axis in row else axes[axis] for axis in (0, 2, 3)]
    return any(
        is_valid(Case(function, "int8", op, in_place, 0))  # type: ignore[arg-type]
        for function, op, in_place in itertools.product(*choices)
    )


def pairwise_cases() -> dict[tuple[int, str], list[Case]]:
    """Return a covering subset of the matrix, by number of ranks and transport."""
    groups: dict[tuple[int, str], list[Case]] = {}
    for index, row in enumerate(covering_rows(random.Random(2))):
        function, dtype, op, in_place, count, nranks, transport = row
        case = Case(function, dtype, op, in_place, count, index)
        groups.setdefault((nranks, transport), []).append(case)
    return groups
