"""Every operation on arrays of one kind and dtype, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arrays import (
    COMPLEX,
    MOVED,
    OPS,
    Array,
    Kind,
    dtype_of,
    factor_of,
    reduced,
    values,
)
from pynccl import Communicator


@contextmanager
def labelled(*label: Any) -> Iterator[None]:
    """Say which case of many it was."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error


class Cases:
    """The operations on arrays of one kind and dtype."""

    def __init__(self, comm: Communicator, kind: Kind, dtype: str) -> None:
        self.comm, self.kind, self.name = comm, kind, dtype
        self.dtype, self.n, self.me = dtype_of(dtype), comm.size, comm.rank

    def inputs(self, shape: Any, seed: int = 0) -> list[Array]:
        return [values(self.name, 100 * seed + rank, shape) for rank in range(self.n)]

    def check(self, got: Any, want: Array | None) -> None:
        if want is None:
            assert got is None
            return
        host = self.kind.read(got)
        assert host.dtype == want.dtype
        assert host.shape == want.shape, (host.shape, want.shape)
        assert (host == want).all(), (host, want)

    def both(self, call: Callable[[Any, Any], Any], mine: Array, want: Array | None, shape: Any) -> None:
        """Check a call with `recv` given, and without where a result can be made."""
        send = self.kind.wrap(mine.copy())
        recv = self.kind.wrap(np.zeros(shape, self.dtype)) if want is not None else None
        got = call(send, recv)
        assert got is recv
        self.check(got, want)
        assert (self.kind.read(send) == mine).all()
        if self.kind.creates:
            got = call(send, None)
            self.check(got, want)
            if want is not None:
                assert got is not send
                assert isinstance(got, np.ndarray if self.kind.name == "memoryview" else type(send))

    def all(self) -> None:
        ops: tuple[str, ...] = ()
        if self.name not in MOVED:
            ops = ("sum", "avg", "premulsum") if self.name in COMPLEX else (*OPS, "premulsum")
        for op in ops:
            with labelled(self.kind.name, self.name, op):
                self.reductions(op)
        for case in (self.broadcast, self.gathers, self.scatters, self.pairs, self.v_forms):
            with labelled(self.kind.name, self.name, case.__name__):
                case()

    def reductions(self, op: str) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2 * n, 3))
        want, mine = reduced(op, inputs), inputs[me]
        how: Any = op
        if op == "premulsum":
            how = comm.pre_mul_sum(factor_of(self.name, me))
        recv = self.kind.wrap(np.zeros_like(mine))
        send = self.kind.wrap(mine.copy())
        assert comm.all_reduce(send, recv, how) is recv
        self.check(recv, want)
        assert (self.kind.read(send) == mine).all()
        assert comm.all_reduce(send, op=how) is send
        self.check(send, want)
        self.both(
            lambda send, recv: comm.reduce_scatter(send, recv, how), mine, want[2 * me : 2 * me + 2], (2, 3)
        )
        for root in {0, n - 1}:
            send, recv = self.kind.wrap(mine.copy()), self.kind.wrap(np.zeros_like(mine))
            got = comm.reduce(send, recv if me == root else None, how, root)
            assert got is (recv if me == root else None)
            self.check(got, want if me == root else None)
            got = comm.reduce(send, op=how, root=root)
            self.check(got, want if me == root else None)
            assert got is (send if me == root else None)
            # Elsewhere in place leaves the input as it was.
            assert me == root or (self.kind.read(send) == mine).all()
        counts = [2 * rank % 5 for rank in range(n)]
        inputs = self.inputs((sum(counts),), seed=1)
        want, start = reduced(op, inputs), sum(counts[:me])
        recv = self.kind.wrap(np.zeros(counts[me], self.dtype))
        got = comm.reduce_scatter_v(self.kind.wrap(inputs[me].copy()), recv, counts, how)
        assert got is recv
        self.check(got, want[start : start + counts[me]])

    def broadcast(self) -> None:
        for root in range(self.n):
            inputs = self.inputs((3, 2))
            buffer = self.kind.wrap(inputs[self.me].copy())
            assert self.comm.broadcast(buffer, root=root) is buffer
            self.check(buffer, inputs[root])
            send = self.kind.wrap(inputs[root].copy()) if self.me == root else None
            recv = self.kind.wrap(np.zeros((3, 2), self.dtype))
            assert self.comm.broadcast(send, recv, root) is recv
            self.check(recv, inputs[root])

    def gathers(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2, 3))
        want = np.stack(inputs)
        self.both(comm.all_gather, inputs[me], want, want.shape)
        for root in {0, n - 1}:
            there = want if me == root else None
            self.both(lambda s, r, root=root: comm.gather(s, r, root), inputs[me], there, want.shape)

    def scatters(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2 * n, 3))
        want = np.concatenate([one[2 * me : 2 * me + 2] for one in inputs])
        self.both(comm.all_to_all, inputs[me], want, want.shape)
        for root in {0, n - 1}:
            want = inputs[root][2 * me : 2 * me + 2]
            self.both(lambda s, r, root=root: comm.scatter(s, r, root), inputs[me], want, (2, 3))
            recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
            send = self.kind.wrap(inputs[me].copy()) if me == root else None
            assert comm.scatter(send, recv, root) is recv
            self.check(recv, want)

    def pairs(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        inputs = self.inputs((2, 3))
        recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
        send = self.kind.wrap(inputs[me].copy())
        assert comm.send_recv(send, (me + 1) % n, recv, (me - 1) % n) is recv
        self.check(recv, inputs[me - 1])
        if n == 1:
            return
        recv = self.kind.wrap(np.zeros((2, 3), self.dtype))
        if me % 2 == 0:
            assert comm.send(send, me + 1) is None
        else:
            assert comm.recv(recv, me - 1) is recv
            self.check(recv, inputs[me - 1])

    def v_forms(self) -> None:
        comm, n, me = self.comm, self.n, self.me
        counts = [2 * rank % 5 for rank in range(n)]
        inputs = [values(self.name, rank, (count,)) for rank, count in enumerate(counts)]
        want, mine = np.concatenate(inputs), self.kind.wrap(inputs[me].copy())
        recv = self.kind.wrap(np.zeros(want.shape, self.dtype))
        assert comm.all_gather_v(mine, recv, counts) is recv
        self.check(recv, want)
        for root in {0, n - 1}:
            recv = self.kind.wrap(np.zeros(want.shape, self.dtype)) if me == root else None
            assert comm.gather_v(mine, recv, counts, root) is recv
            self.check(recv, want if me == root else None)
            part = self.kind.wrap(np.zeros(counts[me], self.dtype))
            whole = self.kind.wrap(want.copy()) if me == root else None
            assert comm.scatter_v(whole, part, counts, root) is part
            self.check(part, inputs[me])
        # Rank i sends (i + 2 j) % 4 elements to rank j.
        table = [[(i + 2 * j) % 4 for j in range(n)] for i in range(n)]
        outs = [[values(self.name, 10 * i + j, (table[i][j],)) for j in range(n)] for i in range(n)]
        into = [table[i][me] for i in range(n)]
        recv = self.kind.wrap(np.zeros(sum(into), self.dtype))
        send = self.kind.wrap(np.concatenate(outs[me]))
        assert comm.all_to_all_v(send, table[me], recv, into) is recv
        self.check(recv, np.concatenate([outs[i][me] for i in range(n)]))
