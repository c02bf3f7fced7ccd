"""The command line of `pynccl doctor`: checks this machine, or the job of which this process is a rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click

from pynccl._base.colours import coloured
from pynccl._base.options import Seconds
from pynccl._base.values import rank_list
from pynccl._errors import NcclError
from pynccl._tools.doctor import devices, environment, job, libraries, limits, network, transports
from pynccl._tools.doctor.finding import LEVELS, Finding, error, ok, worst
from pynccl._tools.machine import Machine
from pynccl._trace.dumps import printable
from pynccl.bootstrap import _environment

Check = Callable[[Machine], Iterator[Finding]]
_THEMES: dict[str, tuple[Check, ...]] = {
    "libraries": libraries.CHECKS,
    "devices": devices.CHECKS,
    "network": network.CHECKS,
    "limits": limits.CHECKS,
    "environment": environment.CHECKS,
    # These two are not checks of a machine alone.
    "job": (),
    "all_reduce": (),
}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there are warnings.")
@click.option(
    "--only",
    type=click.Choice(list(_THEMES)),
    multiple=True,
    help="Run only the checks of this theme; may be repeated. The same on every rank.",
)
@click.option(
    "--timeout",
    type=Seconds(1, 3600),
    default=30,
    show_default=True,
    help="Seconds for the ranks and the all_reduce.",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Read /proc, /sys, /dev and /etc below this folder.",
)
def doctor(as_json: bool, strict: bool, only: tuple[str, ...], timeout: float, root: Path) -> int:
    """Check this machine, or on ranks the job, and say what to do.

    Exits with 2 if there are errors.
    """
    # What pynccl.init warns of is among the findings.
    logging.getLogger("pynccl").setLevel(logging.ERROR)
    machine = Machine(root, dict(os.environ))
    with transports.logged():
        checks = [check for theme in only or _THEMES for check in _THEMES[theme]]
        findings = [finding for check in checks for finding in check(machine)]
        merged = _with_job(machine, findings, only, timeout)
    if merged is None:
        return 0
    print(_json(merged) if as_json else "\n".join(_lines(merged)), flush=True)
    level = worst([finding for finding, _ in merged])
    return 2 if level == "error" else 1 if level == "warning" and strict else 0


def _with_job(
    machine: Machine, findings: list[Finding], only: tuple[str, ...], timeout: float
) -> job.Merged | None:
    """Add the job's findings, or an all_reduce on this machine; return None on ranks other than 0."""
    themes = only or tuple(_THEMES)
    measures = "all_reduce" in themes
    contradictions = [found for found in environment.check_launcher(machine) if found.level == "error"]
    if contradictions:
        # Nobody knows how many ranks to wait for.
        new = contradictions if measures or "job" in themes else []
        return _own([*findings, *(found for found in new if found not in findings)])
    size = _environment.detect(machine.environ).size
    if size in (None, 1):
        nothing = [_no_job(size)] if "job" in only else []
        return _own([*findings, *nothing, *([transports.alone(timeout)] if measures else [])])
    try:
        return job.examine(machine, findings, themes, timeout)
    except (NcclError, OSError) as failure:
        return _own([*findings, _apart(failure)])


def _own(findings: list[Finding]) -> job.Merged:
    return [(finding, []) for finding in findings]


def _no_job(size: int | None) -> Finding:
    if size == 1:
        return ok("ranks", "this is the only rank of its job")
    return error(
        "ranks",
        "no launcher has started this process, so there is no job",
        "The checks of a job compare its ranks.",
        "Start it on every rank: pynccl run -n N --no-tag -m pynccl doctor",
    )


def _apart(failure: Exception) -> Finding:
    return error(
        "ranks",
        str(failure),
        "Creating a communicator needs every rank.",
        "Start all ranks of the job at the same time, and see the findings names and interface.",
    )


def _json(merged: job.Merged) -> str:
    found = [asdict(finding) | {"ranks": ranks} for finding, ranks in merged]
    return json.dumps({"worst": worst([finding for finding, _ in merged]), "findings": found}, indent=2)


def _lines(merged: job.Merged) -> Iterator[str]:
    """Yield the findings as text: level, check, what is so; below it why, and what to do."""
    width = max(len(finding.name) for finding, _ in merged)
    indent = " " * (width + 11)
    for finding, ranks in merged:
        where = f" ({rank_list(ranks)})" if ranks and finding.level != "ok" else ""
        level = coloured(f"{finding.level:8}", finding.level, sys.stdout)
        # Values of variables and answers of other machines may have control characters.
        yield f"{level} {finding.name:{width}}  {printable(finding.text)}{where}"
        if finding.why:
            yield f"{indent}why:   {printable(finding.why)}"
        if finding.fix:
            yield f"{indent}to do: {printable(finding.fix)}"
    counts = {level: sum(finding.level == level for finding, _ in merged) for level in LEVELS}
    text = f"errors: {counts['error']}, warnings: {counts['warning']}, ok: {counts['ok']}"
    yield coloured(text, worst([finding for finding, _ in merged]), sys.stdout)
