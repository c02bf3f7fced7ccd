"""The flight recorder: what it writes down, what it costs nothing for, and every way to a dump."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import ROOT, Run, clean_environment
from pynccl.testing import run

START = """
import ctypes, os, signal, sys, threading, time
import numpy as np
import pynccl
comm = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
x = np.ones(8, np.float32)
y = np.empty(8, np.float32)
"""


@pytest.fixture
def run_started(run_python: Run) -> Run:
    """Run Python code that goes on from START, on the CPU library."""
    return lambda code, **more: run_python(START + code, PYNCCL_LIBRARY="cpu", **more)


def call_everything(rank: int, nranks: int) -> dict[str, list[pynccl.TraceRecord]]:
    comm = pynccl.init(timeout=20)
    x, wide = np.ones(4, np.float32), np.ones(2 * nranks, np.int32)
    peer = (rank + 1) % nranks, (rank - 1) % nranks
    comm.all_reduce(x, op="max")
    comm.reduce(x, root=1)
    comm.broadcast(x, root=1)
    comm.all_gather(x)
    comm.reduce_scatter(wide)
    comm.all_to_all(wide)
    comm.gather(x, root=1)
    comm.scatter(wide if rank == 1 else None, np.empty(2, np.int32), root=1)
    comm.send_recv(x, peer[0], np.empty(4, np.float32), peer[1])
    comm.barrier()
    child = comm.split(rank % 2, key=-rank)
    assert child is not None
    child.all_reduce(x, op=child.pre_mul_sum(0.5))
    child.destroy()
    records = {"comm": comm.trace(), "child": child.trace()}
    comm.finalize()
    records["end"] = comm.trace()[-1:]
    comm.destroy()
    return records


def test_every_call() -> None:
    before = time.time_ns()
    found = run(2, call_everything, backend="cpu")
    after = time.time_ns()
    for rank, records in enumerate(found):
        comm = records["comm"]
        names = ["init", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
        names += ["gather", "scatter", "send", "recv", "barrier", "split"]
        assert [r.call for r in comm] == names
        assert [r.seq for r in comm] == [0, 1, 2, 3, 4, 5, 6, 7, 8, None, None, 9, 10]
        assert [r.state for r in comm] == ["done"] * len(comm)
        assert [r.result for r in comm] == [0] * len(comm)
        assert [r.op for r in comm[1:6]] == ["max", "sum", None, None, "sum"]
        assert [r.root for r in comm if r.root is not None] == [1, 1, 1, 1]
        assert [r.algorithm for r in comm] == [None, *["local"] * 8, None, None, None, None]
        assert [r.count for r in comm[1:9]] == [4, 4, 4, 4, 2, 2, 4, 2]
        assert [r.dtype for r in comm[4:6]] == ["float32", "int32"]
        send, recv = comm[9:11]
        assert (send.peer, send.peer_seq, recv.peer, recv.peer_seq) == (1 - rank, 1, 1 - rank, 1)
        assert send.group is not None and send.group == recv.group
        assert send.send and recv.recv and send.send != recv.recv
        assert comm[1].group is None and comm[1].send == comm[1].recv
        assert comm[12].color == rank % 2
        assert [(r.call, r.seq, r.op) for r in records["child"][:1]] == [("all_reduce", 1, "pre_mul_sum")]
        assert [r.call for r in records["child"][1:]] == ["destroy"]
        assert [r.call for r in records["end"]] == ["finalize"]
        called, ended = [r.time_ns for r in comm], [r.end_ns or 0 for r in comm]
        assert called == sorted(called) and ended == sorted(ended)
        assert before <= called[0] and ended[-1] <= after
        assert all(begin < end for begin, end in zip(called, ended, strict=True))


def make_relatives(rank: int, nranks: int, folder: str) -> None:
    comm = pynccl.init(timeout=20)
    half = comm.split(rank % 2)
    assert half is not None
    again = half.split(0)
    small = comm.shrink([3]) if rank != 3 else None
    pynccl.dump_trace(folder)
    for each in (again, half, small, comm):
        if each is not None:
            each.destroy()


def test_a_communicator_has_one_name_on_all_ranks(tmp_path: Path) -> None:
    run(4, make_relatives, str(tmp_path), backend="cpu")
    names: dict[str, set[int]] = {}
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name.split(".")[0] for path in files] == [f"rank{rank}" for rank in range(4)]
    for rank, path in enumerate(files):
        for line in map(json.loads, path.read_text().splitlines()):
            if "comm" in line:
                names.setdefault(line["comm"], set()).add(rank)
    assert sorted(map(sorted, names.values())) == [[0, 1, 2], [0, 1, 2, 3], [0, 2], [0, 2], [1, 3], [1, 3]]


def test_a_plan_is_one_record_and_shown_as_its_calls(run_started: Run) -> None:
    run_started("""
