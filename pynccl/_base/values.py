"""Values in arguments and messages: checked before C code or a peer gets them; objects without copies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import EnumMeta, IntEnum
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import numpy as np

# One more than the largest int of C.
INT = 1 << 31
# More than the devices of any machine.
MOST_DEVICES = 1 << 16


# Characters of a value in an error's text.
_SHOWN = 200


def shown(value: Any) -> str:
    """Return an object's repr for an error's text, cut if it is long: it may be a model's weights."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print such an int.
        text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"of type {type(value)}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (a {type(value).__qualname__})"


def check_rank(value: Any, name: str, size: int) -> None:
    """Raise TypeError or ValueError unless the value is a rank of a communicator of this size."""
    if not is_int(value):
        raise TypeError(f"{name} is {shown(value)}; expected an int, 0 <= {name} < {size}")
    if not 0 <= value < size:
        raise ValueError(f"{name} is {shown(value)}; expected 0 <= {name} < {size}")


# Ranks that a message names.
_MOST_NAMED = 32


def rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", at most 32 of them."""
    names = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


class _Named(EnumMeta):
    # For type checkers every name would exist.
    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            # Until Python 3.12 the members are no attributes of the class.
            if name in cls.__members__:
                return cls.__members__[name]
            names = ", ".join(cls.__members__)
            raise AttributeError(f"{cls.__name__} has no {name!r}; expected one of {names}")


class Code(IntEnum, metaclass=_Named):
    """One of NCCL's codes, such as a datatype: an int for C, and no number where another int is expected."""


def is_int(value: Any) -> TypeGuard[int | np.integer[Any]]:
    """Tell whether a value is an int or a NumPy integer: a number, and neither a bool nor a Code."""
    return isinstance(value, int | Integral) and not isinstance(value, bool | Code)


def as_index(value: Any) -> int:
    """Return what `operator.index` returns; TypeError for a bool and a Code, too."""
    if isinstance(value, bool | Code):
        raise TypeError
    return index(value)


def check_int(value: Any, name: str, least: int, end: int, expected: str) -> int:
    """Return an int or a NumPy integer, least <= value < end, as an int; raise TypeError or ValueError."""
    if not is_int(value):
        raise TypeError(f"{name} is {shown(value)}; expected {expected}")
    if not least <= value < end:
        raise ValueError(f"{name} is {shown(value)}; expected {expected}")
    return int(value)


def check_text(value: Any, name: str, expected: str = "a str") -> str:
    """Return a str that UTF-8 can encode; raise TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; expected {expected}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is {value!r}; expected {expected} that UTF-8 can encode") from error
    return value


def check_list(value: Any, name: str, expected: str) -> list[Any]:
    """Return the items of an iterable; raise TypeError."""
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; expected {expected}") from None


def refuse_copy(self: Any) -> Any:
    """Raise TypeError: as `__reduce__` of a class whose objects own something of this process."""
    raise TypeError(f"pynccl.{type(self).__name__} cannot be copied or pickled: it belongs to its process")
