"""Run the blocks of a page as a reader would: one folder, one shell, from top to bottom."""

from __future__ import annotations

import contextlib
import doctest
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from engines import environment
from processes import piped

from .pages import Block, blocks_of

BIN = Path(sys.executable).parent


def variables() -> dict[str, str]:
    """Return the environment of a reader who has this package's commands in the path."""
    return environment(
        PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
        # Containers and small machines.
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )


def shell(script: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a script, in a process group of its own."""
    return piped(
        ["bash", "-c", script],
        cwd=folder,
        env=env or variables(),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Wait, leave nothing running, and return the status and what was printed."""
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out


def finished(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for success, and return what was printed."""
    status, out = ended(process, seconds)
    assert status == 0, out
    return out


def populate(folder: Path) -> None:
    """Make a folder look like the checkout."""
    for name in ("examples", "tests"):
        (folder / name).symlink_to(ROOT / name)


def on_ranks(block: Block) -> tuple[str, str]:
    """Return how a Python block is started, and what stands before it: blocks that share both share a run."""
    if "ranks" in block.marks:
        return f"pynccl run -n {block.marks['ranks']} --cpu", block.setup
    if "mpirun" in block.marks:
        return f"mpirun -n {block.marks['mpirun']} python", block.setup
    return "python", block.setup


def copy_sources(folder: Path) -> None:
    """Make a folder look like a fresh clone, as far as building needs it."""
    built = shutil.ignore_patterns("__pycache__", "*.so", "*.so.*", "forward")
    shutil.copytree(ROOT / "pynccl", folder / "pynccl", ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)


@functools.lru_cache
def program(page: Path, start: str, setup: str) -> tuple[int, int, str]:
    """Run Python blocks of a page one after another; return ranks, status and output."""
    blocks = [b for b in blocks_of(page) if runs_python(b) and on_ranks(b) == (start, setup)]
    text = [setup, *(f"{block.text}\nprint('end of {block.name}', flush=True)" for block in blocks)]
    with tempfile.TemporaryDirectory(prefix="pynccl-page-") as folder:
        Path(folder, "program.py").write_text("\n".join(text))
        number = re.search(r" -n (\d+)", start)
        return int(number[1]) if number else 1, *ended(shell(f"{start} program.py", Path(folder)), 250)


def runs_python(block: Block) -> bool:
    return block.language == "python" and not block.file and not {"from", "not run"} & block.marks.keys()


@dataclass(frozen=True)
class Outcome:
    """What came of one command."""

    command: str
    expected: str
    status: int
    out: str
    err: str


@functools.lru_cache
def session(page: Path, slow: bool) -> dict[int, list[Outcome]]:
    """Run the console blocks of a page in one shell; return the outcomes by the blocks' lines.

    Without `slow` it leaves out the blocks that have this mark.
    """
    script, commands = [], []
    with tempfile.TemporaryDirectory(prefix="pynccl-page-") as name:
        folder = Path(name, "work")
        folder.mkdir()
        populate(folder)
        for block in blocks_of(page):
            if block.file:
                Path(name, str(block.line)).write_text(block.text)
                script.append(f"cp ../{block.line} {block.file}")
            elif runs_in_shell(block) and (slow or "slow" not in block.marks):
                if "sources" in block.marks:
                    copy_sources(folder / block.marks["sources"])
                for command, expected in block.commands:
                    i = len(commands)
                    commands.append((block.line, command, expected))
                    # Braces, not a subshell: what one command exports is there for the next.
                    script.append(f"{{ {command}\n}} > ../{i}.out 2> ../{i}.err\necho $? > ../{i}.status")
        finished(shell("\n".join(script), folder), 550 if slow else 250)
        outcomes: dict[int, list[Outcome]] = {}
        for i, (line, command, expected) in enumerate(commands):
            status, out, err = (Path(name, f"{i}.{what}").read_text() for what in ("status", "out", "err"))
            outcomes.setdefault(line, []).append(Outcome(command, expected, int(status), out, err))
    return outcomes


def runs_in_shell(block: Block) -> bool:
    return block.language in ("console", "bash") and "not run" not in block.marks


def same(block: Block, outcome: Outcome) -> bool:
    """Whether a command printed what the page shows; there `...` stands for anything."""
    if "output" in block.marks or block.language == "bash":
        return True
    want, got = outcome.expected.strip(), outcome.out.strip()
    if "any order" in block.marks:
        want, got = ("\n".join(sorted(text.splitlines())) for text in (want, got))
    return doctest.OutputChecker().check_output(want + "\n", got + "\n", doctest.ELLIPSIS)
