"""Registrations: counted, kept, closed in the right order, and refused where NCCL cannot make them."""

from __future__ import annotations

import gc
import inspect
import os
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import pynccl
from arrays import torch_over
from meeting import hear, tell
from pynccl import NcclInvalidArgument, NcclInvalidUsage, NcclTimeoutError, Registration, capi
from ranks import on_ranks


def line() -> str:
    """Return the file and number of the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno}"


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of the C functions that are called from now on."""
    seen: list[str] = []
    for name in ("ncclCommRegister", "ncclCommDeregister", "ncclCommFinalize", "ncclCommDestroy"):
        function = getattr(capi, name)

        def called(*args: Any, name: str = name, function: Any = function) -> Any:
            seen.append(name.removeprefix("ncclComm"))
            return function(*args)

        monkeypatch.setattr(capi, name, called)
    return seen


@pytest.mark.torch
@on_ranks(1, 2)
def test_register(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        for array in (
            pynccl.zeros(1000, np.float32),
            np.zeros((4, 5)),
            torch_over(np.zeros(10, np.float32)),
            pynccl.Buffer(np.zeros(8).ctypes.data, 8, "float64"),
            bytearray(100),
        ):
            assert not comm.registered(array)
            with comm.register(array) as registration:
                where = line()
                assert comm.registered(array)
                assert registration.array is array
                assert not registration.closed
                number = int(where.rpartition(":")[2]) - 1
                assert "bytes at 0x" in repr(registration)
                assert repr(registration).endswith(f"made at {__file__}:{number}>")
                if isinstance(array, np.ndarray):
                    assert (comm.all_reduce(array) == 0).all()
            assert registration.closed
            assert registration.array is None
            assert repr(registration).endswith(", closed>")
            assert not comm.registered(array)
            registration.close()
            with pytest.raises(NcclInvalidUsage, match="cannot be used: it was closed"):
                registration.__enter__()


@on_ranks(1)
def test_counts(rank: int, nranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pynccl.init(timeout=30) as comm:
        seen = calls(patch)
        array = pynccl.zeros(1000, np.float32)
        whole, again, part = comm.register(array), comm.register(array), comm.register(array[10:20])
        assert seen == ["Register"]
        assert comm.registered(array[990:])
        whole.close()
        again.close()
        assert comm.registered(array)
        part.close()
        part.close()
        assert seen == ["Register", "Deregister"]
        first, second = comm.register(array[:500]), comm.register(array)
        assert seen[2:] == ["Register", "Register"]
        first.close()
        assert comm.registered(array[:500])
        second.close()
        assert not comm.registered(array[:500])
        with comm.register(array):
            assert not comm.registered(array[:0])


@on_ranks(1)
def test_each_communicator_counts_for_itself(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, comm.split(0) as child:
        array = pynccl.zeros(1000, np.float32)
        with comm.register(array):
            assert not child.registered(array)
            with child.register(array):
                pass
            assert comm.registered(array)


@on_ranks(1)
def test_it_keeps_the_memory(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        array = pynccl.zeros(1000, np.float32)
        ptr = array.ctypes.data
        registration, part = comm.register(array), comm.register(array[5:9])
        del array
        registration.close()
        gc.collect()
        # Still registered, by the part; a free would unmap it.
        assert comm.registered(part.array)
        assert not np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 1000).from_address(ptr)).any()
        part.close()
        with pytest.raises(NcclInvalidArgument, match="was freed before"):
            capi.ncclMemFree(ptr)
        moving = bytearray(100)
        with comm.register(moving), pytest.raises(BufferError):
            moving.extend(bytes(1 << 20))
        moving.extend(bytes(1 << 20))


@on_ranks(2)
def test_wrong_arrays(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        wrong: list[tuple[Any, type[Exception], str]] = [
            (np.zeros(0), ValueError, "array has no elements"),
            (np.zeros((4, 4))[:, ::2], ValueError, "array is not contiguous"),
            (np.array(["a"]), TypeError, "array has dtype"),
            (3, TypeError, "array is of type int"),
            (None, TypeError, "array is of type NoneType"),
        ]
        for array, kind, text in wrong:
            with pytest.raises(kind, match=text):
                comm.register(array)
        comm.barrier()


@on_ranks(2)
def test_where_it_is_refused(rank: int, nranks: int) -> None:
    array = pynccl.zeros(100, np.float32)
    with pynccl.init(timeout=30) as comm:
        registration = comm.register(array)
        with pynccl.group():
            with pytest.raises(NcclInvalidUsage, match=r"ncclCommRegister inside pynccl.group\(\)"):
                comm.register(np.zeros(4))
            with pytest.raises(NcclInvalidUsage, match=r"ncclCommDeregister inside pynccl.group\(\)"):
                registration.close()
        assert comm.registered(array)
        capi.ncclGroupStart()
        try:
            with pytest.raises(NcclInvalidUsage, match="ncclCommRegister between ncclGroupStart"):
                comm.register(np.zeros(4))
        finally:
            capi.ncclGroupEnd()
        registration.close()
    for use in (comm.register, comm.registered):
        with pytest.raises(NcclInvalidUsage, match="cannot be used: it was destroyed"):
            use(array)


def left(record: list[warnings.WarningMessage]) -> list[str]:
    """Return the lines of the registrations that the warnings name."""
    found = [str(one.message) for one in record if one.category is ResourceWarning]
    texts = [text for text in found if "registration made at" in text]
    return [text.partition("made at ")[2].removesuffix(" was never closed") for text in texts]


@on_ranks(2)
def test_closing_a_communicator_closes_them(rank: int, nranks: int) -> None:
    for end in ("with", "destroy", "finalize"):
        array = pynccl.zeros(100, np.float32)
        alive = weakref.ref(array)
        with pytest.MonkeyPatch.context() as patch:
            comm = pynccl.init(timeout=30)
            seen = calls(patch)
            registration = comm.register(array)
            where = line().rpartition(":")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if end == "with":
                    with comm:
                        pass
                else:
                    getattr(comm, end)()
                    assert registration.closed
                    comm.destroy()
                    comm.destroy()
            assert left(caught) == [f"{where[0]}:{int(where[2]) - 1}"], end
            assert seen[:2] == ["Register", "Deregister"], end
            assert {"Register", "Deregister"}.isdisjoint(seen[2:]), end
        assert registration.closed
        registration.close()
        del array, registration
        assert alive() is None


@on_ranks(2)
def test_closed_in_time_warns_of_nothing(rank: int, nranks: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pynccl.init(timeout=30) as comm, comm.register(np.zeros(100)):
            comm.barrier()


@on_ranks(2)
def test_abort_closes_them(rank: int, nranks: int) -> None:
    array = pynccl.zeros(100, np.float32)
    alive = weakref.ref(array)
    comm = pynccl.init(timeout=30)
    moving = bytearray(100)
    registration, other = comm.register(array), comm.register(moving)
    comm.abort()
    assert registration.closed
    moving.extend(bytes(1 << 20))
    assert other.closed
    registration.close()
    assert repr(registration).endswith(", closed>")
    del array, registration
    assert alive() is None
    with pytest.raises(KeyError), pynccl.init(timeout=30) as comm, comm.register(np.zeros(10)):
        raise KeyError


@on_ranks(2)
def test_a_rank_that_fails(rank: int, nranks: int) -> None:
    """The program's error comes out of both contexts, and not one of deregistration."""

    def fail() -> None:
        with pynccl.init(timeout=30) as comm, comm.register(pynccl.zeros(100)) as registration:
            made.append(registration)
            if rank:
                comm.abort()
            comm.recv(np.zeros(10), 1 - rank)

    made: list[Registration] = []
    words = "it was aborted" if rank else "rank 1"
    with pytest.raises(pynccl.NcclError, match=words):
        fail()
    assert made[0].closed


@on_ranks(2)
def test_a_communicator_that_was_collected(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=30)
    array = pynccl.zeros(100, np.float32)
    alive = weakref.ref(array)
    comm.register(array)
    where = line().rpartition(":")
    comm.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm, array
        gc.collect()
    assert any("was never destroyed or aborted" in str(one.message) for one in caught)
    assert left(caught) == [f"{where[0]}:{int(where[2]) - 1}"]
    # The library still has the communicator, with this memory.
    assert alive() is not None


@on_ranks(1)
def test_another_owner(rank: int, nranks: int) -> None:
    """What does not own the communicator deregisters, since the communicator lives on."""
    array = pynccl.zeros(100, np.float32)
    with pynccl.init(timeout=30) as comm, pytest.MonkeyPatch.context() as patch:
        seen = calls(patch)
        with pynccl.Communicator.from_handle(comm.handle) as other:
            registration = other.register(array)
        assert seen == ["Register", "Deregister"]
        assert registration.closed
        assert (comm.all_reduce(array) == 0).all()


@on_ranks(2)
def test_another_owner_with_calls_in_flight(rank: int, nranks: int) -> None:
    """An abort of what is borrowed does not wait for long; the memory stays, since calls still use it."""
    array = pynccl.zeros(100, np.float32)
    alive = weakref.ref(array)
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        other = pynccl.Communicator.from_handle(comm.handle)
        other.register(array)
        if rank == 0:
            other.recv(array, 1, stream)
            other.abort()
            del array, other
            gc.collect()
            assert alive() is not None
            tell("aborted")
            comm.synchronize(stream)
        else:
            hear("aborted")
            comm.send(array, 0)
            other.abort()


@on_ranks(1)
def test_a_forked_child(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, comm.register(pynccl.zeros(100)) as registration:
        child = os.fork()
        if not child:
            code = 1
            try:
                registration.close()
                code = 0 if registration.closed else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert comm.registered(registration.array)


@on_ranks(2)
def test_close_waits_for_calls_in_flight(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        array = pynccl.zeros(1 << 16, np.float32)
        registration = comm.register(array)
        if rank == 0:
            comm.recv(array, 1, stream)
            assert not stream.query()
            # The other rank sends after this line.
            tell("closes")
            registration.close()
            assert stream.query()
            assert (array == 5).all()
        else:
            hear("closes")
            array[:] = 5
            comm.send(array, 0)
            registration.close()


@on_ranks(2)
def test_close_that_takes_too_long(rank: int, nranks: int) -> None:
    comm, stream = pynccl.init(timeout=2), pynccl.Stream()
    array = pynccl.zeros(1000, np.float32)
    first, second = comm.register(array), comm.register(array)
    if rank:
        hear("gave up")
    else:
        comm.recv(array, 1, stream)
        second.close()
        with pytest.raises(NcclTimeoutError):
            first.close()
        # The library may still write to the memory.
        assert not first.closed
        assert first.array is array
        tell("gave up")
    comm.abort()
    assert first.closed
    first.close()


@on_ranks(3)
def test_survivors_abort_them(rank: int, nranks: int) -> None:
    comm = pynccl.init(timeout=20)
    array = pynccl.zeros(1000, np.float32)
    registration = comm.register(array)
    comm.barrier()
    if rank == 1:
        comm.abort()
        return
    with pytest.raises(pynccl.NcclError):
        comm.all_reduce(array)
    with comm.shrink([1], abort=True) as rest:
        assert registration.closed
        with rest.register(array):
            array[:] = 1
            assert (rest.all_reduce(array) == 2).all()


@on_ranks(2)
def test_suspend_with_registrations(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        array = pynccl.zeros(1000, np.float32)
        before = comm.memory_stats()
        assert before.total == before.suspend + before.persist > 0
        assert before.suspended is False
        with comm.register(array) as registration:
            comm.suspend()
            assert comm.memory_stats().suspended is True
            assert comm.registered(array)
            with pytest.raises(NcclInvalidUsage):
                comm.all_reduce(array)
            comm.resume()
            assert comm.memory_stats() == before
            array[:] = rank + 1
            assert (comm.all_reduce(array) == 3).all()
            comm.suspend()
            registration.close()
            comm.resume()
        assert not comm.registered(array)
        assert (comm.all_reduce(array) == 6).all()
    with pytest.raises(NcclInvalidUsage, match="it was destroyed"):
        comm.memory_stats()


def test_the_class_says_what_it_is() -> None:
    assert "Communicator.register" in (inspect.getdoc(Registration) or "")


@on_ranks(1)
def test_random_registrations(rank: int, nranks: int) -> None:
    """What is registered, and what is called, as in a model: ranges, each with its number of users."""
    with pytest.MonkeyPatch.context() as patch, pynccl.init(timeout=30) as comm:
        seen = calls(patch)
        random = np.random.default_rng(11)
        array = pynccl.zeros(64, np.uint8)
        model: list[list[int]] = []
        opened: list[tuple[Registration, list[int]]] = []
        made = gone = 0
        for _ in range(2000):
            start = int(random.integers(0, 64))
            stop = int(random.integers(start + 1, 65))
            inside = [one for one in model if one[0] <= start and stop <= one[1]]
            assert comm.registered(array[start:stop]) == bool(inside)
            if random.random() < 0.5:
                if not inside:
                    made += 1
                    model.append([start, stop, 0])
                    inside = [model[-1]]
                inside[0][2] += 1
                opened.append((comm.register(array[start:stop]), inside[0]))
            elif opened:
                registration, used = opened.pop(int(random.integers(len(opened))))
                registration.close()
                used[2] -= 1
                if not used[2]:
                    model.remove(used)
                    gone += 1
            assert (seen.count("Register"), seen.count("Deregister")) == (made, gone)
        for registration, _ in opened:
            registration.close()
        assert seen.count("Register") == seen.count("Deregister") > 50
