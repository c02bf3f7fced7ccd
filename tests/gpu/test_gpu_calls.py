"""Calls on devices, without any: over a libnccl that writes down and the fake CUDA driver."""

from __future__ import annotations

import sys
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
from pynccl import (
    Buffer,
    NcclRemoteError,
    NcclTimeoutError,
    Plan,
    group,
    testing,
)
from pynccl._arrays import dlpack
from pynccl._library import cuda

Case = Callable[[int, int], None]

# What the driver may be asked while a capture runs: only what neither waits nor becomes part of the graph.
HARMLESS = {
    "cuPointerGetAttribute", "cuStreamIsCapturing", "run", "cuCtxGetCurrent", "cuCtxGetDevice",
    "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
}  # fmt: skip
# What the library itself does to launch: no more may come from pynccl when a prepared call runs.
LAUNCH = ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "run", "cuCtxPopCurrent_v2"]


class Asked:
    """What the driver was asked since the last look."""

    def __init__(self) -> None:
        self.seen = 0
        self()

    def __call__(self) -> list[str]:
        text = driver().fake_cuda_log().decode()
        new, self.seen = text[self.seen :], len(text)
        return new.splitlines()

    def names(self) -> list[str]:
        return [line.split()[0] for line in self()]


def fake_cupy(stream: Callable[[], int]) -> Any:
    """Install a module of CuPy's name with what pynccl asks for, and return its kind of array."""
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=stream()))
    sys.modules["cupy"] = cupy

    class ndarray:
        def __init__(self, device: int = 0, count: int = 4, dtype: Any = np.float32) -> None:
            self.host = np.zeros(count, dtype)
            self.dtype, self.size, self.shape = self.host.dtype, count, (count,)
            self.flags = SimpleNamespace(c_contiguous=True, f_contiguous=True)
            self._c_contiguous = True
            self.data = SimpleNamespace(ptr=self.host.ctypes.data, device_id=device)

    ndarray.__module__ = "cupy"
    return ndarray


def restores_the_device(rank: int, nranks: int) -> None:
    """Whatever is called, this thread's device is afterwards what it was."""
    # Made once: the fake driver does not learn that memory was given back.
    x, y, z, whole, stream = on_device(1), on_device(1), on_device(0), on_device(1, 8), 2
    for current in (None, 0, 1):
        if current is not None:
            cuda.set_device(current)
        with create(device=1) as comm, pynccl.Communicator(2, bytes([7]) * 128, 0, device=0) as other:
            assert (comm.device, other.device) == (1, 0)
            calls: list[Callable[[], Any]] = [
                lambda: comm.all_reduce(x),
                lambda: comm.all_reduce(x, y, stream=stream),
                lambda: comm.send_recv(x, 0, y, 0),
                lambda: comm.all_gather_v(x, whole, [4, 4]),
                comm.prepare.all_reduce(x),
                Plan([comm.prepare.all_reduce(x), other.prepare.all_reduce(z)]),
                comm.barrier,
                comm.synchronize,
                lambda: comm.all_reduce(Device(x.data, stream=1)),
                lambda: comm.all_reduce(np.zeros(4)),
            ]
            for index, call in enumerate(calls):
                try:
                    call()
                except ValueError:
                    assert index == len(calls) - 1
                assert cuda.current_device() == current, index
            with group():
                comm.all_reduce(x)
                other.all_reduce(z)
            assert cuda.current_device() == current
            comm.abort()
        assert cuda.current_device() == current
    assert pynccl.device_count() == 2
    pynccl.set_device(1)
    assert pynccl.current_device() == 1


