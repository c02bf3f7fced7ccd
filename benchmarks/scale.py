"""Measure how pynccl grows with the number of ranks, which are threads of processes on this machine.

README.md beside this file says what is measured, and what the model assumes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import _plots
import pynccl
from _machine import describe
from _report import Target, number, table
from pynccl import testing

REPEATS = 5
# Seconds of the time-out of ranks that watch each other: no time-out, no watchdog.
WATCHED = 300.0
# The quantities of a row, in their units, and how the model continues them: by a fit of what was measured.
QUANTITIES = {
    "init, s": "init",
    "first all_reduce, s": "first",
    "all_reduce, ms": "all_reduce",
    "barrier, ms": "barrier",
    "all_reduce in check mode, ms": "checked",
    "death noticed, s": "death",
    "TCP segments of an idle rank in 1 s": "idle",
    "memory of a rank, MiB": "memory",
    "descriptors of a rank": "descriptors",
    "the same with a channel": "watched",
    "TCP segments of a rank in init": "segments",
}
# Seconds in which nobody calls anything.
IDLE = 5.0
TARGET = 16384
# Of the ranks that are hosts of their own.
HOSTS = 32
# Ranks of one host, in 16 processes that read nothing of each other's memory.
SHARING = 128
# The model fits the largest numbers of ranks: below them what does not grow counts for most.
FITTED = 4


def fields(path: str) -> dict[str, int]:
    """Return the numbers in a file of /proc with a name on each line."""
    lines = (re.match(r"(\w+):\s+(\d+)", line) for line in Path(path).read_text().splitlines())
    return {found[1]: int(found[2]) for found in lines if found}


def segments() -> int:
    """Return how many TCP segments this machine has sent, other programs' too."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("OutSegs")])


def timed(call: Any) -> float:
    """Return the seconds of a call."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def together(nranks: int, meeting: str) -> None:
    """Wait until all ranks are here: processes start one after another."""
    file = os.open(meeting, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(file, b".")
    while os.fstat(file).st_size < nranks:
        time.sleep(0.1)
    os.close(file)


def work(rank: int, nranks: int, threads: int, timeout: float | None, meeting: str) -> dict[str, float]:
    """Return what one rank sees."""
    together(nranks, meeting)
    sent, resident = segments(), fields("/proc/self/status")["VmRSS"]
    start = time.monotonic()
    with pynccl.init(timeout=timeout) as comm:
        found = {"init": time.monotonic() - start}
        x = np.ones(1)
        found["first"] = timed(lambda: comm.all_reduce(x))
        found["segments"] = (segments() - sent) / nranks
        found["all_reduce"] = 1e3 * statistics.median(
            timed(lambda: comm.all_reduce(x)) for _ in range(REPEATS)
        )
        found["barrier"] = 1e3 * statistics.median(timed(comm.barrier) for _ in range(REPEATS))
        found["memory"] = (fields("/proc/self/status")["VmRSS"] - resident) / threads / 1024
        found["descriptors"] = len(os.listdir("/proc/self/fd")) / threads
        # Everybody has counted before anybody leaves.
        comm.barrier()
    return found


def die(rank: int, nranks: int, threads: int, note: str) -> float | str:
    """Let the process of rank 0 be killed; return how long this rank took to hear of it, or what it heard."""
    together(nranks, f"{note}.begin")
    comm = pynccl.init(timeout=WATCHED)
    comm.barrier()
    if rank == 0:
        time.sleep(0.5)
        Path(note).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except pynccl.RankFailedError as error:
        heard, named = time.monotonic(), error.ranks
    with contextlib.suppress(pynccl.NcclError):
        comm.abort()
    if named != list(range(threads)):
        return f"rank {rank} named {named}"
    return heard - float(Path(note).read_text())


def idle(rank: int, nranks: int, threads: int, meeting: str) -> float:
    """Return how many TCP segments a rank sends in a second in which nobody calls anything."""
    together(nranks, meeting)
    with pynccl.init(timeout=WATCHED) as comm:
        comm.barrier()
        time.sleep(3)
        before = segments()
        time.sleep(IDLE)
        sent = segments() - before
        # Everybody has counted before anybody leaves.
        comm.barrier()
    return sent / IDLE / nranks


def on_its_own_host(rank: int, nranks: int) -> int:
    """Return how many sockets a rank opens for a communicator with a channel, if every rank is a host."""
    os.environ["NCCL_HOSTID"] = str(rank)
    before = len(open_as("socket:"))
    with pynccl.init(timeout=120) as comm:
        comm.barrier()
        opened = len(open_as("socket:")) - before
        # Everybody has counted before anybody leaves.
        comm.barrier()
    return opened


def shared(rank: int, nranks: int) -> float:
    """Return the MiB of shared memory that the ranks of this host use after each has sent data to each."""
    with pynccl.init(timeout=WATCHED) as comm:
        x = np.ones(nranks * 65536, np.uint8)
        for _ in range(3):
            comm.all_to_all(x)
        comm.all_reduce(x)
        files = [os.stat(f"/proc/self/fd/{name}") for name in open_as("/memfd:pynccl")]
        comm.barrier()
    return max(file.st_blocks for file in files) * 512 / 2**20


def open_as(kind: str) -> list[str]:
    """Return the descriptors of this process whose links in /proc begin so."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(kind):
                found.append(name)
    return found


