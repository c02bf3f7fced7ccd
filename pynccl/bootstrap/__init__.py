"""Rendezvous of the ranks of a program: `init`, and the store through which ranks exchange values.

Imported by every room above it.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from pynccl.bootstrap._encryption import encrypt_nccl as encrypt_nccl
    from pynccl.bootstrap._init import init as init
    from pynccl.bootstrap._server import StoreServer as StoreServer
    from pynccl.bootstrap._store import Store as Store

__all__ = ["Store", "StoreServer", "encrypt_nccl", "init"]

# Imported at the first access: the launcher needs neither communicators nor arrays.
_PLACES = {"Store": "_store", "StoreServer": "_server", "encrypt_nccl": "_encryption", "init": "_init"}


# mypy must see wrong names.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
