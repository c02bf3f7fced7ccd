"""The output: nccl-tests' lines, character for character, and its JSON.

Formats are those of nccl-tests 2.19.6 (src/util.cu), so that programs that read them go on working. Only the
line with the version names pynccl, and times of iterations come from the host's clock. The tables that
nccl-tests has not (compare, against, percentiles, pairs) are in its style on purpose, with columns of fixed
widths, so that they stand below its lines and scripts can read both alike; -M's line is its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pynccl import capi
from pynccl._base.version import __version__
from pynccl._library.generated.api import NCCL_VERSION_CODE
from pynccl._tools.bench import compare, pairs, percentiles, plot
from pynccl._tools.bench.against import Document, Earlier
from pynccl._tools.bench.files import open_new, replacements, write_document, write_table
from pynccl._tools.bench.measure import Case, Half
from pynccl._tools.bench.progress import Progress
from pynccl._tools.bench.settings import Settings

_FILE_VERSION = 3
_TIME = "%Y-%m-%d %H:%M:%S"
# Names of variables whose values no file may hold.
_HIDDEN = re.compile("SECRET|TOKEN|PASSW|CREDENTIAL|KEY", re.IGNORECASE)
_DEVICE = re.compile(r"#  Rank +(\d+) Group +(\d+) Pid +(\d+) on +(\S+) device +(\d+) \[(\S+)\] (.*)")


def number(value: float, width: int) -> str:
    """Return a figure in a column: with as many decimals as fit (getFloatStr)."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


