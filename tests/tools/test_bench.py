"""`pynccl bench`: nccl-tests' programs, flags, output and JSON, on real ranks."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import pynccl
from bench_runs import LINE, bench, changed_library, environment, library_with, lines, run
from command_line import pynccl_command
from conftest import ROOT
from engines import Command, open_mpi, torchrun
from launchers import PYNCCL_RUN
from meeting import until
from processes import piped
from pynccl._library import cuda

HERE = Path(__file__).parent
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SHOWS_OP = (*REDUCTIONS, "sendrecv")
OUT_OF_PLACE = ("alltoall", "alltoallv", "sendrecv", "put_signal")
PROGRAMS = (*REDUCTIONS, "all_gather", "broadcast", "scatter", "gather", "hypercube", *OUT_OF_PLACE)

# --- output ---


def test_the_lines_are_those_of_nccl_tests() -> None:
    done = bench(2, "all_reduce_perf", "-b", "8", "-e", "128", "-f", "4", "-n", "3", "-w", "0")
    expected = (HERE / "all_reduce.txt").read_text().replace("{version}", pynccl.__version__)
    text = re.sub(r"=2\d{4}\b", "={nccl}", done.stdout)
    text = re.sub(r"Pid +\d+ on +\S+ device", "Pid #### device", text)
    masked = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        masked.append(line[: match.start(6)] if match else re.sub(r"(bandwidth +: )\S+ ", r"\1# ", line))
    assert masked == expected.splitlines()
    assert done.returncode == 0


# Some of them; `make test-slow` has all.
QUICK_PROGRAMS = ("all_reduce", "alltoall")


@pytest.mark.parametrize(
    ("program", "nranks"),
    [
        pytest.param(name, n, marks=[] if n == 2 and name in QUICK_PROGRAMS else pytest.mark.slow)
        for name in PROGRAMS
        for n in (2, 3)
    ],
)
def test_every_program_is_right(program: str, nranks: int) -> None:
    if program == "hypercube" and nranks == 3:
        assert "hypercube: 3 ranks; expected a power of two" in bench(3, program).stderr
        nranks = 4
    done = bench(nranks, program, "-d", "all", "-o", "all", "-b", "1K", "-e", "130K", "-f", "130", "-n", "2")
    found = lines(done)
    assert {line["type"] for line in found} >= {"int8", "uint64", "half", "double"}
    ops = {"sum", "prod", "max", "min", "avg", "mulsum"}
    # As in nccl-tests' sources: sendrecv.cu names the reductions, and hypercube.cu nothing.
    ops = ops if program in SHOWS_OP else {""} if program == "hypercube" else {"none"}
    assert {line["op"] for line in found} == ops
    assert {line["wrong"] for line in found} == {"0"}
    assert {line["wrong_in_place"] for line in found} == {"N/A" if program in OUT_OF_PLACE else "0"}
    assert "# Out of bounds values : 0 OK\n" in done.stdout


@pytest.fixture(scope="module")
def wrong_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile the CPU library with an all_reduce that changes one bit of one element."""
    change = "if (n > 100) ((unsigned char*)r)[4 * (n / 2)] ^= 1;"
    return library_with(tmp_path_factory.mktemp("wrong"), change)


def test_one_wrong_element_is_found(wrong_library: str) -> None:
    done = bench(
        2, "all_reduce", "-b", "4", "-e", "4K", "-f", "1024", "-n", "2", PYNCCL_LIBRARY=wrong_library
    )
    assert done.returncode == 1, done.stderr
    rows = [LINE.fullmatch(line) for line in done.stdout.splitlines() if line.startswith("  ")]
    # Two ranks have one wrong element each. nccl-tests counts the threads that see one, in each half.
    assert [(row["wrong"].strip(), row["wrong_in_place"].strip()) for row in rows if row] == [
        ("0", "0"),
        ("2", "2"),
    ]
    assert "# Out of bounds values : 4 FAILED\n" in done.stdout


@pytest.mark.slow
def test_uneven_traffic_from_a_file(tmp_path: Path) -> None:
    matrix = tmp_path / "matrix"
    matrix.write_text("0 160 320\n1600 0 16\n32 64 0\n")
    done = bench(3, "alltoallv", "-b", "4K", "-e", "4K", NCCL_TESTS_ALLTOALLV_MATRIX_FILE=str(matrix))
    (line,) = lines(done)
    # Rank 0 receives most, 1632 bytes.
    assert (line["size"], line["count"], line["wrong"]) == ("1632", "0", "0")
    for sizes, words in (
        (("-b", "4K", "-e", "8K"), "expected one size, since the file has the bytes"),
        (("-b", "1K", "-e", "1K"), "expected 1632 bytes or more, which a rank sends or receives"),
    ):
        done = bench(3, "alltoallv", *sizes, NCCL_TESTS_ALLTOALLV_MATRIX_FILE=str(matrix))
        assert (done.returncode, done.stdout) == (2, "")
        assert words in " ".join(done.stderr.split())
    matrix.write_text("0 160\n1600\n")
    done = bench(2, "alltoallv", NCCL_TESTS_ALLTOALLV_MATRIX_FILE=str(matrix))
    assert done.returncode == 2
    assert "NCCL_TESTS_ALLTOALLV_MATRIX_FILE is" in done.stderr
    assert "expected a square matrix" in done.stderr


def test_the_summary_of_the_traffic(tmp_path: Path) -> None:
    """The lines of nccl-tests, in the middle of a line: bytes of each rank, and bandwidths from the time."""
    matrix = tmp_path / "matrix"
    matrix.write_text("0 80 160 0\n800 0 8 0\n16 32 0 0\n0 0 0 0\n")
    of_file = {"NCCL_TESTS_ALLTOALLV_MATRIX_FILE": str(matrix), "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE": "2"}
    for variables, title, moved in (
        ({}, "mode=generated nranks=3 total_bytes=12000 spread=1.000", [(12000, 12000)] * 3),
        (of_file, "mode=matrix nranks=3 matrix_dim=4 scale=2.000", [(480, 1632), (1616, 224), (96, 336)]),
    ):
        command = [sys.executable, "-m", "pynccl", "bench", "alltoallv", "-g", "3", "-n", "2"]
        variables = variables | {"NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY": "1"}
        done = run(*command, "-b", "12000", "-e", "12000", **variables)
        assert done.returncode == 0, done.stderr
        text = done.stdout.partition("(GB/s)         \n")[2].partition("# Out of")[0]
        begin, out_of_place, in_place = text.split("# NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY: ")
        assert re.fullmatch(r" +\d+ +\d+ +float +none +-1", begin)
        for half, checked in ((out_of_place, "     0"), (in_place, "  N/A\n")):
            lines_of_half = half.split("\n", 4)
            found = re.fullmatch(re.escape(title) + r" time_usec=(\d+\.\d\d)", lines_of_half[0])
            assert found, half
            for rank, (sent, received) in enumerate(moved):
                line = re.fullmatch(
                    rf"#   rank={rank} send_bytes={sent} recv_bytes={received} "
                    r"alg_bw=(\d+\.\d\d) bus_bw=(\d+\.\d\d)",
                    lines_of_half[1 + rank],
                )
                assert line, half
                bandwidth = max(sent, received) / float(found[1]) / 1e3
                assert float(line[1]) == pytest.approx(bandwidth, abs=0.0051)
                assert float(line[2]) == pytest.approx(bandwidth * 2 / 3, abs=0.0051)
            time_column, *_ = lines_of_half[4].split()
            assert float(time_column) == pytest.approx(float(found[1]), rel=0.01)
            assert lines_of_half[4].endswith(checked)


def test_without_the_summary() -> None:
    off = bench(2, "alltoallv", "-b", "4K", "-e", "4K", NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY="0")
    assert len(lines(off)) == 1
    wrong = pynccl_command("bench", "-n", "2", "alltoallv", NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY="yes")
    assert wrong.exit_code == 2
    words = "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY is 'yes'; expected 1, or 0"
    assert words in " ".join(wrong.stderr.split())


