"""The error of an argument that the conversion to a C integer has refused."""

from __future__ import annotations

from operator import index
from typing import Any

# Says what an int stands for, by the parameter's name.
_EXPECTED = {
    "comm": "the handle, such as Communicator.handle",
    "stream": "the handle, such as stream.ptr, or 0",
}
_ADDRESS = "the address, such as array.ctypes.data, array.data.ptr or tensor.data_ptr()"


def unfit(error: TypeError | OverflowError, **values: Any) -> TypeError | OverflowError:
    """Return the error that names the one of `values` which is no int, or does not fit; else `error`."""
    for name, value in values.items():
        try:
            number = index(value)
        except TypeError:
            return TypeError(f"{name} is of type {type(value).__qualname__}; expected {_expected(name)}")
        if isinstance(error, OverflowError) and _is_cause(number, str(error)):
            return OverflowError(f"{name} is {number}; expected an int that fits its C type ({error})")
    return error


def _expected(name: str) -> str:
    meaning = _ADDRESS if "buf" in name or name == "ptr" else _EXPECTED.get(name)
    return f"an int: {meaning}" if meaning else "an int"


def _is_cause(number: int, text: str) -> bool:
    """Tell whether this number is the one that a conversion's error text means."""
    if "negative" in text:
        return number < 0
    return str(number) in text.split() or not -(1 << 63) <= number < 1 << 64
