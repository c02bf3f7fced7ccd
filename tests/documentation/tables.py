"""The tables of docs/migrating.md, which hold code, and of docs/hangs.md, which hold messages."""

from __future__ import annotations

import ast
import re
import typing
from typing import Any

import pynccl
from conftest import ROOT

MIGRATING = (ROOT / "docs" / "migrating.md").read_text()
HANGS = (ROOT / "docs" / "hangs.md").read_text()


def migrated() -> list[str]:
    """Return the code in the last column of every table that moves lines to pynccl."""
    found, inside = [], False
    for line in MIGRATING.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            inside = False
        elif cells[-1] == "pynccl" and cells[0]:
            inside = True
        elif inside and not cells[-1].startswith("---"):
            found += re.findall(r"`([^`]+)`", cells[-1])
    return found


def resolve(node: ast.expr) -> Any:
    """Return what a dotted name starting with comm or pynccl means; comm is the class."""
    if isinstance(node, ast.Name):
        return {"comm": pynccl.Communicator, "pynccl": pynccl}.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        if owner is pynccl.Communicator and node.attr == "prepare":
            return typing.get_type_hints(owner.prepare.fget)["return"]
        return None if owner is None else getattr(owner, node.attr)
    return None


def calls(code: str) -> list[ast.Call]:
    """Return the calls in a line of code."""
    tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def messages(start: str, columns: int) -> list[str]:
    """Return the messages in the last of so many columns, in the row of docs/hangs.md that begins so."""
    (line,) = [line for line in HANGS.splitlines() if line.startswith(f"| {start}")]
    return re.findall(r"`([^`]*)`", line.split(" | ", columns - 1)[-1])
