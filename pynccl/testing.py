"""Run a function on several ranks, in new processes, and return the results."""

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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pynccl._base.hints import hints_keywords
from pynccl._base.timeouts import check_timeout
from pynccl._base.values import rank_list, shown
from pynccl._comm import lifetime
from pynccl._errors import BootstrapError
from pynccl._run import ended_record
from pynccl._run.launch import MOST_RANKS, OWN, choose_backend, rank_environment
from pynccl._run.nodes import open_store
from pynccl._run.ports import free_port
from pynccl._run.process import Child, describe_exit, die_with_parent, wait_all
from pynccl._run.stack_requests import in_order
from pynccl.bootstrap._environment import as_rank

__all__ = ["RankError", "RankTimeout", "run"]

# Seconds for the other ranks to end after a rank failed: long enough to report the failure too.
_GRACE = 5.0
# The script's name in a rank, as in multiprocessing.
_SCRIPT = "__mp_main__"
# Ranks of which an error shows the traceback or the stacks.
_SHOWN = 16
# The first and the last line of what faulthandler writes at SIGABRT.
_HEADINGS = re.compile(r"^(Fatal Python error: Aborted|Extension modules: .*)$", re.M)
# The first line of a thread's stack in faulthandler's text.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+)")
T = TypeVar("T")
_PREFIX = "pynccl-testing-"
# Variables of the ranks that `env` cannot set.
_OWN = OWN - {"MASTER_ADDR", "MASTER_PORT"}
# The file of the ranks that failed.
_FAILED = "failed"
# The program of a process: it imports the parent's pynccl, also from a folder with another one in it.
_WORKER = """\
import sys
sys.path[:] = filter(None, sys.path)
try:
    from pynccl.testing import _work
except BaseException:
    import traceback
    with open(f"{sys.argv[2]}/{sys.argv[3]}.dump", "w") as file:
        traceback.print_exc(file=file)
    sys.exit(1)
_work()
"""
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


