"""Each Python's wheel: built, installed and tested as cibuildwheel does it, though not in its containers."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, clean_environment
from processes import completed

sys.path.append(str(ROOT / "tools"))
from pythons import found

COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|tcc|[cf]\d\d|nvcc|ccache)(-[\d.]+)?")


# torch is large: without it, the tests that import it must be left out too.
WITHOUT = os.environ.get("TESTS_WITHOUT", "").split()


def settings() -> dict[str, Any]:
    import tomllib

    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return tools["cibuildwheel"]  # type: ignore[no-any-return]


def without_compilers(folder: Path) -> str:
    """Return a PATH with every program of this one's but compilers."""
    folder.mkdir()
    for program in (program for place in os.get_exec_path() for program in Path(place).glob("*")):
        link = folder / program.name
        if not COMPILERS.fullmatch(program.name) and not program.name.startswith(("python", "pip")):
            link.is_symlink() or link.symlink_to(program)
    return str(folder)


@pytest.mark.full
@pytest.mark.network
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_as_cibuildwheel_does(minor: int, tmp_path: Path) -> None:
    python = found().get((3, minor))
    if python is None:
        pytest.skip(f"Python 3.{minor} is not installed")

    def run(*command: str | Path, cwd: Path = tmp_path, **env: str) -> None:
        done = completed(command, cwd=cwd, env=clean_environment() | env, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout[-2000:])

    run(python, "-m", "venv", tmp_path / "builder")
    builder = tmp_path / "builder" / "bin" / "python"
    run(builder, "-m", "pip", "install", "--quiet", "build")
    # The sdist, and from it the wheel.
    run(builder, "-m", "build", "--outdir", "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob(f"*-cp3{minor}-*.whl")

    run(python, "-m", "venv", tmp_path / "venv")
    alone = {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{without_compilers(tmp_path / 'programs')}",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
    }
    how = settings()
    run("pip", "install", "--quiet", wheel, **alone)
    needed = [one for one in how["test-requires"] if re.split("[=>]", one)[0] not in WITHOUT]
    run("pip", "install", "--quiet", *needed, **alone)
    here = tmp_path / "here"
    here.mkdir()
    for name in how["test-sources"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, here / name)  # type: ignore[operator]
    run("sh", "-c", how["test-command"], cwd=here, TESTS_SKIPS="strict", **alone)
