"""How the ranks of a program find each other: `init`, and the store that it goes through."""

from pynccl import _ended
from pynccl.bootstrap._encryption import encrypt_nccl
from pynccl.bootstrap._init import init
from pynccl.bootstrap._server import StoreServer
from pynccl.bootstrap._store import PromptStore, Store


def _connect(address: str, seconds: float) -> Store:
    return PromptStore(address, timeout=seconds)


# Survivors ask their launcher's store, and their layer is below this one.
_ended.connect = _connect

__all__ = ["Store", "StoreServer", "encrypt_nccl", "init"]
