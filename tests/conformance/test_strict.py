"""What NCCL refuses or orders is refused or ordered here too, so that what passes here passes on a GPU.

Each test says what NCCL 2.30.7 does and where in its `src/` that is written. What knowingly differs stands in
docs/strictness.md.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meeting import free_port

from .backend import capi
from .bodies import on_pool
from .calls import COLLECTIVES, TRANSPORTS, N, Outcome, binding, create_with, ones, operation, state
from .ranks import Pool, Ranks
from .scenario import (
    FLOAT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    SUM,
    TIMEOUT,
    address,
    all_reduce,
    close,
    codes,
    connect,
    outcome,
    synchronize,
    works,
)
from .worker import Rank

UNHANDLED_CUDA_ERROR = 1


# --- configuration ------------------------------------------------------------------------------------------

UNACCEPTABLE: list[tuple[str, int]] = [
    *[("blocking", value) for value in (-1, 2)],
    ("cgaClusterSize", -1),
    *[("minCTAs", value) for value in (0, -1)],
    *[("maxCTAs", value) for value in (0, -1)],
    *[("splitShare", value) for value in (-1, 2)],
    *[("shrinkShare", value) for value in (-1, 2)],
    *[("collnetEnable", value) for value in (-1, 2)],
    *[("CTAPolicy", value) for value in (-1, 4)],
    *[("nvlsCTAs", value) for value in (0, -1)],
    *[("nChannelsPerNetPeer", value) for value in (0, -1, 65)],
    *[("nvlinkCentricSched", value) for value in (-1, 2)],
    *[("graphUsageMode", value) for value in (-1, 3)],
    ("numRmaCtx", -1),
    *[("maxP2pPeers", value) for value in (0, -1)],
    *[("graphStreamOrdering", value) for value in (-1, 2)],
]


@pytest.mark.parametrize(("field", "value"), UNACCEPTABLE)
def test_unacceptable_configuration(pool: Pool, field: str, value: int) -> None:
    """ncclInvalidArgument that names the field ("min/max channels" in NCCL). init.cc: parseCommConfig."""
    config = {field: value, "maxCTAs": 5} if field == "minCTAs" else {field: value}
    code, text = pool.get(1).call(create_with, config)[0]
    assert code == INVALID_ARGUMENT, text
    assert field in text
    assert str(value) in text


@pytest.mark.parametrize("config", [{"minCTAs": 5}, {"minCTAs": 6, "maxCTAs": 5}], ids=str)
def test_least_ctas_need_most_ctas(pool: Pool, config: dict[str, int]) -> None:
    """`minCTAs > maxCTAs` is compared before the defaults are filled in, and undefined is INT_MIN.

    init.cc: parseCommConfig.
    """
    code, text = pool.get(1).call(create_with, config)[0]
    assert code == INVALID_ARGUMENT, text
    assert "minCTAs" in text
    assert "maxCTAs" in text


ACCEPTABLE: list[dict[str, int]] = [
    {"blocking": 1, "cgaClusterSize": 0, "minCTAs": 1, "maxCTAs": 1},
    {"cgaClusterSize": 8, "maxCTAs": 1000, "splitShare": 1, "shrinkShare": 1, "trafficClass": -5},
    {"CTAPolicy": 3, "collnetEnable": 1, "nvlsCTAs": 1, "nChannelsPerNetPeer": 64, "nvlinkCentricSched": 1},
    {"graphUsageMode": 2, "graphStreamOrdering": 0, "numRmaCtx": 0, "maxP2pPeers": 1},
    {"graphUsageMode": 0, "graphStreamOrdering": 1, "numRmaCtx": 1000, "maxP2pPeers": 1 << 20},
]


@pytest.mark.parametrize("config", ACCEPTABLE, ids=str)
def test_acceptable_configuration(pool: Pool, config: dict[str, int]) -> None:
    """The bounds themselves, and what is capped or ignored. init.cc: parseCommConfig, envConfigOverride."""
    assert pool.get(1).call(create_with, config)[0] == (OK, "")


@on_pool(2)
def test_configuration_of_a_child(rank: Rank) -> None:
    """A split reads its configuration in the same way. init.cc: ncclCommInitChildComm."""
    comm = connect(rank)
    code, text = outcome(capi().ncclCommSplit, comm, 0, 0, {"graphUsageMode": 7})
    works(rank, comm, rank.nranks)
    close(rank, comm)
    assert code == INVALID_ARGUMENT, text
    assert "graphUsageMode" in text


def raw_config(rank: Rank, version: int, magic: int) -> int:
    (ffi, lib), api = binding(), capi()
    config = api.Config(cgaClusterSize=-5, graphUsageMode=7).pack()
    config.version, config.magic = version, magic
    comm = ffi.new("uintptr_t*")
    code: int = lib.ncclCommInitRankConfig(comm, 1, api.ncclGetUniqueId(), rank.rank, config)
    if code == OK:
        works(rank, comm[0], 1)
        close(rank, comm[0])
    return code


def test_configuration_of_an_older_caller(pool: Pool) -> None:
    """A field that is newer than the caller's version is not looked at. init.cc: parseCommConfig."""
    magic = 0xCAFEBEEF
    assert pool.get(1).call(raw_config, 21600, magic) == [OK]
    assert pool.get(1).call(raw_config, 21700, magic) == [INVALID_ARGUMENT]
    assert pool.get(1).call(raw_config, 21600, 0) == [INVALID_ARGUMENT]


