"""How communicators end without being asked: collection, signals, exit, fork."""

from __future__ import annotations

import gc
import inspect
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pynccl
from conftest import Run, Script
from engines import (
    MOST_SECONDS,
    RETURNS,
    RUNS,
    Command,
    end_well,
    open_mpi,
    pynccl_run,
    torchrun,
)
from meeting import hear, state, tell
from parameters import slow_except
from processes import completed
from pynccl import NcclError, NcclInvalidUsage, NcclRemoteError, RankFailedError, testing
from ranks import on_ranks


@on_ranks(2, timeout=50)
def test_collection_is_not_collective(rank: int, nranks: int) -> None:
    made = f"{__file__}:{inspect.currentframe().f_lineno + 1}"  # type: ignore[union-attr]
    comm = pynccl.init(timeout=20)
    child = comm.split(0)
    stream = pynccl.Stream()
    comm.barrier()
    if rank == 0:
        comm.all_reduce(np.zeros(100), stream=stream)
        tell("called")
    else:
        # The end of this process would reach rank 0 before its call.
        hear("called")
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm, child
        gc.collect()
        # A warning that was caught holds the child, which holds its parent.
        for warning in caught:
            warning.source = None
        gc.collect()
    assert time.monotonic() - start < 10
    said = [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
    assert len(said) == 2
    it = f"<pynccl.Communicator rank {rank} of {nranks} on device {rank}>"
    assert f"{it}, made at {made}, was never destroyed or aborted" in said


@on_ranks(2, timeout=50)
def test_a_communicator_with_a_window_needs_no_collector(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=20)
    window = comm.window(pynccl.empty(100, np.float32))
    comm.barrier()
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="was never destroyed or aborted"):
            del window, comm
    finally:
        gc.enable()


# The ways to wait, each with a communicator of its own.
INTERRUPTED = """
import os, sys, threading, time, signal
from pathlib import Path
import numpy as np, pynccl

def wait(what, comm, data, op, plan, stream):
    if what == "call":
        comm.all_reduce(data)
    elif what == "barrier":
        comm.barrier()
    elif what == "group":
        with pynccl.group():
            comm.all_reduce(data)
            comm.all_reduce(data)
    elif what == "prepared":
        op()
    elif what == "plan":
        plan()
    elif what == "synchronize":
        comm.all_reduce(data, stream=stream)
        comm.synchronize()
    elif what == "stream":
        comm.all_reduce(data, stream=stream)
        stream.synchronize()
    elif what == "split":
        comm.split(0)
    elif what == "finalize":
        comm.all_reduce(data, stream=stream)
        comm.finalize()

for what in sys.argv[2:]:
    interrupted = Path(sys.argv[1], what)
    comm = pynccl.init(timeout=25)
    data = np.zeros(10)
    comm.barrier()
    if comm.rank == 0:
        op = comm.prepare.all_reduce(data)
        plan = pynccl.Plan([op, op])
        stream = pynccl.Stream()
        start = time.monotonic()
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            wait(what, comm, data, op, plan, stream)
        except KeyboardInterrupt:
            interrupted.touch()
            print(what, "interrupted" if time.monotonic() - start < 5 else "late", flush=True)
    else:
        start = time.monotonic()
        while not interrupted.exists() and time.monotonic() - start < 20:
            time.sleep(0.01)
    comm.abort()
    print(what, "ended", flush=True)
"""
WAITS = ["call", "barrier", "group", "prepared", "plan", "synchronize", "stream", "split", "finalize"]


def test_ctrl_c(run_program: Run, tmp_path: Path) -> None:
    done = run_program(INTERRUPTED, 2, tmp_path, *WAITS)
    mine = [line for line in done.stdout.splitlines() if line.startswith("[0] ")]
    expected = [f"[0] {what} {state}" for what in WAITS for state in ("interrupted", "ended")]
    assert mine == expected, done.stdout + done.stderr
    assert done.returncode == 0


