"""pynccl.testing.run: results and failures come back, and nothing stays behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pynccl
from meeting import until, until_gone
from processes import completed
from pynccl import testing

# The start itself is what is tested here (forked_ranks.py).
NEW_INTERPRETERS = True


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """A rank that imports the script does not start ranks again."""
    script = tmp_path / "unguarded.py"
    script.write_text("from pynccl.testing import run\ndef f(r, n): return r\nprint(run(2, f))\n")
    ended = completed([sys.executable, str(script)], timeout=60)
    assert ended.returncode
    assert "RuntimeError: pynccl.testing.run is called while a rank imports" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr


class Odd(Exception):
    """Does not survive pickling."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


def places(rank: int, nranks: int, *args: object) -> tuple[object, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYNCCL_LIBRARY", "MARK")
    return rank, nranks, args, *(os.environ.get(name) for name in names)


def fail_on_last(rank: int, nranks: int) -> int:
    if rank == nranks - 1:
        raise KeyError("nothing under this key")
    return rank


def fail_oddly(rank: int, nranks: int) -> None:
    raise Odd(rank, nranks)


def die(rank: int, nranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def crash(rank: int, nranks: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(rank: int, nranks: int) -> None:
    os._exit(0)


def sleep_here(rank: int, nranks: int) -> int:
    if rank == 0:
        return 5
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    return 6


def leave_a_process(rank: int, nranks: int) -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def unpicklable(rank: int, nranks: int) -> object:
    return lambda: None


class InAnotherProcess:
    """A value that only the process that made it can unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return look_up, (os.getpid(),)


def look_up(pid: int) -> int:
    return {os.getpid(): 1}[pid]


def unpicklable_here(rank: int, nranks: int) -> object:
    return InAnotherProcess()


def test_results_in_order_and_environment() -> None:
    got = testing.run(3, places, "x", 2, backend="cpu", env={"MARK": "m"})
    assert got == [(r, 3, ("x", 2), str(r), "3", str(r), "3", "cpu", "m") for r in range(3)]


def master(rank: int, nranks: int) -> tuple[str, str]:
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_the_address_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store takes it; an outer launcher's would be another job's."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    (first,) = set(testing.run(2, master))
    assert first[0] == "127.0.0.1" and int(first[1]) > 1
    assert testing.run(1, master, env={"MASTER_ADDR": "localhost"})[0][0] == "localhost"


def test_failure_carries_traceback_and_cause() -> None:
    with pytest.raises(testing.RankError, match="nothing under this key") as caught:
        testing.run(3, fail_on_last, backend="cpu")
    assert caught.value.ranks == [2]
    assert isinstance(caught.value.errors[2], KeyError)
    assert caught.value.__cause__ is caught.value.errors[2]
    assert "in fail_on_last" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_without_check_failures_are_results() -> None:
    got = testing.run(2, fail_on_last, backend="cpu", check=False)
    assert got[0] == 0
    assert isinstance(got[1], testing.RankError)
    assert got[1].ranks == [1]


def test_exception_that_does_not_pickle() -> None:
    with pytest.raises(testing.RankError, match="0 is not 1") as caught:
        testing.run(1, fail_oddly, backend="cpu")
    assert caught.value.errors == {0: None}


def test_killed_rank_ends_the_others_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(testing.RankError, match="rank 1 of 3 was killed by SIGKILL") as caught:
        testing.run(3, die, backend="cpu")
    assert time.monotonic() - start < 40
    assert caught.value.ranks == [1]


def test_crash_shows_the_python_stack() -> None:
    with pytest.raises(testing.RankError, match="SIGSEGV") as caught:
        testing.run(1, crash, backend="cpu")
    assert "in crash" in str(caught.value)


def test_exit_without_result_is_a_failure() -> None:
    with pytest.raises(testing.RankError, match="without a result"):
        testing.run(1, leave, backend="cpu")


def leave_before_init(rank: int, nranks: int, how: str) -> None:
    if rank != 1:
        pynccl.init(timeout=60)
    elif how == "raises":
        raise KeyError("nothing under this key")
    elif how == "exits":
        os._exit(3)


@pytest.mark.parametrize(
    ("how", "end"),
    [("returns", "exited with code 0"), ("raises", "exited with code 1"), ("exits", "exited with code 3")],
)
def test_without_check_a_rank_that_ends_without_init_is_named(how: str, end: str) -> None:
    others = testing.run(3, leave_before_init, how, check=False, timeout=50)[::2]
    assert all(f"rank 1 of 3 {end}, without this call of pynccl.init" in str(error) for error in others)


def test_a_rank_that_returns_without_init_is_named() -> None:
    with pytest.raises(
        testing.RankError, match="rank 1 of 3 exited with code 0, without this call"
    ) as failed:
        testing.run(3, leave_before_init, "returns", timeout=50)
    assert failed.value.ranks == [0, 2]


def test_timeout_shows_where_the_ranks_are() -> None:
    start = time.monotonic()
    with pytest.raises(testing.RankTimeout, match=r"ranks \[1\] of 2 were still running after 6 s") as caught:
        testing.run(2, sleep_here, backend="cpu", timeout=6)
    assert time.monotonic() - start < 30
    assert "in sleep_here" in str(caught.value)
    # It would read as a crash.
    assert "Fatal Python error" not in str(caught.value)
    assert caught.value.ranks == [1]
    assert isinstance(caught.value, TimeoutError)


def test_timeout_before_the_ranks_have_started() -> None:
    with pytest.raises(testing.RankTimeout, match=r"ranks \[0, 1\] of 2 were still running after 0.001 s"):
        testing.run(2, sleep_here, backend="cpu", timeout=0.001)


def test_a_rank_that_ends_when_the_time_is_up(tmp_path: Path) -> None:
    class Ended:
        def poll(self) -> int:
            return 0

    (tmp_path / "0.result").write_bytes(pickle.dumps((True, pickle.dumps(5), "")))
    for check in (True, False):
        job = testing._Job(tmp_path, 1, lambda rank, how: None)
        job.children.append(Ended())  # type: ignore[arg-type]
        assert job.results(1, check) == [5]


def test_descendants_are_killed() -> None:
    pids = testing.run(2, leave_a_process, backend="cpu")
    until_gone(pids)


def test_ranks_die_with_the_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\n"
        "from pynccl import testing\n"
        "def wait(rank, nranks, folder):\n"
        "    open(f'{folder}/{rank}.pid', 'w').write(str(os.getpid()))\n"
        "    time.sleep(60 if sys.argv[2:] == [] else 0)\n"
        "if __name__ == '__main__':\n"
        "    testing.run(2, wait, sys.argv[1], backend='cpu')\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    try:
        until(lambda: sum(path.stat().st_size > 0 for path in tmp_path.glob("*.pid")) == 2)
    finally:
        parent.kill()
        parent.wait()
    until_gone([int(path.read_text()) for path in tmp_path.glob("*.pid")])
    left = list(tmp_path.glob("pynccl-testing-*"))
    assert len(left) == 1
    command = [sys.executable, str(script), str(tmp_path), "0"]
    subprocess.run(command, env=environment, check=True, timeout=30)
    assert not list(tmp_path.glob("pynccl-testing-*"))


@pytest.mark.parametrize(
    ("nranks", "expected"), [(0, "1 or more"), (-1, "1 or more"), (10**7, "at most 1024 proc")]
)
def test_number_of_ranks(nranks: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"nranks is {nranks}; expected {expected}"):
        testing.run(nranks, places)


def test_function_must_be_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="cannot find by name in a file; .*pip install cloudpickle"):
        testing.run(1, lambda rank, nranks: None)


def test_functions_without_a_name() -> None:
    factor = 10
    assert testing.run(2, lambda rank, nranks, x: factor * rank + x, 3, backend="cpu") == [3, 13]


WRONG = [
    ({"timeout": float("nan")}, "timeout is nan; expected a positive number"),
    ({"env": {"A": 1}}, r"env\['A'\] is 1; expected names and values of type str"),
    ({"env": {"RANK": "1"}}, r"env\['RANK'\] is '1'; expected other names, since each rank has its own"),
    ({"env": {"A=B": "1"}}, r"env\['A=B'\] is '1'; expected a name, not empty and without '='"),
    ({"env": {"": "1"}}, r"env\[''\] is '1'; expected a name, not empty"),
    ({"env": {"A": "\0"}}, r"env\['A'\] is '\\x00'; expected .* no NULs"),
    ({"env": "x"}, "env is 'x'; expected a dict of names and values"),
    ({"fn": 3}, "fn is 3; expected a function"),
    ({"check": "no"}, "check is 'no'; expected True or False"),
    ({"backend": None}, "backend is None; expected 'auto', 'cpu' or the path of a libnccl"),
    ({"backend": "gpu"}, "backend is 'gpu', which is not a file; expected 'auto', 'cpu' or the path"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        testing.run(2, **{"fn": places, **wrong})


def test_an_argument_that_cannot_be_pickled() -> None:
    with (
        pytest.raises(TypeError, match=r"^args\[1\] is <.*TextIO.*; expected an argument .*pickled: "),
        open(os.devnull) as f,
    ):
        testing.run(2, places, 1, f)


GUARDED = """
import sys
from pynccl import testing

if __name__ == "__main__":

    def work(rank, nranks):
        return rank

    print(testing.run(2, work, backend="cpu"))
    sys.modules["cloudpickle"] = None
    testing.run(1, work, backend="cpu")
"""


def test_a_function_under_the_guard(tmp_path: Path) -> None:
    """The ranks do not run its definition."""
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)
    done = completed([sys.executable, script])
    assert done.stdout == "[0, 1]\n"
    assert "guarded.py does not define work when a rank runs it" in done.stderr


INTERACTIVE = """
import sys
import numpy as np
import pynccl, pynccl.testing
from dataclasses import dataclass

@dataclass
class Point:
    x: float

class Odd(Exception):
    pass

def double(x):
    return 2 * x

def work(rank, nranks, point):
    with pynccl.init(timeout=30) as comm:
        total = comm.all_reduce(np.full(2, point.x + rank))
    if point.x < 0:
        raise Odd(f"{point} on rank {rank}")
    return Point(double(float(total[0])))

results = pynccl.testing.run(2, work, Point(1.0), backend="cpu")
assert results == [Point(6.0)] * 2, results
try:
    pynccl.testing.run(2, work, Point(-1.0), backend="cpu")
except pynccl.testing.RankError as error:
    assert isinstance(error.errors[0], Odd), error.errors
    assert "Point(x=-1.0) on rank 0" in str(error), error
print("done")
"""


def test_from_standard_input() -> None:
    """As `python < script`: the function and the classes stand in no file."""
    done = completed([sys.executable], input=INTERACTIVE, timeout=55)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_from_an_interactive_session() -> None:
    """As in a notebook: a main module without a file, whose code was compiled under made-up names."""
    code = """
import sys, types
source = sys.argv[1]
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
exec(compile(source, "<ipython-input-1>", "exec"), vars(main))
"""
    command = [sys.executable, "-c", code, INTERACTIVE]
    done = completed(command, timeout=55)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


OF_A_SCRIPT = """
from dataclasses import dataclass
from pynccl import testing

@dataclass
class Point:
    x: int

class Odd(Exception):
    pass

class Picky(Exception):
    def __init__(self, first, second):
        super().__init__(first)

def point(rank, nranks):
    return Point(rank)

def odd(rank, nranks):
    raise Odd("odd rank")

def picky(rank, nranks):
    raise Picky("one", "two")

if __name__ == "__main__":
    assert testing.run(2, point, backend="cpu") == [Point(0), Point(1)]
    for fn, kind in ((odd, Odd), (picky, type(None))):
        try:
            testing.run(1, fn, backend="cpu")
        except testing.RankError as error:
            assert type(error.errors.get(0)) is kind and "rank 0 of 1 failed" in str(error), error.errors
        else:
            raise SystemExit("no error")
    print("done")
"""


def test_classes_of_a_script(tmp_path: Path) -> None:
    """Results and exceptions of classes that only the script has, without multiprocessing's help."""
    script = tmp_path / "script.py"
    script.write_text(OF_A_SCRIPT)
    done = completed([sys.executable, str(script)], timeout=55)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_result_must_pickle() -> None:
    with pytest.raises(testing.RankError, match="the function returned a .* that cannot be pickled"):
        testing.run(1, unpicklable, backend="cpu")
    with pytest.raises(
        testing.RankError, match="rank 0 of 1 returned a value that cannot be unpickled: "
    ) as odd:
        testing.run(1, unpicklable_here, backend="cpu")
    assert isinstance(odd.value.__cause__, KeyError)


@pytest.mark.full
@pytest.mark.timeout(150)
def test_from_a_notebook() -> None:
    """The same in Jupyter's kernel, a cell for each paragraph."""
    script = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(cell) for cell in sys.stdin.read().split("\\n\\n")]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=90).execute()
print(*(output.text for cell in notebook.cells for output in cell.outputs if output.name == "stdout"))
"""
    command = [sys.executable, "-c", script]
    done = completed(command, input=INTERACTIVE, timeout=140)
    assert (done.stdout.strip(), done.returncode) == ("done", 0), done.stderr
