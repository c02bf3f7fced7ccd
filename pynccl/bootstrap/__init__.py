"""Rendezvous of the ranks of a program: `init`, and the store through which ranks exchange values."""

from pynccl.bootstrap._encryption import encrypt_nccl
from pynccl.bootstrap._init import init
from pynccl.bootstrap._server import StoreServer
from pynccl.bootstrap._store import Store

__all__ = ["Store", "StoreServer", "encrypt_nccl", "init"]