def refuses_the_wrong_place(rank: int, nranks: int) -> None:
    """Every argument of every call; nothing reaches the library."""
    fake = Fake()
    with create() as comm:
        here, whole = on_device(0), on_device(0, 8)
        there, host, wide = on_device(1), np.zeros(4, np.float32), on_device(1, 8)
        pinned = Device(np.zeros(4, np.float32))
        driver().fake_cuda_register(pinned.data.ctypes.data, 16, 1, 0)
        raw = Buffer(there.data.ctypes.data, 4, "float32")
        fake.log()
        for wrong, words in (
            (there, "is memory of device 1; expected the communicator's device 0"),
            (raw, "is memory of device 1; expected the communicator's device 0"),
            (host, "is host memory; expected device memory, since NVIDIA's NCCL is loaded"),
            (pinned, "is host memory; expected device memory, since NVIDIA's NCCL is loaded"),
            (bytearray(16), "is host memory; expected device memory, since NVIDIA's NCCL is loaded"),
            (
                Buffer(host.ctypes.data, 4, "float32"),
                "is host memory; expected device memory, since NVIDIA's NCCL is loaded",
            ),
        ):
            for name, call in (
                ("send", lambda w: comm.all_reduce(w)),
                ("recv", lambda w: comm.all_reduce(here, w)),
                ("send", lambda w: comm.reduce(w)),
                ("send", lambda w: comm.broadcast(w)),
                ("recv", lambda w: comm.broadcast(None, w)),
                ("send", lambda w: comm.all_gather(w, whole)),
                ("send", lambda w: comm.reduce_scatter(w, here)),
                ("recv", lambda w: comm.reduce_scatter(whole, w)),
                ("send", lambda w: comm.gather(w)),
                ("recv", lambda w: comm.scatter(None, w)),
                ("buf", lambda w: comm.send(w, 0)),
                ("buf", lambda w: comm.recv(w, 0)),
                ("send", lambda w: comm.send_recv(w, 0, here, 0)),
                ("recv", lambda w: comm.send_recv(here, 0, w, 0)),
                ("send", lambda w: comm.all_gather_v(w, whole, [4, 4])),
                ("send", lambda w: comm.prepare.all_reduce(w)),
                ("factor", lambda w: comm.pre_mul_sum(w)),
            ):
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    call(wrong)
                assert str(caught.value).startswith(f"{name} {words}"), (name, wrong, caught.value)
                assert name == "factor" or str(caught.value).endswith("(rank 1 of 2)")
        with pytest.raises(ValueError, match="recv is memory of device 1"):
            comm.all_gather(here, wide)
        assert fake.log() == []
        # An empty array is nowhere.
        comm.all_reduce(np.zeros(0, np.float32))


def orders_producers(rank: int, nranks: int) -> None:
    """What an array's producer still does comes first, and nothing is asked where there is nothing."""
    cuda.set_device(0)
    fake, asked = Fake(), Asked()
    with create() as comm:
        mine, theirs = cuda.stream_create(), cuda.stream_create()
        data = on_device(0).data
        for stream in (theirs, 1, 2):
            driver().fake_cuda_hold(stream, 1)
            asked()
            comm.all_reduce(Device(data, stream=stream), stream=mine)
            lines = [line for line in asked() if "Event" in line or line.startswith("run")]
            names = [line.split()[0] for line in lines]
            assert names == ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy_v2"], (
                lines
            )
            assert lines[1].endswith(f" {stream:#x}")
            assert lines[2].split()[1] == f"{mine:#x}"
            # The work is on its stream, and waits for the producer's.
            assert fake.log()[-1].endswith(f"stream {mine:#x}")
            driver().fake_cuda_hold(stream, 0)
            assert [line.split()[0] for line in asked() if line.startswith("run")] == ["run"]
        # Both arrays have a producer.
        asked()
        comm.all_reduce(Device(data, stream=theirs), Device(on_device(0).data, stream=1), stream=mine)
        assert [line.split()[-1] for line in asked() if "cuEventRecord" in line] == [f"{theirs:#x}", "0x1"]
        # None is to be ordered: none was stated, or it is the call's own.
        for array, stream in (
            (Device(data), mine),
            (Device(data, stream=None), mine),
            (Device(data, stream=mine), mine),
            (Device(data, stream=1), 0),
            (Device(data, stream=theirs), None),
        ):
            asked()
            comm.all_reduce(array, stream=stream)
            assert "cuEventRecord" not in asked.names(), (array.__cuda_array_interface__, stream)
        # Without a stream of its own the call goes on the producer's.
        assert fake.log()[-1].endswith(f"stream {theirs:#x}")
        with pytest.raises(
            ValueError, match=r"the ambiguous stream 0; expected 1, 2 or None.*\(rank 1 of 2\)"
        ):
            comm.all_reduce(Device(data, stream=0), stream=mine)
        # Recorded now, run later: the order is kept, too.
        asked()
        with group():
            comm.all_reduce(Device(data, stream=theirs), stream=mine)
        names = asked.names()
        assert names.index("cuStreamWaitEvent") < names.index("run")


