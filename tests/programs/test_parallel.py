"""The examples of parallel training, against the whole computed by NumPy in one process.

The right results are made of forward passes only: a complex step gives their gradients, to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mixture_of_experts
import numpy as np
import pipeline_parallel
import pytest
import ring_attention
import sharded_optimizer
import tensor_parallel

import pynccl
from example_runs import launch
from pynccl.testing import run

Arrays = dict[str, Any]
STEP = 1e-30


def gradient(loss: Callable[..., Any], arrays: Arrays) -> Arrays:
    """Return the derivative of a loss by each element of each array."""
    found = {}
    for name, array in arrays.items():
        found[name] = np.empty_like(array)
        for i in np.ndindex(array.shape):
            there = array.astype(complex)
            there[i] += 1j * STEP
            found[name][i] = loss(**{**arrays, name: there}).imag / STEP
    return found


def agree(ours: Any, right: Any, largest: float = 0.0) -> None:
    """Compare a part with the right one, relative to the largest value, of the part or of the whole."""
    largest = largest or abs(right).max()
    assert ours.shape == right.shape
    assert largest > 1e-4, "nothing to compare"
    np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-5 * largest)


def softmax(scores: Any) -> Any:
    chances = np.exp(scores - scores.real.max(axis=-1, keepdims=True))
    return chances / chances.sum(axis=-1, keepdims=True)


# --- tensor parallelism -------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """One head: (length, columns)."""
    scores = q @ k.T / q.shape[1] ** 0.5
    if causal:
        scores = np.where(np.tri(len(q), dtype=bool), scores, -1e30)
    return softmax(scores) @ v


def block(x: Any, query: Any, key: Any, value: Any, out: Any, up: Any, down: Any) -> Any:
    """One sequence through a transformer block of eight heads."""
    heads = zip(*(np.split(x @ w, 8, axis=1) for w in (query, key, value)), strict=True)
    middle = x + np.concatenate([attention(*head) for head in heads], axis=1) @ out
    return middle + np.tanh(middle @ up) @ down


def tensor_rank(rank: int, nranks: int, tensor_size: int, weights: Arrays, x: Any, goal: Any) -> Arrays:
    with pynccl.init(timeout=30) as comm:
        grid = tensor_parallel.Grid(comm, tensor_size)
        result = tensor_parallel.step(grid, weights, x, goal)
        grid.destroy()
        return result


@pytest.mark.parametrize(
    ("nranks", "tensor_size"),
    [(4, 2), *(pytest.param(n, t, marks=pytest.mark.slow) for n, t in ((2, 2), (4, 1), (4, 4)))],
)
def test_tensor_parallel(nranks: int, tensor_size: int) -> None:
    random = np.random.default_rng(1)
    shapes = dict.fromkeys(("query", "key", "value", "out"), (16, 16)) | {"up": (16, 8), "down": (8, 16)}
    weights = {name: 0.3 * random.standard_normal(shape) for name, shape in shapes.items()}
    x, goal = random.standard_normal((2, 4, 3, 16))

    def loss(x: Any, **weights: Any) -> Any:
        return sum(((block(s, **weights) - g) ** 2).sum() for s, g in zip(x, goal, strict=True)) / 2

    right = gradient(loss, {"x": x, **weights})
    right |= {"dx": right["x"], "y": np.array([block(s, **weights) for s in x])}
    for rank, ours in enumerate(run(nranks, tensor_rank, tensor_size, weights, x, goal, backend="cpu")):
        row, column = divmod(rank, tensor_size)
        for name in ("y", "dx"):
            agree(ours[name], np.split(right[name], nranks // tensor_size)[row])
        for name in weights:
            axis = 0 if name in ("out", "down") else 1
            agree(ours[name], np.split(right[name], tensor_size, axis=axis)[column])


# --- pipeline parallelism -----------------------------------------------------------------------------------


def layers(x: Any, weights: Any) -> Any:
    for w in weights:
        x = np.tanh(x @ w)
    return x


def pipeline_rank(rank: int, nranks: int, weights: Any, x: Any, goal: Any, count: int) -> Any:
    parts = np.split(x, count), np.split(goal, count)
    with pynccl.init(timeout=30) as comm:
        return {name: pipeline_parallel.step(comm, name, weights, *parts)[:2] for name in ("gpipe", "1f1b")}


MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 3), (2, 1), (3, 2), (4, 4), (6, 7))]


@pytest.mark.parametrize(("nranks", "count"), [(4, 6), *MORE])
def test_pipeline_parallel(nranks: int, count: int) -> None:
    random = np.random.default_rng(2)
    weights = 0.8 * random.standard_normal((2 * nranks, 2, 2))
    # A message has 8320 bytes: more than the CPU library sends before the receiver comes.
    x, goal = random.standard_normal((2, 520 * count, 2))

    def losses(x: Any, weights: Any) -> Any:
        return ((layers(x, weights) - goal) ** 2).sum(axis=1) / 2

    right = gradient(lambda weights: losses(x, weights).sum(), {"weights": weights})["weights"]
    # The loss of a sample depends on no other sample's row: one step for each column.
    dx = np.stack([losses(x + 1j * STEP * column, weights).imag / STEP for column in np.eye(2)], axis=1)

    every = run(nranks, pipeline_rank, weights, x, goal, count, backend="cpu")
    for rank, both in enumerate(every):
        assert both["gpipe"][1] == count and both["1f1b"][1] == min(count, nranks - rank)
        for ours, _ in both.values():
            agree(ours["gradients"], np.split(right, nranks)[rank])
    for name in ("gpipe", "1f1b"):
        agree(every[0][name][0]["dx"], dx)
        agree(every[-1][name][0]["y"], layers(x, weights))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules(name: str) -> None:
    """With passes of one length and nothing else, the bubble is what the formula says."""
    for size, count in itertools.product(range(1, 7), range(1, 10)):
        left = [pipeline_parallel.SCHEDULES[name](rank, size, count) for rank in range(size)]
        done: dict[tuple[str, int, int], int] = {}
        time = 0
        while any(left):
            time += 1
            for rank, passes in enumerate(left):
                if not passes:
                    continue
                pass_, i = passes[0]
                if pass_ == "forward":
                    needs = (pass_, i, rank - 1) if rank else None
                else:
                    needs = (pass_, i, rank + 1) if rank < size - 1 else ("forward", i, rank)
                if needs is None or done.get(needs, time) < time:
                    done[(*passes.pop(0), rank)] = time
            assert time < 1000, "no rank can go on"
        assert len(done) == 2 * size * count
        assert 1 - 2 * count / time == pytest.approx((size - 1) / (count + size - 1))


def bubble_rank(rank: int, nranks: int) -> Any:
    x, weights = list(np.ones((12, 1, 1))), np.ones((nranks, 1, 1))
    with pynccl.init(timeout=30) as comm:
        return {
            (name, count): pipeline_parallel.step(comm, name, weights, x[:count], x[:count], 0.01)[2]
            for name in ("gpipe", "1f1b")
            for count in (1, 12)
        }


def test_bubble() -> None:
    """Ranks wait as long as they must; how much longer depends on what else the machine does."""
    bubbles = run(3, bubble_rank, backend="cpu")[0]
    for name in ("gpipe", "1f1b"):
        assert 0.9 * 2 / 3 < bubbles[name, 1] < 1
        assert 0.9 * 2 / 14 < bubbles[name, 12] < bubbles[name, 1]


# --- sharded optimizer --------------------------------------------------------------------------------------


def optimizer_rank(rank: int, nranks: int, weights: Any, x: Any, goal: Any) -> Any:
    with pynccl.init(timeout=30) as comm:
        optimizer = sharded_optimizer.train(comm, weights, x, goal, 6)
        return optimizer.weights, optimizer.mean, optimizer.square


@pytest.mark.parametrize("nranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_sharded_optimizer(nranks: int) -> None:
    random = np.random.default_rng(3)
    weights = 0.3 * random.standard_normal(10 * 21 + 21 * 3)
    x, goal = random.standard_normal((24, 10)), random.standard_normal((24, 3))

    def loss(weights: Any) -> Any:
        y = np.tanh(x @ weights[:210].reshape(10, 21)) @ weights[210:].reshape(21, 3)
        return ((y - goal) ** 2).sum() / 2 / 24

    # Adam as its paper has it.
    right, m, v = weights, np.zeros(273), np.zeros(273)
    for t in range(1, 7):
        g = gradient(loss, {"weights": right})["weights"]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        right = right - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    every = run(nranks, optimizer_rank, weights, x, goal, backend="cpu")
    for ours, mean, _ in every:
        agree(ours - weights, right - weights)
        assert mean.size == -(-273 // nranks)
    # Adam's steps are the same for any multiple of the gradient; its moments are not.
    for moment, whole in ((1, m), (2, v)):
        agree(np.concatenate([state[moment] for state in every])[:273], whole)


# --- mixture of experts -------------------------------------------------------------------------------------


SHAPES = {"router": (3, 4), "up": (4, 3, 5), "down": (4, 5, 3)}


def mixture(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Every token by itself: the two likeliest experts, weighted by their chances."""
    y = []
    for token, chances in zip(x, softmax(x @ router), strict=True):
        chosen = np.argsort(chances.real)[-2:]
        y.append(sum(chances[e] * (np.tanh(token @ up[e]) @ down[e]) for e in chosen))
    return np.array(y)


