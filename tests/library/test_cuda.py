"""The GPU path without a GPU: over a fake driver that records the calls and answers as the real one would.

Each test is a function that runs in a process of its own, where that driver is what the loader finds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_cuda
from fake_cuda import driver
from pynccl import NcclUnhandledCudaError, NotSupportedError, testing
from pynccl._library import cuda

Case = Callable[[int, int], None]


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_cuda.compiled(tmp_path_factory.mktemp("fake_cuda"))


def log() -> list[str]:
    text: bytes = driver().fake_cuda_log()
    return [line.strip() for line in text.decode().splitlines()]


def calls(prefix: str) -> list[str]:
    return [line for line in log() if line.startswith(prefix)]


def finds_devices(rank: int, nranks: int) -> None:
    assert cuda.available()
    assert cuda.why_unavailable() == ""
    assert log() == ["cuInit 0", "cuDeviceGetCount"]
    assert cuda.device_count() == 2
    assert cuda.driver_version() == (13, 1)
    assert cuda.device_name(1) == "Fake 1"
    assert cuda.device_uuid(0) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert cuda.device_uuid(1) == "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert calls("cuInit") == ["cuInit 0"]


def uses_the_older_uuid(rank: int, nranks: int) -> None:
    assert cuda.available()
    driver().fake_cuda_fail(b"cuDeviceGetUuid_v2", 1)
    assert cuda.device_uuid(0).startswith("GPU-eeeeeeee-")


def refuses_devices_that_do_not_exist(rank: int, nranks: int) -> None:
    for device in (2, -1):
        with pytest.raises(ValueError, match=rf"device {device} does not exist: the driver shows 2"):
            cuda.set_device(device)


def selects_the_primary_context(rank: int, nranks: int) -> None:
    assert cuda.current_device() is None
    cuda.set_device(1)
    assert cuda.current_device() == 1
    cuda.set_device(0)
    cuda.set_device(1)
    assert cuda.current_device() == 1
    # Kept, as the CUDA runtime keeps them; one reference is enough.
    assert calls("cuDevicePrimaryCtxRetain") == ["cuDevicePrimaryCtxRetain 1", "cuDevicePrimaryCtxRetain 0"]
    assert calls("cuCtxSetCurrent") == ["cuCtxSetCurrent 1", "cuCtxSetCurrent 0", "cuCtxSetCurrent 1"]


def selects_for_this_thread_only(rank: int, nranks: int) -> None:
    seen: list[int | None] = []
    cuda.set_device(1)
    thread = threading.Thread(target=lambda: seen.append(cuda.current_device()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert cuda.current_device() == 1


def restores_the_device(rank: int, nranks: int) -> None:
    with cuda.using_device(1):
        assert cuda.current_device() == 1
        with cuda.using_device(0):
            assert cuda.current_device() == 0
        assert cuda.current_device() == 1
    assert cuda.current_device() is None
    cuda.set_device(0)
    with pytest.raises(KeyError), cuda.using_device(1):
        raise KeyError
    assert cuda.current_device() == 0


def streams(rank: int, nranks: int) -> None:
    fake = driver()
    cuda.set_device(0)
    stream = cuda.stream_create()
    assert stream > 2
    assert calls("cuStreamCreate") == ["cuStreamCreate 1"]
    assert cuda.stream_query(stream)
    fake.fake_cuda_hold(stream, 1)
    fake.fake_cuda_launch(stream, 7)
    assert not cuda.stream_query(stream)
    fake.fake_cuda_hold(stream, 0)
    assert cuda.stream_query(stream)
    assert calls("run") == ["run 7"]
    cuda.stream_destroy(stream)
    with pytest.raises(NcclUnhandledCudaError, match="cuStreamQuery failed with CUDA_ERROR_INVALID_HANDLE"):
        cuda.stream_query(stream)


def needs_a_device_for_a_stream(rank: int, nranks: int) -> None:
    assert cuda.available()
    for create in (cuda.stream_create, cuda.event_create):
        with pytest.raises(NcclUnhandledCudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
            create()


def events_order_streams(rank: int, nranks: int) -> None:
    fake = driver()
    cuda.set_device(0)
    first, then = cuda.stream_create(), cuda.stream_create()
    fake.fake_cuda_hold(first, 1)
    fake.fake_cuda_launch(first, 1)
    event = cuda.event_create()
    cuda.event_record(event, first)
    fake.fake_cuda_launch(first, 2)
    cuda.stream_wait_event(then, event)
    fake.fake_cuda_launch(then, 3)
    assert not cuda.event_query(event)
    assert not cuda.stream_query(then)
    assert calls("run") == []
    fake.fake_cuda_hold(first, 0)
    assert cuda.event_query(event)
    assert cuda.stream_query(then)
    order = calls("run")
    assert sorted(order) == ["run 1", "run 2", "run 3"]
    assert order.index("run 1") < order.index("run 3")
    cuda.event_destroy(event)
    with pytest.raises(NcclUnhandledCudaError, match="INVALID_HANDLE"):
        cuda.event_query(event)


def orders_streams_without_waiting(rank: int, nranks: int) -> None:
    fake = driver()
    cuda.set_device(0)
    first, then = cuda.stream_create(), cuda.stream_create()
    fake.fake_cuda_hold(first, 1)
    fake.fake_cuda_launch(first, 1)
    cuda.order_streams(first, then)
    fake.fake_cuda_launch(then, 2)
    assert calls("run") == []
    fake.fake_cuda_hold(first, 0)
    assert calls("run") == ["run 1", "run 2"]
    names = [line.split()[0] for line in log() if "Event" in line]
    assert names == ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy_v2"]
    cuda.order_streams(then, then)
    assert [line.split()[0] for line in log() if "Event" in line] == names


def capture_state(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    stream = cuda.stream_create()
    assert not cuda.stream_is_capturing(stream)
    for status in (1, 2):
        driver().fake_cuda_capture(stream, status)
        assert cuda.stream_is_capturing(stream)


def graphs(rank: int, nranks: int) -> None:
    """What is issued during a capture runs at each launch of the graph; a wait spoils the capture."""
    cuda.set_device(0)
    stream = cuda.stream_create()
    cuda.stream_begin_capture(stream)
    driver().fake_cuda_launch(stream, 5)
    assert cuda.stream_is_capturing(stream)
    graph = cuda.stream_end_capture(stream)
    assert not cuda.stream_is_capturing(stream)
    executable = cuda.graph_instantiate(graph)
    cuda.graph_destroy(graph)
    assert calls("run") == []
    for _ in range(2):
        cuda.graph_launch(executable, stream)
    assert calls("run") == ["run 5", "run 5"]
    cuda.graph_executable_destroy(executable)
    with pytest.raises(NcclUnhandledCudaError, match="cuGraphLaunch failed with CUDA_ERROR_INVALID_VALUE"):
        cuda.graph_launch(executable, stream)
    cuda.stream_begin_capture(stream)
    with pytest.raises(NcclUnhandledCudaError, match="cuStreamQuery failed .*CAPTURE_UNSUPPORTED"):
        cuda.stream_query(stream)
    with pytest.raises(NcclUnhandledCudaError, match="cuStreamEndCapture failed .*CAPTURE_INVALIDATED"):
        cuda.stream_end_capture(stream)
    assert cuda.stream_query(stream)
    with pytest.raises(NcclUnhandledCudaError, match="cuStreamBeginCapture_v2 failed .*CAPTURE_UNSUPPORTED"):
        cuda.stream_begin_capture(0)


def pointers(rank: int, nranks: int) -> None:
    assert cuda.available()
    fake = driver()
    for begin, kind, device in ((0x10000, 2, 0), (0x20000, 2, 1), (0x30000, 1, 0), (0x40000, 4, 1)):
        fake.fake_cuda_register(begin, 0x1000, kind, device)
    places = [cuda.pointer_device(p) for p in (0x10000, 0x10FFF, 0x20800, 0x30000, 0x40000, 0x11000, 0)]
    assert places == [0, 0, 1, None, 1, None, None]


def memory(rank: int, nranks: int) -> None:
    with cuda.using_device(1):
        before = cuda.memory_available()
        pointer = cuda.memory_allocate(64)
        assert cuda.memory_available() == before - 64
    assert cuda.pointer_device(pointer) == 1
    cuda.memory_free(pointer)
    assert cuda.pointer_device(pointer) is None


def errors_carry_the_name(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    driver().fake_cuda_fail(b"cuStreamQuery", 702)
    with pytest.raises(NcclUnhandledCudaError, match="CUDA_ERROR_LAUNCH_TIMEOUT") as caught:
        cuda.stream_query(0)
    assert (caught.value.function, caught.value.result) == ("cuStreamQuery", 1)
    assert "CUDA_ERROR_LAUNCH_TIMEOUT" in caught.value.detail
    driver().fake_cuda_fail(b"cuStreamQuery", 98765)
    with pytest.raises(NcclUnhandledCudaError, match="CUDA error 98765"):
        cuda.stream_query(0)
    driver().fake_cuda_fail(b"cuPointerGetAttribute", 201)
    with pytest.raises(NcclUnhandledCudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        cuda.pointer_device(1)


def destroys_after_the_driver_has_gone(rank: int, nranks: int) -> None:
    cuda.set_device(0)
    stream, event = cuda.stream_create(), cuda.event_create()
    driver().fake_cuda_fail(b"cuStreamDestroy_v2", 4)
    cuda.stream_destroy(stream)
    driver().fake_cuda_fail(b"cuEventDestroy_v2", 4)
    cuda.event_destroy(event)


CASES = [
    finds_devices,
    uses_the_older_uuid,
    refuses_devices_that_do_not_exist,
    selects_the_primary_context,
    selects_for_this_thread_only,
    restores_the_device,
    streams,
    needs_a_device_for_a_stream,
    events_order_streams,
    orders_streams_without_waiting,
    capture_state,
    graphs,
    pointers,
    memory,
    errors_carry_the_name,
    destroys_after_the_driver_has_gone,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_with_the_fake_driver(fake_driver: dict[str, str], case: Case) -> None:
    testing.run(1, case, backend="cpu", env=fake_driver)


def shows_no_device(rank: int, nranks: int) -> None:
    assert not cuda.available()
    assert cuda.device_count() == 0
    assert "CUDA_ERROR_NO_DEVICE" in cuda.why_unavailable()
    with pytest.raises(NotSupportedError, match="cuInit failed with CUDA_ERROR_NO_DEVICE"):
        cuda.set_device(0)


def test_driver_without_a_device(fake_driver: dict[str, str]) -> None:
    testing.run(1, shows_no_device, backend="cpu", env=fake_driver | {"FAKE_CUDA_DEVICES": "0"})


def lacks_a_function(rank: int, nranks: int) -> None:
    assert cuda.available()
    with pytest.raises(NotSupportedError, match="cuStreamIsCapturing .*lacks the function"):
        cuda.stream_is_capturing(0)
    assert cuda.device_uuid(0).startswith("GPU-eeeeeeee-")


def test_older_driver(tmp_path: Path) -> None:
    text = fake_cuda.SOURCE
    for name in ("cuStreamIsCapturing", "cuDeviceGetUuid_v2"):
        text = text.replace(f"int {name}(", f"int absent_{name}(")
    testing.run(1, lacks_a_function, backend="cpu", env=fake_cuda.compiled(tmp_path, text))


def has_no_driver(rank: int, nranks: int) -> None:
    assert not cuda.available()
    assert cuda.device_count() == 0
    assert "libcuda.so.1" in cuda.why_unavailable()
    with pytest.raises(NotSupportedError, match="PYNCCL_LIBRARY=cpu"):
        cuda.stream_query(0)


def test_without_a_driver(tmp_path: Path) -> None:
    # A file that is no library stands in the way, where a driver may be installed.
    (tmp_path / "libcuda.so.1").write_text("no library")
    if os.path.exists("/usr/lib/wsl/lib/libcuda.so.1"):
        pytest.skip("this is WSL, whose driver is found by its path")
    testing.run(1, has_no_driver, backend="cpu", env={"LD_LIBRARY_PATH": str(tmp_path)})


def test_probe_is_quick() -> None:
    start = time.monotonic()
    for _ in range(1000):
        cuda.available()
    assert time.monotonic() - start < 0.5
