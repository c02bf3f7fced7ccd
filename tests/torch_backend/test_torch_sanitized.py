"""The backend's C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

What ends while others still use it: connections that are given up, groups that are dropped, peers that die.
Leaks are not looked for, since Python and torch have their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import test_torch_flight as flight
import test_torch_trouble as trouble
from conftest import ROOT
from meeting import free_port
from processes import completed
from pynccl import testing

# The first one compiles: that takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# As `make sanitize` has them for the CPU library.
FLAGS = (
    "-fsanitize=address,undefined -fno-sanitize=enum,vptr -fno-sanitize-recover=all "
    "-fno-omit-frame-pointer -O0 -g1"
)
Environment = dict[str, str]


@pytest.fixture(scope="module")
def sanitized() -> Environment:
    """Compile the backend with the sanitizers; return the environment in which ranks load it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pynccl-tests"
    # The backend's own key does not have the flags.
    folder = cache / f"sanitized-{zlib.crc32(FLAGS.encode()):08x}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    compiler = folder / "g++"
    # The last options count.
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {FLAGS}\n')
    compiler.chmod(0o700)
    env = {"PYNCCL_CACHE": str(folder), "CXX": str(compiler)}
    command = [sys.executable, "-m", "pynccl.torch", "build"]
    subprocess.run(command, env=os.environ | env, cwd=ROOT, check=True, timeout=900)
    # Python is not linked with the sanitizer, which must be there first, and needs C++'s exceptions.
    libraries = [runtime(name) for name in ("libasan.so", "libstdc++.so")]
    return env | {"LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "1"}


def runtime(name: str) -> str:
    """Return the path of a library of the compiler."""
    command = ["g++", f"-print-file-name={name}"]
    path = completed(command, check=True).stdout.strip()
    assert os.path.isabs(path), f"g++ has no {name}: the sanitizers need it"
    return path


@pytest.fixture
def on_ranks(sanitized: Environment, tmp_path: Path) -> Callable[..., None]:
    """Run a program on sanitized ranks; none may write a report, not even one whose end nobody sees."""
    options = f"detect_leaks=0:halt_on_error=1:print_stacktrace=1:log_path={tmp_path}/report"
    env = sanitized | {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options}

    def run(nranks: int, fn: Callable[..., None], *args: object, dies: tuple[int, ...] = ()) -> None:
        ends = testing.run(nranks, fn, *args, backend="cpu", timeout=250, check=False, env=env)
        reports = [path.read_text() for path in tmp_path.glob("report.*")]
        assert not reports, reports[0]
        assert all(end is None for rank, end in enumerate(ends) if rank not in dies), ends

    return run


def is_sanitized(rank: int, size: int) -> None:
    from pynccl.torch import _extension

    assert Path(_extension.__file__).is_relative_to(os.environ["PYNCCL_CACHE"])
    assert "libasan" in Path("/proc/self/maps").read_text()


def test_connections_that_time_out(on_ranks: Callable[..., None]) -> None:
    on_ranks(1, is_sanitized)
    on_ranks(2, flight.late_ranks, free_port())


def test_what_is_dropped(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(3, trouble.test_what_is_dropped.body, tmp_path)


def test_exits(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(2, trouble.test_exit_with_callbacks_outstanding.body, tmp_path)


def test_in_flight(on_ranks: Callable[..., None]) -> None:
    # The sanitizer keeps freed memory.
    collectives = [program for program in flight.COLLECTIVES if program is not flight.memory]
    on_ranks(2, flight.one_after_another, free_port(), [*collectives, *flight.MESSAGES])


def test_the_death_of_a_peer(on_ranks: Callable[..., None]) -> None:
    on_ranks(3, flight.after_the_death_of_a_peer, free_port(), dies=(2,))
