"""Processes that tests start: their output is text, and none may last for ever."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def completed(
    command: Sequence[Any], timeout: float = 50, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit code and what it has written."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def piped(command: Sequence[Any], **options: Any) -> subprocess.Popen[str]:
    """Start a command whose output the test reads."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes | options)


def refusing_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a compiler that fails, and the file to which it writes its arguments."""
    said, compiler = folder / "arguments", folder / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit 1\n')
    compiler.chmod(0o755)
    return compiler, said
