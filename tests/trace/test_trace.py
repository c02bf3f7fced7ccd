"""`pynccl trace`: ranks that go wrong in every way, in real processes, and dumps written by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import trace_programs as programs
from command_line import pynccl_command
from conftest import Run, clean_environment
from pynccl.__main__ import main
from pynccl.testing import run
from terminals import GREEN, RED, YELLOW, in_terminal
from trace_dumps import PENDING, mutated, pair, reduce, sound_dumps, write

PLACE = r"( at \S*trace_programs\.py:\d+)?"


def told(path: Path, *options: str) -> str:
    """Return what `pynccl trace` says of a folder or a file."""
    done = pynccl_command("trace", *options, str(path))
    assert done.exit_code == 0, done.output
    return done.stdout


def explained(text: str) -> list[str]:
    """Return the lines on communicators, without their names, and without the places of the calls."""
    lines = [re.sub(PLACE, "", line).strip() for line in text.splitlines()]
    return [line for line in lines if not re.match(r"communicator |ranks? [\d, and-]+ \([\w ]+\): ", line)]


# The program, and all that is said of its ranks.
CASES: list[tuple[Callable[..., None], list[str]]] = [
    (
        programs.function,
        [
            "ranks 0 and 1 called all_reduce #4 (float32, 1,000, sum), which failed with ncclInvalidUsage; "
            "rank 2 called all_gather #4 (float32, 8), which failed with ncclInvalidUsage: "
            "the function differs"
        ],
    ),
    (
        programs.count,
        [
            "ranks 0 and 2 called all_reduce #4 (float32, 4, sum), which failed with ncclInvalidUsage; "
            "rank 1 called all_reduce #4 (float32, 5, sum), which failed with ncclInvalidUsage: "
            "the count differs"
        ],
    ),
    (
        programs.dtype,
        [
            "ranks 0 and 2 called all_reduce #4 (float32, 4, sum), which failed with ncclInvalidUsage; "
            "rank 1 called all_reduce #4 (float64, 4, sum), which failed with ncclInvalidUsage: "
            "the dtype differs"
        ],
    ),
    (
        programs.op,
        [
            "ranks 1 and 2 called all_reduce #4 (float32, 4, sum), which failed with ncclInvalidUsage; "
            "rank 0 called all_reduce #4 (float32, 4, max), which failed with ncclInvalidUsage: "
            "the op differs"
        ],
    ),
    (
        programs.root,
        [
            "ranks 0 and 2 called broadcast #4 (float32, 4, root 0), which failed with ncclInvalidUsage; "
            "rank 1 called broadcast #4 (float32, 4, root 1), which failed with ncclInvalidUsage: "
            "the root differs"
        ],
    ),
    (
        programs.missing,
        [
            "ranks 0 and 1 wait in all_reduce #4 (float32, 4); rank 2 never reached #4: "
            "it exited after all_reduce #3 (float32, 4)"
        ],
    ),
    (
        programs.left,
        [
            "ranks 0 and 1 wait in all_reduce #4 (float32, 4); "
            "rank 2 never reached #4: it exited after all_reduce #3 (float32, 4)"
        ],
    ),
    (
        programs.extra,
        [
            "ranks 0 and 2 called all_reduce #4 (float32, 1, sum), which failed with ncclInvalidUsage; "
            "rank 1 called broadcast #4 (float32, 7, root 0), which failed with ncclInvalidUsage: "
            "the function differs",
            "rank 1 made one call more than the others: broadcast #4 (float32, 7, root 0)",
        ],
    ),
    (
        programs.extra_at_the_end,
        [
            "rank 1 waits in all_gather #4 (float32, 6); ranks 0 and 2 never reached #4: "
            "each exited after all_reduce #3 (float32, 4)"
        ],
    ),
    (
        programs.grouped,
        [
            "ranks 0 and 1 wait in all_reduce #5 (float32, 12); rank 2 never reached #5: "
            "it exited after all_reduce #4 (float32, 11)",
            "rank 0 issued #4 and #5 as one group; ranks 1 and 2 issued #4 alone: "
            "groups differ, and a group starts only as a whole",
        ],
    ),
    (
        programs.unmatched_send,
        [
            "rank 0 waits in send #1 to rank 1 (float32, 1,048,576); rank 1 never received it: "
            "it exited after all_reduce #3 (float32, 4)"
        ],
    ),
    (
        programs.left_message,
        [
            "rank 0 called send #2 to rank 1 (float32, 6); rank 1 has not received it, "
            "and has called barrier #4 since"
        ],
    ),
    (
        programs.too_few_signals,
        [
            "rank 0 waits in wait_signal from rank 1 (signal 3, 2 expected); "
            "rank 1 has signalled 1 of them, and exited after all_reduce #3 (float32, 4)",
        ],
    ),
    (
        programs.wrong_peer,
        [
            "rank 0 waits in send #1 to rank 1 (float32, 1,048,576); rank 1 never received it: "
            "it waits in recv #1 from rank 2 (float32, 1,048,576) instead",
            "rank 1 waits in recv #1 from rank 2 (float32, 1,048,576); rank 2 never sent it: "
            "it exited after all_reduce #3 (float32, 4)",
        ],
    ),
    (
        programs.pair_count,
        [
            "rank 0 called send #2 to rank 1 (float32, 6), but rank 1 called recv #2 from rank 0 "
            "(float32, 5): the count differs"
        ],
    ),
    (
        programs.killed,
        [
            "ranks 0 and 2 wait in all_reduce #4 (float32, 4); "
            "rank 1 died or was stopped after #3: it left no file"
        ],
    ),
    (
        programs.raises,
        [
            "ranks 0 and 2 wait in all_reduce #4 (float32, 4); "
            "rank 1 never reached #4: it ended with ValueError: bad sample"
        ],
    ),
    (
        programs.finalize,
        [
            "rank 0 waits in finalize; rank 1 destroyed the communicator after all_reduce #3 (float32, 4); "
            "rank 2 destroyed the communicator after all_reduce #3 (float32, 4)"
        ],
    ),
    (
        programs.pairs_in_a_plan,
        [
            "rank 0 waits in send #5 to rank 1 (float32, 1,048,576); rank 1 never received it: "
            "it exited after all_reduce #3 (float32, 4)"
        ],
    ),
    (programs.fine, ["nothing is outstanding: the last call is barrier #4"]),
]


# Every ninth is a quick test.
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(*case, id=case[0].__name__, marks=pytest.mark.slow if i % 9 else ())
        for i, case in enumerate(CASES)
    ],
)
def test_in_plain_words(tmp_path: Path, program: Callable[..., None], expected: list[str]) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path)}
    run(3, program, backend="cpu", check=False, timeout=30, env=env)
    assert explained(told(tmp_path)) == expected


def test_a_mismatch_in_a_plan(tmp_path: Path) -> None:
    run(3, programs.in_a_plan, backend="cpu", check=False, env={"PYNCCL_TRACE_DIR": str(tmp_path)})
    (line,) = explained(told(tmp_path))
    assert re.fullmatch(
        r"ranks 0 and 1 .* broadcast #5 \(float32, 4, root 0\).*; rank 2 .* broadcast #5 "
        r"\(float32, 5, root 0\).*: the count differs",
        line,
    )


def test_a_split_that_check_mode_holds_up(tmp_path: Path) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path), "PYNCCL_CHECK": "1"}
    run(3, programs.missing_in_a_split, backend="cpu", check=False, timeout=30, env=env)
    (line,) = explained(told(tmp_path))
    assert re.fullmatch(r"ranks 0 and 1 wait in split #4; rank 2 never reached #4: .*", line)


@pytest.mark.slow
def test_two_communicators_in_different_orders(tmp_path: Path) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path), "PYNCCL_TRACE_STACKS": "1"}
    run(3, programs.order, backend="cpu", check=False, env=env)
    text = told(tmp_path)
    first = re.sub(PLACE, "", text.splitlines()[0])
    assert re.fullmatch(
        r"rank 0 calls all_reduce #5 \(float32, 4\) of (\w+) before all_reduce #1 \(float32, 4\) of (\w+), "
        "rank 1 the other way round: the order on two communicators differs",
        first,
    )
    assert "rank 0 waits in all_reduce #5 (float32, 4) at " in text
    assert "ranks 1 and 2 never reached #5: each waits in all_reduce #1 (float32, 4) at " in text


@pytest.mark.slow
def test_a_rank_that_dies_before_it_joins(tmp_path: Path) -> None:
    env = {"PYNCCL_TRACE_DIR": str(tmp_path / "traces")}
    run(3, programs.creation_of_a_dead, str(tmp_path), backend="cpu", check=False, env=env)
    assert explained(told(tmp_path / "traces")) == [
        "ranks 0 and 2 wait in init; rank 1 never reached init: it left no file"
    ]


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_c(tmp_path: Path) -> None:
    """Only the signal can tell: the rank holds the GIL and is killed in the end."""
    env = {"PYNCCL_TRACE_DIR": str(tmp_path / "traces"), "PYNCCL_TRACE_SIGNAL": "SIGUSR2"}
    run(3, programs.stuck_in_c, str(tmp_path), backend="cpu", check=False, env=env)
    text = told(tmp_path / "traces")
    assert explained(text) == [
        "ranks 0 and 2 wait in all_reduce #4 (float32, 4); rank 1 never reached #4: "
        "it made all_reduce #3 (float32, 4) last"
    ]
    assert "rank 1 (signal): SIGUSR2" in text


# --- dumps written by hand ----------------------------------------------------------------------------------


def test_the_example(tmp_path: Path) -> None:
    for rank in range(4):
        last = reduce(641, 1 << 20, **PENDING)
        if rank == 3:
            last = {"call": "all_gather", "seq": 641, "count": 512, "dtype": "float32", "at": "train.py:88"}
            last |= PENDING
        write(tmp_path, rank, 4, [reduce(640), last])
    assert explained(told(tmp_path)) == [
        "ranks 0-2 wait in all_reduce #641 (float32, 1,048,576, sum); rank 3 waits in all_gather #641 "
        "(float32, 512) at train.py:88: the function differs"
    ]


def test_more_than_one_difference(tmp_path: Path) -> None:
    for rank in range(5):
        last = reduce(1, 8, dtype="int8", **PENDING) if rank in (1, 3) else reduce(1, **PENDING)
        write(tmp_path, rank, 5, [last])
    assert explained(told(tmp_path)) == [
        "ranks 0, 2 and 4 wait in all_reduce #1 (float32, 4, sum); ranks 1 and 3 wait in all_reduce #1 "
        "(int8, 8, sum): the count and dtype differ"
    ]


def test_a_call_left_out(tmp_path: Path) -> None:
    everything = [reduce(1, 10), reduce(2, 20), reduce(3, 30), reduce(4, 40, **PENDING)]
    for rank in range(3):
        calls = everything
        if rank == 1:
            calls = [reduce(1, 10), reduce(2, 30, **PENDING), reduce(3, 40, **PENDING)]
        write(tmp_path, rank, 3, calls)
    assert explained(told(tmp_path))[1:] == [
        "rank 1 left out one call of the others: all_reduce #2 (float32, 20)"
    ]


def test_a_rank_far_behind(tmp_path: Path) -> None:
    """The others' rings have lost the call at which it stopped."""
    write(tmp_path, 0, 2, [reduce(seq, **PENDING) for seq in range(500, 510)], overwritten=500)
    write(tmp_path, 1, 2, [reduce(seq) for seq in range(10, 17)])
    assert explained(told(tmp_path)) == [
        "the others got to #509; rank 1 never reached #17: it made all_reduce #16 (float32, 4) last"
    ]


