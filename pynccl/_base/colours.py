"""The colours of what the commands say in a terminal."""

from __future__ import annotations

import os
from typing import IO

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
