"""The launchers' variables of this process, and the choice between several launchers.

Launchers nest. Every rank of a job applies the same order:

1. RANK and WORLD_SIZE (torchrun, deepspeed, `pynccl run`) come first: the launcher that started the process
   itself sets them for each process.
2. The variables of mpirun (Open MPI, MPICH's hydra, PALS) come before Slurm's: inside a Slurm job mpirun sets
   them later, and SLURM_PROCID then belongs to mpirun's daemon or to the batch script.
3. Slurm's variables come before PMI_RANK and PMI_SIZE, which srun itself sets (--mpi=pmi2). They count only
   in processes that srun started: a batch script and an interactive step have them too.

A thread that is a rank of its own has its own variables: `as_rank`.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from pynccl._errors import BootstrapError

# Ports for a Slurm job without MASTER_PORT; below the range of ephemeral ports.
_SLURM_PORTS = range(10000, 30000)


class Names(NamedTuple):
    """The variables of one launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    mpi: bool = False
    # The variable by which this launcher is recognized; "" for the variable of the rank.
    sign: str = ""


TORCHRUN = Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
# `pynccl run` sets the same variables and this one.
_STORE = "PYNCCL_STORE"
# The step of salloc's shell where it runs on a node of the job (use_interactive_step), as srun writes it.
_INTERACTIVE_STEP = "4294967290"
_SLURM = Names("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_OPEN_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    TORCHRUN,
    Names("Open MPI", _OPEN_MPI + "RANK", _OPEN_MPI + "SIZE", _OPEN_MPI + "LOCAL_RANK", mpi=True),
    Names("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", mpi=True),
    Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", mpi=True, sign="MPI_LOCALRANKID"),
    _SLURM,
    Names("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", mpi=True),
)


class Launcher(NamedTuple):
    """The values that the chosen launcher set; None for variables that are not set."""

    names: Names
    rank: int | None
    size: int | None
    local_rank: int | None
    # Other launchers whose variables are also set.
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = self.names
        text = f"{names.launcher}'s variables ({names.rank}={self.rank}, {names.size}={self.size})"
        return text + (f", not {' or '.join(self.ignored)}'s" if self.ignored else "")


NOBODY = Launcher(Names("no launcher", "rank", "world_size", "local rank"), None, None, None)


# The variables of a thread that is a rank of its own, in front of the process's.
_own: ContextVar[ChainMap[str, str] | None] = ContextVar("pynccl_rank", default=None)


@contextmanager
def as_rank(own: dict[str, str]) -> Iterator[None]:
    """Make this thread a rank of its own, with these variables in place of the process's."""
    token = _own.set(ChainMap(own, os.environ))
    try:
        yield
    finally:
        _own.reset(token)


def variables() -> Mapping[str, str]:
    """Return the variables of this rank: of the process, or of the thread that is a rank."""
    own = _own.get()
    return os.environ if own is None else own


def detect(environ: Mapping[str, str]) -> Launcher:
    """Choose the launcher of this process and return its values."""
    found = [names for names in _LAUNCHERS if (names.sign or names.rank) in environ]
    if _SLURM in found and not by_srun(environ):
        found.remove(_SLURM)
    if not found:
        return NOBODY
    names = found[0]
    if names is TORCHRUN and _STORE in environ and "TORCHELASTIC_RUN_ID" not in environ:
        names = names._replace(launcher="`pynccl run`")
    # srun sets the PMI variables too, and hydra appears under two names.
    others = tuple(dict.fromkeys(n.launcher for n in found[1:] if n.launcher not in ("PMI", names.launcher)))
    return Launcher(
        names,
        _number(environ, names.rank),
        _number(environ, names.size),
        _number(environ, names.local_rank),
        others,
    )


def by_srun(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process, if Slurm's variables are set."""
    return not _is_batch_script(environ) and environ.get("SLURM_STEP_ID") != _INTERACTIVE_STEP


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """Tell whether sbatch's script started this process, and not srun."""
    return (
        environ.get("ENVIRONMENT") == "BATCH" and "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ
    )


def without_srun(environ: Mapping[str, str]) -> str:
    """Return what is wrong if a batch script of several tasks started one without srun; else ""."""
    if not _is_batch_script(environ):
        return ""
    # Without --ntasks, srun starts so many on each node.
    nodes, each = (_number(environ, f"SLURM_{name}") or 1 for name in ("JOB_NUM_NODES", "NTASKS_PER_NODE"))
    tasks = _number(environ, "SLURM_NTASKS") or nodes * each
    if tasks == 1:
        return ""
    return (
        f"Slurm's batch script started this process alone, although the job has {tasks} tasks; expected "
        f"`srun python ...` or mpirun in the script, which start {tasks} ranks, or rank=0 and world_size=1"
    )


def hidden_ranks(environ: Mapping[str, str], launcher: Launcher) -> Iterator[str]:
    """Yield a warning if RANK and WORLD_SIZE make a program of one rank of each rank that MPI has started."""
    if launcher.names is not TORCHRUN or launcher.size != 1 or "TORCHELASTIC_RUN_ID" in environ:
        return
    for names in _LAUNCHERS:
        size = environ.get(names.size, "")
        started = names.mpi and (names.sign or names.rank) in environ
        if started and _NUMBER.fullmatch(size) and int(size) > 1:
            yield (
                f"RANK and WORLD_SIZE=1 make this process the only rank, although {names.size} is "
                f"{size}; unset RANK and WORLD_SIZE to use {names.launcher}'s ranks"
            )
            return


# str.isdigit accepts digits that int() refuses.
_NUMBER = re.compile(r"[0-9]{1,9}")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        expected = "1 to 65535" if name == "MASTER_PORT" else "a number from 0 to 999999999"
        raise BootstrapError(f"{name} is {text!r}; expected {expected}, set by the launcher")
    return int(text)


def master(environ: Mapping[str, str], launcher: Launcher) -> tuple[str, int] | None:
    """Return the host and port of rank 0 from the environment, or None."""
    # torchrun wants an IPv6 address without brackets, others write them.
    host, port = environ.get("MASTER_ADDR", "").strip("[]"), _number(environ, "MASTER_PORT")
    if launcher.names is _SLURM:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        host = host or first_host(nodes or environ.get("SLURM_NODELIST", ""))
        port = _slurm_port(environ) if port is None else port
    if not host or port is None:
        return None
    if not 0 < port <= 65535:
        raise BootstrapError(f"MASTER_PORT is {port}; expected 1 to 65535")
    return host, port


def host_source(environ: Mapping[str, str]) -> str:
    """Return the name of the source of rank 0's host."""
    return "MASTER_ADDR" if environ.get("MASTER_ADDR") else "the first host of Slurm's node list"


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as `a[01-03,7]b,c`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _slurm_port(environ: Mapping[str, str]) -> int | None:
    job = _number(environ, "SLURM_JOB_ID")
    if job is None:
        return None
    step = environ.get("SLURM_STEP_ID", "0")
    return _SLURM_PORTS[(job * 97 + int(step if step.isdigit() else 0)) % len(_SLURM_PORTS)]


def job_name(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Return a name that distinguishes this job from others at the same address; "" if there is none."""
    if environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}"
    if launcher.names is _SLURM and environ.get("SLURM_JOB_ID"):
        return f"Slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return ""


def uses_agent_store(environ: Mapping[str, str]) -> bool:
    """Tell whether the store of torchrun's agent listens at MASTER_PORT."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_PORT" in environ
