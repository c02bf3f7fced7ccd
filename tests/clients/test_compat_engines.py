"""pynccl.compat.vllm and pynccl.compat.sglang: their own classes over ours, and ours in their place."""

from __future__ import annotations

import ctypes
import inspect
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import pynccl
from clients_page import rows
from conftest import ROOT, Run
from engine_files import ENGINES, FILES, Group, Stream, downloaded, imported
from meeting import until
from pynccl import testing
from pynccl.compat import sglang, vllm
from ranks import on_ranks

OURS = {"vllm": vllm, "sglang": sglang}
CPU = torch.device("cpu")
Results = dict[str, Any]
kept: list[torch.Tensor] = []


@pytest.fixture(scope="module")
def files() -> Callable[[str], str]:
    return downloaded


def classes(engine: str, files: str, whose: str) -> tuple[Any, Any]:
    """Return the modules of an engine's communicator and wrapper: theirs, theirs over ours, or ours."""
    if whose == "ours":
        return OURS[engine], OURS[engine]
    return imported(engine, files, OURS[engine] if whose == "over ours" else None)


def meet(rank: int, size: int, engine: str, files: str, whose: str, folder: str) -> Any:
    module, _ = classes(engine, files, whose)
    return module.PyNcclCommunicator(Group(rank, size, folder), CPU, pynccl.cpu_library())


def through(whose: str, nranks: int, program: Callable[..., Any], engine: str, files: str) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        return testing.run(nranks, program, engine, files, whose, folder, backend="cpu", timeout=50)


def done(results: Results, name: str, tensor: torch.Tensor) -> None:
    Stream().synchronize()
    results[name] = tensor.float().numpy().copy()


def mine(rank: int, *shape: int) -> torch.Tensor:
    """Return a tensor of a rank, which lives on: a stream may still read it."""
    kept.append(torch.arange(float(np.prod(shape))).reshape(shape) + 100 * rank)
    return kept[-1]


def common(comm: Any, rank: int, size: int) -> Results:
    """Make the calls that both engines have."""
    results: Results = {}
    assert (comm.rank, comm.world_size, comm.available) == (rank, size, True)
    assert isinstance(comm.comm, ctypes.c_void_p) and len(bytes(comm.unique_id.internal)) == 128
    # Also where nothing has used the stream.
    assert Stream().cuda_stream
    # SGLang's class refuses float8.
    float8 = [torch.float8_e4m3fn] if hasattr(comm, "all_gatherv") else []
    for dtype in (torch.float32, torch.bfloat16, *float8):
        moved = mine(rank, 6).to(dtype)
        comm.group_start()
        comm.send(moved, (rank + 1) % size)
        received = torch.zeros_like(moved)
        comm.recv(received, (rank - 1) % size)
        comm.group_end()
        done(results, f"moved {dtype}", received)
    tensor = mine(rank, 4)
    comm.broadcast(tensor, src=1)
    done(results, "broadcast", tensor)
    gathered = torch.zeros(size * 2, 3)
    comm.all_gather(gathered, mine(rank, 2, 3))
    done(results, "gathered", gathered)
    part = torch.zeros(3)
    comm.reduce_scatter(part, mine(rank, size * 3), ReduceOp.MAX)
    done(results, "part", part)
    memory = comm.nccl.ncclMemAlloc(4096) if hasattr(comm.nccl, "ncclMemAlloc") else None
    block = pynccl.zeros(1024, "float32")
    window = comm.register_comm_window_raw(memory or block.ctypes.data, 4096)
    assert window.value
    comm.deregister_comm_window(window)
    if memory:
        comm.nccl.ncclMemFree(memory)
    results["version"] = comm.nccl.ncclGetRawVersion(), comm.nccl.ncclGetVersion()
    return results


