"""`pynccl bench` in nccl-tests' terms: bandwidths of all programs, lines, keys of documents, defaults."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench_runs import changed_library, environment
from processes import completed
from pynccl._tools.bench.settings import Settings

HERE = Path(__file__).parent
NRANKS = 4
# How src/NAME.cu of nccl-tests 2.19.6 has them: the bytes of its algorithm bandwidth, of a line's count of
# elements; and the factor from there to the bus bandwidth.
BANDWIDTHS = {
    "all_reduce": (lambda n: 1, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: n, lambda n: (n - 1) / n),
    "broadcast": (lambda n: 1, lambda n: 1),
    "reduce_scatter": (lambda n: n, lambda n: (n - 1) / n),
    "reduce": (lambda n: 1, lambda n: 1),
    "alltoall": (lambda n: n, lambda n: (n - 1) / n),
    # Those of the rank that receives most; evenly spread here.
    "alltoallv": (lambda n: n, lambda n: (n - 1) / n),
    "scatter": (lambda n: n, lambda n: (n - 1) / n),
    "gather": (lambda n: n, lambda n: (n - 1) / n),
    "sendrecv": (lambda n: 1, lambda n: 1),
    "hypercube": (lambda n: n - 1, lambda n: 1),
    # A program of pynccl's own, with sendrecv's traffic.
    "put_signal": (lambda n: 1, lambda n: 1),
}
# Other flags, and the name of their output in formats.txt.
FORMS = {
    "a root, and no check": ["broadcast", "-r", "1", "-c", "0"],
    "no in-place form": ["alltoall", "-b", "32K", "-f", "2"],
    "each iteration": ["all_reduce", "-n", "3", "-I", "1", "-K", "1", "-m", "2", "-p", "1"],
    "CPU time, time of day and memory": ["all_reduce", "-C", "1", "-S", "1", "-M", "1", "-z", "3", "-u", "1"],
}
# Starting Python costs more than a measurement.
PROGRAM = """
import json, sys
from pynccl.__main__ import main
for name, args in json.loads(sys.argv[1]).items():
    print("=== " + name, flush=True)
    assert main(["bench", *args]) == 0
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """Return what the programs and the forms print, and the folder of their documents and tables."""
    folder = tmp_path_factory.mktemp("bench")
    common = ["-t", "2", "-g", "2", "-b", "64K", "-e", "64K", "-n", "2", "-w", "0"]
    runs = {}
    for name, (program, *args) in ({name: [name] for name in BANDWIDTHS} | FORMS).items():
        files = ["--save", str(folder / f"{name}.json"), "--csv", str(folder / f"{name}.csv")]
        runs[name] = [program, *common, *files, *args]
    # Each rank sends as much to each.
    even = environment(NCCL_TESTS_ALLTOALLV_SPREAD="0")
    done = completed([sys.executable, "-c", PROGRAM, json.dumps(runs)], env=even)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = done.stdout.split("=== ")[1:]
    return dict(part.split("\n", 1) for part in parts), folder


def results(outputs: tuple[dict[str, str], Path], name: str) -> list[dict[str, Any]]:
    document = json.loads((outputs[1] / f"{name}.json").read_text())
    return list(document["results"])


# --- bandwidths ---


@pytest.mark.parametrize("name", BANDWIDTHS)
def test_bandwidths(outputs: tuple[dict[str, str], Path], name: str) -> None:
    blocks, factor = BANDWIDTHS[name]
    (row,) = results(outputs, name)
    (line,) = [line.split() for line in outputs[0][name].splitlines() if line.startswith("  ")]
    for half, columns in (("out_of_place", line[5:8]), ("in_place", line[9:12])):
        figures = row[half]
        algorithm = 4 * row["count"] * blocks(NRANKS) / figures["time"] / 1e3
        assert figures["alg_bw"] == pytest.approx(algorithm, rel=1e-3, abs=1e-6)
        assert figures["bus_bw"] == pytest.approx(figures["alg_bw"] * factor(NRANKS), rel=1e-3, abs=2e-6)
        shown = [figures[key] for key in ("time", "alg_bw", "bus_bw")]
        assert [float(column) for column in columns] == pytest.approx(shown, abs=0.51)
        # The columns of bandwidths have two decimals.
        assert [float(column) for column in columns[1:]] == pytest.approx(shown[1:], abs=0.0051)


