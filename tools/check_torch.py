"""Check that pynccl.torch's C++ compiles against other versions of torch.

As `python tools/check_torch.py 2.6.0 2.15.0`. Only the headers are needed; they come from the wheels for
aarch64, which are the smallest.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def build_module() -> ModuleType:
    """Return pynccl.torch._build, without importing pynccl.torch, which would compile it."""
    spec = importlib.util.spec_from_file_location("torch_build", ROOT / "pynccl" / "torch" / "_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headers(version: str, folder: Path) -> Path:
    """Download a version's wheel; return the folder of its package, with the headers alone."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "download",
        f"torch=={version}",
    ]
    pip += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "--python-version", "3.12"]
    for platform in ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64"):
        pip += ["--platform", platform]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("torch/include/")]
        archive.extractall(folder, names)
    return folder / "torch"


def main(versions: list[str]) -> int:
    """Compile against each version; say which do not work."""
    build, failed = build_module(), []
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            flags = build.flags_for(headers(version, Path(folder)))
            command = ["g++", "-fsyntax-only", *flags, str(build.SOURCES / "extension.cpp")]
            good = subprocess.run(command).returncode == 0
        print(f"torch {version}: {'compiles' if good else 'does not compile'}", flush=True)
        failed += [] if good else [version]
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
