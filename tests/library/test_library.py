"""Which library is loaded: the order of the places, what is said where none fits, several copies."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pynccl
from conftest import RELEASES, ROOT, Run, clean_environment
from null_library import FUNCTIONS
from processes import completed
from terminals import in_terminal

Compile = Callable[..., str]
INFO = (
    "import pynccl; i = pynccl.library_info(); print(i.backend, *i.version, i.path, i.how, i.others, sep='|')"
)


def library_source(version: int) -> str:
    return f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}"


@pytest.fixture(scope="module")
def place(compile_library: Compile, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Put a libnccl.so.2 of a version into a new folder's subfolder and return the new folder."""

    def place(subfolder: str, version: int) -> Path:
        made = Path(compile_library(library_source(version), "libnccl.so.2", "-Wl,-soname,libnccl.so.2"))
        root = tmp_path_factory.mktemp("place")
        (root / subfolder).mkdir(parents=True, exist_ok=True)
        made.rename(root / subfolder / "libnccl.so.2")
        return root

    return place


def info(run_python: Run, **env: str) -> list[str]:
    return run_python(INFO, **env).stdout.strip().split("|")


# --- the order of the places ------------------------------------------------------------------------------


def test_the_order_of_the_places(run_python: Run, place: Callable[[str, int], Path]) -> None:
    system, conda = place("lib", 20901), place("lib", 20902)
    wheel, mapped = place("nvidia/nccl/lib", 20903), place("lib", 20904)
    own = place("lib", 20905) / "lib" / "libnccl.so.2"
    env = {"LD_LIBRARY_PATH": str(system / "lib")}
    assert info(run_python, **env)[3:6:2] == ["1", "system"]
    env["CONDA_PREFIX"] = str(conda)
    assert info(run_python, **env)[3:6:2] == ["2", "CONDA_PREFIX"]
    env["PYTHONPATH"] = str(wheel)
    assert info(run_python, **env)[3:6:2] == ["3", "nvidia-nccl wheel"]
    env["PYNCCL_LIBRARY"] = "auto"
    load = f"import ctypes; ctypes.CDLL('{mapped}/lib/libnccl.so.2');"
    found = run_python(load + INFO, **env).stdout.strip().split("|")
    assert found[3:6] == ["4", f"{mapped}/lib/libnccl.so.2", "already in this process"]
    env["PYNCCL_LIBRARY"] = str(own)
    assert info(run_python, **env)[3:6] == ["5", str(own), "PYNCCL_LIBRARY"]
    explicit = f"import pynccl; pynccl.load('{mapped}/lib/libnccl.so.2');"
    assert run_python(explicit + INFO, **env).stdout.split("|")[3:6:2] == ["4", "load()"]


def test_the_wheel_is_found_without_importing_it(run_python: Run, place: Callable[[str, int], Path]) -> None:
    wheel = place("nvidia/nccl/lib", 20903)
    code = "import sys, pynccl; pynccl.load(); assert not [m for m in sys.modules if m.startswith('nvidia')]"
    run_python(code, PYTHONPATH=str(wheel))


def test_a_preloaded_library_is_the_one(run_python: Run, place: Callable[[str, int], Path]) -> None:
    path = place("lib", 20906) / "lib" / "libnccl.so.2"
    assert info(run_python, LD_PRELOAD=str(path))[3:6] == ["6", str(path), "already in this process"]


def test_a_mapped_library_whose_file_has_gone(run_python: Run, place: Callable[[str, int], Path]) -> None:
    path = place("lib", 20906) / "lib" / "libnccl.so.2"
    code = f"import ctypes, os; ctypes.CDLL('{path}'); os.unlink('{path}');" + INFO
    assert run_python(code).stdout.split("|")[3:5] == ["6", str(path)]


# --- nothing that fits ------------------------------------------------------------------------------------


def test_import_needs_no_library_and_the_first_call_says_where_it_looked(run_python: Run) -> None:
    done = run_python("import pynccl; print('imported', flush=True); pynccl.get_unique_id()", fails=True)
    assert done.stdout == "imported\n"
    assert "LibraryNotFoundError: no NCCL library was found.\nLooked for:\n" in done.stderr
    for part in (
        "in this process: no libnccl is mapped",
        "nvidia-nccl wheel: not installed",
        "conda: CONDA_PREFIX is not set",
        "system: libnccl.so.2: cannot open shared object file",
    ):
        assert part in done.stderr
    advice = "No NVIDIA driver was found. To run on CPU memory, set PYNCCL_LIBRARY=cpu or call pynccl.load"
    assert done.stderr.splitlines()[-1].startswith(advice)


