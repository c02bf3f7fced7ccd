"""Allocators over ncclMemAlloc: CuPy's by a stand-in for its pool, torch's by the functions it calls."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pynccl
from allocations import is_freed
from pynccl import NotSupportedError
from pynccl._library.binding import fastcall, lib
from pynccl._memory.allocators import known_segments
from pynccl._memory.segments import Registered
from pynccl.allocators import AllocatorCounts, CupyAllocator
from ranks import on_ranks

pytestmark = pytest.mark.usefixtures("cpu")

MIB = 1 << 20


class Block:
    """Memory of the pool, with a name as long as it is used."""

    def __init__(self, pool: Pool, ptr: int, size: int) -> None:
        self.ptr, self.size, self._pool = ptr, size, pool

    def array(self) -> Any:
        """Return the memory as floats; the array holds the block."""
        data = np.frombuffer((ctypes.c_char * self.size).from_address(self.ptr), np.float32)
        interface = dict(data.__array_interface__)
        return np.asarray(SimpleNamespace(__array_interface__=interface, block=self))

    def __del__(self) -> None:
        self._pool.free.append((self.ptr, self.size))


class Pool:
    """As cupy.cuda.MemoryPool: segments of whole MiB, which are reused until they are freed all at once."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate, self._segments = allocate, dict[int, Any]()
        self.free: list[tuple[int, int]] = []

    def malloc(self, nbytes: int) -> Block:
        size = -(-nbytes // MIB) * MIB
        for ptr, bytes_of in self.free:
            if bytes_of == size:
                self.free.remove((ptr, size))
                return Block(self, ptr, size)
        try:
            segment = self._allocate(size)
        except OutOfMemoryError:
            self.free_all_blocks()
            segment = self._allocate(size)
        self._segments[segment.ptr] = segment
        return Block(self, segment.ptr, size)

    def used_bytes(self) -> int:
        return sum(each.size for each in self._segments.values()) - sum(size for _, size in self.free)

    def free_all_blocks(self) -> None:
        for ptr, _ in self.free:
            self._segments.pop(ptr).end()
        self.free.clear()


class PythonFunctionAllocator:
    """As CuPy's: calls one function with the size and the device, and one with the address and the device."""

    def __init__(self, allocate: Callable[[int, int], int], free: Callable[[int, int], None]) -> None:
        self._allocate, self._free = allocate, free

    def malloc(self, size: int) -> Any:
        ptr = self._allocate(size, 0)
        return SimpleNamespace(ptr=ptr, size=size, end=lambda: self._free(ptr, 0))


class OutOfMemoryError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError with errorMemoryAllocation."""


class FakeCupy:
    """The part of CuPy that an allocator uses."""

    def __init__(self) -> None:
        self.current: list[Callable[[int], Block]] = []
        self.cuda = SimpleNamespace(
            MemoryPool=Pool,
            is_available=lambda: True,
            PythonFunctionAllocator=PythonFunctionAllocator,
            using_allocator=self.using,
            runtime=SimpleNamespace(
                CUDARuntimeError=lambda code: OutOfMemoryError(str(code)), errorMemoryAllocation=2
            ),
        )

    @contextmanager
    def using(self, allocator: Callable[[int], Block]) -> Iterator[None]:
        self.current.append(allocator)
        yield
        self.current.pop()


@contextmanager
def fake_cupy() -> Iterator[FakeCupy]:
    fake: Any = FakeCupy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake)
        yield fake


def test_cupy_without_a_device() -> None:
    with fake_cupy() as cupy:
        cupy.cuda.is_available = lambda: False
        with pytest.raises(NotSupportedError, match=r"cupy needs a CUDA device.*; for host memory use pyn"):
            pynccl.allocators.cupy()


def test_cupy_without_a_communicator() -> None:
    with fake_cupy() as cupy:
        allocator = pynccl.allocators.cupy()
        assert isinstance(allocator, CupyAllocator)
        assert allocator.counts() == AllocatorCounts(0, 0, 0)
        with allocator as entered, allocator:
            assert entered is allocator
            assert cupy.current == [allocator.malloc] * 2
            block = cupy.current[-1](100)
        assert cupy.current == []
        assert allocator.counts() == AllocatorCounts(MIB, MIB, 0)
        ptr = block.ptr
        array = block.array()
        array[:] = 3
        del block
        gc.collect()
        assert (array == 3).all()
        del array
        gc.collect()
        assert allocator.counts() == AllocatorCounts(MIB, 0, 0)
        assert allocator.malloc(MIB).ptr == ptr
        allocator.pool.free_all_blocks()
        assert allocator.counts() == AllocatorCounts(0, 0, 0)
        assert is_freed(ptr)


@pytest.mark.parametrize("size", [1 << 61])
def test_out_of_memory(size: int) -> None:
    """The pool frees what it has cached, tries again, and then raises its own error."""
    with fake_cupy():
        allocator = pynccl.allocators.cupy()
        ptr = allocator.malloc(MIB).ptr
        gc.collect()
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(size)
        assert allocator.counts() == AllocatorCounts(0, 0, 0)
        assert is_freed(ptr)


@on_ranks(2)
def test_cupy_registers_its_segments(rank: int, nranks: int) -> None:
    with fake_cupy() as cupy, pynccl.init(timeout=30) as comm:
        allocator = pynccl.allocators.cupy(comm)
        with allocator:
            first = cupy.current[-1](MIB).array()
            assert comm.registered(first)
            assert comm.registered(first[100:200])
            assert allocator.counts() == AllocatorCounts(MIB, MIB, MIB)
            with pynccl.group():
                # A group cannot record a registration, but needs memory.
                second = cupy.current[-1](2 * MIB).array()
                assert allocator.counts() == AllocatorCounts(3 * MIB, 3 * MIB, MIB)
        assert comm.registered(second)
        first[:] = second[: MIB // 4] = rank + 1
        assert (comm.all_reduce(first) == 3).all()
        ptr = int(first.ctypes.data)
        del first
        gc.collect()
        with pynccl.group():
            allocator.pool.free_all_blocks()
        # Not deregistered, so not freed.
        assert allocator.counts() == AllocatorCounts(2 * MIB, 2 * MIB, 3 * MIB)
        allocator.update()
        assert allocator.counts() == AllocatorCounts(2 * MIB, 2 * MIB, 2 * MIB)
        assert is_freed(ptr)
        comm.barrier()
    # No warning of an open registration: the program has none.
    assert allocator.counts() == AllocatorCounts(2 * MIB, 2 * MIB, 0)
    third = allocator.malloc(4 * MIB)
    assert allocator.counts() == AllocatorCounts(6 * MIB, 6 * MIB, 0)
    assert third.size == 4 * MIB
    assert (second[: MIB // 4] == rank + 1).all()


def torch_functions() -> Any:
    """Return the functions as torch finds and calls them: by file and name, without Python's lock."""
    library = ctypes.CDLL(fastcall.__file__)
    library.pynccl_segment_allocate.restype = ctypes.c_void_p
    library.pynccl_segment_allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.pynccl_segment_free.restype = None
    library.pynccl_segment_free.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    ]
    return library


