"""The compiled binding; on unsupported platforms a stand-in whose functions raise NotSupportedError."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from pynccl._base import installation

installation.require_own()

if TYPE_CHECKING:
    import pynccl._native as fastcall
    from pynccl._native import ffi, lib
elif sys.platform == "linux":
    try:
        import pynccl._native as fastcall
        from pynccl._native import ffi, lib
    except ImportError as error:
        raise installation.why_not_built(error) from None
else:
    from pynccl._errors import UNSUPPORTED, NotSupportedError

    class _Unsupported:
        """A stand-in: every attribute is a function that raises."""

        NULL = None
        Call = Hinting = object

        @staticmethod
        def finalizer(end: Any) -> Any:
            return end

        Method = finalizer

        def __getattr__(self, name: str) -> Any:
            def refuse(*_: Any) -> NoReturn:
                raise NotSupportedError(UNSUPPORTED)

            return refuse

    fastcall = ffi = lib = _Unsupported()


def address_of(pointer: Any) -> int:
    """Return a C pointer as an int."""
    return int(ffi.cast("uintptr_t", pointer))


__all__ = ["address_of", "fastcall", "ffi", "lib"]
