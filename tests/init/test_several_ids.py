"""pynccl.init of a large job: several unique ids, one for each share of the ranks."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl import capi, testing
from pynccl.bootstrap import _preflight


def init_in_shares(rank: int, nranks: int, share: int, method: str | None) -> tuple[float, list[int]]:
    """Return a sum, and how many ids each creation used."""
    used: list[int] = []
    create = capi.ncclCommInitRankScalable

    def counted(size: int, me: int, count: int, ids: list[bytes], config: Any) -> int:
        if me == rank:
            used.append(len(set(ids)))
        return create(size, me, count, ids, config)

    _preflight.RANKS_PER_ROOT = share
    capi.ncclCommInitRankScalable = counted
    # So many threads of one interpreter may not answer each other in time on a busy machine.
    with pynccl.init(method, timeout=30 if nranks < 100 else None) as comm:
        x = comm.all_reduce(np.full(3, rank + 1.0))
        comm.barrier()
    return float(x[0]), used


def test_the_shares_are_those_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _preflight.roots(1) == _preflight.roots(128) == [0]
    assert _preflight.roots(129) == [0, 65]
    assert _preflight.roots(1024) == list(range(0, 1024, 128))
    monkeypatch.setattr(_preflight, "RANKS_PER_ROOT", 3)
    # Shares of 3, 3, 2 and 2.
    assert _preflight.roots(10) == [0, 3, 6, 8]


@pytest.mark.parametrize(("share", "count"), [(2, 3), (5, 2), (1, 6)])
def test_a_root_for_each_share(share: int, count: int) -> None:
    assert testing.run(6, init_in_shares, share, None, backend="cpu") == [(21.0, [count])] * 6


def test_ranks_that_are_threads(tmp_path: os.PathLike[str]) -> None:
    got = testing.run(8, init_in_shares, 3, f"file://{tmp_path}/meet", backend="cpu", threads=8)
    assert [total for total, _ in got] == [36.0] * 8


def test_one_id_if_all_name_one_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    got = testing.run(4, init_in_shares, 2, None, backend="cpu", env={"NCCL_COMM_ID": address})
    assert got == [(10.0, [])] * 4


@pytest.mark.slow
def test_more_than_128_ranks() -> None:
    got = testing.run(130, init_in_shares, 128, None, backend="cpu", threads=130)
    assert [total for total, _ in got] == [130 * 131 / 2] * 130