@pytest.mark.parametrize("name", ["CPU", "Auto"])
def test_a_name_in_capitals(run_python: Run, name: str) -> None:
    done = run_python("import pynccl; pynccl.load()", fails=True, PYNCCL_LIBRARY=name)
    text = f"PYNCCL_LIBRARY is {name!r}; pynccl's name is {name.lower()!r}; expected a path, auto or cpu"
    assert text in done.stderr


def test_an_empty_path(run_python: Run) -> None:
    done = run_python("import pynccl; pynccl.load('')", fails=True)
    assert "load() is ''; expected a path, auto or cpu" in done.stderr


def test_auto_never_turns_to_the_cpu_library(run_python: Run) -> None:
    run_python("import pynccl; pynccl.cpu_library(); pynccl.load('auto')", fails=True)


@pytest.mark.parametrize("how", ["PYNCCL_LIBRARY", "load()"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("absent", "does not exist; expected a path, auto or cpu"),
        ("folder", "is not a file"),
        ("text", "invalid ELF header"),
        ("other", "has none of NCCL's functions"),
        ("failing", "ncclGetVersion of {path} failed with result 3"),
    ],
)
def test_a_path_that_cannot_be_used(
    run_python: Run, compile_library: Compile, tmp_path: Path, kind: str, text: str, how: str
) -> None:
    path = tmp_path / "libnccl.so.2"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("no library at all, but long enough to be read as one\n" * 10)
    elif kind != "absent":
        body = "int ncclGetVersion(int* v) { *v = 0; return 3; }" if kind == "failing" else "int other;"
        Path(compile_library(body)).rename(path)
    code = "import pynccl; pynccl.load(SPEC)".replace(
        "SPEC", "" if how == "PYNCCL_LIBRARY" else repr(str(path))
    )
    done = run_python(code, fails=True, **({"PYNCCL_LIBRARY": str(path)} if how == "PYNCCL_LIBRARY" else {}))
    assert f"LibraryNotFoundError: {how} names {path}" in done.stderr
    assert text.format(path=path) in done.stderr


def test_a_failed_load_can_be_repeated(run_python: Run, place: Callable[[str, int], Path]) -> None:
    path = place("lib", 20907) / "lib" / "libnccl.so.2"
    run_python(
        f"""
import pytest, pynccl
with pytest.raises(OSError): pynccl.load("/does/not/exist")
with pytest.raises(pynccl.LibraryNotFoundError): pynccl.get_unique_id()
assert pynccl.load({str(path)!r}).version == (2, 9, 7)
"""
    )


def test_another_platform_imports_and_refuses(run_python: Run) -> None:
    run_python(
        """
import sys
sys.platform = "darwin"
sys.modules["pynccl._native"] = None
import pytest, pynccl
from pynccl import capi
for use in (pynccl.load, pynccl.get_unique_id, pynccl.library_info, lambda: capi.ncclCommCount(1)):
    with pytest.raises(pynccl.NotSupportedError, match="Linux .* only; this is darwin"):
        use()
"""
    )


# --- several copies, switching ----------------------------------------------------------------------------


def test_two_libraries_in_one_process(run_python: Run, place: Callable[[str, int], Path]) -> None:
    first, second = (place("lib", v) / "lib" / "libnccl.so.2" for v in (20901, 20902))
    run_python(
        f"""
import ctypes, pytest, warnings, pynccl
ctypes.CDLL({str(first)!r})
with pytest.warns(RuntimeWarning) as seen:
    info = pynccl.load({str(second)!r})
assert len(seen) == 1 and {str(first)!r} in str(seen[0].message) and {str(second)!r} in str(seen[0].message)
assert info.version == (2, 9, 2) and info.others == ({str(first)!r},)
warnings.simplefilter("error")
assert pynccl.library_info() == info  # told once
"""
    )


