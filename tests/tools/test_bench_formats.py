"""`pynccl bench` in nccl-tests' terms: bandwidths of all programs, lines, keys of documents, defaults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import pynccl
from bench_runs import changed_library, environment
from processes import completed
from pynccl import capi
from pynccl._tools.bench.measure import Case, Half
from pynccl._tools.bench.operations import OPERATIONS, Counts, Shape
from pynccl._tools.bench.progress import Progress
from pynccl._tools.bench.report import Report
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
    # redop may be empty.
    for half, columns in (("out_of_place", line[-8:-5]), ("in_place", line[-4:-1])):
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
        width = 5 if rest.startswith("    N/A") else width
        column, rest = rest[: 2 + width], rest[2 + width :]
        figure = re.fullmatch(rf"  (?= *[\d.]+(e[+-]\d\d)?$).{{{width}}}", column)
        line += column if column.strip() in ("0", "N/A") or not figure else "#".rjust(2 + width)
    return line + rest


def test_the_lines_of_other_flags(outputs: tuple[dict[str, str], Path]) -> None:
    found = [line for name in FORMS for line in [f"=== {name}", *masked(outputs[0][name])]]
    assert found == (HERE / "formats.txt").read_text().splitlines()


# --- what nccl-tests itself writes ---

# What nvidia/nccl_tests_util.cu, src/util.cu of nccl-tests 2.19.6, has of other files and of CUDA.
HEADERS = {
    "util.h": """
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include "nccl.h"
using std::max;
#define NCCL_TESTS_VERSION "2.19.6"
enum testResult_t { testSuccess, testNotImplemented };
struct cudaDeviceProp { int pciDomainID, pciBusID, pciDeviceID; char name[256]; size_t totalGlobalMem; };
inline void cudaGetDeviceCount(int* n) { *n = 1024; }
inline void cudaGetDeviceProperties(cudaDeviceProp* prop, int) { *prop = {0, 0, 0, "CPU library", 0}; }
#define CUDACHECK(call) call
extern int test_ncclVersion;
extern thread_local int is_main_thread;
void writeTimestamp();
struct memInfo_t { int64_t amount; const char* name; };
struct IterStats { double min, max, avg, p50, p95, p99, stdev; };
""",
    "os.h": """