def test_nothing_differs_and_nothing_moves(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, 2, [reduce(1), reduce(2, **PENDING)])
    assert explained(told(tmp_path)) == [
        "ranks 0 and 1 wait in all_reduce #2 (float32, 4)",
        "all ranks made the same calls, up to all_reduce #2 (float32, 4)",
    ]


def test_an_exception_does_not_repeat_its_reason(tmp_path: Path) -> None:
    late = {"kind": "timeout", "text": "rank 1 did not come"}
    wrong = {"kind": "mismatch", "text": "the count differs"}
    for rank, reasons, error in (
        (0, [late], "NcclTimeoutError: rank 1 did not come"),
        (1, [late], "NcclTimeoutError: rank 0 reports: rank 1 did not come"),
        (2, [wrong], "NcclError: ncclAllReduce: the count differs; rank 2 of 4"),
        (3, [], "KeyError: 'x'"),
    ):
        # A dump that was written twice has its exception before other reasons, too.
        write(tmp_path, rank, 4, [], reasons=[{"kind": "exception", "text": error}, *reasons])
    assert told(tmp_path).splitlines()[-6:] == [
        "ranks 0 and 1 (timeout): rank 1 did not come",
        "rank 2 (mismatch): the count differs",
        "rank 0 (exception): NcclTimeoutError: ...",
        "rank 1 (exception): NcclTimeoutError: rank 0 reports: ...",
        "rank 2 (exception): NcclError: ncclAllReduce: ...; rank 2 of 4",
        "rank 3 (exception): KeyError: 'x'",
    ]


