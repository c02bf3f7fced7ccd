"""The methods of init that name where to meet: tcp://, file://, objects with get and set, a store."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import pynccl
from init_methods import Plain, meet
from launchers import forget_the_launcher, logged
from meeting import free_port, hear, tell, together, until
from pynccl import BootstrapError, RankFailedError, testing
from pynccl.bootstrap import Store
from pynccl.bootstrap._keys import FolderKeys
from ranks import on_ranks

# --- tcp:// ---


def by_tcp(rank: int, nranks: int, host: str, port: int) -> list[str]:
    lines = logged()
    forget_the_launcher()
    for _ in range(3):
        meet(f"tcp://{host}:{port}", rank, nranks)
    return lines


@pytest.mark.parametrize("nranks", [1, 2, 4])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_tcp(host: str, nranks: int) -> None:
    port = free_port()
    for lines in testing.run(nranks, by_tcp, host, port, backend="cpu"):
        assert nranks == 1 or f"by the arguments, at tcp://{host}:{port}" in lines[0]


@on_ranks(2)
def test_tcp_with_the_launchers_ranks(rank: int, nranks: int, port: int) -> None:
    # The launcher's local rank counts only where its rank does.
    os.environ["LOCAL_RANK"] = str(rank + 3)
    with pynccl.init(f"tcp://127.0.0.1:{port}", timeout=20) as comm:
        assert (comm.rank, comm.size, comm.device) == (rank, nranks, rank + 3)
    with pynccl.init(f"tcp://127.0.0.1:{port}", rank=nranks - 1 - rank, timeout=20) as comm:
        assert (comm.rank, comm.size, comm.device) == (nranks - 1 - rank, nranks, nranks - 1 - rank)


@on_ranks(3)
def test_a_free_port_and_a_callback(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    file = Path(folder, "method")
    if rank == 0:
        meet("tcp://127.0.0.1:0", rank, nranks, on_listen=lambda text: file.write_text(text + "\n"))
        return
    while not file.exists() or not file.read_text().endswith("\n"):
        time.sleep(0.01)
    meet(file.read_text().strip(), rank, nranks)


@on_ranks(1)
def test_a_callback_that_fails(rank: int, nranks: int) -> None:
    def broken(_: str) -> None:
        raise KeyError("cannot tell")

    start = time.monotonic()
    with pytest.raises(KeyError, match="cannot tell"):
        pynccl.init("tcp://127.0.0.1:0", rank=0, world_size=2, on_listen=broken, timeout=20)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("tcp://127.0.0.1", {}, "the address is '127.0.0.1'; expected host:port"),
        ("tcp://127.0.0.1:99999", {}, "expected host:port"),
        ("tcp://tcp://127.0.0.1:5000", {}, "expected host:port"),
        ("tcp://:5000", {}, "expected a host before the port"),
        ("tcp://127.0.0.1:0", {}, "with port 0, rank 0 needs on_listen="),
        ("file:///", {}, "expected a folder below the root"),
        ("env", {"on_listen": print}, "on_listen is given; expected None unless method is 'tcp://host:port'"),
        (None, {"rank": 2, "world_size": 2}, "rank is 2 and world_size 2; expected 0 <= rank < world_size"),
        (None, {"rank": -1}, "rank is -1; expected an int, 0 or more"),
        (None, {"world_size": 0}, "world_size is 0; expected an int, 1 or more"),
        (None, {"device": -2}, "device is -2; expected an int, 0 or more"),
        (None, {"timeout": 0}, "timeout is 0; expected a positive number of seconds"),
        (None, {"timeout": float("nan")}, "timeout is nan; expected a positive number of seconds"),
    ],
)
def test_wrong_arguments(method: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pynccl.init(method, **({"rank": 0, "world_size": 2} | more))


def test_wrong_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYNCCL_STORE": "foo", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="PYNCCL_STORE: the address is 'foo'; expected host:port"):
        pynccl.init(timeout=5)
    monkeypatch.setenv("PYNCCL_STORE", "127.0.0.1:0")
    with pytest.raises(ValueError, match="PYNCCL_STORE: the address is '127.0.0.1:0'; expected a port of 1"):
        pynccl.init(timeout=5)


def test_wrong_types() -> None:
    for name in ("rank", "world_size", "device"):
        with pytest.raises(TypeError, match=f"{name} is '1'; expected an int, . or more"):
            pynccl.init(**{name: "1"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout is 'soon'; expected a positive number of seconds, or None"):
        pynccl.init(timeout="soon")  # type: ignore[arg-type]


# --- file:// ---


def by_file(rank: int, nranks: int, path: str) -> None:
    forget_the_launcher()
    for _ in range(3):
        meet(f"file://{path}", rank, nranks)


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_file(nranks: int, tmp_path: Path) -> None:
    for _ in range(2):
        testing.run(nranks, by_file, str(tmp_path / "meeting"), backend="cpu")
        # Rank 0 cleans up when everybody has what it needs.
        assert list(tmp_path.iterdir()) == []


def file_fails(rank: int, nranks: int, path: str) -> str:
    if rank == 0:
        os.environ["PYNCCL_LIBRARY"] = "/nonexistent.so"
    start = time.monotonic()
    with pytest.raises(pynccl.NcclError) as caught:
        pynccl.init(f"file://{path}", timeout=20)
    assert time.monotonic() - start < 15
    return str(caught.value)


def test_file_where_rank_0_fails(tmp_path: Path) -> None:
    for text in testing.run(3, file_fails, str(tmp_path / "meeting"), backend="cpu"):
        assert "/nonexistent.so" in text
    assert list(tmp_path.iterdir()) == []


def file_without_rank_0(rank: int, nranks: int, path: str) -> str:
    arrived = Path(path, "init.0.arrival.0")

    def die_when_arrived() -> None:
        while not arrived.exists():
            time.sleep(0.001)
        tell("arrived")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        threading.Thread(target=die_when_arrived, daemon=True).start()
    elif rank == nranks - 1:
        # Until then rank 0 cannot answer.
        hear("arrived")
        time.sleep(1)
    # A rank that begins after its death removes what rank 0 has left.
    silent = "timed out at file://.*; (rank 0 is silent|ranks that never arrived: 0)"
    with pytest.raises(BootstrapError, match=silent) as caught:
        pynccl.init(f"file://{path}", timeout=4)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_file_where_rank_0_is_killed(nranks: int, tmp_path: Path) -> None:
    """The others clear up when they give up, so that the place serves the next job."""
    path = str(tmp_path / "meeting")
    dead, *others = testing.run(nranks, file_without_rank_0, path, backend="cpu", check=False, timeout=40)
    assert isinstance(dead, testing.RankError)
    assert all(isinstance(text, str) for text in others), others
    assert list(tmp_path.iterdir()) == []
    testing.run(2, by_file, path, backend="cpu")


def killed_while_they_wait(rank: int, nranks: int, path: str) -> None:
    if rank < 2:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pynccl.init(f"file://{path}", timeout=20)


def test_a_folder_of_ranks_that_were_all_killed(tmp_path: Path) -> None:
    """The next job takes it over, and its ranks do not take each other for the dead ones."""
    path = tmp_path / "meeting"
    testing.run(3, killed_while_they_wait, str(path), backend="cpu", check=False, timeout=40)
    assert len(list(path.glob("*claim*"))) == 2
    (path / "of the user").touch()
    testing.run(3, by_file, str(path), backend="cpu")
    assert [file.name for file in path.iterdir()] == ["of the user"]


def killed_while_it_claims(rank: int, nranks: int, path: str) -> None:
    sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.link" else None)
    pynccl.init(f"file://{path}", rank=0, world_size=2, timeout=20)


def test_a_folder_of_a_rank_that_was_killed_in_its_claim(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    (dead,) = testing.run(1, killed_while_it_claims, path, backend="cpu", check=False, timeout=40)
    assert "SIGKILL" in str(dead)
    testing.run(2, by_file, path, backend="cpu")


@pytest.mark.parametrize("claim", [b"\xff\xfe\0\x81", b"", b"ab 99999999999999999999 1", None])
def test_a_folder_with_a_damaged_claim(claim: bytes | None, tmp_path: Path) -> None:
    """None: a pipe, which would wait for a program that writes."""
    path = tmp_path / "meeting"
    path.mkdir(mode=0o700)
    (path / "init.999999999999.arrival.0").touch()
    if claim is None:
        os.mkfifo(path / "init.0.claim.0")
    else:
        (path / "init.0.claim.0").write_bytes(claim)
    with pytest.raises(BootstrapError, match="arrived twice .* keys of an earlier run remain"):
        pynccl.init(f"file://{path}", rank=0, world_size=2, timeout=2)


def test_folders_that_are_no_meeting_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, words in (
        ("file", "cannot be created or used"),
        ("open", "is not safe: expected"),
        ("no/where", "cannot"),
    ):
        with pytest.raises(BootstrapError, match=f"{name} .*{words}|{name} {words}"):
            pynccl.init(f"file://{tmp_path}/{name}", rank=0, world_size=2, timeout=1)
    with pytest.raises(BootstrapError):
        pynccl.init(f"file://{tmp_path}/link", rank=0, world_size=2, timeout=1)


@on_ranks(1)
def test_a_folder_that_becomes_a_file(rank: int, nranks: int, tmp_path: Path) -> None:
    """While the rank waits."""
    folder = tmp_path / "meeting"

    def replace() -> None:
        until(lambda: list(folder.glob("*arrival*")))
        folder.rename(tmp_path / "elsewhere")
        folder.touch()

    replacing = threading.Thread(target=replace)
    replacing.start()
    with pytest.raises(BootstrapError, match=r"meeting cannot be read: .*Not a directory"):
        pynccl.init(f"file://{folder}", rank=0, world_size=2, timeout=20)
    replacing.join()


def test_a_folder_that_goes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Path.lstat, [0]

    def gone(path: Path) -> os.stat_result:
        calls[0] += 1
        if calls[0] < 4:
            path.rmdir()
        return real(path)

    monkeypatch.setattr(Path, "lstat", gone)
    keys = FolderKeys(str(tmp_path / "meeting"))
    assert calls[0] == 4
    assert keys.claim("a")
    assert not keys.claim("a")


def test_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    keys = FolderKeys(str(tmp_path / "meeting"))
    assert keys.claim("a")
    assert not keys.claim("a")
    assert [file.read_text().split()[1] for file in keys.path.iterdir()] == [str(os.getpid())]


# --- objects ---


def by_object(rank: int, nranks: int, folder: str, absent: str) -> None:
    forget_the_launcher()
    store = Plain(folder, absent)
    for _ in range(3):
        meet(store, rank, nranks)


@pytest.mark.parametrize("nranks", [1, 2, 4])
@pytest.mark.parametrize("absent", ["raises", "is None"])
def test_an_object(absent: str, nranks: int, tmp_path: Path) -> None:
    testing.run(nranks, by_object, str(tmp_path), absent, backend="cpu")


def object_alone(rank: int, nranks: int, folder: str) -> str:
    together(nranks)
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(Plain(folder, "raises"), rank=rank, world_size=4, timeout=1.5)
    assert time.monotonic() - start < 6
    return str(caught.value)


def test_an_object_where_ranks_never_come(tmp_path: Path) -> None:
    texts = testing.run(2, object_alone, str(tmp_path), backend="cpu")
    assert all("ranks that never arrived: 2, 3 (2 of 4)" in text for text in texts)


def test_an_object_that_is_used_again(tmp_path: Path) -> None:
    testing.run(2, by_object, str(tmp_path), "raises", backend="cpu")
    with pytest.raises(testing.RankError, match="arrived twice at the given Plain"):
        testing.run(2, by_object, str(tmp_path), "raises", backend="cpu")


class Broken:
    """What can be wrong with an object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def get(self, _: str) -> object:
        return self.value

    def set(self, _: str, __: bytes) -> None:
        if self.value == "cannot set":
            raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", "get of the given Broken returned a str; expected the bytes that were set"),
        (b"nothing", "arrived twice"),
    ],
)
def test_objects_that_are_broken(value: object, words: str) -> None:
    with pytest.raises(BootstrapError, match=words):
        pynccl.init(Broken(value), rank=0, world_size=2, timeout=1)


