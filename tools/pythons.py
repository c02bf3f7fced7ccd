"""Run `make test-core` with the oldest Python that pynccl supports and with the newest one found.

Each has a virtual environment of its own, .venv-3.x. The newest runs in Python's development mode. Pythons
are looked for on PATH and among those of pyenv and uv.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Version = tuple[int, int]


def oldest_supported() -> Version:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', text, re.M)
    if found is None:
        raise SystemExit("pyproject.toml: requires-python is not of the form >=3.x")
    return int(found[1]), int(found[2])


def candidates() -> Iterator[Path]:
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    folders += sorted(pyenv.glob("versions/*/bin")) + sorted(data.glob("uv/python/*/bin"))
    for folder in folders:
        yield from sorted(
            path for path in folder.glob("python3*") if re.fullmatch(r"python3(\.\d+)?", path.name)
        )


def version_of(python: Path) -> Version | None:
    """Return the version of a CPython that can build extensions; None for what does not run or cannot."""
    code = (
        "import ensurepip, os, sys, sysconfig, venv\n"
        "header = os.path.join(sysconfig.get_path('include'), 'Python.h')\n"
        "if sys.implementation.name != 'cpython' or not os.path.exists(header): sys.exit(1)\n"
        "print(*sys.version_info[:2])"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    if done.returncode:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def found() -> dict[Version, Path]:
    """Return a Python of each version; the first one found counts."""
    pythons: dict[Version, Path] = {}
    for python in candidates():
        version = version_of(python)
        if version is not None:
            pythons.setdefault(version, python)
    return pythons


def test(python: Path, version: Version, devmode: bool) -> bool:
    name = f"Python {version[0]}.{version[1]}{' in development mode' if devmode else ''}"
    print(f"== {name}: {python}", flush=True)
    start = time.monotonic()
    # Not that of the make which runs this.
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "test-core", f"PYTHON={python}", f"VENV=.venv-{version[0]}.{version[1]}"]
    command += ["DEVMODE=1"] if devmode else []
    code = subprocess.run(command, cwd=ROOT, env=env).returncode
    print(f"== {name}: {'failed' if code else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def main() -> int:
    oldest, pythons = oldest_supported(), found()
    supported = [version for version in pythons if version >= oldest]
    if not supported:
        raise SystemExit(f"no Python >= {oldest[0]}.{oldest[1]} with its headers was found")
    newest = max(supported)
    chosen = [oldest, newest] if oldest in pythons and newest != oldest else [newest]
    passed = [test(pythons[version], version, devmode=version == newest) for version in chosen]
    if oldest not in pythons:
        print(
            f"== Python {oldest[0]}.{oldest[1]}, the oldest supported: not found, so not tested", flush=True
        )
        # As for a skipped test, which the same variable makes a failure.
        passed.append(os.environ.get("TESTS_SKIPS") != "strict")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
