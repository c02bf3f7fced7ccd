"""The flight recorders' dumps of all ranks: read, checked, and grouped by communicator.

All content of a file is checked here, and only here. Users of a `Member` can rely on its types, on ranks and
peers that are ranks of the communicator, on complete records, and on printable text. Damaged content is left
out and reported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pynccl._trace.recorder import OWN_FOLDER, TraceRecord
from pynccl._trace.records import Reading, Records, Rows, scan

PENDING = ("called", "taken")
# Calls that no rank completes before every rank has made them.
JOINT = ("init", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "split", "grow")


class TraceError(ValueError):
    """Report that none of the files is a dump of the flight recorder."""


class Reason(NamedTuple):
    """The reason of a dump."""

    kind: str
    text: str


@dataclass(frozen=True)
class Process:
    """One dump: the process in its first line."""

    path: str
    host: str
    pid: int
    # Its rank in the job, if known.
    rank: int | None
    # The time of the dump.
    written_ns: int
    reasons: list[Reason]
    members: list[Member] = field(default_factory=list, repr=False, compare=False)

    def reason(self, *kinds: str) -> str | None:
        """Return the first reason of the dump that has one of these kinds."""
        return next((reason.text for reason in self.reasons if reason.kind in kinds), None)


@dataclass(frozen=True)
class Member:
    """One rank of a communicator, from its own dump."""

    process: Process
    comm: str
    rank: int
    size: int
    origin: str
    name: str
    # Another name that other ranks use for the same communicator, or "".
    also: str
    # The number of its newest collective call; 0 before the first.
    last: int
    # The call that ended the communicator, and whether the library's communicator was released.
    ended: str
    closed: bool
    records: Records = field(repr=False, compare=False)

    @property
    def process_rank(self) -> int:
        """The rank of its process in the job, if known."""
        return self.rank if self.process.rank is None else self.process.rank

    @cached_property
    def peers(self) -> dict[tuple[str, int], Records]:
        """The sends and recvs, by kind and peer, in the order of their numbers."""
        found = self.records.by(lambda kind: (kind.call, kind.peer))
        ordered = {
            (call, peer): some.ordered("peer_seq") for (call, peer), some in found.items() if peer is not None
        }
        return {pair: some for pair, some in ordered.items() if some}

    def collective(self, seq: int) -> TraceRecord | None:
        """Return a collective call by its number."""
        found = self.records.numbered("seq", seq)
        return found[0] if found else None

    def newest(self) -> TraceRecord | None:
        """Return the newest call that every rank must make."""
        return self.collective(self.last)

    def issued_with(self, record: TraceRecord) -> list[TraceRecord]:
        """Return the calls that were issued together with a call, including itself."""
        return list(self.records.numbered("group", record.group)) if record.group else [record]


# What is said of a rank without a dump: in a folder of dumps, among single files, and while the job runs.
LEFT_NO_FILE, NOT_GIVEN, GAVE_NO_DUMP = "left no file", "has no file here", "gave no dump"


@dataclass
class World:
    """One communicator, with the ranks that left a dump."""

    identity: str
    size: int
    origin: str
    name: str
    members: dict[int, Member] = field(default_factory=dict)
    # Ranks without a record although their process left a dump: they closed the communicator earlier.
    gone: set[int] = field(default_factory=set)
    # What is said of a rank without a dump.
    absence: str = LEFT_NO_FILE

    @property
    def absent(self) -> list[range]:
        """Return the ranks without a dump, as ranges, since a damaged file may name any size."""
        known = sorted({*self.members, *self.gone})
        gaps = (range(a + 1, b) for a, b in zip([-1, *known], [*known, self.size], strict=True))
        return [gap for gap in gaps if gap]

    def is_absent(self, rank: int | None) -> bool:
        """Tell whether a rank left no dump."""
        return rank is not None and rank not in self.members and rank not in self.gone

    @property
    def over(self) -> bool:
        """Tell whether every rank that left a dump had closed it."""
        return all(m.closed or m.ended for m in self.members.values())

    def __str__(self) -> str:
        name = f"{self.name} ({self.identity})" if self.name else self.identity
        return f"communicator {name} of {self.size} rank{'s' * (self.size != 1)}"


# --- checking -----------------------------------------------------------------------------------------------

# Limits of a valid dump: bytes of a line, characters of a text, and values of a number.
_MOST_LINE, _MOST_TEXT, _MOST = 1 << 20, 4096, 1 << 64
_MOST_RANKS = 1 << 31
# A file with more damaged lines is not read to its end.
_MOST_DAMAGED = 100_000


class _Damaged(ValueError):
    """A value that no valid dump contains."""


# What a line with such a value raises.
_BAD = (_Damaged, KeyError, TypeError, IndexError)


def printable(text: str) -> str:
    """Return a text without terminal control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise _Damaged
    return printable(value)


