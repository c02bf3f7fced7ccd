"""Coroutines that wait for a Work; imported with the first await, since it needs asyncio."""

from __future__ import annotations

import asyncio
import os
import weakref
from contextlib import suppress

from pynccl._comm.in_flight import Mark
from pynccl._library.binding import fastcall

# Seconds between two looks: at the watchdog's verdict, and at an event of a library that cannot notify.
_LOOK, _POLL = 0.05, 0.001

_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = weakref.WeakKeyDictionary()


class _Waker:
    """The eventfd of one event loop, and the coroutines that wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # For __del__, which also runs if there is no free descriptor.
        self.descriptor = -1
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.waiting: set[asyncio.Future[None]] = set()
        loop.add_reader(self.descriptor, self._wake)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        for future in self.waiting:
            _finish(future)

    @fastcall.finalizer
    def __del__(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def pause(mark: Mark | None) -> None:
    """Let other coroutines run until the mark may have been reached; without one, for a moment."""
    loop = asyncio.get_running_loop()
    waker = _wakers.get(loop)
    if waker is None:
        try:
            waker = _wakers[loop] = _Waker(loop)
        except OSError:
            # Without a free descriptor.
            return await asyncio.sleep(_POLL)
    future = loop.create_future()
    waker.waiting.add(future)
    notified = mark is not None and mark.notify(waker.descriptor)
    timer = loop.call_later(_LOOK if notified else _POLL, _finish, future)
    try:
        await future
    finally:
        timer.cancel()
        waker.waiting.discard(future)
