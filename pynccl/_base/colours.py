"""The colours of what the commands say in a terminal."""

from __future__ import annotations

import os
from typing import IO

# Select Graphic Rendition of ECMA-48: green, yellow and red.
_COLOURS = {"ok": 32, "warning": 33, "error": 31}


def coloured(text: str, level: str, stream: IO[str]) -> str:
    """Return a text in the colour of its level, ok, warning or error; as it is if the stream shows none.

    NO_COLOR, by its convention, counts if it is not empty.
    """
    # Open MPI gives its ranks a terminal, wherever its own output goes.
    shows = stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    shows = shows and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_COLOURS[level]}m{text}\x1b[0m" if shows and level in _COLOURS else text
