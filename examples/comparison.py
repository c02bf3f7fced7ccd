"""What the examples of parallel training share: seeded numbers, and the comparison with one rank alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pynccl

LIMIT = 1e-5
Array = Any


def normal(seed: int, *shape: int) -> Array:
    """Return numbers of a normal distribution, the same on every rank, times 1/sqrt(the first length)."""
    import numpy

    numbers = numpy.random.default_rng(seed).standard_normal(shape) * shape[0] ** -0.5
    return pynccl.array_module().asarray(numbers)


def compare(comm: pynccl.Communicator, ours: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the largest difference on any rank, relative to the largest value of its array.

    Ends the program where it is more than LIMIT, or no number.
    """
    worst = 0.0
    for name, right in expected.items():
        difference = float(abs(ours[name] - right).max() / abs(right).max())
        if not difference <= LIMIT:
            raise SystemExit(f"rank {comm.rank}: {name} differs from one rank's by {difference:.1e}")
        worst = max(worst, difference)
    every = comm.all_gather(pynccl.array_module().array([worst]))
    return float(every.max())


def divides(comm: pynccl.Communicator, name: str, value: int, parts: int) -> None:
    """End the program where `value` cannot be split evenly."""
    if value % parts:
        # All ranks leave here. Aborted, the communicator would fail in those that have not yet come.
        comm.destroy()
        raise SystemExit(f"rank {comm.rank}: {name} is {value}; expected a multiple of {parts}")


def positive(text: str) -> int:
    """Return the number of an option that counts something."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)
