"""A pytest plugin: a store and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pynccl.bootstrap import Store, StoreServer

SECRET = "a secret of the job"


@pytest.fixture
def secret() -> str:
    """Return the secret of `server`."""
    return SECRET


@pytest.fixture
def server(secret: str) -> Iterator[StoreServer]:
    with StoreServer(secret=secret) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[Store]:
    with Store(server.address, server.secret, timeout=5) as store:
        yield store
