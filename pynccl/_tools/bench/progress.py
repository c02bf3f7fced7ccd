"""The progress line in a terminal, drawn by rich; it changes only between measurements."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


def terminal_of_errors() -> str | None:
    """Return the terminal that standard error is; None: it is none, or rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        return None
    with suppress(OSError, ValueError):
        return os.ttyname(sys.stderr.fileno())
    return None


def clean(terminal: str) -> None:
    """Remove what a process that was killed has left in a terminal."""
    with suppress(OSError), open(terminal, "w") as file:
        file.write("\r\x1b[2K\x1b[?25h")


class Progress:
    """A line that says how many measurements are done, of how many (None: unknown)."""

    def __init__(self, terminal: str | None, total: int | None) -> None:
        self._bar: Any = None
        self._file: IO[str] | None = None
        if terminal is None:
            return
        with suppress(OSError):
            self._file = open(terminal, "w")  # noqa: SIM115
        if self._file is None:
            return
        rich: Any = importlib.import_module("rich.progress")
        # 0: a terminal that does not know its size.
        width = os.get_terminal_size(self._file.fileno()).columns or 80
        make = importlib.import_module("rich.console").Console
        console = make(file=self._file, force_terminal=True, width=width)
        columns = "{task.description}", rich.BarColumn(), rich.MofNCompleteColumn()
        # A thread that draws would disturb the measurement.
        quiet = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = rich.Progress(
            *columns, rich.TimeElapsedColumn(), console=console, transient=True, **quiet
        )
        self._task = self._bar.add_task("", total=total)
        self._started = False

    @property
    def shown(self) -> bool:
        """Whether there is a line."""
        return self._bar is not None

    def step(self, text: str, done: int) -> None:
        """Show what is measured, and how many measurements are done."""
        if self._bar is not None:
            if not self._started:
                self._bar.start()
                self._started = True
            self._bar.update(self._task, description=text, completed=done, refresh=True)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Take the line away while others write to the terminal."""
        if self._bar is None or not self._started:
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None and self._file is not None:
            self._bar.stop()
            self._file.close()
            self._bar = None