FORGETFUL = """
import sys, time, numpy as np, pynccl
from pathlib import Path
called = Path(sys.argv[2])
comm = pynccl.init(timeout=25)
child = comm.split(0)
stream = pynccl.Stream()
comm.barrier()
if comm.rank == 0:
    comm.all_reduce(np.zeros(4), stream=stream)
    child.all_reduce(np.zeros(4), stream=stream)
    called.touch()
else:
    while not called.exists():
        time.sleep(0.01)
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", "raise"])
def test_exit_with_work_outstanding(how: str, run_program: Run, tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_program(FORGETFUL, 2, how, tmp_path / "called")
    assert (done.returncode != 0) == (how == "raise"), done.stderr
    assert "Fatal" not in done.stderr
    assert time.monotonic() - start < 40


@on_ranks(2)
def test_fork(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as comm:
        child = comm.split(0)
        assert child is not None
        x, y = np.ones(2), np.ones(2)
        op = comm.prepare.all_reduce(x)
        plan = pynccl.Plan([op, child.prepare.all_reduce(y)])
        work = child.recv(np.zeros(3), 1, wait=False) if rank == 0 else None
        calls = (
            lambda: comm.all_reduce(x),
            lambda: child.all_reduce(x),
            op,
            plan,
            comm.synchronize,
            lambda: comm.split(0),
            comm.barrier,
            comm.finalize,
            op if work is None else work.wait,
        )
        pid = os.fork()
        if pid == 0:
            code = 0
            for index, call in enumerate(calls, 1):
                try:
                    call()
                    code = index
                except NcclInvalidUsage as error:
                    if "belongs to the parent of this forked process" not in str(error):
                        code = 100 + index
                except BaseException:
                    code = 50 + index
            code = code if comm.closed else 99
            comm.destroy()
            comm.abort()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        child.send(np.ones(3), 0) if work is None else work.wait()
        assert op() is x
        plan()
        assert (x == 4).all() and (y == 2).all()
        child.destroy()


EXITS = """
import os, sys, time
import numpy as np, pynccl
comm = pynccl.init(timeout=10)
comm.barrier()
if comm.rank == 0:
    open(sys.argv[1], "w").write(str(time.time()))
    raise SystemExit(3)
comm.all_reduce(np.ones(3))
"""


def test_interpreter_exit_is_bounded(run_program: Run, tmp_path: Path) -> None:
    """A rank ends in trouble without closing anything; so do the others, with their traceback."""
    start = time.monotonic()
    done = run_program(EXITS, 3, tmp_path / "when")
    # Which rank ends first, nothing says.
    assert done.returncode in (1, 3)
    assert time.monotonic() - start < 20


WAYS = [
    "plain",
    "barrier",
    "timeout",
    "stream",
    "split",
    "messages",
    "broadcast",
    "collected",
    "exit",
    "exit in with",
]
QUICK_WAYS = ("plain", "barrier", "timeout", "exit in with")


EXITS_ALONE = """
import sys, numpy as np, pynccl
with pynccl.init() as comm:
    x = np.ones(1 << 18)
    comm.all_reduce(x)
    if comm.rank == 1:
        sys.exit(0)
    try:
        comm.all_reduce(x)
    except pynccl.NcclError as error:
        print("for rank 1, which has" in str(error), flush=True)
        sys.exit(0)
"""


def test_exits_inside_a_with_block_raise_nothing(run_program: Run) -> None:
    """Neither that of a rank which others still need, nor those of ranks that have handled its absence."""
    done = run_program(EXITS_ALONE, 3, options=["--no-tag"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


# The same through the torch.distributed backend; torch's store ends with rank 0.
TORCH_RETURNS = """
import sys, torch, torch.distributed as dist, pynccl.torch
dist.init_process_group("pynccl")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((100_000,), rank + 1.0)
dist.all_reduce(x)
assert (x == sum(range(1, size + 1))).all()
if sys.argv[1] == "barrier":
    dist.barrier()
# A callback may still run Python at the end; rank 0 ends without a wait, and its part is done all the same.
work = dist.all_reduce(x, async_op=True)
work.get_future().then(lambda future: sum(range(100_000)))
if rank:
    work.wait()