def test_traffic_as_in_nccl_tests() -> None:
    """28, the sum of the distances, does not divide 7808. Shares are cut to 16 bytes after one rounding."""
    args = ["alltoallv", "-g", "8", "-b", "7808", "-e", "7808", "-n", "1", "-w", "0"]
    (line,) = lines(run(sys.executable, "-m", "pynccl", "bench", *args))
    shares = [7808 * distance // 28 & ~15 for distance in range(8)]
    assert (line["size"], line["wrong"]) == (str(sum(shares)), "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/dev/zero", "it is no regular file"),
        ("0 99999999999999999999\n0 0\n", "with 1e+20; expected bytes, 0 to 2**50"),
        ("0 -1\n0 0\n", "with -1; expected bytes, 0 to 2**50"),
    ],
)
def test_traffic_that_is_too_much(tmp_path: Path, file: str, words: str) -> None:
    matrix = Path(file) if file.startswith("/") else tmp_path / "matrix"
    if matrix.parent == tmp_path:
        matrix.write_text(file)
    done = bench(2, "alltoallv", NCCL_TESTS_ALLTOALLV_MATRIX_FILE=str(matrix))
    assert done.returncode == 2
    assert f"NCCL_TESTS_ALLTOALLV_MATRIX_FILE is '{matrix}'" in done.stderr
    assert words in done.stderr


def test_make_bench_runs_every_program() -> None:
    shown = run("make", "-n", "-C", str(ROOT), "bench").stdout
    assert set(re.findall(r"pynccl bench -n 4 --cpu (\w+) ", shown)) == set(PROGRAMS)


# --- JSON ---


def test_nvidias_analyzer_reads_the_document(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    args = ["-b", "8", "-e", "8K", "-f", "32", "-n", "7", "-I", "1", "-K", "2", "-J", str(file)]
    for name in (file, tmp_path / "results.json.0"):
        done = bench(2, "all_reduce", *args, NCCL_TESTS_X="y", PYNCCL_SECRET="a secret of the test's own")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"# Writing JSON output to {name}\n")
        assert "# Per-Iteration Report: host timing" in done.stdout
    document = json.loads(file.read_text())
    assert document["version"] == 3
    assert document["config"]["devices"][1]["rank"] == 1
    assert document["config"] | {"iterations": 7, "per_iter_skip": 2, "step_factor": 32} == document["config"]
    assert [row["size"] for row in document["results"]] == [8, 256, 8192]
    first = document["results"][0]
    assert first["out_of_place"]["nwrong"] == 0
    assert len(first["in_place_per_iter"]["times_us"]) == 7
    assert len(first["in_place_per_iter"]["per_process_max_times_us"]) == 2
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert document["average_bus_bandwidth"]["okay"] == "unchecked"
    assert "NCCL_TESTS_X=y" in document["env"]
    assert not any("a secret of" in text for text in document["env"])
    analyzed = run(sys.executable, str(HERE / "nvidia" / "analyze_perf_json.py"), str(file), "--all")
    assert analyzed.returncode == 0, analyzed.stderr
    assert "Process rows: 2" in analyzed.stdout
    assert "PER-PROCESS STRAGGLER ANALYSIS" in analyzed.stdout
    assert len(re.findall(r"^ +(8|256|8192) +[\d.]+ ", analyzed.stdout, re.MULTILINE)) >= 3


@pytest.mark.parametrize("thread", ["main", "other"])
def test_the_document_of_a_run_that_fails(tmp_path: Path, thread: str) -> None:
    file = tmp_path / "results.json"
    args = ["-b", "4K", "-e", "4K", "-t", "2", "-n", "2", "-N", "0", "-J", str(file)]
    command = [sys.executable, "-m", "pynccl", "bench", "all_reduce", *args]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if LINE.fullmatch(line.rstrip("\n")))
        # The kernel may give a process's signal to any thread.
        tasks = sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/task"))
        task = process.pid if thread == "main" else next(t for t in tasks if t != process.pid)
        assert ctypes.CDLL(None).tgkill(process.pid, task, signal.SIGINT) == 0
        process.communicate(timeout=40)
    assert process.returncode not in (0, None)
    document = json.loads(file.read_text())
    assert document["results"][0]["size"] == 4096
    assert document["errors"][0].startswith("KeyboardInterrupt")


