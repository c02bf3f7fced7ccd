"""`pynccl trace`: analyses the dumps of all ranks, and converts them to Chrome trace events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pynccl._trace.dumps import Member, Process, TraceError, printable, read_all
from pynccl._trace.findings import explain, say
from pynccl._trace.recorder import TraceRecord


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


@click.command("trace")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--chrome", metavar="OUT", help="Write the calls as Chrome trace events (Perfetto).")
def trace(files: tuple[str, ...], chrome: str | None) -> int:
    """Analyse the dumps of all ranks' flight recorders.

    Each FILE is a dump of a rank, or a folder of dumps.
    """
    try:
        dumps = read_all(files)
        if chrome:
            Path(chrome).write_text(json.dumps(chrome_events(dumps.members)), encoding="utf-8")
    except (TraceError, OSError) as error:
        print(f"pynccl trace: {printable(str(error))}", file=sys.stderr)
        return 1
    text = explain(dumps)
    # Names may have characters that the terminal's encoding lacks.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0