def measure(nranks: int, threads: int, library: str, timeout: float) -> dict[str, Any]:
    """Return one row: the slowest rank's figures, or why there are none."""
    row: dict[str, Any] = {"ranks": nranks, "threads": threads, "failures": []}
    limits: dict[str, Any] = {"backend": library, "timeout": timeout, "threads": threads}
    # Not all ranks of one process: a process that dies leaves nobody to hear of it.
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "plain": lambda: testing.run(nranks, work, threads, None, f"{folder}/plain", **limits),
            "check mode": lambda: testing.run(
                nranks, work, threads, WATCHED, f"{folder}/checked", env={"PYNCCL_CHECK": "1"}, **limits
            ),
            "death": lambda: testing.run(nranks, die, threads, f"{folder}/died", check=False, **limits),
            "idle": lambda: testing.run(nranks, idle, threads, f"{folder}/idle", **limits),
        }
        for name, step in steps.items():
            try:
                found = step()
            except testing.RankError as error:
                row["failures"].append(f"{name}: {cause(str(error))}")
                if name == "plain":
                    break
                continue
            if name == "plain":
                row |= {key: max(one[key] for one in found) for key in found[0]}
            elif name == "check mode":
                row["checked"] = max(one["all_reduce"] for one in found)
                row["watched"] = max(one["descriptors"] for one in found)
            elif name == "idle":
                row["idle"] = statistics.median(found)
            else:
                heard = [one for one in found if isinstance(one, float)]
                if len(heard) == nranks - threads:
                    row["death"] = max(heard)
                else:
                    others = next((one for one in found if isinstance(one, str)), "the others heard nothing")
                    row["failures"].append(
                        f"{name}: {len(heard)} of {nranks - threads} survivors named its ranks; {others}"
                    )
    return row


def cause(text: str) -> str:
    """Return the line of an error that says what happened."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+Error: ", line)]
    return (lines or text.splitlines())[0].partition("; the CPU library")[0][:300]


def fit(points: list[tuple[int, float]]) -> tuple[float, float] | None:
    """Return factor and exponent of the power of the number of ranks that fits best; None for few points."""
    points = [(n, value) for n, value in points if value > 0]
    if len(points) < 3:
        return None
    logs = np.log(points[-FITTED:])
    # What is measured for each rank does not shrink for ever: processes have more threads in the later rows.
    exponent = max(0.0, float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]))
    return math.exp(float(np.mean(logs[:, 1] - exponent * logs[:, 0]))), exponent


def model(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what each quantity would be with 16,384 ranks."""
    found = {}
    for name, key in QUANTITIES.items():
        fitted = fit([(row["ranks"], row[key]) for row in rows if key in row])
        if fitted is not None:
            factor, exponent = fitted
            found[name] = {"factor": factor, "exponent": exponent, "predicted": factor * TARGET**exponent}
    return found


def targets(rows: list[dict[str, Any]], opened: int, memory: float) -> list[Target]:
    """Compare with the bounds that are set for scale."""
    by_ranks = {row["ranks"]: row for row in rows}

    def value(ranks: int, key: str) -> float | None:
        return by_ranks.get(ranks, {}).get(key)

    few, many = value(4, "checked"), value(64, "checked")
    wanted = [
        ("init, s", 256, 1.0, value(256, "init")),
        ("death noticed, s", 1024, 2.0, value(1024, "death")),
        ("all_reduce in check mode, over that of 4 ranks", 64, 3.0, many / few if many and few else None),
        ("sockets of a rank, each a host: 2 log2(n) + 1", HOSTS, 2 * math.log2(HOSTS) + 1, opened),
        ("memory that the ranks of a host share, MiB", SHARING, 64.0, memory),
        ("TCP segments of an idle rank in 1 s", 1024, 10.0, value(1024, "idle")),
    ]
    return [Target(name, ranks, None, most, reached, at_most=True) for name, ranks, most, reached in wanted]