inline int ncclTestGetPid() { return atoi(getenv("PID")); }
#define ncclTestAsprintf asprintf
""",
}
# Reads settings, then lines with both their halves, and writes them by that file.
WRITER = """
#include <iostream>
#include <unistd.h>
#include <vector>
#include "nccl_tests_util.cu"
int nThreads, nGpus, datacheck, warmup_iters, iters, agg_iters, parallel_init, blocking_coll, per_iter_timing;
int per_iter_skip, cudaGraphLaunches, unalign, test_ncclVersion;
size_t minBytes, maxBytes, stepBytes, stepFactor;
thread_local int is_main_thread = 1;
const char* ncclGetLastError(ncclComm_t) { return nullptr; }
template <class T> T next() {
  T value;
  std::cin >> value;
  return value;
}
int main(int argc, char** argv) {
  std::cin >> test_ncclVersion >> nThreads >> nGpus >> minBytes >> maxBytes >> stepBytes >> stepFactor >>
      warmup_iters >> iters >> agg_iters >> datacheck >> blocking_coll >> per_iter_timing >> per_iter_skip >>
      parallel_init >> unalign;
  bool onHost = next<int>(), timestamps = next<int>();
  double least = next<double>();
  jsonOutputInit(argv[1], argc, argv, environ);
  size_t most = 0;
  writeDeviceReport(&most, 0, 0, 1, 0, argv[2], argv[3]);
  writeResultHeader(onHost, timestamps);
  int errors = 0, halves = 0;
  double bus = 0;
  for (int lines = next<int>(); lines; lines--) {
    size_t size = next<size_t>(), count = next<size_t>();
    std::string type = next<std::string>(), op = next<std::string>();
    writeBenchmarkLinePreamble(size, count, type.c_str(), op.c_str(), next<int>());
    for (int inPlace = 0; inPlace < 2; inPlace++, halves++) {
      double time = next<double>(), algBw = next<double>(), busBw = next<double>();
      int64_t wrong = next<int64_t>();
      writeBenchmarkLineBody(time, algBw, busBw, wrong >= 0, wrong, onHost, timestamps, !inPlace);
      errors += wrong > 0;
      bus += busBw;
      if (!per_iter_timing) continue;
      std::vector<double> processes(2 * iters), slowest(iters);
      for (double& value : processes) value = next<double>();
      for (int i = 0; i < iters; i++) slowest[i] = std::max(processes[i], processes[iters + i]);
      IterStats stats;
      computeIterStats(slowest.data() + per_iter_skip, iters - per_iter_skip, &stats);
      writePerIterReport(&stats, slowest.data(), iters, per_iter_skip, !inPlace, processes.data(), 2);
      if (inPlace && timestamps) writeTimestamp();
    }
    writeBenchmarkLineTerminator(iters, "");
  }
  bus /= halves;
  writeResultFooter(&errors, &bus, least, argv[3]);
  finalizeFooter();
  writeErrors();
  jsonOutputFinalize();
}
"""
DEVICE = re.compile(r"#  Rank  0 Group  0 Pid +(\d+) on +(\S+) device .*")
VERSION = 23203
READ = """nthreads ngpus minbytes maxbytes stepbytes stepfactor warmup_iters iters agg_iters check blocking
    per_iter_timing per_iter_skip parallel_init unalign report_cputime report_timestamps"""
RUNS = [
    Settings(maxbytes=1 << 36, stepfactor=2),
    Settings(minbytes=0, iters=12, agg_iters=3, warmup_iters=0, check=0, blocking=1, unalign=3),
    Settings(nthreads=2, ngpus=4, blocking=2, report_cputime=1, report_timestamps=1, parallel_init=1),
    Settings(iters=7, per_iter_timing=1, blocking=3),
    Settings(iters=30, per_iter_timing=1, per_iter_skip=4, report_timestamps=1, stepbytes=4096),
]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    for name, text in {**HEADERS, "writer.cpp": WRITER}.items():
        (folder / name).write_text(text)
    include = [folder, HERE / "nvidia", Path(pynccl.cpu_library()).parent / "forward/include"]
    command = ["g++", "-std=c++17", *(f"-I{path}" for path in include), "writer.cpp", "-o", "writer"]
    subprocess.run(command, cwd=folder, check=True, timeout=50)
    return folder / "writer"


def figure(random: Random, least: int, most: int) -> float:
    """Return a figure of any number of digits, or 0."""
    return random.choice((0.0, float(f"1e{most}"), *(10 ** random.uniform(least, most) for _ in range(9))))


def some_half(random: Random, settings: Settings) -> Half:
    wrong = random.choice((0, 1, 123_456, 12_345_678)) if settings.check else None
    half = Half(figure(random, -3, 9), figure(random, -4, 6), figure(random, -4, 6), wrong, int(bool(wrong)))
    if settings.per_iter_timing:
        half.processes = [[10 ** random.uniform(-7, 2) for _ in range(settings.iters)] for _ in range(2)]
        half.iterations = [max(times) for times in zip(*half.processes, strict=True)]
    return half


def some_case(random: Random) -> Case:
    program = random.choice(("all_reduce", "all_gather", "broadcast", "reduce"))
    op = random.choice(("sum", "avg", "mulsum")) if OPERATIONS[program].reduces else "none"
    count, itemsize = random.choice((0, 1, 77, 1 << 20, 1 << 38)), random.choice((1, 8))
    counts, shape = Counts(count, count, count // 2), Shape(count, itemsize, 4)
    root = random.randrange(200) if OPERATIONS[program].rooted else -1
    return Case(OPERATIONS[program], "f8e4m3" if itemsize == 1 else "double", op, root, 0, shape, counts)


@pytest.mark.parametrize("least", [None, "1000", "1e9"])
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_the_writer_of_nccl_tests(
    outputs: tuple[dict[str, str], Path],
    writer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    run: int,
    least: str | None,
) -> None:
    """nccl-tests' own code, given the same figures, writes the same lines and the same document."""
    random, mine, theirs = Random(run), tmp_path / "mine.json", tmp_path / "theirs.json"
    settings = replace(RUNS[run], output_file=str(mine))
    # This process loads no library.
    monkeypatch.setattr(capi, "ncclGetVersion", lambda: VERSION)
    if least is None:
        monkeypatch.delenv("NCCL_TESTS_MIN_BW", raising=False)
    else:
        monkeypatch.setenv("NCCL_TESTS_MIN_BW", least)
    lines = [(some_case(random), some_half(random, settings), some_half(random, settings)) for _ in range(40)]
    device = next(match for line in outputs[0]["all_reduce"].splitlines() if (match := DEVICE.match(line)))

    words = [VERSION, *(getattr(settings, name) for name in READ.split()), least or -1]
    words.append(len(lines))
    for case, *halves in lines:
        words += [case.nbytes, case.counts.param, case.type_name, case.op, case.root]
        for half in halves:
            words += [half.microseconds, half.algorithm, half.bus, -1 if half.wrong is None else half.wrong]
            words += [seconds for times in half.processes for seconds in times]
    done = completed(
        [writer, theirs, device[2], "all_reduce_perf"],
        input=" ".join(map(str, words)),
        env=environment(PID=device[1]),
    )
    assert done.returncode == 0, done.stderr

    report = Report(settings, "all_reduce", 4, Progress(None, None))
    report.header([device[0]] * settings.ranks_each)
    for case, *halves in lines:
        report.begin(case)
        for half, in_place in zip(halves, (False, True), strict=True):
            report.half(half, in_place)
        report.end()
    report.footer(None)
    found, expected = capsys.readouterr().out.splitlines(), done.stdout.splitlines()
    # Only these differ: the name, the clock, the file, and a device's number.
    assert found.pop(1).startswith("# pynccl bench version ") and expected.pop(1).startswith("# nccl-tests ")
    assert list(map(same, found)) == list(map(same, expected))
    assert device[0] in expected

    documents = [json.loads(path.read_text()) for path in (mine, theirs)]
    for document in documents:
        del document["config"]["devices"][1:]
        for name in ("args", "env", "start_time", "end_time"):
            assert document.pop(name)
    compare(*documents)


def same(line: str) -> str:
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "(a time)", line)
    line = line.replace("CUDA event timing;", "host timing, each iteration waited for;")
    line = re.sub(r"^(#  Rank) .*", r"\1", line)
    return re.sub(r"(JSON output to ).*", r"\1", line)


def compare(mine: Any, theirs: Any, place: str = "") -> None:
    """Both hold the same; numbers have six decimals."""
    if isinstance(theirs, dict):
        assert set(mine) == set(theirs), place
        for name, value in theirs.items():
            compare(mine[name], value, f"{place}.{name}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), place
        for i, value in enumerate(theirs):
            compare(mine[i], value, f"{place}[{i}]")
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, abs=1.1e-6, rel=1e-12), place
    else:
        assert mine == theirs, place


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
        "cudagraph": 0,
    }
    assert {name: value for name, value in asdict(Settings()).items() if name in expected} == expected
    own = {"csv", "save", "against", "tolerance", "compare", "p2p", "plot", "beside", "percentiles"}
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
    common = ["-b", "100000", "-e", "100000", "--iters", "3", "-w", "0", "-c", "0"]
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
