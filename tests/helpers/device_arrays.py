"""Arrays of no library: host memory that calls itself CUDA memory, or speaks DLPack only."""

from __future__ import annotations

from typing import Any

import numpy as np


class Device:
    """Host memory that calls itself CUDA memory."""

    def __init__(self, data: np.ndarray[Any, Any], /, **changes: Any) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": data.shape,
            "typestr": data.dtype.str,
            "data": (data.ctypes.data, not data.flags.writeable),
            "version": 3,
            "strides": None if data.flags.c_contiguous else data.strides,
        } | changes


class Exporter:
    """An object that only speaks DLPack, and in its first form only."""

    def __init__(self, data: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.data, self.device = data, device

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream is None or self.device[0] == 2
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
