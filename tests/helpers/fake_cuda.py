"""A pytest plugin: the fake CUDA driver, compiled alone or with a libnccl over it, and the test's side of it.

It stands for libcuda.so.1 and knows nothing of NCCL; the libnccl is fake_nccl.py's.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_nccl
from device_arrays import Device
from pynccl import Communicator

SOURCE = Path(__file__).parents[1].joinpath("fake_cuda", "fake_cuda.c").read_text()


def _compile(source: str, target: Path, *options: str) -> None:
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-x", "c", "-"]
    subprocess.run(["gcc", *flags, *options, "-o", str(target)], input=source, text=True, check=True)


def compiled(folder: Path, source: str = SOURCE) -> dict[str, str]:
    """Compile the driver, and return the environment of a process that is to have it."""
    _compile(source, folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    return {"LD_LIBRARY_PATH": str(folder)}


def compiled_nccl(folder: Path, environment: dict[str, str], version: int = 22809) -> str:
    """Compile a libnccl over the driver, and return its path."""
    target = folder / "libnccl.so.2"
    # What is referred to weakly does not make the linker need a library by itself.
    driver = ["-Wl,--no-as-needed", "-x", "none", f"{environment['LD_LIBRARY_PATH']}/libcuda.so.1"]
    _compile(fake_nccl.source(version), target, *driver)
    return str(target)


@pytest.fixture(scope="session")
def fake_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process that has the driver, and a libnccl over it."""
    folder = tmp_path_factory.mktemp("gpus")
    environment = compiled(folder)
    return environment | {"PYNCCL_LIBRARY": compiled_nccl(folder, environment)}


def driver() -> Any:
    """Return the test's side of the driver that this process has."""
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_cuda_log.restype = ctypes.c_char_p
    for call in (library.fake_cuda_hold, library.fake_cuda_launch, library.fake_cuda_capture):
        call.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.fake_cuda_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    return library


def on_device(device: int, count: int = 4, dtype: Any = np.float32) -> Any:
    """Return an array that the driver says is a device's."""
    data = np.zeros(count, dtype)
    driver().fake_cuda_register(data.ctypes.data, data.nbytes, 2, device)
    return Device(data)


def create(**options: Any) -> Communicator:
    """Return rank 1 of 2; the other one is not there."""
    return Communicator(2, bytes([7]) * 128, 1, **options)