def share_of_checks(rows: list[dict[str, Any]]) -> list[str]:
    """Say what check mode costs beside the call itself, whose time grows with the ranks that share a core."""
    ratios = {r["ranks"]: r["checked"] / r["all_reduce"] for r in rows if "checked" in r}
    if not {4, 64} <= ratios.keys():
        return []
    return [
        "",
        "All ranks share the cores of this machine, so 64 ranks need 16 times the work of 4 for the same "
        f"call, checked or not. Check mode takes {ratios[4]:.1f} times as long as the call alone with 4 "
        f"ranks, and {ratios[64]:.1f} times with 64.",
    ]


def document(
    about: dict[str, str],
    rows: list[dict[str, Any]],
    opened: int,
    memory: float,
    predicted: dict[str, dict[str, float]],
) -> str:
    """Return the report."""
    lines = ["# Scale: ranks as threads", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "Ranks x threads of a process; the figures are those of the slowest rank.", ""]
    cells = [
        [f"{r['ranks']} x {r['threads']}", *(number(r.get(k)) for k in QUANTITIES.values())] for r in rows
    ]
    lines += [table(["ranks", *QUANTITIES], cells), ""]
    lines += [f"- {row['ranks']} ranks, {failure}" for row in rows for failure in row["failures"]]
    lines += ["", "## Targets", ""]
    header = ["target", "ranks", "needed", "reached", "verdict"]
    lines += [table(header, [target.line() for target in targets(rows, opened, memory)]), ""]
    lines += [
        "Sockets: the library has one connection between any two processes, for all communicators, since its "
        "end tells of a death at once. The control channel connects any two ranks up to 32 "
        "(PYNCCL_MESH_RANKS), and with more each has about 2 log2(n) connections. Data connections are made "
        "when they are first needed, for each communicator: unread data of one never holds up another.",
        "",
        "Init: of 256 ranks it takes about 3 s of processor time, 12 ms for each rank, with both cores busy: "
        "half of it runs Python, which compares the ranks and connects each to its neighbours.",
        "",
        "Deaths: a process with all of its ranks is killed. About 20 neighbours lose each of them, and each "
        "survivor hears of that over about 20 connections, before it raises an error that names them all. "
        "All ranks share the cores of this machine, so the time is that of their work, not of the news.",
        "",
        "Idle: a rank sends a heartbeat to log2(n) others in each second, and TCP confirms those that come: "
        "20 segments with 1,024 ranks. Fewer heartbeats would leave a stopped rank unknown to ranks that "
        "then have to ask.",
        *share_of_checks(rows),
    ]
    lines += ["", f"## Model: {TARGET:,} ranks", ""]
    parts = [[name, f"n^{one['exponent']:.2f}", number(one["predicted"])] for name, one in predicted.items()]
    lines += [table(["quantity", "grows as", f"{TARGET:,} ranks"], parts), ""]
    lines += [
        f"Each quantity is a power of the number of ranks, fitted to the last {FITTED} rows that have it and "
        "continued; none shrinks. This assumes that all ranks share the cores of this machine. With a "
        "machine for every 8 ranks the work of the others is done beside that of a rank: times then grow "
        "with an exponent that is 1 less. It also assumes that no limit is met: of descriptors, of "
        "connections that a listener takes, of memory.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="How pynccl grows with the number of ranks.")
    parser.add_argument(
        "--ranks", default="4x2,16x4,32x8,64x16,128x16,256x32,512x32,1024x32", help="ranks x threads"
    )
    parser.add_argument(
        "--library", default="cpu", help="the CPU library, or the path of another build of it"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("results"), help="folder of the files"
    )
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    about = describe() | {"descriptors of a process": f"at most {hard:,}"}
    rows = []
    for text in options.ranks.split(","):
        nranks, threads = map(int, text.split("x"))
        rows.append(measure(nranks, threads, options.library, options.timeout))
        print(rows[-1], file=sys.stderr, flush=True)
    opened = max(testing.run(HOSTS, on_its_own_host, backend=options.library, timeout=options.timeout))
    staged = {"backend": options.library, "timeout": options.timeout, "env": {"PYNCCL_CPU_DIRECT": "0"}}
    memory = max(testing.run(SHARING, shared, threads=SHARING // 16, **staged))
    record = {
        "about": about,
        "rows": rows,
        "sockets": opened,
        "shared": memory,
        "model": model(rows),
        "target": TARGET,
        "quantities": QUANTITIES,
    }
    text = document(about, rows, opened, memory, record["model"])
    print(text)
    (options.out / "scale.md").write_text(text)
    (options.out / "scale.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    figures = _plots.figures()
    (options.out / "scale.svg").write_text(figures.svg(figures.scale(record)["ranks"]))


if __name__ == "__main__":
    main()
