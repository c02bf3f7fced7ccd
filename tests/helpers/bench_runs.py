"""Runs of `pynccl bench` on the CPU library, what they print, and libraries with other functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pynccl
from launchers import environment
from processes import completed

LINE = re.compile(
    r"(?P<size>[ \d]{12})  (?P<count>[ \d]{12})  (?P<type>[ \w]{8})  (?P<op>[ \w]{6})  (?P<root>[ \d-]{6})"
    r"(  (?P<time>[ \d.e+]{7})  [ \d.e+]{6}  [ \d.e+]{6}  (?P<wrong>[ \d]{6}))"
    r"(  [ \d.e+]{7}  [ \d.e+]{6}  [ \d.e+]{6}  (?P<wrong_in_place>[ \d]{6}|  N/A))"
    r"(?P<more>.*)"
)


def run(*command: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    return completed(command, env=environment(**env), timeout=timeout)


def bench(nranks: int, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pynccl", "bench", "-n", str(nranks), *args, **env)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    # No progress in a pipe.
    assert "\x1b" not in done.stdout + done.stderr
    found = [match.groupdict() for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
    assert len(found) == sum(bool(line) and line[0] == " " for line in done.stdout.splitlines())
    return [{name: value.strip() for name, value in line.items()} for line in found]


def changed_library(folder: Path, code: str) -> str:
    """Compile the CPU library with other functions."""
    source, target = folder / "changed.c", folder / "libchanged.so"
    source.write_text(code)
    cpu = Path(pynccl.cpu_library())
    link = [
        "-shared",
        "-fPIC",
        f"-I{cpu.parent}/forward/include",
        "-Wl,--no-as-needed",
        f"-Wl,-rpath,{cpu.parent}",
        f"-L{cpu.parent}",
        f"-l:{cpu.name}",
    ]
    subprocess.run(["gcc", str(source), "-o", str(target), *link], check=True, timeout=60)
    return str(target)


def library_with(folder: Path, after: str) -> str:
    """Compile the CPU library with an all_reduce that runs C code when it has completed."""
    code = f"""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        #include <stdlib.h>
        #include <unistd.h>
        int pyncclCpuStreamSynchronize(void*, void*, long);
        int ncclAllReduce(const void* s, void* r, size_t n, int type, int op, void* comm, void* stream) {{
          int (*real)(const void*, void*, size_t, int, int, void*, void*) = dlsym(RTLD_NEXT, "ncclAllReduce");
          int result = real(s, r, n, type, op, comm, stream);
          if (result == 0) result = pyncclCpuStreamSynchronize(comm, stream, -1);
          if (result == 0) {{ {after} }}
          return result;
        }}
    """
    return changed_library(folder, code)
