"""`pynccl run` on several machines: how the launchers meet, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conftest import Launch, clean_environment
from hosts import Hosts, needs_root
from launchers import PYNCCL_RUN
from meeting import free_port, until_gone
from processes import completed

SECRET = "a secret of more than sixteen bytes"
Start = Callable[..., subprocess.Popen[str]]

PROGRAM = """
import json, os, sys, time
import numpy as np
import pynccl
with pynccl.init(timeout=30) as comm:
    x = np.full(100_000, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    assert (x == comm.size * (comm.size + 1) / 2).all()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    print(json.dumps([os.environ[name] for name in names]), flush=True)
    print("pid", os.getpid(), flush=True)
    # No rank fails before all have printed.
    comm.barrier()
print("closed", flush=True)
if sys.argv[1:]:
    rank, ending = sys.argv[1:]
    if rank == os.environ["RANK"]:
        exec(ending)
    time.sleep(60 if os.environ["PYNCCL_RESTART_COUNT"] == "0" else 0)
"""
# Of a rank that fails at its first start only.
FAILS_ONCE = "if os.environ['PYNCCL_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)"


@pytest.fixture
def start(tmp_path: Path, launched: Launch) -> Start:
    """Start the launcher of one node."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start_one(
        node: int, store: str, *args: str, options: tuple[str, ...] = ("-n", "2"), prefix: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        command = [*prefix, *PYNCCL_RUN, "--cpu", "--no-tag"]
        where = ["--nnodes", "2", "--node-rank", str(node), "--store", store]
        env = clean_environment() | {"PYNCCL_SECRET": SECRET}
        return launched([*command, *where, *options, str(program), *args], env=env)

    return start_one


def here() -> str:
    return f"127.0.0.1:{free_port()}"


def environments(out: str) -> list[list[str]]:
    return sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))


def pids(process: subprocess.Popen[str], count: int, *, closed: bool = True) -> list[int]:
    """Read the ranks' process ids; with `closed`, wait until they have closed the communicator."""
    assert process.stdout is not None
    found: list[int] = []
    left = count if closed else 0
    while len(found) < count or left:
        line = process.stdout.readline()
        assert line, process.communicate()
        if line.startswith("pid"):
            found.append(int(line.split()[1]))
        left -= closed and line == "closed\n"
    return found


def check_environments(first: str, second: str, address: str) -> None:
    """Node 0 has two ranks, and node 1 three."""
    of_first, of_second = environments(first), environments(second)
    port = of_first[0][-1]
    assert of_first == [[str(r), "5", str(r), "2", address, port] for r in range(2)]
    assert of_second == [[str(2 + r), "5", str(r), "3", address, port] for r in range(3)]


@needs_root
def test_two_machines(hosts: Hosts, start: Start) -> None:
    on = [["ip", "netns", "exec", name] for name in hosts.names]
    store = "10.199.0.1:29411"
    second = start(1, store, options=("-n", "3"), prefix=on[1])
    first = start(0, store, prefix=on[0])
    (out0, error0), (out1, error1) = first.communicate(timeout=50), second.communicate(timeout=50)
    assert (first.returncode, second.returncode) == (0, 0), error0 + error1
    check_environments(out0, out1, "10.199.0.1")


def test_a_failure_ends_the_ranks_of_all_machines(start: Start) -> None:
    store = here()
    first, second = (start(node, store, "3", "os.kill(os.getpid(), 9)") for node in range(2))
    running = pids(first, 2, closed=False)
    assert second.wait(40) == 128 + signal.SIGKILL
    _, said = first.communicate(timeout=40)
    assert first.returncode not in (0, None)
    assert "pynccl run: rank 3 was killed by SIGKILL on node 1; ending the ranks of this machine" in said
    until_gone(running)


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_end_of_a_launcher_ends_the_others(start: Start, node: int) -> None:
    store = here()
    launchers = [start(number, store, "9", "") for number in range(2)]
    running = [pid for launcher in launchers for pid in pids(launcher, 2)]
    launchers[node].kill()
    _, said = launchers[1 - node].communicate(timeout=40)
    assert launchers[1 - node].returncode not in (0, None)
    why = "the store of node 0 is lost" if node == 0 else "the launcher of node 1 is gone"
    assert why in said
    until_gone(running)


