"""--percentiles: p50 and p99 of the iterations, as nccl-tests defines them for -I."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_ROW = "# {:>12}  {:>8}  {:>6}  {:>6}  {:>12}  {:>10}  {:>10}"


def median(ordered: Sequence[float]) -> float:
    """Return the middle of ordered values, the upper one of two."""
    return ordered[len(ordered) // 2]


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of ordered values."""
    return ordered[min(len(ordered) - 1, (len(ordered) * percent + 99) // 100 - 1)]


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the percentiles, over all cycles."""
    yield "# Percentiles of the iterations, each waited for, of the slowest process"
    yield _ROW.format("size", "type", "redop", "root", "", "p50 (us)", "p99 (us)")
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in results:
        for half in ("out_of_place", "in_place"):
            place = (row["size"], row["type"], row["redop"], str(row["root"]).strip(), half)
            report = row[f"{half}_per_iter"]
            found.setdefault(place, []).extend(report["times_us"][report["skipped_iterations"] :])
    for place, times in found.items():
        ordered = sorted(times)
        yield _ROW.format(*place, f"{median(ordered):.2f}", f"{percentile(ordered, 99):.2f}")
