"""From measured times to bus bandwidths, ratios, tables and the targets."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _peers import BY_PARTS
from _tables import table

MIB = 1 << 20
OURS = ("pynccl", "pynccl-staged", "torch-pynccl")
THEIRS = ("openmpi", "gloo")


@dataclass
class Row:
    """One operation at one size: what every peer took for it."""

    op: str
    ranks: int
    nbytes: int
    iterations: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, peer: str) -> float:
        """Return the median time of one call."""
        return statistics.median(self.seconds[peer])

    def bus(self, peer: str) -> float:
        """Return the bus bandwidth in GB/s, by nccl-tests' formulas."""
        n = self.ranks
        whole = self.nbytes / self.median(peer) / 1e9
        if self.op in BY_PARTS:
            return whole * (n - 1) / n
        return whole * 2 * (n - 1) / n if self.op == "all_reduce" else whole

    def ratio(self, ours: str, theirs: str) -> float | None:
        """Return how many times the other's bandwidth ours is, None where one was not measured."""
        if ours not in self.seconds or theirs not in self.seconds:
            return None
        return self.median(theirs) / self.median(ours)

    def ratio_text(self, ours: str, theirs: str) -> str:
        """Write the ratio of the medians, and the least and most ratio within one repetition."""
        pairs = zip(self.seconds[ours], self.seconds[theirs], strict=True)
        each = [their / our for our, their in pairs]
        return f"{number(self.ratio(ours, theirs))} ({number(min(each))}–{number(max(each))})"

    def line(self) -> str:
        """Say on one line what was measured."""
        told = "  ".join(f"{peer} {number(self.median(peer) * 1e6)}" for peer in self.seconds)
        return f"{self.op:>14} {self.ranks:>2} ranks {size_text(self.nbytes):>8}, µs:  {told}"

    def record(self) -> dict[str, Any]:
        """Return everything measured and derived, for JSON."""
        bus = {peer: self.bus(peer) for peer in self.seconds}
        medians = {peer: self.median(peer) for peer in self.seconds}
        ratios = {f"{a}/{b}": self.ratio(a, b) for a in OURS for b in THEIRS if self.ratio(a, b) is not None}
        return {**asdict(self), "median_seconds": medians, "bus_gb_per_s": bus, "ratios": ratios}


@dataclass(frozen=True)
class Target:
    """One bound of the project's speed targets, at one size if it has one, and what was reached."""

    name: str
    ranks: int
    nbytes: int | None
    needed: float
    reached: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """Say whether it is met."""
        if self.reached is None:
            return "not measured"
        met = self.reached <= self.needed if self.at_most else self.reached >= self.needed
        return "met" if met else "NOT MET"

    def line(self) -> list[str]:
        """Return the cells of its line."""
        size = [] if self.nbytes is None else [size_text(self.nbytes)]
        bound = f"{'<=' if self.at_most else '>='} {self.needed:g}"
        return [self.name, str(self.ranks), *size, bound, number(self.reached), self.verdict]


def targets(rows: Iterable[Row]) -> list[Target]:
    """Compare all_reduce by direct reads with the bounds set for 2 and 4 ranks."""
    found: list[Target] = []
    for row in rows:
        if row.op != "all_reduce" or row.ranks not in (2, 4):
            continue
        n, size = row.ranks, row.nbytes
        if size == 8:
            slower = row.median("pynccl") / row.median("openmpi") if row.ratio("pynccl", "openmpi") else None
            found.append(Target("latency, times Open MPI's", n, size, 15, slower, at_most=True))
        if size >= MIB:
            needed = 1.3 if n == 2 else 1.0 if size == MIB else 1.2
            found.append(Target("bandwidth over Open MPI's", n, size, needed, row.ratio("pynccl", "openmpi")))
        needed = 5 if size <= MIB else 2.5
        found.append(Target("bandwidth over Gloo's", n, size, needed, row.ratio("pynccl", "gloo")))
    return sorted(found, key=lambda target: (target.name, target.ranks, target.nbytes or 0))


def size_text(nbytes: int) -> str:
    """Write a size the way people read it."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits and no exponent."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    places = digits - 1
    while abs(value) >= 10 and places:
        value, places = value / 10, places - 1
    return f"{value * 10 ** (digits - 1 - places):.{places}f}"


def bandwidths(rows: Sequence[Row], peers: Sequence[str], base: str | None = None) -> str:
    """Tabulate bus bandwidths and the ratios of ours to the others', or of all peers to one of them."""
    pairs = [(a, b) for a in OURS for b in THEIRS if a in peers and b in peers]
    if base:
        pairs = [(peer, base) for peer in peers if peer != base]
    header = ["size", *(f"{peer} GB/s" for peer in peers), *(f"{a}/{b}" for a, b in pairs)]

    def line(row: Row) -> list[str]:
        bus = [number(row.bus(peer)) for peer in peers]
        return [size_text(row.nbytes), *bus, *(row.ratio_text(*pair) for pair in pairs)]

    return table(header, map(line, rows))


def times(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """Tabulate the times of one call: median, least and most."""

    def cell(row: Row, peer: str) -> str:
        values = [second * 1e6 for second in row.seconds[peer]]
        return f"{number(statistics.median(values))} ({number(min(values))}–{number(max(values))})"

    header = ["size", *(f"{peer} µs" for peer in peers)]
    return table(header, ([size_text(row.nbytes), *(cell(row, peer) for peer in peers)] for row in rows))


def document(
    title: str,
    rows: Sequence[Row],
    peers: Sequence[str],
    about: dict[str, dict[str, str]],
    verdicts: Sequence[Target],
    base: str | None = None,
) -> str:
    """Write the whole report."""
    parts = [f"# {title}"]
    for heading, facts in about.items():
        parts += [f"## {heading}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    if verdicts:
        count = sum(target.verdict == "met" for target in verdicts)
        header = ["target", "ranks", "size", "needed", "reached", "verdict"]
        parts += [f"## Targets: {count} of {len(verdicts)} met", table(header, (t.line() for t in verdicts))]
    parts.append("Ratios are of median bandwidths, with (least–most) of the ratios within one repetition.")
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in rows):
        some = [row for row in rows if (row.op, row.ranks) == (op, ranks)]
        parts += [f"## {op}, {ranks} ranks", "Bus bandwidth and ratios:", bandwidths(some, peers, base)]
        parts += ["Time per call, median (least–most):", times(some, peers)]
    return "\n\n".join(parts) + "\n"


def write(
    path: Path,
    title: str,
    rows: Sequence[Row],
    peers: Sequence[str],
    about: dict[str, dict[str, str]],
    verdicts: Sequence[Target],
    base: str | None = None,
) -> None:
    """Print the report and write it, as Markdown and JSON."""
    text = document(title, rows, peers, about, verdicts, base)
    judged = [{**vars(target), "verdict": target.verdict} for target in verdicts]
    data = {"about": about, "rows": [row.record() for row in rows], "targets": judged}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(text)
    path.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(text)
    print(f"written: {path.name}.md and {path.name}.json in {path.parent}", file=sys.stderr)
