"""A first all_reduce, with its time for each transport of the CPU library."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import pynccl
from pynccl import testing
from pynccl._base.timeouts import resolve_timeout
from pynccl._errors import NcclError
from pynccl._library import cuda, loader
from pynccl._library.loader import LibraryInfo
from pynccl._tools.bench.ranks import Memory
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded

_ELEMENTS, _CALLS = 1 << 18, 5
# The transports by the names in the CPU library's log, and the variables with which it uses them.
_CPU: dict[str, dict[str, str]] = {
    # Also where the environment has 0, of which the check left-over tells.
    "direct reads": {"PYNCCL_CPU_DIRECT": "1"},
    "shared memory": {"PYNCCL_CPU_DIRECT": "0"},
    "tcp": {"NCCL_HOSTID": "pynccl doctor, rank {rank}"},
}
_LOGGED = re.compile(r"\d+ hosts, (direct reads|shared memory|tcp)$", re.M)

# Each measurement: what was asked for, what was used, and microseconds; "" is the library's own choice.
Times = list[tuple[str, str, float]]


def measure(rank: int, nranks: int, deadline: float) -> Times:
    """Return the times of all_reduce with every rank of the job, measured until a time of this machine."""
    # A program's pynccl.init reads PYNCCL_TIMEOUT, this one's has a time-out of its own.
    resolve_timeout(None)
    if _library().backend != "cpu":
        return [("", "NCCL's choice", _time(deadline))]
    found = []
    for asked, variables in _CPU.items():
        with _variables({name: value.format(rank=rank) for name, value in variables.items()}):
            spent = _time(deadline)
        found.append((asked, _used(), spent))
    return found


def _library() -> LibraryInfo:
    """Load the library; on a machine without a driver the CPU library, unless another was asked for."""
    library = loaded()
    if not isinstance(library, NcclError):
        return library
    if os.environ.get("PYNCCL_LIBRARY", "auto") not in ("", "auto") or cuda.available():
        raise library
    return loader.load("cpu")


@contextmanager
def logged() -> Iterator[None]:
    """Have this process's library log into memory; it reads these variables when it is loaded."""
    # Memory leaves nothing behind, however the process ends.
    with (
        open(os.memfd_create("pynccl-doctor"), "rb") as log,
        _variables({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{log.fileno()}"}),
    ):
        yield


def _used() -> str:
    """Return the transport of the newest communicator, of which the CPU library's log tells."""
    return str(_LOGGED.findall(Path(os.environ["NCCL_DEBUG_FILE"]).read_text())[-1])


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _time(deadline: float) -> float:
    """Return the microseconds of one all_reduce; raise if a sum is wrong."""
    with pynccl.init(timeout=max(1.0, deadline - time.monotonic())) as comm:
        memory = Memory(4 * _ELEMENTS)
        memory.write(np.ones(_ELEMENTS, np.float32), 0)
        buffer, stream = memory.buffer("float32", _ELEMENTS), pynccl.Stream()
        comm.all_reduce(buffer, stream=stream)
        comm.synchronize(stream)
        if not (memory.read(np.dtype(np.float32), _ELEMENTS, 0) == comm.size).all():
            raise NcclError(f"all_reduce: wrong sums of {comm.size} ranks", function="ncclAllReduce")
        begin = time.perf_counter()
        for _ in range(_CALLS):
            comm.all_reduce(buffer, stream=stream)
        comm.synchronize(stream)
        spent = time.perf_counter() - begin
        stream.destroy()
    return spent / _CALLS * 1e6


def alone(timeout: float) -> Finding:
    """Measure with two ranks of this machine; on a machine with one GPU, with one."""
    try:
        on_gpus = _library().backend != "cpu"
    except NcclError as failure:
        return failed(reason(failure))
    nranks = min(2, cuda.device_count() or 2) if on_gpus else 2
    # Ranks that wait need the rest of the time to say for whom.
    deadline = time.monotonic() + 0.6 * timeout
    try:
        times = testing.run(nranks, _measure_logged, deadline, timeout=timeout)
    except testing.RankError as failure:
        return failed(_reason_of_ranks(failure))
    return finding(nranks, times[0])


def _measure_logged(rank: int, nranks: int, deadline: float) -> Times:
    with logged():
        return measure(rank, nranks, deadline)


def _reason_of_ranks(failure: testing.RankError) -> str:
    """Return the error of the first rank that has raised one; else the head or the end of the text."""
    for rank, raised in failure.errors.items():
        if raised is not None:
            return f"rank {rank}: {reason(raised)}"
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0 if isinstance(failure, testing.RankTimeout) else -1]


def reason(failure: BaseException) -> str:
    """Return an error as one line."""
    # Further lines are advice, which the check library gives.
    return (str(failure) or repr(failure)).splitlines()[0]


def failed(text: str) -> Finding:
    """Return the finding of an all_reduce that failed."""
    return error(
        "all_reduce",
        text,
        "A program's first collective would fail so, too.",
        "Start with the errors above; NCCL_DEBUG=INFO prints what the library does.",
    )


def finding(nranks: int, times: Times) -> Finding:
    """Return the finding of times; a transport that was not the one asked for is named."""
    own = [(used, spent) for asked, used, spent in times if asked in ("", used)]
    size = f"{4 * _ELEMENTS >> 20} MiB on {nranks} rank{'s' if nranks > 1 else ''}"
    text = f"{size}: " + ", ".join(f"{used} {spent:.0f} us" for used, spent in own)
    if ("direct reads", "shared memory") not in [(asked, used) for asked, used, _ in times]:
        return ok("all_reduce", text)
    return warning(
        "all_reduce",
        f"{text}; shared memory in place of direct reads",
        "The kernel refuses direct reads of other processes' memory (Yama, seccomp, another user).",
        "See the findings Yama and seccomp.",
    )