def experts_rank(rank: int, nranks: int, weights: Arrays, x: Any, goal: Any) -> Any:
    with pynccl.init(timeout=30) as comm:
        return mixture_of_experts.step(comm, weights, x, goal)


@pytest.mark.parametrize("nranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("crowded", [False, True])
def test_mixture_of_experts(nranks: int, crowded: bool) -> None:
    random = np.random.default_rng(4)
    weights = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    x, goal = random.standard_normal((2, 12, 3))
    if crowded:
        # All choose experts 0 and 1: other ranks have none.
        x[:, 0], weights["router"][0] = 1, [20, 20, 0, 0]

    def loss(**arrays: Any) -> Any:
        return ((mixture(**arrays) - goal) ** 2).sum() / 2

    right = gradient(loss, {"x": x, **weights})
    right |= {"dx": right["x"], "y": mixture(x, **weights)}
    every = run(nranks, experts_rank, weights, x, goal, backend="cpu")
    for rank, (ours, _) in enumerate(every):
        for name in ("y", "dx"):
            agree(ours[name], np.split(right[name], nranks)[rank])
        for name in ("up", "down"):
            agree(ours[name], np.split(right[name], nranks)[rank], abs(right[name]).max())
        agree(ours["router"], right["router"])
    if crowded and nranks == 4:
        assert [sum(received) for _, received in every] == [12, 12, 0, 0]


# --- ring attention -----------------------------------------------------------------------------------------


def ring_rank(rank: int, nranks: int, causal: bool, qkv: list[Any], goal: Any) -> Any:
    with pynccl.init(timeout=30) as comm:
        return ring_attention.step(comm, causal, qkv, goal)


@pytest.mark.parametrize("nranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool, nranks: int) -> None:
    *qkv, goal = np.random.default_rng(5).standard_normal((4, 2, 12, 5))

    def whole(q: Any, k: Any, v: Any) -> Any:
        return np.stack([attention(*head, causal) for head in zip(q, k, v, strict=True)])

    right = gradient(
        lambda q, k, v: ((whole(q, k, v) - goal) ** 2).sum() / 2, dict(zip("qkv", qkv, strict=True))
    )
    right = {"out": whole(*qkv)} | {f"d{name}": array for name, array in right.items()}
    for rank, ours in enumerate(run(nranks, ring_rank, causal, qkv, goal, backend="cpu")):
        for name, array in right.items():
            agree(ours[name], np.split(array, nranks, axis=1)[rank])


# --- as programs --------------------------------------------------------------------------------------------


UNFIT = {
    "pipeline_parallel.py": "the number of layers is 12; expected a multiple of 5",
    "sharded_optimizer.py": "the number of samples is 24; expected a multiple of 5",
    "mixture_of_experts.py": "the number of experts is 12; expected a multiple of 5",
    "ring_attention.py": "the length of the sequence is 96; expected a multiple of 5",
}


@pytest.mark.parametrize(
    ("nranks", "script", "says"),
    [
        (3, "tensor_parallel.py", "the number of ranks is 3; expected a multiple of 2"),
        *(pytest.param(5, *case, marks=pytest.mark.slow) for case in UNFIT.items()),
    ],
)
def test_ranks_that_do_not_fit(nranks: int, script: str, says: str) -> None:
    done = launch(nranks, script)
    assert done.returncode == 1
    assert says in done.stderr and "Traceback" not in done.stderr
