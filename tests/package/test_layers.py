"""No module imports one above it or in a circle, or uses the privates of another.

The rooms' docstrings say which rooms import them.
"""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import ROOT

PACKAGE = ROOT / "pynccl"
# From the ground up; modules of one floor do not import one another's rooms. docs/architecture.md draws this.
FLOORS = (
    ("_base", "_errors"),
    ("_native",),
    ("_library", "_secure"),
    ("_types",),
    ("capi",),
    ("_arrays", "_trace"),
    ("_device",),
    ("_watch",),
    ("_memory",),
    ("_comm",),
    ("bootstrap",),
    ("_run", "allocators", "mpi", "ras", "ray", "torch"),
    ("testing", "transfer"),
    ("",),
    ("_tools",),
    ("__main__", "compat"),
)
# Built by setuptools, before there is a package.
APART = {"_build_c", "_build_ffi"}
# What others' libraries, and Python's own, call so.
FOREIGN = {"_C", "_asdict", "_c_contiguous", "_current_frames", "_exit", "_f_contiguous", "_fields"}
FOREIGN |= {"_getframe", "_replace"}
FOREIGN |= {"_get_default_store", "_register_backend", "_set_default_backend"}
FOREIGN |= {"_internal_kv_del", "_internal_kv_exists", "_internal_kv_get", "_internal_kv_put"}
FOREIGN |= {"_ray_actor_id"}
GETTERS = ("attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    found = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    return {name: tree for name, tree in found.items() if room(name) not in APART}


def room(module: str) -> str:
    """Return the first part of a module's name below pynccl."""
    return [*module.split("."), ""][1]


def floor(module: str) -> int:
    (found,) = (level for level, rooms in enumerate(FLOORS) if room(module) in rooms)
    return found


@cache
def imports(module: str) -> tuple[str, ...]:
    """Return what a module imports of the package; also for type checkers, and in functions."""
    return tuple(found_imports(module))


def found_imports(module: str) -> Iterator[str]:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pynccl")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pynccl":
            assert node.module is not None
            for alias in node.names:
                deep = f"{node.module}.{alias.name}"
                compiled = node.module == "pynccl" and alias.name in FLOORS[1]
                yield deep if deep in modules() or compiled else node.module


def imports_by_name(module: str) -> Iterator[str]:
    """Yield what a module imports of the package by import_module("pynccl.a") or __import__."""
    calls = (node for node in ast.walk(modules()[module]) if isinstance(node, ast.Call) and node.args)
    for call in calls:
        name = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__") and name in modules():
            yield str(name)


def test_every_module_has_a_floor() -> None:
    rooms = {room(module) for module in modules()}
    assert rooms | {"_native"} == {name for names in FLOORS for name in names}


def test_nothing_imports_what_is_above_it() -> None:
    imported = ((a, b) for a in sorted(modules()) for b in (*imports(a), *imports_by_name(a)))
    between_rooms = ((a, b) for a, b in imported if room(a) != room(b))
    assert not [f"{a} imports {b}, which is not below it" for a, b in between_rooms if floor(b) >= floor(a)]


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PACKAGE.rglob("__init__.py")), ids=lambda path: path.name
)
def test_every_room_says_what_imports_it(folder: Path) -> None:
    text = ast.get_docstring(modules()[name_of(folder / "__init__.py")]) or ""
    (said,) = re.findall(r"\bImported by (.*?)(?=[.:])", " ".join(text.split()))
    own = name_of(folder / "__init__.py")
    inside = [module for module in modules() if own == "pynccl" and not room(module)]
    inside += [module for module in modules() if own != "pynccl" and f"{module}.".startswith(f"{own}.")]
    others = (module for module in modules() if room(module) != room(own))
    users = {room(other) or "pynccl" for other in others if {*imports(other)} & {*inside}}
    if said.endswith("every room above it"):
        assert len(users) > 5
    else:
        assert said == (", ".join(f"`{user}`" for user in sorted(users)) or "no other room")


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join((*path[path.index(module) :], module))
        if module in done or module not in modules():
            return
        for other in imports(module):
            visit(other, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_nothing_uses_the_privates_of_another_module() -> None:
    uses = []
    for module, tree in sorted(modules().items()):
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name)}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        own |= {node.attr for node in attributes if is_self(node.value)}
        found = [(node, node.attr) for node in attributes if not is_self(node.value)]
        found += [(node, part) for node in nodes for part in names_in_text(node)]
        foreign = [(node, name) for node, name in found if is_private(name) and name not in own | FOREIGN]
        uses += [f"{module}:{node.lineno} uses {ast.unparse(node)}" for node, _ in foreign]
    assert not uses


