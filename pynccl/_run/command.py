"""The command line of `pynccl run`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pynccl._run.launch import launch
from pynccl._timeouts import LONGEST

# As many as the CPU library takes on one machine.
_MOST_RANKS = 1024


def ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the number of ranks that an option gives; None without it."""
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 9 or not 1 <= int(value) <= _MOST_RANKS:
        raise click.BadParameter(
            f"expected a number of ranks, 1 to {_MOST_RANKS} on one machine, not {value!r}"
        )
    return int(value)


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise click.BadParameter(f"expected a positive number of seconds, not {value!r}")
    return min(seconds, LONGEST)


# What follows SCRIPT is the program's, options included.
@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-n", "-np", "--nranks", callback=ranks, metavar="N", required=True, help="Number of ranks.")
@click.option("--cpu", is_flag=True, help="Use the CPU library (PYNCCL_LIBRARY=cpu).")
@click.option(
    "--timeout",
    callback=_seconds,
    metavar="SECONDS",
    help="End ranks that still run after this number of seconds (exit code 124), and show their stacks.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="When a rank fails, let the others go on. The exit code is still that of the first to fail.",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write each rank's output to files, too: rank0.out, rank0.err.",
)
@click.option(
    "--tag/--no-tag",
    default=True,
    help="Begin each line of standard output with the rank, as each line of standard error.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    nranks: int,
    cpu: bool,
    timeout: float | None,
    keep_going: bool,
    log_dir: Path | None,
    tag: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run a Python program on several ranks of this machine.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as under
    torchrun, and finds the others by pynccl.init().
    """
    if script in ("-", "/dev/stdin", "/proc/self/fd/0"):
        raise click.UsageError(f"SCRIPT is {script!r}; expected a file, since ranks have no standard input")
    argv = [sys.executable, "-u", *(["-m", script] if module else [script]), *args]
    return launch(argv, nranks, cpu=cpu, timeout=timeout, keep_going=keep_going, log_dir=log_dir, tag=tag)
