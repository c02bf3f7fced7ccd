"""pynccl.transfer: named tensors from one rank to the others, announced and checked before they move."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import pynccl
from fake_cuda import driver, on_device
from meeting import publish, until
from pynccl import testing, transfer
from pynccl._library import cuda
from ranks import on_ranks

Tensors = dict[str, Any]


def shared(rank: int, nranks: int, folder: str, timeout: float | None = 20) -> pynccl.Communicator:
    path = Path(folder, "id")
    if rank == 0:
        publish(path, bytes(pynccl.get_unique_id()))
    until(path.exists)
    return pynccl.Communicator(nranks, path.read_bytes(), rank, timeout=timeout)


def numbers(dtype: Any, *shape: int) -> Any:
    return (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(dtype)


def model() -> Tensors:
    """Return tensors of every dtype and of odd shapes."""
    integers = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bool")
    names = (*integers, "float16", "float32", "float64", "complex64")
    tensors = {f"of {name}": numbers(name, 3, 5) for name in names}
    tensors["bf16"] = numbers(ml_dtypes.bfloat16, 4, 4)
    tensors["e4m3"] = numbers(ml_dtypes.float8_e4m3fn, 9)
    tensors |= {
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(3.5),
        "naïve \u2713": numbers("f4", 1),
    }
    read_only = numbers("float32", 8)
    read_only.flags.writeable = False
    return tensors | {"read-only": read_only}


@on_ranks(2, timeout=50)
def test_every_dtype_and_shape(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with shared(rank, nranks, folder) as comm:
        ours = model()
        if rank == 1:
            assert transfer.send_tensors(comm, ours) == sum(array.nbytes for array in ours.values())
            assert transfer.send_tensors(comm, ours, bucket_bytes=1) > 0
            assert transfer.send_tensors(comm, {}) == 0
            return
        into = {name: np.zeros_like(array) for name, array in reversed(ours.items())}
        kept = dict(into)
        found = transfer.recv_tensors(comm, into, root=1)
        assert all(found[name] is kept[name] for name in found) and list(found) == list(ours)
        new = transfer.recv_tensors(comm, root=1)
        for name, array in ours.items():
            for received in (into[name], new[name]):
                assert (received.dtype, received.shape) == (array.dtype, array.shape), name
                assert received.tobytes() == array.tobytes(), name
        assert transfer.recv_tensors(comm, root=1) == {}


@on_ranks(2, timeout=50)
def test_torch_and_numpy(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    network = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).bfloat16()
    with shared(rank, nranks, folder) as comm, torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(rank)
        if rank == 0:
            transfer.send_tensors(comm, dict(network.named_parameters()))
            transfer.send_tensors(comm, network.state_dict())
            transfer.send_tensors(comm, network.state_dict())
            return
        names = list(network.state_dict())
        assert list(transfer.recv_tensors(comm, network.state_dict())) == names
        assert all((parameter == 0).all() for parameter in network.parameters())
        made = transfer.recv_tensors(comm, like=torch.empty(0))
        assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
        on_numpy = transfer.recv_tensors(comm)
        assert {array.dtype for array in on_numpy.values()} == {np.dtype(ml_dtypes.bfloat16)}
        assert on_numpy["0.weight"].shape == (7, 5)


@on_ranks(2, timeout=50, env={"PYNCCL_TRACE_SIZE": "4096"})
def test_many_small_tensors(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with shared(rank, nranks, folder) as comm:
        tensors = {f"layer.{i}": np.full(17, i * (rank == 0), np.float32) for i in range(3000)}
        if rank == 0:
            transfer.send_tensors(comm, tensors)
        else:
            transfer.recv_tensors(comm, tensors)
            assert all((tensors[f"layer.{i}"] == i).all() for i in range(3000))
        # The announcement, and 3000 tensors in three plans.
        moves = [record for record in comm.trace() if record.call == "broadcast" and record.plan]
        assert len(moves) == 3000 and len({record.group for record in moves}) == 3


# --- refusals -----------------------------------------------------------------------------------------------


class Unreadable(dict[str, Any]):
    """A mapping that is read from a file whose name is not UTF-8."""

    def items(self) -> Any:
        raise ValueError("a \udcff")


def mismatches() -> list[tuple[Tensors, str]]:
    """Return what rank 1 expects of one float32 `w` of (2, 3), and what all ranks say of it."""
    f4 = np.float32
    x = np.zeros(7, f4)
    return [
        ({"w": np.zeros((3, 2), f4)}, r"'w' is announced as float32 \(2, 3\), expected as float32 \(3, 2\)"),
        ({"w": np.zeros((2, 3))}, r"'w' is announced as float32 \(2, 3\), expected as float64 \(2, 3\)"),
        ({"v": np.zeros((2, 3), f4)}, r"not announced: 'v'; not expected: 'w'"),
        ({f"v{i}": np.zeros(1) for i in range(9)}, r"'v0', 'v1', 'v2', 'v3' and 5 more names"),
        ({"w": np.zeros((2, 6), f4)[:, ::2]}, r"into\['w'\] is not contiguous"),
        ({"w": np.zeros((3, 2), f4).T}, r"into\['w'\] is in Fortran order; expected C order"),
        ({"w": np.broadcast_to(np.zeros((2, 3), f4), (2, 3))}, r"into\['w'\] is read-only"),
        ({"w": torch.zeros(2, 3, requires_grad=True)}, r"into\['w'\] requires grad"),
        ({"w": [1, 2]}, r"into\['w'\] is of type list"),
        ({1: np.zeros(1)}, r"into\[1\] has the name 1; expected a str"),
        ([np.zeros(1)], r"into is of type list; expected a mapping"),
        ({"w": x[:6].reshape(2, 3), "v": x[1:7]}, r"into\['v'\] overlaps into\['w'\] in memory"),
        (Unreadable(), "a .*"),
    ]


def either(comm: pynccl.Communicator, tensors: Any, *, senders: Any = (0,), **options: Any) -> Any:
    """Send on these ranks, receive on the others; options are for the ranks whose call takes them."""
    if comm.rank in senders:
        of_sender = {name: options[name] for name in options if name == "bucket_bytes"}
        return transfer.send_tensors(comm, tensors, **of_sender)
    return transfer.recv_tensors(comm, **{name: options[name] for name in options if name != "bucket_bytes"})


@on_ranks(2, timeout=50)
def test_names_that_share_an_array(rank: int, nranks: int, tmp_path: Path) -> None:
    """Receive into one array under two names, from one array and from two."""
    folder = str(tmp_path)
    one = np.full(3, rank + 1.0)
    with shared(rank, nranks, folder) as comm:
        either(comm, {"v": one, "w": one}, into={"v": one, "w": one})
        assert (one == 1).all()
        either(comm, {"v": one, "w": one}, into={"v": np.zeros(3), "w": np.zeros(3)})
        with pytest.raises(pynccl.CollectiveMismatchError, match="'w' and 'v' are announced as two tensors"):
            either(comm, {"v": one, "w": np.zeros(3)}, into={"v": one, "w": one})
        with pytest.raises(pynccl.NcclInvalidUsage, match=r"tensors inside pynccl.group\(\)"), pynccl.group():
            either(comm, {"v": one}, into={"v": one})
        comm.barrier()


@on_ranks(3, timeout=50)
def test_what_is_refused(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    untouched = np.full((2, 3), 7, np.float32)
    ones = {"w": np.ones((2, 3), np.float32)}
    wrong = (pynccl.CollectiveMismatchError, TypeError, ValueError)
    with shared(rank, nranks, folder) as comm:
        for expected, says in mismatches():
            with pytest.raises(wrong, match=says) as caught:
                either(comm, ones, into=expected if rank == 1 else {"w": untouched})
            if rank != 1:
                assert type(caught.value) is pynccl.CollectiveMismatchError
                assert str(caught.value).startswith("no tensors were sent; rank 1: ")
        assert (untouched == 7).all()
        for tensors, options, says in (
            ({"w": np.ones((4, 4))[:, ::2]}, {}, r"tensors\['w'\] is not contiguous"),
            ({"w": np.ones((4, 4)).T}, {}, r"tensors\['w'\] is in Fortran order"),
            ({"w": np.array(["text"])}, {}, r"tensors\['w'\] has dtype str"),
            ({"w": torch.ones(2, requires_grad=True)}, {}, r"tensors\['w'\] requires grad; .* state_dict"),
            (None, {}, "tensors is of type NoneType; expected a mapping"),
            (
                torch.nn.Linear(1, 1),
                {},
                r"is of type Linear; expected a mapping .*, such as its \.state_dict",
            ),
            (ones, {"bucket_bytes": 0}, "bucket_bytes is 0; expected a positive number of bytes"),
        ):
            with pytest.raises(wrong, match=says) as caught:
                either(comm, tensors, **options)
            assert (type(caught.value) is pynccl.CollectiveMismatchError) == (rank != 0)
        with pytest.raises(wrong, match="like is of type str; expected a NumPy or CuPy array"):
            either(comm, ones, like="numpy")
        with pytest.raises(pynccl.CollectiveMismatchError, match=r"ranks \[0, 1\] call send_tensors"):
            either(comm, ones, senders=(0, 1), root=1)
        with pytest.raises(pynccl.CollectiveMismatchError, match="no rank calls send_tensors, .* root 0, 1"):
            transfer.recv_tensors(comm, root=rank % 2)
        for root in (9, -1, "0"):
            with pytest.raises(wrong, match="root is .*; expected a rank from 0 to") as caught:
                either(comm, ones, root=root if rank == 1 else 0)
            if rank != 1:
                assert str(caught.value).startswith("no tensors were sent; rank 1: ")
        # And it still works.
        either(comm, ones, senders=(2,), into={"w": untouched}, root=2)
        assert (untouched == (7 if rank == 2 else 1)).all()


@on_ranks(2, timeout=50)
def test_an_announcement_without_memory(rank: int, nranks: int, tmp_path: Path) -> None:
    """Announce more than rank 1 has memory for."""
    folder = str(tmp_path)
    with shared(rank, nranks, folder) as comm:
        either(comm, {"x": np.ones(1)}, into={"x": np.ones(1)})
        if rank == 1:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20), -1))
        with pytest.raises(MemoryError if rank == 1 else pynccl.CollectiveMismatchError):
            either(comm, {"n" * (rank == 0) * (30 << 20): np.ones(1)})
        comm.barrier()


@on_ranks(1, timeout=50)
def test_alone(rank: int, nranks: int) -> None:
    with pytest.raises(TypeError, match="comm is 'comm'; expected a pynccl.Communicator"):
        transfer.send_tensors("comm", {})  # type: ignore[arg-type]
    comm = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
    with comm, pytest.raises(ValueError, match="one rank; expected a sender and at least one receiver"):
        transfer.recv_tensors(comm)


# --- a death ------------------------------------------------------------------------------------------------


def dying(rank: int, nranks: int, folder: str, victim: int, timeout: float | None) -> Any:
    """Kill a rank as soon as rank 1 has some of the tensors; return what the other one sees."""
    comm = shared(rank, nranks, folder, timeout)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    tensors = {f"t{i}": np.full(1 << 18, 1 - rank, np.float32) for i in range(96)}

    def kill() -> None:
        while not tensors["t1"][-1]:
            time.sleep(0)
        os.kill(int(Path(folder, f"pid-{victim}").read_text()), signal.SIGKILL)

    comm.barrier()
    if rank == 1:
        threading.Thread(target=kill, daemon=True).start()
    try:
        if rank == 0:
            transfer.send_tensors(comm, tensors, bucket_bytes=1 << 20)
        else:
            transfer.recv_tensors(comm, tensors)
        # All may have been moved before the victim is killed.
        if rank == victim:
            time.sleep(40)
        comm.barrier()
    except pynccl.NcclError as error:
        comm.abort()
        return type(error).__name__, getattr(error, "ranks", None)
    return "nothing"


@pytest.mark.parametrize("victim", [0, 1], ids=["sender", "receiver"])
def test_a_death_in_the_middle(victim: int, tmp_path: Path) -> None:
    start = time.monotonic()
    results = testing.run(2, dying, str(tmp_path), victim, 15, backend="cpu", timeout=50, check=False)
    assert isinstance(results[victim], testing.RankError)
    assert results[1 - victim] == ("RankFailedError", [victim])
    assert time.monotonic() - start < 30


# --- devices ------------------------------------------------------------------------------------------------


def on_devices(rank: int, nranks: int) -> None:
    """Make calls that do not match; the fake libnccl moves no more than the numbers by which they differ."""
    cuda.set_device(rank)
    comm = pynccl.Communicator(nranks, bytes([7]) * 128, rank)
    with (
        comm,
        pytest.raises(pynccl.CollectiveMismatchError, match=r"ranks \[0, 1\] call send_tensors, and no rank"),
    ):
        transfer.send_tensors(comm, {"w": on_device(rank)})
    log = driver().fake_cuda_log().decode().splitlines()
    made, freed = (sum(line.startswith(name) for line in log) for name in ("cuMemAlloc", "cuMemFree"))
    assert made == freed == 2, log
    assert cuda.current_device() == rank


@pytest.mark.slow
def test_over_the_fake_driver(fake_gpus: dict[str, str], tmp_path: Path) -> None:
    env = fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)}
    testing.run(2, on_devices, env=env, timeout=50)
