"""The NCCL libraries of this machine, and packages that are taken for pynccl."""

from __future__ import annotations

import mmap
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pynccl._base import installation
from pynccl._errors import NcclError
from pynccl._library import cuda, discovery, loader
from pynccl._library.loader import LibraryInfo
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.machine import Machine

# What NVIDIA's library prints about itself.
_BANNER = re.compile(rb"NCCL version (\d+\.\d+\.\d+)[^\0\n+]*\+cuda(\d+)\.(\d+)")


def check_library(machine: Machine) -> Iterator[Finding]:
    """Load the library that a program would load."""
    found = loaded()
    if isinstance(found, NcclError):
        named = machine.environ.get("PYNCCL_LIBRARY", "auto") not in ("", "auto")
        # A finding says elsewhere whether there is a driver.
        advice = "Correct PYNCCL_LIBRARY." if named else loader.what_to_install()
        say = error if machine.gpus() or named else warning
        why = "Every call of NCCL fails; `pynccl run` takes the CPU library if there is no driver."
        yield say("library", str(found).splitlines()[0], why, advice)
        return
    kind = "the CPU library" if found.backend == "cpu" else "NCCL"
    yield ok("library", f"{kind} {loader.version_text(found.version)}, {found.path} ({found.how})")


def loaded() -> LibraryInfo | NcclError:
    """Return the library of this process, or the reason why there is none."""
    with warnings.catch_warnings():
        # check_copies reports the other libraries.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return loader.load()
        except NcclError as failure:
            return failure


def check_copies(machine: Machine) -> Iterator[Finding]:
    """Compare the versions of all libnccl that programs on this machine may load."""
    found = {path: banner(path) for path in _copies()}
    texts = [
        f"{path} ({' with CUDA '.join(said) if said else 'version unknown'})" for path, said in found.items()
    ]
    if len(set(found.values())) > 1:
        yield warning(
            "copies",
            f"several libnccl: {', '.join(texts)}",
            "Which one a program gets depends on what it imports first; two in one process must not mix.",
            "Uninstall all but one; PYNCCL_LIBRARY=PATH selects the one that pynccl uses.",
        )
    else:
        yield ok("copies", f"libnccl: {', '.join(texts) or 'none'}")


def _copies() -> list[str]:
    real: dict[str, None] = {}
    for candidate in discovery.candidates([]):
        # A name without a folder is the dynamic linker's to find.
        if os.sep in candidate.path:
            real[os.path.realpath(candidate.path)] = None
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        path = os.path.join(folder, discovery.SONAME)
        if os.path.exists(path) and discovery.behind(path) is None:
            real[os.path.realpath(path)] = None
    return list(real)


def banner(path: str) -> tuple[str, str] | None:
    """Return the version and the CUDA version that a library's file names, or None."""
    with opened(path) as content:
        match = _BANNER.search(content)
        found = match and [group.decode() for group in match.groups()]
    return (found[0], f"{found[1]}.{found[2]}") if found else None


@contextmanager
def opened(path: str) -> Iterator[mmap.mmap | bytes]:
    """Map a file, since NVIDIA's libraries have hundreds of MiB; a file that cannot be read is empty."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError:
        yield b""
        return
    with file:
        if not os.fstat(file.fileno()).st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def check_cuda_of_library(machine: Machine) -> Iterator[Finding]:
    """Compare the CUDA version of the library with the driver's."""
    found = loaded()
    said = None if isinstance(found, NcclError) else banner(found.path)
    if said is None or not cuda.available():
        return
    ours, drivers = said[1], ".".join(map(str, cuda.driver_version()))
    if int(ours.split(".")[0]) > cuda.driver_version()[0]:
        yield error(
            "library's CUDA",
            f"the library is built with CUDA {ours}, the driver supports CUDA {drivers}",
            "Kernels of a newer major version do not run on this driver.",
            f"pip install nvidia-nccl-cu{cuda.driver_version()[0]}, or update the driver.",
        )
    else:
        yield ok("library's CUDA", f"CUDA {ours}, and the driver supports {drivers}")


def check_package(machine: Machine) -> Iterator[Finding]:
    """Look for the other package named pynccl."""
    other = installation.other_version()
    if other is None:
        yield ok("package", "no other package named pynccl is installed")
    else:
        yield error(
            "package",
            installation.other_found(other),
            "Both install into the same folder, and each overwrites files of the other.",
            "pip uninstall pynccl pynccl-cffi, then install pynccl-cffi again.",
        )


CHECKS = (check_library, check_copies, check_cuda_of_library, check_package)
