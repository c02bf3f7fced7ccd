"""The command line: `pynccl` and `python -m pynccl`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from pynccl import _package
from pynccl._errors import NcclError
from pynccl._library import cuda, discovery, loader
from pynccl._run.launch import add_run_parser
from pynccl._trace.command import add_trace_parser
from pynccl._version import __version__


class _Parser(argparse.ArgumentParser):
    """A parser whose subcommands refuse what they do not know with a usage of their own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; with arguments that are not known end the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("pynccl", description="NCCL from Python.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_run_parser(commands)
    add_trace_parser(commands)
    info = commands.add_parser("info", help="print versions, libraries and devices")
    info.set_defaults(command=_info)
    cpu = commands.add_parser("cpu-library", help="print the path of the CPU library")
    cpu.add_argument("--dir", action="store_true", help="the folder of libnccl.so.2 and its headers instead")
    cpu.set_defaults(command=_cpu_library)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except NcclError as error:
        print(f"pynccl: {error}", file=sys.stderr)
        return 1


def _cpu_library(args: argparse.Namespace) -> int:
    print(discovery.forward_folder() if args.dir else discovery.cpu_library())
    return 0


def _info(_: argparse.Namespace) -> int:
    """Say what there is, and what is missing."""
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
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
