"""mpi4py's buffer arguments for device arrays: `[data, count, displacement, datatype]` in every form.

The rules are those of mpi4py's own parser: counts are per rank, `(counts, displacements)` may be a pair, and
omitted values follow from the memory's length. In addition, all regions must lie within the array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pynccl._arrays import dtypes
from pynccl._arrays.buffers import Part, spans
from pynccl._base.values import shown
from pynccl._errors import NotSupportedError

# Offset and length, in bytes.
Block = tuple[int, int]


class Layout(NamedTuple):
    """An MPI datatype: the bytes from one element to the next, the blocks of data in them, their dtype."""

    extent: int
    # In MPI's order.
    blocks: tuple[Block, ...]
    # pynccl's name of the dtype; None for bytes.
    dtype: str | None
    # The bytes of data in one element.
    size: int
    # True if elements follow each other in order without gaps.
    dense: bool
    # True if it is derived from other datatypes.
    derived: bool


def _layout_of(extent: int, blocks: tuple[Block, ...], dtype: str | None, *, derived: bool = False) -> Layout:
    size = sum(length for _, length in blocks)
    return Layout(extent, blocks, dtype, size, blocks == ((0, extent),), derived)


class Region(NamedTuple):
    """Consecutive elements of a datatype, from an offset in bytes."""

    offset: int
    entries: int
    layout: Layout

    @property
    def nbytes(self) -> int:
        """The bytes of data."""
        return self.entries * self.layout.size

    def blocks(self) -> Iterator[Block]:
        """Return the pieces of memory in order; adjacent pieces are merged."""
        extent = self.layout.extent
        if self.layout.dense:
            yield self.offset, self.entries * extent
            return
        yield from _joined(
            (self.offset + i * extent + offset, length)
            for i in range(self.entries)
            for offset, length in self.layout.blocks
        )

    def ends(self) -> tuple[int, int]:
        """Return the first byte of its memory, and the byte after the last."""
        if self.layout.dense or not self.nbytes:
            return self.offset, self.offset + self.nbytes
        steps = sorted((0, (self.entries - 1) * self.layout.extent))
        least = min(offset for offset, _ in self.layout.blocks)
        most = max(offset + length for offset, length in self.layout.blocks)
        return self.offset + steps[0] + least, self.offset + steps[1] + most


class _Memory(NamedTuple):
    """The memory of an array."""

    array: Any
    pointer: int
    nbytes: int
    dtype: str | None
    # Bytes of one element by mpi4py's rules.
    itemsize: int
    readonly: bool
    # True if in C order, writable, and with a dtype of NCCL's own.
    simple: bool


class Message(NamedTuple):
    """The device memory of an argument: one region, or one for every rank."""

    name: str
    memory: _Memory
    regions: list[Region]
    # Elements for each rank, for an argument with one region.
    entries: int = 0

    @property
    def dtype(self) -> str | None:
        """pynccl's name of the dtype; None for bytes."""
        return self.regions[0].layout.dtype

    def share(self, rank: int) -> Message:
        """Return one rank's part of an argument with one region."""
        (whole,) = self.regions
        start = whole.offset + rank * self.entries * whole.layout.extent
        return self._replace(regions=[Region(start, self.entries, whole.layout)])

    def of(self, *ranks: int) -> Message:
        """Return the regions of some ranks."""
        return self._replace(regions=[self.regions[rank] for rank in ranks])

    def buffer(self, region: Region) -> Any:
        """Return the memory of a region without gaps; the array itself if the region covers it."""
        memory, dtype = self.memory, region.layout.dtype
        if not region.nbytes:
            # Datatypes of empty regions may differ.
            return part_of(memory.array, memory.pointer, 0, None)
        if memory.simple and dtype == memory.dtype and region.nbytes == memory.nbytes:
            return memory.array
        return part_of(memory.array, memory.pointer + region.offset, region.nbytes, dtype, memory.readonly)

    def blocks(self, region: Region) -> Iterator[Part]:
        """Return the pieces of memory of a region, as bytes."""
        for offset, length in region.blocks():
            yield part_of(self.memory.array, self.memory.pointer + offset, length, None, self.memory.readonly)


