"""What each rank of alltoallv sends to each: nccl-tests' pattern, or a file's (src/alltoallv.cu)."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SPREAD = "NCCL_TESTS_ALLTOALLV_SPREAD"
MATRIX = "NCCL_TESTS_ALLTOALLV_MATRIX_FILE"
SCALE = "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE"
SUMMARY = "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY"

_MOST_TEXT, _MOST_BYTES = 1 << 26, 1 << 50


def has_matrix() -> bool:
    """Tell whether a file gives the traffic, whatever the size."""
    return MATRIX in os.environ


def require_sizes(nranks: int, least: int, most: int) -> None:
    """Refuse wrong variables, and sizes (-b, -e) that do not fit the traffic of the file, if there is one."""
    has_summary()
    if not has_matrix():
        _variable(SPREAD)
        return
    if least != most:
        raise ValueError(
            f"-b {least} -e {most} with {MATRIX}; expected one size, since the file has the bytes"
        )
    sent = traffic(nranks, 0)
    needed = int(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))
    if most < needed:
        raise ValueError(
            f"-e {most} with {MATRIX}; expected {needed} bytes or more, which a rank sends or receives"
        )


def traffic(nranks: int, total: int) -> Array:
    """Return the bytes from each rank (row) to each (column); without a file each sends about `total`."""
    path = os.environ.get(MATRIX)
    if path is not None:
        return _from_file(path, _variable(SCALE), nranks)[:nranks, :nranks]
    spread = _spread()
    if nranks == 1:
        return np.array([[total]]) & ~15
    distance = (np.arange(nranks) - np.arange(nranks)[:, None]) % nranks
    # In nccl-tests' order: another one may round to 16 bytes less.
    weighted = distance * float(total) / (nranks * (nranks - 1) // 2)
    return ((1 - spread) * (total / nranks) + spread * weighted).astype(np.int64) & ~15


@cache
def _from_file(path: str, scale: float, nranks: int) -> Array:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it is no regular file")
        with open(path) as file:
            text = file.read(_MOST_TEXT + 1)
        if len(text) > _MOST_TEXT:
            raise ValueError(f"it has more than {_MOST_TEXT} characters")
        rows = [[float(word) for word in line.split()] for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{MATRIX} is {path!r}: {error}; expected a file of numbers, a row a line") from None
    rows = [row for row in rows if row]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{MATRIX} is {path!r}; expected a square matrix, as many numbers a line as lines")
    if len(rows) < nranks:
        raise ValueError(f"{MATRIX} is {path!r}, of {len(rows)} ranks; expected {nranks} or more")
    for value in (value for row in rows for value in row):
        if not 0 <= value * scale < _MOST_BYTES:
            raise ValueError(f"{MATRIX} is {path!r}, with {value:g}; expected bytes, 0 to 2**50")
    # In nccl-tests, too, the products are of this type.
    return (np.array(rows, np.longdouble) * scale).astype(np.int64) & ~15


def has_summary() -> bool:
    """Tell whether each measurement prints the traffic and the bandwidth of each rank."""
    text = os.environ.get(SUMMARY, "0")
    try:
        return int(text) != 0
    except ValueError:
        raise ValueError(f"{SUMMARY} is {text!r}; expected 1, or 0") from None


def summary(nranks: int, total: int, seconds: float) -> str:
    """Return the lines of that summary, as nccl-tests prints them (AlltoAllvPrintRankBandwidths)."""
    path = os.environ.get(MATRIX)
    if path is None:
        how = f"mode=generated nranks={nranks} total_bytes={total} spread={_spread():.3f}"
    else:
        scale = _variable(SCALE)
        dim = len(_from_file(path, scale, nranks))
        how = f"mode=matrix nranks={nranks} matrix_dim={dim} scale={scale:.3f}"
    lines = [f"# {SUMMARY}: {how} time_usec={seconds * 1e6:.2f}"]
    moved = traffic(nranks, total)
    for rank, (sent, received) in enumerate(zip(moved.sum(axis=1), moved.sum(axis=0), strict=True)):
        bandwidth = max(sent, received) / 1e9 / seconds if seconds else 0.0
        lines.append(
            f"#   rank={rank} send_bytes={sent} recv_bytes={received} alg_bw={bandwidth:.2f} "
            f"bus_bw={bandwidth * ((nranks - 1) / nranks):.2f}"
        )
    return "".join(f"{line}\n" for line in lines)


def _spread() -> float:
    return min(1.0, _variable(SPREAD))


def _variable(name: str) -> float:
    text = os.environ.get(name, "1")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {text!r}; expected a number, 0 or more")
    return value
