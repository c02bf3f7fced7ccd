"""The store: what it keeps, where it can be reached, whom it trusts, and how long anything takes."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from meeting import free_port
from processes import piped
from pynccl import BootstrapError
from pynccl._secure.secret import read_secret
from pynccl.bootstrap import Store, StoreServer, _peer, _server, encrypt_nccl
from pynccl.bootstrap._store import MAX_FRAME, format_address, parse_address
from stores import SECRET

pytestmark = pytest.mark.usefixtures("no_secret_of_the_environment")


@pytest.fixture(params=[SECRET, ""], ids=["secret", "open"])
def secret(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def together(server: StoreServer, count: int, body: Callable[[int, Store], object]) -> list[object]:
    """Run a function in so many threads, each with a store of its own, and return what they did."""
    results: list[object] = [None] * count

    def client(index: int) -> None:
        try:
            with Store(server.address, server.secret, timeout=20) as mine:
                results[index] = body(index, mine)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=client, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def raises(kind: type[Exception], call: Callable[..., object], *args: object) -> None:
    with pytest.raises(kind):
        call(*args)


# --- operations ---


def test_set_and_get(store: Store) -> None:
    store.set("key", b"value\0\n")
    assert store.get("key") == b"value\0\n"
    store.set("key", memoryview(b""))
    assert store.get("key", 0) == b""


def test_add(store: Store) -> None:
    assert [store.add("n", 3), store.add("n", -5), store.add("m", 1)] == [3, -2, 1]
    assert store.get("n") == b"-2"
    for value in (b"three", b" 5_0 ", b"", b"1.0"):
        store.set("text", value)
        with pytest.raises(BootstrapError, match="refused 'text': its value is not a number"):
            store.add("text", 1)
    with pytest.raises(BootstrapError, match="refused 'text': its value is not a number"):
        store.add("text", 1)
    store.add("huge", 2**63 - 1)
    with pytest.raises(BootstrapError, match="refused 'huge': the sum does not fit"):
        store.add("huge", 1)
    with pytest.raises(ValueError, match="number is 9223372036854775808; expected a signed 64-bit integer"):
        store.add("huge", 2**63)
    assert store.add("n", 0) == -2


def test_delete(store: Store) -> None:
    store.set("key", b"value")
    assert [store.delete("key"), store.delete("key")] == [True, False]
    with pytest.raises(TimeoutError):
        store.get("key", 0)
    store.set("key", b"again")
    assert store.get("key") == b"again"


def test_get_and_wait_end_with_set(server: StoreServer, store: Store) -> None:
    def body(index: int, mine: Store) -> object:
        if index == 0:
            return mine.get("late")
        if index == 1:
            return mine.wait(["early", "late"])
        return mine.wait("late")

    def later() -> None:
        store.set("early", b"e")
        time.sleep(0.3)
        store.set("late", b"x")

    thread = threading.Thread(target=later)
    start = time.monotonic()
    thread.start()
    assert together(server, 3, body) == [b"x", None, None]
    assert 0.2 < time.monotonic() - start < 10
    thread.join()


@pytest.mark.parametrize("how", ["get", "wait", "barrier"])
@pytest.mark.parametrize("timeout", [0, 0.3])
def test_waits_are_bounded(store: Store, how: str, timeout: float) -> None:
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "get": (lambda: store.get("never", timeout), "no client set 'never'"),
        "wait": (lambda: store.wait(["a", "b", "here", "c"], timeout), "no client set 'a', 'b', 'c' in"),
        "barrier": (lambda: store.barrier("b", 3, timeout), "barrier 'b' .*: 1 of 3 clients arrived within"),
    }
    store.set("here", b"")
    call, words = calls[how]
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=words):
        call()
    assert timeout - 0.01 < time.monotonic() - start < timeout + 6
    store.set("after", b"1")
    assert store.get("after") == b"1"


def test_barrier_again_and_again(server: StoreServer) -> None:
    inside = [0] * 5

    def body(index: int, mine: Store) -> object:
        for turn in range(1, 21):
            inside[index] = turn
            mine.barrier("all", 5)
            assert min(inside) >= turn
        return turn

    assert together(server, 5, body) == [20] * 5


def test_who_leaves_a_barrier_does_not_count(server: StoreServer, store: Store) -> None:
    with pytest.raises(TimeoutError):
        store.barrier("b", 2, 0.1)
    gone = Store(server.address, server.secret)
    gone.add("here", 1)
    thread = threading.Thread(target=raises, args=(BootstrapError, gone.barrier, "b", 2))
    thread.start()
    time.sleep(0.2)
    assert gone._connection is not None
    gone._connection.sock.shutdown(socket.SHUT_RDWR)
    thread.join()
    gone.close()
    with pytest.raises(TimeoutError, match="1 of 2 clients"):
        store.barrier("b", 2, 0.2)
    assert together(server, 2, lambda _, mine: mine.barrier("b", 2, 5)) == [None, None]


def test_barrier_with_different_counts(server: StoreServer) -> None:
    errors = together(server, 2, lambda index, mine: mine.barrier("b", 2 + index, 1))
    refused = [error for error in errors if isinstance(error, BootstrapError)]
    assert len(refused) == 1 and "the count of the clients that wait there" in str(refused[0])


def test_many_clients_wait_together(server: StoreServer, store: Store) -> None:
    def body(index: int, mine: Store) -> object:
        if mine.add("here", 1) == 40:
            mine.set("go", b"!" * 1000)
        return mine.get("go", 10)

    assert together(server, 40, body) == [b"!" * 1000] * 40


def test_large_value_and_its_limit(server: StoreServer, store: Store) -> None:
    value = os.urandom(MAX_FRAME - 100)
    store.set("large", value)
    assert store.get("large") == value
    assert together(server, 8, lambda _, mine: mine.get("large") == value) == [True] * 8
    with pytest.raises(ValueError, match="expected at most"):
        store.set("larger", bytes(MAX_FRAME))
    assert store.get("large") == value


def test_the_longest_key_and_value(store: Store) -> None:
    store.set("k" * 65535, b"1")
    assert store.get("k" * 65535) == b"1"
    with pytest.raises(ValueError, match="key 'k+' has 65536 bytes; expected at most 65535"):
        store.set("k" * 65536, b"1")
    store.set("k", bytes(MAX_FRAME - 5))
    assert len(store.get("k")) == MAX_FRAME - 5
    with pytest.raises(ValueError, match="take 1048573 bytes; expected at most 1048572"):
        store.set("k", bytes(MAX_FRAME - 4))


def test_it_can_be_full(server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.bootstrap._server._MAX_BYTES", 1 << 20)
    store.set("a", bytes(600_000))
    with pytest.raises(BootstrapError, match="refused 'b': it is full: it stores at most 1 MiB"):
        store.set("b", bytes(600_000))
    store.set("a", b"")
    store.set("b", bytes(600_000))
    store.delete("b")
    store.set("c", bytes(900_000))


def test_one_store_for_several_threads(server: StoreServer, store: Store) -> None:
    sums: list[int] = []
    threads = [
        threading.Thread(target=lambda: sums.extend(store.add("n", 1) for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 201))
    waiter = threading.Thread(target=store.get, args=("later", 30))
    waiter.start()
    time.sleep(0.5)  # the other thread waits by then
    with pytest.raises(TimeoutError, match="another thread used the store"):
        store.set("key", b"", 0.2)
    with Store(server.address, server.secret) as other:
        other.set("later", b"")
    waiter.join()


def test_bad_arguments(store: Store) -> None:
    bad: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "value of 'k' is 'text'; expected bytes", lambda: store.set("k", "text")),  # type: ignore[arg-type]
        (ValueError, "timeout is -1; expected seconds", lambda: store.get("k", -1)),
        (ValueError, "timeout is nan; expected seconds", lambda: store.get("k", float("nan"))),
        (TypeError, "timeout is 'soon'; expected seconds", lambda: store.get("k", "soon")),  # type: ignore[arg-type]
        (ValueError, "count is 0; expected the number of clients", lambda: store.barrier("b", 0)),
        (ValueError, "key .*expected at most", lambda: store.get("k" * 70000)),
        (ValueError, "timeout is -1; expected seconds", lambda: Store("127.0.0.1:1", timeout=-1)),
        (ValueError, "the address is '127.0.0.1'; expected host:port", lambda: Store("127.0.0.1")),
        (ValueError, "port is 70000; expected 0 to 65535", lambda: StoreServer(port=70000)),
        (OSError, "the host is empty", lambda: StoreServer("")),
        (OSError, "host is 'no.such.host.invalid'", lambda: StoreServer("no.such.host.invalid")),
    ]
    wrong: Any = 1.5
    bad += [
        (TypeError, "key is 1.5; expected a str", lambda: store.set(wrong, b"")),
        (TypeError, r"keys\[0\] is 1.5; expected a str", lambda: store.wait([wrong])),
        (TypeError, "keys is 1.5; expected a key or a list", lambda: store.wait(wrong)),
        (ValueError, "key is .*that UTF-8 can encode", lambda: store.get("\ud800")),
        (TypeError, "number is 1.5; expected a signed 64-bit", lambda: store.add("n", wrong)),
        (TypeError, "count is 1.5; expected the number of clients", lambda: store.barrier("b", wrong)),
        (TypeError, "value of 'w' is 1.5; expected bytes", lambda: store.will("w", wrong)),
        (TypeError, "the address is 1.5; expected host:port", lambda: Store(wrong)),
        (ValueError, "the address is '\\[::1:80'; expected host:port", lambda: Store("[::1:80")),
        (TypeError, "secret is a float; expected a str", lambda: Store("127.0.0.1:1", wrong)),
        (TypeError, "host is 1.5; expected a name or an address", lambda: StoreServer(wrong)),
        (TypeError, "port is 1.5; expected 0 to 65535", lambda: StoreServer(port=wrong)),
        (TypeError, "job is 1.5; expected a str, or None", lambda: StoreServer(job=wrong)),
    ]
    for kind, words, call in bad:
        with pytest.raises(kind, match=words):
            call()
    store.set("still", b"fine", timeout=float("inf"))


def test_closed_store(server: StoreServer) -> None:
    store = Store(server.address, server.secret)
    store.close()
    store.close()
    with pytest.raises(BootstrapError, match="was closed by this process"):
        store.get("key")


# --- where it is ---


def test_nobody_listens() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(BootstrapError, match=f"no store answered at 127.0.0.1:{port} within 0.5 s"):
        Store(f"127.0.0.1:{port}", timeout=0.5)
    assert 0.45 < time.monotonic() - start < 6


def test_server_comes_later() -> None:
    port = free_port()
    servers: list[StoreServer] = []
    timer = threading.Timer(0.4, lambda: servers.append(StoreServer(port=port, secret=SECRET)))
    timer.start()
    with Store(f"127.0.0.1:{port}", SECRET, timeout=10) as store:
        store.set("a", b"b")
    timer.join()
    servers[0].close()


def test_server_goes_away(server: StoreServer, store: Store) -> None:
    timer = threading.Timer(0.2, server.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(BootstrapError, match="lost the store"):
        store.get("never", 10)
    assert time.monotonic() - start < 8
    timer.join()


def test_close_twice_and_port_is_free(server: StoreServer) -> None:
    server.close()
    server.close()
    with StoreServer(port=server.port) as again, Store(again.address, again.secret) as store:
        store.set("a", b"b")


def test_port_is_taken(server: StoreServer) -> None:
    with pytest.raises(OSError, match=f"Address already in use .127.0.0.1:{server.port}."):
        StoreServer(port=server.port)


def test_loopback_and_a_secret_by_default() -> None:
    with StoreServer() as one, StoreServer() as two:
        assert one.host == "127.0.0.1" and one._listener.getsockname()[0] == "127.0.0.1"
        assert one.port != two.port and one.secret != two.secret
        assert len(one.secret) == 32


def test_ipv6() -> None:
    with StoreServer("::1") as server, Store(server.address, server.secret) as store:
        assert server.address.startswith("[::1]:")
        store.set("a", b"b")
        assert store.get("a") == b"b"


def test_host_name() -> None:
    with StoreServer("localhost") as server, Store(server.address, server.secret) as store:
        assert server.address.startswith("localhost:")
        store.set("a", b"b")
        assert store.get("a") == b"b"


def test_name_whose_first_address_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def both(host: str, port: int, **options: object) -> object:
        assert host == "twofold"
        return [
            *real("::1", port, type=socket.SOCK_STREAM),
            *real("127.0.0.1", port, type=socket.SOCK_STREAM),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with StoreServer() as server, Store(f"twofold:{server.port}", server.secret, timeout=5) as store:
        store.set("a", b"b")


def test_name_that_does_not_resolve() -> None:
    start = time.monotonic()
    with pytest.raises(BootstrapError, match="no store answered at no-such-host.invalid:1 within 0.7 s"):
        Store("no-such-host.invalid:1", SECRET, timeout=0.7)
    with pytest.raises(OSError, match="not resolved|not known|resolution"):
        StoreServer("no-such-host.invalid", timeout=0.7)
    assert time.monotonic() - start < 10


def test_silent_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def silent(host: str, port: int, *, type: int) -> object:
        ended.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    start = time.monotonic()
    with pytest.raises(BootstrapError, match="the name 'host' was not resolved in time"):
        Store("host:1", SECRET, timeout=0.5)
    assert time.monotonic() - start < 6
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "pynccl-resolve":
            thread.join()


def test_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is asked for where the address is a number, and no address is turned into a name."""

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("looked up")

    for name in ("getaddrinfo", "getfqdn", "gethostbyaddr", "gethostbyname", "gethostname", "getnameinfo"):
        monkeypatch.setattr(socket, name, refuse)
    for host in ("127.0.0.1", "::1"):
        with StoreServer(host) as server, Store(server.address, server.secret) as store:
            store.set("a", b"b")