def test_a_library_that_comes_later_is_told_too(run_python: Run, place: Callable[[str, int], Path]) -> None:
    first, second = (place("lib", v) / "lib" / "libnccl.so.2" for v in (20901, 20902))
    run_python(
        f"""
import ctypes, pytest, pynccl
assert pynccl.load({str(first)!r}).others == ()
ctypes.CDLL({str(second)!r})
with pytest.warns(RuntimeWarning, match="more than one libnccl"):
    assert pynccl.library_info().others == ({str(second)!r},)
"""
    )


INTERNAL = """
int ncclGroupStart(void) { return %d; }
int ncclGetVersion(int* version) { *version = 20900 + ncclGroupStart(); return 0; }
"""


def test_a_library_keeps_its_own_functions_beside_a_global_one(
    run_python: Run, compile_library: Compile, tmp_path: Path
) -> None:
    """NVIDIA's library is not linked with -Bsymbolic: its own calls could end in a preloaded copy."""
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "libnccl.so.2"
        Path(compile_library(INTERNAL % number)).rename(path)
        paths.append(str(path))
    code = "import warnings; warnings.simplefilter('ignore'); import pynccl;"
    code += f"print(pynccl.load({paths[1]!r}).version)"
    assert run_python(code, LD_PRELOAD=paths[0]).stdout == "(2, 9, 2)\n"


def test_switching_is_an_error(run_python: Run, place: Callable[[str, int], Path], tmp_path: Path) -> None:
    first, second = (place("lib", v) / "lib" / "libnccl.so.2" for v in (20901, 20902))
    link = tmp_path / "link.so"
    link.symlink_to(first)
    run_python(
        f"""
import pytest, pynccl
info = pynccl.load({str(first)!r})
assert pynccl.load() == pynccl.load("auto") == pynccl.load({str(link)!r}) == info
for other in ({str(second)!r}, "cpu"):
    with pytest.raises(pynccl.NcclInvalidUsage, match="already uses {first}"):
        pynccl.load(other)
assert pynccl.get_version() == (2, 9, 1)
"""
    )


