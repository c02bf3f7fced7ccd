"""`pynccl ras`: the answers of NCCL's versions, and of strangers."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import pynccl_command
from conftest import ROOT, clean_environment
from hosts import needs_root
from meeting import free_port
from processes import completed
from pynccl import NcclTimeoutError, ras
from terminals import GREEN, RED, YELLOW, in_terminal

pytestmark = pytest.mark.timeout(60)

GOLDEN = Path(__file__).with_name("ras")
Answer = Callable[[socket.socket], None]
Serve = Callable[[Answer], str]


COMMAND = [sys.executable, "-m", "pynccl", "ras"]


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return completed([*COMMAND, *args], env=clean_environment(), timeout=40)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answer every connection in the way of a function, at the address that is returned."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run(answer: Answer) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                try:
                    answer(connection)
                except OSError:
                    continue

    def start(answer: Answer) -> str:
        threading.Thread(target=run, args=(answer,), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def nccl(text: str | None = None, as_json: str | None = None) -> Answer:
    """Return a server that gives these answers, in the steps of src/ras/client_support.cc."""

    def answer(connection: socket.socket) -> None:
        chosen = text
        for line in connection.makefile("r"):
            order = line.strip().lower()
            if order.startswith("client protocol "):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif order.startswith("timeout "):
                connection.sendall(b"OK\n")
            elif order == "set format json" and as_json is not None:
                chosen = as_json
                connection.sendall(b"OK\n")
            elif order.removeprefix("verbose ") == "status":
                assert chosen is not None
                return connection.sendall(chosen.encode())
            else:
                connection.sendall(f"ERROR: Unknown command {line.strip()}\n".encode())
        return None

    return answer


def silent(connection: socket.socket) -> None:
    """Do not answer until the client leaves."""
    while connection.recv(1000):
        pass


def golden(name: str) -> str:
    return (GOLDEN / name).read_text()


# --- the answers of NCCL ------------------------------------------------------------------------------------


def test_text_of_2_24(serve: Serve) -> None:
    found = ras.status(serve(nccl(golden("nccl-2.24.3-stopped.txt"))))
    assert (found.format, found.nccl_version, found.cuda_driver_version) == ("text", "2.24.3", 12060)
    assert (found.nodes, found.processes, found.devices) == (4, 32, 32)
    assert found.groups is not None
    assert [(group.size, group.errors) for group in found.groups] == [
        (32, ("INCOMPLETE",)),
        (32, ("MISMATCH",)),
    ]
    assert found.missing_processes == (ras.MissingProcess(3487984, "172.16.64.213", "5", False),)
    assert (found.timeouts, found.collection_seconds, found.ok) == (2, 2.05, False)
    stopped, behind = found.communicators
    assert (stopped.hash, stopped.ranks) == ("0xcf264af53edbe986", None)
    assert stopped.missing == (ras.MissingRank(21, unresponsive=True),)
    assert behind.lagging == (ras.Lag(None, 6649, 6650, 6, (0, 2, 3, 4, 5, 7)),)


def test_the_address_of_the_variable(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    at = serve(nccl(golden("nccl-2.24.3-stopped.txt")))
    monkeypatch.setenv("NCCL_RAS_ADDR", at)
    assert ras.status().nccl_version == "2.24.3"
    named = completed(COMMAND, env=clean_environment() | {"NCCL_RAS_ADDR": at}, timeout=40)
    assert named.stdout == command("--address", at).stdout
    # An address that is given counts more.
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{free_port()}")
    assert ras.status(at).nccl_version == "2.24.3"


# In a network of its own, where the port is free: a server that says what it was asked first.
AT_THE_DEFAULT = """
import socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.0.0.1", 28028)) as listener:
    client = subprocess.Popen([sys.executable, "-m", "pynccl", "ras"], stderr=subprocess.DEVNULL)
    listener.settimeout(30)
    connection, _ = listener.accept()
    with connection, connection.makefile() as lines:
        print(lines.readline())
