"""Tests whose body runs on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pynccl import testing

Body = Callable[[int, int], None]


def on_ranks(*counts: int, **options: Any) -> Callable[[Body], Callable[..., None]]:
    """Make a test of a function of rank and number of ranks, once for each number given.

    The options are those of `pynccl.testing.run`.
    """

    def decorate(body: Body) -> Callable[..., None]:
        def test(nranks: int) -> None:
            testing.run(nranks, body, **{"backend": "cpu"} | options)

        # The ranks find the body by this name in the test's module.
        body.__qualname__, test.body = f"{body.__name__}.body", body  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.pytestmark = getattr(body, "pytestmark", [])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("nranks", counts)(test)

    return decorate