# --- lines ---


def masked(text: str) -> list[str]:
    """Return the lines with # for each figure that another run has otherwise, in columns as wide."""
    found = []
    for line in text.splitlines():
        if line.startswith("  "):
            more = [7, 7, 7, 7] if "i_min" in text else []
            line = _columns(line, [7, 6, 6, 6, *more] * 2)
        line = re.sub(r"(version|headers=|library=)( ?)[\d.]+", r"\1\2#", line)
        line = re.sub(r"Pid +\d+ on +\S+ device", "Pid # device", line)
        line = re.sub(r"(bandwidth +: )\S+ ", r"\1# ", line)
        line = re.sub(r"(Initialization|Collective|Total) ( ?)\d+(\.\d+)? [KMG]?B", r"\1 \2# B", line)
        found.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "YYYY-MM-DD HH:MM:SS", line))
    return found


def _columns(line: str, widths: list[int]) -> str:
    line, rest = line[:52], line[52:]
    for width in widths:
        column, rest = rest[: 2 + width], rest[2 + width :]
        figure = re.fullmatch(rf"  (?= *[\d.]+(e[+-]\d\d)?$).{{{width}}}", column)
        line += column if column.strip() in ("0", "N/A") or not figure else "#".rjust(2 + width)
    return line + rest


def test_the_lines_of_other_flags(outputs: tuple[dict[str, str], Path]) -> None:
    found = [line for name in FORMS for line in [f"=== {name}", *masked(outputs[0][name])]]
    assert found == (HERE / "formats.txt").read_text().splitlines()


# --- documents and tables ---


# The names that nccl-tests gives to jsonKey.
KEYS = {
    "document": """version start_time args env nccl_version config results out_of_bounds average_bus_bandwidth
        errors end_time""",
    "config": """nthreads ngpus minimum_bytes maximum_bytes step_bytes warmup_iters iterations
        aggregated_iterations validation graph blocking_collectives per_iter_timing per_iter_skip
        parallel_init devices""",
    "device": "rank group pid hostname device device_hex device_info",
    "out_of_bounds": "count okay",
    "average_bus_bandwidth": "bandwidth okay",
    "line": "size count type redop root out_of_place in_place actual_iterations experiment_name",
    "half": "time alg_bw bus_bw nwrong",
    # Of one process, whose times are those of all.
    "per_iter": """skipped_iterations min_us max_us avg_us p50_us p95_us p99_us stdev_us cv_pct
        times_us""",
}


def test_the_keys_of_the_document(outputs: tuple[dict[str, str], Path]) -> None:
    """No more and no fewer."""
    keys = {name: set(text.split()) for name, text in KEYS.items()}
    document = json.loads((outputs[1] / "all_reduce.json").read_text())
    assert set(document) == keys["document"]
    assert set(document["config"]) == keys["config"]
    devices = document["config"]["devices"]
    assert [device["rank"] for device in devices] == [0, 1, 2, 3]
    assert set(devices[0]) == keys["device"]
    assert set(document["out_of_bounds"]) == keys["out_of_bounds"]
    assert set(document["average_bus_bandwidth"]) == keys["average_bus_bandwidth"]
    (row,) = document["results"]
    assert set(row) == keys["line"]
    assert set(row["in_place"]) == set(row["out_of_place"]) == keys["half"]
    (row,) = results(outputs, "each iteration")
    assert set(row) == keys["line"] | {"out_of_place_per_iter", "in_place_per_iter"}
    assert set(row["in_place_per_iter"]) == keys["per_iter"]
    (row,) = results(outputs, "CPU time, time of day and memory")
    assert set(row["in_place"]) == keys["half"] - {"time"} | {"cpu_time"}
    (row,) = results(outputs, "a root, and no check")
    assert (row["root"], row["in_place"]["nwrong"]) == ("     1", None)


