"""The part of the CUDA driver that pynccl uses: devices, contexts, streams, events, graphs and memory.

The driver is opened at the first use. CuPy and torch use the same driver: a device selected here is current
for them too. Handles and pointers are ints. Without a driver `available` returns False and other functions
raise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pynccl._errors import NcclUnhandledCudaError, NotSupportedError
from pynccl._library.binding import ffi, lib

# The second is WSL's path.
_PATHS = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
# Results of the function table for an empty slot; CUDA uses neither number.
_ABSENT = (lib.PYNCCL_NOT_FOUND, lib.PYNCCL_NOT_LOADED)

# The legacy default stream does not wait for such a stream; the CPU library has the same flag.
STREAM_NON_BLOCKING: int = lib.CU_STREAM_NON_BLOCKING


class _Driver:
    """The result of the search for the driver."""

    def __init__(self) -> None:
        self.failure = self._open()
        self.contexts: dict[int, int] = {}
        # Reentrant: a finalizer that frees memory can run while this thread holds it.
        self.lock = threading.RLock()

    def _open(self) -> str:
        reasons = []
        for path in _PATHS:
            handle = lib.pynccl_open(path.encode(), 0)
            if handle != ffi.NULL:
                lib.cuda_api_bind(handle)
                return self._initialize()
            reasons.append(ffi.string(lib.pynccl_error()).decode(errors="replace"))
        return "; ".join(reasons)

    def _initialize(self) -> str:
        code = lib.cuInit(0)
        if code:
            return f"cuInit failed with {_error_text(code)}"
        count = ffi.new("int*")
        code = lib.cuDeviceGetCount(count)
        if code:
            return f"cuDeviceGetCount failed with {_error_text(code)}"
        return "" if count[0] else "the driver shows no device (see CUDA_VISIBLE_DEVICES)"


_driver: _Driver | None = None
_driver_lock = threading.Lock()


def _found() -> _Driver:
    global _driver
    if _driver is None:
        with _driver_lock:
            _driver = _driver or _Driver()
    return _driver


def available() -> bool:
    """Tell whether there is a driver with at least one device."""
    return not _found().failure


def why_unavailable() -> str:
    """Return why no driver can be used, or ""."""
    return _found().failure


def _error_text(code: int) -> str:
    if code in _ABSENT:
        return "not found: this NVIDIA driver lacks the function"
    text = ffi.new("char const**")
    name = (
        ffi.string(text[0]).decode()
        if not lib.cuGetErrorName(code, text) and text[0]
        else f"CUDA error {code}"
    )
    if not lib.cuGetErrorString(code, text) and text[0]:
        return f"{name} ({ffi.string(text[0]).decode(errors='replace')})"
    return name


def _call(name: str, *args: object) -> None:
    """Call a function of the driver; raise unless it succeeds."""
    code = _try(name, *args)
    if code:
        _fail(name, code)


def _try(name: str, *args: object) -> int:
    """Call a function of the driver and return its result."""
    failure = _found().failure
    if failure:
        raise NotSupportedError(
            f"{name} needs an NVIDIA driver, but none was found: {failure}. "
            "PYNCCL_LIBRARY=cpu runs the same program on host memory.",
            function=name,
        )
    return int(getattr(lib, name)(*args))


def _fail(name: str, code: int) -> None:
    text = _error_text(code)
    kind = NotSupportedError if code in _ABSENT else NcclUnhandledCudaError
    raise kind(f"{name} failed with {text}", function=name, detail=text)


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports."""
    out = ffi.new("int*")
    _call("cuDriverGetVersion", out)
    return out[0] // 1000, out[0] % 1000 // 10


# --- devices ------------------------------------------------------------------------------------------------


def device_count() -> int:
    """Return the number of visible devices, 0 without a driver."""
    if not available():
        return 0
    out = ffi.new("int*")
    _call("cuDeviceGetCount", out)
    return int(out[0])


def _device(ordinal: int) -> int:
    count = device_count()
    if count and not 0 <= ordinal < count:
        raise ValueError(f"device {ordinal} does not exist: the driver shows {count}, counted from 0")
    out = ffi.new("CUdevice*")
    _call("cuDeviceGet", out, ordinal)
    return int(out[0])


