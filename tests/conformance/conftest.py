"""Fixtures of the conformance tests, and which of them run where.

`-m gpu` runs the matrix and the random programs over NVIDIA's library; the rest is about the CPU library.
PYNCCL_TEST_SUMMARY names a file for the summary of the complete matrix.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .ranks import Pool

HERE = Path(__file__).parent
ON_A_GPU = {"test_matrix", "test_random_programs"}


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Groups of ranks that the tests share."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def summary() -> Iterator[list[tuple[int, str, int, float]]]:
    """Rows of the complete matrix: ranks, transport, cases, seconds."""
    rows: list[tuple[int, str, int, float]] = []
    yield rows
    path = os.environ.get("PYNCCL_TEST_SUMMARY")
    if path and rows:
        Path(path).write_text(as_markdown(rows))


def as_markdown(rows: list[tuple[int, str, int, float]]) -> str:
    """Return the summary as a document."""
    # Imported late: what lays it out is needed for no test.
    from _tables import table

    shown = [(transport, f"{ranks}", f"{cases}", f"{took:.0f}") for ranks, transport, cases, took in rows]
    total, seconds = sum(row[2] for row in rows), sum(row[3] for row in rows)
    backend = os.environ.get("PYNCCL_TEST_BACKEND", "cpu")
    lines = [
        "# The complete matrix",
        "",
        f"{total} cases in {seconds:.0f} s, none failed. Backend {backend}, {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, NumPy {np.__version__}. "
        "Written by `PYNCCL_TEST_SUMMARY=FILE make test-full`.",
        "",
        table(("transport", "ranks", "cases", "seconds"), shown, "left"),
    ]
    return "\n".join(lines) + "\n"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs on a GPU, without what is marked as full unless the command line names that mark."""
    chosen = config.option.markexpr or ""
    if chosen == "gpu":
        os.environ["PYNCCL_TEST_BACKEND"] = "gpu"
    on_gpu = os.environ.get("PYNCCL_TEST_BACKEND") == "gpu"
    left_out = []
    for item in items:
        if HERE not in item.path.parents:
            continue
        fits = item.path.stem in ON_A_GPU
        if on_gpu and fits:
            item.add_marker(pytest.mark.gpu)
        if on_gpu and (not fits or (item.get_closest_marker("full") and "full" not in chosen)):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
