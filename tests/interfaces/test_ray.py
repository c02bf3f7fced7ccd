"""pynccl.ray in real Ray actors, on the CPU library."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from conftest import ROOT
from engines import environment
from meeting import publish, until
from processes import completed
from pynccl import testing

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

Actors = Sequence[Any]
Function = Callable[..., Any]


class Member:
    """An actor; tests send it the functions that it runs, or put its methods into graphs."""

    def values(self, x: float) -> Any:
        import torch

        if x < 0:
            os._exit(1)
        return torch.arange(6.0) * x

    def twice(self, x: Any) -> Any:
        return x * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start Ray, whose actors have the CPU library; return the module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(clean := environment()):
            patch.delenv(name)
        for name, value in clean.items():
            patch.setenv(name, value)
        patch.setenv("PYNCCL_TIMEOUT", "30")
        import ray

        import pynccl.ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        pynccl.ray.register_transport()
        env = {"worker_process_setup_hook": pynccl.ray.register}
        ray.init(
            num_cpus=4,
            # By the numbers alone: nothing of a GPU is used.
            num_gpus=3,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            runtime_env=env,
        )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def members(cluster: Any) -> Actors:
    """Return three actors that no test kills."""
    return make(cluster, 3)


def make(ray: Any, count: int, **options: Any) -> list[Any]:
    return [ray.remote(num_cpus=0, **options)(Member).remote() for _ in range(count)]


def start(actors: Actors, function: Function, *args: Any) -> list[Any]:
    """Call a function with (actor's index, arguments) in every actor; return the references."""
    return [a.__ray_call__.remote(lambda _, i: function(i, *args), i) for i, a in enumerate(actors)]


def run(ray: Any, actors: Actors, function: Function, *args: Any) -> list[Any]:
    return list(ray.get(start(actors, function, *args), timeout=60))


def join(rank: int, size: int, name: str) -> None:
    import ray.util.collective as collective

    collective.init_collective_group(size, rank, backend="pynccl", group_name=name)


def leave(_: int, name: str) -> None:
    import ray.util.collective as collective

    collective.destroy_collective_group(name)


@pytest.fixture(scope="module")
def group(cluster: Any, members: Actors) -> Iterator[str]:
    """Make the three members a group and return its name."""
    run(cluster, members, join, 3, "all")
    yield "all"
    run(cluster, members, leave, "all")


def failure(ray: Any, reference: Any) -> Any:
    """Return the exception of an actor's call."""
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(reference, timeout=60)
    return caught.value


def arrays(rank: int, library: str) -> tuple[Any, Callable[[Any], Any], np.ndarray]:
    """Return a function that makes the library's arrays of NumPy's, the one back, and this rank's values."""
    values = np.random.default_rng(rank).integers(1, 5, (3, 4)).astype(np.float32)
    if library == "numpy":
        return np.array, np.array, values
    import torch

    return torch.tensor, lambda x: x.numpy(), values


def operations(rank: int, name: str, library: str) -> dict[str, Any]:
    """Make every call of ray.util.collective; return what each has left in its arguments."""
    import ray.util.collective as collective
    from ray.util.collective.types import ReduceOp

    made, back, mine = arrays(rank, library)
    size = collective.get_collective_group_size(name)
    found: dict[str, Any] = {"place": (collective.get_rank(name), size)}
    for op in ReduceOp:
        collective.allreduce(x := made(mine), name, op)
        found[f"allreduce {op.name}"] = back(x)
    collective.barrier(name)
    collective.reduce(x := made(mine), 1, name, ReduceOp.MAX)
    found["reduce"] = back(x)
    collective.broadcast(x := made(mine), 2, name)
    found["broadcast"] = back(x)
    outputs = [made(np.zeros_like(mine)) for _ in range(size)]
    collective.allgather(outputs, made(mine), name)
    found["allgather"] = np.array([back(x) for x in outputs])
    x = made(np.zeros_like(mine))
    collective.reducescatter(x, [made(mine * (i + 1)) for i in range(size)], name)
    found["reducescatter"] = back(x)
    if rank == 0:
        collective.send(made(mine), 2, name)
        collective.send_multigpu(made(mine), 2, 0, name, n_elements=5)
    if rank == 2:
        collective.recv(x := made(mine), 0, name)
        collective.recv_multigpu(y := made(np.zeros_like(mine)), 0, 0, name, n_elements=5)
        found["recv"] = back(x), back(y)
    found["all_to_all"] = back(pynccl_ray().communicator(name).all_to_all(made(mine)))
    return found


def pynccl_ray() -> Any:
    import pynccl.ray

    return pynccl.ray


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_operations(cluster: Any, members: Actors, group: str, library: str) -> None:
    mine = np.array([arrays(rank, library)[2] for rank in range(3)])
    reductions = {"SUM": np.sum, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    for rank, found in enumerate(run(cluster, members, operations, group, library)):
        assert found["place"] == (rank, 3)
        for op, reduction in reductions.items():
            np.testing.assert_array_equal(found[f"allreduce {op}"], reduction(mine, axis=0))
        np.testing.assert_array_equal(found["reduce"], mine.max(axis=0) if rank == 1 else mine[rank])
        np.testing.assert_array_equal(found["broadcast"], mine[2])
        np.testing.assert_array_equal(found["allgather"], mine)
        np.testing.assert_array_equal(found["reducescatter"], mine.sum(axis=0) * (rank + 1))
        np.testing.assert_array_equal(found["all_to_all"], mine[:, rank])
    whole, part = found["recv"]
    np.testing.assert_array_equal(whole, mine[0])
    np.testing.assert_array_equal(part.ravel(), [*mine[0].ravel()[:5], *[0] * 7])


def test_a_declared_group(cluster: Any, members: Actors) -> None:
    """The driver names actors and ranks; the actors join at their first call, each in its own group."""
    import ray.util.collective as collective

    collective.create_collective_group(members[:2], 2, [1, 0], "pynccl", "pair")
    collective.create_collective_group(members[2:], 1, [0], "pynccl", "single")

    def summed(index: int) -> tuple[list[float], int]:
        import ray.util.collective as collective

        name = "pair" if index < 2 else "single"
        collective.allreduce(x := np.full(2, index + 1.0), name)
        return x.tolist(), collective.get_rank(name)

    assert run(cluster, members, summed) == [([3, 3], 1), ([3, 3], 0), ([3, 3], 0)]
    run(cluster, members[:2], leave, "pair")
    run(cluster, members[2:], leave, "single")


WRONG = {
    "tensor_list[1] is a numpy.ndarray of shape (3,) and dtype float32; expected a numpy.ndarray of shape "
    "(2,) and dtype float32, as tensor is": lambda g, x: g.allgather([[x, np.zeros(3, np.float32), x]], [x]),
    "tensor_list has 2 tensors; expected 3, one for each rank": lambda g, x: g.reducescatter([x], [[x, x]]),
    "2 tensors are given; expected one: an actor has one device in a group": lambda g, x: g.allreduce([x, x]),
    "n_elements is 7; expected at most the elements of the tensor, (2,)": lambda g, x: sent(
        g, x, n_elements=7
    ),
    "dst_gpu_index is 1; expected 0": lambda g, x: sent(g, x, dst_gpu_index=1),
    "buf is not contiguous": lambda g, x: sent(g, np.zeros((4, 4))[:, 1]),
}


def sent(group: Any, x: Any, **options: int) -> None:
    from ray.util.collective.types import SendOptions

    chosen = SendOptions()
    for name, value in options.items():
        setattr(chosen, name, value)
    group.send([x], chosen)


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments(cluster: Any, members: Actors, group: str, text: str) -> None:
    def wrong(_: int) -> None:
        import ray.util.collective as collective

        WRONG[text](collective.get_group_handle(group), np.zeros(2, np.float32))

    error = failure(cluster, start(members[:1], wrong)[0])
    assert isinstance(error, ValueError)
    assert text in str(error)


def test_a_group_of_another_backend(cluster: Any, members: Actors) -> None:
    def other(_: int) -> None:
        import ray.util.collective as collective

        collective.init_collective_group(1, 0, backend="gloo", group_name="gloo")
        pynccl_ray().communicator("gloo")

    error = failure(cluster, start(members[:1], other)[0])
    assert isinstance(error, TypeError)
    assert "group 'gloo' has the backend GLOO; expected PYNCCL" in str(error)


def test_a_group_by_the_experimental_interface(cluster: Any, members: Actors) -> None:
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    group = create_collective_group(list(members[::-1]), "pynccl")
    assert run(cluster, members[::-1], add, group.name) == [[6, 6]] * 3
    destroy_collective_group(group)


def add(rank: int, name: str) -> list[float]:
    import ray.util.collective as collective

    collective.allreduce(x := np.full(2, rank + 1.0), name)
    return list(x)


def test_a_killed_actor(cluster: Any) -> None:
    """The survivors learn who it was, go on without it, and take another one into a new group."""
    actors = make(cluster, 3)
    run(cluster, actors, join, 3, "killed")
    assert run(cluster, actors, add, "killed") == [[6, 6]] * 3
    calls = start([actors[0], actors[2]], add, "killed")
    time.sleep(0.3)
    cluster.kill(actors.pop(1))
    for call in calls:
        error = failure(cluster, call)
        assert isinstance(error, pynccl.RankFailedError)
        assert error.ranks == [1]
        assert "rank 1 died" in str(error)

    def shrink(_: int) -> tuple[int, int]:
        import ray.util.collective as collective

        pynccl_ray().shrink([1], "killed")
        return collective.get_rank("killed"), collective.get_collective_group_size("killed")

    assert run(cluster, actors, shrink) == [(0, 2), (1, 2)]
    assert run(cluster, actors, add, "killed") == [[3, 3]] * 2
    run(cluster, actors, leave, "killed")
    actors += make(cluster, 1)
    run(cluster, actors, join, 3, "killed")
    assert run(cluster, actors, add, "killed") == [[6, 6]] * 3


def test_an_actor_that_never_joins(cluster: Any, members: Actors) -> None:
    def wait(rank: int) -> None:
        os.environ["PYNCCL_TIMEOUT"] = "2"
        try:
            join(rank, 4, "late")
        finally:
            os.environ["PYNCCL_TIMEOUT"] = "30"

    for rank, call in enumerate(start(members[:2], wait)):
        text = str(failure(cluster, call))
        assert "BootstrapError: group 'late'" in text, rank
        assert re.search(r"ranks that never arrived: (1, )?2, 3 \(\d of 4\)", text), text
    # What they have left behind does not disturb those who come later.
    run(cluster, members, join, 3, "late")
    assert run(cluster, members, add, "late") == [[6, 6]] * 3
    run(cluster, members, leave, "late")


# --- Compiled Graphs ---


def graph(actors: Actors, communicator: Any) -> Any:
    """Compile a graph with every collective, whose input is a number for each actor."""
    from ray.dag import InputNode, MultiOutputNode
    from ray.experimental.collective import allgather, allreduce, reducescatter
    from ray.experimental.util.types import ReduceOp

    with InputNode() as given:
        made = [actor.values.bind(given[i]) for i, actor in enumerate(actors)]
        sums = allreduce.bind(made, ReduceOp.SUM, transport=communicator)
        doubled = [actor.twice.bind(x) for actor, x in zip(actors, sums, strict=True)]
        gathered = allgather.bind(made, transport=communicator)
        parts = reducescatter.bind(made, ReduceOp.MAX, transport=communicator)
        return MultiOutputNode([*doubled, *gathered, *parts]).experimental_compile()


def check_graph(ray: Any, compiled: Any, given: list[float]) -> None:
    count, mine = len(given), np.array([np.arange(6.0) * x for x in given])
    found = [x.numpy() for x in ray.get(compiled.execute(*given), timeout=60)]
    for rank in range(count):
        np.testing.assert_array_equal(found[rank], 2 * mine.sum(axis=0))
        np.testing.assert_array_equal(found[count + rank], mine.ravel())
        part = np.split(mine.max(axis=0), count)[rank]
        np.testing.assert_array_equal(found[2 * count + rank], part)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_graph(cluster: Any, members: Actors, kind: str) -> None:
    """Of actors without GPUs, and with the class for GPUs, whose collectives take host memory as well."""
    import pynccl.ray

    if kind == "host":
        actors, communicator = members, pynccl.ray.HostCommunicator(members)
    else:
        actors = make(cluster, 3, num_gpus=1)
        run(cluster, actors, lambda _: pynccl_ray().register_graphs())
        communicator = pynccl.ray.DeviceCommunicator.of(actors)
    compiled = graph(actors, communicator)
    for given in ([1.0, 2.0, 3.0], [3.0, 5.0, 4.0]):
        check_graph(cluster, compiled, given)
    compiled.teardown()
    communicator.destroy()


def test_the_communicator_that_ray_creates(cluster: Any) -> None:
    """Do in each actor what Ray does where a graph names no communicator: its graphs ask for GPUs first."""
    actors = make(cluster, 2)

    def registered(_: int) -> str:
        from ray.experimental.channel.accelerator_context import AcceleratorContext

        pynccl_ray().register_graphs()
        return str(AcceleratorContext.get().generate_communicator_id())

    def created(rank: int, uid: str) -> tuple[str, list[float]]:
        import torch
        from ray.experimental.channel.accelerator_context import AcceleratorContext
        from ray.experimental.util.types import ReduceOp

        communicator = AcceleratorContext.get().create_communicator(2, uid, rank, actors, None, False)
        total = torch.empty(2)
        communicator.allreduce(torch.full((2,), rank + 1.0), total, ReduceOp.SUM)
        communicator.destroy()
        return type(communicator).__name__, total.tolist()

    uid = run(cluster, actors, registered)[0]
    assert run(cluster, actors, created, uid) == [("DeviceCommunicator", [3.0, 3.0])] * 2


def test_an_actor_of_a_graph_dies(cluster: Any) -> None:
    """The others, which wait for it, are free again at once, and take part in a new graph."""
    import pynccl.ray

    actors = make(cluster, 3)
    communicator = pynccl.ray.HostCommunicator(actors)
    compiled = graph(actors, communicator)
    check_graph(cluster, compiled, [1.0, 2.0, 3.0])
    begin = time.monotonic()
    with pytest.raises(cluster.exceptions.RayError):
        cluster.get(compiled.execute(1.0, -1.0, 1.0), timeout=60)
    compiled.teardown()
    communicator.destroy()
    del actors[1]
    assert run(cluster, actors, lambda rank: rank) == [0, 1]
    # Of 30 s until the time-out.
    assert time.monotonic() - begin < 25
    compiled = graph(actors, pynccl.ray.HostCommunicator(actors))
    check_graph(cluster, compiled, [2.0, 3.0])
    compiled.teardown()


def test_wrong_actors_of_a_graph(cluster: Any, members: Actors) -> None:
    import pynccl.ray

    with pytest.raises(ValueError, match="actors has 2, 1 different ones; expected each once"):
        pynccl.ray.HostCommunicator([members[0], members[0]])
    with pytest.raises(TypeError, match=re.escape("actors[0] is 1; expected the handle of an actor")):
        pynccl.ray.DeviceCommunicator.of([1])
    with pytest.raises(ValueError, match="expected one of this communicator's 2"):
        pynccl.ray.HostCommunicator(members[:2]).get_rank(members[2])


def test_the_import_warns_of_nothing() -> None:
    """CuPy warns where there is no libnccl, which pynccl does not need."""
    program = [sys.executable, "-W", "error::UserWarning", "-c", "import pynccl.ray"]
    done = completed(program, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


# --- the tensor transport ---


def make_senders(ray: Any, count: int) -> list[Any]:
    class Sender:
        @ray.method(tensor_transport="pynccl")
        def tensors(self, x: float) -> Any:
            import torch

            return {"view": torch.arange(6.0).reshape(2, 3).T * x, "more": [torch.ones(3).bfloat16(), 5]}

        def nothing(self) -> None:
            """Answer."""

        def sums(self, given: Any) -> list[Any]:
            return [given["view"][2].tolist(), float(given["more"][0].sum()), given["more"][1]]

    sender = ray.remote(num_cpus=0, enable_tensor_transport=True)(Sender)
    return [sender.remote() for _ in range(count)]


def wait_for_death(ray: Any, actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.ActorDiedError):
        while True:
            ray.get(actor.nothing.remote(), timeout=60)


def test_tensors_from_actor_to_actor(cluster: Any) -> None:
    """In both directions, and after the death of an actor whose tensors were not yet sent."""
    one, other, victim = make_senders(cluster, 3)
    for source, target in ((one, other), (other, one), (one, other)):
        found = target.sums.remote(source.tensors.remote(2.0))
        assert cluster.get(found, timeout=60) == [[4.0, 10.0], 3.0, 5]
    known, unknown = victim.tensors.remote(3.0), victim.tensors.remote(4.0)
    assert cluster.get(one.sums.remote(known), timeout=60) == [[6.0, 15.0], 3.0, 5]
    cluster.wait([unknown], timeout=60)
    cluster.kill(victim)
    wait_for_death(cluster, victim)
    begin = time.monotonic()
    # One has a communicator with the victim, the other has none.
    for survivor in (one, other):
        with pytest.raises(cluster.exceptions.RayError) as raised:
            cluster.get(survivor.sums.remote(unknown), timeout=60)
        if isinstance(raised.value, pynccl.NcclError):
            text = str(raised.value)
            assert re.search(f"; rank 0 is actor .*{victim._actor_id.hex()}", text), text
    # Of 30 s until the time-out.
    assert time.monotonic() - begin < 25
    found = other.sums.remote(one.tensors.remote(2.0))
    assert cluster.get(found, timeout=60) == [[4.0, 10.0], 3.0, 5]


def test_errors_of_the_transport_name_actors() -> None:
    from pynccl.ray._transport import _Line

    line = _Line("0a-1b")
    error = pynccl.RankFailedError("rank 1 died (noticed by rank 0 of 2); 2 ranks", ranks=[1])
    for _ in range(2):
        line.name_actors(error)
        assert str(error) == (
            "the transfer between actor 0a and actor 1b: rank 1 died (noticed by rank 0 of 2); 2 ranks; "
            "rank 0 is actor 0a and rank 1 is actor 1b"
        )
    assert error.ranks == [1]


# --- Ray's own backend ---


def by_rays_functions(rank: int, nranks: int, folder: str) -> tuple[list[float], str, list[str]]:
    from pynccl.compat import cupy

    cupy.install()
    from ray.util.collective.collective_group import nccl_util as ray_nccl
    from ray.util.collective.types import ReduceOp

    path = Path(folder, "id")
    if rank == 0:
        publish(path, ray_nccl.get_nccl_unique_id())
    until(path.exists)
    ray_nccl.groupStart()
    comm = ray_nccl.create_nccl_communicator(nranks, path.read_bytes(), rank)
    ray_nccl.groupEnd()
    x = np.full(3, rank + 1, np.float64)
    dtype, op = ray_nccl.NUMPY_NCCL_DTYPE_MAP[np.float64], ray_nccl.get_nccl_reduce_op(ReduceOp.PRODUCT)
    comm.allReduce(x.ctypes.data, x.ctypes.data, x.size, dtype, op, 0)
    pynccl.dump_trace(f"{folder}/{rank}")
    comm.destroy()
    calls = re.findall(r'"call": ?"(\w+)"', Path(folder, str(rank)).read_text())
    return list(x), type(comm).__module__, calls


def test_rays_nccl_functions_on_pynccl(tmp_path: Path) -> None:
    env = {"PYNCCL_CPU_BLOCKING": "1", "PYNCCL_TIMEOUT": "30"}
    found = testing.run(2, by_rays_functions, str(tmp_path), backend="cpu", timeout=100, env=env)
    for result, module, calls in found:
        assert (result, module) == ([2.0] * 3, "pynccl.compat.cupy")
        assert "all_reduce" in calls


def test_the_example(cluster: Any) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_training.py"), "-n", "3"]
    done = completed(command, env=environment(), timeout=170)
    assert done.returncode == 0, done.stderr
    assert "killing rank 1\n" in done.stdout
    assert [f"survived the death of [1]: rank {rank} of 2\n" in done.stdout for rank in range(2)] == [
        True
    ] * 2
    assert re.search(r"^accuracy 0\.9\d+, undisturbed 0\.9\d+, difference", done.stdout, re.M)


def test_the_example_of_graphs_and_transport(cluster: Any) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_graph.py")]
    done = completed(command, env=environment(), timeout=170)
    assert done.returncode == 0, done.stderr
    # The sum of three tensors of four times the step.
    said = [f"step {step}: the norms are {[6.0 * step] * 3}" for step in (1, 2, 3)]
    said.append("worker 2 has worker 0's weights: [0.0, 1.0, 2.0, 3.0]")
    assert [line for line in done.stdout.splitlines() if line.startswith(("step", "worker"))] == said
