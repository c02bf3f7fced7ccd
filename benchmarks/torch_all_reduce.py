"""Measure torch.distributed's pynccl backend against gloo, in one run, repetition by repetition.

all_reduce from 8 B to 64 MiB, and a DistributedDataParallel step of a small model. README.md beside this file
says how it is measured.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from _group import Group, PeerError
from _machine import Meter, describe
from _peers import DDP_BYTES, DDP_STEP
from _report import MIB, Row, Target, number, size_text, write
from collectives import measure, require, terminate

PEERS = ("torch-pynccl", "gloo")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="torch.distributed on pynccl and on Gloo.")
    add = parser.add_argument
    add("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    add("--max-bytes", type=int, default=64 * MIB, help="largest size (default: %(default)s)")
    add("--reps", type=int, default=5, help="repetitions, whose median counts (default: %(default)s)")
    add("--budget", type=float, default=0.2, help="seconds of one measurement (default: %(default)s)")
    add("--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the .md and .json")
    return parser.parse_args()


def sweep(options: argparse.Namespace, ranks: int, groups: dict[str, Group]) -> list[Row]:
    """Measure every size and the step with these processes, telling each row as it comes."""
    sizes = [1 << power for power in range(3, 27) if 1 << power <= options.max_bytes]
    rows = []
    for op, nbytes in [*(("all_reduce", size) for size in sizes), (DDP_STEP, DDP_BYTES)]:
        row = measure(groups, op, nbytes, options.reps, options.budget)
        told = "  ".join(f"{peer} {number(row.median(peer) * 1e6)}" for peer in PEERS)
        ratio = number(row.ratio(*PEERS))
        print(f"{op}, {ranks} ranks, {size_text(nbytes):>8}, µs:  {told}  ratio {ratio}", file=sys.stderr)
        rows.append(row)
    return rows


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Start the processes, measure, and return the rows with all that there is to say about the run."""
    about = {"Machine": describe()}
    meter, used = Meter(), 0.0
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for ranks in map(int, options.ranks.split(",")):
        with ExitStack() as stack:
            groups = {peer: stack.enter_context(Group(peer, ranks, options.max_bytes)) for peer in PEERS}
            rows += sweep(options, ranks, groups)
            for group in groups.values():
                versions |= group.versions
                used += group.cpu_seconds()
    about["Machine"]["during the run"] = meter.text(used)
    about["Versions"] = versions
    about["Method"] = {"repetitions": str(options.reps), "seconds of one measurement": str(options.budget)}
    return rows, about


def targets(rows: list[Row]) -> list[Target]:
    """Compare with the project's bounds; whatever reaches these bandwidths has the lower latency, too."""
    found = []
    for row in rows:
        ratio = row.ratio(*PEERS)
        assert ratio is not None
        if row.op == DDP_STEP:
            found.append(Target("DDP step, times gloo's", row.ranks, row.nbytes, 1, 1 / ratio, at_most=True))
        else:
            needed = 5 if row.nbytes <= MIB else 2.5
            found.append(Target("all_reduce bandwidth over gloo's", row.ranks, row.nbytes, needed, ratio))
    return sorted(found, key=lambda target: target.name)


def main() -> None:
    """Run the benchmark."""
    signal.signal(signal.SIGTERM, terminate)
    options = arguments()
    require(PEERS)
    try:
        rows, about = run(options)
    except PeerError as error:
        sys.exit(str(error))
    title = "torch.distributed: all_reduce and a DDP step, on pynccl and on gloo"
    write(options.out / "torch_all_reduce", title, rows, PEERS, about, targets(rows))


if __name__ == "__main__":
    main()
