"""From a result code to an exception: `check`, and the ranks of communicators for its messages."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from pynccl._base.host import is_short_of_descriptors
from pynccl._errors import (
    CollectiveMismatchError,
    NcclError,
    NcclUnhandledCudaError,
    NotSupportedError,
    RankFailedError,
    error_class,
)
from pynccl._library import cuda, loader
from pynccl._library.binding import ffi, lib
from pynccl._library.generated.api import (
    CPU_FUNCTIONS,
    FUNCTIONS,
    ncclInProgress,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclSystemError,
    ncclTimeout,
    pyncclCpuNoMismatch,
)
from pynccl._library.loader import version_text
from pynccl._library.results import result_name

IN_PROGRESS = ncclInProgress
NOT_FOUND = lib.PYNCCL_NOT_FOUND

# Rank and size of open communicators that capi made; None while only the library knows them.
# The cells that NCCL wrote them to stay alive with them.
_known: dict[int, tuple[tuple[int, int] | None, Any]] = {}
# By communicator, the cells of handles that NCCL will write.
_late: dict[int, list[Any]] = {}


# Communicators that were garbage-collected without an end: the library still holds their descriptors.
_dropped: set[int] = set()


def note_dropped(comm: int) -> None:
    """Count a communicator that was garbage-collected without an end, for later errors."""
    _dropped.add(comm)


def _why_exhausted(result: int) -> str:
    """Return what the program has to do with a lack of descriptors in this process; "" if nothing."""
    if not _dropped or result != ncclSystemError or not is_short_of_descriptors():
        return ""
    several = len(_dropped) > 1
    return (
        f"{len(_dropped)} communicator{'s were' if several else ' was'} garbage-collected without destroy(), "
        f"and keep{'' if several else 's'} {'their' if several else 'its'} descriptors until the process "
        "ends; call destroy() or use `with`"
    )


def remember(comm: int, place: tuple[int, int] | None, cells: Any = None) -> None:
    """Keep a new communicator's (rank, size) for error texts."""
    _known[comm] = place, cells


def remember_late(comm: int, cell: Any) -> None:
    """Keep a cell alive that NCCL will write because of a call on a communicator."""
    cells = _late.setdefault(int(comm), [])
    cells[:] = [other for other in cells if not other[0]] + [cell]


def forget(comm: int) -> None:
    """Forget a communicator, since its handle may be reused."""
    _known.pop(int(comm), None)
    _late.pop(int(comm), None)
    _dropped.discard(int(comm))


def place_of(comm: int) -> tuple[int, int] | None:
    """Return (rank, size) of a communicator that capi made; None for others, which may be closed."""
    if comm not in _known:
        return None
    place, cells = _known[comm]
    if place is None:
        rank, size = ffi.new("int*"), ffi.new("int*")
        if lib.ncclCommUserRank(comm, rank) == 0 and lib.ncclCommCount(comm, size) == 0:
            place = rank[0], size[0]
            _known[comm] = place, cells
    return place


def text(pointer: Any) -> str:
    """Return a C string as str, "" for NULL."""
    return str(ffi.string(pointer).decode(errors="replace")) if pointer else ""


def check(result: int, function: str, comm: int = 0) -> None:
    """Raise the exception of a result code; none for success and ncclInProgress."""
    if result not in (0, IN_PROGRESS):
        raise _missing(function) if result == NOT_FOUND else _failed(result, function, int(comm))


def _on_cpu() -> bool:
    info = loader.loaded()
    return info is not None and info.backend == "cpu"


def _library_name() -> str:
    return "the CPU library" if _on_cpu() else "NCCL"


def _origin() -> str:
    info = loader.loaded()
    return f"{_library_name()} {version_text(info.version)} from {info.path}" if info else "nothing"


def _missing(function: str) -> NotSupportedError:
    if function in CPU_FUNCTIONS:
        need = "is a function of the CPU library (PYNCCL_LIBRARY=cpu)"
    elif function in FUNCTIONS:
        need = f"needs NCCL >= {version_text(FUNCTIONS[function])}"
    else:
        need = "is missing"
    return NotSupportedError(f"{function} {need}; loaded {_origin()}", function=function)


