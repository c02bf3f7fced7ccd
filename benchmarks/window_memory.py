"""Measure collectives on window memory against plain memory and Open MPI, all in one run.

README.md beside this file says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _group import PeerError
from _report import Row, Target, write
from collectives import parse_size, run

DIRECT, MAPPED = "pynccl", "pynccl-staged-window"
PEERS = (DIRECT, "pynccl-staged", MAPPED, "pynccl-window", "openmpi")
OPS = ("all_reduce", "all_gather")
NEEDED = 0.95


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Collectives on window memory, on plain memory, and Open MPI's."
    )
    add = parser.add_argument
    add("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    add("--sizes", default="1M,4M,16M,64M", help="of the larger buffer (default: %(default)s)")
    add("--reps", type=int, default=5, help="repetitions, whose median counts (default: %(default)s)")
    add("--budget", type=float, default=0.3, help="seconds of one measurement (default: %(default)s)")
    add("--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the .md and .json")
    options = parser.parse_args()
    try:
        options.ranks = [int(text) for text in options.ranks.split(",")]
        sizes = [parse_size(text) for text in options.sizes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.peers, options.ops, options.sizes = PEERS, OPS, dict.fromkeys(OPS, sizes)
    return options


def targets(rows: list[Row]) -> list[Target]:
    """Compare window memory without direct reads with the direct path."""
    name = "{} on windows over direct reads".format
    return [Target(name(r.op), r.ranks, r.nbytes, NEEDED, r.ratio(MAPPED, DIRECT)) for r in rows]


def main() -> None:
    """Run the benchmark."""
    options = arguments()
    try:
        rows, about = run(options)
    except PeerError as error:
        sys.exit(str(error))
    title = "Window memory: bus bandwidth and time per call"
    write(options.out / "window_memory", title, rows, PEERS, about, targets(rows), DIRECT)


if __name__ == "__main__":
    main()
