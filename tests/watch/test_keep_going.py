"""`pynccl run --keep-going`: who goes on when ranks fail, and what the launcher's record of an end proves.

In a pid namespace of its own a rank sees no other rank's process, as in a container, and what the launcher
says of theirs is all that it has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines import ROOT, Command, environment, pynccl_run
from meeting import until
from processes import completed
from pynccl._run import ended_record
from pynccl._watch import ended
from pynccl.bootstrap import StoreServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace takes root")


def keep_going(nranks: int, script: Path, *args: str) -> Command:
    command = pynccl_run(nranks)
    return [*command, "--keep-going", str(script), *args]


def run(command: Command) -> subprocess.CompletedProcess[str]:
    return completed(command, env=_environment())


def _environment() -> dict[str, str]:
    return environment(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))


@contextmanager
def started(command: Command) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher, and leave nothing of it behind."""
    with subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# --- ranks that end at once after their error ---

ONE_STOPS = """
import os, signal, sys, time
import numpy as np, pynccl
comm = pynccl.init(timeout=2)
comm.all_reduce(np.ones(10))
if comm.rank == 2:
    stopped = os.getpid()
    if not os.fork():
        time.sleep(5)
        os.kill(stopped, signal.SIGKILL)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
try:
    comm.all_reduce(np.ones(10))
except pynccl.RankFailedError as error:
    print("names", error.ranks, flush=True)
    if sys.argv[1] == "raises":
        raise
    if sys.argv[1] == "drops":
        del comm, error
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["raises", *(pytest.param(end, marks=pytest.mark.slow) for end in ("returns", "drops"))]
)
def test_who_ends_after_its_error_is_not_blamed(end: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ONE_STOPS)
    assert sorted(run(keep_going(3, script, end)).stdout.splitlines()) == [
        f"[{rank}] names [2]" for rank in range(2)
    ]


# --- the launcher ---

OTHERS_FINISH = """
import os, sys, time
from pathlib import Path
rank, ends = int(os.environ["RANK"]), sys.argv[1:]

def pid_of(rank):
    return Path(__file__).with_name(f"pid {rank}")

def has_ended(rank):
    # The launcher, its parent, keeps it as a zombie.
    stat = Path("/proc", pid_of(rank).read_text() or "self", "stat") if pid_of(rank).exists() else None
    return stat is not None and stat.read_text().rpartition(")")[2].split()[0] == "Z"

if rank < len(ends):
    while rank and not has_ended(rank - 1):
        time.sleep(0.01)
    time.sleep(0.3 * rank)
    pid_of(rank).write_text(str(os.getpid()))
    if ends[rank] == "raises":
        raise RuntimeError("in trouble")
    if ends[rank].startswith("signal"):
        os.kill(os.getpid(), int(ends[rank][6:]))
    sys.exit(int(ends[rank]))
