"""The measurement of one size: nccl-tests' TimeTest and BenchTime (src/common.cu)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from pynccl._comm.prepared import Plan
from pynccl._tools.bench import graphs
from pynccl._tools.bench.data import TYPES, Pattern, numpy_dtype
from pynccl._tools.bench.operations import Counts, Operation, Shape, Slot, Step
from pynccl._tools.bench.ranks import Memory, Seat, World
from pynccl._tools.bench.settings import Settings

# Shifted copies of a call that are prepared: enough that the caches do not hold them.
_MOST_SHIFTS = 256


@dataclass(frozen=True)
class Case:
    """What one line of the output measures."""

    operation: Operation
    type_name: str
    op: str
    root: int
    size: int
    shape: Shape
    counts: Counts

    @property
    def nbytes(self) -> int:
        """The bytes of the larger buffer: the first column."""
        return max(self.counts.send, self.counts.recv) * self.shape.itemsize


@dataclass
class Half:
    """The results of one half of a line: out of place or in place."""

    microseconds: float
    algorithm: float
    bus: float
    # None: not checked.
    wrong: int | None
    # The threads of all processes whose ranks have wrong elements.
    failing: int = 0
    # Seconds of each iteration, the longest of all processes, and each process's.
    iterations: list[float] = field(default_factory=list)
    processes: list[list[float]] = field(default_factory=list)
    # Lines that nccl-tests prints before the columns.
    lines_before: str = ""


class Bench:
    """Measures the cases of one thread's ranks."""

    def __init__(self, world: World, thread: int, operation: Operation) -> None:
        self.world, self.thread, self.operation = world, thread, operation
        self.settings: Settings = world.settings
        self.seats: list[Seat] = world.seats[thread]
        self._repetition = 0

    def cases(self, type_name: str, op: str, root: int) -> Iterator[Case]:
        """Return the lines of one cycle."""
        for size in self.settings.sizes():
            yield self._case(type_name, op, root, size)

    def warm_up(self, type_name: str, op: str, root: int) -> None:
        """Run every power of two once before the first measurement."""
        size = self.settings.minbytes
        while size <= self.settings.maxbytes:
            launch = self._launches(self._case(type_name, op, root, size), False, 1)
            for iteration in range(self.settings.warmup_iters):
                launch(iteration, 1)
            self._complete()
            if not size:
                break
            size *= 2

    def measure(self, case: Case, in_place: bool) -> Half:
        """Measure one half of a line, then check results."""
        settings, once = self.settings, self._launches(case, in_place, 1)
        launch = self._launches(case, in_place, settings.agg_iters)
        checked = settings.check and (case.operation.in_place or not in_place)
        if checked:
            self._fill(case, in_place, Pattern(*self.pattern(case), 99))
        once(0, 1)
        self._complete()
        for iteration in range(settings.iters):
            # Prepares the calls.
            launch(iteration, 0)
        self.world.barrier(self.thread)
        iterations: list[float] = []
        if settings.cudagraph:
            seconds, on_host = self._time_graph(launch)
        else:
            seconds, on_host, iterations = self._time(launch, bool(settings.per_iter_timing))
        rows = self.world.rows(self.thread, [seconds])
        seconds = float([rows[0, 0], rows.mean(), rows.min(), rows.max()][settings.average])
        moved = case.operation.moved(case.shape, case.counts) / 1e9
        algorithm = moved / seconds if seconds else 0.0
        wrong, failing = self._check(case, in_place, once) if checked else (None, 0)
        half = Half(
            1e6 * (on_host if settings.report_cputime else seconds),
            algorithm,
            algorithm * case.operation.factor(case.shape.nranks),
            wrong,
            failing,
            lines_before=case.operation.lines_before(case.shape, case.counts, seconds),
        )
        if settings.percentiles and not settings.per_iter_timing:
            # Apart from the line's time, in which iterations are not waited for.
            self.world.barrier(self.thread)
            _, _, iterations = self._time(launch, True)
        if settings.per_iter_timing or settings.percentiles:
            every = self.world.rows(self.thread, iterations)
            by_process = every.reshape(self.world.processes, settings.nthreads, -1).max(axis=1)
            half.iterations = by_process.max(axis=0).tolist()
            half.processes = by_process.tolist()
        return half

    def _time(self, launch: Callable[[int, int], None], each: bool) -> tuple[float, float, list[float]]:
        """Return the seconds of one call: until it is complete, and on the host; and of each iteration."""
        settings, calls = self.settings, self.settings.iters * self.settings.agg_iters
        alone, iterations = 0.0, []
        begin = time.perf_counter()
        for iteration in range(settings.iters):
            start = time.perf_counter()
            launch(iteration, 1)
            if settings.blocking or each:
                self._complete()
            took = time.perf_counter() - start
            alone += took
            iterations.append(took / settings.agg_iters)
            if settings.blocking in (1, 3):
                self.world.barrier(self.thread)
        on_host = alone if settings.blocking == 3 else time.perf_counter() - begin
        self._complete()
        seconds = alone if settings.blocking == 3 else time.perf_counter() - begin
        return seconds / calls, on_host / calls, iterations

    def _time_graph(self, launch: Callable[[int, int], None]) -> tuple[float, float]:
        """Return the seconds of one call in a graph: until it is complete, and on the host."""
        settings = self.settings

        def iterations() -> None:
            for iteration in range(settings.iters):
                launch(iteration, 1)

        with self._as_graph(iterations) as launch_graph:
            self.world.barrier(self.thread)
            begin = time.perf_counter()
            for _ in range(settings.cudagraph):
                launch_graph()
            on_host = time.perf_counter() - begin
            self._complete()
            seconds = time.perf_counter() - begin
        calls = settings.iters * settings.agg_iters * settings.cudagraph
        return seconds / calls, on_host / calls

    def _as_graph(self, calls: Callable[[], None]) -> AbstractContextManager[Callable[[], None]]:
        """Return what runs calls: with -G as a graph, else one by one."""
        return graphs.captured(self.seats, calls) if self.settings.cudagraph else nullcontext(calls)

    def _check(self, case: Case, in_place: bool, once: Callable[[int, int], None]) -> tuple[int, int]:
        """Return the number of wrong elements, and of threads that have some."""
        self._repetition += 1
        found = np.zeros(1)
        for _ in range(self.settings.check):
            pattern = Pattern(*self.pattern(case), self._repetition)
            untouched = self._fill(case, in_place, pattern)
            with self._as_graph(lambda: once(0, 1)) as run:
                run()
                self._complete()
            here = sum(
                self._wrong(seat, case, in_place, pattern, before)
                for seat, before in zip(self.seats, untouched, strict=True)
            )
            found = self.world.rows(self.thread, [here])
            if found.any():
                break
        return int(found.sum()), int(np.count_nonzero(found))

    def one_call(self, case: Case, in_place: bool) -> Callable[[], None]:
        """Return a call that is waited for, always on the same buffers; they hold zeros."""
        launch = self._launches(case, in_place, 1)
        for seat in self.seats:
            for memory in (seat.send, seat.recv):
                memory.write(np.zeros(memory.nbytes, np.uint8), 0)

        def call() -> None:
            launch(0, 1)
            self._complete()

        return call

    # --- calls ---

    def _case(self, type_name: str, op: str, root: int, size: int) -> Case:
        itemsize = numpy_dtype(type_name).itemsize
        shape = Shape(size // itemsize, itemsize, self.world.nranks)
        return Case(self.operation, type_name, op, root, size, shape, self.operation.counts(shape))

    def _launches(self, case: Case, in_place: bool, together: int) -> Callable[[int, int], None]:
        """Return what runs (1) or only prepares (0) an iteration: a group of `together` calls.

        Each iteration uses another part of the buffers, as in nccl-tests, so that no cache holds it.
        """
        places = max(1, min(_MOST_SHIFTS, self.settings.maxbytes // case.nbytes if case.nbytes else 1))
        prepared: dict[tuple[int, ...], list[Step]] = {}

        def launch(iteration: int, run: int) -> None:
            shifts = tuple((iteration * together + i) % places for i in range(together))
            steps = prepared.get(shifts)
            if steps is None:
                steps = prepared[shifts] = self._steps(case, in_place, shifts)
            if run:
                for step in steps:
                    step()

        return launch

    def _steps(self, case: Case, in_place: bool, shifts: tuple[int, ...]) -> list[Step]:
        calls = [
            case.operation.calls(self._slot(seat, case, in_place, shift * case.nbytes))
            for shift in shifts
            for seat in self.seats
        ]
        if len(calls) == 1:
            return list(calls[0])
        return [Plan([step for step in stage if step is not None]) for stage in zip_longest(*calls)]

    def _slot(self, seat: Seat, case: Case, in_place: bool, shift: int) -> Slot:
        counts, dtype = case.counts, TYPES[case.type_name]
        itemsize = case.shape.itemsize
        first = shift + self.settings.unalign * itemsize
        in_place = in_place and case.operation.in_place
        send, recv = seat.recv if in_place else seat.send, seat.recv
        send_at = first + (counts.send_in_place * seat.comm.rank * itemsize if in_place else 0)
        recv_at = first + (counts.recv_in_place * seat.comm.rank * itemsize if in_place else 0)

        def part(memory: Memory, at: int) -> Callable[[int, int], Any]:
            return lambda start, count: memory.buffer(dtype, count, at + start * itemsize)

        op: Any = None
        if case.operation.reduces:
            pattern = Pattern(*self.pattern(case), 0)
            op = seat.comm.pre_mul_sum(pattern.factor(seat.comm.rank)) if case.op == "mulsum" else case.op
        window = seat.windows[1] if case.operation.windows else None
        return Slot(
            seat.comm,
            part(send, send_at),
            part(recv, recv_at),
            counts=counts,
            itemsize=itemsize,
            op=op,
            root=case.root,
            stream=seat.stream,
            window=window,
            byte_offset=first,
        )

    def _complete(self) -> None:
        for seat in self.seats:
            self.world.complete(seat.comm, seat.stream)

    # --- data ---

    def pattern(self, case: Case) -> tuple[np.dtype[Any], str, int]:
        """Return the arguments of a case's patterns, without the repetition."""
        return (
            numpy_dtype(case.type_name),
            case.op if case.operation.reduces else "none",
            self.world.nranks,
        )

    def _recv_at(self, seat: Seat, case: Case, in_place: bool) -> int:
        begin = case.counts.recv_in_place * seat.comm.rank if in_place and case.operation.in_place else 0
        return (begin + self.settings.unalign) * case.shape.itemsize

    def _fill(self, case: Case, in_place: bool, pattern: Pattern) -> list[Any]:
        """Write the ranks' data; return what their receive buffers hold then."""
        in_place, before = in_place and case.operation.in_place, []
        first = self.settings.unalign * case.shape.itemsize
        for seat in self.seats:
            rank, counts = seat.comm.rank, case.counts
            seat.recv.write(np.zeros(max(counts.send, counts.recv), pattern.dtype), first)
            data = case.operation.fill(pattern, counts, rank, case.root)
            if data is not None:
                at = first + (counts.send_in_place * rank * case.shape.itemsize if in_place else 0)
                (seat.recv if in_place else seat.send).write(data, at)
            before.append(seat.recv.read(pattern.dtype, counts.recv, self._recv_at(seat, case, in_place)))
        # No rank may send before all have written: a put goes into this memory.
        self.world.barrier(self.thread)
        return before

    def _wrong(self, seat: Seat, case: Case, in_place: bool, pattern: Pattern, before: Any) -> int:
        expected = case.operation.expect(pattern, case.counts, seat.comm.rank, case.root)
        got = seat.recv.read(pattern.dtype, case.counts.recv, self._recv_at(seat, case, in_place))
        return pattern.wrong(got, before if expected is None else expected)