def part_of(array: Any, pointer: int, nbytes: int, dtype: str | None, readonly: bool = False) -> Part:
    """Return a part of an array's memory as numbers of a dtype, or as bytes."""
    name = dtype or "uint8"
    return Part(pointer, nbytes // _itemsize(name), name, owner=array, readonly=readonly)


def _itemsize(dtype: str) -> int:
    code = dtypes.CODES[dtype]
    travel = dtypes.traveller(code)
    return dtypes.itemsize(code) * (travel.factor if travel else 1)


# --- NCCL's call or MPI's -----------------------------------------------------------------------------------


# Whether arrays of a type are in device memory; None if each array decides.
_devices: dict[type, bool | None] = {np.ndarray: False}


def is_device(array: Any) -> bool:
    """Tell whether an array is in device memory, or with the CPU library stands for device memory."""
    kind = type(array)
    if kind not in _devices:
        # Without a driver, reading the interface of a CuPy array raises.
        cupy = kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "__cuda_array_interface__")
        _devices[kind] = True if cupy else None
    known = _devices[kind]
    if known is not None:
        return known
    device = getattr(getattr(array, "device", None), "type", None)
    if isinstance(device, str):
        # A torch tensor: its interface raises if the tensor requires a gradient.
        return device == "cuda"
    return hasattr(array, "__cuda_array_interface__")


def place_of(spec: Any) -> bool | None:
    """Tell whether an argument names device memory; None if it names no memory."""
    data = spec[0] if isinstance(spec, list | tuple) and spec else spec
    if data is None or isinstance(data, type(MPI.IN_PLACE) | type(MPI.BOTTOM)):
        return None
    return is_device(data)


def on_device(**specs: Any) -> bool:
    """Tell whether a call's arguments name device memory; raise if only some do."""
    places = {name: place_of(spec) for name, spec in specs.items()}
    if True not in places.values():
        return False
    for name, place in places.items():
        if place is False:
            raise TypeError(
                f"{name} is host memory, but the other buffer is device memory; expected the same kind"
            )
    return True


def in_place(spec: Any) -> bool:
    """Tell whether an argument is MPI.IN_PLACE or None, which mean the same."""
    return spec is None or spec is MPI.IN_PLACE


# --- the forms of an argument -------------------------------------------------------------------------------


def one(spec: Any, name: str, blocks: int = 1, *, writes: bool = False) -> Message:
    """Read an argument with one count, which is the count of each of its blocks."""
    data, count, displacement, datatype = _items(spec, name, (tuple, list))
    memory = _memory(data, name, writes)
    layout = _layout(datatype, memory, name)
    start = 0 if displacement is None else whole(displacement, f"the displacement of {name}")
    offset = start * layout.extent
    if offset > memory.nbytes:
        raise ValueError(f"{name} has displacement {start}, beyond the {memory.nbytes} bytes of its array")
    if count is None:
        entries = _entries(memory.nbytes - offset, layout, name)
        if entries % blocks:
            raise ValueError(f"{name} has {entries} elements; expected a multiple of the {blocks} ranks")
        each = entries // blocks
    else:
        each = whole(count, f"the count of {name}")
    return _within(Message(name, memory, [Region(offset, each * blocks, layout)], each))


def target_of(spec: Any, origin: Message, nbytes: int, unit: int, rank: int) -> Region:
    """Read the target of a put or get: where the origin's data are in a rank's memory."""
    items = [spec] if _is_int(spec) else [] if spec is None else spec
    if not isinstance(items, list | tuple) or len(items) > 3:
        raise TypeError(
            f"target is {shown(spec)}; expected a displacement, or displacement, count and datatype"
        )
    displacement, count, datatype = [*items, None, None, None][:3]
    (region,) = origin.regions
    start = 0 if displacement is None else whole(displacement, "the displacement of target")
    entries = origin.entries if count is None else whole(count, "the count of target")
    layout = region.layout
    if datatype is not None:
        layout = _layout(datatype, origin.memory._replace(dtype=None), "target")
    target = Region(start * unit, entries, layout)
    if target.nbytes != region.nbytes:
        raise ValueError(f"target has {target.nbytes} bytes; expected {region.nbytes}, the bytes of origin")
    if region.nbytes and layout.dtype != region.layout.dtype:
        raise ValueError(
            f"target has {layout.dtype or 'bytes'}; expected the datatype of origin, "
            f"{region.layout.dtype or 'bytes'}"
        )
    first, last = target.ends()
    if target.nbytes and (first < 0 or last > nbytes):
        raise ValueError(
            f"target has bytes {first} to {last}; expected them within the {nbytes} bytes of rank {rank}"
        )
    return target


