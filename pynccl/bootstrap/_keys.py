"""Keys: one interface to the TCP store, a folder, or any object with get and set."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pynccl._base.host import is_short_of_descriptors
from pynccl._errors import BootstrapError, RankFailedError
from pynccl._watch import ended
from pynccl.bootstrap._preflight import unpack_failure
from pynccl.bootstrap._store import Store, StoreEnded, StoreLost, StoreSilent

R = TypeVar("R")
# Seconds between polls: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# The file of an arrival, with the number of its round.
_ARRIVED = re.compile(r"init\.(\d{1,6})\.arrival\.")
# A file that tells which process takes part as a rank.
_CLAIMED = re.compile(r"init\.\d+\.claim\.")
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
# Attempts to create a folder that rank 0 of the previous round removes concurrently.
_TRIES = 5
# Seconds to wait for another rank's lock: it may be stopped.
_LOCK_SECONDS = 1.0


class Keys(Protocol):
    """Values under names, shared by the ranks of a job."""

    where: str
    # True if the keys of a round that failed must go. Other keys stay, so that late ranks read the reason.
    clears: bool

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value."""

    def fetch(self, name: str, timeout: float) -> bytes:
        """Wait until a value is set and return it; raise TimeoutError after `timeout` seconds."""

    def claim(self, name: str) -> bool:
        """Return True for the first process that claims the name, else False."""

    def remove(self, prefix: str, names: Iterable[str]) -> None:
        """Remove the values of a round, as far as possible: those of these names, which have the prefix."""

    def will(self, name: str, value: bytes) -> None:
        """Have a value set if this process dies before `withdraw`, where a death can be noticed."""

    def withdraw(self) -> None:
        """Cancel the will."""


