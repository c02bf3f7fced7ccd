"""Ranks that meet by a method of pynccl.init, and an object that is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import pynccl


def meet(method: Any, rank: int, nranks: int, **more: Any) -> None:
    with pynccl.init(method, rank=rank, world_size=nranks, timeout=20, **more) as comm:
        assert (comm.rank, comm.size) == (rank, nranks)
        assert (comm.all_reduce(np.ones(3)) == nranks).all()


class Plain:
    """get and set alone, as a Ray actor or a Dask scheduler's metadata would be wrapped: over files here."""

    def __init__(self, folder: str, absent: str) -> None:
        self.folder, self.absent = Path(folder), absent

    def set(self, name: str, value: bytes) -> None:
        fresh = self.folder / f"{os.getpid()}.new"
        fresh.write_bytes(value)
        fresh.rename(self.folder / name.replace("/", "."))

    def get(self, name: str) -> bytes | None:
        try:
            return (self.folder / name.replace("/", ".")).read_bytes()
        except OSError:
            if self.absent == "raises":
                raise KeyError(name) from None
            return None