def several(spec: Any, name: str, blocks: int, *, writes: bool = False) -> Message:
    """Read an argument with a count and a displacement for every rank."""
    data, counts, displacements, datatype = _items(spec, name, tuple)
    memory = _memory(data, name, writes)
    layout = _layout(datatype, memory, name)
    if counts is None:
        share, rest = divmod(_entries(memory.nbytes, layout, name), blocks)
        each = [share + (rest > i) for i in range(blocks)]
    elif _is_int(counts):
        each = [whole(counts, f"the count of {name}")] * blocks
    else:
        each = wholes(counts, f"the counts of {name}", blocks)
    if displacements is None:
        starts = [0, *itertools.accumulate(each[:-1])]
    elif _is_int(displacements):
        stride = whole(displacements, f"the stride of {name}")
        starts = [stride * i for i in range(blocks)]
    else:
        starts = wholes(displacements, f"the displacements of {name}", blocks)
    regions = [Region(start * layout.extent, n, layout) for start, n in zip(starts, each, strict=True)]
    return _separate(_within(Message(name, memory, regions)), writes)


def each_its_own(spec: Any, name: str, blocks: int, *, writes: bool = False) -> Message:
    """Read an argument of Alltoallw: displacements are in bytes, and each rank has its own datatype."""
    items = list(spec) if isinstance(spec, list | tuple) else []
    if len(items) == 3:
        items[1:2] = items[1]
    elif len(items) == 2:
        items[1:1] = [1] * blocks, [0] * blocks
    if len(items) != 4:
        raise ValueError(f"{name} has {len(items)} items; expected data, counts, displacements, datatypes")
    data, counts, displacements, datatypes = items
    memory = _memory(data, name, writes)
    if len(datatypes) != blocks:
        raise ValueError(f"{name} has {len(datatypes)} datatypes; expected {blocks}, one for each rank")
    regions = [
        Region(start, count, _layout(datatype, memory, name))
        for count, start, datatype in zip(
            wholes(counts, f"the counts of {name}", blocks),
            wholes(displacements, f"the displacements of {name}", blocks),
            datatypes,
            strict=True,
        )
    ]
    return _separate(_within(Message(name, memory, regions)), writes)


def _items(spec: Any, name: str, pair: Any) -> tuple[Any, Any, Any, Any]:
    """Return data, count, displacement and datatype; None for omitted items."""
    if spec is None or isinstance(spec, type(MPI.IN_PLACE) | type(MPI.BOTTOM)):
        raise TypeError(
            f"{name} is {shown(spec)}; expected a device array, or a list whose first item is one"
        )
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    if not 2 <= len(spec) <= 4:
        raise ValueError(f"{name} has {len(spec)} items; expected data, count, displacement, datatype")
    data, count, *more = spec
    if not more and isinstance(count, MPI.Datatype | str):
        return data, None, None, count
    if len(more) == 2:
        return data, count, more[0], more[1]
    datatype = more[0] if more else None
    if not isinstance(count, pair):
        return data, count, None, datatype
    if len(count) != 2:
        raise ValueError(f"{name} has {count!r} for its count; expected a number, or count and displacement")
    return data, count[0], count[1], datatype


def _is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def whole(value: Any, what: str) -> int:
    """Return a number of 0 or more as an int; raise for anything else."""
    if not _is_int(value):
        raise TypeError(f"{what} is {shown(value)}; expected an int")
    if index(value) < 0:
        raise ValueError(f"{what} is {shown(value)}; expected 0 or more")
    return index(value)


