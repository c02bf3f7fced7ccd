"""Dumps of the flight recorder, written by hand; and sound ones that are damaged at random."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

Calls = list[dict[str, Any]]


def write(folder: Path, rank: int, size: int, calls: Calls, *, comm: str = "abc", **more: Any) -> Path:
    """Write a rank's dump; the calls have a name and what is unusual of them."""
    reasons = more.pop("reasons", [])
    head = {"pynccl": "0", "host": "h", "pid": 100 + rank, "process_rank": rank, "reasons": reasons}
    head["clock"] = [[0, 1000], [10**9, 10**9]]
    seqs = [call["seq"] for call in calls if "seq" in call]
    own = {"comm": comm, "rank": rank, "size": size, "origin": "init", "name": "", "also": ""}
    own |= {"collectives": max(seqs, default=0), "overwritten": 0} | more
    lines = [head, own]
    for number, call in enumerate(calls):
        usual = {"call": "", "time_ns": 1000 * number + 1000, "state": "done", "result": 0}
        lines.append(usual | {"end_ns": 1000 * number + 1500} | call)
    path = folder / f"rank{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reduce(seq: int, count: int = 4, **more: Any) -> dict[str, Any]:
    usual = {"call": "all_reduce", "seq": seq, "count": count, "dtype": "float32", "op": "sum"}
    return usual | {"state": "done"} | more


def pair(call: str, peer: int, number: int, **more: Any) -> dict[str, Any]:
    return {"call": call, "peer": peer, "peer_seq": number, "count": 4, "dtype": "float32"} | more


PENDING = {"state": "taken", "end_ns": None}


# --- damage -------------------------------------------------------------------------------------------------

# What stands in the place of a value, a piece of text, and a line.
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1 << 31, 10**30, 1e308, float("nan"), float("inf"), 0.5, "", "1", "\x1b[31m"),
    *("\ud800", "x" * 10_000, [], [[]], [[1, 2], [3]], {}, {"a": []}, "abc", "init", "send", "failed"),
]
PIECES = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\n",
    b"9" * 5000,
    b"[" * 3000,
    b"NaN",
    b"-",
    b"e9",
]


def _mutated_value(random: Random, line: bytes) -> bytes:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return line
    target = values
    while isinstance(target, dict | list) and target:
        name = random.choice(list(target) if isinstance(target, dict) else range(len(target)))
        inner = target[name]
        if isinstance(inner, dict | list) and inner and random.random() < 0.7:
            target = inner
            continue
        if random.random() < 0.2:
            del target[name]
        else:
            target[name] = random.choice(HOSTILE)
        break
    return json.dumps(values).encode()


def mutated(random: Random, dump: bytes) -> bytes:
    """Return a dump with some of it replaced, removed, doubled or moved, as bytes, values or lines."""
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        lines = dump.split(b"\n")
        at, kind = random.randrange(len(lines)), random.randrange(8)
        if kind < 4:
            lines[at] = _mutated_value(random, lines[at])
        elif kind == 4:
            lines[at : at + 1] = random.choice(([], [lines[at]] * 2, [random.choice(lines)]))
        elif kind == 5:
            other = random.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        dump = b"\n".join(lines)
        if kind == 6:
            dump = dump[: random.randrange(len(dump) + 1)]
        elif kind == 7:
            place = random.randrange(len(dump) + 1)
            dump = dump[:place] + random.choice(PIECES) + dump[place + random.randrange(4) :]
    return dump


def sound_dumps(folder: Path) -> list[list[bytes]]:
    """Return the dumps of some jobs: what goes wrong in them leads to every kind of finding."""
    jobs: list[list[Calls]] = [
        [[reduce(1), reduce(2, **PENDING)], [reduce(1), reduce(2, 5, **PENDING)], [reduce(1)]],
        [[reduce(1), pair("send", 1, 1, **PENDING)], [pair("recv", 2, 1, **PENDING)], [pair("send", 1, 1)]],
        [[reduce(s, group=7, **PENDING) for s in (1, 2)], [reduce(1, group=3, **PENDING)], [reduce(1)]],
        [[{"call": "init", "seq": 0, "state": "called"}], [reduce(1, state="failed", result=5)]],
        [
            [{"call": "finalize", "state": "called"}],
            [reduce(1, at="train.py:88", color=3, plan=True, algorithm="local")],
            [],
        ],
    ]
    found = []
    for ranks in jobs:
        texts = []
        for rank, calls in enumerate(ranks):
            first = write(folder, rank, 3, calls, reasons=[{"kind": "timeout", "text": "late"}], also="also")
            second = write(folder, rank, 3, calls[::-1], comm="other").read_bytes()
            texts.append(first.read_bytes() + second.partition(b"\n")[2])
        found.append(texts)
    return found
