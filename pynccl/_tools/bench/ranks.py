"""The ranks of one process: communicators, streams and memory, and what the processes tell one another."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

import pynccl
from pynccl._base.host import loopback, machine
from pynccl._base.interrupts import interrupted_later
from pynccl._base.values import check_int
from pynccl._device.devices import on_device
from pynccl._errors import NcclTimeoutError
from pynccl._library import cuda, loader
from pynccl._memory.allocation import Allocation
from pynccl._tools.bench.creation import GroupCall
from pynccl._tools.bench.memory import DeviceUsage, HostUsage
from pynccl._tools.bench.settings import Settings

Array = np.ndarray[Any, Any]
T = TypeVar("T")


def _on_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Return what `work` returns for each number below `count`, on a thread each."""
    with ThreadPoolExecutor(count) as pool:
        # Those that have begun wait for the others.
        with interrupted_later():
            begun = [pool.submit(work, i) for i in range(count)]
        return [each.result() for each in begun]


class Memory:
    """Memory from ncclMemAlloc, which the host reads and writes."""

    def __init__(self, nbytes: int) -> None:
        self._allocation = Allocation(max(nbytes, 1))
        self.ptr, self.nbytes = self._allocation.ptr, nbytes
        self._on_device = self._allocation.device is not None
        if not self._on_device:
            content = (ctypes.c_char * max(nbytes, 1)).from_address(self.ptr)
            self._bytes = np.frombuffer(memoryview(content).cast("B"), np.uint8)

    def buffer(self, dtype: str, count: int, at: int = 0) -> pynccl.Buffer:
        """Return elements from byte `at` on, for a call."""
        return pynccl.Buffer(self.ptr + at, count, dtype, owner=self)

    def write(self, data: Array, at: int) -> None:
        """Copy an array here."""
        data = np.ascontiguousarray(data)
        if self._on_device:
            with on_device(self._allocation.device):
                cuda.copy_to_device(self.ptr + at, data.ctypes.data, data.nbytes)
        else:
            self._bytes[at : at + data.nbytes] = data.view(np.uint8).reshape(-1)

    def read(self, dtype: np.dtype[Any], count: int, at: int) -> Array:
        """Return a copy of elements from byte `at` on."""
        data = np.empty(count, dtype)
        if self._on_device:
            with on_device(self._allocation.device):
                cuda.copy_to_host(data.ctypes.data, self.ptr + at, data.nbytes)
        else:
            data.view(np.uint8)[:] = self._bytes[at : at + data.nbytes]
        return data


class Seat:
    """One rank: a communicator, a stream, and the buffers that its calls use."""

    def __init__(self, comm: pynccl.Communicator, settings: Settings, windows: bool) -> None:
        nbytes = settings.buffer_bytes
        # The threads that make seats have no current device.
        with on_device(comm.device):
            self.comm, self.stream = comm, 0 if settings.stream_null else pynccl.Stream()
            self.send, self.recv = Memory(nbytes), Memory(nbytes)
        self.windows: list[pynccl.Window] = []
        self._open = ExitStack()
        for memory in (self.send, self.recv):
            whole = memory.buffer("uint8", max(nbytes, 1))
            if windows or settings.local_register == 2:
                window = comm.window(whole, symmetric=True)
                self.windows.append(self._open.enter_context(window))
            elif settings.local_register == 1:
                self._open.enter_context(comm.register(whole))

    def close(self) -> None:
        """Give the registrations up and end the communicator."""
        self._open.close()
        if isinstance(self.stream, pynccl.Stream):
            self.stream.destroy()