@overload
def run(
    nranks: int,
    fn: Callable[..., T],
    *args: Any,
    backend: str = ...,
    timeout: float = ...,
    check: Literal[True] = ...,
    env: dict[str, str] | None = ...,
    threads: int = ...,
) -> list[T]: ...
@overload
def run(
    nranks: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = ...,
    timeout: float = ...,
    check: bool,
    env: dict[str, str] | None = ...,
    threads: int = ...,
) -> list[Any]: ...
@hints_keywords
def run(
    nranks: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "auto",
    timeout: float = 60,
    check: bool = True,
    env: dict[str, str] | None = None,
    threads: int = 1,
) -> list[Any]:
    """Call `fn(rank, nranks, *args)` in one new process for each rank; return the results in rank order.

    A new process finds `fn` by its name in its module or file, which it imports: a script calls `run` under
    `if __name__ == "__main__":`. With cloudpickle installed any function works, also from notebooks and
    standard input, and lambdas. Arguments and results are pickled. `backend` is "auto" (the CPU library
    without an NVIDIA driver) or a value for PYNCCL_LIBRARY. `env` adds variables; those of torchrun are set,
    so that torch.distributed.init_process_group works, too. No process is left running afterwards.

    With `threads`, each process has that many ranks as threads, so that hundreds fit on a laptop.
    Each rank gets its own copy of `args`, and `pynccl.init()` knows its rank. There is no RANK in os.environ.
    Ranks of one process share what a process has once, such as the globals of modules.

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
    _check_numbers(nranks, threads)
    if not callable(fn):
        raise TypeError(f"fn is {shown(fn)}; expected a function that takes (rank, nranks, *args)")
    check_timeout(timeout, optional=False)
    if not isinstance(check, bool):
        raise TypeError(f"check is {shown(check)}; expected True or False")
    _check_backend(backend)
    _check_env({} if env is None else env)
    # By name, or as bytes together with the arguments, whose classes have the same problem.
    place = _locate(fn)
    content = _packed(args) if place else _cloudpickle(fn).dumps((fn, args))
    task = (
        list(sys.path),
        place,
        _by_value(fn) if place and place[0] == "__main__" else None,
        nranks,
        threads,
    )
    base = choose_backend(os.environ, backend) | _master(threads) | (env or {})
    with _folder() as folder, open_store(base) as server:
        tell = partial(ended_record.tell_exit, server.address, server.secret, server.job)
        job = _Job(Path(folder), nranks, tell, threads)
        Path(folder, "task").write_bytes(pickle.dumps(task))
        Path(folder, "args").write_bytes(content)
        try:
            for process in range(nranks // threads):
                job.start(process, _process_environment(base, process, nranks, server.address, threads))
            job.wait(timeout, check)
        finally:
            job.close()
        return job.results(timeout, check)


def _check_numbers(nranks: int, threads: int) -> None:
    if isinstance(nranks, bool) or not isinstance(nranks, int):
        raise TypeError(f"nranks is {shown(nranks)}; expected an int before the function: run(4, fn)")
    if nranks < 1:
        raise ValueError(f"nranks is {shown(nranks)}; expected 1 or more")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1 or nranks % threads:
        raise ValueError(
            f"threads is {shown(threads)}; expected a positive int that divides nranks, {nranks}"
        )
    if nranks // threads > MOST_RANKS:
        raise ValueError(
            f"nranks is {shown(nranks)}; expected at most {MOST_RANKS} processes of {threads} ranks"
        )


def _check_backend(backend: str) -> None:
    expected = "expected 'auto', 'cpu' or the path of a libnccl"
    if not isinstance(backend, str):
        raise TypeError(f"backend is {shown(backend)}; {expected}")
    if backend not in ("auto", "cpu") and not os.path.isfile(os.path.expanduser(backend)):
        raise ValueError(f"backend is {shown(backend)}, which is not a file; {expected}")


def _check_env(env: Any) -> None:
    if not isinstance(env, dict):
        raise TypeError(f"env is {shown(env)}; expected a dict of names and values of type str, or None")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env[{name!r}] is {shown(value)}; expected names and values of type str")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env[{name!r}] is {shown(value)}; expected a name, not empty and without '=', and no NULs"
            )
        if name in _OWN:
            raise ValueError(
                f"env[{name!r}] is {shown(value)}; expected other names, since each rank has its own"
            )


def _master(threads: int) -> dict[str, str]:
    """Return torchrun's variables for the server of rank 0, such as torch's store, if ranks are processes."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if threads == 1 else {}


def _process_environment(
    base: dict[str, str], process: int, nranks: int, store: str, threads: int
) -> dict[str, str]:
    env = rank_environment(base, process, nranks, store)
    if threads > 1:
        # WORLD_SIZE stays: with it, pynccl.init in a thread that is no rank raises.
        del env["RANK"], env["LOCAL_RANK"]
    return env


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
        raise TypeError(f"fn is {shown(fn)}; expected a function")
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise ValueError(
            f"fn is {shown(fn)}, which a new process cannot find by name in a file; expected a function of a "
            "module or a script, or any function with cloudpickle installed (pip install cloudpickle)"
        ) from None


def _by_value(fn: Callable[..., Any]) -> bytes | None:
    """Pickle a function of a script by value, for ranks that do not define it when they run the script."""
    try:
        found: bytes = _cloudpickle(fn).dumps(fn)
    except Exception:
        return None
    return found


class _Failure:
    """The failure of a rank that returned no result."""

    def __init__(self, text: str, error: BaseException | None = None, killed: bool = False) -> None:
        self.text, self.error, self.killed = text, error, killed


