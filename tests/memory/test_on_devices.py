"""Memory and registrations on devices, without any: over a recording libnccl and the fake CUDA driver."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import pynccl
from device_arrays import Device
from fake_cuda import compiled, compiled_nccl, create, driver, on_device
from fake_nccl import Fake
from pynccl import NcclInvalidUsage, NotSupportedError, testing
from pynccl._library import cuda
from pynccl._library.binding import fastcall, lib

Case = Callable[[int, int], None]
# What matters of the driver's log: where memory is made and freed, and what comes before.
STEPS = ("cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuCtxSynchronize")


def steps(library: Any) -> list[str]:
    """Return the newest calls of the driver by which memory is freed."""
    lines = library.fake_cuda_log().decode().splitlines()
    return [line for line in lines if line.startswith(STEPS)]


def fail(library: Any, name: str, code: int) -> None:
    """Make a function of the driver fail."""
    library.fake_cuda_fail(name.encode(), code)


def allocates_on_the_current_device(rank: int, nranks: int) -> None:
    library, nccl = driver(), Fake()
    for device in (0, 1):
        cuda.set_device(device)
        array = pynccl.empty((2, 3), np.float32)
        assert type(array).__module__.partition(".")[0] == "cupy"
        assert (array.shape, array.dtype, array.data.device_id) == ((2, 3), np.float32, device)
        assert nccl.log() == [f"MemAlloc 24 on device {device}"]
        view = array[1]
        del array
        gc.collect()
        assert nccl.log() == []
        before = len(steps(library))
        # Kernels may use it, and another thread may capture a graph.
        del view
        assert nccl.log() == ["MemFree"]
        assert [line.split()[0] for line in steps(library)[before:]] == [
            "cuThreadExchangeStreamCaptureMode",
            "cuCtxPushCurrent_v2",
            "cuCtxSynchronize",
            "cuThreadExchangeStreamCaptureMode",
        ]
        assert f"cuCtxPushCurrent_v2 {device}" in steps(library)[before:]
        assert cuda.current_device() == device
    cuda.set_device(0)
    there = pynccl.empty(4, like=None, dtype="f")
    cuda.set_device(1)
    nccl.log()
    assert pynccl.empty(4, like=there).data.device_id == 0
    assert nccl.log()[0] == "MemAlloc 16 on device 0"
    assert cuda.current_device() == 1


def frees_later_what_cannot_be_freed_now(rank: int, nranks: int) -> None:
    library, nccl = driver(), Fake()
    array = pynccl.empty(4, "f")
    nccl.log()
    fail(library, "cuCtxSynchronize", 900)
    del array
    assert nccl.log() == []
    fail(library, "", 0)
    again = pynccl.empty(8, "f")
    assert nccl.log() == ["MemFree", "MemAlloc 32 on device 0"]
    del again
    assert nccl.log() == ["MemFree"]


def frees_segments_of_torch(rank: int, nranks: int) -> None:
    """By the C functions that torch calls, with the device current that torch has set."""
    library, nccl = driver(), Fake()
    cuda.set_device(1)
    torch: Any = ctypes.CDLL(fastcall.__file__)
    torch.pynccl_segment_allocate.restype = ctypes.c_void_p
    ptr = torch.pynccl_segment_allocate(ctypes.c_ssize_t(4096), 1, None)
    assert nccl.log() == ["MemAlloc 4096 on device 1"]
    cuda.set_device(0)
    before = len(steps(library))
    fail(library, "cuCtxSynchronize", 900)
    torch.pynccl_segment_free(ctypes.c_void_p(ptr), ctypes.c_size_t(4096), 1, None)
    assert nccl.log() == []
    assert "cuCtxPushCurrent_v2 1" in steps(library)[before:]
    assert cuda.current_device() == 0
    fail(library, "", 0)
    assert lib.pynccl_segment_pin(ptr) == 0
    torch.pynccl_segment_free(None, ctypes.c_size_t(0), 1, None)
    assert nccl.log() == ["MemFree"]
    assert lib.pynccl_segment_bytes() == 0


class FakeTorch:
    """The part of torch that an allocator uses; its pool calls the functions of the file that it is given."""

    def __init__(self) -> None:
        self.active: list[FakeTorch.MemPool] = []
        memory = SimpleNamespace(CUDAPluggableAllocator=self.Functions)
        self.cuda = SimpleNamespace(
            is_available=lambda: True, memory=memory, MemPool=self.MemPool, use_mem_pool=self.use
        )

    @contextmanager
    def use(self, pool: FakeTorch.MemPool) -> Iterator[None]:
        self.active.append(pool)
        yield
        self.active.pop()

    class Functions:
        def __init__(self, path: str, allocate: str, free: str) -> None:
            library = ctypes.CDLL(path)
            kinds = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self.allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, *kinds[2:])(
                (allocate, library)
            )
            self.free = ctypes.CFUNCTYPE(None, *kinds)((free, library))

        def allocator(self) -> FakeTorch.Functions:
            return self

    class MemPool:
        def __init__(self, functions: FakeTorch.Functions) -> None:
            self._functions, self._segments = functions, dict[int, int]()

        def malloc(self, nbytes: int) -> int:
            ptr = int(self._functions.allocate(nbytes, 0, None))
            self._segments[ptr] = nbytes
            return ptr

        def free(self, ptr: int) -> None:
            self._functions.free(ptr, self._segments.pop(ptr), 0, None)

        def snapshot(self) -> list[dict[str, int]]:
            return [
                {"address": ptr, "total_size": size, "allocated_size": size // 2}
                for ptr, size in self._segments.items()
            ]


def registers_segments_of_torch(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    nccl, torch = Fake(), FakeTorch()
    with pytest.MonkeyPatch.context() as patch, create() as comm:
        patch.setitem(sys.modules, "torch", cast("ModuleType", torch))
        alone, allocator = pynccl.allocators.torch(), pynccl.allocators.torch(comm)
        for each in (alone, allocator):
            with each:
                ptr = torch.active[-1].malloc(4096)
                assert nccl.log() == ["MemAlloc 4096 on device 0"]
            assert torch.active == []
        assert nccl.log() == ["Register 4096"]
        assert alone.counts() == (4096, 2048, 0)
        assert allocator.counts() == (4096, 2048, 4096)
        assert comm.registered(pynccl.Buffer(ptr, 10, "float32"))
        # torch frees it, and the registration keeps it until the next update.
        allocator.pool.free(ptr)
        assert nccl.log() == []
        assert allocator.counts() == (0, 0, 4096)
        allocator.update()
        assert nccl.log() == ["Deregister", "MemFree"]
        assert allocator.counts() == (0, 0, 0)
        alone.update()
        alone.pool.free(alone.pool.snapshot()[0]["address"])
        assert nccl.log() == ["MemFree"]


def refuses_host_memory(rank: int, nranks: int) -> None:
    with pytest.raises(ValueError, match=r"like is a NumPy array, host memory; expected a CuPy array"):
        pynccl.empty(3, like=np.zeros(3))
    torch: Any = ModuleType("torch")
    torch.Tensor = type("Tensor", (), {"device": type("device", (), {"type": "cpu"})(), "dtype": None})
    before = sys.modules.get("torch")
    sys.modules["torch"] = torch
    try:
        with pytest.raises(ValueError, match="expected one on a cuda device, since NVIDIA's NCCL is loaded"):
            pynccl.empty(3, "f", like=torch.Tensor())
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
    with create() as comm:
        for array, words in (
            (np.zeros(4, np.float32), "array is host memory; expected device memory"),
            (on_device(1), "array is memory of device 1; expected the communicator's device 0"),
        ):
            with pytest.raises(ValueError, match=words):
                comm.register(array)
    assert not [line for line in Fake().log() if line.startswith(("MemAlloc", "Register"))]


def registers(rank: int, nranks: int) -> None:
    nccl = Fake()
    cuda.set_device(0)
    with create() as comm:
        array = on_device(0, 100)
        with comm.register(array), comm.register(array):
            assert comm.registered(array)
            assert nccl.log() == ["Register 400"]
            stream = cuda.stream_create()
            driver().fake_cuda_hold(stream, 1)
            comm.all_reduce(array, stream=stream)
            driver().fake_cuda_hold(stream, 0)
        assert nccl.log()[1:] == ["Deregister"]
    assert nccl.log() == ["finalize", "destroy"]


def refuses_registration_during_capture(rank: int, nranks: int) -> None:
    nccl = Fake()
    cuda.set_device(0)
    with create() as comm:
        array = on_device(0, 100)
        stream = cuda.stream_create()
        registration = comm.register(array)
        comm.all_reduce(array, stream=stream)
        nccl.log()
        for handle in (stream, 0):
            driver().fake_cuda_capture(handle, 1)
            with pytest.raises(
                NcclInvalidUsage, match=f"ncclCommRegister during the graph capture of stream {handle:#x}"
            ):
                comm.register(on_device(0))
            with pytest.raises(NcclInvalidUsage, match="ncclCommDeregister during the graph capture"):
                registration.close()
            driver().fake_cuda_capture(handle, 0)
        # The default stream's answer while a stream that synchronizes with it is captured.
        fail(driver(), "cuStreamIsCapturing", 906)
        with pytest.raises(NcclInvalidUsage, match="during the graph capture"):
            comm.register(on_device(0))
        fail(driver(), "", 0)
        assert nccl.log() == []
        registration.close()
        assert nccl.log() == ["Deregister"]


def page(count: int) -> Device:
    """Return an array of a device in memory that begins at a page."""
    memory = pynccl.empty(count, np.float32)
    shown = np.ctypeslib.as_array((ctypes.c_float * count).from_address(memory.data.ptr))
    made = Device(shown)
    made.memory = memory
    return made


def part(array: Device, begin: int, end: int) -> Device:
    return Device(array.data[begin:end])


def newest(nccl: Fake) -> list[str]:
    """Return what was called, without streams."""
    return [line.partition(" stream ")[0] for line in nccl.log()]


def makes_windows(rank: int, nranks: int) -> None:
    nccl = Fake()
    cuda.set_device(0)
    with create() as comm:
        mine, source = page(100), page(100)
        nccl.log()
        window, other = comm.window(part(mine, 3, 100), symmetric=True), comm.window(source, symmetric=True)
        assert newest(nccl) == [
            "AllGather 40 5 type 4",
            "WindowRegister 400 at 0 of a page, flags 1",
            "AllGather 40 5 type 4",
            "WindowRegister 400 at 0 of a page, flags 1",
        ]
        comm.put_signal(part(source, 0, 8), 0, window, offset=2, signal=5, context=3)
        comm.signal(0)
        comm.wait_signal(0, 7, 1)
        assert newest(nccl) == [
            "PutSignal 8 type 7 to 0 offset 20 signal 5 context 3 flags 0",
            "Signal to 0 signal 0 context 0 flags 0",
            "WaitSignal 7 of signal 1 context 0 from 0 (1)",
        ]
        with pytest.raises(ValueError, match="array is in no symmetric window of this communicator"):
            comm.put_signal(on_device(0), 0, window)
        plain = comm.window(on_device(0, 10))
        with pytest.raises(ValueError, match=r"expected a symmetric one, since NVIDIA's NCCL puts only into"):
            comm.put_signal(part(source, 0, 2), 0, plain)
        with pytest.raises(ValueError, match="array is host memory; expected device memory"):
            comm.window(np.zeros(4))
        assert type(window.peer(1)).__module__.partition(".")[0] == "cupy"
        assert window.peer(1).data.ptr == mine.data.ctypes.data + 12
        with pytest.raises(ValueError, match="the memory of rank 0 in .* cannot be reached"):
            window.peer(0)
        nccl.log()
        for each in (plain, other, window):
            each.close()
        assert newest(nccl) == ["AllGather 8 1 type 4", "WindowDeregister"] * 3


def looks_at_no_mapped_files(rank: int, nranks: int) -> None:
    """Only what makes a communicator looks for another libnccl in the process."""
    looks: list[str] = []
    sys.addaudithook(lambda event, args: looks.extend(args[:1]) if event == "open" else None)
    cuda.set_device(0)
    with create() as comm:
        assert "/proc/self/maps" in looks
        source = page(100)
        window = comm.window(source, symmetric=True)
        looks.clear()
        for _ in range(3):
            comm.put_signal(part(source, 0, 8), 0, window)
            window.peer(1)
            pynccl.empty(3, np.float32)
            pynccl.current_device()
            pynccl.set_device(0)
            pynccl.array_module()
            pynccl.Stream().destroy()
        assert "/proc/self/maps" not in looks
        pynccl.library_info()
        assert "/proc/self/maps" in looks


def captures_puts_and_waits(rank: int, nranks: int) -> None:
    """A prepared call only launches, so a graph can have it; a window cannot be made in a capture."""
    library, nccl = driver(), Fake()
    cuda.set_device(0)
    with create() as comm:
        mine = page(100)
        stream = cuda.stream_create()
        window = comm.window(mine, symmetric=True)
        plan = pynccl.Plan(
            [
                comm.prepare.put_signal(part(mine, 0, 4), 0, window, stream=stream),
                comm.prepare.signal(0, stream=stream),
                comm.prepare.wait_signal(0, stream=stream),
            ]
        )
        nccl.log()
        library.fake_cuda_capture(stream, 1)
        before = library.fake_cuda_log().decode()
        plan()
        asked = library.fake_cuda_log().decode()[len(before) :].splitlines()
        launch = ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "run", "cuCtxPopCurrent_v2"]
        assert [line.split()[0] for line in asked] == launch * 3
        with pytest.raises(
            NcclInvalidUsage, match="ncclCommWindowRegister during the graph capture of stream"
        ):
            comm.window(on_device(0))
        with pytest.raises(NcclInvalidUsage, match="ncclCommWindowDeregister during the graph capture"):
            window.close()
        library.fake_cuda_capture(stream, 0)
        assert newest(nccl)[1:4] == [
            "PutSignal 4 type 7 to 0 offset 0 signal 0 context 0 flags 0",
            "Signal to 0 signal 0 context 0 flags 0",
            "WaitSignal 1 of signal 0 context 0 from 0 (1)",
        ]


def refuses_what_a_graph_cannot_replay(rank: int, nranks: int) -> None:
    library, nccl = driver(), Fake()
    cuda.set_device(0)
    with create() as comm:
        array, stream = on_device(0), cuda.stream_create()
        comm.all_reduce(array, stream=stream)
        nccl.log()
        library.fake_cuda_capture(stream, 1)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("barrier", comm.barrier),
            ("ncclCommSplit", lambda: comm.split(0)),
            ("ncclCommShrink", lambda: comm.shrink([0])),
            ("ncclCommGrow", lambda: comm.grow(3)),
            ("ncclCommSuspend", comm.suspend),
            ("ncclCommResume", comm.resume),
            ("ncclCommFinalize", comm.finalize),
            ("synchronize", comm.synchronize),
            ("synchronize", lambda: comm.synchronize(stream)),
        ]
        for name, call in calls:
            text = f"{name} during the graph capture of stream {stream:#x}: expected it before or after"
            with pytest.raises(NcclInvalidUsage, match=text):
                call()
        assert nccl.log() == []
        library.fake_cuda_capture(stream, 0)
        comm.synchronize()


def refuses_check_mode_in_a_capture(rank: int, nranks: int) -> None:
    pynccl.check_mode(True)
    cuda.set_device(rank)
    with pynccl.init(timeout=30, device=rank) as comm:
        array, stream = on_device(rank), cuda.stream_create()
        comm.all_reduce(array, stream=stream)
        prepared = comm.prepare.broadcast(array, stream=stream)
        driver().fake_cuda_capture(stream, 1)
        for call in (lambda: comm.all_reduce(array, stream=stream), prepared):
            with pytest.raises(NcclInvalidUsage, match="check mode cannot compare the calls of a graph"):
                call()
        driver().fake_cuda_capture(stream, 0)
        comm.all_reduce(array, stream=stream)
        comm.synchronize()


def test_check_mode(fake_gpus: dict[str, str], tmp_path: Path) -> None:
    testing.run(2, refuses_check_mode_in_a_capture, env=fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)})


def needs_a_stream_without_a_window(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    with create() as comm:
        for call in (lambda: comm.signal(0), lambda: comm.wait_signal(0)):
            with pytest.raises(TypeError, match="stream is None; expected a stream: the communicator has no"):
                call()
        comm.signal(0, stream=2)


CASES = (
    allocates_on_the_current_device,
    frees_later_what_cannot_be_freed_now,
    frees_segments_of_torch,
    registers_segments_of_torch,
    refuses_host_memory,
    registers,
    refuses_registration_during_capture,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_fake_driver(fake_gpus: dict[str, str], case: Case) -> None:
    testing.run(1, case, env=fake_gpus)


def says_what_an_old_library_lacks(rank: int, nranks: int) -> None:
    with create() as comm:
        with pytest.raises(
            NotSupportedError, match=r"ncclCommMemStats needs NCCL >= 2\.29\.7; loaded NCCL 2\.18\.3"
        ):
            comm.memory_stats()
        with pytest.raises(NotSupportedError, match=r"ncclCommRegister needs NCCL >= 2\.19"):
            comm.register(on_device(0))
        assert not comm.registered(on_device(0))
        with pytest.raises(NotSupportedError, match=r"ncclCommWindowRegister needs NCCL >= 2\.27\.3"):
            comm.window(on_device(0))
        with pytest.raises(NotSupportedError, match=r"ncclSignal needs NCCL >= 2\.29\.2"):
            comm.signal(0, stream=2)
        with pytest.raises(NotSupportedError, match=r"ncclMemAlloc needs NCCL >= 2\.19"):
            pynccl.empty(3, "f")
        with pytest.raises(NotSupportedError, match=r"ncclCommSuspend needs NCCL >= 2\.29\.7"):
            comm.suspend()


def reads_statistics(rank: int, nranks: int) -> None:
    with create() as comm:
        array = on_device(0)
        with comm.register(array):
            assert comm.memory_stats() == pynccl.MemoryStats(
                suspend=100, suspended=False, persist=400, total=800
            )
            comm.suspend()
            assert comm.memory_stats().suspended is True
            assert comm.registered(array)
            comm.resume()
            assert comm.memory_stats().suspended is False


@pytest.mark.parametrize(
    ("version", "case"),
    [
        (21803, says_what_an_old_library_lacks),
        (23203, reads_statistics),
        (23203, makes_windows),
        (23203, looks_at_no_mapped_files),
        (23203, captures_puts_and_waits),
        (23203, refuses_what_a_graph_cannot_replay),
        (23203, needs_a_stream_without_a_window),
    ],
)
def test_versions(tmp_path: Path, version: int, case: Case) -> None:
    environment = compiled(tmp_path)
    environment |= {"PYNCCL_LIBRARY": compiled_nccl(tmp_path, environment, version)}
    testing.run(1, case, env=environment)
