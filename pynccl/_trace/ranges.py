"""NVTX ranges around operations, with PYNCCL_NVTX=1: for Nsight Systems and other profilers."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

NVTX = "PYNCCL_NVTX"


def with_ranges(*names: str) -> Callable[[type[T]], type[T]]:
    """Make these methods of a class NVTX ranges of the domain pynccl, if PYNCCL_NVTX is 1.

    A range has the method's name, and as its payload the bytes of the method's first array.
    """

    def decorate(cls: type[T]) -> type[T]:
        if _wanted():
            domain = _domain()
            for name in names:
                setattr(cls, name, _in_range(getattr(cls, name), domain))
        return cls

    return decorate


def _wanted() -> bool:
    value = os.environ.get(NVTX, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{NVTX} is {value!r}; expected 0 or 1")
    return value == "1"


def _domain() -> Any:
    try:
        return importlib.import_module("nvtx").get_domain("pynccl")
    except ImportError as error:
        raise ImportError(f"{NVTX}=1 needs the package nvtx: pip install nvtx ({error})") from error


def _in_range(method: Callable[..., Any], domain: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_range(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        size = getattr(first, "nbytes", None)
        payload = size if isinstance(size, int) else None
        domain.push_range(domain.get_event_attributes(message=method.__name__, payload=payload))
        try:
            return method(self, *args, **kwargs)
        finally:
            domain.pop_range()

    return in_range