class _Job:
    """The processes of one run, and the folder of their ranks' answers."""

    def __init__(self, folder: Path, nranks: int, tell: Callable[[int, str], None], threads: int = 1) -> None:
        self.folder, self.nranks, self.threads = folder, nranks, threads
        # Tells the other ranks how one has ended.
        self.tell = tell
        self.children: list[Child] = []
        # The processes that ended by themselves, in the order of their ends.
        self.ended: list[int] = []
        self.timed_out = False
        # The number of processes of `ended` whose ends the others have been told.
        self._told = 0

    def start(self, process: int, env: dict[str, str]) -> None:
        argv = [
            sys.executable,
            *_interpreter_options(),
            "-c",
            _WORKER,
            str(os.getpid()),
            str(self.folder),
            str(process),
        ]
        # The package's folder may not be on the child's own path.
        here = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")]))
        self.children.append(Child(argv, env=env))

    def wait(self, timeout: float, check: bool) -> None:
        """Wait until the processes end; with `check`, only a short time after a rank has failed."""
        deadline, tells_failures = time.monotonic() + timeout, not check
        while not self._all_ended():
            self._tell_ends(tells_failures)
            now = time.monotonic()
            if check and self._any_failed():
                deadline, check = min(deadline, now + _GRACE), False
            elif now >= deadline:
                break
            time.sleep(0.005)
        self._all_ended()
        running = [child for process, child in enumerate(self.children) if process not in self.ended]
        self.timed_out = bool(running) and not self._any_failed()
        # On this signal a process writes its stacks and ends.
        for child in running:
            os.kill(child.pid, signal.SIGABRT)
        wait_all(running, 2.0)

    def _all_ended(self) -> bool:
        for process, child in enumerate(self.children):
            if process not in self.ended and child.poll() is not None:
                self.ended.append(process)
        return len(self.ended) == len(self.children)

    def _tell_ends(self, tells_failures: bool) -> None:
        """Tell ranks that may wait for others in pynccl.init which of these have ended."""
        told, self._told = self._told, len(self.ended)
        for process in self.ended[told:]:
            code = self.children[process].poll() or 0
            for rank in self._ranks(process) if code == 0 or tells_failures else ():
                with contextlib.suppress(BootstrapError, TimeoutError):
                    self.tell(rank, describe_exit(code))

    def _any_failed(self) -> bool:
        # A process whose rank has failed runs on while its other ranks do.
        return any(self.children[process].poll() for process in self.ended) or bool(self._reported())

    def _reported(self) -> list[int]:
        """Return the ranks that have reported a failure, in that order."""
        path = self.folder / _FAILED
        return list(map(int, path.read_text().split())) if path.exists() else []

    def close(self) -> None:
        for child in self.children:
            child.close()

    def results(self, timeout: float, check: bool) -> list[Any]:
        answers = self._answers()
        if not check:
            return [
                self._as_error([rank], answers, "") if isinstance(a, _Failure) else a
                for rank, a in enumerate(answers)
            ]
        by_end = (rank for process in self.ended for rank in self._ranks(process))
        order = dict.fromkeys([*self._reported(), *by_end, *range(self.nranks)])
        failed = [rank for rank in order if isinstance(answers[rank], _Failure)]
        if failed:
            late = sorted(rank for rank in failed if answers[rank].killed)
            head = f"ranks {late} of {self.nranks} were still running after {timeout:g} s\n"
            raise self._as_error(failed, answers, head if self.timed_out else "")
        return answers

    def _ranks(self, process: int) -> range:
        return _ranks_of(process, self.threads)

    def _as_error(self, ranks: list[int], answers: list[Any], head: str) -> RankError:
        """Return one error for these ranks, caused by the first of their errors."""
        kind = RankTimeout if all(answers[rank].killed for rank in ranks) else RankError
        shown, more = ranks[:_SHOWN], sorted(ranks[_SHOWN:])
        text = "\n".join(f"rank {rank} of {self.nranks} {answers[rank].text}" for rank in shown)
        if more:
            text += f"\n{len(more)} more of {self.nranks} ranks failed: {rank_list(more)}"
        blamed = [rank for rank in ranks if kind is RankTimeout or not answers[rank].killed]
        error = kind(head + text, {rank: answers[rank].error for rank in blamed})
        error.__cause__ = answers[ranks[0]].error
        return error

    def _answers(self) -> list[Any]:
        """Return each rank's result, or a _Failure."""
        found: list[Any] = []
        for process, child in enumerate(self.children):
            code, ranks = child.poll(), self._ranks(process)
            written = [self._written(rank) for rank in ranks]
            # Ranks that failed, or did not end, are the reason of how their process ended.
            excused = not all(isinstance(answer, bytes) for answer in written)
            for rank, answer in zip(ranks, written, strict=True):
                if isinstance(answer, bytes) and (code == 0 or excused):
                    found.append(_unpickled(answer))
                else:
                    found.append(answer if isinstance(answer, _Failure) else self._without_result(rank))
        return found

    def _written(self, rank: int) -> bytes | _Failure | None:
        """Return a rank's pickled result, or its failure; None if it has written neither."""
        path = self.folder / f"{rank}.result"
        if not path.exists():
            return None
        ok, value, text = pickle.loads(path.read_bytes())
        return value if ok else _Failure(f"failed:\n{text}", _error_in(value))

    def _without_result(self, rank: int) -> _Failure:
        process = rank // self.threads
        killed = process not in self.ended
        state = describe_exit(self.children[process].poll() or 0)
        if killed:
            state = "was still running and was ended"
        elif self.threads > 1:
            ranks = self._ranks(process)
            state = f"is a thread of the process of ranks {ranks[0]} to {ranks[-1]}, which {state}"
        stacks = self._stacks(process, rank, killed)
        return _Failure(f"{state}\n{stacks}" if stacks else f"{state}, without a result", killed=killed)

    def _stacks(self, process: int, rank: int, killed: bool) -> str:
        """Return the stacks of a rank: of all threads of its process, if it has no other ranks."""
        dump = self.folder / f"{process}.dump"
        # A process that was ended during its start has no stacks.
        text = dump.read_text(errors="replace").strip() if dump.exists() else ""
        if killed:
            # faulthandler reads as a crash, and these are the stacks of a process that `run` has ended.
            text = _HEADINGS.sub("", text).strip()
        path = self.folder / f"{process}.threads"
        if not path.exists():
            return in_order(text)
        owners = dict(zip(path.read_text().split(), self._ranks(process), strict=False))
        blocks = re.split(r"\n\n+", text)
        of = [owners.get(found[1]) if (found := _THREAD.match(block)) else None for block in blocks]
        # A crash may have happened in a thread that is no rank.
        extra = not killed and rank == self._ranks(process)[0]
        return "\n\n".join(b for b, o in zip(blocks, of, strict=True) if o == rank or (o is None and extra))


