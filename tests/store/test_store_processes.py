"""The store among processes: every way to start them, their ends, and Ctrl-C."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meeting import free_port
from processes import piped
from pynccl import BootstrapError
from pynccl.bootstrap import Store, StoreServer, _store

SECRET = "a secret of these tests"


@contextmanager
def python(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that has said its first line, and kill it in the end."""
    with piped([sys.executable, "-c", code, *args], stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# --- starting ---


def take_part(address: str, index: int, count: int) -> None:
    with Store(address, SECRET, timeout=30) as store:
        if index == 0:
            store.set("id", b"i" * 128)
        assert store.get("id") == b"i" * 128
        assert 1 <= store.add("here", 1) <= count
        store.barrier("all", count + 1)
        assert store.get("here") == b"%d" % count


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
def test_start_methods(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=40) as store:
        clients = [context.Process(target=take_part, args=(server.address, i, 3)) for i in range(3)]
        for client in clients:
            client.start()
        store.barrier("all", 4)
        for client in clients:
            client.join()
        assert [client.exitcode for client in clients] == [0, 0, 0]
        assert store.get("here", 0) == b"3"


def serve(pipe: Any) -> None:
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET) as own:
        pipe.send(server.address)
        assert own.get("done", 20) == b"x"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_the_server_in_a_process_of_any_kind(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,))
    child.start()
    with Store(ours.recv(), SECRET, timeout=10) as store:
        store.set("done", b"x")
    child.join()
    assert child.exitcode == 0
    ours.close()
    theirs.close()


def children() -> list[str]:
    return sorted(
        pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()
    )


def test_one_thread_and_no_process() -> None:
    before, processes = threading.active_count(), children()
    with StoreServer(secret=SECRET) as server:
        clients = [Store(server.address, SECRET) for _ in range(50)]
        assert threading.active_count() == before + 1
        assert children() == processes
        for client in clients:
            client.close()
    assert threading.active_count() == before


def test_within_a_running_event_loop() -> None:
    """As in a Jupyter kernel, whose cells run inside a loop."""

    async def cell() -> bytes:
        with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=10) as store:
            other = asyncio.to_thread(take_part, server.address, 0, 1)
            task = asyncio.ensure_future(other)
            await asyncio.sleep(0.05)
            await asyncio.to_thread(store.barrier, "all", 2)
            await task
            return store.get("id")

    assert asyncio.run(cell()) == b"i" * 128


FORK = """
import os, sys, time
from pynccl.bootstrap import Store, StoreServer
server = StoreServer(secret=sys.argv[1])
store = Store(server.address, sys.argv[1], timeout=10)
store.set("of the parent", b"1")
child = os.fork()
if child == 0:
    # The store goes on with a connection of its own; the server is not this process's.
    assert store.get("of the parent") == b"1"
    server.close()
    print(os.getpid(), flush=True)
    store.set("of the child", b"2")
    time.sleep(60)
assert store.get("of the child") == b"2"
print(server.address, flush=True)
sys.stdin.read()
"""


def test_a_forked_child_keeps_nothing_open() -> None:
    with python(FORK, SECRET) as parent:
        orphan, address = int(line(parent)), line(parent)
        try:
            with Store(address, SECRET, timeout=5) as store:
                timer = threading.Timer(0.3, parent.kill)
                timer.start()
                start = time.monotonic()
                with pytest.raises(BootstrapError, match="lost the store"):
                    store.get("never", 20)
                assert time.monotonic() - start < 6
                timer.join()
            parent.wait()
            # The port is free again, though the child is still there.
            os.kill(orphan, 0)
            StoreServer(port=int(address.rpartition(":")[2])).close()
        finally:
            os.kill(orphan, signal.SIGKILL)


# --- ends ---

