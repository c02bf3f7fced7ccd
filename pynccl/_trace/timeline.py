"""The calls of all ranks as a self-contained HTML page: `pynccl trace --html`.

The files in `page/` make the page. Dumps may contain anything: their texts reach the page only with HTML's
special characters escaped, and its policy lets nothing run and nothing load beside the script made here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from pynccl._library.generated.tables import ITEM_SIZES
from pynccl._library.results import result_name
from pynccl._trace.clocks import Clocks, align
from pynccl._trace.dumps import PENDING, Dumps, Member, World, worlds_of
from pynccl._trace.findings import QUIET, never_made, say_place, say_runs
from pynccl._trace.recorder import TraceRecord
from pynccl._types import DataType

_PAGE = Path(__file__).with_name("page")
_SCRIPTS = ("calls.js", "picture.js", "controls.js")
_ITEM_SIZES = {dtype.name.lower(): ITEM_SIZES[dtype] for dtype in DataType}
_ARGUMENTS = (
    *("dtype", "op", "root", "algorithm", "color"),
    *("peer", "signal", "context", "signals", "offset"),
)
# The states of records, and of calls that have no record, as the page names them.
_STATES = {"done": "d", "taken": "t", "called": "c", "failed": "f"}
_NEVER, _ABSENT = "n", "x"
# In the place of a duration, and of a number.
_NOT_ENDED, _END_UNKNOWN = -1, -2
_NO_NUMBER = -1


@dataclass
class _Lane:
    """One rank of a communicator, or several ranks without a record."""

    name: str
    about: str
    written: int
    rank: int | None = None
    # Begin, duration, state, arguments and number of each call.
    calls: list[tuple[int, int, str, int, int]] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """Return the calls as columns for JSON; each begin is relative to the one before."""
        calls = sorted(self.calls, key=lambda call: call[0])
        begins = [call[0] for call in calls]
        return {
            "name": self.name,
            "about": self.about,
            "rank": self.rank,
            "written": self.written,
            "begins": [now - before for before, now in zip([0, *begins], begins, strict=False)],
            "durations": [call[1] for call in calls],
            "states": "".join(call[2] for call in calls),
            "whats": [call[3] for call in calls],
            "numbers": [call[4] for call in calls],
        }


class _Timeline:
    """All times are in ns since the first, by the first host's clock."""

    def __init__(self, worlds: Sequence[World], clocks: Clocks) -> None:
        self.clocks = clocks
        members = [member for world in worlds for member in world.members.values()]
        times = [time for member in members for time in self._times(member)]
        self.first = min(times, default=0)
        self.span = max(times, default=0) - self.first
        # The arguments of calls; most are equal to those of others.
        self._whats: dict[tuple[tuple[str, str], ...], int] = {}
        self.worlds = [{"name": str(world), "lanes": list(self._lanes(world))} for world in worlds]

    def _times(self, member: Member) -> Iterator[int]:
        ahead = self.clocks.ahead(member.process.host)
        yield member.process.written_ns - ahead
        for record in member.records:
            yield record.time_ns - ahead
            if record.end_ns is not None:
                yield record.end_ns - ahead

    @property
    def data(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"span": self.span, "whats": list(self._whats), "worlds": self.worlds}

    def _lanes(self, world: World) -> Iterator[dict[str, Any]]:
        lanes: dict[int, _Lane] = {rank: self._lane(member) for rank, member in world.members.items()}
        self._add_never_made(world, lanes)
        gone = [range(rank, rank + 1) for rank in world.gone]
        for runs, why in ((world.absent, "no file"), (gone, "closed earlier")):
            for run in runs:
                lane = lanes[run[0]] = _Lane(say_runs([run]), why, self.span)
                lane.calls.append((0, _NOT_ENDED, _ABSENT, self._index((("call", why),)), _NO_NUMBER))
        yield from (lane.columns() for _, lane in sorted(lanes.items()))

    def _lane(self, member: Member) -> _Lane:
        process = member.process
        base = self.clocks.ahead(process.host) + self.first
        about = f"{process.host}, process {process.pid}"
        lane = _Lane(f"rank {member.rank}", about, process.written_ns - base, member.rank)
        for record in member.records:
            if record.state in PENDING:
                duration = _NOT_ENDED
            elif record.end_ns is None:
                duration = _END_UNKNOWN
            else:
                duration = max(0, record.end_ns - record.time_ns)
            state, what = _STATES[record.state], self._what(record)
            lane.calls.append((record.time_ns - base, duration, state, what, _number(record)))
        return lane

    def _add_never_made(self, world: World, lanes: dict[int, _Lane]) -> None:
        """Add the call that others made, to the ranks that never reached it."""
        late, others = never_made(world)
        if not others:
            return
        since = min(
            record.time_ns - self.clocks.ahead(world.members[rank].process.host) - self.first
            for rank, record in others.items()
        )
        # Where and on which stream the others called it says nothing of these ranks.
        record = replace(next(iter(others.values())), at=None, stream=None, state="called")
        for rank in late:
            ends = (begin + took for begin, took, *_ in lanes[rank].calls if took >= 0)
            begin = max([since, *ends])
            lanes[rank].calls.append((begin, _NOT_ENDED, _NEVER, self._what(record), _number(record)))

    def _what(self, record: TraceRecord) -> int:
        return self._index(tuple(_arguments(record)))

    def _index(self, what: tuple[tuple[str, str], ...]) -> int:
        return self._whats.setdefault(what, len(self._whats))


