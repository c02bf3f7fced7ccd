"""Random programs: what they consist of, what a rank does to run one, and what must come out.

Every rank has a few registers (arrays), each belonging to one stream. Communicators come in families: one
split makes one communicator of each colour, and a step runs on all of them at once. A program is legal by
construction: all ranks issue the same steps in the same order, and a group uses a register in one step only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .backend import Memory, capi
from .oracle import DATATYPES, OPS, SMALL, Array, differences, fill, reduce
from .worker import Rank

NRANKS = 4
STREAMS = 3
REGISTERS = 7
CAPACITY = 96
# A register has room for so many incoming point-to-point messages.
SLOTS = 8


@dataclass(frozen=True)
class Collective:
    """A collective on every communicator of a family; in place where both registers are the same."""

    family: int
    function: str
    op: str
    send: int
    receive: int
    count: int
    root: int


@dataclass(frozen=True)
class PointToPoint:
    """Messages (source, target, count) in one group; the k-th one to a target lands in its k-th slot."""

    family: int
    edges: tuple[tuple[int, int, int], ...]
    send: int
    receive: int


@dataclass(frozen=True)
class Group:
    """Steps between ncclGroupStart and ncclGroupEnd."""

    steps: tuple[Any, ...]


@dataclass(frozen=True)
class Either:
    """Two steps on different families, streams and registers, whose order is each rank's own."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Split:
    """A new family from all communicators of another one; -1 is no colour."""

    family: int
    colors: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Handover:
    """Give a register to another stream, which waits for the old one."""

    register: int
    stream: int


@dataclass(frozen=True)
class Sync:
    """Wait for a stream on the host."""

    stream: int


@dataclass(frozen=True)
class Program:
    """Steps, the datatype of each register, and how much longer than CAPACITY the registers are."""

    dtypes: tuple[str, ...]
    steps: tuple[Any, ...]
    scale: int = 1
    seed: int = 0


Family = list[list[int]]


def split(family: Family, step: Split) -> Family:
    """Return the members of the new communicators, as ranks of the world, in the order of their new ranks."""
    new: Family = []
    for members in family:
        colors = sorted({step.colors[rank] for rank in members} - {-1})
        for color in colors:
            chosen = [rank for rank in members if step.colors[rank] == color]
            new.append(sorted(chosen, key=lambda rank: (step.keys[rank], members.index(rank))))
    return new


def units(function: str, size: int) -> tuple[int, int]:
    """Return how many counts a rank sends and receives."""
    send = size if function in ("ReduceScatter", "AlltoAll", "Scatter") else 1
    receive = size if function in ("AllGather", "AlltoAll", "Gather") else 1
    return send, receive


def offsets(step: Collective, size: int, me: int, root: int) -> tuple[int, int]:
    """Return where, in counts, NCCL wants both sides of an in-place call to start."""
    if step.send != step.receive:
        return 0, 0
    send = me if step.function == "AllGather" or (step.function == "Gather" and me == root) else 0
    receive = me if step.function == "ReduceScatter" or (step.function == "Scatter" and me == root) else 0
    return send, receive


