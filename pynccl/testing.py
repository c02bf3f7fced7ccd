"""Run a function on several ranks, each in a new process, and return the results."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pynccl._run.launch import choose_backend, rank_environment
from pynccl._run.nodes import open_store
from pynccl._run.process import Child, describe_exit, die_with_parent, wait_all
from pynccl._timeouts import check_timeout

__all__ = ["RankError", "RankTimeout", "run"]

# Seconds for the other ranks to end after a rank failed: long enough to report the failure too.
_GRACE = 5.0
# The first and the last line of what faulthandler writes at SIGABRT.
_HEADINGS = re.compile(r"^(Fatal Python error: Aborted|Extension modules: .*)$", re.M)
_PREFIX = "pynccl-testing-"
_WORKER = "from pynccl.testing import _work; _work()"
# The file that this rank imports to find its function.
_importing: str | None = None


class RankError(RuntimeError):
    """A rank of `run` failed; `.ranks` are the failed ranks, `.errors` the exceptions that can be pickled."""

    def __init__(self, message: str, errors: dict[int, BaseException | None]) -> None:
        super().__init__(message, errors)
        self.errors = errors

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that failed, sorted."""
        return sorted(self.errors)

    def __str__(self) -> str:
        return str(self.args[0])


class RankTimeout(RankError, TimeoutError):
    """Ranks of `run` were still running at the time-out, and were killed."""


