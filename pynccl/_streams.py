"""From a stream argument to a handle, and how to wait for a stream so that Ctrl-C still works."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from pynccl import _cuda, capi
from pynccl._status import IN_PROGRESS, check

# Between two slices Python handles signals; within one, the waiting thread works for the CPU library.
_SLICE_MS = 100
_LONGEST_SLEEP = 0.001


def handle_of(stream: Any) -> int:
    """Return the handle of an explicit stream: an int, or an object that shows one."""
    handle: Any = stream
    if not isinstance(stream, int) or isinstance(stream, bool):
        handle = _shown_handle(stream)
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise TypeError(
            f"stream is {stream!r}; expected None, a stream handle as an int, or an object with "
            "__cuda_stream__, ptr or cuda_stream"
        )
    return handle


def _shown_handle(stream: Any) -> Any:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method by now, an attribute in its first form: (version, handle).
        version, handle = protocol() if callable(protocol) else protocol
        return handle if version == 0 else None
    return getattr(stream, "ptr", getattr(stream, "cuda_stream", None))


def current_of(array: Any) -> int:
    """Return the stream that the array's own library uses at present for its next operation."""
    library = type(array).__module__.partition(".")[0]
    # Looked up, never imported: an array of a library shows that it is there.
    module = sys.modules.get(library)
    if module is None or not _cuda.available():
        return 0
    if library == "cupy":
        return int(module.cuda.get_current_stream().ptr)
    if library == "torch":
        return int(module.cuda.current_stream(array.device).cuda_stream)
    return 0


def wait_cpu(comm: Callable[[], int], stream: int, deadline: float | None) -> bool:
    """Wait for a stream of the CPU library; False when the deadline passed."""
    while True:
        left = _SLICE_MS if deadline is None else (deadline - time.monotonic()) * 1000
        slice_ms = max(0, min(_SLICE_MS, int(left) + 1))
        if capi.pyncclCpuStreamSynchronize(comm(), stream, slice_ms) != IN_PROGRESS:
            return True
        if left <= 0:
            return False


def wait_cuda(comm: Callable[[], int], stream: int, deadline: float | None) -> bool:
    """Wait for a CUDA stream, looking at the communicator for errors; False when the deadline passed."""
    pause = 0.0
    while not _cuda.stream_query(stream):
        raise_async_error(comm())
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(_LONGEST_SLEEP, 1.5 * pause + 1e-6)
    return True


def wait_ready(comm: Callable[[], int], deadline: float | None) -> bool:
    """Wait until a non-blocking communicator has done what it was asked; False when the deadline passed."""
    pause = 0.0
    while raise_async_error(comm()) == IN_PROGRESS:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(_LONGEST_SLEEP, 1.5 * pause + 1e-6)
    return True


def raise_async_error(comm: int) -> int:
    """Raise a communicator's asynchronous error; return 0, or 7 while it is still busy."""
    state = capi.ncclCommGetAsyncError(comm)
    check(state, "ncclCommGetAsyncError", comm)
    return state
