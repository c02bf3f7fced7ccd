"""Where the torch backend's compiled part is loaded from: nowhere that others could have written to."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

import pytest

import pynccl
from conftest import clean_environment
from processes import completed

pytest.importorskip("torch")

BUILD = Path(pynccl.__file__).with_name("torch") / "_build.py"
_spec = importlib.util.spec_from_file_location("build_of_the_torch_backend", BUILD)
assert _spec is not None and _spec.loader is not None
# By itself: the package would compile at its import.
_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_build)

pytestmark = pytest.mark.timeout(120)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stand in for the compiler with one that writes an empty module; answer what it has written."""
    made: list[Path] = []

    def compiles(target: Path) -> None:
        target.write_bytes(b"not a library")
        target.chmod(0o755)
        made.append(target)

    monkeypatch.setattr(_build, "_compile", compiles)
    monkeypatch.setenv("PYNCCL_CACHE", str(tmp_path / "cache" / "of" / "mine"))
    return made


def loads() -> None:
    """Get as far as loading what the stand-in has written."""
    with pytest.raises(ImportError, match="file too short|invalid ELF header"):
        _build.load()


def refused(*words: str) -> None:
    with pytest.raises(_build.BuildError) as caught:
        _build.load()
    for word in (*words, "PYNCCL_CACHE"):
        assert word in str(caught.value), caught.value


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_new_folders_are_private(tmp_path: Path, compiled: list[Path]) -> None:
    os.umask(old := os.umask(0o022))
    os.umask(0o002)
    try:
        loads()
    finally:
        os.umask(old)
    (target,) = compiled
    folders = [target.parent, *(tmp_path / "cache" / part for part in ("", "of", "of/mine"))]
    assert [mode(folder) for folder in folders] == [0o700] * 4
    # Once compiled it is found.
    loads()
    assert len(compiled) == 1


@pytest.mark.parametrize("bits", [0o770, 0o757, 0o777, 0o1777])
def test_the_folder_itself_is_nobody_elses_to_write(tmp_path: Path, compiled: list[Path], bits: int) -> None:
    loads()
    compiled[0].parent.chmod(bits)
    refused(str(compiled[0].parent), f"mode {bits:04o}")


def test_no_folder_above_is_either(tmp_path: Path, compiled: list[Path]) -> None:
    loads()
    for folder in (tmp_path / "cache" / "of" / "mine", tmp_path / "cache", tmp_path):
        before = mode(folder)
        for bits in (0o775, 0o777):
            folder.chmod(bits)
            refused(f"{folder} belongs to user", f"mode {bits:04o}")
        # As /tmp, where others can add files but not replace this user's.
        folder.chmod(0o1777)
        loads()
        folder.chmod(before)


def test_nothing_is_made_in_a_folder_that_others_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    for cache in (shared, shared / "of" / "mine"):
        monkeypatch.setenv("PYNCCL_CACHE", str(cache))
        refused(f"{shared} belongs to user", "mode 0777")
        assert not list(shared.iterdir())


def test_nor_is_the_file(compiled: list[Path]) -> None:
    loads()
    compiled[0].chmod(0o775)
    refused(str(compiled[0]), "mode 0775")
    compiled[0].rename(compiled[0].with_name("elsewhere"))
    compiled[0].symlink_to("elsewhere")
    refused(str(compiled[0]))


@as_root
@pytest.mark.parametrize("whose", ["file", "folder", "above"])
def test_what_belongs_to_another_user_is_not_loaded(compiled: list[Path], whose: str) -> None:
    loads()
    path = {"file": compiled[0], "folder": compiled[0].parent, "above": compiled[0].parents[2]}[whose]
    os.chown(path, 12345, -1)
    refused(str(path), "belongs to user 12345")


def test_a_link_counts_as_what_it_leads_to(
    tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache")
    monkeypatch.setenv("PYNCCL_CACHE", str(link / "of" / "mine"))
    loads()
    assert len(compiled) == 1
    (tmp_path / "cache").chmod(0o777)
    refused(str(tmp_path / "cache"), "mode 0777")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PYNCCL_CACHE": "here"}, "PYNCCL_CACHE is 'here'; expected an absolute path"),
        ({"PYNCCL_CACHE": ""}, "PYNCCL_CACHE is ''; expected an absolute path"),
        ({"XDG_CACHE_HOME": "here"}, "XDG_CACHE_HOME is 'here'; expected an absolute path"),
        ({"HOME": "here"}, "HOME is 'here'; expected an absolute path"),
    ],
)
def test_only_absolute_paths(
    tmp_path: Path, settings: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYNCCL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    refused(words)
    assert not list(tmp_path.iterdir())


NO_HOME = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_build)
# A user without an entry in the table of users, and without HOME.
os.environ.pop("HOME")
os.setuid(23456)
try:
    _build.load()
except _build.BuildError as error:
    print(error)
"""


@pytest.mark.slow
@as_root
def test_not_in_the_working_directory_where_there_is_no_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    env = clean_environment() | {"PYTHONPATH": str(Path(pynccl.__file__).parents[1])}
    done = completed([sys.executable, "-c", NO_HOME, str(BUILD)], env=env, cwd=tmp_path, timeout=100)
    assert "HOME is not set; expected an absolute path, or set PYNCCL_CACHE to one" in done.stdout, done
    assert not list(tmp_path.iterdir())


def test_who_cannot_write_is_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_CACHE", "/dev/null")
    refused("keeps its compiled backend in /dev/null/torch-", "cannot be written")
