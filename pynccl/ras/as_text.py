"""The text answer, which every NCCL since 2.24 gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pynccl.ras.report import Communicator, Damaged, Group, Lag, MissingProcess, MissingRank, Status

_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+(?:-\d+)?)\s+(\d+)\s+(\d+)\s+([A-Z]+)\s+([A-Z,]+)\s*")
_COMM = re.compile(r"#(\d+)-(\d+) \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_PROCESS = re.compile(r"\s+Process (\d+) on node (\S+) managing GPUs? (.+)")
_PLACE = re.compile(r"GPU (\d+)(?: \(NVML (\d+)\))? managed by process (\d+) on node (\S+)")
_RANK = re.compile(r"\s+Rank (\d+)\b(.*)")
_MISSING = re.compile(r"\s+The missing ranks?: ([\d, ]+)")
_COUNTS = re.compile(r"\s+Communicator ranks have different (.+) operation counts")
_LAUNCHED = re.compile(r"\s+(\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)")
_ONE = re.compile(r"\s+Rank (\d+) has (?:launched up to operation (\d+)|not launched any operations)")
_NAMES = {"collective": None}


@dataclass
class _Counts:
    """The groups of ranks with the same count of an operation."""

    operation: str | None
    groups: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def lags(self) -> Iterator[Lag]:
        furthest = max((launched for launched, _, _ in self.groups), default=0)
        for launched, count, ranks in sorted(self.groups, key=lambda group: group[0]):
            if launched < furthest:
                known = tuple(sorted(ranks)) if len(ranks) == count else None
                yield Lag(self.operation, launched, furthest, count, known)


@dataclass
class _Found:
    """What is said of one communicator, in several places."""

    group: int
    missing: dict[int, MissingRank] = field(default_factory=dict)
    unlisted: int = 0
    counts: list[_Counts] = field(default_factory=list)


def read(text: str, address: str) -> Status:
    """Return the state; Damaged if the text is no such answer."""
    if "Communicators..." not in text or "\nWarnings\n" not in text:
        raise Damaged("the answer is incomplete")
    head, _, rest = text.partition("\nCommunicators...")
    groups = tuple(_group(row) for row in map(_ROW.fullmatch, rest.splitlines()) if row)
    version = re.search(r"NCCL version (\S+)", head)
    cuda = re.search(r"CUDA runtime version (\d+), driver version (\d+)", head)
    nodes, processes, devices = _job(head)
    seconds = re.match(r" \(([\d.]+)s\)", rest)
    timeouts = re.search(r"Encountered (\d+) communication timeout", rest)
    return Status(
        address=address,
        format="text",
        nccl_version=version and version[1],
        communicators=tuple(_communicators(rest, groups)),
        communicator_count=sum(group.communicators for group in groups),
        cuda_runtime_version=int(cuda[1]) if cuda and int(cuda[1]) else None,
        cuda_driver_version=int(cuda[2]) if cuda and int(cuda[2]) else None,
        nodes=nodes,
        processes=processes,
        devices=devices,
        groups=groups,
        missing_processes=tuple(_processes(rest)),
        collection_seconds=float(seconds[1]) if seconds and seconds[1].count(".") == 1 else None,
        timeouts=int(timeouts[1]) if timeouts else 0,
        raw=text,
    )


def _group(row: re.Match[str]) -> Group:
    errors = () if row[8] == "OK" else tuple(row[8].split(","))
    return Group(int(row[2]), int(row[3]), row[4], int(row[5]), int(row[6]), row[7], errors)


def _job(head: str) -> tuple[int | None, int | None, int | None]:
    """Return the nodes, processes and GPUs: a table of five columns, or the last one of three."""
    rows = [line.split() for line in head.splitlines() if re.fullmatch(r"[\d ]+", line) and line.strip()]
    if not rows or len(rows[-1]) not in (3, 5):
        return None, None, None
    numbers = [int(value) for value in rows[-1]]
    return numbers[0], numbers[-2], numbers[-1]


def _processes(rest: str) -> Iterator[MissingProcess]:
    dead = False
    for line in rest.splitlines():
        if line in ("DEAD", "INCOMPLETE"):
            dead = line == "DEAD"
        elif process := _PROCESS.fullmatch(line):
            yield MissingProcess(int(process[1]), process[2], process[3], dead)


def _communicators(rest: str, groups: tuple[Group, ...]) -> Iterator[Communicator]:
    found: dict[str, _Found] = {}
    kind, one = "", _Found(0)
    for line in rest.splitlines():
        if header := _COMM.fullmatch(line):
            kind = header[4]
            one = found.setdefault(f"0x{int(header[3], 16):x}", _Found(int(header[1])))
        elif not line.startswith(" "):
            kind = ""
        elif kind == "INCOMPLETE":
            _read_missing(line, one)
        elif kind == "MISMATCH":
            _read_mismatch(line, one)
    for name, one in found.items():
        group = groups[one.group] if one.group < len(groups) else None
        yield Communicator(
            hash=name,
            size=group.size if group else None,
            status=group.status if group else None,
            errors=group.errors if group else (),
            missing=tuple(one.missing.values()) if len(one.missing) >= one.unlisted else None,
            lagging=tuple(lag for counts in one.counts for lag in counts.lags()),
        )


def _read_missing(line: str, one: _Found) -> None:
    if total := re.search(r"Missing communicator data from (\d+) rank", line):
        one.unlisted = int(total[1])
    elif ranks := _MISSING.fullmatch(line):
        for rank in re.findall(r"\d+", ranks[1]):
            one.missing[int(rank)] = MissingRank(int(rank), unresponsive=True)
    elif rank := _RANK.fullmatch(line):
        place = _PLACE.search(rank[2])
        one.missing[int(rank[1])] = (
            MissingRank(int(rank[1]), place[4], int(place[3]), int(place[1]), _nvml(place), True)
            if place
            else MissingRank(int(rank[1]), unresponsive=True)
        )


def _nvml(place: re.Match[str]) -> int:
    return int(place[2] if place[2] is not None else place[1])


def _read_mismatch(line: str, one: _Found) -> None:
    if name := _COUNTS.fullmatch(line):
        one.counts.append(_Counts(_NAMES.get(name[1], name[1])))
    elif not one.counts:
        return
    elif many := _LAUNCHED.fullmatch(line):
        one.counts[-1].groups.append((int(many[2] or 0), int(many[1]), []))
    elif single := _ONE.match(line):
        one.counts[-1].groups.append((int(single[2] or 0), 1, [int(single[1])]))
    elif (rank := _RANK.fullmatch(line)) and one.counts[-1].groups:
        one.counts[-1].groups[-1][2].append(int(rank[1]))
