"""`pynccl trace`: analyses dumps, and writes them as a page or as Chrome trace events."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from pynccl._base.colours import Line, coloured, print_report
from pynccl._base.options import Seconds
from pynccl._tools.live import ask, listeners, names
from pynccl._trace.dumps import GAVE_NO_DUMP, Dumps, Member, Process, TraceError, printable, read_all
from pynccl._trace.findings import explain, say
from pynccl._trace.recorder import TraceRecord, private_file
from pynccl.ras.client import ADDRESS, TIMEOUT, parse_address, status
from pynccl.ras.command import lines as report
from pynccl.ras.report import RasError


def chrome_events(members: Iterable[Member]) -> dict[str, Any]:
    """Return the calls as Chrome trace events, a process for each rank and a thread for each communicator."""
    events: list[dict[str, Any]] = []
    threads: dict[str, int] = {}
    pids: dict[str, int] = {}
    for member in members:
        process, identity = member.process, member.comm
        pid = pids.setdefault(process.path, member.process_rank)
        thread = threads.setdefault(identity, len(threads))
        host = f"{process.host}, {process.pid}"
        place = {"pid": pid, "tid": thread}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {pid} ({host})"}})
        name = member.name or member.origin
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"{name} {identity}"}})
        for record in member.records:
            events.append({**place, **_event(record, process)})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _event(record: TraceRecord, process: Process) -> dict[str, Any]:
    kept = {name: value for name, value in vars(record).items() if value is not None}
    event: dict[str, Any] = {
        "name": say(record),
        "cat": record.call,
        "ts": record.time_ns / 1000,
        "args": kept,
    }
    end = process.written_ns if record.state == "called" else record.end_ns
    if end is None:
        # The time of its end is unknown.
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": max(0, end - record.time_ns) / 1000}


def _write(option: str, path: str, content: bytes) -> None:
    """Write a private file, or replace it at once; nothing is left of a file that cannot be completed."""
    if path.endswith(".jsonl"):
        # As in `pynccl trace --html traces/*.jsonl`.
        raise TraceError(f"{option}: {path!r} has the name of a dump; expected the name of the file to write")
    try:
        with private_file(Path(path)) as fd, open(fd, "wb", closefd=False) as file:
            file.write(content)
    except OSError as error:
        raise TraceError(f"{option}: {path!r} cannot be written: {error.strerror}") from error


def _named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("expected the name of a file, not ''")
    return value


@click.command("trace")
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path())
@click.option(
    "--chrome", metavar="OUT", callback=_named, help="Write the calls as Chrome trace events (Perfetto)."
)
@click.option(
    "--html", metavar="OUT", callback=_named, help="Write the calls and the report as one HTML page."
)
@click.option("--live", is_flag=True, help="Ask the running processes of this machine, and the RAS server.")
@click.option("--address", metavar="HOST:PORT", help=f"With --live: the RAS server; default: {ADDRESS}.")
@click.option(
    "--timeout", type=Seconds(0, 86400, min_open=True),
    help=f"With --live: seconds for the answers; default: {TIMEOUT:g}.",
)  # fmt: skip
def trace(
    files: tuple[str, ...],
    chrome: str | None,
    html: str | None,
    live: bool,
    address: str | None,
    timeout: float | None,
) -> int:
    """Analyse the dumps of all ranks' flight recorders.

    Each FILE is a dump of a rank, or a folder of dumps. An OUT that exists is replaced. With --live the ranks
    of this machine that run with PYNCCL_TRACE_SIGNAL dump now, and FILEs are the folders of their dumps; the
    report ends with what NCCL's RAS server knows of all ranks.
    """
    if not files and not live:
        raise click.UsageError("Missing argument 'FILE...'; expected dumps, folders of dumps, or --live")
    if address is not None and not live:
        raise click.UsageError(f"--address {address}: expected --live, too")
    if timeout is not None and not live:
        raise click.UsageError(f"--timeout {timeout:g}: expected --live, too")
    if html is not None and chrome is not None and os.path.abspath(html) == os.path.abspath(chrome):
        raise click.UsageError(f"--html and --chrome are both {html}; expected different files")
    try:
        if live:
            dumps, lines = _live(files, address, TIMEOUT if timeout is None else timeout)
        else:
            dumps = read_all(files)
            lines = explain(dumps)
        if chrome:
            _write("--chrome", chrome, json.dumps(chrome_events(dumps.members)).encode())
        if html:
            # Imported late: `pynccl run` starts without it.
            from pynccl._trace.timeline import page

            _write("--html", html, page(dumps, "\n".join(text for _, text in lines)))
    except (TraceError, OSError) as error:
        print(coloured(f"pynccl trace: {printable(str(error))}", "error", sys.stderr), file=sys.stderr)
        return 1
    print_report(lines, sys.stdout)
    return 0


def _live(folders: tuple[str, ...], address: str | None, seconds: float) -> tuple[Dumps, list[Line]]:
    """Return fresh dumps, and the report on them and on what RAS knows."""
    try:
        parse_address(address)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    asked = listeners(folders)
    with ThreadPoolExecutor(1) as pool:
        # At the same time, so that both tell of one moment.
        answer = pool.submit(status, address, timeout=seconds)
        paths, failures = ask(asked, seconds)
    dumps = read_all(paths)._replace(absence=GAVE_NO_DUMP) if paths else Dumps([], [])
    lines: list[Line] = [("warning", text) for text in failures]
    if dumps.members:
        lines = [*explain(dumps), *lines]
    elif not any(one.number for one in asked):
        text = "no process of yours listens here: start the ranks with PYNCCL_TRACE_SIGNAL=USR2"
        lines.append(("warning", text))
    try:
        found = answer.result()
    except (RasError, OSError) as error:
        lines.append(("warning", f"RAS: {error}"))
        if not dumps.members:
            raise TraceError("; ".join(text for _, text in lines)) from error
    else:
        lines += report(found, names=names(found, dumps))
    return dumps, lines
