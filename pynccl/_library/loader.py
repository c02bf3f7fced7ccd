"""The library of this process: found and loaded at the first call that needs it."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pynccl._base.values import shown
from pynccl._errors import UNSUPPORTED, LibraryNotFoundError, NcclInvalidUsage, NotSupportedError
from pynccl._library import cuda, discovery
from pynccl._library.binding import ffi, lib
from pynccl._library.discovery import Candidate
from pynccl._library.generated.api import Version

_IF_LOADED, _DEEPBIND = 1, 2
_ON_CPU = """To run on CPU memory, set PYNCCL_LIBRARY=cpu or call pynccl.load("cpu") first."""
_INSTALL = "nvidia-nccl-cu12 or nvidia-nccl-cu13, or set PYNCCL_LIBRARY to the path of a libnccl."


@dataclass(frozen=True)
class LibraryInfo:
    """The loaded library; `others` are further libnccl mapped into the process."""

    backend: str
    version: Version
    path: str
    how: str
    others: tuple[str, ...] = ()


_lock = threading.Lock()
_loaded: LibraryInfo | None = None
_warned: set[str] = set()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child forked while another thread loads the library would wait for this thread forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def version_text(version: Version) -> str:
    """Return a version in NCCL's notation."""
    return ".".join(map(str, version)) if any(version) else "of unknown version"


def decode_version(code: int) -> Version:
    """Split the code of ncclGetVersion; NCCL 2.8 and older use one digit for the minor version."""
    base = 1000 if code < 10000 else 10000
    return code // base, code % base // 100, code % 100


def encode_version(version: Version) -> int:
    """Return ncclGetVersion's code for a version."""
    major, minor, patch = version
    return major * (1000 if version < (2, 9, 0) else 10000) + minor * 100 + patch


def load(spec: str | os.PathLike[str] | None = None) -> LibraryInfo:
    """Load the library: "auto", "cpu" or a path; None means PYNCCL_LIBRARY, which is "auto" by default.

    "cpu" is the CPU library, which comes with pynccl; "auto" never selects it.
    One process uses one library. Loading it again has no effect; loading another one raises NcclInvalidUsage.
    Raises LibraryNotFoundError if no library can be loaded.
    """
    global _loaded
    if sys.platform != "linux":
        raise NotSupportedError(UNSUPPORTED)
    if spec is not None and not isinstance(spec, str | os.PathLike):
        raise TypeError(f"spec is {shown(spec)}; expected 'auto', 'cpu', a path, or None")
    with _lock:
        if _loaded is None:
            _loaded = _load_first(spec)
        elif spec is not None:
            _require_same(os.fspath(spec), _loaded)
    return _with_others(_loaded)


def loaded() -> LibraryInfo | None:
    """Return the loaded library or None, without loading one."""
    return _loaded


def _in_use() -> LibraryInfo:
    """Return the loaded library as `load` has seen it, loading it if none is."""
    return _loaded or load()


def backend() -> str:
    """Return the kind of the library, "cpu" or "nccl", loading it if none is."""
    return _in_use().backend


def library_info() -> LibraryInfo:
    """Return the loaded library, loading it if necessary; warn once of each other libnccl in the process.

    Raises LibraryNotFoundError if no library can be loaded.
    """
    return load() if _loaded is None else _with_others(_loaded)


def _with_others(info: LibraryInfo) -> LibraryInfo:
    """Return the library with what else is mapped, which takes a look at all mapped files."""
    info = replace(info, others=_others(info))
    # The CPU library works beside any other.
    if info.backend == "nccl":
        _warn(info)
    return info


def get_version() -> Version:
    """Return the version of the loaded library."""
    return _in_use().version


