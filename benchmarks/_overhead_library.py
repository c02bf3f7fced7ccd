"""A libnccl that does nothing: every function of nccl_api.h counts its calls and returns success at once."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
from os import environ
from pathlib import Path

from pynccl import _build_ffi

VERSION = 23203
SONAME = "libnccl.so.2"
DRIVER = "libcuda.so.1"
RANKS = 2
ROOT = Path(__file__).resolve().parents[1]

_HEAD = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
"""
_ANSWERS = {
    "ncclGetVersion": f"*version = {VERSION}; return ncclSuccess;",
    "ncclCommCount": f"*count = {RANKS}; return ncclSuccess;",
    "ncclCommUserRank": "*rank = 0; return ncclSuccess;",
    "ncclCommCuDevice": "*device = 0; return ncclSuccess;",
    "ncclCommGetAsyncError": "*asyncError = ncclSuccess; return ncclSuccess;",
    "ncclGetUniqueId": "memset(uniqueId, 0, sizeof *uniqueId); return ncclSuccess;",
    "ncclCommInitAll": "for (int i = 0; i < ndev; ++i) comm[i] = (ncclComm_t)&object; return ncclSuccess;",
    "ncclGetErrorString": 'return "no error";',
    "ncclGetLastError": 'return "";',
}
_RETURNS = {"void": "", "ncclTeam_t": "return (ncclTeam_t){0};"}
_NEW = {"comm", "newcomm"}


def source() -> str:
    """Return the library's C source."""
    header = _build_ffi.parse("nccl_api")
    parts = [_HEAD, header.types, "static char object;"]
    parts.append(f"static unsigned long long calls[{len(header.functions)}];")
    for index, function in enumerate(header.functions):
        made = [
            name
            for ctype, name in function.params
            if ctype.replace(" ", "") == "ncclComm_t*" and name in _NEW
        ]
        answer = _ANSWERS.get(function.name)
        if answer is None:
            answer = "".join(f"*{name} = (ncclComm_t)&object; " for name in made)
            answer += _RETURNS.get(function.result, "return ncclSuccess;")
        parts.append(f"{function.prototype} {{ ++calls[{index}]; {answer} }}")
    names = ", ".join(f'"{function.name}"' for function in header.functions)
    parts.append(f"static const char* const names[] = {{{names}}};")
    parts.append(
        "unsigned long long null_calls(const char* name) {\n"
        "  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)\n"
        "    if (!strcmp(names[i], name)) return calls[i];\n"
        "  return -1ull;\n}"
    )
    # What calls cost by themselves, through a pointer as every binding has one.
    parts.append(
        "void null_repeat(long count) {\n"
        "  __typeof__(&ncclAllReduce) volatile function = ncclAllReduce;\n"
        "  while (count--) function(0, 0, 0, ncclFloat32, ncclSum, (ncclComm_t)&object, 0);\n}"
    )
    # The recorder's clock (native/ring.h): a virtual machine may make it slow.
    parts.append(
        "#if defined(__x86_64__)\n#define TICKS __builtin_ia32_rdtsc()\n#else\n"
        '#define TICKS ({ long t; __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t)); t; })\n#endif\n'
        "void null_clock(long count) {\n"
        "  volatile unsigned long long ticks;\n"
        "  while (count--) ticks = TICKS;\n  (void)ticks;\n}"
    )
    return "\n".join(parts) + "\n"


def build(folder: Path) -> Path:
    """Compile the library into a folder; return its path."""
    code = folder / "null_nccl.c"
    code.write_text(source())
    return _compile(code, folder / SONAME)


def build_driver(folder: Path) -> Path:
    """Compile the tests' fake CUDA driver into a folder; return its path."""
    return _compile(ROOT / "tests" / "fake_cuda" / "fake_cuda.c", folder / DRIVER)


def _compile(code: Path, library: Path) -> Path:
    compiler = shlex.split(environ.get("CC", "cc"))
    flags = ["-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    command = [*compiler, *flags, f"-Wl,-soname,{library.name}", str(code), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class Counter:
    """Reads how often the library's functions were called."""

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library)
        self._calls, self.repeat, self.read_clock = loaded.null_calls, loaded.null_repeat, loaded.null_clock
        self._calls.restype, self._calls.argtypes = ctypes.c_ulonglong, [ctypes.c_char_p]
        for function in (self.repeat, self.read_clock):
            function.restype, function.argtypes = None, [ctypes.c_long]

    def __call__(self, function: str) -> int:
        """Return the number of calls of a function so far."""
        return int(self._calls(function.encode()))
