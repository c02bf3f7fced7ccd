"""The command line: `pynccl` and `python -m pynccl`."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import ClassVar

import click

from pynccl import _package
from pynccl._errors import NcclError
from pynccl._library import cuda, discovery, loader
from pynccl._run.command import run
from pynccl._trace.command import trace
from pynccl._version import __version__


class _Cli(click.Group):
    """Imports a tool only when its subcommand is named: `pynccl run` starts without them."""

    _tools: ClassVar = {"bench": "pynccl._tools.bench.command"}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._tools])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._tools and cmd_name not in self.commands:
            module = importlib.import_module(self._tools[cmd_name])
            self.add_command(getattr(module, cmd_name))
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def cli() -> None:
    """NCCL from Python."""


cli.add_command(run)
cli.add_command(trace)


@cli.command("cpu-library")
@click.option(
    "--dir", "folder", is_flag=True, help="Print the folder of libnccl.so.2 and its headers instead."
)
def _cpu_library(folder: bool) -> None:
    """Print the path of the CPU library."""
    print(discovery.forward_folder() if folder else discovery.cpu_library())


@cli.command("info")
def _info() -> None:
    """Print versions, libraries and devices."""
    print(f"pynccl      {__version__}, Python {platform.python_version()}, {platform.platform()}")
    with warnings.catch_warnings():
        # The other libraries are listed below.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            info = loader.load()
        except NcclError as error:
            info = None
            lines = str(error).splitlines()
            print("\n".join([f"library     {lines[0]}", *(f"            {line}" for line in lines[1:])]))
    if info:
        print(f"library     {info.backend} {loader.version_text(info.version)}, {info.path}")
        print(f"found by    {info.how}")
        for path in info.others:
            print(f"also here   {path}")
    if other := _package.other_version():
        print(f"beware      {_package.other_text(other)}")
    print("\n".join(_machine()))


def _machine() -> Iterator[str]:
    try:
        yield f"CPU library {discovery.cpu_library()}"
    except NcclError as error:
        yield f"CPU library {error}"
    if cuda.available():
        yield f"CUDA driver {'.'.join(map(str, cuda.driver_version()))}"
        for device in range(cuda.device_count()):
            yield f"device {device:<4} {cuda.device_name(device)}, {cuda.device_uuid(device)}"
    else:
        yield f"CUDA driver none: {cuda.why_unavailable()}"
    for name in sorted(os.environ):
        if name.startswith(("NCCL_", "PYNCCL_")):
            yield f"environment {name}={'(set)' if 'SECRET' in name else os.environ[name]}"


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
        # The device of the output is full, for example.
        print(f"pynccl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
