"""Why targets of matrix.py are missed, as far as it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _report import MIB, Row, Target

KIB = 1 << 10
UNKNOWN = "not found"
# As _hosts.py limits the links.
QUEUE_SECONDS = 0.02


@dataclass(frozen=True)
class Miss:
    """A target that was missed, and the repetitions behind it."""

    setting: str
    target: Target
    row: Row
    ours: str
    peer: str

    @property
    def reached(self) -> float:
        """What was reached of the target."""
        return self.target.reached or 0.0

    @property
    def on_one_host(self) -> bool:
        """Whether no data cross a network."""
        return self.setting in ("direct", "staged")

    @property
    def on_links(self) -> bool:
        """Whether the hosts have links of a limited rate."""
        return self.setting.startswith("hosts")

    def behind(self) -> float:
        """Return by how many seconds the median is above the peer's."""
        return self.row.median(self.ours) - self.row.median(self.peer)

    def spreads(self) -> bool:
        """Tell whether the middle three of five repetitions reach the target with those of the peer."""
        needed = self.target.needed if self.target.at_most else 1 / self.target.needed
        first, last = _middle(self.row.seconds[self.ours])[0], _middle(self.row.seconds[self.peer])[-1]
        return first <= needed * last


def _middle(seconds: Sequence[float]) -> list[float]:
    outside = len(seconds) // 4
    return sorted(seconds)[outside : len(seconds) - outside]


@dataclass(frozen=True)
class Reason:
    """A reason, in one word and in sentences, and the misses that it explains."""

    word: str
    text: str
    explains: Callable[[Miss], bool]


# The first that explains a miss.
REASONS = (
    Reason(
        "spread",
        "The middle three of the five repetitions, ours and the peer's, overlap at the bound.",
        Miss.spreads,
    ),
    Reason(
        "link",
        "The time of the link: both need it, and the medians differ by at most 3 %.",
        lambda miss: miss.on_links and not miss.target.at_most and miss.reached >= 0.97,
    ),
    Reason(
        "queue",
        "The call takes 13 to 17 ms longer than the link alone, with 16 MiB as with 64: about what the queue "
        "of a link holds, behind which the results wait once. No segment is sent twice.",
        lambda miss: (
            miss.on_links
            and miss.row.op == "all_reduce"
            and miss.row.nbytes > MIB
            and miss.behind() <= QUEUE_SECONDS
        ),
    ),
    Reason(
        "compared",
        "Each rank compares the calls of all ranks before a result is written, in a broadcast, too. Open "
        "MPI's root returns before the others have called, so its calls overlap.",
        lambda miss: miss.row.op == "broadcast" and miss.row.nbytes <= 64 * KIB,
    ),
    Reason(
        "calls",
        "Each rank gets the calls of all others, which Open MPI combines on the way: n against log2(n). "
        "With more ranks than cores each look costs a scheduling of its process, whose caches are cold "
        "then.",
        lambda miss: miss.target.at_most,
    ),
    Reason(
        "messages",
        "After the comparison the parts go from each rank to each: n(n - 1) messages, in an all_reduce "
        "twice. Open MPI sends n log2(n). Recursive halving was tried: with 16 ranks an all_reduce of 64 KiB "
        "took 0.8 of the time, a reduce_scatter 0.6, an all_gather 1.5, since each of the log2(n) steps "
        "waits for a process to be scheduled.",
        lambda miss: miss.setting == "tcp" and miss.row.nbytes <= (MIB if miss.row.ranks > 8 else 64 * KIB),
    ),
    Reason(
        "chain",
        "Large data pass from host to host, so that each sends them once over its link. Here each step waits "
        "for a process to be scheduled. A tree was tried: with 8 ranks 0.92 in place of 0.80.",
        lambda miss: miss.setting == "tcp" and miss.row.op == "broadcast" and miss.row.nbytes <= MIB,
    ),
    Reason(
        "cores",
        "All ranks of all hosts share two cores: the link is idle while a rank waits for a core.",
        lambda miss: miss.on_links and miss.row.ranks > 4 and miss.row.nbytes <= MIB,
    ),
    Reason(
        "board",
        "Each rank copies its data to the board, and the others from there, where Open MPI's read them "
        "from their place: one copy more, which saves a wait for the peers at the end.",
        lambda miss: miss.setting == "direct" and miss.row.nbytes <= MIB,
    ),
    Reason(
        "memory",
        "Both copy each byte as often, once by the kernel or twice by themselves: the time is that of the "
        "memory, and 1.3 times the bandwidth cannot be had.",
        lambda miss: miss.on_one_host and miss.row.nbytes >= MIB and miss.reached >= 0.8,
    ),
    Reason(
        "loopback",
        "Both send the same bytes, and the kernel copies them: the time is that of its loopback device.",
        lambda miss: miss.setting == "tcp" and miss.row.nbytes >= MIB and miss.reached >= 0.8,
    ),
)


def reason_of(miss: Miss) -> str:
    """Return the word of the reason for a miss, or that none was found."""
    return next((reason.word for reason in REASONS if reason.explains(miss)), UNKNOWN)
