"""Files of other projects' releases, downloaded once for all runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def cached(name: str) -> Iterator[Path]:
    """Yield the folder of that name in the cache, which no other process changes meanwhile."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pynccl-tests" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@contextlib.contextmanager
def downloaded(release: str, *options: str) -> Iterator[Path]:
    """Yield the file of a release on the package index, which lasts as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # With this variable CuPy's sources tell their version where there is no CUDA.
        env = os.environ | {"READTHEDOCS": "True"}
        subprocess.run([*pip, *options, "--dest", folder, release], check=True, timeout=280, env=env)
        (file,) = Path(folder).iterdir()
        yield file


def sources(release: str) -> Path:
    """Return the folder of a release's sources, whose tests its wheels leave out."""
    with cached(f"{release}-sources") as folder:
        unpacked = folder / release.replace("==", "-")
        if not unpacked.exists():
            with (
                downloaded(release, "--no-binary", ":all:", "--no-build-isolation") as file,
                tarfile.open(file) as archive,
                tempfile.TemporaryDirectory(dir=folder) as draft,
            ):
                archive.extractall(draft, filter="data")
                Path(draft, unpacked.name).rename(unpacked)
        return unpacked