def names_in_text(node: ast.AST) -> list[str]:
    """Return the names that attrgetter("_a.b"), getattr(x, "_a") and the like stand for."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in GETTERS:
        return []
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return [part for text in texts if isinstance(text, str) for part in text.split(".")]


def test_mpi_passes_methods_and_not_their_names() -> None:
    """Only what forwards any attribute by `__getattr__` looks one up by its name."""
    found = []
    for module, tree in modules().items():
        for function in ast.walk(tree) if room(module) == "mpi" else ():
            if not isinstance(function, ast.FunctionDef) or function.name in ("__getattr__", "_op_text"):
                continue
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and len(node.args) > 1)
            looked = [node for node in calls if ast.unparse(node.func) == "getattr"]
            found += [f"{module}.{function.name}" for n in looked if not isinstance(n.args[1], ast.Constant)]
    assert not found


def test_nothing_sets_the_globals_of_another_module() -> None:
    """A layer registers with one below it by a function."""
    found = []
    for module, tree in sorted(modules().items()):
        others = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in modules()
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found += [f"{module} sets {ast.unparse(node)}"] if ast.unparse(node.value) in others else []
    assert not found


def test_nothing_imports_private_names() -> None:
    found = [
        f"{module} imports {alias.name} of {node.module}"
        for module, tree in sorted(modules().items())
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pynccl"
        for alias in node.names
        if is_private(alias.name) and f"{node.module}.{alias.name}" not in {*modules(), "pynccl._native"}
    ]
    assert not found


def test_nothing_uses_the_privates_of_a_base_in_another_module() -> None:
    uses = []
    for (module, name), cls in classes().items():
        for base in bases(module, cls):
            if base[0] == module:
                continue
            used = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and is_self(node.value)]
            theirs = members(classes()[base]) & ({node.attr for node in used} | members(cls))
            uses += [f"{module}.{name} uses {base[1]}.{one}" for one in theirs if is_private(one)]
    assert not uses


def test_no_class_has_a_stub_for_its_subclasses() -> None:
    """No method that only raises, and no attribute that only subclasses set."""
    derived = {base for (module, _), cls in classes().items() for base in bases(module, cls)}
    stubs = []
    for (module, name), cls in classes().items():
        if "Protocol" in map(ast.unparse, cls.bases):
            continue
        methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        stubs += [f"{module}.{name}.{method.name}" for method in methods if is_stub(method)]
        if (module, name) in derived and not is_dataclass(cls):
            open_ones = (node for node in cls.body if isinstance(node, ast.AnnAssign) and node.value is None)
            # A schema of class variables says what its subclasses are.
            named = {ast.unparse(n.target) for n in open_ones if "ClassVar" not in ast.unparse(n.annotation)}
            stubs += [f"{module}.{name}.{one}" for one in sorted(named - assigned(cls))]
    assert not stubs


def is_stub(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [ast.unparse(node) for node in method.body[ast.get_docstring(method) is not None :]]
    only = ["..."], ["raise NotImplementedError"], ["raise NotImplementedError()"]
    return body in only and "overload" not in map(ast.unparse, method.decorator_list)


def is_dataclass(cls: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(node) for node in cls.decorator_list)


def assigned(cls: ast.ClassDef) -> set[str]:
    """Return the attributes that a class sets in its own methods."""
    nodes = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and is_self(node.value))
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}


@cache
def classes() -> dict[tuple[str, str], ast.ClassDef]:
    """Return the classes by module and name."""
    found = ((m, node) for m, tree in modules().items() for node in ast.walk(tree))
    return {(module, node.name): node for module, node in found if isinstance(node, ast.ClassDef)}


def bases(module: str, cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the package's classes that a class is derived from, those of its bases too."""
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for base in cls.bases:
        first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        where = f"{names.get(first, f'{module}.{first}')}{'.' if rest else ''}{rest}".rpartition(".")
        key = where[0], where[2]
        if key in classes():
            yield key
            yield from bases(key[0], classes()[key])