def run(
    nranks: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "auto",
    timeout: float = 60,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, nranks, *args)` in one new process for each rank; return the results in rank order.

    A new process finds `fn` by its name in its module or file, which it imports: a script calls `run` under
    `if __name__ == "__main__":`. With cloudpickle installed any function works, also from notebooks and
    standard input, and lambdas. Arguments and results are pickled. `backend` is "auto" (the CPU library
    without an NVIDIA driver) or a value for PYNCCL_LIBRARY. `env` adds variables. No process is left running
    afterwards.

    Raises RankError with the traceback of a rank that failed. With `check=False` the result holds the
    RankError instead, and the other ranks continue. Raises RankTimeout after `timeout` seconds, and TypeError
    or ValueError for wrong arguments.
    """
    if _importing is not None:
        # The rank's own call would start ranks again, which import the file again, and so on.
        raise RuntimeError(
            f"pynccl.testing.run is called while a rank imports {_importing} to find its function; expected "
            'the call under if __name__ == "__main__":, since every rank runs the rest of the file'
        )
    if isinstance(nranks, bool) or not isinstance(nranks, int):
        raise TypeError(f"nranks is {nranks!r}; expected an int before the function: run(4, fn)")
    if nranks < 1:
        raise ValueError(f"nranks is {nranks}; expected 1 or more")
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; expected a function that takes (rank, nranks, *args)")
    check_timeout(timeout, optional=False)
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env[{name!r}] is {value!r}; expected names and values of type str")
    # By name, or as bytes together with the arguments, whose classes have the same problem.
    place = _locate(fn)
    content = pickle.dumps(args) if place else _cloudpickle(fn).dumps((fn, args))
    task = (list(sys.path), place, nranks)
    base = choose_backend(os.environ, backend) | (env or {})
    with _folder() as folder, open_store(base) as server:
        job = _Job(Path(folder), nranks)
        Path(folder, "task").write_bytes(pickle.dumps(task))
        Path(folder, "args").write_bytes(content)
        try:
            for rank in range(nranks):
                job.start(rank, rank_environment(base, rank, nranks, server.address))
            job.wait(timeout, check)
        finally:
            job.close()
        return job.results(timeout, check)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Make a folder for one run, and remove those of programs that were killed."""
    for entry in os.scandir(tempfile.gettempdir()):
        # Also an error: another process still has the lock.
        with contextlib.suppress(OSError):
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                _remove_unlocked(entry.path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, open(f"{name}/locking", "w") as lock:
        # Without locks, as on some network file systems, nobody removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, f"{name}/lock")
        yield name


def _remove_unlocked(folder: str) -> None:
    with open(f"{folder}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def _locate(fn: Callable[..., Any]) -> tuple[str, str, str] | None:
    """Return module name, file and qualified name of a function that another process can find; else None."""
    name, module = getattr(fn, "__qualname__", ""), sys.modules.get(getattr(fn, "__module__", ""))
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if found is not fn or module is None or file is None or not os.path.exists(file):
        return None
    return module.__name__, os.path.abspath(file), name


def _cloudpickle(fn: Callable[..., Any]) -> Any:
    """Return the module that pickles functions by value."""
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; expected a function")
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise ValueError(
            f"fn is {fn!r}, which a new process cannot find by name in a file; expected a function of a "
            "module or a script, or any function with cloudpickle installed (pip install cloudpickle)"
        ) from None


class _Failure:
    """The failure of a rank that returned no result."""

    def __init__(self, text: str, error: BaseException | None = None, killed: bool = False) -> None:
        self.text, self.error, self.killed = text, error, killed


class _Job:
    """The processes of one run, and the folder of their answers."""

    def __init__(self, folder: Path, nranks: int) -> None:
        self.folder, self.nranks = folder, nranks
        self.children: list[Child] = []
        self.ended: list[int] = []
        self.timed_out = False

    def start(self, rank: int, env: dict[str, str]) -> None:
        argv = [
            sys.executable,
            *_interpreter_options(),
            "-c",
            _WORKER,
            str(os.getpid()),
            str(self.folder),
            str(rank),
        ]
        # The package's folder may not be on the child's own path.
        here = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")]))
        self.children.append(Child(argv, env=env))

    def wait(self, timeout: float, check: bool) -> None:
        """Wait until the ranks end; with `check`, only a short time after a rank has failed."""
        deadline = time.monotonic() + timeout
        while not self._all_ended():
            now = time.monotonic()
            if check and any(self.children[rank].poll() for rank in self.ended):
                deadline, check = min(deadline, now + _GRACE), False
            elif now >= deadline:
                break
            time.sleep(0.005)
        self._all_ended()
        running = [child for rank, child in enumerate(self.children) if rank not in self.ended]
        self.timed_out = bool(running) and not any(self.children[rank].poll() for rank in self.ended)
        # On this signal a rank writes its stacks and ends.
        for child in running:
            os.kill(child.pid, signal.SIGABRT)
        wait_all(running, 2.0)

    def _all_ended(self) -> bool:
        for rank, child in enumerate(self.children):
            if rank not in self.ended and child.poll() is not None:
                self.ended.append(rank)
        return len(self.ended) == self.nranks

    def close(self) -> None:
        for child in self.children:
            child.close()

    def results(self, timeout: float, check: bool) -> list[Any]:
        answers = [self._answer(rank) for rank in range(self.nranks)]
        if not check:
            return [
                self._as_error([rank], answers, "") if isinstance(a, _Failure) else a
                for rank, a in enumerate(answers)
            ]
        failed = [rank for rank in self.ended if isinstance(answers[rank], _Failure)]
        # A rank that ended just before the time-out has a result.
        late = [
            rank
            for rank, answer in enumerate(answers)
            if rank not in self.ended and isinstance(answer, _Failure)
        ]
        if failed or late:
            head = (
                f"ranks {late} of {self.nranks} were still running after {timeout:g} s\n"
                if self.timed_out
                else ""
            )
            raise self._as_error(failed + late, answers, head)
        return answers

    def _as_error(self, ranks: list[int], answers: list[Any], head: str) -> RankError:
        """Return one error for these ranks, caused by the first of their errors."""
        kind = RankTimeout if all(answers[rank].killed for rank in ranks) else RankError
        text = "\n".join(f"rank {rank} of {self.nranks} {answers[rank].text}" for rank in ranks)
        blamed = [rank for rank in ranks if kind is RankTimeout or not answers[rank].killed]
        error = kind(head + text, {rank: answers[rank].error for rank in blamed})
        error.__cause__ = answers[ranks[0]].error
        return error

    def _answer(self, rank: int) -> Any:
        path, code = self.folder / f"{rank}.result", self.children[rank].poll()
        if path.exists():
            ok, value, text = pickle.loads(path.read_bytes())
            if not ok:
                return _Failure(f"failed:\n{text}", pickle.loads(value))
            if code == 0:
                try:
                    return pickle.loads(value)
                except Exception as error:
                    return _Failure(f"returned a value that cannot be unpickled: {error!r}", error)
        killed = rank not in self.ended
        state = "was still running and was ended" if killed else describe_exit(code or 0)
        dump = self.folder / f"{rank}.dump"
        # A rank that was ended during its start has no stacks.
        stacks = dump.read_text(errors="replace").strip() if dump.exists() else ""
        if killed:
            # faulthandler reads as a crash, and these are the stacks of a rank that `run` has ended.
            stacks = _HEADINGS.sub("", stacks).strip()
        return _Failure(f"{state}\n{stacks}" if stacks else f"{state}, without a result", killed=killed)


def _interpreter_options() -> list[str]:
    """Return the interpreter's options that the ranks use too."""
    options = [f"-W{option}" for option in sys.warnoptions]
    return [*options, "-Xdev"] if sys.flags.dev_mode else options


def _work() -> None:
    """Run one rank; the entry point of the processes that `run` starts."""
    parent, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Open until the process ends, for faulthandler.
    faulthandler.enable(os.open(folder / f"{rank}.dump", os.O_WRONLY | os.O_CREAT), all_threads=True)
    sys.exit(not _call(folder, rank))


def _call(folder: Path, rank: int) -> bool:
    dumps = pickle.dumps
    try:
        path, target, nranks = pickle.loads((folder / "task").read_bytes())
        sys.path[:] = path
        if target:
            fn, dumps = _find(*target), pickle.dumps
            args = pickle.loads((folder / "args").read_bytes())
        else:
            fn, args = pickle.loads((folder / "args").read_bytes())
            dumps = _cloudpickle(fn).dumps
        answer = (True, _dumps_result(fn(rank, nranks, *args), dumps), "")
    except BaseException as error:
        answer = (False, _dumps_error(error, dumps), traceback.format_exc())
    draft = folder / f"{rank}.draft"
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(folder / f"{rank}.result")
    return answer[0]


def _dumps_result(value: Any, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        kind = type(value).__qualname__
        raise TypeError(f"the function returned a {kind} that cannot be pickled: {error}") from error


def _dumps_error(error: BaseException, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(None)
    return data


def _find(module_name: str, file: str, qualname: str) -> Callable[..., Any]:
    """Return the function of this name from the parent's file."""
    global _importing
    _importing = file
    found: Any = _import(module_name, file)
    _importing = None
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _import(name: str, file: str) -> Any:
    if name == "__main__":
        # As in multiprocessing: the script runs under another name, and its classes can still be unpickled.
        namespace = runpy.run_path(file, run_name="__mp_main__")
        module = type(sys)("__mp_main__")
        module.__dict__.update(namespace)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        return module
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if os.path.abspath(getattr(module, "__file__", None) or "") == file:
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