def mismatch(result: int, comm: int) -> int:
    """Return what the library's last error says of the ranks' calls: a pyncclCpuErrorKind_t."""
    kind = ffi.new("int*")
    # Only the CPU library can tell.
    if result != ncclInvalidUsage or lib.pyncclCpuGetErrorKind(comm, kind):
        return pyncclCpuNoMismatch
    return int(kind[0])


def _late_ranks(result: int) -> list[int]:
    """Return the ranks that were late, or have left while others joined, if the library tells them."""
    if result not in (ncclRemoteError, ncclTimeout):
        return []
    found, rank = [], ffi.new("int*")
    for index in itertools.count():
        # Only the CPU library can tell.
        if lib.pyncclCpuGetLateRank(index, rank) or rank[0] < 0:
            break
        found.append(int(rank[0]))
    return found


class _Reported(NamedTuple):
    """The library's last error: its text, and how much of that is the failed function and the rank."""

    text: str
    function: int = 0
    place: int = 0

    def is_of(self, function: str) -> bool:
        return self.text[: self.function] == f"{function}: "

    def cause(self, function: str) -> str:
        return self.text[self.function :] if self.is_of(function) else self.text


def _reported(comm: int) -> _Reported:
    """Return the last error of a communicator, or of this thread."""
    detail = text(lib.ncclGetLastError(comm))
    function, place = ffi.new("int*"), ffi.new("int*")
    # Only the CPU library can tell.
    told = lib.pyncclCpuGetErrorPrefix(comm, function, place) == 0
    return _Reported(detail, function[0], place[0]) if told else _Reported(detail)


def _cause(meaning: str, reported: _Reported, function: str) -> str:
    """Return the cause in an error's text; NCCL's last error may be that of an earlier call."""
    if reported.text and _on_cpu():
        return reported.cause(function)
    last = reported.text and f"last error reported by NCCL: {reported.text}"
    return "; ".join(filter(None, [meaning, last]))


def _explained(result: int, function: str, comm: int) -> _Reported:
    """Return what the library reports of a failed call."""
    # First, since any other call may replace the text.
    refusal = _reported(0)
    reported = _reported(comm)
    # The CPU library's text for a communicator that has failed is that of its failure, which does not explain
    # why a later call was refused.
    refused = result in (ncclInvalidArgument, ncclInvalidUsage) and refusal.is_of(function)
    return refusal if refused and mismatch(result, comm) == pyncclCpuNoMismatch else reported


def _failed(result: int, function: str, comm: int) -> NcclError:
    reported = _explained(result, function, comm)
    # Behind it: this thread's last error is now the one that it returns.
    late = _late_ranks(result)
    meaning = text(lib.ncclGetErrorString(result))
    cls = CollectiveMismatchError if mismatch(result, comm) != pyncclCpuNoMismatch else error_class(result)
    if late and result == ncclRemoteError:
        cls = RankFailedError
    cause = _cause(meaning, reported, function)
    parts = [f"{function}: {result_name(result)}: {cause}" if cause else f"{function}: {result_name(result)}"]
    rank, size = place_of(comm) or (None, None)
    if rank is not None and not reported.place:
        parts.append(f"rank {rank} of {size}")
    if why := _why_exhausted(result):
        parts.append(why)
    parts.append(_origin())
    if cls is NcclUnhandledCudaError and not _on_cpu() and not cuda.available():
        parts.append(
            f"no NVIDIA driver was found ({cuda.why_unavailable()}): "
            "set PYNCCL_LIBRARY=cpu to run on CPU memory without a GPU"
        )
    known: dict[str, Any] = {"ranks": late} if late else {}
    return cls(
        "; ".join(parts),
        result=result,
        function=function,
        detail=reported.text,
        rank=rank,
        size=size,
        **known,
    )
