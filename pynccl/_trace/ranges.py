"""Ranges around operations for profilers: NVTX's with PYNCCL_NVTX=1, torch's with PYNCCL_TORCH_PROFILER=1."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
# Opens a range with an operation's name and the bytes of its first array, if it has one.
_Open = Callable[[str, int | None], AbstractContextManager[Any]]

NVTX, TORCH = "PYNCCL_NVTX", "PYNCCL_TORCH_PROFILER"


def with_ranges(*names: str) -> Callable[[type[T]], type[T]]:
    """Make these methods of a class ranges of the profilers whose variables are 1."""

    def decorate(cls: type[T]) -> type[T]:
        for variable, package, make in ((NVTX, "nvtx", _nvtx), (TORCH, "torch", _torch)):
            if _wanted(variable):
                open_range = _made(make, variable, package)
                for name in names:
                    setattr(cls, name, _in_range(getattr(cls, name), open_range))
        return cls

    return decorate


def _wanted(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} is {value!r}; expected 0 or 1")
    return value == "1"


def _made(make: Callable[[], _Open], variable: str, package: str) -> _Open:
    try:
        return make()
    except ImportError as error:
        raise ImportError(
            f"{variable}=1 needs the package {package}: pip install {package} ({error})"
        ) from error


def _nvtx() -> _Open:
    domain = importlib.import_module("nvtx").get_domain("pynccl")

    @contextmanager
    def nvtx_range(name: str, size: int | None) -> Iterator[None]:
        domain.push_range(domain.get_event_attributes(message=name, payload=size))
        try:
            yield
        finally:
            domain.pop_range()

    return nvtx_range


def _torch() -> _Open:
    record_function = importlib.import_module("torch.profiler").record_function
    # torch.profiler shows no payload.
    return lambda name, _: record_function(f"pynccl:{name}")


def _in_range(method: Callable[..., Any], open_range: _Open) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_range(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        size = getattr(first, "nbytes", None)
        with open_range(method.__name__, size if isinstance(size, int) else None):
            return method(self, *args, **kwargs)

    return in_range
