"""Libraries made from the headers.

`source`: one with every declared function that writes down its arguments and returns what it is told. It is
made by other rules than the binding, from the C types alone, so that a wrong order, width or cast in the
binding shows. `null_log` returns the newest call, `null_result` sets the results; `instead` has the bodies
that a test writes by hand.
`forwarding`: the CPU library as if it were of a version.
"""

from __future__ import annotations

from collections.abc import Mapping

from pynccl import _build_ffi, cpu_library

VERSION = 23203
OUT = 0x7F0000000000
HEADERS = [_build_ffi.parse("nccl_api"), _build_ffi.parse("cpu_api")]
FUNCTIONS = [function for header in HEADERS for function in header.functions]

_HEAD = """
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static char log_text[1 << 16];
static int result_now;
static const char* last_error = "";
const char* null_log(void) { return log_text; }
void null_result(int result, const char* error) { result_now = result; last_error = error; }
static void begin(const char* name) { strcpy(log_text, name); }
static __attribute__((format(printf, 1, 2))) void note(const char* format, ...) {
  va_list args;
  va_start(args, format);
  size_t used = strlen(log_text);
  vsnprintf(log_text + used, sizeof log_text - used, format, args);
  va_end(args);
}
static void hex(const char* name, const void* data, int size) {
  note("|%s=", name);
  for (int i = 0; i < size; ++i) note("%02x", ((const unsigned char*)data)[i]);
}
"""

# Arrays and out-pointers cannot be told apart by their types.
_ARRAYS = {
    "ncclCommInitAll": {"devlist": ("ndev", "int"), "comm": ("ndev", "out")},
    "ncclCommShrink": {"excludeRanksList": ("excludeRanksCount", "int")},
    "pyncclCpuRefuseToGrow": {"lateRanks": ("lateRanksCount", "int")},
    "ncclCommInitRankScalable": {"commIds": ("nId", "id")},
    "ncclWaitSignal": {"signalDescs": ("nDesc", "desc")},
}
_STRUCTS = (
    "ncclConfig_t",
    "ncclCollConfig_t",
    "ncclEncryptionConfig_t",
    "ncclSimInfo_t",
    "ncclCommProperties_t",
    "ncclDevCommRequirements_t",
)
_BY_VALUE = ("ncclTeam_t", "ncclMultimemHandle_t")


def source(
    version: int = VERSION, skip: frozenset[str] = frozenset(), instead: Mapping[str, str] | None = None
) -> str:
    """Return the library's C source, without the functions in `skip`; `instead` has bodies by name."""
    by_hand = instead or {}
    parts = [_HEAD, *(header.types for header in HEADERS), 'static const char* texts[] = {"alpha", "beta"};']
    for index, f in enumerate(FUNCTIONS):
        if f.name not in skip:
            parts.append(f"{f.prototype} {{\n{by_hand.get(f.name) or _body(f, index, version)}}}")
    return "\n".join(parts)


def _body(f: _build_ffi.Function, index: int, version: int) -> str:
    if f.name == "ncclGetVersion":
        return f"  *version = {version};\n  return ncclSuccess;\n"
    if f.name == "ncclGetErrorString":
        return '  static char text[32];\n  sprintf(text, "text %d", (int)result);\n  return text;\n'
    if f.name == "ncclGetLastError":
        return "  (void)comm;\n  return last_error;\n"
    lines = [f'  begin("{f.name}");']
    lines += [_note(f.name, ctype, name, index) for ctype, name in f.params]
    results = {
        "ncclResult_t": "(ncclResult_t)result_now",
        "int": str(index),
        "ncclTeam_t": "(ncclTeam_t){11, 12, 13}",
    }
    lines += [f"  return {results[f.result]};"] if f.result != "void" else []
    return "\n".join(lines) + "\n"


def _note(function: str, ctype: str, name: str, index: int) -> str:
    base, stars = ctype.replace("const ", "").rstrip("*").strip(), ctype.count("*")
    if name in _ARRAYS.get(function, {}):
        return _array(name, *_ARRAYS[function][name])
    if ctype == "ncclUniqueId":
        return f'  hex("{name}", &{name}, 128);'
    if ctype in _BY_VALUE:
        return f'  hex("{name}", &{name}, sizeof {name});'
    if base == "ncclUniqueId" and ctype.startswith("const"):
        return f'  if ({name}) hex("{name}", {name}, 128); else note("|{name}=NULL");'
    if base == "ncclUniqueId":
        return f"  memset({name}, {index}, 128);"
    if base in _STRUCTS:
        return f'  if ({name}) hex("{name}", {name}, (int){name}->size); else note("|{name}=NULL");'
    if name in ("outHandle", "outReq"):
        return f"  memset({name}, {index}, sizeof *{name});"
    if name == "outDevComm":
        return f'  strcpy((char*){name}, "device");'
    if ctype == "const char*":
        return f'  note("|{name}=%s", {name});'
    if function == "ncclParamGet" and name == "out":
        return '  memcpy(out, "payload", 7);'
    if stars == 3:
        return f"  *{name} = texts;"
    if stars == 2 and base == "char":
        return f"  *{name} = texts[0];"
    if stars == 2 or (stars and base not in ("void", "ncclDevComm_t")):
        value = 2 if name == "tableLen" else 7 if name == "len" else index if stars == 1 else OUT + index
        handle = base in HEADERS[0].handles
        return f"  *{name} = ({base}{'*' * (stars - 1)})({OUT + index if handle else value}LL);"
    cast = "(long long)(intptr_t)" if stars or base in HEADERS[0].handles else "(long long)"
    return f'  note("|{name}=%lld", {cast}{name});'


def _array(name: str, count: str, kind: str) -> str:
    loop = f"for (int i = 0; i < {count}; ++i)"
    if kind == "out":
        return f"  {loop} {name}[i] = (ncclComm_t)({OUT}LL + i);"
    if kind == "id":
        return f'  hex("{name}", {name}, 128 * {count});'
    size = "sizeof(int)" if kind == "int" else "sizeof(ncclWaitSignalDesc_t)"
    return f'  if ({name}) hex("{name}", {name}, (int)({size} * {count})); else note("|{name}=NULL");'


# --- libraries of an age ---


def forwarding(version: str) -> str:
    """Return the C source of a library over the CPU library: with its number, and the functions it had."""
    have = tuple(int(part) for part in version.split("."))
    parts = [
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stddef.h>\n#include <stdint.h>\n",
        *(header.types for header in HEADERS),
    ]
    parts.append(f'static void* real(const char* name) {{\n  static void* library;\n'
                 f'  if (!library) library = dlopen("{cpu_library()}", RTLD_NOW | RTLD_LOCAL);\n'
                 "  return dlsym(library, name);\n}\n")  # fmt: skip
    for f in FUNCTIONS:
        if f.name == "ncclGetVersion":
            number = have[0] * 10000 + have[1] * 100 + have[2]
            parts.append(f"{f.prototype} {{ *version = {number}; return ncclSuccess; }}")
        elif f.since <= have or f.name.startswith("pynccl"):
            types, names = ", ".join(t for t, _ in f.params) or "void", ", ".join(n for _, n in f.params)
            returns = "" if f.result == "void" else "return "
            parts.append(
                f"{f.prototype} {{\n  static {f.result} (*call)({types});\n"
                f'  if (!call) call = ({f.result}(*)({types}))real("{f.name}");\n'
                f"  {returns}call({names});\n}}"
            )
    return "\n".join(parts)