# --- flags ---


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["-m", "3", "-u", "3", "-C", "1", "-S", "1", "-M", "1", "-R", "1"],
            [
                "agg iters: 3",
                "unalign: 3",
                " cputime ",
                " %Y-%m-%d %H:%M:%S\n",
                "# Host memory usage    : Initialization ",
                " | User-Allocated 128 KB | Collective ",
            ],
        ),
        (
            ["-z", "1", "-y", "1", "-x", "1", "-w", "0", "-c", "3"],
            [
                "# Blocking Enabled: wait and barrier after each inner iteration (-m) \n",
                "warmup iters: 0 iters: 2 agg iters: 1 validation: 3",
            ],
        ),
        pytest.param(
            ["-z", "2", "-m", "2", "-R", "2"],
            ["# Blocking Enabled: wait after each inner iteration (-m), no barrier \n"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["-z", "3", "-a", "3", "-T", "20"],
            ["# Blocking Enabled: wait and barrier after each outer iteration (-n); time excludes"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_flags(args: list[str], words: list[str]) -> None:
    done = bench(2, "all_reduce", "-b", "4K", "-e", "64K", "-f", "16", "-n", "2", *args)
    assert [line["wrong"] + line["wrong_in_place"] for line in lines(done)] == ["00", "00"]
    assert not [text for text in words if text not in done.stdout], done.stdout


@pytest.fixture(scope="module")
def late_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile the CPU library with an all_reduce after which rank 1 is busy for 0.2 s."""
    # Barriers have other counts.
    sleep = 'if (n == 100 && atoi(getenv("RANK")) == 1) usleep(200000);'
    return library_with(tmp_path_factory.mktemp("late"), sleep)


@pytest.mark.slow
def test_whose_time_is_reported(late_library: str) -> None:
    """-a: the first rank's, the mean, the least, the most."""
    args = ("all_reduce", "-b", "400", "-e", "400", "-n", "1", "-w", "0")
    first, mean, least, most = (
        float(lines(bench(2, *args, "-a", mode, PYNCCL_LIBRARY=late_library))[0]["time"]) for mode in "0123"
    )
    assert most >= 200_000
    assert max(first, least) < mean < most


def test_a_wait_that_takes_too_long() -> None:
    """-T names the rank that is late."""
    done = bench(
        3, "all_reduce", "-b", "8", "-e", "8", "-T", "2", PYNCCL_CPU_FAULT="rank=1,call=30,action=sleep:60"
    )
    assert done.returncode == 1
    assert "# Test timeout: " in done.stdout
    waited = r"Error: all_reduce: (synchronize|barrier) did not complete (on stream \S+ )?within 2 s "
    # The call is a barrier, or one that rank 1 has not made.
    assert re.search(waited + r".*(; it waits for rank 1;| rank 1: #28 )", done.stderr), done.stderr


def test_policy_and_stream_reach_the_library(tmp_path: Path) -> None:
    """-x and -y."""
    code = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <nccl.h>
        #include <stdio.h>
        ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                            ncclConfig_t* config) {
          fprintf(stderr, "policy %d\\n", config->CTAPolicy);
          ncclResult_t (*real)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) =
              dlsym(RTLD_NEXT, "ncclCommInitRankConfig");
          return real(comm, nranks, id, rank, config);
        }
        ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
          if (n == 100) fprintf(stderr, "stream %s\\n", stream ? "of its own" : "NULL");
          ncclResult_t (*real)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) = dlsym(RTLD_NEXT, "ncclAllReduce");
          return real(s, r, n, type, op, comm, stream);
        }
    """
    args, library = ("all_reduce", "-b", "400", "-e", "400", "-n", "1"), changed_library(tmp_path, code)
    plain = bench(1, *args, PYNCCL_LIBRARY=library).stderr
    assert "stream of its own" in plain and "NULL" not in plain and "policy" not in plain
    other = bench(1, *args, "-x", "2", "-y", "1", PYNCCL_LIBRARY=library).stderr
    assert "stream NULL" in other and "of its own" not in other and "policy 2" in other


def test_help_lists_every_flag() -> None:
    """Those of nccl-tests, in its letters."""
    text = bench(1, "all_reduce", "-h").stdout
    assert re.findall(r"^ +-(\w), --", text, re.M) == list("tgbeifnmwNpcodrzyTCSJaRxMuIKGDVh")


def test_the_docs_list_every_flag() -> None:
    """docs/bench.md: letter, name, default and text are those of the help."""
    page = (ROOT / "docs" / "bench.md").read_text()
    words = "".join(bench(1, "all_reduce", "-h").stdout.split())
    helps = {text[:2]: text for text in re.split(r"(?=-\w,--)", words)}
    rows = re.findall(r"^\| `(-\w)`, `--(\w+)` \| (.*?) \| (.*) \|$", page, re.M)
    for letter, name, default, text in rows:
        assert helps[letter].startswith(f"{letter},--{name}")
        assert "".join(text.split()) in helps[letter]
        assert not default or f"[default:{default}" in helps[letter]
    assert {letter for letter, *_ in rows} == helps.keys() - {"-h", words[:2]}


@pytest.mark.parametrize("roots", ["-1", "all"])
def test_steps_cycles_and_roots(roots: str) -> None:
    found = lines(
        bench(2, "broadcast", "-b", "1K", "-e", "3K", "-i", "1K", "-n", "1", "-N", "2", "-r", roots)
    )
    assert [line["size"] for line in found] == ["1024", "2048", "3072"] * 4
    assert [line["root"] for line in found] == ["0"] * 6 + ["1"] * 6


def test_without_a_check() -> None:
    done = bench(2, "all_gather", "-b", "4K", "-e", "4K", "-c", "0")
    assert done.returncode == 0
    assert done.stdout.count("    N/A") == 2


@pytest.mark.parametrize("program", ["all_reduce", "sendrecv", "put_signal"])
def test_threads_and_devices_of_one_process(program: str) -> None:
    args = ["-t", "2", "-g", "2", "-p", "1", "-b", "4K", "-e", "4K", "-n", "2", "-m", "2"]
    done = run(sys.executable, "-m", "pynccl", "bench", program, *args)
    (line,) = lines(done)
    assert line["wrong"] == "0"
    assert len(re.findall(r"^#  Rank +\d Group +0 Pid .* CPU library$", done.stdout, re.MULTILINE)) == 4
    assert "# nThread 2 nGpus 2 " in done.stdout
    assert "# Parallel Init Enabled: threads call into NcclInitRank concurrently \n" in done.stdout


# Tells of each group call that creates ranks of a communicator of several: its thread and these ranks.
TELLS_OF_CREATIONS = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <nccl.h>
    #include <stdio.h>
    #include <unistd.h>
    static __thread int depth;
    static __thread char ranks[100];
    ncclResult_t ncclGroupStart(void) {
      depth++;
      return ((__typeof__(&ncclGroupStart))dlsym(RTLD_NEXT, "ncclGroupStart"))();
    }
    ncclResult_t ncclGroupEnd(void) {
      if (--depth == 0 && ranks[0]) fprintf(stderr, "created by %d:%s\\n", gettid(), ranks);
      ranks[0] = 0;
      return ((__typeof__(&ncclGroupEnd))dlsym(RTLD_NEXT, "ncclGroupEnd"))();
    }
    ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
      int used = 0;
      while (ranks[used]) used++;
      if (depth && nranks > 1) sprintf(ranks + used, " %d", rank);
      else if (nranks > 1) fprintf(stderr, "created alone: %d\\n", rank);
      return ((__typeof__(&ncclCommInitRank))dlsym(RTLD_NEXT, "ncclCommInitRank"))(comm, nranks, id, rank);
    }
"""


def test_which_thread_creates_the_communicators(tmp_path: Path) -> None:
    """-p 0: one creates all in one group; 1: each its own."""
    library = changed_library(tmp_path, TELLS_OF_CREATIONS)
    args = ["all_reduce", "-t", "2", "-g", "2", "-b", "4K", "-e", "4K", "-n", "1"]
    for flags, groups in (
        ([], [" 0 1 2 3"]),
        (["-p", "1"], [" 0 1", " 2 3"]),
        (["-p", "1", "-T", "20", "-t", "4", "-g", "1"], [" 0", " 1", " 2", " 3"]),
    ):
        done = run(sys.executable, "-m", "pynccl", "bench", *args, *flags, PYNCCL_LIBRARY=library)
        assert [line["wrong"] for line in lines(done)] == ["0"]
        found = re.findall(r"created (\w+).*?(\d+):(.*)", done.stderr)
        assert sorted(ranks for _, _, ranks in found) == groups, done.stderr
        assert len({thread for _, thread, _ in found}) == len(groups)
        assert "created alone" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["0", "1"])
def test_several_processes_of_several_devices(flag: str) -> None:
    done = bench(
        2, "all_gather", "-t", "2", "-g", "2", "-p", flag, "-T", "20", "-x", "1", "-b", "4K", "-e", "4K"
    )
    assert [line["wrong"] for line in lines(done)] == ["0"]
    assert len(re.findall(r"^#  Rank +\d Group", done.stdout, re.MULTILINE)) == 8