def of_vllm(rank: int, size: int, engine: str, files: str, whose: str, folder: str) -> Results:
    comm = meet(rank, size, engine, files, whose, folder)
    results = common(comm, rank, size)
    sizes = [1, 2, 3][:size]
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG):
        tensor = mine(rank, 5)
        done(results, f"reduced {op}", comm.all_reduce(tensor, op=op))
        assert torch.equal(tensor, mine(rank, 5))
    out = torch.zeros(5)
    assert comm.all_reduce(mine(rank, 5), out) is out
    done(results, "into", out)
    gathered = torch.zeros(sum(sizes), 2)
    comm.all_gatherv(gathered, mine(rank, sizes[rank], 2), sizes)
    done(results, "rows", gathered)
    part = torch.zeros(sizes[rank], 2)
    comm.reduce_scatterv(part, mine(rank, sum(sizes), 2), sizes)
    done(results, "parts", part)
    total = torch.zeros(5)
    comm.reduce(total, mine(rank, 5), root=1)
    done(results, "total", total)
    scattered = torch.zeros(sizes[rank], 2)
    comm.scatter(scattered, mine(rank, sum(sizes), 2), sizes, root=1)
    done(results, "scattered", scattered)
    received = torch.zeros(3)
    peers = (rank + 1) % size, (rank - 1) % size
    ops = [
        SimpleNamespace(op=dist.isend, tensor=mine(rank, 3), group_peer=peers[0]),
        SimpleNamespace(op=dist.irecv, tensor=received, group_peer=peers[1]),
    ]
    comm.batch_isend_irecv(ops)
    done(results, "batch", received)
    comm.deregister_comm_window(comm.register_comm_window(pynccl.zeros(16, like=torch.empty(0))))
    comm.suspend()
    comm.suspend()
    comm.resume()
    done(results, "resumed", comm.all_reduce(mine(rank, 5)))
    comm.group_start()
    first, second = comm.all_reduce(mine(rank, 5)), comm.all_reduce(mine(rank, 3))
    comm.group_end()
    Stream().synchronize()
    done(results, "grouped", torch.cat([first, second]))
    comm.destroy()
    assert (comm.available, comm.disabled) == (False, True)
    return results


def of_sglang(rank: int, size: int, engine: str, files: str, whose: str, folder: str) -> Results:
    comm = meet(rank, size, engine, files, whose, folder)
    assert comm.disabled and comm.outplace_all_reduce(mine(rank, 5)) is None
    sizes = [1, 2, 3][:size]
    with comm.change_state(enable=True):
        results = common(comm, rank, size)
        tensor = mine(rank, 5)
        comm.all_reduce(tensor, ReduceOp.SUM)
        done(results, "reduced", tensor)
        done(results, "out of place", comm.outplace_all_reduce(mine(rank, 5), op=ReduceOp.MIN))
        gathered = torch.zeros(sum(sizes), 2)
        comm.all_gather(gathered, mine(rank, sizes[rank], 2), sizes=sizes)
        done(results, "rows", gathered)
        part = torch.zeros(sizes[rank], 2)
        comm.reduce_scatter(part, mine(rank, sum(sizes), 2), sizes=sizes)
        done(results, "parts", part)
        exchanged = torch.zeros(size * 2)
        comm.all_to_all_single(exchanged, mine(rank, size * 2))
        done(results, "exchanged", exchanged)
    assert comm.disabled
    comm.nccl.ncclCommDestroy(comm.comm)
    return results


def expected(rank: int, size: int) -> Results:
    """Return what NumPy computes for the calls of either engine."""
    sizes = [1, 2, 3][:size]
    every = [mine(r, 5).numpy() for r in range(size)]
    big = [mine(r, sum(sizes), 2).numpy() for r in range(size)]
    start = sum(sizes[:rank])
    flat = [mine(r, size * 2).numpy() for r in range(size)]
    left = (rank - 1) % size
    types = torch.float32, torch.bfloat16, torch.float8_e4m3fn
    found: Results = {f"moved {dtype}": mine(left, 6).to(dtype).float().numpy() for dtype in types}
    found["broadcast"] = mine(1, 4).numpy()
    found["gathered"] = np.concatenate([mine(r, 2, 3).numpy() for r in range(size)])
    found["part"] = mine(size - 1, size * 3).numpy()[3 * rank : 3 * rank + 3]
    found["reduced"] = found["into"] = found["resumed"] = sum(every)
    found["reduced RedOpType.SUM"] = sum(every)
    found["reduced RedOpType.PRODUCT"] = np.prod(every, axis=0)
    found["reduced RedOpType.AVG"] = np.mean(every, axis=0)
    found["out of place"] = np.min(every, axis=0)
    found["rows"] = np.concatenate([mine(r, sizes[r], 2).numpy() for r in range(size)])
    found["parts"] = sum(big)[start : start + sizes[rank]]
    found["total"] = sum(every) if rank == 1 else np.zeros(5)
    found["scattered"] = big[1][start : start + sizes[rank]]
    found["batch"] = mine(left, 3).numpy()
    found["grouped"] = np.concatenate([sum(every), sum(mine(r, 3).numpy() for r in range(size))])
    found["exchanged"] = np.concatenate([flat[r][2 * rank : 2 * rank + 2] for r in range(size)])
    found["version"] = (23203, "2.32.3")
    return found


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("engine", "calls"), [("vllm", 17), ("sglang", 11)])
def test_the_same_program(engine: str, calls: int, files: Callable[[str], str]) -> None:
    """Through their class over ctypes, through their class over our NCCLLibrary, and through our class."""
    program = of_vllm if engine == "vllm" else of_sglang
    results = {w: through(w, 2, program, engine, files(engine)) for w in ("theirs", "over ours", "ours")}
    for rank in range(2):
        oracle = expected(rank, 2)
        checked = 0
        for name, value in results["ours"][rank].items():
            for whose in ("theirs", "over ours"):
                assert np.array_equal(value, results[whose][rank][name]), (rank, name, whose)
            if name in oracle:
                same = np.allclose if "AVG" in name else np.array_equal
                assert same(value, oracle[name]), (rank, name)
                checked += 1
        assert checked >= calls, sorted(results["ours"][rank])


