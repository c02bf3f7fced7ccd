"""The command line of the torch backend: `python -m pynccl.torch build`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pynccl._errors import NcclError
from pynccl.torch import _build


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pynccl.torch", description="The torch backend of pynccl.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser(
        "build", help="compile the backend, which the first import does otherwise, and print its path"
    )
    build.set_defaults(command=_build_ahead)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command())
    except NcclError as error:
        print(f"pynccl.torch: {error}", file=sys.stderr)
        return 1


def _build_ahead() -> int:
    path, compiled = _build.build()
    if not compiled:
        print("pynccl.torch: compiled already", file=sys.stderr)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