class StoreKeys:
    """Keys in pynccl's own store; `of_rank_0`: the store is in the process of rank 0."""

    clears = False

    def __init__(self, store: Store, where: str = "", of_rank_0: bool = False) -> None:
        self.store, self.where, self.of_rank_0 = store, where or store.address, of_rank_0

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except StoreEnded as error:
            raise unpack_failure(error.last_word).error() from error
        except StoreLost as error:
            if self.of_rank_0:
                raise RankFailedError(
                    f"rank 0, whose process serves the store, died or left: {error}", ranks=[0]
                ) from error
            raise
        except StoreSilent as error:
            if self.of_rank_0:
                raise StoreSilent(
                    f"rank 0, whose process serves the store, does not respond: {error}"
                ) from error
            raise

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value."""
        with self._noticing():
            self.store.set(name, value, timeout)

    def fetch(self, name: str, timeout: float) -> bytes:
        """Wait until a value is set and return it; raise TimeoutError after `timeout` seconds."""
        with self._noticing():
            return self.store.get(name, timeout)

    def claim(self, name: str) -> bool:
        """Return True for the first process that claims the name, else False."""
        with self._noticing():
            return self.store.add(name, 1) == 1

    def will(self, name: str, value: bytes) -> None:
        """Have a value set if this process dies before `withdraw`."""
        with self._noticing():
            self.store.will(name, value)

    def withdraw(self) -> None:
        """Cancel the will."""
        with suppress(BootstrapError, TimeoutError):
            self.store.withdraw(1.0)

    def remove(self, prefix: str, names: Iterable[str]) -> None:
        """Keep the values: the store ends with its job."""


class _Unnoticed:
    """Base of keys where the death of a process cannot be noticed."""

    def will(self, name: str, value: bytes) -> None:
        """Do nothing."""

    def withdraw(self) -> None:
        """Do nothing."""


def _poll(look: Callable[[str], bytes | None], name: str, timeout: float, where: str) -> bytes:
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while (value := look(name)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no rank set {name!r} in {where} within {timeout:g} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return value


class ObjectKeys(_Unnoticed):
    """Keys in an object with get(name) and set(name, bytes): a torch store, a dictionary in a Ray actor.

    For a missing name `get` may return None or raise. torch's `get` would wait, so `check` is called first.
    """

    clears = False

    def __init__(self, target: Any, where: str = "", prefix: str = "") -> None:
        self.target, self.prefix = target, prefix
        self.where = where or f"the given {type(target).__name__}"
        self._error: Exception | None = None
        check, add = getattr(target, "check", None), getattr(target, "add", None)
        self._check: Callable[[list[str]], bool] | None = check if callable(check) else None
        self._add: Callable[[str, int], Any] | None = add if callable(add) else None

    @staticmethod
    def fits(target: Any) -> bool:
        """Tell whether an object has the required methods."""
        return all(callable(getattr(target, name, None)) for name in ("get", "set"))

    def put(self, name: str, value: bytes, timeout: float = 0.0) -> None:
        """Set a value; the object decides how long this takes."""
        try:
            self.target.set(self.prefix + name, value)
        except Exception as error:
            raise BootstrapError(
                f"{self.where} did not accept a value: {type(error).__name__}: {error}"
            ) from error

    def look(self, name: str) -> bytes | None:
        """Return a value, or None if it is not set."""
        try:
            if self._check is not None and not self._check([self.prefix + name]):
                return None
            value = self.target.get(self.prefix + name)
        except Exception as error:
            # Most objects raise an exception of their own for a missing name.
            self._error = error
            return None
        if value is None:
            return None
        if not isinstance(value, bytes | bytearray | memoryview):
            raise BootstrapError(
                f"get of {self.where} returned a {type(value).__name__}; expected the bytes that were set, "
                "or None where there are none"
            )
        return bytes(value)

    def fetch(self, name: str, timeout: float) -> bytes:
        """Wait until a value is set and return it; raise TimeoutError after `timeout` seconds."""
        try:
            return _poll(self.look, name, timeout, self.where)
        except TimeoutError as late:
            error = self._error
            if error is None:
                raise
            raise TimeoutError(f"{late}; its get last raised {type(error).__name__}: {error}") from error

    def claim(self, name: str) -> bool:
        """Return True for the first process that claims the name; without `add`, for all concurrent ones."""
        if self._add is not None:
            with suppress(TypeError, NotImplementedError):
                return int(self._add(self.prefix + name, 1)) == 1
        if self.look(name) is not None:
            return False
        self.put(name, b"1")
        return True

    def remove(self, prefix: str, names: Iterable[str]) -> None:
        """Remove the values of a round, as far as possible."""
        delete = getattr(self.target, "delete_key", None) or getattr(self.target, "delete", None)
        if callable(delete):
            # Best effort: not every store can delete keys.
            with suppress(Exception):
                for name in names:
                    delete(self.prefix + name)


def _owner(pid: int) -> str:
    """Return a text about a process of this machine, as long as it runs."""
    process = ended.process(pid)
    return f"{process.space.hex()} {pid} {process.start}"


def _has_ended(owner: str) -> bool:
    """Tell whether the process of a claim ran on this machine and has ended."""
    space, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    if not pid.isdecimal() or len(pid) > 9:
        return False
    now = _owner(int(pid))
    return now != owner and now.startswith(f"{space} ")


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _rename_unless_there(old: str, new: Path) -> None:
    try:
        # A process that is killed meanwhile leaves no claim without its text, which _sweep needs.
        os.link(old, new)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.replace(old, new)
    else:
        os.unlink(old)


class FolderKeys(_Unnoticed):
    """Keys as files in a folder that every rank sees, on one machine or on a shared file system."""

    clears = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.where = f"file://{path}"
        if not self.path.parent.is_dir():
            raise BootstrapError(f"{self.where} cannot be created: {self.path.parent} is not a folder")
        with self._naming("cannot be created or used as a folder"):
            found = self._make()
        # If all users can write to the parent folder, another user may have created this one.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise BootstrapError(
                f"{self.where} is not safe: expected a path that does not exist yet, or a folder that "
                "belongs to this user and that no other user can write to"
            )
        self._me = _owner(os.getpid())
        self._sweep()
        # Free for the report of a failure, which may be a lack of descriptors.
        self._spare: list[int] = []
        with suppress(OSError):
            self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _make(self) -> os.stat_result:
        for _ in range(_TRIES):
            # Other ranks may create or remove the folder at the same time.
            with suppress(FileExistsError, FileNotFoundError):
                self.path.mkdir(mode=0o700, exist_ok=True)
                return self.path.lstat()
        self.path.mkdir(mode=0o700, exist_ok=True)
        return self.path.lstat()

    def _sweep(self) -> None:
        """Remove what a job has left of which all processes have ended, as far as this machine can tell."""
        with self._locked(), suppress(OSError):
            claims = [file for file in self.path.iterdir() if _CLAIMED.match(file.name)]
            if claims and all(
                claim.is_file() and _has_ended(claim.read_text("ascii", "replace")) for claim in claims
            ):
                for file in self.path.iterdir():
                    if file.name.startswith(("init.", ".new-")):
                        file.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other ranks out, on file systems that have locks, if there are descriptors to spare."""
        with ExitStack() as stack:
            with suppress(OSError):
                if not is_short_of_descriptors():
                    folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    stack.callback(os.close, folder)
                    until = time.monotonic() + _LOCK_SECONDS
                    while not _lock(folder) and time.monotonic() < until:
                        time.sleep(_FIRST_PAUSE)
            yield

    def _file(self, name: str) -> Path:
        return self.path / name.replace("/", ".")

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value atomically: a reader never sees a part of it."""
        self._write(lambda: os.replace(self._new(value), self._file(name)))

    def _new(self, value: bytes) -> str:
        """Return a file with the value, for a name that other ranks read."""
        # It imports much, for the other rendezvous in vain.
        import tempfile

        number, path = tempfile.mkstemp(dir=self.path, prefix=".new-")
        with os.fdopen(number, "wb") as file:
            file.write(value)
        return path

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BootstrapError(f"{self.where} {what}: {error}") from error

    def _write(self, write: Callable[[], R]) -> R:

        def attempt() -> R:
            try:
                return write()
            except FileNotFoundError:
                # Rank 0 has just removed the folder of the previous round.
                self._make()
                return write()

        return self._do(attempt, "did not accept a value")

    def _do(self, attempt: Callable[[], R], what: str) -> R:
        with self._naming(what):
            try:
                return attempt()
            except OSError as error:
                if error.errno != errno.EMFILE or not self._spare:
                    raise
                self.withdraw()
                return attempt()

    def look(self, name: str) -> bytes | None:
        """Return a value, or None if it is not set."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                # Listing the folder makes a network file system refresh its cache.
                os.scandir(self.path).close()
                return self._file(name).read_bytes()
            return None

        return self._do(read, "cannot be read")

    def fetch(self, name: str, timeout: float) -> bytes:
        """Wait until a value is set and return it; raise TimeoutError after `timeout` seconds."""
        return _poll(self.look, name, timeout, self.where)

    def claim(self, name: str) -> bool:
        """Return True for the first process that claims the name, else False."""

        def create() -> bool:
            with self._locked():
                new = self._new(self._me.encode())
                try:
                    _rename_unless_there(new, self._file(name))
                except FileExistsError:
                    os.unlink(new)
                    return False
                return True

        return self._write(create)

    def remove(self, prefix: str, names: Iterable[str]) -> None:
        """Remove the files of a round, and the folder if it is then empty."""
        begin = self._file(prefix).name
        with suppress(OSError):
            for file in self.path.iterdir():
                if file.name.startswith(begin):
                    file.unlink(missing_ok=True)
            self.path.rmdir()

    def withdraw(self) -> None:
        """Close the spare descriptor."""
        while self._spare:
            os.close(self._spare.pop())

    def newest(self) -> int:
        """Return the number of the newest round in which a rank has arrived, or -1."""
        with suppress(OSError):
            found = (_ARRIVED.match(file.name) for file in self.path.iterdir())
            return max((int(match[1]) for match in found if match), default=-1)
        return -1
