"""The communicators that one group call creates: nccl-tests' initComms (src/common.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from pynccl import capi
from pynccl._comm import create
from pynccl._comm.communicator import Communicator, around
from pynccl._comm.core import Core
from pynccl._device.devices import on_device
from pynccl._errors import NcclError
from pynccl._trace import recorder
from pynccl._types import UniqueId


class GroupCall:
    """Some ranks of a communicator, from `first` on, which one thread creates in one group call.

    Their control channels wait for each other, so a thread for each rank calls `communicator`.
    """

    def __init__(
        self,
        unique_id: UniqueId,
        size: int,
        first: int,
        devices: Sequence[int],
        config: capi.Config | None,
        timeout: float | None,
    ) -> None:
        self._id, self._size, self._config = bytes(unique_id), size, config
        self._places = list(enumerate(devices, first))
        self._handles: Future[list[int]] = Future()
        self._cores = [self._core(rank, timeout) for rank, _ in self._places]

    def _core(self, rank: int, timeout: float | None) -> Core:
        core = Core(timeout)
        core.identity = recorder.numbered("id", self._id, rank=rank)
        recorder.open_trace(core.c, core.identity, rank, self._size, "init")
        return core

    def communicator(self, i: int) -> Communicator:
        """Return the i-th rank's communicator; the first makes the group call, and the others wait for it."""
        (rank, device), core = self._places[i], self._cores[i]
        what = f"creating the communicator of rank {rank} of {self._size}"
        create.create(core, what, lambda: self._handle(i), device)
        return around(core)

    def _handle(self, i: int) -> int:
        if i == 0:
            try:
                self._handles.set_result(self._create())
            except BaseException as error:
                self._handles.set_exception(error)
                raise
        elif cause := self._handles.exception():
            raise NcclError(f"the group call of rank {self._places[0][0]} failed: {cause}") from cause
        # NCCL may write them only at the end of the group.
        return int(self._handles.result()[i])

    def _create(self) -> list[int]:
        handles = []
        capi.ncclGroupStart()
        try:
            for rank, device in self._places:
                with on_device(device):
                    handles.append(create.init_rank(self._size, [self._id], rank, self._config))
        except BaseException:
            with suppress(NcclError):
                capi.ncclGroupEnd()
            raise
        capi.ncclGroupEnd()
        return handles