def device_uuid(ordinal: int) -> str:
    """Return the UUID of a device or MIG slice, in nvidia-smi's notation."""
    out = ffi.new("CUuuid*")
    device = _device(ordinal)
    # The older function returns the same UUID for all MIG slices of a device.
    if _try("cuDeviceGetUuid_v2", out, device):
        _call("cuDeviceGetUuid", out, device)
    text = bytes(ffi.buffer(out)).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def device_name(ordinal: int) -> str:
    """Return the product name of a device."""
    out = ffi.new("char[256]")
    _call("cuDeviceGetName", out, 256, _device(ordinal))
    return str(ffi.string(out).decode(errors="replace"))


def device_pci(ordinal: int) -> str:
    """Return the PCI address of a device as /sys writes it, such as 0000:3b:00.0."""
    out = ffi.new("char[32]")
    _call("cuDeviceGetPCIBusId", out, 32, _device(ordinal))
    return str(ffi.string(out).decode()).lower()


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Tell whether a device can read and write the memory of another directly."""
    out = ffi.new("int*")
    _call("cuDeviceCanAccessPeer", out, _device(ordinal), _device(peer))
    return bool(out[0])


def peer_link(ordinal: int, peer: int) -> tuple[int, bool]:
    """Return the driver's rank of the path between two devices, 0 the fastest, and whether it has atomics."""
    devices, out = (_device(ordinal), _device(peer)), ffi.new("int*")
    _call("cuDeviceGetP2PAttribute", out, lib.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, *devices)
    rank = int(out[0])
    _call("cuDeviceGetP2PAttribute", out, lib.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, *devices)
    return rank, bool(out[0])


def current_device() -> int | None:
    """Return the ordinal of this thread's device; None if it has no context yet."""
    if _current_context() == 0:
        return None
    out = ffi.new("CUdevice*")
    _call("cuCtxGetDevice", out)
    return _ordinal(int(out[0]))


def _ordinal(device: int) -> int:
    # A CUdevice equals the ordinal in every driver so far, but CUDA does not guarantee it.
    return next((i for i in range(device_count()) if _device(i) == device), device)


def _current_context() -> int:
    out = ffi.new("uintptr_t*")
    _call("cuCtxGetCurrent", out)
    return int(out[0])


def primary_context(ordinal: int) -> int:
    """Return the primary context, which CuPy and torch use too; it is kept until the process ends."""
    driver = _found()
    with driver.lock:
        if ordinal not in driver.contexts:
            out = ffi.new("uintptr_t*")
            _call("cuDevicePrimaryCtxRetain", out, _device(ordinal))
            driver.contexts[ordinal] = int(out[0])
        return driver.contexts[ordinal]


def set_device(ordinal: int) -> None:
    """Make a device the current one of this thread, for every CUDA library in the process."""
    _call("cuCtxSetCurrent", primary_context(ordinal))


