"""`pynccl trace`: analyses the dumps of all ranks, and writes them as a page or as Chrome trace events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pynccl._trace.dumps import Member, Process, TraceError, printable, read_all
from pynccl._trace.findings import explain, say
from pynccl._trace.recorder import TraceRecord, private_file


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


@click.command("trace")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--chrome", metavar="OUT", help="Write the calls as Chrome trace events (Perfetto).")
@click.option("--html", metavar="OUT", help="Write the calls and the report as one HTML page.")
def trace(files: tuple[str, ...], chrome: str | None, html: str | None) -> int:
    """Analyse the dumps of all ranks' flight recorders.

    Each FILE is a dump of a rank, or a folder of dumps. An OUT that exists is replaced.
    """
    try:
        dumps = read_all(files)
        text = explain(dumps)
        if chrome:
            _write("--chrome", chrome, json.dumps(chrome_events(dumps.members)).encode())
        if html:
            # Imported late: `pynccl run` starts without it.
            from pynccl._trace.timeline import page

            _write("--html", html, page(dumps, text))
    except (TraceError, OSError) as error:
        print(f"pynccl trace: {printable(str(error))}", file=sys.stderr)
        return 1
    # Names may have characters that the terminal's encoding lacks.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0
