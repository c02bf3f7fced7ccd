"""Hosts on one machine, as tests use them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from _hosts import Hosts, joined

__all__ = ["Hosts", "hosts", "joined", "needs_root"]

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the ip command"
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with joined(2) as made:
        yield made
