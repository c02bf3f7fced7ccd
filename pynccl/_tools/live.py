"""Fresh dumps of the jobs that run on this machine, for `pynccl trace --live`.

A process is asked only if it listens: it is this user's, has PYNCCL_TRACE_SIGNAL in its environment and
pynccl's library in its memory, and handles this signal. All that is read again through /proc when a pidfd
holds the process, so that no other process gets the signal.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pynccl._run.stack_requests import status_of
from pynccl._trace.dumps import Dumps
from pynccl._trace.recorder import DIR, OWN_FOLDER, signal_of
from pynccl.ras.report import Status

_LOOK_SECONDS = 0.02
_LIBRARY = b"/pynccl/_native."


class Listener(NamedTuple):
    """A process with pynccl, the signal at which it dumps, and where; 0: it does not listen."""

    pid: int
    # Its rank in the job, if the launcher names it.
    rank: str
    number: int
    folder: Path

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" (rank {self.rank})" if self.rank else "")

    def dump(self) -> Path | None:
        """Return its newest dump."""
        places = (f"*.{self.pid}.jsonl", f"{OWN_FOLDER}{os.geteuid()}*/*.{self.pid}.jsonl")
        found = [path for place in places for path in self.folder.glob(place)]
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def listeners(folders: Sequence[str]) -> list[Listener]:
    """Return this machine's processes that listen, and ranks that do not; with `folders`, those of there."""
    wanted = {Path(os.path.realpath(folder)) for folder in folders}
    found = []
    for entry in Path("/proc").iterdir():
        # Processes may end meanwhile, and others' cannot be read.
        with suppress(OSError, ValueError):
            one = _listener(entry) if entry.name.isdigit() else None
            if one is not None and (not wanted or one.folder in wanted):
                found.append(one)
    # A launcher, which has no rank itself, passes the signals on.
    launchers = {status_of(one.pid, "PPid") for one in found if one.rank}
    found = [one for one in found if one.rank or str(one.pid) not in launchers]
    return sorted(found, key=lambda one: (not one.rank, len(one.rank), one))


def _listener(process: Path) -> Listener | None:
    if process.stat().st_uid != os.geteuid():
        return None
    environ = _environment((process / "environ").read_bytes())
    pid, rank, number = int(process.name), environ.get("RANK", ""), int(signal_of(environ) or 0)
    if number and not int(status_of(pid, "SigCgt"), 16) >> (number - 1) & 1:
        number = 0
    if not (number or rank) or _LIBRARY not in (process / "maps").read_bytes():
        return None
    folder = os.path.join(os.readlink(process / "cwd"), environ.get(DIR, ""))
    return Listener(pid, rank, number, Path(os.path.realpath(folder)))


def _environment(data: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0"))
    return {name: value for name, _, value in pairs}


def ask(asked: Iterable[Listener], seconds: float) -> tuple[list[Path], list[str]]:
    """Return the fresh dumps, and why other processes gave none."""
    stamps: dict[Listener, tuple[Path, int] | None] = {}
    failures = []
    for one in asked:
        before = _stamp(one)
        why = _signal(one)
        if why:
            failures.append(f"{one} {why}")
        else:
            stamps[one] = before
    found: list[Path] = []
    deadline = time.monotonic() + seconds
    while stamps and time.monotonic() < deadline:
        for one, before in list(stamps.items()):
            now = _stamp(one)
            if now is not None and now != before:
                found.append(now[0])
                del stamps[one]
        time.sleep(_LOOK_SECONDS)
    failures += [f"{one} did not answer within {seconds:g} s" for one in stamps]
    return found, failures


def _signal(one: Listener) -> str:
    """Send a process its signal; else return why not."""
    if not one.number:
        return "does not listen: it has no PYNCCL_TRACE_SIGNAL, or no communicator yet"
    try:
        held = os.pidfd_open(one.pid)
    except OSError:
        return "has ended"
    try:
        if status_of(one.pid, "State").startswith("T"):
            return "is stopped"
        if _listener(Path(f"/proc/{one.pid}")) != one:
            return "does not listen any more"
        signal.pidfd_send_signal(held, one.number)
    except OSError as error:
        return f"could not be asked: {error.strerror or error}"
    finally:
        os.close(held)
    return ""


def _stamp(one: Listener) -> tuple[Path, int] | None:
    # A dump replaces the file of the one before.
    with suppress(OSError):
        path = one.dump()
        return None if path is None else (path, path.stat().st_ino)
    return None


def names(found: Status, dumps: Dumps) -> Mapping[str, str]:
    """Return the recorder's names of RAS's communicators: those of the same size with the same processes."""
    named = {}
    for one in found.communicators:
        processes = {(rank.rank, rank.pid) for rank in one.ranks or ()}
        alike: dict[str, bool] = {}
        for member in dumps.members:
            if member.size == one.size and not member.closed:
                here = (member.rank, member.process.pid) in processes
                alike[member.comm] = alike.get(member.comm, True) and here
        same = [name for name, is_same in alike.items() if is_same]
        if len(same) == 1:
            named[one.hash] = same[0]
    return named
