"""Ring attention: a sequence is split over the ranks, and keys and values go round.

pynccl run -n 4 examples/ring_attention.py
pynccl run -n 4 examples/ring_attention.py --causal

Each rank has the queries, keys and values of its part of the sequence. In every step it attends to the keys
and values that it holds, adds that to what it has, and passes them to its right neighbour. No rank ever holds
the scores of the whole sequence, or its keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from comparison import compare, divides, normal

import pynccl

HEADS, LENGTH, WIDTH = 4, 96, 16
Array = Any


class RingAttention:
    """Attention of one rank's queries to the whole sequence. Arrays are (heads, length, width)."""

    def __init__(self, comm: pynccl.Communicator, causal: bool) -> None:
        self.comm, self.causal = comm, causal
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def pass_on(self, held: Array) -> Array:
        """Send what this rank holds to the right, and return what comes from the left."""
        arriving = pynccl.array_module().empty_like(held)
        return self.comm.send_recv(held, self.right, arriving, self.left)

    def owners(self) -> Iterator[int]:
        """Yield the rank whose keys and values are here, in each step."""
        for step in range(self.comm.size):
            yield (self.comm.rank - step) % self.comm.size

    def scores(self, q: Array, k: Array, owner: int) -> Array:
        xp = pynccl.array_module()
        scores = q @ k.swapaxes(1, 2) * q.shape[2] ** -0.5
        if self.causal:
            place = xp.arange(q.shape[1])
            seen = place[:, None] + self.comm.rank * len(place) >= place + owner * len(place)
            scores = xp.where(seen, scores, -xp.inf)
        return scores

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Return softmax(q @ k.T) @ v, summed up in parts: each is scaled to the largest score so far."""
        xp = pynccl.array_module()
        held = xp.stack([k, v])
        # Every query sees its own key, in the first step: no maximum stays infinite.
        largest = xp.full((*q.shape[:2], 1), -xp.inf)
        total, out = xp.zeros_like(largest), xp.zeros_like(q)
        for owner in self.owners():
            scores = self.scores(q, held[0], owner)
            before, largest = largest, xp.maximum(largest, scores.max(axis=2, keepdims=True))
            chances, scale = xp.exp(scores - largest), xp.exp(before - largest)
            total = total * scale + chances.sum(axis=2, keepdims=True)
            out = out * scale + chances @ held[1]
            # What belongs to the right neighbour is there already.
            if owner != self.right:
                held = self.pass_on(held)
        self.q, self.k, self.v, self.out = q, k, v, out / total
        # With it, backward makes any part of the chances again: exp(scores - log_total).
        self.log_total = largest + xp.log(total)
        return self.out

    def backward(self, dout: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; those of k and v travel with them, all the way round."""
        xp = pynccl.array_module()
        dq, scale = xp.zeros_like(self.q), self.q.shape[2] ** -0.5
        held = xp.stack([self.k, self.v, xp.zeros_like(self.k), xp.zeros_like(self.v)])
        of_chances = (dout * self.out).sum(axis=2, keepdims=True)
        for owner in self.owners():
            k, v, dk, dv = held
            chances = xp.exp(self.scores(self.q, k, owner) - self.log_total)
            dscores = chances * (dout @ v.swapaxes(1, 2) - of_chances) * scale
            dq += dscores @ k
            dk += dscores.swapaxes(1, 2) @ self.q
            dv += chances.swapaxes(1, 2) @ dout
            held = self.pass_on(held)
        return dq, held[2], held[3]


def step(comm: pynccl.Communicator, causal: bool, qkv: list[Array], goal: Array) -> dict[str, Array]:
    """Return the results for this rank's part of the sequence.

    The loss is half the squared distance from `goal`, summed over the sequence.
    """
    *mine, goal = (part(comm, whole) for whole in (*qkv, goal))
    attention = RingAttention(comm, causal)
    out = attention.forward(*mine)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *attention.backward(out - goal)), strict=True))


def part(comm: pynccl.Communicator, whole: Array) -> Array:
    """Return this rank's part of the sequence."""
    xp = pynccl.array_module()
    return xp.ascontiguousarray(xp.split(whole, comm.size, axis=1)[comm.rank])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--causal", action="store_true", help="no query sees a key behind it")
    args = parser.parse_args()
    with pynccl.init() as comm:
        divides(comm, "the length of the sequence", LENGTH, comm.size)
        *qkv, goal = (normal(seed, HEADS, LENGTH, WIDTH) for seed in range(4))
        ours = step(comm, args.causal, qkv, goal)
        with comm.split(comm.rank) as alone:
            whole = step(alone, args.causal, qkv, goal)
        difference = compare(comm, ours, {name: part(comm, array) for name, array in whole.items()})
        if comm.rank == 0:
            print(f"{LENGTH // comm.size} of {LENGTH} tokens on each of {comm.size} ranks", flush=True)
            print(f"outputs and gradients differ from one rank's by {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
