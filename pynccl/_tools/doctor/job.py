"""The ranks of a job compared: who came, versions, variables, interfaces, connections, and an all_reduce."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pynccl._base.host import loopback
from pynccl._base.values import rank_list
from pynccl._base.version import __version__
from pynccl._errors import NcclError, RankFailedError
from pynccl._library import cuda, loader
from pynccl._tools.doctor import network, probe, transports
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded
from pynccl._tools.machine import Machine
from pynccl.bootstrap import _environment, _methods
from pynccl.bootstrap._exchange import Exchange
from pynccl.bootstrap._variables import PRIVATE

_SHARED = {"PYNCCL_CHECK", "PYNCCL_TIMEOUT"}
_CONNECT_SECONDS = 3.0
_CLOCK_SECONDS = 0.5
# The part of the time in which the ranks must have come; the rest is for what follows.
_ARRIVAL = 0.5
# Launchers kill ranks 5 s after SIGTERM: seconds until then to wait for other ranks, and for their reports.
_PATIENCE, _LAST_SECONDS = 1, 2.0


@dataclass(frozen=True)
class Report:
    """What a rank says of itself."""

    host: str
    place: str
    versions: dict[str, str]
    variables: dict[str, str]
    # The processors on which it may run.
    cores: list[int]
    mtu: tuple[str, int] | None
    listener: tuple[str, int] | None
    findings: list[dict[str, str]]


# Each finding with the ranks that have it.
Merged = list[tuple[Finding, list[int]]]


def examine(
    machine: Machine, findings: Sequence[Finding], themes: Sequence[str], timeout: float
) -> Merged | None:
    """Compare the ranks, and return all findings on rank 0; None on the others."""
    launcher = _environment.detect(machine.environ)
    chosen = _methods.choose(None, None, None, launcher, None)
    deadline = time.monotonic() + timeout
    with probe.Listener(network.listener_host(machine)) as listener:
        mine = _report(machine, findings, listener.address)
        with chosen.open(time.monotonic() + timeout * _ARRIVAL) as exchange:
            return _meet(exchange, mine, themes, deadline)


def _report(machine: Machine, findings: Sequence[Finding], listener: tuple[str, int]) -> Report:
    names = [
        name
        for name in machine.environ
        if name in _SHARED or (name.startswith("NCCL_") and name not in PRIVATE and "SECRET" not in name)
    ]
    return Report(
        socket.gethostname(),
        loopback(),
        _versions(),
        {name: machine.environ[name] for name in names},
        sorted(os.sched_getaffinity(0)),
        network.mtu(machine),
        listener,
        [asdict(finding) for finding in findings],
    )


def _versions() -> dict[str, str]:
    library = loaded()
    found = {"pynccl": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    if not isinstance(library, NcclError):
        kind = "the CPU library" if library.backend == "cpu" else "NCCL"
        found["library"] = f"{kind} {loader.version_text(library.version)}"
    if cuda.available():
        found["CUDA driver"] = ".".join(map(str, cuda.driver_version()))
    return found


def _meet(exchange: Exchange, mine: Report, themes: Sequence[str], deadline: float) -> Merged | None:
    came = exchange.collect("report", json.dumps(asdict(mine)).encode())
    complete = len(came) == exchange.size
    reports = {rank: Report(**json.loads(said)) for rank, said in came.items()}
    answer = exchange.announce("reports", json.dumps(_listeners(reports) if complete else None).encode())
    listeners = json.loads(answer)
    merged = merge(reports) if exchange.rank == 0 else None
    if listeners is None:
        if merged is not None:
            missing = [rank for rank in range(exchange.size) if rank not in came]
            merged.append((_absent(missing, exchange.size), []))
        return merged
    # The ranks' arrival had only a part of the time.
    exchange.deadline = deadline
    probes = exchange.collect("probes", json.dumps(_probe(listeners, exchange.rank)).encode())
    usable = "all_reduce" in themes and _all_reachable(probes, exchange.size)
    usable = exchange.announce("usable", b"1" if usable else b"0") == b"1"
    if not usable:
        # After a rank that did not answer there is no time left, and rank 0's store must outlast the others.
        deadline = exchange.deadline = max(deadline, time.monotonic() + _LAST_SECONDS)
    ends = _ends(exchange, deadline, usable)
    if merged is None:
        return None
    found = [*compare(reports), *_silent(probes, exchange.size), *_connections(reports, listeners, probes)]
    # Errors stand in the way of every theme.
    merged += [(finding, []) for finding in found if "job" in themes or finding.level == "error"]
    if usable:
        merged += [(finding, []) for finding in _ended(ends, exchange.size)]
    return merged


def _absent(missing: list[int], size: int) -> Finding:
    return error(
        "ranks",
        f"{rank_list(missing)} of {size} did not come",
        "Creating a communicator waits for every rank.",
        "Look for the output of that rank: it was not started, cannot reach rank 0, or still starts.",
    )


def _silent(probes: dict[int, bytes], size: int) -> Iterator[Finding]:
    if ranks := [rank for rank in range(size) if rank not in probes]:
        yield error(
            "ranks",
            f"{rank_list(ranks)} of {size} came, then did not answer",
            "A collective waits for every rank.",
            "Look at that process, ps -o pid,stat,wchan: it is stopped, or waits for a disk or a network.",
        )


def merge(reports: dict[int, Report]) -> Merged:
    """Return rank 0's findings, and warnings and errors of all ranks, equal ones once."""
    ranks: defaultdict[Finding, list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items()):
        for said in report.findings:
            if rank == 0 or said["level"] != "ok":
                ranks[Finding(**said)].append(rank)  # type: ignore[arg-type]
    return list(ranks.items())


