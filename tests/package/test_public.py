"""The public interface: names, parameters and texts, pinned so that they change only on purpose."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import pynccl
from pynccl import Communicator, Group, Plan, Prepared
from pynccl._comm.operations import Operations

NAMES = """
BootstrapError Buffer CollConfig CollectiveMismatchError CommProperties Communicator CommunicatorMetrics
Config DataType Event Group LibraryInfo LibraryNotFoundError MemoryStats NcclError NcclInternalError
NcclInvalidArgument NcclInvalidUsage NcclRemoteError NcclSystemError NcclTimeoutError NcclUnhandledCudaError
NotSupportedError OperationMetrics Plan PreMulSum Prepared RankFailedError RedOp Registration SimInfo Stream
TraceRecord UniqueId Window Work __version__ array_module check_mode cpu_library current_device device_count
dump_trace empty get_unique_id get_version group init init_all library_info load metrics set_device zeros
"""

# Parameters as they are written, with defaults and without types.
SIGNATURES = """
Buffer(ptr, count, dtype, *, owner=None, readonly=False)
Communicator(nranks, unique_id, rank, *, config=None, device=None, timeout=None)
Communicator.abort(self)
Communicator.all_gather(self, send, recv=None, stream=None, *, config=None, wait=True)
Communicator.all_gather_v(self, send, recv, counts, stream=None, *, wait=True)
Communicator.all_reduce(self, send, recv=None, op='sum', stream=None, *, config=None, wait=True)
Communicator.all_to_all(self, send, recv=None, stream=None, *, config=None, wait=True)
Communicator.all_to_all_v(self, send, send_counts, recv, recv_counts, stream=None, *, wait=True)
Communicator.async_error(self)
Communicator.barrier(self, *, timeout=None, wait=True)
Communicator.broadcast(self, send, recv=None, root=0, stream=None, *, config=None, wait=True)
Communicator.destroy(self)
Communicator.finalize(self)
Communicator.from_handle(handle)
Communicator.gather(self, send, recv=None, root=0, stream=None, *, config=None, wait=True)
Communicator.gather_v(self, send, recv, counts, root=0, stream=None, *, wait=True)
Communicator.get_unique_id(self)
Communicator.grow(self, nranks, unique_id=None, *, config=None)
Communicator.join(nranks, unique_id, rank, *, config=None, device=None, timeout=None)
Communicator.memory_stats(self)
Communicator.pre_mul_sum(self, factor)
Communicator.put_signal(self, array, peer, window, offset=0, signal=0, \
*, byte_offset=None, context=0, stream=None, wait=True)
Communicator.recv(self, buf, peer, stream=None, *, wait=True)
Communicator.reduce(self, send, recv=None, op='sum', root=0, stream=None, *, config=None, wait=True)
Communicator.reduce_scatter(self, send, recv=None, op='sum', stream=None, *, config=None, wait=True)
Communicator.reduce_scatter_v(self, send, recv, counts, op='sum', stream=None, *, wait=True)
Communicator.register(self, array)
Communicator.registered(self, array)
Communicator.resume(self)
Communicator.revoke(self)
Communicator.scatter(self, send, recv=None, root=0, stream=None, *, config=None, wait=True)
Communicator.scatter_v(self, send, recv, counts, root=0, stream=None, *, wait=True)
Communicator.send(self, buf, peer, stream=None, *, wait=True)
Communicator.send_recv(self, send, dest, recv, source, stream=None, *, wait=True)
Communicator.shrink(self, exclude, abort=False, *, config=None, quorum='majority')
Communicator.signal(self, peer, signal=0, *, context=0, stream=None, wait=True)
Communicator.split(self, color, key=0, *, config=None)
Communicator.suspend(self)
Communicator.synchronize(self, stream=None, timeout=None)
Communicator.trace(self)
Communicator.wait_signal(self, peer, count=1, signal=0, *, context=0, stream=None, wait=True)
Communicator.window(self, array, *, symmetric=False)
Event()
Event.destroy(self)
Event.query(self)
Event.record(self, stream)
Event.synchronize(self, timeout=None)
Plan(calls)
PreMulSum.destroy(self)
Registration.close(self)
Stream()
Stream.destroy(self)
Stream.query(self)
Stream.synchronize(self, timeout=None)
Stream.wait_event(self, event)
Window.close(self)
Window.peer(self, rank)
array_module()
check_mode(on=True)
cpu_library()
current_device()
device_count()
dump_trace(path)
empty(shape, dtype=None, *, like=None)
get_unique_id()
Work.done(self)
Work.exception(self)
Work.wait(self, timeout=None)
get_version()
group(simulate=False)
init(method=None, *, rank=None, world_size=None, device=None, config=None, timeout=None, on_listen=None)
init_all(devices, *, timeout=None)
library_info()
load(spec=None)
set_device(device)
transfer.recv_tensors(comm, into=None, *, root=0, like=None)
transfer.send_tensors(comm, tensors, *, bucket_bytes=268435456)
zeros(shape, dtype=None, *, like=None)
"""

PROPERTIES = {
    Communicator: {"closed", "device", "handle", "prepare", "properties", "rank", "size"},
    Group: {"estimated_microseconds"},
    Prepared: {"stream"},
    pynccl.Registration: {"closed", "nbytes"},
    pynccl.Window: {"array", "closed", "handle", "sizes", "symmetric"},
    Plan: {"stream"},
    pynccl.Stream: {"handle"},
    pynccl.Event: {"handle"},
    pynccl.Buffer: {"count", "ptr"},
}

# What a docstring of a property, a class or a constant may begin with instead of an order.
VERBLESS = {"a", "an", "the", "true", "one", "what", "raw", "calls", "how", "nccl's", "prepared"}


def test_names() -> None:
    assert sorted(NAMES.split()) == sorted(pynccl.__all__)


@pytest.mark.parametrize("module", [pynccl, pynccl.bootstrap], ids=["pynccl", "pynccl.bootstrap"])
def test_names_are_imported_from_where_type_checkers_see_them(module: Any) -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    for name in set(module.__all__) - {"__version__"}:
        assert getattr(module, name) is getattr(importlib.import_module(seen[name]), name)
    for name in pynccl.__all__:
        assert hasattr(pynccl, name), name


def members(kind: Any) -> Iterator[tuple[str, Any]]:
    for cls in inspect.getmro(kind):
        if cls.__module__.startswith("pynccl"):
            yield from ((name, value) for name, value in vars(cls).items() if not name.startswith("_"))


def shown(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def test_signatures() -> None:
    for line in SIGNATURES.split("\n"):
        name, bracket, rest = line.partition("(")
        if bracket:
            target: Any = pynccl
            for part in name.split("."):
                target = getattr(target, part)
            assert shown(target) == f"({rest}", name
    pinned = {line.partition("(")[0] for line in SIGNATURES.split()}
    for kind in (
        Communicator,
        pynccl.Stream,
        pynccl.Event,
        pynccl.Buffer,
        pynccl.Registration,
        pynccl.Window,
    ):
        methods = {name for name, value in members(kind) if inspect.isfunction(value) or is_class(value)}
        assert {f"{kind.__name__}.{name}" for name in methods} <= pinned, kind


def is_class(value: Any) -> bool:
    return isinstance(value, classmethod | staticmethod)


def test_properties() -> None:
    for kind, names in PROPERTIES.items():
        found = {name for name, value in members(kind) if isinstance(value, property)}
        assert found == names, kind
        assert all(getattr(kind, name).__doc__ for name in names), kind


def documented() -> list[tuple[str, Any]]:
    """Return every public function, class, method and property of the package."""
    found: list[tuple[str, Any]] = []
    for name in pynccl.__all__:
        value = getattr(pynccl, name, None)
        if inspect.isclass(value):
            found.append((name, value))
            found += [(f"{name}.{member}", member_of) for member, member_of in members(value)]
        elif inspect.isfunction(value):
            found.append((name, value))
    return [
        (name, value)
        for name, value in found
        if inspect.isclass(value)
        or inspect.isroutine(value)
        or isinstance(value, property)
        or is_class(value)
    ]


def test_docstrings() -> None:
    """One line that says what it does, ended by a full stop; then an empty line, if more is to be said."""
    for name, value in documented():
        text = getattr(value, "__func__", value).__doc__
        assert text, f"{name} has no docstring"
        first, *rest = text.strip().split("\n")
        assert first.endswith("."), (name, first)
        assert len(first) < 110, (name, first)
        assert not rest or not rest[0].strip(), f"{name}: the second line of the docstring is not empty"
        word = first.split()[0].lower().rstrip(",")
        if not inspect.isclass(value) and not isinstance(value, property):
            # Imperative: not "Returns", not "Returning", not a noun.
            assert word not in VERBLESS, (name, first)
            assert not word.endswith(("ing", "ed")), (name, first)
            assert not re.search("(?<!s)(?<!es)s$", word) or word in ("discuss", "pass"), (name, first)


def test_every_module_says_what_it_is() -> None:
    modules = set(Path(pynccl.__file__).parent.rglob("*.py"))
    silent = {path for path in modules if not ast.get_docstring(ast.parse(path.read_text()))}
    assert not silent, silent


def test_what_help_says() -> None:
    """help(Communicator.all_reduce) tells all there is to know of a call."""
    text = inspect.getdoc(Communicator.all_reduce) or ""
    for word in ("In place", "`recv`", "Returns", "`op`", "avg", "RedOp", "pre_mul_sum", "`stream=None`"):
        assert word in text, word


@pytest.mark.parametrize("name", [name for name in vars(Operations) if not name.startswith("_")])
def test_every_operation_names_its_errors(name: str) -> None:
    named = errors_in(inspect.getdoc(getattr(Communicator, name)))
    if name == "pre_mul_sum":  # which calls nothing
        assert named == {"NotSupportedError"}
    else:
        assert named >= {"NcclError", "RankFailedError", "NcclTimeoutError", "CollectiveMismatchError"}
        assert "NcclInvalidUsage" in named


@pytest.mark.parametrize(
    "name", ["split", "shrink", "grow", "window", "suspend", "resume", "finalize", "destroy"]
)
def test_every_call_of_all_ranks_names_the_errors_of_others(name: str) -> None:
    text = inspect.getdoc(getattr(Communicator, name)) or ""
    like_others = re.search("as `(all_reduce|suspend)` does", text)
    assert like_others or errors_in(text) >= {"RankFailedError", "NcclTimeoutError"}


# By file a class whose operations raise the same, as its docstring says; some need other packages.
ALIKE = {
    "compat/_engine.py": "Engine",
    "compat/cupy.py": "NcclCommunicator",
    "compat/cupyx.py": "NCCLBackend",
    "compat/sglang.py": "PyNcclCommunicator",
    "compat/vllm.py": "PyNcclCommunicator",
    "mpi/_comm.py": "Comm",
    "mpi/_persistent.py": "Persistent",
    "mpi/_requests.py": "Prequest",
    "mpi/_win.py": "Win",
    "ray/_group.py": "Group",
}


@pytest.mark.parametrize("file", ALIKE)
def test_a_class_names_the_errors_of_its_operations(file: str) -> None:
    tree = ast.parse((Path(pynccl.__file__).parent / file).read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == ALIKE[file])
    assert errors_in((ast.get_docstring(cls) or "").partition("Every operation raises")[2])


def errors_in(text: str | None) -> set[str]:
    """Return the errors of pynccl that a docstring names; there is no other but Python's own."""
    named = {*re.findall(r"\b(?:Nccl[A-Z]\w+|[A-Z]\w+Error)\b", text or "")} - {*dir(builtins)}
    assert all(hasattr(pynccl, error) for error in named)
    return named


def test_all_reduce_passes_for_a_function() -> None:
    """It is a C object; inspect, copy, weakref and mock find in it what they find in other methods."""
    method = Communicator.all_reduce
    assert copy.deepcopy([method]) == [method]
    assert weakref.ref(method)() is method
    assert repr(method).startswith("<function Communicator.all_reduce at ")
    assert inspect.getsourcefile(method) == inspect.getsourcefile(Communicator.reduce)
    for mocked in (mock.create_autospec(Communicator, instance=True), mock.create_autospec(Communicator)):
        with pytest.raises(TypeError, match="missing a required argument"):
            mocked.all_reduce()
    with mock.patch.object(Communicator, "all_reduce", autospec=True) as mocked:
        comm = object.__new__(Communicator)
        comm.all_reduce(1)
    mocked.assert_called_once_with(comm, 1)