def test_the_first_line_of_the_table(outputs: tuple[dict[str, str], Path]) -> None:
    first = "size,count,type,redop,root,time_us,algbw,busbw,wrong,"
    first += "in_place_time_us,in_place_algbw,in_place_busbw,in_place_wrong"
    assert (outputs[1] / "all_reduce.csv").read_text().splitlines()[0] == first
    percentiles = ",p50_us,p99_us,in_place_p50_us,in_place_p99_us"
    assert (outputs[1] / "each iteration.csv").read_text().splitlines()[0] == first + percentiles
    _, line = (outputs[1] / "no in-place form.csv").read_text().splitlines()[:2]
    # The half that is not checked.
    assert line.startswith("32768,2048,float,none,-1,") and line.endswith(",")


# --- defaults ---


def test_the_defaults_are_those_of_nccl_tests() -> None:
    """The initial values of src/util.cu of nccl-tests 2.19.6; None: none is given to the library."""
    expected = {
        "nthreads": 1,
        "ngpus": 1,
        "minbytes": 32 * 1024 * 1024,
        "maxbytes": 32 * 1024 * 1024,
        "stepbytes": 1024 * 1024,
        "stepfactor": 1,
        "iters": 20,
        "agg_iters": 1,
        "warmup_iters": 1,
        "run_cycles": 1,
        "parallel_init": 0,
        "check": 1,
        "op": "sum",
        "datatype": "float",
        "root": 0,
        "blocking": 0,
        "stream_null": 0,
        "timeout": 0,
        "report_cputime": 0,
        "report_timestamps": 0,
        "output_file": None,
        "average": 1,
        "local_register": 0,
        "cta_policy": None,
        "memory": 0,
        "unalign": 0,
        "per_iter_timing": 0,
        "per_iter_skip": 0,
    }
    assert {name: value for name, value in asdict(Settings()).items() if name in expected} == expected
    own = {"csv", "save", "against", "tolerance", "compare", "p2p", "plot", "percentiles"}
    assert set(asdict(Settings())) - set(expected) == own | {"terminal", "onto_terminal"}


# --- what the library is asked for ---