def pair(rank: int, size: int, engine: str, files: str, folder: str) -> list[float]:
    """Let vLLM's own class be rank 0 and ours rank 1, as a trainer that pushes weights by an id."""
    module, wrapper = classes(engine, files, "theirs" if rank == 0 else "ours")
    library = wrapper.NCCLLibrary(pynccl.cpu_library())
    uid = Group(rank, size, folder).broadcast_obj(bytes(library.ncclGetUniqueId().internal), src=0)
    comm = module.PyNcclCommunicator.from_unique_id_bytes(uid, rank, size, CPU, pynccl.cpu_library())
    weights = mine(1, 1000).to(torch.bfloat16)
    if rank == 0:
        weights.zero_()
    comm.broadcast(weights, src=1)
    reply = torch.full((3,), float(rank))
    (comm.send if rank == 0 else comm.recv)(reply, 1 - rank)
    # vLLM sends float8 as bytes.
    float8 = torch.full((3,), float(rank)).to(torch.float8_e4m3fn)
    (comm.send if rank == 1 else comm.recv)(float8, 1 - rank)
    assert Stream().cuda_stream
    Stream().synchronize()
    found = [float(weights.float().sum()), float(reply.sum()), float(float8.float().sum())]
    comm.destroy()
    return found


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(240)
def test_with_vllms_own_class_on_the_other_side(files: Callable[[str], str]) -> None:
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        results = testing.run(2, pair, "vllm", files("vllm"), folder, backend="cpu", timeout=50)
    total = float(mine(1, 1000).to(torch.bfloat16).float().sum())
    assert results == [[total, 0.0, 3.0]] * 2


def parameters(function: Any) -> dict[str, str]:
    found = inspect.signature(function).parameters.values()
    return {p.name: "" if p.default is p.empty else "optional" for p in found if p.name != "self"}


def described(engine: str, files: str) -> dict[str, dict[str, str]]:
    """Return the parameters of all public functions of an engine's two classes."""
    module, wrapper = imported(engine, files)
    found = {}
    for kind in (module.PyNcclCommunicator, wrapper.NCCLLibrary):
        for name, function in inspect.getmembers(kind, inspect.isroutine):
            if name == "__init__" or not name.startswith("_"):
                found[f"{kind.__name__}.{name}"] = parameters(function)
    return found | {"names": dict.fromkeys(wrapper.__all__, "")}


def describe(rank: int, size: int, engine: str, files: str) -> dict[str, dict[str, str]]:
    return described(engine, files)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", OURS)
def test_signatures(engine: str, files: Callable[[str], str]) -> None:
    """Each function of theirs is there, and takes their arguments in their order."""
    (theirs,) = testing.run(1, describe, engine, files(engine), backend="cpu", timeout=50)
    assert set(theirs.pop("names")) <= set(OURS[engine].__all__)
    assert len(theirs) > 30
    for name, wanted in theirs.items():
        kind, _, function = name.partition(".")
        mine = parameters(getattr(getattr(OURS[engine], kind), function))
        assert list(mine.items())[: len(wanted)] == list(wanted.items()), name
        assert all(list(mine.values())[len(wanted) :]), name


@pytest.mark.parametrize("engine", OURS)
def test_the_page(engine: str) -> None:
    name, release = {"vllm": "vLLM", "sglang": "SGLang"}[engine], ENGINES[engine][0].split("==")[1]
    found = rows(1, f"{name} {release}")
    assert {file for cells in found for file in cells[0].split(", ")} - {"signatures"} <= {
        *FILES,
        "pynccl.py on rank 0",
    }
    assert set(FILES) <= {file for cells in found for file in cells[0].split(", ")}


# --- without the engines ------------------------------------------------------------------------------------


