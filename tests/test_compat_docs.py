"""docs/migrating.md: every name in its pynccl columns exists, and every call in them fits its signature."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

import pynccl
from conftest import ROOT
from pynccl._comm.prepared import Prepare

TEXT = (ROOT / "docs" / "migrating.md").read_text()


def lines() -> list[str]:
    """Return the code in the last column of every table that moves lines to pynccl."""
    found, inside = [], False
    for line in TEXT.splitlines():
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
            return Prepare
        return None if owner is None else getattr(owner, node.attr)
    return None


def calls(code: str) -> list[ast.Call]:
    tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("code", [code for code in lines() if re.search(r"(comm|pynccl)\.\w+", code)])
def test_names_and_arguments(code: str) -> None:
    if not re.search(r"[\s(=]", code):
        assert code.startswith("pynccl run") or resolve(ast.parse(code, mode="eval").body) is not None
        return
    if code.startswith("pynccl run"):
        return
    for call in calls(code):
        function = resolve(call.func)
        if function is None:
            continue
        method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func).startswith("comm.")
        given = [object()] * (len(call.args) + method)
        named = {word.arg: object() for word in call.keywords if word.arg}
        inspect.signature(function).bind(*given, **named)


def test_there_is_much_to_check() -> None:
    assert len(lines()) > 70
    assert TEXT.count("\n## ") == 6