@pytest.mark.parametrize("flag", ["0", "1"])
def test_a_creation_that_fails(tmp_path: Path, flag: str) -> None:
    """The error is that of rank 2, also in the thread of ranks 0 and 1, and every thread ends."""
    code = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <nccl.h>
        ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
          if (nranks > 1 && rank == 2) rank = -2;
          __typeof__(&ncclCommInitRank) real = dlsym(RTLD_NEXT, "ncclCommInitRank");
          return real(comm, nranks, id, rank);
        }
    """
    args = ["all_reduce", "-t", "2", "-g", "2", "-p", flag, "-b", "4K", "-e", "4K"]
    command = [sys.executable, "-m", "pynccl", "bench", *args]
    done = run(*command, PYNCCL_LIBRARY=changed_library(tmp_path, code), timeout=50)
    assert done.returncode == 1
    assert re.search(r"rank -2 \(pid .*\) is out of range for 4 ranks", done.stderr), done.stderr


@pytest.mark.skipif(cuda.available(), reason="this machine has an NVIDIA driver")
def test_one_process_without_a_driver() -> None:
    args = ["all_reduce", "-g", "2", "-b", "4K", "-e", "4K", "-n", "2"]
    done = run(sys.executable, "-m", "pynccl", "bench", *args, PYNCCL_LIBRARY="auto")
    assert len(lines(done)) == 1 and done.stdout.count("CPU library\n") == 2
    assert done.stderr == "pynccl bench: no NVIDIA driver found, so PYNCCL_LIBRARY=cpu\n"


@pytest.mark.slow
@pytest.mark.skipif(cuda.available(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("engine", [open_mpi, torchrun])
def test_under_launchers_without_a_driver(engine: Callable[[int], Command]) -> None:
    command = [*engine(2), "-m", "pynccl", "bench", "all_reduce", "-b", "4K", "-e", "4K", "-n", "2"]
    if engine is open_mpi:
        command.insert(command.index("-m"), sys.executable)
    done = run(*command, PYNCCL_LIBRARY="auto")
    assert len(lines(done)) == 1
    assert done.stderr.count("pynccl bench: no NVIDIA driver found, so PYNCCL_LIBRARY=cpu") == 1


SMALL = ("-b", "8", "-e", "8", "-w", "0")
ALONE = "pynccl bench: 1 rank: `pynccl bench -n 2 all_reduce` starts two\n"
TWO = (
    "pynccl bench: -n 2 is the number of ranks, since no launcher, -t or -g gives it; iterations are --iters "
    "or, with -g 1, -n\n"
)


@pytest.mark.parametrize(
    ("args", "variables", "nranks", "iterations", "told"),
    [
        pytest.param(["-n", "2"], {}, 2, 20, TWO, marks=pytest.mark.slow),
        (["-n2", "--iters", "3"], {}, 2, 3, TWO),
        (["--iters", "3"], {}, 1, 3, ALONE),
        (["-g", "1", "-n", "3"], {}, 1, 3, ALONE),
        (["-t1", "-n", "3"], {}, 1, 3, ALONE),
        (["-n", "3"], {"RANK": "0", "WORLD_SIZE": "1"}, 1, 3, ALONE),
    ],
)
def test_iterations_or_ranks(
    args: list[str], variables: dict[str, str], nranks: int, iterations: int, told: str
) -> None:
    """-n behind the program: nccl-tests' iterations where something else gives the number of ranks."""
    command = (sys.executable, "-m", "pynccl", "bench", "all_reduce", *SMALL, *args)
    done = run(*command, **variables)
    assert len(lines(done)) == 1
    assert done.stdout.count("CPU library\n") == nranks
    assert f" iters: {iterations} " in done.stdout
    assert done.stderr == told


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "100",
            "-n 100 behind the program: ranks or iterations? Expected `pynccl bench -n 100 all_reduce` for "
            "ranks, or --iters 100 for iterations",
        ),
        ("many", "Invalid value for '-n': expected a number of ranks, 1 to 1024 on one machine, or auto"),
        ("", "Invalid value for '-n': expected a number of ranks"),
    ],
)
def test_wrong_numbers_of_ranks(value: str, words: str) -> None:
    done = pynccl_command("bench", "all_reduce", "-n", value)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_a_rank_for_each_core() -> None:
    command = (sys.executable, "-m", "pynccl", "bench", "-n", "auto", "--cpu", "all_reduce", *SMALL)
    done = run(*command)
    assert len(lines(done)) == 1
    assert done.stdout.count("CPU library\n") == len(os.sched_getaffinity(0))


def test_groups_of_ranks() -> None:
    done = bench(4, "all_reduce", "-b", "4K", "-e", "4K", NCCL_TESTS_SPLIT="MOD 2")
    assert len(lines(done)) == 1
    groups = re.findall(r"^#  Rank +(\d) Group +(\d)", done.stdout, re.MULTILINE)
    assert groups == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]


@pytest.mark.slow
def test_a_bandwidth_that_is_required() -> None:
    args = ["all_reduce", "-b", "4K", "-e", "4K", "-n", "2"]
    done = bench(2, *args, NCCL_TESTS_MIN_BW="1e9")
    assert done.returncode == 1
    assert re.search(r"# Avg bus bandwidth    : \S+ FAILED\n", done.stdout)
    assert re.search(r"# Avg bus bandwidth    : \S+ OK\n", bench(2, *args, NCCL_TESTS_MIN_BW="0").stdout)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["all_reduce", "-b", "1X"], "expected a number of bytes, or with K, M or G behind it, not '1X'"),
        (["all_reduce", "-b", "9" * 41], "expected a number of bytes, or with K, M or G behind it, not '999"),
        (["all_reduce", "-b", "2M", "-e", "1M"], "-b 2097152 is more than -e 1048576; expected"),
        (["all_reduce", "-e", "1K"], "-b 33554432, its default, is more than -e 1024; expected"),
        (["all_reduce", "-b", "9" * 15], f"-b {'9' * 15} is more than -e 33554432, its default; expected"),
        (["all_reduce", "-b", "9999999G"], "expected at most 1048576G, not '9999999G'"),
        (["all_reduce", "--tolerance", "nan"], "'--tolerance': nan is not in the range"),
        (["all_reduce", "-J", ""], "-J '': expected a name that ends in .json"),
        (["all_reduce", "--csv", "x", "--save", "x"], "--csv are both x; expected different files"),
        (["all_reduce", "--beside", "x.json"], "--beside without a --plot of lines; expected --plot"),
        (["all_reduce", "-n", "0"], "'-n'"),
        (
            ["all_reduce", "-o", "mean"],
            "expected one of sum, prod, max, min, avg, mulsum, or all, not 'mean'; it is avg here",
        ),
        (["all_reduce", "-d", "float32"], "expected one of int8, uint8,"),
        (["all_reduce", "-K", "2"], "-K without -I 1"),
        (
            ["all_reduce", "-I", "1", "-n", "2", "-K", "2"],
            "-K 2 with -n 2; expected fewer than the iterations of -n",
        ),
        (["all_reduce", "-J", "x.csv"], "expected a name that ends in .json"),
        (["all_reduce", "-G", "2", "-y", "1"], "-G 2 with -y 1; expected one of them: CUDA cannot capture"),
        (["all_reduce", "-G", "2", "-z", "2"], "-G 2 with -z 2; expected one of them: the host cannot wait"),
        (["all_reduce", "-G", "2", "-I", "1"], "-G 2 with -I 1; expected one of them: the iterations of a"),
        (["all_reduce", "-G", "2", "--percentiles"], "-G 2 with --percentiles; expected one of them"),
        (
            ["all_reduce", "-G", "2", "--compare", "gloo"],
            "-G 2 with --compare; expected one of them: calls are",
        ),
        (["put_signal", "-G", "2"], "-G 2 with put_signal; expected one of them: with NCCL 2.29 a wait"),
        (["sendrecv", "--p2p", "-G", "2"], "--p2p with -G 2; expected no -G: it has no effect there"),
        (["all_reduce", "-D", "1"], "pynccl runs no kernels of its own"),
        (["all_reduce", "-V", "0"], "expected 16, the default, not '0': it counts the CTAs of -D"),
        (["all_reduce", "-i", "0"], "-i 0 without -f"),
        (["all_reduce", "-b", "0", "-f", "2"], "-b 0 with -f"),
        (["all_reduce", "--compare", "nccl"], "expected some of gloo,mpi,torch, not 'nccl'"),
        (["all_reduce", "--compare", ""], "expected some of gloo,mpi,torch, not ''"),
        (["all_reduce", "--compare", "mpi"], "which starts ranks without MPI; expected mpirun -n 2 pynccl"),
        (
            ["put_signal", "--compare", "gloo"],
            "--compare: no peer has put_signal; expected one of",
        ),
        (["all_reduce", "-g", "2", "--compare", "gloo"], "expected one rank in a process"),
        (["all_reduce", "--compare", "torch"], "--compare torch: torch finds no GPU on this machine"),
        (["all_reduce", "--p2p"], "--p2p: all_reduce has no pairs of ranks; expected sendrecv or put_signal"),
        (["sendrecv", "--p2p", "-d", "all"], "--p2p with -d all; expected one datatype"),
        (["sendrecv", "--p2p", "-N", "0"], "--p2p with -N 0; expected no -N: it has no effect there"),
        (["sendrecv", "--p2p", "--percentiles"], "--p2p with --percentiles; expected one of them"),
        (["sendrecv", "--p2p", "--compare", "gloo"], "--p2p with --compare; expected one of them"),
        (["all_reduce", "--plot", "x.pdf"], "--plot: x.pdf: expected a name that ends in .png or .svg"),
        (["put_signal", "-R", "1"], "put_signal has its buffers in windows"),
        (["broadcast", "-r", "x"], "expected a rank, or -1 or all for all ranks, not 'x'"),
        (["broadcast", "-r", "-2"], "expected a rank, or -1 or all for all ranks, not '-2'"),
        (["broadcast", "-r", "²"], "expected a rank, or -1 or all for all ranks, not '²'"),
        (["broadcast", "-b", "٣"], "expected a number of bytes, or with K, M or G behind it, not '٣'"),
        (["allreduce"], "No such command 'allreduce'"),
        (["all_reduce", "--cpu"], "--cpu behind the program; expected `pynccl bench -n N --cpu PROGRAM ...`"),
        (["all_reduce", "-n", "many"], "'many' is not a valid integer."),
        (["all_reduce", "--csv", "/nowhere/x", "-b", "8", "-e", "8"], "--csv /nowhere/x cannot be written"),
    ],
)
def test_wrong_flags(args: list[str], words: str) -> None:
    # The ranks are not started to find it out.
    done = pynccl_command("bench", "-n", "2", *args)
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ")