def members(cls: ast.ClassDef) -> set[str]:
    """Return what a class itself defines, or sets in its methods."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and is_self(node.value) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    fields = (
        node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)] for node in cls.body
    )
    return found | {
        name.id
        for some in fields
        for node in some
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# Runs the others' programs again, under sanitizers.
AGAIN = ("test_torch_sanitized",)


def test_no_test_module_imports_another() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "nvidia" not in path.parts]
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())) if path.stem not in AGAIN else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name} imports {name}" for name in names if name.split(".")[-1] in tests]
    assert not found


def test_tests_start_programs_in_one_way() -> None:
    """`completed` of tests/helpers/processes.py runs programs, PYNCCL_RUN is the launcher's command."""
    run = 'sys.executable, "-m", "pynccl", "run"'
    once = {"capture_output=True, text=True": "processes.py", run: "launchers.py"}
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != Path(__file__).name]
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in files]
    assert not [
        f"{name}: {part}" for name, text in texts for part in once if part in text and once[part] != name
    ]


def test_the_picture_shows_the_floors() -> None:
    """docs/figures/rooms.svg has every room, each floor lower than those above it."""
    drawing = ElementTree.parse(ROOT / "docs" / "figures" / "rooms.svg")
    texts = [node for node in drawing.iter("{http://www.w3.org/2000/svg}text") if node.get("class") == "name"]
    drawn = {str(node.text).rstrip("/").removeprefix("pynccl"): float(node.get("y", 0)) for node in texts}
    assert set(drawn) == {name for names in FLOORS for name in names}
    levels = [[drawn[name] for name in names] for names in FLOORS]
    for lower, upper in pairwise(levels):
        assert min(lower) > max(upper)


def test_the_table_of_rooms_names_modules_that_are_there() -> None:
    """docs/architecture.md: the lower-case names in a room's row are its modules."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", text, re.M)
    rooms = {room: what for where, what in rows for room in re.findall(r"`(\w+)/`", where)}
    assert len(rooms) > 10
    missing = [
        f"{room}/{name}"
        for room, what in rooms.items()
        for name in re.findall(r"`(\w+)/?`", what)
        if not {name, f"{name}.py"} & {path.name for path in (PACKAGE / room).iterdir()}
    ]
    assert not missing


def test_the_files_that_pages_and_comments_name_are_there() -> None:
    """Such as `native/channel.h`, if its first folder is one of the project's."""
    kinds = ("*.md", "*.py", "*.c", "*.h", "*.cpp", "*.hpp")
    places = [PACKAGE, *(ROOT / name for name in ("docs", "tests", "benchmarks", "examples"))]
    texts = [*ROOT.glob("*.md"), *(path for place in places for kind in kinds for path in place.rglob(kind))]
    named = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|c|h|cpp|hpp|inc))`")
    missing = [
        f"{text.relative_to(ROOT)}: {name}"
        for text in texts
        for name in named.findall(text.read_text(encoding="utf-8"))
        if any((base / name.split("/")[0]).is_dir() for base in (ROOT, PACKAGE, PACKAGE / "cpu"))
        if not any((base / name).exists() for base in (ROOT, PACKAGE, PACKAGE / "cpu"))
    ]
    assert not missing