def test_a_forked_child_can_load_and_use(run_python: Run, place: Callable[[str, int], Path]) -> None:
    path = place("lib", 20908) / "lib" / "libnccl.so.2"
    run_python(
        f"""
import os, pynccl
from pynccl._library import loader
loader._lock.acquire()  # as if another thread was loading
pid = os.fork()
if pid == 0:
    os._exit(0 if pynccl.load({str(path)!r}).version == (2, 9, 8) else 1)
assert os.waitpid(pid, 0)[1] == 0
loader._lock.release()
pynccl.load({str(path)!r})
pid = os.fork()
if pid == 0:
    os._exit(0 if pynccl.get_version() == (2, 9, 8) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    )


@pytest.mark.parametrize(
    ("code", "version"), [(2304, (2, 3, 4)), (2804, (2, 8, 4)), (20906, (2, 9, 6)), (23203, (2, 32, 3))]
)
def test_versions_decode(code: int, version: tuple[int, int, int]) -> None:
    from pynccl._library.loader import decode_version, encode_version

    assert decode_version(code) == version
    assert encode_version(version) == code


# --- NVIDIA's own libraries -------------------------------------------------------------------------------

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels used here are for x86_64")


@pytest.mark.slow
@needs_x86
@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", RELEASES)
def test_nvidias_library(run_python: Run, released: Callable[[str], str], version: str) -> None:
    done = run_python(
        """
import pickle, pytest, pynccl
from pynccl import capi
info = pynccl.library_info()
print(".".join(map(str, pynccl.get_version())), info.backend, info.how)
one, two = pynccl.get_unique_id(), pynccl.get_unique_id()
assert one != two and len(bytes(one)) == 128
assert pynccl._library.loader.decode_version(capi.ncclGetVersion()) == info.version
assert capi.ncclGetErrorString(4).startswith("invalid argument")
assert capi.ncclGetErrorString(0) == "no error"
with pytest.raises(pynccl.NcclInvalidArgument, match="ncclCommCount: ncclInvalidArgument: invalid argument"):
    capi.ncclCommCount(0)
with pytest.raises(pynccl.NcclUnhandledCudaError) as caught:
    capi.ncclCommInitRank(1, bytes(one), 0)
error = pickle.loads(pickle.dumps(caught.value))
assert error.result == 1 and error.function == "ncclCommInitRank" and error.detail
assert "no NVIDIA driver was found" in str(error) and "PYNCCL_LIBRARY=cpu" in str(error)
assert info.path in str(error)
assert capi.ncclGetLastError() == error.detail
supported = [name for name, since in capi.FUNCTIONS.items() if since <= info.version]
print(len(supported))
from pynccl._native import lib
assert supported == [name for name in capi.FUNCTIONS if lib.nccl_api_find(name.encode())]
""",
        PYNCCL_LIBRARY=released(version),
    )
    assert done.stdout.split("\n")[0] == f"{version} nccl PYNCCL_LIBRARY"
    listed = completed(["nm", "-D", "--defined-only", released(version)])
    exported = {line.split()[2].partition("@")[0] for line in listed.stdout.splitlines()}
    # For NCCL's own tests.
    exported -= {"ncclResetDebugInitInternal"}
    assert {name for name in exported if name.startswith("nccl")} <= {function.name for function in FUNCTIONS}


@pytest.mark.slow
@needs_x86
@pytest.mark.network
@pytest.mark.timeout(600)
def test_nvidias_library_from_a_wheel_folder(run_python: Run, released: Callable[[str], str]) -> None:
    root = Path(released("2.28.9")).parents[3]
    assert info(run_python, PYTHONPATH=str(root))[1:6:4] == ["2", "nvidia-nccl wheel"]


@needs_x86
@pytest.mark.network
@pytest.mark.timeout(600)
def test_two_of_nvidias_libraries(run_python: Run, released: Callable[[str], str]) -> None:
    old, new = released("2.19.3"), released("2.32.3")
    run_python(
        f"""
import pytest, pynccl
from pynccl import capi
with pytest.warns(RuntimeWarning, match="more than one libnccl"):
    assert pynccl.load({new!r}).others == ({old!r},)
assert pynccl.get_version() == (2, 32, 3)
assert "NCCL_DEBUG_FILE" in capi.ncclParamGetAllParameterKeys()
""",
        LD_PRELOAD=old,
    )


@needs_x86
@pytest.mark.network
@pytest.mark.timeout(600)
def test_a_function_newer_than_the_library(run_python: Run, released: Callable[[str], str]) -> None:
    path = released("2.19.3")
    run_python(
        f"""
import pytest, pynccl
from pynccl import capi
with pytest.raises(pynccl.NotSupportedError) as caught:
    capi.ncclCommShrink(1, [0], 1)
assert str(caught.value) == "ncclCommShrink needs NCCL >= 2.27.3; loaded NCCL 2.19.3 from {path}"
assert isinstance(caught.value, NotImplementedError)
""",
        PYNCCL_LIBRARY=path,
    )


@pytest.mark.slow
@needs_x86
@pytest.mark.network
@pytest.mark.timeout(600)
def test_parameters_of_nvidias_library(run_python: Run, released: Callable[[str], str]) -> None:
    run_python(
        """
import pytest, pynccl
from pynccl import capi
handle = capi.ncclParamBind("NCCL_DEBUG_FILE")
assert capi.ncclParamGetStr(handle) == "/dev/null" == capi.ncclParamGetParameter("NCCL_DEBUG_FILE")
assert capi.ncclParamGet(handle, 64).rstrip(b"\\0") == b"/dev/null"
with pytest.raises(pynccl.NcclInvalidArgument):
    capi.ncclParamGetI64(handle)
with pytest.raises(pynccl.NcclInvalidArgument):
    capi.ncclParamBind("NO_SUCH_KEY")
""",
        PYNCCL_LIBRARY=released("2.32.3"),
        NCCL_DEBUG_FILE="/dev/null",
    )


# --- a user's own library, the CPU library, the forwarding library ------------------------------------------


def test_a_users_library_with_one_function(run_python: Run, compile_library: Compile) -> None:
    path = compile_library(
        """
#include <stddef.h>
int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, void* comm, void* stream) {
  (void)send, (void)recv, (void)count, (void)type, (void)op, (void)comm, (void)stream;
  return 2;
}
""",
        "libmine.so",
    )
    run_python(
        f"""