def test_the_functions_for_torch() -> None:
    torch = torch_functions()
    before = lib.pynccl_segment_bytes()
    pointers = [torch.pynccl_segment_allocate(size, 0, None) for size in (1, 4096, MIB)]
    assert all(ptr % 4096 == 0 for ptr in pointers)
    assert lib.pynccl_segment_bytes() - before == 1 + 4096 + MIB
    for size in (0, -5, 1 << 61):
        assert torch.pynccl_segment_allocate(size, 0, None) is None
    for ptr, size in zip(pointers, (1, 4096, MIB), strict=True):
        ctypes.memset(ptr, 7, size)
        torch.pynccl_segment_free(ptr, size, 0, None)
        assert is_freed(ptr)
        torch.pynccl_segment_free(ptr, size, 0, None)
    torch.pynccl_segment_free(0, 0, 0, None)
    assert lib.pynccl_segment_bytes() == before
    assert lib.pynccl_segment_pin(pointers[0]) == 0


@on_ranks(2)
def test_torch_segments_are_registered(rank: int, nranks: int) -> None:
    torch = torch_functions()
    with pynccl.init(timeout=30) as comm:
        registered = Registered(comm)
        ptr, other = (torch.pynccl_segment_allocate(MIB, 0, None) for _ in range(2))
        # An address that is not ours, as of a segment that torch had before.
        known = known_segments({}, [ptr, other, 4096])
        registered.update(known)
        assert registered.nbytes == 2 * MIB
        memory = pynccl.Buffer(ptr, MIB // 4, "float32")
        data = np.frombuffer((ctypes.c_char * MIB).from_address(ptr), np.float32)
        data[:] = rank + 1
        assert comm.registered(memory)
        comm.all_reduce(memory)
        assert (data == 3).all()
        # torch frees a segment when it wants; its memory stays while it is registered.
        torch.pynccl_segment_free(ptr, MIB, 0, None)
        assert (data == 3).all()
        assert comm.registered(memory)
        assert known_segments({}, [ptr]) == {}
        del data
        known = known_segments(known, [other])
        registered.update(known)
        assert registered.nbytes == MIB
        assert not comm.registered(memory)
        assert is_freed(ptr)
        comm.barrier()
    assert registered.nbytes == 0
    registered.update(known)
    torch.pynccl_segment_free(other, MIB, 0, None)
    del known
    registered.update({})
    gc.collect()
    assert is_freed(other)


def test_torch_needs_a_device() -> None:
    with pytest.raises(
        pynccl.NotSupportedError, match=r"pynccl.allocators.torch needs NVIDIA's NCCL and a torch"
    ):
        pynccl.allocators.torch()
