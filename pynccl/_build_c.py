"""Derive the C side's files from api/*.h: the forwarding library, and what C programs need to link with it.

The headers are those that `_build_ffi.parse` has read; setup.py passes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pynccl._build_ffi import Field, Header

API = Path(__file__).resolve().parent / "api"
FORWARD_LIBRARY = "libnccl.so.2"


def export_map(nccl: Header, cpu: Header) -> str:
    """Return a linker script that exports the declared functions and hides the rest, libstdc++ too."""
    names = "".join(f"  {f.name};\n" for f in nccl.functions + cpu.functions)
    return f"{{\nglobal:\n{names}local:\n  *;\n}};\n"


def _absent(result: str) -> str:
    """Return what a function answers where there is no CPU library to forward to."""
    known = {
        "ncclResult_t": "ncclSystemError",
        "const char*": '"pynccl: the CPU library cannot be loaded"',
        "int": "-1",
    }
    return known.get(result, f"({result}){{0}}")


def forward_source(nccl: Header, cpu: Header) -> str:
    """Return the C source of what other NCCL clients load: every function, forwarded to the CPU library."""
    functions = nccl.functions + cpu.functions
    parts = ["#define _GNU_SOURCE", "#include <stddef.h>", "#include <stdint.h>"]
    parts += [nccl.types, cpu.types]
    parts += ["static const char* const names[] = {" + ", ".join(f'"{f.name}"' for f in functions) + "};"]
    parts += ['#include "forward.inc"', ""]
    for index, f in enumerate(functions):
        types = ", ".join(t for t, _ in f.params) or "void"
        call = f"f({', '.join(n for _, n in f.params)})"
        body = f"if (f) {call};" if f.result == "void" else f"return f ? {call} : {_absent(f.result)};"
        parts += [f"{f.prototype} {{", f"  {f.result} (*f)({types}) = function({index});", f"  {body}", "}"]
        if f in nccl.functions:
            parts.append(f'extern __typeof__({f.name}) p{f.name} __attribute__((alias("{f.name}")));')
    return "\n".join(parts) + "\n"


# --- for C and C++ programs: the headers, a name for the linker, and a file for pkg-config ---

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


def c_headers(nccl: Header) -> dict[str, str]:
    """Return the headers by name; nccl.h and nccl_device.h declare what NVIDIA's declare, for the host."""
    texts = {}
    for name in ("nccl_api", "cpu_api"):
        # Without the comment at the top, which is for those who edit the file.
        texts[name] = (API / f"{name}.h").read_text(encoding="utf-8").split("\n\n", 1)[1]
    host, device = texts["nccl_api"].split(_DEVICE_PART)
    host += _PROFILING + "".join(
        f.prototype.replace(f.name, f"p{f.name}", 1) + ";\n" for f in nccl.functions if f"{f.name}(" in host
    )
    for struct in INITIALIZERS:
        if f"}} {struct};" in host:
            host = f"{host.strip()}\n\n{_initializer(struct, nccl)}"
        else:
            device = f"{device.strip()}\n\n{_initializer(struct, nccl)}"
    return {
        "nccl.h": _c_header("nccl_api.h", "NCCL_H_", _NCCL_INCLUDES, host),
        "nccl_device.h": _c_header("nccl_api.h", "_NCCL_DEVICE_H_", _DEVICE_INCLUDES, device),
        "pynccl_cpu.h": _c_header("cpu_api.h", "_PYNCCL_CPU_H_", "#include <nccl.h>\n", texts["cpu_api"]),
    }


def pkg_config(nccl: Header) -> str:
    """Return nccl.pc, for the folder `pkgconfig` beside the libraries, wherever that is."""
    version = ".".join(str(nccl.constants[f"NCCL_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))
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


def write_c_files(folder: Path, nccl: Header) -> None:
    """Write beside the forwarding library what C programs need to be compiled and linked with it."""
    files = {f"include/{name}": text for name, text in c_headers(nccl).items()}
    for name, text in {**files, "pkgconfig/nccl.pc": pkg_config(nccl)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # A copy, since a wheel holds no links; a program linked with it asks for the soname.
    shutil.copy(folder / FORWARD_LIBRARY, folder / "libnccl.new")
    (folder / "libnccl.new").replace(folder / "libnccl.so")