print("right", flush=True)
"""


# How ranks are started, and what they run.
ENGINES: dict[str, tuple[Callable[[int], Command], str]] = {
    "pynccl run": (pynccl_run, RETURNS),
    "mpirun": (lambda nranks: [*open_mpi(nranks), sys.executable], RETURNS),
    "torchrun": (torchrun, RETURNS),
    "torch backend": (pynccl_run, TORCH_RETURNS),
    "torch backend under torchrun": (torchrun, TORCH_RETURNS),
}


def returns(engine: str, how: str, nranks: int, script: Path, runs: int) -> None:
    launch, program = ENGINES[engine]
    script.write_text(program)
    end_well([*launch(nranks), str(script), how], nranks, runs)


@pytest.mark.parametrize("how", slow_except(QUICK_WAYS, WAYS))
def test_a_program_that_returns_ends_well(how: str, tmp_path: Path) -> None:
    returns("pynccl run", how, 4, tmp_path / "returns.py", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_backend")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["plain", "barrier"])
@pytest.mark.parametrize("engine", list(ENGINES)[1:])
def test_a_program_that_returns_ends_well_under(engine: str, how: str, tmp_path: Path) -> None:
    returns(engine, how, 3, tmp_path / "returns.py", 1)


@pytest.mark.full
@pytest.mark.usefixtures("torch_backend")
@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("how", ["plain", "barrier"])
@pytest.mark.parametrize("nranks", [2, 4, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_200_programs_that_return_end_well(engine: str, nranks: int, how: str, tmp_path: Path) -> None:
    returns(engine, how, nranks, tmp_path / "returns.py", RUNS)


TORCH_FAILS = """
import atexit, time
# The ranks that it leaves alone exit in this time.
atexit.register(time.sleep, 0.5)
import torch, torch.distributed as dist, pynccl.torch
dist.init_process_group("pynccl")
x = torch.ones(3)
dist.all_reduce(x)
if dist.get_rank() == 1:
    raise RuntimeError("the reason")
atexit.unregister(time.sleep)
dist.all_reduce(x)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("torch_backend")
@pytest.mark.timeout(600)
def test_the_rank_of_a_torch_group_that_failed_first(run_program: Run) -> None:
    done = run_program(TORCH_FAILS, 3)
    assert "pynccl run: rank 1 failed first:" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: the reason"), done.stderr


# A rank drops its communicator, a local variable, and goes on with other work.
DROPS = """
import sys, time, numpy as np, pynccl
x = np.ones(4)
def main():
    comm = pynccl.init(timeout=10)
    comm.all_reduce(x)
    if comm.rank == 1:
        return
    for _ in range(10):
        comm.send(x, 2) if comm.rank == 0 else comm.recv(x, 0)
        time.sleep(0.05)
    print("fine", flush=True)
    try:
        comm.all_reduce(x)
    except pynccl.RankFailedError as error:
        print(error.ranks, error, flush=True)
main()
time.sleep(1.5)
"""


def test_a_rank_that_drops_its_communicator(run_program: Run) -> None:
    done = run_program(DROPS, 3, options=["--no-tag", "--keep-going"])
    assert done.stdout.count("fine") == 2, done.stderr
    # Or in the words of a rank whose time-out passes first.
    assert done.stdout.count("[1] ") == done.stdout.count(" left without closing its communicator") == 2


