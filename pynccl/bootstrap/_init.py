"""`pynccl.init`: from the launcher's variables to a communicator, or to an error that names missing ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from pynccl import capi
from pynccl._base.hints import hints_keywords
from pynccl._base.timeouts import check_timeout, resolve_timeout
from pynccl._base.values import INT, check_int
from pynccl._comm.communicator import Communicator
from pynccl._secure.secret import read_secret
from pynccl._trace.callers import called_from, caller
from pynccl._types import UniqueId
from pynccl._watch import channel
from pynccl.bootstrap import _environment, _methods
from pynccl.bootstrap._create import create
from pynccl.bootstrap._environment import Launcher
from pynccl.bootstrap._exchange import Exchange
from pynccl.bootstrap._methods import Method
from pynccl.bootstrap._preflight import Facts, gather_facts, id_of_root, use_device
from pynccl.bootstrap._variables import misspelled

DEFAULT_TIMEOUT = 300.0

log = logging.getLogger("pynccl")

# The warnings about the environment that this process has logged.
_warned: set[str] = set()
# The device that the last init chose for this process.
_chosen_before: int | None = None


@hints_keywords
def init(
    method: Any = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: int | None = None,
    config: Any = None,
    timeout: float | None = None,
    on_listen: Callable[[str], object] | None = None,
) -> Communicator:
    """Find the other ranks of this program and return a communicator with all of them.

    `method` is one of

    - None: chosen from the arguments and the environment: `rank` and `world_size`, the variables of torchrun,
      Slurm or MPI, or a single process (docs/rendezvous.md has the whole order)
    - "env": the same without MPI
    - "mpi": MPI.COMM_WORLD; or pass any mpi4py communicator
    - "tcp://host:port": rank 0 listens at this address; with port 0 it takes a free port and calls
      `on_listen` with the method for the other ranks, as text
    - "file:///path": a folder that init creates, on a file system that every rank sees
    - an object with get(name) and set(name, bytes), such as a torch store: a new one, or one whose users all
      call init the same number of times

    `rank` and `world_size` override the environment. `device` is by default LOCAL_RANK, or the index of the
    rank on its machine; init makes it the current device.

    `timeout` bounds the rendezvous and every later wait, in seconds; its default is PYNCCL_TIMEOUT. Without
    both the rendezvous may take 300 s, and later waits have no limit. The import of torch for torchrun's
    store does not count.

    If a rank fails, every rank raises its error. BootstrapError names ranks that do not arrive in time, also
    in `ranks`, two ranks with one device, and ranks with different libraries. Also raises RankFailedError if
    a rank dies, NcclTimeoutError if the creation takes too long, LibraryNotFoundError without a library,
    another NcclError if the creation fails, and TypeError or ValueError for wrong arguments.
    """
    _require(rank, world_size, device, timeout)
    limit = resolve_timeout(timeout)
    seconds, timed = limit or DEFAULT_TIMEOUT, limit is not None
    launcher = _environment.detect(_environment.variables())
    chosen = _methods.choose(method, rank, world_size, launcher, on_listen)
    deadline = time.monotonic() + seconds
    if chosen.rank == 0:
        warnings = {*misspelled(os.environ), *_environment.hidden_ranks(os.environ, launcher)}
        for warning in sorted(warnings - _warned):
            log.warning("pynccl.init: %s", warning)
        _warned.update(warnings)
    log.info("pynccl.init: rank %d of %d by %s", chosen.rank, chosen.size, chosen.why)
    local_rank = _local_rank(chosen, launcher)
    if chosen.part and device is None:
        device = _chosen_before

    channel.remember_host(chosen.host)
    place = caller()

    def make(uids: list[UniqueId], on: int | None) -> Communicator:
        with called_from(place):
            return Communicator(chosen.size, uids, chosen.rank, config=config, device=on, timeout=timeout)

    if chosen.size == 1:
        # A single rank uses no secret, but a bad secret raises the same error as with several ranks.
        read_secret()
        facts = gather_facts(device, local_rank or 0, timed)
        use_device(facts, facts.device)
        return create(lambda: make([UniqueId(capi.ncclGetUniqueId())], facts.device), None, deadline, seconds)
    with chosen.open(deadline) as exchange:
        uids, on = _exchange(exchange, device, local_rank, timed)
        return create(lambda: make(uids, on), exchange, deadline, seconds)


def _exchange(
    exchange: Exchange, device: int | None, local_rank: int | None, timed: bool
) -> tuple[list[UniqueId], int | None]:
    facts: list[Facts] = []

    def prepare() -> Facts:
        facts.append(gather_facts(device, local_rank, timed))
        # Before the id is published, if the device is already known: selecting a device may fail.
        use_device(facts[0], facts[0].device)
        return facts[0]._replace(uid=id_of_root(exchange.rank, exchange.size))

    answer = exchange.exchange(prepare)
    on = answer.devices[exchange.rank] if answer.devices else facts[0].device
    if facts[0].device is None:
        try:
            use_device(facts[0], on)
        except Exception as error:
            exchange.fail(error)
            raise
    if exchange.rank == 0:
        for warning in answer.warnings:
            log.warning("pynccl.init: %s", warning)
    if device is None:
        global _chosen_before
        _chosen_before = on
    return answer.unique_ids(), on


def _local_rank(chosen: Method, launcher: Launcher) -> int | None:
    """Return the launcher's local rank; None if the caller chose other rank numbers."""
    if launcher.rank is not None and chosen.follows:
        return launcher.local_rank
    return None


def _require(rank: int | None, world_size: int | None, device: int | None, timeout: float | None) -> None:
    for name, value, least in (("rank", rank, 0), ("world_size", world_size, 1), ("device", device, 0)):
        if value is None:
            continue
        check_int(value, name, least, INT, f"an int, {least} or more and below 2**31, or None")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ValueError(f"rank is {rank} and world_size {world_size}; expected 0 <= rank < world_size")
    check_timeout(timeout)
