"""The end of a communicator: finalize, destroy, abort and revoke; also suspend and resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pynccl import capi
from pynccl._comm import lifetime
from pynccl._comm.core import Core
from pynccl._device.blocking import LINGER, Running, bounded
from pynccl._errors import CollectiveMismatchError, NcclError, NcclRemoteError
from pynccl._library.binding import lib
from pynccl._library.generated import kinds
from pynccl._memory import registration, window
from pynccl._trace import recorder
from pynccl._watch.watchdog import BY_DEATH

# Seconds for ncclCommAbort, which can itself wait forever, for example on a captured graph.
_ABORT_SECONDS = 10.0
# Seconds that an abort waits for calls in flight on a communicator that it does not own.
_BORROWED_SECONDS = 1.0
_ABORT = "ncclCommAbort (a captured CUDA graph that uses the communicator holds it: drop graphs first)"


def finalize(core: Core) -> None:
    """Complete the outstanding calls of all ranks."""
    core.open()
    core.outside_groups("ncclCommFinalize")

    def call() -> None:
        core.finalized = True
        window.close_all(core)
        if core.registrations:
            with core.alone():
                registration.close_all(core)
        _call(core, kinds.FINALIZE, lambda: capi.ncclCommFinalize(core.open()))

    core.together(call, "ncclCommFinalize", same=kinds.FINALIZE)


def suspend(core: Core) -> None:
    """Release the communicator's device memory."""
    core.open()
    core.outside_groups("ncclCommSuspend")

    def call() -> None:
        core.suspended = True
        _call(core, kinds.SUSPEND, lambda: capi.ncclCommSuspend(core.open(), capi.NCCL_SUSPEND_MEM))

    core.together(call, "ncclCommSuspend", same=kinds.SUSPEND)


def resume(core: Core) -> None:
    """Allocate the device memory again that `suspend` released."""
    core.open()
    core.outside_groups("ncclCommResume")

    def call() -> None:
        _call(core, kinds.RESUME, lambda: capi.ncclCommResume(core.open()))
        core.suspended = False

    core.together(call, "ncclCommResume", same=kinds.RESUME)


def _call(core: Core, kind: int, call: Callable[[], int]) -> None:
    name = kinds.FUNCTIONS[kind]
    core.open()
    with core.alone(), core.announced(kind):
        try:
            # What changes the communicator must not take effect amid a later call.
            core.change(call, name, linger=LINGER)
        except NcclError:
            core.told = True
            raise


def revoke(core: Core) -> None:
    """End outstanding calls on this rank without closing the communicator."""
    handle = core.open()
    lib.pynccl_trace_mark(core.c.trace, kinds.REVOKE)
    core.c.revoked = 1
    core.bounded(lambda: capi.ncclCommRevoke(handle, capi.NCCL_REVOKE_DEFAULT), "ncclCommRevoke")


def destroy(core: Core) -> None:
    """Finalize if necessary, then release all resources; no effect on a closed communicator.

    Raises the error of a call that nobody waited for, unless the program has heard of an error.
    """
    if not core.handle:
        return
    core.end_interrupted()
    if not core.handle:
        return
    failed = core.failed_at_end = core.unheard()
    if core.watch.verdict() is not None:
        # A destroy would finalize, which a revoked communicator cannot do.
        abort(core)
    else:
        if core.windows:
            core.together(lambda: window.close_all(core), "ncclCommWindowDeregister")
        with core.alone(), recorder.recorded(core.c, kinds.DESTROY):
            registration.close_all(core)
            handle = core.close("it was destroyed")
            # Before the call: if it does not return, an abort at exit would run concurrently with it.
            lifetime.disown(handle)
            if handle and core.watch.claim():
                try:
                    core.bounded(lambda: capi.ncclCommDestroy(handle), "ncclCommDestroy")
                except CollectiveMismatchError as error:
                    # Only the CPU library tells, after the end.
                    core.failed_at_end = failed or error
                    failed = failed or (None if core.told else error)
                except BaseException:
                    core.watch.stop(lib.PYNCCL_ABORTS_TOO)
                    lifetime.keep_to_the_end([core.holdings])
                    raise
            core.release()
    lib.pynccl_trace_mark(core.c.trace, kinds.DESTROY)
    core.windows.warn(core)
    core.registrations.warn(core)
    if failed is not None:
        raise failed


def abort(core: Core) -> None:
    """Release all resources immediately, without the other ranks; also abort derived communicators."""
    family = core.family()
    for one in family:
        one.aborted = one.told = True
    if core.handle:
        recorder.dump_because("abort", f"{core!r} is aborted")
    handles: list[int] = []
    interrupted: list[Running[Any]] = []
    for one in family:
        if (left := one.interrupted) is not None and not left.running.runs_here():
            one.interrupted = None
            left.running.abandon()
            interrupted.append(left.running)
        if one.handle:
            lib.pynccl_trace_mark(one.c.trace, kinds.ABORT)
            if not one.owned:
                _close_borrowed(one)
        # Announce the abort first, so that other ranks do not take the closed connection for a death.
        one.watch.stop(_abort_reason(one))
        handle = one.close("it was aborted")
        if handle:
            lifetime.disown(handle)
            if one.watch.claim():
                handles.append(handle)
    try:
        if handles:
            bounded(lambda: abort_all(handles), _ABORT_SECONDS, _ABORT)
    except BaseException:
        lifetime.keep_to_the_end(one.holdings for one in family)
        raise
    until = time.monotonic() + LINGER
    for running in interrupted:
        running.wait(until)
    for one in family:
        one.release()


def _close_borrowed(core: Core) -> None:
    """Deregister memory from a communicator that its creator goes on using."""
    # Only all ranks together close a window.
    lifetime.keep_to_the_end(core.windows.kept())
    if not core.registrations:
        return
    try:
        with core.alone():
            registration.close_all(core, _BORROWED_SECONDS)
    except NcclError:
        # Calls are still in flight, or another thread is in one.
        lifetime.keep_to_the_end(core.registrations.kept())


def adopt(core: Core, child: Core) -> None:
    """Register a derived communicator; abort it if another thread has aborted its parent meanwhile."""
    core.adopt(child)
    if core.aborted:
        abort(child)
        core.not_aborted()


def report(error: BaseException | None) -> None:
    """Tell the launcher of an exception that no other rank caused, before the abort tells the other ranks."""
    if isinstance(error, Exception) and not isinstance(error, NcclRemoteError):
        lifetime.tell_launcher()


def _abort_reason(core: Core) -> Any:
    """Return the reason announced to the other ranks: it is the first failure, follows one, or is none."""
    watch = core.watch
    if core.goes_on:
        return lib.PYNCCL_GOES_ON
    if watch.verdict() is None and core.handle:
        # The program may have learned of the error elsewhere: ask the library for it.
        error = core.async_error()
        if error is not None and error.result in BY_DEATH:
            watch.cause(error)
    return lib.PYNCCL_ABORTS_FIRST if watch.verdict() is None else lib.PYNCCL_ABORTS_TOO


def abort_all(handles: list[int]) -> None:
    """Abort several ncclComm_t in one group: those that share resources wait for each other's abort."""
    several = len(handles) > 1
    if several:
        capi.ncclGroupStart()
    for handle in reversed(handles):
        capi.ncclCommAbort(handle)
    if several:
        capi.ncclGroupEnd()


def abort_if_made(handle: int) -> None:
    """Abort the communicator of a call that completed after its caller had given up."""
    if handle:
        capi.ncclCommAbort(handle)
