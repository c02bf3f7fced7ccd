"""The CPU library for C and C++: headers, linking, pkg-config, and what docs/cpu-library.md tells to do."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import c_headers
import pynccl
from conftest import ROOT, clean_environment, headers_of
from processes import completed
from pynccl._build_c import INITIALIZERS, pkg_config
from pynccl._build_c import c_headers as made_headers
from pynccl._build_ffi import parse

DOC = (ROOT / "docs" / "cpu-library.md").read_text()
CC = [*shlex.split(os.environ.get("CC", "gcc")), "-std=c11"]
CXX = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
HEADERS = ["nccl.h", "nccl_device.h", "pynccl_cpu.h"]


def environment() -> dict[str, str]:
    """Return the environment of a user who has this package's commands, and pkg-config, in the path."""
    scripts = str(Path(sys.executable).parent)
    return clean_environment() | {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYNCCL_CPU_INIT_TIMEOUT": "40",
        "PYNCCL_CPU_TIMEOUT": "40",
    }


def run(command: list[str], **env: str) -> str:
    done = completed(command, env=environment() | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return what `pynccl cpu-library --dir` prints."""
    return Path(run([sys.executable, "-m", "pynccl", "cpu-library", "--dir"]).strip())


def flags(folder: Path, *what: str) -> list[str]:
    return run(["pkg-config", *what, "nccl"], PKG_CONFIG_PATH=str(folder / "pkgconfig")).split()


def compiled(source: str, target: Path, compiler: list[str], *options: str) -> Path:
    """Compile a program, written beside the target."""
    file = target.with_suffix(".cpp" if compiler == CXX else ".c")
    file.write_text(source)
    run([*compiler, str(file), *options, "-o", str(target)])
    return target


def program() -> str:
    found = re.search(r"```c\n(.*?)```", DOC, re.S)
    assert found is not None
    return found[1]


def right(output: str) -> None:
    lines = [f"rank {rank} of 4: the sum is 10, 0 are wrong" for rank in range(4)]
    assert sorted(output.splitlines()) == lines


# --- the program of the documentation, which tests/documentation/ runs as well -----------------------------


@pytest.mark.parametrize("compiler", [CC, CXX], ids=["C11", "C++17"])
def test_the_program_compiles_without_warnings(folder: Path, tmp_path: Path, compiler: list[str]) -> None:
    linked = [*WARNINGS, *flags(folder, "--cflags", "--libs")]
    right(run([str(compiled(program(), tmp_path / "all_reduce", compiler, *linked))]))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
def test_with_cmake(folder: Path, tmp_path: Path) -> None:
    found = re.search(r"```cmake\n(.*?)```", DOC, re.S)
    assert found is not None
    (tmp_path / "all_reduce.c").write_text(program())
    head = "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nadd_executable(all_reduce all_reduce.c)\n"
    (tmp_path / "CMakeLists.txt").write_text(head + found[1])
    build = str(tmp_path / "build")
    run(["cmake", "-S", str(tmp_path), "-B", build], PKG_CONFIG_PATH=str(folder / "pkgconfig"))
    run(["cmake", "--build", build])
    right(run([f"{build}/all_reduce"]))


PROFILER = """
#include <nccl.h>
#include <stdio.h>
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  fprintf(stderr, "counted %zu\\n", count);
  return pncclAllReduce(send, recv, count, type, op, comm, stream);
}
"""


def test_a_profiler_calls_by_the_other_names(folder: Path, tmp_path: Path) -> None:
    linked = [*WARNINGS, *flags(folder, "--cflags", "--libs")]
    counted = compiled(program(), tmp_path / "all_reduce", CC, *linked)
    profiler = compiled(PROFILER, tmp_path / "profiler.so", CC, "-shared", "-fPIC", *linked)
    env = environment() | {"LD_PRELOAD": str(profiler)}
    done = completed([str(counted)], env=env)
    assert done.returncode == 0, done.stderr
    right(done.stdout)
    assert done.stderr.splitlines() == ["counted 1000000"] * 4


# --- the folder ---------------------------------------------------------------------------------------------


def test_what_is_in_the_folder(folder: Path) -> None:
    listed = set(re.findall(r"^\| `([\w/.]+)` \|", DOC, re.M))
    assert listed == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name, text in made_headers(parse("nccl_api")).items():
        assert (folder / "include" / name).read_text() == text, f"{name} is stale: build again"
    assert (folder / "pkgconfig" / "nccl.pc").read_text() == pkg_config(parse("nccl_api"))


def test_the_folder_can_be_anywhere(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "somewhere"
    shutil.copytree(folder, package / "forward")
    shutil.copy(pynccl.cpu_library(), package)
    linked = flags(package / "forward", "--cflags", "--libs")
    target = compiled(program(), tmp_path / "all_reduce", CC, *linked)
    right(run([str(target)]))
    assert str(folder) not in run(["readelf", "-d", str(target)])


def test_what_a_program_asks_for_is_the_soname(folder: Path, tmp_path: Path) -> None:
    target = compiled(program(), tmp_path / "all_reduce", CC, *flags(folder, "--cflags", "--libs"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", str(target)]))
    assert [name for name in needed if "nccl" in name] == ["libnccl.so.2"]


def test_the_version(folder: Path, tmp_path: Path) -> None:
    source = """