def orders_dlpack(rank: int, nranks: int) -> None:
    """A DLPack producer is told the stream, and orders itself."""
    cuda.set_device(0)

    class Producer:
        def __init__(self, data: Any) -> None:
            self.data = data
            self.told: list[Any] = []

        def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
            self.told.append(stream)
            capsule = self.data.__dlpack__()
            tensor = dlpack._Tensor.from_address(dlpack._pointer_of(capsule, b"dltensor"))
            tensor.device_type = 2
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with create() as comm:
        stream = cuda.stream_create()
        send, recv = Producer(on_device(0).data), Producer(on_device(0).data)
        comm.all_reduce(send, recv, stream=stream)
        # -1 only looks; then the producer is asked once.
        assert [told for told in send.told if told != -1] == [stream]
        assert [told for told in recv.told if told != -1] == [stream]
        send.told.clear()
        comm.all_reduce(send)
        # Without a stream it is the legacy default one, which DLPack calls 1.
        assert [told for told in send.told if told != -1] == [1]
    assert Fake().log()


def captures(rank: int, nranks: int) -> None:
    """Prepared calls, plans and groups ask the driver for nothing; plain calls for nothing that hurts."""
    cuda.set_device(0)
    fake, asked = Fake(), Asked()
    with create() as comm:
        stream = cuda.stream_create()
        x, y = on_device(0), on_device(0)
        big = on_device(0, 8)
        ops = [
            comm.prepare.all_reduce(x, stream=stream),
            comm.prepare.all_gather(x, big, stream=stream),
            comm.prepare.send_recv(x, 0, y, 0, stream=stream),
            comm.prepare.all_gather_v(x, big, [4, 4], stream=stream),
        ]
        plan = Plan([*ops, Plan(ops)])
        driver().fake_cuda_capture(stream, 1)
        fake.log()
        for op in (*ops, plan):
            asked()
            result = op()
            assert result is op.result
            assert asked.names() == LAUNCH * len(op), op
        with group():
            ops[0]()
            plan()
            assert asked() == []
        assert asked.names() == LAUNCH * (1 + len(plan))
        fake.log()
        for _ in range(150):
            comm.all_reduce(x, stream=stream)
            comm.all_gather_v(x, big, [4, 4], stream=stream)
        assert set(asked.names()) <= HARMLESS
        driver().fake_cuda_capture(stream, 0)
        # On another stream likewise.
        other = cuda.stream_create()
        plan.stream = other
        driver().fake_cuda_capture(other, 1)
        asked()
        fake.log()
        plan()
        assert asked.names() == LAUNCH * len(plan)
        assert all(line in ("start", "end") or line.endswith(f"stream {other:#x}") for line in fake.log())
        driver().fake_cuda_capture(other, 0)
        comm.synchronize()


def asks_little(rank: int, nranks: int) -> None:
    """A call on arrays that say where they are asks the driver for nothing at all."""
    cuda.set_device(0)
    current = 0
    ndarray = fake_cupy(lambda: current)
    fake, asked = Fake(), Asked()
    with create() as comm:
        one, two = cuda.stream_create(), cuda.stream_create()
        x, y = ndarray(), ndarray()
        for _ in range(2):
            for current in (one, two):
                fake.log()
                asked()
                assert comm.all_reduce(x) is x
                assert comm.all_reduce(x, y) is y
                assert comm.all_reduce(x, op="max") is x
                with group():
                    comm.all_reduce(x)
                    comm.all_reduce(x, y)
                assert asked.names() == LAUNCH * 5
                calls = [line for line in fake.log() if line.startswith("AllReduce")]
                assert len(calls) == 5
                assert all(line.endswith(f"stream {current:#x}") for line in calls), calls
        # A prepared call keeps the stream that was the current one.
        current = one
        op = comm.prepare.all_reduce(x)
        current = two
        fake.log()
        op()
        assert fake.log() == [f"AllReduce in place 4 type 7 op 0 stream {one:#x}"]
        # What is on the current stream needs no keeping, what is elsewhere does.
        assert not comm._core.in_flight
        comm.all_reduce(x, stream=one)
        assert set(comm._core.in_flight) == {one}
        comm.synchronize(one)
        assert not comm._core.in_flight
        elsewhere = ndarray(device=1)
        for call, name in (
            (lambda: comm.all_reduce(elsewhere), "send"),
            (lambda: comm.all_reduce(x, elsewhere), "recv"),
            (lambda: comm.all_gather(elsewhere, x), "send"),
        ):
            with pytest.raises(
                ValueError, match=f"^{name} is memory of device 1; expected the communicator's"
            ):
                call()