def other(call: str, **more: Any) -> dict[str, Any]:
    return {"call": call} | more


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([["suspend", "resume"]] * 2, "the last call is resume"),
        ([["init", "suspend"]] * 2, "the last call is suspend"),
        ([["init", "shrink"], ["init", "revoke"]], "rank 0 called shrink; rank 1 called revoke"),
        ([["init"], ["init", "shrink"]], "rank 0 called init; rank 1 called shrink"),
        ([["abort"], []], "rank 0 called abort"),
        ([[], []], "no calls"),
    ],
)
def test_calls_without_a_number(tmp_path: Path, calls: list[list[str]], expected: str) -> None:
    for rank, names in enumerate(calls):
        write(tmp_path, rank, 2, [other(n, **({"seq": 0} if n == "init" else {})) for n in names])
    (text,) = explained(told(tmp_path))
    assert text.removeprefix("nothing is outstanding: ") == expected


def test_the_receive_that_is_not_met_comes_first(tmp_path: Path) -> None:
    """As after a receive from the wrong rank before a barrier: the ranks ended with one long error."""
    why = "rank 1 of 3: the ranks called different things: deadlock: rank 1 waits in Recv #1 from rank 2"
    mismatch = {"kind": "mismatch", "text": why}
    failed = {"state": "failed", "result": 5}
    calls = [pair("send", 1, 1, **failed)], [pair("recv", 2, 1, **failed)], [reduce(1, **failed)]
    for rank, records in enumerate(calls):
        raised = {"kind": "exception", "text": f"CollectiveMismatchError: ncclRecv: {why}"}
        write(tmp_path, rank, 3, list(records), reasons=[mismatch, raised])
    assert explained(told(tmp_path)) == [
        "rank 0 called send #1 to rank 1 (float32, 4), which failed with ncclInvalidUsage; "
        "rank 1 never received it: it called recv #1 from rank 2 (float32, 4) instead",
        "rank 1 called recv #1 from rank 2 (float32, 4), which failed with ncclInvalidUsage; "
        "rank 2 never sent it: it ended with CollectiveMismatchError: ncclRecv: ...",
        "rank 2 called all_reduce #1 (float32, 4), which failed with ncclInvalidUsage; "
        "ranks 0 and 1 never reached #1: each ended with CollectiveMismatchError: ncclRecv: ...",
    ]


