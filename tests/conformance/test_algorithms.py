"""Which algorithm a collective uses: by size and layout, by force, and the same one on all ranks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

import pynccl
from pynccl import capi, testing
from pynccl._trace.dumps import read_all

from .checks import algorithm_names

LINE = re.compile(r'NCCL INFO (\w+) of (\d+) elements of (\d+) B: algorithm "(.+)", 4 ranks on \d hosts')
LARGE = 300_000
PAIRS = {"AllReduce": "shares", "Broadcast": "copies", "AllGather": "copies"}
HOSTS = {
    "AllReduce": "all_reduce across hosts",
    "Broadcast": "broadcast across hosts",
    "AllGather": "all_gather across hosts",
}


def calls(rank: int, nranks: int, log: str, flat: int | None) -> str:
    os.environ |= {"NCCL_HOSTID": f"host{rank % 2}", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log + "%p"}
    if flat == rank:
        os.environ["PYNCCL_CPU_BY_HOSTS"] = "0"
    with pynccl.init(timeout=30) as comm:
        for count in (2, LARGE):
            ones = np.ones(count, np.float32)
            assert np.all(comm.all_reduce(ones) == nranks)
            assert np.all(comm.broadcast(np.full(count, rank), root=1) == 1)
            assert np.all(comm.all_gather(ones) == nranks)
    return f"{log}{os.getpid()}"


@pytest.mark.parametrize("flat", [None, 2], ids=["by hosts", "one rank refuses"])
def test_the_log_shows_it(tmp_path: os.PathLike[str], flat: int | None) -> None:
    for name in testing.run(4, calls, str(tmp_path) + "/log.", flat, backend="cpu"):
        with open(name) as file:
            used = {(function, int(count)): how for function, count, _, how in LINE.findall(file.read())}
        expected = {(function, 2): "local" for function in PAIRS}
        expected |= {(function, LARGE): how for function, how in (HOSTS if flat is None else PAIRS).items()}
        assert used.items() >= expected.items()


COLLECTIVES = {
    "all_reduce": "AllReduce",
    "reduce": "Reduce",
    "broadcast": "Broadcast",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AlltoAll",
    "gather": "Gather",
    "scatter": "Scatter",
}
CUT = {"all_reduce", "broadcast", "all_gather", "reduce_scatter"}
# What each rank sends to all others together comes with the headers only if it has at most so many bytes.
AREA = 1 << 20


def traced(
    rank: int, nranks: int, folder: str, hosts: int, inline: int
) -> tuple[str, str, list[pynccl.TraceRecord]]:
    log, dump = f"{folder}/log.{rank}", f"{folder}/rank{rank}.jsonl"
    os.environ |= {"NCCL_HOSTID": f"host{rank % hosts}", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log}
    limits = sorted({inline // 4, AREA // nranks // 4, AREA // 4})
    counts = [count for limit in limits for count in (limit - 1, limit, limit + 1) if count > 0]
    with pynccl.init(timeout=30) as comm:
        x, wide = np.ones(max(counts), np.float32), np.ones(nranks * max(counts), np.float32)
        calls = []
        for count in counts:
            few, many = x[:count], wide[: nranks * count]
            calls += [comm.prepare.all_reduce(few), comm.prepare.reduce(few, root=1)]
            calls += [comm.prepare.broadcast(few, root=2), comm.prepare.all_gather(few)]
            calls += [comm.prepare.reduce_scatter(many), comm.prepare.all_to_all(many)]
            calls += [comm.prepare.gather(few, root=3), comm.prepare.scatter(many, root=3)]
        for call in calls:
            call()
        pynccl.Plan(calls)()
        with pynccl.group():
            comm.all_reduce(x[:1])
            comm.all_gather(x[: counts[-1]])
        comm.all_reduce(x[:0])
        comm.send_recv(x[:1], (rank + 1) % nranks, np.empty(1, np.float32), (rank - 1) % nranks)
        comm.barrier()
        pynccl.dump_trace(dump)
        return log, dump, comm.trace()


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("inline", [0, 1024, 200_000])
@pytest.mark.parametrize(("by_hosts", "direct"), [(True, True), (False, True), (True, False)])
def test_the_trace_says_what_the_log_says(
    tmp_path: Path, hosts: int, inline: int, by_hosts: bool, direct: bool
) -> None:
    env = {"PYNCCL_CPU_INLINE_BYTES": str(inline), "PYNCCL_CPU_BY_HOSTS": str(int(by_hosts))}
    env |= {"PYNCCL_CPU_DIRECT": str(int(direct))}
    for log, dump, records in testing.run(4, traced, str(tmp_path), hosts, inline, backend="cpu", env=env):
        used = {(name, int(count)): how for name, count, _, how in LINE.findall(Path(log).read_text())}
        shown = [record for record in records if record.call in COLLECTIVES and record.count]
        assert [record.algorithm for record in shown] == [
            used[COLLECTIVES[r.call], r.count or 0] for r in shown
        ]
        assert {record.call for record in shown if record.plan} == set(COLLECTIVES)
        for call in COLLECTIVES:
            # Data that a host's ranks show are handled as small data are, but for all_reduce.
            number = 2 + (call == "all_reduce" and bool(inline)) if hosts == 1 else 1 + bool(inline)
            assert len({record.algorithm for record in shown if record.call == call}) == number
        cut = {record.call for record in shown if record.algorithm == "pieces"}
        assert cut == (CUT if hosts == 1 and not direct else set())
        others = [record for record in records if record not in shown]
        assert {record.algorithm for record in others} == {None}
        assert {"init", "all_reduce", "send", "recv", "barrier"} == {record.call for record in others}
        (member,) = read_all([dump]).members
        assert [record.algorithm for record in member.records] == [record.algorithm for record in records]


def test_the_design_lists_all() -> None:
    names, design = algorithm_names(), Path(pynccl.__file__).parent / "cpu" / "DESIGN.md"
    rows = re.findall(r"^\| ([^|]+) \|", design.read_text(), re.M)
    first = rows.index(names[0])
    assert rows[first : first + len(names)] == names


def derived(rank: int, nranks: int) -> list[str | None]:
    with pynccl.init(timeout=30, config={"blocking": 0}) as comm, comm.split(rank // 2) as half:
        found = []
        for one in (comm, half, *pynccl.init_all([0])):
            assert np.all(one.all_reduce(np.ones(10_000)) == one.size)
            one.all_reduce(np.ones(LARGE))
            found.append(one.trace()[-1].algorithm)
        one.destroy()
        for wrong in ("ncclSend", "AllReduce", ""):
            with pytest.raises(
                pynccl.NcclInvalidArgument, match=f'collective is "{wrong}", expected "ncclAll'
            ):
                capi.pyncclCpuGetAlgorithm(comm.handle, wrong, 1)
        assert capi.pyncclCpuGetAlgorithm(comm.handle, "ncclReduce", AREA + 1) == (
            "shares",
            (1 << 64) - 1,
        )
        assert capi.pyncclCpuGetAlgorithm(comm.handle, "ncclAllReduce", 8193) == ("shown shares", AREA)
        return found


def test_every_communicator_knows_its_algorithms() -> None:
    assert testing.run(4, derived, backend="cpu") == [["shares", "shares", "local"]] * 4


def cut(*comms: pynccl.Communicator) -> None:
    """Run three calls that are cut into pieces on each communicator."""
    for comm in comms:
        assert [float(comm.all_reduce(np.ones(LARGE), op="max").sum()) for _ in range(3)] == [LARGE] * 3


def leaves_early(rank: int, nranks: int) -> bool:
    """Rank 1 has queued its last call behind a message when it begins to leave."""
    os.environ["PYNCCL_CPU_DIRECT"] = "0"
    comm, stream, x = pynccl.init(), pynccl.Stream(), np.ones(4)
    cut(comm)
    if rank == 1:
        comm.recv(np.zeros(4), 2, stream=stream)
    if rank == 2:
        time.sleep(1)
        comm.send(x, 1)
    comm.all_reduce(x, stream=stream if rank == 1 else None)
    comm.destroy()
    return bool(np.all(x == nranks))


def locks_up(rank: int, nranks: int) -> str:
    """The ranks call two communicators in different orders."""
    os.environ["PYNCCL_CPU_DIRECT"] = "0"
    comm, stream = pynccl.init(), pynccl.Stream()
    other = comm.split(0)
    cut(comm, other)
    for each in (comm, other)[:: 1 if rank else -1]:
        each.all_reduce(np.ones(4), stream=stream)
    with pytest.raises(pynccl.CollectiveMismatchError) as caught:
        stream.synchronize()
    comm.abort()
    other.abort()
    return str(caught.value)


def mismatches(rank: int, nranks: int) -> str:
    os.environ["PYNCCL_CPU_DIRECT"] = "0"
    comm = pynccl.init()
    cut(comm)
    with pytest.raises(pynccl.CollectiveMismatchError) as caught:
        comm.all_reduce(np.ones(LARGE + rank))
    comm.abort()
    return str(caught.value)


def test_pieces_are_no_calls_of_the_program() -> None:
    assert testing.run(3, leaves_early, backend="cpu", timeout=40) == [True] * 3
    assert all("deadlock: " in text for text in testing.run(2, locks_up, backend="cpu", timeout=40))
    assert all("collective #4 differs" in text for text in testing.run(2, mismatches, backend="cpu"))