def _number(record: TraceRecord) -> int:
    number = record.peer_seq if record.seq is None else record.seq
    return _NO_NUMBER if number is None else number


def _arguments(record: TraceRecord) -> Iterator[tuple[str, str]]:
    """Yield the names and values that the page shows of a call; the first is the call itself."""
    yield "call", record.call
    if record.count is not None:
        yield "count", f"{record.count:,}"
        size = _ITEM_SIZES.get(record.dtype or "")
        if size is not None:
            yield "bytes", f"{record.count * size:,}"
    for name in _ARGUMENTS:
        value = getattr(record, name)
        if value is not None:
            yield name, str(value)
    if record.stream is not None:
        yield "stream", f"{record.stream:#x}"
    if record.plan:
        yield "plan", "yes"
    if record.state == "failed":
        yield "result", result_name(record.result) if record.result > 0 else "an exception"
    if record.at is not None:
        yield "line", say_place(record).removeprefix(" at ")


# --- HTML ---------------------------------------------------------------------------------------------------


def _json(values: object) -> str:
    """Return JSON that is safe in a script element: in ASCII, and without HTML's special characters."""
    text = json.dumps(values, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _paragraphs(report: str) -> Iterator[str]:
    """Yield the lines of the report; those above the first communicator are findings, too."""
    kind = "finding"
    for line in report.splitlines():
        if line.startswith("  "):
            own = "subject" if line.strip().startswith(QUIET) else "finding"
        else:
            subject = line.startswith("communicator ")
            own = kind = "subject" if subject else "finding" if kind == "finding" else "note"
        yield f'<p class="{own}">{escape(line.strip())}</p>'


def _when(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns / 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        # Only damaged dumps have such a time.
        return f"{ns} ns after 1970"


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def page(dumps: Dumps, report: str) -> bytes:
    """Return the HTML page; the report of the findings stands above the picture."""
    worlds = worlds_of(dumps.members)
    clocks = align(worlds)
    timeline = _Timeline(worlds, clocks)
    style = (_PAGE / "page.css").read_text(encoding="utf-8")
    script = "".join((_PAGE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    text = Template((_PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}",
        style=style,
        script=script,
        findings="\n".join(_paragraphs(report)),
        about=escape(f"The picture begins at {_when(timeline.first)}. {clocks}".strip()),
        data=_json(timeline.data),
    )
    return text.encode(errors="backslashreplace")
