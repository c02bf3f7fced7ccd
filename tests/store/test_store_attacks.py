"""The store under attack: what strangers cannot read, set, hold up or fill."""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import pynccl
from conftest import ROOT
from pynccl import BootstrapError, testing
from pynccl.bootstrap import Store, StoreServer
from pynccl.bootstrap._frames import MAX_SEALED
from pynccl.bootstrap._store import PromptStore, format_address
from relays import relay
from stores import SECRET

pytestmark = pytest.mark.slow

ATTACKER = ROOT / "tests" / "helpers" / "store_attacker.py"
SERVER = """
import resource, sys
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from pynccl.bootstrap import StoreServer
with StoreServer(secret=sys.argv[2]) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def resident(pid: int) -> int:
    """Return the most memory that a process ever had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


# --- crowds ---


def rendezvous(rank: int, nranks: int, address: str) -> None:
    os.environ.update(PYNCCL_STORE=address, PYNCCL_SECRET=SECRET)
    for _ in range(3):
        with pynccl.init(timeout=40) as comm:
            assert (comm.all_reduce(np.ones(3)) == nranks).all()


@pytest.mark.parametrize(
    ("kind", "files"),
    [("half-open", 0), ("garbage", 0), ("oversized", 0), ("slow", 0), ("all", 0), ("all", 256)],
)
def test_a_job_comes_together_under_attack(kind: str, files: int) -> None:
    with process("-c", SERVER, str(files), SECRET) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with Store(address, SECRET, timeout=10) as store:
            store.set("before", b"x")
            before = resident(server.pid)
            with process(str(ATTACKER), kind, address) as attacker:
                assert attacker.stdout is not None
                testing.run(4, rendezvous, address, backend="cpu", timeout=50)
                assert attacker.stdout.readline() == "enough\n"
                # Who is in already does not even notice.
                for turn in range(100):
                    start = time.monotonic()
                    assert store.add("turn", 1) == turn + 1
                    assert time.monotonic() - start < 6
                for _ in range(5):
                    with Store(address, SECRET, timeout=10) as late:
                        assert late.get("before", 0) == b"x"
                open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
                assert resident(server.pid) - before < 32 << 20
                soft = files or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                assert open_files < soft // 2


def test_strangers_in_front_of_a_full_house() -> None:
    """Where the files are used up by clients, that is said once, and goes on when one leaves."""
    with process("-c", SERVER, "64", SECRET) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        clients: list[Store] = []
        with pytest.raises(BootstrapError, match="it did not answer in time"):
            clients.extend(Store(address, SECRET, timeout=1) for _ in range(64))
        assert len(clients) > 40
        clients[0].set("a", b"b")
        for client in clients[1:5]:
            client.close()
        with Store(address, SECRET, timeout=5) as late:
            assert late.get("a", 1) == b"b"
        for client in clients:
            client.close()


# --- one at a time ---


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, os.urandom(70000), b""],
    ids=["http", "random", "silent"],
)
def test_strangers_harm_nobody(server: StoreServer, store: Store, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        with suppress(OSError):
            stranger.sendall(garbage)
        store.set("key", b"value")
        assert store.get("key") == b"value"


def test_the_silent_are_sent_away(server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.bootstrap._server._HELLO_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        start = time.monotonic()
        with suppress(OSError):
            for byte in b"pynccl-store-3\n\1" + bytes(48):
                stranger.send(bytes([byte]))
                time.sleep(0.1)
        assert 0.4 < time.monotonic() - start < 6
    store.set("key", b"value")


def test_a_proof_that_waits_for_a_request_comes_alone_in_the_end(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pynccl.bootstrap._server._HELLO_SECONDS", 1.0)
    with PromptStore(server.address, SECRET, timeout=5) as store:
        connection = store._connection
        time.sleep(1.5)
        store.set("key", b"value")
        assert store._connection is connection


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!I", MAX_SEALED + 1),
        struct.pack("!I", 0),
        struct.pack("!IBH", 3, 77, 0),
        struct.pack("!IBH", 5, 1, 9) + b"ab",
        struct.pack("!IBH", 4, 2, 1) + b"a",
        struct.pack("!IBH", 4, 5, 1) + b"a",
    ],
    ids=["too long", "empty", "unknown operation", "key beyond the frame", "no argument", "no count"],
)
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["secret", "open"])
def test_bad_frames_end_only_their_connection(secret: str, frame: bytes) -> None:
    with StoreServer(secret=secret) as server, Store(server.address, secret) as store:
        with Store(server.address, secret, timeout=5) as bad:
            assert bad._connection is not None
            bad._connection.sock.sendall(frame)
            assert bad._connection.sock.recv(1) == b""
        store.set("key", b"value")
        assert store.get("key") == b"value"


