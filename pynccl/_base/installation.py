"""Checks that this folder is a built pynccl and no other package, at the import."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NATIVE = "_native"
# Files of another package named pynccl, which pip installs into the same folder.
_OF_THE_OTHER = ("api.py", "binding.py")
_REMEDY = (
    "pip uninstall pynccl pynccl-cffi, and install pynccl-cffi again (PyPI's package `pynccl` is another one)"
)


def require_own() -> None:
    """Raise if `import pynccl` finds another package's module; warn if both are in the same folder."""
    if not hasattr(sys.modules["pynccl"], "__distribution__"):
        raise ImportError(f"{_FOLDER}/__init__.py is missing, or another package's: {_REMEDY}")
    if all(os.path.exists(os.path.join(_FOLDER, name)) for name in _OF_THE_OTHER):
        warnings.warn(f"{_FOLDER} holds files of another package: {_REMEDY}", RuntimeWarning, stacklevel=2)


def require_built() -> None:
    """Continue the import in an installed pynccl if this folder is a checkout that is not built.

    `pip install .` builds nothing in the clone, and Python looks into the working directory or the script's
    folder first. Only an installation of the same __init__.py can take over: that file is running already.
    """
    if _is_built(_FOLDER) or not _is_checkout():
        return
    folders = (os.path.join(os.path.abspath(entry), "pynccl") for entry in sys.path)
    other = next((folder for folder in folders if _is_built(folder) and _has_same_init(folder)), None)
    if other is None:
        return
    package = sys.modules["pynccl"]
    package.__path__[:] = [other]
    package.__file__ = os.path.join(other, "__init__.py")
    if package.__spec__ is not None:
        package.__spec__.origin = package.__file__
    # The installation's own modules take the place of this room's.
    room = __name__.rpartition(".")[0]
    for name in [each for each in sys.modules if each.startswith(room)]:
        del sys.modules[name]
    del package.__dict__[room.rpartition(".")[2]]
    # Once for a job.
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"{_FOLDER} is a checkout that is not built; {other} is imported in its place",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_built(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, _NATIVE + suffix)) for suffix in EXTENSION_SUFFIXES)


def _is_checkout() -> bool:
    return os.path.exists(os.path.join(os.path.dirname(_FOLDER), "pyproject.toml"))


def _has_same_init(folder: str) -> bool:
    try:
        with (
            open(os.path.join(folder, "__init__.py"), "rb") as theirs,
            open(os.path.join(_FOLDER, "__init__.py"), "rb") as ours,
        ):
            return theirs.read() == ours.read()
    except OSError:
        return False


def why_not_built(error: ImportError) -> ImportError:
    """Return an error that tells how to build pynccl if it is not built; else the error itself."""
    if _is_built(_FOLDER):
        return error
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if _is_checkout():
        return ImportError(
            f"{_FOLDER} is a checkout that is not built for {python}; build it first: make build (an "
            "installed pynccl is imported from any other working directory)"
        )
    return ImportError(f"{_FOLDER} has no {_NATIVE} for {python}: pip install --force-reinstall pynccl-cffi")


def other_version() -> str | None:
    """Return the version of the other package named pynccl, if it is installed."""
    # Imported late, because the import is slow.
    from importlib import metadata

    try:
        return metadata.version("pynccl")
    except metadata.PackageNotFoundError:
        return None


def other_found(other: str) -> str:
    """Return that PyPI's package pynccl is there, in a version."""
    return f"another package named pynccl is installed: version {other}"


def other_text(other: str) -> str:
    """Return what to do about PyPI's package pynccl."""
    return f"{other_found(other)}: {_REMEDY}"
