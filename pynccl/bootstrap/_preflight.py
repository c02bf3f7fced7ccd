"""What ranks tell each other before NCCL is called, and what rank 0 makes of it.

A rank that arrives says what it is (`Arrival`), or why it failed; rank 0 compares them all and answers with
the id (`Answer`), or with why there is none. Both travel as JSON, never as code.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pynccl import _host, capi
from pynccl._errors import BootstrapError, NcclError, RankFailedError
from pynccl._library import cuda, loader
from pynccl._types import UniqueId

_LONGEST_TEXT = 4096
_MOST_NAMED = 32
# Variables that concern one rank only.
_PRIVATE = ("NCCL_HOSTID", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_COMM_ID")
_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_MULTI_RANK_SINCE = (2, 30)


class Facts(NamedTuple):
    """One rank: its machine, its library, its devices, its settings."""

    host: str
    machine: str
    backend: str
    version: tuple[int, ...]
    path: str
    # The device of this rank, None where its local rank has to be counted first.
    device: int | None
    # What tells the visible devices from those of other ranks; empty without a driver.
    devices: tuple[str, ...]
    variables: dict[str, str]
    # A virtual device is a rank's own, unless PYNCCL_CPU_DEVICES says how many there are.
    shared_devices: bool = True


class Failure(NamedTuple):
    """Why there is no communicator: what happened, and the ranks that died."""

    text: str
    dead: tuple[int, ...] = ()

    def error(self) -> NcclError:
        """Return it as every rank raises it."""
        return RankFailedError(self.text, ranks=self.dead) if self.dead else BootstrapError(self.text)


class Arrival(NamedTuple):
    """What a rank says when it arrives: facts, or a failure."""

    size: int
    facts: Facts | None
    failure: Failure | None = None


class Answer(NamedTuple):
    """What rank 0 says: the id, or a failure; the device of each rank where they were counted."""

    size: int
    uid: str
    failure: Failure | None = None
    devices: tuple[int | None, ...] = ()
    warnings: tuple[str, ...] = ()

    def unique_id(self) -> UniqueId:
        """Return the id."""
        return UniqueId(bytes.fromhex(self.uid))


def describe(error: BaseException) -> str:
    """Return the text of an error as it travels to other ranks."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]


def failure_of(rank: int, size: int, error: BaseException) -> Failure:
    """Return what other ranks are told of a rank's failure."""
    if isinstance(error, RankFailedError):
        return Failure(str(error)[:_LONGEST_TEXT], tuple(error.ranks))
    return Failure(f"rank {rank} of {size} failed: {describe(error)}")


def verdict(size: int, error: BaseException) -> Failure:
    """Return what the other ranks are told when rank 0 cannot answer with an id."""
    return (
        Failure(str(error)[:_LONGEST_TEXT])
        if isinstance(error, BootstrapError)
        else failure_of(0, size, error)
    )


def death_of(rank: int, size: int) -> Failure:
    """Return what the other ranks are told when a rank dies."""
    return Failure(f"rank {rank} of {size} died while the communicator was created", (rank,))


def pack(message: Arrival | Answer | Failure) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message).encode()


def unpack_arrival(data: bytes, rank: int) -> Arrival:
    """Return what a rank said."""
    with _understanding(f"rank {rank}", data):
        size, facts, failure = json.loads(data)
        if facts is not None:
            facts = Facts(*facts)
            facts = facts._replace(version=tuple(facts.version), devices=tuple(facts.devices))
        return Arrival(int(size), facts, _failure(failure))


def unpack_answer(data: bytes) -> Answer:
    """Return what rank 0 said."""
    with _understanding("rank 0", data):
        size, uid, failure, devices, warnings = json.loads(data)
        return Answer(int(size), str(uid), _failure(failure), tuple(devices), tuple(warnings))


def unpack_failure(data: bytes) -> Failure:
    """Return what a rank said when it failed, or had said for it when it died."""
    with _understanding("a rank that failed", data):
        failure = _failure(json.loads(data))
        if failure is None:
            raise ValueError("nothing")
        return failure


def _failure(said: Any) -> Failure | None:
    return None if said is None else Failure(str(said[0]), tuple(map(int, said[1])))


