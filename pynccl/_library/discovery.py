"""The search for a libnccl: in the process, in the nvidia-nccl wheel, in conda, in the system."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pynccl._errors import LibraryNotFoundError

SONAME = "libnccl.so.2"
CPU_LIBRARY = "libpynccl_cpu.so"
PACKAGE = Path(__file__).resolve().parents[1]
_LIBNCCL = re.compile(r"libnccl(-[0-9a-f]+)?\.so[.\d]*")


@dataclass(frozen=True)
class Candidate:
    """A library to try; a mapped one must not be loaded a second time."""

    path: str
    how: str
    mapped: bool = False


def same_file(one: str, other: str) -> bool:
    """Tell whether two paths are one file; a deleted file is compared by name."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one == other


def mapped_files(name: re.Pattern[str]) -> list[str]:
    """Return the files mapped into this process whose base name matches, in address order, each once."""
    found: list[str] = []
    # Without a free descriptor, nothing can be found; calls of a loaded library go on.
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            clean = path[0].removesuffix(" (deleted)") if path else ""
            if name.fullmatch(os.path.basename(clean)) and not any(same_file(clean, old) for old in found):
                found.append(clean)
    return found


def mapped_libnccl() -> list[str]:
    """Return every libnccl mapped into this process, the forwarding library included."""
    return mapped_files(_LIBNCCL)


def behind(path: str) -> str | None:
    """Return the CPU library that the file forwards to, or None if it is not a forwarding library."""
    library = Path(path).resolve().parent.parent / CPU_LIBRARY
    return str(library) if Path(path).resolve().parent.name == "forward" and library.exists() else None


def forward_folder() -> Path:
    """Return the folder with the forwarding libnccl.so.2 and the other files that C programs need."""
    folder = PACKAGE / "forward"
    if not (folder / SONAME).exists():
        raise _without_cpu_library(folder / SONAME)
    return folder


def cpu_library() -> str:
    """Return the path of the CPU library."""
    library = PACKAGE / CPU_LIBRARY
    if not library.exists():
        raise _without_cpu_library(library)
    return str(library)


def _without_cpu_library(path: Path) -> LibraryNotFoundError:
    return LibraryNotFoundError(
        f"{path} does not exist: this pynccl was built without its CPU library (PYNCCL_BUILD_CPU_LIBRARY=0)"
    )


def cpu_candidate(how: str) -> Candidate:
    """Return the CPU library; one that is already in the process comes first."""
    mapped = mapped_files(re.compile(re.escape(CPU_LIBRARY)))
    forwarded = [library for path in mapped_libnccl() if (library := behind(path))]
    for path in (*mapped, *forwarded):
        return Candidate(path, f"{how}, already in this process")
    return Candidate(cpu_library(), how)


def candidates(tried: list[str]) -> Iterator[Candidate]:
    """Yield the candidates of `auto` in order; add the places without a library to `tried`."""
    mapped = mapped_libnccl()
    for path in mapped:
        library = behind(path)
        if library:
            yield Candidate(library, f"behind the forwarding library {path}, already in this process")
        else:
            yield Candidate(path, "already in this process", mapped=True)
    if not mapped:
        tried.append("in this process: no libnccl is mapped")
    for how, folder in _folders(tried):
        path = os.path.join(folder, SONAME)
        if os.path.exists(path):
            yield Candidate(path, how)
        else:
            tried.append(f"{how}: {path} does not exist")
    yield Candidate(SONAME, "system")


def _folders(tried: list[str]) -> Iterator[tuple[str, str]]:
    wheels = list(_nvidia_folders())
    if not wheels:
        tried.append("nvidia-nccl wheel: not installed")
    for folder in wheels:
        yield "nvidia-nccl wheel", folder
    conda = os.environ.get("CONDA_PREFIX")
    if conda:
        yield "CONDA_PREFIX", os.path.join(conda, "lib")
    else:
        tried.append("conda: CONDA_PREFIX is not set")
    if not conda or not same_file(conda, sys.prefix):
        yield "sys.prefix", os.path.join(sys.prefix, "lib")


def _nvidia_folders() -> Iterator[str]:
    """Yield nvidia/nccl/lib of each part of the namespace package, without importing anything."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for part in (spec.submodule_search_locations or ()) if spec else ():
        folder = os.path.join(part, "nccl", "lib")
        if os.path.isdir(folder):
            yield folder
