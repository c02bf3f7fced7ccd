"""Parameters of tests with marks."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters that stand for values, of which all but the quick ones make slow tests."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
