"""Recordings of calls, the base of groups, prepared calls and plans.

While a recording is open in a thread, the thread's array calls go into a C list, and the objects that they
use into a Python list. One C call then runs the recording, any number of times.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from pynccl import capi
from pynccl._comm.core import BUSY, CLOSED, NO_WINDOW, STOPPED, WAITING, Core, go_on
from pynccl._errors import NcclError, NcclInvalidUsage
from pynccl._library.binding import address_of, fastcall, lib
from pynccl._library.generated.kinds import FUNCTIONS, PUT_SIGNAL
from pynccl._library.status import IN_PROGRESS, check

# Cores by the address of their pynccl_comm, by which C names a communicator.
cores: weakref.WeakValueDictionary[int, Core] = weakref.WeakValueDictionary()


def function_name(kind: int, configured: bool = False) -> str:
    """Return the C function of a kind of call; `configured`: the variant that takes a configuration."""
    return FUNCTIONS[kind] + ("Config" if configured else "")


def closed_window(function: str, where: str = "") -> NcclInvalidUsage:
    """Return the error of a put whose window was closed after the call was prepared or recorded."""
    return NcclInvalidUsage(f"{function} cannot be called: its window was closed{where}", function=function)


class Recording:
    """A list of calls, and the objects that must stay alive for them."""

    def __init__(self) -> None:
        self.calls = lib.pynccl_list_new()
        self.address = address_of(self.calls)
        self._owner = fastcall.own_list(self.address)
        self.kept: list[Any] = []

    def begin(self, nested: bool) -> fastcall.Open | None:
        """Record this thread's calls until `fastcall.end`; None inside another recording, unless `nested`.

        A recording whose Open is dropped before that ends without running its calls.
        """
        return fastcall.begin(self.address, nested, self)

    def cores(self) -> list[Core]:
        """Return the communicators of the calls, each once."""
        found = (cores.get(address_of(use.comm)) for use in self._uses() if use.first)
        return [core for core in found if core is not None]

    def streams(self) -> list[tuple[Core, int]]:
        """Return each communicator and stream of the calls."""
        return [(cores[address_of(use.comm)], int(use.stream)) for use in self._uses()]

    def waits(self) -> list[tuple[Core, int]]:
        """Return each communicator and stream that a run must wait for."""
        return [(cores[address_of(use.comm)], int(use.stream)) for use in self._uses() if use.wait]

    def _uses(self) -> list[Any]:
        return [self.calls.uses[i] for i in range(self.calls.use_count)]

    def finish(self, result: int, later: bool = False) -> None:
        """Complete a run that returned `result`: wait for its streams unless `later`, or raise its error.

        If this raises, the caller calls `let_go`.
        """
        if result == WAITING:
            for core, stream in self.waits():
                core.wait(stream, self.name(), None)
            lib.pynccl_list_leave(self.calls)
        elif result == IN_PROGRESS:
            try:
                self._settle(later)
            except BaseException:
                self._keep()
                raise
        elif result == STOPPED:
            go_on(self.cores(), lambda: self._run_again(later), self.name())
            self._raise(result)
        elif result:
            self._raise(result)

    def _run_again(self, later: bool) -> None:
        try:
            self.finish(lib.pynccl_list_run(self.calls, not later), later)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Leave the communicators after an exception, and keep the arrays that the library may still use."""
        if lib.pynccl_list_leave_mine(self.calls):
            self._keep()

    def _settle(self, later: bool) -> None:
        for core in self.cores():
            with core.alone():
                core.settle(self.name())
                for use in self._uses():
                    if use.comm == core.c and (later or not use.wait):
                        lib.pynccl_comm_use(core.c, use.stream)
                        lib.pynccl_watch_issued(core.c, use.stream)
        for core, stream in [] if later else self.waits():
            with core.alone():
                core.wait(stream, self.name(), None)

    def _keep(self) -> None:
        for core, stream in self.waits():
            if core.handle:
                core.keep(stream, list(self.kept))

    def name(self) -> str:
        """Return the name for messages: the C function, or the size of the group."""
        count = self.calls.count
        return function_name(self.calls.calls[0].kind) if count == 1 else f"a group of {count} calls"

    def _raise(self, result: int) -> None:
        # The one that an interrupted call keeps is the reason.
        for core in sorted(self.cores(), key=lambda core: core.interrupted is None):
            core.refuse(result)
        if result == CLOSED:
            # In a finalizer the communicator may no longer be found.
            raise NcclInvalidUsage(f"{self.name()} cannot be called: its communicator was closed")
        failed, count = self.calls.failed, self.calls.count
        where = f" (call {failed} of {count}, counted from 0)" if 0 <= failed < count > 1 else ""
        if result == NO_WINDOW:
            raise closed_window(FUNCTIONS[PUT_SIGNAL], where)
        if 0 <= failed < count:
            call = self.calls.calls[failed]
            function, handle = function_name(call.kind, bool(call.config)), int(call.comm.handle)
        else:
            function, handle = "ncclGroupEnd", self._failed_comm(result)
            if count == 1 and not self.calls.grouped:
                function = function_name(self.calls.calls[0].kind)
        try:
            check(result, function, handle)
        except NcclError as error:
            error.args = (f"{error.args[0]}{where}",)
            raise

    def _failed_comm(self, result: int) -> int:
        """Return the handle of the communicator that failed with a group's result, or 0."""
        for core in self.cores():
            # Another thread may have closed it.
            with suppress(NcclError):
                if core.handle and capi.ncclCommGetAsyncError(core.handle) == result:
                    return core.handle
        return 0

    def set_stream(self, stream: int) -> None:
        """Move all calls to another stream."""
        answer = lib.pynccl_list_set_stream(self.calls, stream)
        if answer == BUSY:
            raise NcclInvalidUsage(
                f"{self.name()} is running in another thread; its stream cannot change now"
            )
        if answer:
            raise MemoryError