def test_a_client_that_reads_nothing() -> None:
    with StoreServer(secret="") as server, Store(server.address, "", timeout=10) as store:
        store.set("large", bytes(1 << 19))
        request = struct.pack("!IBH", 3 + 5 + 8, 2, 5) + b"large" + bytes(8)
        with Store(server.address, "", timeout=5) as deaf:
            assert deaf._connection is not None
            sock = deaf._connection.sock
            with suppress(OSError):
                for _ in range(100_000):
                    sock.sendall(request)
                raise AssertionError("the server has kept it all")
        store.set("key", b"value")
        assert store.get("key") == b"value"


class Tap:
    """Somebody on the way between client and server, who sees everything and may change it."""

    def __init__(self, port: int, spoil_after: int | None = None) -> None:
        self.seen, self._spoil_after = {True: b"", False: b""}, spoil_after
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address("127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        pumps = [
            threading.Thread(target=self._pump, args=(client, server, True)),
            threading.Thread(target=self._pump, args=(server, client, False)),
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        def spoilt(data: bytes) -> bytes:
            self.seen[to_server] += data
            if self._spoil_after is not None and to_server and len(self.seen[True]) > self._spoil_after:
                return data[:-1] + bytes((data[-1] ^ 1,))
            return data

        relay(source, target, spoilt)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        self._listener.close()


def test_who_listens_on_the_way_reads_nothing(server: StoreServer, store: Store) -> None:
    tap = Tap(server.port)
    with Store(tap.address, SECRET, timeout=5) as tapped:
        tapped.set("the name", b"the value")
        assert tapped.get("the name") == b"the value"
    tap.close()
    both = tap.seen[True] + tap.seen[False]
    assert len(both) > 150
    for text in (b"the name", b"the value", SECRET.encode()):
        assert text not in both
    # Nor is what was heard worth anything later.
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(tap.seen[True])
        answer = b""
        with suppress(ConnectionError):
            while part := stranger.recv(1000):
                answer += part
        # Its first message is right, but nobody has the private key behind it.
        assert len(answer) in (0, 64) and answer != tap.seen[False][:64]
    assert store.get("the name") == b"the value"


def test_who_sits_on_the_way_changes_nothing(server: StoreServer, store: Store) -> None:
    store.set("key", b"right")
    tap = Tap(server.port, spoil_after=80)
    with (
        Store(tap.address, SECRET, timeout=5) as tapped,
        pytest.raises(BootstrapError, match="the store at .* does not respond"),
    ):
        tapped.set("key", b"wrong")
    tap.close()
    assert store.get("key") == b"right"


# --- impostors ---


@contextmanager
def impostor(*says: bytes) -> Iterator[str]:
    """Listen as something else than the store, and say these things to the first client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                for text in says:
                    connection.sendall(text)
                    connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        yield format_address("127.0.0.1", listener.getsockname()[1])
        thread.join()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ([b"220 mail.example.org ESMTP and a long greeting\r\n"], "it is not a pynccl store"),
        ([b"SSH-2.0\r\n"], "it is not a pynccl store"),
        ([b"pynccl-store-3\n\1" + bytes(48)], "the secret .* differs from the store's"),
        ([b"pynccl-store-3\n\0" + bytes(48)], "it has no secret, but this process has one"),
        ([b"pynccl-store-3\n\2"], "the secret .* differs from the store's"),
        ([b"pynccl-store-2\n\1" + bytes(48)], "it is not a pynccl store"),
    ],
    ids=["mail", "ssh", "another store", "a store without a secret", "a refusal", "an older store"],
)
def test_impostors(says: list[bytes], words: str) -> None:
    start = time.monotonic()
    with impostor(*says) as address, pytest.raises(BootstrapError, match=words):
        Store(address, SECRET, timeout=20)
    assert time.monotonic() - start < 6


def test_a_listener_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = format_address("127.0.0.1", listener.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(BootstrapError, match="it did not answer in time"):
            Store(address, SECRET, timeout=0.5)
        assert time.monotonic() - start < 6
