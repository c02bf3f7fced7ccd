"""--compare: NCCL and its peers in turn, on the same ranks, each call waited for."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pynccl._errors import NcclError
from pynccl._tools.bench.data import Pattern
from pynccl._tools.bench.measure import Bench, Case
from pynccl._tools.bench.peers import IN_PLACE, PEERS, Call, Peer

OURS = "pynccl"
# Each library is measured this often, one after another; the median counts.
ROUNDS = 5
_KEYS = ("size", "type", "redop", "root")
_REPETITION = 77


class Comparison:
    """Measures each case by NCCL and by the peers."""

    def __init__(self, bench: Bench, fail: Callable[[str], None]) -> None:
        self._bench = bench
        self._watch = _Watch(bench.settings.longest_wait, fail)
        with self._watch.over("the peers' start"):
            self.peers = [PEERS[name](bench.world) for name in bench.settings.compare]

    def title(self) -> str:
        """Return the versions of the peers."""
        return ", ".join(f"{peer.name} is {peer.version}" for peer in self.peers)

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the time of a call, and each peer's figures; None for a peer without such a call."""
        pattern = Pattern(*self._bench.pattern(case), _REPETITION)
        calls: dict[str, Call] = {OURS: self._bench.one_call(case, case.operation.name in IN_PLACE)}
        wrong: dict[str, int | None] = {}
        for peer in self.peers:
            with self._watch.over(f"{peer.name}'s {case.operation.name}"):
                ready = self._prepare(peer, case, pattern)
            if ready is not None:
                calls[peer.name], wrong[peer.name] = ready
        took = self._in_turn(calls)
        found: dict[str, Any] = {"time": round(took[OURS], 6)}
        for peer in self.peers:
            name = peer.name
            found[name] = name in took and {
                "time": round(took[name], 6),
                "ratio": round(took[name] / took[OURS], 6),
                "nwrong": wrong[name],
            }
        return {name: value or None for name, value in found.items()}

    def _prepare(self, peer: Peer, case: Case, pattern: Pattern) -> tuple[Call, int | None] | None:
        """Return a peer's call and the number of its wrong elements on all ranks."""
        operation, counts = case.operation, case.counts
        data = operation.fill(pattern, counts, peer.rank, case.root)
        empty = [np.zeros(count, pattern.dtype) for count in (counts.send, counts.recv)]
        in_place = operation.name in IN_PLACE
        send = peer.place(empty[0] if data is None else data, case)
        recv = peer.place(data if in_place and data is not None else empty[1], case)
        call = peer.call(case, send, recv)
        if call is None:
            return None
        try:
            call()
        except (NotImplementedError, RuntimeError) as error:
            if not peer.lacks(error):
                raise
            return None
        wrong = self._wrong(peer, case, pattern, recv) if self._bench.settings.check else None
        # In place, a peer goes on with its own results: zeros stay zeros.
        peer.clear(send)
        peer.clear(recv)
        return call, wrong

    def _wrong(self, peer: Peer, case: Case, pattern: Pattern, recv: Any) -> int:
        expected = case.operation.expect(pattern, case.counts, peer.rank, case.root)
        here = 0 if expected is None else pattern.wrong(peer.read(recv, pattern.dtype), expected)
        return int(self._bench.world.rows(self._bench.thread, [here]).sum())

    def _in_turn(self, calls: dict[str, Call]) -> dict[str, float]:
        """Return the microseconds of each library's call, of the slowest rank; who begins rotates."""
        each = -(-self._bench.settings.iters // ROUNDS)
        took: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for number in range(ROUNDS):
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                with self._watch.over(f"{name}, {each} calls"):
                    took[name].append(self._time(calls[name], each))
        flat = [seconds for name in order for seconds in took[name]]
        slowest = self._bench.world.rows(self._bench.thread, flat).max(axis=0).reshape(len(order), ROUNDS)
        return {name: 1e6 * statistics.median(row) for name, row in zip(order, slowest.tolist(), strict=True)}

    def _time(self, call: Call, times: int) -> float:
        call()
        self._bench.world.barrier(self._bench.thread)
        begin = time.perf_counter()
        for _ in range(times):
            call()
            self._watch.moved()
        return (time.perf_counter() - begin) / times

    def close(self) -> None:
        """Leave the peers' groups."""
        with self._watch.over("the peers' end"):
            for peer in reversed(self.peers):
                peer.close()


class _Watch:
    """Ends this process, and so the job, when a call takes too long: a peer's cannot be interrupted."""

    def __init__(self, seconds: float, fail: Callable[[str], None]) -> None:
        self._seconds, self._fail = seconds, fail
        self._what: str | None = None
        self._moves = 0
        threading.Thread(target=self._run, daemon=True).start()

    def moved(self) -> None:
        """Say that a call has ended."""
        self._moves += 1

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the calls of a block."""
        self._moves += 1
        self._what = what
        try:
            yield
        except NcclError:
            raise
        except RuntimeError as error:
            # Those of torch.distributed and of mpi4py.
            raise ValueError(f"--compare: {what}: {error}") from error
        finally:
            self._what = None

    def _run(self) -> None:
        seen = -1
        while True:
            time.sleep(self._seconds)
            what = self._what
            if what is not None and self._moves == seen:
                self._end(what)
            seen = self._moves

    def _end(self, what: str) -> None:
        text = f"--compare: {what} took more than {self._seconds:g} s (-T)"
        print(f"\n# Test timeout: {text}", file=sys.stderr, flush=True)
        self._fail(text)
        os._exit(1)


# --- the table ---


def table(title: str, names: Sequence[str], results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the comparison: medians of the cycles."""
    yield f"# Compared in turn, each call waited for; ratio: a peer's time by pynccl's; {title}"
    heads = "".join(f"  {name + ' (us)':>12}  {'ratio':>7}  {'#wrong':>6}" for name in names)
    yield f"# {'size':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {OURS + ' (us)':>12}{heads}"
    places: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        if "compare" in row:
            places.setdefault(tuple(row[key] for key in _KEYS), []).append(row["compare"])
    for (size, kind, op, root), cycles in places.items():
        ours = statistics.median(cycle["time"] for cycle in cycles)
        parts = "".join(_columns([cycle[name] for cycle in cycles if cycle[name]]) for name in names)
        yield f"# {size:12d}  {kind:>8}  {op:>6}  {str(root).strip():>6}  {ours:12.2f}{parts}"


def _columns(cycles: Sequence[dict[str, Any]]) -> str:
    if not cycles:
        return f"  {'n/a':>12}  {'n/a':>7}  {'n/a':>6}"
    took, ratio = (statistics.median(cycle[key] for cycle in cycles) for key in ("time", "ratio"))
    wrong = [cycle["nwrong"] for cycle in cycles]
    count = "N/A" if None in wrong else str(sum(wrong))
    return f"  {took:12.2f}  {ratio:7.2f}  {count:>6}"


def wrong_measurements(names: Sequence[str], results: Sequence[dict[str, Any]]) -> int:
    """Count the measurements in which a peer's result was wrong."""
    compared = [row["compare"][name] for row in results if "compare" in row for name in names]
    return sum(bool(found and found["nwrong"]) for found in compared)
