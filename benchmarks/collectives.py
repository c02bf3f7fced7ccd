"""Measure pynccl's CPU library against Open MPI and Gloo, all in one run, repetition by repetition.

Run `python benchmarks/collectives.py --help`; README.md beside this file says what is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from _group import Group, PeerError, mpirun
from _machine import Meter, describe, openmpi_transport
from _peers import BY_PARTS, OPS, PEERS
from _report import Row, size_text, targets, write

FULL = ("8", "64", "1K", "8K", "64K", "256K", "1M", "4M", "16M", "64M")
SHORT = ("1K", "64K", "1M", "16M", "64M")
DEFAULT_PEERS = ("pynccl", "pynccl-staged", "openmpi", "gloo")
QUICK = {"all_reduce": ("8", "64K", "1M", "16M")}
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Read 8, 64K, 1M, 1MiB."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = UNITS.get(digits[-1:], 1)
    nbytes = int(digits if unit == 1 else digits[:-1]) * unit
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"{text}: a size is a positive multiple of 4 bytes (float32)")
    return nbytes


def names(text: str, known: Sequence[str]) -> list[str]:
    """Read a comma-separated choice."""
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown: {name!r} (known: {', '.join(known)})")
    return list(dict.fromkeys(chosen))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Collectives of pynccl's CPU library, Open MPI and Gloo.")
    add = parser.add_argument
    add("--peers", default=",".join(DEFAULT_PEERS), help="comma-separated (default: %(default)s)")
    add("--ops", default=",".join(OPS), help="comma-separated (default: %(default)s)")
    add("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    add("--sizes", help="for every operation, such as 8,64K,1M (default: 8 to 64M, fewer beside all_reduce)")
    add("--reps", type=int, help="repetitions, whose median counts (default: 5; 3 with --quick)")
    add("--budget", type=float, help="seconds of one measurement (default: 0.3; 0.1 with --quick)")
    add("--quick", action="store_true", help="few sizes and short; writes to files of its own")
    add("--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the .md and .json")
    options = parser.parse_args()
    options.reps = options.reps or (3 if options.quick else 5)
    options.budget = options.budget or (0.1 if options.quick else 0.3)
    try:
        options.peers = names(options.peers, list(PEERS))
        options.ops = names(options.ops, OPS)
        options.ranks = [int(text) for text in options.ranks.split(",")]
        options.sizes = {op: sizes_for(op, options) for op in options.ops}
    except ValueError as error:
        parser.error(str(error))
    if min(options.ranks) < 2:
        parser.error("--ranks: a collective needs 2 processes or more")
    return options


def sizes_for(op: str, options: argparse.Namespace) -> list[int]:
    """Choose an operation's sizes."""
    if options.sizes:
        return [parse_size(text) for text in options.sizes.split(",")]
    if options.quick:
        return [parse_size(text) for text in QUICK.get(op, ("1M",))]
    return [parse_size(text) for text in (FULL if op == "all_reduce" else SHORT)]


def require(peers: Sequence[str]) -> None:
    """Refuse to run with a peer missing, rather than print a table without it."""
    missing = [f"{peer} needs {PEERS[peer].module}" for peer in peers if not find(PEERS[peer].module)]
    if mpirun() is None:
        missing += [f"{peer} needs mpirun" for peer in peers if PEERS[peer].mpirun is not None]
    if missing:
        advice = "Install the bench extra, or name the others with --peers."
        sys.exit(f"not installed: {'; '.join(missing)}. {advice}")


def find(module: str) -> bool:
    """Say whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def fitted(seconds: float, budget: float) -> int:
    """Return how many iterations of so many seconds fill the budget."""
    return max(1 if seconds > budget else 3, min(50_000, int(budget / max(seconds, 1e-7))))


def calibrate(group: Group, op: str, nbytes: int, budget: float) -> int:
    """Prepare a measurement and return its number of iterations."""
    group.ask("prepare", op, nbytes)
    rough = group.measure(1, 2)
    return fitted(group.measure(0, fitted(rough, budget / 10)), budget)


def measure(groups: dict[str, Group], op: str, nbytes: int, reps: int, budget: float) -> Row:
    """Measure every peer in every repetition; who goes first rotates."""
    row = Row(op, next(iter(groups.values())).nranks, nbytes)
    for peer, group in groups.items():
        row.iterations[peer] = calibrate(group, op, nbytes, budget)
        row.seconds[peer] = []
    order = list(groups)
    for rep in range(reps):
        turn = rep % len(order)
        for peer in order[turn:] + order[:turn]:
            iterations = row.iterations[peer]
            row.seconds[peer].append(groups[peer].measure(max(1, iterations // 10), iterations))
    return row


def sweep(groups: dict[str, Group], options: argparse.Namespace, ranks: int) -> Iterator[Row]:
    """Measure all operations and sizes with these processes, telling each row as it comes."""
    for op in options.ops:
        for nbytes in options.sizes[op]:
            if op in BY_PARTS and nbytes % (4 * ranks):
                told = f"{op} of {size_text(nbytes)} does not divide by {ranks} ranks: left out"
                print(told, file=sys.stderr)
                continue
            row = measure(groups, op, nbytes, options.reps, options.budget)
            print(row.line(), file=sys.stderr, flush=True)
            yield row


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Start the processes, measure, and return the rows with all that there is to say about the run."""
    largest = max(max(sizes) for sizes in options.sizes.values())
    about = {"Machine": describe()}
    if "openmpi" in options.peers:
        about["Machine"]["Open MPI's transport"] = openmpi_transport()
    meter, used = Meter(), 0.0
    rows: list[Row] = []
    versions: dict[str, str] = {}
    idle: dict[str, str] = {}
    for ranks in options.ranks:
        with ExitStack() as stack:
            groups = {peer: stack.enter_context(Group(peer, ranks, largest)) for peer in options.peers}
            rows += sweep(groups, options, ranks)
            for peer, group in groups.items():
                versions |= group.versions
                used += group.cpu_seconds()
                idle[f"{peer}, {ranks} ranks"] = f"{group.idle_load:.3f}"
    about["Machine"]["during the run"] = meter.text(used)
    about["Versions"] = versions
    about["Cores that a peer's processes used while the others were measured"] = idle
    about["Method"] = {"repetitions": str(options.reps), "seconds of one measurement": str(options.budget)}
    return rows, about


def terminate(signum: int, frame: FrameType | None) -> None:
    """Leave by way of the clean-up on SIGTERM."""
    sys.exit(128 + signum)


def main() -> None:
    """Run the benchmark."""
    signal.signal(signal.SIGTERM, terminate)
    options = arguments()
    require(options.peers)
    try:
        rows, about = run(options)
        name = "collectives-quick" if options.quick else "collectives"
        verdicts = targets(rows) if "pynccl" in options.peers else []
        title = "Collectives: bus bandwidth and time per call"
        write(options.out / name, title, rows, options.peers, about, verdicts)
    except PeerError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted; the processes are ended", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
