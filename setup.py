"""How the native parts are compiled: the binding, the CPU library and the forwarding library.

pynccl/_build_ffi.py generates the binding's sources, _build_c.py the forwarding library and the headers for
C programs. `setup.py build_ext --inplace` builds what has changed, and `--only=pynccl.libpynccl_cpu` that one
alone. PYNCCL_WERROR makes warnings errors; PYNCCL_BUILD_CPU_LIBRARY=0 leaves the CPU library out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext as _build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "pynccl"))
import _build_c
import _build_ffi

del sys.path[0]

MADE = Path("build", "native")
NCCL_API, CPU_API = _build_ffi.parse("nccl_api"), _build_ffi.parse("cpu_api")
BINDING, CPU, FORWARD = "pynccl._native", "pynccl.libpynccl_cpu", "pynccl.forward.libnccl"
# What Python names by a suffix of its own, others load by these names.
FILES = {CPU: "libpynccl_cpu.so", FORWARD: _build_c.FORWARD_LIBRARY}

# A newer compiler than the project's may warn of more; for those who only install that is no error.
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("PYNCCL_WERROR") else [])]
EXTENSIONS = [
    Extension(
        BINDING,
        sorted(glob("pynccl/native/*.c")),
        include_dirs=["pynccl/native", str(MADE)],
        depends=[*glob("pynccl/native/*.h"), *glob("pynccl/api/*.h")],
        define_macros=[("_GNU_SOURCE", "1")],
        libraries=["dl", "pthread"],
        extra_compile_args=["-O2", "-fvisibility=hidden", *WARNINGS],
    ),
    Extension(
        CPU,
        sorted(glob("pynccl/cpu/*/*.cpp")),
        language="c++",
        include_dirs=["pynccl", "pynccl/cpu"],
        depends=[*glob("pynccl/cpu/*/*.hpp"), *glob("pynccl/cpu/*/*.inc"), *glob("pynccl/api/*.h")],
        extra_compile_args=[
            *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"),
            *WARNINGS,
        ],
        extra_link_args=[
            *("-pthread", "-static-libstdc++", "-static-libgcc", f"-Wl,-soname,{FILES[CPU]}"),
            *("-Wl,--no-undefined", "-Wl,-Bsymbolic", f"-Wl,--version-script={MADE / 'exports.map'}"),
        ],
    ),
    Extension(
        FORWARD,
        [],
        include_dirs=["pynccl/native"],
        depends=["pynccl/native/forward.inc", *glob("pynccl/api/*.h")],
        libraries=["dl", "pthread"],
        extra_compile_args=["-O2", "-g0", *WARNINGS],
        extra_link_args=[f"-Wl,-soname,{FILES[FORWARD]}", "-Wl,--no-undefined"],
    ),
]

_PACKAGES = (
    "Debian and Ubuntu: apt install gcc g++ python3-dev; Fedora and RHEL: dnf install gcc gcc-c++ "
    "python3-devel; conda: conda install gcc gxx"
)


def require_compilers(names: set[str]) -> None:
    """Say which packages bring what is missing, before a compiler says it in its own way."""
    wanted = [("C", "CC")] if names & {BINDING, FORWARD} else []
    wanted += [("C++", "CXX")] if CPU in names else []
    for language, variable in wanted:
        default = sysconfig.get_config_var(variable) or {"C": "gcc", "C++": "g++"}[language]
        command = shlex.split(os.environ.get(variable) or default)[0]
        if shutil.which(command) is None:
            named = os.environ.get(variable)
            problem = f"{variable} names {command!r}, which is not" if named else f"there is no {command!r}"
            raise SystemExit(
                f"pynccl needs a {language} compiler to be built: {problem} on PATH. {_PACKAGES}"
            )
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if BINDING in names and not os.path.exists(header):
        raise SystemExit(f"pynccl needs Python's headers to be built: {header} does not exist. {_PACKAGES}")


def generate(names: set[str]) -> dict[str, list[Path]]:
    """Write what is generated, where that has changed, and return the sources of each extension."""
    MADE.mkdir(parents=True, exist_ok=True)
    _build_ffi.write(MADE / "exports.map", _build_c.export_map(NCCL_API, CPU_API))
    _build_ffi.write(MADE / "forward.c", _build_c.forward_source(NCCL_API, CPU_API))
    made = {FORWARD: [MADE / "forward.c"]}
    return made | {BINDING: _build_ffi.Binding().emit(MADE)} if BINDING in names else made


def side_by_side(compile_all: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return a compiler's `compile` that compiles the files of an extension in parallel.

    setuptools can only build whole extensions in parallel, and nearly all files belong to one.
    """

    def compile(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(compile_all, [source], **options) for source in sources]
        return [made for job in jobs for made in job.result()]

    return compile


class build_ext(_build_ext):
    user_options: ClassVar = [*_build_ext.user_options, ("only=", None, "build these extensions alone")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.only: str | None = None

    def finalize_options(self) -> None:
        super().finalize_options()
        left_out = {CPU, FORWARD} if os.environ.get("PYNCCL_BUILD_CPU_LIBRARY") == "0" else set()
        wanted = set(self.only.split(",")) if self.only else {ext.name for ext in EXTENSIONS} - left_out
        unknown = wanted - {ext.name for ext in EXTENSIONS}
        if unknown:
            known = ", ".join(ext.name for ext in EXTENSIONS)
            raise SystemExit(
                f"--only={self.only}: there is no {', '.join(unknown)}; expected some of {known}"
            )
        # Elsewhere the package only says that it needs Linux.
        on_linux = sys.platform == "linux"
        self.extensions = [ext for ext in self.extensions if ext.name in wanted and on_linux]

    def run(self) -> None:
        names = {ext.name for ext in self.extensions}
        require_compilers(names)
        if self.editable_mode:
            # Kept for the next build, which then compiles only the extensions that have changed.
            self.build_temp, self.build_lib = "build/temp", "build/lib"
        made = generate(names)
        for ext in self.extensions:
            ext.sources += map(str, made.get(ext.name, []))
        super().run()

    def build_extensions(self) -> None:
        self.compiler.compile = side_by_side(self.compiler.compile)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        if ext.name == FORWARD:
            _build_c.write_c_files(Path(self.get_ext_fullpath(ext.name)).parent, NCCL_API)

    def get_ext_filename(self, fullname: str) -> str:
        # Asked with and without the package.
        *package, name = fullname.split(".")
        for known, filename in FILES.items():
            if name == known.split(".")[-1]:
                return os.path.join(*package, filename)
        return str(super().get_ext_filename(fullname))

    def copy_extensions_to_source(self) -> None:
        # A build in place copies into the package, where nothing has made this folder yet.
        folder = Path("pynccl", "forward")
        folder.mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        if any(ext.name == FORWARD for ext in self.extensions):
            _build_c.write_c_files(folder, NCCL_API)


setup(ext_modules=EXTENSIONS if sys.platform == "linux" else [], cmdclass={"build_ext": build_ext})
