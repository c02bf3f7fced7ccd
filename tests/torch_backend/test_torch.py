"""The torch.distributed backend: every operation, on the same inputs as gloo or against torch itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pynccl import testing
from torch_pairs import Op, on_groups, run_on_groups, same, values

# Each rank imports torch.
pytestmark = [pytest.mark.usefixtures("torch_backend"), pytest.mark.timeout(600)]

REAL = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory with gaps."""
    wide = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@on_groups(3)
def test_reductions_as_gloo(rank: int, size: int, gloo: Any, ours: Any) -> None:
    """all_reduce and reduce of every dtype and operation that gloo has."""
    for dtype in REAL:
        for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR):
            if dtype.is_floating_point and op in (Op.BAND, Op.BOR, Op.BXOR):
                continue
            for make in (torch.Tensor.clone, strided):
                # gloo takes no notice of strides: its answer is asked for in dense memory.
                a, b = values(rank, (5, 3), dtype), make(values(rank, (5, 3), dtype))
                dist.all_reduce(a, op, gloo)
                dist.all_reduce(b, op, ours)
                same([b], [a], (dtype, op, make))
            a, b = (values(rank, (7,), dtype) for _ in range(2))
            dist.reduce(a, size - 1, op, gloo)
            dist.reduce(b, size - 1, op, ours)
            if rank == size - 1:
                same([b], [a], ("reduce", dtype, op))


@pytest.mark.full
@on_groups(3)
def test_what_gloo_lacks(rank: int, size: int, gloo: Any, ours: Any) -> None:
    everyone = [values(r, (4,), torch.float64) for r in range(size)]
    x = everyone[rank].clone()
    dist.all_reduce(x, Op.AVG, ours)
    torch.testing.assert_close(x, sum(everyone) / size)
    for factor in (0.5, torch.tensor([0.5], dtype=torch.float64)):
        x = everyone[rank].clone()
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor), ours)
        same([x], [sum(everyone) * 0.5], "premul")
    for op, expected in (
        (Op.SUM, torch.any),
        (Op.MAX, torch.any),
        (Op.PRODUCT, torch.all),
        (Op.MIN, torch.all),
    ):
        x = values(rank, (16,), torch.bool)
        dist.all_reduce(x, op, ours)
        same([x], [expected(torch.stack([values(r, (16,), torch.bool) for r in range(size)]), 0)], op)
    for dtype in (torch.complex64, torch.complex128):
        x = values(rank, (3, 2), dtype)
        dist.all_reduce(x, Op.SUM, ours)
        same([x], [sum(values(r, (3, 2), dtype) for r in range(size))], dtype)
    x = torch.full((3,), 100 * (rank + 1), dtype=torch.int16)
    dist.all_reduce(x, Op.SUM, ours)
    assert x.tolist() == [sum(100 * (r + 1) for r in range(size))] * 3
    half = values(rank, (9,), torch.bfloat16)
    dist.all_reduce(half, Op.SUM, ours)
    same([half], [sum(values(r, (9,), torch.bfloat16) for r in range(size))], "bfloat16")
    for wrong, op, error in (
        (torch.ones(2, dtype=torch.bool), Op.AVG, "AVG with Bool"),
        (torch.ones(2), Op.BAND, "non-integral"),
        (torch.ones(2, dtype=torch.complex64), Op.MAX, "complex"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            dist.all_reduce(wrong, op, ours)


def movements(rank: int, size: int, group: Any, gaps: Any, wire: Any) -> Iterator[list[torch.Tensor]]:
    """Every operation that moves data, in every form; yields the results.

    `gaps` makes strided tensors, `wire` views of them.
    """
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.int16):
        for make in (torch.Tensor.clone, gaps):
            x = make(values(rank, (4, 3), dtype))
            dist.broadcast(wire(x), 1, group)
            yield [x]
            outs = [make(torch.zeros(4, 3, dtype=dtype)) for _ in range(size)]
            dist.all_gather([wire(out) for out in outs], wire(make(values(rank, (4, 3), dtype))), group)
            yield outs
        out = torch.zeros(size * 4, 3, dtype=dtype)
        dist.all_gather_into_tensor(wire(out), wire(values(rank, (4, 3), dtype)), group)
        yield [out]
        outs = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == 0 else []
        dist.gather(wire(values(rank, (4,), dtype)), [wire(out) for out in outs] or None, 0, group)
        yield outs
        x = torch.zeros(4, dtype=dtype)
        parts = [wire(values(r, (4,), dtype)) for r in range(size)] if rank == 1 else None
        dist.scatter(wire(x), parts, 1, group)
        yield [x]
        out = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(wire(out), wire(values(rank, (2 * size, 3), dtype)), group=group)
        yield [out]
        counts = [r + 1 for r in range(size)]
        out, x = torch.zeros((rank + 1) * size, 1, dtype=dtype), values(rank, (sum(counts), 1), dtype)
        dist.all_to_all_single(wire(out), wire(x), [rank + 1] * size, counts, group)
        yield [out]


def moved(rank: int, size: int, gloo: Any, ours: Any) -> int:
    # gloo has neither every dtype nor strides: it is given the same bytes.
    as_bytes = partial(torch.Tensor.view, dtype=torch.uint8)
    theirs = movements(rank, size, gloo, torch.Tensor.clone, as_bytes)
    count = 0
    for a, b in zip(theirs, movements(rank, size, ours, strided, lambda x: x), strict=True):
        same(b, a, count)
        count += 1
    return count


@pytest.mark.full
@pytest.mark.parametrize("nranks", [2, 3])
def test_data_movement_as_gloo(tmp_path: Path, nranks: int) -> None:
    assert run_on_groups(nranks, moved, tmp_path) == [45] * nranks


@pytest.mark.full
@on_groups(3)
def test_uneven_sizes(rank: int, size: int, gloo: Any, ours: Any) -> None:
    outs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)), group=ours)
    same(outs, [torch.full((r + 1,), float(r)) for r in range(size)], "all_gather")
    ins = [torch.full((r + 1,), float(rank + r)) for r in range(size)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, ins, group=ours)
    same([out], [torch.full((rank + 1,), float(sum(r + rank for r in range(size))))], "reduce_scatter")
    ins = [torch.full((rank + r,), float(10 * rank + r)) for r in range(size)]
    outs = [torch.zeros(rank + r) for r in range(size)]
    dist.all_to_all(outs, ins, group=ours)
    same(outs, [torch.full((rank + r,), float(10 * r + rank)) for r in range(size)], "all_to_all")


