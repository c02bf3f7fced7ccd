"""--plot: bus bandwidth and time over size, or the matrices of --p2p, drawn by matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pynccl._tools.bench.against import Place, Times, times_of
from pynccl._tools.bench.compare import OURS
from pynccl._tools.bench.pairs import Link, matrices

SUFFIXES = (".png", ".svg")
# Ranks up to which each field of a matrix has its figure.
_MOST_FIGURES = 16
# Of a line: sizes, microseconds, GB/s.
_Line = dict[int, tuple[float, float]]


def refusal(path: str) -> str | None:
    """Return why a picture cannot be drawn to this file."""
    if not path.lower().endswith(SUFFIXES):
        return f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}"
    if Path(path).is_dir():
        return f"{path} cannot be written: it is a folder"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; install it, for example by pip install matplotlib"
    return None


def curves(
    title: str,
    results: Sequence[dict[str, Any]],
    earlier: Times | None,
    beside: Mapping[str, Sequence[dict[str, Any]]],
    kind: str,
) -> bytes:
    """Return a picture of a run, of its peers, of an earlier run, and of other runs by their names."""
    lines = _lines(results) | _peers(results) | _before(results, earlier or {})
    others = {f"{run}, {name}": line for run, rows in beside.items() for name, line in _lines(rows).items()}
    lines |= others
    figure = _figure(11, 4.6)
    for axes, column, label in zip(
        figure.subplots(1, 2), (1, 0), ("bus bandwidth (GB/s)", "time (µs)"), strict=True
    ):
        for number, (name, line) in enumerate(lines.items()):
            # A size of 0 has no place on a logarithmic axis.
            shown = [(size, figures[column]) for size, figures in sorted(line.items()) if size]
            shown = [(size, value) for size, value in shown if value > 0]
            style = ":" if name in others else "--" if name.startswith("before") else "-"
            axes.plot(*zip(*shown, strict=True) if shown else ((), ()), style, marker="o", ms=3, label=name)
            axes.lines[-1].set_color(f"C{number % 10}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(label)
        axes.grid(True, which="major", alpha=0.3)
        axes.xaxis.set_major_formatter(lambda size, _: _size(size))
    axes.legend(fontsize="small")
    figure.suptitle(title)
    return _drawn(figure, kind)


def heat_maps(title: str, links: Sequence[Link], kind: str) -> bytes:
    """Return a picture of the matrices of --p2p."""
    figure = _figure(11, 5)
    for axes, (name, figures) in zip(figure.subplots(1, 2), matrices(links), strict=True):
        filled = [[float("nan") if value is None else value for value in row] for row in figures]
        # Slow is dark in both.
        colors = "viridis" if name.startswith("Bandwidth") else "viridis_r"
        picture = axes.imshow(filled, cmap=colors)
        figure.colorbar(picture, ax=axes, shrink=0.8)
        axes.set_title(name)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        ticks = range(0, len(filled), max(1, len(filled) // _MOST_FIGURES))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        if len(filled) <= _MOST_FIGURES:
            _write_figures(axes, figures, picture)
    figure.suptitle(title)
    return _drawn(figure, kind)


def _write_figures(axes: Any, figures: Sequence[Sequence[float | None]], picture: Any) -> None:
    for source, row in enumerate(figures):
        for target, value in enumerate(row):
            if value is not None:
                light = sum(picture.cmap(picture.norm(value))[:3]) > 1.5
                color = "black" if light else "white"
                axes.text(target, source, f"{value:.3g}", ha="center", va="center", color=color)


def _figure(width: float, height: float) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _drawn(figure: Any, kind: str) -> bytes:
    file = io.BytesIO()
    # Text stays text in an SVG, so that it can be searched.
    with importlib.import_module("matplotlib").rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format=kind.lstrip("."), dpi=120)
    return file.getvalue()


def _size(nbytes: float) -> str:
    units = ["", "K", "M", "G"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:g}{units[0]}"


# --- the lines ---


def _lines(results: Sequence[dict[str, Any]]) -> dict[str, _Line]:
    return {
        name: {size: (took, scale / took) for size, (took, scale) in line.items()}
        for name, line in _medians(results, times_of(results)).items()
    }


def _before(results: Sequence[dict[str, Any]], earlier: Times) -> dict[str, _Line]:
    now = times_of(results)
    found = _medians(results, {place: times for place, times in earlier.items() if place in now})
    return {
        f"before, {name}": {size: (took, scale / took) for size, (took, scale) in line.items()}
        for name, line in found.items()
    }


def _medians(results: Sequence[dict[str, Any]], times: Times) -> dict[str, dict[int, tuple[float, float]]]:
    """Return of each line and size the median time, and the product of time and bus bandwidth."""
    scales = _scales(results)
    several = len({place[1:4] for place in times}) > 1
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for place, taken in times.items():
        name = place.half.replace("_", " ").replace("out of place", "out-of-place")
        name = f"{place.type_name} {place.op} {name}" if several else name
        found.setdefault(name, {})[place.size] = statistics.median(taken), scales[place]
    return found


def _scales(results: Sequence[dict[str, Any]]) -> dict[Place, float]:
    found = {}
    for row in results:
        for half in ("out_of_place", "in_place"):
            figures = row[half]
            place = Place(int(row["size"]), str(row["type"]), str(row["redop"]), int(row["root"]), half)
            found[place] = figures["bus_bw"] * figures.get("time", figures.get("cpu_time"))
    return found


def _peers(results: Sequence[dict[str, Any]]) -> dict[str, _Line]:
    """Return the lines of --compare, NCCL's own in turn with the peers among them."""
    rows = [row for row in results if "compare" in row]
    scales, kinds = _scales(rows), {(row["type"], row["redop"], row["root"]) for row in rows}
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        place = Place(int(row["size"]), str(row["type"]), str(row["redop"]), int(row["root"]), "out_of_place")
        for peer, figures in row["compare"].items():
            if figures:
                took = figures if peer == "time" else figures["time"]
                name = f"{OURS}, in turn" if peer == "time" else peer
                name = f"{place.type_name} {place.op} {name}" if len(kinds) > 1 else name
                found.setdefault(name, {}).setdefault(place.size, []).append((took, scales[place] / took))
    return {
        name: {
            size: (statistics.median(took for took, _ in all_), statistics.median(bw for _, bw in all_))
            for size, all_ in line.items()
        }
        for name, line in found.items()
    }