class World:
    """All processes of the run, with this one's seats; `seats[t]` are those of thread t."""

    def __init__(self, settings: Settings, windows: bool) -> None:
        self.settings = settings
        config = pynccl.Config(CTAPolicy=settings.cta_policy) if settings.cta_policy is not None else None
        each = settings.ranks_each
        alone = each == 1
        # -M reads the memory of the devices before the communicators are there, and `init` chooses devices.
        self._apart = bool(settings.memory) and loader.backend() != "cpu"
        self.usage: HostUsage | DeviceUsage = HostUsage(2 * each * settings.buffer_bytes)
        self.control = pynccl.init(
            config=config if alone else None,
            device=self.device(0) if alone else None,
            timeout=settings.watched,
        )
        self.process, self.processes = self.control.rank, self.control.size
        self.local = self._texts(machine())[: self.process].count(machine())
        self._meeting = threading.Barrier(settings.nthreads, self._act)
        self._told: list[Any] = [None] * settings.nthreads
        self._action: Callable[[], Any] = self._meet
        self._answer: Any = None
        self.color = color(self.process)
        if self._apart:
            self._meet()
            self.usage = DeviceUsage([self._chosen_device(i) for i in range(each)])
        self._comms = self._communicators(config)
        self.usage.read()
        self.nranks = self._comms[0].size
        self.all_seats = _on_threads(each, lambda i: Seat(self._comms[i], settings, windows))
        self.seats = [
            self.all_seats[t * settings.ngpus : (t + 1) * settings.ngpus] for t in range(settings.nthreads)
        ]
        self.usage.read()

    def _communicators(self, config: pynccl.Config | None) -> list[pynccl.Communicator]:
        each = self.settings.ranks_each
        if self.color is not None:
            if each > 1:
                raise ValueError("NCCL_TESTS_SPLIT is set; expected -t 1 -g 1 with it")
            return [self.control.split(self.color, self.process)]
        if each == 1 and not self._apart:
            return [self.control]
        uid = pynccl.UniqueId(bytes.fromhex(self._texts(bytes(pynccl.get_unique_id()).hex())[0]))
        size, first = each * self.processes, each * self.process
        devices = [self._chosen_device(i) for i in range(each)]
        # -p: one thread creates all communicators of the process, or each its own.
        together = self.settings.ngpus if self.settings.parallel_init else each
        groups = [
            GroupCall(uid, size, first + at, devices[at : at + together], config, self.settings.watched)
            for at in range(0, each, together)
        ]
        return _on_threads(each, lambda i: groups[i // together].communicator(i % together))

    def device(self, i: int) -> int | None:
        """Return the device of this process's rank i."""
        first = os.environ.get("NCCL_TESTS_DEVICE")
        if first is not None:
            number = _number(first, "NCCL_TESTS_DEVICE", 10)
            return check_int(number, "NCCL_TESTS_DEVICE", 0, 1 << 16, "a device's ordinal") + i
        if self.settings.ranks_each == 1:
            return None
        device: int = self.local * self.settings.ranks_each + i
        return device

    def _chosen_device(self, i: int) -> int:
        """Return the device of this process's rank i, also if `init` chose it."""
        device = self.device(i)
        return self.control.device if device is None else device

    # --- what threads and processes tell one another ---

    def barrier(self, thread: int) -> None:
        """Return when every thread of every process has come."""
        self.exchange(thread, None, self._meet)

    def _meet(self) -> None:
        try:
            self.control.barrier(timeout=self.settings.long_wait)
        except NcclTimeoutError as error:
            self._go_on(error, self.control, None)

    def complete(self, comm: pynccl.Communicator, stream: Any) -> None:
        """Wait for a stream."""
        try:
            comm.synchronize(stream, timeout=self.settings.long_wait)
        except NcclTimeoutError as error:
            self._go_on(error, comm, stream)

    def _go_on(self, error: NcclTimeoutError, comm: pynccl.Communicator, stream: Any) -> None:
        """Without -T, say what a long wait is for, and go on with it."""
        # The communicator's own time-out is final.
        if self.settings.timeout or comm.async_error() is not None:
            raise error
        limit = self.settings.longest_wait
        note = f"pynccl bench: {error}; the wait goes on for up to {limit:g} s, or the seconds of -T"
        print(note, file=sys.stderr, flush=True)
        comm.synchronize(stream, timeout=limit)

    def exchange(self, thread: int, value: Any, action: Callable[[], Any] | None = None) -> Any:
        """Return what every thread of this process said, or what an action returns, once all have come."""
        self._told[thread] = value
        self._action = action or (lambda: list(self._told))
        self._meeting.wait()
        return self._answer

    def _act(self) -> None:
        self._answer = self._action()

    def rows(self, thread: int, values: Sequence[float]) -> Array:
        """Return each thread's numbers, of all processes: a row each."""
        return np.asarray(self.exchange(thread, values, self._all_rows))

    def _all_rows(self) -> Array:
        mine = np.asarray(self._told, np.float64)
        return self._gather(mine.reshape(-1)).reshape(-1, mine.shape[1])

    def process_rows(self, values: Sequence[float]) -> Array:
        """Return each process's numbers, a row each; for one thread."""
        return self._gather(np.asarray(values, np.float64)).reshape(-1, len(values))

    def texts(self, text: str) -> list[str]:
        """Return a text of every process; for one thread."""
        return self._texts(text)

    def _texts(self, text: str) -> list[str]:
        mine = np.zeros(4096, np.uint8)
        data = text.encode()[:4096]
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self._gather(mine).reshape(self.control.size, -1)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]

    def _gather(self, mine: Array) -> Array:
        with on_device(self.control.device):
            return self._gather_here(mine)

    def _gather_here(self, mine: Array) -> Array:
        size = self.control.size
        memory = Memory(mine.nbytes * (size + 1))
        memory.write(mine, 0)
        send, recv = (
            memory.buffer("uint8", mine.nbytes),
            memory.buffer("uint8", mine.nbytes * size, mine.nbytes),
        )
        stream = pynccl.Stream()
        self.control.all_gather(send, recv, stream=stream)
        self.complete(self.control, stream)
        stream.destroy()
        return memory.read(mine.dtype, mine.size * size, mine.nbytes)

    def meeting_host(self) -> str:
        """Return the host at which rank 0 may listen for the other processes; the same everywhere."""
        one_host = len(set(self._texts(loopback()))) == 1
        mine = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR") or socket.gethostname()
        return self._texts(mine)[0]

    def close(self) -> None:
        """End all communicators."""
        with ThreadPoolExecutor(self.settings.ranks_each) as pool:
            list(pool.map(lambda seat: seat.close(), self.all_seats))
            list(pool.map(lambda comm: comm.destroy(), self._comms))
        if not self.control.closed:
            self.control.destroy()

    def abort(self) -> None:
        """Give all communicators up after an error, in any thread; the other threads' calls fail."""
        self._meeting.abort()
        for comm in {*self._comms, self.control}:
            if not comm.closed:
                comm.abort()

    def device_line(self, i: int) -> str:
        """Return nccl-tests' line about this process's rank i."""
        seat = self.all_seats[i]
        rank = self.process * self.settings.ranks_each + i
        name, pci = "CPU library", "0000:00:00"
        if loader.backend() != "cpu":
            name = cuda.device_name(seat.comm.device)
            pci = cuda.device_pci(seat.comm.device).rpartition(".")[0]
        host = socket.gethostname().partition(".")[0]
        return (
            f"#  Rank {rank:2d} Group {self.color or 0:2d} Pid {os.getpid():6d} on {host:>10s} "
            f"device {seat.comm.device:2d} [{pci}] {name}"
        )


def color(process: int) -> int | None:
    """Return the group that NCCL_TESTS_SPLIT or NCCL_TESTS_SPLIT_MASK gives a process; None without them."""
    mask = os.environ.get("NCCL_TESTS_SPLIT_MASK")
    if mask is not None:
        return process & _number(mask, "NCCL_TESTS_SPLIT_MASK", 16)
    text = os.environ.get("NCCL_TESTS_SPLIT")
    if text is None:
        return None
    operations: dict[str, Callable[[int, int], int]] = {
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "MOD": lambda a, b: a % b,
        "DIV": lambda a, b: a // b,
    }
    signs = {"&": "AND", "|": "OR", "%": "MOD", "/": "DIV"}
    for sign, name in {**signs, **{name: name for name in operations}}.items():
        if text.upper().startswith(sign):
            try:
                value = int(text[len(sign) :].strip(), 0)
            except ValueError:
                break
            if name in ("MOD", "DIV") and value == 0:
                raise ValueError(f"NCCL_TESTS_SPLIT is {text!r}; expected a number other than 0")
            return operations[name](process, value)
    raise ValueError(
        f"NCCL_TESTS_SPLIT is {text!r}; expected AND, OR, MOD or DIV and a number, as in 'MOD 2'"
    )


def _number(text: str, name: str, base: int) -> int:
    try:
        return int(text.strip(), base)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected a number") from None
