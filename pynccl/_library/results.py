"""The names of NCCL's results."""

from __future__ import annotations

from pynccl._library.generated.tables import RESULTS


def result_name(result: int) -> str:
    """Return the C name of a result code."""
    return RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
