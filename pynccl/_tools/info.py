"""`pynccl info` and `pynccl --version`: what is installed, and what would be used."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pynccl._base import installation
from pynccl._base.version import __version__
from pynccl._errors import NcclError
from pynccl._library import cuda, discovery, loader
from pynccl._tools import topology
from pynccl._tools.machine import Machine


@click.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option(
    "--topology", "shows_topology", is_flag=True, help="Print NUMA nodes, GPUs, network devices and links."
)
@click.option(
    "--svg", type=click.Path(dir_okay=False), help="With --topology: draw it into this file instead."
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="With --topology: read /sys below this folder.",
)
def info(as_json: bool, shows_topology: bool, svg: str | None, root: Path) -> None:
    """Print versions, libraries and devices, or the topology of this machine."""
    if not shows_topology and (svg is not None or root != Path("/")):
        raise click.UsageError(f"{'--root' if svg is None else '--svg'} needs --topology")
    if as_json and shows_topology:
        raise click.UsageError("--json and --topology are given; expected one of them")
    if shows_topology:
        _show_topology(Machine(root), svg)
        return
    found = facts()
    print(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _show_topology(machine: Machine, file: str | None) -> None:
    if file is None:
        print("\n".join(topology.lines(machine)))
        return
    try:
        Path(file).write_text(topology.svg(machine))
    except OSError as error:
        raise click.FileError(file, error.strerror or str(error)) from error


def version() -> str:
    """Return the version of pynccl and that of the library that it would use."""
    library = _library()
    used = (
        f"{library['backend']} {library['version']}, {library['path']}" if library["path"] else "none found"
    )
    return f"pynccl {__version__}, NCCL library: {used}"


def facts() -> dict[str, Any]:
    """Return all that `pynccl info` prints; what is not there is None, with the reason in `error`."""
    return {
        "pynccl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "library": _library(),
        "beware": installation.other_text(other) if (other := installation.other_version()) else None,
        "cpu_library": _cpu_library(),
        "cuda": _cuda(),
        "environment": {
            name: "(set)" if "SECRET" in name else os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("NCCL_", "PYNCCL_"))
        },
    }


def _library() -> dict[str, Any]:
    """Return the library that this process loads."""
    with warnings.catch_warnings():
        # The other libraries are among the facts.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            found = loader.load()
        except NcclError as error:
            return {"backend": None, "version": None, "path": None, "error": str(error)}
    return {
        "backend": found.backend,
        "version": loader.version_text(found.version),
        "path": found.path,
        "how": found.how,
        "others": list(found.others),
    }


def _cpu_library() -> dict[str, str | None]:
    try:
        return {"path": str(discovery.cpu_library())}
    except NcclError as error:
        return {"path": None, "error": str(error)}


def _cuda() -> dict[str, Any]:
    if not cuda.available():
        return {"version": None, "error": cuda.why_unavailable(), "devices": []}
    return {
        "version": ".".join(map(str, cuda.driver_version())),
        "devices": [
            {"ordinal": device, "name": cuda.device_name(device), "uuid": cuda.device_uuid(device)}
            for device in range(cuda.device_count())
        ],
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the facts as text: a name in the first column, and indented lines that belong to it."""
    library, cpu, driver = found["library"], found["cpu_library"], found["cuda"]
    yield f"pynccl      {found['pynccl']}, Python {found['python']}, {found['platform']}"
    if library["path"] is None:
        first, *more = library["error"].splitlines()
        yield f"library     {first}"
        yield from (f"            {line}" for line in more)
    else:
        yield f"library     {library['backend']} {library['version']}, {library['path']}"
        yield f"found by    {library['how']}"
        yield from (f"also here   {path}" for path in library["others"])
    if found["beware"]:
        yield f"beware      {found['beware']}"
    yield f"CPU library {cpu['path'] or cpu['error']}"
    yield f"CUDA driver {driver['version'] or 'none: ' + driver['error']}"
    for device in driver["devices"]:
        yield f"device {device['ordinal']:<4} {device['name']}, {device['uuid']}"
    yield from (f"environment {name}={value}" for name, value in found["environment"].items())
