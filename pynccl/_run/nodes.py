"""The machines of a job: how their launchers meet in a store, and end together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pynccl._errors import BootstrapError
from pynccl._run.ports import free_port
from pynccl._secure.secret import read_secret
from pynccl.bootstrap._store import Store, StoreLost, StoreServer, format_address, parse_address

# Seconds to wait for the launchers of the other nodes, for their ends after a failure, and of one request.
_MEET_SECONDS = 300.0
_END_SECONDS = 20.0
_SLICE_SECONDS = 30.0
# Seconds in which the others see in the store why node 0 ends.
_TELL_SECONDS = 1.0
_FAILED, _FAILURES, _OUTCOME, _START = "nodes/failed", "nodes/failures", "nodes/outcome", "nodes/start"
# Seconds after which node 0 says for which nodes it waits, and seconds for the will of a killed launcher.
_SAY_SECONDS = 10.0
_WILL_SECONDS = 2.0
# The exit code if a node does not end after --timeout.
TIMED_OUT = 124
# A key that no launcher sets.
_CLOSED = "nodes/closed"
# The end of a launcher that has not told of it.
_GONE = b"gone"


@dataclass(frozen=True)
class Node:
    """This machine's number in a job, the number of machines, and the address of the store on node 0."""

    rank: int
    count: int
    store: str
    restarts: int = 0


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a machine ended, or of the whole job; `final`: nothing starts again."""

    code: int
    final: bool = False
    text: str = ""

    def packed(self) -> bytes:
        """Return what `unpacked` reads."""
        return f"{self.code} {int(self.final)} {self.text}".encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Outcome:
        """Return what another machine wrote."""
        code, final, text = data.decode().split(" ", 2)
        return cls(int(code), final == "1", text)


class Failures:
    """The failures of other nodes. `news` is readable from the first one on, which is then `first`.

    If the job may start again, `outcome` is that of all nodes after `end`, and the same on each.
    """

    def __init__(
        self, store: Store, node: Node, secret: str, job: str, again: bool, timeout: float | None
    ) -> None:
        self.news, self.first, self.again = os.eventfd(0), Outcome(1), again
        # The nodes that have not ended after the time-out, and when that is noticed.
        self.late: list[int] = []
        self._until = None if timeout is None else time.monotonic() + timeout + _END_SECONDS
        # How this node's ranks have ended, and how all have. Without an answer of node 0 they have failed.
        self.own, self.outcome = Outcome(1), Outcome(1)
        self._store, self._node, self._secret, self._job = store, node, secret, job
        self._failed_at: float | None = None
        self._over = False
        self._ends: dict[int, Outcome] = {}
        store.will(_end_of(node.rank), _GONE)
        threading.Thread(target=self._watch, daemon=True).start()
        others = range(1, node.count) if node.rank == 0 else ()
        self._watchers = {k: threading.Thread(target=self._watch_end, args=[k], daemon=True) for k in others}
        for watcher in self._watchers.values():
            watcher.start()

    def tell(self, text: str, code: int = 1, final: bool = False) -> None:
        """Tell the other nodes of the first failure, its exit code, and whether it ends the job for good."""
        self._over = True
        self._fail(self._store, Outcome(code, final, f"{text} on node {self._node.rank}"))

    def end(self, say: Callable[[str], None]) -> None:
        """Tell the others how this node's ranks have ended.

        Node 0, with the store, waits for the ranks of all; if the job may start again, every node does.
        """
        self._over = True
        self._store.withdraw()
        self._store.set(_end_of(self._node.rank), self.own.packed())
        self._await_others(say)
        if self.again and self._node.rank == 0:
            self._decide()
        elif self.again:
            self.outcome = Outcome.unpacked(_come(self._store, _OUTCOME))
            self._store.set(_left(self._node.rank), b"")
            # The next attempt has another store, at the same address.
            with suppress(BootstrapError, TimeoutError):
                self._store.get(_CLOSED, _END_SECONDS)

    def _await_others(self, say: Callable[[str], None]) -> None:
        say_at: float | None = time.monotonic() + _SAY_SECONDS
        while running := [other for other, watcher in self._watchers.items() if watcher.is_alive()]:
            if self._is_late():
                self.late = running if self._failed_at is None else []
                return
            if say_at is not None and time.monotonic() > say_at:
                say(f"the ranks of this machine have ended; waiting for node {', '.join(map(str, running))}")
                say_at = None
            self._watchers[running[0]].join(0.2)

    def _decide(self) -> None:
        """Tell the others the outcome, and wait until they have read it: the store ends with this attempt."""
        ends = [self.own, *(self._ends[other] for other in sorted(self._ends))]
        ends += [Outcome(TIMED_OUT)] if self.late else []
        if self._store.add(_FAILURES, 0):
            ends.insert(0, Outcome.unpacked(_come(self._store, _FAILED)))
        failed = [end for end in ends if end.code]
        code = failed[0].code if failed else 0
        self.outcome = Outcome(code, any(end.final for end in ends))
        self._store.set(_OUTCOME, self.outcome.packed())
        deadline = time.monotonic() + _END_SECONDS
        for other in self._ends:
            with suppress(TimeoutError):
                self._store.get(_left(other), max(0.0, deadline - time.monotonic()))

    def _is_late(self) -> bool:
        """Tell whether the others had the time to end after a failure, or after the time-out."""
        until = self._until if self._failed_at is None else self._failed_at + _END_SECONDS
        return until is not None and time.monotonic() > until

    def _fail(self, store: Store, outcome: Outcome) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        if store.add(_FAILURES, 1) == 1:
            store.set(_FAILED, outcome.packed())

    def _watch(self) -> None:
        """Wait for the failure of another node."""
        try:
            with self._connect() as store:
                self.first = Outcome.unpacked(_come(store, _FAILED))
        except BootstrapError as error:
            self.first = Outcome(1, False, f"the store of node 0 is lost: {error}")
        self._failed_at = self._failed_at or time.monotonic()
        if not self._over:
            os.eventfd_write(self.news, 1)

    def _watch_end(self, other: int) -> None:
        # The store ends with this process.
        with suppress(BootstrapError), self._connect() as store:
            end = _come(store, _end_of(other))
            if end == _GONE:
                self._fail(store, Outcome(1, False, f"the launcher of node {other} is gone"))
            else:
                self._ends[other] = Outcome.unpacked(end)

    def _connect(self) -> Store:
        return Store(self._node.store, self._secret, job=self._job)


def _come(store: Store, key: str) -> bytes:
    """Wait for a key without a time-out."""
    while True:
        with suppress(TimeoutError):
            return store.get(key, _SLICE_SECONDS)


@dataclass(frozen=True)
class Meeting:
    """What the launchers agree on: this machine's first rank, the number of all ranks, and addresses."""

    first: int
    size: int
    store: str
    secret: str
    job: str
    master: tuple[str, int]
    # The number of starts before this one.
    attempt: int = 0
    # None on the only machine.
    failures: Failures | None = None


