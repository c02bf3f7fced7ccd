"""Whether this folder is pynccl, built, and nobody else's: what the errors of an import say otherwise."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NATIVE = "_native"
# Of PyPI's package with the name pynccl, which is not ours, and which pip writes into the same folder.
_OF_THE_OTHER = ("api.py", "binding.py")
_REMEDY = (
    "pip uninstall pynccl pynccl-cffi, and install pynccl-cffi again (PyPI's package `pynccl` is another one)"
)


def require_own() -> None:
    """Raise where `import pynccl` gives another package's module; warn where it is in the same folder."""
    if not hasattr(sys.modules["pynccl"], "__distribution__"):
        raise ImportError(f"{_FOLDER}/__init__.py is missing, or another package's: {_REMEDY}")
    if all(os.path.exists(os.path.join(_FOLDER, name)) for name in _OF_THE_OTHER):
        warnings.warn(f"{_FOLDER} holds files of another package: {_REMEDY}", RuntimeWarning, stacklevel=2)


def why_not_built(error: ImportError) -> ImportError:
    """Return an error that says how to build, where that was not done; else the error itself."""
    if any(os.path.exists(os.path.join(_FOLDER, _NATIVE + suffix)) for suffix in EXTENSION_SUFFIXES):
        return error
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if os.path.exists(os.path.join(os.path.dirname(_FOLDER), "pyproject.toml")):
        return ImportError(
            f"{_FOLDER} is a checkout that is not built for {python}; build it first: make build (an "
            "installed pynccl is imported from any other working directory)"
        )
    return ImportError(f"{_FOLDER} has no {_NATIVE} for {python}: pip install --force-reinstall pynccl-cffi")


def other_version() -> str | None:
    """Return the version of PyPI's package pynccl where it is installed, too."""
    # Slow to import, and of no use before.
    from importlib import metadata

    try:
        return metadata.version("pynccl")
    except metadata.PackageNotFoundError:
        return None


def other_text(other: str) -> str:
    """Return what to do about PyPI's package pynccl."""
    return f"another package named pynccl is installed, too, {other}: {_REMEDY}"
