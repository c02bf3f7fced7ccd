"""Tensors that torch differentiates: what would be lost is refused, and what changes is told to torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pynccl
from ranks import on_ranks


@on_ranks(2)
def test_gradients(rank: int, nranks: int) -> None:
    with pynccl.init() as comm:
        leaf = torch.ones(4, requires_grad=True)
        inner = leaf * 2
        plain = torch.ones(4)
        writes: list[Callable[[torch.Tensor], object]] = [
            comm.all_reduce,
            lambda t: comm.all_reduce(plain, t),
            lambda t: comm.reduce(t, root=rank),
            # The root too: it writes nothing, but would wait for the other rank.
            lambda t: comm.broadcast(t, root=1 - rank),
            lambda t: comm.broadcast(t, root=rank),
            lambda t: comm.recv(t, 1 - rank),
            lambda t: comm.all_gather_v(plain[:2], t, [2, 2]),
            comm.prepare.all_reduce,
        ]
        for tensor in (leaf, inner, leaf[:], inner.view(2, 2).view(4)):
            for write in writes:
                with pytest.raises(ValueError, match="requires grad, and autograd would miss"):
                    write(tensor)
        assert torch.equal(leaf.detach(), plain)
        # To be sent they are as good as others.
        assert torch.equal(comm.all_reduce(leaf, torch.empty(4)), torch.full((4,), float(nranks)))

        # The common ways to do so: without gradients, and on the gradient.
        before = leaf._version
        with torch.no_grad():
            comm.all_reduce(leaf)
        comm.all_reduce(leaf.detach(), op="avg")
        assert leaf._version > before + 1
        (leaf * 3).sum().backward()
        assert leaf.grad is not None
        comm.all_reduce(leaf.grad)
        assert leaf.grad.tolist() == [3.0 * nranks] * 4

        # What a backward pass still needs must not have changed below it.
        weight = torch.ones(4, requires_grad=True)
        changes: list[Callable[[torch.Tensor], object]] = [
            comm.all_reduce,
            lambda t: comm.all_gather_v(torch.zeros(2), t, [2, 2]),
            lambda t: comm.send_recv(plain, 1 - rank, t, 1 - rank),
        ]
        for change in changes:
            data = torch.full((4,), 2.0)
            loss = (weight * data).sum()
            change(data)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        # A call that is refused has changed nothing, and neither has one that only sends.
        data = torch.full((4,), 2.0)
        loss = (weight * data).sum()
        with pytest.raises(ValueError, match="elements"):
            comm.all_reduce(torch.ones(5), data)
        if rank == 0:
            comm.broadcast(data)
            comm.send(data, 1)
        else:
            comm.broadcast(torch.empty(4))
            comm.recv(torch.empty(4), 0)
        loss.backward()
        with torch.inference_mode():
            assert comm.all_reduce(torch.ones(2)).tolist() == [nranks] * 2
