"""The figures of the benchmarks, drawn from the JSON that the benchmarks wrote."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Text stays text, and a figure that did not change is the same file.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pynccl", "font.size": 9, "axes.grid": True})

Results = dict[str, Any]


def svg(figure: Figure) -> str:
    """Return a figure as SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return text.getvalue()


def bandwidth(results: Results) -> dict[str, Figure]:
    """Draw bus bandwidth over size: one figure for each number of ranks, one plot for each operation."""
    rows = [row for row in results["rows"] if "bus_gb_per_s" in row and row["nbytes"]]
    return {f"{ranks}-ranks": _bandwidth(rows, ranks) for ranks in sorted({row["ranks"] for row in rows})}


def _bandwidth(rows: list[Results], ranks: int) -> Figure:
    rows = sorted((row for row in rows if row["ranks"] == ranks), key=lambda row: (row["op"], row["nbytes"]))
    operations = {op: list(group) for op, group in itertools.groupby(rows, lambda row: row["op"])}
    # A single size makes no line.
    operations = {op: group for op, group in operations.items() if len(group) > 1}
    across = min(len(operations), 3)
    down = -(-len(operations) // across)
    figure = Figure(figsize=(4.2 * across, 3.2 * down), layout="constrained")
    plots = figure.subplots(down, across, squeeze=False).flat
    for (op, group), plot in zip(operations.items(), plots, strict=False):
        for peer in group[0]["bus_gb_per_s"]:
            sizes = [row["nbytes"] for row in group]
            plot.loglog(sizes, [row["bus_gb_per_s"][peer] for row in group], "o-", label=peer, ms=3)
        plot.set(title=f"{op}, {ranks} ranks", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        plot.legend()
    for plot in plots:
        plot.set_axis_off()
    return figure


def call_overhead(results: Results) -> dict[str, Figure]:
    """Draw the median time of a call in each case, in the order of the table."""
    host, driver = (
        {case["name"]: case["ns"] for case in results[key]} for key in ("cases", "cases_with_driver")
    )
    return {
        "cases": _bars(host, "One call on the host", 1e-3),
        "with-driver": _bars(driver, "One call with a fake CUDA driver", 1e-3),
    }


def one_sided(results: Results) -> dict[str, Figure]:
    """Draw the median time of a round trip, and of a copy, by each way."""
    return {
        "round-trips": _bars(results["round_trips"], "A round trip", 1e6, "linear"),
        "copies": _bars(results["copies"], "A copy", 1e6, "linear"),
    }


def _bars(times: dict[str, list[float]], title: str, microseconds: float, scale: str = "log") -> Figure:
    """Draw the medians of times, whose unit has so many microseconds."""
    figure = Figure(figsize=(9, 0.26 * len(times) + 1), layout="constrained")
    plot = figure.subplots()
    plot.barh(list(times), [statistics.median(some) * microseconds for some in times.values()])
    plot.invert_yaxis()
    plot.set(title=title, xlabel="microseconds", xscale=scale)
    return figure


def store(results: Results) -> dict[str, Figure]:
    """Draw the time until all clients have the id and have left the barrier, by the number of clients."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    plot = figure.subplots()
    rows = [row for row in results["rows"] if row["seconds"]]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        its = [row for row in rows if row["peer"] == peer]
        points = sorted((row["clients"], statistics.median(row["seconds"])) for row in its)
        plot.loglog(*zip(*points, strict=True), "o-", label=peer, ms=3)
    plot.set(title="An id and a barrier", xlabel="clients", ylabel="seconds")
    plot.legend()
    return {"clients": figure}


def scale(results: Results) -> dict[str, Figure]:
    """Draw each quantity over the number of ranks, and its model as a line."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    plots = figure.subplots(-(-len(results["quantities"]) // 3), 3).flat
    for plot in plots[len(results["quantities"]) :]:
        plot.remove()
    for plot, (name, key) in zip(plots, results["quantities"].items(), strict=False):
        points = [(row["ranks"], row[key]) for row in results["rows"] if row.get(key)]
        if points:
            plot.loglog(*zip(*points, strict=True), "o", ms=3)
        if found := results["model"].get(name):
            ends = [16, results["target"]]
            plot.loglog(ends, [found["factor"] * n ** found["exponent"] for n in ends], "--", lw=1)
        plot.set(title=name, xlabel="ranks")
    return {"ranks": figure}


def in_flight(results: Results) -> dict[str, Figure]:
    """Draw each time in milliseconds for both backends."""
    names = [name for name in results["pynccl"] if name.endswith(", ms")]
    figure = Figure(figsize=(8, 0.6 * len(names) + 1), layout="constrained")
    plot = figure.subplots()
    for i, peer in enumerate(("pynccl", "gloo")):
        heights = [place + 0.4 * i for place in range(len(names))]
        plot.barh(heights, [results[peer][name] for name in names], height=0.4, label=peer)
    ticks = [place + 0.2 for place in range(len(names))]
    plot.set_yticks(ticks, [name.removesuffix(", ms") for name in names])
    plot.invert_yaxis()
    plot.set(xlabel="milliseconds", xscale="log")
    plot.legend()
    return {"times": figure}


def matrix(results: Results) -> dict[str, Figure]:
    """Draw, for each setting, how many times the better peer's speed pynccl's is, over size."""
    return {name: _ratios(found["rows"]) for name, found in results.items()}


def _ratios(rows: list[Results]) -> Figure:
    operations = list(dict.fromkeys(row["op"] for row in rows))
    figure = Figure(figsize=(4.2 * len(operations), 3.2), layout="constrained")
    for op, plot in zip(operations, figure.subplots(1, len(operations), squeeze=False).flat, strict=True):
        for ranks in sorted({row["ranks"] for row in rows}):
            some = [row for row in rows if (row["op"], row["ranks"]) == (op, ranks)]
            points = [(row["nbytes"], _against_the_better(row["median_seconds"])) for row in some]
            plot.loglog(*zip(*points, strict=True), "o-", label=f"{ranks} ranks", ms=3)
        plot.axhline(1, color="black", lw=1)
        plot.set(title=op, xlabel="bytes", ylabel="speed over the better of Open MPI and Gloo")
        plot.legend()
    return figure


def _against_the_better(seconds: dict[str, float]) -> float:
    ours = next(value for peer, value in seconds.items() if peer.startswith("pynccl"))
    return min(value for peer, value in seconds.items() if not peer.startswith("pynccl")) / ours


BENCHMARKS: dict[str, Callable[[Results], dict[str, Figure]]] = {
    "collectives": bandwidth,
    "matrix": matrix,
    "call_overhead": call_overhead,
    "store": store,
    "one_sided": one_sided,
    "window_memory": bandwidth,
    "scale": scale,
    "torch_all_reduce": bandwidth,
    "torch_in_flight": in_flight,
}