def test_proxies_are_not_for_it(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Store(server.address, server.secret, timeout=5) as store:
        store.set("a", b"b")


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:70000", "host:\u0663"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text)


# --- whom it trusts ---


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            "another secret, as long",
            r"the secret \(PYNCCL_SECRET\) or the id of the job \(PYNCCL_JOB_ID\) differs",
        ),
        ("", "it requires a secret, but this process has none; set PYNCCL_SECRET"),
    ],
)
def test_wrong_secret(theirs: str, words: str) -> None:
    start = time.monotonic()
    with StoreServer(secret=SECRET) as server, pytest.raises(BootstrapError, match=words):
        Store(server.address, theirs, timeout=30)
    with StoreServer(secret=SECRET) as server, pytest.raises(BootstrapError, match=words):
        Store(server.address, theirs, timeout=5)
    assert time.monotonic() - start < 10


def test_secret_for_a_server_without() -> None:
    with StoreServer(secret="") as server, pytest.raises(BootstrapError, match="it has no secret, but this"):
        Store(server.address, SECRET, timeout=30)


@pytest.mark.parametrize("secret", ["", SECRET])
def test_two_jobs_never_meet(secret: str) -> None:
    with (
        StoreServer(secret=secret, job="1") as one,
        StoreServer(secret=secret, job="2") as two,
        Store(one.address, secret, job="1") as first,
        Store(two.address, secret, job="2") as second,
    ):
        first.set("id", b"1")
        second.set("id", b"2")
        assert (first.get("id"), second.get("id")) == (b"1", b"2")
        start = time.monotonic()
        with pytest.raises(BootstrapError, match=r"id of the job \(PYNCCL_JOB_ID\) differs from the store's"):
            Store(two.address, secret, job="1", timeout=30)
        assert time.monotonic() - start < 10


