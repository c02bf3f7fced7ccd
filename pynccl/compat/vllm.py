"""The interface of vLLM's pynccl_wrapper.py and pynccl.py over pynccl.

Differences from vLLM:

- Tensors are whatever pynccl's calls take, also on the host with the CPU library, and are checked.
- What fails raises a pynccl.NcclError, also a library that cannot be loaded. A time-out names the dead ranks.
- Reductions and copies with `sizes` are one call of pynccl, and drop the group if one of them is wrong.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pynccl.compat import _wrapper
from pynccl.compat._engine import Engine, like, memory_of, one_each, rows, send_and_receive, width_of
from pynccl.compat._wrapper import *

__all__ = [*_wrapper.__all__, "PyNcclCommunicator", "install"]


def install() -> None:
    """Make vLLM use this NCCLLibrary, in place of its pynccl_wrapper; call it before vLLM is imported.

    Raises NcclError if vLLM's pynccl_wrapper is imported already.
    """
    _wrapper.replace("vllm.distributed.device_communicators.pynccl_wrapper", sys.modules[__name__])


class PyNcclCommunicator(Engine):
    """vLLM's communicator: the output first, reductions out of place.

    Every operation raises as `Communicator.all_reduce` does: TypeError, ValueError, NcclInvalidUsage,
    CollectiveMismatchError, RankFailedError, NcclTimeoutError, or another NcclError.
    """

    _suspended = False

    def __init__(
        self, group: Any, device: Any, library_path: str | None = None, *, timeout: float | None = None
    ) -> None:
        """Join with the ranks of `group`, a process group of torch or an object like StatelessProcessGroup.

        `device` is an ordinal, a name or a torch.device. `timeout` is Communicator's: with it all ranks must
        be pynccl's.
        """
        super().__init__(group, library_path, device, timeout=timeout)

    def all_reduce(self, in_tensor: Any, out_tensor: Any = None, op: Any = "sum", stream: Any = None) -> Any:
        """Reduce the tensors of all ranks to `out_tensor`, by default a new one; return it."""
        if self.disabled:
            return None
        out = like(in_tensor) if out_tensor is None else out_tensor
        return self.communicator.all_reduce(in_tensor, out, _wrapper.op_of(op), stream)

    def all_gather(self, output_tensor: Any, input_tensor: Any, stream: Any = None) -> None:
        """Concatenate the tensors of all ranks on every rank."""
        if not self.disabled:
            self.communicator.all_gather(input_tensor, output_tensor, stream)

    def all_gatherv(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], stream: Any = None
    ) -> None:
        """Concatenate the tensors of all ranks, of `sizes` rows, on every rank."""
        if not self.disabled:
            counts = rows(output_tensor, sizes, "output_tensor", self.world_size)
            self.communicator.all_gather_v(input_tensor, output_tensor, counts, stream)

    def reduce_scatter(
        self, output_tensor: Any, input_tensor: Any, op: Any = "sum", stream: Any = None
    ) -> None:
        """Reduce the tensors of all ranks; each rank gets its part."""
        if not self.disabled:
            self.communicator.reduce_scatter(input_tensor, output_tensor, _wrapper.op_of(op), stream)

    def reduce_scatterv(
        self,
        output_tensor: Any,
        input_tensor: Any,
        sizes: Sequence[int],
        op: Any = "sum",
        stream: Any = None,
    ) -> None:
        """Reduce the tensors of all ranks; each rank gets its part, of `sizes` rows."""
        if not self.disabled:
            counts = rows(input_tensor, sizes, "input_tensor", self.world_size)
            self.communicator.reduce_scatter_v(
                input_tensor, output_tensor, counts, _wrapper.op_of(op), stream
            )

    def reduce(
        self, output_tensor: Any, input_tensor: Any, root: int, op: Any = "sum", stream: Any = None
    ) -> None:
        """Reduce the tensors of all ranks to the root's output."""
        if not self.disabled:
            self.communicator.reduce(input_tensor, output_tensor, _wrapper.op_of(op), root, stream)

    def scatter(
        self,
        output_tensor: Any,
        input_tensor: Any,
        sizes: Sequence[int],
        root: int = 0,
        stream: Any = None,
    ) -> None:
        """Give every rank its part, of `sizes` rows, of the root's input."""
        if self.disabled:
            return
        here = self.rank == root
        if here:
            counts = rows(input_tensor, sizes, "input_tensor", self.world_size)
        else:
            counts = [n * width_of(output_tensor) for n in one_each(sizes, self.world_size)]
        self.communicator.scatter_v(input_tensor if here else None, output_tensor, counts, root, stream)

    def batch_isend_irecv(self, p2p_ops: Iterable[Any], stream: Any = None) -> None:
        """Issue torch's P2POps as one group."""
        if not self.disabled:
            send_and_receive(
                p2p_ops,
                lambda tensor, peer: self.send(tensor, peer, stream),
                lambda tensor, peer: self.recv(tensor, peer, stream),
            )

    def register_comm_window(self, tensor: Any) -> ctypes.c_void_p:
        """Make the tensors of all ranks a symmetric window; every rank calls it. Return its handle."""
        return self.register_comm_window_raw(*memory_of(tensor))

    def suspend(self) -> None:
        """Release the communicator's device memory until `resume`; no effect if repeated."""
        if not (self.disabled or self._suspended):
            self.communicator.suspend()
            self._suspended = True

    def resume(self) -> None:
        """Allocate the memory again that `suspend` released."""
        if not self.disabled and self._suspended:
            self.communicator.resume()
            self._suspended = False
