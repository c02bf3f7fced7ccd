"""Every code block, command and table of the documentation does what the page says."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import pynccl
from conftest import ROOT
from meeting import free_port

from . import commands, hangs, session, tables
from .pages import BLOCKS, LANGUAGES, NOT_RUN, OUTPUT, Block, blocks_of, shown


def parameters(blocks: list[Block]) -> list[object]:
    quick, slow = [pytest.mark.timeout(300)], [pytest.mark.timeout(600), pytest.mark.slow]
    return [pytest.param(b, id=b.name, marks=slow if "slow" in b.marks else quick) for b in blocks]


# --- blocks -------------------------------------------------------------------------------------------------

PYTHON = [block for block in BLOCKS if session.runs_python(block)]
SHELL = [block for block in BLOCKS if session.runs_in_shell(block)]


@pytest.mark.parametrize("block", parameters(PYTHON))
def test_python(block: Block, request: pytest.FixtureRequest) -> None:
    if "pynccl.torch" in block.text:
        request.getfixturevalue("torch_backend")
    nranks, status, out = session.program(block.page, *session.on_ranks(block))
    assert out.count(f"end of {block.name}\n") == nranks, out
    assert status == 0, out


@pytest.mark.parametrize("block", parameters(SHELL))
def test_console(block: Block) -> None:
    outcomes = session.session(block.page, "slow" in block.marks)[block.line]
    for outcome in outcomes:
        last = outcome is outcomes[-1]
        assert outcome.status == (int(block.marks.get("exit", 0)) if last else 0), outcome
        assert session.same(block, outcome), outcome


@pytest.mark.parametrize("block", [pytest.param(b, id=b.name) for b in BLOCKS if "not run" in b.marks])
def test_not_run(block: Block) -> None:
    """Skipped with the reason, so that `pytest -ra` lists every block that is not run."""
    reason, _, details = block.marks["not run"].partition(", ")
    assert reason in NOT_RUN, f"{block.name}: not run: {reason!r}; expected one of {', '.join(NOT_RUN)}"
    named = re.findall(r"tests/[\w/]+\.py", f"{NOT_RUN[reason]} {details}")
    assert all((ROOT / name).exists() for name in named), f"{block.name} names {named}"
    assert named or reason != "another test", f"{block.name} names no test"
    pytest.skip(f"{block.name}: {reason}: {details or NOT_RUN[reason]}")


@pytest.mark.parametrize("block", [pytest.param(b, id=b.name) for b in BLOCKS if "from" in b.marks])
def test_parts_of_a_file(block: Block) -> None:
    text = (ROOT / block.marks["from"]).read_text()
    for part in block.parts:
        places = [textwrap.indent(part, " " * columns) for columns in (0, 4, 8, 12)]
        assert any(f"\n{place}\n" in text for place in places), (
            f"{block.marks['from']} has no longer:\n{part}"
        )


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in BLOCKS])
def test_marks(block: Block) -> None:
    assert block.language in (*LANGUAGES, "hidden"), "the language of the block is missing or unknown"
    if block.language == "text":
        assert not re.search(r"^\$ ", block.text, re.M), "it has commands, so its language is console"
    if "output" in block.marks:
        assert block.marks["output"] in OUTPUT
    # What is neither run nor saved needs the mark that says why.
    if block.language in ("c", "cpp", "cmake"):
        assert block.file or "not run" in block.marks


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "<!-- test: rank: 4 -->\n```python\n1\n```\n",
            "PAGE:1: the mark is 'rank'; expected one of ranks, ",
        ),
        (
            "<!-- test: ranks: 4 -->\nA sentence.\n\n```python\n1\n```\n",
            "PAGE:4: a mark above it stands above no",
        ),
        ("<!-- test: slow: long -->\n", "PAGE: the last mark stands above no block"),
        ("```python title\n1\n```\n", "PAGE: the end: above it is '```python title'; expected ```LANGUAGE"),
        ("<!-- tests: slow -->\n", "PAGE: the end: above it is '<!-- tests: slow -->'; expected"),
        ("<!-- test: exit: 1\nx = 1\n-->\n", "PAGE:1: 'exit' has a body; expected one of file, setup"),
    ],
)
def test_wrong_marks_are_refused(text: str, says: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=re.escape(says.replace("PAGE", shown(page)))):
        blocks_of(page)


# --- commands elsewhere on the pages ------------------------------------------------------------------------


def test_every_command_is_known() -> None:
    known, shown = {*commands.RUNS, *commands.PAIRS}, commands.shown()
    unknown = {command for command in shown - known if not command.startswith(tuple(commands.ELSEWHERE))}
    assert not unknown, "neither run here nor named as run elsewhere"
    assert known <= shown, f"no longer documented: {known - shown}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=() if c in commands.QUICK else pytest.mark.full) for c in commands.RUNS],
)
def test_a_command(command: str, tmp_path: Path) -> None:
    session.populate(tmp_path)
    env = session.variables()
    if command.startswith(("pynccl", "python examples/survive")):
        # These choose the CPU library by themselves.
        del env["PYNCCL_LIBRARY"]
    if "traces" in (text := commands.filled(command)):
        text = f"PYNCCL_TRACE_DIR=traces pynccl run -n 2 examples/all_reduce.py && {text}"
    assert commands.RUNS[command] in session.finished(session.shell(text, tmp_path, env), 250)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", commands.PAIRS)
def test_two_of_a_command(command: str, tmp_path: Path) -> None:
    session.populate(tmp_path)
    first, second, nranks = commands.PAIRS[command]
    here = command.replace("HOST0", "127.0.0.1").replace("29500", str(free_port()))
    both = [session.shell(text, tmp_path) for text in (here, here.replace(first, second))]
    out = "".join(session.finished(process, 250) for process in both)
    assert f"rank {nranks - 1} of {nranks}: success" in out


# --- tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [c for c in tables.migrated() if re.search(r"(comm|pynccl)\.\w+", c)])
def test_migrated_names_and_arguments(code: str) -> None:
    """Every name in docs/migrating.md exists, and every call fits its signature."""
    if not re.search(r"[\s(=]", code):
        assert code.startswith("pynccl run") or tables.resolve(ast.parse(code, mode="eval").body) is not None
        return
    if code.startswith("pynccl run"):
        return
    for call in tables.calls(code):
        function = tables.resolve(call.func)
        if function is None:
            continue
        method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func).startswith("comm.")
        given = [object()] * (len(call.args) + method)
        named = {word.arg: object() for word in call.keywords if word.arg}
        inspect.signature(function).bind(*given, **named)


def test_there_is_much_to_migrate() -> None:
    assert len(tables.migrated()) > 70
    assert tables.MIGRATING.count("\n## ") == 9


@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=pytest.mark.slow if i else ()) for i, start in enumerate(hangs.HANGS)],
)
def test_a_way_to_hang(start: str) -> None:
    checked = start in ("does not come, in check mode", "different order on two")
    nranks = 2 if start == "only one rank has" else 3
    text = hangs.printed(start, nranks, PYNCCL_CHECK=str(int(checked)))
    assert any(hangs.plain(message) in text for message in tables.messages(start, columns=3)), text


@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=pytest.mark.slow if i else ()) for i, start in enumerate(hangs.MISMATCHES)],
)
def test_a_mismatch(start: str) -> None:
    text = hangs.printed(start, PYNCCL_CHECK="1")
    head, *lines = text.splitlines()
    assert head == "CollectiveMismatchError: the ranks called different things:"
    assert [line.strip() for line in lines] == [
        hangs.plain(message) for message in tables.messages(start, columns=2)
    ]


# --- what the documentation holds ---------------------------------------------------------------------------


def test_the_readme_is_short_and_begins_with_a_call() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    assert any("comm.all_reduce(" in line for line in lines[:30])


def test_the_reference_has_every_public_name() -> None:
    reference = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    documented = set(re.findall(r"^::: pynccl\.(\w+)$", reference, re.M))
    assert set(pynccl.__all__) - {"__version__"} <= documented