SERVER = """
import sys
from pynccl.bootstrap import StoreServer
server = StoreServer(secret=sys.argv[1])
print(server.address, flush=True)
sys.stdin.read()
"""
CALLS = {
    "get": lambda store, timeout: store.get("never", timeout),
    "wait": lambda store, timeout: store.wait(["never"], timeout),
    "barrier": lambda store, timeout: store.barrier("b", 2, timeout),
    "set": lambda store, timeout: store.set("k", b"v", timeout),
    "add": lambda store, timeout: store.add("n", 1, timeout),
    "delete": lambda store, timeout: store.delete("k", timeout),
}


@pytest.mark.parametrize("how", ["get", "wait", "barrier"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_killed(how: str, number: int) -> None:
    with python(SERVER, SECRET) as server, Store(line(server), SECRET, timeout=20) as store:
        timer = threading.Timer(0.2, server.send_signal, [number])
        timer.start()
        start = time.monotonic()
        with pytest.raises(BootstrapError, match="lost the store at .*: "):
            CALLS[how](store, 20)
        assert time.monotonic() - start < 6
        timer.join()
        # And so does every later call, within its own time.
        with pytest.raises(BootstrapError, match="no store answered"):
            CALLS[how](store, 0.2)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "get" else pytest.mark.slow) for how in CALLS]
)
def test_server_that_hangs(how: str) -> None:
    with python(SERVER, SECRET) as server, Store(line(server), SECRET, timeout=20) as store:
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
        start = time.monotonic()
        with pytest.raises(
            BootstrapError, match="the store at .* does not respond: it did not answer in time"
        ):
            CALLS[how](store, 0.5)
        assert 0.4 < time.monotonic() - start < 6
        start = time.monotonic()
        with pytest.raises(BootstrapError, match="it did not answer in time"):
            CALLS[how](store, 0.3)
        assert time.monotonic() - start < 6
        server.send_signal(signal.SIGCONT)
        store.set("again", b"there")
        assert store.get("again") == b"there"


def test_clients_that_die_hold_nobody_up() -> None:
    code = """
import sys
from pynccl.bootstrap import Store
store = Store(sys.argv[1], sys.argv[2])
print("in", flush=True)
store.barrier("all", 3)
"""
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=10) as store:
        with python(code, server.address, SECRET) as client:
            assert line(client) == "in"
            time.sleep(0.2)
        with pytest.raises(TimeoutError, match="1 of 3 clients arrived"):
            store.barrier("all", 3, 0.5)


WILLS = """
import os, signal, sys
from pynccl.bootstrap import Store
how, address, secret = sys.argv[1:]
store = Store(address, secret)
store.will("lost", b"first")
store.will("lost", b"the " + how.encode())
print("said", flush=True)
if how == "interrupted":
    try:
        store.get("never")
    except KeyboardInterrupt:
        store.add("back", 1)
        store.get("never")
if how == "withdrawn":
    store.withdraw()
if how == "closed":
    store.close()
if how == "forked":
    child = os.fork()
    if child == 0:
        # The will is the parent's: a child that uses the store and dies changes nothing.
        store.add("child", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    print("alone", flush=True)
if how != "exits":
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how",
    [
        "killed",
        "closed",
        "withdrawn",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("exits", "interrupted", "forked")),
    ],
)
def test_wills(how: str) -> None:
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=10) as store:
        with python(WILLS, how, server.address, SECRET) as client:
            assert line(client) == "said"
            if how == "forked":
                assert line(client) == "alone"
            if how == "interrupted":
                time.sleep(0.2)
                client.send_signal(signal.SIGINT)
                store.wait("back")
            if how not in ("killed", "exits"):
                with pytest.raises(TimeoutError):
                    store.get("lost", 1.0)
        if how in ("closed", "withdrawn"):
            with pytest.raises(TimeoutError):
                store.get("lost", 1.0)
        else:
            assert store.get("lost", 3) == b"the " + how.encode()


@pytest.mark.parametrize("secret", [SECRET, ""])
def test_a_close_cancels_a_will_while_the_store_owes_an_answer(secret: str) -> None:
    with python(SERVER, secret) as server, Store(address := line(server), secret, timeout=10) as other:
        with Store(address, secret, timeout=10) as store:
            store.will("lost", b"died")
            server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(BootstrapError, match="does not respond"):
                store.get("never", 0.1)
        server.send_signal(signal.SIGCONT)
        with pytest.raises(TimeoutError):
            other.get("lost", 1.5)


def test_a_reset_behind_a_cancelled_will_ends_no_server() -> None:
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=10) as other:
        store = Store(server.address, SECRET, timeout=10)
        store.will("lost", b"died")
        connection = store._connection
        assert connection is not None
        waits = _store._frame(_store.f.GET, "never", _store.f.INT64.pack(60_000))
        connection.ask(waits, time.monotonic() + 5)
        store._withdraw_unheard(connection)
        time.sleep(0.2)
        # The close resets the connection.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sock.close()
        with pytest.raises(TimeoutError):
            other.get("lost", 1.0)
        other.set("still", b"there")


def test_a_will_changes_nothing_that_is_set() -> None:
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=10) as store:
        with python(WILLS, "killed", server.address, SECRET) as client:
            assert line(client) == "said"
            store.set("lost", b"and found")
        time.sleep(1)
        assert store.get("lost") == b"and found"


# --- Ctrl-C ---

INTERRUPTED = """
import socket, sys, threading, time
from pynccl.bootstrap import Store, StoreServer
how, address, secret = sys.argv[1:]
if how == "name":
    real = socket.getaddrinfo
    def slow(*args, **options):
        time.sleep(5)
        return real(*args, **options)
    socket.getaddrinfo = slow