def wholes(values: Any, what: str, size: int) -> list[int]:
    """Return a sequence of non-negative ints, one for every rank."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{what} is {shown(values)}; expected a sequence of {size} ints")
    numbers = [whole(value, what) for value in values]
    if len(numbers) != size:
        raise ValueError(f"{what} has {len(numbers)} entries; expected {size}, one for each rank")
    return numbers


def _entries(nbytes: int, layout: Layout, name: str) -> int:
    """Return the number of elements in `nbytes` bytes."""
    if not nbytes:
        return 0
    if layout.extent <= 0 or nbytes % layout.extent:
        raise ValueError(
            f"{name} has {nbytes} bytes and no count; expected a multiple of its datatype's {layout.extent}"
        )
    return nbytes // layout.extent


def _within(message: Message) -> Message:
    for region in message.regions:
        first, last = region.ends()
        if first < 0 or last > message.memory.nbytes:
            raise ValueError(
                f"{message.name} has bytes {first} to {last}; expected them within the array's "
                f"{message.memory.nbytes}"
            )
    return message


# --- memory -------------------------------------------------------------------------------------------------


class _AsBytes:
    """An array whose dtype NCCL lacks, as bytes."""

    def __init__(self, array: Any, interface: dict[str, Any], itemsize: int) -> None:
        self.array = array
        self.__cuda_array_interface__ = interface | {"shape": (*interface["shape"], itemsize)}
        self.__cuda_array_interface__ |= {"typestr": "|u1", "descr": [("", "|u1")]}
        if interface.get("strides") is not None:
            self.__cuda_array_interface__["strides"] = (*interface["strides"], 1)


def _memory(array: Any, name: str, writes: bool) -> _Memory:
    if array is None or isinstance(array, type(MPI.BOTTOM)):
        # An empty argument; an address is not a device array.
        return _Memory(None, 0, 0, None, 1, False, False)
    try:
        pointer, elements, code, _, flags = spans[type(array)](array, name)
        dtype = dtypes.name_of(code)
        nbytes, itemsize = elements * dtypes.itemsize(code), _itemsize(dtype)
    except TypeError:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise
        has = np.dtype(interface["typestr"])
        # MPI has datatypes for numbers only; mpi4py also sends other dtypes as bytes.
        dtype, itemsize = None, has.itemsize if has.kind in "biufc" else 1
        pointer, nbytes, _, _, flags = spans[_AsBytes](_AsBytes(array, interface, has.itemsize), name)
    if writes and flags & 1 and nbytes:
        raise ValueError(f"{name} is read-only; expected a writable array for the result")
    return _Memory(array, pointer, nbytes, dtype, itemsize, bool(flags & 1), not flags and dtype is not None)


# --- datatypes ----------------------------------------------------------------------------------------------


def _layout(datatype: Any, memory: _Memory, name: str) -> Layout:
    """Return an argument's datatype, or the datatype of its array."""
    if datatype is None:
        return _plain(memory.itemsize, memory.dtype)
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    if not isinstance(datatype, MPI.Datatype):
        raise TypeError(f"{name} has {datatype!r} for its datatype; expected an MPI datatype")
    if datatype == MPI.DATATYPE_NULL:
        raise ValueError(f"{name} has MPI.DATATYPE_NULL; expected a datatype")
    known = _known.get(id(datatype))
    if known is None:
        blocks, numbers = _contents(datatype, name)
        dtype = numbers.pop() if len(numbers) == 1 else None
        derived = not datatype.is_predefined
        known = datatype, _layout_of(datatype.extent, tuple(_joined(blocks)), dtype, derived=derived)
        if not derived and len(_known) < _MANY:
            _known[id(datatype)] = known
    _, layout = known
    # An array of bytes may hold any numbers; for other arrays a different datatype is a mistake.
    if not layout.derived and layout.dtype and memory.dtype not in (layout.dtype, "uint8", None):
        raise TypeError(
            f"{name} has MPI datatype {datatype.Get_name()}, which is {layout.dtype}; expected the "
            f"datatype of its array, {memory.dtype}, or MPI.BYTE"
        )
    return layout


# Layouts of predefined datatypes, by id(), since they have no hash; the object is kept so that its id stays
# valid.
_known: dict[int, tuple[Any, Layout]] = {}
_MANY = 100


@lru_cache(_MANY)
def _plain(itemsize: int, dtype: str | None) -> Layout:
    """Return the layout of an array's own elements."""
    return _layout_of(itemsize, ((0, itemsize),), dtype)


def _joined(blocks: Iterable[Block]) -> Iterator[Block]:
    """Return the blocks, without empty ones and with adjacent ones merged."""
    start = end = None
    for offset, length in blocks:
        if not length:
            continue
        if offset != end:
            if start is not None and end is not None:
                yield start, end - start
            start = offset
        end = offset + length
    if start is not None and end is not None:
        yield start, end - start


def _contents(datatype: Any, name: str) -> tuple[list[Block], set[str | None]]:
    """Return the layout of a datatype, with blocks in MPI's order."""
    if datatype.is_predefined:
        if datatype.size != datatype.extent:
            raise NotSupportedError(
                f"{name} has {datatype.Get_name()}, which has gaps; expected a datatype without gaps"
            )
        return [(0, datatype.size)], {_number(datatype)}
    base, combiner, how = datatype.decode()
    # A struct has several datatypes and no single base.
    parts = how.get("datatypes", [base])
    try:
        placed = _placed(combiner, how, 1 if combiner == "STRUCT" else base.extent, name)
        bases = itertools.cycle([(*_contents(part, name), part.extent) for part in parts])
        blocks: list[Block] = []
        numbers: set[str | None] = set()
        for (start, count), (inner, kinds, extent) in zip(placed, bases, strict=False):
            numbers |= kinds if count else set()
            if inner == [(0, extent)]:
                blocks.append((start, count * extent))
            else:
                blocks += [(start + i * extent + at, length) for i in range(count) for at, length in inner]
        return blocks, numbers
    finally:
        for part in parts:
            if not part.is_predefined:
                part.Free()


