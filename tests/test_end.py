"""How communicators end without being asked: collection, signals, exit, fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import pynccl
from meeting import hear, tell
from pynccl import NcclInvalidUsage, testing


def collected(rank: int, nranks: int) -> None:
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
    assert sum(issubclass(w.category, ResourceWarning) for w in caught) == 2


def test_collection_is_not_collective() -> None:
    testing.run(2, collected, backend="cpu", timeout=50)


INTERRUPTED = """
import os, sys, threading, time, signal
from pathlib import Path
import numpy as np, pynccl
what, interrupted = sys.argv[1], Path(sys.argv[2])
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
        if what == "group":
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
    except KeyboardInterrupt:
        interrupted.touch()
        print("interrupted" if time.monotonic() - start < 5 else "late", flush=True)
else:
    start = time.monotonic()
    while not interrupted.exists() and time.monotonic() - start < 20:
        time.sleep(0.01)
comm.abort()
print("ended", flush=True)
"""


@pytest.mark.parametrize("what", ["group", "prepared", "plan", "synchronize", "stream", "split", "finalize"])
def test_ctrl_c(what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "pynccl", "run", "-n", "2", "--cpu", str(tmp_path / "program.py")]
    command += [what, str(tmp_path / "interrupted")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    lines = done.stdout.splitlines()
    assert "[0] interrupted" in lines, done.stdout + done.stderr
    assert "[0] ended" in lines, done.stdout + done.stderr
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
def test_exit_with_work_outstanding(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FORGETFUL)
    command = [sys.executable, "-m", "pynccl", "run", "-n", "2", "--cpu", str(tmp_path / "program.py")]
    command += [how, str(tmp_path / "called")]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode != 0) == (how == "raise"), done.stderr
    assert "Fatal" not in done.stderr
    assert time.monotonic() - start < 40


def forks(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=20) as comm:
        child = comm.split(0)
        assert child is not None
        x, y = np.ones(2), np.ones(2)
        op = comm.prepare.all_reduce(x)
        plan = pynccl.Plan([op, child.prepare.all_reduce(y)])
        calls = (
            lambda: comm.all_reduce(x),
            lambda: child.all_reduce(x),
            op,
            plan,
            comm.synchronize,
            lambda: comm.split(0),
            comm.finalize,
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
            comm.destroy()
            comm.abort()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert op() is x
        plan()
        assert (x == 4).all() and (y == 2).all()
        child.destroy()


def test_fork() -> None:
    testing.run(2, forks, backend="cpu")


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


def test_interpreter_exit_is_bounded(tmp_path: Path) -> None:
    """A rank ends in trouble without closing anything; so do the others, with their traceback."""
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    command = [sys.executable, "-m", "pynccl", "run", "-n", "3", "--cpu", "--grace", "20"]
    start = time.monotonic()
    done = subprocess.run(
        [*command[:-2], str(script), str(tmp_path / "when")], capture_output=True, text=True, timeout=50
    )
    # Which rank ends first, nothing says.
    assert done.returncode in (1, 3)
    assert time.monotonic() - start < 20
