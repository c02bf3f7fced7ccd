"""Libraries that lack functions: the same calls as grouped sends and receives, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pynccl
from arrays import device_over
from fake_cuda import create
from fake_nccl import Fake, source
from null_library import forwarding
from pynccl import NotSupportedError, testing


@pytest.fixture(scope="module")
def old(compile_library: Callable[..., str]) -> str:
    return compile_library(forwarding("2.19.3"), "libnccl.so.2", "-ldl")


def on_an_old_library(rank: int, nranks: int) -> None:
    from pynccl import capi

    n, me = nranks, rank
    assert pynccl.get_version() == (2, 19, 3)
    # Without a time-out there is no control channel, over which a shrink would do without NCCL's own.
    with pynccl.init() as comm:
        for name in ("ncclAlltoAll", "ncclGather", "ncclScatter"):
            args = (8, 8, 0, 0, *((0,) if name != "ncclAlltoAll" else ()), comm.handle, 0)
            with pytest.raises(
                NotSupportedError, match=f"{name} needs NCCL >= 2.28.3; loaded .* 2.19.3 from"
            ):
                getattr(capi, name)(*args)
        for dtype in ("float32", "complex128", "int16", "bool", "uint8"):
            x = (np.arange(2 * n * 3).reshape(2 * n, 3) + me).astype(dtype)
            all_x = np.stack([(np.arange(2 * n * 3).reshape(2 * n, 3) + r).astype(dtype) for r in range(n)])
            mine = slice(2 * me, 2 * me + 2)
            assert (comm.all_to_all(x) == all_x[:, mine].reshape(x.shape)).all()
            for root in range(n):
                got = comm.gather(x, root=root)
                assert (got is None) == (me != root)
                assert got is None or (got == all_x).all()
                assert (comm.scatter(x, root=root) == all_x[root][mine]).all()
                recv = np.zeros((2, 3), dtype)
                comm.scatter(x if me == root else None, recv, root)
                assert (recv == all_x[root][mine]).all()
        # The same in a group and prepared, in place at the root, and with nothing at all.
        x = np.arange(4.0 * n) + me
        with pynccl.group():
            turned, gathered = comm.all_to_all(x), comm.gather(x)
        op = comm.prepare.all_to_all(x)
        assert (op() == turned).all()
        assert (pynccl.Plan([op, comm.prepare.scatter(x)])()[0] == turned).all()
        assert (turned[:4] == np.arange(4.0) + 4 * me).all()
        assert (gathered is None) == (me != 0)
        whole = np.zeros((n, 4)) + me
        comm.gather(whole[me], whole if me == 0 else None)
        assert me != 0 or (whole == np.arange(n)[:, None]).all()
        assert comm.all_to_all(np.zeros(0)).size == 0
        x = np.ones(4 * n)
        for name, call in (
            ("ncclAllReduceConfig", lambda **k: comm.all_reduce(x, **k)),
            ("ncclAlltoAllConfig", lambda **k: comm.all_to_all(x, **k)),
            ("ncclGatherConfig", lambda **k: comm.gather(x, **k)),
            ("ncclScatterConfig", lambda **k: comm.scatter(x, **k)),
            ("ncclReduceConfig", lambda **k: comm.reduce(x, **k)),
            ("ncclBroadcastConfig", lambda **k: comm.broadcast(x, **k)),
            ("ncclAllGatherConfig", lambda **k: comm.all_gather(x, **k)),
            ("ncclReduceScatterConfig", lambda **k: comm.reduce_scatter(x, **k)),
        ):
            with pytest.raises(NotSupportedError, match=f"{name} needs NCCL >= 2.31.2; loaded .* 2.19.3"):
                call(config=pynccl.CollConfig())
            with pytest.raises(NotSupportedError, match="ncclCollConfig_t.minCTAs needs NCCL >= 2.31.2"):
                call(config={"minCTAs": 2})
        for make, words in (
            (lambda: comm.shrink([(me + 1) % n]), "ncclCommShrink needs NCCL >= 2.27"),
            (comm.revoke, "ncclCommRevoke needs NCCL >= 2.2"),
            (comm.suspend, "ncclCommSuspend needs NCCL >= 2.29"),
            (comm.resume, "ncclCommResume needs NCCL >= 2.29"),
            (lambda: comm.properties, "ncclCommQueryProperties needs NCCL >= 2.29"),
            (lambda: comm.split(0, config={"commName": "x"}), "ncclConfig_t.commName needs NCCL >= 2.27.3"),
        ):
            with pytest.raises(NotSupportedError, match=f"{words}.*; loaded .*2.19.3"):
                make()
        assert (comm.all_reduce(np.ones(2)) == n).all()


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_on_an_old_library(old: str, nranks: int) -> None:
    if nranks == 1:
        testing.run(1, alone_on_an_old_library, backend=old)
    else:
        testing.run(nranks, on_an_old_library, backend=old)


def alone_on_an_old_library(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        x = np.arange(3.0)
        assert (comm.all_to_all(x) == x).all()
        gathered = comm.gather(x)
        assert gathered is not None
        assert (gathered == x).all()
        assert (comm.scatter(x) == x).all()


@pytest.fixture(scope="module")
def fakes(compile_library: Callable[..., str]) -> dict[str, str]:
    return {
        "new": compile_library(source(), "libnccl.so.2"),
        "old": compile_library(source(21903), "libnccl.so.2"),
    }


def pairs_of_calls(rank: int, nranks: int, version: str) -> None:
    fake = Fake()
    with create() as comm:
        data, into = np.zeros(4, np.float32), np.zeros(4, np.float32)
        x, y = device_over(data), device_over(into)
        big = device_over(np.zeros(8, np.float32))
        s, r = data.ctypes.data, into.ctypes.data
        fake.log()
        comm.all_to_all(x, y, stream=5)
        comm.gather(x, root=0, stream=5)
        comm.gather(x, big, root=1, stream=5)
        comm.scatter(None, y, root=0, stream=5)
        log = fake.log()
        # Only the CPU library tells its algorithms.
        assert {record.algorithm for record in comm.trace()} == {None}
        if version == "new":
            assert [line.split()[0] for line in log] == ["AlltoAll", "Gather", "Gather", "Scatter"]
            comm.all_to_all(x, y, config={"minCTAs": 4})
            assert fake.log() == ["AlltoAllConfig 2 type 7 minCTAs 4 stream 0"]
            return
        g = big.data.ctypes.data
        assert log == [
            "start",
            f"Send {s:#x} 2 type 7 to 0 stream 0x5",
            f"Recv {r:#x} 2 type 7 from 0 stream 0x5",
            f"Send {s + 8:#x} 2 type 7 to 1 stream 0x5",
            f"Recv {r + 8:#x} 2 type 7 from 1 stream 0x5",
            "end",
            "start",
            f"Send {s:#x} 4 type 7 to 0 stream 0x5",
            "end",
            "start",
            f"Recv {g:#x} 4 type 7 from 0 stream 0x5",
            f"Send {s:#x} 4 type 7 to 1 stream 0x5",
            f"Recv {g + 16:#x} 4 type 7 from 1 stream 0x5",
            "end",
            "start",
            f"Recv {r:#x} 4 type 7 from 0 stream 0x5",
            "end",
        ]
        # A failure in between ends the group, and is told of the call that was made.
        fake.fail(1, 3)
        with pytest.raises(pynccl.NcclInternalError, match="^ncclAlltoAll: ncclInternalError"):
            comm.all_to_all(x, y)
        assert fake.log()[-1] == "end"


@pytest.mark.parametrize("version", ["new", "old"])
def test_pairs_of_calls(fakes: dict[str, str], version: str) -> None:
    testing.run(1, pairs_of_calls, version, backend=fakes[version])