@pytest.mark.full
@on_groups(3)
def test_reduce_scatter(rank: int, size: int, gloo: Any, ours: Any) -> None:
    for dtype in (torch.float32, torch.int64, torch.uint8):
        everyone = [values(r, (size, 5), dtype) for r in range(size)]
        for op, expected in ((Op.SUM, torch.sum), (Op.MAX, torch.amax), (Op.BOR, None)):
            if dtype.is_floating_point and expected is None:
                continue
            if expected is None:
                whole = everyone[0] | everyone[1] | everyone[2]
            else:
                whole = expected(torch.stack(everyone), 0).to(dtype)
            out = torch.zeros(5, dtype=dtype)
            dist.reduce_scatter_tensor(out, everyone[rank].clone(), op, ours)
            same([out], [whole[rank]], (dtype, op))
            out.zero_()
            dist.reduce_scatter(out, list(everyone[rank]), op, ours)
            same([out], [whole[rank]], (dtype, op, "list"))


@pytest.mark.slow
@on_groups(3)
def test_messages(rank: int, size: int, gloo: Any, ours: Any) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 1 << 20):
        sent, got = torch.full((count,), float(rank)), torch.zeros(count)
        works = [dist.isend(sent, right, ours), dist.irecv(got, left, ours)]
        assert all(work.wait() for work in works)
        same([got], [torch.full((count,), float(left))], count)
    # Tags keep messages apart, in whatever order they are received.
    if rank == 0:
        works = [dist.isend(torch.tensor([tag]), 1, ours, tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    if rank == 1:
        for tag in (3, 1, 2):
            x = torch.zeros(1, dtype=torch.int64)
            dist.recv(x, 0, ours, tag)
            assert x.item() == tag
    # From any source, then again from a named one.
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            x = torch.zeros(2)
            source = dist.recv(x, group=ours)
            assert x.tolist() == [float(source)] * 2
            seen.add(source)
        assert seen == set(range(1, size))
        dist.barrier(ours)
        for source in range(1, size):
            dist.recv(x, source, ours)
            assert x.tolist() == [source + 0.5] * 2
    else:
        dist.send(torch.full((2,), float(rank)), 0, ours)
        dist.barrier(ours)
        dist.send(torch.full((2,), rank + 0.5), 0, ours)
    got = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), right, ours),
        dist.P2POp(dist.irecv, got, left, ours),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [float(left)] * 3
    # Two independent directions: nobody's send waits for its own receive.
    big = torch.full((1 << 18,), float(rank))
    other = torch.empty_like(big)
    for work in [dist.irecv(other, left, ours), dist.isend(big, right, ours)]:
        work.wait()
    assert other[0] == left