def test_secret_and_job_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYNCCL_JOB_ID", "77")
    monkeypatch.setenv("PYNCCL_SECRET", "of the environment")
    with StoreServer() as server, Store(server.address) as store:
        assert (server.secret, server.job) == ("of the environment", "77")
        store.set("a", b"b")
    monkeypatch.delenv("PYNCCL_SECRET")
    file = tmp_path / "secret"
    file.write_text("out of that file\n")
    file.chmod(0o600)
    monkeypatch.setenv("PYNCCL_SECRET_FILE", str(file))
    with StoreServer() as server, Store(server.address) as store:
        assert server.secret == "out of that file"
        store.set("a", b"b")


def test_bad_secret_files(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(BootstrapError, match="cannot read .*: No such file"):
        read_secret({"PYNCCL_SECRET_FILE": str(file)})
    file.write_text("long enough for one")
    file.chmod(0o644)
    with pytest.raises(BootstrapError, match=r"is open to every user \(mode 0644\); expected 0600"):
        read_secret({"PYNCCL_SECRET_FILE": str(file)})
    file.chmod(0o600)
    assert read_secret({"PYNCCL_SECRET_FILE": str(file)}) == "long enough for one"
    file.write_text(" \n")
    with pytest.raises(BootstrapError, match="is empty; expected the secret"):
        read_secret({"PYNCCL_SECRET_FILE": str(file)})
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(BootstrapError, match="is not a regular file"):
        read_secret({"PYNCCL_SECRET_FILE": str(file)})
    assert read_secret({}) == ""


def test_one_warning_without_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pynccl")
    with StoreServer("0.0.0.0", secret="") as server:
        assert server._listener.getsockname()[0] == "0.0.0.0"
        with Store(format_address("127.0.0.1", server.port), "") as store:
            store.set("a", b"b")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no secret: every process can take part; set PYNCCL_SECRET" in caplog.text
    caplog.clear()
    with StoreServer("127.0.0.1", secret=""), StoreServer("::1", secret=""), StoreServer("0.0.0.0"):
        pass
    assert not caplog.records


# --- NCCL's own encryption ---


def test_encrypt_nccl_needs_a_secret() -> None:
    with pytest.raises(BootstrapError, match="no secret: expected PYNCCL_SECRET"):
        encrypt_nccl()


ENCRYPT = """
import pynccl
from pynccl.bootstrap import encrypt_nccl
try:
    encrypt_nccl()
except pynccl.NcclError as error:
    print(type(error).__name__, error)
else:
    print("taken")
"""


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "words"), [("2.28.9", "NotSupportedError"), ("2.32.3", "taken")])
def test_encrypt_nccl(
    run_python: Callable[..., object], released: Callable[[str], str], version: str, words: str
) -> None:
    done = run_python(ENCRYPT, PYNCCL_LIBRARY=released(version), PYNCCL_SECRET="not too short a secret")
    assert words in done.stdout  # type: ignore[attr-defined]