@contextmanager
def _understanding(who: str, data: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise BootstrapError(f"what {who} said is not understood ({error}): {data[:80]!r}") from None


# --- this rank ----------------------------------------------------------------------------------------------


def gather_facts(device: int | None, local_rank: int | None) -> Facts:
    """Return the facts of this rank; its device is given, or follows from its local rank."""
    info = loader.library_info()
    cpu = info.backend == "cpu"
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
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
    )
    if device is None and local_rank is not None:
        return facts._replace(device=device_for(facts, local_rank))
    return facts


def _machine(cpu: bool) -> str:
    """Return what the library tells machines by: NCCL_HOSTID, or the name and the boot."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    # The CPU library's devices are those of a container; a GPU is the machine's, whoever sees it.
    return _host.same_host("net", "pid") if cpu else _host.same_host()


def device_for(facts: Facts, local_rank: int) -> int | None:
    """Return the device of the local rank; None without a driver, when the library answers for itself."""
    if facts.backend == "cpu":
        return local_rank
    count = len(facts.devices)
    if not count:
        return None
    # Where the launcher shows each task its own device only, that is number 0.
    chosen = 0 if count == 1 else local_rank
    if chosen >= count:
        raise BootstrapError(
            f"local rank {local_rank} has no device: the driver shows {count} on {facts.host}; start fewer "
            "ranks on this machine, or choose by pynccl.init(device=...)"
        )
    return chosen


def use_device(facts: Facts, device: int | None) -> None:
    """Make a device the current one, for everybody in this process."""
    if device is None:
        return
    if facts.backend == "cpu":
        capi.pyncclCpuSetDevice(device)
    else:
        cuda.set_device(device)


# --- rank 0 -------------------------------------------------------------------------------------------------


def judge(arrivals: Sequence[Arrival], size: int) -> Answer:
    """Compare all ranks and return the answer for them; BootstrapError where they do not fit."""
    facts = []
    for rank, arrival in enumerate(arrivals):
        if arrival.failure is not None or arrival.facts is None:
            raise (arrival.failure or Failure(f"rank {rank} said nothing of itself")).error()
        if arrival.size != size:
            raise BootstrapError(f"rank {rank} has world_size {arrival.size}, rank 0 has {size}")
        facts.append(arrival.facts)
    _require_one_library(facts)
    devices = _devices(facts)
    _require_own_devices(facts, devices)
    uid = bytes(UniqueId(capi.ncclGetUniqueId())).hex()
    counted = any(one.device is None for one in facts)
    return Answer(size, uid, devices=tuple(devices) if counted else (), warnings=tuple(_differences(facts)))


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
    """Return each rank's device; where it is not known yet, by the rank's number within its machine."""
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
    return facts.variables.get(_MULTI_RANK) == "1" and facts.version >= _MULTI_RANK_SINCE


def _sharing_text(owner: int, rank: int, devices: Sequence[int | None], facts: Facts, name: str) -> str:
    text = (
        f"ranks {owner} and {rank} are both on {name} (their devices {devices[owner]} and {devices[rank]}) "
        f"of {facts.host}; NCCL takes one rank per device. Without device=, init chooses by LOCAL_RANK, or "
        "by the rank's number on its machine"
    )
    if facts.version >= _MULTI_RANK_SINCE:
        return f"{text}; to share a device on purpose, set {_MULTI_RANK}=1 on every rank"
    return f"{text}; sharing a device needs NCCL >= 2.30, or a NCCL_HOSTID of its own for each rank"


def _differences(facts: Sequence[Facts]) -> list[str]:
    """Return a text for each NCCL variable that is not the same on every rank."""
    names = sorted({name for one in facts for name in one.variables} - set(_PRIVATE))
    texts = []
    for name in names:
        ranks = defaultdict(list)
        for rank, one in enumerate(facts):
            ranks[one.variables.get(name)].append(rank)
        if len(ranks) > 1:
            parts = [
                f"{'not set' if value is None else repr(value[:200])} on {rank_list(group)}"
                for value, group in ranks.items()
            ]
            texts.append(f"{name} differs between ranks: {', '.join(parts)}")
    return texts


def rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", at most 32 of them."""
    names = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def absent(rank: int, size: int, missing: Sequence[int], where: Any, refused: str = "") -> BootstrapError:
    """Return the error of a rank whose time is up; `refused`: who did come, and was turned away."""
    names = rank_list(missing).split(" ", 1)[-1]
    who = f"ranks that never arrived: {names} ({len(missing)} of {size})" if missing else "rank 0 is silent"
    return BootstrapError(f"rank {rank} of {size} waited in vain at {where}; {who}{refused}")
