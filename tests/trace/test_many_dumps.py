"""The dumps of a large job: what is read is what was written, in little memory."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conftest import clean_environment
from processes import completed
from pynccl import TraceRecord
from pynccl._trace.dumps import read_all
from trace_dumps import PENDING, pair, reduce, write

# Numbers at the ends of what 64 bits hold, and texts that are written in several ways.
ODD: list[dict[str, Any]] = [
    reduce(1, send=0, recv=(1 << 63) - 1),
    reduce(2, algorithm="shares", send=1 << 63, recv=(1 << 64) - 1),
    reduce(3, send=-(1 << 63), recv=-5),
    reduce((1 << 63) + 4),
    reduce(5, at='a "quoted" \\ place.py:3'),
    reduce(5, at="pl\u00e4ce.py:3", group=7, plan=True),
    pair("send", 1, 1),
    pair("send", 1, 2, end_ns=None, state="taken"),
    {"call": "put_signal", "peer": 1, "signal": 0, "context": 0, "offset": -8, "count": 4, "dtype": "int8"},
    {"call": "finalize", "time_ns": 1 << 63},
]


def as_read(line: dict[str, Any]) -> TraceRecord:
    names = {field.name for field in fields(TraceRecord)}
    return TraceRecord(**{name: value for name, value in line.items() if name in names})


@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_records_are_what_the_lines_say(tmp_path: Path, separators: tuple[str, str] | None) -> None:
    """In the form that the recorder writes, which is scanned, and in another."""
    path = write(tmp_path, 0, 2, ODD * 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line, separators=separators) + "\n" for line in lines))
    dumps = read_all([path])
    (member,) = dumps.members
    assert list(member.records) == [as_read(line) for line in lines[2:]]
    assert member.records[-1] == as_read(lines[-1]) and len(member.records[2:5]) == 3
    assert not dumps.damage


@pytest.mark.parametrize(
    "damage",
    [
        '"seq": -1',
        '"seq": 01',
        '"seq": 1.0',
        '"seq": 1e3',
        '"seq": true',
        '"seq": "1"',
        '"seq": 99999999999999999999',
    ],
)
def test_a_number_that_is_none(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, 0, 2, [reduce(1), reduce(2), reduce(3)])
    path.write_text(path.read_text().replace('"seq": 2', damage))
    dumps = read_all([path])
    assert [record.seq for record in dumps.members[0].records] == [1, 3]
    assert dumps.damage == [f"{path}, line 4: this is not a record of the flight recorder"]


def test_a_damaged_kind(tmp_path: Path) -> None:
    """All of its lines are left out, and only they."""
    calls = [reduce(seq, dtype=None if seq % 3 else "float32") for seq in range(1, 10)]
    dumps = read_all([write(tmp_path, 0, 2, calls)])
    assert [record.seq for record in dumps.members[0].records] == [3, 6, 9]
    assert dumps.damage[0].endswith("line 3: this is not a record of the flight recorder, and 5 more lines")


def test_more_damage_than_is_worth_reading(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 2, [reduce(1), reduce(2)])
    with path.open("ab") as file:
        file.write(b"\n" * 30_000_000)
    dumps = read_all([path])
    assert [record.seq for record in dumps.members[0].records] == [1, 2]
    assert dumps.damage[0].endswith("and 100000 more lines; the rest of the file is not read")


def test_lines_longer_than_any_sound_one(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 2, [reduce(1), reduce(2)])
    path.write_text(path.read_text() + '{"call": "' + "x" * (3 << 20) + '"}\n' + json.dumps(reduce(3)) + "\n")
    assert len(read_all([path]).members[0].records) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_dumps(tmp_path: Path) -> None:
    """1,024 of 2,048 records, half a gigabyte, take less memory than they have bytes."""
    ranks, records, late = 1024, 2048, 700
    calls = [
        reduce(seq, 4 + seq % 7, send=1 << 46, recv=1 << 46, stream=1 << 57) for seq in range(1, records + 1)
    ]
    path = write(tmp_path, 0, ranks, [*calls[:-1], calls[-1] | PENDING])
    first, own, *lines = path.read_text().splitlines(keepends=True)
    for rank in range(1, ranks):
        head, member = json.loads(first), json.loads(own)
        head |= {"process_rank": rank, "pid": 100 + rank}
        member |= {"rank": rank, "collectives": records - (rank == late)}
        kept = lines[: records - (rank == late)]
        text = json.dumps(head) + "\n" + json.dumps(member) + "\n" + "".join(kept)
        (tmp_path / f"rank{rank}.jsonl").write_text(text)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = completed(
        [sys.executable, "-m", "pynccl", "trace", str(tmp_path)],
        env=clean_environment(),
        timeout=300,
        check=True,
    )
    assert (
        "ranks 0-699 and 701-1023 wait in all_reduce #2048 (float32, 8); rank 700 never reached"
        in done.stdout
    )
    assert max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) < max(before + 1, 600 << 10)