class Report:
    """Writes the lines to standard output, and the document at the end; one process does."""

    def __init__(self, settings: Settings, operation: str, nranks: int, progress: Progress) -> None:
        self._progress, self._held, self._done = progress, "", 0
        self._settings, self._program, self._nranks = settings, f"{operation}_perf", nranks
        self._bus: list[float] = []
        self._errors = 0
        # The versions of the peers, once they are known.
        self.compared: str | None = None
        self._least = _least_bandwidth()
        self._results: list[dict[str, Any]] = []
        self._document: dict[str, Any] = {
            "version": _FILE_VERSION,
            "start_time": time.strftime(_TIME),
            "args": list(sys.argv),
            "env": [f"{name}={_shown(name, value)}" for name, value in os.environ.items()],
            "nccl_version": capi.ncclGetVersion(),
        }
        self._earlier = Earlier.of(settings, operation, nranks)
        self._beside = {
            str(Path(path).with_suffix("")): Document(path, "--beside").results for path in settings.beside
        }
        self._json: IO[str] | None = None
        if settings.output_file:
            self._json, name = open_new(settings.output_file, "-J")
            self._print(f"# Writing JSON output to {name}")
        self._files = replacements(settings.replaced)
        self._links: Sequence[pairs.Link] = ()

    def _print(self, text: str, end: str = "\n") -> None:
        self._held += text + end
        # With a progress line, only whole lines.
        if end or not self._progress.shown:
            with self._progress.away():
                print(self._held, end="", flush=True)
            self._held = ""

    # --- before the measurements ---

    def header(self, devices: Sequence[str]) -> None:
        """Write what is run, and on which devices."""
        s = self._settings
        self._print(
            f"# pynccl bench version {__version__} nccl-headers={NCCL_VERSION_CODE} "
            f"nccl-library={capi.ncclGetVersion()}"
        )
        self._print(f"# Collective test starting: {self._program}")
        step, kind = (s.stepfactor, "factor") if s.stepfactor > 1 else (s.stepbytes, "bytes")
        self._print(
            f"# nThread {s.nthreads} nGpus {s.ngpus} minBytes {s.minbytes} maxBytes {s.maxbytes} "
            f"step: {step}({kind}) warmup iters: {s.warmup_iters} iters: {s.iters} agg iters: {s.agg_iters} "
            f"validation: {s.check} graph: {s.cudagraph} unalign: {s.unalign}"
        )
        blocking = {
            1: "wait and barrier after each inner iteration (-m) ",
            2: "wait after each inner iteration (-m), no barrier ",
            3: "wait and barrier after each outer iteration (-n); time excludes barrier ",
        }
        if s.blocking:
            self._print(f"# Blocking Enabled: {blocking[s.blocking]}")
        if s.per_iter_timing:
            skip = f"; summary skips first {s.per_iter_skip} iterations" if s.per_iter_skip else ""
            self._print(
                f"# Per-Iteration Report: host timing, each iteration waited for; i_* uses max over process "
                f"rows{skip} "
            )
        if s.parallel_init:
            self._print("# Parallel Init Enabled: threads call into NcclInitRank concurrently ")
        self._print("#\n# Using devices")
        for line in devices:
            self._print(line)
        self._document["config"] = self._config(devices)
        if not s.p2p:
            self._columns()

    def _config(self, devices: Sequence[str]) -> dict[str, Any]:
        s = self._settings
        step = {"step_factor": s.stepfactor} if s.stepfactor > 1 else {"step_bytes": s.stepbytes}
        names = ("rank", "group", "pid", "hostname", "device", "device_hex", "device_info")
        rows = [match.groups() for line in devices if (match := _DEVICE.match(line))]
        return {
            "nthreads": s.nthreads,
            "ngpus": s.ngpus,
            "minimum_bytes": s.minbytes,
            "maximum_bytes": s.maxbytes,
            **step,
            "warmup_iters": s.warmup_iters,
            "iterations": s.iters,
            "aggregated_iterations": s.agg_iters,
            "validation": s.check,
            "graph": s.cudagraph,
            "blocking_collectives": _flag(s.blocking),
            "per_iter_timing": _flag(s.per_iter_timing),
            "per_iter_skip": s.per_iter_skip,
            "parallel_init": _flag(s.parallel_init),
            "devices": [
                {
                    name: int(value) if name in ("rank", "group", "pid", "device") else value
                    for name, value in zip(names, row, strict=True)
                }
                for row in rows
            ],
        }

    def _columns(self) -> None:
        s = self._settings
        label, pad, form = ("timestamp", 19, _TIME) if s.report_timestamps else ("", 0, "")
        took = "cputime" if s.report_cputime else "time"
        row = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
        half, units = ["{:>7}", "{:>6}", "{:>6}", "{:>6}"], ["(us)", "(GB/s)", "(GB/s)", ""]
        names = [took, "algbw", "busbw", "#wrong"]
        if s.per_iter_timing:
            half += ["{:>7}"] * 4
            names += ["i_min", "i_max", "i_p99", "i_cv%"]
            units += ["(us)", "(us)", "(us)", "(%)"]
            title = (
                "              out-of-place (+ per-iteration)                                "
                "in-place (+ per-iteration)"
            )
        else:
            title = "           out-of-place                       in-place          "
        self._print("#")
        self._print(row.format("", "", "", "", "") + title)
        columns = row + "".join(f"  {column}" for column in half * 2) + " {:>{pad}}"
        self._print(columns.format("size", "count", "type", "redop", "root", *names, *names, label, pad=pad))
        self._print(columns.format("(B)", "(elements)", "", "", "", *units, *units, form, pad=pad))

    # --- the lines ---

    def begin(self, case: Case) -> None:
        """Write a line's first columns."""
        self._progress.step(f"{case.operation.name}, {case.nbytes} bytes", self._done)
        self._done += 1
        root = f"{case.root if case.operation.rooted else -1:6d}"
        op = case.op if case.operation.redop is None else case.operation.redop
        self._print(
            f"{case.nbytes:12d}  {case.counts.param:12d}  {case.type_name:>8}  {op:>6}  {root:>6}", end=""
        )
        self._results.append(
            {
                "size": case.nbytes,
                "count": case.counts.param,
                "type": case.type_name,
                "redop": op,
                "root": root,
            }
        )

    def half(self, half: Half, in_place: bool) -> None:
        """Write one half of a line."""
        s, name = self._settings, "in_place" if in_place else "out_of_place"
        # As there, in the middle of the line.
        if half.lines_before:
            self._print(half.lines_before, end="")
        # One column less, as there.
        wrong = "  N/A" if half.wrong is None else f"{half.wrong:6g}"
        self._print(
            f"  {number(half.microseconds, 7)}  {number(half.algorithm, 6)}  {number(half.bus, 6)}  {wrong}",
            end="",
        )
        result = self._results[-1]
        result[name] = {
            "cpu_time" if s.report_cputime else "time": round(half.microseconds, 6),
            "alg_bw": round(half.algorithm, 6),
            "bus_bw": round(half.bus, 6),
            "nwrong": None if half.wrong is None else float(half.wrong),
        }
        if half.iterations:
            report = result[f"{name}_per_iter"] = self._iterations(half)
            if s.per_iter_timing:
                self._summary(report)
        if in_place and s.report_timestamps:
            self._print(f"{time.strftime(_TIME):>21}", end="")
        self._bus.append(half.bus)
        self._errors += half.failing

    def _iterations(self, half: Half) -> dict[str, Any]:
        skip = self._settings.per_iter_skip
        times = [1e6 * seconds for seconds in half.iterations]
        ordered = sorted(times[skip:])
        mean, deviation = statistics.fmean(ordered), statistics.pstdev(ordered)
        spread = 100 * deviation / mean if mean else 0.0
        figures = {
            "skipped_iterations": skip,
            "min_us": ordered[0],
            "max_us": ordered[-1],
            "avg_us": mean,
            "p50_us": percentiles.median(ordered),
            "p95_us": percentiles.percentile(ordered, 95),
            "p99_us": percentiles.percentile(ordered, 99),
            "stdev_us": deviation,
            "cv_pct": spread,
        }
        report: dict[str, Any] = {name: round(value, 6) for name, value in figures.items()}
        report["times_us"] = [round(value, 6) for value in times]
        if len(half.processes) > 1:
            report["per_process_max_times_us"] = [
                [round(1e6 * seconds, 6) for seconds in row] for row in half.processes
            ]
        return report

    def _summary(self, report: dict[str, Any]) -> None:
        for name in ("min_us", "max_us", "p99_us", "cv_pct"):
            self._print(f"  {number(report[name], 7)}", end="")

    def end(self, compared: dict[str, Any] | None = None) -> None:
        """End a line; `compared` is the case's comparison with the peers."""
        self._print("")
        if compared is not None:
            self._results[-1]["compare"] = compared
        self._results[-1] |= {"actual_iterations": self._settings.iters, "experiment_name": ""}

    def link(self, done: int, total: int) -> None:
        """Show how many links of --p2p are measured."""
        self._progress.step(f"{self._program.removesuffix('_perf')}, {total} links", done)

    def links(self, links: Sequence[pairs.Link]) -> None:
        """Write the matrices of --p2p."""
        self._links = links
        self._results = [link.row() for link in links]
        self._bus = [link.bandwidth for link in links]
        self._errors = sum(bool(link.wrong) for link in links)
        for title, figures in pairs.matrices(links):
            title += ", from the rank of the row to that of the column"
            if sys.stdout.isatty() and importlib.util.find_spec("rich"):
                # 0: a terminal that does not know its size.
                width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
                self._print(pairs.drawn(title, figures, width))
                continue
            self._print(f"#\n# {title}")
            for line in pairs.text(figures):
                self._print(line)
        slow = list(pairs.slow_links(links))
        self._print("#\n# Links clearly slower than the median" + (":" if slow else ": none"))
        for line in slow:
            self._print(f"#   {line}")

    # --- after the measurements ---

    def footer(self, memory: str | None) -> int:
        """Write the summary and the files; return the exit code.

        1: a result was wrong, also a peer's, or the bandwidth too low; 3: slower than the earlier run.
        """
        self._progress.close()
        least = self._least
        mean = statistics.fmean(self._bus) if self._bus else 0.0
        fast = least is None or mean >= 0.9 * least
        self._print(f"# {'Out of bounds values':<20} : {self._errors} {'FAILED' if self._errors else 'OK'}")
        verdict = "" if least is None else "OK" if fast else "FAILED"
        self._print(f"# {'Avg bus bandwidth':<20} : {mean:g} {verdict}")
        self._print(f"#\n# Collective test concluded: {self._program}")
        if memory:
            self._print(memory)
        self._print("#\n")
        self._document["out_of_bounds"] = {"count": self._errors, "okay": _flag(not self._errors)}
        self._document["average_bus_bandwidth"] = {
            "bandwidth": round(mean, 6),
            "okay": "unchecked" if least is None else _flag(fast),
        }
        self._end([])
        self._write_files()
        if self._settings.percentiles:
            for line in percentiles.table(self._results):
                self._print(line)
        if self.compared is not None:
            for line in compare.table(self.compared, self._settings.compare, self._results):
                self._print(line)
        slower = self._is_slower()
        wrong = self._errors + compare.wrong_measurements(self._settings.compare, self._results)
        return 1 if wrong or not fast else 3 if slower else 0

    def _write_files(self) -> None:
        if "--save" in self._files:
            write_document(self._files["--save"].file, self._document)
        if "--csv" in self._files:
            write_table(self._files["--csv"].file, self._results)
        if self._settings.plot:
            self._files["--plot"].write(self._picture(Path(self._settings.plot).suffix.lower()))
        for file in self._files.values():
            file.keep()

    def _picture(self, kind: str) -> bytes:
        title = f"{self._program.removesuffix('_perf')} on {self._nranks} ranks"
        if self._links:
            return plot.heat_maps(title, self._links, kind)
        earlier = self._earlier.times if self._earlier else None
        return plot.curves(title, self._results, earlier, self._beside, kind)

    def _is_slower(self) -> bool:
        """Write the comparison with the earlier run, if there is one."""
        if self._earlier is None:
            return False
        lines, as_fast = self._earlier.compare(self._results, self._settings.tolerance)
        for line in lines:
            self._print(line)
        return not as_fast

    def fail(self, error: str) -> None:
        """Write -J's document with the lines so far and an error; leave the other files as they were."""
        self._progress.close()
        self._end([error])
        for file in self._files.values():
            file.drop()

    def _end(self, errors: list[str]) -> None:
        self._document["results"] = self._results
        self._document["errors"] = errors
        self._document["end_time"] = time.strftime(_TIME)
        if self._json is not None:
            with self._json as file:
                write_document(file, self._document)


def _least_bandwidth() -> float | None:
    text = os.environ.get("NCCL_TESTS_MIN_BW")
    if text is None:
        return None
    try:
        least = float(text)
    except ValueError:
        least = math.nan
    if math.isnan(least):
        raise ValueError(f"NCCL_TESTS_MIN_BW is {text!r}; expected a number of GB/s")
    return least


def _flag(value: object) -> str:
    return "true" if value else "false"


def _shown(name: str, value: str) -> str:
    return "(set)" if _HIDDEN.search(name) else value
