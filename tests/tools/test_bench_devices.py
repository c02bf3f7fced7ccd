"""`pynccl bench` on devices, without any: over a libnccl that moves little and the fake CUDA driver."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pynccl
from command_line import pynccl_command
from fake_cuda import driver
from fake_nccl import Fake
from pynccl import testing

Case = Callable[[int, int], None]

SIZE = ("-b", "64", "-e", "64", "-w", "0")
BEGIN, END, INSTANTIATE = "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"
LAUNCH, DROP = "cuGraphLaunch", ["cuGraphExecDestroy", "cuGraphDestroy"]


class Asked:
    """What the driver was asked about graphs since this was made; the other calls are left out.

    "record" and "run" are what becomes of a call of NCCL; a "run" outside a launch of a graph is left out.
    """

    def __init__(self) -> None:
        self._before = len(self._text())

    def _text(self) -> str:
        text: str = driver().fake_cuda_log().decode()
        return text

    def lines(self) -> list[str]:
        found: list[str] = []
        launched = False
        for line in self._text()[self._before :].splitlines():
            name = line.split()[0]
            if (name == "run" and launched) or name in (BEGIN, END, "record") or name.startswith("cuGraph"):
                found.append(line)
            launched = (launched and name == "run") or name == LAUNCH
        return found

    def names(self) -> list[str]:
        return [line.split()[0] for line in self.lines()]


def graph(calls: int, launches: int) -> list[str]:
    """Return the steps of a graph of some calls."""
    runs = [LAUNCH, *["run"] * calls] * launches
    return [BEGIN, *["record"] * calls, END, INSTANTIATE, *runs, *DROP]


def measured(*args: str) -> str:
    """Run a program in this rank, and return what it wrote."""
    done = pynccl_command("bench", *args)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def captures_iterations(rank: int, nranks: int) -> None:
    """3 iterations of 2 calls are captured once for each half of a line, and launched 4 times."""
    asked, nccl = Asked(), Fake()
    flags = ("--iters", "3", "-m", "2", "-G", "4", "-c", "0", "-J", "graphs.json")
    output = measured("all_reduce", *SIZE, *flags)
    assert asked.names() == 2 * graph(6, 4)
    lines = asked.lines()
    stream, made = lines[0].split()[1], lines[9].split()[1]
    # Captured for this thread only, as nccl-tests does.
    assert lines[0] == f"{BEGIN} {stream} 1"
    assert lines[7] == f"{END} {stream}"
    assert lines[9] == f"{LAUNCH} {made} {stream}"
    assert [line.split()[1] for line in lines[10:16]] == [line.split()[1] for line in lines[1:7]]
    # The first call of each half is not captured.
    calls = [line for line in nccl.log() if "type 7" in line]
    assert len(calls) == 14
    assert all(line.endswith(f" stream {stream}") for line in calls)
    if rank == 0:
        assert " graph: 4 unalign: 0\n" in output
        assert json.loads(Path("graphs.json").read_text())["config"]["graph"] == 4


def meets_before_the_launches(rank: int, nranks: int) -> None:
    before = len(driver().fake_cuda_log())
    measured("all_reduce", *SIZE, "--iters", "1", "-G", "1", "-c", "0")
    text = driver().fake_cuda_log()[before:].decode()
    between = re.findall(f"{INSTANTIATE} .*?\n(.*?){LAUNCH}", text, re.DOTALL)
    # The barrier's call runs.
    assert [part.count("\nrun ") for part in between] == [1, 1], between


def checks_a_graph(rank: int, nranks: int) -> None:
    """A checked call is a graph of its own, launched once; the libnccl moves int8."""
    asked = Asked()
    output = measured("all_gather", *SIZE, "--iters", "2", "-G", "3", "-d", "int8", "-c", "2")
    assert asked.names() == 2 * (graph(2, 3) + 2 * graph(1, 1))
    assert "# Out of bounds values : 0 OK" in output


def captures_on_every_device(rank: int, nranks: int) -> None:
    """The calls of a thread's ranks are a graph for each of their streams."""
    asked = Asked()
    measured("all_reduce", *SIZE, "-g", "2", "-n", "2", "-G", "2", "-c", "0")
    half = asked.names()[: len(asked.names()) // 2]
    launches = [LAUNCH, "run", "run"] * 4
    assert half[:10] == [BEGIN, BEGIN, *["record"] * 4, END, END, INSTANTIATE, INSTANTIATE]
    assert half[10:22] == launches
    assert sorted(half[22:]) == sorted(DROP * 2)
    lines = asked.lines()
    begun, ended, launched = ({line.split()[i] for line in lines if line.startswith(name)} for name, i in (
        (BEGIN, 1), (END, 1), (LAUNCH, 2),
    ))  # fmt: skip
    assert len(begun) == 2
    assert begun == ended == launched


def ends_a_capture_that_fails(rank: int, nranks: int) -> None:
    """The error of the call is raised, and the stream is no longer captured."""
    args = ("all_reduce", *SIZE, "--iters", "3", "-G", "1", "-c", "0")
    nccl, asked = Fake(), Asked()
    nccl.fail(-1, 0)
    measured(*args)
    second = int(asked.lines()[2].split()[1])
    asked = Asked()
    nccl.fail(second - 1, 3)
    done = pynccl_command("bench", *args)
    assert done.exit_code == 1
    assert isinstance(done.exception, pynccl.NcclInternalError)
    assert "ncclAllReduce" in str(done.exception)
    assert "the cause" in str(done.exception)
    assert asked.names() == [BEGIN, "record", END, "cuGraphDestroy"]
    assert nccl.log()[-1] == "abort"


def leaves_no_graph_after_an_error(rank: int, nranks: int) -> None:
    args = ("all_reduce", *SIZE, "--iters", "2", "-G", "1", "-c", "0")
    start, whole = [BEGIN, "record", "record", END], [BEGIN, "record", "record", END, INSTANTIATE]
    for name, steps in (
        (BEGIN, [BEGIN]),
        (INSTANTIATE, [*whole, "cuGraphDestroy"]),
        (LAUNCH, [*whole, LAUNCH, *DROP]),
        # Last, since this leaves the stream in the capture.
        (END, start),
    ):
        asked = Asked()
        driver().fake_cuda_fail(name.encode(), 901)
        done = pynccl_command("bench", *args)
        assert isinstance(done.exception, pynccl.NcclUnhandledCudaError)
        assert f"{name} failed with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" in str(done.exception), (
            done.exception
        )
        assert asked.names() == steps
        driver().fake_cuda_fail(b"", 0)


def refuses_graphs_on_the_null_stream(rank: int, nranks: int) -> None:
    asked = Asked()
    done = pynccl_command("bench", "all_reduce", *SIZE, "-G", "2", "-y", "1")
    assert done.exit_code == 2
    assert "-G 2 with -y 1; expected one of them: CUDA cannot capture the NULL stream" in done.output
    assert asked.names() == []


def reports_memory(rank: int, nranks: int) -> None:
    memory_is_reported(communicators=2)


def reports_memory_of_two_devices(rank: int, nranks: int) -> None:
    memory_is_reported("-g", "2", communicators=3)


def reports_memory_beside_a_graph(rank: int, nranks: int) -> None:
    memory_is_reported("-G", "2", communicators=2)


def memory_is_reported(*flags: str, communicators: int) -> None:
    """3 MiB for a communicator, two buffers, and nothing that is kept of the measurements.

    What the processes tell one another takes some bytes, which may be freed at a later call.
    """
    output = measured("all_reduce", "-b", "64K", "-e", "64K", "--iters", "2", "-c", "0", "-M", "1", *flags)
    assert re.search(
        r"^# GPU memory usage     : Initialization 3[.]00 MB [|] User-Allocated 128 KB "
        r"[|] Collective -?[\d.]+ B [|] Total  3[.]12 MB$",
        output,
        re.M,
    ), output
    assert Fake().log().count("destroy") == communicators


def uses_the_devices_of_its_ranks(rank: int, nranks: int) -> None:
    """Memory and streams are those of each rank's device, in every thread."""
    flags, devices = ((), [rank]) if nranks > 1 else (("-g", "2"), [0, 1])
    for more in (flags, ("-y", "1", *flags), () if nranks > 1 else ("-t", "2")):
        output = measured("all_reduce", *SIZE, "--iters", "2", *more)
        # What nobody moved is wrong.
        assert rank or re.search("# Out of bounds values : [1-9] FAILED", output), output
    made = [line for line in Fake().log() if line.startswith("MemAlloc 64 ")]
    assert sorted(made) == [f"MemAlloc 64 on device {device}" for device in devices for _ in range(6)]


CASES = [
    captures_on_every_device,
    checks_a_graph,
    ends_a_capture_that_fails,
    leaves_no_graph_after_an_error,
    meets_before_the_launches,
    refuses_graphs_on_the_null_stream,
    reports_memory,
    reports_memory_beside_a_graph,
    reports_memory_of_two_devices,
    uses_the_devices_of_its_ranks,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_fake_driver(fake_gpus: dict[str, str], tmp_path: Path, case: Case) -> None:
    testing.run(1, case, env=fake_gpus | {"FAKE_NCCL_FOLDER": str(tmp_path)})


def test_two_ranks(fake_gpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for case in (captures_iterations, uses_the_devices_of_its_ranks):
        folder = tmp_path / case.__name__
        folder.mkdir()
        testing.run(2, case, env=fake_gpus | {"FAKE_NCCL_FOLDER": str(folder)})