def _loads(data: bytes) -> Any:
    # A rank knows the script by this name: see `_import`.
    sys.modules.setdefault(_SCRIPT, sys.modules["__main__"])
    return pickle.loads(data)


def _error_in(data: bytes) -> Any:
    """Return a rank's exception; None if it cannot be made here."""
    try:
        return _loads(data)
    except Exception:
        return None


def _unpickled(result: bytes) -> Any:
    try:
        return _loads(result)
    except Exception as error:
        return _Failure(f"returned a value that cannot be unpickled: {error!r}", error)


def _ranks_of(process: int, threads: int) -> range:
    return range(process * threads, (process + 1) * threads)


def _interpreter_options() -> list[str]:
    """Return the interpreter's options that the ranks use too."""
    options = [f"-W{option}" for option in sys.warnoptions]
    return [*options, "-Xdev"] if sys.flags.dev_mode else options


def _work() -> None:
    """Run the ranks of one process; the entry point of the processes that `run` starts."""
    parent, folder, process = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Open until the process ends, for faulthandler.
    faulthandler.enable(os.open(folder / f"{process}.dump", os.O_WRONLY | os.O_CREAT), all_threads=True)
    sys.exit(not _work_on(folder, process))


# Returns the function, its arguments, and what pickles its result.
_Load = Callable[[], tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], bytes]]]


