"""Every declared function, called through pynccl.capi on a library that writes down what arrives."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Run
from null_library import FUNCTIONS, OUT, source
from processes import completed

NAMES = [f.name for f in FUNCTIONS]
DECLARED = {f.name: f for f in FUNCTIONS}
# They answer with something else, or nothing, so no result code can come back.
WITHOUT_RESULT = {f.name for f in FUNCTIONS if f.result != "ncclResult_t"}
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(null: str) -> Callable[..., Answers]:
    """Return what every function answered when the library returned `result`."""
    kept: dict[tuple[str, int], Answers] = {}

    def answers(result: int = 0, library: str = null) -> Answers:
        if (library, result) not in kept:
            command = [sys.executable, str(ROOT / "tests" / "helpers" / "surface.py"), library, str(result)]
            done = completed(command, check=True)
            kept[library, result] = json.loads(done.stdout)
        return kept[library, result]

    return answers


def expected_log(name: str, given: dict[str, Any]) -> str:
    """Return what the library must have seen, from the C prototype and the arguments given by name."""
    if name in ("ncclGetVersion", "ncclGetErrorString", "ncclGetLastError"):
        return ""
    parts = [name]
    for _, param in DECLARED[name].params:
        if param not in given:
            continue
        value = given[param]
        if param in ("devlist", "excludeRanksList", "lateRanks"):
            value = struct.pack(f"{len(value)}i", *value).hex()
        elif param == "signalDescs":
            value = b"".join(struct.pack("4i", *desc) for desc in value).hex()
        elif param in ("team", "peers", "cftTeam"):
            value = struct.pack("3i", *value).hex()
        elif param == "multimem":
            value = struct.pack("N", value).hex()
        elif param == "reqs":
            # The struct, whose fields tests/library/test_structs.py compares.
            value = struct.pack("NII", 120, 0xCAFEBEEF, 23203).hex()
        elif param == "commIds":
            value = "".join(value)
        elif param == "simInfo":
            value = struct.pack("NIIf", 24, 0x74685283, 23203, -1.0).hex() + "00000000"
        parts.append(f"{param}={'NULL' if value is None else value}")
    return "|".join(parts)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_arrive(answers: Callable[..., Answers], name: str) -> None:
    answer = answers()[name]
    log = expected_log(name, answer["given"])
    if name in ("ncclCommQueryProperties", "ncclDevCommCreate"):
        assert answer["log"].startswith(log)
    elif log:
        assert answer["log"] == log


@pytest.mark.parametrize("name", NAMES)
def test_out_values_return(answers: Callable[..., Answers], name: str) -> None:
    index, value = NAMES.index(name), answers()[name]["value"]
    special: dict[str, Any] = {
        "ncclGetVersion": 23203,
        "ncclGetErrorString": "text 3",
        "ncclGetLastError": "the cause",
        "ncclGetUniqueId": f"{index:02x}" * 128,
        "ncclCommGetUniqueId": f"{index:02x}" * 128,
        "ncclCommInitAll": [OUT, OUT + 1, OUT + 2],
        "ncclParamGetStr": "alpha",
        "ncclParamGetParameter": "alpha",
        "ncclParamGetAllParameterKeys": ["alpha", "beta"],
        "pyncclCpuGetAlgorithm": f"('alpha', {index})",
        "pyncclCpuGetErrorPrefix": f"({index}, {index})",
        "ncclParamGet": b"payload".hex(),
        "ncclResetDebugInit": None,
        "ncclParamDumpAll": None,
        **dict.fromkeys(
            ("ncclTeamWorld", "ncclTeamLsa", "ncclTeamRail", "ncclTeamCft", "ncclTeamCftMultimem"),
            "Team(nRanks=11, rank=12, stride=13)",
        ),
        **{name: NAMES.index(name) for name in WITHOUT_RESULT if DECLARED[name].result == "int"},
        "ncclDevCommCreate": "device",
        **{name: f"({index}, {index})" for name in NAMES if name.endswith("LeInfo")},
    }
    if name in special:
        assert value == special[name]
    elif name.endswith("CreateRequirement"):
        every_byte = index * 0x01010101
        assert value[0] == every_byte << 32 | every_byte
        assert set(value[1:]) == {every_byte}
    elif name in ("ncclGroupSimulateEnd", "ncclCommQueryProperties"):
        assert value.startswith(("SimInfo(estimatedTime=-1.0", "CommProperties(rank=0, nRanks=0"))
    else:
        outs = [ctype for ctype, param in DECLARED[name].params if param not in answers()[name]["given"]]
        is_address = any(
            word in ctype for ctype in outs for word in ("void", "Comm_", "Window", "Handle", "cuda")
        )
        assert value == (OUT + index if is_address else index if outs else 0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*WITHOUT_RESULT, "ncclGetVersion")])
def test_errors_raise(answers: Callable[..., Answers], name: str) -> None:
    answer = answers(3)[name]
    assert answer["error"] == "NcclInternalError"
    assert answer["result"] == 3
    assert answer["function"] == name
    assert answer["detail"] == "the cause"
    assert answer["text"].startswith(f"{name}: ncclInternalError: the cause; ")
    assert "2.32.3 from " in answer["text"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*WITHOUT_RESULT, "ncclGetVersion")])
def test_in_progress_is_no_error(answers: Callable[..., Answers], name: str) -> None:
    done, pending = answers()[name]["value"], answers(7)[name]["value"]
    returns_result = done == 0 and name not in ("ncclMemAlloc",)
    assert pending == (7 if returns_result else done)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ncclGetVersion"])
def test_missing_functions_say_what_they_need(answers: Callable[..., Answers], name: str, bare: str) -> None:
    answer = answers(0, bare)[name]
    assert answer["error"] == "NotSupportedError"
    assert answer["function"] == name
    need = "is a function of the CPU library" if name.startswith("pyncclCpu") else "needs NCCL >= "
    assert answer["text"].startswith(f"{name} {need}")
    assert answer["text"].endswith(f"loaded NCCL 2.19.3 from {bare}")


@pytest.fixture(scope="module")
def bare(compile_library: Callable[..., str]) -> str:
    return compile_library(source(21903, frozenset(NAMES) - {"ncclGetVersion"}), "libbare.so")


def test_every_declared_function_has_one_binding() -> None:
    from pynccl import capi
    from pynccl._library.generated import capi as generated_capi
    from pynccl._library.generated import capi_cpu

    generated = {name for module in (generated_capi, capi_cpu) for name in vars(module) if name in DECLARED}
    by_hand = {
        name
        for name, value in vars(capi).items()
        if name in DECLARED and value.__module__ in ("pynccl.capi", "pynccl._library.device_api")
    }
    assert generated | by_hand == set(DECLARED)
    assert not generated & by_hand
    assert len(capi.FUNCTIONS) == 96


def test_versions_are_those_of_the_header() -> None:
    from pynccl import capi

    assert {f.name: f.since for f in FUNCTIONS} == {**capi.FUNCTIONS, **capi.CPU_FUNCTIONS}
    assert capi.FUNCTIONS["ncclCommShrink"] == (2, 27, 3)


def test_generated_files_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_api.py"), "--check"]
    done = completed(command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrong_python_arguments(run_python: Run, null: str) -> None:
    run_python(
        """
        import numpy as np
        import pytest
        from pynccl import capi
        with pytest.raises(ValueError, match="has 3 bytes; expected the 128"):
            capi.ncclCommInitRank(2, b"abc", 0)
        with pytest.raises(TypeError, match="is of type str"):
            capi.ncclCommInitRank(2, "abc", 0)
        with pytest.raises(ValueError, match="devlist has 1 entries; expected 2"):
            capi.ncclCommInitAll(2, [0])
        with pytest.raises(ValueError, match="excludeRanksList has 0 entries"):
            capi.ncclCommShrink(1, [], 1)
        with pytest.raises(ValueError, match="commIds has 1"):
            capi.ncclCommInitRankScalable(2, 0, 2, [bytes(128)])
        with pytest.raises(ValueError, match="signalDescs has 0"):
            capi.ncclWaitSignal(1, [], 1, 0)
        with pytest.raises(TypeError, match="excludeRanksList is ..a..; expected 1 ints"):
            capi.ncclCommShrink(1, ["a"], 1)
        with pytest.raises(TypeError, match="^comm is of type str; expected an int: the handle, such as "):
            capi.ncclCommCount("comm")
        with pytest.raises(TypeError, match="^sendbuff is of type ndarray; expected an int: the address"):
            capi.ncclAllReduce(np.ones(4), 1, 4, 7, 0, 1, 0)
        with pytest.raises(TypeError, match="^comm is of type Thing; expected an int"):
            capi.ncclSend(1, 2, 7, 0, type("Thing", (), {})(), 0)
        with pytest.raises(TypeError, match="^rank is of type float; expected an int$"):
            capi.ncclCommInitRank(2, bytes(128), 1.0)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'stream'"):
            capi.ncclSend(1, 2, 7, 0, 1)
        with pytest.raises(OverflowError, match="^sendbuff is -1; expected an int that fits its C type"):
            capi.ncclSend(-1, 2, 7, 0, 1, 0)
        with pytest.raises(OverflowError, match="^peer is 2147483648; expected an int that fits its C type"):
            capi.ncclSend(1, 2, 7, 2**31, 1, 0)
        # Python's error does not name the number: an int can be negative, a handle cannot.
        with pytest.raises(OverflowError, match="^comm is -1; expected an int that fits its C type"):
            capi.ncclSend(1, 2, 7, -3, -1, 0)
        with pytest.raises(OverflowError, match="^peer is -2147483649; expected an int that fits its C type"):
            capi.ncclSend(1, 2, 7, -(2**31) - 1, 1, 0)
        with pytest.raises(OverflowError, match="^stream is 1180591620717411303424; expected"):
            capi.ncclSend(1, 2, 7, 0, 1, 2**70)
        """.replace("\n        ", "\n"),
        PYNCCL_LIBRARY=null,
    )


# The end of a group writes the handle of a split; those of the negative color never come.
KEPT = "static struct ncclComm** late;\n"
LATE = {
    "ncclGroupEnd": "if (late) *late = (ncclComm_t)0x7f00000000ffLL;\nreturn 0;",
    "ncclCommSplit": "*newcomm = 0; late = color < 0 ? 0 : newcomm; return color == 9 ? 7 : 0;",
    "ncclCommUserRank": "*rank = (long long)comm == 0x7f00000000ffLL; return 0;",
}


def test_a_handle_that_is_written_late(run_python: Run, compile_library: Callable[..., str]) -> None:
    run_python(
        """
