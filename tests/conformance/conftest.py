"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Groups of ranks that the tests share."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as full unless the command line asks for it."""
    if "full" in (config.option.markexpr or ""):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]