import pytest, pynccl
from pynccl import capi
with pytest.raises(pynccl.NcclSystemError) as caught:
    capi.ncclAllReduce(1, 2, 3, capi.ncclFloat32, capi.ncclSum, 4, 0)
assert str(caught.value) == "ncclAllReduce: ncclSystemError; NCCL of unknown version from {path}"
assert pynccl.library_info().version == (0, 0, 0)
with pytest.raises(pynccl.NotSupportedError, match="ncclBroadcast needs NCCL >= 2.3.5"):
    capi.ncclBroadcast(1, 2, 3, 7, 0, 4, 0)
with pytest.raises(pynccl.NotSupportedError):
    capi.ncclCommInitRankConfig(1, bytes(128), 0, {{"blocking": 0}})
""",
        PYNCCL_LIBRARY=path,
    )


def exported(path: str) -> set[str]:
    done = completed(["nm", "-D", "--defined-only", path], check=True)
    return {line.split()[2] for line in done.stdout.splitlines()}


def test_the_cpu_library_exports_the_api_and_nothing_else() -> None:
    import pynccl

    assert exported(pynccl.cpu_library()) == {function.name for function in FUNCTIONS}


def test_the_cpu_library(run_python: Run) -> None:
    found = info(run_python, PYNCCL_LIBRARY="cpu")
    assert found[0:4] == ["cpu", "2", "32", "3"]
    assert found[4:] == [str(ROOT / "pynccl" / "libpynccl_cpu.so"), "PYNCCL_LIBRARY", "()"]
    path = run_python(args=["-m", "pynccl", "cpu-library"]).stdout.strip()
    assert path == found[4]
    dynamic = completed(["readelf", "-d", path], check=True).stdout
    assert "soname: [libpynccl_cpu.so]" in dynamic
    assert "libstdc++" not in dynamic


def test_the_forwarding_library(run_python: Run) -> None:
    folder = run_python(args=["-m", "pynccl", "cpu-library", "--dir"]).stdout.strip()
    path = f"{folder}/libnccl.so.2"
    dynamic = completed(["readelf", "-d", path], check=True).stdout
    assert "soname: [libnccl.so.2]" in dynamic
    names = {function.name for function in FUNCTIONS}
    assert exported(path) == names | {f"p{name}" for name in names if name.startswith("nccl")}
    run_python(
        """