@contextmanager
def using_device(ordinal: int) -> Iterator[None]:
    """Make a device current, and restore the previous one afterwards."""
    _call("cuCtxPushCurrent_v2", primary_context(ordinal))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ffi.new("uintptr_t*"))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread calls that would end a graph capture of another thread."""
    mode = ffi.new("int*", lib.CU_STREAM_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", mode)


# --- streams and events -------------------------------------------------------------------------------------


def stream_create() -> int:
    """Create a stream of the current device that does not synchronize with the default stream."""
    out = ffi.new("uintptr_t*")
    _call("cuStreamCreate", out, STREAM_NON_BLOCKING)
    return int(out[0])


def stream_destroy(stream: int) -> None:
    """Destroy a stream; its pending work is finished first."""
    _destroy("cuStreamDestroy_v2", stream)


def _destroy(name: str, handle: int) -> None:
    code = _try(name, handle)
    # At the end of the process the driver may already be shut down.
    if code not in (0, lib.CUDA_ERROR_DEINITIALIZED):
        _fail(name, code)


def is_stream(stream: int) -> bool:
    """Tell whether the driver knows a stream."""
    return _try("cuStreamQuery", stream) != lib.CUDA_ERROR_INVALID_HANDLE


def stream_query(stream: int) -> bool:
    """Tell whether a stream has finished its work."""
    return _query("cuStreamQuery", stream)


def _query(name: str, handle: int) -> bool:
    code = _try(name, handle)
    if code not in (0, lib.CUDA_ERROR_NOT_READY):
        _fail(name, code)
    return code == 0


def stream_wait_event(stream: int, event: int) -> None:
    """Make the later work of a stream wait for an event."""
    _call("cuStreamWaitEvent", stream, event, 0)


def stream_is_capturing(stream: int) -> bool:
    """Tell whether the calls on a stream are being recorded into a graph."""
    out = ffi.new("int*")
    code = _try("cuStreamIsCapturing", stream, out)
    # The legacy default stream's answer while a stream that synchronizes with it is captured.
    if code == lib.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    if code:
        _fail("cuStreamIsCapturing", code)
    return bool(out[0])


def event_create() -> int:
    """Create an event of the current device, without timing."""
    out = ffi.new("uintptr_t*")
    _call("cuEventCreate", out, lib.CU_EVENT_DISABLE_TIMING)
    return int(out[0])


def event_destroy(event: int) -> None:
    """Destroy an event."""
    _destroy("cuEventDestroy_v2", event)


def event_record(event: int, stream: int) -> None:
    """Record an event after the present work of a stream."""
    _call("cuEventRecord", event, stream)


def event_query(event: int) -> bool:
    """Tell whether an event has completed."""
    return _query("cuEventQuery", event)


def order_streams(first: int, then: int) -> None:
    """Make the later work of one stream wait for the present work of another."""
    if first != then:
        event = event_create()
        try:
            event_record(event, first)
            stream_wait_event(then, event)
        finally:
            event_destroy(event)


# --- graphs -------------------------------------------------------------------------------------------------


def stream_begin_capture(stream: int) -> None:
    """Record what is issued on a stream, instead of running it, until `stream_end_capture`."""
    _call("cuStreamBeginCapture_v2", stream, lib.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)


def stream_end_capture(stream: int) -> int:
    """Return the graph of what was recorded; raise if something in between has spoilt the capture."""
    out = ffi.new("uintptr_t*")
    _call("cuStreamEndCapture", stream, out)
    return int(out[0])


def graph_instantiate(graph: int) -> int:
    """Return a graph in the form that can be launched."""
    out = ffi.new("uintptr_t*")
    _call("cuGraphInstantiateWithFlags", out, graph, 0)
    return int(out[0])


def graph_launch(executable: int, stream: int) -> None:
    """Run an instantiated graph on a stream."""
    _call("cuGraphLaunch", executable, stream)


def graph_executable_destroy(executable: int) -> None:
    """Destroy an instantiated graph."""
    _destroy("cuGraphExecDestroy", executable)


def graph_destroy(graph: int) -> None:
    """Destroy a graph."""
    _destroy("cuGraphDestroy", graph)


# --- memory -------------------------------------------------------------------------------------------------


def pointer_device(pointer: int) -> int | None:
    """Return the ordinal of the device that memory belongs to; None for host memory."""
    kind = _pointer_attribute("unsigned int*", lib.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    if kind is None or kind == lib.CU_MEMORYTYPE_HOST:
        return None
    return _pointer_attribute("int*", lib.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)


def _pointer_attribute(ctype: str, attribute: int, pointer: int) -> int | None:
    out = ffi.new(ctype)
    code = _try("cuPointerGetAttribute", int(ffi.cast("uintptr_t", out)), attribute, pointer)
    # Memory that is unknown to the driver.
    if code == lib.CUDA_ERROR_INVALID_VALUE:
        return None
    if code:
        _fail("cuPointerGetAttribute", code)
    return int(out[0])


def memory_available() -> int:
    """Return the bytes of the current device's memory that no process uses."""
    free, total = ffi.new("size_t*"), ffi.new("size_t*")
    _call("cuMemGetInfo_v2", free, total)
    return int(free[0])


def memory_allocate(nbytes: int) -> int:
    """Allocate memory of the current device."""
    out = ffi.new("CUdeviceptr*")
    _call("cuMemAlloc_v2", out, nbytes)
    return int(out[0])


def memory_free(pointer: int) -> None:
    """Free device memory."""
    _destroy("cuMemFree_v2", pointer)


def copy_to_device(pointer: int, host: int, nbytes: int) -> None:
    """Copy host memory to the device, and return when the copy has completed."""
    _call("cuMemcpyHtoD_v2", pointer, host, nbytes)


def copy_to_host(host: int, pointer: int, nbytes: int) -> None:
    """Copy device memory to the host, and return when the copy has completed."""
    _call("cuMemcpyDtoH_v2", host, pointer, nbytes)
