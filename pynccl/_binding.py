"""The compiled binding; on a platform that pynccl does not support, a stand-in that says so when used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or sys.platform == "linux":
    from pynccl._native import ffi, lib
else:
    from pynccl._errors import UNSUPPORTED, NotSupportedError

    class _Unsupported:
        """Has every attribute; each can be called, which raises."""

        NULL = None

        def __getattr__(self, name: str) -> Any:
            def refuse(*_: Any) -> NoReturn:
                raise NotSupportedError(UNSUPPORTED)

            return refuse

    ffi = lib = _Unsupported()

__all__ = ["ffi", "lib"]
