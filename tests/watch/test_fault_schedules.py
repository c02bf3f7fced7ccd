"""Random fault schedules: every surviving rank returns or raises what it should, in time, and leaves nothing.

`python tests/helpers/fault_schedules.py --seed N` runs the one that failed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fault_jobs import Runner
from fault_schedules import PAIRS, draw

CHUNK, QUICK, SLOW, ALL = 10, 10, 100, 1000
# Instead of schedules whose fault did not come.
SPARE = 1_000_000
# More than these not to come would mean that the schedules do not test what they say.
MOST_SPARE = 5


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def mark(first: int) -> pytest.MarkDecorator | tuple[()]:
    return () if first < QUICK else pytest.mark.slow if first < SLOW else pytest.mark.full


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [pytest.param(n, marks=mark(n)) for n in range(0, ALL, CHUNK)])
def test_schedules(runner: Runner, first: int) -> None:
    seeds = range(first, first + CHUNK)
    verdicts = runner.run_fired(seeds, iter(range(SPARE + first, SPARE + first + MOST_SPARE)))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, "\n".join(wrong)
    assert sum(verdict.fired for verdict in verdicts) == CHUNK


def test_all_pairs_come_up() -> None:
    drawn = {(s.fault, s.stage) for s in map(draw, range(ALL))}
    assert drawn == set(PAIRS)
