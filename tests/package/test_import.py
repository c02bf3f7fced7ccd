"""`import pynccl`: what it shows, and what it says where it is not built or another package has its name."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

import pynccl
from conftest import ROOT, Run, clean_environment
from processes import completed

PACKAGE = Path(pynccl.__file__).parent
# An editable installation, as the one that these tests may run in, would stand behind any copy.
ALONE = f"import sys; sys.path = [folder for folder in sys.path if folder != {str(PACKAGE.parent)!r}]; "


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package, without its compiled parts."""
    folder = tmp_path / "site"
    unwanted = shutil.ignore_patterns("*.so", "*.so.2", "__pycache__", "cpu")
    shutil.copytree(PACKAGE, folder / "pynccl", ignore=unwanted)
    return folder


def build(folder: Path) -> None:
    for path in PACKAGE.glob("*.so"):
        (folder / "pynccl" / path.name).symlink_to(path)


def put_other(folder: Path) -> None:
    """Put the files of PyPI's pynccl 0.1.2 into the package, in which ours are not."""
    for name in ("api", "binding"):
        (folder / "pynccl" / f"{name}.py").write_text("Nccl = NcclWrp = object\n")
    metadata = folder / "pynccl-0.1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pynccl\nVersion: 0.1.2\n")


def test_a_checkout_that_is_not_built(copy: Path, run_python: Run) -> None:
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in ("pynccl", "pynccl.testing", "pynccl.capi"):
        done = run_python(f"{ALONE}import {name}", fails=True, PYTHONPATH=str(copy))
        assert "is a checkout that is not built for Python 3" in done.stderr
        assert "build it first: make build" in done.stderr
        assert "circular" not in done.stderr


