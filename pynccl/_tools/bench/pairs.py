"""--p2p: the bandwidth and the latency from each rank to each other one, one pair at a time."""

from __future__ import annotations

import importlib
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pynccl._secure.secret import read_secret
from pynccl._tools.bench.data import TYPES, Pattern, numpy_dtype
from pynccl._tools.bench.ranks import Seat, World
from pynccl.bootstrap import Store, StoreServer

PROGRAMS = ("sendrecv", "put_signal")
# A link is clearly slower than the others from this multiple of the median time on.
CLEARLY = 2
_ROUNDS = 3
# Seconds for ranks that wait for their turn.
_LONGEST_TURNS = 24 * 3600.0


@dataclass(frozen=True)
class Link:
    """One direction between two ranks; bandwidth in GB/s, the sizes in bytes."""

    source: int
    target: int
    size: int
    bandwidth: float
    latency_size: int
    latency_us: float
    wrong: int | None

    def row(self) -> dict[str, Any]:
        """Return the figures for files."""
        return asdict(self)


class Pairs:
    """Measures the links of this process's rank; the ranks take turns."""

    def __init__(self, world: World, program: str, type_name: str) -> None:
        self._world, self._settings, self._type = world, world.settings, type_name
        self._seat: Seat = world.seats[0][0]
        self._one_sided = program == "put_signal"
        self._itemsize = numpy_dtype(type_name).itemsize
        sizes = world.settings.minbytes, world.settings.maxbytes
        # At least one element.
        self._small, self._large = (max(size // self._itemsize, 1) for size in sizes)
        self._open = ExitStack()
        self._server: StoreServer | None = None

    def measure(self, tell: Callable[[int, int], None]) -> list[Link]:
        """Measure all links; `tell` gets the number of links measured, and of all."""
        comm, size = self._seat.comm, self._world.nranks
        pattern = Pattern(numpy_dtype(self._type), "none", size, 1)
        self._seat.send.write(pattern.of(comm.rank, self._large), 0)
        places = [(i, j) for i in range(size) for j in range(size) if i != j]
        found = np.zeros((len(places), 3))
        with self._open:
            store = self._store()
            last: tuple[int, ...] = tuple(range(size))
            for number, (source, target) in enumerate(places):
                # The others wait in a read of a socket: they neither spin nor use the library.
                store.barrier("pair", size, self._limit(comm.rank in last))
                last = source, target
                if comm.rank == source:
                    found[number, :2] = self._lead(target)
                elif comm.rank == target:
                    found[number, 2] = self._follow(source, pattern)
                tell(number + 1, len(places))
            store.barrier("end", size, self._limit(comm.rank in last))
        # After a failure the server lives as long as this process: the others must not end before its error.
        if self._server is not None:
            self._server.close()
        rows = self._world.rows(0, found.reshape(-1).tolist()).sum(axis=0).reshape(len(places), 3)
        return [self._link(place, row) for place, row in zip(places, rows.tolist(), strict=True)]

    def _limit(self, measured: bool) -> float:
        """Return the seconds to wait for the others; who was measured finds all others waiting already."""
        return self._settings.longest_wait if measured else _LONGEST_TURNS

    def _store(self) -> Store:
        address = ""
        host = self._world.meeting_host()
        if self._world.process == 0:
            # Without a secret of the job's: a new one needs PyNaCl.
            self._server = StoreServer(host, secret=read_secret() or "")
            address = self._server.address
        address = self._world.texts(address)[0]
        return self._open.enter_context(Store(address))

    def _link(self, place: tuple[int, int], figures: Sequence[float]) -> Link:
        seconds, latency, wrong = figures
        nbytes, small = self._large * self._itemsize, self._small * self._itemsize
        bandwidth = nbytes / seconds / 1e9
        checked = int(wrong) if self._settings.check else None
        return Link(*place, nbytes, round(bandwidth, 6), small, round(1e6 * latency, 6), checked)

    # --- one pair ---

    def _lead(self, peer: int) -> tuple[float, float]:
        """Return the seconds of a large message to a peer, and of a small one."""
        out, into = self._out(peer, self._small), self._into(peer, self._small)
        large = self._out(peer, self._large)
        iters = self._settings.iters

        def bounce() -> None:
            out()
            into()

        def stream() -> None:
            for _ in range(iters):
                large()
            # The peer has all of them.
            into()

        latencies, times = [], []
        for _ in range(_ROUNDS):
            bounce()
            latencies.append(self._time(bounce, iters) / iters / 2)
        for _ in range(_ROUNDS):
            bounce()
            times.append(self._time(stream, 1) / iters)
        return statistics.median(times), statistics.median(latencies)

    def _follow(self, peer: int, pattern: Pattern) -> int:
        """Answer a peer's messages; return the number of wrong elements."""
        recv = self._seat.recv
        recv.write(np.zeros(self._large, pattern.dtype), 0)
        out, into = self._out(peer, self._small), self._into(peer, self._small)
        large = self._into(peer, self._large)
        for _ in range(_ROUNDS * (1 + self._settings.iters)):
            into()
            out()
        for _ in range(_ROUNDS):
            into()
            out()
            for _ in range(self._settings.iters):
                large()
            out()
        if not self._settings.check:
            return 0
        return pattern.wrong(recv.read(pattern.dtype, self._large, 0), pattern.of(peer, self._large))

    def _time(self, call: Callable[[], None], times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - begin

    def _out(self, peer: int, count: int) -> Callable[[], None]:
        prepare, stream = self._seat.comm.prepare, self._seat.stream
        data = self._seat.send.buffer(TYPES[self._type], count)
        if self._one_sided:
            window = self._seat.windows[1]
            return self._waited(prepare.put_signal(data, peer, window, byte_offset=0, stream=stream))
        return self._waited(prepare.send(data, peer, stream=stream))

    def _into(self, peer: int, count: int) -> Callable[[], None]:
        prepare, stream = self._seat.comm.prepare, self._seat.stream
        if self._one_sided:
            return self._waited(prepare.wait_signal(peer, stream=stream))
        data = self._seat.recv.buffer(TYPES[self._type], count)
        return self._waited(prepare.recv(data, peer, stream=stream))

    def _waited(self, call: Callable[[], Any]) -> Callable[[], None]:
        comm, stream, complete = self._seat.comm, self._seat.stream, self._world.complete

        def waited() -> None:
            call()
            complete(comm, stream)

        return waited


# --- what the links say ---


def slow_links(links: Sequence[Link]) -> Iterator[str]:
    """Yield a line for each link that is clearly slower than the median, the slowest first."""
    bandwidth = statistics.median(link.bandwidth for link in links)
    latency = statistics.median(link.latency_us for link in links)
    for link in sorted(links, key=lambda link: link.bandwidth):
        if link.bandwidth * CLEARLY < bandwidth:
            part = link.bandwidth / bandwidth
            yield f"{link.source} -> {link.target}: {link.bandwidth:.2f} GB/s, {part:.2f} of the median"
    for link in sorted(links, key=lambda link: -link.latency_us):
        if link.latency_us > CLEARLY * latency:
            part = link.latency_us / latency
            yield f"{link.source} -> {link.target}: {link.latency_us:.2f} us, {part:.2f} times the median"


def matrix(links: Sequence[Link], figure: Callable[[Link], float]) -> list[list[float | None]]:
    """Return a figure of all links: a row for each source, None from a rank to itself."""
    size = 1 + max(link.source for link in links)
    found: list[list[float | None]] = [[None] * size for _ in range(size)]
    for link in links:
        found[link.source][link.target] = figure(link)
    return found


def matrices(links: Sequence[Link]) -> Iterator[tuple[str, list[list[float | None]]]]:
    """Yield the titles and the figures of both matrices."""
    first = links[0]
    yield f"Bandwidth (GB/s) of {first.size} bytes", matrix(links, lambda link: link.bandwidth)
    yield f"Latency (us) of {first.latency_size} bytes", matrix(links, lambda link: link.latency_us)


def drawn(title: str, figures: Sequence[Sequence[float | None]], width: int) -> str:
    """Return a matrix as rich draws it for a terminal."""
    table = importlib.import_module("rich.table").Table(title=title, title_justify="left")
    table.add_column("from/to", justify="right")
    for target in range(len(figures)):
        table.add_column(str(target), justify="right")
    for source, row in enumerate(figures):
        table.add_row(str(source), *("-" if value is None else f"{value:.2f}" for value in row))
    file = io.StringIO()
    console = importlib.import_module("rich.console").Console(file=file, force_terminal=True, width=width)
    console.print(table)
    return file.getvalue().rstrip("\n")


def text(figures: Sequence[Sequence[float | None]]) -> Iterator[str]:
    """Yield a matrix as lines: from the rank of the row to that of the column."""
    yield f"# {'from/to':>8}" + "".join(f"  {target:8d}" for target in range(len(figures)))
    for source, row in enumerate(figures):
        cells = ("-" if value is None else f"{value:.2f}" for value in row)
        yield f"  {source:8d}" + "".join(f"  {cell:>8}" for cell in cells)
