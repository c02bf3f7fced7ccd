"""`pynccl run`: the environment of the ranks, their output, and how they end, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import pynccl_command
from conftest import Launch, Script
from launchers import PYNCCL_RUN
from meeting import state, until, until_gone
from processes import completed
from pynccl._library import cuda
from pynccl._run.launch import GRACE_SECONDS, STACKS_SECONDS
from terminals import RED, in_terminal

Started = Callable[..., subprocess.Popen[str]]


def _command(*args: str) -> list[str]:
    return [*PYNCCL_RUN, *args]


def _environment(**env: str) -> dict[str, str]:
    outside = ("PYNCCL_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if not name.startswith(outside)} | env


def launch(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return completed(_command(*args), env=_environment(**env))


@pytest.fixture
def started(launched: Launch) -> Started:
    """Start launchers whose end the test brings about; they are killed if it does not."""

    def start(*args: str, **env: str) -> subprocess.Popen[str]:
        return launched(_command(*args), env=_environment(**env))

    return start


def _pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """Read the process ids that the ranks print first."""
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[-1]) for _ in range(count)]


PRINT_ENVIRONMENT = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR PYNCCL_LIBRARY OMP_NUM_THREADS".split()
given = int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0])
# No connection can have taken the port by chance.
port, store = 1024 <= int(os.environ["MASTER_PORT"]) < given, "PYNCCL_STORE" in os.environ
print(*[os.environ.get(name) for name in names], port, store)
"""


def test_environment_of_torchrun(script: Script) -> None:
    done = launch("-n", "3", "--cpu", script(PRINT_ENVIRONMENT))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"[{r}] {r} 3 {r} 3 127.0.0.1 cpu 1 True True" for r in range(3)
    ]


def test_arguments_and_exit_code(script: Script) -> None:
    done = launch("-n", "1", "--cpu", script("import sys; print(sys.argv[1:])"), "-n", "--cpu", "a b")
    assert done.stdout == "[0] ['-n', '--cpu', 'a b']\n"


def test_module(tmp_path: Path) -> None:
    (tmp_path / "programme.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv[1:])")
    done = launch("-n", "2", "--cpu", "-m", "programme", "x", PYTHONPATH=str(tmp_path))
    assert sorted(done.stdout.splitlines()) == ["[0] 0 ['x']", "[1] 1 ['x']"]


def test_torchruns_option(script: Script) -> None:
    done = launch("--nproc-per-node=4", script("pass"))
    assert done.returncode == 2
    assert "--nproc-per-node is torchrun's; expected -n 4" in done.stderr


def test_ranks_have_no_standard_input(script: Script) -> None:
    program = script("import sys; print(repr(sys.stdin.read()))")
    done = completed(_command("-n", "2", "--cpu", program), env=_environment(), input="unread")
    assert sorted(done.stdout.splitlines()) == ["[0] ''", "[1] ''"]
    assert "Ranks have no standard input" in " ".join(launch("--help").stdout.split())


def test_without_a_driver_it_says_so(script: Script) -> None:
    program = script("import os; print(os.environ['PYNCCL_LIBRARY'])")
    if cuda.available():
        pytest.skip("this machine has an NVIDIA driver")
    done = launch("-n", "1", program)
    assert done.stdout == "[0] cpu\n"
    assert done.stderr == "pynccl run: no NVIDIA driver found, so the ranks run with PYNCCL_LIBRARY=cpu\n"
    chosen = launch("-n", "1", program, PYNCCL_LIBRARY="/some/library.so")
    assert (chosen.stdout, chosen.stderr) == ("[0] /some/library.so\n", "")


def test_lines_stay_whole_and_in_order(script: Script) -> None:
    program = script(
        "import os, sys\n"
        "r = os.environ['RANK']\n"
        "for i in range(300):\n"
        "    out = sys.stdout if i % 2 else sys.stderr\n"
        "    for part in (r * 500, f' {i}', '\\n'): out.write(part); out.flush()\n"
        "print('no newline at the end', end='')\n"
    )
    done = launch("-n", "3", "--cpu", program)
    assert done.returncode == 0
    for text, first in ((done.stdout, 1), (done.stderr, 0)):
        lines = [line for line in text.splitlines() if "no newline" not in line]
        for rank in range(3):
            mine = [line for line in lines if line.startswith(f"[{rank}] ")]
            assert mine == [f"[{rank}] {str(rank) * 500} {i}" for i in range(first, 300, 2)]
        assert len(lines) == 450
    assert sorted(done.stdout.splitlines()[-3:])[-1].endswith("no newline at the end")


def test_lines_without_tags(script: Script) -> None:
    program = script("import sys; print('out'); print('error', file=sys.stderr)")
    done = launch("-n", "1", "--cpu", "--no-tag", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "[0] error\n")


