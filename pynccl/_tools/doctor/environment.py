"""The environment's variables: NCCL's and pynccl's, the files of settings, and the launcher's."""

from __future__ import annotations

import importlib.util
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from pynccl._base.timeouts import resolve_timeout
from pynccl._errors import BootstrapError
from pynccl._tools.doctor import known, network
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded, opened
from pynccl._tools.machine import Machine
from pynccl._watch import check_mode
from pynccl.bootstrap import _environment, _variables
from pynccl.bootstrap._address import is_loopback
from pynccl.bootstrap._variables import PYNCCL
from pynccl.ras.client import parse_address

# Names that others read, or that an older release read, and the name of today.
_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
}
# Variables that are set to find a fault and then forgotten: harmless values, and what the others do.
_LEFT_OVER = {
    "NCCL_P2P_DISABLE": (("0",), "devices of a machine do not reach each other's memory"),
    "NCCL_SHM_DISABLE": (("0",), "processes of a machine talk over the network"),
    "NCCL_IB_DISABLE": (("0",), "InfiniBand and RoCE are not used, only TCP"),
    "NCCL_NVLS_ENABLE": (("1", "2"), "NVLink SHARP is not used"),
    "NCCL_CHECK_POINTERS": (("0",), "every call checks its buffers, which takes time"),
    "NCCL_ALGO": ((), "NCCL does not choose the algorithm by size"),
    "NCCL_PROTO": ((), "NCCL does not choose the protocol by size"),
    "PYNCCL_CPU_BLOCKING": (("0",), "every operation waits until it is done"),
    "PYNCCL_CPU_DIRECT": (("1",), "the CPU library does not read other processes' memory"),
    "PYNCCL_CPU_FAULT": ((), "the CPU library injects faults"),
    "PYNCCL_TRACE_STACKS": (("0",), "every call notes its line, which takes time"),
}
_CHATTY = ("INFO", "TRACE", "ABORT")
_SETTINGS = "nccl.conf"
# PT_LOAD: the kind of an ELF file's part that is loaded.
_LOADED = 1


def check_names(machine: Machine) -> Iterator[Finding]:
    """Look for NCCL_ and PYNCCL_ variables that nothing reads."""
    names = sorted(name for name in machine.environ if name.startswith(("NCCL_", "PYNCCL_")))
    strange = [name for name in names if not is_known(name)]
    for name in strange:
        yield _unknown("variables", name, f"unset {name}")
    if not strange:
        yield ok("variables", f"{len(names)} of NCCL and pynccl, all known")


def is_known(name: str) -> bool:
    """Tell whether NCCL, nccl-tests, a build or pynccl reads a variable."""
    if name in _RENAMED or name in known.CONSTANTS:
        return False
    listed = name in known.NCCL | known.AROUND | PYNCCL or name.startswith("NCCL_TESTS_")
    return listed or _is_in_library(name)


def _is_in_library(name: str) -> bool:
    """Tell whether NVIDIA's loaded library has the name in its memory: it may be newer than the list."""
    library = loaded()
    if isinstance(library, Exception) or library.backend == "cpu":
        # The CPU library's are listed.
        return False
    wanted = name.encode() + b"\0"
    with opened(library.path) as content:
        # The rest of the file is debug information, which names constants and functions, too.
        return any(content.find(wanted, first, end) >= 0 for first, end in _in_memory(content))


