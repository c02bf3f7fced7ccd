"""Prepared calls and plans: results, streams, groups, failures, and what they hold."""

# The body of a group is what is tested here.
# ruff: noqa: PT012

from __future__ import annotations

import array
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arrays
import pynccl
from arrays import cupy_over, device_over
from fake_cuda import create
from fake_nccl import Fake
from meeting import hear, tell
from pynccl import NcclInvalidUsage, Plan, Prepared, group, testing
from pynccl._comm.operations import Operations
from pynccl._comm.prepared import Prepare
from ranks import on_ranks


@on_ranks(1)
def test_memory_that_would_move(rank: int, nranks: int) -> None:
    """A buffer that an open group, a stream or a prepared call uses cannot be resized."""
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        for data, longer in ((bytearray(8), b"x"), (array.array("d", [1, 2]), [3.0])):
            with group():
                comm.all_reduce(data)
                with pytest.raises(BufferError):
                    data.extend(longer)
            data.extend(longer)
            comm.all_reduce(data, stream=stream)
            with pytest.raises(BufferError):
                data.extend(longer)
            comm.synchronize(stream)
            data.extend(longer)
            op = comm.prepare.all_reduce(data, memoryview(data))
            op()
            with pytest.raises(BufferError):
                data.extend(longer)
            del op
            data.extend(longer)
            view = memoryview(data)
            op = comm.prepare.all_reduce(view)
            view.release()
            with pytest.raises(BufferError):
                data.extend(longer)
            op()


@pytest.mark.timeout(180)
@on_ranks(1, 2, timeout=170)
def test_every_operation(rank: int, nranks: int) -> None:
    n, me = nranks, rank
    with pynccl.init(timeout=30) as comm:
        x = np.zeros((n, 2))
        half, whole = np.zeros(2), np.zeros((n, n, 2))
        p = comm.prepare
        total, ranks = n * (n - 1) / 2 + n, (np.arange(n) + 1)[:, None] * np.ones(2)
        each = (np.arange(n) + 1)[:, None, None] * np.ones((n, 2))
        root = me == 0
        cases: list[tuple[Prepared, Any, int]] = [
            (p.all_reduce(x, np.zeros_like(x)), total, 1),
            (p.reduce(x, np.zeros_like(x), "max"), n if root else None, 1),
            (p.broadcast(x, np.zeros_like(x), 1 % n), 1 % n + 1, 1),
            (p.all_gather(x), each, 1),
            (p.reduce_scatter(x, half, op="avg"), total / n, 1),
            (p.all_to_all(x), ranks, 1),
            (p.gather(x, whole if root else None), each if root else None, 1),
            (p.scatter(x), 1, 1),
            (p.send_recv(x, (me + 1) % n, np.zeros_like(x), (me - 1) % n), (me - 1) % n + 1, 2),
            (p.all_gather_v(x, np.zeros((n, n, 2)), [2 * n] * n), each, n),
            (p.reduce_scatter_v(x, np.zeros(2), [2] * n), total, n),
            (p.gather_v(x, np.zeros((n, n, 2)), [2 * n] * n), each if root else None, 1 + n * root),
            (p.scatter_v(x if root else None, np.zeros(2), [2] * n), 1, 1 + n * root),
            (p.all_to_all_v(x, [2] * n, np.zeros_like(x), [2] * n), ranks, 2 * n),
        ]
        if n == 2:
            cases.append((p.send(x, 1) if root else p.recv(np.zeros_like(x), 0), None if root else 1, 1))
        assert (x == 0).all()
        for repeat in range(3):
            x[:] = me + 1
            for index, (op, want, length) in enumerate(cases):
                assert len(op) == length, (index, op)
                if op.result is not None:
                    op.result[:] = -1
                comm.barrier()
                got = op()
                assert got is op.result, index
                assert (got is None) == (want is None), index
                assert want is None or (got == want).all(), (repeat, index, got, want)
        plan = Plan(op for op, _, _ in cases)
        assert len(plan) == sum(length for _, _, length in cases)
        assert repr(plan) == f"<pynccl.Plan of {len(plan)} calls>"
        for _ in range(3):
            for op, _, _ in cases:
                if op.result is not None:
                    op.result[:] = -1
            comm.barrier()
            results = plan()
            assert results is plan.result
            for got, (op, want, _) in zip(results, cases, strict=True):
                assert got is op.result
                assert want is None or (got == want).all()