@on_ranks(2, timeout=50)
def test_on_numpy(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    comm = vllm.PyNcclCommunicator(Group(rank, nranks, folder), rank, timeout=100)
    kinds = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)
    for dtype in kinds:
        array = np.full(3, rank + 1).astype(dtype)
        (comm.send if rank == 0 else comm.recv)(array, 1 - rank)
        assert (array.astype("float32") == 1).all()
        total = comm.all_reduce(np.full(3, rank + 1).astype(dtype), op="max")
        assert total.dtype == dtype and (total.astype("float32") == 2).all()
    # A wrong call names the argument; in a group it drops the other calls.
    with pytest.raises(ValueError, match="not contiguous"):
        comm.all_reduce(np.zeros((4, 4))[:, ::2])
    with pytest.raises(ValueError, match=r"sizes is \[1, 1\], 2 rows; expected those of output_tensor"):
        comm.all_gatherv(np.zeros((3, 2)), np.zeros((1, 2)), [1, 1])
    with pytest.raises(ValueError, match="op is 'median'; expected sum, prod, max, min or avg"):
        comm.all_reduce(np.zeros(2), op="median")
    for root in range(nranks):
        with pytest.raises(TypeError, match="sizes is None; expected 2 ints, one for each rank"):
            comm.scatter(np.zeros(2), np.zeros(4), None, root)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="p2p_ops is 3; expected torch.distributed.P2POps"):
        comm.batch_isend_irecv(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"p2p_ops\[0\] is 'x'; expected a torch.distributed.P2POp"):
        comm.batch_isend_irecv(["x"])
    with pytest.raises(pynccl.NcclInvalidUsage, match="group_end without a group"):
        comm.group_end()
    for _ in range(2):
        comm.group_start()
    first = comm.all_reduce(np.ones(2))
    for _ in range(2):
        comm.group_end()
    assert (first == nranks).all()
    window = comm.register_comm_window(pynccl.zeros(16, "float32"))
    comm.deregister_comm_window(window)
    # A rank that has left is named.
    comm.all_reduce(np.ones(1))
    seen = Path(folder, "seen")
    if rank == 0:
        comm.destroy()
        comm.destroy()
        assert comm.all_reduce(np.ones(1)) is None
        with pytest.raises(pynccl.NcclInvalidUsage, match="rank 0 of 2 is closed"):
            comm.comm  # noqa: B018
        until(seen.exists)
    else:
        with pytest.raises(pynccl.RankFailedError) as caught:
            comm.all_reduce(np.ones(1))
        assert caught.value.ranks == [0]
        seen.touch()
        comm.group_start()
        comm.destroy()


