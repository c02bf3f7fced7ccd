"""The memory of one communicator: arrays are checked, then registered or made a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pynccl._arrays.buffers import Array
from pynccl._comm.calls import Calls
from pynccl._comm.core import Core
from pynccl._memory import registration, window
from pynccl._memory.registration import Registration
from pynccl._memory.window import Window


class Memory:
    """Registers memory with one communicator."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._core, self._arguments = calls, calls.core, calls.arguments

    def register(self, array: Array) -> Registration:
        """Check and register an array's memory."""
        self._core.open()
        with self._calls.locating():
            return registration.register(self._core, array, self._arguments.span(array, "array"))

    def registered(self, array: Array) -> bool:
        """Tell whether a registration contains the array's memory."""
        self._core.open()
        with self._calls.locating():
            return registration.registered(self._core, self._arguments.span(array, "array"))

    def window(self, array: Array, symmetric: bool) -> Window:
        """Check the arrays of all ranks and make them a window."""
        self._core.open()
        with self._calls.locating():
            span = self._arguments.output(array, "array")
            return window.register(self._core, array, span, symmetric, _exchange)


def _exchange(core: Core, kind: int, words: Sequence[int]) -> Any:
    return Calls(core).exchange(kind, words)
