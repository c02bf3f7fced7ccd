"""The code blocks of the documentation, with the marks that say how each is run.

A mark is an HTML comment directly above a block; readers do not see it:

    <!-- test: ranks: 4 -->                   Python: run by `pynccl run -n 4`, else by python alone
    <!-- test: mpirun: 4 -->                  Python: run by `mpirun -n 4`
    <!-- test: file: hello.py -->             saved under this name, for the console blocks of the page
    <!-- test: from: examples/a.py -->        not run: it stands in this file; a line of `...` leaves some out
    <!-- test: sources: FOLDER -->            console: this folder holds a copy of the sources
    <!-- test: exit: 1 -->                    console: the last command ends with this status, else with 0
    <!-- test: any order -->                  console: the lines come in any order
    <!-- test: output: REASON -->             console: what is printed is not compared, for a reason in OUTPUT
    <!-- test: slow: WHY -->                  left to `make test-slow`
    <!-- test: not run: REASON -->            for a reason in NOT_RUN; details may follow after a comma

`setup` and `file: NAME` may have a body, in the lines up to `-->`. The body of `setup` is code that stands
before each Python block that follows on the page. The body of `file` is a file that the page does not show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/parallel/*.md")),
    *sorted(ROOT.glob("docs/guides/*.md")),
    *sorted(ROOT.glob("docs/reference/*.md")),
]
LANGUAGES = ("python", "console", "bash", "c", "cpp", "cmake", "text")
MARKS = (
    "ranks",
    "mpirun",
    "file",
    "from",
    "sources",
    "exit",
    "any order",
    "output",
    "slow",
    "not run",
    "setup",
)
NOT_RUN = {
    "the Makefile's": "CI runs its targets",
    "installs": "changes the environment; tests/package/test_packaging.py installs the wheel",
    "a benchmark": "`make bench` runs it, on a machine that does nothing else",
    "another test": "the test that is named runs it",
    "needs a GPU": "`make test-gpu` runs what stands for it",
    "needs several machines": "one machine runs the tests",
}
OUTPUT = {
    "of this machine": "it names what is installed here",
    "of a random job": "the fault, and who notices it first, differ",
}

_MARK = r"<!-- test: (?P<key>[\w ]+?)(?:: (?P<value>.*?))?(?P<body>\n.*?)?\s*-->\n"
_FENCE = r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$"
_PART = re.compile(rf"^(?:{_MARK}|{_FENCE})", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One block of a page. A file that the page does not show is a block, too, of the language "hidden"."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    setup: str = ""

    @property
    def name(self) -> str:
        """Return the page and the line, as in README.md:14."""
        return f"{shown(self.page)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return the name under which it is saved."""
        return self.marks.get("file")

    @property
    def parts(self) -> list[str]:
        """Return what stands between lines of `...`."""
        return [part.strip("\n") for part in re.split(r"^ *\.\.\.\n", self.text, flags=re.M) if part.strip()]

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return each command of a console block with what it prints; a bash block is one command."""
        if self.language == "bash":
            return [(self.text, "")]
        parts = re.split(r"^\$ ", self.text, flags=re.M)
        assert not parts[0].strip(), f"{self.name} does not begin with a command: '$ ...'"
        found = [re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.S) for part in parts[1:]]
        return [(match[1], match[2]) for match in found if match]


def shown(page: Path) -> str:
    """Return the path of a page in the repository."""
    return os.path.relpath(page, ROOT)


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    marks: dict[str, str] = {}
    setup, end = "", 0
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        where = f"{shown(page)}:{line}"
        _check_between(text[end : part.start()], where)
        if text[end : part.start()].strip():
            assert not marks, f"{where}: a mark above it stands above no block"
        end = part.end()
        if part["language"] is not None:
            yield Block(page, line, part["language"], part["text"], marks, setup)
            marks = {}
            continue
        key, value, body = part["key"], part["value"] or "", part["body"]
        assert key in MARKS, f"{where}: the mark is {key!r}; expected one of {', '.join(MARKS)}"
        if key == "setup":
            setup = body or ""
        elif body:
            assert key == "file", f"{where}: {key!r} has a body; expected one of file, setup"
            yield Block(page, line, "hidden", body.lstrip("\n") + "\n", {"file": value})
        else:
            marks[key] = value
    assert not marks, f"{shown(page)}: the last mark stands above no block"
    _check_between(text[end:], f"{shown(page)}: the end")


def _check_between(text: str, where: str) -> None:
    """Refuse marks and blocks that the patterns miss, which would not be run."""
    missed = re.search(r"^ *(```|~~~|<!-- *tests?\b).*", text, re.M)
    assert missed is None, (
        f"{where}: above it is {missed and missed[0]!r}; expected ```LANGUAGE or <!-- test: ..."
    )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
