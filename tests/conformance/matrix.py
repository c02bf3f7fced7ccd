"""What a rank does for one case of the matrix: prepare buffers, call, wait, compare every byte."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Backend, Bytes, Memory, capi
from .cases import MOVES, REDUCTIONS, ROOTED, Case
from .oracle import DATATYPES, OPS, SMALL, Array, Datatype, differences, distances, fill, reduce
from .worker import Rank

# Data repeats itself after a prime number of elements, so that an oracle for millions of them costs no more.
PERIOD = 8191
GUARD = 64
POISON = 0xA5
WHOLE_SENDS = {"ReduceScatter", "AlltoAll", "Scatter", "Exchange"}
WHOLE_RECEIVES = {"AllGather", "AlltoAll", "Gather", "Exchange"}
SAME_EVERYWHERE = {"AllReduce", "Broadcast", "Bcast", "AllGather"}


@dataclass(frozen=True)
class Layout:
    """The host of each rank, and the size up to which an array is reduced as if there were one host."""

    hosts: Sequence[int] | None = None
    inline_bytes: int = SMALL


class Inputs:
    """What every rank sends, in units of the case's count."""

    def __init__(self, case: Case, nranks: int, exact: bool, hosts: Sequence[int] | None) -> None:
        """`hosts`: that of each rank, if each host reduces its ranks' data first."""
        self.case, self.nranks, self.exact, self.hosts = case, nranks, exact, hosts
        self.datatype = DATATYPES[case.dtype]
        units = nranks if case.collective in WHOLE_SENDS else 1
        length = min(PERIOD, max(1, units * case.count))
        nans = exact and case.op not in ("premul_host", "premul_device")
        rngs = [np.random.default_rng([case.seed, rank]) for rank in range(nranks)]
        self.patterns = [fill(self.datatype, length, rng, exact, nans) for rng in rngs]
        self.scalars = self._scalars() if case.op and OPS[case.op] < 0 else None

    def _scalars(self) -> Array:
        rng = np.random.default_rng(self.case.seed)
        if self.datatype.is_float:
            return fill(self.datatype, self.nranks, rng, False, False)
        return rng.integers(1, 6, self.nranks).astype(self.datatype.numpy)

    def part(self, rank: int, unit: int, units: int = 1) -> Array:
        """Return these units of what the rank sends."""
        return self._periodic(self.patterns[rank], unit, units)

    def reduced(self, unit: int) -> Array:
        """Return the reduction over all ranks of one unit."""
        op = "sum" if self.scalars is not None else str(self.case.op)
        return self._periodic(reduce(self.patterns, op, self.datatype, self.scalars, self.hosts), unit, 1)

    def scale(self, unit: int) -> Array:
        """Return how large the numbers are that one unit of a reduction is made of."""
        factors = np.ones(self.nranks) if self.scalars is None else np.abs(self.scalars.astype(np.float64))
        patterns = zip(self.patterns, factors, strict=True)
        total: Array = sum(np.abs(pattern.astype(np.float64)) * factor for pattern, factor in patterns)
        return self._periodic(total, unit, 1)

    def _periodic(self, pattern: Array, unit: int, units: int) -> Array:
        count = self.case.count
        if count == 0:
            return pattern[:0]
        return np.resize(np.roll(pattern, -(unit * count % len(pattern))), units * count)