def test_a_signal_ends_all_machines(start: Start) -> None:
    store = here()
    first, second = (start(node, store, "9", "") for node in range(2))
    running = pids(first, 2) + pids(second, 2)
    second.send_signal(signal.SIGTERM)
    assert second.wait(40) == 128 + signal.SIGTERM
    _, said = first.communicate(timeout=40)
    assert first.returncode == 128 + signal.SIGTERM
    assert "pynccl run was ended by SIGTERM on node 1" in said
    until_gone(running)


def test_a_launcher_that_fails_ends_the_others(start: Start, tmp_path: Path) -> None:
    store, logs = here(), tmp_path / "logs"
    (logs / "rank3.out").mkdir(parents=True)
    first = start(0, store, "9", "")
    second = start(1, store, options=("-n", "2", "--log-dir", str(logs)))
    assert second.wait(40) == 1
    _, said = first.communicate(timeout=40)
    assert first.returncode not in (0, None)
    assert "pynccl run failed ([Errno 21] Is a directory" in said
    assert "ending the ranks of this machine" in said


def test_a_machine_that_does_not_come(start: Start) -> None:
    alone = start(0, here(), options=("-n", "2", "--timeout", "1"))
    _, said = alone.communicate(timeout=30)
    assert alone.returncode == 1
    assert "no pynccl run with --node-rank 1 has come to 127.0.0.1" in said


@pytest.mark.slow
def test_one_number_for_two_machines(start: Start) -> None:
    store = here()
    first, second, third = start(0, store), start(1, store), start(1, store)
    codes = sorted((second.wait(40), third.wait(40)))
    assert codes == [0, 1]
    assert first.wait(40) == 0
    said = second.communicate()[1] + third.communicate()[1]
    assert "--node-rank 1 was given on two machines; expected it on one" in said


def test_different_numbers_of_machines(start: Start) -> None:
    store = here()
    first = start(0, store)
    second = start(1, store, options=("-n", "2", "--nnodes", "3"))
    said = [launcher.communicate(timeout=40)[1] for launcher in (first, second)]
    assert [first.returncode, second.returncode] == [1, 1]
    assert "expected it equal" in said[0]
    # Under load the second may come to read it too late.
    assert "expected it equal" in said[1] or "node 0 has ended while the nodes met" in said[1]


@pytest.mark.slow
def test_keep_going_on_two_machines(start: Start) -> None:
    store, options = here(), ("-n", "2", "--keep-going")
    ending = "os.kill(os.getpid(), 9)"
    first, second = (start(node, store, "3", ending, options=options) for node in range(2))
    running = pids(first, 2)
    pids(second, 2)
    time.sleep(1)
    # The program of the other ranks goes on until it is told to end.
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.wait(40) == 128 + signal.SIGTERM
    assert second.wait(40) not in (0, None)
    until_gone(running)


# ---- restarts ----


@pytest.mark.parametrize("others", [("3", FAILS_ONCE), pytest.param((), marks=pytest.mark.slow)])
def test_restarts(others: tuple[str, ...], start: Start) -> None:
    """All machines start again, also if the ranks of one had ended well."""
    store, options = here(), ("-n", "2", "--restarts", "2")
    launchers = [
        start(0, store, *others, options=options),
        start(1, store, "3", FAILS_ONCE, options=options),
    ]
    for launcher in launchers:
        out, errors = launcher.communicate(timeout=50)
        assert launcher.returncode == 0, errors
        # Of both starts.
        assert len(environments(out)) == 4
        assert errors.count("pynccl run: restart ") == 1 and "pynccl run: restart 1 of 2\n" in errors


@pytest.mark.slow
def test_too_few_restarts(start: Start) -> None:
    store = here()
    failing = "3", "sys.exit(7)"
    launchers = [start(node, store, *failing, options=("-n", "2", "--restarts", "1")) for node in range(2)]
    for launcher in launchers:
        _, errors = launcher.communicate(timeout=50)
        assert errors.count("pynccl run: restart ") == 1
    # At the last start the ranks of node 0 may have ended before.
    assert launchers[1].returncode == 7


