"""The files of a run: nccl-tests' document and a table, whole or not there."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_FIRST = ("size", "count", "type", "redop", "root")
_FIGURES = {"time_us": ("time", "cpu_time"), "algbw": ("alg_bw",), "busbw": ("bus_bw",), "wrong": ("nwrong",)}
_PERCENTILES = ("p50_us", "p99_us")
_HALVES = {"out_of_place": "", "in_place": "in_place_"}


def open_new(path: str, flag: str, suffix: str = "") -> tuple[IO[str], str]:
    """Open a new file of this name; if it exists, with .0, .1 and so on behind it."""
    tries, name = 0, f"{path}{suffix}"
    while True:
        try:
            return Path(name).open("x"), name
        except FileExistsError:
            name, tries = f"{path}{suffix}.{tries}", tries + 1
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from error


class Replacement:
    """A file that takes the place of an older one when the run has succeeded."""

    def __init__(self, path: str, flag: str) -> None:
        self.path = path
        if Path(path).is_dir():
            raise ValueError(f"{flag} {path} cannot be written: it is a folder")
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            # For root, to replace it would remove /dev/stdout or /dev/null.
            why = "it is a link, a device or a pipe; expected a file"
            raise ValueError(f"{flag} {path} cannot be written: {why}")
        self.file, self._name = open_new(path, flag, ".part")

    def write(self, data: bytes) -> None:
        """Write bytes in place of text."""
        Path(self._name).write_bytes(data)

    def keep(self) -> None:
        """Close the file, and give it its name."""
        self.file.close()
        os.replace(self._name, self.path)

    def drop(self) -> None:
        """Remove the file."""
        self.file.close()
        with suppress(OSError):
            os.unlink(self._name)


def replacements(paths: dict[str, str | None]) -> dict[str, Replacement]:
    """Return the files of some flags; all that are given or, on an error, none."""
    found: dict[str, Replacement] = {}
    try:
        for flag, path in paths.items():
            if path is not None:
                found[flag] = Replacement(path, flag)
    except ValueError:
        for file in found.values():
            file.drop()
        raise
    return found


def require_writable(document: str | None, paths: dict[str, str | None]) -> None:
    """Raise ValueError if the files of a run could not be written: the document of -J, and replacements."""
    for file in replacements(paths).values():
        file.drop()
    if document:
        opened, name = open_new(document, "-J")
        opened.close()
        os.unlink(name)


def write_document(file: IO[str], document: dict[str, Any]) -> None:
    """Write a document as one line of JSON."""
    json.dump(document, file)
    file.write("\n")


def write_table(file: IO[str], results: Sequence[dict[str, Any]]) -> None:
    """Write the lines of the output as comma-separated values, with a first line of names."""
    if results and "source" in results[0]:
        _write_links(file, results)
        return
    peers = [name for name in results[0].get("compare", {}) if name != "time"] if results else []
    writer = csv.writer(file, lineterminator="\n")
    names = [prefix + name for prefix in _HALVES.values() for name in _FIGURES]
    writer.writerow([*_FIRST, *names, *_percentile_names(results), *_compared_names(peers)])
    for row in results:
        halves = [row[half] for half in _HALVES]
        figures = [
            next(half[key] for key in keys if key in half) for half in halves for keys in _FIGURES.values()
        ]
        # Not checked, or without such a call: empty.
        first = [str(row[name]).strip() for name in _FIRST]
        writer.writerow(first + figures + _percentile_figures(row) + _compared_figures(row, peers))


def _write_links(file: IO[str], links: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(links[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(links)


def _percentile_names(results: Sequence[dict[str, Any]]) -> list[str]:
    timed = bool(results) and "in_place_per_iter" in results[0]
    return [prefix + name for prefix in _HALVES.values() for name in _PERCENTILES] if timed else []


def _percentile_figures(row: dict[str, Any]) -> list[Any]:
    reports = [row[f"{half}_per_iter"] for half in _HALVES if f"{half}_per_iter" in row]
    return [report[name] for report in reports for name in _PERCENTILES]


def _compared_names(peers: Sequence[str]) -> list[str]:
    columns = [f"{peer}_{name}" for peer in peers for name in ("time_us", "ratio", "wrong")]
    return ["pynccl_time_us", *columns] if peers else []


def _compared_figures(row: dict[str, Any], peers: Sequence[str]) -> list[Any]:
    if not peers:
        return []
    found = [row["compare"][peer] or {} for peer in peers]
    return [row["compare"]["time"], *(each.get(key) for each in found for key in ("time", "ratio", "nwrong"))]
