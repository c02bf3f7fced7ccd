"""Where ranks leave values for each other, all seen alike: the TCP store, a folder, any object with get/set.

`claim` tells whether this is the first process to ask for a name, `fetch` waits.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from pynccl._errors import BootstrapError, RankFailedError
from pynccl.bootstrap._store import Store, StoreLost, StoreSilent

# Polling begins with the first and slows down to the second.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# So often a folder is made that rank 0 of the round before removes at the same time.
_TRIES = 5


class Keys(Protocol):
    """Values under names, shared by the ranks of a job."""

    where: str

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value."""

    def fetch(self, name: str, timeout: float) -> bytes:
        """Return a value, waiting until it is set; TimeoutError when that takes too long."""

    def claim(self, name: str) -> bool:
        """Return True to the first who asks."""

    def remove(self, names: list[str]) -> None:
        """Remove what nobody needs any more, as far as that is possible."""

    def will(self, name: str, value: bytes) -> None:
        """Have a value set should this process die before `withdraw`, where somebody would notice."""

    def withdraw(self) -> None:
        """Take the will back."""


class StoreKeys:
    """Keys in pynccl's own store; `of_rank_0` where that is in rank 0's process."""

    def __init__(self, store: Store, where: str = "", of_rank_0: bool = False) -> None:
        self.store, self.where, self.of_rank_0 = store, where or store.address, of_rank_0

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except StoreLost as error:
            if self.of_rank_0:
                raise RankFailedError(
                    f"rank 0, which has the store, died or left: {error}", ranks=[0]
                ) from error
            raise
        except StoreSilent as error:
            if self.of_rank_0:
                raise StoreSilent(f"rank 0, which has the store, does not respond: {error}") from error
            raise

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value."""
        with self._noticing():
            self.store.set(name, value, timeout)

    def fetch(self, name: str, timeout: float) -> bytes:
        """Return a value, waiting until it is set; TimeoutError when that takes too long."""
        with self._noticing():
            return self.store.get(name, timeout)

    def claim(self, name: str) -> bool:
        """Return True to the first who asks."""
        with self._noticing():
            return self.store.add(name, 1) == 1

    def will(self, name: str, value: bytes) -> None:
        """Have a value set should this process die before `withdraw`."""
        with self._noticing():
            self.store.will(name, value)

    def withdraw(self) -> None:
        """Take the will back."""
        with suppress(BootstrapError, TimeoutError):
            self.store.withdraw(1.0)

    def remove(self, names: list[str]) -> None:
        """Leave them: the store ends with its job."""


class _Polled:
    """What can only be looked at is looked at again and again."""

    where: str

    def will(self, name: str, value: bytes) -> None:
        """Leave it: nobody notices here when a process dies."""

    def withdraw(self) -> None:
        """Do nothing."""

    def look(self, name: str) -> bytes | None:
        """Return a value, None when it is not set."""
        raise NotImplementedError

    def why(self) -> str:
        """Return what may be the reason why values do not appear."""
        return ""

    def fetch(self, name: str, timeout: float) -> bytes:
        """Return a value, waiting until it is set; TimeoutError when that takes too long."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while (value := self.look(name)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nobody set {name!r} in {self.where} within {timeout:g} s{self.why()}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return value


