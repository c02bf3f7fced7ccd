"""What is written wrong at first, and what the error says that was meant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import pynccl
from conftest import Run
from meeting import hear, tell
from processes import completed
from pynccl import NcclTimeoutError
from pynccl.testing import RankError, run
from ranks import on_ranks


def refused(
    call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("command", "meant"),
    [("benchmark", "bench"), ("infos", "info"), ("rn", "run"), ("CPU_library", "cpu-library")],
)
def test_a_subcommand(command: str, meant: str) -> None:
    done = completed([sys.executable, "-m", "pynccl", command], timeout=60)
    assert done.returncode == 2
    assert f"No such command '{command}'. Did you mean '{meant}'?" in done.stderr


@on_ranks(2)
def test_second_argument(rank: int, nranks: int) -> None:
    """Pass what comes third or later where recv belongs, as torch and MPI users do."""
    with pynccl.init(timeout=30) as comm, pynccl.Stream() as stream:
        x: Any = np.ones(4 * nranks)
        each: list[tuple[Callable[[], object], str]] = [
            (lambda: comm.all_reduce(x, "max"), "the second argument is recv: write op='max' (rank"),
            (lambda: comm.all_reduce(x, pynccl.RedOp.MAX), "write op=RedOp.MAX"),
            (lambda: comm.all_reduce(x, comm.pre_mul_sum(2.0)), "write op=<pynccl.PreMulSum 2.0"),
            (lambda: comm.reduce_scatter(x, "avg"), "write op='avg'"),
            (lambda: comm.prepare.all_reduce(x, "max"), "write op='max'"),
            (lambda: comm.all_reduce(x, stream), "write stream=<pynccl.Stream"),
            (lambda: comm.all_gather(x, stream), "write stream=<pynccl.Stream"),
        ]
        # The others are not looked at where they receive nothing.
        each += [(lambda: comm.reduce(x, "max", root=rank), "write op='max'")]
        each += [
            (lambda c=c: c(x, rank, root=rank), f"write root={rank}")
            for c in (comm.reduce, comm.gather, comm.scatter, comm.broadcast)
        ]
        each += [(lambda: comm.broadcast(x, 1 - rank, root=1 - rank), f"write root={1 - rank}")]
        for call, text in each:
            refused(call, TypeError, text)
        with pytest.raises(TypeError) as caught:
            comm.all_gather(x, 3)
        assert "write" not in str(caught.value)
        comm.barrier()


@on_ranks(2)
def test_wrong_types(rank: int, nranks: int) -> None:
    with pynccl.init(timeout=30) as comm:
        x, y = np.ones(4), np.ones(8)
        refused(lambda: comm.all_to_all(x, x), ValueError, "overlap; expected separate memory")
        for message in (comm.send, comm.recv):
            refused(lambda to=message: to(x, rank), ValueError, "expected another rank, or both the send and")
        refused(lambda: comm.all_reduce(y[:4], y[1:5]), ValueError, "expected the same memory, or separate")
        key: Any
        for key in (1.7, "2", None, True):
            refused(lambda k=key: comm.split(0, key=k), TypeError, f"key is {key!r}; expected an int")
        refused(lambda: comm.split(0, key=1 << 31), ValueError, "expected -2**31 <= key < 2**31")
        counts: Any
        for counts in ("44", b"\x04\x04", ["4", "4"], [4.0, 4.0], 8):
            text = f"counts is {counts!r}; expected a sequence of 2 ints"
            refused(lambda c=counts: comm.all_gather_v(x, y, c), TypeError, text)
        for counts in ((4, 4), np.array([4, 4]), [np.int64(4), 4]):
            assert comm.all_gather_v(x, y, counts) is y
        on: Any
        for on in ("on", "0", 1, None):
            refused(lambda o=on: pynccl.check_mode(o), TypeError, f"on is {on!r}; expected True or False")
        for number in (-1, 10**30):
            wrong = f"op is {number!r}; expected one of "
            refused(lambda o=number: comm.all_reduce(x, op=o), ValueError, wrong)
        name: Any
        for name, ours in {"mean": "avg", "SUM": "sum", "Product": "prod", "maximum": "max"}.items():
            hint = f"op is {name!r}; pynccl's name is {ours!r}; expected one of sum, prod, "
            refused(lambda o=name: comm.all_reduce(x, op=o), ValueError, hint)
        hint = f"op is {np.add!r}; pynccl's name is 'sum'; expected one of sum, "
        refused(lambda: comm.all_reduce(x, op=np.add), TypeError, hint)  # type: ignore[call-overload]
        hint = "dtype is 'bf16'; pynccl's name is 'bfloat16'; expected a dtype that NCCL can carry"
        refused(lambda: pynccl.empty(3, "bf16"), TypeError, hint)
        refused(lambda: comm.all_reduce(x, op="band"), ValueError, "op is 'band'; expected one of")  # type: ignore[call-overload]
        exclude: Any
        for exclude in (1, "1", np.int64(1), None):
            text = f"exclude is {exclude!r}; expected a list of ranks"
            refused(lambda e=exclude: comm.shrink(exclude=e), TypeError, text)
        op = comm.prepare.all_reduce(x)
        for calls in (op, pynccl.Plan([op])):
            refused(
                lambda c=calls: pynccl.Plan(c), TypeError, "; expected a list of prepared calls and plans"
            )
        comm.barrier()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("minCTAs", "a", "an int"),
        ("minCTAs", 1.5, "an int"),
        ("commName", 3, "a str"),
        ("commName", b"name", "a str"),
        ("blocking", "0", "an int"),
    ],
)
def test_a_config(field: str, value: object, expected: str) -> None:
    message = f"ncclConfig_t.{field} is {value!r}; expected {expected}, or None"
    refused(lambda: pynccl.Config(**{field: value}), TypeError, message)  # type: ignore[arg-type]


def test_configs_as_they_are_meant() -> None:
    config = pynccl.Config(blocking=False, minCTAs=int(np.int64(2)), commName="ring")
    assert (config.blocking, config.minCTAs, config.commName, config.maxCTAs) == (False, 2, "ring", None)


@on_ranks(1)
def test_a_config_as_a_dict(rank: int, nranks: int) -> None:
    with pytest.raises(TypeError, match=r"ncclConfig_t.minCTAs is 'a'; expected an int"):
        pynccl.init(config={"minCTAs": "a"})
    pynccl.init(config={"blocking": True}).destroy()


def late(rank: int, nranks: int) -> None:
    with pynccl.init() as comm:
        comm.barrier(timeout=30)
        if rank:
            hear("gave up")
        else:
            with pytest.raises(NcclTimeoutError, match=r"did not complete .*within 0.2 s"):
                comm.barrier(timeout=0.2)
            tell("gave up")
        timeout: Any
        for timeout in (-1, 0, "1", True):
            refused(
                lambda t=timeout: comm.barrier(timeout=t),
                (TypeError, ValueError),
                "expected a positive number",
            )
        # The barrier that took too long stays outstanding, and is completed by the others'.
        if rank:
            comm.barrier(timeout=30)
        comm.barrier()
        assert (comm.all_reduce(np.ones(2)) == nranks).all()


def test_a_barrier_with_a_time_of_its_own() -> None:
    run(3, late, backend="cpu")
    run(3, late, backend="cpu", env={"PYNCCL_TIMEOUT": "30"})


def fails_to_start(rank: int, nranks: int) -> str:
    with pytest.raises(pynccl.NcclInvalidArgument) as caught:
        pynccl.init(timeout=20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TIMEOUT", "soon", "number of seconds from 0 to 1000000000"),
        ("INIT_TIMEOUT", "-1", "number of seconds from 0"),
        ("RING_BYTES", "4k", "integer from 4096"),
        ("DEVICES", "0", "integer from 1"),
    ],
)
def test_numbers_of_the_cpu_library(name: str, value: str, expected: str) -> None:
    (text,) = run(1, fails_to_start, backend="cpu", env={f"PYNCCL_CPU_{name}": value})
    assert f'PYNCCL_CPU_{name} is "{value}", which is no {expected}' in text
    assert run(1, works, backend="cpu", env={f"PYNCCL_CPU_{name}": ""}) == [1.0]


def works(rank: int, nranks: int) -> float:
    with pynccl.init() as comm:
        return float(comm.all_reduce(np.ones(1))[0])


@on_ranks(2)
def test_what_nccl_does(rank: int, nranks: int) -> None:
    """Reduce NaN, and more than an integer holds: as NCCL, and as docs/communicator.md says."""
    nan = np.nan
    with pynccl.init() as comm:
        for dtype in ("float16", "float32", "float64"):
            x = np.array([nan if rank else 3.0, 2.0 if rank else nan, nan], dtype)
            for op in ("max", "min"):
                np.testing.assert_array_equal(comm.all_reduce(x.copy(), op=op), np.array([3, 2, nan], dtype))
            for op in ("sum", "prod", "avg"):
                assert np.isnan(comm.all_reduce(x.copy(), op=op)).all()
        assert comm.all_reduce(np.array([200], np.uint8)).tolist() == [144]
        assert comm.all_reduce(np.array([200], np.uint8), op="avg").tolist() == [72]
        assert comm.all_reduce(np.array([-3 * rank], np.int32), op="avg").tolist() == [-1]


@on_ranks(1)
def test_prepare_as_a_function(rank: int, nranks: int) -> None:
    with pynccl.init() as comm:
        x, prepare = np.ones(4), cast("Any", comm.prepare)
        for call, ours in (
            (lambda: prepare(comm.broadcast, x), "broadcast"),
            (lambda: prepare("allgather", x), "all_gather"),
            (lambda: prepare("reduce", x, timeout=3), "reduce"),
            (lambda: prepare(x), "all_reduce"),
            (lambda: prepare(), "all_reduce"),
        ):
            refused(call, TypeError, f"comm.prepare is no function; expected comm.prepare.{ours}(...)")


KEYWORDS: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda comm, x: comm.all_reduce(x, async_op=True), "'async_op'; pynccl's name is wait: async_op=True"),
    (lambda comm, x: comm.prepare.all_reduce(tensor=x), "'tensor'; pynccl's name is send"),
    (lambda comm, x: comm.send(x, dest=0), "'dest'; pynccl's name is peer"),
    (lambda comm, x: comm.recv(tensor=x, peer=0), "'tensor'; pynccl's name is buf"),
    (lambda comm, x: comm.recv(x, source=0), "'source'; pynccl's name is peer"),
    (lambda comm, x: comm.broadcast(x, src=0), "'src'; pynccl's name is root"),
    (lambda comm, x: comm.reduce(x, reduceOp="max"), "'reduceOp'; pynccl's name is op"),
    (lambda comm, x: comm.all_reduce(x, group=1), "'group'; each group of ranks has a communicator of its"),
    (lambda comm, x: comm.send(x, 0, tag=7), "'tag'; NCCL has no tags: "),
    (lambda comm, x: pynccl.init(nranks=2), "'nranks'; pynccl's name is world_size"),  # type: ignore[call-arg]
    (lambda comm, x: pynccl.init(backend="nccl"), "'backend'; PYNCCL_LIBRARY selects "),  # type: ignore[call-arg]
    (lambda comm, x: pynccl.init(nonsense=1), "'nonsense'"),  # type: ignore[call-arg]
    (lambda comm, x: comm.shrink(ranks=[0]), "'ranks'; pynccl's name is exclude, the"),
    (lambda comm, x: comm.split(ranks=[0]), "'ranks'; pynccl's name is color: ranks with"),
    (lambda comm, x: comm.grow(size=2), "'size'; pynccl's name is nranks"),
    (lambda comm, x: comm.all_gather(tensor_list=[x]), "'tensor_list'; pynccl's name is recv, one array"),
    (lambda comm, x: pynccl.init_all(ndev=2), "'ndev'; pynccl's name is devices"),  # type: ignore[call-arg]
    (lambda comm, x: run(nprocs=2, fn=len), "'nprocs'; pynccl's name is nranks"),  # type: ignore[call-arg]
    (lambda comm, x: comm.all_reduce(x, timeout=3), "'timeout'; pynccl's name is pynccl.init(timeout=...)"),
]


def call_with_another_keyword(rank: int, nranks: int) -> None:
    pynccl.init().all_reduce(np.ones(1), async_op=True)  # type: ignore[call-overload]


def test_a_keyword_of_another_library_ends_a_program(run_program: Run) -> None:
    done = run_program("import pynccl\npynccl.init().barrier(async_op=True)", 1)
    assert (
        "[0] pynccl: barrier(async_op=...): pynccl's name is wait: async_op=True is wait=False\n"
        in done.stderr
    )


@on_ranks(1)
def test_keywords_of_other_libraries(rank: int, nranks: int) -> None:
    for call, text in KEYWORDS:

        def called(call: Callable[[Any, Any], object] = call) -> None:
            with pynccl.init() as whole, whole.split(0) as comm:
                call(comm, np.ones(4))

        refused(called, TypeError, f"() got an unexpected keyword argument {text}")
    # Outside a `with` block, when the exception ends the rank.
    with pytest.raises(RankError, match="'async_op'; pynccl's name is wait: async_op=True is wait=False"):
        run(1, call_with_another_keyword, backend="cpu", timeout=30)
    with pytest.raises(TypeError, match="keyword argument 'nonsense'$"), pynccl.init() as comm:
        comm.barrier(nonsense=1)  # type: ignore[call-overload]


@on_ranks(1)
def test_arguments_of_a_stream_and_an_event(rank: int, nranks: int) -> None:
    made: Any
    for made in (pynccl.Stream, pynccl.Event):
        refused(
            lambda c=made: c(5), TypeError, f"{made.__name__}.__init__() takes 1 positional argument but 2"
        )