NO_GRAPHS = (
    "all_reduce: -G 2 on the CPU library; expected a GPU: CUDA graphs need CUDA's streams, and the CPU "
    "library has none"
)


@pytest.mark.parametrize("cpu", [["--cpu"], []])
def test_graphs_on_the_cpu_library(cpu: list[str]) -> None:
    variables = {} if cpu else {"PYNCCL_LIBRARY": "cpu"}
    done = pynccl_command("bench", "-n", "2", *cpu, "all_reduce", "-G", "2", **variables)
    assert done.exit_code == 2
    assert NO_GRAPHS in " ".join(done.output.split())


def test_graphs_on_ranks_of_a_launcher_with_the_cpu_library() -> None:
    done = run(*PYNCCL_RUN, "-n", "2", "--no-tag", "-m", "pynccl", "bench", "all_reduce", "-G", "2")
    assert done.returncode == 1
    assert f"Error: {NO_GRAPHS}\n" in done.stderr
    assert "# Using devices" not in done.stdout


def test_ranks_within_a_rank() -> None:
    """-n in a rank of a launcher would start a job for each."""
    done = pynccl_command("bench", "-n", "3", "all_reduce", RANK="0", WORLD_SIZE="2")
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert (
        "-n 3 in a rank that a launcher has started, by torchrun's variables (RANK=0, WORLD_SIZE=2)" in text
    )


@pytest.mark.parametrize(
    ("args", "variables", "words"),
    [
        (["-r", "2"], {}, "reduce: -r 2; expected a rank, 0 to 1"),
        (["-J", "/nowhere/x.json"], {}, "reduce: -J /nowhere/x.json cannot be written: No such file"),
        ([], {"NCCL_TESTS_SPLIT": "XOR 3"}, "NCCL_TESTS_SPLIT is 'XOR 3'; expected AND, OR, MOD or DIV"),
        (["-g", "2"], {"NCCL_TESTS_DEVICE": "x"}, "NCCL_TESTS_DEVICE is 'x'; expected a number"),
        *(
            pytest.param([], {name: value}, f"{name} is {told}", marks=pytest.mark.slow)
            for name, value, told in (
                ("NCCL_TESTS_SPLIT", "DIV 0", "'DIV 0'; expected a number other than 0"),
                ("NCCL_TESTS_SPLIT", "MOD", "'MOD'; expected AND, OR, MOD or DIV"),
                ("NCCL_TESTS_MIN_BW", "fast", "'fast'; expected a number of GB/s"),
                ("NCCL_TESTS_MIN_BW", "nan", "'nan'; expected a number of GB/s"),
                ("NCCL_TESTS_DEVICE", "99999999999", "99999999999; expected a device's"),
            )
        ),
    ],
)
def test_wrong_settings(args: list[str], variables: dict[str, str], words: str) -> None:
    command = ("reduce", "-b", "4K", "-e", "4K", *args)
    if {"NCCL_TESTS_MIN_BW", "NCCL_TESTS_DEVICE"} & set(variables):
        by_ranks = bench(2, *command, **variables)
        text = by_ranks.stderr
        assert by_ranks.returncode == 1 and "Traceback" not in text
    else:
        done = pynccl_command("bench", "-n", "2", *command, **variables)
        text = done.stderr
        assert done.exit_code == 2
    assert words in " ".join(text.split())


# --- files and comparisons ---

QUICK = ("all_reduce", "-b", "1K", "-e", "4K", "-f", "4", "-n", "3", "-w", "0")


def test_a_table(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("an older one")
    found = lines(bench(2, *QUICK, "--csv", str(table)))
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["size"], row["count"], row["type"], row["redop"], row["root"]) for row in rows] == [
        (line["size"], line["count"], line["type"], line["op"], line["root"]) for line in found
    ]
    for row in rows:
        for half in ("", "in_place_"):
            assert float(row[f"{half}wrong"]) == 0
            bandwidth = float(row["size"]) / float(row[f"{half}time_us"]) / 1e3
            assert float(row[f"{half}algbw"]) == pytest.approx(bandwidth, rel=0.01, abs=1e-5)
    assert list(tmp_path.iterdir()) == [table]


def scaled(document: Path, factor: float, more: float = 0) -> None:
    """Change all times of a document, in us."""
    content = json.loads(document.read_text())
    for row in content["results"]:
        for half in ("out_of_place", "in_place"):
            row[half]["time"] = row[half]["time"] * factor + more
    document.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("factor", "code", "verdict"), [(1e-6, 3, "FAILED"), pytest.param(1e6, 0, "OK", marks=pytest.mark.slow)]
)
def test_against_an_earlier_run(tmp_path: Path, factor: float, code: int, verdict: str) -> None:
    saved = tmp_path / "saved.json"
    assert bench(2, *QUICK, "-N", "3", "--save", str(saved)).returncode == 0
    assert list(tmp_path.iterdir()) == [saved]
    scaled(saved, factor)
    done = bench(2, *QUICK, "-N", "3", "--against", str(saved))
    assert done.returncode == code, done.stdout + done.stderr
    slower = 4 if code else 0
    last = f"# {slower} of 4 measurements are slower by more than 5 % and the noise {verdict}\n"
    assert done.stdout.endswith(last)
    assert done.stdout.count("  slower\n") == slower
    assert not code or f"rank 0 exited with code {code}" in done.stderr


