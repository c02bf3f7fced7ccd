"""Mixture of experts: every rank holds some experts, and every token travels to the two that it has chosen.

pynccl run -n 4 examples/mixture_of_experts.py

How many tokens go from one rank to another is known only when all have chosen. So two exchanges follow each
other: all_to_all tells the counts, all_to_all_v moves the tokens. The way back has the same counts.
"""

from __future__ import annotations

from typing import Any

from comparison import compare, divides, normal

import pynccl

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 120, 16, 24, 12, 2
Array = Any
Arrays = dict[str, Array]


class Route:
    """The way of this rank's tokens to their experts, and back."""

    def __init__(self, comm: pynccl.Communicator, chosen: Array, experts: int) -> None:
        xp = pynccl.array_module()
        self.comm, self.shape = comm, chosen.shape
        # Copies leave in the order of their experts, and so in the order of the ranks that hold these.
        self.order = xp.argsort(chosen.ravel(), kind="stable")
        leaving = xp.bincount(chosen.ravel(), minlength=experts).reshape(comm.size, -1)
        arriving = comm.all_to_all(leaving)
        self.sent, self.received = leaving.sum(axis=1).tolist(), arriving.sum(axis=1).tolist()
        # From each rank, in turn, arrive the copies for this rank's first expert, its second, and so on.
        local = xp.tile(xp.arange(arriving.shape[1]), comm.size)
        self.expert = xp.repeat(local, arriving.ravel().tolist())

    def there(self, copies: Array) -> Array:
        """Send a row for each token and choice to the expert; return the rows that arrive."""
        rows = copies.reshape(-1, copies.shape[-1])[self.order]
        return self.exchange(rows, self.sent, self.received)

    def back(self, rows: Array) -> Array:
        """Return a row of each arrived one to where it came from: (tokens, choices, columns)."""
        copies = pynccl.array_module().empty((len(self.order), rows.shape[1]), rows.dtype)
        copies[self.order] = self.exchange(rows, self.received, self.sent)
        return copies.reshape(*self.shape, -1)

    def exchange(self, rows: Array, sent: list[int], received: list[int]) -> Array:
        width = rows.shape[1]
        out = pynccl.array_module().empty((sum(received), width), rows.dtype)
        # NCCL counts elements.
        return self.comm.all_to_all_v(rows, [n * width for n in sent], out, [n * width for n in received])


class Layer:
    """A router, the same on every rank, and this rank's experts: tanh(x @ up) @ down each."""

    def __init__(self, comm: pynccl.Communicator, router: Array, up: Array, down: Array) -> None:
        xp = pynccl.array_module()
        self.comm, self.router = comm, router
        self.up, self.down = (xp.split(whole, comm.size)[comm.rank] for whole in (up, down))

    def forward(self, x: Array) -> Array:
        xp = pynccl.array_module()
        scores = x @ self.router
        chances = xp.exp(scores - scores.max(axis=1, keepdims=True))
        self.x, self.chances = x, chances / chances.sum(axis=1, keepdims=True)
        self.chosen = xp.argsort(-self.chances, axis=1)[:, :CHOICES]
        self.token = xp.arange(len(x))[:, None]
        self.gates = self.chances[self.token, self.chosen][..., None]

        self.route = Route(self.comm, self.chosen, self.router.shape[1])
        copies = xp.broadcast_to(x[:, None], (*self.chosen.shape, x.shape[1]))
        self.rows = self.route.there(copies)
        self.hidden = xp.empty((len(self.rows), self.up.shape[2]), x.dtype)
        results = xp.empty_like(self.rows)
        for expert in range(len(self.up)):
            here = self.route.expert == expert
            self.hidden[here] = xp.tanh(self.rows[here] @ self.up[expert])
            results[here] = self.hidden[here] @ self.down[expert]
        self.results = self.route.back(results)
        return (self.gates * self.results).sum(axis=1)

    def backward(self, dy: Array) -> tuple[Array, Arrays]:
        xp = pynccl.array_module()
        # To the experts, by the same way as the tokens.
        dresults = self.route.there(self.gates * dy[:, None])
        drows = xp.empty_like(self.rows)
        gradients = {"up": xp.empty_like(self.up), "down": xp.empty_like(self.down)}
        for expert in range(len(self.up)):
            here = self.route.expert == expert
            dhidden = (dresults[here] @ self.down[expert].T) * (1 - self.hidden[here] ** 2)
            gradients["down"][expert] = self.hidden[here].T @ dresults[here]
            gradients["up"][expert] = self.rows[here].T @ dhidden
            drows[here] = dhidden @ self.up[expert].T
        dx = self.route.back(drows).sum(axis=1)

        # Through the gates to the router, whose gradient comes from all tokens.
        dchances = xp.zeros_like(self.chances)
        dchances[self.token, self.chosen] = (self.results * dy[:, None]).sum(axis=2)
        dscores = self.chances * (dchances - (dchances * self.chances).sum(axis=1, keepdims=True))
        gradients["router"] = self.comm.all_reduce(self.x.T @ dscores)
        return dx + dscores @ self.router.T, gradients


def step(comm: pynccl.Communicator, weights: Arrays, x: Array, goal: Array) -> tuple[Arrays, list[int]]:
    """Return this rank's parts of the results, and how many copies of tokens each rank has sent it.

    The loss is half the squared distance from `goal`, summed over all tokens.
    """
    layer = Layer(comm, **weights)
    mine, goal = (pynccl.array_module().split(whole, comm.size)[comm.rank] for whole in (x, goal))
    y = layer.forward(mine)
    dx, gradients = layer.backward(y - goal)
    return {"y": y, "dx": dx, **gradients}, layer.route.received


def main() -> None:
    with pynccl.init() as comm:
        divides(comm, "the number of experts", EXPERTS, comm.size)
        xp = pynccl.array_module()
        weights = {
            "router": normal(1, WIDTH, EXPERTS),
            "up": xp.stack([normal(10 + e, WIDTH, HIDDEN) for e in range(EXPERTS)]),
            "down": xp.stack([normal(50 + e, HIDDEN, WIDTH) for e in range(EXPERTS)]),
        }
        x, goal = normal(2, TOKENS, WIDTH) * 11, normal(3, TOKENS, WIDTH) * 11
        ours, received = step(comm, weights, x, goal)
        with comm.split(comm.rank) as alone:
            whole, _ = step(alone, weights, x, goal)
        parts = {name: xp.split(whole[name], comm.size)[comm.rank] for name in ("y", "dx", "up", "down")}
        difference = compare(comm, ours, parts | {"router": whole["router"]})
        counts = comm.gather(xp.array(received))
        if comm.rank == 0:
            for rank, row in enumerate(counts.tolist()):
                print(
                    f"the experts of rank {rank} have {sum(row)} tokens: {row} of ranks 0 to {comm.size - 1}"
                )
            print(f"outputs and gradients differ from one rank's by {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
