"""The base of classes that users write: their errors for wrong names tell the right ones."""

from __future__ import annotations

from pynccl._base.hints import meant
from pynccl._library.binding import fastcall


class Hinting(fastcall.Hinting):
    """A class whose error for a name that it does not have tells the name that it has instead."""

    __slots__ = ()

    def __explain__(self, name: str) -> None:
        ours = meant(type(self), name)
        hint = f"; pynccl's name is {ours}" if ours else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
