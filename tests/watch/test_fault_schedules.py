"""Random fault schedules: every surviving rank returns or raises what it should, in time, and leaves nothing.

`python tests/helpers/fault_schedules.py --seed N` runs the one that failed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fault_jobs import LANES, Runner
from fault_schedules import LARGE, PAIRS, draw

CHUNK, QUICK, SLOW, ALL = 10, 10, 100, 1000
# Of jobs of 8 to 32 ranks over several hosts.
LARGE_CHUNK, LARGE_QUICK, LARGE_SLOW, LARGE_ALL = 4, 0, 24, 440
# Instead of schedules whose fault did not come.
SPARE = 1_000_000
# More than these not to come would mean that the schedules do not test what they say.
MOST_SPARE = 5


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def runner_of_large() -> Iterator[Runner]:
    with Runner(LANES // 2) as runner:
        yield runner


def mark(first: int, quick: int, slow: int) -> pytest.MarkDecorator | tuple[()]:
    return () if first < quick else pytest.mark.slow if first < slow else pytest.mark.full


def check(runner: Runner, first: int, count: int) -> None:
    spare = range(SPARE + first, SPARE + first + MOST_SPARE)
    verdicts = runner.run_fired(range(first, first + count), iter(spare))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, "\n".join(wrong)
    assert sum(verdict.fired for verdict in verdicts) == count


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [pytest.param(n, marks=mark(n, QUICK, SLOW)) for n in range(0, ALL, CHUNK)])
def test_schedules(runner: Runner, first: int) -> None:
    check(runner, first, CHUNK)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=mark(n, LARGE_QUICK, LARGE_SLOW)) for n in range(0, LARGE_ALL, LARGE_CHUNK)],
)
def test_large_jobs_over_hosts(runner_of_large: Runner, first: int) -> None:
    check(runner_of_large, LARGE + first, LARGE_CHUNK)


@pytest.mark.parametrize(("start", "count"), [(0, ALL), (LARGE, LARGE_ALL)])
def test_all_pairs_come_up(start: int, count: int) -> None:
    drawn = {(s.fault, s.stage) for s in map(draw, range(start, start + count))}
    assert drawn == set(PAIRS)
