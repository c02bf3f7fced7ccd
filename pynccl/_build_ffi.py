"""Derive the binding from api/*.h and native/*.h: cffi's declarations, and the table of functions.

Needs the standard library and, to write the sources, cffi.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
API, NATIVE = PACKAGE / "api", PACKAGE / "native"
HEADERS = ("nccl_api", "cpu_api", "cuda_api")
# What Python calls beside the tables' functions: cffi reads these headers but for their preprocessor lines.
_OWN_HEADERS = (
    "status.h",
    "call.h",
    "recorder.h",
    "comm.h",
    "signals.h",
    "watch.h",
    "calls.h",
    "memory.h",
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
    def dtype_names(self) -> tuple[str, ...]:
        """What NumPy calls the datatypes, with ml_dtypes for those that it lacks: int8, float8_e4m3fn."""
        others = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
        return tuple(others.get(name, name) for name in self.names["ncclDataType_t"])

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
        # The number of values, or their bound, is no value.
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

        folder.mkdir(parents=True, exist_ok=True)
        ffi = cffi.FFI()
        ffi.cdef(self.cdef())
        includes = "".join(f'#include "{name}"\n' for name in ("library.h", *_OWN_HEADERS))
        # module.c has the module's initialisation, which calls cffi's.
        rename = "#define PyInit__native pynccl_cffi_module\n"
        ffi.set_source("pynccl._native", includes + rename)
        ffi.emit_c_code(str(folder / "_native.c"))
        write(folder / "library.h", self.library_header())
        write(folder / "library.c", self.library_source())
        return [folder / "_native.c", folder / "library.c"]


def write(path: Path, text: str) -> None:
    """Write a file if its text has changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
