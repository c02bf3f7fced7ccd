"""Runs cases on a group of ranks, and compares what every rank reports."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import pynccl

from .backend import host_of
from .cases import FORCES, Case
from .matrix import Layout, run_cases
from .ranks import Pool, RanksFailed, transport_layout

CHUNK = 256
# A library that crashes or hangs this often has made its point.
MAX_CRASHES = 8


def algorithm_names() -> list[str]:
    """Return the names in the CPU library's table of algorithms, in its order."""
    source = Path(pynccl.__file__).parent / "cpu" / "ops" / "algorithms.cpp"
    names = re.findall(r'^    \{"([^"]+)",', source.read_text(), re.M)
    assert len(names) >= 10
    return names


def layout_of(transport: str, nranks: int, force: str) -> Layout:
    """Return where a transport's ranks are; backend.py says so to the library."""
    if transport not in ("mixed", "hosts", "scattered") or force == "flat":
        return Layout()
    hosts = [
        host
        for number, ranks in enumerate(transport_layout(transport, nranks))
        for host in repeat(host_of(transport, number) or 0, len(ranks))
    ]
    return Layout(hosts, 0) if "hosts" in (transport, force) else Layout(hosts)


def check(
    pool: Pool,
    nranks: int,
    transport: str,
    cases: Sequence[Case],
    timeout: float = 120,
    force: str = "chosen",
) -> None:
    """Run the cases and fail with all that went wrong; one that kills the group does not hide the others."""
    problems: list[str] = []
    crashes, layout = 0, layout_of(transport, nranks, force)
    todo = deque(list(cases[i : i + CHUNK]) for i in range(0, len(cases), CHUNK))
    while todo and crashes < MAX_CRASHES:
        chunk = todo.popleft()
        if not chunk:
            continue
        try:
            group = pool.get(nranks, transport, **FORCES[force])
            results = group.call(run_cases, chunk, layout, timeout=timeout)
        except RanksFailed as error:
            crashes += 1
            index = min([int(note.split()[0]) for note in error.notes if note], default=0)
            problems.append(f"{chunk[index]}: {error}")
            todo.extendleft([chunk[index + 1 :], chunk[:index]])
            continue
        for rank, (wrong, _) in enumerate(results):
            problems += [f"{chunk[index]} rank {rank}: {text}" for index, text in wrong.items()]
        different = [
            i for i, sums in enumerate(zip(*(sums for _, sums in results), strict=True)) if len(set(sums)) > 1
        ]
        problems += [f"{chunk[i]}: the ranks' results differ" for i in different]
    shown = "\n".join(problems[:20])
    assert not problems, (
        f"{len(problems)} problems in {len(cases)} cases, {nranks} ranks over {transport}, {force}:\n{shown}"
    )
