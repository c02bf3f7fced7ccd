"""The Markdown tables of the benchmarks, of the site and of the tests' summaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "right") -> str:
    """Lay out a Markdown table that is also read as it is; `align` is "right" or "left", for every column."""
    columns = (align,) * len(header)
    return tabulate(rows, header, tablefmt="pipe", disable_numparse=True, colalign=columns)
