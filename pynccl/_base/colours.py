"""The colours of what the commands say in a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, TextIO

# The level of a line of a report, ok, warning, error or "", and the line.
Line = tuple[str, str]
_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def coloured(text: str, level: str, stream: IO[str]) -> str:
    """Return a text in the colour of its level, ok, warning or error; as it is if the stream shows none.

    NO_COLOR, by its convention, counts if it is not empty.
    """
    # Open MPI gives its ranks a terminal, wherever its own output goes.
    shows = stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    shows = shows and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not shows or level not in _COLOURS:
        return text
    # Imported late: pynccl.testing needs no colours.
    import click

    return click.style(text, fg=_COLOURS[level])


def print_report(lines: Iterable[Line], stream: TextIO) -> None:
    """Print the lines of a report in the colours of their levels."""
    encoding = stream.encoding or "utf-8"
    for level, line in lines:
        # Names may have characters that the terminal's encoding lacks.
        text = line.encode(encoding, "backslashreplace").decode(encoding)
        print(coloured(text, level, stream), file=stream)
    stream.flush()
