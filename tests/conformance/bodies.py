"""Tests whose body runs on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from parameters import slow_except
from ranks import Body, stands_for

from .ranks import Pool

# The transports of which every test is in `make test`.
QUICK = ("direct", "tcp")


def transports(*names: str) -> list[Any]:
    """Return parameters that stand for transports, most of whose code is that of the quick ones."""
    return slow_except(QUICK, names)


def on_pool(nranks: int, transports: Sequence[Any] = (), **env: str) -> Callable[[Body], Callable[..., None]]:
    """Make a test of a function of a rank, over each transport; the test has its further parameters."""

    def decorate(body: Body) -> Callable[..., None]:
        def over_one(pool: Pool, **further: Any) -> None:
            pool.get(nranks, **env).call(body, *further.values())

        def over_each(pool: Pool, transport: str, **further: Any) -> None:
            pool.get(nranks, transport, **env).call(body, *further.values())

        if not transports:
            return stands_for(body, over_one, 1)
        return pytest.mark.parametrize("transport", transports)(stands_for(body, over_each, 1))

    return decorate