@on_ranks(2, timeout=50)
def test_groups_of_several_communicators_and_threads(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name in ("first", "second", "third"):
        Path(folder, name).mkdir(exist_ok=True)
    first = vllm.PyNcclCommunicator(Group(rank, nranks, f"{folder}/first"), rank, timeout=20)
    second = vllm.PyNcclCommunicator(Group(rank, nranks, f"{folder}/second"), rank, timeout=20)
    mine, one, other = np.full(4, rank + 1.0), np.zeros(4), np.zeros(4)
    # Overlapping groups: as with ncclGroupEnd, only the last end issues the calls.
    first.group_start()
    second.group_start()
    first.send(mine, 1 - rank)
    second.recv(one, 1 - rank)
    first.group_end()
    first.recv(other, 1 - rank)
    second.send(mine, 1 - rank)
    second.group_end()
    assert (one == 2 - rank).all() and (other == 2 - rank).all()
    # Another thread cannot end a group, but its destroy closes the communicator and drops the calls.
    first.group_start()
    first.send(mine, 1 - rank)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(pynccl.NcclInvalidUsage, match="group_end without a group of this thread"):
            pool.submit(first.group_end).result()
        pool.submit(first.destroy).result()
    assert not first.available
    assert (second.all_reduce(mine) == 3).all()
    # A communicator can be made again: no group is open.
    third = vllm.PyNcclCommunicator(Group(rank, nranks, f"{folder}/third"), rank, timeout=20)
    assert (third.all_reduce(mine) == 3).all()
    third.destroy()
    second.destroy()


@on_ranks(2, timeout=50)
def test_with_a_process_group_of_torch(rank: int, nranks: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nranks)
    comm = sglang.PyNcclCommunicator(dist.group.WORLD, "cpu", cta_policy=2)
    with comm.change_state():
        tensor = torch.ones(4) * (rank + 1)
        comm.all_reduce(tensor, ReduceOp.SUM)
    assert tensor.tolist() == [3] * 4
    comm.all_reduce(tensor)
    assert tensor.tolist() == [3] * 4
    dist.barrier()
    comm.destroy()


def by_id(rank: int, size: int, folder: str) -> list[list[float]]:
    """Join by an id: vLLM's takes calls at once, SGLang's when it is enabled."""
    found = []
    for name, module in OURS.items():
        made = bytes(pynccl.get_unique_id()) if rank == 0 else b""
        uid = Group(rank, size, f"{folder}/{name}").broadcast_obj(made, src=0)
        comm = module.PyNcclCommunicator.from_unique_id_bytes(uid, rank, size, "cpu", timeout=30)
        assert type(comm) is module.PyNcclCommunicator
        x = torch.full((2,), rank + 1.0)
        comm.broadcast(x, src=1)
        with comm.change_state(enable=True):
            comm.broadcast(x, src=0)
        comm.destroy()
        found.append(x.tolist())
    return found


def test_by_an_id(tmp_path: Path) -> None:
    for name in OURS:
        (tmp_path / name).mkdir()
    results = testing.run(2, by_id, str(tmp_path), backend="cpu", timeout=50)
    assert results == [[[2.0, 2.0], [1.0, 1.0]]] * 2


@on_ranks(1, timeout=50)
def test_refusals(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    library = vllm.NCCLLibrary("cpu")
    assert library.has_symbol("ncclCommSuspend") and not library.has_symbol("ncclNothing")
    assert library.ncclGetVersion() == "2.32.3"
    with pytest.raises(pynccl.NcclInvalidArgument, match="NCCL error: invalid argument"):
        library.NCCL_CHECK(4)
    for data, kind, says in (
        (b"short", ValueError, "5 bytes; expected the 128"),
        ("text", TypeError, "expected a UniqueId or its 128 bytes"),
    ):
        with pytest.raises(kind, match=says):
            library.unique_id_from_bytes(data)
        with pytest.raises(kind, match=says):
            vllm.PyNcclCommunicator.from_unique_id_bytes(data, 0, 2, "cpu")
    with pytest.raises(TypeError, match="comm is 'a'; expected an int or a ctypes.c_void_p"):
        library.ncclCommDestroy("a")
    with pytest.raises(TypeError, match="rank is '0', of type str; expected an int"):
        vllm.PyNcclCommunicator.from_unique_id_bytes(bytes(128), "0", 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank is 2 and world_size 2"):
        vllm.PyNcclCommunicator.from_unique_id_bytes(bytes(128), 2, 2, "cpu")
    with pytest.raises(ValueError, match="device is 'tpu:0'; expected an ordinal"):
        vllm.PyNcclCommunicator.from_unique_id_bytes(bytes(128), 0, 2, "tpu:0")
    with pytest.raises(pynccl.NcclInvalidUsage, match="torch.distributed is not initialized"):
        vllm.PyNcclCommunicator(None, "cpu")
    with pytest.raises(ValueError, match="complex64"):
        vllm.ncclDataTypeEnum.from_torch(torch.complex64)
    assert not vllm.ncclDataTypeEnum.supports_torch_dtype(torch.complex64)
    assert vllm.ncclDataTypeEnum.from_torch(torch.float8_e5m2) == 11
    assert sglang.ncclRedOpTypeEnum.from_torch(ReduceOp(ReduceOp.PRODUCT)) == 1
    alone = vllm.PyNcclCommunicator(Group(0, 1, folder), "cpu")
    assert (alone.available, alone.disabled, alone.all_reduce(torch.ones(1))) == (False, True, None)
    alone.destroy()
    # Never destroyed, as in the engines: the exit says nothing of it.
    assert library.ncclCommInitRank(1, library.ncclGetUniqueId(), 0).value


def test_import_and_install(run_python: Run) -> None:
    run_python(
        "import sys, pynccl.compat.vllm as ours, pynccl.compat.sglang\n"
        "assert not {'torch', 'vllm', 'sglang'} & set(sys.modules)\n"
        "ours.install(); ours.install()\n"
        "from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary\n"
        "assert NCCLLibrary is ours.NCCLLibrary\n"
        "sys.modules['sglang.srt.distributed.device_communicators.pynccl_wrapper'] = sys\n"
        "try:\n"
        "    pynccl.compat.sglang.install()\n"
        "except pynccl.NcclError as error:\n"
        "    assert 'pynccl_wrapper is imported already; expected pynccl.compat.sglang' in str(error)\n"
        "else:\n"
        "    raise SystemExit('no error')",
        PYTHONPATH=str(ROOT),
    )
