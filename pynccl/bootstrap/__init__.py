"""How the ranks of a program find each other: `init`, and the store that it goes through."""

from pynccl.bootstrap._init import init
from pynccl.bootstrap._store import Store, StoreServer

__all__ = ["Store", "StoreServer", "init"]