def test_both_ranks_send_first(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, 2, [reduce(1), pair("send", 1 - rank, 3, **PENDING)])
    assert explained(told(tmp_path)) == [
        "rank 0 waits in send #3 to rank 1 (float32, 4); rank 1 never received it: "
        "it waits in send #3 to rank 0 (float32, 4) instead",
        "rank 1 waits in send #3 to rank 0 (float32, 4); rank 0 never received it: "
        "it waits in send #3 to rank 1 (float32, 4) instead",
    ]


def test_the_peer_is_dead(tmp_path: Path) -> None:
    write(tmp_path, 0, 2, [reduce(1), pair("recv", 1, 1, **PENDING)])
    assert explained(told(tmp_path)) == [
        "rank 1 died or was stopped after #1: it left no file",
        "rank 0 waits in recv #1 from rank 1 (float32, 4), which left no file",
    ]


def test_the_files_of_other_ranks_are_not_given(tmp_path: Path) -> None:
    write(tmp_path, 0, 3, [reduce(1), pair("recv", 1, 1, **PENDING)])
    assert explained(told(tmp_path / "rank0.jsonl")) == [
        "ranks 1 and 2: no file here, because it was not given or the rank died; all ranks have completed #1",
        "rank 0 waits in recv #1 from rank 1 (float32, 4), which has no file here",
    ]


