"""The communicator: array calls on one rank of a group."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pynccl import _cuda, _library, _lifetime, _streams, capi
from pynccl._binding import lib
from pynccl._buffers import Span, require_alike, require_place, require_writable, resolve
from pynccl._errors import NcclError, NcclInvalidUsage, NcclTimeoutError
from pynccl._kept import CpuEvents, CudaEvents, Kept
from pynccl._lifetime import ABORT_SECONDS, bounded
from pynccl._types import DataType, RedOp, UniqueId

A = TypeVar("A")

_OPS = {op.name.lower(): int(op) for op in RedOp}


class _Call(NamedTuple):
    """The resolved arguments of one collective."""

    source: int
    target: int
    elements: int
    datatype: int
    stream: int
    wait: bool
    keep: tuple[Any, ...]


class Communicator:
    """One rank of a group of processes; with the other ranks it makes collective calls on arrays.

    `stream=None` means the current stream of the array's library; for host arrays, which have none, the
    call returns when the result is there. `recv=None` means in place. Every call returns the array with the
    result. A communicator is for one thread at a time: used by two, or after it was closed, it raises
    NcclInvalidUsage.

    As a context manager it is finalized and destroyed at the end, and aborted when an exception leaves the
    body.
    """

    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes | Sequence[UniqueId | bytes],
        rank: int,
        *,
        config: Any = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join the group of `nranks` that shares the unique id (or several, for large groups).

        `timeout` bounds the creation and every later wait, in seconds.
        """
        self._prepare(timeout)
        if nranks < 1 or not 0 <= rank < nranks:
            raise ValueError(f"rank is {rank} and nranks {nranks}; expected 0 <= rank < nranks")
        ids = _ids(unique_id)
        _library.load()
        place = _device_to_use(device)

        def create() -> int:
            with _on_device(place):
                if len(ids) > 1:
                    return capi.ncclCommInitRankScalable(nranks, rank, len(ids), ids, config)
                if config is not None:
                    return capi.ncclCommInitRankConfig(nranks, ids[0], rank, config)
                return capi.ncclCommInitRank(nranks, ids[0], rank)

        what = f"creating the communicator of rank {rank} of {nranks}"
        self._take(bounded(create, timeout, what, if_abandoned=capi.ncclCommAbort), owned=True)

    @classmethod
    def from_handle(cls, handle: int) -> Communicator:
        """Use a communicator that somebody else made and will destroy, given as its ncclComm_t."""
        if not handle:
            raise ValueError("handle is 0; expected an ncclComm_t")
        self = cls.__new__(cls)
        self._prepare(None)
        self._take(handle, owned=False)
        return self

    def _prepare(self, timeout: float | None) -> None:
        # First of all, so that an object whose creation failed can be collected.
        self._handle = 0
        self._owned = False
        self._why = "was never created"
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; expected a positive number of seconds, or None")
        self._timeout = timeout
        self._lock = threading.Lock()
        self._kept: dict[int, Kept] = {}
        self._used: set[int] = set()
        self._scratch: tuple[int, int] | None = None
        self._token = np.zeros(1, np.uint8)

    def _take(self, handle: int, owned: bool) -> None:
        self._handle, self._owned = handle, owned
        if owned:
            _lifetime.own(int(handle))
        _lifetime.living.add(self)
        self._backend = _library.library_info().backend
        try:
            self._settle("creating the communicator")
            self._rank = capi.ncclCommUserRank(handle)
            self._size = capi.ncclCommCount(handle)
            self._device = capi.ncclCommCuDevice(handle)
        except BaseException:
            self.abort()
            raise

    # --- what it is ---

    @property
    def handle(self) -> int:
        """The ncclComm_t as an int, for pynccl.capi and other libraries."""
        return int(self._open())

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def device(self) -> int:
        """The device that this rank computes on."""
        return self._device

    @property
    def closed(self) -> bool:
        """True once it was destroyed or aborted."""
        return not self._handle

    def __repr__(self) -> str:
        place = (
            f"rank {self._rank} of {self._size} on device {self._device}"
            if hasattr(self, "_device")
            else "no rank"
        )
        return f"<pynccl.Communicator {place}{'' if self._handle else ', closed'}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to its process and cannot be pickled")

    def _open(self) -> int:
        """Return the handle, or say why there is none any more."""
        if not self._handle:
            raise NcclInvalidUsage(f"{self!r} cannot be used: {self._why}", rank=getattr(self, "_rank", None))
        return self._handle

    # --- collectives ---

    def all_reduce(
        self, send: A, recv: A | None = None, op: str | RedOp | int = "sum", stream: Any = None
    ) -> A:
        """Reduce the arrays of all ranks, element by element; every rank gets the result."""
        call = self._two(send, recv, stream)
        self._issue(capi.ncclAllReduce, call, _op_code(op), self._open(), call.stream)
        return send if recv is None else recv

    def broadcast(self, send: A | None, recv: A | None = None, root: int = 0, stream: Any = None) -> A:
        """Copy the root's array to every rank; elsewhere `send` may be None when `recv` is given."""
        if not 0 <= root < self._size:
            raise ValueError(f"root is {root}; expected 0 <= root < {self._size}{self._here()}")
        result = send if recv is None else recv
        if result is None or (send is None and self._rank == root):
            raise TypeError(
                f"send is None; expected an array{' on the root' if recv is not None else ''}{self._here()}"
            )
        call = self._two(result if send is None else send, recv, stream, writes=self._rank != root)
        self._issue(capi.ncclBroadcast, call, root, self._open(), call.stream)
        return result

    def barrier(self) -> None:
        """Return when every rank has reached this."""
        if self._backend == "cpu":
            pointer, stream = self._token.ctypes.data, 0
        else:
            pointer, stream = self._device_scratch()
        call = _Call(pointer, pointer, 1, int(DataType.UINT8), stream, True, ())
        self._issue(capi.ncclAllReduce, call, int(RedOp.MAX), self._open(), stream)

    def synchronize(self, stream: Any = None, timeout: float | None = None) -> None:
        """Wait for a stream, or for every stream that this communicator has used."""
        self._open()
        handles = list(self._used) if stream is None else [_streams.handle_of(stream)]
        with self._alone():
            for handle in handles:
                self._wait(handle, "synchronize", timeout)

    def async_error(self) -> NcclError | None:
        """Return what has gone wrong in the background, None when nothing has."""
        handle = self._open()
        try:
            _streams.raise_async_error(handle)
        except NcclError as error:
            return error
        return None

    # --- the path of a call ---

    def _two(self, send: Any, recv: Any, stream: Any, writes: bool = True) -> _Call:
        """Resolve an input and an output, the same array where `recv` is None."""
        try:
            source = self._span(send, "send")
            target = source if recv is None else self._span(recv, "recv")
            if recv is not None:
                require_alike(source, target)
            if writes or recv is not None:
                require_writable(target, "send (in place)" if recv is None else "recv")
            handle = self._current(send) if stream is None else _streams.handle_of(stream)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}{self._here()}") from error
        waits = stream is None and self._backend == "cpu"
        # Host memory has no allocator that knows of streams; a device's has one, for the current stream.
        keep = (
            (send, recv)
            if self._backend == "cpu" or (stream is not None and handle != self._current(send))
            else ()
        )
        return _Call(source[0], target[0], source[1], source[2], handle, waits, keep)

    def _span(self, array: Any, name: str) -> Span:
        span = resolve(array, name)
        require_place(span, name, self._backend, self._device)
        return span

    def _current(self, array: Any) -> int:
        return 0 if self._backend == "cpu" else _streams.current_of(array)

    def _here(self) -> str:
        return f" (rank {self._rank} of {self._size})"

    def _issue(self, function: Callable[..., int], call: _Call, *rest: int) -> None:
        """Make one call of the library; what it returns early, or asynchronously, is waited for here."""
        with self._alone():
            if call.keep:
                self._keep(call)
            self._used.add(call.stream)
            if function(call.source, call.target, call.elements, call.datatype, *rest):
                self._settle(function.__name__)
            # Inside a group nothing has been issued yet that could be waited for.
            if call.wait and not lib.pynccl_group_depth():
                self._wait(call.stream, function.__name__, None)

    def _keep(self, call: _Call) -> None:
        """Hold on to the arrays of a call until its stream is known to be done with them."""
        kept = self._kept.get(call.stream)
        if kept is None:
            events = CpuEvents(self._open()) if self._backend == "cpu" else CudaEvents(self._device)
            kept = self._kept[call.stream] = Kept(events, call.stream)
        kept.add(call.keep)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise NcclInvalidUsage(
                f"{self!r} is in use by another thread; a communicator is for one at a time"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _deadline(self, timeout: float | None) -> tuple[float | None, float | None]:
        seconds = self._timeout if timeout is None else timeout
        return seconds, None if seconds is None else time.monotonic() + seconds

    def _wait(self, stream: int, what: str, timeout: float | None) -> None:
        """Wait for a stream, and let go of the arrays that were kept for it."""
        seconds, deadline = self._deadline(timeout)
        if self._backend == "cpu":
            done = _streams.wait_cpu(self._open, stream, deadline)
        else:
            # Handles up to 2 mean the current device's default streams.
            with _cuda.using_device(self._device):
                done = _streams.wait_cuda(self._open, stream, deadline)
        if not done:
            raise self._late(what, seconds, f" on stream {stream:#x}")
        if stream in self._kept:
            self._kept.pop(stream).clear()
        self._used.discard(stream)

    def _settle(self, what: str) -> None:
        """Wait until a non-blocking communicator has taken the last call."""
        seconds, deadline = self._deadline(None)
        if not _streams.wait_ready(self._open, deadline):
            raise self._late(what, seconds, "")

    def _late(self, what: str, seconds: float | None, where: str) -> NcclTimeoutError:
        rank, size = getattr(self, "_rank", None), getattr(self, "_size", None)
        text = f"{what} did not complete{where} within {seconds:g} s ({self!r})"
        return NcclTimeoutError(text, function=what, rank=rank, size=size)

    def _device_scratch(self) -> tuple[int, int]:
        """Return a byte of device memory and a stream of its own, for the barrier."""
        if self._scratch is None:
            with _cuda.using_device(self._device):
                self._scratch = _cuda.memory_allocate(1), _cuda.stream_create()
        return self._scratch

    # --- the end ---

    def finalize(self) -> None:
        """Complete the outstanding calls of all ranks; the communicator can then only be destroyed."""
        handle = self._open()
        with self._alone():
            bounded(lambda: capi.ncclCommFinalize(handle), self._timeout, "ncclCommFinalize")
            self._settle("ncclCommFinalize")

    def destroy(self) -> None:
        """Finalize where that was not done, and give everything back; harmless when already closed."""
        if not self._handle:
            return
        with self._alone():
            handle = self._close("it was destroyed")
            if handle:
                # Before the call: when it does not return, an abort at exit would only meet it halfway.
                _lifetime.disown(handle)
                bounded(lambda: capi.ncclCommDestroy(handle), self._timeout, "ncclCommDestroy")
            self._release()

    def abort(self) -> None:
        """Give everything back at once, without the other ranks; any thread may call it, at any time."""
        handle = self._close("it was aborted")
        if handle:
            _lifetime.disown(handle)
            bounded(lambda: capi.ncclCommAbort(handle), ABORT_SECONDS, "ncclCommAbort")
        self._release()

    def _close(self, why: str) -> int:
        """Mark it as closed; return the handle if it is to be given back."""
        handle, owned = int(self._handle), self._owned
        self._forget(why)
        return handle if owned else 0

    def _forget(self, why: str) -> None:
        if self._handle:
            self._handle, self._why = 0, why

    def _release(self) -> None:
        while self._kept:
            self._kept.popitem()[1].clear()
        self._used.clear()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with _cuda.using_device(self._device):
                _cuda.memory_free(scratch[0])
                _cuda.stream_destroy(scratch[1])

    def __enter__(self) -> Communicator:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handle:
            return
        if kind is not None or not self._owned:
            self.abort()
            return
        try:
            self.finalize()
            self.destroy()
        except BaseException:
            self.abort()
            raise

    def __del__(self) -> None:
        # Never a collective call from here: the other ranks' collectors run at other times.
        if getattr(self, "_handle", 0) and self._owned:
            _lifetime.orphans.append(self._kept)
            warnings.warn(
                f"{self!r} was never destroyed or aborted", ResourceWarning, source=self, stacklevel=2
            )


def _ids(unique_id: UniqueId | bytes | Sequence[UniqueId | bytes]) -> list[bytes]:
    if isinstance(unique_id, UniqueId | bytes | bytearray | memoryview):
        return [bytes(UniqueId(unique_id))]
    ids = [bytes(UniqueId(one)) for one in unique_id]
    if not ids:
        raise ValueError("unique_id is an empty sequence; expected at least one id")
    return ids


def _op_code(op: str | RedOp | int) -> int:
    if isinstance(op, str):
        code = _OPS.get(op)
        if code is None:
            raise ValueError(f"op is {op!r}; expected one of {', '.join(_OPS)}, or a RedOp")
        return code
    if isinstance(op, bool) or not isinstance(op, int):
        raise TypeError(f"op is {op!r}; expected one of {', '.join(_OPS)}, or a RedOp")
    return int(op)


def _device_to_use(device: int | None) -> int | None:
    """Return the given device or this thread's; None without a driver: the library answers for itself."""
    if device is not None and device < 0:
        raise ValueError(f"device is {device}; expected 0 or more")
    if _library.library_info().backend == "cpu":
        return capi.pyncclCpuGetDevice() if device is None else device
    if device is None and _cuda.available():
        return _cuda.current_device() or 0
    return device


@contextmanager
def _on_device(device: int | None) -> Iterator[None]:
    """Make a device the current one of this thread, by the CPU library or by the driver."""
    if device is None:
        yield
    elif _library.library_info().backend == "cpu":
        before = capi.pyncclCpuGetDevice()
        capi.pyncclCpuSetDevice(device)
        try:
            yield
        finally:
            capi.pyncclCpuSetDevice(before)
    else:
        with _cuda.using_device(device):
            yield