def edges_of(step: PointToPoint, size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Give source, target, count, the slot read and the slot written, for a communicator of this size."""
    arrived = [0] * size
    for index, (source, target, count) in enumerate(step.edges):
        source, target = source % size, target % size
        if arrived[target] < SLOTS:
            yield source, target, count, index % SLOTS, arrived[target]
            arrived[target] += 1


class Oracle:
    """Runs a program on all ranks' registers in NumPy."""

    def __init__(self, program: Program, hosts: Sequence[int]) -> None:
        """`hosts`: that of each rank."""
        self.program, self.scale, self.hosts = program, program.scale, hosts
        self.families: list[Family] = [[list(range(NRANKS))]]
        self.registers = [self._registers(rank) for rank in range(NRANKS)]

    def _registers(self, rank: int) -> list[Array]:
        rng = np.random.default_rng([self.program.seed, rank])
        n = CAPACITY * self.scale
        return [fill(DATATYPES[name], n, rng, False, False) for name in self.program.dtypes]

    def run(self) -> None:
        for step in self.program.steps:
            self.step(step)

    def step(self, step: Any) -> None:
        match step:
            case Group(steps):
                for inner in steps:
                    self.step(inner)
            case Either(first, second):
                self.step(first)
                self.step(second)
            case Split():
                self.families.append(split(self.families[step.family], step))
            case Collective():
                for members in self.families[step.family]:
                    self.collective(step, members)
            case PointToPoint():
                for members in self.families[step.family]:
                    self.point_to_point(step, members)

    def point_to_point(self, step: PointToPoint, members: list[int]) -> None:
        slot = CAPACITY * self.scale // SLOTS
        for source, target, count, read, written in edges_of(step, len(members)):
            n = count * self.scale
            data = self.registers[members[source]][step.send][read * slot : read * slot + n]
            self.registers[members[target]][step.receive][written * slot : written * slot + n] = data

    def collective(self, step: Collective, members: list[int]) -> None:
        size, n = len(members), step.count * self.scale
        root = step.root % size
        sent, _ = units(step.function, size)
        inputs = []
        for me, rank in enumerate(members):
            start = offsets(step, size, me, root)[0] * n
            inputs.append(self.registers[rank][step.send][start : start + sent * n].copy())
        for me, rank in enumerate(members):
            by_hosts = n * inputs[0].itemsize > SMALL
            hosts = [self.hosts[member] for member in members] if by_hosts else None
            result = self._result(step, inputs, hosts, me, root, n)
            if result is not None:
                start = offsets(step, size, me, root)[1] * n
                self.registers[rank][step.receive][start : start + result.size] = result

    def _result(
        self, step: Collective, inputs: list[Array], hosts: list[int] | None, me: int, root: int, n: int
    ) -> Array | None:
        mine = slice(me * n, (me + 1) * n)
        datatype = DATATYPES[self.program.dtypes[step.send]]
        match step.function:
            case "AllReduce":
                return reduce(inputs, step.op, datatype, hosts=hosts)
            case "Reduce":
                return reduce(inputs, step.op, datatype, hosts=hosts) if me == root else None
            case "ReduceScatter":
                return reduce([array[mine] for array in inputs], step.op, datatype, hosts=hosts)
            case "Broadcast":
                return inputs[root]
            case "Scatter":
                return inputs[root][mine]
            case "AllGather":
                return np.concatenate(inputs)
            case "Gather":
                return np.concatenate(inputs) if me == root else None
        return np.concatenate([array[mine] for array in inputs])


@dataclass
class Machine:
    """Runs a program on one rank."""

    rank: Rank
    program: Program
    world: int
    streams: Sequence[int]
    registers: list[Memory]
    owner: list[int]
    families: list[Family] = field(default_factory=lambda: [[list(range(NRANKS))]])
    comms: list[int] = field(default_factory=list)

    def run(self) -> None:
        self.comms = [self.world]
        for step in self.program.steps:
            self.step(step)
        for stream in self.streams:
            self.rank.backend.synchronize(self.world, stream)
        for comm in self.comms[1:]:
            if comm:
                capi().ncclCommDestroy(comm)

    def step(self, step: Any) -> None:
        api, me = capi(), self.rank.rank
        match step:
            case Group(steps):
                api.ncclGroupStart()
                for inner in steps:
                    self.step(inner)
                api.ncclGroupEnd()
            case Either(first, second):
                self.step(second if me % 2 else first)
                self.step(first if me % 2 else second)
            case Split():
                parent = self.comms[step.family]
                new = api.ncclCommSplit(parent, step.colors[me], step.keys[me], None) if parent else 0
                self.comms.append(new)
                self.families.append(split(self.families[step.family], step))
            case Handover(register, stream):
                self.rank.backend.order(self.world, self.streams[self.owner[register]], self.streams[stream])
                self.owner[register] = stream
            case Sync(stream):
                self.rank.backend.synchronize(self.world, self.streams[stream])
            case _ if self.comms[step.family]:
                members = next(m for m in self.families[step.family] if me in m)
                run = self.collective if isinstance(step, Collective) else self.point_to_point
                run(step, members)

    def at(self, register: int, element: int) -> int:
        return (
            self.registers[register].ptr + element * DATATYPES[self.program.dtypes[register]].numpy.itemsize
        )

    def collective(self, step: Collective, members: list[int]) -> None:
        size, n, me = len(members), step.count * self.program.scale, members.index(self.rank.rank)
        root = step.root % size
        send, receive = offsets(step, size, me, root)
        function = getattr(capi(), f"nccl{step.function}")
        number = DATATYPES[self.program.dtypes[step.send]].number
        arguments = [self.at(step.send, send * n), self.at(step.receive, receive * n), n, number]
        if step.function in ("AllReduce", "Reduce", "ReduceScatter"):
            arguments.append(OPS[step.op])
        if step.function in ("Reduce", "Broadcast", "Gather", "Scatter"):
            arguments.append(root)
        function(*arguments, self.comms[step.family], self.streams[self.owner[step.send]])

    def point_to_point(self, step: PointToPoint, members: list[int]) -> None:
        api, scale, me = capi(), self.program.scale, members.index(self.rank.rank)
        slot = CAPACITY * scale // SLOTS
        number = DATATYPES[self.program.dtypes[step.send]].number
        comm, stream = self.comms[step.family], self.streams[self.owner[step.send]]
        api.ncclGroupStart()
        for source, target, count, read, written in edges_of(step, len(members)):
            if source == me:
                api.ncclSend(self.at(step.send, read * slot), count * scale, number, target, comm, stream)
            if target == me:
                api.ncclRecv(
                    self.at(step.receive, written * slot), count * scale, number, source, comm, stream
                )
        api.ncclGroupEnd()


def run_program(rank: Rank, program: Program, owner: list[int], hosts: list[int]) -> str | None:
    """Run a program on a rank; return how its registers differ from the oracle's."""
    from .matrix import communicator

    rank.note(f"{program}"[:200])
    world = communicator(rank)
    oracle = Oracle(program, hosts)
    registers = []
    for values in oracle.registers[rank.rank]:
        memory = rank.backend.memory(values.nbytes)
        memory.write(0, values.view(np.uint8))
        registers.append(memory)
    Machine(rank, program, world, rank.state["streams"], registers, list(owner)).run()
    oracle.run()
    for index, (memory, expected) in enumerate(zip(registers, oracle.registers[rank.rank], strict=True)):
        datatype = DATATYPES[program.dtypes[index]]
        got = memory.read(0, expected.nbytes).copy().view(datatype.numpy)
        wrong = differences(got, expected, datatype)
        if wrong.size:
            i = wrong[0]
            return (
                f"register {index} ({datatype.name})[{i}] is {got[i]}, not {expected[i]}; {wrong.size} differ"
            )
    return None
