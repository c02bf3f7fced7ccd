"""The exchange over MPI: any communicator, and no wait without an end.

Every rank tells rank 0 what it is, rank 0 says that the id is going to come, the id is broadcast, and a
barrier follows: a broadcast may not have reached everybody yet, and NCCL blocks from here on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pynccl._errors import BootstrapError
from pynccl.bootstrap._environment import Launcher
from pynccl.bootstrap._preflight import (
    Answer,
    Arrival,
    Facts,
    Failure,
    absent,
    failure_of,
    judge,
    pack,
    unpack_answer,
    unpack_arrival,
    unpack_failure,
    verdict,
)

# Tags below the smallest upper bound that MPI allows.
_ARRIVAL, _WORD, _FAILED = 28260, 28261, 28262
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01
_MARGIN = 0.5
_WHERE = "its MPI communicator"


def is_communicator(method: Any) -> bool:
    """Tell whether this is an mpi4py communicator, without importing mpi4py."""
    return not isinstance(method, str) and all(
        hasattr(method, name) for name in ("Get_rank", "Get_size", "Ibcast", "improbe")
    )


def communicator(method: Any) -> Any:
    """Return the mpi4py communicator that is meant."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py raises the latter where it finds no MPI library.
        raise BootstrapError(f"method='mpi' needs mpi4py, which cannot be imported: {error}") from error
    comm = MPI.COMM_WORLD if method == "mpi" else method
    if comm == MPI.COMM_NULL or comm.Is_inter():
        kind = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
        raise ValueError(f"method is {kind}; expected an intracommunicator that this process is in")
    return comm


def is_part(comm: Any) -> bool:
    """Tell whether a communicator lacks some of the processes of the job."""
    from mpi4py import MPI

    return int(comm.Get_size()) != int(MPI.COMM_WORLD.Get_size())


def require_same_world(comm: Any, launcher: Launcher) -> None:
    """Compare MPI.COMM_WORLD with what mpirun says: another MPI's mpirun starts ranks that are each alone."""
    from mpi4py import MPI

    size = comm.Get_size()
    if launcher.names.mpi and launcher.size is not None and size != launcher.size:
        raise BootstrapError(
            f"{launcher} started {launcher.size} ranks, but mpi4py sees {size}: it uses another MPI "
            f"({MPI.Get_library_version().split(',')[0].splitlines()[0]}) than mpirun's"
        )


class MpiExchange:
    """One exchange through an mpi4py communicator."""

    def __init__(self, comm: Any, deadline: float) -> None:
        self.comm, self.deadline = comm, deadline
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._mark = b""
        # Requests of messages that nobody may ever take.
        self._sent: list[Any] = []

    def exchange(self, prepare: Callable[[], Facts]) -> Answer:
        """Tell the others what `prepare` returns or raises, and return rank 0's answer."""
        error: Exception | None = None
        try:
            arrival = Arrival(self.size, prepare())
        except Exception as caught:
            error, arrival = caught, Arrival(self.size, None, failure_of(self.rank, self.size, caught))
        answer = self._lead(arrival, error) if self.rank == 0 else self._follow(arrival, error)
        self._wait(self.comm.Ibarrier(), "the barrier after the id")
        self._mark = bytes.fromhex(answer.uid)[:32]
        return answer

    def _lead(self, arrival: Arrival, own: Exception | None) -> Answer:
        arrivals = {0: arrival}
        try:
            self._collect(arrivals)
            answer = judge([arrivals[rank] for rank in range(self.size)], self.size)
        except BaseException as error:
            failed = pack(Answer(self.size, "", arrival.failure or verdict(self.size, error)))
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

    # --- messages ---

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        self._sent.append((self.comm.Isend(data, dest=rank, tag=tag), data))

    def _receive(self, tag: int, source: int | None = None) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of a message that has come, None when none has."""
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
                    f"rank {self.rank} of {self.size}: {what} did not end in time; every rank had arrived, "
                    "so one of them has died or left since"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # --- after the exchange ---

    def failure(self) -> Failure | None:
        """Return what another rank has failed with since."""
        while (found := self._receive(_FAILED)) is not None:
            # Others may be left from an earlier exchange, of which this rank had been told by somebody else.
            if found[1].startswith(self._mark):
                return unpack_failure(found[1][len(self._mark) :])
        return None

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the others of a failure after the exchange; return an earlier one."""
        earlier = self.failure()
        if earlier is None:
            said = self._mark + pack(failure_of(self.rank, self.size, error))
            for rank in range(self.size):
                if rank != self.rank:
                    self._send(said, rank, _FAILED)
        return earlier

    def done(self) -> None:
        """Complete what was sent."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