def _work_on(folder: Path, process: int) -> bool:
    """Call the function on this process's ranks; tell whether all of them succeeded."""
    path, place, by_value, nranks, threads = pickle.loads((folder / "task").read_bytes())
    sys.path[:] = path
    ranks = _ranks_of(process, threads)
    try:
        load = _loader(place, by_value, (folder / "args").read_bytes())
    except BaseException as error:
        for rank in ranks:
            _write(folder, rank, _failed_by(error, pickle.dumps))
        return False
    if threads == 1:
        return _call(folder, process, nranks, load)
    return _call_in_threads(folder, process, ranks, nranks, load)


def _loader(place: tuple[str, str, str] | None, by_value: bytes | None, content: bytes) -> _Load:
    """Import the function; the arguments are unpickled for every rank, so that ranks do not share them."""
    if place:
        fn = _find(*place, by_value)
        return lambda: (fn, pickle.loads(content), pickle.dumps)
    dumps = _cloudpickle(_loader).dumps
    return lambda: (*pickle.loads(content), dumps)


def _call_in_threads(folder: Path, process: int, ranks: range, nranks: int, load: _Load) -> bool:
    succeeded: list[int] = []

    def work(rank: int) -> None:
        with as_rank(rank_environment({}, rank, nranks, os.environ["PYNCCL_STORE"])):
            if _call(folder, rank, nranks, load):
                succeeded.append(rank)

    started = []
    for rank in ranks:
        thread = threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _write(folder, rank, _failed_by(error, pickle.dumps))
            break
        started.append(thread)
    (folder / f"{process}.threads").write_text(" ".join(f"{thread.ident or 0:x}" for thread in started))
    for thread in started:
        thread.join()
    return len(succeeded) == len(ranks)


def _call(folder: Path, rank: int, nranks: int, load: _Load) -> bool:
    """Call the function on one rank and write its answer; tell whether it succeeded."""
    dumps: Callable[[Any], bytes] = pickle.dumps
    try:
        fn, args, dumps = load()
        answer = (True, _dumps_result(fn(rank, nranks, *args), dumps), "")
    except BaseException as error:
        answer = _failed_by(error, dumps)
    return _write(folder, rank, answer)


def _packed(args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(args)
    except Exception:
        for index, value in enumerate(args):
            try:
                pickle.dumps(value)
            except Exception as error:
                text = f"args[{index}] is {shown(value)}; expected an argument that can be pickled: {error}"
                raise TypeError(text) from error
        raise


def _failed_by(error: BaseException, dumps: Callable[[Any], bytes]) -> tuple[bool, bytes, str]:
    if isinstance(error, TypeError):
        lifetime.add_hint(error)
    return False, _dumps_error(error, dumps), "".join(traceback.format_exception(error))


def _write(folder: Path, rank: int, answer: tuple[bool, bytes, str]) -> bool:
    """Write a rank's answer; tell whether it is a result."""
    draft = folder / f"{rank}.draft"
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(folder / f"{rank}.result")
    if not answer[0]:
        with open(folder / _FAILED, "ab") as file:
            file.write(b"%d\n" % rank)
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


def _find(module_name: str, file: str, qualname: str, by_value: bytes | None) -> Callable[..., Any]:
    """Return the function of this name from the parent's file."""
    global _importing
    _importing = file
    found: Any = _import(module_name, file)
    _importing = None
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is None and by_value is not None:
        found = pickle.loads(by_value)
    if found is None:
        raise RuntimeError(
            f"{file} does not define {qualname} when a rank runs it, perhaps because it does so under if "
            '__name__ == "__main__":; expected it above that, or cloudpickle (pip install cloudpickle)'
        )
    return found  # type: ignore[no-any-return]


def _import(name: str, file: str) -> Any:
    if name == "__main__":
        # As in multiprocessing: the script runs under another name, and its classes can still be unpickled.
        namespace = runpy.run_path(file, run_name=_SCRIPT)
        module = type(sys)(_SCRIPT)
        module.__dict__.update(namespace)
        sys.modules["__main__"] = sys.modules[_SCRIPT] = module
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
