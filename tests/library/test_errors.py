"""The tree of exceptions: what each is, what it carries, that it travels."""

from __future__ import annotations

import inspect
import pickle

import pytest

import pynccl
from conftest import Run
from null_library import HEADERS
from pynccl import _errors
from pynccl._library.results import result_name

CLASSES = [
    value
    for name, value in vars(_errors).items()
    if name[0] != "_" and inspect.isclass(value) and issubclass(value, BaseException)
]


def test_the_tree_drawn_is_the_tree() -> None:
    """Compare the drawing at the top of the module with the classes."""
    drawn: dict[str, str] = {}
    parents = ["NcclError"]
    for line in (_errors.__doc__ or "").splitlines():
        if "──" in line:
            depth = line.index("──") // 4 + 1
            name = line.split("──", 1)[1].split()[0]
            drawn[name] = parents[depth - 1]
            parents[depth:] = [name]
    parent = {cls: next(base for base in cls.__mro__[1:] if base.__name__[0] != "_") for cls in CLASSES}
    del parent[pynccl.NcclError]
    assert drawn == {cls.__name__: base.__name__ for cls, base in parent.items()}


def test_every_result_has_its_name_and_class() -> None:
    codes = dict(enumerate(HEADERS[0].values["ncclResult_t"]))
    assert [result_name(code) for code in (*codes, len(codes))] == [*codes.values(), f"result {len(codes)}"]
    for code in set(codes) - {0, 7}:
        cls = _errors.error_class(code)
        assert cls.code == code
        assert cls.__name__.removesuffix("Error") in ("N" + codes[code][1:]).removesuffix("Error")


def test_builtin_parents() -> None:
    assert issubclass(pynccl.NcclError, RuntimeError)
    assert issubclass(pynccl.NcclTimeoutError, TimeoutError)
    assert issubclass(pynccl.NotSupportedError, NotImplementedError)
    assert issubclass(pynccl.LibraryNotFoundError, OSError)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_travel(cls: type[pynccl.NcclError]) -> None:
    error = cls("what happened", function="ncclAllReduce", detail="why", rank=1, size=4)
    error.note = "added later"  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "what happened"
    assert vars(again) == vars(error)
    assert (again.function, again.detail, again.rank, again.size, again.result) == (
        "ncclAllReduce",
        "why",
        1,
        4,
        cls.code,
    )


def test_ranks_are_sorted_and_travel() -> None:
    error = pynccl.RankFailedError("two died", ranks=[3, 1], rank=0)
    assert pickle.loads(pickle.dumps(error)).ranks == [1, 3]
    assert error.result == 6


def test_an_unknown_code_never_breaks_the_error_path(run_python: Run, null: str) -> None:
    run_python(
        """
import ctypes, pickle, pytest, pynccl
from pynccl import capi
info = pynccl.load()
ctypes.CDLL(info.path).null_result(42, b"\\xff strange")
with pytest.raises(pynccl.NcclError) as caught:
    capi.ncclCommFinalize(1)
error = pickle.loads(pickle.dumps(caught.value))
assert type(error) is pynccl.NcclError and error.result == 42
assert str(error) == (
    "ncclCommFinalize: result 42: \\ufffd strange; "
    f"the CPU library 2.32.3 from {info.path}"
)
""",
        PYNCCL_LIBRARY=null,
    )


def test_rank_and_size_are_told_where_known(run_python: Run, null: str) -> None:
    run_python(
        """
import ctypes, pytest, pynccl
from pynccl import capi
null = ctypes.CDLL(pynccl.load().path)
def fail(comm):
    null.null_result(5, b"")
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        capi.ncclSend(0, 0, 0, 0, comm, 0)
    null.null_result(0, b"")
    return caught.value
comm = capi.ncclCommInitRank(4, bytes(128), 2)
error = fail(comm)
assert (error.rank, error.size) == (2, 4) and "; rank 2 of 4; " in str(error)
assert fail(comm + 1).rank is None  # not ours: it may be gone
capi.ncclCommDestroy(comm)
assert fail(comm).rank is None
first, second = capi.ncclCommInitAll(2)
assert [(fail(c).rank, fail(c).size) for c in (first, second)] == [(0, 2), (1, 2)]
""",
        PYNCCL_LIBRARY=null,
    )


def test_the_public_names() -> None:
    assert pynccl.__all__ == sorted(pynccl.__all__)
    for name in pynccl.__all__:
        assert getattr(pynccl, name) is not None
    public = {
        name
        for name, value in vars(pynccl).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(pynccl.__all__) - {"__version__"}
    assert {cls.__name__ for cls in CLASSES} <= set(pynccl.__all__)