IN_A_THREAD = """
import sys, threading, time, numpy as np, pynccl
comm = pynccl.init(timeout=30 if sys.argv[1] == "timeout" else None)
comm.barrier()
x = np.ones(100_000)
if comm.rank == 0:
    # In the call when the main thread ends.
    threading.Thread(target=comm.all_reduce, args=(x,), daemon=True).start()
    time.sleep(0.3)
    sys.exit(0)
time.sleep(1)
comm.all_reduce(x)
assert (x == comm.size).all()
print("right", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "timeout"])
def test_a_call_of_a_daemon_thread_is_completed(how: str, run_program: Run) -> None:
    done = run_program(IN_A_THREAD, 3, how)
    assert (done.returncode, done.stdout.count("right"), done.stderr) == (0, 2, "")


def a_rank_of_a_pool(rank: int, nranks: int, id_bytes: bytes) -> None:
    comm = pynccl.Communicator(nranks, pynccl.UniqueId(id_bytes), rank)
    x = np.full(100_000, 1.0)
    comm.all_reduce(x)
    comm.broadcast(x, root=0)
    assert (x == nranks).all()


POOL = """
import multiprocessing, sys
import pynccl, test_end
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    place = 3, bytes(pynccl.get_unique_id())
    ranks = [context.Process(target=test_end.a_rank_of_a_pool, args=(r, *place)) for r in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(40)
    sys.exit(any(rank.exitcode for rank in ranks))
"""


@pytest.mark.parametrize("how", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_processes_of_multiprocessing_end_well(how: str, script: Script) -> None:
    """They end without atexit where they were forked."""
    environment = {**os.environ, "PYNCCL_LIBRARY": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script(POOL), how]
    done = completed(command, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


LEAVES = """
import os, signal, sys, time, numpy as np, pynccl
how, left = sys.argv[1], sys.argv[2]
# The launcher ends who is left as soon as one has failed.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
comm = pynccl.init(timeout=20)
comm.barrier()
if comm.rank == 1:
    # What it has sent before its end is received.
    comm.send(np.arange(3.0), 0, stream=pynccl.Stream())
    open(left, "w").close()
    if how == "raises":
        raise RuntimeError("in trouble")
    if how == "_exit":
        os._exit(0)
else:
    while not os.path.exists(left):
        time.sleep(0.01)
    if how == "returns":
        time.sleep(1)
    try:
        if how == "returns":
            x = np.zeros(3)
            comm.recv(x, 1)
            assert (x == np.arange(3.0)).all()
        start = time.monotonic()
        comm.all_reduce(np.ones(3))
    except pynccl.NcclError as error:
        print(f"{type(error).__name__} after {time.monotonic() - start < 10}: {error}", flush=True)
    comm.abort()
"""


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("returns", "RankFailedError", "rank 1 left without closing its communicator: its program ended"),
        ("raises", "RankFailedError", "rank 1 aborted its communicator"),
        ("_exit", "RankFailedError", "rank 1 died, or exited without closing its communicator"),
    ],
)
def test_who_needs_a_call_of_a_rank_that_has_ended_is_told(
    how: str, error: str, text: str, run_program: Run, tmp_path: Path
) -> None:
    done = run_program(LEAVES, 2, how, tmp_path / "left")
    assert f"[0] {error} after True: " in done.stdout, done.stdout + done.stderr
    assert text in done.stdout
    assert "rank 1" in done.stdout


UNHEARD = """
import sys, numpy as np, pynccl
how, end = sys.argv[1:]
comm = pynccl.init(timeout=20)
x = np.ones(2 + comm.rank)
if how == "work":
    comm.all_reduce(x, wait=False)
else:
    comm.all_reduce(x, stream=pynccl.Stream())
if end == "destroy":
    try:
        comm.destroy()
    except pynccl.CollectiveMismatchError as error:
        print("destroy:", error)
"""


@pytest.mark.parametrize("how", ["work", "stream"])
@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_call_that_fails_unheard_is_told_of_at_the_end(how: str, end: str, run_program: Run) -> None:
    done = run_program(UNHEARD, 2, how, end)
    told = done.stdout if end == "destroy" else done.stderr
    begin = "destroy: " if end == "destroy" else "pynccl: a call that nobody waited for has failed: "
    for rank in range(2):
        (line,) = (line for line in told.splitlines() if line.startswith(f"[{rank}] {begin}"))
        assert "AllReduce(count 2, float64, sum)" in line and "AllReduce(count 3, float64, sum)" in line


UNFINISHED = """
import threading, time
import pynccl
from pynccl import capi

begun = threading.Event()


def slow(*_):
    begun.set()
    time.sleep(60)


capi.ncclCommUserRank = slow
threading.Thread(target=pynccl.init, kwargs={"timeout": 20}, daemon=True).start()
assert begun.wait(20)
"""


def test_an_exit_while_a_thread_creates_a_communicator(run_program: Run) -> None:
    done = run_program(UNFINISHED, 1)
    assert done.returncode == 0 and done.stderr == "", done.stderr


HEARD = """
import sys, numpy as np, pynccl
comm = pynccl.init(timeout=20)
try:
    if sys.argv[1] == "work":
        comm.all_reduce(np.ones(2 + comm.rank), wait=False).wait()
    else:
        # Too large to be sent before the other rank receives: rank 0 would end without an error.
        n = 1 << 19
        comm.recv(np.ones(n), 0, wait=False) if comm.rank else comm.send(np.ones(2 * n), 1, wait=False)
        comm.finalize()
except pynccl.CollectiveMismatchError:
    print("heard")
"""


@pytest.mark.parametrize("how", ["work", "finalize"])
def test_an_error_that_the_program_has_heard_is_not_told_again(how: str, run_program: Run) -> None:
    done = run_program(HEARD, 2, how)
    assert done.stdout.count("heard") == 2, done.stdout
    assert "nobody waited for" not in done.stderr


LAST_MESSAGE = """
import numpy as np, pynccl
comm = pynccl.init(timeout=20)
if comm.rank == 0:
    comm.send(np.ones(4), 1)
else:
    comm.recv(np.ones(5), 0)
"""


def test_the_last_message_of_a_program_that_has_ended_differs(run_program: Run) -> None:
    done = run_program(LAST_MESSAGE, 2)
    assert "[1] pynccl._errors.CollectiveMismatchError: " in done.stderr, done.stderr
    assert "Send(count 4, float64)" in done.stderr and "Recv(count 5, float64)" in done.stderr


def shrinks_at_once(rank: int, nranks: int, abort: bool) -> list[int]:
    comm = pynccl.init(timeout=20)
    pids = np.zeros(nranks, dtype=np.int64)
    comm.all_gather(np.array([os.getpid()]), pids)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    # A busy machine may let the others finish the shrink before rank 2 kills itself.
    while state(int(pids[2])) not in "ZX":
        time.sleep(1e-4)
    try:
        return list(range(comm.shrink(exclude=[2], abort=abort).size))
    except pynccl.RankFailedError as error:
        return error.ranks


def test_a_shrink_right_after_a_death() -> None:
    """Without abort=True it needs a sound communicator, and says who has failed."""
    assert testing.run(3, shrinks_at_once, False, backend="cpu", check=False)[:2] == [[2], [2]]
    assert testing.run(3, shrinks_at_once, True, backend="cpu", check=False)[:2] == [[0, 1]] * 2


def sends_and_dies(rank: int, nranks: int, how: str, hosts: int) -> list[bool]:
    os.environ["NCCL_HOSTID"] = f"host {rank % hosts}"
    comm = pynccl.init()
    comm.barrier()
    if rank == 0:
        for i in range(3):
            comm.send(np.full(4, i), 1)
        tell("sent")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.abort()
        return []
    hear("sent")
    # Long after the end of the connection.
    time.sleep(1.5)
    received = []
    for i in range(3):
        x = np.zeros(4, int)
        comm.recv(x, 0)
        received.append(bool((x == i).all()))
    for refused in (lambda: comm.recv(x, 0), lambda: comm.send(x, 0), comm.barrier):
        with pytest.raises(NcclRemoteError, match="rank 0"):
            refused()
    return received


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("how", ["killed", "aborts"])
def test_what_a_rank_sent_before_it_died_is_received(how: str, hosts: int) -> None:
    _, received = testing.run(2, sends_and_dies, how, hosts, backend="cpu", check=False)
    assert received == [True] * 3


def test_the_end_without_destroy_is_warned_of(run_program: Run) -> None:
    program = "import pynccl\ncomm = pynccl.init()\ncomm.barrier()\n"
    done = run_program(program, 2, PYTHONWARNINGS="default::ResourceWarning")
    assert done.returncode == 0
    assert done.stderr.count("was never destroyed or aborted") == 2, done.stderr


LEAVES_WITHOUT_ITS_FILE = """
import os, time, numpy as np, pynccl
comm = pynccl.init(timeout=20)
x = np.ones(200_000)
if comm.rank == 1:
    for fd in range(3, 100):
        if os.path.realpath(f"/proc/self/fd/{fd}").startswith(os.environ["PYNCCL_STACKS_DIR"]):
            os.close(fd)
    work = comm.all_reduce(x, wait=False)
else:
    time.sleep(1)
    comm.all_reduce(x)
    assert (x == comm.size).all()
    comm.destroy()
"""


def test_a_rank_that_cannot_tell_the_launcher_leaves_well(run_program: Run) -> None:
    done = run_program(LEAVES_WITHOUT_ITS_FILE, 3)
    assert (done.returncode, done.stderr) == (0, "")


def drop_until_no_descriptor_is_left(rank: int, nranks: int) -> str:
    base = pynccl.init()
    if rank == 0:
        descriptors = len(os.listdir("/proc/self/fd")) + 30
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    for _ in range(60):
        try:
            base.split(0).barrier()
        except NcclError as error:
            return str(error)
        gc.collect()
    return "no error"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_error_counts_the_communicators_that_were_dropped() -> None:
    text, _ = testing.run(2, drop_until_no_descriptor_is_left, backend="cpu")
    assert "Too many open files" in text
    dropped = re.search(r"(\d+) communicators were garbage-collected without destroy", text)
    assert dropped is not None and 5 < int(dropped[1]) < 31, text


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("call", ["all_reduce", "split", "recv"])
@on_ranks(3)
def test_a_dropped_communicator_is_noticed(rank: int, nranks: int, call: str, timeout: float | None) -> None:
    """Its process goes on: what it has issued completes, and a wait for more ends soon."""
    comm = pynccl.init(timeout=timeout)
    x, stream = np.full(100_000, rank + 1.0), pynccl.Stream()
    if rank == 0:
        time.sleep(0.5)
    comm.all_reduce(x, stream=stream)
    if rank == 1:
        del comm
        gc.collect()
        stream.synchronize()
        assert (x == 6).all()
        hear("failed 0")
        hear("failed 2")
        return
    stream.synchronize()
    assert (x == 6).all()
    begin = time.monotonic()
    with pytest.raises(NcclError) as caught:
        {
            "all_reduce": lambda: comm.all_reduce(x),
            "split": lambda: comm.split(0),
            "recv": lambda: comm.recv(x, 1),
        }[call]()
    assert time.monotonic() - begin < 30
    text = str(caught.value)
    if timeout is None:
        assert "for rank 1, which has finalized, destroyed or dropped its communicator" in text
    else:
        assert isinstance(caught.value, RankFailedError) and caught.value.ranks == [1]
        assert "rank 1 left without closing its communicator: its program ended, or dropped it" in text
    tell(f"failed {rank}")
    comm.abort()


# Ctrl-C while the exit of rank 0 completes what it has issued on two communicators.
INTERRUPTED_AT_EXIT = """
import signal, time, numpy as np, pynccl
comm = pynccl.init(timeout=30)
child = comm.split(0)
comm.barrier()
if comm.rank == 0:
    works = [one.recv(np.zeros(4), 1, wait=False) for one in (comm, child)]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1)
