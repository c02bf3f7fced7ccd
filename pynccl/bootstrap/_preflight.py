"""The checks before NCCL is called: facts of every rank, and their comparison by rank 0.

Every rank sends its facts or its failure (`Arrival`). Rank 0 compares all arrivals and replies with the
unique id or a failure (`Answer`). Messages are JSON, so they cannot carry code.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pynccl import capi
from pynccl._base import host
from pynccl._base.values import rank_list
from pynccl._errors import BootstrapError, NcclError, NcclTimeoutError, RankFailedError
from pynccl._library import cuda, features, loader
from pynccl._library.binding import lib
from pynccl._types import UniqueId
from pynccl._watch import check_mode
from pynccl.bootstrap._variables import PRIVATE

_LONGEST_TEXT = 4096
_CHECK = "PYNCCL_CHECK"
_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
# The ranks that one root of NCCL's bootstrap serves, about.
RANKS_PER_ROOT = 128


class Facts(NamedTuple):
    """One rank: its machine, its library, its devices, its settings."""

    host: str
    machine: str
    backend: str
    version: tuple[int, ...]
    path: str
    # The device of this rank; None if rank 0 must count the local ranks first.
    device: int | None
    # The UUIDs of the visible devices; empty without a driver.
    devices: tuple[str, ...]
    variables: dict[str, str]
    # False if each rank has virtual devices of its own: with the CPU library without PYNCCL_CPU_DEVICES.
    shared_devices: bool = True
    # True if the communicator has a time-out, so that it opens a control channel.
    timed: bool = False
    # The unique id that a root of a large job has made, in hexadecimal.
    uid: str = ""


class Failure(NamedTuple):
    """The reason why no communicator is created: a text, and the ranks that died or do not respond.

    With `asks`, the time-out of a rank: each rank has to answer, and the verdict follows. `late`: after a
    time-out the ranks that were awaited, as far as they are known; None: the reason is no such time-out.
    `missing`: the ranks that never arrived.
    """

    text: str
    dead: tuple[int, ...] = ()
    asks: bool = False
    late: tuple[int, ...] | None = None
    missing: tuple[int, ...] = ()

    def error(self) -> NcclError:
        """Return the exception that every rank raises."""
        if self.dead:
            return RankFailedError(self.text, ranks=self.dead)
        if self.late is None:
            return BootstrapError(self.text, ranks=self.missing)
        return NcclTimeoutError(self.text, ranks=self.late)


class Arrival(NamedTuple):
    """The message of a rank to rank 0: facts or a failure."""

    size: int
    facts: Facts | None
    failure: Failure | None = None


class Answer(NamedTuple):
    """The reply of rank 0: the ids or a failure, each rank's device if rank 0 chose it, rank 0's host."""

    size: int
    uid: str
    failure: Failure | None = None
    devices: tuple[int | None, ...] = ()
    warnings: tuple[str, ...] = ()
    host: str = ""

    def unique_ids(self) -> list[UniqueId]:
        """Return the unique ids: several for a large job."""
        data = bytes.fromhex(self.uid)
        return [UniqueId(data[at : at + UniqueId.SIZE]) for at in range(0, len(data), UniqueId.SIZE)]


def describe(error: BaseException) -> str:
    """Return the text of an error for messages to other ranks."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]


def failure_of(rank: int, size: int, error: BaseException) -> Failure:
    """Return the failure that reports a rank's error to the other ranks."""
    if isinstance(error, RankFailedError):
        return Failure(str(error)[:_LONGEST_TEXT], tuple(error.ranks))
    late = tuple(error.ranks) if isinstance(error, NcclTimeoutError) else None
    if isinstance(error, NcclError) and error.relayed:
        text = str(error)
    elif late is not None:
        text = f"rank {rank} of {size} reports: {error}"
    else:
        text = f"rank {rank} of {size} failed: {describe(error)}"
    missing = tuple(error.ranks) if isinstance(error, BootstrapError) else ()
    return Failure(text[:_LONGEST_TEXT], late=late, missing=missing)


def failure_of_rank_0(size: int, error: BaseException) -> Failure:
    """Return the failure that rank 0 answers in place of an id."""
    return (
        Failure(str(error)[:_LONGEST_TEXT], missing=tuple(error.ranks))
        if isinstance(error, BootstrapError)
        else failure_of(0, size, error)
    )


def death_of(rank: int, size: int) -> Failure:
    """Return the failure that reports a rank's death to the other ranks."""
    return Failure(f"rank {rank} of {size} died while the communicator was created", (rank,))


def silence_of(silent: Sequence[int], rank: int, size: int) -> Failure:
    """Return the failure that names ranks that did not answer the rank whose time-out had passed."""
    text = f"did not respond while the communicator was created (time-out of rank {rank} of {size})"
    return Failure(f"{rank_list(silent)} {text}", tuple(silent))


def pack(message: Arrival | Answer | Failure) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message).encode()


