"""The stores that benchmarks/store.py compares, and how each of them is driven by many simulated clients.

One process is the server, a few are the clients: `python _store_peers.py server|clients PEER ...`. What a
client does is the same everywhere: connect, get the id that the first one sets (128 bytes), and leave a
barrier that all have entered.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ID = b"i" * 128
TIMEOUT = 120.0
SECRET = "s" * 32
HOST = "127.0.0.1"


def pynccl_server(secret: str) -> int:
    """Serve pynccl's store."""
    from pynccl.bootstrap import StoreServer

    server = StoreServer(HOST, secret=secret)
    keep.append(server)
    return int(server.port)


def pynccl_clients(port: int, mine: int, all_clients: int, leads: bool, secret: str) -> None:
    """Take each step with all clients before the next: they wait together, as so many processes would."""
    import socket

    from pynccl._secure import handshake
    from pynccl.bootstrap import _frames as f
    from pynccl.bootstrap._store import Connection

    deadline = time.monotonic() + TIMEOUT
    scheme = handshake.choose(secret, f.PURPOSE, b"", f.HELLO)

    def request(op: int, name: bytes, argument: bytes) -> bytes:
        return f.REQUEST.pack(op, len(name)) + name + argument

    def connect() -> Connection:
        sock = socket.socket()
        sock.connect((HOST, port))
        return Connection(sock, scheme)

    wait = int(TIMEOUT * 1000)
    clients = [connect() for _ in range(mine)]
    keep.extend(clients)
    for client in clients:
        client.prove(deadline, more=True)
    if leads:
        clients[0].ask(request(f.SET, b"id", ID), deadline)
        assert clients[0].answer(deadline)[0] == f.OK
    steps = [
        (request(f.GET, b"id", f.INT64.pack(wait)), ID),
        (request(f.BARRIER, b"all", f.BARRIER_ARGUMENT.pack(wait, all_clients)), b""),
    ]
    for frame, expected in steps:
        for client in clients:
            client.ask(frame, deadline)
        for client in clients:
            assert client.answer(deadline) == (f.OK, expected)


def torch_server(_: str) -> int:
    """Serve torch's store."""
    from torch.distributed import TCPStore

    server = TCPStore(HOST, 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
    keep.append(server)
    return int(server.port)


def torch_clients(port: int, mine: int, all_clients: int, leads: bool, _: str) -> None:
    """Take each step with one client after another, which is faster for it than a thread for each."""
    from torch.distributed import TCPStore

    clients = [
        TCPStore(HOST, port, None, False, timedelta(seconds=TIMEOUT), wait_for_workers=False)
        for _ in range(mine)
    ]
    keep.extend(clients)
    if leads:
        clients[0].set("id", ID)
    for client in clients:
        assert client.get("id") == ID
    for client in clients:
        if client.add("arrived", 1) == all_clients:
            client.set("all", b"1")
    for client in clients:
        client.wait(["all"])


def cupyx_server(_: str) -> int:
    """Serve cupyx's store from this process: its own would start one more."""
    import socket
    import threading

    from cupyx.distributed._store import TCPStore

    with socket.create_server((HOST, 0)) as probe:
        port = int(probe.getsockname()[1])
    store = TCPStore(int(sys.argv[4]))
    threading.Thread(target=store._server_loop, args=(HOST, port), daemon=True).start()
    keep.append(store)
    return port


def cupyx_clients(port: int, mine: int, all_clients: int, leads: bool, _: str) -> None:
    """Give each client a thread, because its barrier is one blocking request."""
    import threading

    from cupyx.distributed._store import TCPStoreProxy

    errors: list[BaseException] = []

    def run(first: bool) -> None:
        try:
            client = TCPStoreProxy(HOST, port)
            if first:
                client["id"] = ID
            # A key that is not there yet is an error to it, so the barrier comes first.
            client.barrier()
            assert client["id"] == ID
        except BaseException as error:
            errors.append(error)

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=run, args=(leads and i == 0,), daemon=True) for i in range(mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


Server, Clients = Callable[[str], int], Callable[[int, int, int, bool, str], None]
PEERS: dict[str, tuple[Server, Clients, str]] = {
    "pynccl": (pynccl_server, pynccl_clients, SECRET),
    "pynccl, no secret": (pynccl_server, pynccl_clients, ""),
    "torch": (torch_server, torch_clients, ""),
    "cupyx": (cupyx_server, cupyx_clients, ""),
}
keep: list[Any] = []


def memory() -> tuple[int, int]:
    """Return this process's resident memory and the most it ever was, in KiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]), int(lines["VmHWM"].split()[0])


def cpu_seconds() -> float:
    """Return what this process has used of the CPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(**facts: object) -> None:
    """Tell the benchmark."""
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Be one of the processes."""
    role, peer = sys.argv[1:3]
    server, clients, secret = PEERS[peer]
    if role == "server":
        port = server(secret)
        before, _ = memory()
        cpu = cpu_seconds()
        say(port=port)
        sys.stdin.readline()
        _, most = memory()
        say(kib=most - before, cpu=cpu_seconds() - cpu)
    else:
        port, mine, all_clients, leads = map(int, sys.argv[3:7])
        # What it imports is not what is measured.
        modules = {"torch": "torch.distributed", "cupyx": "cupyx.distributed._store"}
        importlib.import_module(modules.get(peer, "pynccl.bootstrap._store"))
        if secret:
            importlib.import_module("pynccl._secure.noise")
        say(ready=True)
        sys.stdin.readline()
        clients(port, mine, all_clients, bool(leads), secret)
        say(end=time.monotonic())
    sys.stdin.readline()


if __name__ == "__main__":
    main()
