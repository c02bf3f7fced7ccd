"""What a C header declares, read by a C parser, to compare two headers that stand for the same library."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser

from processes import completed

# Of the system's and CUDA's headers, what NCCL's need: a parser of plain C cannot read the real ones.
STUBS = {
    "stddef.h": "#pragma once\ntypedef unsigned long size_t;\n#define NULL ((void*)0)\n",
    "stdint.h": "#pragma once\n"
    + "".join(
        f"typedef {sign} {ctype} {prefix}int{bits}_t;\n"
        for bits, ctype in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
        for prefix, sign in (("", "signed"), ("u", "unsigned"))
    ),
    "limits.h": "#define INT_MIN (-2147483647 - 1)\n#define INT_MAX 2147483647\n",
    "stdbool.h": "#define bool _Bool\n",
    "cuda.h": "typedef int CUmemLocationType;\n",
    "cuda_fp16.h": "",
    "cuda_runtime.h": """
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
""",
}


@dataclass
class Declared:
    """Structs by field, enumerators by enum, parameter types by function, and what each macro stands for."""

    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    enums: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    handles: dict[str, str] = field(default_factory=dict)
    macros: dict[str, str] = field(default_factory=dict)


def write_stubs(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names or STUBS:
        (folder / name).write_text(STUBS[name])
    return folder


def declared(include: Path, stubs: Path, headers: list[str], *flags: str) -> Declared:
    """Read what the headers of a folder declare under NCCL's names; the profilers' aliases are left out."""
    text = "".join(f"#include <{name}>\n" for name in headers)
    compiler = [
        *shlex.split(os.environ.get("CC", "gcc")),
        "-std=c11",
        "-nostdinc",
        f"-I{stubs}",
        f"-I{include}",
    ]

    def preprocess(*more: str) -> str:
        command = [*compiler, *flags, *more, "-E", "-"]
        done = completed(command, input=text, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = Declared()
    for name, value in re.findall(r"^#define (NCCL_\w+(?:\([\w, ]*\))?) ?(.*)$", preprocess("-dM"), re.M):
        found.macros[name.replace(" ", "")] = re.sub(r"\s+", " ", value)
    for node in c_parser.CParser().parse(preprocess("-P", "-D__attribute__(x)=")).ext:
        _read(node, found)
    return found


def _text(node: c_ast.Node) -> str:
    return re.sub(r"\s+", " ", str(c_generator.CGenerator().visit(node)))


def _read(node: c_ast.Node, found: Declared) -> None:
    name = getattr(node, "name", None) or ""
    if not name.startswith("nccl"):
        return
    if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
        found.functions[name] = _prototype(node.type)
    elif isinstance(node, c_ast.Typedef) and isinstance(node.type, c_ast.PtrDecl):
        found.handles[name] = _text(node.type)
    elif isinstance(node, c_ast.Typedef):
        inner = node.type.type
        if isinstance(inner, c_ast.Struct) and inner.decls:
            found.structs[name] = [(decl.name, _text(decl.type)) for decl in inner.decls]
        elif isinstance(inner, c_ast.Enum):
            found.enums[name] = [item.name for item in inner.values.enumerators]


def _prototype(function: c_ast.FuncDecl) -> str:
    """Return the types alone: names of parameters differ, and so do () and (void)."""
    params = [_nameless(p) for p in function.args.params] if function.args else []
    return f"{_nameless(function)}({', '.join(p for p in params if p != 'void')})"


def _nameless(node: c_ast.Node) -> str:
    inner = node.type
    stars = ""
    while isinstance(inner, c_ast.PtrDecl):
        stars, inner = stars + "*", inner.type
    return " ".join([*inner.quals, *inner.type.names]) + stars


# --- values: a program to be compiled with either header ---------------------------------------------------

_PROBE = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#define FORMAT(x) \\
  _Generic((x), char*: "%s", void*: "%p", double: "%f", float: "%f", unsigned: "%u", default: "%d")
#define SHOW(x) (printf("%s = ", #x), printf(FORMAT(x), x), printf("\\n"))
static void show_bytes(const char* name, const void* bytes, size_t size) {
  printf("%s =", name);
  for (size_t i = 0; i < size; ++i) printf(" %02x", ((const unsigned char*)bytes)[i]);
  printf("\\n");
}
"""


def probe(found: Declared, headers: list[str], initializers: dict[str, str]) -> str:
    """Return a C program that prints every value, size and offset; `initializers` maps structs to macros."""
    lines = [f"SHOW({item});" for items in found.enums.values() for item in items]
    lines += [f"SHOW((int)sizeof({name}));" for name in (*found.structs, *found.enums)]
    for name, fields in found.structs.items():
        lines += [f"SHOW((int)offsetof({name}, {field}));" for field, _ in fields]
    for name, value in found.macros.items():
        if "(" in name:
            lines += [f"SHOW({name.split('(')[0]}({args}));" for args in ("2, 8, 4", "2, 9, 0", "3, 1, 2")]
        elif value and name not in initializers.values():
            lines.append(f"SHOW({name});")
    for struct, macro in initializers.items():
        lines.append(f'{{ static {struct} x = {macro}; show_bytes("{macro}", &x, sizeof x); }}')
    includes = "".join(f"#include <{name}>\n" for name in headers)
    return f"{_PROBE}{includes}int main(void) {{\n" + "\n".join(lines) + "\n}\n"