def calls(): return [(r.call, r.seq, r.peer_seq, r.root, r.plan) for r in comm.trace()[1:]]
send, recv = comm.prepare.send(x, 0), comm.prepare.recv(y, 0)
plan = pynccl.Plan([comm.prepare.broadcast(x), send, recv, comm.prepare.all_reduce(x)])
with pynccl.group(): comm.send(x, 0); comm.recv(y, 0)
for _ in range(2): plan()
with pynccl.group(): comm.send(x, 0); comm.recv(y, 0)
first = [("send", None, 1, None, False), ("recv", None, 1, None, False)]
def ran(seq, pair):
    return [("broadcast", seq, None, 0, True), ("send", None, pair, None, True),
            ("recv", None, pair, None, True), ("all_reduce", seq + 1, None, None, True)]
last = [("send", None, 4, None, False), ("recv", None, 4, None, False)]
assert calls() == [*first, *ran(1, 2), *ran(3, 3), *last], calls()
groups = [r.group for r in comm.trace()[1:]]
assert groups == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4], groups
assert [r.state for r in comm.trace()] == ["done"] * 13

own = comm.trace()[1].stream
# A plan that is gone is still shown, and one moved to another stream as what it was then.
with pynccl.Stream() as stream:
    op = pynccl.Plan([comm.prepare.all_reduce(x), comm.prepare.reduce(x)])
    op()
    op.stream = stream
    op()
    comm.synchronize(stream)
    handle = stream.handle
del plan, op
assert [(r.call, r.stream) for r in comm.trace()[-4:]] == [
    ("all_reduce", own), ("reduce", own), ("all_reduce", handle), ("reduce", handle)]
comm.destroy()
""")


def test_the_ring_keeps_the_newest(run_started: Run) -> None:
    run_started(
        """
for _ in range(5):
    comm.all_reduce(x)
assert [r.seq for r in comm.trace()] == [0, 1, 2, 3, 4, 5]
for _ in range(100):
    comm.all_reduce(x)
assert [r.seq for r in comm.trace()] == list(range(99, 106))
# Many plans, most of them gone before their records are.
for n in range(40):
    pynccl.Plan([comm.prepare.broadcast(x), comm.prepare.all_reduce(x[: 1 + n % 8])])()
found = comm.trace()
assert [r.seq for r in found] == list(range(178, 186)), found
assert [r.count for r in found[1::2]] == [5, 6, 7, 8]
op = comm.prepare.all_reduce(x)
long = pynccl.Plan([op] * 50)
long(); long()
assert [r.seq for r in comm.trace()] == list(range(236, 286))
with pynccl.group():
    for _ in range(20): comm.all_reduce(x)
assert [r.seq for r in comm.trace()] == list(range(299, 306))
assert {r.state for r in comm.trace()} == {"done"}
comm.destroy()
""",
        PYNCCL_TRACE_SIZE="7",
    )


def test_off(run_started: Run, tmp_path: Path) -> None:
    run_started(
        f"""
comm.all_reduce(x)
op = comm.prepare.all_reduce(x); op()
pynccl.Plan([op, op])()
with pynccl.group(): comm.all_reduce(x)
assert comm.trace() == []
path = pynccl.dump_trace({str(tmp_path / "dump")!r})
assert len(path.read_text().splitlines()) == 1
comm.barrier(); comm.destroy()
""",
        PYNCCL_TRACE_SIZE="0",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYNCCL_TRACE_SIZE", "many", "a number of records"),
        ("PYNCCL_TRACE_SIZE", "-1", "a number of records"),
        ("PYNCCL_TRACE_SIZE", "99999999999", "a number of records"),
        ("PYNCCL_TRACE_SIGNAL", "USR9", "a signal that can be caught"),
        ("PYNCCL_TRACE_SIGNAL", "KILL", "a signal that can be caught"),
    ],
)
def test_wrong_settings(run_started: Run, name: str, value: str, expected: str) -> None:
    done = run_started("", fails=True, **{name: value})
    assert f"ValueError: {name} is '{value}'; expected {expected}" in done.stderr


@pytest.mark.parametrize("value", ["SEGV", "SIGBUS", "fpe", "4", "TRAP", "SYS"])
def test_the_signal_of_a_fault_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "cpu")
    monkeypatch.setenv("PYNCCL_TRACE_SIGNAL", value)
    wrong = f"PYNCCL_TRACE_SIGNAL is '{value}', a signal that a fault .* raises; expected another one"
    with pytest.raises(ValueError, match=wrong):
        pynccl.init()


def test_a_failed_call(run_started: Run) -> None:
    run_started(
        """