@pytest.mark.slow
def test_a_signal_restarts_nothing(start: Start) -> None:
    store = here()
    launchers = [start(node, store, "9", "", options=("-n", "2", "--restarts", "3")) for node in range(2)]
    running = [pid for launcher in launchers for pid in pids(launcher, 2)]
    launchers[1].send_signal(signal.SIGTERM)
    for launcher in launchers:
        _, errors = launcher.communicate(timeout=50)
        assert launcher.returncode == 128 + signal.SIGTERM
        assert "pynccl run: restart" not in errors
    until_gone(running)


@pytest.mark.slow
def test_a_new_launcher_takes_part_in_the_restart(start: Start) -> None:
    store, options = here(), ("-n", "2", "--restarts", "2")
    first, second = (start(node, store, "9", "", options=options) for node in range(2))
    pids(second, 2)
    second.kill()
    assert first.stderr is not None
    said = []
    while "restart 1 of 2" not in "".join(said):
        said.append(first.stderr.readline())
        assert said[-1], said
    assert any("the launcher of node 1 is gone" in line for line in said)
    again = start(1, store, "9", "", options=options)
    for launcher in (first, again):
        _, errors = launcher.communicate(timeout=50)
        assert launcher.returncode == 0, errors


@pytest.mark.slow
def test_a_new_launcher_comes_before_the_restart(start: Start) -> None:
    """The ranks of node 0 take some seconds to end."""
    store, options = here(), ("-n", "2", "--restarts", "2")
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid 0\\nclosed')"
    first, second = start(0, store, "0", ignore, options=options), start(1, store, "9", "", options=options)
    pids(first, 3), pids(second, 2)
    second.kill()
    again = start(1, store, "9", "", options=options)
    for launcher in (first, again):
        _, errors = launcher.communicate(timeout=80)
        assert launcher.returncode == 0, errors
        assert "given on two machines" not in errors


@pytest.mark.slow
def test_a_launcher_that_is_stopped(start: Start) -> None:
    """Node 0 waits for it until the time-out."""
    store, options = here(), ("-n", "2", "--timeout", "6")
    first, second = (start(node, store, options=options) for node in range(2))
    second_pid = second.pid
    pids(first, 2)
    os.kill(second_pid, signal.SIGSTOP)
    _, errors = first.communicate(timeout=80)
    assert first.returncode == 124, errors
    assert "waiting for node 1" in errors and "--timeout has passed; not ended: node 1" in errors


def test_different_numbers_of_restarts(start: Start) -> None:
    store = here()
    launchers = [start(node, store, options=("-n", "2", "--restarts", str(node))) for node in range(2)]
    for node, launcher in enumerate(launchers):
        _, errors = launcher.communicate(timeout=50)
        assert launcher.returncode == 1
        theirs = f"--restarts is {1 - node} on node {1 - node} and {node} on node {node}; expected it equal"
        assert theirs in errors, errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "2"], "--nnodes 2: expected --node-rank and --store HOST:PORT, too"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--store", "a:1"],
            "--node-rank 2: expected less than --nnodes, 2",
        ),
        (["--nnodes", "2", "--node-rank", "0", "--store", "a"], "--store a: expected HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "--store", "a:0"], "--store a:0: expected HOST:PORT"),
        (["--node-rank", "1"], "--node-rank and --store: expected --nnodes, too"),
    ],
)
def test_wrong_options(options: list[str], words: str) -> None:
    command = [*PYNCCL_RUN, "-n", "2", *options, "x.py"]
    done = completed(command, env=clean_environment(), timeout=30)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_store_that_cannot_be_served(start: Start) -> None:
    nobody = start(0, "192.0.2.1:29555")
    _, said = nobody.communicate(timeout=30)
    assert nobody.returncode == 1
    assert "--store 192.0.2.1:29555: node 0 cannot listen there" in said
    assert os.strerror(99) in said