def _in_memory(content: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Yield the parts of a 64-bit ELF file that are loaded into memory."""
    if content[:5] != b"\x7fELF\2":
        return
    (table,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<HH", content, 54)
    for i in range(count):
        kind, _, first, _, _, length = struct.unpack_from("<IIQQQQ", content, table + i * size)
        if kind == _LOADED:
            yield first, first + length


def _unknown(check: str, name: str, otherwise: str) -> Finding:
    near = _RENAMED.get(name) or nearest(name)
    return warning(
        check,
        f"{name} is a name that no NCCL from 2.16 to 2.32 reads"
        if name.startswith("NCCL_")
        else f"{name} is a name that pynccl does not read",
        "The setting has no effect.",
        f"{otherwise}, or set {near}" if near else otherwise,
    )


def nearest(name: str) -> str | None:
    """Return the known name that is most like a name, or None."""
    return _variables.nearest(name, PYNCCL if name.startswith("PYNCCL_") else known.NCCL)


def check_left_over(machine: Machine) -> Iterator[Finding]:
    """Look for variables that were set to find a fault and slow programs down."""
    for name, (harmless, effect) in _LEFT_OVER.items():
        value = machine.environ.get(name, "")
        if value and value not in harmless:
            yield warning("left-over", f"{name}={value}", f"With it {effect}.", f"unset {name}")
    if machine.environ.get("NCCL_DEBUG", "").upper() in _CHATTY:
        value = machine.environ["NCCL_DEBUG"]
        yield warning(
            "left-over",
            f"NCCL_DEBUG={value}",
            "Every rank prints many lines.",
            "NCCL_DEBUG=WARN prints errors only; or name a file by NCCL_DEBUG_FILE=/tmp/nccl.%h.%p",
        )


def check_values(machine: Machine) -> Iterator[Finding]:
    """Read the variables that pynccl.init refuses; the first all_reduce has a time-out of its own."""
    raised = "pynccl.init raises this error."
    if why := _refusal(machine, "PYNCCL_TIMEOUT", partial(resolve_timeout, None)):
        yield error("PYNCCL_TIMEOUT", why, raised, "unset PYNCCL_TIMEOUT, or correct it.")
    if why := _refusal(machine, "PYNCCL_CHECK", check_mode.enabled):
        correct = "PYNCCL_CHECK=1 compares the ranks' calls, PYNCCL_CHECK=0 does not."
        yield error("PYNCCL_CHECK", why, raised, correct)


def _refusal(machine: Machine, name: str, read: Callable[[], object]) -> str:
    if name in machine.environ:
        try:
            read()
        except ValueError as problem:
            return str(problem)
    return ""


def check_ras_address(machine: Machine) -> Iterator[Finding]:
    """Read the address of the RAS server."""
    if not (address := machine.environ.get("NCCL_RAS_ADDR")):
        return
    try:
        parse_address(address)
    except ValueError:
        yield warning(
            "NCCL_RAS_ADDR",
            f"NCCL_RAS_ADDR is {address!r}; expected HOST:PORT or [IPV6]:PORT",
            "The job has no RAS server, and pynccl ras refuses the variable.",
            "NCCL_RAS_ADDR=localhost:28028, or another address of this machine.",
        )


def check_files(machine: Machine) -> Iterator[Finding]:
    """List the files of settings that are in effect, and the names in them that nothing reads."""
    own = machine.environ.get("NCCL_CONF_FILE")
    home = machine.environ.get("HOME", "")
    users = os.path.expanduser(own) if own else os.path.join(home, f".{_SETTINGS}")
    paths = [Path(users), machine.path("etc", _SETTINGS)]
    if own and not paths[0].is_file():
        yield error(
            _SETTINGS,
            f"NCCL_CONF_FILE names {own}, which is not a file",
            "None of its settings has an effect, and ~/.nccl.conf is not read.",
            "unset NCCL_CONF_FILE, or correct the path.",
        )
    for path in paths:
        with suppress(OSError):
            # A pipe would wait for a program that writes.
            if path.is_file():
                yield from _settings(machine, path, path.read_text(errors="replace"))


def _settings(machine: Machine, path: Path, text: str) -> Iterator[Finding]:
    lines = [line.strip() for line in text.splitlines()]
    pairs = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    covered = sorted(name for name in pairs if name in machine.environ)
    shown = ", ".join(f"{name}={'(set)' if 'SECRET' in name else value}" for name, value in pairs.items())
    yield ok(
        _SETTINGS,
        f"{path} sets {shown or 'nothing'}"
        + (f"; the environment covers {', '.join(covered)}" if covered else ""),
    )
    for name in pairs:
        if not is_known(name):
            yield _unknown(_SETTINGS, name, f"remove it from {path}")


def check_launcher(machine: Machine) -> Iterator[Finding]:
    """Look for contradictions between the variables of the launcher."""
    environ = machine.environ
    faults = list(_contradictions(machine))
    for text, fix in faults:
        yield error("launcher", text, "pynccl.init fails, or waits for ranks that do not exist.", fix)
    if faults:
        return
    launcher = _environment.detect(environ)
    if launcher is _environment.NOBODY:
        yield ok("launcher", "none: a program of one rank")
        return
    yield ok("launcher", str(launcher))
    for other in _others(machine):
        yield warning(
            "launcher",
            other,
            "A library that reads the other variables takes part as another rank.",
            "Start each rank by one launcher only, or unset the variables of the outer one.",
        )


_START = "Start the ranks by pynccl run, torchrun, srun or mpirun, which set all of them."


def _contradictions(machine: Machine) -> Iterator[tuple[str, str]]:
    environ = machine.environ
    try:
        launcher = _environment.detect(environ)
        at = _environment.master(environ, launcher)
    except BootstrapError as failure:
        yield str(failure), _START
        return
    names = launcher.names
    if launcher is _environment.NOBODY:
        if environ.get("WORLD_SIZE", "1") != "1":
            yield f"WORLD_SIZE is {environ['WORLD_SIZE']}, and RANK is not set", _START
        if wrong := _environment.without_srun(environ):
            yield wrong, _START
        return
    if launcher.size is None:
        yield f"{names.rank} is {launcher.rank}, and {names.size} is not set", _START
    elif launcher.rank is not None and launcher.rank >= launcher.size:
        yield f"{names.rank} is {launcher.rank} and {names.size} {launcher.size}: ranks count from 0", _START
    local = machine.number("LOCAL_WORLD_SIZE")
    if local is not None and launcher.size is not None and local > launcher.size:
        yield f"LOCAL_WORLD_SIZE is {local}, more than {names.size} {launcher.size}", _START
    if local is not None and launcher.local_rank is not None and launcher.local_rank >= local:
        yield f"{names.local_rank} is {launcher.local_rank} and LOCAL_WORLD_SIZE {local}", _START
    if at is not None and _loops(at[0]) and (others := network.elsewhere(machine, launcher)):
        yield (
            f"MASTER_ADDR is {at[0]}, and {others}",
            "Set MASTER_ADDR to the name of rank 0's machine.",
        )
    if names.mpi and (launcher.size or 1) > 1 and at is None and importlib.util.find_spec("mpi4py") is None:
        yield (
            f"{launcher} started the ranks, and mpi4py is not installed",
            "pip install mpi4py, or set MASTER_ADDR and MASTER_PORT.",
        )


def _loops(host: str) -> bool:
    """Tell whether a host is a loopback address or localhost; the check names resolves other names."""
    with suppress(ValueError):
        return is_loopback(host)
    return host == "localhost"


def _others(machine: Machine) -> Iterator[str]:
    """Yield texts about launchers whose variables name another rank or size than the chosen one's."""
    chosen = _environment.detect(machine.environ)
    others = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
    if _environment.by_srun(machine.environ):
        others.append(("SLURM_PROCID", "SLURM_NTASKS"))
    for rank, size in others:
        said = machine.number(rank), machine.number(size)
        if chosen.names.rank != rank and None not in said and said != (chosen.rank, chosen.size):
            yield (
                f"{chosen.names.rank}={chosen.rank} of {chosen.size}, but "
                f"{rank}={said[0]} of {size}={said[1]}"
            )


CHECKS = (
    check_names,
    check_left_over,
    check_values,
    check_ras_address,
    check_files,
    check_launcher,
)