def makes_numba_arrays(rank: int, nranks: int) -> None:
    """Numba's arrays speak the interface, and results are made by Numba."""
    made: list[Any] = []

    class DeviceNDArray(Device):
        def __init__(self, data: Any) -> None:
            super().__init__(data)
            self.dtype, self.shape = data.dtype, data.shape

    def device_array(shape: Any, dtype: Any) -> Any:
        made.append(DeviceNDArray(on_device(0, int(np.prod(shape)), dtype).data.reshape(shape)))
        return made[-1]

    DeviceNDArray.__module__ = "numba.cuda.cudadrv.devicearray"
    numba: Any = ModuleType("numba")
    numba.cuda = SimpleNamespace(device_array=device_array)
    sys.modules["numba"] = numba
    with create() as comm:
        x = DeviceNDArray(on_device(0).data.reshape(2, 2))
        for call, shape in (
            (comm.all_gather, (2, 2, 2)),
            (comm.reduce_scatter, (1, 2)),
            (comm.all_to_all, (2, 2)),
            (comm.scatter, (1, 2)),
        ):
            got = call(x)
            assert got is made[-1]
            assert got.shape == shape
        assert comm.gather(x) is None
        assert comm.gather(x, root=1) is made[-1]
        assert len(made) == 5


def waits_and_fails(rank: int, nranks: int) -> None:
    """Waiting for a stream bounded in time, and ended by what goes wrong in the background."""
    cuda.set_device(0)
    fake = Fake()
    with create() as comm:
        stream = cuda.stream_create()
        plan = Plan([comm.prepare.all_reduce(on_device(0), stream=stream)] * 3)
        driver().fake_cuda_hold(stream, 1)
        start = time.monotonic()
        plan()
        assert time.monotonic() - start < 10
        with pytest.raises(
            NcclTimeoutError, match=f"synchronize did not complete on stream {stream:#x} within 0.3"
        ):
            comm.synchronize(timeout=0.3)
        fake.async_error(comm.handle, 6)
        with pytest.raises(NcclRemoteError, match="the cause"):
            comm.synchronize(stream)
        fake.async_error(comm.handle, 0)
        driver().fake_cuda_hold(stream, 0)
        comm.synchronize()
        own, event = pynccl.Stream(), pynccl.Event()
        driver().fake_cuda_hold(own.handle, 1)
        comm.all_reduce(on_device(0), stream=own)
        event.record(own)
        assert not own.query()
        assert not event.query()
        with pytest.raises(NcclTimeoutError, match="Event.synchronize took longer than 0.1 s"):
            event.synchronize(0.1)
        other = pynccl.Stream()
        other.wait_event(event)
        comm.all_reduce(on_device(0), stream=other)
        assert not other.query()
        driver().fake_cuda_hold(own.handle, 0)
        other.synchronize(5)
        event.synchronize(5)
        for thing in (own, other, event):
            thing.destroy()


def uses_cupy(rank: int, nranks: int) -> None:
    cupy = fake_cupy(lambda: 0).__module__
    assert pynccl.array_module() is sys.modules[cupy]


CASES = [
    restores_the_device,
    refuses_the_wrong_place,
    orders_producers,
    orders_dlpack,
    captures,
    asks_little,
    makes_numba_arrays,
    waits_and_fails,
    uses_cupy,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_fake_driver(fake_gpus: dict[str, str], case: Case) -> None:
    testing.run(1, case, env=fake_gpus)
