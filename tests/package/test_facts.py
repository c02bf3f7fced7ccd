"""Facts that stand in one file of the package, from which the others take them."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT

PACKAGE = ROOT / "pynccl"
# A text, and the file that has it.
ONCE = {
    '"float16"': "cpu/base/generated.inc",
    '"float8_e4m3fn"': "cpu/base/generated.inc",
}


@pytest.mark.parametrize("fact", ONCE)
def test_a_fact_stands_once(fact: str) -> None:
    kinds = (".cpp", ".hpp", ".inc", ".c", ".h") if ONCE[fact].startswith(("cpu/", "native/")) else (".py",)
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in kinds]
    code = {path: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in files}
    found = {path.relative_to(PACKAGE).as_posix() for path, text in code.items() if fact in text}
    assert found == {ONCE[fact]}