def unpack_arrival(data: bytes, rank: int) -> Arrival:
    """Return the arrival of a rank from its message."""
    with _understanding(f"rank {rank}", data):
        size, facts, failure = json.loads(data)
        if facts is not None:
            facts = Facts(*facts)
            facts = facts._replace(version=tuple(facts.version), devices=tuple(facts.devices))
        return Arrival(int(size), facts, _failure(failure))


def unpack_answer(data: bytes) -> Answer:
    """Return the answer of rank 0 from its message."""
    with _understanding("rank 0", data):
        size, uid, failure, devices, warnings, host = json.loads(data)
        return Answer(int(size), str(uid), _failure(failure), tuple(devices), tuple(warnings), str(host))


def unpack_failure(data: bytes) -> Failure:
    """Return the failure from the message of a rank, or from the will of a rank that died."""
    with _understanding("a rank that failed", data):
        failure = _failure(json.loads(data))
        if failure is None:
            raise ValueError("nothing")
        return failure


def _failure(said: Any) -> Failure | None:
    if said is None:
        return None
    text, dead, asks, late, missing = said
    return Failure(
        str(text),
        tuple(map(int, dead)),
        bool(asks),
        None if late is None else tuple(map(int, late)),
        tuple(map(int, missing)),
    )


@contextmanager
def _understanding(who: str, data: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise BootstrapError(f"the message of {who} cannot be parsed ({error}): {data[:80]!r}") from None


# --- this rank ----------------------------------------------------------------------------------------------


def gather_facts(device: int | None, local_rank: int | None, timed: bool) -> Facts:
    """Return the facts of this rank; `device` None means the device of `local_rank`, if that is known."""
    info = loader.loaded() or loader.load()
    cpu = info.backend == "cpu"
    # Check mode may set one of the variables.
    checks = check_mode.enabled()
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if checks:
        variables[_CHECK] = "1"
    devices = () if cpu else tuple(map(cuda.device_uuid, range(cuda.device_count())))
    shared = not cpu or bool(os.environ.get("PYNCCL_CPU_DEVICES"))
    facts = Facts(
        socket.gethostname(),
        _machine(cpu),
        info.backend,
        info.version,
        info.path,
        device,
        devices,
        variables,
        shared,
        timed,
    )
    if device is None and local_rank is not None:
        return facts._replace(device=device_for(facts, local_rank))
    return facts


def _machine(cpu: bool) -> str:
    """Return what is equal for ranks that share devices."""
    # Virtual devices belong to what the CPU library takes to be a host, GPUs to the machine.
    return f"{capi.pyncclCpuHostId():x}" if cpu else os.environ.get("NCCL_HOSTID") or host.machine()


def device_for(facts: Facts, local_rank: int) -> int | None:
    """Return the device of the local rank; None without a CUDA driver."""
    if facts.backend == "cpu":
        return local_rank
    count = len(facts.devices)
    if not count:
        return None
    # If the launcher makes one device visible to each task, that device is number 0.
    chosen = 0 if count == 1 else local_rank
    if chosen >= count:
        raise BootstrapError(
            f"local rank {local_rank} has no device: the driver shows {count} on {facts.host}; start fewer "
            "ranks on this machine, or pass pynccl.init(device=...)"
        )
    return chosen


def roots(size: int) -> list[int]:
    """Return the ranks that make the unique ids: the first of each share, as NCCL divides the ranks."""
    count = -(-size // RANKS_PER_ROOT)
    share, larger = divmod(size, count)
    return [i * share + min(i, larger) for i in range(count)]


def id_of_root(rank: int, size: int) -> str:
    """Return the id that this rank makes beside rank 0's, in hexadecimal; "" if it makes none."""
    # With NCCL_COMM_ID all ids name the same root.
    if rank == 0 or rank not in roots(size) or "NCCL_COMM_ID" in os.environ:
        return ""
    return _new_id() if lib.nccl_api_find(b"ncclCommInitRankScalable") else ""


def _new_id() -> str:
    return bytes(UniqueId(capi.ncclGetUniqueId())).hex()


def use_device(facts: Facts, device: int | None) -> None:
    """Make a device the current one of this process."""
    if device is None:
        return
    if facts.backend == "cpu":
        capi.pyncclCpuSetDevice(device)
    else:
        cuda.set_device(device)


# --- rank 0 -------------------------------------------------------------------------------------------------


def compare(arrivals: Sequence[Arrival], size: int) -> Answer:
    """Compare the facts of all ranks and return the answer; raise if a rank failed or does not fit."""
    facts = []
    for rank, arrival in enumerate(arrivals):
        if arrival.failure is not None or arrival.facts is None:
            raise (arrival.failure or Failure(f"rank {rank} sent no facts")).error()
        facts.append(arrival.facts)
    _require_one_library(facts)
    if text := _difference(facts, _CHECK):
        raise BootstrapError(f"{text}; check mode compares the calls of all ranks: all need it, or none")
    _require_equal_timing(facts)
    devices = _devices(facts)
    _require_own_devices(facts, devices)
    others = [facts[root].uid for root in roots(size)[1:]]
    uid = _new_id() + ("".join(others) if all(others) else "")
    counted = any(one.device is None for one in facts)
    chosen = tuple(devices) if counted else ()
    return Answer(size, uid, devices=chosen, warnings=tuple(_differences(facts)), host=facts[0].host)


def _require_equal_timing(facts: Sequence[Facts]) -> None:
    timed = [rank for rank, one in enumerate(facts) if one.timed]
    if 0 < len(timed) < len(facts):
        has = "have" if len(timed) > 1 else "has"
        raise BootstrapError(
            f"only {rank_list(timed)} of {len(facts)} {has} a time-out (timeout= or PYNCCL_TIMEOUT), with "
            "which ranks watch each other: all need one, or none"
        )


def _require_one_library(facts: Sequence[Facts]) -> None:
    first = facts[0]
    for rank, other in enumerate(facts):
        if other.backend != first.backend or other.version != first.version:
            raise BootstrapError(
                f"rank 0 and rank {rank} have different libraries: {_library_text(0, first)}; "
                f"{_library_text(rank, other)}. Every rank needs the same: install the same release "
                "everywhere, or name one file by PYNCCL_LIBRARY"
            )


def _library_text(rank: int, facts: Facts) -> str:
    kind = "the CPU library" if facts.backend == "cpu" else "NCCL"
    version = loader.version_text(facts.version)  # type: ignore[arg-type]
    return f"rank {rank} on {facts.host} has {kind} {version} ({facts.path})"


def _devices(facts: Sequence[Facts]) -> list[int | None]:
    """Return each rank's device; an unknown one follows from the rank's index on its machine."""
    seen: Counter[str] = Counter()
    devices = []
    for one in facts:
        devices.append(device_for(one, seen[one.machine]) if one.device is None else one.device)
        seen[one.machine] += 1
    return devices


def _require_own_devices(facts: Sequence[Facts], devices: Sequence[int | None]) -> None:
    owners: dict[tuple[str, str], int] = {}
    for rank, (one, device) in enumerate(zip(facts, devices, strict=True)):
        if device is None or not one.shared_devices:
            continue
        name = one.devices[device] if device < len(one.devices) else f"virtual device {device}"
        owner = owners.setdefault((one.machine, name), rank)
        if owner != rank and not (_shares(one) and _shares(facts[owner])):
            raise BootstrapError(_sharing_text(owner, rank, devices, one, name))


def _shares(facts: Facts) -> bool:
    return facts.variables.get(_MULTI_RANK) == "1" and features.reads(facts.version, _MULTI_RANK)


def _sharing_text(owner: int, rank: int, devices: Sequence[int | None], facts: Facts, name: str) -> str:
    text = (
        f"ranks {owner} and {rank} are both on {name} (their devices {devices[owner]} and {devices[rank]}) "
        f"of {facts.host}; NCCL allows one rank per device. Without device=, init uses LOCAL_RANK or the "
        "index of the rank on its machine"
    )
    if features.reads(facts.version, _MULTI_RANK):
        return f"{text}; to share a device on purpose, set {_MULTI_RANK}=1 on every rank"
    newer = f"use NCCL >= {features.needed(_MULTI_RANK)}"
    return f"{text}; to share a device, {newer}, or set a different NCCL_HOSTID on each rank"


def _differences(facts: Sequence[Facts]) -> list[str]:
    """Return a text for each NCCL variable that is not the same on every rank."""
    names = {name for one in facts for name in one.variables if name != _CHECK}
    return [text for name in sorted(names - PRIVATE) if (text := _difference(facts, name))]


def _difference(facts: Sequence[Facts], name: str) -> str | None:
    """Return a text if a variable is not the same on every rank."""
    ranks = defaultdict(list)
    for rank, one in enumerate(facts):
        ranks[one.variables.get(name)].append(rank)
    if len(ranks) == 1:
        return None
    parts = [
        f"{'not set' if value is None else repr(value[:200])} on {rank_list(group)}"
        for value, group in ranks.items()
    ]
    return f"{name} differs between ranks: {', '.join(parts)}"


def absent(
    rank: int, size: int, missing: Sequence[int], where: Any, refused: str = "", *, looked: int | None = None
) -> BootstrapError:
    """Return the error of a rank that timed out; `refused`: a text about clients that were refused.

    `looked`: how many ranks this one had time to look for, if not all.
    """
    names = rank_list(missing).split(" ", 1)[-1]
    least = "at least " if looked is not None and looked < size else ""
    who = f"ranks that never arrived: {names} ({least}{len(missing)} of {size})"
    who = who if missing else "rank 0 is silent"
    return BootstrapError(f"rank {rank} of {size} timed out at {where}; {who}{refused}", ranks=missing)
