"""The package as others get it: sdist, wheel, what is in them, and rules that the sources keep."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import pynccl
from conftest import ROOT, Run, clean_environment
from launchers import PYNCCL_RUN
from processes import completed, refusing_compiler

PACKAGE = ROOT / "pynccl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and from it, in a folder of its own, the wheel."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = completed(command, env=clean_environment(), timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    for name in ("py.typed", "libpynccl_cpu.so", "capi.py", "api/nccl_api.h"):
        assert f"pynccl/{name}" in names
    pages = {f"pynccl/_trace/page/{path.name}" for path in (PACKAGE / "_trace" / "page").iterdir()}
    assert pages and pages <= names
    assert {name for name in names if name.startswith("pynccl/forward/")} == {
        *(f"pynccl/forward/{name}" for name in ("libnccl.so.2", "libnccl.so", "pkgconfig/nccl.pc")),
        *(f"pynccl/forward/include/{name}" for name in ("nccl.h", "nccl_device.h", "pynccl_cpu.h")),
    }
    # The torch backend is compiled where torch is; the CPU library is compiled already.
    sources = [name for name in names if not name.startswith("pynccl/torch/csrc/")]
    assert not [
        name for name in sources if name.endswith((".cpp", ".hpp", ".inc")) or name.startswith("tests")
    ]
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pynccl"}
    fields = message_from_string(metadata)
    assert fields["Name"] == "pynccl-cffi"
    assert fields["Version"] == pynccl.__version__
    assert fields["Requires-Python"] == ">=3.10"
    needed = fields.get_all("Requires-Dist") or []
    required = [line for line in needed if "extra ==" not in line]
    assert sorted(re.split(r"[<>=! ]", line)[0] for line in required) == ["cffi", "click", "numpy"]
    assert [line for line in needed if line.startswith("pynacl") and line.endswith('extra == "secure"')]


def install(wheel: Path, target: Path, **env: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, env=clean_environment() | env, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_from_a_wheel_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    target, nothing = tmp_path / "installed", tmp_path / "bin"
    nothing.mkdir()
    alone = {"PATH": str(nothing), "PYTHONPATH": str(target)}
    install(wheel, target, **alone)
    demo = [str(ROOT / "examples" / "data_parallel.py"), "--check"]
    done = completed(
        [*PYNCCL_RUN, "-n", "4", "--cpu", *demo],
        env=clean_environment() | alone,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_installed_elsewhere(wheel: Path, tmp_path: Path, run_python: Run) -> None:
    install(wheel, tmp_path)
    done = run_python(
        "import pynccl; print(pynccl.__file__); print(*pynccl.get_version()); pynccl.get_unique_id()",
        PYTHONPATH=str(tmp_path),
        PYNCCL_LIBRARY="cpu",
    )
    assert done.stdout.splitlines() == [str(tmp_path / "pynccl" / "__init__.py"), "2 32 3"]


@pytest.mark.parametrize("errors", [False, True])
def test_warnings_are_errors_only_for_developers(errors: bool, tmp_path: Path) -> None:
    compiler, said = refusing_compiler(tmp_path)
    env = {name: value for name, value in clean_environment().items() if name != "PYNCCL_WERROR"}
    env |= {"CC": str(compiler), "CXX": str(compiler)} | ({"PYNCCL_WERROR": "1"} if errors else {})
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    assert completed(command, cwd=ROOT, env=env).returncode != 0
    assert "-Wall" in said.read_text()
    assert ("-Werror" in said.read_text()) == errors


def test_import_is_light_and_silent(run_python: Run) -> None:
    done = run_python(
        "import sys, pynccl, pynccl.capi\n"
        "print(sorted({'cupy', 'torch', 'mpi4py', 'setuptools'} & set(sys.modules)))"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_changelog_tells_of_this_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == pynccl.__version__


def test_every_variable_is_documented() -> None:
    documented = set(re.findall(r"`((?:PYNCCL|NCCL)_\w+)`", (ROOT / "docs" / "variables.md").read_text()))
    read = set()
    for path in (ROOT / "setup.py", *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp")):
        read |= set(re.findall(r"""["']((?:PYNCCL|NCCL)_[A-Z_]+)["']""", path.read_text()))
    constants = {
        name
        for name in vars(__import__("pynccl._library.generated.api", fromlist=["*"]))
        if name.startswith("NCCL_")
    }
    assert {name for name in read - constants if name.startswith("PYNCCL_")} <= documented
    assert {name for name in documented if name.startswith("PYNCCL_")} <= read
    assert documented <= read


def test_the_c_api_is_declared_once() -> None:
    """A prototype of NCCL's stands in nccl_api.h only, and in what is made from it."""
    made = PACKAGE / "forward"
    again = [
        path
        for path in PACKAGE.rglob("*.h*")
        if path.name != "nccl_api.h" and made not in path.parents
        if re.search(r"^ncclResult_t nccl\w+\(.*\);", path.read_text(), re.M)
    ]
    assert again == []


def test_c_files_include_lower_layers_alone() -> None:
    """internal.h names the layers of native/, from below."""
    folder = PACKAGE / "native"
    comment = re.search(r"Layers, from below: ([^.]+)\.", (folder / "internal.h").read_text())
    assert comment is not None
    layers = re.findall(r"\w+", comment[1])
    files = list(folder.glob("*.[ch]"))
    assert {path.stem for path in files} == set(layers) - {"library"}
    wrong = [
        f"{path.name} includes {name}.h"
        for path in files
        for name in re.findall(r'^#include "(\w+)\.h"$', path.read_text(), re.M)
        if layers.index(name) > layers.index(path.stem)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PATH": "/nonexistent"}, "needs a C compiler to be built: there is no"),
        ({"CC": "nocc -m64"}, "needs a C compiler to be built: CC names 'nocc', which is not on PATH"),
        ({"CXX": "nocxx"}, "needs a C++ compiler to be built: CXX names 'nocxx', which is not on PATH"),
    ],
)
def test_without_a_compiler(env: dict[str, str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    only = "--only=pynccl.libpynccl_cpu,pynccl.forward.libnccl"
    clean = {name: value for name, value in clean_environment().items() if name not in ("CC", "CXX")}
    for call in (command, [*command, only]):
        done = completed(call, cwd=ROOT, env=clean | env)
        assert done.returncode != 0
        assert words in done.stderr
        assert "Debian and Ubuntu: apt install gcc g++" in done.stderr
        assert "Traceback" not in done.stderr