def wrong_size(rank: int, size: int, gloo: Any, ours: Any) -> str:
    try:
        if rank == 0:
            dist.send(torch.zeros(4), 1, ours)
        else:
            dist.recv(torch.zeros(3), 0, ours)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_message_of_another_size_is_an_error(tmp_path: Path) -> None:
    _, receiver = run_on_groups(2, wrong_size, tmp_path)
    assert "16" in receiver and "12" in receiver


def works(rank: int, size: int, gloo: Any, ours: Any) -> None:
    tensors = [torch.full((1000,), float(rank + i)) for i in range(40)]
    handles = [dist.all_reduce(x, group=ours, async_op=True) for x in tensors]
    total = sum(range(size))
    for i in reversed(range(40)):
        assert handles[i].wait() and handles[i].is_completed() and handles[i].is_success()
        assert tensors[i][0] == total + size * i
        assert handles[i].result()[0].data_ptr() == tensors[i].data_ptr()
    x = torch.ones(3)
    doubled = dist.all_reduce(x, group=ours, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * size] * 3
    # Nobody keeps the handle: the operation is done all the same, and its tensor lives until then.
    for _ in range(100):
        dist.all_reduce(torch.ones(100), group=ours, async_op=True)
    with dist._coalescing_manager(ours, async_ops=True) as manager:
        many = [torch.full((10,), float(i)) for i in range(5)]
        for x in many:
            dist.all_reduce(x, group=ours)
    manager.wait()
    assert [x[0].item() for x in many] == [float(i * size) for i in range(5)]
    with dist._coalescing_manager(ours, torch.device("cpu"), async_ops=True) as manager:
        first, second = torch.full((4,), float(rank)), torch.full((4,), float(rank))
        dist.broadcast(first, 0, ours, async_op=True)
        dist.broadcast(second, 1, ours, async_op=True)
    manager.wait()
    assert first.tolist() == [0.0] * 4 and second.tolist() == [1.0] * 4
    with dist._coalescing_manager(ours, async_ops=True) as manager:
        outs = [torch.zeros(size * (i + 1)) for i in range(3)]
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((i + 1,), float(rank)), ours)
    manager.wait()
    assert outs[2].tolist() == [float(r) for r in range(size) for _ in range(3)]


def test_works_futures_and_coalescing(tmp_path: Path) -> None:
    run_on_groups(3, works, tmp_path)


@pytest.mark.full
@on_groups(3)
def test_objects_and_sparse_tensors(rank: int, size: int, gloo: Any, ours: Any) -> None:
    mine = {"rank": rank, "text": "x" * (10 * rank)}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, ours)
    assert [o["rank"] for o in everyone] == list(range(size))
    given = [mine if rank == 1 else None]
    dist.broadcast_object_list(given, 1, ours)
    assert given[0]["rank"] == 1
    out: list[Any] = [None]
    dist.scatter_object_list(out, everyone if rank == 0 else None, 0, ours)
    assert out[0]["rank"] == rank
    collected: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object(mine, collected, 2, ours)
    assert collected is None or collected == everyone
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse, group=ours)
    assert sparse.to_dense().tolist() == [1.0] * size + [2.0 * size]
    dist.monitored_barrier(gloo)
    dist.barrier(ours)


def by_variables(rank: int, size: int, backend: str) -> list[float]:
    import pynccl.torch  # noqa: F401

    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return list(x.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pynccl", "gloo"])
def test_ranks_of_testing_meet_by_their_variables(backend: str) -> None:
    assert testing.run(2, by_variables, backend, backend="cpu", timeout=200) == [[2.0, 2.0]] * 2
