"""What tests share: clean environments, small libraries compiled on the spot, and NVIDIA's released ones."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fake_nccl
import null_library
import pynccl
from launchers import PYNCCL_RUN, clean_environment
from meeting import free_port
from processes import completed, piped

pytest_plugins = ["fake_cuda", "forked_ranks", "hosts", "skips", "stores"]

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("2.19.3", "2.28.9", "2.32.3")

# A shell's background jobs ignore Ctrl-C, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Containers set this often. Each of the thousands of processes would compile all of pynccl again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The threads of NumPy's algebra, which no process here needs, take a third of its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Launch = Callable[..., "subprocess.Popen[str]"]
Script = Callable[[str], str]


@pytest.fixture
def launched() -> Iterator[Launch]:
    """Start commands whose output the test reads; whatever is left in the end is killed."""
    processes = []

    def launch(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        processes.append(piped(command, **options))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run_python() -> Run:
    """Run Python code, or a command line, in a process of its own: a process uses one library."""

    def run(
        code: str = "", *, args: list[str] | None = None, fails: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", *(["-c", code] if args is None else args)]
        done = completed(command, env=clean_environment() | env, cwd="/")
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a program's text to a file and return its path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def port() -> int:
    """Return a port for the ranks to meet at."""
    return free_port()


@pytest.fixture
def run_program(script: Script) -> Run:
    """Run the text of a program on ranks that `pynccl run` starts."""

    def run(
        text: str, nranks: int, *args: str | Path, options: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        launcher = [*PYNCCL_RUN, "-n", str(nranks), "--cpu", *options]
        command = [*launcher, script(text), *map(str, args)]
        return completed(command, env=os.environ | env, timeout=100)

    return run


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Compile C source to a shared library and return its path."""

    def compile_library(source: str, name: str = "libtest.so", *flags: str) -> str:
        folder = tmp_path_factory.mktemp("library")
        (folder / "source.c").write_text(source)
        target = folder / name
        compiler = shlex.split(os.environ.get("CC", "gcc"))
        options = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused", *flags]
        subprocess.run([*compiler, *options, str(folder / "source.c"), "-o", str(target)], check=True)
        return str(target)

    return compile_library


@pytest.fixture(scope="session")
def fake(compile_library: Callable[..., str]) -> str:
    """Return fake_nccl's library."""
    return compile_library(fake_nccl.source(), "libnccl.so.2")


@pytest.fixture(scope="session")
def null(compile_library: Callable[..., str]) -> str:
    """Return null_library's library."""
    return compile_library(null_library.source(), "libnull.so")


@pytest.fixture
def cpu() -> None:
    """Load the CPU library in this process."""
    pynccl.load("cpu")


@pytest.fixture
def no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYNCCL_SECRET", "PYNCCL_SECRET_FILE", "PYNCCL_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def released() -> Callable[[str], str]:
    """Return the path of NVIDIA's library of a version, downloaded once with its headers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pynccl-tests"

    def released(version: str) -> str:
        target = cache / version / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target.exists() and headers_of(str(target)).exists()):
                _download(version, target)
        return str(target)

    return released


def headers_of(library: str) -> Path:
    """Return the folder of the headers that came with a released library."""
    return Path(library).parents[1] / "include"


def _download(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, f"nvidia-nccl-cu12=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        fresh = target.with_suffix(".new")
        with zipfile.ZipFile(wheel) as archive, open(fresh, "wb") as out:
            shutil.copyfileobj(archive.open("nvidia/nccl/lib/libnccl.so.2"), out)
            headers = [name for name in archive.namelist() if name.startswith("nvidia/nccl/include/")]
            archive.extractall(target.parents[3], headers)
        fresh.replace(target)