def exchange_size(case: Case, source: int, target: int) -> int:
    """Return how many elements one rank sends to another in an Exchange: all, half or none of a unit."""
    return [case.count, case.count // 2, 0][(source + 2 * target + case.seed) % 3]


def expected_units(case: Case, rank: int, inputs: Inputs) -> list[Array]:
    """Return what a rank receives, by unit of its output; nothing where it receives nothing."""
    n, root, everyone = inputs.nranks, case.root(inputs.nranks), range(inputs.nranks)
    match case.collective:
        case "AllReduce":
            return [inputs.reduced(0)]
        case "Reduce":
            return [inputs.reduced(0)] if rank == root else []
        case "ReduceScatter":
            return [inputs.reduced(rank)]
        case "Broadcast" | "Bcast":
            return [inputs.part(root, 0)]
        case "AllGather":
            return [inputs.part(source, 0) for source in everyone]
        case "AlltoAll":
            return [inputs.part(source, rank) for source in everyone]
        case "Gather":
            return [inputs.part(source, 0) for source in everyone] if rank == root else []
        case "Scatter":
            return [inputs.part(root, rank)]
        case "Ring":
            return [inputs.part((rank - 1) % n, 0)]
        case "Exchange":
            return [inputs.part(source, rank)[: exchange_size(case, source, rank)] for source in everyone]
        case "Chain":
            return [inputs.part(0, 0)] if rank > 0 else []
    raise AssertionError(case)


class Buffer:
    """Memory with guards around it, at an address that is aligned to an element and no better."""

    def __init__(self, backend: Backend, case: Case, units: int) -> None:
        self.itemsize = DATATYPES[case.dtype].numpy.itemsize
        self.unit_bytes = case.count * self.itemsize
        self.start = GUARD + case.seed % 5 * self.itemsize
        self.expected: Bytes = np.full(self.start + units * self.unit_bytes + GUARD, POISON, np.uint8)
        self.memory: Memory = backend.memory(self.expected.size)

    def at(self, unit: int) -> int:
        """Return the address of a unit."""
        return self.memory.ptr + self.start + unit * self.unit_bytes

    def expect(self, unit: int, values: Array) -> None:
        """Put values into what the memory has to be in the end."""
        data = np.ascontiguousarray(values).view(np.uint8)
        first = self.start + unit * self.unit_bytes
        self.expected[first : first + data.size] = data

    def store(self) -> None:
        """Make the memory what is expected so far."""
        self.memory.write(0, self.expected)

    def got(self) -> Bytes:
        return self.memory.read(0, self.expected.size)


@dataclass
class Buffers:
    """A rank's sending and receiving side: one buffer in place, None where NCCL looks at neither pointer."""

    send: Buffer | None
    send_unit: int
    receive: Buffer | None
    receive_unit: int

    def pointers(self, case: Case, scratch: Buffer) -> tuple[int, int]:
        """Return both addresses; half of the unused ones are NULL, and so are some for no elements at all."""
        unused = 0 if case.seed % 2 else scratch.at(0)
        send = self.send.at(self.send_unit) if self.send else unused
        receive = self.receive.at(self.receive_unit) if self.receive else unused
        return (0, 0) if case.count == 0 and case.seed % 3 == 0 else (send, receive)

    def each(self) -> list[tuple[str, Buffer]]:
        """Return the distinct buffers with their names."""
        if self.send is self.receive:
            return [("buffer", self.send)] if self.send else []
        pairs = [("input", self.send), ("output", self.receive)]
        return [(name, buffer) for name, buffer in pairs if buffer]


def make_buffers(case: Case, rank: int, inputs: Inputs, backend: Backend) -> Buffers:
    """Allocate, fill with what the rank sends, and note what has to be there afterwards."""
    n, name, root = inputs.nranks, case.collective, case.root(inputs.nranks)
    sends = (
        rank == root if name in ("Broadcast", "Bcast", "Scatter") else rank == 0 if name == "Chain" else True
    )
    send_units = n if name in WHOLE_SENDS else 1
    result = expected_units(case, rank, inputs)
    receive_units = n if name in WHOLE_RECEIVES else 1
    receives = bool(result)
    if not case.in_place:
        send = Buffer(backend, case, send_units) if sends else None
        buffers = Buffers(send, 0, Buffer(backend, case, receive_units) if receives else None, 0)
    else:
        both = Buffer(backend, case, max(send_units if sends else 0, receive_units if receives else 0, 1))
        shifts_send = name == "AllGather" or (name == "Gather" and rank == root)
        shifts_receive = name == "ReduceScatter" or (name == "Scatter" and rank == root)
        buffers = Buffers(both, rank if shifts_send else 0, both, rank if shifts_receive else 0)
    if buffers.send and sends:
        buffers.send.expect(buffers.send_unit, inputs.part(rank, 0, send_units))
    for _, buffer in buffers.each():
        buffer.store()
    if buffers.receive:
        for unit, values in enumerate(result):
            buffers.receive.expect(buffers.receive_unit + unit, values)
    return buffers


class Caller:
    """The calls of one case on one rank."""

    def __init__(
        self, rank: Rank, case: Case, inputs: Inputs, buffers: Buffers, comm: int, stream: int
    ) -> None:
        self.rank, self.case, self.inputs, self.buffers = rank, case, inputs, buffers
        self.comm, self.stream, self.dtype = comm, stream, inputs.datatype.number
        # Kept until the operation is done: it may read its scalar as late as that.
        self.scalar: Memory | None = None

    def __call__(self, scratch: Buffer) -> None:
        case, api = self.case, capi()
        send, receive = self.buffers.pointers(case, scratch)
        if case.collective in ("Ring", "Exchange", "Chain"):
            getattr(self, case.collective.lower())()
            return
        function: Callable[..., Any] = getattr(api, f"nccl{case.function}")
        pointers = [receive] if case.collective == "Bcast" else [send, receive]
        arguments: list[Any] = [*pointers, case.count, self.dtype]
        custom = None
        if case.op is not None:
            custom = self.create_op(case.op)
            arguments.append(OPS[case.op] if custom is None else custom)
        if case.collective in ROOTED:
            arguments.append(case.root(self.rank.nranks))
        arguments += [self.comm, self.stream]
        if case.function.endswith("Config"):
            arguments.append({"maxCTAs": 4} if case.seed % 2 else None)
        function(*arguments)
        if custom is not None:
            # NCCL allows that as soon as the call has returned.
            api.ncclRedOpDestroy(custom, self.comm)

    def create_op(self, op: str) -> int | None:
        """Return a new PreMulSum operation, or None for NCCL's own."""
        scalars, api = self.inputs.scalars, capi()
        if scalars is None:
            return None
        mine = np.ascontiguousarray(scalars[self.rank.rank : self.rank.rank + 1]).view(np.uint8).copy()
        if op == "premul_host":
            op_of_host = int(api.ncclRedOpCreatePreMulSum(mine.ctypes.data, self.dtype, 1, self.comm))
            # NCCL has read it by now.
            mine[:] = 0
            return op_of_host
        self.scalar = self.rank.backend.memory(mine.size)
        self.scalar.write(0, mine)
        return int(api.ncclRedOpCreatePreMulSum(self.scalar.ptr, self.dtype, 0, self.comm))

    def ring(self) -> None:
        """Send to the next rank and receive from the one before."""
        n, rank, count, api = self.rank.nranks, self.rank.rank, self.case.count, capi()
        send, receive = self.buffers.pointers(self.case, scratch=_some(self.buffers.receive))
        api.ncclGroupStart()
        api.ncclSend(send, count, self.dtype, (rank + 1) % n, self.comm, self.stream)
        api.ncclRecv(receive, count, self.dtype, (rank - 1) % n, self.comm, self.stream)
        api.ncclGroupEnd()

    def exchange(self) -> None:
        """Send a different amount to every rank, in an order of this rank's own."""
        n, me, api = self.rank.nranks, self.rank.rank, capi()
        send, receive = _some(self.buffers.send), _some(self.buffers.receive)
        api.ncclGroupStart()
        for other in ((me + step) % n for step in range(n)):
            count = exchange_size(self.case, me, other)
            api.ncclSend(send.at(other), count, self.dtype, other, self.comm, self.stream)
        for other in range(n):
            count = exchange_size(self.case, other, me)
            api.ncclRecv(receive.at(other), count, self.dtype, other, self.comm, self.stream)
        api.ncclGroupEnd()

    def chain(self) -> None:
        """Hand on what the rank before sent, without a group: the stream keeps the order."""
        n, me, count, api = self.rank.nranks, self.rank.rank, self.case.count, capi()
        if me > 0:
            api.ncclRecv(_some(self.buffers.receive).at(0), count, self.dtype, me - 1, self.comm, self.stream)
        if me + 1 < n:
            mine = _some(self.buffers.receive if me > 0 else self.buffers.send)
            api.ncclSend(mine.at(0), count, self.dtype, me + 1, self.comm, self.stream)


def _some(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer


def compare(case: Case, rank: int, inputs: Inputs, buffers: Buffers, backend: Backend) -> str | None:
    """Return what is wrong in the buffers, or None."""
    for name, buffer in buffers.each():
        got = buffer.got()
        if np.array_equal(got, buffer.expected):
            continue
        first, end = buffer.start, buffer.expected.size - GUARD
        outside = np.r_[0:first, end : buffer.expected.size]
        bad = outside[got[outside] != POISON]
        if bad.size:
            return f"wrote outside the {name}: byte {bad[0] - first} of {end - first}"
        datatype = inputs.datatype
        values, expected = (side[first:end].copy().view(datatype.numpy) for side in (got, buffer.expected))
        if backend.exact or case.collective not in REDUCTIONS or name == "input":
            wrong = differences(values, expected, datatype)
        else:
            unit = rank if case.collective == "ReduceScatter" else 0
            scale = np.resize(inputs.scale(unit), values.size)
            wrong = distances(values, expected, datatype, 2 * inputs.nranks, scale)
        if wrong.size:
            return describe(name, values, expected, wrong, datatype)
    return None


def describe(name: str, got: Array, expected: Array, wrong: Array, datatype: Datatype) -> str:
    """Return the first wrong element in words."""
    i = int(wrong[0])
    bits = f"u{datatype.numpy.itemsize}"
    shown = [f"{side[i]} (0x{int(side[i : i + 1].view(bits)[0]):x})" for side in (got, expected)]
    return f"{name}[{i}] is {shown[0]}, not {shown[1]}; {wrong.size} of {got.size} elements differ"


def communicator(rank: Rank) -> int:
    """Return this rank's communicator of all ranks, made at the first call."""
    if "comm" not in rank.state:
        uid = rank.exchange(capi().ncclGetUniqueId() if rank.rank == 0 else None)[0]
        rank.state["comm"] = capi().ncclCommInitRank(rank.nranks, uid, rank.rank)
        rank.state["streams"] = [0, rank.backend.create_stream(), rank.backend.create_stream()]
    comm: int = rank.state["comm"]
    return comm


def run_case(rank: Rank, case: Case, layout: Layout) -> tuple[str | None, int]:
    """Run one case; return what is wrong, and a checksum where all ranks have to receive the same."""
    backend, comm = rank.backend, communicator(rank)
    stream = rank.state["streams"][case.seed % 3]
    by_hosts = case.count * DATATYPES[case.dtype].numpy.itemsize > layout.inline_bytes
    inputs = Inputs(case, rank.nranks, backend.exact, layout.hosts if by_hosts else None)
    buffers = make_buffers(case, rank.rank, inputs, backend)
    caller = Caller(rank, case, inputs, buffers, comm, stream)
    caller(Buffer(backend, case, 1))
    backend.synchronize(comm, stream)
    checksum = 0
    if case.collective in SAME_EVERYWHERE:
        receive = _some(buffers.receive)
        checksum = zlib.crc32(receive.got()[receive.start : receive.expected.size - GUARD].tobytes())
    return compare(case, rank.rank, inputs, buffers, backend), checksum


def run_cases(rank: Rank, cases: Sequence[Case], layout: Layout) -> tuple[dict[int, str], list[int]]:
    """Run the cases in order; return what was wrong by index, and the checksums."""
    wrong: dict[int, str] = {}
    checksums: list[int] = []
    for index, case in enumerate(cases):
        reduces = case.op is not None
        if not rank.backend.supports(case.dtype, reduces):
            checksums.append(0)
            continue
        rank.note(f"{index} {case}")
        problem, checksum = run_case(rank, case, layout)
        checksums.append(checksum)
        if problem:
            wrong[index] = problem
    return wrong, checksums


def algorithms(rank: Rank) -> set[str]:
    """Return the algorithms of the CPU library for small, middle and large calls of all collectives."""
    comm, sizes = communicator(rank), (1, 1 << 16, 1 << 30)
    calls = [(f"nccl{function}", size) for function in REDUCTIONS + MOVES for size in sizes]
    return {capi().pyncclCpuGetAlgorithm(comm, *call)[0] for call in calls}
