"""`pynccl.init`: from what the launcher set to a communicator, or to an error that names who is missing."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from pynccl import _cuda, _library, capi
from pynccl._communicator import Communicator
from pynccl._errors import BootstrapError
from pynccl._types import UniqueId
from pynccl._watchdog import resolve_timeout
from pynccl.bootstrap import _mpi
from pynccl.bootstrap._round import Round
from pynccl.bootstrap._store import Store, StoreServer, format_address

DEFAULT_TIMEOUT = 300.0
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

# One store serves several calls of init: each is a round of its own, counted alike on every rank.
_rounds = itertools.count()
# Size, unique id, rank and device.
_Place = tuple[int, UniqueId, int, int | None]


def init(
    method: Any = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: int | None = None,
    config: Any = None,
    timeout: float | None = None,
) -> Communicator:
    """Find the other ranks of this program and return a communicator with all of them.

    `method` is "env" (RANK, WORLD_SIZE and PYNCCL_STORE, or MASTER_ADDR and MASTER_PORT, as `pynccl run`
    and torchrun set them), "mpi" or an mpi4py communicator; None takes what the environment shows, and one
    process where it shows nothing. `rank` and `world_size` replace the environment's. The device is by
    default the one that LOCAL_RANK names, and becomes the current one. Ranks that do not arrive within
    `timeout` seconds (300) are named in a BootstrapError.
    """
    method = _choose(rank, world_size) if method is None else method
    deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout)
    if method == "mpi" or _mpi.is_communicator(method):
        if rank is not None or world_size is not None:
            raise ValueError("rank and world_size are MPI's own with method='mpi'; expected None")
        place = _mpi.exchange(method, lambda local: _select(device, local))
    elif method in ("env", "single"):
        return _from_environment(method, rank, world_size, device, config, timeout, deadline)
    else:
        raise ValueError(f"method is {method!r}; expected None, 'env', 'mpi' or an mpi4py communicator")
    size, uid, rank, chosen = place
    return Communicator(size, uid, rank, config=config, device=chosen, timeout=timeout)


def _choose(rank: int | None, world_size: int | None) -> str:
    if rank is not None or world_size is not None or "RANK" in os.environ:
        return "env"
    if any(int(os.environ.get(name) or 1) > 1 for name in _MPI_SIZES):
        return "mpi"
    return "single"


def _select(device: int | None, local_rank: int) -> int | None:
    """Choose the device by the rank on this machine, and make it the current one for everybody."""
    if _library.library_info().backend == "cpu":
        chosen = local_rank if device is None else device
        capi.pyncclCpuSetDevice(chosen)
        return chosen
    count = _cuda.device_count()
    if device is None and count:
        # Where the launcher shows each task its own device only, that is number 0.
        device = 0 if count == 1 else local_rank
        if device >= count:
            raise BootstrapError(f"local rank {local_rank} has no device: the driver shows {count}")
    if device is not None:
        _cuda.set_device(device)
    return device


def _from_environment(
    method: str,
    rank: int | None,
    world_size: int | None,
    device: int | None,
    config: Any,
    timeout: float | None,
    deadline: float,
) -> Communicator:
    rank = _number("RANK", rank, None if method == "env" else 0)
    size = _number("WORLD_SIZE", world_size, None if method == "env" else 1)
    if not 0 <= rank < size:
        raise BootstrapError(f"RANK is {rank} and WORLD_SIZE {size}; expected 0 <= RANK < WORLD_SIZE")
    local_rank = _number("LOCAL_RANK", None, 0 if method == "single" else rank)
    if size == 1:
        chosen = _select(device, local_rank)
        uid = UniqueId(capi.ncclGetUniqueId())
        return Communicator(size, uid, rank, config=config, device=chosen, timeout=timeout)
    address, token, server = _store_address(rank)
    try:
        with Store(address, token, timeout=max(0.1, deadline - time.monotonic())) as store:
            meeting = Round(store, next(_rounds), rank, size, deadline)
            guarded = resolve_timeout(timeout) is not None
            if guarded:
                meeting.tie()
            uid, chosen = meeting.exchange(lambda: _select(device, local_rank), lingers=server is not None)

            def create(look: Callable[[], None] | None = None) -> Communicator:
                return Communicator._joined(size, uid, rank, config, chosen, timeout, look)

            return meeting.guard(create, lingers=server is not None) if guarded else create()
    finally:
        if server is not None:
            server.close()


def _number(name: str, given: int | None, default: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        state = "not set" if text is None else f"{text!r}"
        raise BootstrapError(f"{name} is {state}; expected a number, as `pynccl run` and torchrun set it")
    return int(text)


def _store_address(rank: int) -> tuple[str, str, StoreServer | None]:
    """Return address and token of the store, and its server where this rank has to be it."""
    token = os.environ.get("PYNCCL_STORE_TOKEN", "")
    address = os.environ.get("PYNCCL_STORE")
    if address:
        return address, token, None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise BootstrapError(
            f"rank {rank} knows no store: expected PYNCCL_STORE=host:port, or MASTER_ADDR and MASTER_PORT "
            f"(MASTER_ADDR={host!r}, MASTER_PORT={port!r})"
        )
    if rank != 0:
        return format_address(host, int(port)), token, None
    try:
        return format_address(host, int(port)), token, StoreServer(host, int(port), token)
    except OSError as error:
        raise BootstrapError(
            f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT ({host}:{port}): {error}"
        ) from error