class Unreadable:
    """An object whose get raises, or sleeps first."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def get(self, _: str) -> bytes:
        time.sleep(self.seconds)
        raise OSError("the disk cannot be read")

    def set(self, _: str, __: bytes) -> None:
        pass


def cannot_read(_: int, __: int, seconds: float) -> tuple[str, list[int], float]:
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(Unreadable(seconds), rank=1, world_size=3, timeout=1)
    return str(caught.value), caught.value.ranks, time.monotonic() - start


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "the given Unreadable does not return what this rank has set: .* the disk cannot be read"),
        (3.0, "rank 1 of 3 arrived .* s after its time-out: calls of the given Unreadable took 3"),
    ],
)
def test_an_object_that_cannot_be_read(seconds: float, words: str) -> None:
    """No other rank is blamed, and after the time-out nothing slow is called again."""
    ((text, ranks, took),) = testing.run(1, cannot_read, seconds, backend="cpu")
    assert re.search(words, text), text
    assert not ranks and took < 5.5


class Forgetful(Plain):
    """An object that returns nothing to this rank."""

    def get(self, name: str) -> bytes:
        raise KeyError(name)


def reads_nothing(rank: int, _: int, folder: str) -> list[int]:
    store = (Forgetful if rank == 1 else Plain)(folder, "raises")
    with pytest.raises(BootstrapError if rank == 1 else RankFailedError) as caught:
        pynccl.init(store, rank=rank, world_size=3, timeout=3)
    return caught.value.ranks


@pytest.mark.slow
def test_an_object_that_one_rank_cannot_read(tmp_path: Path) -> None:
    """The two others time out at once: each answers while it asks who responds."""
    assert testing.run(3, reads_nothing, str(tmp_path), backend="cpu") == [[1], [], [1]]


@on_ranks(2)
def test_a_store_of_ones_own(rank: int, nranks: int) -> None:
    with Store(os.environ["PYNCCL_STORE"]) as store:
        for _ in range(2):
            meet(store, rank, nranks)
        store.set("still usable", b"1")


# --- two jobs at once, and threads ---


def test_two_jobs_on_one_machine(tmp_path: Path) -> None:
    """Two jobs with the same method: each has its own port, and they never meet."""
    failures: list[BaseException] = []

    def job(port: int) -> None:
        try:
            testing.run(2, by_tcp, "127.0.0.1", port, backend="cpu")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=job, args=(free_port(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def garbage(rank: int, nranks: int, answer: bytes) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(answer)
            time.sleep(3)

    threading.Thread(target=serve, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=1.5)
    assert time.monotonic() - start < 6
    listener.close()
    return str(caught.value)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"\0" * 200])
def test_something_else_listens_there(answer: bytes) -> None:
    (text,) = testing.run(1, garbage, answer, backend="cpu")
    assert "rank 1 of 2 did not meet rank 0" in text