time.sleep(3)
print("finished", flush=True)
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (["signal9", "5"], 137, ["rank 0 was killed by SIGKILL; the other ranks go on (--keep-going)"]),
        (["5", "signal9"], 5, ["rank 0 exited with code 5; the", "rank 1 was killed by SIGKILL; the"]),
        (["raises"], 1, ["rank 0 exited with code 1; the other ranks go on", "rank 0 failed first:"]),
        (["0"], 0, []),
    ],
)
def test_the_others_finish(ends: list[str], code: int, said: list[str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(OTHERS_FINISH)
    done = run(keep_going(3, script, *ends))
    assert done.returncode == code, done.stderr
    assert done.stdout.count("finished") == 3 - len(ends)
    for line in said:
        assert f"pynccl run: {line}" in done.stderr
    last = f"pynccl run: exit code {code} of rank 0, the first to exit with a failure"
    assert done.stderr.splitlines()[-1:] == ([last] if code else [])


def test_a_rank_that_failed_alone(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys; sys.exit(3)")
    done = run(keep_going(1, script))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "pynccl run: rank 0 exited with code 3",
        "pynccl run: exit code 3 of rank 0, the first to exit with a failure",
    ]


STAYS = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit(3)
print("waits", flush=True)
time.sleep(100)
"""


def test_the_time_is_up_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(STAYS)
    start = time.monotonic()
    done = run([*pynccl_run(2), "--keep-going", "--timeout", "2", str(script)])
    assert done.returncode == 124, done.stderr
    assert "rank 0 exited with code 3; the other ranks go on" in done.stderr
    assert "--timeout has passed; still running: 1" in done.stderr
    assert time.monotonic() - start < 30


def test_a_signal_ends_who_went_on(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(STAYS)
    with started(keep_going(2, script)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "[1] waits\n"
        while "go on" not in process.stderr.readline():
            pass
        process.terminate()
        assert process.wait(30) == 3


ENDS_BY_THE_SIGNAL = """
import os, signal, sys, time

def end(number, frame):
    if os.environ["RANK"] == "0":
        sys.exit(1)
    time.sleep(1)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

signal.signal(signal.SIGTERM, end)
print("waits", flush=True)
time.sleep(100)
"""


def test_the_rank_is_named_whose_code_it_is(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENDS_BY_THE_SIGNAL)
    with started(keep_going(2, script)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] waits\n", "[1] waits\n"}
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        last = process.stderr.read().splitlines()[-1]
    assert last == "pynccl run: exit code 143 of rank 1, which SIGTERM ended"


LEAVES_A_CHILD = """
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "100"])
    open(sys.argv[1], "w").write(str(child.pid))
    os._exit(3)
path = sys.argv[1]
while not os.path.exists(path) or not open(path).read():
    time.sleep(0.01)
pid = open(path).read()
start = time.monotonic()
def runs():
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
while runs() and time.monotonic() - start < 20:
    time.sleep(0.01)
print("runs" if runs() else "ended", flush=True)
"""


def test_what_a_failed_rank_has_left_is_ended_at_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(LEAVES_A_CHILD)
    done = run(keep_going(2, script, str(tmp_path / "pid")))
    assert (done.returncode, done.stdout) == (3, "[1] ended\n"), done.stderr


# --- the launcher's record ---

# sys.argv: what happens, who has a pid namespace, who ends or is cut off, and a folder.
SURVIVES = """
import ctypes, os, signal, sys, time
from pathlib import Path


def hide():
    '''Go on as a child in a pid namespace, for which the process that the launcher has started waits.'''
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000000) == 0, os.strerror(ctypes.get_errno())
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(1, signal.SIGKILL)
    assert os.getpid() == 1


what, hidden, gone = sys.argv[1], *([int(r) for r in ranks.split(",") if r] for ranks in sys.argv[2:4])
folder = Path(sys.argv[4])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Different hosts, as far as the library knows.
os.environ["NCCL_HOSTID"] = f"host {rank}"
if rank in hidden:
    hide()

import pynccl
from meeting import failure, together
from cutting import Cutter, who

cutter = Cutter()
comm = pynccl.init(timeout=15)
if what == "split":
    # The same processes under other numbers.
    parent, comm = comm, comm.split(0, key=size - comm.rank)
    cutter.sockets.pop(0)
comm.barrier()
together(size)
if rank in gone and what in ("killed", "split", "no store", "silent store"):
    os.kill(os.getpid(), signal.SIGKILL)
if rank in gone and what == "hidden":
    # In a pid namespace the first process takes no signal from inside.
    os._exit(9)
if what in ("cut", "ends later"):
    cutter.cut(rank, (other for other in range(size) if (rank in gone) != (other in gone)))
error = failure(comm.barrier)
if rank not in gone:
    if what == "ends later":
        time.sleep(5)
    if what == "no store":
        os.environ["PYNCCL_STORE"] = "127.0.0.1:1"
    if what == "silent store":
        (folder / "asks").touch()
        while not (folder / "silent").exists():
            time.sleep(0.01)
start = time.monotonic()
try:
    comm = comm.shrink(exclude=error.ranks, abort=True)
except pynccl.RankFailedError as second:
    print(f"{str(second).split(':')[0]} in time: {time.monotonic() - start < 8}", flush=True)
    comm.abort()
    (folder / "done").touch()
    os._exit(0)
