"""The store: what it keeps, whom it refuses, and how long anything takes."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pynccl import BootstrapError
from pynccl.bootstrap import Store, StoreServer
from pynccl.bootstrap._store import MAX_FRAME, format_address, parse_address


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer() as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[Store]:
    with Store(server.address, server.token, timeout=5) as store:
        yield store


def test_set_and_get(store: Store) -> None:
    store.set("key", b"value\0\n")
    assert store.get("key") == b"value\0\n"
    store.set("key", b"")
    assert store.get("key", 0) == b""


def test_add(store: Store) -> None:
    assert [store.add("n", 3), store.add("n", -5), store.add("m", 1)] == [3, -2, 1]
    assert store.get("n") == b"-2"


def test_get_waits_for_set(server: StoreServer, store: Store) -> None:
    def later() -> None:
        time.sleep(0.2)
        with Store(server.address, server.token) as other:
            other.set("late", b"x")

    thread = threading.Thread(target=later)
    thread.start()
    start = time.monotonic()
    assert store.get("late") == b"x"
    assert 0.15 < time.monotonic() - start < 2
    thread.join()


def test_get_is_bounded(store: Store) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="nobody set 'never'"):
        store.get("never", 0.3)
    assert 0.25 < time.monotonic() - start < 1.3
    with pytest.raises(TimeoutError):
        store.get("never", 0)
    store.set("after", b"1")
    assert store.get("after") == b"1"


def test_many_clients_wait_together(server: StoreServer, store: Store) -> None:
    got: list[bytes] = []

    def client() -> None:
        with Store(server.address, server.token) as mine:
            mine.add("here", 1)
            got.append(mine.get("go", 10))

    threads = [threading.Thread(target=client) for _ in range(40)]
    for thread in threads:
        thread.start()
    while store.add("here", 0) < 40:
        time.sleep(0.01)
    store.set("go", b"!" * 1000)
    for thread in threads:
        thread.join()
    assert got == [b"!" * 1000] * 40


def test_large_value_and_its_limit(store: Store) -> None:
    value = os.urandom(MAX_FRAME - 100)
    store.set("large", value)
    assert store.get("large") == value
    with pytest.raises(ValueError, match="more than the store takes"):
        store.set("larger", bytes(MAX_FRAME))
    assert store.get("large") == value


@pytest.mark.parametrize("token", ["", "wrong"])
def test_wrong_token(server: StoreServer, token: str) -> None:
    with pytest.raises(BootstrapError, match="PYNCCL_STORE_TOKEN"):
        Store(server.address, token, timeout=5)


def test_server_without_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(b"pynccl-store-1\n\0" + bytes(16))
                connection.recv(100)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BootstrapError, match="does not know the job's token"):
            Store(format_address("127.0.0.1", fake.getsockname()[1]), "secret", timeout=5)
        thread.join()


def test_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP and a long greeting\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BootstrapError, match="no pynccl store"):
            Store(format_address("127.0.0.1", fake.getsockname()[1]), timeout=5)
        thread.join()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        os.urandom(70000),
        b"",
    ],
    ids=["http", "random", "silent"],
)
def test_strangers_harm_nobody(server: StoreServer, store: Store, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        with suppress(OSError):
            stranger.sendall(garbage)
        store.set("key", b"value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!I", MAX_FRAME + 1),
        struct.pack("!I", 0),
        struct.pack("!IBH", 3, 77, 0),
        struct.pack("!IBH", 5, 1, 9) + b"ab",
        struct.pack("!IBH", 4, 2, 1) + b"a",
    ],
    ids=["too long", "empty", "unknown operation", "key beyond the frame", "no argument"],
)
def test_bad_frames_end_only_their_connection(server: StoreServer, store: Store, frame: bytes) -> None:
    bad = Store(server.address, server.token, timeout=5)
    assert bad._sock is not None
    bad._sock.sendall(frame)
    assert bad._sock.recv(1) == b""
    bad.close()
    store.set("key", b"value")
    assert store.get("key") == b"value"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(BootstrapError, match=f"no store answered at 127.0.0.1:{port} within 0.5 s"):
        Store(f"127.0.0.1:{port}", timeout=0.5)
    assert time.monotonic() - start < 1.5


def test_server_goes_away(server: StoreServer, store: Store) -> None:
    timer = threading.Timer(0.2, server.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(BootstrapError, match="lost the store"):
        store.get("never", 10)
    assert time.monotonic() - start < 2
    timer.join()


def test_close_twice_and_port_is_free(server: StoreServer) -> None:
    server.close()
    server.close()
    with StoreServer(port=server.port) as again, Store(again.address, again.token) as store:
        store.set("a", b"b")


def test_loopback_by_default(server: StoreServer) -> None:
    assert server.host == "127.0.0.1"
    assert len(server.token) == 32


def test_ipv6() -> None:
    with StoreServer("::1") as server, Store(server.address, server.token) as store:
        assert server.address.startswith("[::1]:")
        store.set("a", b"b")
        assert store.get("a") == b"b"


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:70000"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text)
