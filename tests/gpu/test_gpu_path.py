"""The communicator on devices, without any: over a recording libnccl and the fake CUDA driver."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pynccl
from device_arrays import Device
from fake_cuda import create, driver, on_device
from fake_nccl import Fake
from pynccl import Communicator, NcclInvalidUsage, NcclTimeoutError, NcclUnhandledCudaError, testing
from pynccl._library import cuda
from pynccl._memory.owner import used_streams

Case = Callable[[int, int], None]


def takes_the_device_and_restores(rank: int, nranks: int) -> None:
    assert pynccl.library_info().backend == "nccl"
    with create() as comm:
        assert (comm.rank, comm.size, comm.device) == (1, 2, 0)
    with create(device=1) as comm:
        assert comm.device == 1
    assert cuda.current_device() is None
    cuda.set_device(1)
    with create() as comm:
        assert comm.device == 1
    with create(device=0) as comm:
        assert comm.device == 0
        assert cuda.current_device() == 1
    with pytest.raises(ValueError, match="device 5 does not exist"):
        create(device=5)


def checks_where_memory_is(rank: int, nranks: int) -> None:
    with create() as comm:
        here, there = on_device(0), on_device(1)
        driver().fake_cuda_register(0x5000, 64, 1, 0)
        for array, words in (
            (
                np.zeros(4, np.float32),
                r"send is host memory; expected device memory.*\(rank 1 of 2\)",
            ),
            (Device(np.zeros(4, np.float32)), "send is host memory"),
            (Device(np.zeros(4, np.float32), data=(0x5000, False)), "send is host memory"),
            (there, "send is memory of device 1; expected the communicator's device 0"),
        ):
            with pytest.raises(ValueError, match=words):
                comm.all_reduce(array)
        with pytest.raises(ValueError, match="recv is memory of device 1"):
            comm.all_reduce(here, there)
        assert comm.all_reduce(here) is here
    assert Fake().log()[0] == "AllReduce in place 4 type 7 op 0 stream 0"


def passes_streams_on(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    with create() as comm:
        send, recv = on_device(0), on_device(0)
        stream = cuda.stream_create()
        shown = [
            stream,
            SimpleNamespace(ptr=stream),
            SimpleNamespace(cuda_stream=stream),
            SimpleNamespace(__cuda_stream__=lambda: (0, stream)),
            SimpleNamespace(__cuda_stream__=(0, stream)),
        ]
        for one in shown:
            comm.all_reduce(send, recv, "max", one)
        comm.broadcast(send, recv, 1, stream=stream)
        for wrong in (
            SimpleNamespace(),
            SimpleNamespace(ptr="x"),
            SimpleNamespace(__cuda_stream__=(1, stream)),
            1 << 64,
        ):
            with pytest.raises(TypeError, match="expected None, a stream handle as an int, 0 or more"):
                comm.all_reduce(send, stream=wrong)
    want = f"AllReduce apart 4 type 7 op 2 stream {stream:#x}"
    assert Fake().log()[:6] == [want] * 5 + [f"Broadcast apart 4 type 7 root 1 stream {stream:#x}"]


def uses_the_current_stream(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    stream = cuda.stream_create()
    # No CuPy here: a module of that name, whose arrays and streams have what pynccl asks for.
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=stream))
    sys.modules["cupy"] = cupy
    data = np.zeros(4, np.float16)
    flags = SimpleNamespace(c_contiguous=True, f_contiguous=False)
    memory = SimpleNamespace(ptr=data.ctypes.data, device_id=0)
    kind = type(
        "ndarray", (), {"__module__": "cupy", "dtype": data.dtype, "size": 4, "flags": flags, "data": memory}
    )
    with create() as comm:
        array = kind()
        comm.all_reduce(array)
        comm.all_reduce(on_device(0))
        assert not comm._core.in_flight
        memory.device_id = 1
        with pytest.raises(ValueError, match="send is memory of device 1"):
            comm.all_reduce(array)
    assert Fake().log()[:2] == [
        f"AllReduce in place 4 type 6 op 0 stream {stream:#x}",
        "AllReduce in place 4 type 7 op 0 stream 0",
    ]


def parts_go_on_the_arrays_stream(rank: int, nranks: int) -> None:
    """pynccl.mpi: what names a part of an array is in order with what else happens to the array."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    from pynccl.mpi import Comm

    cuda.set_device(0)
    streams = [cuda.stream_create() for _ in range(2)]
    with create() as nccl:
        comm = Comm.__new__(Comm)
        comm._over(MPI.COMM_NULL, nccl)
        array, other = on_device(0, 8), on_device(0, 8)
        array.__cuda_array_interface__["stream"], other.__cuda_array_interface__["stream"] = streams
        comm.Bcast([array, (2, 3)], root=1)
        comm.Allreduce([other, 3], [array, (3, 4)], op=MPI.MAX)
        assert not nccl._core.in_flight
    assert Fake().log()[:2] == [
        f"Broadcast in place 2 type 7 root 1 stream {streams[0]:#x}",
        f"AllReduce apart 3 type 7 op 2 stream {streams[1]:#x}",
    ]


