"""The tables of docs/clients.md, which tests/clients/ compare with what they run."""

from __future__ import annotations

import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()


def rows(table: int, client: str) -> list[list[str]]:
    """Return the cells behind a client's name in the rows of that table, without marks; for "" those of all.

    Empty cells are those above, but for the last column's.
    """
    tables = re.findall(r"^\| client \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.M)
    found, above = [], [""] * 9
    for line in tables[table].splitlines():
        *cells, last = (cell.strip().replace("`", "") for cell in line.split("|")[1:-1])
        above = [cell or upper for cell, upper in zip(cells, above, strict=False)]
        if client in above[0]:
            found.append([*above[0 if not client else 1 :], last])
    return found
