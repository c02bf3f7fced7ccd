"""Which NCCL version first reads a variable; api/nccl_api.h has the versions of functions and structs."""

from __future__ import annotations

from collections.abc import Sequence

# Variables that NCCL reads, by the version from which on it does.
VARIABLES = {"NCCL_MULTI_RANK_GPU_ENABLE": (2, 30)}


def reads(version: Sequence[int], variable: str) -> bool:
    """Tell whether an NCCL of this version reads the variable."""
    return tuple(version) >= VARIABLES[variable]


def needed(variable: str) -> str:
    """Return the version that reads the variable, as in an error's text."""
    return ".".join(map(str, VARIABLES[variable]))