@pytest.mark.slow
def test_a_slower_run_within_the_noise_or_the_tolerance(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    assert bench(2, *QUICK, "-N", "3", "--save", str(saved)).returncode == 0
    was = saved.read_text()
    scaled(saved, 1e-6)
    content = json.loads(saved.read_text())
    # One cycle of each measurement was slower than all of the new run.
    for row in content["results"][:2]:
        for half in ("out_of_place", "in_place"):
            row[half]["time"] = 1e9
    saved.write_text(json.dumps(content))
    noisy = bench(2, *QUICK, "-N", "3", "--against", str(saved))
    assert noisy.returncode == 0, noisy.stdout
    saved.write_text(was)
    scaled(saved, 1e-3)
    tolerant = bench(2, *QUICK, "-N", "3", "--against", str(saved), "--tolerance", "1e6")
    assert tolerant.returncode == 0, tolerant.stdout


@pytest.mark.slow
def test_noise_of_the_new_run(tmp_path: Path) -> None:
    """Calls last 20 ms more: in every cycle, or in all but the second, which is as fast as before."""
    saved = tmp_path / "saved.json"
    # A cycle makes 4 calls out of place and 4 in place.
    sleep = 'static int calls; if (n == 100 && (calls++ / 8 != 1 || !getenv("FAST"))) usleep(20000);'
    library = library_with(tmp_path, sleep)
    args = ("all_reduce", "-b", "400", "-e", "400", "-n", "3", "-w", "0", "-c", "0", "-N", "3")
    assert bench(2, *args, "--save", str(saved)).returncode == 0
    # Slower than the new run's fast cycle, also beside other programs, and far from its slow ones.
    scaled(saved, 0, 5000)
    slower = bench(2, *args, "--against", str(saved), PYNCCL_LIBRARY=library)
    assert slower.returncode == 3, slower.stdout
    noisy = bench(2, *args, "--against", str(saved), PYNCCL_LIBRARY=library, FAST="1")
    assert noisy.returncode == 0, noisy.stdout
    assert noisy.stdout.endswith("# 0 of 2 measurements are slower by more than 5 % and the noise OK\n")
    # The medians differ as before, and the noise is the distance of the new run's cycles.
    rows = [line.split() for line in noisy.stdout.splitlines() if re.match(r"# +400 ", line)]
    assert len(rows) == 2
    for *_, ratio, noise in rows:
        assert float(ratio) > 2 and float(noise) > 50


@pytest.mark.slow
def test_an_earlier_run_that_cannot_be_compared(tmp_path: Path) -> None:
    saved, broken = tmp_path / "saved.json", tmp_path / "broken.json"
    assert bench(2, *QUICK, "--save", str(saved)).returncode == 0
    broken.write_text('{"results": []')
    pipe, infinite = tmp_path / "pipe", tmp_path / "infinite.json"
    os.mkfifo(pipe)
    infinite.write_text(re.sub('"size": [0-9]+', '"size": Infinity', saved.read_text()))
    args = ("-N", "3", "--against")
    for nranks, program, path, words in (
        (2, "all_reduce", saved, "has 1 cycles (-N); expected 3 or more"),
        (3, "all_reduce", saved, "is of 2 ranks; expected 3"),
        (2, "all_gather", saved, "is not of all_gather; its command was"),
        (2, "all_reduce", broken, "expected a document of --save or -J (JSONDecodeError"),
        (2, "all_reduce", tmp_path / "none", "cannot be read: No such file or directory"),
        (2, "all_reduce", pipe, "is not a file; expected a document of --save or -J"),
        (2, "all_reduce", infinite, "expected a document of --save or -J (OverflowError"),
    ):
        done = bench(nranks, program, *QUICK[1:], *args, str(path))
        # No rank was started.
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--against {path}" in done.stderr
        assert words in done.stderr, done.stderr
    assert "expected 3 or more cycles" in bench(2, *QUICK, "--against", str(saved)).stderr
    assert "has -C 0; expected -C 1, as here" in bench(2, *QUICK, "-C", "1", *args, str(saved)).stderr
    content = json.loads(saved.read_text())
    for row in content["results"]:
        row["size"] += 1
    content["results"] *= 3
    saved.write_text(json.dumps(content))
    done = bench(2, *QUICK, *args, str(saved))
    assert done.returncode == 1
    assert f"--against {saved} has none of this run's measurements; expected some" in done.stderr


def test_files_stay_as_they_were_after_a_failure(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text("an older one")
    wrong = [
        (
            ["--csv", "/nowhere/table.csv"],
            "--csv /nowhere/table.csv cannot be written: No such file",
        ),
        (["--csv", str(tmp_path)], f"--csv {tmp_path} cannot be written: it is a folder"),
        (["-J", "/nowhere/run.json"], "-J /nowhere/run.json cannot be written: No such file or directory"),
    ]
    for args, words in wrong:
        refused = pynccl_command("bench", "-n", "2", *QUICK, "--save", str(saved), *args)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert words in refused.stderr
    # Ranks of another launcher find it out themselves.
    started = (*PYNCCL_RUN, "-n", "2", "-m", "pynccl", "bench")
    done = run(*started, *QUICK, "--save", str(saved), *wrong[0][0])
    assert done.returncode == 1
    assert wrong[0][1] in done.stderr
    assert saved.read_text() == "an older one"
    assert list(tmp_path.iterdir()) == [saved]


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link.png", tmp_path / "pipe"
    file.write_text("an older one")
    link.symlink_to(file)
    os.mkfifo(pipe)
    # Replacing /dev/stdout or /dev/null would take it from all programs of the machine.
    for flag, path in (("--save", link), ("--plot", link), ("--csv", pipe)):
        refused = pynccl_command("bench", "-n", "2", *QUICK, flag, str(path))
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"{flag} {path} cannot be written: it is a link, a device or a pipe" in refused.stderr
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


def test_percentiles(tmp_path: Path) -> None:
    table, saved = tmp_path / "table.csv", tmp_path / "saved.json"
    args = [*QUICK, "-N", "2", "--percentiles", "--csv", str(table), "--save", str(saved)]
    done = bench(2, *args)
    assert len(lines(done)) == 4
    results = json.loads(saved.read_text())["results"]
    expected = []
    for size in (1024, 4096):
        for half in ("out_of_place", "in_place"):
            rows = [row[f"{half}_per_iter"]["times_us"] for row in results if row["size"] == size]
            assert [len(row) for row in rows] == [3, 3]
            times = sorted(took for row in rows for took in row)
            expected.append(
                f"# {size:12d}     float     sum      -1  {half:>12}  {times[3]:10.2f}  {times[5]:10.2f}"
            )
    after = done.stdout.split("# Percentiles of the iterations, each waited for, of the slowest process\n")[1]
    heads = "#         size      type   redop    root                  p50 (us)    p99 (us)"
    assert after.splitlines() == [heads, *expected]
    with table.open(newline="") as file:
        for row, result in zip(csv.DictReader(file), results, strict=True):
            times = sorted(result["in_place_per_iter"]["times_us"])
            assert [float(row["in_place_p50_us"]), float(row["in_place_p99_us"])] == times[1:]
            assert float(row["p50_us"]) <= float(row["p99_us"])


# --- peers ---

COMPARED = re.compile(r"# +(?P<size>\d+) +(?P<type>\w+) +(?P<op>\w+) +(?P<root>[-\d]+) +[\d.]+(?P<peers>.*)")


def mpirun(nranks: int) -> list[str]:
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None
    return [found, "--oversubscribe", "-n", str(nranks), sys.executable, "-m"]


def compared(text: str) -> list[tuple[str, str, list[str]]]:
    """Return type, operation and what each peer's columns hold: a number as #."""
    rows = [match for line in text.splitlines() if (match := COMPARED.fullmatch(line))]
    return [(row["type"], row["op"], re.sub(r"\d+\.\d\d", "#", row["peers"]).split()) for row in rows if row]


@pytest.mark.slow
def test_peers_in_turn(tmp_path: Path) -> None:
    table, saved = tmp_path / "table.csv", tmp_path / "saved.json"
    files = ["--csv", str(table), "--save", str(saved)]
    args = ["all_reduce", "-b", "1K", "-e", "4K", "-f", "4", "-n", "5", "--compare", "mpi,gloo", *files]
    done = run(*mpirun(2), "pynccl", "bench", *args)
    assert [line["wrong"] for line in lines(done)] == ["0", "0"]
    after = done.stdout.split("# Collective test concluded: all_reduce_perf\n")[1]
    masked = re.sub(r" +\d+\.\d\d(?= )", " ####", re.sub(r" is [^,\n]*", " is VERSION", after))
    assert masked == (HERE / "compared.txt").read_text()
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = json.loads(saved.read_text())["results"]
    assert [row["compare"]["gloo"]["nwrong"] for row in results] == [0, 0]
    for row, result in zip(rows, results, strict=True):
        for peer in ("mpi", "gloo"):
            ratio = float(row[f"{peer}_time_us"]) / float(row["pynccl_time_us"])
            assert float(row[f"{peer}_ratio"]) == pytest.approx(ratio, rel=0.01)
            assert result["compare"][peer]["time"] == float(row[f"{peer}_time_us"])


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_operation_of_the_peers_is_right(program: str) -> None:
    args = [program, "-b", "1K", "-e", "1K", "-n", "1", "-d", "all", "-o", "all", "--compare", "gloo,mpi"]
    done = run(*mpirun(3), "pynccl", "bench", *args)
    if program in ("hypercube", "put_signal"):
        assert done.returncode == 2
        assert f"no peer has {program}" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    right, none = ["#", "#", "0"], ["n/a"] * 3
    of = {(kind, op): (peers[:3], peers[3:]) for kind, op, peers in compared(done.stdout)}
    op = "prod" if program in SHOWS_OP else "none"
    assert of["float", op] == (right, right)
    assert of["bfloat16", op] == (right, none)
    assert of["uint64", op] == (none, right)
    assert program not in REDUCTIONS or of["float", "mulsum"] == (none, none)


# A rank whose torch.distributed is broken in one way.
BROKEN = """
import sys, time
from pynccl.__main__ import main
def change(how):
    import torch.distributed as dist
    real = dist.all_reduce
    def all_reduce(tensor, **more):
        if how == "hangs" and dist.get_rank() == 1:
            time.sleep(1000)
        real(tensor, **more)
        tensor[0] += 1
    dist.all_reduce = all_reduce
how = sys.argv.pop(1)
if how == "absent":
    sys.modules["torch"] = sys.modules["matplotlib"] = None
else:
    change(how)
sys.exit(main(["bench", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("wrong", 1, r"\n# +1024 .*  2\n"),
        pytest.param("hangs", 1, r"--compare: gloo's all_reduce", marks=pytest.mark.slow),
        ("absent", 2, r"--compare gloo: torch is not installed; install it, for example by pip install"),
    ],
)
def test_a_peer_that_is_broken(tmp_path: Path, how: str, code: int, words: str) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    launcher = [*PYNCCL_RUN, "-n", "2", "--no-tag", str(program), how]
    args = ["all_reduce", "-b", "1K", "-e", "1K", "-n", "1", "-T", "2", "--compare", "gloo"]
    done = run(*launcher, *args, timeout=50)
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(words, done.stdout + done.stderr), done.stdout + done.stderr
    assert how == "wrong" or "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_hung_rank_of_mpi_ends_the_run() -> None:
    args = ["all_reduce", "-b", "4K", "-e", "4K", "-n", "50", "-N", "0", "-T", "2", "--compare", "mpi"]
    command = [*mpirun(2), "pynccl", "bench", *args]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = 0
        for line in process.stdout:
            if match := re.match(r"#  Rank  1 Group  0 Pid +(\d+)", line):
                pid = int(match[1])
            if LINE.fullmatch(line.rstrip("\n")):
                break
        os.kill(pid, signal.SIGSTOP)
        try:
            process.communicate(timeout=40)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1


# --- pairs ---

SLOW_AND_WRONG = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stddef.h>
    #include <stdlib.h>
    #include <unistd.h>
    int ncclSend(void* s, size_t n, int type, int to, void* comm, void* stream) {
      int (*real)(const void*, size_t, int, int, void*, void*) = dlsym(RTLD_NEXT, "ncclSend");
      int slow = to == 1 && atoi(getenv("RANK")) == 2;
      if (slow) usleep(10000);
      if (slow && n > 2) ((unsigned char*)s)[4] += 1;
      return real(s, n, type, to, comm, stream);
    }
"""


@pytest.mark.slow
def test_the_matrix_names_a_slow_link(tmp_path: Path) -> None:
    library, table, saved = changed_library(tmp_path, SLOW_AND_WRONG), tmp_path / "t.csv", tmp_path / "s.json"
    args = ["sendrecv", "--p2p", "-b", "8", "-e", "4K", "-f", "2", "-n", "10"]
    done = bench(3, *args, "--csv", str(table), "--save", str(saved), PYNCCL_LIBRARY=library)
    # The wrong element is the slow rank's.
    assert done.returncode == 1, done.stdout + done.stderr
    shown = done.stdout.split("CPU library\n")[-1].split("# Avg")[0]
    slow = re.findall(r"#   (\d -> \d): ([\d.]+ GB/s, 0.\d\d of|[\d.]+ us, [\d.]+ times) the median\n", shown)
    # On a busy machine other links may be slow, too.
    assert slow[0][0] == "2 -> 1"
    masked = re.sub(r" +\d+\.\d\d(?=[ \n])", " ####", re.sub(r"#   \d -> .*\n", "", shown))
    assert masked == (HERE / "pairs.txt").read_text()
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] + row["target"] for row in rows] == ["01", "02", "10", "12", "20", "21"]
    assert [row["wrong"] for row in rows] == ["0"] * 5 + ["1"]
    assert {(row["size"], row["latency_size"]) for row in rows} == {("4096", "8")}
    for row, link in zip(rows, json.loads(saved.read_text())["results"], strict=True):
        assert {name: str(value) for name, value in link.items()} == row


