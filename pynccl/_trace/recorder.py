"""The Python side of the flight recorder: settings, names of communicators, and dumps.

C code writes and dumps the records (native/ring.c); this module reads the dumps.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pynccl._base.values import shown
from pynccl._base.version import __version__
from pynccl._errors import NcclError, NcclTimeoutError
from pynccl._library.binding import ffi, lib
from pynccl._trace.callers import Place, caller

T = TypeVar("T")

SIZE, DIR = "PYNCCL_TRACE_SIZE", "PYNCCL_TRACE_DIR"
SIGNAL, STACKS = "PYNCCL_TRACE_SIGNAL", "PYNCCL_TRACE_STACKS"
# Prefix of this user's own folder in a shared one; the user id follows.
OWN_FOLDER = "pynccl-"
_LARGEST = 1 << 24
# The number of closed communicators whose records are kept for automatic dumps.
_KEPT = 8
# The result of a call that ended with an exception that has no NCCL result.
_NO_RESULT = -1
_UNCAUGHT = signal.SIGKILL, signal.SIGSTOP
_FAULTS = signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS


@dataclass(frozen=True)
class TraceRecord:
    """One call in the flight recorder; fields that do not apply or are unknown are None.

    `seq` counts the collective calls of the communicator, `peer_seq` the sends to (or receives from) `peer`:
    the same number on two ranks means the same call. Calls with the same `group` were issued together.
    `state` is "called" (still in the library's function), "taken" (accepted by the library, running
    or queued), "done" or "failed". `result` is NCCL's code, or -1 after an exception without a code.
    `algorithm` is the one that the CPU library chooses for a collective.
    One-sided calls have `peer`, `signal` and `context`; a put has `offset`, in bytes of the peer's window as
    the library counts them, and a wait `signals`, the number that it waits for.
    Times are nanoseconds since 1970; `end_ns` is the time at which the call was found to be done.
    """

    call: str
    time_ns: int
    state: str
    result: int
    seq: int | None = None
    peer_seq: int | None = None
    peer: int | None = None
    count: int | None = None
    dtype: str | None = None
    op: str | None = None
    root: int | None = None
    color: int | None = None
    algorithm: str | None = None
    send: int | None = None
    recv: int | None = None
    stream: int | None = None
    group: int | None = None
    plan: bool = False
    signal: int | None = None
    context: int | None = None
    signals: int | None = None
    offset: int | None = None
    end_ns: int | None = None
    at: str | None = None


_FIELDS = frozenset(field.name for field in fields(TraceRecord))


def read_record(values: dict[str, Any]) -> TraceRecord:
    """Return the record in a line of a dump; fields of newer versions are ignored."""
    return TraceRecord(**{name: value for name, value in values.items() if name in _FIELDS})


# --- settings -----------------------------------------------------------------------------------------------


def _size() -> int:
    text = os.environ.get(SIZE, "2048")
    if not text.isdecimal() or int(text) > _LARGEST:
        raise ValueError(f"{SIZE} is {shown(text)}; expected a number of records, 0 (off) to {_LARGEST}")
    return int(text)


def signal_of(environ: Mapping[str, str]) -> signal.Signals | None:
    """Return the signal that makes a process with this environment dump; None without one."""
    text = environ.get(SIGNAL, "")
    if not text:
        return None
    for known in signal.Signals:
        if text.upper() in (known.name, known.name.removeprefix("SIG"), str(known.value)):
            if known in _UNCAUGHT:
                break
            if known in _FAULTS:
                # After the dump the faulty instruction would run again, and raise the signal again.
                raise ValueError(
                    f"{SIGNAL} is {shown(text)}, a signal that a fault of the program raises; expected "
                    "another one, as USR2 or 12"
                )
            return known
    raise ValueError(f"{SIGNAL} is {shown(text)}; expected a signal that can be caught, as USR2 or 12")


# --- names of communicators  --------------------------------------------------------------------------

_made: Counter[tuple[str, int]] = Counter()


def identify(*parts: object) -> str:
    """Return a short name that is equal on all ranks with equal parts."""
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def numbered(*parts: object, rank: int = 0) -> str:
    """Like `identify`, but different for each repetition of the same parts by a rank of this process."""
    name = identify(*parts)
    _made[name, rank] += 1
    return name if _made[name, rank] == 1 else identify(name, _made[name, rank])


# --- one communicator ---------------------------------------------------------------------------------------


def open_trace(
    comm: Any, identity: str, rank: int, size: int, origin: str, *, name: str = "", also: str = ""
) -> None:
    """Record the calls of a pynccl_comm; `also` is another name that other ranks use for it."""
    records = _size()
    if not records or comm.trace:
        return
    # Imported late, because the import is slow.
    import json

    _install(rank)
    header = {"comm": identity, "rank": rank, "size": size, "origin": origin, "name": name, "also": also}
    comm.trace = lib.pynccl_trace_open(records, size, json.dumps(header)[1:-1].encode())
    if not comm.trace:
        raise MemoryError(f"there is no memory to record the calls of a communicator of {size} ranks")


@contextmanager
def recorded(comm: Any, kind: int, detail: int = 0) -> Iterator[None]:
    """Record a call that is not on the C call path."""
    token = lib.pynccl_trace_begin(comm.trace, kind, detail)
    try:
        yield
    except NcclTimeoutError:
        # The call is still running.
        raise
    except Exception as error:
        known = error.result if isinstance(error, NcclError) else None
        lib.pynccl_trace_end(comm.trace, token, known or _NO_RESULT)
        raise
    lib.pynccl_trace_end(comm.trace, token, 0)


def trace(comm: Any) -> list[TraceRecord]:
    """Return the records of a pynccl_comm, oldest first."""
    import json

    if not comm.trace:
        return []
    fd = os.memfd_create("pynccl-trace")
    try:
        _dump(fd, comm.trace)
        with open(os.dup(fd), encoding="utf-8") as file:
            file.seek(0)
            lines = [json.loads(line) for line in file]
    finally:
        os.close(fd)
    return [read_record(line) for line in lines if "call" in line]


# --- dumps --------------------------------------------------------------------------------------------------


def _dump(fd: int, only: Any) -> None:
    deadline = time.monotonic() + 5
    while (error := lib.pynccl_trace_dump(fd, only)) == errno.EBUSY and time.monotonic() < deadline:
        time.sleep(0.001)
    if error:
        raise OSError(error, f"the trace could not be written: {os.strerror(error)}")


def dump_trace(path: str | os.PathLike[str]) -> Path:
    """Write the records of all communicators of this process to a file of JSON lines; return its path.

    In a folder, the file is named after rank, host and process. `pynccl trace` reads the files of all
    ranks together. Raises OSError if the file cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {shown(path)}; expected the name of a file or a folder")
    target = Path(path)
    if target.is_dir():
        target /= file_name(_process.get("rank"), os.getpid())
    if not _process.get("header"):
        _set_process(None, "")
    with private_file(target) as fd:
        _dump(fd, ffi.NULL)
    return target


