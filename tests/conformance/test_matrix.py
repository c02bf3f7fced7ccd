"""Every collective x datatype x operation x place x count x ranks x transport, against NumPy, bit by bit.

`pytest -m full` runs all of it; else a subset runs in which every pair of these values occurs, and every
function, datatype and operation once with little data.
"""

from __future__ import annotations

import time
from itertools import product

import pytest

from .bodies import QUICK, transports
from .cases import NRANKS, TRANSPORTS, all_cases, pairwise_cases, small_cases
from .checks import check
from .ranks import Pool

CHOSEN = {*((2, transport) for transport in TRANSPORTS), *product((3, 4), QUICK)}
GROUPS = [
    pytest.param(*group, marks=[] if group in CHOSEN else pytest.mark.slow)
    for group in ((nranks, transport) for transport in TRANSPORTS for nranks in NRANKS)
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("nranks", "transport"), GROUPS)
def test_pairwise(pool: Pool, nranks: int, transport: str) -> None:
    check(pool, nranks, transport, pairwise_cases()[nranks, transport])


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", transports(*TRANSPORTS))
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
