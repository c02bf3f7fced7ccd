"""Measure pynccl's store, torch's and cupyx's: id exchange and barrier of many clients, in one run.

Run `python benchmarks/store.py --help`; `_store_peers.py` beside this file is what each process does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from _machine import describe
from _report import number, table

HELPER = Path(__file__).with_name("_store_peers.py")
PEERS = ("pynccl", "pynccl, no secret", "torch", "cupyx")
# What has to be faster than torch's store, which encrypts nothing.
BOUND = "pynccl, no secret"
MISSED = "NOT MET"
LIMIT = 30.0
SETTLE = 0.2
# torch looks up the names of both ends of every connection for its log; without a name service each takes as
# long as that is waited for. This makes them numbers, in the C library's function.
NUMERIC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
typedef int function(const struct sockaddr*, socklen_t, char*, socklen_t, char*, socklen_t, int);
int getnameinfo(const struct sockaddr* a, socklen_t n, char* h, socklen_t hn, char* s, socklen_t sn,
                int flags) {
  return ((function*)dlsym(RTLD_NEXT, "getnameinfo"))(a, n, h, hn, s, sn, flags | NI_NUMERICHOST);
}
"""


@dataclass
class Row:
    """What one peer did with so many clients, repetition by repetition."""

    peer: str
    clients: int
    seconds: list[float] = field(default_factory=list)
    kib: list[int] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    failure: str = ""

    def line(self) -> list[str]:
        """Return the cells of its line."""
        if self.failure:
            return [str(self.clients), self.peer, self.failure, "", "", ""]
        least, most = min(self.seconds), max(self.seconds)
        middle = statistics.median(self.seconds)
        return [
            str(self.clients),
            self.peer,
            f"{number(middle * 1e3)} ({number(least * 1e3)}–{number(most * 1e3)})",
            number(middle / self.clients * 1e6),
            number(statistics.median(self.server_cpu) * 1e3),
            number(statistics.median(self.kib) / 1024),
        ]


class Failed(Exception):
    """A peer's process ended or took too long."""