try: comm.all_reduce(x, y)
except pynccl.NcclError as error: assert error.result == 2, error
else: raise AssertionError
(record,) = comm.trace()[1:]
assert (record.state, record.result, record.call) == ("failed", 2, "all_reduce"), record
assert record.algorithm is None, record
comm.abort()
""",
        PYNCCL_CPU_FAULT="rank=0,call=1,action=fail:2",
    )


def end_in_turn(rank: int, nranks: int) -> list[list[str]]:
    comm = pynccl.init()
    comm.suspend()
    comm.resume()
    child = comm.split(0)
    assert child is not None
    comm.barrier()
    child.revoke()
    shown = [[r.call for r in child.trace()]]
    comm.revoke()
    shown.append([r.call for r in comm.trace()])
    comm.abort()
    for each in (comm, child):
        shown.append([r.call for r in each.trace()])
        assert [r.state for r in each.trace()] == ["done"] * len(each.trace())
        assert all(r.time_ns <= (r.end_ns or 0) for r in each.trace())
    return shown


def test_revoke_and_abort_are_shown() -> None:
    calls = ["init", "suspend", "resume", "split", "barrier", "revoke"]
    expected = [["revoke"], calls, [*calls, "abort"], ["revoke", "abort"]]
    assert run(2, end_in_turn, backend="cpu") == [expected] * 2


def test_states_on_a_stream(run_started: Run) -> None:
    run_started("""
with pynccl.Stream() as stream, pynccl.Stream() as other:
    comm.all_reduce(x, y, stream=stream)
    comm.all_reduce(x, stream=other)
    states = [(r.state, r.end_ns) for r in comm.trace()[1:]]
    assert states == [("taken", None)] * 2, states
    comm.synchronize(stream)
    first, second = comm.trace()[1:]
    assert (first.state, first.stream) == ("done", stream.handle) and first.end_ns > first.time_ns
    assert (second.state, second.stream) == ("taken", other.handle)
    comm.synchronize()
    assert comm.trace()[2].state == "done"
comm.destroy()
""")


def test_callers(run_python: Run, tmp_path: Path) -> None:
    script = tmp_path / 'a "quoted" name.py'
    script.write_text(
        START.replace("\n", "; ").strip("; ").replace("\\", "")
        + """
comm.all_reduce(x)
def inner(): return comm.prepare.broadcast(x)
op = inner()
op()
pynccl.Plan([op, op])()
with pynccl.group():
    comm.reduce(x)
    comm.barrier if False else comm.all_gather(x)
comm.barrier()
win = comm.window(x)
win.close()
places = [r.at for r in comm.trace()[1:]]
lines = [int(place.rpartition(":")[2]) for place in places]
assert {place.rpartition(":")[0] for place in places} == {__file__}, places
assert lines == [2, 3, 3, 3, 8, 9, 10, 11, 12], lines
comm.destroy()
"""
    )
    run_python(args=[str(script)], PYNCCL_LIBRARY="cpu", PYNCCL_TRACE_STACKS="1")
    run_python(
        START + "comm.all_reduce(x); assert comm.trace()[1].at is None; comm.destroy()", PYNCCL_LIBRARY="cpu"
    )


# --- dumps --------------------------------------------------------------------------------------------------


def dump_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*")
    assert path.suffix == ".jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def reasons(dump: list[dict[str, Any]]) -> list[str]:
    return [reason["kind"] for reason in dump[0]["reasons"]]


def test_nothing_is_written_unasked(run_python: Run, tmp_path: Path) -> None:
    code = START + f"os.chdir({str(tmp_path)!r}); comm.all_reduce(x); comm.abort(); raise ValueError"
    run_python(code, fails=True, PYNCCL_LIBRARY="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("end", "kinds", "fails"),
    [
        ("comm.destroy()", ["exit"], False),
        ("comm.abort()", ["abort", "exit"], False),
        ("raise ValueError('bad \"sample\"')", ["exception", "exit"], True),
        ("threading.Thread(target=lambda: 1 / 0).start(); comm.destroy()", ["exception", "exit"], False),
        ("with comm: raise KeyError('x')", ["exception", "abort", "exception", "exit"], True),
    ],
)
def test_dumps_by_themselves(
    run_python: Run, tmp_path: Path, end: str, kinds: list[str], fails: bool
) -> None:
    folder = tmp_path / "new" / "folder"
    code = START + f"comm.all_reduce(x)\n{end}\n"
    run_python(code, fails=fails, PYNCCL_LIBRARY="cpu", PYNCCL_TRACE_DIR=str(folder))
    dump = dump_in(folder)
    assert reasons(dump) == kinds
    assert [line["call"] for line in dump if "call" in line][:2] == ["init", "all_reduce"]
    if "sample" in end:
        assert dump[0]["reasons"][0]["text"] == 'ValueError: bad "sample"'


def test_closed_communicators_stay_in_later_dumps(run_started: Run, tmp_path: Path) -> None:
    run_started(
        """
