"""The exceptions, as one tree.

NcclError (RuntimeError)
├── NcclUnhandledCudaError        ncclUnhandledCudaError
├── NcclSystemError               ncclSystemError
├── NcclInternalError             ncclInternalError
├── NcclInvalidArgument           ncclInvalidArgument
├── NcclInvalidUsage              ncclInvalidUsage
│   └── CollectiveMismatchError   the ranks made different calls
├── NcclRemoteError               ncclRemoteError
│   └── RankFailedError           .ranks died
├── NcclTimeoutError              ncclTimeout; a TimeoutError too
├── NotSupportedError             the loaded library lacks it; a NotImplementedError too
├── LibraryNotFoundError          no library could be loaded; an OSError too
└── BootstrapError                the ranks could not find each other; .ranks never arrived

Wrong Python arguments are TypeError and ValueError. Every class pickles.

Not in `_base/`: tracebacks and pickles contain this module's name.
"""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

UNSUPPORTED = f"pynccl works on Linux (x86_64, aarch64, WSL) only; this is {sys.platform}"


def descriptor_limit(error: OSError) -> str:
    """Return what messages add to an error of the system: the limit that it has met, if it has."""
    if error.errno != errno.EMFILE:
        return ""
    return f"; RLIMIT_NOFILE (ulimit -n) is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


class NcclError(RuntimeError):
    """Report a failed call; unknown attributes are None or empty.

    `result` is NCCL's code, `detail` the library's last error message. `agreed` tells that all ranks raise an
    error for this failure, `relayed` that it is another rank's.
    """

    code: ClassVar[int | None] = None
    agreed = False
    relayed = False
    result: int | None
    function: str
    detail: str
    rank: int | None
    size: int | None

    def __init__(
        self,
        message: str,
        *,
        result: int | None = None,
        function: str = "",
        detail: str = "",
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(message)
        self.result = self.code if result is None else result
        self.function = function
        self.detail = detail
        self.rank = rank
        self.size = size

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class NcclUnhandledCudaError(NcclError):
    """Report that a call to CUDA failed."""

    code = 1


class NcclSystemError(NcclError):
    """Report that a call to the operating system failed."""

    code = 2


class NcclInternalError(NcclError):
    """Report a failed check inside the library."""

    code = 3


class NcclInvalidArgument(NcclError):
    """Report an argument that the library refused."""

    code = 4


class NcclInvalidUsage(NcclError):
    """Report calls that the library does not allow together."""

    code = 5


class NcclRemoteError(NcclError):
    """Report that another rank failed or cannot be reached."""

    code = 6


class _WithRanks(NcclError):
    """An error that names ranks."""

    def __init__(self, message: str, *, ranks: Iterable[int] = (), **known: Any) -> None:
        super().__init__(message, **known)
        self.ranks = sorted(ranks)


class NcclTimeoutError(_WithRanks, TimeoutError):
    """Report that something did not happen in time; `ranks` has those known to be behind the others."""

    code = 8


class NotSupportedError(NcclError, NotImplementedError):
    """Report a function that the loaded library or this platform lacks."""


class LibraryNotFoundError(NcclError, OSError):
    """Report that no library could be loaded; the text names every place that was tried."""


class BootstrapError(_WithRanks):
    """Report that the ranks could not find each other; `ranks` has those that never arrived, if known."""


class CollectiveMismatchError(NcclInvalidUsage):
    """Report that the ranks called different operations, or the same one with different arguments."""


class RankFailedError(_WithRanks, NcclRemoteError):
    """Report which ranks of the communicator died."""


_CLASSES: dict[int, type[NcclError]] = {
    cls.code: cls
    for cls in (
        NcclUnhandledCudaError,
        NcclSystemError,
        NcclInternalError,
        NcclInvalidArgument,
        NcclInvalidUsage,
        NcclRemoteError,
        NcclTimeoutError,
    )
    if cls.code is not None
}


def error_class(result: int) -> type[NcclError]:
    """Return the class for a result code: NcclError itself for an unknown one."""
    return _CLASSES.get(result, NcclError)
