"""The flight recorders' dumps of all ranks, read and put together by communicator."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pynccl._recorder import TraceRecord, read_record

PENDING = ("called", "taken")


class TraceError(ValueError):
    """Report a file that is no dump of the flight recorder."""


@dataclass(frozen=True)
class Process:
    """One dump: what its header says of the process."""

    path: str
    header: dict[str, Any]
    members: list[Member] = field(default_factory=list, repr=False, compare=False)

    @property
    def written_ns(self) -> int:
        """When the dump was made."""
        return int(self.header["clock"][1][1])

    def reason(self, *kinds: str) -> str | None:
        """Return the first of its reasons for dumping that is of one of these kinds."""
        return next((str(r["text"]) for r in self.header["reasons"] if r["kind"] in kinds), None)


@dataclass(frozen=True)
class Member:
    """One rank of a communicator, as its own dump has it."""

    process: Process
    header: dict[str, Any]
    records: list[TraceRecord]

    @property
    def rank(self) -> int:
        """Its number in the communicator."""
        return int(self.header["rank"])

    @property
    def process_rank(self) -> int:
        """The number of its process in the job, as far as that is known."""
        known = self.process.header.get("process_rank")
        return self.rank if known is None else int(known)

    @property
    def last(self) -> int:
        """The number of its newest collective call, 0 before the first."""
        return int(self.header["collectives"])

    def collective(self, seq: int) -> TraceRecord | None:
        """Return a collective call by its number."""
        return next((r for r in self.records if r.seq == seq), None)

    def newest(self) -> TraceRecord | None:
        """Return the newest call that every rank has to make."""
        return self.collective(self.last)

    def pairs(self, call: str, peer: int) -> dict[int, TraceRecord]:
        """Return the sends to a peer, or the recvs from it, by their numbers."""
        return {r.peer_seq: r for r in self.records if r.call == call and r.peer == peer and r.peer_seq}


@dataclass
class World:
    """One communicator, of which some ranks left a dump."""

    identity: str
    size: int
    origin: str
    name: str
    members: dict[int, Member] = field(default_factory=dict)
    # Absent ranks whose process left a dump: they closed the communicator long before.
    gone: set[int] = field(default_factory=set)

    @property
    def absent(self) -> list[int]:
        """Return the ranks of which there is no dump."""
        return [rank for rank in range(self.size) if rank not in self.members and rank not in self.gone]

    @property
    def over(self) -> bool:
        """Tell whether every rank that left a dump had closed it."""
        return all(m.header.get("closed") or m.header.get("ended") for m in self.members.values())

    def __str__(self) -> str:
        name = f"{self.name} ({self.identity})" if self.name else self.identity
        return f"communicator {name} of {self.size} rank{'s' * (self.size != 1)}"


# --- reading ------------------------------------------------------------------------------------------------


def files_of(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the files, those of folders included."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise TraceError("no files; expected dumps of the flight recorder (*.jsonl)")
    return found


def read(path: Path) -> list[Member]:
    """Read one dump: the process's part in each of its communicators."""
    process: Process | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                values = json.loads(line)
                if process is None:
                    process = Process(str(path), {"pynccl": values["pynccl"], **values})
                elif "comm" in values:
                    process.members.append(Member(process, values, []))
                else:
                    process.members[-1].records.append(read_record(values))
            except (ValueError, KeyError, TypeError, IndexError):
                what = "a dump of the flight recorder" if number == 1 else "a record of the flight recorder"
                raise TraceError(f"{path}, line {number}: this is not {what}") from None
    if process is None:
        raise TraceError(f"{path} is empty; expected a dump of the flight recorder")
    return process.members


def worlds_of(members: Iterable[Member]) -> list[World]:
    """Put the ranks of each communicator together; of two dumps of one rank the newer counts."""
    members = sorted(members, key=lambda member: member.process.written_ns)
    same = {str(m.header["also"]): str(m.header["comm"]) for m in members if m.header.get("also")}
    worlds: dict[str, World] = {}
    for member in members:
        identity = same.get(str(member.header["comm"]), str(member.header["comm"]))
        head = member.header
        world = worlds.setdefault(identity, World(identity, 0, str(head["origin"]), str(head["name"])))
        world.size = max(world.size, int(head["size"]))
        world.members[member.rank] = member
    processes = {m.process.header.get("process_rank") for m in members}
    for world in worlds.values():
        world.members = dict(sorted(world.members.items()))
        if all(m.process.header.get("process_rank") == rank for rank, m in world.members.items()):
            world.gone = {rank for rank in range(world.size) if rank in processes} - set(world.members)
    return sorted(worlds.values(), key=lambda world: (-world.size, world.origin != "init", world.identity))