class Child:
    """A process of a peer: one line of JSON from it for every line to it."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hear(self, deadline: float) -> dict[str, float]:
        """Wait for its next line."""
        assert self._process.stdout is not None and self._process.stderr is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Failed(f"not done after {LIMIT:g} s")
        line = self._process.stdout.readline()
        if not line:
            errors = self._process.stderr.read().strip().splitlines()
            raise Failed(errors[-1][:80] if errors else "ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def tell(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def children() -> Iterator[list[Child]]:
    """Hold processes that are ended in the end."""
    held: list[Child] = []
    try:
        yield held
    finally:
        for child in held:
            child.end()


def measure(row: Row, python: str, env: dict[str, str], processes: int) -> None:
    """Run one repetition of one peer."""
    deadline = time.monotonic() + LIMIT
    with children() as held:
        server = Child([python, str(HELPER), "server", row.peer, "0", str(row.clients)], env)
        held.append(server)
        port = server.hear(deadline)["port"]
        shares = [row.clients // processes + (i < row.clients % processes) for i in range(processes)]
        for index, share in enumerate(shares):
            what = [str(port), str(share), str(row.clients), str(int(index == 0))]
            held.append(Child([python, str(HELPER), "clients", row.peer, *what], env))
        for child in held[1:]:
            child.hear(deadline)
        # NumPy's threads (OpenBLAS) spin for some 30 ms after the import, longer than 64 clients take.
        time.sleep(SETTLE)
        start = time.monotonic()
        for child in held[1:]:
            child.tell()
        end = max(child.hear(deadline)["end"] for child in held[1:])
        server.tell()
        used = server.hear(deadline)
    row.seconds.append(end - start)
    row.kib.append(int(used["kib"]))
    row.server_cpu.append(used["cpu"])


def verdicts(rows: list[Row]) -> list[str]:
    """Compare with torch, and with a line through the first and the last size."""
    found = {(row.peer, row.clients): statistics.median(row.seconds) for row in rows if row.seconds}
    sizes = sorted({row.clients for row in rows})
    lines = []
    for peer in PEERS[:2]:
        for size in sizes:
            if (peer, size) in found and ("torch", size) in found:
                ratio = found[peer, size] / found["torch", size]
                bound = f", at most 1: {'met' if ratio <= 1 else MISSED}" if peer == BOUND else ""
                lines.append(f"- {peer}, {size} clients: {number(ratio)} times torch's time{bound}")
        each = [found[peer, size] / size * 1e6 for size in sizes if (peer, size) in found]
        if len(each) > 1:
            lines.append(
                f"- {peer}: {number(each[0])} µs a client with {sizes[0]}, {number(each[-1])} with "
                f"{sizes[-1]}: {'linear or better' if each[-1] <= 1.25 * each[0] else 'more than linear'}"
            )
    return lines


def document(rows: list[Row], about: dict[str, str], method: str) -> str:
    """Write the whole report."""
    header = ["clients", "store", "ms (least–most)", "µs a client", "server's CPU ms", "server's memory MiB"]
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    parts = ["# Store: id exchange and barrier of many clients", facts, method]
    parts += [table(header, (row.line() for row in rows)), "\n".join(verdicts(rows))]
    return "\n\n".join(parts) + "\n"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="pynccl's store, torch's and cupyx's, with many clients.")
    add = parser.add_argument
    add("--clients", default="64,512,2048,4096", help="numbers of clients (default: %(default)s)")
    add("--processes", type=int, default=4, help="processes that simulate them (default: %(default)s)")
    add("--reps", type=int, default=5, help="repetitions, whose median counts (default: %(default)s)")
    add("--torch-python", default=sys.executable, help="a Python that has torch (default: this one)")
    add("--cupy-python", default=sys.executable, help="a Python that has CuPy (default: this one)")
    add("--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the .md and .json")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write."""
    options = arguments()
    sizes = [int(text) for text in options.clients.split(",")]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < max(sizes) + 64:
        raise SystemExit(f"ulimit -n is {hard}; expected at least {max(sizes) + 64}")
    about = describe()
    rows = {(size, peer): Row(peer, size) for size in sizes for peer in PEERS}
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "libnumeric.so"
        (Path(folder) / "numeric.c").write_text(NUMERIC)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-shared", "-fPIC", f"{folder}/numeric.c", "-o", str(shim)], check=True)
        plain = os.environ | {"PYTHONPATH": str(HELPER.parent.parent), "PYTHONWARNINGS": "ignore"}
        pythons = {"torch": options.torch_python, "cupyx": options.cupy_python}
        for size in sizes:
            for turn in range(options.reps):
                # cupyx's leaves thousands of threads and sockets: nobody should come right after it.
                time.sleep(1.0)
                first = turn % (len(PEERS) - 1)
                for peer in (*PEERS[first:-1], *PEERS[:first], PEERS[-1]):
                    row = rows[size, peer]
                    env = plain | ({"LD_PRELOAD": str(shim)} if peer == "torch" else {})
                    if not row.failure:
                        try:
                            measure(row, pythons.get(peer, sys.executable), env, options.processes)
                        except Failed as error:
                            row.failure = str(error)
                    print(" | ".join(row.line()), flush=True)
    method = (
        f"Medians of {options.reps} repetitions; {options.processes} processes simulate the clients. The "
        "time is from the first connection to the end of the last client's barrier; imports come before, "
        "and a moment for the threads that they start to rest. Memory is what the server's process grew by "
        "at most. pynccl's clients take each step together, cupyx's have a thread each, torch's go one "
        "after another (threads take longer), without torch's "
        "reverse look-ups of names (an LD_PRELOAD makes its getnameinfo answer numbers)."
    )
    text = document(list(rows.values()), about, method)
    print(text)
    options.out.mkdir(exist_ok=True)
    (options.out / "store.md").write_text(text)
    record = {"about": about, "rows": [asdict(row) for row in rows.values()]}
    (options.out / "store.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    sys.exit(MISSED in text)


if __name__ == "__main__":
    main()
