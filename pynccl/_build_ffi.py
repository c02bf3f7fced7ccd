"""Derive the binding, the forwarding library, and what C programs need from api/*.h and native/*.h.

Needs the standard library and, for the binding, cffi.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
API, NATIVE = PACKAGE / "api", PACKAGE / "native"
HEADERS = ("nccl_api", "cpu_api", "cuda_api")
FORWARD_LIBRARY = "libnccl.so.2"
# What Python calls beside the tables' functions: cffi reads these headers but for their preprocessor lines.
_OWN_HEADERS = (
    "status.h",
    "call.h",
    "recorder.h",
    "comm.h",
    "signals.h",
    "watch.h",
    "calls.h",
    "segments.h",
    "scan.h",
)
GROUP_STEPS = {"ncclGroupStart": 1, "ncclGroupEnd": -1, "ncclGroupSimulateEnd": -1}

# --- the declarations ---------------------------------------------------------------------------------------

_PROTOTYPE = re.compile(r"^(?P<result>.+?[ *])(?P<name>\w+)\((?P<params>.*)\);\s*// since (?P<since>[\d.]+)$")
_STRUCT = re.compile(r"^typedef struct(?: \w+)? \{$(?P<body>.*?)^\} (?P<name>\w+);$", re.M | re.S)
_FIELD = re.compile(
    r"^  (?P<type>.+?[ *])(?P<name>\w+)(?:\[(?P<len>\d+)\])?;\s*"
    r"// since (?P<since>[\d.]+)(?: = (?P<initial>\w+))?$",
    re.M,
)
_HANDLE = re.compile(r"^typedef struct \w+\* (\w+);$", re.M)
_ENUM = re.compile(r"^typedef enum \{(?P<body>.*?)\} (?P<name>\w+);$", re.M | re.S)
_DEFINE = re.compile(r"^#define (\w+) ([^\"\n]+)$", re.M)

# What answers of functions without a status are sound.
_SOUND = {"ncclTeam_t": "out->nRanks > 0", "int": "*out >= 0"}

Version = tuple[int, int, int]


def _version(text: str) -> Version:
    parts = [int(part) for part in text.split(".")] + [0, 0]
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True)
class Field:
    type: str
    name: str
    since: Version
    length: int | None = None
    initial: str | None = None


@dataclass(frozen=True)
class Function:
    result: str
    name: str
    params: tuple[tuple[str, str], ...]
    since: Version

    @property
    def returns_value(self) -> bool:
        """Whether the result is an answer instead of a status."""
        return self.result in _SOUND

    @property
    def prototype(self) -> str:
        return f"{self.result} {self.name}({', '.join(f'{t} {n}' for t, n in self.params) or 'void'})"


@dataclass(frozen=True)
class Header:
    """One declaration header: `types` is its text without prototypes and comments."""

    name: str
    types: str
    functions: tuple[Function, ...]
    structs: dict[str, tuple[Field, ...]]
    constants: dict[str, int | float]
    handles: frozenset[str]
    enums: frozenset[str]
    # The enumerators by value, each with its first name.
    values: dict[str, tuple[str, ...]]

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """What datatypes and operations are called without NCCL's prefix: int8, sum."""
        return {
            enum: tuple(name.removeprefix("nccl").lower() for name in self.values[enum])
            for enum in ("ncclDataType_t", "ncclRedOp_t")
        }

    @property
    def item_sizes(self) -> tuple[int, ...]:
        """The bytes of an element of each datatype, which its name tells in bits."""
        bits = (re.search(r"\d+", name) for name in self.values["ncclDataType_t"])
        return tuple(int(found[0]) // 8 for found in bits if found)


def _function(match: re.Match[str]) -> Function:
    params = []
    for text in match["params"].split(","):
        if text.strip() in ("", "void"):
            continue
        ctype, name = re.fullmatch(r"\s*(.+?[ *])(\w+)", text).groups()  # type: ignore[union-attr]
        params.append((ctype.strip(), name))
    return Function(match["result"].strip(), match["name"], tuple(params), _version(match["since"]))


def parse(name: str) -> Header:
    """Read api/<name>.h; a line that looks like a prototype but is none is an error."""
    text = (API / f"{name}.h").read_text(encoding="utf-8")
    functions, rest = [], []
    for line in text.splitlines():
        match = _PROTOTYPE.match(line)
        if match:
            functions.append(_function(match))
        elif line.endswith(");") or (line[:1].isalpha() and "(" in line):
            raise ValueError(f"{name}.h: not a prototype with its version: {line}")
        else:
            rest.append(line)
    body = "\n".join(rest)
    structs = {
        m["name"]: tuple(
            Field(
                *(f["type"].strip(), f["name"], _version(f["since"])),
                int(f["len"]) if f["len"] else None,
                f["initial"],
            )
            for f in _FIELD.finditer(m["body"])
        )
        for m in _STRUCT.finditer(body)
    }
    types = re.sub(r"\s*//.*$", "", body, flags=re.M)
    constants: dict[str, int | float] = {}
    for key, value in _DEFINE.findall(types):
        number = re.sub(r"(?<=\.\d)f\b", "", value)
        constants[key] = eval(number, {"__builtins__": {}, "NULL": 0}, constants)
    values: dict[str, tuple[str, ...]] = {}
    for enum in _ENUM.finditer(types):
        members = [(key, int(value, 0)) for key, value in re.findall(r"(\w+) = (-?\w+)", enum["body"])]
        constants.update(members)
        # What counts them, or bounds them, is none of them.
        first = {value: key for key, value in reversed(members) if not re.match("nccl(Num|Max)[A-Z]", key)}
        values[enum["name"]] = tuple(first[value] for value in sorted(first))
    return Header(
        name,
        types,
        tuple(functions),
        {key: fields for key, fields in structs.items() if fields},
        constants,
        frozenset(_HANDLE.findall(types)),
        frozenset(values),
        values,
    )


# --- the binding --------------------------------------------------------------------------------------------


class Binding:
    """The cffi module `_native`: for each function a wrapper that takes integers for pointers and handles."""

    def __init__(self) -> None:
        self.headers = [parse(name) for name in HEADERS]
        self._handles = frozenset().union(*(h.handles for h in self.headers))
        self._enums = frozenset().union(*(h.enums for h in self.headers))

    def python_type(self, ctype: str) -> str:
        """Return the type that the wrapper takes for NCCL's `ctype`: cffi converts it without a cast."""
        base, stars = ctype.replace("const ", "").rstrip("*").strip(), ctype.count("*")
        if base == "ncclUniqueId":
            return "char*"
        if base == "void" and stars:
            return "uintptr_t" + "*" * (stars - 1)
        if base in self._handles:
            return "uintptr_t" + "*" * stars
        if base in self._enums:
            return "int" + "*" * stars
        return ctype

    def _argument(self, ctype: str, name: str) -> str:
        if ctype == "ncclUniqueId":
            return f"*(const ncclUniqueId*){name}"
        return name if self.python_type(ctype) == ctype else f"({ctype}){name}"

    def _result(self, function: Function) -> str:
        return function.result if "*" in function.result else "int"

    def declaration(self, function: Function) -> str:
        params = [f"{self.python_type(t)} {n}" for t, n in function.params]
        params += [f"{function.result}* out"] if function.returns_value else []
        return f"{self._result(function)} {function.name}({', '.join(params) or 'void'})"

    def cdef(self) -> str:
        parts = [
            "void* pynccl_open(const char* path, int how);",
            "void* pynccl_symbol(void* handle, const char* name);",
            "int pynccl_close(void* handle);",
            "const char* pynccl_error(void);",
            "const char* pynccl_path(void* handle);",
        ]
        for header in self.headers:
            parts += [re.sub(r"^#.*$", "", header.types, flags=re.M)]
            parts += [f"{signature};" for signature in self._table_functions(header)]
            parts += [self.declaration(function) + ";" for function in header.functions]
        texts = [(NATIVE / name).read_text(encoding="utf-8") for name in _OWN_HEADERS]
        return "\n".join(parts + [re.sub(r"^#.*$", "", text, flags=re.M) for text in texts])

    def library_header(self) -> str:
        """Return library.h: the libraries' types, and each function as a wrapper around its slot."""
        parts = ["#pragma once", '#include "shim.h"']
        parts += [header.types for header in self.headers]
        parts += ["#pragma GCC visibility push(hidden)"]
        for header in self.headers:
            parts += [f"extern struct pynccl_table {header.name};"]
            functions = self._table_functions(header).items()
            parts += [f"static inline {signature} {{ {body}; }}" for signature, body in functions]
            parts += [f"extern {self._slot(f)};" for f in header.functions]
            parts += [self._wrapper(header, f) for f in header.functions]
        parts += [f"extern {table};" for table in self._names()]
        return "\n".join([*parts, "#pragma GCC visibility pop", ""])

    def library_source(self) -> str:
        """Return library.c: the slots, the tables over them, and NCCL's names."""
        parts = ['#include "library.h"', "#define NAME(name) {#name, (void**)&p_##name}"]
        for header in self.headers:
            parts += [f"{self._slot(f)};" for f in header.functions]
            slots = ", ".join(f"NAME({f.name})" for f in header.functions)
            parts += [
                f"static const struct pynccl_slot {header.name}_slots[] = {{{slots}}};",
                f"struct pynccl_table {header.name} = "
                f"{{{header.name}_slots, {len(header.functions)}, PYNCCL_NOT_LOADED}};",
            ]
        parts += [f"{table} = {{{values}}};" for table, values in self._names().items()]
        return "\n".join([*parts, ""])

    def _table_functions(self, header: Header) -> dict[str, str]:
        return {
            f"int {header.name}_count(void* handle)": f"return pynccl_count(&{header.name}, handle)",
            f"void {header.name}_bind(void* handle)": f"pynccl_fill(&{header.name}, handle)",
            f"void* {header.name}_find(const char* name)": f"return pynccl_find(&{header.name}, name)",
        }

    def _names(self) -> dict[str, str]:
        nccl = self.headers[0]
        quoted = {key: ", ".join(f'"{name}"' for name in names) for key, names in nccl.names.items()}
        return {
            "const char* const pynccl_type_names[ncclNumTypes]": quoted["ncclDataType_t"],
            "const char* const pynccl_op_names[ncclNumOps]": quoted["ncclRedOp_t"],
            "const unsigned char pynccl_item_sizes[ncclNumTypes]": ", ".join(map(str, nccl.item_sizes)),
        }

    def _slot(self, f: Function) -> str:
        return f"{f.result} (*p_{f.name})({self._c_params(f)})"

    def _c_params(self, function: Function) -> str:
        return ", ".join(t for t, _ in function.params) or "void"

    def _wrapper(self, header: Header, f: Function) -> str:
        call = f"f({', '.join(self._argument(t, n) for t, n in f.params)})"
        absent = "NULL" if "*" in f.result else f"pynccl_absent(&{header.name})"
        if f.name in GROUP_STEPS:
            call = f"pynccl_group({GROUP_STEPS[f.name]}, (int){call})"
        if f.returns_value:
            body = f"*out = {call}; return {_SOUND[f.result]} ? ncclSuccess : ncclInvalidArgument;"
        else:
            body = f"{call}; return 0;" if f.result == "void" else f"return {call};"
        load = f"{f.result} (*f)({self._c_params(f)}) = __atomic_load_n(&p_{f.name}, __ATOMIC_ACQUIRE);"
        return f"static inline {self.declaration(f)} {{\n  {load}\n  if (!f) return {absent};\n  {body}\n}}"

    def emit(self, folder: Path) -> list[Path]:
        """Write the generated sources into a folder, and return those to be compiled."""
        import cffi

        ffi = cffi.FFI()
        ffi.cdef(self.cdef())
        includes = "".join(f'#include "{name}"\n' for name in ("library.h", *_OWN_HEADERS))
        # fastcall.c has the module's initialisation, which calls cffi's.
        rename = "#define PyInit__native pynccl_cffi_module\n"
        ffi.set_source("pynccl._native", includes + rename)
        ffi.emit_c_code(str(folder / "_native.c"))
        _write(folder / "library.h", self.library_header())
        _write(folder / "library.c", self.library_source())
        return [folder / "_native.c", folder / "library.c"]


# --- the plain shared libraries -----------------------------------------------------------------------------


def _export_map() -> str:
    """Return a linker script that exports the declared functions and hides the rest, libstdc++ too."""
    names = "".join(f"  {f.name};\n" for name in ("nccl_api", "cpu_api") for f in parse(name).functions)
    return f"{{\nglobal:\n{names}local:\n  *;\n}};\n"


def _absent(result: str) -> str:
    """Return what a function answers where there is no CPU library to forward to."""
    known = {
        "ncclResult_t": "ncclSystemError",
        "const char*": '"pynccl: the CPU library cannot be loaded"',
        "int": "-1",
    }
    return known.get(result, f"({result}){{0}}")


def forward_source() -> str:
    """Return the C source of what other NCCL clients load: every function, forwarded to the CPU library."""
    headers = [parse("nccl_api"), parse("cpu_api")]
    functions = [f for header in headers for f in header.functions]
    parts = ["#define _GNU_SOURCE", "#include <stddef.h>", "#include <stdint.h>"]
    parts += [header.types for header in headers]
    parts += ["static const char* const names[] = {" + ", ".join(f'"{f.name}"' for f in functions) + "};"]
    parts += ['#include "forward.h"', ""]
    for index, f in enumerate(functions):
        types = ", ".join(t for t, _ in f.params) or "void"
        call = f"f({', '.join(n for _, n in f.params)})"
        body = f"if (f) {call};" if f.result == "void" else f"return f ? {call} : {_absent(f.result)};"
        parts += [f"{f.prototype} {{", f"  {f.result} (*f)({types}) = function({index});", f"  {body}", "}"]
        if f in headers[0].functions:
            parts.append(f'extern __typeof__({f.name}) p{f.name} __attribute__((alias("{f.name}")));')
    return "\n".join(parts) + "\n"


# What C and C++ programs need of it: the headers, a name for the linker, and a file for pkg-config.

_NCCL_INCLUDES = """\
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

// Where there is CUDA, as NVIDIA's header has it; where not, streams and events are declared as CUDA does.
#ifdef __has_include
#if __has_include(<cuda_runtime.h>)
#include <cuda_runtime.h>
#endif
#endif
"""
_PROFILING = """
// The same functions for profilers, which define the names above themselves.
"""
_DEVICE_PART = "// From here on: what nccl_device.h declares for the host.\n"
_DEVICE_INCLUDES = "#include <nccl.h>\n#ifndef __cplusplus\n#include <stdbool.h>\n#endif\n"
INITIALIZERS = {
    "ncclConfig_t": "NCCL_CONFIG_INITIALIZER",
    "ncclCollConfig_t": "NCCL_COLLCONFIG_INITIALIZER",
    "ncclSimInfo_t": "NCCL_SIM_INFO_INITIALIZER",
    "ncclEncryptionConfig_t": "NCCL_ENCRYPTION_CONFIG_INITIALIZER",
    "ncclCommProperties_t": "NCCL_COMM_PROPERTIES_INITIALIZER",
    "ncclDevCommRequirements_t": "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER",
}


def _initial(field: Field, struct: str, header: Header) -> str:
    by_name = {"size": f"sizeof({struct})", "magic": "NCCL_API_MAGIC", "version": "NCCL_VERSION_CODE"}
    if field.initial or field.name in by_name:
        return field.initial or by_name[field.name]
    if struct in ("ncclCommProperties_t", "ncclDevCommRequirements_t"):  # no options left undefined
        return "{0}" if field.length else f"({field.type})0" if field.type in header.enums else "0"
    is_pointer = field.type.endswith("*") or field.type in header.handles
    return "NCCL_CONFIG_UNDEF_PTR" if is_pointer else "NCCL_CONFIG_UNDEF_INT"


def _initializer(struct: str, header: Header) -> str:
    fields = header.structs[struct]
    lines = [f"  {_initial(field, struct, header)}, /* {field.name} */ \\" for field in fields]
    return "\n".join([f"#define {INITIALIZERS[struct]} {{ \\", *lines, "}", ""])


def _c_header(source: str, guard: str, includes: str, declarations: str) -> str:
    return f"""\
// Made from pynccl/api/{source}, for C and C++. "since": the first NCCL that goes with a declaration.
#ifndef {guard}
#define {guard}

{includes}
#ifdef __cplusplus
extern "C" {{
#endif

{declarations.strip().replace("_Bool", "bool")}

#ifdef __cplusplus
}}
#endif

#endif
"""


def c_headers() -> dict[str, str]:
    """Return the headers by name; nccl.h and nccl_device.h declare what NVIDIA's declare, for the host."""
    header, texts = parse("nccl_api"), {}
    for name in ("nccl_api", "cpu_api"):
        # Without the comment at the top, which is for who edits the file.
        texts[name] = (API / f"{name}.h").read_text(encoding="utf-8").split("\n\n", 1)[1]
    host, device = texts["nccl_api"].split(_DEVICE_PART)
    host += _PROFILING + "".join(
        f.prototype.replace(f.name, f"p{f.name}", 1) + ";\n" for f in header.functions if f"{f.name}(" in host
    )
    for struct in INITIALIZERS:
        if f"}} {struct};" in host:
            host = f"{host.strip()}\n\n{_initializer(struct, header)}"
        else:
            device = f"{device.strip()}\n\n{_initializer(struct, header)}"
    return {
        "nccl.h": _c_header("nccl_api.h", "NCCL_H_", _NCCL_INCLUDES, host),
        "nccl_device.h": _c_header("nccl_api.h", "_NCCL_DEVICE_H_", _DEVICE_INCLUDES, device),
        "pynccl_cpu.h": _c_header("cpu_api.h", "_PYNCCL_CPU_H_", "#include <nccl.h>\n", texts["cpu_api"]),
    }


def pkg_config() -> str:
    """Return nccl.pc, for the folder `pkgconfig` beside the libraries, wherever that is."""
    constants = parse("nccl_api").constants
    version = ".".join(str(constants[f"NCCL_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))
    return f"""\
prefix=${{pcfiledir}}/..
libdir=${{prefix}}
includedir=${{prefix}}/include

Name: nccl
Description: NCCL's C API over CPU memory, by pynccl
Version: {version}
Cflags: -I${{includedir}}
Libs: -L${{libdir}} -Wl,-rpath,${{libdir}} -lnccl
"""


def write_c_files(folder: Path) -> None:
    """Write beside the forwarding library what C programs need to be compiled and linked with it."""
    files = {f"include/{name}": text for name, text in c_headers().items()}
    for name, text in {**files, "pkgconfig/nccl.pc": pkg_config()}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # A copy, since a wheel holds no links; a program linked with it asks for the soname.
    shutil.copy(folder / FORWARD_LIBRARY, folder / "libnccl.new")
    (folder / "libnccl.new").replace(folder / "libnccl.so")


# --- all of it ----------------------------------------------------------------------------------------------


def emit(folder: Path, binding: bool) -> dict[str, list[Path]]:
    """Write what is generated, where that has changed, and return the sources of each extension."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "exports.map", _export_map())
    _write(folder / "forward.c", forward_source())
    made = {"pynccl.forward.libnccl": [folder / "forward.c"]}
    return made | {"pynccl._native": Binding().emit(folder)} if binding else made


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
