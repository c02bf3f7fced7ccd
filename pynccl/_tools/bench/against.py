"""A run against an earlier one: which measurements are slower, beyond the noise of both runs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pynccl._tools.bench.settings import Settings

# Cycles (-N) from which a run's noise can be told.
LEAST_CYCLES = 3
_HALVES = ("out_of_place", "in_place")
_ROW = "# {:>12}  {:>8}  {:>6}  {:>6}  {:>12}  {:>9}  {:>9}  {:>6}  {:>7}{}"


class Place(NamedTuple):
    """One measurement of a cycle: the first columns of its line, and its half of the line."""

    size: int
    type_name: str
    op: str
    root: int
    half: str


Times = dict[Place, list[float]]


class Document:
    """A document of --save or -J, or nccl-tests' own; `flag` names the option that gave its path."""

    def __init__(self, path: str, flag: str) -> None:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{flag} {path} is not a file; expected a document of --save or -J")
        try:
            document = json.loads(Path(path).read_text())
            self.results: list[dict[str, Any]] = document["results"]
            self.times = times_of(self.results)
            self.ranks, self.args = len(document["config"]["devices"]), [str(arg) for arg in document["args"]]
            self.measured = str(document["start_time"])
            self.on_host = any("cpu_time" in row["out_of_place"] for row in self.results)
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{flag} {path}; expected a document of --save or -J ({why})") from None


class Earlier:
    """An earlier run of the same program on as many ranks."""

    def __init__(self, path: str, program: str, nranks: int, on_host: bool) -> None:
        document = Document(path, "--against")
        self.path, self.times, self.measured = path, document.times, document.measured
        if not any(Path(arg).name in (program, f"{program}_perf") for arg in document.args):
            command = " ".join(document.args)
            raise ValueError(f"--against {path} is not of {program}; its command was {command}")
        if document.ranks != nranks:
            raise ValueError(
                f"--against {path} is of {document.ranks} ranks; expected {nranks}, as many as here"
            )
        if document.on_host != on_host:
            raise ValueError(
                f"--against {path} has -C {int(document.on_host)}; expected -C {int(on_host)}, as here"
            )
        cycles = min(map(len, self.times.values()), default=0)
        if cycles < LEAST_CYCLES:
            raise ValueError(
                f"--against {path} has {cycles} cycles (-N); expected {LEAST_CYCLES} or more, whose spread "
                "is the noise"
            )

    @staticmethod
    def of(settings: Settings, program: str, nranks: int) -> Earlier | None:
        """Return the run of --against, if it is given."""
        if settings.against is None:
            return None
        return Earlier(settings.against, program, nranks, bool(settings.report_cputime))

    def compare(self, results: Sequence[dict[str, Any]], tolerance: float) -> tuple[list[str], bool]:
        """Return the lines of a comparison with a run's results, and whether none is slower.

        Slower: the median by more than `tolerance` percent, and every cycle than every earlier one.
        """
        slower, lines, new = 0, list(self._head()), 0
        for place, now in times_of(results).items():
            before = self.times.get(place)
            if before is None:
                new += 1
                continue
            ratio = statistics.median(now) / statistics.median(before)
            is_slower = ratio > 1 + tolerance / 100 and min(now) > max(before)
            slower += is_slower
            figures = f"{statistics.median(now):.2f}", f"{statistics.median(before):.2f}", f"{ratio:.2f}"
            noise = f"{100 * max(spread(now), spread(before)):.0f}"
            lines.append(_ROW.format(*place, *figures, noise, "  slower" if is_slower else ""))
        compared = len(lines) - 2
        if new:
            lines.append(f"# {new} measurements are not in {self.path}")
        if not compared:
            raise ValueError(f"--against {self.path} has none of this run's measurements; expected some")
        verdict = "FAILED" if slower else "OK"
        lines.append(
            f"# {slower} of {compared} measurements are slower by more than {tolerance:g} % and the noise "
            f"{verdict}"
        )
        return lines, verdict == "OK"

    def _head(self) -> Iterator[str]:
        yield f"# Against {self.path} of {self.measured}: medians of the cycles, and the larger spread"
        names = "size", "type", "redop", "root", "", "time (us)", "before", "ratio", "noise %"
        yield _ROW.format(*names, "")


def times_of(results: Sequence[dict[str, Any]]) -> Times:
    """Return the microseconds of each measurement, one for each cycle; not those that time nothing."""
    found: Times = {}
    for row in results:
        for half in _HALVES:
            place = Place(int(row["size"]), str(row["type"]), str(row["redop"]), int(row["root"]), half)
            figures = row[half]
            took = float(figures["cpu_time" if "cpu_time" in figures else "time"])
            if took > 0:
                found.setdefault(place, []).append(took)
    return found


def spread(times: Sequence[float]) -> float:
    """Return the distance of the extremes, as a part of the median."""
    return (max(times) - min(times)) / statistics.median(times)
