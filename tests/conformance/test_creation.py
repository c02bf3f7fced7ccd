"""How communicators come to be: ids, ranks that do not fit together or never come, non-blocking creation."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from meeting import free_port
from processes import completed

from .backend import capi
from .bodies import on_pool, transports
from .ranks import ROOT, Pool, Ranks
from .scenario import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    OK,
    REMOTE_ERROR,
    SYSTEM_ERROR,
    TIMEOUT,
    all_reduce,
    close,
    codes,
    connect,
    outcome,
    synchronize,
    wait_for_state,
    works,
)
from .worker import Rank

TRANSPORTS = transports("direct", "tcp", "threads")


def make_id(rank: Rank) -> bytes:
    uid: bytes = rank.exchange(capi().ncclGetUniqueId() if rank.rank == 0 else None)[0]
    return uid


@on_pool(2, transports=TRANSPORTS)
def test_id_used_twice(rank: Rank) -> None:
    uid = make_id(rank)
    comm = capi().ncclCommInitRank(rank.nranks, uid, rank.rank)
    code, text = outcome(capi().ncclCommInitRank, rank.nranks, uid, rank.rank)
    works(rank, comm, rank.nranks)
    close(rank, comm)
    assert code == INVALID_USAGE, text
    assert "id" in text
    assert "used" in text


def init_as(rank: Rank, nranks: list[int], ranks: list[int]) -> tuple[int, str]:
    return outcome(capi().ncclCommInitRank, nranks[rank.rank], make_id(rank), ranks[rank.rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_taken_twice(pool: Pool, transport: str) -> None:
    results = pool.get(3, transport).call(init_as, [3, 3, 3], [0, 1, 1])
    assert codes(results) == [INVALID_ARGUMENT] * 3, results
    assert all("rank 1" in text and "twice" in text for _, text in results), results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_numbers_of_ranks_differ(pool: Pool, transport: str) -> None:
    results = pool.get(3, transport).call(init_as, [3, 3, 4], [0, 1, 2])
    assert codes(results) == [INVALID_ARGUMENT] * 3, results
    assert all(re.search(r"\b3\b.*\b4\b|\b4\b.*\b3\b", text) for _, text in results), results


def out_of_range(rank: Rank, bad: int) -> tuple[int, str]:
    return outcome(capi().ncclCommInitRank, rank.nranks, make_id(rank), bad if rank.rank == 1 else rank.rank)


@pytest.mark.parametrize("bad", [2, -1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_out_of_range(pool: Pool, transport: str, bad: int) -> None:
    results = pool.get(2, transport).call(out_of_range, bad)
    assert codes(results) == [INVALID_ARGUMENT] * 2, results
    assert all(f"rank {bad}" in text for _, text in results), results


@on_pool(1)
def test_wrong_arguments(rank: Rank) -> None:
    api = capi()
    uid = api.ncclGetUniqueId()
    assert outcome(api.ncclCommInitRank, 0, uid, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitRank, -1, uid, 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitRank, 1, bytes(128), 0)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitAll, 0, None)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitAll, -1, None)[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitRankConfig, 1, uid, 0, {"blocking": 7})[0] == INVALID_ARGUMENT
    assert outcome(api.ncclCommInitRankScalable, 1, 0, 0, [])[0] == INVALID_ARGUMENT


@on_pool(1)
def test_wrong_refusals_to_grow(rank: Rank) -> None:
    api, comm = capi(), connect(rank)
    for uid, result, ranks, text in (
        (None, 0, [], "result is 0, expected an error"),
        (None, 99, [], "result is 99, expected an error"),
        (None, REMOTE_ERROR, [0, 7], "lateRanks[1] is 7, expected a rank, 0 to"),
        (None, REMOTE_ERROR, [-3], "lateRanks[0] is -3, expected a rank, 0 to"),
        (bytes(128), REMOTE_ERROR, [], "uniqueId was not made by ncclGetUniqueId of this library"),
    ):
        code, told = outcome(api.pyncclCpuRefuseToGrow, comm, uid, result, "why", ranks, len(ranks))
        assert code == INVALID_ARGUMENT and text in told, told
    code, told = outcome(api.pyncclCpuRefuseToGrow, comm, None, REMOTE_ERROR, "why", [], -1)
    assert code == INVALID_ARGUMENT and "lateRanksCount is -1, expected 0 or more" in told, told
    close(rank, comm)


def never_come(rank: Rank) -> tuple[int, str, float]:
    uid = make_id(rank)
    start = time.monotonic()
    code, text = outcome(capi().ncclCommInitRank, 5, uid, 2 * rank.rank)
    return code, text, time.monotonic() - start


def test_missing_ranks_are_named(pool: Pool) -> None:
    results = pool.get(2, PYNCCL_CPU_INIT_TIMEOUT="1").call(never_come)
    for code, text, took in results:
        assert code == TIMEOUT, text
        assert re.search(r"\b1\b.*\b3\b.*\b4\b", text.split("missing")[-1]), text
        assert "PYNCCL_CPU_INIT_TIMEOUT" in text
        assert took < 20
    # Their second begins when the first of them has joined.
    assert max(took for _, _, took in results) > 0.8


def died_early(rank: Rank) -> tuple[int, str]:
    uid = make_id(rank)
    if rank.rank == 1:
        # Having joined, so that the others wait for the third.
        capi().ncclCommInitRankConfig(3, uid, 1, {"blocking": 0})
        time.sleep(2)
        os._exit(9)
    return outcome(capi().ncclCommInitRank, 3, uid, 0)


def test_death_during_creation(pool: Pool) -> None:
    with Ranks(2) as ranks:
        code, text = ranks.call(died_early, check=False)[0]
    assert code == 6, text
    assert "rank 1" in text


MAKER = "import os; from pynccl import capi; os.write(1, capi.ncclGetUniqueId())"


@pytest.mark.slow
@on_pool(2)
def test_maker_of_the_id_is_gone(rank: Rank) -> None:
    uid = rank.exchange(
        subprocess.check_output([sys.executable, "-c", MAKER])[-128:] if rank.rank == 0 else None
    )[0]
    code, text = outcome(capi().ncclCommInitRank, rank.nranks, uid, rank.rank)
    assert code == SYSTEM_ERROR, text


def listening_addresses() -> list[tuple[str, int]]:
    """Return the IPv4 addresses that this process listens on."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    with open("/proc/self/net/tcp") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    assert found
    return found