class _Functions:
    """The loaded library's functions; the first use of one loads the library, if none is."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(lib, name)
        _in_use()
        setattr(self, name, function)
        return function


functions = lib if TYPE_CHECKING else _Functions()


def _load_first(spec: str | os.PathLike[str] | None) -> LibraryInfo:
    how = "load()"
    if spec is None:
        how, spec = "PYNCCL_LIBRARY", os.environ.get("PYNCCL_LIBRARY") or "auto"
    text = os.fspath(spec)
    if text == "auto":
        return _load_auto()
    candidate = discovery.cpu_candidate(how) if text == "cpu" else Candidate(_file(text, how), how)
    try:
        return _open(candidate)
    except OSError as error:
        raise LibraryNotFoundError(f"{how} names {text}, a library that cannot be used: {error}") from None


def _load_auto() -> LibraryInfo:
    tried: list[str] = []
    for candidate in discovery.candidates(tried):
        try:
            return _open(candidate)
        except OSError as error:
            tried.append(f"{candidate.how}: {error}")
    places = "\n".join(f"  - {line}" for line in tried)
    driver = "" if cuda.available() else "No NVIDIA driver was found. "
    raise LibraryNotFoundError(
        f"no NCCL library was found.\nLooked for:\n{places}\n{driver}{what_to_install()}"
    )


def what_to_install() -> str:
    """Return what to do without a library: first what can work on this machine."""
    if cuda.available():
        return f"Install {_INSTALL} {_ON_CPU}"
    return f"{_ON_CPU} With a driver, install {_INSTALL}"


def _file(text: str, how: str) -> str:
    expected = "expected a path, auto or cpu"
    if not text:
        raise LibraryNotFoundError(f"{how} is ''; {expected}")
    path = os.path.abspath(os.path.expanduser(text))
    if not os.path.isfile(path):
        problem = "is not a file" if os.path.exists(path) else "does not exist"
        if text.lower() in ("auto", "cpu"):
            raise LibraryNotFoundError(
                f"{how} is {shown(text)}; pynccl's name is {text.lower()!r}; {expected}"
            )
        raise LibraryNotFoundError(f"{how} names {path}, which {problem}; {expected}")
    return path


def _open(candidate: Candidate) -> LibraryInfo:
    """Load one file and fill the tables from its handle; OSError tells why this fails."""
    path = os.fsencode(candidate.path)
    crowded = any(not discovery.same_file(candidate.path, other) for other in discovery.mapped_libnccl())
    handle = lib.pynccl_open(path, _IF_LOADED if candidate.mapped else _DEEPBIND if crowded else 0)
    if not handle:
        raise OSError(ffi.string(lib.pynccl_error()).decode(errors="replace"))
    real = os.path.realpath(os.fsdecode(ffi.string(lib.pynccl_path(handle))))
    try:
        if not lib.nccl_api_count(handle):
            raise OSError(f"{real} has none of NCCL's functions")
        version = _ask_version(handle, real)
    except OSError:
        lib.pynccl_close(handle)
        raise
    lib.nccl_api_bind(handle)
    lib.cpu_api_bind(handle)
    backend = "cpu" if lib.cpu_api_count(handle) else "nccl"
    return LibraryInfo(backend, version, real, candidate.how)


def _ask_version(handle: Any, path: str) -> Version:
    function = lib.pynccl_symbol(handle, b"ncclGetVersion")
    if not function:
        return 0, 0, 0
    code = ffi.new("int*")
    result = ffi.cast("int(*)(int*)", function)(code)
    if result:
        raise OSError(f"ncclGetVersion of {path} failed with result {result}")
    return decode_version(code[0])


def _require_same(text: str, info: LibraryInfo) -> None:
    if text == "auto":
        return
    path = discovery.cpu_candidate("load()").path if text == "cpu" else _file(text, "load()")
    if not discovery.same_file(path, info.path):
        raise NcclInvalidUsage(
            f"cannot load {path}: this process already uses {info.path} ({info.how}), and the handles of two "
            "libraries must not mix. Call pynccl.load before anything else, or set PYNCCL_LIBRARY.",
            function="pynccl.load",
        )


def _others(info: LibraryInfo) -> tuple[str, ...]:
    return tuple(
        path
        for path in discovery.mapped_libnccl()
        if not discovery.same_file(path, info.path)
        and not discovery.same_file(discovery.behind(path) or path, info.path)
    )


def _warn(info: LibraryInfo) -> None:
    new = set(info.others) - _warned
    if new:
        _warned.update(new)
        warnings.warn(
            f"more than one libnccl is in this process: pynccl uses {info.path} ({info.how}), and there is "
            f"also {', '.join(sorted(new))}. Communicators of one must not be given to the other; "
            "set PYNCCL_LIBRARY to choose.",
            RuntimeWarning,
            stacklevel=4,
        )