if how in ("name", "connect", "silent"):
    call = lambda: Store(address, secret, timeout=60)
else:
    store = Store(address, secret, timeout=60)
    if how == "lock":
        threading.Thread(target=store.get, args=("never",), daemon=True).start()
        time.sleep(0.2)
    call = {
        "get": lambda: store.get("never"),
        "wait": lambda: store.wait(["never"]),
        "barrier": lambda: store.barrier("b", 2),
        "lock": lambda: store.set("key", b""),
    }[how]
print("waiting", flush=True)
try:
    call()
except KeyboardInterrupt:
    if how not in ("name", "connect", "silent", "lock"):
        # Nothing is left over that a later call could take for its answer.
        store.set("key", b"fine")
        assert store.get("key") == b"fine"
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["name", "connect", "silent", "get", "wait", "barrier", "lock"])
def test_ctrl_c(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, StoreServer(secret=SECRET) as server:
        address = {
            "name": "no-such-host.invalid:1",
            "connect": f"127.0.0.1:{free_port()}",
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
        }.get(how, server.address)
        with python(INTERRUPTED, how, address, SECRET) as client:
            assert line(client) == "waiting"
            time.sleep(0.4)
            start = time.monotonic()
            client.send_signal(signal.SIGINT)
            assert line(client) == "interrupted", client.communicate(timeout=10)[1]
            assert time.monotonic() - start < 6
            assert client.wait(timeout=10) == 0


AT_RANDOM = """
import random, signal, sys
from pynccl import BootstrapError
from pynccl.bootstrap import Store
store, rng, interrupted = Store(*sys.argv[1:], timeout=10), random.Random(1), 0
store.set("key", b"value")
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for _ in range(1000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + 4e-4 * rng.random())
        while True:
            store.get("key")
    except KeyboardInterrupt:
        interrupted += 1
    assert store.get("key", timeout=5) == b"value"
assert interrupted == 1000
def use(*_):
    try:
        store.get("key")
    except BootstrapError as error:
        print(error, flush=True)
signal.signal(signal.SIGALRM, use)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    store.get("never", timeout=0.5)
except TimeoutError:
    assert store.get("key") == b"value"
    print("usable", flush=True)
"""


def test_ctrl_c_at_any_moment() -> None:
    """Also between the acquisition of the lock and the next statement; a handler that uses it is refused."""
    with StoreServer(secret=SECRET) as server, python(AT_RANDOM, server.address, SECRET) as client:
        out, errors = client.communicate(timeout=50)
        assert out.splitlines()[1:] == ["usable"], errors
        assert "is in use by the call that this signal handler interrupted" in out
