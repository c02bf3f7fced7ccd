"""Command lines that end before a rank starts, in this process: starting Python costs more than the test."""

from __future__ import annotations

from click.testing import CliRunner, Result

from pynccl.__main__ import cli


def pynccl_command(*args: str, **variables: str) -> Result:
    """Return the exit code and the output of `pynccl ARGS`."""
    return CliRunner().invoke(cli, args, prog_name="pynccl", env=dict(variables))