def waits_for_streams(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    with create() as comm:
        array, streams = on_device(0), [cuda.stream_create() for _ in range(2)]
        for stream in streams:
            comm.all_reduce(array, stream=stream)
        comm.synchronize()
        assert not used_streams(comm._core.c)
        driver().fake_cuda_hold(streams[1], 1)
        for stream in streams:
            comm.all_reduce(array, stream=stream)
        comm.synchronize(streams[0])
        start = time.monotonic()
        with pytest.raises(NcclTimeoutError, match=f"on stream {streams[1]:#x} within 0.2 s"):
            comm.synchronize(streams[1], timeout=0.2)
        assert 0.15 < time.monotonic() - start < 10
        timer = threading.Timer(0.2, driver().fake_cuda_hold, (streams[1], 0))
        timer.start()
        comm.synchronize()
        timer.join()
        assert not used_streams(comm._core.c)
        assert not comm._core.in_flight
        driver().fake_cuda_hold(streams[1], 1)
        comm.all_reduce(array, stream=streams[1])
        Fake().async_error(comm.handle, 6)
        with pytest.raises(pynccl.NcclRemoteError, match="the cause"):
            comm.synchronize()
        assert isinstance(comm.async_error(), pynccl.NcclRemoteError)
        Fake().async_error(comm.handle, 0)
        driver().fake_cuda_hold(streams[1], 0)
        driver().fake_cuda_fail(b"cuStreamQuery", 702)
        with pytest.raises(NcclUnhandledCudaError, match="CUDA_ERROR_LAUNCH_TIMEOUT"):
            comm.synchronize(streams[0])


def watches_streams(rank: int, nranks: int) -> None:
    """With a time-out, a stream that makes no progress is noticed although nobody waits for it."""
    comm = Communicator(1, bytes([7]) * 128, 0, timeout=0.6)
    send, recv, streams = on_device(0), on_device(0), []
    with cuda.using_device(0):
        streams = [cuda.stream_create() for _ in range(2)]
    driver().fake_cuda_capture(streams[0], 1)
    comm.all_reduce(send, recv, stream=streams[0])
    calls = driver().fake_cuda_log().decode()
    assert "cuEventRecord" not in calls
    driver().fake_cuda_capture(streams[0], 0)
    for _ in range(8):
        # Slow, but moving all the time.
        comm.all_reduce(send, recv, stream=streams[1])
        time.sleep(0.15)
    assert comm.async_error() is None
    driver().fake_cuda_hold(streams[1], 1)
    start = time.monotonic()
    comm.all_reduce(send, recv, stream=streams[1])
    while (error := comm.async_error()) is None:
        time.sleep(0.01)
    assert 0.5 < time.monotonic() - start < 10
    assert f"calls up to #10 all_reduce on stream {streams[1]:#x} did not complete within 0.6 s" in str(error)
    with pytest.raises(NcclTimeoutError, match="did not complete within 0.6 s"):
        comm.all_reduce(send, recv, stream=streams[0])
    with pytest.raises(NcclTimeoutError, match="did not complete within 0.6 s"):
        comm.synchronize()
    # This library can neither revoke nor shrink: the watchdog aborts, and nobody does so again.
    comm.abort()
    assert comm.closed
    assert Fake().log().count("abort") == 1
    calls = driver().fake_cuda_log().decode()
    assert calls.count("cuEventCreate") == calls.count("cuEventDestroy_v2") == 2


def watches_calls_that_do_not_block(rank: int, nranks: int) -> None:
    """The library takes the call later: only then is it on the stream."""
    for grouped in (False, True):
        comm = Communicator(1, bytes([7]) * 128, 0, timeout=0.6)
        send, recv = on_device(0), on_device(0)
        with cuda.using_device(0):
            stream = cuda.stream_create()
        driver().fake_cuda_hold(stream, 1)
        Fake().in_progress(comm.handle, 5)
        start = time.monotonic()
        with pynccl.group() if grouped else contextlib.nullcontext():
            comm.all_reduce(send, recv, stream=stream)
        while (error := comm.async_error()) is None:
            time.sleep(0.01)
        assert 0.5 < time.monotonic() - start < 10
        assert f"all_reduce on stream {stream:#x} did not complete within 0.6 s" in str(error)
        comm.abort()


def works_in_a_thread_without_a_context(rank: int, nranks: int) -> None:
    """Only with a context does the driver know a default stream."""
    with create() as comm:
        array = on_device(0)
        assert cuda.current_device() is None
        works = [comm.all_reduce(array, stream=0, wait=False)]
        works.append(comm.prepare.all_reduce(array, stream=0)(wait=False))
        for work in works:
            work.wait(timeout=20)
        assert cuda.current_device() is None


def keeps_arrays_of_other_streams(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    with create() as comm:
        array, stream = on_device(0), cuda.stream_create()
        driver().fake_cuda_hold(stream, 1)
        for _ in range(200):
            comm.all_reduce(array, stream=stream)
        assert len(comm._core.in_flight[stream]) == 200
        driver().fake_cuda_hold(stream, 0)
        for _ in range(70):
            comm.all_reduce(array, stream=stream)
        assert len(comm._core.in_flight[stream]) < 135
        comm.synchronize(stream)
        driver().fake_cuda_capture(stream, 1)
        before = driver().fake_cuda_log().decode()
        for _ in range(200):
            comm.all_reduce(array, stream=stream)
        during = driver().fake_cuda_log().decode()[len(before) :]
        # Nothing that would spoil a capture or become part of it.
        assert {line.split()[0] for line in during.splitlines()} <= {
            *("cuPointerGetAttribute", "cuStreamIsCapturing", "run"),
            *("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
        }
        driver().fake_cuda_capture(stream, 0)


def barriers(rank: int, nranks: int) -> None:
    with create(device=1) as comm:
        comm.barrier()
        comm.barrier()
        stream = comm._core._scratch[1] if comm._core._scratch else 0
        assert stream > 2
    assert Fake().log()[:2] == [f"AllReduce in place 1 type 1 op 2 stream {stream:#x}"] * 2
    calls = driver().fake_cuda_log().decode()
    assert calls.count("cuMemAlloc_v2") == calls.count("cuMemFree_v2") == 1
    assert calls.count("cuStreamCreate") == calls.count("cuStreamDestroy_v2") == 1
    assert cuda.current_device() is None


def ends(rank: int, nranks: int) -> None:
    with create():
        pass
    with pytest.raises(KeyError), create():
        raise KeyError
    comm = create()
    comm.destroy()
    with pytest.raises(NcclInvalidUsage):
        comm.barrier()
    assert Fake().log() == ["finalize", "destroy", "abort", "destroy"]


def initializes(rank: int, nranks: int) -> None:
    with pynccl.init() as comm:
        assert comm.device == rank
        assert cuda.current_device() == rank
    with pynccl.init(device=1 - rank) as comm:
        assert comm.device == 1 - rank
        assert cuda.current_device() == 1 - rank


CASES = [
    takes_the_device_and_restores,
    checks_where_memory_is,
    passes_streams_on,
    uses_the_current_stream,
    parts_go_on_the_arrays_stream,
    waits_for_streams,
    watches_streams,
    watches_calls_that_do_not_block,
    works_in_a_thread_without_a_context,
    keeps_arrays_of_other_streams,
    barriers,
    ends,
]


def _run(case: Case, fake_gpus: dict[str, str], nranks: int = 1, **more: str) -> None:
    testing.run(nranks, case, env=fake_gpus | more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_fake_driver(fake_gpus: dict[str, str], case: Case) -> None:
    _run(case, fake_gpus)


def test_init_selects_the_device(fake_gpus: dict[str, str]) -> None:
    _run(initializes, fake_gpus, 2)


def one_device_each(rank: int, nranks: int) -> None:
    os.environ["FAKE_CUDA_FIRST"] = str(rank)
    with pynccl.init() as comm:
        assert comm.device == 0


def test_init_where_each_rank_sees_one_device(fake_gpus: dict[str, str]) -> None:
    _run(one_device_each, fake_gpus, 2, FAKE_CUDA_DEVICES="1")


def too_few_devices(rank: int, nranks: int) -> None:
    start = time.monotonic()
    words = "local rank 2 has no device" + (": the driver shows 2" if rank == 2 else "")
    with pytest.raises(pynccl.BootstrapError, match=words):
        pynccl.init(timeout=20)
    assert time.monotonic() - start < 15


def test_init_with_too_few_devices(fake_gpus: dict[str, str]) -> None:
    _run(too_few_devices, fake_gpus, 3)
