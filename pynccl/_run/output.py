"""The outputs of the ranks: their lines in the terminal and in files, and the status line below them."""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from pynccl._base.colours import coloured

_MAX_LINE = 1 << 20
# Bytes that are kept of an output, to repeat its traceback or its last lines at the end.
_TAIL = 1 << 16
_TRACEBACK = b"Traceback (most recent call last):\n"
# Python's text between the tracebacks of chained exceptions.
_CHAINED = (b"another exception occurred:\n\n", b"direct cause of the following exception:\n\n")
# Returns to the beginning of the terminal's line, and erases the line.
_ERASE = b"\r\x1b[K"


class Status:
    """The line with the elapsed time at the bottom of a terminal; without a terminal there is none."""

    def __init__(self, wanted: bool) -> None:
        self.on = wanted and sys.stderr.isatty()
        self._began = time.monotonic()
        self._text = b""

    def show(self, text: str) -> None:
        """Show the elapsed time and a text in place of the last one."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        hours, minutes = divmod(minutes, 60)
        line = f"pynccl run: {hours}:{minutes:02}:{seconds:02}, {text}".encode()
        if self.on and line != self._text:
            self._text = line
            write_all(sys.stderr.fileno(), _ERASE + line)

    def clear(self) -> None:
        """Make place for other lines."""
        if self._text:
            self._text = b""
            write_all(sys.stderr.fileno(), _ERASE)


class Lines:
    """One output of one rank, copied line by line to a target, or to none; the tag is the rank's number."""

    def __init__(
        self, rank: int, target: int | None, log: BinaryIO | None, status: Status, tag: bool = True
    ) -> None:
        self.prefix, self.target, self.log = b"[%d] " % rank if tag else b"", target, log
        self.status = status
        self.rest = bytearray()
        self.tail = bytearray()
        # The time at which the last traceback began.
        self.failed_at = float("inf")

    def feed(self, data: bytes) -> None:
        """Copy the complete lines; empty data means the end of the output."""
        if self.log is not None:
            try:
                write_all(self.log.fileno(), data)
            except OSError as error:
                self._lose_log(self.log.name, error)
        if _TRACEBACK in self.tail[-len(_TRACEBACK) :] + data:
            self.failed_at = time.monotonic()
        self.tail += data
        del self.tail[:-_TAIL]
        if self.target is None:
            return
        self.rest += data
        cut = self.rest.rfind(b"\n") + 1
        if not data or len(self.rest) - cut > _MAX_LINE:
            cut = len(self.rest)
        lines = bytes(self.rest[:cut]).split(b"\n")
        del self.rest[:cut]
        if not lines[-1]:
            lines.pop()
        if lines:
            self.status.clear()
            write_all(self.target, b"".join(self.prefix + line + b"\n" for line in lines))

    def _lose_log(self, name: str, error: OSError) -> None:
        self.log = None
        self.status.clear()
        text = f"pynccl run: cannot write to {name}: {error.strerror}; it lacks the output from here on\n"
        write_all(sys.stderr.fileno(), coloured(text, "error", sys.stderr).encode())

    def insert(self, text: bytes) -> None:
        """Show the launcher's own lines between the rank's lines."""
        if text:
            self.feed((b"\n" if self.rest else b"") + text)

    def traceback(self) -> bytes:
        """Return the last traceback, with the tracebacks of its causes and the later output."""
        start = self.tail.rfind(_TRACEBACK)
        while start > 0 and self.tail[:start].endswith(_CHAINED):
            start = self.tail.rfind(_TRACEBACK, 0, start)
        return bytes(self.tail[start:]) if start >= 0 else b""


class Logs:
    """The files of --log-dir, two for each rank; none without a folder. A context manager."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._files, self._stack = folder, dict[tuple[int, str], BinaryIO](), ExitStack()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # Before a rank starts.
            tempfile.TemporaryFile(dir=folder).close()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, rank: int) -> tuple[BinaryIO | None, BinaryIO | None]:
        """Return the files of a rank's outputs."""
        return self._file(rank, "out"), self._file(rank, "err")

    def _file(self, rank: int, kind: str) -> BinaryIO | None:
        if self._folder is None:
            return None
        if (rank, kind) not in self._files:
            path = self._folder / f"rank{rank}.{kind}"
            file = open(path, "wb", buffering=0, opener=_open_at_once)  # noqa: SIM115
            self._files[rank, kind] = self._stack.enter_context(file)
        return self._files[rank, kind]


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a FIFO that nobody reads is an error instead of a wait."""
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(fd, True)
    return fd


def shown(ranks: Collection[int] | None, rank: int, target: int) -> int | None:
    """Return the target of a rank's output; None if only other ranks' outputs are shown."""
    return target if ranks is None or rank in ranks else None


def write_all(target: int, data: bytes) -> None:
    """Write all of the data to a descriptor, also if another program has made it non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            ready = select.poll()
            ready.register(target, select.POLLOUT)
            ready.poll()
