"""The interface of SGLang's pynccl_wrapper.py and pynccl.py over pynccl.

The names of the wrapper are those of pynccl.compat.vllm, and so are the differences; only the communicator
has other parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pynccl.compat import _wrapper
from pynccl.compat._engine import Engine, like, rows
from pynccl.compat._wrapper import *

__all__ = [*_wrapper.__all__, "PyNcclCommunicator", "install"]


def install() -> None:
    """Make SGLang use this NCCLLibrary, in place of its pynccl_wrapper; call it before SGLang is imported.

    Raises NcclError if SGLang's pynccl_wrapper is imported already.
    """
    _wrapper.replace("sglang.srt.distributed.device_communicators.pynccl_wrapper", sys.modules[__name__])


class PyNcclCommunicator(Engine):
    """SGLang's communicator: reductions in place, and disabled until `change_state` enables it.

    Every operation raises as `Communicator.all_reduce` does: TypeError, ValueError, NcclInvalidUsage,
    CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
    """

    begins_disabled = True

    def __init__(
        self,
        group: Any,
        device: Any,
        library_path: str | None = None,
        is_symmetric_memory_enabled: bool = False,
        cta_policy: int | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Join with the ranks of `group`, a process group of torch or an object like StatelessProcessGroup.

        `device` is an ordinal, a name or a torch.device. `timeout` is Communicator's: with it all ranks must
        be pynccl's.
        """
        usage = 1 if is_symmetric_memory_enabled else None
        config = _wrapper.ncclConfig_t(graphUsageMode=usage, CTAPolicy=cta_policy)
        options = None if config == _wrapper.ncclConfig_t() else config
        super().__init__(group, library_path, device, config=options, timeout=timeout)

    def all_reduce(self, tensor: Any, op: Any = "sum", stream: Any = None) -> None:
        """Reduce the tensors of all ranks, in place."""
        if not self.disabled:
            self.communicator.all_reduce(tensor, op=_wrapper.op_of(op), stream=stream)

    def outplace_all_reduce(
        self, in_tensor: Any, out_tensor: Any = None, op: Any = "sum", stream: Any = None
    ) -> Any:
        """Reduce the tensors of all ranks to `out_tensor`, by default a new one; return it."""
        if self.disabled:
            return None
        out = like(in_tensor) if out_tensor is None else out_tensor
        return self.communicator.all_reduce(in_tensor, out, _wrapper.op_of(op), stream)

    def all_gather(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int] | None = None, stream: Any = None
    ) -> None:
        """Concatenate the tensors of all ranks, with `sizes` of that many rows, on every rank."""
        if self.disabled:
            return
        if sizes is None:
            self.communicator.all_gather(input_tensor, output_tensor, stream)
        else:
            counts = rows(output_tensor, sizes, "output_tensor", self.world_size)
            self.communicator.all_gather_v(input_tensor, output_tensor, counts, stream)

    def reduce_scatter(
        self,
        output_tensor: Any,
        input_tensor: Any,
        op: Any = "sum",
        sizes: Sequence[int] | None = None,
        stream: Any = None,
    ) -> None:
        """Reduce the tensors of all ranks; each rank gets its part, with `sizes` of that many rows."""
        if self.disabled:
            return
        reduction = _wrapper.op_of(op)
        if sizes is None:
            self.communicator.reduce_scatter(input_tensor, output_tensor, reduction, stream)
        else:
            counts = rows(input_tensor, sizes, "input_tensor", self.world_size)
            self.communicator.reduce_scatter_v(input_tensor, output_tensor, counts, reduction, stream)

    def all_to_all_single(self, output_tensor: Any, input_tensor: Any, stream: Any = None) -> None:
        """Send each rank its part of the input; receive every rank's part for this one."""
        if not self.disabled:
            self.communicator.all_to_all(input_tensor, output_tensor, stream)