@contextmanager
def alone(env: Mapping[str, str], nranks: int, attempt: int) -> Iterator[Meeting]:
    """Serve a store for the ranks of the only machine; without a secret, for this user only."""
    with open_store(env) as server:
        master = "127.0.0.1", free_port()
        yield Meeting(0, nranks, server.address, server.secret, server.job, master, attempt)


def open_store(env: Mapping[str, str]) -> StoreServer:
    """Return a store on this machine for the ranks; without a secret, for this user only."""
    return StoreServer(secret=read_secret(env), job=env.get("PYNCCL_JOB_ID", ""))


@contextmanager
def among(
    env: Mapping[str, str],
    nranks: int,
    node: Node,
    timeout: float | None,
    attempt: int,
    say: Callable[[str], None],
) -> Iterator[Meeting]:
    """Meet the other machines' launchers in the store of node 0, and tell them of the end.

    The attempt is the highest of all nodes': a launcher that was started anew counts from the others' number.
    `say` shows what this launcher waits for.
    """
    host, port = parse_address(node.store)
    secret, job = read_secret(env), env.get("PYNCCL_JOB_ID", "")
    seconds = min(timeout or _MEET_SECONDS, _MEET_SECONDS)
    server = _serve(host, port, secret, job) if node.rank == 0 else None
    try:
        with _join(node, secret, job, seconds) as store:
            first, size, attempt = _meet(store, nranks, node, seconds, attempt)
            if node.rank == 0:
                store.set(_START, b"%d" % free_port())
            port = int(store.get(_START))
            failures = Failures(store, node, secret, job, attempt < node.restarts, timeout)
            try:
                yield Meeting(first, size, node.store, secret, job, (host, port), attempt, failures)
            except BaseException as error:
                with suppress(BootstrapError, TimeoutError):
                    failures.tell(f"pynccl run failed ({error})", final=True)
                raise
            finally:
                with suppress(BootstrapError, TimeoutError):
                    failures.end(say)
    finally:
        if server is not None:
            server.close()