from pynccl import capi
assert capi.ncclCommSplit(1, -1, 0) == 0
assert repr(capi.ncclCommSplit(1, 0, 0)) == "<LateHandle 0x0>"  # NULL until it is there
capi.ncclGroupStart()
late, none = capi.ncclCommSplit(1, 0, 0), capi.ncclCommSplit(1, -1, 0)
assert not late and late == 0 and repr(late) == "<LateHandle 0x0>" and type(none) is int
late = capi.ncclCommSplit(1, 0, 0)
capi.ncclGroupEnd()
assert late and late == 0x7f00000000ff and int(late) == 0x7f00000000ff
assert capi.ncclCommUserRank(late) == 1
background = capi.ncclCommSplit(1, 9, 0)
assert not background
capi.ncclGroupEnd()
assert background == late
""",
        PYNCCL_LIBRARY=compile_library(KEPT + source(instead=LATE), "liblate.so"),
    )


def test_group_depth_counts_this_thread(run_python: Run, null: str) -> None:
    run_python(
        """
import threading
from pynccl import capi
from pynccl._native import lib
capi.ncclGroupStart(); capi.ncclGroupStart()
assert lib.pynccl_group_depth() == 2
seen = []
thread = threading.Thread(target=lambda: seen.append(lib.pynccl_group_depth()))
thread.start(); thread.join()
assert seen == [0]
capi.ncclGroupEnd()
capi.ncclGroupSimulateEnd()
assert lib.pynccl_group_depth() == 0
capi.ncclGroupEnd()
assert lib.pynccl_group_depth() == 0
""",
        PYNCCL_LIBRARY=null,
    )


def test_threads_that_load_at_once(run_python: Run, null: str) -> None:
    run_python(
        """
import sys, threading
sys.setswitchinterval(1e-6)
from pynccl import capi
failures = []
def work():
    try:
        for _ in range(200):
            assert capi.ncclCommCount(1) and capi.ncclGetErrorString(1) == "text 1"
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
""",
        PYNCCL_LIBRARY=null,
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_type_checker_sees_signatures(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from pynccl import capi, get_version\n"
        "handle: int = capi.ncclCommInitRank(2, capi.ncclGetUniqueId(), 0)\n"
        "capi.ncclAllReduce(1, 2, 3, capi.ncclFloat32, capi.ncclSum, handle, 0)\n"
        "major, minor, patch = get_version()\n"
        "capi.ncclAllReduce(1, 2, 3, 'float32', capi.ncclSum, handle, 0)\n"
        "capi.ncclCommCount()\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program)]
    done = completed(command, timeout=115, cwd=ROOT)
    errors = [line for line in done.stdout.splitlines() if "program.py" in line and ": error:" in line]
    assert len(errors) == 2, done.stdout
    assert ":5:" in errors[0]
    assert ":6:" in errors[1]