def test_encrypt_nccl_on_the_cpu_library(run_python: Callable[..., object]) -> None:
    done = run_python(ENCRYPT, PYNCCL_LIBRARY="cpu", PYNCCL_SECRET="not too short a secret")
    assert "NcclInvalidUsage" in done.stdout  # type: ignore[attr-defined]
    assert "does not encrypt" in done.stdout  # type: ignore[attr-defined]


# --- memory -------------------------------------------------------------------------------------------------


def _settled(server: StoreServer, seconds: float = 10) -> tuple[int, int]:
    """Return what the server counts as kept and as unread, once that has come to nothing."""
    deadline = time.monotonic() + seconds
    while (server._bytes or server._unread) and time.monotonic() < deadline:
        time.sleep(0.02)
    return server._bytes, server._unread


def test_wills_are_counted(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    monkeypatch.setattr(_server, "_MAX_BYTES", 1 << 20)
    with Store(server.address, server.secret) as one, Store(server.address, server.secret) as two:
        for _ in range(3):
            one.will("key", bytes(700_000))
        with pytest.raises(BootstrapError, match="it is full"):
            two.will("key", bytes(700_000))
        with pytest.raises(BootstrapError, match="it is full"):
            two.set("key", bytes(700_000))
        one.withdraw()
        two.will("key", bytes(700_000))
        # One that has died is counted as well, and then as the value.
        assert two._connection is not None
        two._connection.sock.shutdown(socket.SHUT_RDWR)
        time.sleep(0.2)
        with pytest.raises(BootstrapError, match="it is full"):
            one.set("other", bytes(700_000))
        assert len(one.get("key", 5)) == 700_000
        one.delete("key")
    assert _settled(server) == (0, 0)


def test_what_clients_wait_for_is_counted(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    monkeypatch.setattr(_server, "_MAX_BYTES", 0)
    monkeypatch.setattr(_server, "_MAX_WAITS", 200_000)

    def wait(number: int, store: Store) -> str:
        key = f"{number}".rjust(60_000)
        try:
            if number % 2:
                store.barrier(key, 2, timeout=1)
            else:
                store.get(key, timeout=1)
        except (TimeoutError, BootstrapError) as error:
            return "full" if "it is full" in str(error) else "waited"
        raise AssertionError

    assert sorted(map(str, together(server, 8, wait))) == ["full"] * 5 + ["waited"] * 3
    assert _settled(server) == (0, 0)


def test_requests_that_come_in_part_are_counted(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    monkeypatch.setattr(_server, "_MAX_UNREAD", 1 << 20)
    clients = [Store(server.address, server.secret, timeout=20) for _ in range(30)]
    for client in clients:
        client.add("here", 1)
        assert client._connection is not None
        client._connection.sock.setblocking(False)
        with suppress(BlockingIOError):
            # A request that never ends.
            client._connection.sock.send((1 << 20).to_bytes(4, "big") + bytes(900_000))
    time.sleep(0.5)
    assert 1 << 20 <= server._unread < 3 << 20
    with Store(server.address, server.secret, timeout=20) as other:
        start = time.monotonic()
        assert other.add("here", 1) == 31
        assert time.monotonic() - start < 10
        for client in clients:
            client._disconnect()
        # Now there is room, also for many at once that are larger than it.
        together(server, 8, lambda number, store: store.set(f"{number}", bytes(900_000)))
        for key in ("here", *map(str, range(8))):
            assert other.delete(key)
    assert _settled(server) == (0, 0)


# --- other users --------------------------------------------------------------------------------------------

STRANGER = """
import encodings.ascii, encodings.idna, os, sys
from pynccl import BootstrapError
from pynccl.bootstrap import Store, StoreServer, _peer, _store
# Before, since the other user may not be allowed to read this folder.
import pynccl._secure.noise
os.setresuid(12345, 12345, 12345)
role, address, secret = sys.argv[1:]
if role == "server":
    with StoreServer(secret=secret) as server:
        print(server.address, flush=True)
        sys.stdin.read()
else:
    if role == "attacker":
        _store.why_not = lambda *_: ""
    try:
        with Store(address, secret, timeout=3) as store:
            store.set("key", b"1")
            print("is in")
    except BootstrapError as error:
        print(error)
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_another_user(role: str, address: str = "", secret: str = "") -> subprocess.Popen[str]:
    return piped(
        [sys.executable, "-c", STRANGER, role, address, secret],
        stdin=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["netlink", "proc"])
def test_other_users_stay_out_without_a_secret(host: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("as in a sandbox")

    if way == "proc":
        monkeypatch.setattr(_peer, "_ask", refuse)
    with StoreServer(host, secret="") as server:
        with Store(server.address, "", timeout=5) as store:
            store.set("mine", b"1")
        with as_another_user("client", server.address) as client:
            said, _ = client.communicate(timeout=30)
        assert "it belongs to another user, so it may not be the job's store; set PYNCCL_SECRET" in said
        # One that does not mind who the server is; it comes again and again, in vain.
        with as_another_user("attacker", server.address) as client:
            said, _ = client.communicate(timeout=30)
        assert "is in" not in said and "the store at" in said, said
        with Store(server.address, "", timeout=5) as store, pytest.raises(TimeoutError):
            store.get("key", 0)


@as_root
def test_a_store_of_another_user_is_not_believed() -> None:
    with as_another_user("server") as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with pytest.raises(BootstrapError, match="it belongs to another user"):
            Store(address, "", timeout=5)
        server.kill()


def test_nobody_is_believed_where_the_kernel_does_not_say_who_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("as in a sandbox")

    caplog.set_level(logging.WARNING, "pynccl")
    monkeypatch.setattr(_peer, "_ask", refuse)
    monkeypatch.setattr(_peer, "_look_up", refuse)
    with StoreServer(secret="") as server:
        with pytest.raises(BootstrapError, match="its user is unknown .*PYNCCL_SECRET"):
            Store(server.address, "", timeout=5)
        # Clients that do not mind are refused all the same, which is said once.
        monkeypatch.setattr("pynccl.bootstrap._store.why_not", lambda *_: "")
        for _ in range(2):
            with pytest.raises(BootstrapError), Store(server.address, "", timeout=0.5) as store:
                store.set("key", b"1", timeout=0.5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no secret and refuses a client: its user is unknown" in caplog.text
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET) as store:
        store.set("key", b"1")


@as_root
def test_a_secret_is_proof_enough() -> None:
    with StoreServer(secret="known to both users") as server:
        with as_another_user("client", server.address, "known to both users") as client:
            said, _ = client.communicate(timeout=30)
        assert said == "is in\n"


def test_wrong_arguments_are_named() -> None:
    wrong: Any
    for wrong in ("x", -1, None, b""):
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises((TypeError, ValueError), match="timeout is .*; expected"):
                StoreServer(host, timeout=wrong)
    server = StoreServer("127.0.0.1", secret="")
    with Store(server.address, "", timeout=5) as store:
        with pytest.raises(TypeError, match="name is None; expected a str"):
            store.barrier(cast("Any", None), 1)
        with pytest.raises(TypeError, match=r"keys\[1\] is None; expected a str"):
            store.wait(["a", cast("Any", None)], timeout=0)
    server.close()