def _join(node: Node, secret: str, job: str, seconds: float) -> Store:
    """Connect to the store of the attempt that begins.

    If a launcher of this node took part in the present attempt and was killed, wait for that attempt's end
    first.
    """
    while True:
        store = Store(node.store, secret, job=job, timeout=seconds)
        if not node.restarts or not _was_killed(store, node):
            return store
        with store, suppress(BootstrapError, TimeoutError):
            store.get(_CLOSED, seconds)


def _was_killed(store: Store, node: Node) -> bool:
    """Tell whether an earlier launcher of this node took part in the attempt, and is gone."""
    if not store.add(_place(node.rank), 0):
        return False
    with suppress(TimeoutError):
        return store.get(_end_of(node.rank), _WILL_SECONDS) == _GONE
    return False


def _meet(store: Store, nranks: int, node: Node, seconds: float, attempt: int) -> tuple[int, int, int]:
    """Return what `_count` does; raise on all nodes if they disagree."""
    try:
        return _count(store, nranks, node, seconds, attempt)
    except StoreLost as error:
        raise BootstrapError(f"node 0 has ended while the nodes met, and says why: {error}") from None
    except BootstrapError:
        if node.rank == 0:
            # The others find the same error in the store, which ends with this process.
            time.sleep(_TELL_SECONDS)
        raise


def _serve(host: str, port: int, secret: str, job: str) -> StoreServer:
    try:
        return StoreServer(host, port, secret, job=job)
    except OSError as error:
        raise BootstrapError(
            f"--store {format_address(host, port)}: node 0 cannot listen there: {error}; expected "
            "a free port of this machine"
        ) from None


def _count(store: Store, nranks: int, node: Node, seconds: float, attempt: int) -> tuple[int, int, int]:
    """Return this node's first rank, the number of all ranks and the attempt, once all nodes are there."""
    if store.add(_place(node.rank), 1) > 1:
        raise BootstrapError(f"--node-rank {node.rank} was given on two machines; expected it on one")
    store.set(_ranks(node.rank), b"%d %d %d %d" % (nranks, node.count, node.restarts, attempt))
    deadline = time.monotonic() + seconds
    sizes = []
    for other in range(node.count):
        try:
            given = store.get(_ranks(other), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise BootstrapError(
                f"no pynccl run with --node-rank {other} has come to {node.store} within {seconds:g} s"
            ) from None
        size, count, restarts, their_attempt = map(int, given.split())
        attempt = max(attempt, their_attempt)
        for option, theirs, ours in (
            ("--nnodes", count, node.count),
            ("--restarts", restarts, node.restarts),
        ):
            if theirs != ours:
                raise BootstrapError(
                    f"{option} is {theirs} on node {other} and {ours} on node {node.rank}; expected it equal"
                )
        sizes.append(size)
    return sum(sizes[: node.rank]), sum(sizes), attempt


def _place(node: int) -> str:
    return f"nodes/{node}/place"


def _ranks(node: int) -> str:
    return f"nodes/{node}/ranks"


def _end_of(node: int) -> str:
    return f"nodes/{node}/end"


def _left(node: int) -> str:
    return f"nodes/{node}/left"