@on_pool(2)
def test_strangers_are_dropped(rank: Rank) -> None:
    """Connections without the id's token, before and while the ranks come, are dropped and harm nobody."""
    uid = make_id(rank)
    guests = []
    if rank.rank == 0:
        for number, greeting in enumerate(
            [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64), os.urandom(4096), b"pynccl01" * 9]
        ):
            for address in listening_addresses():
                guest = socket.create_connection(address, 5)
                guest.sendall(greeting)
                guests.append((number, guest))
    rank.exchange()
    comm = capi().ncclCommInitRank(rank.nranks, uid, rank.rank)
    works(rank, comm, rank.nranks)
    for number, guest in guests:
        # Who sends nothing at all has a few seconds to do so.
        if number > 1:
            guest.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert guest.recv(1) == b"", "a stranger was answered"
        guest.close()
    works(rank, comm, rank.nranks)
    close(rank, comm)


@on_pool(2, transports=TRANSPORTS)
def test_nonblocking(rank: Rank) -> None:
    api, uid = capi(), make_id(rank)
    if rank.rank == 1:
        rank.exchange()
    comm = api.ncclCommInitRankConfig(rank.nranks, uid, rank.rank, {"blocking": 0})
    if rank.rank == 0:
        assert api.ncclCommGetAsyncError(comm) == IN_PROGRESS
        array = np.ones(1, np.float32)
        assert outcome(all_reduce, comm, array)[0] in (INVALID_ARGUMENT, INVALID_USAGE)
        rank.exchange()
    assert wait_for_state(comm) == OK
    array = np.ones(100, np.float32)
    assert all_reduce(comm, array) in (OK, IN_PROGRESS)
    assert wait_for_state(comm) == OK
    assert synchronize(comm) == OK
    assert (array == rank.nranks).all()
    child = api.ncclCommSplit(comm, 0, -rank.rank)
    assert wait_for_state(comm) == OK
    assert wait_for_state(int(child)) == OK
    assert api.ncclCommUserRank(int(child)) == rank.nranks - 1 - rank.rank
    for each in (int(child), comm):
        assert outcome(api.ncclCommFinalize, each)[0] in (OK, IN_PROGRESS)
        assert wait_for_state(each) == OK
        assert api.ncclCommDestroy(each) == OK


