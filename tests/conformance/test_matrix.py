"""Every collective x datatype x operation x place x count x ranks x transport, against NumPy, bit by bit.

`pytest -m full` runs all of it; else a subset runs in which every pair of these values occurs, and every
function, datatype and operation once with little data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import pytest

from .cases import NRANKS, TRANSPORTS, Case, all_cases, pairwise_cases, small_cases
from .matrix import Layout, run_cases
from .ranks import Pool, RanksFailed, transport_layout

CHUNK = 256
# A library that crashes or hangs this often has made its point.
MAX_CRASHES = 8


def layout_of(transport: str, nranks: int) -> Layout:
    """Return where a transport's ranks are; backend.py says so to the library."""
    if transport not in ("mixed", "hosts"):
        return Layout()
    hosts = [number % 2 for number, ranks in enumerate(transport_layout(transport, nranks)) for _ in ranks]
    return Layout(hosts, 0) if transport == "hosts" else Layout(hosts)


def check(pool: Pool, nranks: int, transport: str, cases: Sequence[Case], timeout: float = 120) -> None:
    """Run the cases and fail with all that went wrong; one that kills the group does not hide the others."""
    problems: list[str] = []
    crashes, layout = 0, layout_of(transport, nranks)
    todo = deque(list(cases[i : i + CHUNK]) for i in range(0, len(cases), CHUNK))
    while todo and crashes < MAX_CRASHES:
        chunk = todo.popleft()
        if not chunk:
            continue
        try:
            results = pool.get(nranks, transport).call(run_cases, chunk, layout, timeout=timeout)
        except RanksFailed as error:
            crashes += 1
            index = min([int(note.split()[0]) for note in error.notes if note], default=0)
            problems.append(f"{chunk[index]}: {error}")
            todo.extendleft([chunk[index + 1 :], chunk[:index]])
            continue
        for rank, (wrong, _) in enumerate(results):
            problems += [f"{chunk[index]} rank {rank}: {text}" for index, text in wrong.items()]
        different = [
            i for i, sums in enumerate(zip(*(sums for _, sums in results), strict=True)) if len(set(sums)) > 1
        ]
        problems += [f"{chunk[i]}: the ranks' results differ" for i in different]
    shown = "\n".join(problems[:20])
    assert not problems, (
        f"{len(problems)} problems in {len(cases)} cases, {nranks} ranks over {transport}:\n{shown}"
    )


QUICK = {*((nranks, transport) for nranks in (2, 3, 4) for transport in TRANSPORTS), (8, "direct")}
GROUPS = [
    pytest.param(*group, marks=[] if group in QUICK else pytest.mark.slow)
    for group in ((nranks, transport) for transport in TRANSPORTS for nranks in NRANKS)
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("nranks", "transport"), GROUPS)
def test_pairwise(pool: Pool, nranks: int, transport: str) -> None:
    check(pool, nranks, transport, pairwise_cases()[nranks, transport])


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_function_datatype_and_operation(pool: Pool, transport: str) -> None:
    check(pool, 3, transport, small_cases())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("nranks", "transport"), GROUPS)
def test_complete(
    pool: Pool, nranks: int, transport: str, summary: list[tuple[int, str, int, float]]
) -> None:
    start, cases = time.monotonic(), all_cases()
    check(pool, nranks, transport, cases, timeout=1800)
    summary.append((nranks, transport, len(cases), time.monotonic() - start))
