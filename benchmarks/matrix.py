"""Measure collectives in every setting: direct reads, staged, TCP, hosts with links; 2 to 32 ranks.

Run `python benchmarks/matrix.py --help`; README.md beside this file says what is measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _plots
from _group import Group, PeerError
from _hosts import Hosts, joined
from _machine import Meter, describe
from _peers import BY_PARTS
from _reasons import REASONS, UNKNOWN, Miss, reason_of
from _report import MIB, Row, Target, number, size_text, table
from collectives import measure, names, parse_size, require, terminate

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = ("8", "64K", "1M", "16M", "64M")
RATE = "1gbit"
# Where ranks exchange parts, a size below SMALL is that of a part.
SMALL = 1024


@dataclass(frozen=True)
class Setting:
    """Where the ranks are, and which peers run there: pynccl, Open MPI, Gloo."""

    about: str
    peers: tuple[str, str, str]
    ranks: tuple[int, ...] = (2, 4, 8, 16, 32)
    hosts: int = 1
    one_host: bool = False


SETTINGS = {
    "direct": Setting("One host, direct reads", ("pynccl", "openmpi", "gloo"), one_host=True),
    "staged": Setting(
        "One host, no direct reads", ("pynccl-staged", "openmpi-staged", "gloo"), one_host=True
    ),
    "tcp": Setting("Every rank a host of its own, TCP over loopback", ("pynccl-tcp", "openmpi-tcp", "gloo")),
    "hosts-2": Setting("2 hosts, links of 1 Gbit/s", ("pynccl", "openmpi", "gloo"), (2, 4, 8), hosts=2),
    "hosts-4": Setting("4 hosts, links of 1 Gbit/s", ("pynccl", "openmpi", "gloo"), (4, 8, 16), hosts=4),
}


@dataclass
class Measured:
    """The rows of one setting, and what there is to say about its run."""

    about: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Collectives in every setting: pynccl, Open MPI, Gloo.")
    add = parser.add_argument
    add("--settings", default=",".join(SETTINGS), help="comma-separated (default: %(default)s)")
    add("--ops", default=",".join(OPS), help="comma-separated (default: %(default)s)")
    add("--ranks", help="numbers of processes, of those that each setting has (default: all)")
    add("--sizes", default=",".join(SIZES), help="largest buffer in bytes (default: %(default)s)")
    add(
        "--most",
        default="256M",
        help="leave out sizes that, times the ranks, are more (default: %(default)s)",
    )
    add("--reps", type=int, default=5, help="repetitions, whose median counts (default: %(default)s)")
    add("--budget", type=float, default=0.05, help="seconds of one measurement (default: %(default)s)")
    add("--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the .md and .json")
    options = parser.parse_args()
    try:
        options.settings = names(options.settings, list(SETTINGS))
        options.ops = names(options.ops, OPS)
        options.ranks = options.ranks and [int(text) for text in options.ranks.split(",")]
        options.sizes = [parse_size(text) for text in options.sizes.split(",")]
        options.most = parse_size(options.most)
        for name in options.settings:
            require_rows(name, options)
    except ValueError as error:
        parser.error(str(error))
    return options


def ranks_of(setting: Setting, options: argparse.Namespace) -> list[int]:
    """Return the numbers of ranks to measure."""
    return [ranks for ranks in setting.ranks if not options.ranks or ranks in options.ranks]


def require_rows(name: str, options: argparse.Namespace) -> None:
    """Refuse options that leave nothing of a setting to measure."""
    setting = SETTINGS[name]
    chosen = ranks_of(setting, options)
    if not chosen:
        known = ", ".join(map(str, setting.ranks))
        raise ValueError(f"--ranks leaves nothing of {name}, which has {known}")
    for ranks in chosen:
        if not all(any(sizes_for(op, ranks, options)) for op in options.ops):
            raise ValueError(f"--most leaves no size for {ranks} ranks")


# --- measurement ---


def sizes_for(op: str, ranks: int, options: argparse.Namespace) -> Iterator[int]:
    """Yield the sizes of an operation's larger buffer."""
    for nbytes in options.sizes:
        size = nbytes * ranks if op in BY_PARTS and nbytes < SMALL else nbytes
        if size * ranks <= options.most:
            yield size