comm.destroy()
del comm
for n in range(1, 21):
    c = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
    for _ in range(n): c.all_reduce(x)
    c.destroy()
""",
        PYNCCL_TRACE_DIR=str(tmp_path),
    )
    heads = [line for line in dump_in(tmp_path) if "comm" in line]
    assert sorted(head["collectives"] for head in heads) == list(range(12, 21))
    assert {head["ended"] for head in heads} == {"destroy"}


STUCK = (
    """
before = []
signal.signal(signal.SIGUSR2, lambda number, frame: before.append(number))
"""
    + START
    + """
comm.all_reduce(x)
print("stuck", flush=True)
ctypes.PyDLL(None).usleep(2_000_000)  # in C, with the GIL held
ctypes.PyDLL(None).usleep(2_000_000)  # the signal ends the first one
assert before == [signal.SIGUSR2], before
comm.destroy()
"""
)


@pytest.mark.slow
def test_a_signal_dumps_while_python_is_stuck(tmp_path: Path) -> None:
    env = clean_environment() | {"PYNCCL_LIBRARY": "cpu", "PYNCCL_TRACE_SIGNAL": "USR2"}
    env |= {"PYTHONPATH": str(ROOT)}
    code = STUCK.replace("before = []", "import signal; before = []")
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGUSR2)
        while not list(tmp_path.glob("*.jsonl")) and time.monotonic() < sent + 20:
            time.sleep(0.01)
        dump = dump_in(tmp_path)
        assert process.poll() is None
        assert [line["call"] for line in dump if "call" in line] == ["init", "all_reduce"]
        assert [(r["kind"], r["text"]) for r in dump[0]["reasons"]] == [("signal", "SIGUSR2")]
        # The handler that was there before, Python's own, had its turn as well.
        assert process.wait(20) == 0


def test_a_signal_that_nobody_handled_before_does_not_kill(run_python: Run, tmp_path: Path) -> None:
    code = START + "os.kill(os.getpid(), signal.SIGUSR1); comm.all_reduce(x); comm.destroy(); print('on')"
    found = run_python(code, PYNCCL_LIBRARY="cpu", PYNCCL_TRACE_SIGNAL="10", PYNCCL_TRACE_DIR=str(tmp_path))
    assert found.stdout == "on\n"
    assert reasons(dump_in(tmp_path)) == ["signal", "exit"]


def test_dumps_during_calls(run_started: Run, tmp_path: Path) -> None:
    """Signals and another thread dump a ring that is being written and plans that come and go."""
    run_started(
        f"""
folder = {str(tmp_path)!r}
ended = threading.Event()
def dump():
    while not ended.is_set():
        pynccl.dump_trace(folder + "/asked")
        os.kill(os.getpid(), signal.SIGUSR2)
        numbers = [r.seq for r in comm.trace()]
        assert numbers == sorted(numbers), numbers
        dumps.append(len(numbers))
dumps = []
thread = threading.Thread(target=dump)
thread.start()
end = time.monotonic() + 3
while time.monotonic() < end:
    plan = pynccl.Plan([comm.prepare.all_reduce(x), comm.prepare.broadcast(x)])
    for _ in range(20): plan(); comm.all_reduce(x)
    other = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
    other.all_reduce(x); other.destroy()
ended.set()
thread.join()
assert len(dumps) > 5, dumps
comm.destroy()
""",
        PYNCCL_TRACE_SIZE="50",
        PYNCCL_TRACE_SIGNAL="USR2",
        PYNCCL_TRACE_DIR=str(tmp_path),
    )
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".jsonl"]
    for path in tmp_path.iterdir():
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_forked_child_starts_anew(run_started: Run, tmp_path: Path) -> None:
    run_started(
        """
import warnings; warnings.simplefilter("ignore")
comm.all_reduce(x)
pid = os.fork()
if not pid:
    mine = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
    mine.barrier(); mine.destroy()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