def test_every_operation_can_be_prepared() -> None:
    """Nothing was forgotten, and the names and texts are the operations'."""
    operations = {name for name in vars(Operations) if not name.startswith("_")} - {"pre_mul_sum", "barrier"}
    prepared = {name for name in vars(Prepare) if not name.startswith("_")}
    assert prepared == operations
    for name in operations:
        assert getattr(Prepare, name).__name__ == name
        assert f"Communicator.{name}" in (getattr(Prepare, name).__doc__ or "")


@pytest.mark.torch
@on_ranks(2)
def test_every_kind_of_array(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        factor = comm.pre_mul_sum(rank + 1)
        for kind in arrays.KINDS:
            data = np.ones(4, np.float32)
            op = comm.prepare.all_reduce(kind.wrap(data), op=factor)
            assert op() is op.result
            assert (data == 3).all(), kind.name
            op()
            assert (data == 9).all(), kind.name


@on_ranks(2)
def test_wrong_arguments(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        for prepare, error, words in (
            (lambda: comm.prepare.all_reduce(np.zeros(4)[::2]), ValueError, "send is not contiguous"),
            (lambda: comm.prepare.all_reduce(np.zeros(4), op="median"), ValueError, "op is 'median'"),
            (lambda: comm.prepare.broadcast(np.zeros(4), root=2), ValueError, "root is 2; expected 0 <="),
            (lambda: comm.prepare.all_gather(np.zeros(4), np.zeros(4)), ValueError, "recv has 4 elements"),
            (
                lambda: comm.prepare.all_to_all_v(*[np.zeros(4), [1]] * 2),
                ValueError,
                "send_counts has 1 entries",
            ),
        ):
            with pytest.raises(error, match=rf"{words}.*\(rank {rank} of 2\)$"):
                prepare()
            # The failed attempt left no recording open.
            assert (comm.all_reduce(np.ones(2)) == 2).all()
        op = comm.prepare.all_reduce(np.zeros(4))
        assert repr(op) == "<pynccl.Prepared ncclAllReduce>"
        call: Any = op
        with pytest.raises(TypeError, match="got the argument 1; expected none but wait"):
            call(1)
        with pytest.raises(TypeError, match="got the argument stream; expected none but wait"):
            call(stream=0)
        wrong: Any = [op, comm.all_reduce]
        with pytest.raises(TypeError, match=r"calls\[1\] is .*; expected a Prepared or a Plan"):
            Plan(wrong)
        with pytest.raises(TypeError, match="stream is 'x'; expected"):
            op.stream = "x"
        with pytest.raises(TypeError, match="stream is None; expected a stream: prepare again"):
            op.stream = None
        with pytest.raises(TypeError, match="stream is -1; expected"):
            op.stream = -1
        op()
        assert Plan([])() == ()


@on_ranks(2)
def test_streams_can_be_changed(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as one, pynccl.Stream() as two:
        data = np.ones(1000)
        op = comm.prepare.all_reduce(data)
        assert op.stream is None
        op()
        assert (data == 2).all()
        op.stream = one
        assert op.stream is one
        plan = Plan([op, op])
        comm.barrier()
        if rank == 1:
            hear("call checked")
        op()
        if rank == 0:
            assert not one.query()
            tell("call checked")
        with pynccl.Event() as event:
            event.record(one)
            two.wait_event(event)
        op.stream = two.handle
        op()
        comm.synchronize()
        assert (data == 8).all()
        # The plan has the stream that the call had when it was made; a plan can be moved, too.
        comm.barrier()
        if rank == 1:
            hear("plan checked")
        plan()
        if rank == 0:
            assert two.query()
            assert not one.query()
            tell("plan checked")
        comm.synchronize(one)
        assert (data == 32).all()
        plan.stream = two
        comm.barrier()
        if rank == 1:
            hear("moved plan checked")
        plan()
        if rank == 0:
            assert one.query()
            assert not two.query()
            tell("moved plan checked")
        comm.synchronize(two)
        assert (data == 128).all()
        prepared = comm.prepare.all_reduce(data, stream=one)
        assert prepared.stream is one
        prepared()
        comm.synchronize(one)
        assert (data == 256).all()


@on_ranks(2)
def test_inside_groups(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        a, b, c = np.ones(3), np.ones(3), np.ones(3)
        op = comm.prepare.all_reduce(a)
        plan = Plan([comm.prepare.all_reduce(b), comm.prepare.all_reduce(b)])
        with group():
            assert op() is a
            comm.all_reduce(c)
            assert plan()[1] is b
            assert (a == 1).all() and (b == 1).all() and (c == 1).all()
        assert (a == 2).all() and (b == 4).all() and (c == 2).all()
        with pytest.raises(KeyError), group():
            op()
            plan()
            raise KeyError
        assert (a == 2).all()
        # Preparing inside a group records nothing in it.
        with group():
            comm.all_reduce(c)
            inner = comm.prepare.all_reduce(a)
            comm.all_reduce(b)
        assert (a == 2).all() and (c == 4).all()
        inner()
        assert (a == 4).all()
        # What a group holds stays alive until it has run, whoever else lets go of it.
        kept = np.ones(3)
        with group():
            comm.prepare.all_reduce(kept)()
            gc.collect()
        assert (kept == 2).all()


@on_ranks(2)
def test_plans_of_plans(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        other = comm.split(0, key=-rank)
        assert other is not None
        data = [np.full(2, float(i)) for i in range(5)]
        ops = [comm.prepare.all_reduce(d) for d in data[:3]] + [other.prepare.all_reduce(d) for d in data[3:]]
        plan = Plan([Plan(ops[:2]), ops[2], Plan([Plan(ops[3:])])])
        assert len(plan) == 5
        results = plan()
        assert results[1] is data[2]
        assert results[0][1] is data[1]
        assert results[2][0][0] is data[3]
        assert [d[0] for d in data] == [0, 2, 4, 6, 8]
        # The parts may go; the plan holds what it needs.
        del ops, results
        gc.collect()
        plan()
        assert [d[0] for d in data] == [0, 4, 8, 12, 16]
        # One thousand calls are one.
        many = Plan([comm.prepare.all_reduce(d) for d in data] * 200)
        data[0][:] = 1
        assert len(many) == 1000
        assert len(many()) == 1000
        comm.barrier()
        other.destroy()
        with pytest.raises(NcclInvalidUsage, match=r"rank \d of 2.* cannot be used: it was destroyed"):
            plan()
        assert (comm.all_reduce(np.ones(1)) == 2).all()


@on_ranks(2)
def test_buffers_are_held_and_let_go(rank: int, nranks: int) -> None:
    class Kept(np.ndarray[Any, Any]):
        pass

    with pynccl.init(timeout=30) as comm:
        send, recv = np.ones(4).view(Kept), np.zeros(4).view(Kept)
        alive = [weakref.ref(send), weakref.ref(recv)]
        op = comm.prepare.all_reduce(send, recv)
        plan = Plan([op])
        del send, recv
        gc.collect()
        assert all(ref() is not None for ref in alive)
        assert (op() == 2).all()
        del op
        gc.collect()
        assert all(ref() is not None for ref in alive)
        plan()
        del plan
        gc.collect()
        assert all(ref() is None for ref in alive)


@on_ranks(2)
def test_a_closed_communicator(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=30)
    data = np.ones(2)
    op = comm.prepare.all_reduce(data)
    plan = Plan([op, op])
    op()
    comm.barrier()
    comm.destroy()
    for call in (op, plan):
        with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
            call()
    assert (data == 2).all()
    with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
        comm.prepare.all_reduce(data)
    # Nor does the call crash once the communicator itself is gone.
    del comm
    gc.collect()
    with pytest.raises(NcclInvalidUsage):
        op()


# --- on a library that fails when it is told to ---


def failures(rank: int, nranks: int) -> None:
    fake = Fake()
    with create() as comm:
        x, y = device_over(np.zeros(4, np.float32)), device_over(np.zeros(8, np.float32))
        ops = [comm.prepare.all_reduce(x), comm.prepare.broadcast(x), comm.prepare.all_gather(x, y)]
        names = ["ncclAllReduce", "ncclBroadcast", "ncclAllGather"]
        for op, name in zip(ops, names, strict=True):
            fake.fail(0, 3)
            with pytest.raises(
                pynccl.NcclInternalError, match=f"^{name}: ncclInternalError: something failed; .*the cause"
            ) as caught:
                op()
            assert (caught.value.function, caught.value.result) == (name, 3)
            op()
        for build in (Plan, lambda parts: Plan([Plan(parts[:2]), parts[2]])):
            plan = build(ops)
            for k, name in enumerate(names):
                fake.log()
                fake.fail(k, 2)
                with pytest.raises(
                    pynccl.NcclSystemError, match=rf"^{name}: .*\(call {k} of 3, counted from 0\)$"
                ) as caught:
                    plan()
                assert caught.value.function == name
                assert "rank 1 of 2" in str(caught.value)
                # The group was ended nevertheless, and nothing came after the failure.
                log = fake.log()
                assert (log[0], log[-1], len(log)) == ("start", "end", k + 3)
            plan()
        with (
            pytest.raises(
                pynccl.NcclInternalError, match=r"^ncclAllGather.*\(call 2 of 4, counted from 0\)$"
            ),
            group(),
        ):
            fake.fail(2, 3)
            for op in ops:
                op()
            comm.all_reduce(x)
        fake.fail(-1, 0)
        fake.fail_end(1)
        for run in (Plan(ops), Plan(ops[:1])):
            with pytest.raises(pynccl.NcclUnhandledCudaError, match="^ncclGroupEnd: ") as caught:
                run()
            assert "call" not in str(caught.value).split(";")[0]
        fake.fail_end(0)
        Plan(ops)()
        with pytest.raises(pynccl.NcclError, match="result 99"):
            fake.fail(0, 99)
            ops[0]()
        fake.fail(-1, 0)


def test_failures_name_function_and_index(fake: str) -> None:
    testing.run(1, failures, backend=fake)


def one_call_of_c(rank: int, nranks: int) -> None:
    """What reaches the library: one group a plan, no group for one call."""
    fake = Fake()
    with create() as comm:
        x = cupy_over(np.zeros(4, np.float32))
        op = comm.prepare.all_reduce(x, op="max")
        plan = Plan([op] * 1000)
        fake.log()
        op()
        line = "AllReduce in place 4 type 7 op 2 stream 0"
        assert fake.log() == [line]
        plan()
        assert fake.log() == ["start", *[line] * 1000, "end"]
        plan.stream = 0x1234
        plan()
        assert fake.log() == ["start", *["AllReduce in place 4 type 7 op 2 stream 0x1234"] * 1000, "end"]
        op()
        assert fake.log() == [line]
        comm.prepare.all_reduce(x, config={"minCTAs": 3})()
        assert fake.log() == ["AllReduceConfig 4 type 7 op 0 minCTAs 3 stream 0"]
        with group():
            op()
            plan()
        assert len(fake.log()) == 1003


def test_what_reaches_the_library(fake: str) -> None:
    testing.run(1, one_call_of_c, backend=fake)


FINALIZER = """
import numpy as np, pynccl
class Owner:
    def __init__(self):
        self.call = pynccl.init().prepare.all_reduce(np.ones(4))
    def __del__(self):
        try:
            self.call()
        except Exception as error:
            print(error)
owner = Owner()
owner.call()
"""


def test_a_call_in_a_finalizer_at_exit(run_python: Callable[..., Any]) -> None:
    done = run_python(FINALIZER, PYNCCL_LIBRARY="cpu")
    assert done.stdout == "ncclAllReduce cannot be called: its communicator was closed\n"


# The collector ends a cycle in any order; memory that is freed is overwritten.
COLLECTED = """
import gc, numpy as np, pynccl
class Owner:
    def __del__(self):
        print(self.call() is not None)
for prepare in (lambda call: call, lambda call: pynccl.Plan([call])):
    owner = Owner()
    owner.cycle, owner.comm = owner, pynccl.init_all(1)[0]
    owner.call = prepare(owner.comm.prepare.all_reduce(np.ones(4)))
    del owner
    gc.collect()
"""


def test_a_call_in_a_finalizer_of_a_cycle(run_python: Callable[..., Any]) -> None:
    command = ["-W", "ignore", "-c", COLLECTED]
    done = run_python(args=command, PYNCCL_LIBRARY="cpu", MALLOC_PERTURB_="165")
    assert done.stdout == "True\nTrue\n"