def measure_with(hosts: Hosts | None, setting: Setting, ranks: int, options: argparse.Namespace) -> Measured:
    """Measure all operations and sizes with one number of ranks."""
    done, meter = Measured(describe()), Meter()
    largest = max(size for op in options.ops for size in sizes_for(op, ranks, options))
    with ExitStack() as stack:
        groups = {p: stack.enter_context(Group(p, ranks, largest, hosts)) for p in setting.peers}
        for op in options.ops:
            for nbytes in sizes_for(op, ranks, options):
                done.rows.append(measure(groups, op, nbytes, options.reps, options.budget))
                print(done.rows[-1].line(), file=sys.stderr, flush=True)
        for group in groups.values():
            done.about |= group.versions
        done.about["method"] = f"{options.reps} repetitions of {options.budget:g} s or one call"
        done.about["during the run"] = meter.text(sum(group.cpu_seconds() for group in groups.values()))
    return done


def run(setting: Setting, options: argparse.Namespace) -> Measured:
    """Measure one setting with all its numbers of ranks."""
    whole = Measured()
    for ranks in ranks_of(setting, options):
        with joined(setting.hosts) if setting.hosts > 1 else nullcontext() as hosts:
            if hosts:
                hosts.reach()
                hosts.limit(RATE)
            done = measure_with(hosts, setting, ranks, options)
        meter = done.about.pop("during the run")
        whole.about |= {**done.about, f"during the run of {ranks} ranks": meter}
        whole.rows += done.rows
    return whole


# --- report ---


def asked(row: Row) -> int:
    """Return the size that a row was asked for."""
    part = row.nbytes // row.ranks
    return part if row.op in BY_PARTS and part < SMALL else row.nbytes


def targets(setting: Setting, rows: Iterable[Row]) -> Iterator[Target]:
    """Compare with the bounds set for every setting."""
    ours, openmpi, gloo = setting.peers
    for row in rows:
        if asked(row) <= 8:
            bound = 3.0 if setting.one_host and row.ranks == 2 else 1.5
            reached = row.median(ours) / row.median(openmpi)
            name = f"{row.op}: time over Open MPI's"
            yield Target(name, row.ranks, row.nbytes, bound, reached, at_most=True)
        elif asked(row) >= 64 << 10:
            bound = 1.3 if setting.one_host and row.nbytes >= MIB else 1.0
            reached = min(row.median(openmpi), row.median(gloo)) / row.median(ours)
            name = f"{row.op}: bandwidth over the better peer's"
            yield Target(name, row.ranks, row.nbytes, bound, reached)


def misses(name: str, judged: Iterable[Target], rows: Iterable[Row]) -> Iterator[tuple[Target, str]]:
    """Yield the targets that are missed, with the words of their reasons."""
    ours, openmpi, gloo = SETTINGS[name].peers
    measured = {(row.op, row.ranks, row.nbytes): row for row in rows}
    for target in judged:
        if target.verdict != "met":
            row = measured[target.name.partition(":")[0], target.ranks, target.nbytes or 0]
            peers = [openmpi] if target.at_most else [openmpi, gloo]
            yield target, reason_of(Miss(name, target, row, ours, min(peers, key=row.median)))


def reasons(words: Sequence[str]) -> str:
    """Say what the words stand for, and how often each is the reason."""
    texts = [(reason.word, reason.text) for reason in REASONS]
    texts.append((UNKNOWN, "Nothing that was tried explains it."))
    return "\n".join(f"- **{word}** ({words.count(word)}): {text}" for word, text in texts if word in words)