def _word(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[a-z][a-z0-9_]{0,31}", value):
        raise _Damaged
    return value


def _integer(value: Any, low: int = -_MOST, high: int = _MOST) -> int:
    # Not isinstance: a bool is an int too.
    if type(value) is not int or not low <= value < high:
        raise _Damaged
    return value


def _number(value: Any) -> int:
    return _integer(value, 0)


def _state(value: Any) -> str:
    if value not in (*PENDING, "done", "failed"):
        raise _Damaged
    return str(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Damaged
    return value


_NEEDED: dict[str, Callable[[Any], Any]] = {
    "call": _word,
    "time_ns": _integer,
    "state": _state,
    "result": _integer,
}
_OPTIONAL: dict[str, Callable[[Any], Any]] = {
    "seq": _number,
    "peer_seq": _number,
    "peer": _number,
    "count": _number,
    "dtype": _text,
    "op": _text,
    "root": _integer,
    "color": _integer,
    "algorithm": _text,
    "send": _integer,
    "recv": _integer,
    "stream": _integer,
    "group": _number,
    "plan": _flag,
    "signal": _number,
    "context": _number,
    "signals": _number,
    "offset": _integer,
    "end_ns": _integer,
    "at": _text,
}


def _record(values: dict[str, Any], size: int) -> TraceRecord:
    """Return the record of a line; fields of newer versions are ignored."""
    checked = {name: check(values[name]) for name, check in _NEEDED.items()}
    checked |= {n: check(values[n]) for n, check in _OPTIONAL.items() if values.get(n) is not None}
    record = TraceRecord(**checked)
    numbers = [number for number in (record.peer_seq, record.signal) if number is not None]
    if len(numbers) != (record.peer is not None) or (record.peer or 0) >= size:
        raise _Damaged
    if (record.dtype is None) != (record.count is None):
        raise _Damaged
    return record


def _member(process: Process, values: dict[str, Any]) -> Callable[..., Member]:
    """Return what makes a member of its records."""
    size = _integer(values["size"], 1, _MOST_RANKS)
    return partial(
        Member,
        process,
        comm=_text(values["comm"]),
        rank=_integer(values["rank"], 0, size),
        size=size,
        origin=_text(values["origin"]),
        name=_text(values["name"]),
        also=_text(values.get("also", "")),
        last=_number(values["collectives"]),
        ended=_text(values.get("ended", "")),
        closed=_flag(values.get("closed", False)),
    )


def _process(path: str, values: dict[str, Any]) -> Process:
    _text(values["pynccl"])
    rank = values.get("process_rank")
    return Process(
        path,
        host=_text(values["host"]),
        pid=_number(values["pid"]),
        rank=None if rank is None else _integer(rank, 0, _MOST_RANKS),
        written_ns=_integer(values["clock"][1][1]),
        reasons=[Reason(_text(r["kind"]), _text(r["text"])) for r in values["reasons"]],
    )


# --- reading ------------------------------------------------------------------------------------------------


class Dumps(NamedTuple):
    """The content of the files: ranks of communicators, and descriptions of damage."""

    members: list[Member]
    damage: list[str]
    # What is said of a rank without a dump.
    absence: str = LEFT_NO_FILE


def _stacks_in(paths: Iterable[str | os.PathLike[str]]) -> str:
    stacks = [file.name for path in map(Path, paths) if path.is_dir() for file in path.glob("*.stacks")]
    if not stacks:
        return ""
    return (
        "; there are Python stacks, of ranks without a recorded communicator (groups of torch are not "
        f"recorded): {', '.join(sorted(stacks))}"
    )


def files_of(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files, including those in folders and in this user's folder there."""
    found: list[Path] = []
    for path in map(Path, paths):
        own = f"{OWN_FOLDER}{os.geteuid()}*/*.jsonl"
        found += [*sorted(path.glob("*.jsonl")), *sorted(path.glob(own))] if path.is_dir() else [path]
    if not found:
        where = ", ".join(str(path) for path in paths)
        raise TraceError(
            f"no files in {where}; expected dumps of the flight recorder (*.jsonl){_stacks_in(paths)}"
        )
    return found


def read_all(paths: Sequence[str | os.PathLike[str]]) -> Dumps:
    """Read the dumps of several processes; raise TraceError if they contain nothing."""
    # Where single files are given, those of other ranks may be elsewhere.
    absence = LEFT_NO_FILE if all(Path(path).is_dir() for path in paths) else NOT_GIVEN
    everything = Dumps([], [], absence)
    for path in files_of(paths):
        try:
            if path.exists() and not path.is_file():
                # A named pipe would wait for its writer.
                raise TraceError(f"{path} is no regular file; expected a dump or a folder of dumps")
            found = _read(path)
        except TraceError as error:
            found = Dumps([], [printable(str(error))])
        except OSError as error:
            expected = "expected a dump of the flight recorder, or a folder of dumps"
            found = Dumps([], [printable(f"{path} cannot be read: {error.strerror}; {expected}")])
        everything.members.extend(found.members)
        everything.damage.extend(found.damage)
    if everything.damage and not everything.members:
        raise TraceError(everything.damage[0])
    return everything


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content in pieces of whole lines; a line that is too long is cut."""
    rest = b""
    while more := file.read(_MOST_LINE):
        end = more.rfind(b"\n") + 1
        if not end and len(rest) < _MOST_LINE:
            rest += more
            continue
        end = end or len(more)
        yield rest + more[:end]
        rest = more[end:]
    if rest:
        yield rest


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        raise _Damaged from None
    if not isinstance(values, dict):
        raise _Damaged
    return values


def _record_in(line: bytes, size: int) -> TraceRecord | None:
    """Return the record of a line; None if it is damaged."""
    try:
        return _record(_parse(line), size)
    except _BAD:
        return None


class _Reader:
    """Reads one dump: the rank of the process in each of its communicators."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: Process | None = None
        # The numbers of damaged lines.
        self.damaged: list[int] = []
        self._lines = 0
        # The member that the next records belong to, without them; None if its line is damaged.
        self._member: Callable[..., Member] | None = None
        self._reading = Reading(lambda _: None)

    @property
    def stops(self) -> bool:
        """Whether the file is so damaged that the rest is not read."""
        return len(self.damaged) > _MOST_DAMAGED

    def read(self, text: bytes) -> None:
        """Read some lines."""
        at = 0
        while at < len(text) and not self.stops:
            rows, at = scan(text, at)
            if len(rows):
                self._add(text, rows)
            if at < len(text):
                end = text.find(b"\n", at) + 1 or len(text)
                self._lines += 1
                self._read_line(text[at:end])
                at = end

    def _add(self, text: bytes, rows: Rows) -> None:
        if self.process is None:
            raise self._no_dump()
        first = self._lines + 1
        self._lines += len(rows)
        damaged = range(len(rows)) if self._member is None else self._reading.add(text, rows)
        self.damaged += [first + line for line in damaged]

    def _read_line(self, line: bytes) -> None:
        try:
            values = _parse(line)
            if self.process is None:
                self.process = _process(self.name, values)
                return
            if "comm" in values:
                self.finish()
                self._member = _member(self.process, values)
                size = int(values["size"])
                self._reading = Reading(lambda line: _record_in(line, size))
                return
        except _BAD:
            if self.process is None:
                raise self._no_dump() from None
            values = {"call": ""} if line.startswith(b'{"call"') else {}
        if self._member is None or not self._reading.add_line(line):
            self.damaged.append(self._lines)
            if "call" not in values:
                self.finish()

    def _no_dump(self) -> TraceError:
        return TraceError(f"{self.name}, line 1: this is not a dump of the flight recorder")

    def finish(self) -> None:
        """Complete the member that the last records belong to."""
        if self.process is not None and self._member is not None:
            self.process.members.append(self._member(records=self._reading.records()))
        self._member = None


def _read(path: Path) -> Dumps:
    reader = _Reader(printable(str(path)))
    with open(path, "rb") as file:
        for text in _chunks(file):
            reader.read(text)
            if reader.stops:
                break
    reader.finish()
    if reader.process is None:
        raise TraceError(f"{reader.name} is empty; expected a dump of the flight recorder")
    return Dumps(reader.process.members, [_say_damage(reader)] if reader.damaged else [])


def _say_damage(reader: _Reader) -> str:
    lines = reader.damaged
    more = f", and {len(lines) - 1} more lines" if len(lines) > 1 else ""
    more += "; the rest of the file is not read" if reader.stops else ""
    return f"{reader.name}, line {lines[0]}: this is not a record of the flight recorder{more}"


def worlds_of(members: Iterable[Member]) -> list[World]:
    """Group the ranks by communicator; of two dumps of one rank, use the newer."""
    members = sorted(members, key=lambda member: member.process.written_ns)
    same = {member.also: member.comm for member in members if member.also}
    worlds: dict[str, World] = {}
    for member in members:
        identity = same.get(member.comm, member.comm)
        world = worlds.setdefault(identity, World(identity, 0, member.origin, member.name))
        world.size = max(world.size, member.size)
        world.members[member.rank] = member
    processes = {m.process.rank for m in members}
    for world in worlds.values():
        world.members = dict(sorted(world.members.items()))
        if all(m.process.rank == rank for rank, m in world.members.items()):
            known = {rank for rank in processes if rank is not None and rank < world.size}
            world.gone = known - set(world.members)
    return sorted(worlds.values(), key=lambda world: (-world.size, world.origin != "init", world.identity))
