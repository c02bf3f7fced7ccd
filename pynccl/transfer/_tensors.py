"""What is announced of a tensor, and the arrays that are made for one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import FORTRAN, READ_ONLY, RECORDED_BY_AUTOGRAD, kind_of, shape_of
from pynccl._device.devices import array_module
from pynccl._memory.creation import numpy_dtype


class Tensor(NamedTuple):
    """The dtype's name and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def described(tensors: Any, name: str, *, written: bool = False) -> dict[str, Tensor]:
    """Return what is to be announced of each array; raise for one that cannot be sent, or written."""
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{name} is of type {type(tensors).__qualname__}; expected a mapping of names to arrays"
        )
    return {key: _described(key, array, f"{name}[{key!r}]", written) for key, array in tensors.items()}


def _described(key: Any, array: Any, name: str, written: bool) -> Tensor:
    if not isinstance(key, str):
        raise TypeError(f"{name} has the name {key!r}; expected a str")
    _, count, code, _, flags = kind_of(array, name).span(array, name)
    if flags & FORTRAN:
        raise ValueError(f"{name} is in Fortran order; expected C order")
    if written and flags & READ_ONLY and count:
        raise ValueError(f"{name} is read-only; expected a writable array")
    if written and flags & RECORDED_BY_AUTOGRAD:
        raise ValueError(
            f"{name} requires grad, and autograd would miss the change of its elements; expected a tensor "
            "without requires_grad, such as those of state_dict(), or a call under torch.no_grad()"
        )
    return Tensor(dtypes.name_of(code), shape_of(array))


def differences(expected: Mapping[str, Tensor], announced: Mapping[str, Tensor]) -> str:
    """Return how an announcement differs from what is expected, or nothing."""
    missing = [name for name in expected if name not in announced]
    unexpected = [name for name in announced if name not in expected]
    other = [
        f"{name!r} is announced as {announced[name]}, expected as {expected[name]}"
        for name in expected
        if name in announced and announced[name] != expected[name]
    ]
    parts = _listed(other, "; ", "tensors differ")
    parts += [f"not announced: {_names(missing)}"] if missing else []
    parts += [f"not expected: {_names(unexpected)}"] if unexpected else []
    return "; ".join(parts)


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
            for name, (dtype, shape) in tensors.items()
        }
    library = array_module() if like is None else _library_of(like)
    return {name: library.empty(shape, numpy_dtype(dtype)) for name, (dtype, shape) in tensors.items()}


def _library_of(like: Any) -> Any:
    library = type(like).__module__.partition(".")[0]
    if library not in ("numpy", "cupy") or not hasattr(like, "dtype"):
        raise TypeError(
            f"like is of type {type(like).__qualname__}; expected a NumPy or CuPy array or a torch tensor"
        )
    return importlib.import_module(library)
