"""Where the ranks of a test meet without the communicator under test: who has left may end at once."""

from __future__ import annotations

import os

from pynccl.bootstrap import Store


def store() -> Store:
    """Return the store that every rank of `pynccl.testing.run` has."""
    return Store(os.environ["PYNCCL_STORE"], os.environ["PYNCCL_SECRET"], timeout=40)


def together(nranks: int, name: str = "together") -> None:
    """Wait for the other ranks, whose processes may have started seconds apart."""
    with store() as meeting:
        meeting.barrier(name, nranks)


def tell(what: str) -> None:
    """Say something to the other ranks."""
    with store() as meeting:
        meeting.set(what, b"1")


def hear(what: str) -> None:
    """Wait until another rank has said something."""
    with store() as meeting:
        meeting.wait(what)