#include <nccl.h>
#include <stdio.h>
int main(void) {
  int version = 0;
  if (ncclGetVersion(&version) || version != NCCL_VERSION_CODE || version != NCCL_VERSION(2, 32, 3)) return 1;
  printf("%d.%d.%d%s", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, NCCL_SUFFIX);
}
"""
    target = compiled(source, tmp_path / "version", CC, *flags(folder, "--cflags", "--libs"))
    assert (
        run([str(target)])
        == run(["pkg-config", "--modversion", "nccl"], PKG_CONFIG_PATH=str(folder / "pkgconfig")).strip()
    )


def test_opened_by_either_name(folder: Path, tmp_path: Path) -> None:
    """Programs that open the library at run time take one name or the other, or both."""
    source = """
#include <dlfcn.h>
#include <nccl.h>
int main(void) {
  typedef ncclResult_t (*GetVersion)(int*);
  const char* names[] = {"libnccl.so", "libnccl.so.2"};
  for (int i = 0; i < 2; ++i) {
    void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    GetVersion get_version = library ? (GetVersion)dlsym(library, "ncclGetVersion") : NULL;
    int version = 0;
    if (!get_version || get_version(&version) != ncclSuccess || version != NCCL_VERSION_CODE) return i + 1;
  }
  return 0;
}
"""
    target = compiled(source, tmp_path / "opens", CC, *flags(folder, "--cflags"), "-ldl")
    run([str(target)], LD_LIBRARY_PATH=str(folder))


def test_preloaded_into_a_program_linked_with_another_libnccl(folder: Path, tmp_path: Path) -> None:
    other = "#include <nccl.h>\nncclResult_t ncclGetVersion(int* v) { *v = 20000; return ncclSuccess; }\n"
    shared = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", *flags(folder, "--cflags")]
    compiled(other, tmp_path / "libnccl.so", CC, *shared)
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so")
    main = 'int main(void) { int v; ncclGetVersion(&v); printf("%d", v); }\n'
    source = f"#include <nccl.h>\n#include <stdio.h>\n{main}"
    linked = [*flags(folder, "--cflags"), f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}", "-lnccl"]
    target = compiled(source, tmp_path / "program", CC, *linked)
    assert run([str(target)]) == "20000"
    assert run([str(target)], LD_PRELOAD=str(folder / "libnccl.so.2")) == "23203"


# --- the headers --------------------------------------------------------------------------------------------

USES_ALL = """
int main(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclCollConfig_t coll_config = NCCL_COLLCONFIG_INITIALIZER;
  ncclSimInfo_t sim_info = NCCL_SIM_INFO_INITIALIZER;
  ncclEncryptionConfig_t encryption = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  ncclComm_t comm = NCCL_COMM_NULL;
  ncclUniqueId id;
  cudaStream_t stream;
  float x[3] = {1, 2, 3};
  int device = 7;
  config.blocking = 1;
  return ncclGetUniqueId(&id) || ncclCommInitRankConfig(&comm, 1, id, 0, &config) ||
         ncclCommQueryProperties(comm, &properties) || properties.nRanks != 1 ||
         ncclTeamWorld(comm).nRanks != 1 || ncclTeamRankToWorld(comm, ncclTeamLsa(comm), 0) != 0 ||
         pyncclCpuGetDevice(&device) || pyncclCpuStreamCreate(&stream) ||
         ncclAllReduceConfig(x, x, 3, ncclFloat, ncclSum, comm, stream, &coll_config) || ncclGroupStart() ||
         ncclAllReduce(x, x, 3, ncclFloat, ncclSum, comm, stream) || ncclGroupSimulateEnd(&sim_info) ||
         pyncclCpuStreamSynchronize(comm, stream, -1) || x[2] != 3 ||
         encryption.mode != NCCL_ENCRYPTION_MODE_NONE || ncclCommDestroy(comm) ||
         pyncclCpuStreamDestroy(stream);
}
"""
STANDARDS = [(CC, "c99"), (CC, "c11"), (CC, "c17"), (CXX, "c++11"), (CXX, "c++17"), (CXX, "c++20")]


@pytest.mark.parametrize(("compiler", "standard"), STANDARDS, ids=[standard for _, standard in STANDARDS])
def test_every_initializer_in_every_standard(
    folder: Path, tmp_path: Path, compiler: list[str], standard: str
) -> None:
    source = "".join(f"#include <{name}>\n" for name in HEADERS) + USES_ALL
    linked = [f"-std={standard}", *WARNINGS, *flags(folder, "--cflags", "--libs")]
    run([str(compiled(source, tmp_path / "uses", compiler, *linked))])


@pytest.mark.parametrize("compiler", [CC, CXX], ids=["C", "C++"])
@pytest.mark.parametrize("header", HEADERS)
def test_each_header_stands_alone(folder: Path, tmp_path: Path, header: str, compiler: list[str]) -> None:
    source = f"#include <{header}>\n#include <{header}>\nint main(void) {{ return ncclSuccess; }}\n"
    run([str(compiled(source, tmp_path / "alone", compiler, *WARNINGS, *flags(folder, "--cflags")))])


@pytest.mark.parametrize("compiler", [CC, CXX], ids=["C", "C++"])
def test_with_cuda_it_is_nvidias_way(folder: Path, tmp_path: Path, compiler: list[str]) -> None:
    """NVIDIA's nccl.h brings cuda_runtime.h, and programs count on that."""
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    (cuda / "cuda_runtime.h").write_text(
        c_headers.STUBS["cuda_runtime.h"]
        + "static inline int cudaStreamCreate(cudaStream_t* s) { *s = 0; return 0; }\n"
    )
    source = "#include <nccl.h>\nint main(void) { cudaStream_t s; return cudaStreamCreate(&s); }\n"
    run(
        [
            str(
                compiled(
                    source,
                    tmp_path / "cuda_user",
                    compiler,
                    *WARNINGS,
                    f"-I{cuda}",
                    *flags(folder, "--cflags"),
                )
            )
        ]
    )