def times(setting: Setting, rows: list[Row], op: str) -> str:
    """Tabulate the times of an operation: a line for each number of ranks, a column for each size."""
    some = {(row.ranks, asked(row)): row for row in rows if row.op == op}
    every, sizes = (sorted(set(values)) for values in zip(*some, strict=True))

    def cell(ranks: int, size: int) -> str:
        row = some.get((ranks, size))
        return " / ".join(number(row.median(peer) * 1e6) for peer in setting.peers) if row else "–"

    header = ["ranks", *map(size_text, sizes)]
    return table(header, ([str(ranks), *(cell(ranks, size) for size in sizes)] for ranks in every))


def document(settings: dict[str, Measured]) -> str:
    """Write the report."""
    judged = {name: list(targets(SETTINGS[name], done.rows)) for name, done in settings.items()}
    summary = [
        [SETTINGS[name].about, f"{sum(t.verdict == 'met' for t in found)} of {len(found)}"]
        for name, found in judged.items()
    ]
    parts = ["# Collectives in every setting", "Targets met:", table(["setting", "met"], summary)]
    missed = {name: list(misses(name, judged[name], done.rows)) for name, done in settings.items()}
    if words := [word for found in missed.values() for _, word in found]:
        parts += ["Why the others are missed:", reasons(words)]
    parts.append("Times are µs of a call, medians: pynccl / Open MPI / Gloo. README.md has the method.")
    for name, done in settings.items():
        setting = SETTINGS[name]
        where = setting.about[0].lower() + setting.about[1:]
        parts += [f"## {setting.about}", "\n".join(f"- {key}: {value}" for key, value in done.about.items())]
        for op in dict.fromkeys(row.op for row in done.rows):
            parts += [f"### {op}: {where}", times(setting, done.rows, op)]
        if missed[name]:
            header = ["missed", "ranks", "size", "needed", "reached", "reason"]
            lines = [[*target.line()[:-1], word] for target, word in missed[name]]
            parts += [f"Targets missed, {len(lines)}:", table(header, lines)]
    return "\n\n".join(parts) + "\n"


def recorded(settings: dict[str, Measured]) -> dict[str, Any]:
    """Return everything measured, for JSON."""
    return {name: {"about": m.about, "rows": [r.record() for r in m.rows]} for name, m in settings.items()}


def restored(path: Path) -> dict[str, Measured]:
    """Read the settings of earlier runs."""
    if not path.exists():
        return {}

    def row(found: dict[str, Any]) -> Row:
        return Row(*(found[name] for name in ("op", "ranks", "nbytes", "iterations", "seconds")))

    data = json.loads(path.read_text())
    return {name: Measured(found["about"], list(map(row, found["rows"]))) for name, found in data.items()}


def write(path: Path, settings: dict[str, Measured]) -> None:
    """Write the report, as Markdown and JSON, and a plot of each setting."""
    ordered = {name: settings[name] for name in SETTINGS if name in settings}
    record = recorded(ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(document(ordered))
    figures = _plots.figures()
    for name, figure in figures.matrix(record).items():
        path.with_name(f"{path.name}-{name}.svg").write_text(figures.svg(figure))


def main() -> None:
    """Run the benchmark, and write after each setting; settings that are not measured keep their results."""
    signal.signal(signal.SIGTERM, terminate)
    options = arguments()
    require(sorted({peer for name in options.settings for peer in SETTINGS[name].peers}))
    path = options.out / "matrix"
    settings = restored(path.with_suffix(".json"))
    try:
        for name in options.settings:
            print(f"{name}: {SETTINGS[name].about}", file=sys.stderr)
            settings[name] = run(SETTINGS[name], options)
            write(path, settings)
    except PeerError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted; the processes are ended", file=sys.stderr)
        sys.exit(130)
    print(document(settings))


if __name__ == "__main__":
    main()
