"""The C API as pages: every function and field of nccl_api.h with the NCCL version that brought it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _tables import table

FUNCTION = re.compile(r"^([\w ]+?[ *]+)(\w+)\((.*)\); // since ([\d.]+)$", re.M)
STRUCT = re.compile(r"^typedef struct \{\n((?:  .*// since .*\n)+)\} (\w+);$", re.M)
FIELD = re.compile(r"^  (.*?);\s*// since ([\d.]+)(?: = (\S+))?$", re.M)
ENUM = re.compile(r"^typedef enum \{([^}]*)\} (\w+);$", re.M)


def reference(header: str) -> str:
    """Return the page of pynccl.capi, whose functions are those of the header."""
    names = ", ".join(name for _, name, _, _ in FUNCTION.findall(header))
    return (
        "# pynccl.capi\n\n[The C API](c-api.md) lists the NCCL version of each function.\n\n::: pynccl.capi\n"
        f"    options:\n      members: [{names}]\n      show_if_no_docstring: true\n"
    )


def page(header: str) -> str:
    """Return the page for the text of nccl_api.h."""
    functions = [
        [f"`{name}`", since, f"`{kind.strip()} {name}({arguments})`"]
        for kind, name, arguments, since in FUNCTION.findall(header)
    ]
    # A prototype or a field that the patterns above miss must not be left out of the page.
    assert len(functions) == len(re.findall(r"^\w.*\);.*since", header, re.M))
    parts = [
        "# The C API\n",
        "What `pynccl/api/nccl_api.h` declares, and the NCCL version that brought each part. "
        "`pynccl.capi` has every function under its C name. A function that the loaded library lacks "
        "raises `NotSupportedError`.\n",
        "## Functions\n",
        table(["function", "since", "prototype"], functions, "left") + "\n",
    ]
    for body, name in STRUCT.findall(header):
        fields = [
            [f"`{field}`", since, default and f"`{default}`"] for field, since, default in FIELD.findall(body)
        ]
        assert len(fields) == body.count("// since"), name
        parts += [f"## {name}\n", table(["field", "since", "initial value"], fields, "left") + "\n"]
    for body, name in ENUM.findall(header):
        values = [value.split("=") for value in body.split(",")]
        parts += [
            f"## {name}\n",
            table(["name", "value"], [[f"`{n.strip()}`", v.strip()] for n, v in values], "left") + "\n",
        ]
    return "\n".join(parts)