def test_the_matrix_of_puts() -> None:
    done = bench(2, "put_signal", "--p2p", "-b", "8", "-e", "4K", "-f", "2", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +[01](?: +(?:-|\d+\.\d\d)){2}$", done.stdout, re.MULTILINE)) == 4


def test_a_matrix_of_one_rank() -> None:
    done = pynccl_command("bench", "-n", "1", "sendrecv", "--p2p")
    assert done.exit_code == 2
    assert "--p2p with -n 1; expected 2 or more ranks" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("SIGKILL", 128 + signal.SIGKILL), ("SIGSTOP", 1)])
def test_a_rank_that_dies_or_hangs_in_the_matrix_ends_the_run(tmp_path: Path, what: str, code: int) -> None:
    source = SLOW_AND_WRONG.replace("usleep(10000)", f"kill(getpid(), {what})")
    library = changed_library(tmp_path, "#include <signal.h>\n" + source)
    args = ["sendrecv", "--p2p", "-b", "8", "-e", "8", "-n", "1", "-T", "2"]
    done = bench(3, *args, PYNCCL_LIBRARY=library)
    assert done.returncode == code, done.stderr
    assert what == "SIGKILL" or "did not complete on stream" in done.stderr
    done = bench(3, *args[:-2], PYNCCL_LIBRARY=library, PYNCCL_TIMEOUT="3")
    assert what == "SIGKILL" or re.search(r"rank 2\b", done.stderr), done.stderr


# --- pictures ---


def texts(picture: Path) -> list[str]:
    """Return what is written in an SVG."""
    nodes = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in nodes]


