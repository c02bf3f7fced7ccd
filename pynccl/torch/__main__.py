"""The command line of the torch backend: `python -m pynccl.torch build`."""

from __future__ import annotations

import sys

import click

from pynccl._errors import NcclError
from pynccl.torch._build import build


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The torch backend of pynccl."""


@cli.command("build")
def _build_ahead() -> None:
    """Compile the backend before its first import, and print its path."""
    try:
        path, compiled = build()
    except NcclError as error:
        raise click.ClickException(str(error)) from None
    if not compiled:
        print("pynccl.torch: already compiled", file=sys.stderr)
    print(path)


if __name__ == "__main__":
    cli(prog_name="python -m pynccl.torch")