def _placed(combiner: str, how: dict[str, Any], extent: int, name: str) -> Sequence[tuple[int, int]]:
    """Return the offsets in bytes and the counts of base elements in a derived datatype."""
    match combiner:
        case "DUP" | "RESIZED":
            return [(0, 1)]
        case "CONTIGUOUS":
            return [(0, how["count"])]
        case "VECTOR" | "HVECTOR":
            step = how["stride"] * (extent if combiner == "VECTOR" else 1)
            return [(i * step, how["blocklength"]) for i in range(how["count"])]
        case "INDEXED" | "HINDEXED" | "INDEXED_BLOCK" | "HINDEXED_BLOCK" | "STRUCT":
            step = extent if combiner.startswith("INDEXED") else 1
            starts = how["displacements"]
            lengths = how.get("blocklengths") or [how["blocklength"]] * len(starts)
            return [(start * step, length) for start, length in zip(starts, lengths, strict=True)]
        case "SUBARRAY":
            return list(_rows(how, extent))
    raise NotSupportedError(f"{name} has a datatype made as {combiner}; pynccl.mpi cannot decode this kind")


def _rows(how: dict[str, Any], extent: int) -> Iterator[tuple[int, int]]:
    """Return the rows of a subarray."""
    axes = list(zip(how["sizes"], how["subsizes"], how["starts"], strict=True))
    if how["order"] == MPI.ORDER_F:
        axes.reverse()
    steps = [math.prod(size for size, _, _ in axes[i + 1 :]) for i in range(len(axes))]
    *outer, (_, length, first) = axes
    for place in itertools.product(*(range(start, start + n) for _, n, start in outer)):
        yield (sum(map(int.__mul__, place, steps)) + first) * extent, length


def _number(datatype: Any) -> str | None:
    """Return pynccl's name of a predefined datatype; None for bytes and datatypes that NCCL lacks."""
    if datatype in (MPI.BYTE, MPI.PACKED):
        return None
    try:
        dtype = np.dtype(datatype.tocode())
    except (TypeError, ValueError):
        return None
    return dtype.name if dtype.kind in "biufc" and dtype.name in dtypes.CODES else None


# --- arguments that belong together -------------------------------------------------------------------------


def require_alike(send: Message, recv: Message) -> None:
    """Require equal length and datatype of the data that a rank sends to itself."""
    given, taken = send.regions[0].nbytes, recv.regions[0].nbytes
    same_dtype = send.dtype == recv.dtype or not (given or taken)
    # As many elements of another datatype: the datatype is what is wrong.
    if given != taken and (same_dtype or send.regions[0].entries != recv.regions[0].entries):
        raise ValueError(f"{send.name} has {given} bytes; expected {taken}, the bytes of {recv.name}")
    if not same_dtype:
        raise ValueError(
            f"{send.name} has {send.dtype or 'bytes'}; expected the datatype of {recv.name}, "
            f"{recv.dtype or 'bytes'}"
        )


def same(send: Message, recv: Message) -> bool:
    """Tell whether two arguments name the same memory in the same order."""
    return _pieces(send) == _pieces(recv)


def _separate(message: Message, writes: bool) -> Message:
    """Require that the parts to write to do not overlap: the result would depend on timing."""
    pieces = sorted(_pieces(message)) if writes else []
    if any(start < end for (_, end), (start, _) in itertools.pairwise(pieces)):
        raise ValueError(f"the parts of {message.name} overlap; expected separate memory for each rank")
    return message


def require_apart(send: Message, recv: Message) -> None:
    """Require that arguments do not share memory."""
    sends, recvs = sorted(_pieces(send)), sorted(_pieces(recv))
    if not sends or not recvs or sends[-1][1] <= recvs[0][0] or recvs[-1][1] <= sends[0][0]:
        return
    last = {0: 0, 1: 0}
    for start, end, which in sorted([(*s, 0) for s in sends] + [(*r, 1) for r in recvs]):
        if start < last[1 - which]:
            raise ValueError(
                f"{send.name} and {recv.name} share memory; expected MPI.IN_PLACE, or two arrays"
            )
        last[which] = max(last[which], end)


def _pieces(message: Message) -> list[tuple[int, int]]:
    """Return the beginnings and ends of an argument's pieces of memory."""
    base = message.memory.pointer
    pieces = [block for region in message.regions for block in region.blocks()]
    return [(base + start, base + start + length) for start, length in pieces if length]