comm.destroy()
""",
        PYNCCL_TRACE_DIR=str(tmp_path),
    )
    calls = []
    for path in tmp_path.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        calls.append([line["call"] for line in lines if "call" in line])
        assert str(lines[0]["pid"]) in path.name
    assert sorted(calls) == [["init", "all_reduce", "destroy"], ["init", "barrier", "destroy"]]


def test_a_path_that_cannot_be_written() -> None:
    with pytest.raises(NotADirectoryError):
        pynccl.dump_trace(os.devnull + "/x")


# --- nobody else's files ------------------------------------------------------------------------------------

PLANTED = (
    START
    + """
from pynccl._trace import recorder
comm.all_reduce(x)
folder, victim = os.environ["PYNCCL_TRACE_DIR"], sys.argv[1]
name = f"rank0.{os.uname().nodename}.{os.getpid()}.jsonl"
(place,) = [where for where, _, files in os.walk(folder)][-1:]
# Whoever knows the names leaves links where the dump and its draft are to be.
for planted in (name, name + ".new"):
    os.symlink(victim, os.path.join(place, planted))
comm.abort()
"""
)


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_dumps_follow_no_links(run_python: Run, tmp_path: Path, mode: int) -> None:
    victim, folder, program = tmp_path / "victim", tmp_path / "traces", tmp_path / "program.py"
    victim.write_text("precious")
    folder.mkdir()
    folder.chmod(mode)
    program.write_text(PLANTED)
    run_python(args=[str(program), str(victim)], PYNCCL_LIBRARY="cpu", PYNCCL_TRACE_DIR=str(folder))
    assert victim.read_text() == "precious"
    place = folder if mode == 0o700 else folder / f"pynccl-{os.geteuid()}"
    assert place.stat().st_mode & 0o777 == 0o700
    (dump,) = place.iterdir()
    assert not dump.is_symlink() and dump.stat().st_mode & 0o777 == 0o600
    assert reasons([json.loads(dump.read_text().splitlines()[0])]) == ["abort", "exit"]
    # The folder in which the dumps have one of their own will do.
    told = run_python(args=["-m", "pynccl", "trace", str(folder)], PYNCCL_LIBRARY="cpu")
    assert "of 1 rank" in told.stdout


REPLACED = (
    START
    + """
folder, other = os.environ["PYNCCL_TRACE_DIR"], sys.argv[1]
os.rename(folder, folder + ".old")
os.symlink(other, folder)
comm.abort()
"""
)


def test_a_folder_that_became_a_link_is_left_alone(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REPLACED)
    (tmp_path / "other").mkdir()
    run_python(
        args=[str(program), str(tmp_path / "other")],
        PYNCCL_LIBRARY="cpu",
        PYNCCL_TRACE_DIR=str(tmp_path / "traces"),
    )
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_somebody_elses(run_python: Run, tmp_path: Path) -> None:
    """What stands where one's own folder would be is another user's: there is a third one."""
    planted = tmp_path / "shared" / "pynccl-0"
    planted.mkdir(parents=True)
    planted.parent.chmod(0o777)
    os.chown(planted, 12345, 12345)
    run_python(START + "comm.abort()", PYNCCL_LIBRARY="cpu", PYNCCL_TRACE_DIR=str(planted.parent))
    assert not list(planted.iterdir())
    (own,) = planted.parent.glob("pynccl-0-*")
    assert len(list(own.iterdir())) == 1
    told = run_python(args=["-m", "pynccl", "trace", str(planted.parent)], PYNCCL_LIBRARY="cpu")
    assert "of 1 rank" in told.stdout


def test_a_full_disk_is_reported_once(run_started: Run, tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
comm.abort()
"""
    done = run_started(code, PYNCCL_TRACE_DIR=str(tmp_path))
    assert done.stderr == "pynccl: the trace could not be written to PYNCCL_TRACE_DIR: File too large\n"
    assert not list(tmp_path.iterdir())


def test_dump_trace_follows_no_links(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "trace.jsonl"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="this is a symbolic link; expected a file or a folder"):
        pynccl.dump_trace(link)
    with pytest.raises(FileNotFoundError, match="/missing/dump'$"):
        pynccl.dump_trace(tmp_path / "missing" / "dump")
    assert victim.read_text() == "precious"
    path = pynccl.dump_trace(tmp_path / "new.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.jsonl", "trace.jsonl", "victim"]
    assert pynccl.dump_trace(os.devnull) == Path(os.devnull)
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("value", ["/dev/null/traces", "/proc/traces", "/proc"])
def test_a_folder_that_cannot_be(run_started: Run, value: str) -> None:
    done = run_started("", fails=True, PYNCCL_TRACE_DIR=value)
    assert "PYNCCL_TRACE_DIR cannot be used: " in done.stderr