@pytest.mark.slow
def test_a_picture_of_several_runs(tmp_path: Path) -> None:
    saved, first, second = tmp_path / "saved.json", tmp_path / "first.PNG", tmp_path / "second.svg"
    assert bench(2, *QUICK, "-N", "3", "--save", str(saved), "--plot", str(first)).returncode == 0
    assert first.read_bytes().startswith(b"\x89PNG\r\n")
    scaled(saved, 1e6)
    other = tmp_path / "other.json"
    assert bench(3, "broadcast", *QUICK[1:], "--save", str(other)).returncode == 0
    more = ["--against", str(saved), "--compare", "gloo", "--plot", str(second), "--beside", str(other)]
    done = bench(2, *QUICK, "-N", "3", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    written = texts(second)
    lines = [
        "out-of-place",
        "in place",
        "pynccl, in turn",
        "gloo",
        "before, out-of-place",
        "before, in place",
        f"{tmp_path}/other, out-of-place",
        f"{tmp_path}/other, in place",
    ]
    assert [text for text in written if text in lines] == lines
    assert {"bus bandwidth (GB/s)", "time (µs)", "all_reduce on 2 ranks", "1K", "4K"} <= set(written)
    assert sorted(tmp_path.iterdir()) == sorted([saved, first, second, other])


@pytest.mark.slow
def test_a_picture_of_the_matrix(tmp_path: Path) -> None:
    picture, table = tmp_path / "pairs.svg", tmp_path / "pairs.csv"
    args = ["sendrecv", "--p2p", "-b", "8", "-e", "4K", "-f", "2", "-n", "2"]
    done = bench(2, *args, "--plot", str(picture), "--csv", str(table))
    assert done.returncode == 0, done.stderr
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = {f"{float(row[name]):.3g}" for row in rows for name in ("bandwidth", "latency_us")}
    assert figures | {"from rank", "to rank"} <= set(texts(picture))


def test_a_picture_that_cannot_be_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    refused = pynccl_command("bench", "-n", "2", *QUICK, "--plot", str(folder))
    assert refused.exit_code == 2
    assert "cannot be written: it is a folder" in " ".join(refused.stderr.split())
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    done = run(sys.executable, str(program), "absent", *QUICK, "--plot", str(tmp_path / "x.svg"))
    assert done.returncode == 2
    assert "--plot: matplotlib is not installed" in done.stderr


# --- in a terminal ---

IN_A_TERMINAL = ("all_reduce", "-b", "1K", "-e", "16K", "-f", "4", "-n", "2")


def in_a_terminal(*args: str, both: bool, interrupt: bool = False) -> tuple[str, str, int]:
    """Return what a run writes to a terminal, what it writes to a pipe, and its exit code."""
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "pynccl", "bench", "-n", "2", "--cpu", *args]
    output = side if both else subprocess.PIPE
    written = b""
    with subprocess.Popen(command, env=environment(), stdout=output, stderr=side) as process:
        os.close(side)
        # The end of the terminal is an error.
        with suppress(OSError):
            while data := os.read(terminal, 1 << 16):
                written += data
                if interrupt and b"4096 bytes" in written:
                    process.send_signal(signal.SIGINT)
                    interrupt = False
        piped = process.stdout.read().decode() if process.stdout else ""
        code = process.wait(timeout=40)
    os.close(terminal)
    return written.decode(), piped, code


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end."""
    shown, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            shown += [""] * (row == len(shown))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            shown[row] = ""
        elif part[0] not in "\x1b\r":
            shown[row] += part
    return shown


@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_progress_in_a_terminal(both: bool) -> None:
    written, piped, code = in_a_terminal(*IN_A_TERMINAL, both=both)
    assert code == 0
    assert re.search(r"all_reduce, 16384 bytes .*2/3", written)
    left = screen(written)
    table = left if both else piped.splitlines()
    assert [line.split()[0] for line in table if LINE.fullmatch(line)] == ["1024", "4096", "16384"]
    assert not any("bytes " in line for line in left)
    assert both or set(left) == {""}
    assert written.count("\x1b[?25h") >= written.count("\x1b[?25l") > 0


def test_the_matrix_in_a_terminal() -> None:
    args = ["sendrecv", "--p2p", "-b", "8", "-e", "4K", "-f", "2", "-n", "2"]
    written, _, code = in_a_terminal(*args, both=True)
    assert code == 0
    rows = [line for line in screen(written) if re.fullmatch(r"│ +\d( │ +(-|\d+\.\d\d)){2} │", line)]
    assert len(rows) == 4, written


def test_an_interrupt_leaves_a_clean_terminal() -> None:
    written, _, code = in_a_terminal(*IN_A_TERMINAL, "-N", "0", both=False, interrupt=True)
    assert code == 128 + signal.SIGINT
    assert screen(written)[-1] == ""
    assert written.endswith("\x1b[?25h")


@pytest.mark.parametrize("milliseconds", [0, 10, 20, 30, 40, 60])
def test_an_interrupt_while_communicators_are_created(milliseconds: int) -> None:
    """The threads that create those of one process wait for each other."""
    command = [
        sys.executable,
        "-m",
        "pynccl",
        "bench",
        "all_reduce",
        "-g",
        "4",
        "-b",
        "8",
        "-e",
        "8",
        "-N",
        "0",
    ]
    with piped(command, env=environment(PYNCCL_LIBRARY="auto")) as process:
        try:
            assert process.stderr is not None
            assert "no NVIDIA driver found" in process.stderr.readline()
            time.sleep(milliseconds / 1000)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


# --- launchers and ends ---


@pytest.fixture(params=["pynccl run", "mpirun", "torchrun"])
def launcher(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    if request.param == "pynccl run":
        yield [*PYNCCL_RUN, "-n", "2", "--no-tag", "-m"]
    elif request.param == "torchrun":
        yield [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    else:
        yield mpirun(2)


@pytest.mark.slow
def test_launchers(launcher: list[str]) -> None:
    done = run(*launcher, "pynccl", "bench", "all_reduce", "-b", "4K", "-e", "4K")
    assert [line["wrong"] for line in lines(done)] == ["0"]


@pytest.mark.parametrize(
    ("what", "variables", "code", "words"),
    [
        (signal.SIGKILL, {}, 128 + signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(
            signal.SIGSTOP,
            {"PYNCCL_TIMEOUT": "3"},
            1,
            "rank 1 is not responding: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            signal.SIGSTOP,
            {"-T": "3"},
            1,
            "; rank 1 is not responding: ",
            marks=pytest.mark.slow,
        ),
        # Too short to learn that a rank does not respond.
        pytest.param(
            signal.SIGSTOP,
            {"-T": "1"},
            1,
            "; it waits for rank 1; ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            signal.SIGSTOP,
            {"LONGEST_WAIT": "3"},
            1,
            "; it waits for rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_run(
    tmp_path: Path, what: signal.Signals, variables: dict[str, str], code: int, words: str
) -> None:
    """Without -T, the variable of all programs bounds the waits, or an hour, of which this makes seconds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from pynccl._tools.bench import settings\n"
        "settings.LONGEST_WAIT = int(os.environ.get('LONGEST_WAIT', settings.LONGEST_WAIT))\n"
        "settings.LONG_WAIT = 1\n"
    )
    flags = [word for name, value in variables.items() if name.startswith("-") for word in (name, value)]
    args = ["-n", "3", "all_reduce", "-b", "4K", "-e", "4K", "-N", "0", *flags]
    env = {name: value for name, value in variables.items() if not name.startswith("-")}
    command = [sys.executable, "-m", "pynccl", "bench", *args]
    with piped(command, env=environment(PYTHONPATH=str(tmp_path), **env)) as process:
        assert process.stdout is not None
        seen = ""
        for seen in process.stdout:
            if LINE.fullmatch(seen.rstrip("\n")):
                break
        pid = victim(process.pid)
        os.kill(pid, what)
        start = time.monotonic()
        _, errors = process.communicate(timeout=40)
    assert time.monotonic() - start < 30
    assert process.returncode == code
    assert words in errors


def test_a_long_wait_is_told_and_goes_on(tmp_path: Path) -> None:
    """Without -T; this makes the 30 seconds 1."""
    (tmp_path / "sitecustomize.py").write_text(
        "from pynccl._tools.bench import settings\nsettings.LONG_WAIT = 1\n"
    )
    command = [sys.executable, "-m", "pynccl", "bench", "-n", "3", "all_reduce", "-b", "4K", "-e", "4K"]
    env = environment(PYTHONPATH=str(tmp_path))
    with piped([*command, "-N", "0"], env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any(LINE.fullmatch(line.rstrip("\n")) for line in process.stdout)
        pid = victim(process.pid)
        os.kill(pid, signal.SIGSTOP)
        told = next(line for line in process.stderr if "did not complete" in line)
        assert re.search(
            r"pynccl bench: (synchronize|barrier) did not complete .*within 1 s .*; it waits for rank 1; "
            "the wait goes on for up to 3600 s, or the seconds of -T",
            told,
        )
        os.kill(pid, signal.SIGCONT)
        for _ in range(3):
            assert any(LINE.fullmatch(line.rstrip("\n")) for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)


def victim(launcher: int) -> int:
    def ranks() -> list[int]:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [
            pid for pid in map(int, children) if b"\0bench\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    until(lambda: len(ranks()) == 3)
    return ranks()[1]
