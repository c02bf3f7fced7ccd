"""A ring all_reduce written by hand with put_signal, in chunks of every size, against the library's own.

pynccl run -n 4 examples/ring_all_reduce.py --plot ring.png

With one chunk the whole buffer goes from rank to rank, and all ranks but two are idle: the time grows with
the number of ranks. With many chunks all ranks work at the same time, each on another chunk. With too many,
the time of a call counts more than that of its bytes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pynccl


class Ring:
    """The buffers of one rank: its data, which become the result, and a place for its neighbour's sums."""

    def __init__(self, comm: pynccl.Communicator, count: int) -> None:
        self.comm, self.count = comm, count
        self.data, self.landing = pynccl.empty(count, "float32"), pynccl.empty(count, "float32")
        self.results = comm.window(self.data, symmetric=True)
        self.sums = comm.window(self.landing, symmetric=True)
        self.left, self.right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def all_reduce(self, chunk: int) -> None:
        """Sum `data` over all ranks, `chunk` elements at a time.

        One signal is enough: a rank waits for sums and results in the order in which its neighbour puts them.
        """
        chunks = [slice(i, min(i + chunk, self.count)) for i in range(0, self.count, chunk)]
        last = self.comm.size - 1
        # The result of a chunk comes round after the sums of `last` more chunks have passed.
        for step in range(len(chunks) + last):
            if step < len(chunks):
                self._add(chunks[step], last)
            if step >= last and self.comm.rank < last:
                self._pass_on(chunks[step - last], last)

    def _add(self, part: slice, last: int) -> None:
        """Add this rank's data to the sum from the left; the last rank sends the result round."""
        if self.comm.rank > 0:
            self.comm.wait_signal(self.left)
            self.data[part] += self.landing[part]
        if self.comm.rank < last:
            self.comm.put_signal(self.data[part], self.right, self.sums, part.start)
        elif last:
            self.comm.put_signal(self.data[part], self.right, self.results, part.start)

    def _pass_on(self, part: slice, last: int) -> None:
        self.comm.wait_signal(self.left)
        if self.right != last:
            self.comm.put_signal(self.data[part], self.right, self.results, part.start)

    def close(self) -> None:
        """Close the windows; every rank calls it."""
        self.sums.close()
        self.results.close()


def measure(ring: Ring, pattern: Any, chunk: int | None, repeats: int) -> float:
    """Return the shortest time in seconds, after checking each result; without a chunk, of the library."""
    comm, times = ring.comm, []
    expected = pattern * (comm.size * (comm.size + 1) // 2)
    for _ in range(repeats):
        ring.data[:] = pattern * (comm.rank + 1)
        comm.barrier()
        start = time.perf_counter()
        if chunk is None:
            comm.all_reduce(ring.data)
        else:
            ring.all_reduce(chunk)
        comm.synchronize()
        times.append(time.perf_counter() - start)
        if not bool((ring.data == expected).all()):
            raise SystemExit(f"rank {comm.rank}: the sum is wrong with chunks of {chunk}")
        comm.barrier()
    return min(times)


def plot(path: Path, times: dict[int, float], whole: float, library: float, ranks: int) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([4 * chunk for chunk in times], [t * 1e3 for t in times.values()], "o-", label="chunked")
    axes.axhline(whole * 1e3, linestyle="--", color="gray", label="whole buffer")
    axes.axhline(library * 1e3, linestyle=":", color="black", label="comm.all_reduce")
    axes.set(xscale="log", xlabel="bytes of a chunk", ylabel="milliseconds", title=f"{ranks} ranks")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1 << 20, help="floats per rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="write a plot of time by chunk size to this file")
    args = parser.parse_args()
    with pynccl.init() as comm:
        ring = Ring(comm, args.count)
        pattern = pynccl.array_module().arange(args.count, dtype="float32") % 7
        sizes = [args.count // parts for parts in (2, 4, 8, 16, 32, 64, 128, 256) if args.count // parts]
        whole = measure(ring, pattern, args.count, args.repeats)
        times = {size: measure(ring, pattern, size, args.repeats) for size in sizes}
        library = measure(ring, pattern, None, args.repeats)
        ring.close()
        if comm.rank == 0:
            print(f"whole buffer: {whole * 1e3:.2f} ms", flush=True)
            for size, seconds in times.items():
                print(f"chunks of {4 * size} bytes: {seconds * 1e3:.2f} ms", flush=True)
            print(f"comm.all_reduce: {library * 1e3:.2f} ms", flush=True)
            if args.plot:
                plot(args.plot, times, whole, library, comm.size)
        print(f"rank {comm.rank} of {comm.size}: all sums are right", flush=True)


if __name__ == "__main__":
    main()