import ctypes, re
client = ctypes.CDLL("libnccl.so.2")
version = ctypes.c_int()
assert client.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 23203
client.ncclGetErrorString.restype = ctypes.c_char_p
assert b"argument" in client.ncclGetErrorString(4)
import pynccl
info = pynccl.load()
assert info.backend == "cpu" and info.others == () and "behind the forwarding library" in info.how
assert pynccl.load("cpu") == info
maps = open("/proc/self/maps").read()
assert len(set(re.findall(r"\\S*libpynccl_cpu\\S*", maps))) == 1
""",
        LD_PRELOAD=path,
    )


def test_the_forwarding_library_alone_says_what_is_missing(tmp_path: Path) -> None:
    copy = tmp_path / "libnccl.so.2"
    copy.write_bytes((ROOT / "pynccl" / "forward" / "libnccl.so.2").read_bytes())
    code = f"import ctypes; print(ctypes.CDLL({str(copy)!r}).ncclGroupStart())"
    done = completed([sys.executable, "-c", code], check=True)
    assert done.stdout == "2\n"
    assert "pynccl: the CPU library cannot be loaded" in done.stderr


def test_info_of_what_is_there(run_python: Run) -> None:
    nothing = run_python(args=["-m", "pynccl", "info"]).stdout
    assert "no NCCL library was found" in nothing
    assert "CUDA driver none" in nothing
    cpu = run_python(args=["-m", "pynccl", "info"], PYNCCL_LIBRARY="cpu", NCCL_DEBUG="WARN").stdout
    assert "library     cpu 2.32.3" in cpu
    assert "found by    PYNCCL_LIBRARY" in cpu
    assert "environment NCCL_DEBUG=WARN" in cpu


def test_info_as_json(run_python: Run) -> None:
    nothing = json.loads(run_python(args=["-m", "pynccl", "info", "--json"]).stdout)
    assert nothing["pynccl"] == pynccl.__version__
    assert nothing["library"]["path"] is None
    assert "no NCCL library was found" in nothing["library"]["error"]
    variables = {"PYNCCL_LIBRARY": "cpu", "NCCL_DEBUG": "WARN", "PYNCCL_SECRET": "sixteen bytes or more"}
    found = json.loads(run_python(args=["-m", "pynccl", "info", "--json"], **variables).stdout)
    library = found["library"]
    assert (library["backend"], library["version"], library["others"]) == ("cpu", "2.32.3", [])
    assert library["path"] == found["cpu_library"]["path"]
    assert found["environment"] == variables | {"PYNCCL_SECRET": "(set)"}


def test_the_version_of_the_library(run_python: Run) -> None:
    said = run_python(args=["-m", "pynccl", "--version"]).stdout
    assert said == f"pynccl {pynccl.__version__}, NCCL library: none found\n"
    said = run_python(args=["-m", "pynccl", "--version"], PYNCCL_LIBRARY="cpu").stdout
    assert said.startswith(f"pynccl {pynccl.__version__}, NCCL library: cpu 2.32.3, /")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pynccl do", ["doctor"]),
        ("pynccl ru", ["run"]),
        ("pynccl run --res", ["--restarts"]),
        ("pynccl bench all_re", ["all_reduce"]),
    ],
)
def test_completion(words: str, found: list[str], run_python: Run) -> None:
    count = str(len(words.split()) - 1)
    asked = {"_PYNCCL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = run_python(
        args=["-c", "import sys; sys.argv = ['pynccl']; from pynccl.__main__ import main; main()"], **asked
    )
    assert done.stdout.split() == [f"plain,{word}" for word in found]


def completion_line(shell: str) -> str:
    """Return the line that the docs give for a shell's start-up file."""
    (line,) = re.findall(rf"^- {shell}: `(.+?)`", (ROOT / "docs/reference/commands.md").read_text(), re.M)
    return str(line)


def with_pynccl(**more: str) -> dict[str, str]:
    """Return the environment of a shell that finds the command."""
    return clean_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | more


def needs_shell(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


# What is typed, and the word that is completed.
BEGUN = {"pynccl do": "doctor", "pynccl run --res": "--restarts", "pynccl bench all_re": "all_reduce"}


def test_bash_completes() -> None:
    """By the line in the docs, and as bash calls what it has defined."""
    asks = """
    for words in "$@"; do
      COMP_WORDS=($words) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
      function=$(complete -p pynccl | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
      $function pynccl "${COMP_WORDS[COMP_CWORD]}"
      echo "${COMPREPLY[@]}"
    done
    """
    script = f"set -e\n{completion_line('bash')}\n{asks}"
    done = completed(["bash", "--norc", "-c", script, "bash", *BEGUN], env=with_pynccl())
    assert (done.stdout.splitlines(), done.stderr) == (list(BEGUN.values()), "")


@needs_shell("fish")
def test_fish_completes(tmp_path: Path) -> None:
    asks = "; ".join(f"complete -C '{words}'" for words in BEGUN)
    script = f"{completion_line('fish')}; {asks}"
    done = completed(["fish", "--no-config", "-c", script], env=with_pynccl(HOME=str(tmp_path)))
    # Each word stands before its help.
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == list(BEGUN.values())


@needs_shell("zsh")
def test_zsh_completes(tmp_path: Path) -> None:
    """As typed: Tab, and `echo` in front of the line."""
    typed = "".join(f"{words}\t\x01echo \n" for words in BEGUN)
    typed = f"autoload -U compinit; compinit -D -u; {completion_line('zsh')}\n{typed}exit\n"
    shown, code = in_terminal(["zsh", "-f", "-i"], with_pynccl(HOME=str(tmp_path)), typed=typed)
    assert code == 0
    lines = [line for line in shown if line.startswith("pynccl ") and "\t" not in line]
    assert lines == [f"{words.rpartition(' ')[0]} {word}" for words, word in BEGUN.items()]


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "pynccl"
    done = completed([command, "--version"], check=True)
    assert done.stdout.startswith(f"pynccl {pynccl.__version__}, NCCL library: ")
    assert os.access(command, os.X_OK)