needs_nvidia = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels used here are for x86_64"),
    pytest.mark.network,
    pytest.mark.timeout(600),
]


@pytest.fixture
def nvidias(released: Callable[[str], str]) -> Path:
    """Return the folder of NVIDIA's own headers of the version that ours have."""
    return headers_of(released("2.32.3"))


class TestAgainstNvidias:
    """The same names, types and values as NVIDIA's header has."""

    pytestmark = needs_nvidia

    def test_declarations(self, folder: Path, nvidias: Path, tmp_path: Path) -> None:
        stubs = c_headers.write_stubs(tmp_path / "stubs")
        ours = c_headers.declared(folder / "include", stubs, ["nccl.h"])
        theirs = c_headers.declared(nvidias, stubs, ["nccl.h"], "-DNCCL_OS_LINUX")
        assert len(theirs.functions) == 73 and len(theirs.structs) == 7
        # It serves NVIDIA's header alone, to find out how large an enum is.
        del theirs.enums["ncclRedOp_dummy_t"]
        assert ours.structs == theirs.structs
        assert ours.enums == theirs.enums
        assert ours.functions == theirs.functions
        assert ours.handles == theirs.handles
        # A flag that was given above; and NVIDIA's header has the number itself in the initializer.
        del theirs.macros["NCCL_OS_LINUX"]
        assert set(ours.macros) == set(theirs.macros) | {"NCCL_SIM_INFO_MAGIC"}

    def test_declarations_of_the_device_header(self, folder: Path, nvidias: Path, tmp_path: Path) -> None:
        stubs = c_headers.write_stubs(tmp_path / "stubs")
        ours = c_headers.declared(folder / "include", stubs, ["nccl_device.h"])
        theirs = c_headers.declared(nvidias, stubs, ["stddef.h", "stdbool.h", "nccl_device/host.h"])
        # NVIDIA's headers declare these for Windows and for C++ only.
        ginless = {"ncclGinOutboxCreateRequirement", "ncclGinInboxA2ACreateRequirement"}
        host = c_headers.declared(folder / "include", stubs, ["nccl.h"])
        assert len(set(ours.functions) - set(host.functions)) == 23
        for name in set(ours.functions) - set(host.functions) - ginless:
            assert ours.functions[name] == theirs.functions[name], name
        for name in ("ncclGinType_t", "ncclGinConnectionType_t", "ncclCftTeamMode_t", "ncclCftCap_t"):
            assert ours.enums[name] == theirs.enums[name]
        for name in (
            *("ncclCommProperties_t", "ncclDevCommRequirements_t", "ncclDevResourceRequirements_t"),
            "ncclTeamRequirements_t",
        ):
            assert ours.structs[name] == theirs.structs[name], name

    def test_values(self, folder: Path, nvidias: Path, tmp_path: Path) -> None:
        stubs = c_headers.write_stubs(tmp_path / "stubs")
        cuda = c_headers.write_stubs(tmp_path / "cuda", "cuda.h", "cuda_runtime.h", "cuda_fp16.h")
        ours = c_headers.declared(folder / "include", stubs, ["nccl_device.h"])
        del ours.macros["NCCL_SIM_INFO_MAGIC"]
        # NVIDIA's headers declare these for Windows and for C++ only.
        for name in ("ncclGinOutboxHandle", "ncclGinInboxA2AHandle"):
            del ours.structs[name]
        printed = {}
        for include, device in ((folder / "include", "nccl_device.h"), (nvidias, "nccl_device/host.h")):
            source = c_headers.probe(ours, ["nccl.h", device], INITIALIZERS)
            target = compiled(source, tmp_path / "probe", CC, "-w", f"-I{include}", f"-I{cuda}")
            printed[device] = run([str(target)]).splitlines()
        assert len(printed["nccl_device.h"]) == 256
        assert printed["nccl_device.h"] == printed["nccl_device/host.h"]

    def test_a_device_communicator_has_room(self, nvidias: Path, tmp_path: Path) -> None:
        cuda = c_headers.write_stubs(tmp_path / "cuda", "cuda.h", "cuda_runtime.h", "cuda_fp16.h")
        source = """
            #include <stdbool.h>
            #include <stdio.h>
            #include <nccl_device/host.h>
            int main(void) { return printf("%zu", sizeof(ncclDevComm_t)) < 1; }
        """
        target = compiled(source, tmp_path / "size", CC, "-w", f"-I{nvidias}", f"-I{cuda}")
        assert 200 < int(run([str(target)])) <= 4096

    def test_a_program_compiled_with_nvidias_header(
        self, folder: Path, nvidias: Path, tmp_path: Path
    ) -> None:
        cuda = c_headers.write_stubs(tmp_path / "cuda", "cuda_runtime.h", "cuda_fp16.h")
        linked = [f"-I{cuda}", f"-I{nvidias}", *flags(folder, "--cflags", "--libs")]
        right(run([str(compiled(program(), tmp_path / "all_reduce", CC, *linked))]))
