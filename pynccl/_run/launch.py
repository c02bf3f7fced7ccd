"""`pynccl run`: start the ranks of a program on this machine, show their output, and end them together."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pynccl._base.colours import coloured
from pynccl._errors import BootstrapError
from pynccl._library import cuda
from pynccl._run import ended_record, stack_requests
from pynccl._run.nodes import TIMED_OUT, Meeting, Node, Outcome, alone, among
from pynccl._run.output import Lines, Logs, Status, shown, write_all
from pynccl._run.process import Child
from pynccl._trace.recorder import DIR, file_name, own_folder, private_file
from pynccl._watch import ended

# Seconds for the ranks to write their traces and stacks, and seconds after SIGTERM before SIGKILL.
STACKS_SECONDS = 3.0
GRACE_SECONDS = 5.0
# Seconds between two looks for the ranks' answers; the longest wait of epoll.
_LOOK_SECONDS = 0.02
_LONGEST_WAIT = 3600.0
# Seconds to read the rest of the pipes, which a descendant may hold open.
_DRAIN_SECONDS = 1.0
# Lines of a failing rank that are shown before a restart.
_LAST_LINES = 10
# Seconds for which the end of a rank waits for that of the rank whose exception came first.
_CAUSE_SECONDS = 1.0
# Removes the folder in its argument when the launcher ends or closes the pipe. Without the word "ended"
# it kills the ranks' process groups before.
_GUARD = (
    "import os, shutil, signal, sys\n"
    "words = sys.stdin.read().split()\n"
    "if 'ended' not in words:\n"
    "    for word in words:\n"
    "        try: os.killpg(int(word), signal.SIGKILL)\n"
    "        except OSError: pass\n"
    "shutil.rmtree(sys.argv[1], ignore_errors=True)\n"
)
# Processes of one machine: as many ranks as the CPU library takes there.
MOST_RANKS = 1024
# Variables that the launcher sets for its ranks.
OWN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
OWN |= {"PYNCCL_STORE", "PYNCCL_STACKS_DIR", "PYNCCL_KEEP_GOING", "PYNCCL_RESTART_COUNT"}
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Job:
    """What to run, on how many ranks of this machine (0: one for each device, or core), and how."""

    argv: list[str]
    nranks: int
    cpu: bool = False
    # Ranks may read each other's memory where Yama forbids it.
    direct: bool = False
    timeout: float | None = None
    keep_going: bool = False
    restarts: int = 0
    log_dir: Path | None = None
    # The ranks whose output is shown; None: all.
    tee: Collection[int] | None = None
    tag: bool = True
    status: bool = False
    # This machine among several; None: it is the only one.
    node: Node | None = None
    # Variables that are set for the ranks.
    variables: Mapping[str, str] = field(default_factory=dict)


def launch(job: Job) -> int:
    """Run the job, again after a failure if it has restarts left, and return the last exit code."""
    outer = {**os.environ, **job.variables}
    env = choose_backend(outer, "cpu" if job.cpu else "auto")
    if job.direct:
        env["PYNCCL_CPU_PTRACER"] = str(os.getpid())
    on_cpu = env.get("PYNCCL_LIBRARY") == "cpu"
    if on_cpu and not job.cpu and outer.get("PYNCCL_LIBRARY") != "cpu":
        _say("no NVIDIA driver found, so the ranks run with PYNCCL_LIBRARY=cpu", "warning")
    if not job.nranks:
        job = replace(job, nranks=ranks_here(env))
    try:
        logs = Logs(job.log_dir)
    except OSError as error:
        _say(f"cannot write to --log-dir {job.log_dir}: {error}", "error")
        return 2
    with logs:
        attempt = 0
        while True:
            start = _start(job, env, logs, attempt)
            if start.code == 0 or start.stopped or start.meeting.attempt >= job.restarts:
                return start.code
            start.show_last_lines()
            attempt = start.meeting.attempt + 1
            _say(f"restart {attempt} of {job.restarts}", "warning")


def _start(job: Job, env: dict[str, str], logs: Logs, attempt: int) -> _Launcher:
    if job.node is None:
        place = alone(env, job.nranks, attempt)
    else:
        place = among(env, job.nranks, job.node, job.timeout, attempt, _say)
    with place as meeting, _guarded() as (folder, guard):
        launcher = _Launcher(job, env, meeting, logs, folder)
        launcher.run(guard)
        launcher.tell_end()
    launcher.agree()
    return launcher


@contextmanager
def _guarded() -> Iterator[tuple[Path, IO[bytes]]]:
    """Make a folder that does not outlive this process; yield it and the pipe of its guard."""
    folder = Path(tempfile.gettempdir(), f"pynccl-run-{secrets.token_hex(8)}")
    # The guard comes before the folder: a signal may end this process at any time.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None
        folder.mkdir(mode=0o700)
        yield folder, guard.stdin


def choose_backend(environ: Mapping[str, str], backend: str) -> dict[str, str]:
    """Return the environment with PYNCCL_LIBRARY set; "auto" sets the CPU library if no driver is found."""
    env = dict(environ)
    if backend != "auto":
        env["PYNCCL_LIBRARY"] = backend
    elif env.get("PYNCCL_LIBRARY", "auto") in ("", "auto") and not cuda.available():
        env["PYNCCL_LIBRARY"] = "cpu"
    return env


def ranks_here(env: Mapping[str, str]) -> int:
    """Return the ranks of `-n auto`: one for each device, or for each core without devices."""
    on_cpu = env.get("PYNCCL_LIBRARY") == "cpu"
    devices = 0 if on_cpu or not cuda.available() else cuda.device_count()
    return devices or len(os.sched_getaffinity(0))


def rank_environment(
    base: Mapping[str, str], local: int, nranks: int, store: str, first: int = 0, size: int = 0
) -> dict[str, str]:
    """Return the environment of one of this machine's ranks: torchrun's variables and the store's address.

    `first` is the machine's first rank, and `size` the number of all ranks: by default, of the machine's.
    """
    # The variables of an outer torchrun describe its own ranks.
    env = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    env.update(RANK=str(first + local), WORLD_SIZE=str(size or nranks))
    env.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(nranks))
    env.update(PYNCCL_STORE=store, PYTHONUNBUFFERED="1")
    if nranks > 1:
        # As torchrun does: one thread per core in every rank would overload the cores.
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def _say(text: str, level: str = "") -> None:
    print(coloured(f"pynccl run: {text}", level, sys.stderr), file=sys.stderr, flush=True)


class _Launcher:
    """The ranks of one run, and the loop over their output, their exits and this process's signals."""

    def __init__(self, job: Job, env: dict[str, str], meeting: Meeting, logs: Logs, folder: Path) -> None:
        self.job, self.meeting, self.logs, self.folder = job, meeting, logs, folder
        self.ranks = range(meeting.first, meeting.first + job.nranks)
        self.status = Status(job.status)
        host, port = meeting.master
        self.env = env | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        self.env["PYNCCL_RESTART_COUNT"] = str(meeting.attempt)
        self.env[stack_requests.FOLDER] = str(folder)
        self.env[ended.KEEP_GOING] = str(int(job.keep_going))
        self.children: dict[int, Child] = {}
        self.processes: dict[int, ended.Process] = {}
        self.outputs: dict[int, Lines] = {}
        self.errors: dict[int, Lines] = {}
        self.selector = selectors.DefaultSelector()
        self.code = 0
        # The request for traces and stacks, made before the ranks get the signal that ends them.
        self.request: stack_requests.Request | None = None
        # When ranks ended; only of those that may have failed because of another one.
        self.ends: dict[int, float] = {}
        self.last_signal: int = signal.SIGTERM
        self.kill_at: float | None = None
        self.timeout_at: float | None = None
        self.ended: set[int] = set()
        self.first: int | None = None
        # The user ended this run, by a signal or by closing its output.
        self.stopped = False
        # The signal by which the user ended ranks of which none had failed.
        self.stopped_by = 0

    def run(self, guard: IO[bytes]) -> None:
        """Start the ranks, and wait for all of them; `code` is then the first failing one's."""
        self._run(guard)
        guard.write(b"ended\n")
        guard.flush()

    def _run(self, guard: IO[bytes]) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        old_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGCHLD, *_FORWARDED)
        old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            self.selector.register(reader, selectors.EVENT_READ)
            if self.meeting.failures is not None:
                self.selector.register(self.meeting.failures.news, selectors.EVENT_READ)
            if self.job.timeout is not None:
                self.timeout_at = time.monotonic() + self.job.timeout
            # Starting many ranks takes time, in which a signal may arrive or a rank may exit.
            for rank in self.ranks:
                if self._ending:
                    break
                self._start(rank)
                guard.write(b"%d\n" % self.children[rank].pid)
                guard.flush()
                self._step(reader, waits=False)
            while len(self.ended) < len(self.children):
                self._step(reader)
            self._drain()
            self.status.clear()
            self._show_traceback()
            self._explain_code()
        except BrokenPipeError:
            # The output was closed: exit as a program that writes to a closed pipe.
            self.code, self.stopped = 128 + signal.SIGPIPE, True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            for child in self.children.values():
                child.close()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            self.selector.close()
            reader.close()
            writer.close()

    def _start(self, rank: int) -> None:
        meeting, count = self.meeting, len(self.ranks)
        local = rank - meeting.first
        env = rank_environment(self.env, local, count, meeting.store, meeting.first, meeting.size)
        child = Child(self.job.argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, tie=True)
        self.children[rank], self.processes[rank] = child, ended.process(child.pid)
        out, error = (shown(self.job.tee, rank, output.fileno()) for output in (sys.stdout, sys.stderr))
        out_log, error_log = self.logs.of(rank)
        self.outputs[rank] = Lines(rank, out, out_log, self.status, self.job.tag)
        self.errors[rank] = Lines(rank, error, error_log, self.status)
        for pipe, lines in ((child.stdout, self.outputs[rank]), (child.stderr, self.errors[rank])):
            assert pipe is not None
            self.selector.register(pipe, selectors.EVENT_READ, lines)

    def _step(self, reader: socket.socket, waits: bool = True) -> None:
        now = time.monotonic()
        ends = [end for end in (self.kill_at, self.timeout_at) if end is not None]
        ends += [since + _CAUSE_SECONDS for rank, since in self.ends.items() if rank not in self.ended]
        if self.request is not None:
            ends.append(now + _LOOK_SECONDS)
        if self.status.on:
            ends.append(now + 1)
        wait = min(max(0.0, min(ends) - now), _LONGEST_WAIT) if ends else None
        if not waits:
            wait = 0.0
        for key, _ in self.selector.select(wait):
            if key.fileobj is reader:
                for number in reader.recv(4096):
                    self._on_signal(number)
            elif isinstance(key.data, Lines):
                self._copy(key)
            else:
                self.selector.unregister(key.fileobj)
                self._end_with_the_others()
        self._look_for_ends()
        self.status.show(f"{len(self.children) - len(self.ended)} of {len(self.ranks)} ranks run")
        if self.request is not None and self.request.over:
            self._end(self.last_signal)
        if self.timeout_at is not None and time.monotonic() >= self.timeout_at:
            self._time_out()
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.kill_at = None
            self._send(signal.SIGKILL)

    @property
    def _ending(self) -> bool:
        return self.request is not None or self.kill_at is not None

    def _time_out(self) -> None:
        self.timeout_at = None
        running = [rank for rank in self.children if rank not in self.ended]
        if running and not self._ending:
            self._say(f"--timeout has passed; still running: {', '.join(map(str, running))}", "error")
            self.code = TIMED_OUT
            self._tell("--timeout has passed")
            self._ask(signal.SIGTERM)

    def _ask(self, then: int) -> None:
        """Request traces and stacks of the ranks, and end the ranks by a signal after their answers."""
        running = {child.pid: rank for rank, child in self.children.items() if rank not in self.ended}
        self.request = stack_requests.Request(self.folder, running, STACKS_SECONDS)
        self.last_signal = then

    def _end(self, number: int) -> None:
        """Send the ranks a signal to end by; ranks that do not end are killed later."""
        if self.request is not None:
            self._show(self.request)
            self.request = None
        self._send(number)
        # A stopped process handles no other signal.
        self._send(signal.SIGCONT)
        if self.kill_at is None:
            self.kill_at = time.monotonic() + GRACE_SECONDS

    def _show(self, request: stack_requests.Request) -> None:
        if not request.answers:
            return
        traces = os.environ.get(DIR)
        for answer in request.answers:
            stacks, rank, pid = answer.stacks, answer.rank, answer.pid
            how = ", which was stopped" if answer.stopped else ""
            if not answer.complete:
                how += f": it did not answer within {STACKS_SECONDS:g} s"
            self._say(f"rank {rank} (process {pid}){how}")
            self.errors[rank].insert(stacks)
            if traces and stacks:
                try:
                    with private_file(Path(own_folder(traces), file_name(rank, pid, "stacks"))) as fd:
                        write_all(fd, stacks)
                except OSError as error:
                    self._say(f"cannot write to {DIR} ({traces}): {error}", "error")
        for rank in request.deaf:
            self._say(f"rank {rank} left no stack: it has not imported pynccl")

    def _copy(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 65536)
        key.data.feed(data)
        if not data:
            self.selector.unregister(key.fileobj)

    def _on_signal(self, number: int) -> None:
        self.stopped = self.stopped or number in ENDING
        if number in ENDING and not self._ending:
            # After SIGHUP the terminal may be gone.
            with suppress(OSError):
                self._say(f"got {signal.Signals(number).name}; ending the ranks", "warning")
            self.stopped_by = 0 if self.code else number
            self._tell(f"pynccl run was ended by {signal.Signals(number).name}", 128 + number)
            self._ask(number)
        elif number in ENDING:
            # The signal came a second time.
            self._end(number)
        elif number in _FORWARDED:
            self._send(number)

    def _look_for_ends(self) -> None:
        found = ((rank, child.poll()) for rank, child in self.children.items() if rank not in self.ended)
        ends = [(rank, code) for rank, code in found if code is not None]
        # Of ranks that have ended since the last look, one that a signal killed is the cause of exceptions.
        for rank, code in sorted(ends, key=lambda end: end[1] >= 0):
            if code > 0 and self.code == 0 and self._is_consequence(rank):
                continue
            self.ended.add(rank)
            if self.job.keep_going and not self._ending:
                self._go_on_without(rank, code)
            elif code == 0:
                self._tell_exit(rank)
            elif self.code == 0:
                # After a signal, and after --timeout, the ranks end already.
                self._note_failure(rank, code, "" if self._ending else "; ending the other ranks")
                if not self._ending:
                    self._end(signal.SIGTERM)
            elif self.code == 1 and self.stopped_by and code in (128 + self.stopped_by, -self.stopped_by):
                # The end of this rank was the cause of the exception of the one that was seen first.
                self.code, self.first = 128 + self.stopped_by, rank

    def _is_consequence(self, rank: int) -> bool:
        """Tell whether a rank has ended because another one had left, which will end soon."""
        since = self.ends.setdefault(rank, time.monotonic())
        at, first = min((self._left_at(rank), rank) for rank in self.children)
        waits = first != rank and first not in self.ended and at < since
        return waits and time.monotonic() - since < _CAUSE_SECONDS

    def _end_with_the_others(self) -> None:
        """End the ranks of this machine after a failure on another one."""
        assert self.meeting.failures is not None
        self._say(f"{self.meeting.failures.first.text}; ending the ranks of this machine", "error")
        self.code = self.code or self.meeting.failures.first.code
        if not self._ending:
            self._ask(signal.SIGTERM)

    def _note_failure(self, rank: int, code: int, others: str) -> None:
        if self.code == 0:
            self.code = code if code > 0 else 128 - code
            self.first = rank
        others = others if len(self.ended) < len(self.children) else ""
        text = f"rank {rank} {self.children[rank].describe_exit()}"
        self._say(f"{text}{others}", "error")
        if not self.job.keep_going:
            self._tell(text)

    def _tell(self, failure: str, code: int = 1) -> None:
        """Tell the launchers on other machines why this one ends its ranks."""
        if self.meeting.failures is not None:
            try:
                self.meeting.failures.tell(failure, self.code or code, self.stopped)
            except (BootstrapError, TimeoutError) as error:
                self._say(f"cannot tell the other machines: {error}", "error")

    def tell_end(self) -> None:
        """Note how this machine's ranks have ended, for the launchers on the others."""
        if self.meeting.failures is not None:
            self.meeting.failures.own = Outcome(self.code, self.stopped)

    def agree(self) -> None:
        """Take over the outcome of all machines, by which each decides whether its ranks start again."""
        failures = self.meeting.failures
        if failures is not None and failures.late:
            self._say(f"--timeout has passed; not ended: node {', '.join(map(str, failures.late))}", "error")
            self.code = self.code or TIMED_OUT
        if failures is not None and failures.again:
            self.code = self.code or failures.outcome.code
            self.stopped = failures.outcome.final

    def _tell_exit(self, rank: int) -> None:
        """Tell ranks that may wait for this one in pynccl.init."""
        if len(self.ended) < len(self.children):
            meeting, how = self.meeting, self.children[rank].describe_exit()
            with suppress(BootstrapError, TimeoutError):
                ended_record.tell_exit(meeting.store, meeting.secret, meeting.job, rank, how)

    def _go_on_without(self, rank: int, code: int) -> None:
        """Tell the other ranks of an exit; end the remaining processes of a failed rank."""
        self._tell_exit(rank)
        try:
            ended_record.tell(self.meeting.store, self.meeting.secret, self.meeting.job, self.processes[rank])
        except (BootstrapError, TimeoutError) as error:
            self._say(f"cannot tell the other ranks of the end of rank {rank}: {error}", "error")
        if code != 0:
            self._note_failure(rank, code, "; the other ranks go on (--keep-going)")
            self.children[rank].send(signal.SIGKILL)

    def _show_traceback(self) -> None:
        """Repeat the earliest traceback; the first rank to exit need not be the first to fail."""
        failed = [rank for rank, child in self.children.items() if (child.poll() or 0) > 0]
        # A rank that a signal ended has no traceback, and the other tracebacks are its consequence.
        if self.first not in failed or self.errors[self.first].failed_at == float("inf"):
            return
        first = min(failed, key=lambda rank: (self._left_at(rank), self.errors[rank].failed_at))
        # Another rank may have been faster to exit, and its code is the launcher's.
        self._say(f"rank {first} {'failed' if first == self.first else 'raised its exception'} first:")
        for line in self.errors[first].traceback().splitlines():
            write_all(sys.stderr.fileno(), b"[%d] %s\n" % (first, line))

    def _left_at(self, rank: int) -> float:
        return stack_requests.left_at(self.folder, self.children[rank].pid)

    def show_last_lines(self) -> None:
        """Show the last lines of the first rank to fail; `_show_traceback` has shown those of a traceback."""
        if self.first is None or self.errors[self.first].traceback():
            return
        tails = (lines[self.first].tail.splitlines()[-_LAST_LINES:] for lines in (self.errors, self.outputs))
        last = next(filter(None, tails), [])
        self._say(f"the last lines of rank {self.first}:" if last else f"rank {self.first} wrote nothing")
        for line in last:
            write_all(sys.stderr.fileno(), b"[%d] %s\n" % (self.first, line))

    def _explain_code(self) -> None:
        """Explain the exit code if some ranks reached the end of the program."""
        code = None if self.first is None else self.children[self.first].poll()
        if self.job.keep_going and code is not None and self.code != TIMED_OUT:
            why = "the first to exit with a failure"
            if self.stopped_by and self.code == 128 + self.stopped_by:
                why = f"which {signal.Signals(self.stopped_by).name} ended"
            self._say(f"exit code {self.code} of rank {self.first}, {why}")

    def _say(self, text: str, level: str = "") -> None:
        self.status.clear()
        _say(text, level)

    def _send(self, number: int) -> None:
        for rank, child in self.children.items():
            if rank not in self.ended:
                child.send(number)

    def _drain(self) -> None:
        """Copy the last output of the ranks."""
        for child in self.children.values():
            child.send(signal.SIGKILL)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while any(isinstance(key.data, Lines) for key in self.selector.get_map().values()):
            events = self.selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in events:
                if isinstance(key.data, Lines):
                    self._copy(key)
            if time.monotonic() >= deadline:
                break
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Lines):
                key.data.feed(b"")