@on_pool(2)
def test_nonblocking_failure(rank: Rank) -> None:
    api = capi()
    comm = api.ncclCommInitRankConfig(rank.nranks, make_id(rank), 0, {"blocking": 0})
    code, text = wait_for_state(comm), api.ncclGetLastError(comm)
    api.ncclCommAbort(comm)
    assert code == INVALID_ARGUMENT, text
    assert "rank 0" in text


def aborted_creation(rank: Rank) -> float:
    """A creation that waits for ranks that never come can be aborted."""
    api = capi()
    comm = api.ncclCommInitRankConfig(5, make_id(rank), rank.rank, {"blocking": 0})
    assert api.ncclCommGetAsyncError(comm) == IN_PROGRESS
    rank.exchange()
    start = time.monotonic()
    api.ncclCommAbort(comm)
    return time.monotonic() - start


def test_abort_during_creation(pool: Pool) -> None:
    assert max(pool.get(2).call(aborted_creation)) < 15


@on_pool(2, NCCL_COMM_BLOCKING="0")
def test_nonblocking_from_the_environment(rank: Rank) -> None:
    """Without a configuration ncclCommInitRank opens no group, so that it blocks outside of one.

    NCCL's src/init.cc: ncclCommInitRank; src/group.cc: ncclAsyncLaunch.
    """
    api, uids = capi(), [make_id(rank), make_id(rank)]
    comm = api.ncclCommInitRank(rank.nranks, uids[0], rank.rank)
    states = [api.ncclCommGetAsyncError(comm)]
    api.ncclGroupStart()
    other = api.ncclCommInitRank(rank.nranks, uids[1], rank.rank)
    assert api.ncclGroupEnd() == IN_PROGRESS
    states.append(api.ncclCommGetAsyncError(other))
    for each in (comm, other):
        assert wait_for_state(each) == OK
        works(rank, each, rank.nranks)
        close(rank, each)
    assert states == [OK, IN_PROGRESS]


@pytest.mark.parametrize("nids", [1, 2, 4])
@on_pool(4, transports=TRANSPORTS)
def test_scalable(rank: Rank, nids: int) -> None:
    ids = rank.exchange(capi().ncclGetUniqueId())[:nids]
    comm = capi().ncclCommInitRankScalable(rank.nranks, rank.rank, nids, ids, {"commName": "scalable"})
    works(rank, comm, rank.nranks)
    close(rank, comm)


def scalable_mismatch(rank: Rank) -> tuple[int, str]:
    ids = rank.exchange(capi().ncclGetUniqueId())
    mine = ids if rank.rank == 0 else [ids[0], *reversed(ids[1:])]
    return outcome(capi().ncclCommInitRankScalable, rank.nranks, rank.rank, 3, mine)


def test_scalable_with_different_ids(pool: Pool) -> None:
    results = pool.get(3).call(scalable_mismatch)
    assert codes(results) == [INVALID_ARGUMENT] * 3, results


@on_pool(2)
def test_properties(rank: Rank) -> None:
    api, comm = capi(), connect(rank, {"commName": "mine", "blocking": 1})
    assert (api.ncclCommCount(comm), api.ncclCommUserRank(comm)) == (rank.nranks, rank.rank)
    found = api.ncclCommQueryProperties(comm)
    assert (found.rank, found.nRanks, found.cudaDev) == (rank.rank, rank.nranks, api.ncclCommCuDevice(comm))
    hashes = rank.exchange(found.commHash)
    assert len(set(hashes)) == 1
    other = connect(rank)
    assert api.ncclCommQueryProperties(other).commHash != found.commHash
    close(rank, other, comm)


