"""`pynccl ras`: who is behind, and who is missing, in a running job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType

import click

from pynccl._base.colours import Line, coloured, print_report
from pynccl._base.options import Integer, Seconds
from pynccl._errors import NcclError, NcclTimeoutError
from pynccl._library.results import result_name
from pynccl._trace.dumps import printable
from pynccl.ras.client import ADDRESS, TIMEOUT, parse_address, status
from pynccl.ras.report import Communicator, Lag, MissingRank, NoServer, Rank, Status

# Another rank serves within a second after the one that did has ended.
_TAKES_OVER_S = 1.5
_MOST_MISSED = 10


def _action(_: click.Context, __: click.Parameter, value: str) -> str:
    if value != "status":
        raise click.BadParameter(f"expected status, or --address {value}, not {value!r}")
    return value


def _host(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("expected a host, not ''")
    return value


@click.command("ras")
@click.argument("action", callback=_action, default="status", metavar="[status]")
@click.option("--address", metavar="HOST:PORT", help=f"The server; default: NCCL_RAS_ADDR, else {ADDRESS}.")
@click.option("--host", callback=_host, help="The server's host, in place of the address's.")
@click.option("--port", type=Integer(1, 65535), help="The server's port, in place of the address's.")
@click.option(
    "--timeout", type=Seconds(0, 86400, min_open=True), default=TIMEOUT, show_default=True,
    help="Seconds for the server to greet, and then for the ranks to answer it.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Show every rank that the server describes.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; with --follow one a line.")
@click.option(
    "--follow", type=Seconds(0.1, 86400), is_flag=False, flag_value=2.0, metavar="[SECONDS]",
    help="Ask again every SECONDS (2) until the job ends.",
)  # fmt: skip
@click.option(
    "--max-missed", type=Integer(1), metavar="N",
    help=f"With --follow: end when N answers in a row have not come; default: {_MOST_MISSED}.",
)  # fmt: skip
def ras(
    action: str,
    address: str | None,
    host: str | None,
    port: int | None,
    timeout: float,
    verbose: bool,
    as_json: bool,
    follow: float | None,
    max_missed: int | None,
) -> int:
    """Show the state of a running job, as its NCCL RAS server knows it.

    Exits with 2 if a rank is missing, behind or failed, with 1 if no server answered. With --follow it
    exits with 0 when the job ends, and with 1 when a server that is stopped does not answer any more.
    """
    if max_missed is not None and follow is None:
        raise click.UsageError(f"--max-missed {max_missed}: expected --follow, too")
    try:
        default_host, default_port = parse_address(address)
        where, number = host or default_host, port or default_port
        asked = f"[{where}]:{number}" if ":" in where else f"{where}:{number}"
        parse_address(asked)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        for found in _answers(asked, timeout, follow, max_missed or _MOST_MISSED):
            text = [("", _json(found, follow is None))] if as_json else lines(found, verbose)
            print_report(text, sys.stdout)
    except NcclError as error:
        print(coloured(f"pynccl ras: {error}", "error", sys.stderr), file=sys.stderr)
        return 1
    if follow is None:
        return 0 if found.ok else 2
    print(f"pynccl ras: the job has ended: nobody answers at {asked} any more", file=sys.stderr)
    return 0


def _answers(address: str, timeout: float, follow: float | None, most_missed: int) -> Iterator[Status]:
    """Yield the answer, or with `follow` one after the other until nobody answers any more."""
    yield status(address, timeout=timeout)
    missed = 0
    while follow is not None:
        time.sleep(follow)
        try:
            found = _status_or_successor(address, timeout)
        except NoServer:
            return
        except NcclTimeoutError as error:
            # The process that serves is stopped, or busy.
            missed += 1
            text = f"pynccl ras: {error} ({missed} of {most_missed} in a row)"
            print(coloured(text, "warning", sys.stderr), file=sys.stderr, flush=True)
            if missed == most_missed:
                raise NcclTimeoutError(
                    f"{missed} answers in a row have not come from {address}; --max-missed allows more"
                ) from None
            continue
        missed = 0
        yield found


def _status_or_successor(address: str, timeout: float) -> Status:
    """Return the state, also if another rank has to take over first."""
    try:
        return status(address, timeout=timeout)
    except NoServer:
        time.sleep(_TAKES_OVER_S)
    return status(address, timeout=timeout)


def _json(found: Status, indented: bool) -> str:
    fields = asdict(found) | {"ok": found.ok}
    del fields["raw"]
    return json.dumps(fields, indent=2 if indented else None)


def lines(
    found: Status, verbose: bool = False, names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Line]:
    """Yield the report; `names` has other names of communicators, by their hashes."""
    for level, line in _report(found, verbose, names):
        yield level, printable(line)


def _report(found: Status, verbose: bool, names: Mapping[str, str]) -> Iterator[Line]:
    yield "", f"NCCL {found.nccl_version or '(version unknown)'} at {found.address}"
    if found.processes is not None:
        counts = ((found.nodes, "node"), (found.processes, "process"), (found.devices, "GPU"))
        yield "", ", ".join(f"{count} {_plural(word, count or 0)}" for count, word in counts)
    for process in found.missing_processes or ():
        state = "is dead" if process.dead else "does not answer"
        yield "error", f"process {process.pid} on {process.host} {state} (GPU {process.devices})"
    yield "", f"{found.communicator_count} {_plural('communicator', found.communicator_count)}"
    for group in found.groups or ():
        errors = ",".join(group.errors) or "OK"
        level = "error" if group.errors else "ok"
        text = f"{group.communicators} of {group.size} ranks on {group.nodes} nodes: {group.status} {errors}"
        yield level, f"  {text}"
    for one in found.communicators:
        yield from _communicator(one, verbose, names.get(one.hash, ""))


def _communicator(one: Communicator, verbose: bool, name: str) -> Iterator[Line]:
    ranks = "size unknown" if one.size is None else f"{one.size} {_plural('rank', one.size)}"
    named = f"{one.hash} ({name})" if name else one.hash
    text = f"communicator {named}, {ranks}: {one.status or 'status unknown'} {','.join(one.errors) or 'OK'}"
    yield "error" if one.errors else "ok", text
    for lag in one.lagging:
        yield "warning", f"  {_behind(lag)}{_whereabouts(lag, one.ranks or ())}"
    for missing in one.missing or ():
        yield "error", f"  rank {missing.rank} {_absence(missing)}{_place(missing)}"
    if one.missing is None:
        yield "", "  missing ranks are not listed"
    for rank in one.ranks or ():
        if rank.failed:
            code = rank.init_state if rank.init_state not in (0, 7) else rank.async_error
            yield "error", f"  rank {rank.rank} has failed: {result_name(code or 0)}{_place(rank)}"
        if rank.state != one.status and rank.state is not None:
            yield "warning", f"  rank {rank.rank} is in state {rank.state}{_place(rank)}"
        if verbose:
            counts = ", ".join(f"{name} {count}" for name, count in (rank.counts or {}).items() if count)
            yield "", f"  rank {rank.rank}: {rank.state}, {counts or 'no collectives'}{_place(rank)}"


def _behind(lag: Lag) -> str:
    if lag.ranks is None:
        who, have = f"{lag.count} ranks", "have"
    elif len(lag.ranks) == 1:
        who, have = f"rank {lag.ranks[0]}", "has"
    else:
        shown = ", ".join(map(str, lag.ranks[:10])) + (", ..." if len(lag.ranks) > 10 else "")
        who, have = f"ranks {shown}", "have"
    name = lag.operation or "collective"
    return f"{who} {have} launched {lag.launched} of {lag.furthest} {name} operations"


def _whereabouts(lag: Lag, ranks: tuple[Rank, ...]) -> str:
    return next((_place(rank) for rank in ranks if lag.ranks == (rank.rank,)), "")


def _absence(missing: MissingRank) -> str:
    if missing.dead:
        return "is dead"
    return "has left" if missing.unresponsive is False else "does not answer"


def _place(rank: Rank | MissingRank) -> str:
    known = {"process": rank.pid, "on": rank.host, "GPU": rank.device}
    text = " ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return f" ({text})" if text else ""


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + ("es" if word.endswith("s") else "s")
