"""Tests whose body runs on ranks, or on a communicator of one rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl import Communicator, testing

Body = Callable[..., None]


def on_ranks(*counts: int, **options: Any) -> Callable[[Body], Callable[..., None]]:
    """Make a test of a function of rank and number of ranks, once for each number given.

    The function's further parameters are the test's, and the options those of `pynccl.testing.run`.
    """

    def decorate(body: Body) -> Callable[..., None]:
        def test(nranks: int, **further: Any) -> None:
            testing.run(nranks, body, *further.values(), **{"backend": "cpu"} | options)

        return pytest.mark.parametrize("nranks", counts)(stands_for(body, test, 2))

    return decorate


def reach_by(transport: str, rank: int) -> None:
    """Choose how the ranks reach each other, before they meet: the kernel, shared memory, or TCP."""
    if transport == "shm":
        os.environ["PYNCCL_CPU_DIRECT"] = "0"
    if transport in ("tcp", "mixed"):
        os.environ["NCCL_HOSTID"] = f"host{rank if transport == 'tcp' else rank // 2}"


def stands_for(body: Body, test: Callable[..., None], given: int) -> Callable[..., None]:
    """Give a test the name of its body and, for its `**`, the parameters from number `given` on."""
    own, further = (list(inspect.signature(each).parameters.values()) for each in (test, body))
    signature = inspect.Signature([*own[:-1], *further[given:]])
    # The ranks find the body by this name in the test's module.
    body.__qualname__ = f"{body.__name__}.body"
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    attributes = {"body": body, "__signature__": signature, "pytestmark": getattr(body, "pytestmark", [])}
    test.__dict__.update(attributes)
    return test


def single(**options: Any) -> Communicator:
    """Return a communicator of one rank."""
    return Communicator(1, pynccl.get_unique_id(), 0, **options)


def total(comm: Communicator) -> float:
    """Return how many ranks there are, as the sum of what each contributes, all different."""
    parts = np.full(1000, 1 + comm.rank - (comm.size - 1) / 2)
    return float(comm.all_reduce(parts)[0])