def dump_because(kind: str, text: str) -> None:
    """Dump to PYNCCL_TRACE_DIR, if it is set, and record the reason in this and later dumps."""
    if _process.get("automatic"):
        error = lib.pynccl_trace_save(kind.encode(), text.encode(errors="replace"))
        # EBUSY: the dump that is being written is followed by another one.
        if error not in (0, errno.EBUSY) and not _process.get("lost"):
            _process["lost"] = True
            why = os.strerror(error)
            # The failure itself matters more than a failed dump.
            with suppress(OSError, ValueError):
                print(f"pynccl: the trace could not be written to {DIR}: {why}", file=sys.stderr)


_process: dict[str, Any] = {}


def file_name(rank: int | None, pid: int, suffix: str = "jsonl") -> str:
    """Return the name of a process's file."""
    return f"{'process' if rank is None else f'rank{rank}'}.{os.uname().nodename}.{pid}.{suffix}"


def own_folder(path: str) -> str:
    """Return a folder that other users cannot write to: this one, or a new one in it."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    folder = os.path.realpath(path)
    if _is_own(os.lstat(folder)):
        return folder
    own = os.path.join(folder, f"{OWN_FOLDER}{os.geteuid()}")
    try:
        os.mkdir(own, 0o700)
    except FileExistsError:
        if not _is_own(os.lstat(own)):
            # It belongs to another user, or the file system shows all files as one user's.
            import tempfile

            return tempfile.mkdtemp(prefix=f"{OWN_FOLDER}{os.geteuid()}-", dir=folder)
    return own


def _require_writable(folder: str) -> None:
    """Make a file and remove it: permissions alone do not tell whether the file system takes one."""
    import tempfile

    with tempfile.TemporaryFile(dir=folder):
        pass


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


@contextmanager
def private_file(target: Path) -> Iterator[int]:
    """Yield a new file that replaces the target at the end; a target such as a pipe is written directly."""
    try:
        kind = target.lstat().st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    if stat.S_ISLNK(kind):
        raise OSError(errno.ELOOP, "this is a symbolic link; expected a file or a folder", str(target))
    draft = target.with_name(f".{target.name}.{os.urandom(8).hex()}") if stat.S_ISREG(kind) else target
    flags = os.O_CREAT | os.O_EXCL if draft is not target else 0
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    try:
        yield fd
        if draft is not target:
            os.replace(draft, target)
    except BaseException:
        if draft is not target:
            draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _set_process(rank: int | None, folder: str) -> None:
    import json

    _process["rank"] = rank
    known = {"pynccl": __version__, "host": os.uname().nodename, "pid": os.getpid(), "process_rank": rank}
    known["program"] = (sys.argv or [""])[0][:1024]
    _process["header"] = json.dumps(known)[1:-1]
    file = file_name(rank, os.getpid()) if folder else ""
    error = lib.pynccl_trace_process(_process["header"].encode(), os.fsencode(folder), file.encode())
    if error:
        raise OSError(error, os.strerror(error), folder)


def _install(rank: int) -> None:
    """At the first communicator of a process, set the folder of dumps and their triggers."""
    if _process.get("rank") is not None:
        return
    folder, number = os.environ.get(DIR, ""), signal_of(os.environ)
    if (stacks := os.environ.get(STACKS, "")) not in ("", "0", "1"):
        raise ValueError(f"{STACKS} is {shown(stacks)}; expected 0 or 1")
    world = os.environ.get("RANK", "")
    try:
        where = own_folder(folder or ".") if folder or number else ""
        if where:
            _require_writable(where)
    except OSError as reason:
        raise OSError(reason.errno, f"{DIR} cannot be used: {reason.strerror}", reason.filename) from None
    _set_process(int(world) if world.isdecimal() else rank, where)
    lib.pynccl_trace_keep(_KEPT if where else 0)
    if number:
        error = lib.pynccl_trace_on_signal(number.value, b"signal", number.name.encode(), -1)
        if error:
            raise OSError(error, f"{SIGNAL}: {os.strerror(error)}")
    if folder:
        _process["automatic"] = True
        if not _process.get("hooked"):
            _process["hooked"] = True
            _hook()


def _hook() -> None:
    """Dump at the end of the program, and when an exception ends the program or a thread."""
    before, before_in_thread = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        dump_because("exception", f"{kind.__name__}: {error}")
        before(kind, error, where)

    def on_exception_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            dump_because("exception", f"{args.exc_type.__name__} in a thread: {args.exc_value}")
        before_in_thread(args)

    sys.excepthook, threading.excepthook = on_exception, on_exception_in_thread
    atexit.register(dump_because, "exit", "the program has ended")


def _in_child() -> None:
    """In a forked child, drop the traces, which belong to the parent."""
    lib.pynccl_trace_forked()
    for name in ("rank", "header", "automatic", "lost"):
        _process.pop(name, None)


os.register_at_fork(after_in_child=_in_child)


# --- callers ------------------------------------------------------------------------------------------------

_callers: dict[Place, int] = {}


def _caller() -> int:
    """Return the number of the newest source line outside of pynccl."""
    place = caller()
    number = _callers.get(place)
    if number is None:
        number = int(lib.pynccl_trace_intern("{}:{}".format(*place).encode(errors="replace")))
        _callers[place] = number
    return number


def _with_caller(method: Callable[..., Any], struct_of: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        lib.pynccl_trace_caller(struct_of(self).trace, _caller())
        return method(self, *args, **kwargs)

    return noting


def with_callers(struct_of: Callable[[Any], Any], *names: str) -> Callable[[type[T]], type[T]]:
    """Make these methods of a class record their caller's line, if PYNCCL_TRACE_STACKS is set.

    `struct_of` returns an object's pynccl_comm.
    """

    def decorate(cls: type[T]) -> type[T]:
        if os.environ.get(STACKS, "0") not in ("", "0"):
            for name in names:
                setattr(cls, name, _with_caller(getattr(cls, name), struct_of))
        return cls

    return decorate