# --- comparison ---------------------------------------------------------------------------------------------


def compare(reports: dict[int, Report]) -> Iterator[Finding]:
    """Compare what the ranks said of themselves."""
    hosts = {report.place: report.host for report in reports.values()}
    plural = "s" if len(hosts) > 1 else ""
    yield ok("ranks", f"all {len(reports)} came, on {len(hosts)} machine{plural}")
    yield from _compare_versions(reports)
    yield from _compare_variables(reports)
    yield from _compare_cores(reports)
    yield from _compare_mtu(reports)


def _differs(reports: dict[int, Report], of: Callable[[Report], Hashable]) -> str:
    """Return the values with their ranks as text; "" if every rank has the same."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items()):
        groups[of(report)].append(rank)
    if len(groups) == 1:
        return ""
    return ", ".join(
        f"{'not set' if value is None else value} on {rank_list(ranks)}" for value, ranks in groups.items()
    )


def _compare_versions(reports: dict[int, Report]) -> Iterator[Finding]:
    names = list(dict.fromkeys(name for report in reports.values() for name in report.versions))
    for name in names:
        text = _differs(reports, lambda report, name=name: report.versions.get(name))  # type: ignore[misc]
        if text and name in ("library", "pynccl"):
            yield error(
                "versions",
                f"{name} differs: {text}",
                "Ranks with different libraries cannot make a communicator.",
                "Install the same release on every machine.",
            )
        elif text:
            yield warning(
                "versions",
                f"{name} differs: {text}",
                "Programs may behave differently on some ranks.",
                "Use the same on every machine.",
            )
        else:
            yield ok("versions", f"{name} {reports[0].versions[name]} on every rank")


def _compare_variables(reports: dict[int, Report]) -> Iterator[Finding]:
    names = sorted({name for report in reports.values() for name in report.variables})
    differing = {
        name: text
        for name in names
        if (text := _differs(reports, lambda report, name=name: report.variables.get(name)))  # type: ignore[misc]
    }
    for name, text in differing.items():
        yield warning(
            "variables of ranks",
            f"{name} differs: {text}",
            "Ranks that choose different algorithms or transports hang or fail.",
            f"Set {name} for all ranks: pynccl run -x {name}=VALUE, mpirun -x {name}.",
        )
    if not differing:
        yield ok("variables of ranks", "equal")


def _compare_cores(reports: dict[int, Report]) -> Iterator[Finding]:
    """Compare the ranks of each machine with the processors on which they may run together."""
    machines: defaultdict[str, list[Report]] = defaultdict(list)
    for report in reports.values():
        machines[report.place].append(report)
    crowded = False
    for ranks in machines.values():
        cores = set[int]().union(*(report.cores for report in ranks))
        if len(ranks) > len(cores):
            crowded = True
            yield warning(
                "processors",
                f"{len(ranks)} ranks on {ranks[0].host}, and {len(cores)} of its processors for them",
                "Ranks that share a processor wait for each other's time slices.",
                "Start fewer ranks, or give the job more: srun --cpus-per-task, mpirun --bind-to none.",
            )
    if not crowded:
        yield ok("processors", "no machine has more ranks than processors for them")


def _compare_mtu(reports: dict[int, Report]) -> Iterator[Finding]:
    text = _differs(reports, lambda report: report.mtu[1] if report.mtu else None)
    if text:
        yield warning(
            "MTU",
            f"differs: {text}",
            "Large packets of some ranks are dropped: small messages pass, large ones hang.",
            "ip link set dev INTERFACE mtu VALUE, the same on every machine and switch.",
        )
    elif reports[0].mtu:
        yield ok("MTU", f"{reports[0].mtu[1]} on every rank")


# --- connections between machines ---------------------------------------------------------------------------


def _listeners(reports: dict[int, Report]) -> dict[str, list[object]]:
    """Return the first rank of each machine, with its address."""
    first: dict[str, int] = {}
    for rank, report in sorted(reports.items()):
        first.setdefault(report.place, rank)
    return {str(rank): list(reports[rank].listener or ()) for rank in first.values()}


def _probe(listeners: dict[str, list[object]], rank: int) -> dict[str, probe.Answer]:
    """Connect to every other machine, if this rank is the first of its own."""
    if str(rank) not in listeners or len(listeners) == 1:
        return {}
    others = {other: (str(at[0]), int(str(at[1]))) for other, at in listeners.items() if other != str(rank)}
    with ThreadPoolExecutor(min(len(others), 32)) as pool:
        answers = pool.map(lambda at: probe.ask(at, _CONNECT_SECONDS), others.values())
        return dict(zip(others, answers, strict=True))


def _answers(probes: dict[int, bytes]) -> Iterator[tuple[int, int, probe.Answer]]:
    for rank, said in sorted(probes.items()):
        for other, answer in json.loads(said).items():
            yield rank, int(other), probe.Answer(*answer)


def _all_reachable(probes: dict[int, bytes], size: int) -> bool:
    return len(probes) == size and not any(answer.failure for *_, answer in _answers(probes))


def _connections(
    reports: dict[int, Report], listeners: dict[str, list[object]], probes: dict[int, bytes]
) -> Iterator[Finding]:
    yield from (
        error(
            "connections",
            f"rank {rank} on {reports[rank].host} cannot reach rank {other} on {reports[other].host} "
            f"at {listeners[str(other)][0]}: {answer.failure}",
            "Ranks connect to each other at ports that the system chooses.",
            "Open the firewall between the machines, or set NCCL_SOCKET_IFNAME to a network that both have.",
        )
        for rank, other, answer in _answers(probes)
        if answer.failure
    )
    if len(listeners) > 1 and _all_reachable(probes, len(reports)):
        yield ok("connections", f"each of {len(listeners)} machines reaches every other")
    yield from _clocks(reports, probes)


def _clocks(reports: dict[int, Report], probes: dict[int, bytes]) -> Iterator[Finding]:
    known = [(other, answer.offset) for rank, other, answer in _answers(probes) if rank == 0]
    offsets = [(other, offset) for other, offset in known if offset is not None]
    late = [(other, offset) for other, offset in offsets if abs(offset) > _CLOCK_SECONDS]
    for other, offset in late:
        yield warning(
            "clocks",
            f"the clock of {reports[other].host} (rank {other}) is {abs(offset):.1f} s "
            f"{'ahead of' if offset > 0 else 'behind'} rank 0's",
            "Times in logs and traces of the ranks cannot be compared.",
            "Run chrony or ntpd on every machine: timedatectl set-ntp true",
        )
    if offsets and not late:
        most = max(abs(offset) for _, offset in offsets)
        yield ok("clocks", f"differ by at most {most * 1000:.0f} ms from rank 0's")


# --- all_reduce ---------------------------------------------------------------------------------------------


class _GivenUp(KeyboardInterrupt):
    """SIGTERM has come, and what this rank waits for has not."""


@contextmanager
def _ends_later() -> Iterator[None]:
    """Leave time to report a rank that has died after SIGTERM, by which a launcher ends the others."""

    def give_up(*_: object) -> None:
        raise _GivenUp

    handlers = {signal.SIGTERM: lambda *_: signal.alarm(_PATIENCE), signal.SIGALRM: give_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _ends(exchange: Exchange, deadline: float, usable: bool) -> dict[int, bytes]:
    """Measure if the ranks can, and return on rank 0 what each says of it: None if it has given up."""
    try:
        with _ends_later():
            times = _measure(exchange, deadline) if usable else None
            return exchange.collect("end", json.dumps(times).encode())
    except _GivenUp:
        exchange.deadline = min(deadline, time.monotonic() + _LAST_SECONDS)
        return exchange.collect("end", b"null")


def _measure(exchange: Exchange, deadline: float) -> transports.Times | dict[str, Any]:
    """Return the times, or the text of the failure and whether another rank has caused it."""
    # Rank 0 also has to hear of it.
    now = time.monotonic()
    try:
        return transports.measure(exchange.rank, exchange.size, now + 0.7 * (deadline - now))
    except RankFailedError as failure:
        exchange.deadline = min(deadline, time.monotonic() + _LAST_SECONDS)
        # Nothing else has to be waited for.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(0)
        return {"text": transports.reason(failure), "other": True}
    except Exception as failure:
        return {"text": transports.reason(failure), "other": False}


def _ended(ends: dict[int, bytes], size: int) -> Iterator[Finding]:
    said = {rank: json.loads(end) for rank, end in ends.items()}
    failures = [(end["other"], rank, end["text"]) for rank, end in said.items() if isinstance(end, dict)]
    silent = [rank for rank in range(size) if rank not in said]
    if said[0] is None:
        # Others fail since this rank has given up.
        yield transports.failed(f"{rank_list(silent)} did not finish" if silent else "SIGTERM ended it")
    elif failures:
        # The rank that has caused it says why.
        _, rank, text = min(failures)
        yield transports.failed(f"rank {rank}: {text}")
    elif silent:
        yield transports.failed(f"{rank_list(silent)} did not finish")
    else:
        yield transports.finding(size, [(asked, used, spent) for asked, used, spent in said[0]])
