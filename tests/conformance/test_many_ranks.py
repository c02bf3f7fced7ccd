"""Every function at 5 to 33 ranks, in every layout of hosts, by every algorithm: by choice and by force."""

from __future__ import annotations

import pytest

from .cases import FORCES, MANY, PLACES, cases_of_many
from .checks import algorithm_names, check
from .matrix import algorithms
from .ranks import Pool

QUICK = {
    (7, "direct", "chosen"),
    (7, "shm", "pieces"),
    (7, "scattered", "hosts"),
}
SLOW = {(7, *place) for place in PLACES} | {(17, "scattered", force) for force in ("chosen", "hosts", "flat")}


def _mark(group: tuple[int, str, str]) -> pytest.MarkDecorator | tuple[()]:
    return () if group in QUICK else pytest.mark.slow if group in SLOW else pytest.mark.full


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("nranks", "layout", "force"),
    [pytest.param(n, *place, marks=_mark((n, *place))) for n in MANY for place in PLACES],
)
def test_every_function(pool: Pool, nranks: int, layout: str, force: str) -> None:
    check(pool, nranks, layout, cases_of_many(nranks), timeout=240, force=force)


def test_the_quick_groups_use_all_algorithms(pool: Pool) -> None:
    used = set()
    for nranks, layout, force in sorted(QUICK):
        used |= set().union(*pool.get(nranks, layout, **FORCES[force]).call(algorithms))
    assert used == set(algorithm_names())