def test_output_comes_at_once(script: Script, started: Started) -> None:
    process = started("-n", "1", "--cpu", script("import time; print('first'); time.sleep(30)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] first\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM


def test_bytes_that_are_no_text(script: Script) -> None:
    program = script("import sys; sys.stdout.buffer.write(b'\\xff\\0\\n\\n')")
    done = subprocess.run(_command("-n", "1", "--cpu", program), capture_output=True, timeout=50)
    assert done.stdout == b"[0] \xff\0\n[0] \n"


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 exited with code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("raise ValueError('broken')", 1, "rank 1 exited with code 1"),
    ],
)
def test_one_failure_ends_all(script: Script, ending: str, code: int, words: str) -> None:
    program = script(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(60)\n")
    start = time.monotonic()
    done = launch("-n", "3", "--cpu", program)
    assert time.monotonic() - start < 40
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("ending the other ranks") == 1


STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
deaf = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid)
if os.environ["RANK"] == "0":
    while not deaf.exists():
        time.sleep(0.01)
    sys.exit(3)
deaf.touch()
time.sleep(60)
"""


@pytest.mark.slow
def test_who_ignores_sigterm_is_killed_with_its_children(
    script: Script, started: Started, tmp_path: Path
) -> None:
    start = time.monotonic()
    process = started("-n", "2", "--cpu", script(STUBBORN), str(tmp_path / "deaf"))
    pids = _pids(process, 2)
    assert process.wait(45) == 3
    assert GRACE_SECONDS - 1 < time.monotonic() - start < GRACE_SECONDS + 30
    until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded(script: Script, started: Started, number: signal.Signals) -> None:
    program = script(
        "import os, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('got it'), sys.exit(5)))\n"
        "print(os.getpid())\n"
        "time.sleep(60)\n"
    )
    process = started("-n", "2", "--cpu", program)
    pids = _pids(process, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 5
    assert sorted(out.splitlines()) == ["[0] got it", "[1] got it"]
    until_gone(pids)


def test_user_signals_are_forwarded_and_end_nothing(script: Script, started: Started) -> None:
    program = script(
        "import os, signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))\n"
        "print(os.getpid())\n"
        "while not seen: time.sleep(0.01)\n"
    )
    process = started("-n", "2", "--cpu", program)
    _pids(process, 2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 0


def test_ctrl_c(script: Script, started: Started) -> None:
    process = started("-n", "2", "--cpu", script("import os, time; print(os.getpid()); time.sleep(60)"))
    _pids(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT


def test_ctrl_c_outlasts_the_exception_that_it_caused_elsewhere(script: Script, started: Started) -> None:
    program = script(
        "import os, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def end(*_):\n"
        "    time.sleep(2 * rank)\n"
        "    sys.exit(130 if rank else 1)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "print(os.getpid())\n"
        "time.sleep(60)\n"
    )
    process = started("-n", "2", "--cpu", program)
    _pids(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT


def test_ranks_die_with_the_launcher(script: Script, started: Started) -> None:
    process = started("-n", "2", "--cpu", script("import os, time; print(os.getpid()); time.sleep(60)"))
    pids = _pids(process, 2)
    process.kill()
    process.wait()
    until_gone(pids)


def test_a_daemon_that_keeps_the_pipe_is_not_waited_for(script: Script) -> None:
    program = script("import subprocess; print(subprocess.Popen(['setsid', 'sleep', '30']).pid)")
    start = time.monotonic()
    done = subprocess.run(
        _command("-n", "1", "--cpu", program), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=50
    )
    took = time.monotonic() - start
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(done.stdout.split()[-1]), signal.SIGKILL)
    assert (done.returncode, done.stdout[:4]) == (0, b"[0] ")
    assert took < 20


WAIT_FOR_A_FILE = """
import os, sys, time
print(os.getpid())
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
"""


def _holds(pid: int, argument: str) -> bool:
    with contextlib.suppress(OSError):
        return argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return False


def _handles(pid: int, number: int) -> bool:
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_after_the_end_of_the_ranks(
    script: Script, started: Started, tmp_path: Path, number: int
) -> None:
    """The launcher, which takes signals no more, is ended while it waits for its guard: no folder stays."""
    temporary, end = tmp_path / "temporary", tmp_path / "end"
    temporary.mkdir()
    process = started("-n", "1", "--cpu", script(WAIT_FOR_A_FILE), str(end), TMPDIR=str(temporary))
    _pids(process, 1)
    (folder,) = temporary.iterdir()
    (guard,) = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _holds(int(pid), str(folder))]
    os.kill(guard, signal.SIGSTOP)
    try:
        end.touch()
        until(lambda: not _handles(process.pid, signal.SIGTERM))
        process.send_signal(number)
        process.communicate(timeout=20)
    finally:
        os.kill(guard, signal.SIGCONT)
    until(lambda: not list(temporary.iterdir()))


def test_closed_output(script: Script) -> None:
    program = script("import time\nfor i in range(10000): print('x' * 1000); time.sleep(0.001)")
    process = subprocess.Popen(
        _command("-n", "2", "--cpu", program), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(15) == 128 + signal.SIGPIPE
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_output_into_a_pipe_that_does_not_block(script: Script) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(_command("-n", "1", "--cpu", script("print('x' * 200_000)")), stdout=writer)
    os.close(writer)
    time.sleep(0.5)
    with open(reader) as output:
        assert output.read() == f"[0] {200_000 * 'x'}\n"
    assert process.wait(20) == 0


def test_output_that_goes_nowhere(script: Script) -> None:
    command = _command("-n", "2", "--cpu", script("print('hello')"))
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr == "pynccl: standard output: [Errno 28] No space left on device\n"
    without = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(without, stderr=subprocess.PIPE, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_whose_output_is_closed() -> None:
    """As other programs before `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "pynccl", "info"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_launcher_without_descriptors_names_the_limit(script: Script) -> None:
    command = f"ulimit -n 12; exec {shlex.join(_command('-n', '4', '--cpu', script('pass')))}"
    done = completed(["sh", "-c", command])
    assert done.returncode == 1
    assert done.stderr.endswith("Too many open files; RLIMIT_NOFILE (ulimit -n) is 12\n")


FIRST = """
import os, sys, time
rank = os.environ["RANK"]
print(f"rank {rank}", file=sys.stderr)
if rank == "2":
    try:
        {}["cause"]
    except KeyError as error:
        raise ValueError("the cause") from error
time.sleep(30)
raise RuntimeError("only a consequence")
"""


def test_the_first_traceback_comes_last(script: Script) -> None:
    done = launch("-n", "3", "--cpu", script(FIRST))
    assert done.returncode == 1
    _, _, last = done.stderr.partition("pynccl run: rank 2 failed first:\n")
    lines = last.splitlines()
    assert lines[0] == "[2] Traceback (most recent call last):"
    assert "[2] KeyError: 'cause'" in lines
    assert lines[-1] == "[2] ValueError: the cause"


SLOW_TO_END = """
import atexit, os, signal, sys, time
from pathlib import Path
rank, failed = os.environ["RANK"], Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def end():
    failed.touch()
    time.sleep(1.5)
if rank == "0":
    atexit.register(end)
    raise ValueError("the cause")
while not failed.exists():
    time.sleep(0.01)
raise RuntimeError("only a consequence")
"""


def test_who_failed_first_may_end_later(script: Script, tmp_path: Path) -> None:
    done = launch("-n", "2", "--cpu", script(SLOW_TO_END), str(tmp_path / "failed"))
    assert done.stderr.splitlines()[-1] == "[0] ValueError: the cause"


CAUSES_OTHERS = """
import atexit, time
import numpy as np
import pynccl

with pynccl.init() as comm:
    comm.barrier()
    if comm.rank == 0:
        atexit.register(time.sleep, 0.4)
        raise ValueError("the cause")
    comm.all_reduce(np.ones(4))
"""


def test_an_exception_that_ends_the_other_ranks_first(script: Script) -> None:
    """The other ranks learn of rank 0's abort before its traceback and its exit."""
    done = launch("-n", "3", "--cpu", script(CAUSES_OTHERS))
    assert done.returncode == 1
    assert "pynccl run: rank 0 exited with code 1; ending the other ranks" in done.stderr
    assert "pynccl run: rank 0 failed first:" in done.stderr
    assert done.stderr.splitlines()[-1] == "[0] ValueError: the cause"


EXITS = """
import atexit, sys, time
# The functions registered first run last: this rank's process ends after the others'.
atexit.register(lambda: time.sleep(0.5 * leaves))
import numpy as np
import pynccl

comm = pynccl.init(timeout=20)
comm.barrier()
leaves = comm.rank == 0
if leaves:
    sys.exit(3)
comm.all_reduce(np.ones(4))
"""


def test_an_exit_that_ends_the_other_ranks_first(script: Script) -> None:
    """In check mode the other ranks learn immediately that rank 0 leaves."""
    done = launch("-n", "3", "--cpu", script(EXITS), PYNCCL_CHECK="1")
    assert done.returncode == 3, done.stderr
    assert "pynccl run: rank 0 exited with code 3; ending the other ranks" in done.stderr


LEAVES = """
import os, sys
import pynccl
if sys.argv[2:]:
    pynccl.init(timeout=60).destroy()
if os.environ["RANK"] != sys.argv[1]:
    pynccl.init(timeout=60)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.mark.parametrize("args", [pytest.param(["1"], marks=pytest.mark.slow), ["0"], ["1", "after an init"]])
def test_a_rank_that_ends_without_init(script: Script, args: list[str]) -> None:
    done = launch("-n", "3", "--cpu", script(LEAVES), *args)
    assert f"rank {args[0]} of 3 exited with code 0, without this call of pynccl.init" in done.stderr


def test_a_rank_that_fails_without_init_while_the_others_go_on(script: Script) -> None:
    done = launch("-n", "3", "--cpu", "--keep-going", script(LEAVES), "1", CODE="3")
    assert "rank 1 of 3 exited with code 3, without this call of pynccl.init" in done.stderr


HANDLED = """
import os, sys, time
import pynccl
try:
    with pynccl.init() as comm:
        comm.barrier()
        if comm.rank == 0:
            raise KeyError("handled")
except KeyError:
    time.sleep(60)
sys.exit(3)
"""


def test_a_rank_that_handles_its_exception_is_ended(script: Script) -> None:
    done = launch("-n", "2", "--cpu", script(HANDLED))
    # The abort of rank 0 may reach rank 1 in the barrier.
    assert done.returncode in (1, 3)
    assert f"rank 1 exited with code {done.returncode}; ending the other ranks" in done.stderr


def test_time_out(script: Script) -> None:
    program = script("import os, time\nif os.environ['RANK'] != '1': time.sleep(60)")
    start = time.monotonic()
    done = launch("-n", "3", "--cpu", "--timeout", "4", program)
    assert time.monotonic() - start < 40
    assert done.returncode == 124
    assert "--timeout has passed; still running: 0, 2\n" in done.stderr
    for enough in ("30", "1e20"):
        assert launch("-n", "2", "--cpu", "--timeout", enough, script("pass")).returncode == 0


LISTENERS = """
import os, threading, time
from pathlib import Path
import numpy as np
import pynccl

def look():
    # Of this rank and of the launcher.
    while not ended:
        mine = set()
        for pid in (os.getpid(), os.getppid()):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    mine.add(os.readlink(file))
                except OSError:
                    pass
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                    found.add(words[1].partition(":")[0])
        time.sleep(0.002)

ended, found = [], set()
thread = threading.Thread(target=look)
thread.start()
for _ in range(5):
    with pynccl.init(timeout=20) as comm:
        comm.all_reduce(np.ones(3))
        comm.split(0).destroy()
with pynccl.init() as comm:
    comm.barrier()
ended.append(1)
thread.join()
print(*sorted(found))
"""


def test_on_one_machine_nobody_else_can_connect(script: Script) -> None:
    """Whatever interfaces there are to other machines, where none is named."""
    done = launch("-n", "3", "--cpu", script(LISTENERS))
    assert done.returncode == 0, done.stderr
    # 127.0.0.1, in the machine's order.
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {"0100007F"}


# --- what ranks that hang leave behind ----------------------------------------------------------------------

HANGS = """
import ctypes, os, signal, sys, time
import numpy as np
import pynccl
comm = pynccl.init(timeout=30)
x = np.ones(4, np.float32)
comm.all_reduce(x)
comm._core.timeout = None

def ready():
    print(os.getpid(), "ready", flush=True)

def collective():
    ready()
    comm.all_reduce(x)

def asleep():
    ready()
    time.sleep(100)

def busy():
    ready()
    while True:
        pass

def in_c_with_the_gil():
    ready()
    while True:
        ctypes.PyDLL(None).sleep(100)

def stopped():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)

[collective, asleep, busy, in_c_with_the_gil, stopped][comm.rank]()
"""


def _wait_ready(process: subprocess.Popen[str], count: int) -> dict[str, int]:
    """Wait until all ranks have said that they are ready; return the process that each names, if it does."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    assert all(line.endswith("ready\n") for line in lines), lines
    time.sleep(0.3)
    return {line.split()[0]: int(line.split()[1]) for line in lines if len(line.split()) == 3}


@pytest.mark.parametrize("by", ["SIGTERM", pytest.param("--timeout", marks=pytest.mark.slow)])
def test_evidence_of_every_hang(script: Script, started: Started, tmp_path: Path, by: str) -> None:
    folder = tmp_path / "traces"
    limit = ["--timeout", "15"] if by == "--timeout" else []
    process = started("-n", "5", "--cpu", *limit, script(HANGS), PYNCCL_TRACE_DIR=str(folder))
    stopped = _wait_ready(process, 5)["[4]"]
    until(lambda: state(stopped) == "T")
    if not limit:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    if limit:
        assert process.returncode == 124
        assert errors.startswith("pynccl run: --timeout has passed; still running: 0, 1, 2, 3, 4\n")
    else:
        assert process.returncode == 128 + signal.SIGTERM
        assert errors.startswith("pynccl run: got SIGTERM; ending the ranks\n")
    assert "ending the other ranks" not in errors
    for rank, function in enumerate(("collective", "asleep", "busy", "in_c_with_the_gil", "stopped")):
        mine = [line for line in errors.splitlines() if line.startswith(f"[{rank}] ")]
        assert any(line.endswith(f" in {function}") for line in mine), errors
        assert not any("end" in line.split() for line in mine), errors
        # Not the threads of pynccl that wait for the exit.
        assert "hread 0x" in mine[0] and "in _work" not in errors, errors
        (dump,) = folder.glob(f"rank{rank}.*.jsonl")
        head, *records = map(json.loads, dump.read_text().splitlines())
        assert [reason["kind"] for reason in head["reasons"]] == ["launcher"]
        assert [r["call"] for r in records[1:]] == ["init", *["all_reduce"] * (2 if rank == 0 else 1)]
        stacks = dump.with_suffix(".stacks")
        assert stacks.read_text().splitlines() == [line.removeprefix(f"[{rank}] ") for line in mine]
        assert stacks.stat().st_mode & 0o777 == dump.stat().st_mode & 0o777 == 0o600
    assert errors.count(", which was stopped") == 1
    assert "rank 0 (launcher): asked by pynccl run" not in errors


OUTLIVES = """
import signal, time, numpy as np, pynccl
comm = pynccl.init()
if comm.rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
if comm.rank == 0:
    comm.all_reduce(np.zeros(4))
time.sleep(100)
"""


def test_evidence_is_not_replaced_by_what_comes_of_the_end(
    script: Script, started: Started, tmp_path: Path
) -> None:
    """A rank that sees the others end dumps no more."""
    folder = tmp_path / "traces"
    process = started("-n", "2", "--cpu", script(OUTLIVES), PYNCCL_TRACE_DIR=str(folder))
    _wait_ready(process, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and "NcclRemoteError" in errors
    (dump,) = folder.glob("rank0.*.jsonl")
    head, *records = map(json.loads, dump.read_text().splitlines())
    assert [reason["kind"] for reason in head["reasons"]] == ["launcher"]
    assert [r["call"] for r in records[1:]] == ["init", "all_reduce"] and records[-1]["state"] == "taken"


PARTLY = """
import os, signal, sys, time
def end(number, frame):
    print("ended by", signal.Signals(number).name, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
rank = int(os.environ["RANK"])
if rank == 0:
    import pynccl
if rank == 2:
    import pynccl
    code = "import signal, time; signal.signal(15, lambda *_: (print('SIGTERM too'), exit(0)));"
    code += "print('ready', flush=True); time.sleep(100)"
    os.execv(sys.executable, [sys.executable, "-c", code])
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_who_does_not_listen_is_not_asked(script: Script, started: Started) -> None:
    """A rank that never imported pynccl, and one that runs another program by now."""
    process = started("-n", "3", "--cpu", "--timeout", "8", script(PARTLY))
    out, errors = process.communicate(timeout=40)
    assert process.returncode == 124
    assert out.count("ready") == 3
    ends = sorted(line for line in out.splitlines() if "SIGTERM" in line)
    assert ends == ["[0] ended by SIGTERM", "[1] ended by SIGTERM", "[2] SIGTERM too"]
    for rank in (1, 2):
        assert f"rank {rank} left no stack" in errors
    assert any(line.startswith("[0] ") and line.endswith(" in <module>") for line in errors.splitlines())


RUNS_WHILE_ASKED = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import pynccl

def short(n):
    return n and long(n - 1)

exec("def long(n):\\n" + 300 * "    x = n\\n" + "    return n and short(n - 1)")

request = int((Path(os.environ["PYNCCL_STACKS_DIR"]) / str(os.getpid())).read_text().split()[0])
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
# The other thread answers while this one runs.
signal.pthread_sigmask(signal.SIG_BLOCK, [request])
asks = f"import os, time\\nfor _ in range(100): os.kill({os.getpid()}, {request}); time.sleep(0.005)"
with subprocess.Popen([sys.executable, "-c", asks]) as asking:
    while asking.poll() is None:
        for _ in range(100):
            short(20)
print("ready", flush=True)
time.sleep(100)
"""


def test_the_stacks_of_running_threads_end_no_rank(script: Script, started: Started) -> None:
    """faulthandler crashes where a frame changes while it reads it."""
    process = started("-n", "1", "--cpu", script(RUNS_WHILE_ASKED))
    _wait_ready(process, 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert any(line.startswith("[0] ") and line.endswith(" in <module>") for line in errors.splitlines())


REUSED = """
import os, sys, time
import pynccl
os.closerange(3, 256)
files = [open(sys.argv[1], "ab") for _ in range(64)]
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_stacks_never_go_to_a_file_of_the_programs(script: Script, started: Started, tmp_path: Path) -> None:
    process = started("-n", "1", "--cpu", script(REUSED), str(tmp_path / "data"))
    _wait_ready(process, 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "did not answer within" in errors
    assert (tmp_path / "data").read_bytes() == b""


DEAF = """
import os, signal, time
import pynccl
signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
print("ready", flush=True)
while True:
    time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_who_does_not_answer_is_ended_all_the_same(script: Script, started: Started, times: int) -> None:
    """A second signal does not wait for answers."""
    process = started("-n", "2", "--cpu", script(DEAF))
    _wait_ready(process, 2)
    start = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=30)
    took = time.monotonic() - start
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.count("did not answer within") == 2
    if times == 1:
        assert took > STACKS_SECONDS - 0.5
    else:
        assert took < STACKS_SECONDS


def test_log_folder(script: Script, tmp_path: Path) -> None:
    program = script(
        "import os, sys\nprint('out ' + os.environ['RANK'])\nsys.stderr.write('err ' + os.environ['RANK'])"
    )
    folder = tmp_path / "some" / "logs"
    done = launch("-n", "2", "--cpu", "--log-dir", str(folder), program)
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: text
        for r in range(2)
        for name, text in ((f"rank{r}.out", f"out {r}\n"), (f"rank{r}.err", f"err {r}"))
    }
    (tmp_path / "file").touch()
    done = launch("-n", "1", "--cpu", "--log-dir", str(tmp_path / "file"), program)
    assert done.returncode == 2
    assert "cannot write to --log-dir" in done.stderr
    os.mkfifo(tmp_path / "rank0.out")
    done = launch("-n", "1", "--cpu", "--log-dir", str(tmp_path), program)
    assert (done.returncode, "rank0.out" in done.stderr) == (1, True)


def test_a_log_on_a_full_disk(script: Script, tmp_path: Path) -> None:
    (tmp_path / "rank0.out").symlink_to("/dev/full")
    done = launch("-n", "1", "--cpu", "--log-dir", str(tmp_path), script("print('shown')"))
    assert (done.returncode, done.stdout) == (0, "[0] shown\n")
    assert f"cannot write to {tmp_path}/rank0.out: No space left on device" in done.stderr


@pytest.mark.parametrize("secret", ["", "one of at least 16 bytes"])
def test_the_launchers_store_has_the_secret_of_the_environment(script: Script, secret: str) -> None:
    """Without one the kernel says whose the ranks are, and nobody else can come in."""
    program = script(
        "import os, pynccl\n"
        "comm = pynccl.init(timeout=20)\n"
        "comm.barrier()\n"
        "comm.destroy()\n"
        "print(os.environ.get('PYNCCL_SECRET', ''))\n"
    )
    env = {"PYNCCL_SECRET": secret} if secret else {}
    done = launch("-n", "2", "--cpu", program, **env)
    assert sorted(line.rstrip() for line in done.stdout.splitlines()) == [
        f"[{r}] {secret}".rstrip() for r in (0, 1)
    ]
    assert "secret" not in done.stderr


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), flush=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_ranks_children_die_with_the_launcher(script: Script, started: Started) -> None:
    process = started("-n", "2", "--cpu", script(PARENT))
    pids = _pids(process, 4)
    process.kill()
    process.wait()
    until_gone(pids)


def test_no_process_is_left(script: Script, started: Started) -> None:
    process = started("-n", "2", "--cpu", script("input_ = print(1); import time; time.sleep(1.5)"))
    _pids(process, 2)
    children = [int(pid) for pid in _children(process.pid)]
    # The ranks, and who watches over them.
    assert len(children) == 3
    assert process.wait(10) == 0
    until_gone(children)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["-n", "0", "x.py"],
            "'-n' / '-np' / '--nranks': expected a number of ranks, 1 to 1024 on one machine, or auto, not",
        ),
        (["-n", "all", "x.py"], "expected a number of ranks, 1 to 1024 on one machine, or auto, not 'all'"),
        (["-n", "100000", "x.py"], "1 to 1024 on one machine, or auto, not '100000'"),
        (["-np", "-2", "x.py"], "'-n' / '-np' / '--nranks': expected"),
        (["x.py"], "Missing option '-n'"),
        (["x.py", "-n", "2"], "what follows SCRIPT goes to the program"),
        (["-n", "2"], "Missing argument 'SCRIPT'"),
        (["-n", "2", "-"], "SCRIPT is '-'; expected a file, since ranks have no standard input"),
        (["-n", "2", "--timeout", "0", "x.py"], "expected a positive number of seconds, not '0'"),
        (["-n", "2", "--timeout", "soon", "x.py"], "'--timeout': expected a positive number"),
        (["-n", "2", "--tiemout", "3", "x.py"], "No such option"),
        (["-n", "2", "--restarts", "-1", "x.py"], "-1 is not in the range"),
        (["-n", "2", "-x", "=3", "x.py"], "expected NAME or NAME=VALUE, not '=3'"),
        (["-n", "2", "-x", "NOT_SET", "x.py"], "NOT_SET is not set here; expected NOT_SET=VALUE"),
        (
            ["-n", "2", "-x", "RANK=3", "x.py"],
            "RANK=3: expected another variable, since pynccl run sets RANK",
        ),
        (["-n", "2", "--tee", "0", "x.py"], "--tee without --log-dir: the other ranks' output would be lost"),
        (["-n", "2", "--tee", "1-2", "x.py"], "expected ranks with commas between them, such as 0 or 0,3"),
        (["-n", "2", "--log-dir", "x", "--tee", "0,2", "x.py"], "--tee 2: expected ranks below 2"),
        (["-n", "2", "python3", "x"], "SCRIPT is 'python3'; leave it out: pynccl run starts Python itself"),
        (["-n", "2", "--log-dir", "", "x.py"], "expected a folder, not ''"),
        (["-n", "2", "--ssh", "rsh", "x.py"], "--ssh 'rsh': expected --hosts, too"),
        (["-n", "2", "--no-python", "-m", "x"], "-m and --no-python: expected one of them"),
        (["-n", "2", "/no/such.py"], "SCRIPT is '/no/such.py'; there is no such file"),
        (["-n", "2", "/tmp"], "SCRIPT is '/tmp', a folder; expected a program, or __main__.py in it"),
        (["-n", "2", "-m", __file__], "a file; expected the name of a module after -m"),
        (
            ["-n", "2", "sh", "x"],
            "there is no such file; a program other than Python needs --no-python",
        ),
        (
            ["-n", "2", "--no-python", "/no/such"],
            "SCRIPT is '/no/such'; expected a program that can be executed",
        ),
    ],
)
def test_wrong_command_lines(args: list[str], words: str) -> None:
    done = pynccl_command("run", *args)
    assert done.exit_code == 2
    assert words in done.output
    assert done.output.startswith("Usage: pynccl run [OPTIONS] SCRIPT [ARGS]...\n")


def test_as_mpirun_has_it(script: Script) -> None:
    done = launch("-np", "2", "--cpu", script("import os; print(os.environ['WORLD_SIZE'])"))
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "[0] 2", "[1] 2"])


# ---- restarts ----

RESTARTED = """
import os, sys, time
import numpy as np
import pynccl
count = int(os.environ["PYNCCL_RESTART_COUNT"])
comm = pynccl.init()
print("start", count)
comm.barrier()
if comm.rank == 1 and count < int(sys.argv[1]):
    print("about to end", file=sys.stderr)
    exec(sys.argv[2])
x = np.ones(4)
comm.all_reduce(x)
assert (x == comm.size).all()
comm.destroy()
"""


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        pytest.param("raise ValueError('broken')", "exited with code 1", marks=pytest.mark.slow),
    ],
)
def test_restarts_until_it_succeeds(script: Script, ending: str, how: str) -> None:
    done = launch("-n", "2", "--cpu", "--restarts", "5", script(RESTARTED), "2", ending)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{r}] start {i}" for i in range(3) for r in range(2))
    # After an exception the other rank may be the first to exit.
    assert len(re.findall(rf"pynccl run: rank \d {how}", done.stderr)) >= 2
    assert done.stderr.count("pynccl run: restart ") == 2
    assert "pynccl run: restart 2 of 5\n" in done.stderr


STOPS_THE_LAUNCHER = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
later = f"import os, signal, time; time.sleep(1); os.kill({os.getppid()}, signal.SIGCONT)"
subprocess.Popen([sys.executable, "-c", later])
os.kill(os.getppid(), signal.SIGSTOP)
open(sys.argv[1], "w").close()
time.sleep(0.5)
sys.exit("its peer has ended")
"""


def test_a_killed_rank_is_named_before_one_that_failed_for_it(script: Script, tmp_path: Path) -> None:
    """The launcher sees both ends at once."""
    done = launch("-n", "2", script(STOPS_THE_LAUNCHER), str(tmp_path / "stopped"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stderr and "rank 0 exited" not in done.stderr


def test_the_last_lines_come_before_a_restart(script: Script) -> None:
    program = script("import os\nfor i in range(30): print('line', i)\nos.kill(os.getpid(), 9)")
    done = launch("-n", "1", "--cpu", "--restarts", "1", program)
    assert done.returncode == 128 + signal.SIGKILL
    said = done.stderr.splitlines()
    before = said.index("pynccl run: restart 1 of 1")
    assert said[before - 11 : before] == [
        "pynccl run: the last lines of rank 0:",
        *(f"[0] line {i}" for i in range(20, 30)),
    ]


def test_too_few_restarts(script: Script) -> None:
    done = launch("-n", "2", "--cpu", "--restarts", "1", script(RESTARTED), "2", "sys.exit(7)")
    assert done.returncode == 7
    assert done.stderr.count("pynccl run: rank 1 exited with code 7") == 2


def test_restart_after_a_timeout(script: Script) -> None:
    program = script("import os, time\nif os.environ['PYNCCL_RESTART_COUNT'] == '0': time.sleep(60)")
    # Long enough for a start of Python on a busy machine.
    done = launch("-n", "1", "--cpu", "--timeout", "4", "--restarts", "1", program)
    assert done.returncode == 0, done.stderr
    assert "--timeout has passed; still running: 0" in done.stderr


def test_no_restart_after_a_signal(script: Script, started: Started) -> None:
    program = script("import os, time; print(os.getpid()); time.sleep(60)")
    process = started("-n", "2", "--cpu", "--restarts", "5", program)
    pids = _pids(process, 2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "restart" not in said
    until_gone(pids)


# ---- what runs, and what is shown of it ----


def test_variables(script: Script) -> None:
    program = script("import os; print(os.environ['GIVEN'], os.environ['TAKEN'], os.environ['EMPTY'] == '')")
    done = launch("-n", "1", "--cpu", "-x", "GIVEN=a=b", "-x", "TAKEN", "-x", "EMPTY=", program, TAKEN="c")
    assert (done.returncode, done.stdout) == (0, "[0] a=b c True\n"), done.stderr


def test_as_many_ranks_as_cores(script: Script) -> None:
    program = script("import os; print(os.environ['WORLD_SIZE'])")
    done = launch("-n", "auto", "--cpu", program)
    cores = len(os.sched_getaffinity(0))
    assert sorted(done.stdout.splitlines()) == sorted(f"[{r}] {cores}" for r in range(cores))


def test_programs_of_other_languages() -> None:
    done = launch("-n", "2", "--cpu", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 0 of 2", "[1] 1 of 2"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("#!/no/such\n", "No such file or directory (it, or the interpreter in its first line)"),
        ("\x7fELF garbage", "Exec format error"),
    ],
)
def test_a_program_that_cannot_be_run(content: str, reason: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(0o755)
    done = launch("-n", "1", "--cpu", "--no-python", str(program))
    assert done.returncode == 1
    assert f"[0] '{program}' cannot be run: {reason}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_some_ranks_are_shown(script: Script, tmp_path: Path) -> None:
    program = script("import os, sys; print('out', os.environ['RANK']); print('error', file=sys.stderr)")
    done = launch("-n", "3", "--cpu", "--log-dir", str(tmp_path / "logs"), "--tee", "0,2", program)
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[2] out 2"]
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[2] error"]
    assert (tmp_path / "logs/rank1.out").read_text() == "out 1\n"
    assert (tmp_path / "logs/rank1.err").read_text() == "error\n"


DUMPS = """
import os, resource, signal, sys
os.chdir(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_core_dump_is_mentioned(script: Script, tmp_path: Path) -> None:
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", DUMPS, str(tmp_path)])
    if not os.WCOREDUMP(os.waitpid(pid, 0)[1]):
        pytest.skip("this machine writes no core dumps")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    done = launch("-n", "1", "--cpu", script(DUMPS), str(tmp_path))
    assert f"rank 0 was killed by SIGSEGV, core dumped (core_pattern: {pattern})" in done.stderr


def test_the_status_line(script: Script) -> None:
    program = script("import time\nfor i in range(3): print('line', i); time.sleep(0.6)")
    master, terminal = os.openpty()
    with subprocess.Popen(
        _command("-n", "1", "--cpu", "--status", program),
        env=_environment(),
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the end of the other side
            while data := os.read(master, 4096):
                shown += data
        assert process.wait(20) == 0
    os.close(master)
    screen: list[bytes] = []
    for line in shown.split(b"\r\n"):
        screen.append(line.rsplit(b"\r\x1b[K", 1)[-1])
    assert screen == [b"[0] line 0", b"[0] line 1", b"[0] line 2", b""]
    assert b"\r\x1b[Kpynccl run: 0:00:01, 1 of 1 ranks run" in shown


def test_a_failure_has_its_colour_in_a_terminal() -> None:
    args = _command("-n", "1", "--cpu", "--no-python", "sh", "-c", "exit 3")
    failure = "pynccl run: rank 0 exited with code 3"
    red = ([f"{RED}{failure}\x1b[0m", ""], 3)
    assert in_terminal(args, _environment()) == red
    # An empty NO_COLOR counts as none.
    assert in_terminal(args, _environment(), NO_COLOR="") == red
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert in_terminal(args, _environment(), **variables) == ([failure, ""], 3)
    assert completed(args, env=_environment()).stderr == f"{failure}\n"


def test_no_status_line_without_a_terminal(script: Script) -> None:
    done = launch("-n", "1", "--cpu", "--status", script("print(1)"))
    assert (done.stdout, done.stderr) == ("[0] 1\n", "")


@pytest.mark.slow
def test_programs_one_after_another(tmp_path: Path) -> None:
    """The launcher's store outlives the first program of a rank, and the second begins to count again."""
    program = """
import numpy as np, pynccl
for _ in range(2):
    comm = pynccl.init(timeout=20)
    print("sum", int(comm.all_reduce(np.ones(1))[0]), flush=True)
    comm.destroy()
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    both = f"{sys.executable} {path} && exec {sys.executable} {path}"
    done = launch("-n", "3", "--cpu", "--no-python", "sh", "-c", both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3") == 12