def test_an_installation_behind_a_checkout_that_is_not_built(copy: Path, tmp_path: Path) -> None:
    """What runs in the root of a clone imports the installed package, and says so once."""
    shutil.copytree(copy, tmp_path / "clone")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    build(copy)
    (copy / "pynccl" / "cpu").symlink_to(PACKAGE / "cpu")
    first = "import pynccl, pynccl.capi; print(pynccl.__file__, pynccl.capi.__file__)"
    (tmp_path / "clone" / "hello.py").write_text(
        "import numpy, pynccl; pynccl.load('cpu')\nwith pynccl.init() as c: c.all_reduce(numpy.ones(1)); "
        "print(c.size, pynccl.get_version.__code__.co_filename)\n"
    )
    env = clean_environment() | {"PYTHONPATH": str(copy), "PYNCCL_LIBRARY": "cpu"}

    def run(*args: str) -> tuple[str, str]:
        command = [sys.executable, "-c", *args] if args[0] != "-m" else [sys.executable, *args]
        done = completed(command, env=env, cwd=tmp_path / "clone", timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr

    out, err = run(ALONE + first)
    assert out.split() == [f"{copy}/pynccl/__init__.py", f"{copy}/pynccl/capi.py"]
    assert f"RuntimeWarning: {tmp_path}/clone/pynccl is a checkout that is not built; {copy}/pynccl" in err
    out, err = run("-m", "pynccl", "run", "-n", "2", "hello.py")
    assert out.count(f"2 {copy}/pynccl/") == 2
    # The launcher's, and rank 0's.
    assert err.count("is a checkout that is not built") == 2
    out, err = run("-m", "pynccl", "doctor", "--only", "all_reduce")
    assert "1 MiB on 2 ranks" in out and err.count("is a checkout that is not built") == 1


def test_another_version_behind_a_checkout_that_is_not_built(
    copy: Path, tmp_path: Path, run_python: Run
) -> None:
    """The checkout's __init__.py is running already: it fits only a package that has the same."""
    shutil.copytree(copy, tmp_path / "clone")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    build(copy)
    with open(copy / "pynccl" / "__init__.py", "a") as file:
        file.write("# another version\n")
    done = run_python(f"{ALONE}import pynccl", fails=True, PYTHONPATH=f"{tmp_path}/clone:{copy}")
    assert "is a checkout that is not built for Python 3" in done.stderr
    assert "imported from any other working directory" in done.stderr


def test_an_installation_without_its_binding(copy: Path, run_python: Run) -> None:
    done = run_python(f"{ALONE}import pynccl", fails=True, PYTHONPATH=str(copy))
    assert "has no _native for Python 3" in done.stderr
    assert "pip install --force-reinstall pynccl-cffi" in done.stderr


def test_a_built_copy(copy: Path, run_python: Run) -> None:
    """What the other tests break works before."""
    build(copy)
    done = run_python("import pynccl; print(pynccl.__file__)", PYTHONPATH=str(copy))
    assert Path(done.stdout.strip()).is_relative_to(copy)
    done = run_python(args=["-m", "pynccl", "info"], PYTHONPATH=str(copy), PYNCCL_LIBRARY="cpu")
    assert "beware" not in done.stdout


def test_pypis_pynccl_below_ours(copy: Path, run_python: Run) -> None:
    build(copy)
    put_other(copy)
    done = run_python("import pynccl", fails=True, PYTHONPATH=str(copy))
    assert "RuntimeWarning" in done.stderr
    assert "holds files of another package: pip uninstall pynccl pynccl-cffi" in done.stderr


def test_pypis_pynccl_elsewhere(copy: Path, tmp_path: Path, run_python: Run) -> None:
    build(copy)
    (tmp_path / "other" / "pynccl").mkdir(parents=True)
    put_other(tmp_path / "other")
    path = f"{copy}:{tmp_path / 'other'}"
    done = run_python(args=["-m", "pynccl", "info"], PYTHONPATH=path, PYNCCL_LIBRARY="cpu")
    assert "another package named pynccl is installed: version 0.1.2: pip uninstall pynccl" in done.stdout


@pytest.mark.parametrize("module", ["__main__", "testing", "capi"])
def test_pypis_pynccl_over_ours(copy: Path, run_python: Run, module: str) -> None:
    build(copy)
    put_other(copy)
    (copy / "pynccl" / "__init__.py").write_text("from .api import Nccl, NcclWrp\n")
    done = run_python(f"import pynccl.{module}", fails=True, PYTHONPATH=str(copy))
    assert "ImportError" in done.stderr
    assert "__init__.py is missing, or another package's: pip uninstall pynccl pynccl-cffi" in done.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("all_reduce", "; a communicator has it: pynccl.init().all_reduce"),
        ("get_rank", "; a communicator has it: pynccl.init().rank"),
        ("group_start", "; pynccl's name is pynccl.group()"),
        ("ReduceOp", "; pynccl's name is RedOp"),
        ("SUM", "; pynccl's name is RedOp.SUM"),
        ("max", "; pynccl's name is RedOp.MAX"),
        ("float32", "; pynccl's name is DataType.FLOAT32"),
        ("Comm", "; pynccl's name is Communicator"),
        ("NcclTimeout", "; pynccl's name is NcclTimeoutError"),
        ("TimeoutError", "; pynccl's name is NcclTimeoutError"),
        ("NCCLError", "; pynccl's name is NcclError"),
        ("RankFailed", "; pynccl's name is RankFailedError"),
        ("timeout", "; pynccl's name is pynccl.init(timeout=...)"),
        ("NcclCommunicator", "; pynccl's name is Communicator"),
        ("COMM_WORLD", "; pynccl's name is init()"),
        ("ncclGetUniqueId", "; pynccl's name is capi.ncclGetUniqueId"),
        ("init_process_group", "; pynccl's name is init"),
        ("zeros_like", "; pynccl's name is zeros(array.shape, like=array)"),
        ("nonsense", ""),
    ],
)
def test_names_of_other_libraries(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(pynccl, name)
    assert str(raised.value) == f"module 'pynccl' has no attribute '{name}'{hint}"


def test_names_of_codes() -> None:
    text = "RedOp has no 'sum'; expected one of SUM, PROD, MAX, MIN, AVG"
    with pytest.raises(AttributeError, match=f"^{text}$"):
        pynccl.RedOp.sum  # type: ignore[attr-defined]  # noqa: B018
    assert pynccl.RedOp["SUM"] is pynccl.RedOp.SUM and not hasattr(pynccl.RedOp, "__array__")


def test_a_package_that_is_not_imported(run_python: Run) -> None:
    code = """
import pynccl
try:
    pynccl.torch
except AttributeError as error:
    assert str(error) == "module 'pynccl' has no attribute 'torch': import pynccl.torch", error
"""
    run_python(code)


def test_the_launcher_starts_without_numpy(run_python: Run) -> None:
    run_python("import sys, pynccl.__main__; assert not {'numpy', 'pynccl.capi'} & set(sys.modules)")


def test_what_is_shown_before_it_is_used(run_python: Run) -> None:
    code = """
import sys, pynccl
assert "pynccl.bootstrap" not in sys.modules and "pynccl.testing" not in sys.modules
shown = dir(pynccl)
assert {"init", "testing", "mpi", "__version__"} <= set(shown), shown
assert {name for name in pynccl.__all__} <= set(shown)
assert callable(pynccl.testing.run) and callable(pynccl.init)
assert pynccl.bootstrap.Store
try: pynccl.nonsense
except AttributeError as error: assert "nonsense" in str(error)
else: raise AssertionError
"""
    run_python(code)


# Ctrl-C where Python drops the exception: a callback of a weak reference, when the lock of an import goes.
INTERRUPTED = """
import os, signal, sys, pynccl

def interrupt(frame, event, arg):
    if frame.f_code.co_name == "cb" and "importlib" in frame.f_code.co_filename:
        sys.settrace(None)
        print("interrupted", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

sys.settrace(interrupt)
comm = pynccl.init(rank=0, world_size=1)
print("went on")
"""


def test_ctrl_c_in_the_first_use() -> None:
    env = clean_environment() | {"PYNCCL_LIBRARY": "cpu"}
    ended = completed([sys.executable, "-c", INTERRUPTED], env=env)
    assert ended.stdout == "interrupted\n"
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.endswith("KeyboardInterrupt\n") and "ignored" not in ended.stderr
