"""The differences between the hosts' clocks, from the times of calls that all ranks make.

No rank completes such a call before every rank has begun it. So on two hosts, each one's end of the call is
not earlier than the other's begin. Together, the calls bound the difference of the two clocks on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pynccl._trace.dumps import JOINT, World


class Offset(NamedTuple):
    """How far a host's clock is ahead, and how exactly this is known, in ns."""

    ahead: int
    exact: int


class Clocks(NamedTuple):
    """The offsets of the hosts that are known; others are taken to be right."""

    offsets: dict[str, Offset]
    hosts: set[str]

    def ahead(self, host: str) -> int:
        """Return how far a host's clock is ahead of the first host's."""
        return self.offsets[host].ahead if host in self.offsets else 0

    def __str__(self) -> str:
        if len(self.hosts) < 2:
            return ""
        if len(self.offsets) < 2:
            return "The hosts' clocks are not aligned: no call that all ranks made connects them."
        most, exact = (
            max(abs(o.ahead) for o in self.offsets.values()),
            max(o.exact for o in self.offsets.values()),
        )
        text = (
            f"The clocks of {len(self.offsets)} hosts are aligned by calls that all ranks completed: "
            f"they differed by up to {_say(most)}, which is known to within {_say(exact)}."
        )
        if len(self.offsets) == len(self.hosts):
            return text
        others = ", ".join(sorted(self.hosts - set(self.offsets)))
        return f"{text} These hosts' clocks are not aligned, as no such call connects them: {others}."


def _say(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns} ns"


# The lowest and the highest difference between two hosts' clocks that the calls permit.
_Bounds = tuple[int, int]


def align(worlds: Sequence[World]) -> Clocks:
    """Measure the hosts' clocks against that of the lowest rank's host."""
    hosts = [m.process.host for world in worlds for m in world.members.values()]
    if not hosts:
        return Clocks({}, set())
    bounds: dict[tuple[str, str], _Bounds] = {}
    for world in worlds if len(set(hosts)) > 1 else ():
        _narrow(bounds, world)
    neighbours: dict[str, dict[str, Offset]] = {}
    for (one, other), (low, high) in bounds.items():
        ahead, exact = (low + high) // 2, abs(high - low) // 2
        neighbours.setdefault(one, {})[other] = Offset(ahead, exact)
        neighbours.setdefault(other, {})[one] = Offset(-ahead, exact)
    found, reached = {hosts[0]: Offset(0, 0)}, [hosts[0]]
    for host in reached:
        for other, offset in neighbours.get(host, {}).items():
            if other not in found:
                before = found[host]
                found[other] = Offset(before.ahead + offset.ahead, before.exact + offset.exact)
                reached.append(other)
    return Clocks(found, set(hosts))


def _narrow(bounds: dict[tuple[str, str], _Bounds], world: World) -> None:
    """Narrow the bounds between the host of the lowest rank and each other host."""
    calls: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for member in world.members.values():
        for record in member.records:
            complete = record.state == "done" and record.end_ns is not None
            if complete and record.seq is not None and record.call in JOINT and record.count != 0:
                times = calls.setdefault(record.seq, {}).setdefault(member.process.host, [])
                times.append((record.time_ns, record.end_ns or 0))
    for by_host in calls.values():
        (one, first), *others = by_host.items()
        begin, end = max(t for t, _ in first), min(t for _, t in first)
        for other, times in others:
            low, high = max(t for t, _ in times) - end, min(t for _, t in times) - begin
            known = bounds.get((one, other), (low, high))
            bounds[one, other] = max(low, known[0]), min(high, known[1])
