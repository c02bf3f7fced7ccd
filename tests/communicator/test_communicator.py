"""The communicator on the CPU library, in real processes: names, refusals, waiting, and its end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import Run
from meeting import hear, tell, together, until
from pynccl import (
    Communicator,
    NcclError,
    NcclInvalidUsage,
    NcclTimeoutError,
    Plan,
    RedOp,
    capi,
    testing,
)
from pynccl._memory.owner import used_streams
from ranks import on_ranks, single

# --- names ---


class Derived(Communicator):
    @property
    def broken(self) -> Any:
        return self.missing  # type: ignore[attr-defined]


NAMES = {
    "bcast": "broadcast",
    "Allreduce": "all_reduce",
    "allReduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "Get_rank": "rank",
    "world_size": "size",
    "isend": r"send\(\.\.\., wait=False\), or `with pynccl.group\(\):` for sends and receives .*",
    "Irecv": r"recv\(\.\.\., wait=False\), or `with pynccl.group\(\):` for sends and receives .*",
    "Iallreduce": r"all_reduce\(\.\.\., wait=False\)",
    "Ibcast": r"broadcast\(\.\.\., wait=False\)",
    "close": "destroy",
    "Dup": r"split\(0\)",
    "Free": "destroy",
    "device_id": "device",
    "new_group": "split",
    "group": r"pynccl\.group\(\)",
    "group_start": r"pynccl\.group\(\)",
    "Put": "put_signal",
    "Get": r"window\(\.\.\.\)\.peer\(rank\)",
    "Split_type": r"split\(color\), with one color for each node",
    "split_by_node": r"split\(color\), with one color for each node",
    "stop": "destroy",
    "metrics": r"pynccl\.metrics\(\)",
    "ncclAllReduce": "all_reduce",
    "timeout": r"pynccl\.init\(timeout=\.\.\.\)",
    "wait": "synchronize, or wait_event of a stream",
}
CALLED = "; pynccl's name is __call__: write op()"
OTHERS = {
    "Work": {
        "result": "; pynccl's name is wait",
        "is_completed": "; pynccl's name is done",
        "Test": "; pynccl's name is done",
        "get_future": "; pynccl's name is __await__: write await work",
        "synchronize": "; pynccl's name is wait",
    },
    "Prepared": {"Start": CALLED, "wait": "; pynccl's name is __call__: write op(wait=False).wait()"},
    "Plan": {"replay": CALLED},
    "Window": {
        "Put": "; pynccl's name is pynccl.Communicator.put_signal",
        "Get": "; pynccl's name is peer(rank)",
        "Free": "; pynccl's name is close",
    },
    "Stream": {
        "ptr": "; pynccl's name is handle",
        "record_event": "; pynccl's name is pynccl.Event().record(stream)",
        "wait_stream": "; pynccl's name is wait_event(event), after event.record(stream)",
        "done": "; pynccl's name is query",
        "priority": "",
    },
    "Event": {
        "cuda_event": "; pynccl's name is handle",
        "wait": "; pynccl's name is synchronize, or wait_event of a stream",
        "__array__": "",
    },
}


@on_ranks(1)
def test_names_of_other_libraries(rank: int, nranks: int) -> None:
    with single() as comm:
        for name, ours in NAMES.items():
            with pytest.raises(AttributeError, match=rf"no attribute '{name}'; pynccl's name is {ours}$"):
                getattr(comm, name)
        with pytest.raises(
            AttributeError, match=r"comm\.prepare has no barrier: expected an operation on ar"
        ):
            comm.prepare.barrier  # type: ignore[attr-defined]  # noqa: B018
        work = comm.all_reduce(np.ones(1), wait=False)
        work.wait()
        call = comm.prepare.all_reduce(np.ones(1))
        with comm.window(pynccl.empty(1)) as window, pynccl.Stream() as stream, pynccl.Event() as event:
            for owner in (work, call, pynccl.Plan([call]), window, stream, event):
                kind = type(owner).__name__
                for name, ours in OTHERS[kind].items():
                    text = f"{kind!r} object has no attribute {name!r}{ours}"
                    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
                        getattr(owner, name)
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
            comm.nonsense  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match="no attribute 'allreduce'; pynccl's name is all_reduce$"):
            comm.prepare.allreduce  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match="no attribute 'timeout'"):
            comm.timeout = 3  # type: ignore[attr-defined]
    missing = pytest.raises(AttributeError, match="'Derived' object has no attribute 'missing'$")
    with Derived(1, pynccl.get_unique_id(), 0) as derived, missing:
        derived.broken  # noqa: B018


# --- streams and waiting ---


@on_ranks(2)
def test_explicit_streams_return_at_once(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        stream, other = capi.pyncclCpuStreamCreate(), capi.pyncclCpuStreamCreate()
        data = np.full(1000, rank + 1, np.int64)
        comm.barrier()
        if rank == 1:
            hear("time out")
        comm.all_reduce(data, stream=stream)
        comm.synchronize(other)
        if rank == 0:
            with pytest.raises(
                NcclTimeoutError, match="synchronize did not complete on stream .* within 0.1 s"
            ):
                comm.synchronize(stream, timeout=0.1)
            tell("time out")
        comm.synchronize()
        assert (data == 3).all()


@on_ranks(3)
def test_a_wait_without_a_channel_names_late_ranks(rank: int, nranks: int) -> None:
    with pynccl.init() as comm, pynccl.Stream() as stream:
        comm.barrier()
        if rank == 1:
            hear("time out")
        data = np.ones(4)
        comm.all_reduce(data, stream=stream)
        if rank == 0:
            with pytest.raises(NcclTimeoutError, match=r"within 0.5 s .*; it waits for rank 1$"):
                comm.synchronize(stream, timeout=0.5)
            tell("time out")
        comm.synchronize(stream)
        assert (data == 3).all()


@on_ranks(2)
def test_arrays_are_kept_until_the_stream_is_done(rank: int, nranks: int) -> None:
    import weakref

    class Array(np.ndarray[Any, Any]):
        pass

    with pynccl.init(timeout=30) as comm:
        data = np.zeros(1000).view(Array)
        gone = weakref.ref(data)
        stream = capi.pyncclCpuStreamCreate()
        comm.barrier()
        time.sleep(0.5 * rank)
        comm.all_reduce(data, stream=stream)
        del data
        assert gone() is not None
        comm.synchronize(stream)
        assert gone() is None
        for _ in range(300):
            comm.all_reduce(np.zeros(10), stream=stream)
        comm.synchronize(stream)
        for _ in range(300):
            comm.all_reduce(np.zeros(10), stream=stream)
            time.sleep(0.0005)
        # However far one rank is ahead of the other, what is done is let go in batches.
        comm.barrier()
        time.sleep(0.2)
        for _ in range(130):
            comm.all_reduce(np.zeros(10), stream=stream)
        assert len(comm._core.in_flight[stream]) < 330
        comm.synchronize()
        assert not comm._core.in_flight
        assert not used_streams(comm._core.c)


def barrier_times(rank: int, nranks: int) -> tuple[float, float]:
    with pynccl.init(timeout=30) as comm:
        comm.barrier()
        time.sleep(0.3 * rank)
        reached = time.monotonic()
        comm.barrier()
        return reached, time.monotonic()


def test_barrier() -> None:
    times = testing.run(3, barrier_times, backend="cpu")
    assert min(left for _, left in times) >= max(reached for reached, _ in times)


def two_calls_in_a_group(comm: Communicator) -> None:
    with pynccl.group():
        comm.all_reduce(np.zeros(4))
        comm.all_reduce(np.zeros(4))


@on_ranks(2)
def test_timeout_of_a_wait(rank: int, nranks: int) -> None:
    """For a call, a group and a plan."""
    for what, words, call in (
        ("call", "ncclAllReduce", lambda comm: comm.all_reduce(np.zeros(10))),
        ("group", "a group of 2 calls", two_calls_in_a_group),
        ("plan", "a group of 2 calls", lambda comm: Plan([comm.prepare.all_reduce(np.zeros(4))] * 2)()),
    ):
        together(nranks, what)
        comm = pynccl.init(timeout=3)
        if rank == 0:
            start = time.monotonic()
            text = f"^{words} did not complete .*within 3 s .*rank 0 of 2"
            with pytest.raises(NcclTimeoutError, match=text):
                call(comm)
            assert 2.9 < time.monotonic() - start < 15
            tell(f"{what} timed out")
        else:
            hear(f"{what} timed out")
        comm.abort()


@on_ranks(1)
def test_timeout_of_creation(rank: int, nranks: int) -> None:
    # In the words of NVIDIA's NCCL, or of the CPU library.
    for create, place, words in (
        (Communicator, 0, "longer than 1 s; expected all 2 ranks|after 1 s: 1 of 2 ranks .*missing rank 1; "),
        (Communicator.join, 1, "(longer than|after) 1 s"),
    ):
        start = time.monotonic()
        with pytest.raises(NcclTimeoutError, match=words):
            create(2, pynccl.get_unique_id(), place, timeout=1)
        assert time.monotonic() - start < 15


@on_ranks(3)
def test_a_rank_never_comes_to_a_creation_by_unique_id(rank: int, nranks: int, tmp_path: Path) -> None:
    """The shortest time-out ends the creation on all ranks."""
    path = str(tmp_path)
    if rank == 2:
        return
    if rank == 0:
        Path(path, "new").write_bytes(bytes(pynccl.get_unique_id()))
        Path(path, "new").rename(Path(path, "id"))
    until(Path(path, "id").exists)
    start = time.monotonic()
    with pytest.raises(NcclTimeoutError, match=r"after 3 s: 2 of 3 ranks joined, missing rank 2; "):
        Communicator(3, Path(path, "id").read_bytes(), rank, timeout=3 + 20 * rank)
    assert time.monotonic() - start < 15


def test_ctrl_c_during_creation(run_python: Run) -> None:
    interrupt = "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()"
    create = "pynccl.Communicator(2, pynccl.get_unique_id(), 0)"
    code = f"import os, signal, threading, pynccl\n{interrupt}\n{create}"
    done = run_python(code, fails=True, PYNCCL_LIBRARY="cpu")
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode == -signal.SIGINT


# --- refusals ---


@on_ranks(2)
def test_wrong_arguments_that_are_long(rank: int, nranks: int) -> None:
    """Python prints no int of more than 4,300 digits, and a message is no place for a megabyte."""
    with pynccl.init(timeout=30) as comm:
        x = np.zeros(4, np.float32)
        for huge in (10**5000, "a" * 10**6):
            for wrong in (
                lambda huge=huge: comm.broadcast(x, root=huge),
                lambda huge=huge: comm.split(huge),
                lambda huge=huge: comm.all_reduce(x, op=huge),
                lambda huge=huge: comm.pre_mul_sum(huge) if isinstance(huge, str) else comm.split(0, huge),
            ):
                with pytest.raises(
                    (TypeError, ValueError), match="^(root|color|op|factor|key) is .*; expected"
                ) as found:
                    wrong()
                assert len(str(found.value)) < 600
        with pytest.raises(TypeError, match="^timeout is 'a{199}; expected"):
            comm.barrier(timeout="a" * 10**6)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"; write timeout.total_seconds\(\)"):
            comm.synchronize(timeout=timedelta(seconds=3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((0, bytes(128), 0), {}, ValueError, "nranks is 0; expected an int, 1 <= nranks < 2\\*\\*31"),
        ((1 << 31, bytes(128), 0), {}, ValueError, "nranks is 2147483648; expected an int, 1 <= nranks"),
        ((np.array([1, 2]), bytes(128), 0), {}, TypeError, r"nranks is array\(\[1, 2\]\); expected an int"),
        ((1, np.array(1), 0), {}, TypeError, r"unique_id is array\(1\); expected a UniqueId"),
        ((2, bytes(128), 2), {}, ValueError, "rank is 2 and nranks 2; expected 0 <= rank < nranks"),
        ((2, bytes(128), -1), {}, ValueError, "rank is -1"),
        ((1, bytes(127), 0), {}, ValueError, "unique_id has 127 bytes; expected the 128 of"),
        ((1, [], 0), {}, ValueError, "unique_id is an empty sequence"),
        ((1, "id", 0), {}, TypeError, "unique_id is of type str; expected a UniqueId or its 128 bytes"),
        ((1, None, 0), {}, TypeError, "unique_id is of type NoneType; expected a UniqueId"),
        ((1, [bytes(128), b"id"], 0), {}, ValueError, r"unique_id\[1\] has 2 bytes; expected the 128"),
        ((1, bytes(128), 0), {"timeout": 0}, ValueError, "timeout is 0; expected a positive number"),
        ((1, bytes(128), 0), {"timeout": -1.5}, ValueError, "timeout is -1.5"),
        ((1, bytes(128), 0), {"timeout": RedOp.MAX}, TypeError, "timeout is <RedOp.MAX: 2>; expected"),
    ],
)
def test_wrong_creation(args: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Communicator(*args, **options)


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        (None, TypeError, "devices is None; expected a number of devices from 1 to "),
        (1.0, TypeError, "devices is 1.0"),
        ("12", TypeError, "devices is '12'"),
        ({0, 1}, TypeError, r"devices is \{0, 1\}"),
        (True, TypeError, "devices is True"),
        (False, TypeError, "devices is False"),
        (-1, ValueError, "devices is -1; expected a number of devices from 1 to "),
        ([], ValueError, r"devices is \[\]"),
        (0, ValueError, "devices is 0"),
        (1 << 31, ValueError, "devices is 2147483648"),
        ([0, 1.5], TypeError, r"devices\[1\] is 1.5; expected an ordinal"),
        ([1 << 31], ValueError, r"devices\[0\] is 2147483648; expected an ordinal"),
    ],
)
def test_wrong_devices_of_init_all(devices: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pynccl.init_all(devices)


@on_ranks(1)
def test_integers_that_c_cannot_have(rank: int, nranks: int) -> None:
    comm, x = pynccl.init(timeout=30), pynccl.zeros(4, np.float32)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: comm.grow(1 << 31), ValueError, "nranks is 2147483648; expected more than the present"),
        (
            lambda: Communicator(1, bytes(128), 0, device=1 << 31),
            ValueError,
            "device is 2147483648; expected an int",
        ),
        (lambda: comm.grow(10**30), ValueError, "nranks is 10{30}; expected more than the present"),
        (lambda: comm.shrink(exclude=np.array(1)), TypeError, r"exclude is array\(1\); expected a list"),  # type: ignore[arg-type]
        (lambda: Communicator.from_handle(10**30), ValueError, "handle is 10{30}; expected an ncclComm_t"),
        (lambda: comm.all_gather_v(x, x, {4}), TypeError, r"counts is \{4\}; expected a sequence"),  # type: ignore[arg-type]
        (lambda: comm.broadcast(np.float32(1)), TypeError, "send is .*1.0.*, a number; expected an array"),
        (lambda: comm.register(np.float32(1)), TypeError, "array is .*1.0.*, a number; expected an array"),
    ]
    with comm.window(x) as window:
        wrong = np.array([0, 1])
        calls += [
            (
                lambda: comm.signal(0, signal=wrong),
                TypeError,
                r"signal is array\(\[0, 1\]\); expected",
            ),  # type: ignore[arg-type]
            (lambda: comm.put_signal(x, 0, window, offset=wrong), TypeError, "offset is array"),  # type: ignore[arg-type]
        ]
        for call, error, words in calls:
            with pytest.raises(error, match=words):
                call()
    comm.destroy()


# --- life and death ---


@on_ranks(1)
def test_life(rank: int, nranks: int) -> None:
    comm = single()
    assert repr(comm) == "<pynccl.Communicator rank 0 of 1 on device 0>"
    assert comm.handle != 0
    factor = comm.pre_mul_sum(2.0)
    with pynccl.Stream() as stream, pynccl.Event() as event:
        call = comm.prepare.all_reduce(np.ones(1))
        group, plan = pynccl.group(), pynccl.Plan([call])
        for one in (comm, factor, stream, event, comm.barrier(wait=False), group, call, plan):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(
                    TypeError, match=f"pynccl.{type(one).__name__} cannot be copied or pickled"
                ):
                    copied(one)
    comm.finalize()
    comm.destroy()
    comm.destroy()
    comm.abort()
    assert comm.closed
    assert "closed" in repr(comm)
    assert (comm.rank, comm.size) == (0, 1)
    for call in (
        lambda: comm.all_reduce(np.zeros(1)),
        lambda: comm.broadcast(np.zeros(1)),
        comm.barrier,
        comm.synchronize,
        comm.finalize,
        comm.async_error,
        comm.__enter__,
        lambda: comm.handle,
    ):
        with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
            call()
    aborted = single()
    aborted.abort()
    aborted.destroy()
    with pytest.raises(NcclInvalidUsage, match="cannot be used: it was aborted"):
        aborted.barrier()


@on_ranks(1)
def test_context_manager(rank: int, nranks: int) -> None:
    with single() as comm:
        comm.barrier()
    assert comm.closed
    assert comm._core.why == "it was destroyed"
    with pytest.raises(KeyError), single() as comm:
        raise KeyError
    assert comm.closed
    assert comm._core.why == "it was aborted"
    with single() as comm:
        comm.abort()
    assert comm.closed


def one_rank_leaves_the_body(rank: int, nranks: int) -> str:
    try:
        with pynccl.init(timeout=30) as comm:
            comm.barrier()
            if rank == 1:
                raise KeyError
            comm.all_reduce(np.zeros(4))
    except KeyError:
        return "KeyError"
    except NcclError as error:
        return type(error).__mro__[-5].__name__ if isinstance(error, NcclTimeoutError) else "NcclError"
    return "nothing"


def test_an_exception_on_one_rank_does_not_hang_the_others() -> None:
    assert testing.run(2, one_rank_leaves_the_body, backend="cpu", timeout=30) == ["NcclError", "KeyError"]


@on_ranks(2)
def test_from_handle(rank: int, nranks: int) -> None:
    owner = pynccl.init(timeout=30)
    comm = Communicator.from_handle(owner.handle)
    assert (comm.rank, comm.size, comm.device, comm.handle) == (rank, nranks, rank, owner.handle)
    assert (comm.all_reduce(np.ones(3)) == nranks).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.destroy()
        assert comm.closed
        with Communicator.from_handle(owner.handle) as other:
            other.barrier()
        other = Communicator.from_handle(owner.handle)
        del other
        gc.collect()
    assert (owner.all_reduce(np.ones(3)) == nranks).all()
    owner.destroy()
    with pytest.raises(NcclError):
        Communicator.from_handle(0x1234560)


@on_ranks(3)
def test_several_ids(rank: int, nranks: int) -> None:
    from pynccl.bootstrap import Store

    with Store(os.environ["PYNCCL_STORE"]) as store:
        if rank < 2:
            store.set(f"id{rank}", bytes(pynccl.get_unique_id()))
        ids = [store.get("id0"), store.get("id1")]
    with Communicator(nranks, ids, rank, timeout=30) as comm:
        assert (comm.all_reduce(np.ones(3)) == nranks).all()
