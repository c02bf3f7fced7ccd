"""The command line: `pynccl` and `python -m pynccl`."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import click

from pynccl._errors import NcclError, descriptor_limit
from pynccl._library import discovery
from pynccl._run.command import run


class _Cli(click.Group):
    """Imports a tool only when its subcommand is named: `pynccl run` starts without them."""

    _tools: ClassVar = {
        "bench": "pynccl._tools.bench.command",
        "doctor": "pynccl._tools.doctor.command",
        "info": "pynccl._tools.info",
        "ras": "pynccl.ras.command",
        "trace": "pynccl._tools.trace",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._tools])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._tools and cmd_name not in self.commands:
            module = importlib.import_module(self._tools[cmd_name])
            self.add_command(getattr(module, cmd_name))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            # Click suggests only commands that it has.
            for name in self._tools:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # Exit as a program that writes to a closed pipe; click would exit with 1.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE


_VERSION = "Print the version, and that of the NCCL library."


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        print(importlib.import_module("pynccl._tools.info").version())
        ctx.exit()


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help=_VERSION
)
def cli() -> None:
    """NCCL from Python."""


cli.add_command(run)


@cli.command("cpu-library")
@click.option(
    "--dir", "folder", is_flag=True, help="Print the folder of libnccl.so.2 and its headers instead."
)
def _cpu_library(folder: bool) -> None:
    """Print the path of the CPU library."""
    print(discovery.forward_folder() if folder else discovery.cpu_library())


def _replace_closed_output() -> None:
    """Give a program that was started with a closed stdout or stderr one that goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    _replace_closed_output()
    try:
        return int(cli.main(argv, prog_name="pynccl", standalone_mode=False) or 0)
    except NcclError as error:
        print(f"pynccl: {error}", file=sys.stderr)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except OSError as error:
        # A file's error has its name.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None
        print(
            f"pynccl: {'standard output: ' if full else ''}{error}{descriptor_limit(error)}", file=sys.stderr
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