@on_pool(2)
def test_other_structs_without_magic(rank: Rank) -> None:
    """CommProperties is ncclInvalidUsage; SimInfo is ncclInvalidArgument, and the group is over.

    dev_runtime.cc: ncclCommQueryProperties, group.cc: ncclGroupEndInternal.
    """
    (ffi, lib), api, comm = binding(), capi(), connect(rank)
    properties = api.CommProperties().pack()
    properties.magic = 0
    assert lib.ncclCommQueryProperties(comm, properties) == INVALID_USAGE
    assert lib.ncclCommQueryProperties(comm, ffi.NULL) == INVALID_ARGUMENT
    info, array = api.SimInfo().pack(), ones()
    info.magic = 0
    api.ncclGroupStart()
    all_reduce(comm, array)
    assert lib.ncclGroupSimulateEnd(info) == INVALID_ARGUMENT
    assert outcome(api.ncclGroupEnd)[0] == INVALID_USAGE, "the group was left open"
    works(rank, comm, rank.nranks)
    assert (array == 1).all()
    close(rank, comm)


# --- devices ------------------------------------------------------------------------------------------------


def create_on(rank: Rank, devices: list[int]) -> Outcome:
    """Create on these devices, one for each rank; then on one of each rank's own."""
    api = capi()
    api.pyncclCpuSetDevice(devices[rank.rank])
    made: list[int] = []
    result = outcome(lambda: made.append(connect(rank)))
    if made:
        assert api.ncclCommCuDevice(made[0]) == devices[rank.rank]
        # Threads that share a device share its legacy stream too, on which their calls would wait in line.
        works(rank, made[0], rank.nranks, api.pyncclCpuStreamCreate())
        close(rank, made[0])
    rank.exchange()
    api.pyncclCpuSetDevice(rank.rank)
    comm = connect(rank)
    works(rank, comm, rank.nranks)
    close(rank, comm)
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_device_is_chosen(pool: Pool, transport: str) -> None:
    """By default a rank's device is its own, whatever its number: a CPU has none to share."""
    assert pool.get(3, transport).call(create_on, [0, 0, 0]) == [(OK, "")] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_on_a_device(pool: Pool, transport: str) -> None:
    """ncclInvalidUsage on every rank, also on those who share nothing. init.cc: initTransportsRank.

    Until 2.29 "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx"; since 2.30 the text
    names NCCL_MULTI_RANK_GPU_ENABLE.
    """
    for code, text in pool.get(3, transport, PYNCCL_CPU_DEVICES="3").call(create_on, [1, 1, 2]):
        assert code == INVALID_USAGE, text
        for word in ("Duplicate GPU detected", "rank 0", "rank 1", "NCCL_MULTI_RANK_GPU_ENABLE"):
            assert word in text, text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_on_a_device_that_may(pool: Pool, transport: str) -> None:
    """NCCL_MULTI_RANK_GPU_ENABLE=1 allows it (since 2.30). init.cc: initTransportsRank."""
    group = pool.get(2, transport, PYNCCL_CPU_DEVICES="2", NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert group.call(create_on, [0, 0]) == [(OK, "")] * 2


def test_two_ranks_on_a_device_of_their_hosts(pool: Pool) -> None:
    """NCCL_HOSTID says which ranks share a host; misc/utils.cc: getHostHashOnce. TCP gives each its own."""
    assert pool.get(2, "tcp", PYNCCL_CPU_DEVICES="2").call(create_on, [0, 0]) == [(OK, "")] * 2


@on_pool(2, PYNCCL_CPU_DEVICES="2")
def test_devices_have_a_number(rank: Rank) -> None:
    """As cudaSetDevice refuses what is not there."""
    api = capi()
    assert api.pyncclCpuDeviceCount() == 2
    zero, one, two, negative = [outcome(api.pyncclCpuSetDevice, device) for device in (0, 1, 2, -1)]
    assert zero == one == (OK, "")
    assert codes([two, negative]) == [INVALID_ARGUMENT] * 2
    assert "PYNCCL_CPU_DEVICES" in two[1]
    assert "2" in two[1].partition("PYNCCL_CPU_DEVICES")[2]


@pytest.mark.parametrize(
    ("ndev", "devices", "expected"),
    [
        (2, [1, 0], {OK}),
        (2, None, {OK}),
        (2, [1, 1], {INVALID_USAGE}),
        (1, [2], {INVALID_ARGUMENT}),
        (1, [-1], {INVALID_ARGUMENT}),
        (3, None, {UNHANDLED_CUDA_ERROR, INVALID_ARGUMENT}),
        (-1, None, {INVALID_ARGUMENT}),
    ],
)
@on_pool(1, PYNCCL_CPU_DEVICES="2")
def test_init_all_on_devices(rank: Rank, ndev: int, devices: list[int] | None, expected: set[int]) -> None:
    """Duplicates are ncclInvalidUsage, an unknown device ncclInvalidArgument. init.cc: ncclCommInitAll.

    More ranks than devices without a list is cudaSetDevice's error.
    """
    comms: list[int] = []
    code, text = outcome(lambda: comms.extend(capi().ncclCommInitAll(ndev, devices)))
    for comm in comms:
        capi().ncclCommAbort(comm)
    assert code in expected, text


# --- NULL, twice, unknown -----------------------------------------------------------------------------------


@on_pool(2)
def test_null_is_nothing_to_do(rank: Rank) -> None:
    """These return ncclSuccess for NULL; all others refuse it.

    init.cc: ncclCommDestroy, ncclCommAbort, ncclCommFinalize, ncclCommRevoke; register/register.cc:
    commDeregister; dev_runtime.cc: ncclCommWindowDeregister; allocator.cc: ncclMemFree.
    """
    api, comm = capi(), connect(rank)
    found = {
        "Destroy": outcome(api.ncclCommDestroy, 0),
        "Abort": outcome(api.ncclCommAbort, 0),
        "Finalize": outcome(api.ncclCommFinalize, 0),
        "Revoke": outcome(api.ncclCommRevoke, 0, 0),
        "Revoke with flags": outcome(api.ncclCommRevoke, 0, 1),
        "Deregister": outcome(api.ncclCommDeregister, comm, 0),
        "WindowDeregister": outcome(api.ncclCommWindowDeregister, comm, 0),
        "MemFree": outcome(api.ncclMemFree, 0),
    }
    refused = [
        outcome(api.ncclCommDeregister, 0, 0),
        outcome(api.ncclCommWindowDeregister, 0, 0),
        outcome(api.ncclCommGetAsyncError, 0),
        outcome(api.ncclCommSplit, 0, 0, 0),
        outcome(api.ncclCommGetUniqueId, 0),
    ]
    assert codes(refused) == [INVALID_ARGUMENT] * len(refused), refused
    works(rank, comm, rank.nranks)
    close(rank, comm)
    assert found == dict.fromkeys(found, (OK, ""))


@on_pool(2)
def test_revoke_after_finalize(rank: Rank) -> None:
    """ncclInvalidArgument, and nobody hears of it. init.cc: ncclCommRevoke."""
    api, comm = capi(), connect(rank)
    if rank.rank == 1:
        works(rank, comm, rank.nranks)
        thread = threading.Thread(target=lambda: api.ncclCommFinalize(comm))
        thread.start()
        rank.exchange()
        thread.join(20)
        assert not thread.is_alive()
        assert outcome(api.ncclCommRevoke, comm, 0)[0] == INVALID_ARGUMENT
        rank.exchange()
    else:
        works(rank, comm, rank.nranks)
        rank.exchange()
        assert outcome(api.ncclCommFinalize, comm) == (OK, "")
        rank.exchange()
        assert state(comm) == OK, "the other rank's late revoke was heard"
    assert outcome(api.ncclCommDestroy, comm) == (OK, "")


def id_to_grow(rank: Rank) -> Outcome:
    comm = capi().ncclCommInitRank(1, capi().ncclGetUniqueId(), 0)
    result = outcome(capi().ncclCommGetUniqueId, comm)
    close(rank, comm)
    return result


def test_no_id_to_grow_with_one_from_the_environment() -> None:
    """ncclInvalidUsage while NCCL_COMM_ID is set. bootstrap.cc: bootstrapGetUniqueId."""
    with Ranks(1, env={"NCCL_COMM_ID": f"127.0.0.1:{free_port()}"}) as ranks:
        code, text = ranks.call(id_to_grow)[0]
    assert code == INVALID_USAGE, text
    assert "NCCL_COMM_ID" in text


# --- windows ------------------------------------------------------------------------------------------------


def window_on_one_rank(rank: Rank, other: str) -> Outcome:
    """Rank 0 registers; rank 1 does something else that waits for rank 0."""
    api, comm, array = capi(), connect(rank), ones()
    pointer = api.ncclMemAlloc(4096)
    if rank.rank == 0:
        result = outcome(api.ncclCommWindowRegister, comm, pointer, 4096, 0)
    elif other == "AllReduce":
        result = outcome(all_reduce, comm, array)
        if result[0] == OK:
            result = outcome(synchronize, comm)
    elif other == "Split":
        result = outcome(api.ncclCommSplit, comm, 0, 0)
    else:
        result = outcome(api.ncclCommFinalize, comm)
    rank.exchange()
    api.ncclCommAbort(comm)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("other", ["AllReduce", "Split", "Finalize"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_window_on_one_rank_only(pool: Pool, transport: str, other: str) -> None:
    """Registering is collective, so NCCL hangs: bootstrapAllGather and bootstrapBarrier in dev_runtime.cc:
    ncclDevrWindowRegisterInGroup. Here both ranks are told.
    """
    zero, one = pool.get(2, transport, PYNCCL_CPU_INIT_TIMEOUT="3").call(window_on_one_rank, other)
    # Rank 1 might still register, by another thread: only time tells that it does not.
    assert zero[0] == (TIMEOUT if other == "AllReduce" else INVALID_USAGE), zero
    assert "WindowRegister" in zero[1]
    assert "rank 1" in zero[1]
    # Finalize waits for nobody in NCCL, and may have succeeded.
    assert one[0] == zero[0] or (other == "Finalize" and one[0] == OK), one


@on_pool(2, transports=TRANSPORTS)
def test_windows_and_collectives_do_not_wait_for_each_other(rank: Rank) -> None:
    """Ranks meet for a window on their hosts, for a collective on their streams: the order is free.

    group.cc: groupLaunch registers, then launches; dev_runtime.cc: ncclCommWindowDeregister has no barrier.
    """
    api, comm, array = capi(), connect(rank), ones()
    pointer, stream = api.ncclMemAlloc(8192), api.pyncclCpuStreamCreate()
    steps: list[Callable[[], Any]] = [
        lambda: all_reduce(comm, array, stream),
        lambda: api.ncclCommWindowRegister(comm, pointer, 8192, 1),
    ]
    done = [step() for step in (steps if rank.rank else reversed(steps))]
    win = done[1] if rank.rank else done[0]
    assert synchronize(comm, stream) == OK
    assert (array == rank.nranks).all()
    assert api.ncclWinGetUserPtr(comm, win) == pointer
    api.ncclGroupStart()
    all_reduce(comm, array, stream)
    late = api.ncclCommWindowRegister(comm, pointer, 4096, 0)
    api.ncclGroupEnd()
    assert api.ncclWinGetUserPtr(comm, int(late)) == pointer
    assert synchronize(comm, stream) == OK
    assert (array == rank.nranks**2).all()
    if rank.rank == 0:
        # Deregistering is local.
        for each in (int(late), win):
            assert outcome(api.ncclCommWindowDeregister, comm, each) == (OK, "")
    works(rank, comm, rank.nranks)
    close(rank, comm)


def window_of(rank: Rank, kind: str) -> Outcome:
    """Rank 1 tries the wrong memory, and then the right one."""
    api, comm, tried = capi(), connect(rank), (OK, "")
    good = api.ncclMemAlloc(8192)
    if rank.rank == 1:
        wrong = {
            "nobody's": (0x10000, 4096),
            "beyond its end": (good, 1 << 30),
            "not aligned": (good + 64, 4096),
            "NULL": (0, 4096),
            "empty": (good, 0),
        }
        tried = outcome(api.ncclCommWindowRegister, comm, *wrong[kind], 0)
    if tried[0] != OK or rank.rank == 0:
        win = api.ncclCommWindowRegister(comm, good, 8192, 0)
        assert api.ncclWinGetUserPtr(comm, win) == good
    works(rank, comm, rank.nranks)
    close(rank, comm)
    return tried


@pytest.mark.parametrize("kind", ["nobody's", "beyond its end", "not aligned", "NULL", "empty"])
def test_memory_of_a_window(pool: Pool, kind: str) -> None:
    """A window lies in memory that the driver maps, as ncclMemAlloc's, or it is a CUDA error; it is aligned
    to 4096 bytes, or it is ncclInvalidArgument. The other ranks do not notice: they go on waiting.

    dev_runtime.cc: ncclDevrWindowRegisterInGroup, before symMemoryObtain.
    """
    _, (code, text) = pool.get(2).call(window_of, kind)
    assert code in (UNHANDLED_CUDA_ERROR, INVALID_ARGUMENT), text


# --- counts of zero, groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLLECTIVES)
@on_pool(2)
def test_a_collective_of_nothing_waits_for_nobody(rank: Rank, name: str) -> None:
    """ "Empty collectives can be discarded": the others need not make the call. enqueue.cc: taskAppend."""
    comm = connect(rank)
    a, b = ones(2 * N), np.zeros(2 * N, np.float32)
    function, *args = operation(name, rank, comm, address(a), address(b))
    if rank.rank == 0:
        args[2] = 0
        assert outcome(function, *args) == (OK, "")
        assert synchronize(comm, seconds=5) == OK, "it waits for the other rank"
    rank.exchange()
    works(rank, comm, rank.nranks)
    close(rank, comm)


def empty_on_one_rank_only(rank: Rank) -> list[Outcome]:
    api, comm, array = capi(), connect(rank), ones()
    results = []
    if rank.rank == 0:
        results.append(outcome(api.ncclAllReduce, 0, 0, 0, FLOAT32, SUM, comm, 0))
    else:
        results.append(outcome(all_reduce, comm, array))
    results.append(outcome(api.ncclCommFinalize, comm))
    api.ncclCommAbort(comm)
    return results


def test_a_collective_of_nothing_matches_nothing(pool: Pool) -> None:
    """Rank 1 waits in vain, for ever in NCCL. enqueue.cc: taskAppend. Here both hear of it at the end."""
    zero, one = pool.get(2).call(empty_on_one_rank_only)
    assert codes(zero) == [OK, INVALID_USAGE], zero
    assert codes(one) == [OK, INVALID_USAGE], one
    assert all("rank 0" in results[1][1] and "rank 1" in results[1][1] for results in (zero, one))


@on_pool(2, transports=TRANSPORTS)
def test_creations_and_collectives_in_a_group(rank: Rank) -> None:
    """The communicators are made first, then the collectives are launched. group.cc: groupLaunch."""
    api, comm, array = capi(), connect(rank), ones()
    uid = rank.exchange(api.ncclGetUniqueId() if rank.rank == 0 else None)[0]
    api.ncclGroupStart()
    all_reduce(comm, array)
    child = api.ncclCommSplit(comm, 0, -rank.rank)
    fresh = api.ncclCommInitRank(rank.nranks, uid, rank.rank)
    all_reduce(comm, array)
    assert outcome(api.ncclGroupEnd) == (OK, "")
    assert synchronize(comm) == OK
    assert (array == rank.nranks**2).all()
    assert api.ncclCommUserRank(int(child)) == rank.nranks - 1 - rank.rank
    for each in (int(child), int(fresh), comm):
        works(rank, each, rank.nranks)
        close(rank, each)


# --- the id of many ids -------------------------------------------------------------------------------------

MAKER = "import os; from pynccl import capi; os.write(1, capi.ncclGetUniqueId())"


def scalable(rank: Rank, dead: int) -> Outcome:
    """Create with two ids; `dead` is the one whose maker has exited, or -1."""
    ids = rank.exchange(capi().ncclGetUniqueId() if rank.rank in (0, 2) else None)[::2]
    if dead >= 0:
        gone = subprocess.check_output([sys.executable, "-c", MAKER])[-128:] if rank.rank == 0 else None
        ids[dead] = rank.exchange(gone)[0]
    made: list[int] = []
    result = outcome(lambda: made.append(capi().ncclCommInitRankScalable(rank.nranks, rank.rank, 2, ids)))
    for comm in made:
        works(rank, comm, rank.nranks)
        close(rank, comm)
    return result


@pytest.mark.parametrize("dead", [-1, pytest.param(0, marks=pytest.mark.slow), 1])
def test_every_id_is_met_at(pool: Pool, dead: int) -> None:
    """Ranks 0 and 1 of 4 report to the first of two ids, ranks 2 and 3 to the second: without its maker none
    of them comes to be. bootstrap.cc: rootIdFromRank, bootstrapInit.
    """
    results = pool.get(4, PYNCCL_CPU_INIT_TIMEOUT="3").call(scalable, dead)
    if dead < 0:
        assert results == [(OK, "")] * 4
    else:
        assert OK not in codes(results), results