def test_the_newer_dump_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, 2, [reduce(1), reduce(2)])
    write(tmp_path, 1, 2, [reduce(1), reduce(2)])
    old = json.loads((tmp_path / "rank1.jsonl").read_text().splitlines()[0]) | {"clock": [[0, 1], [2, 3]]}
    lines = [old, {"comm": "abc", "rank": 1, "size": 2, "origin": "init", "name": "", "collectives": 0}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert explained(told(tmp_path)) == [
        "nothing is outstanding: the last call is all_reduce #2 (float32, 4)"
    ]


def test_two_names_of_one_communicator(tmp_path: Path) -> None:
    """A communicator that was grown: the new ranks know it by the id that they joined with."""
    write(tmp_path, 0, 3, [reduce(1, **PENDING)], comm="grown", also="joined")
    write(tmp_path, 1, 3, [reduce(1, **PENDING)], comm="grown")
    write(tmp_path, 2, 3, [], comm="joined")
    assert explained(told(tmp_path)) == [
        "ranks 0 and 1 wait in all_reduce #1 (float32, 4); rank 2 never reached #1: it made no call"
    ]


def test_a_communicator_that_a_rank_closed_long_ago(tmp_path: Path) -> None:
    """Its ring is gone from the dump of a rank that went on; nobody died."""
    write(tmp_path, 0, 2, [reduce(1)], comm="old", ended="destroy")
    write(tmp_path, 1, 2, [reduce(1)], comm="new")
    newer = [{"comm": "new", "rank": 0, "size": 2, "origin": "init", "name": "", "collectives": 1}, reduce(1)]
    newer[1] |= {"time_ns": 5, "result": 0}
    with open(tmp_path / "rank0.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in newer)
    assert (
        explained(told(tmp_path))
        == ["nothing is outstanding: the last call is all_reduce #1 (float32, 4)"] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("[" * 100_000, "line 1: this is not a dump"),
        ("hello\n", "line 1: this is not a dump"),
        ('{"some": "json"}\n', "line 1: this is not a dump"),
        (
            '{"pynccl": "0", "host": "h", "pid": 1, "clock": [[0, 0], [1, 1]], "reasons": []}\n{"call": 1}\n',
            "line 2: this is not a rec",
        ),
    ],
)
def test_no_dump(run_python: Run, tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    done = run_python(args=["-m", "pynccl", "trace", str(tmp_path / "x.jsonl")], fails=True)
    assert done.stderr.startswith("pynccl trace: ") and expected in done.stderr


@pytest.mark.slow
def test_no_file(run_python: Run, tmp_path: Path) -> None:
    done = run_python(args=["-m", "pynccl", "trace", str(tmp_path / "none.jsonl")], fails=True)
    assert "No such file" in done.stderr
    (tmp_path / "empty").mkdir()
    done = run_python(args=["-m", "pynccl", "trace", str(tmp_path / "empty")], fails=True)
    assert "no files in " in done.stderr
    (tmp_path / "empty" / "rank0.host.7.stacks").write_text("")
    done = run_python(args=["-m", "pynccl", "trace", str(tmp_path / "empty")], fails=True)
    assert "there are Python stacks" in done.stderr and "rank0.host.7.stacks" in done.stderr


def test_chrome_events(tmp_path: Path) -> None:
    run(2, programs.fine, backend="cpu", env={"PYNCCL_TRACE_DIR": str(tmp_path)})
    out = tmp_path / "out.json"
    told(tmp_path, "--chrome", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    names = ["init", "all_reduce #1", "all_reduce #2", "all_reduce #3", "barrier #4", "finalize", "destroy"]
    for rank in range(2):
        mine = [event for event in calls if event["pid"] == rank]
        assert [event["name"].split(" (")[0] for event in mine] == names
        assert [event["args"].get("algorithm") for event in mine] == [None, *["local"] * 3, None, None, None]
        assert all(event["dur"] > 0 and event["args"]["state"] == "done" for event in mine)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(mine))
    assert {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }


def test_colours_in_a_terminal(tmp_path: Path) -> None:
    for name, records in (("good", [reduce(1)]), ("bad", [reduce(1), reduce(2, **PENDING)])):
        (tmp_path / name).mkdir()
        for rank in range(2):
            write(tmp_path / name, rank, 2, records[: 2 - rank], comm=name)
    (tmp_path / "bad" / "rank9.jsonl").write_text("not a dump")
    command = [sys.executable, "-m", "pynccl", "trace", str(tmp_path / "good"), str(tmp_path / "bad")]
    shown, code = in_terminal(command, clean_environment())
    plain, _ = in_terminal(command, clean_environment(), NO_COLOR="1")
    assert (code, plain) == (0, [re.sub(r"\x1b\[\d+m", "", line) for line in shown])
    assert plain == [*told(tmp_path / "bad", str(tmp_path / "good")).splitlines(), ""]
    levels = {GREEN: "nothing is outstanding", RED: "rank 0 waits in all_reduce #2", YELLOW: "left out: "}
    for colour, words in levels.items():
        (line,) = [line for line in shown if line.startswith(colour)]
        assert words in line
    gone, _ = in_terminal([*command[:4], str(tmp_path / "gone")], clean_environment())
    assert gone[0].startswith(f"{RED}pynccl trace: ")


# --- damaged dumps ------------------------------------------------------------------------------------------


def test_a_truncated_dump_tells_the_rest(tmp_path: Path) -> None:
    for rank in range(3):
        path = write(tmp_path, rank, 3, [reduce(1), reduce(2), *([reduce(3, **PENDING)] if rank else [])])
    path.write_text(path.read_text()[:-20])
    (tmp_path / "rank9.jsonl").write_text("not a dump")
    text = told(tmp_path)
    assert "rank 1 waits in all_reduce #3 (float32, 4); rank 0 never reached #3: it made all_redu" in text
    assert f"left out: {path}, line 5: this is not a record of the flight recorder\n" in text
    assert f"left out: {tmp_path}/rank9.jsonl, line 1: this is not a dump of the flight recorder\n" in text


def test_records_of_a_damaged_communicator_are_nobodys(tmp_path: Path) -> None:
    """They must not be taken for the communicator's before."""
    path = write(tmp_path, 0, 1, [reduce(1)])
    other = write(tmp_path, 1, 2, [reduce(seq) for seq in range(2, 9)])
    lines = other.read_text().splitlines()
    lines[1] = lines[1].replace('"comm"', "comm")
    path.write_text(path.read_text() + "\n".join(lines[1:]) + "\n")
    other.unlink()
    text = told(tmp_path)
    assert explained(text)[0] == "nothing is outstanding: the last call is all_reduce #1 (float32, 4)"
    assert "line 4: this is not a record of the flight recorder, and 7 more lines" in text


def test_a_pipe_among_the_dumps(run_python: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.host.1.jsonl")
    for given in (tmp_path, tmp_path / "rank0.host.1.jsonl"):
        done = run_python(args=["-m", "pynccl", "trace", str(given)], fails=True)
        says = "rank0.host.1.jsonl is no regular file; expected a dump or a folder of dumps\n"
        assert done.stderr == f"pynccl trace: {tmp_path}/{says}"


def test_a_huge_size_is_no_work(tmp_path: Path) -> None:
    size = (1 << 31) - 1
    write(tmp_path, 7, size, [reduce(1, **PENDING), pair("send", 1 << 30, 1, **PENDING)], reasons=[])
    text = told(tmp_path)
    assert f"ranks 0-6 and 8-{size - 1} died or were stopped: they left no files" in text
    assert f"rank 7 waits in send #1 to rank {1 << 30} (float32, 4), which left no file" in text


@pytest.mark.slow
def test_many_ranks(tmp_path: Path) -> None:
    """What is said takes time in proportion to what there is to say."""
    calls = [reduce(seq) for seq in range(1, 30)]
    grouped = [reduce(seq, group=1, **PENDING) for seq in range(30, 60)]
    for rank in range(300):
        peers = [pair("send", peer, 1) for peer in range(rank % 7, 300, 40)]
        write(tmp_path, rank, 100_000, [*calls, *peers, *grouped])
    text = told(tmp_path)
    assert "ranks 300-99999 died or were stopped after #29: they left no files" in text


def test_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    evil = "\x1b[31mred\x07\r\n\u202e\ud800"
    call = reduce(1, dtype=evil, at=evil, **PENDING)
    reasons = [{"kind": "timeout", "text": evil}]
    path = write(tmp_path, 0, 2, [call], name=evil, origin=evil, reasons=reasons, comm=evil)
    path.rename(tmp_path / "\x1b[31m.jsonl")
    (tmp_path / "\x1b[32m.jsonl").write_text("no dump")
    text = told(tmp_path, "--chrome", str(tmp_path / "out.json"))
    assert "\\x1b[31mred" in text and "\\x1b[32m.jsonl, line 1" in text
    assert all(character.isprintable() or character == "\n" for character in text)
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_dumps_end_in_a_report_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    def too_long(*_: object) -> None:
        raise AssertionError("it has no end")

    jobs, outcomes = sound_dumps(tmp_path), Counter[int]()
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for seed in range(count):
            random = Random(seed)
            dumps = [mutated(random, each) if random.random() < 0.6 else each for each in random.choice(jobs)]
            for rank, dump in enumerate(dumps):
                (tmp_path / f"rank{rank}.jsonl").write_bytes(dump)
            signal.alarm(20)
            options = [[], ["--chrome", str(tmp_path / "out")], ["--html", str(tmp_path / "out")]][seed % 3]
            code = main(
                ["trace", *options, *(str(tmp_path / f"rank{rank}.jsonl") for rank in range(len(dumps)))]
            )
            signal.alarm(0)
            out, error = capsys.readouterr()
            outcomes[code] += 1
            assert all(c.isprintable() or c == "\n" for c in out + error), seed
            if code == 0:
                assert out.strip() and not error, seed
            else:
                assert not out and error.startswith("pynccl trace: ") and error.count("\n") == 1, seed
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert outcomes[0] > count * 0.9