client.wait(30)
"""


@needs_root
def test_the_default_address() -> None:
    command = ["unshare", "--net", sys.executable, "-c", AT_THE_DEFAULT]
    done = completed(command, env=clean_environment(), timeout=50)
    assert done.stdout.startswith("CLIENT PROTOCOL "), done.stderr


def test_colours_in_a_terminal(serve: Serve) -> None:
    at = serve(nccl(golden("nccl-2.24.3-stopped.txt")))
    shown, code = in_terminal([*COMMAND, "--address", at], clean_environment())
    plain = command("--address", at)
    assert (code, plain.returncode) == (2, 2)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in shown] == [*plain.stdout.splitlines(), ""]
    levels = {line: colour for line in shown for colour in (GREEN, YELLOW, RED) if line.startswith(colour)}
    assert {"does not answer", "INCOMPLETE", "MISMATCH"} <= words(levels, RED)
    assert "have launched" in words(levels, YELLOW)
    assert "processes" not in words(levels, RED) | words(levels, YELLOW)
    gone, _ = in_terminal([*COMMAND, "--port", str(free_port())], clean_environment())
    assert gone[0].startswith(f"{RED}pynccl ras: ")


def words(levels: dict[str, str], of: str) -> set[str]:
    known = ("does not answer", "INCOMPLETE", "MISMATCH", "have launched", "processes")
    return {word for word in known for line, colour in levels.items() if colour == of and word in line}


@pytest.mark.parametrize("version", ["2.28.9", "2.29.1"])
def test_json(serve: Serve, version: str) -> None:
    """That of 2.28.9 lacks a comma."""
    text = golden(f"nccl-{version}-missing.json")
    if version == "2.28.9":
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
    found = ras.status(serve(nccl(as_json=text)), json=True)
    assert found.nccl_version is not None
    assert found.nccl_version.startswith(version)
    (one,) = found.communicators
    assert (one.hash, one.size, one.status, one.errors) == (
        "0xae94423cfbb2ef4a",
        2,
        "RUNNING",
        ("INCOMPLETE",),
    )
    assert one.ranks is not None
    assert (one.ranks[0].pid, one.ranks[0].state, one.ranks[0].failed) == (1524344, "RUNNING", False)
    assert one.missing == (ras.MissingRank(1, "172.16.64.245", 1524345, 1, 1, True, False),)


def test_verbose_shows_every_rank(serve: Serve) -> None:
    address = serve(nccl(as_json=golden("nccl-2.29.1-missing.json")))
    short, whole = (command("--address", address, *args) for args in ([], ["-v"]))
    assert short.returncode == whole.returncode == 2
    assert "1524344" not in short.stdout and "1524344" in whole.stdout


@pytest.mark.parametrize("takes_over", [True, False])
def test_follow_asks_again_until_nobody_answers(serve: Serve, takes_over: bool) -> None:
    """A server that is missing once may be another rank that takes over."""
    answer, asked = nccl(as_json=golden("nccl-2.29.1-missing.json")), Counter[str]()

    def answers_at_times(connection: socket.socket) -> None:
        asked["times"] += 1
        if asked["times"] <= 3 or (takes_over and asked["times"] == 5):
            answer(connection)

    address = serve(answers_at_times)
    done = command("--address", address, "--follow", "0.1", "--json")
    answers, times = (4, 7) if takes_over else (3, 5)
    assert (done.returncode, asked["times"]) == (0, times)
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [False] * answers
    assert done.stderr == f"pynccl ras: the job has ended: nobody answers at {address} any more\n"


def test_follow_goes_on_while_the_server_is_stopped(serve: Serve) -> None:
    answer, asked = nccl(as_json=golden("nccl-2.29.1-missing.json")), Counter[str]()

    def silent_once(connection: socket.socket) -> None:
        asked["times"] += 1
        if asked["times"] == 2:
            silent(connection)
        elif asked["times"] < 4:
            answer(connection)

    address = serve(silent_once)
    done = command("--address", address, "--follow", "0.1", "--timeout", "1", "--json")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    assert "did not answer the greeting within 1 s (1 of 10 in a row)\n" in done.stderr


def test_follow_ends_when_the_server_stays_stopped(serve: Serve) -> None:
    """Only answers that are missed in a row count."""
    answer, asked = nccl(as_json=golden("nccl-2.29.1-missing.json")), Counter[str]()

    def silent_at_times(connection: socket.socket) -> None:
        asked["times"] += 1
        if asked["times"] in (1, 3):
            answer(connection)
        else:
            silent(connection)

    address = serve(silent_at_times)
    done = command("--address", address, "--follow", "0.1", "--timeout", "0.5", "--json", "--max-missed", "2")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2)
    late = f"pynccl ras: The server at {address} did not answer the greeting within 0.5 s"
    assert done.stderr.splitlines() == [
        *(f"{late} ({number} of 2 in a row)" for number in (1, 1, 2)),
        f"pynccl ras: 2 answers in a row have not come from {address}; --max-missed allows more",
    ]


def test_the_answer_of_the_page(serve: Serve) -> None:
    shown = command("--address", serve(nccl(as_json=golden("nccl-2.29.1-missing.json")))).stdout
    page = (ROOT / "docs" / "ras.md").read_text()
    assert f"$ pynccl ras\n{re.sub('127.0.0.1:[0-9]+', 'localhost:28028', shown)}```\n" in page


def test_who_is_behind(serve: Serve) -> None:
    answer = json.loads(golden("nccl-2.29.1-missing.json"))
    one = answer["communicators"][0]
    first = one["ranks"][0]
    second = json.loads(json.dumps(first)) | {"rank": 1, "pid": 7}
    first["collective_counts"] |= {"AllReduce": 5, "Broadcast": 2}
    second["collective_counts"] |= {"AllReduce": 3, "Broadcast": 2}
    one |= {"ranks": [first, second], "missing_ranks": []}
    address = serve(nccl(as_json=json.dumps(answer)))
    found = ras.status(address)
    assert found.communicators[0].lagging == (ras.Lag("AllReduce", 3, 5, 1, (1,)),)
    assert (found.communicators[0].errors, found.ok) == (("MISMATCH",), False)
    shown = command("--address", address)
    assert (
        "rank 1 has launched 3 of 5 AllReduce operations (process 7 on 172.16.64.245 GPU 0)" in shown.stdout
    )
    assert shown.returncode == 2
    printed = json.loads(command("status", "--json", "--address", address).stdout)
    assert printed["communicators"][0]["lagging"][0]["ranks"] == [1]


def test_a_rank_that_has_failed(serve: Serve) -> None:
    answer = json.loads(golden("nccl-2.29.1-missing.json"))
    answer["communicators"][0]["ranks"][0]["status"]["async_error"] = 6
    shown = command("--address", serve(nccl(as_json=json.dumps(answer))))
    assert "rank 0 has failed: ncclRemoteError (process 1524344 on " in shown.stdout


def test_unreadable_json_is_asked_for_as_text(serve: Serve) -> None:
    server = nccl(golden("nccl-2.24.3-stopped.txt"), as_json='{"communicators": [')
    address = serve(server)
    assert ras.status(address).format == "text"
    with pytest.raises(ras.RasError, match="cannot be read: it is not JSON"):
        ras.status(address, json=True)


def test_a_torn_text_is_refused(serve: Serve) -> None:
    text = golden("nccl-2.24.3-stopped.txt")
    with pytest.raises(ras.RasError, match="the answer is incomplete"):
        ras.status(serve(nccl(text[: text.index("Warnings")])))


def test_control_characters_are_escaped(serve: Serve) -> None:
    answer = golden("nccl-2.29.1-missing.json").replace("172.16.64.245", "\\u001b]0;owned\\u0007")
    shown = command("--address", serve(nccl(as_json=answer)))
    assert "\x1b" not in shown.stdout
    assert "on \\x1b]0;owned" in shown.stdout


# --- no server, and strangers -------------------------------------------------------------------------------


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shown = command("--host", "127.0.0.1", "--port", str(port))
    assert shown.returncode == 1
    assert f"pynccl ras: No RAS server answers at 127.0.0.1:{port}: Connection refused" in shown.stderr


def test_a_stranger(serve: Serve) -> None:
    def http(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\x1b\r\n\r\n")

    with pytest.raises(ras.RasError, match=r"is no RAS server: it answered 'HTTP/1.1 400 Bad Request\\+x1b'"):
        ras.status(serve(http))


def test_a_server_that_never_answers(serve: Serve) -> None:
    address = serve(lambda connection: time.sleep(30))
    with pytest.raises(NcclTimeoutError, match=r"did not answer the greeting within 0\.1 s"):
        ras.status(address, timeout=0.1)


@pytest.mark.slow
def test_a_server_that_never_ends(serve: Serve) -> None:
    """A byte now and then does not keep the client."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
        while True:
            connection.sendall(b"{")
            time.sleep(0.2)

    with pytest.raises(NcclTimeoutError, match="did not answer the state of the job within 7 s"):
        ras.status(serve(drip), timeout=0.1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"address": "nowhere"}, "address must be HOST:PORT .* not 'nowhere'"),
        ({"address": "::1:5"}, "address must be HOST:PORT"),
        ({"address": "host:70000"}, "address must be HOST:PORT"),
        ({"timeout": 0}, "timeout must be more than 0 .* not 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ras.status(**arguments)  # type: ignore[arg-type]


def test_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", "nowhere")
    with pytest.raises(ValueError, match="NCCL_RAS_ADDR must be HOST:PORT"):
        ras.status()


def test_an_empty_host() -> None:
    done = pynccl_command("ras", "--host", "", "--port", "5")
    assert done.exit_code == 2
    assert "'--host': expected a host, not ''" in done.output


def test_most_missed_answers_without_follow() -> None:
    done = pynccl_command("ras", "--max-missed", "3")
    assert done.exit_code == 2
    assert "--max-missed 3: expected --follow, too" in done.output


def test_an_address_without_its_option() -> None:
    done = pynccl_command("ras", "node7:28028")
    assert done.exit_code == 2
    assert "expected status, or --address node7:28028, not 'node7:28028'" in " ".join(done.output.split())