class ObjectKeys(_Polled):
    """Keys in an object with get(name) and set(name, bytes): a torch store, a dictionary in a Ray actor.

    `get` may return None or raise where there is nothing; torch's would wait, so `check` is asked first.
    """

    def __init__(self, target: Any, where: str = "", prefix: str = "") -> None:
        self.target, self.prefix = target, prefix
        self.where = where or f"the given {type(target).__name__}"
        self._error: Exception | None = None
        check, add = getattr(target, "check", None), getattr(target, "add", None)
        self._check: Callable[[list[str]], bool] | None = check if callable(check) else None
        self._add: Callable[[str, int], Any] | None = add if callable(add) else None

    @staticmethod
    def fits(target: Any) -> bool:
        """Tell whether an object has what this needs."""
        return all(callable(getattr(target, name, None)) for name in ("get", "set"))

    def put(self, name: str, value: bytes, timeout: float = 0.0) -> None:
        """Set a value, in the time that the object takes."""
        try:
            self.target.set(self.prefix + name, value)
        except Exception as error:
            raise BootstrapError(f"{self.where} took no value: {type(error).__name__}: {error}") from error

    def look(self, name: str) -> bytes | None:
        """Return a value, None when it is not set."""
        try:
            if self._check is not None and not self._check([self.prefix + name]):
                return None
            value = self.target.get(self.prefix + name)
        except Exception as error:
            # Most say "not there" by an exception of their own.
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

    def why(self) -> str:
        """Return what may be the reason why values do not appear."""
        error = self._error
        return f"; its get last raised {type(error).__name__}: {error}" if error is not None else ""

    def claim(self, name: str) -> bool:
        """Return True to the first who asks; without `add`, to all who ask at the same time."""
        if self._add is not None:
            with suppress(TypeError, NotImplementedError):
                return int(self._add(self.prefix + name, 1)) == 1
        if self.look(name) is not None:
            return False
        self.put(name, b"1")
        return True

    def remove(self, names: list[str]) -> None:
        """Remove what nobody needs any more, as far as that is possible."""
        delete = getattr(self.target, "delete_key", None) or getattr(self.target, "delete", None)
        if callable(delete):
            # Only a courtesy: not every store can, or lets everybody.
            with suppress(Exception):
                for name in names:
                    delete(self.prefix + name)


class FolderKeys(_Polled):
    """Keys as files of a folder that every rank sees, on one machine or on a shared file system."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.where = f"file://{path}"
        try:
            found = self._make()
        except OSError as error:
            raise BootstrapError(f"{self.where} cannot be used as a meeting place: {error}") from error
        # In a folder that all users write to, somebody else may have been there first.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise BootstrapError(
                f"{self.where} is not safe to meet at: expected a folder of this user's that nobody else can "
                "write to, or a path where there is nothing yet"
            )

    def _make(self) -> os.stat_result:
        for _ in range(_TRIES):
            # It may be there and go at the same time.
            with suppress(FileExistsError, FileNotFoundError):
                self.path.mkdir(mode=0o700, exist_ok=True)
                return self.path.lstat()
        self.path.mkdir(mode=0o700, exist_ok=True)
        return self.path.lstat()

    def _file(self, name: str) -> Path:
        return self.path / name.replace("/", ".")

    def put(self, name: str, value: bytes, timeout: float) -> None:
        """Set a value: a reader sees all of it or nothing."""

        def write() -> None:
            number, fresh = tempfile.mkstemp(dir=self.path, prefix=".new-")
            with os.fdopen(number, "wb") as file:
                file.write(value)
            os.replace(fresh, self._file(name))

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            try:
                write()
            except FileNotFoundError:
                # Rank 0 has just removed the folder of the round before.
                self._make()
                write()
        except FileExistsError:
            raise
        except OSError as error:
            raise BootstrapError(f"{self.where} took no value: {error}") from error

    def look(self, name: str) -> bytes | None:
        """Return a value, None when it is not set."""
        with suppress(FileNotFoundError):
            # Listing makes a network file system look at its server again.
            os.scandir(self.path).close()
            return self._file(name).read_bytes()
        return None

    def claim(self, name: str) -> bool:
        """Return True to the first who asks."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            self._write(lambda: os.close(os.open(self._file(name), flags, 0o600)))
        except FileExistsError:
            return False
        return True

    def remove(self, names: list[str]) -> None:
        """Remove files, and the folder when it is empty."""
        for name in names:
            with suppress(OSError):
                self._file(name).unlink()
        with suppress(OSError):
            self.path.rmdir()
