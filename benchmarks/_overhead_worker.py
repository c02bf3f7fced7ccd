"""The process that measures every binding, on the same CuPy arrays, over the null library it began with.

Reads its options as JSON from the command line, writes what it measured as JSON to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import timeit
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np

from _overhead_cases import CASES, COUNT, DRIVER_CASES, Case
from _overhead_ctypes import Communicator as CtypesCommunicator
from _overhead_ctypes import Library as CtypesLibrary
from _overhead_library import RANKS, Counter


def device_array() -> Any:
    """Return a CuPy array over host memory, which it takes for device 0's."""
    import cupy

    host = np.ones(COUNT, np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))


def arrays(names: dict[str, Any]) -> None:
    import cupy

    a, b = device_array(), device_array()
    names |= {"a": a, "b": b, "p": a.data.ptr, "q": b.data.ptr, "n": a.size}
    names |= {"stream": cupy.cuda.Stream.null}


def pynccl(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    import pynccl

    info = pynccl.library_info()
    assert info.path == names["library"], f"pynccl took {info.path}, not {names['library']}"
    os.environ["PYNCCL_TRACE_SIZE"] = "0"
    comm = pynccl.Communicator(RANKS, bytes(128), 0)
    del os.environ["PYNCCL_TRACE_SIZE"]
    assert not comm.trace()
    stack.callback(comm.destroy)
    op = comm.prepare.all_reduce(names["a"])
    plan = pynccl.Plan([op] * 1000)
    names |= {"pynccl": pynccl, "comm": comm, "op": op, "plan": plan}
    return {"pynccl": pynccl.__version__, "how pynccl found the library": info.how}


def recorder(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    import pynccl

    comm = pynccl.Communicator(RANKS, bytes(128), 0)
    assert [record.call for record in comm.trace()] == ["init"]
    stack.callback(comm.destroy)
    op = comm.prepare.all_reduce(names["a"])
    names |= {"pynccl": pynccl, "traced": comm, "traced_op": op, "traced_plan": pynccl.Plan([op] * 1000)}
    return {}


def cffi(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    from pynccl import capi
    from pynccl._library.binding import lib

    names |= {"lib": lib, "handle": capi.ncclCommInitRank(RANKS, bytes(128), 0)}
    stack.callback(capi.ncclCommDestroy, names["handle"])
    return {"cffi": version("cffi")}


def compat(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    from pynccl.compat import cupy

    names |= {"compat_comm": cupy.NcclCommunicator(RANKS, bytes(128), 0)}
    stack.callback(names["compat_comm"].destroy)
    return {}


def cupy(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    from cupy import __version__
    from cupy.cuda import nccl

    comm = nccl.NcclCommunicator(RANKS, bytes(128), 0)
    stack.callback(comm.destroy)
    names |= {"nccl": nccl, "cupy_comm": comm}
    return {"cupy": __version__}


def cupyx(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    from cupy.cuda import nccl
    from cupyx.distributed import NCCLBackend

    # Its constructor starts a store and a process for it; a call needs no more than this.
    backend = NCCLBackend.__new__(NCCLBackend)
    backend._comm = nccl.NcclCommunicator(RANKS, bytes(128), 0)
    backend.rank, backend._n_devices, backend._use_mpi = 0, RANKS, False
    stack.callback(backend._comm.destroy)
    names |= {"cupyx_comm": backend}
    return {}


def nccl4py(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    import nccl.core
    from nccl.bindings import nccl as bindings

    comm = nccl.core.Communicator.init(RANKS, 0, nccl.core.get_unique_id())
    stack.callback(comm.destroy)
    # The one thing that asks the driver: the communicator's device, found once and kept in this attribute.
    comm._device = SimpleNamespace(device_id=0)
    names |= {"n4_comm": comm, "n4_sum": nccl.core.SUM, "n4": bindings, "n4_handle": comm._comm}
    return {"nccl4py": version("nccl4py"), "cuda.core": version("cuda-core")}


def ctypes_wrapper(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    comm = CtypesCommunicator(CtypesLibrary(names["library"]), RANKS, 0, 0)
    stack.callback(comm.destroy)
    names |= {"ctypes_comm": comm}
    return {}


def the_library(names: dict[str, Any], stack: ExitStack) -> dict[str, str]:
    return {}


SETUPS: Mapping[str, Callable[[dict[str, Any], ExitStack], dict[str, str]]] = {
    "library": the_library,
    "cffi": cffi,
    "pynccl": pynccl,
    "recorder": recorder,
    "compat": compat,
    "cupy": cupy,
    "cupyx": cupyx,
    "nccl4py": nccl4py,
    "ctypes": ctypes_wrapper,
}


@dataclass
class Measured:
    """One case with its timer, how often it runs in a sample, and its samples in ns per call."""

    case: Case
    timer: timeit.Timer
    number: int
    samples: list[float]


class Bench:
    """Samples of every case, interleaved, with the library's own count of the calls checked each time."""

    def __init__(self, cases: list[Case], names: dict[str, Any], seconds: float) -> None:
        self._counter: Counter = names["counter"]
        self._measured = [self._prepare(case, names, seconds) for case in cases]

    def _prepare(self, case: Case, names: dict[str, Any], seconds: float) -> Measured:
        timer = timeit.Timer(case.statement, globals=names)
        self._sample(case, timer, 1)
        number = 1
        while (took := self._sample(case, timer, number)) < seconds / 4:
            number *= 2
        return Measured(case, timer, max(1, round(number * seconds / took)), [])

    def _sample(self, case: Case, timer: timeit.Timer, number: int) -> float:
        before = {function: self._counter(function) for function in case.functions}
        seconds = timer.timeit(number)
        for function, each in case.functions.items():
            found = self._counter(function) - before[function]
            if found != each * number:
                raise AssertionError(
                    f"{case.name}: {function} was called {found} times in {number} runs of "
                    f"{case.statement!r}; expected {each * number}"
                )
        return seconds

    def run(self, reps: int) -> list[Measured]:
        """Measure every case in every repetition; who goes first rotates."""
        for rep in range(reps):
            turn = rep % len(self._measured)
            for one in self._measured[turn:] + self._measured[:turn]:
                seconds = self._sample(one.case, one.timer, one.number)
                one.samples.append(seconds / one.number / one.case.calls * 1e9)
        return self._measured


def take_null_for_current(null: Any) -> None:
    """Name CuPy's current stream in its place: it would ask CUDA's runtime, and that a real driver."""
    import cupy

    from pynccl._library import cuda

    cupy.cuda.get_current_stream = cupy.cuda.stream.get_current_stream = lambda: null
    assert cuda.available(), cuda.why_unavailable()


def main() -> None:
    """Measure the chosen cases."""
    options = json.loads(sys.argv[1])
    cases = [case for case in (DRIVER_CASES if options["driver"] else CASES) if case.name in options["cases"]]
    counter = Counter(options["library"])
    names: dict[str, Any] = {"library": options["library"], "counter": counter}
    names |= {"repeat": counter.repeat, "read_clock": counter.read_clock}
    versions: dict[str, str] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arrays(names)
        if options["driver"]:
            take_null_for_current(names["stream"])
        for setup in dict.fromkeys(case.setup for case in cases):
            versions |= SETUPS[setup](names, stack)
        measured = Bench(cases, names, options["seconds"]).run(options["reps"])
    found = [
        {"name": one.case.name, "number": one.number, "ns": one.samples, "counted": one.case.functions}
        for one in measured
    ]
    json.dump({"versions": versions, "cases": found}, sys.stdout)


if __name__ == "__main__":
    main()