print(f"went on: {who(comm, rank)}", flush=True)
comm.destroy()
"""


def survives(tmp_path: Path, what: str, nranks: int, *, hidden: list[int], gone: list[int]) -> Command:
    script = tmp_path / "program.py"
    script.write_text(SURVIVES)
    ranks = [",".join(map(str, some)) for some in (hidden, gone)]
    return keep_going(nranks, script, what, *ranks, str(tmp_path))


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("what", ["killed", "split"])
@pytest.mark.parametrize(
    ("nranks", "survivors"), [(2, [1]), (4, [3]), pytest.param(4, [2, 3], marks=pytest.mark.slow)]
)
def test_ranks_that_cannot_be_seen_are_known_to_have_ended(
    nranks: int, survivors: list[int], what: str, tmp_path: Path
) -> None:
    """The lowest rank is among the dead, so that no half of the rest would do either."""
    gone = [rank for rank in range(nranks) if rank not in survivors]
    done = run(survives(tmp_path, what, nranks, hidden=survivors, gone=gone))
    assert done.returncode == 137, done.stdout + done.stderr
    order = survivors if what == "killed" else survivors[::-1]
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] went on: {order}" for rank in survivors]


@needs_root
def test_the_end_of_another_process_proves_nothing(tmp_path: Path) -> None:
    """The launcher has started only the parent of the rank that ends."""
    done = run(survives(tmp_path, "hidden", 2, hidden=[0], gone=[0]))
    assert done.stdout == "[1] partition in time: True\n", done.stderr
    assert done.returncode == 9


@needs_root
@pytest.mark.parametrize("what", ["cut", pytest.param("ends later", marks=pytest.mark.slow)])
def test_a_rank_that_lives_has_not_ended(what: str, tmp_path: Path) -> None:
    """It goes on by itself; that it has ended when the other one asks proves nothing either."""
    done = run(survives(tmp_path, what, 2, hidden=[1], gone=[0]))
    assert sorted(done.stdout.splitlines()) == ["[0] went on: [0]", "[1] partition in time: True"], (
        done.stderr
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@needs_root
def test_the_store_is_gone(tmp_path: Path) -> None:
    done = run(survives(tmp_path, "no store", 2, hidden=[1], gone=[0]))
    assert done.stdout == "[1] partition in time: True\n", done.stderr


@pytest.mark.slow
@needs_root
def test_the_launcher_is_stopped(tmp_path: Path) -> None:
    command = survives(tmp_path, "silent store", 2, hidden=[1], gone=[0])
    with started(command) as process:
        until((tmp_path / "asks").exists)
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "silent").touch()
        until((tmp_path / "done").exists)
        process.send_signal(signal.SIGCONT)
        out, errors = process.communicate(timeout=30)
    assert "[1] partition in time: True" in out, errors


ASKS = """
import sys, time, pynccl
from pynccl._watch import ended
assert "pynccl.bootstrap" not in sys.modules
space, start = bytes.fromhex(sys.argv[1]), int(sys.argv[3])
known, other = (ended.Process(space, int(pid), start) for pid in (sys.argv[2], "1"))
for _ in range(2):
    record = ended.EndedRecord()
    for rank, at in record.ends({3: known, 5: other}, time.monotonic() + 20):
        print(rank, at)
    record.pause()
"""


@pytest.mark.parametrize("told", [True, False])
def test_who_has_never_looked_for_other_ranks_asks_too(told: bool) -> None:
    asked = ended.process(os.getpid())
    before = time.monotonic_ns()
    with StoreServer(secret="") as server:
        ended_record.tell(server.address, server.secret, server.job, asked)
        after = time.monotonic_ns()
        arguments = [asked.space.hex(), str(asked.pid), str(asked.start)]
        env = _environment() | {"PYNCCL_STORE": server.address, "PYNCCL_KEEP_GOING": str(int(told))}
        command = [sys.executable, "-c", ASKS, *arguments]
        done = completed(command, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split() for line in done.stdout.splitlines()]
    assert [rank for rank, _ in found] == (["3", "3"] if told else [])
    assert all(before <= int(at) <= after for _, at in found)
