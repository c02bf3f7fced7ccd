"""Compile the C++ backend against the installed torch, once for each torch, Python and source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import torch

from pynccl._base.values import shown
from pynccl._errors import NcclError

NAME = "_pynccl_torch"
SOURCES = Path(__file__).parent / "csrc"
API = Path(__file__).parents[1] / "api"
_BUILD_SECONDS = 600


class BuildError(NcclError, ImportError):
    """The C++ part of pynccl.torch could not be compiled."""


def build() -> tuple[Path, bool]:
    """Return the path of the extension in the cache, and whether it had to be compiled."""
    path = _own_folder(_cache() / _key()) / f"{NAME}.so"
    compiled = False
    if not path.exists():
        with _locked(path.parent):
            if not path.exists():
                _compile(path)
                compiled = True
    _check(path, path.lstat(), stat.S_ISREG, sticky=False)
    return path, compiled


def load() -> ModuleType:
    """Return the extension module; compile it if the cache does not have it."""
    path, _ = build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    """Return the directory of compiled extensions: PYNCCL_CACHE, else pynccl in the user's cache."""
    if "PYNCCL_CACHE" in os.environ:
        name, folder = "PYNCCL_CACHE", Path(os.environ["PYNCCL_CACHE"])
    elif home := os.environ.get("XDG_CACHE_HOME"):
        name, folder = "XDG_CACHE_HOME", Path(home, "pynccl")
    else:
        name, folder = "HOME", Path(os.path.expanduser("~/.cache"), "pynccl")
    if not folder.is_absolute():
        # A relative path would mean a folder in the working directory.
        value = repr(os.environ[name]) if name in os.environ else "not set"
        raise BuildError(
            f"pynccl.torch needs a folder for its compiled backend, but {name} is {value}; expected an "
            "absolute path, or set PYNCCL_CACHE to one"
        )
    return folder


def _own_folder(folder: Path) -> Path:
    """Make a folder and return its real path; raise if another user can write to it."""
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        if missing and (there := missing[-1].parent).is_dir():
            _check_folders(there.resolve(strict=True), sticky=True)
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve(strict=True)
        _check_folders(folder, sticky=False)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _check_folders(folder: Path, *, sticky: bool) -> None:
    """Raise if another user could change a folder or one above it; `sticky`: it may itself be like /tmp."""
    for each in (*reversed(folder.parents), folder):
        # In a folder with the sticky bit others can add files, but not move this user's.
        _check(each, each.lstat(), stat.S_ISDIR, sticky=sticky or each != folder)


def _check(path: Path, found: os.stat_result, is_kind: Callable[[int], bool], *, sticky: bool) -> None:
    """Raise if another user could have changed the file or folder, as ssh does for its keys."""
    open_to_others = found.st_mode & 0o022 and not (sticky and found.st_mode & stat.S_ISVTX)
    if is_kind(found.st_mode) and found.st_uid in _trusted_users() and not open_to_others:
        return
    raise BuildError(
        f"pynccl.torch loads no library that other users can change: {path} belongs to user {found.st_uid} "
        f"with mode {stat.S_IMODE(found.st_mode):04o}; expected it, and every folder above it, to be this "
        f"user's ({os.geteuid()}) or root's and writable by nobody else: chmod go-w, or set PYNCCL_CACHE "
        "to another folder"
    )


def _trusted_users() -> set[int]:
    """Return the ids of this user and root; a user namespace without root shows root as nobody."""
    trusted = {0, os.geteuid()}
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
        if not any(int(line.split()[0]) == 0 for line in lines):
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text("ascii")))
    return trusted


def _unusable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"pynccl.torch keeps its compiled backend in {folder}, which cannot be written ({error}); "
        "set PYNCCL_CACHE to a writable folder"
    )


def _key() -> str:
    digest = hashlib.sha256()
    for file in sorted([*SOURCES.iterdir(), API / "nccl_api.h", API / "cpu_api.h"]):
        if file.suffix in {".cpp", ".hpp", ".h"}:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update(" ".join(_flags()).encode())
    return f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process compile; the others wait for its result."""
    try:
        file = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise _unusable(folder, error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    """Return the command in CXX, which may have options."""
    text = os.environ.get("CXX", "").strip() or "g++"
    try:
        wanted, *options = shlex.split(text)
    except ValueError as error:
        raise BuildError(
            f"CXX is {shown(text)}; expected a compiler, with options or without: {error}"
        ) from None
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(
            f"pynccl.torch compiles its backend against the installed torch {torch.__version__} at the first "
            f"import, but there is no C++ compiler {wanted!r} on PATH; install a compiler "
            "(Debian and Ubuntu: apt install g++; Fedora and RHEL: dnf install gcc-c++; conda: conda install "
            "gxx), or set CXX to a compiler"
        )
    return [found, *options]


def flags_for(root: Path) -> list[str]:
    """Return the compiler's options for the torch package in a folder."""
    headers = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        "-std=c++20",
        "-Wall",
        "-Wextra",
        # torch's headers have operations with unused parameters.
        "-Wno-unused-parameter",
        # Versions of torch differ in which methods are virtual.
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
    """Return torch's pybind11 ABI tags, if any, since both share classes."""
    tags = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = {tag: getattr(torch._C, f"_PYBIND11_{tag}", None) for tag in tags}
    return [f'-DPYBIND11_{tag}="{value}"' for tag, value in values.items() if value is not None]


def _compile(target: Path) -> None:
    library = Path(torch.__file__).parent / "lib"
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    libraries = [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    try:
        compiler = _compiler()
        command = [*compiler, *_flags(), str(SOURCES / "extension.cpp"), "-o", partial, *libraries]
        print(
            f"pynccl.torch compiles its backend against torch {torch.__version__} with "
            f"{shlex.join(compiler)}, once: this takes 20 to 100 s "
            "(`python -m pynccl.torch build` compiles it in advance)",
            file=sys.stderr,
            flush=True,
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode:
            raise BuildError(
                f"compiling pynccl.torch against torch {torch.__version__} failed:\n"
                f"{' '.join(command)}\n{done.stderr[-6000:]}"
            )
        # The linker applies the umask, which may allow a group to write.
        os.chmod(partial, 0o755)
        os.replace(partial, target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"compiling pynccl.torch took longer than {_BUILD_SECONDS} s") from None
    finally:
        Path(partial).unlink(missing_ok=True)
