"""The lines of the program that call this package."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A file and a line.
Place = tuple[str, int]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The place for which a thread of this package works.
_given = threading.local()


def caller() -> Place:
    """Return the newest place outside of this package."""
    given: Place | None = getattr(_given, "place", None)
    if given is not None:
        return given
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def caller_line() -> str:
    """Return the newest place outside of this package, as a text."""
    return "{}:{}".format(*caller())


@contextmanager
def called_from(place: Place) -> Iterator[None]:
    """Make `caller` return this place in a thread of this package, which no other code calls."""
    _given.place = place
    try:
        yield
    finally:
        _given.place = None