else:
    signal.pause()
"""


def test_an_interrupt_of_the_exit(run_program: Run) -> None:
    done = run_program(INTERRUPTED_AT_EXIT, 2)
    assert done.returncode == 130
    assert "rank 0 was killed by SIGINT" in done.stderr
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr


LEAVES_AN_INTERRUPTED_CALL = """
import atexit, os, signal, sys, threading, time
done = sys.argv[1]
# Exit handlers run in reverse order: this one after pynccl's.
atexit.register(lambda: open(done, "w").close())
import pynccl
comm = pynccl.init(config={"blocking": 0})
if comm.rank == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        comm.split(0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    until = time.monotonic() + 20
    while not os.path.exists(done) and time.monotonic() < until:
        time.sleep(0.01)
    print("rank 1 has left" if os.path.exists(done) else "rank 1 waits", flush=True)
"""


def test_the_exit_does_not_wait_for_an_interrupted_call(run_program: Run, tmp_path: Path) -> None:
    """The other rank never makes the call that Ctrl-C has interrupted."""
    done = run_program(LEAVES_AN_INTERRUPTED_CALL, 2, tmp_path / "done", PYNCCL_EXIT_TIMEOUT="1")
    assert "[1] interrupted" in done.stdout and "[0] rank 1 has left" in done.stdout, done
