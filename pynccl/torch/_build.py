"""Compile the C++ backend against the installed torch, once for each torch, Python and source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from pynccl._errors import NcclError

NAME = "_pynccl_torch"
SOURCES = Path(__file__).parent / "csrc"
API = Path(__file__).parents[1] / "native"
_BUILD_SECONDS = 600


class BuildError(NcclError, ImportError):
    """The C++ part of pynccl.torch could not be compiled."""


def build() -> tuple[Path, bool]:
    """Return the path of the extension in the cache, and whether it had to be compiled."""
    path = _cache() / _key() / f"{NAME}.so"
    if not path.exists():
        with _locked(path.parent):
            if not path.exists():
                _compile(path)
                return path, True
    return path, False


def load() -> ModuleType:
    """Return the extension module, compiled first where the cache does not have it."""
    path, _ = build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    """Return the directory of compiled extensions: PYNCCL_CACHE, else pynccl in the user's cache."""
    if "PYNCCL_CACHE" in os.environ:
        return Path(os.environ["PYNCCL_CACHE"]).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "pynccl"


def _key() -> str:
    digest = hashlib.sha256()
    for file in sorted([*SOURCES.iterdir(), API / "nccl_api.h", API / "cpu_api.h"]):
        if file.suffix in {".cpp", ".hpp", ".h"}:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update(" ".join(_flags()).encode())
    return f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process compile; the others wait, and find its result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise BuildError(
            f"pynccl.torch keeps what it compiles in {folder}, which cannot be written ({error}); "
            "set PYNCCL_CACHE to a directory that can"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    """Return CXX, which may be a command with options."""
    wanted, *options = shlex.split(os.environ.get("CXX") or "g++")
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(
            f"pynccl.torch compiles its backend against the installed torch {torch.__version__} at the first "
            f"import, and there is no C++ compiler {wanted!r} on PATH; install one "
            "(Debian and Ubuntu: apt install g++; Fedora and RHEL: dnf install gcc-c++; conda: conda install "
            "gxx), or set CXX to a compiler"
        )
    return [found, *options]


def flags_for(root: Path) -> list[str]:
    """Return what the sources are compiled with against the torch package in a folder."""
    headers = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        "-std=c++20",
        "-Wall",
        "-Wextra",
        # Operations that a backend does not look at keep their parameters' names.
        "-Wno-unused-parameter",
        # What is virtual differs between versions of torch.
        "-Wno-inconsistent-missing-override",
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-I{API}",
        *(argument for path in headers for argument in ("-isystem", str(path))),
    ]


def _flags() -> list[str]:
    return [
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-pthread",
        *flags_for(Path(torch.__file__).parent),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *_pybind_abi(),
    ]


def _pybind_abi() -> list[str]:
    """Return torch's own pybind11 ABI tags, where it has them: classes are shared with it."""
    tags = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = {tag: getattr(torch._C, f"_PYBIND11_{tag}", None) for tag in tags}
    return [f'-DPYBIND11_{tag}="{value}"' for tag, value in values.items() if value is not None]


def _compile(target: Path) -> None:
    library = Path(torch.__file__).parent / "lib"
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    libraries = [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    try:
        command = [*_compiler(), *_flags(), str(SOURCES / "extension.cpp"), "-o", partial, *libraries]
        print(
            f"pynccl.torch compiles its backend against torch {torch.__version__} with {command[0]}, once: "
            "this takes 20 to 100 s (`python -m pynccl.torch build` does it ahead)",
            file=sys.stderr,
            flush=True,
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode:
            raise BuildError(
                f"compiling pynccl.torch against torch {torch.__version__} failed:\n"
                f"{' '.join(command)}\n{done.stderr[-6000:]}"
            )
        os.replace(partial, target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"compiling pynccl.torch took longer than {_BUILD_SECONDS} s") from None
    finally:
        Path(partial).unlink(missing_ok=True)