# Tells of each call by a letter, and of addresses. Waits and meetings last 20 ms.
TELLS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <unistd.h>
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int pyncclCpuStreamSynchronize(ncclComm_t, cudaStream_t, long);
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  if (n == 25000) fprintf(stderr, "c %p %p\\n", s, r);
  else {
    fprintf(stderr, "m\\n");
    usleep(20000);
  }
  return REAL(ncclAllReduce)(s, r, n, type, op, comm, stream);
}
int pyncclCpuStreamSynchronize(ncclComm_t comm, cudaStream_t stream, long slice) {
  int result = REAL(pyncclCpuStreamSynchronize)(comm, stream, slice);
  // Else the slice has passed.
  if (result == 0) {
    fprintf(stderr, "w\\n");
    usleep(20000);
  }
  return result;
}
ncclResult_t ncclGroupStart(void) {
  fprintf(stderr, "g\\n");
  return REAL(ncclGroupStart)();
}
ncclResult_t ncclGroupEnd(void) {
  fprintf(stderr, "e\\n");
  return REAL(ncclGroupEnd)();
}
ncclResult_t ncclMemAlloc(void** p, size_t n) {
  ncclResult_t result = REAL(ncclMemAlloc)(p, n);
  fprintf(stderr, "memory %p %zu\\n", *p, n);
  return result;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* p, size_t n, void** handle) {
  fprintf(stderr, "register %p %zu\\n", p, n);
  return REAL(ncclCommRegister)(comm, p, n, handle);
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* p, size_t n, ncclWindow_t* window, int flags) {
  fprintf(stderr, "window %p %zu %d\\n", p, n, flags);
  return REAL(ncclCommWindowRegister)(comm, p, n, window, flags);
}
"""
Told = dict[str, tuple[list[list[str]], dict[str, Any]]]
FLAGS = ["", "-w 2", "-c 2", "-m 4", "-z 1", "-z 2", "-z 3", "-C 1", "-R 1", "-R 2", "-u 3"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return what the library was asked for with each of FLAGS, and the line's results."""
    folder = tmp_path_factory.mktemp("told")
    library = changed_library(folder, TELLS)
    common = ["-b", "100000", "-e", "100000", "-n", "3", "-w", "0", "-c", "0"]
    runs = {
        flags: ["all_reduce", *common, "--save", str(folder / f"{flags}.json"), *flags.split()]
        for flags in FLAGS
    }
    program = PROGRAM.replace('"=== " + name', '"=== " + name, file=sys.stderr')
    done = completed(
        [sys.executable, "-c", program, json.dumps(runs)], env=environment(PYNCCL_LIBRARY=library)
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for part in done.stderr.split("=== ")[1:]:
        flags, _, text = part.partition("\n")
        (row,) = json.loads((folder / f"{flags}.json").read_text())["results"]
        found[flags] = [line.split() for line in text.splitlines()], row
    return found


# With each of FLAGS, the timed iterations: calls, groups, waits, and meetings, which end with a wait.
TIMED = {
    "": "cccw",
    "-m 4": "gcccce" * 3 + "w",
    "-z 1": "cwmw" * 3 + "w",
    "-z 2": "cw" * 3 + "w",
    "-z 3": "cwmw" * 3 + "w",
    "-C 1": "cccw",
}


def test_how_often_and_when_the_library_is_called(told: Told) -> None:
    """A half is a first call, the timed ones, and the exchange of times; then there are the checks."""

    def asked(flags: str) -> str:
        return "".join(words[0] for words in told[flags][0] if len(words[0]) == 1)

    for flags, timed in TIMED.items():
        assert re.fullmatch(f"w*(cwmw{timed}w){{2}}w*", asked(flags)), (flags, asked(flags))
    assert re.fullmatch("w*ccw(cwmwcccww){2}w*", asked("-w 2")), asked("-w 2")
    # Ranks meet before a call whose data they have written.
    assert re.fullmatch("w*(mwcwmwcccww(mwcww){2}){2}w*", asked("-c 2")), asked("-c 2")


def test_what_the_times_hold(told: Told) -> None:
    """-C: not the wait at the end, 20 ms after three calls; -z 3: not the meetings, each of 20 ms."""
    for half in ("out_of_place", "in_place"):
        whole = {flags: 100 / told[flags][1][half]["alg_bw"] for flags in TIMED}
        reported = {flags: next(iter(told[flags][1][half].values())) for flags in TIMED}
        assert reported[""] == pytest.approx(whole[""], rel=0.01)
        assert whole["-C 1"] - reported["-C 1"] > 0.99 * 20_000 / 3
        assert reported["-z 1"] >= 40_000 and reported["-z 2"] >= 20_000
    least = min(told["-z 3"][1][half]["time"] for half in ("out_of_place", "in_place"))
    assert 20_000 <= least < 40_000


def test_which_buffers_the_calls_have(told: Told) -> None:
    for flags in FLAGS:
        asked, _ = told[flags]
        elements = 3 if flags == "-u 3" else 0
        nbytes = 100_000 + 8 * elements
        send, recv = (words[1] for words in asked if words[0] == "memory" and words[2] == str(nbytes))
        pairs = {(int(words[1], 16), int(words[2], 16)) for words in asked if words[0] == "c"}
        first, second = (int(address, 16) + 4 * elements for address in (send, recv))
        assert pairs == {(first, second), (second, second)}, flags
        registered = [words for words in asked if words[0] in ("register", "window")]
        expected: dict[str, list[list[str]]] = {
            "-R 1": [["register", address, str(nbytes)] for address in (send, recv)],
            # The last is NCCL_WIN_COLL_SYMMETRIC.
            "-R 2": [["window", address, str(nbytes), "1"] for address in (send, recv)],
        }
        assert registered == expected.get(flags, []), flags