def teams(rank: Rank) -> list[int]:
    api, comm = capi(), connect(rank)
    n, me = rank.nranks, rank.rank
    world, lsa, rail = (find(comm) for find in (api.ncclTeamWorld, api.ncclTeamLsa, api.ncclTeamRail))
    assert world == (n, me, 1)
    # Consecutive ranks that reach each other's memory; a rail has one of each such team.
    assert lsa.stride == 1 and rail == (n // lsa.nRanks, me // lsa.nRanks, lsa.nRanks)
    assert api.ncclCommQueryProperties(comm).nLsaTeams == rail.nRanks
    assert lsa.rank == me % lsa.nRanks
    first = me - lsa.rank
    for team, ranks in (
        (world, range(n)),
        (lsa, range(first, first + lsa.nRanks)),
        (rail, range(lsa.rank, n, lsa.nRanks)),
    ):
        assert [api.ncclTeamRankToWorld(comm, team, r) for r in range(team.nRanks)] == list(ranks)
    assert [api.ncclTeamRankToLsa(comm, lsa, r) for r in range(lsa.nRanks)] == list(range(lsa.nRanks))
    close(rank, comm)
    return list(lsa)


def test_teams(pool: Pool) -> None:
    assert pool.get(4).call(teams) == [[4, me, 1] for me in range(4)]


FORKING = """
import os
import numpy as np
from pynccl import capi
uid = capi.ncclGetUniqueId()
children = []
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        comm = capi.ncclCommInitRank(3, uid, rank)
        array = np.full(100000, rank + 1.0, np.float32)
        capi.ncclAllReduce(array.ctypes.data, array.ctypes.data, array.size, 7, 0, comm, 0)
        capi.pyncclCpuStreamSynchronize(comm, 0, 20000)
        capi.ncclCommDestroy(comm)
        os._exit(0 if (array == 6).all() else 3)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0, 0, 0], codes
"""

FORKED_LATER = """
import os
from pynccl import NcclError, capi
comm = capi.ncclCommInitRank(1, capi.ncclGetUniqueId(), 0)
pid = os.fork()
if pid == 0:
    try:
        capi.ncclCommCount(comm)
        capi.ncclAllReduce(1, 1, 0, 7, 0, comm, 0)
    except NcclError as error:
        os._exit(0 if error.result in (4, 5) and "fork" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert capi.ncclAllReduce(0, 0, 0, 7, 0, comm, 0) == 0
capi.ncclCommDestroy(comm)
"""


@pytest.mark.parametrize("program", [FORKING, FORKED_LATER], ids=["id", "communicator"])
def test_fork(program: str) -> None:
    """Children may use an id that was made before them, but no communicator."""
    env = os.environ | {"PYNCCL_LIBRARY": "cpu", "PYTHONPATH": str(ROOT), "PYNCCL_CPU_INIT_TIMEOUT": "10"}
    options = ["-W", "ignore::DeprecationWarning"]
    done = completed([sys.executable, *options, "-c", program], env=env, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr


def own_id(rank: Rank, rounds: int) -> None:
    """With NCCL_COMM_ID each rank makes the id itself, as often as it wants."""
    for _ in range(rounds):
        comm = capi().ncclCommInitRank(rank.nranks, capi().ncclGetUniqueId(), rank.rank)
        works(rank, comm, rank.nranks)
        close(rank, comm)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_comm_id_from_the_environment(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    with Ranks(3, env={"NCCL_COMM_ID": f"{host}:{free_port()}"}) as ranks:
        ranks.call(own_id, 2)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def own_id_outcome(rank: Rank) -> tuple[int, str]:
    return outcome(capi().ncclGetUniqueId)


@pytest.mark.parametrize("text", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "[::1]", ":80"])
def test_malformed_comm_id(text: str) -> None:
    with Ranks(1, env={"NCCL_COMM_ID": text}) as ranks:
        code, message = ranks.call(own_id_outcome)[0]
    assert code == INVALID_ARGUMENT, message
    assert "NCCL_COMM_ID" in message
