"""The error of an argument that the conversion to a C integer has refused."""

from __future__ import annotations

from operator import index
from typing import Any

from pynccl._library.binding import ffi

# Says what an int stands for, by the parameter's name.
_EXPECTED = {
    "comm": "the handle, such as Communicator.handle",
    "stream": "the handle, such as stream.ptr, or 0",
}
_ADDRESS = "the address, such as array.ctypes.data, array.data.ptr or tensor.data_ptr()"


def argument_error(error: TypeError | OverflowError, types: str, **values: Any) -> TypeError | OverflowError:
    """Return the error that names the one of `values` which is no int, or does not fit; else `error`.

    `types` has their C types, in the same order: "uintptr_t, int".
    """
    for (name, value), ctype in zip(values.items(), types.split(", "), strict=True):
        try:
            number = index(value)
        except TypeError:
            return TypeError(f"{name} is of type {type(value).__qualname__}; expected {_expected(name)}")
        try:
            ffi.new(f"{ctype}*", number)
        except OverflowError:
            return OverflowError(f"{name} is {number}; expected an int that fits its C type ({error})")
    return error


def _expected(name: str) -> str:
    meaning = _ADDRESS if "buf" in name or name == "ptr" else _EXPECTED.get(name)
    return f"an int: {meaning}" if meaning else "an int"
