"""The command line of `pynccl run`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from pynccl._base.options import Integer
from pynccl._base.timeouts import LONGEST
from pynccl._run import remote
from pynccl._run.hosts import SSH, read_hosts, run_on
from pynccl._run.launch import MOST_RANKS, OWN, Job, launch
from pynccl._run.nodes import Node
from pynccl.bootstrap._address import parse_address

# The names of Python's interpreters.
_PYTHON = re.compile(r"python[\d.]*")


def ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the number of ranks that an option gives: 0 for auto, None without it."""
    if value is None:
        return None
    if value == "auto":
        return 0
    if not value.isascii() or not value.isdigit() or len(value) > 9 or not 1 <= int(value) <= MOST_RANKS:
        raise click.BadParameter(
            f"expected a number of ranks, 1 to {MOST_RANKS} on one machine, or auto, not {value!r}"
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


def _log_dir(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        # Path("") would be the working directory.
        raise click.BadParameter("expected a folder, not ''")
    return None if value is None else Path(value)


def _tee(ctx: click.Context, param: click.Parameter, value: str | None) -> frozenset[int] | None:
    if value is None:
        return None
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in value.split(",")):
        raise click.BadParameter(f"expected ranks with commas between them, such as 0 or 0,3, not {value!r}")
    return frozenset(map(int, value.split(",")))


def _variables(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in value:
        name, sign, content = text.partition("=")
        if not name:
            raise click.BadParameter(f"expected NAME or NAME=VALUE, not {text!r}")
        if name in OWN:
            raise click.BadParameter(
                f"{text}: expected another variable, since pynccl run sets {name} itself"
            )
        if not sign and name not in os.environ:
            raise click.BadParameter(f"{name} is not set here; expected {name}=VALUE")
        given[name] = content if sign else os.environ[name]
    return given


def _torchruns(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"--nproc-per-node is torchrun's; expected -n {value}")


_BEFORE = "before SCRIPT: what follows SCRIPT goes to the program"


# What follows SCRIPT is the program's, options included.
@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "-np",
    "--nranks",
    callback=ranks,
    metavar="N",
    help="Number of ranks; auto: one for each device, or for each core without devices. "
    "Required, except with --hosts if each line of the file has slots=N.",
)
@click.option("--cpu", is_flag=True, help="Use the CPU library (PYNCCL_LIBRARY=cpu).")
@click.option(
    "--direct",
    is_flag=True,
    help="Let the ranks of a machine read each other's memory where Yama forbids it (PYNCCL_CPU_PTRACER).",
)
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
    "--restarts",
    type=Integer(0, 1_000_000),
    default=0,
    metavar="N",
    help="Start all ranks again when one has failed or --timeout has passed, up to N times.",
)
@click.option(
    "-x", "variables", multiple=True, callback=_variables, metavar="NAME[=VALUE]", help="Set a variable."
)
@click.option(
    "--log-dir",
    type=click.Path(),
    callback=_log_dir,
    metavar="DIR",
    help="Write each rank's output to files, too: rank0.out, rank0.err.",
)
@click.option(
    "--tag/--no-tag",
    default=True,
    help="Begin each line of standard output with the rank, as each line of standard error.",
)
@click.option("--nnodes", type=Integer(1, 100_000), default=1, metavar="N", help="Number of machines.")
@click.option("--node-rank", type=Integer(0), metavar="I", help="Number of this machine, from 0.")
@click.option(
    "--store",
    metavar="HOST:PORT",
    help="Where machine 0 listens for the others, by a name or an address that they reach.",
)
@click.option(
    "--hosts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Start on the machines of this file, a HOST [slots=N] on each line, by ssh.",
)
@click.option("--ssh", metavar="COMMAND", help=f"With --hosts: the command for ssh; default: {SSH}.")
@click.option("--end-with-input", is_flag=True, hidden=True)
@click.option("--nproc-per-node", "--nproc_per_node", hidden=True, expose_value=False, callback=_torchruns)
@click.option(
    "--tee", callback=_tee, metavar="RANKS", help="Show only these ranks' output; --log-dir has all."
)
@click.option("--status", is_flag=True, help="Show the elapsed time and the running ranks in a terminal.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program of another language.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    nranks: int | None,
    cpu: bool,
    direct: bool,
    timeout: float | None,
    keep_going: bool,
    restarts: int,
    variables: dict[str, str],
    log_dir: Path | None,
    nnodes: int,
    node_rank: int | None,
    store: str | None,
    hosts: Path | None,
    ssh: str | None,
    end_with_input: bool,
    tag: bool,
    tee: frozenset[int] | None,
    status: bool,
    no_python: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run a program on several ranks of this machine, or of several.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as under
    torchrun, and finds the others by pynccl.init(). Ranks have no standard input: they read an empty one.
    """
    if tee is not None and log_dir is None:
        raise click.UsageError("--tee without --log-dir: the other ranks' output would be lost")
    if hosts is not None:
        return _on_hosts(click.get_current_context(), hosts)
    if ssh is not None:
        raise click.UsageError(f"--ssh {ssh!r}: expected --hosts, too")
    if nranks is None:
        raise click.UsageError(f"Missing option '-n', {_BEFORE}")
    if end_with_input:
        remote.end_with_input()
    node = _node(nnodes, node_rank, store, restarts)
    if tee is not None and node is None and nranks and max(tee) >= nranks:
        raise click.UsageError(f"--tee {max(tee)}: expected ranks below {nranks}")
    return launch(
        Job(
            [*_command(script, module, no_python), *args],
            nranks,
            cpu=cpu,
            direct=direct,
            timeout=timeout,
            keep_going=keep_going,
            restarts=restarts,
            variables=variables,
            log_dir=log_dir,
            tag=tag,
            tee=tee,
            status=status,
            node=node,
        )
    )


# What a launcher of a hosts file is told in another way, or not at all.
_NOT_FORWARDED = (
    "nranks",
    "nnodes",
    "node_rank",
    "store",
    "hosts",
    "ssh",
    "end_with_input",
    "script",
    "args",
)


def _on_hosts(ctx: click.Context, path: Path) -> int:
    """Run on the machines of a hosts file, with the other options of this command line."""
    given = ctx.params
    if given["node_rank"] is not None or given["nnodes"] != 1:
        raise click.UsageError("--hosts with --nnodes or --node-rank: the file's lines count the machines")
    if given["status"]:
        raise click.UsageError("--status with --hosts: expected one machine")
    try:
        found = read_hosts(path)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--hosts: {error}") from None
    if given["nranks"] is None and (unsaid := [host.name for host in found if host.slots is None]):
        raise click.UsageError(f"Missing option '-n', {_BEFORE}; or give {unsaid[0]} slots=N in {path}")
    ssh = _ssh(SSH if given["ssh"] is None else given["ssh"])
    if given["store"] is not None:
        _node(2, 0, given["store"])
    options = [text for param in ctx.command.params for text in _forwarded(param, given)]
    nranks = str(given["nranks"] or "auto")
    return run_on(found, ssh, nranks, given["store"], [*options, "--", given["script"], *given["args"]])


def _ssh(text: str) -> list[str]:
    expected = f"--ssh {text!r}: expected a command that can be executed"
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"{expected} ({error})") from None
    if not found or shutil.which(found[0]) is None:
        raise click.UsageError(expected)
    return found


def _forwarded(param: click.Parameter, given: dict[str, Any]) -> list[str]:
    """Return an option as it stands on a command line."""
    value = given.get(str(param.name))
    if param.name in _NOT_FORWARDED or value is None or value is False:
        return [param.secondary_opts[0]] if value is False and param.secondary_opts else []
    if isinstance(value, dict):
        return [text for pair in value.items() for text in (param.opts[0], "=".join(pair))]
    if isinstance(value, frozenset):
        return [param.opts[0], ",".join(map(str, sorted(value)))]
    return [param.opts[0]] if value is True else [param.opts[0], str(value)]


def _command(script: str, module: bool, no_python: bool) -> list[str]:
    if script in ("-", "/dev/stdin", "/proc/self/fd/0"):
        raise click.UsageError(f"SCRIPT is {script!r}; expected a file, since ranks have no standard input")
    if module and no_python:
        raise click.UsageError("-m and --no-python: expected one of them, since a module is a Python program")
    if no_python:
        found = shutil.which(script)
        if found is None:
            raise click.UsageError(f"SCRIPT is {script!r}; expected a program that can be executed")
        return [os.path.abspath(found)]
    if not module and _PYTHON.fullmatch(os.path.basename(script)) and shutil.which(script):
        raise click.UsageError(f"SCRIPT is {script!r}; leave it out: pynccl run starts Python itself")
    if not module and not os.path.exists(script):
        why = "there is no such file"
        if shutil.which(script):
            why += "; a program other than Python needs --no-python"
        raise click.UsageError(f"SCRIPT is {script!r}; {why}")
    if module and script.endswith(".py") and os.path.exists(script):
        raise click.UsageError(f"SCRIPT is {script!r}, a file; expected the name of a module after -m")
    if not module and os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise click.UsageError(f"SCRIPT is {script!r}, a folder; expected a program, or __main__.py in it")
    return [sys.executable, "-u", *(["-m", script] if module else [script])]


def _node(count: int, rank: int | None, store: str | None, restarts: int = 0) -> Node | None:
    """Return this machine among several; None if it is the only one."""
    if count == 1:
        if rank or store is not None:
            raise click.UsageError("--node-rank and --store: expected --nnodes, too, the number of machines")
        return None
    if rank is None or store is None:
        raise click.UsageError(f"--nnodes {count}: expected --node-rank and --store HOST:PORT, too")
    if rank >= count:
        raise click.UsageError(f"--node-rank {rank}: expected less than --nnodes, {count}")
    try:
        if not parse_address(store)[1]:
            raise ValueError("port 0")
    except ValueError as error:
        raise click.UsageError(f"--store {store}: expected HOST:PORT ({error})") from None
    return Node(rank, count, store, restarts)
