"""What is announced of a tensor, and the arrays that are made for one."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import FORTRAN, READ_ONLY, RECORDED_BY_AUTOGRAD, kind_of, shape_of
from pynccl._device.devices import array_module
from pynccl._memory.creation import numpy_dtype


class Tensor(NamedTuple):
    """The dtype's name and the shape of a tensor, and the first name of the memory that it shares."""

    dtype: str
    shape: tuple[int, ...]
    shares: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        code = dtypes.CODES[self.dtype]
        travel = dtypes.traveller(code)
        return math.prod(self.shape) * dtypes.itemsize(code) * (travel.factor if travel else 1)


def described(tensors: Any, name: str, *, written: bool = False) -> dict[str, Tensor]:
    """Return what is to be announced of each array; raise for one that cannot be sent, or written."""
    if not isinstance(tensors, Mapping):
        module = ", such as its .state_dict()" if hasattr(tensors, "state_dict") else ""
        raise TypeError(
            f"{name} is of type {type(tensors).__qualname__}; expected a mapping of names to arrays{module}"
        )
    found: dict[str, Tensor] = {}
    # The first name of each array's memory: (device, begin, end).
    places: dict[tuple[int, int, int], str] = {}
    for key, array in tensors.items():
        begin, device, tensor = _described(key, array, f"{name}[{key!r}]", written)
        first = key
        if tensor.nbytes:
            first = places.setdefault((device, begin, begin + tensor.nbytes), key)
        found[key] = tensor if first == key else tensor._replace(shares=first)
    if written:
        _require_apart(places, name)
    return found


def _require_apart(places: Mapping[tuple[int, int, int], str], name: str) -> None:
    ordered = sorted(places.items())
    for ((device, _, end), first), ((other, begin, _), second) in pairwise(ordered):
        if device == other and begin < end:
            raise ValueError(
                f"{name}[{second!r}] overlaps {name}[{first!r}] in memory; expected arrays of their own"
            )


def _described(key: Any, array: Any, name: str, written: bool) -> tuple[int, int, Tensor]:
    """Return the address, the device and the description of an array."""
    if not isinstance(key, str):
        raise TypeError(f"{name} has the name {key!r}; expected a str")
    address, count, code, device, flags = kind_of(array, name).span(array, name)
    if flags & FORTRAN:
        raise ValueError(f"{name} is in Fortran order; expected C order")
    if written and flags & READ_ONLY and count:
        raise ValueError(f"{name} is read-only; expected a writable array")
    if flags & RECORDED_BY_AUTOGRAD:
        missed = ", and autograd would miss the change of its elements" if written else ""
        raise ValueError(
            f"{name} requires grad{missed}; expected a tensor without requires_grad, such as those of "
            "state_dict(), or a call under torch.no_grad()"
        )
    return address, device, Tensor(dtypes.name_of(code), shape_of(array))


def differences(expected: Mapping[str, Tensor], announced: Mapping[str, Tensor]) -> str:
    """Return how an announcement differs from what is expected, or nothing."""
    missing = [name for name in expected if name not in announced]
    unexpected = [name for name in announced if name not in expected]
    other = [
        f"{name!r} is announced as {announced[name]}, expected as {expected[name]}"
        for name in expected
        if name in announced and announced[name][:2] != expected[name][:2]
    ]
    other += [
        f"{name!r} and {tensor.shares!r} are announced as two tensors, expected as one"
        for name, tensor in expected.items()
        if tensor.shares and name in announced and not _are_one(announced, name, tensor.shares)
    ]
    parts = _listed(other, "; ", "tensors differ")
    parts += [f"not announced: {_names(missing)}"] if missing else []
    parts += [f"not expected: {_names(unexpected)}"] if unexpected else []
    return "; ".join(parts)


def _are_one(announced: Mapping[str, Tensor], name: str, other: str) -> bool:
    """Tell whether two announced tensors share their memory."""
    return other in announced and (announced[name].shares or name) == (announced[other].shares or other)


# More differences are counted.
_SHOWN = 4


def _listed(texts: list[str], between: str, what: str) -> list[str]:
    more = [f"and {len(texts) - _SHOWN} more {what}"] if len(texts) > _SHOWN else []
    return [between.join(texts[:_SHOWN]), *more] if texts else []


def _names(names: list[str]) -> str:
    return " ".join(_listed([repr(name) for name in names], ", ", "names"))


def made(tensors: Mapping[str, Tensor], like: Any) -> dict[str, Any]:
    """Return new arrays for announced tensors, of the library of `like` if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
            for name, (dtype, shape, _) in tensors.items()
        }
    library = array_module() if like is None else _library_of(like)
    return {name: library.empty(shape, numpy_dtype(dtype)) for name, (dtype, shape, _) in tensors.items()}


def _library_of(like: Any) -> Any:
    library = type(like).__module__.partition(".")[0]
    if library not in ("numpy", "cupy") or not hasattr(like, "dtype"):
        raise TypeError(
            f"like is of type {type(like).__qualname__}; expected a NumPy or CuPy array or a torch tensor"
        )
    return importlib.import_module(library)
