"""group(): calls recorded in a `with` body and issued together at its end."""

from __future__ import annotations

from types import TracebackType

from pynccl._base.values import refuse_copy, shown
from pynccl._comm.recording import Recording
from pynccl._errors import NcclInvalidUsage
from pynccl._library import loader
from pynccl._library.binding import fastcall, lib
from pynccl._library.generated.structs import SimInfo
from pynccl._library.status import check

end = fastcall.end

# Empty recordings for reuse.
_spare: list[Recording] = []


class Group:
    """The calls of a `with` body as one NCCL group, issued by one call at the end of the body.

    An exception in the body drops all calls. Groups may be nested and may hold calls of several
    communicators. Only the outermost counts: an exception that leaves only an inner body drops nothing.
    Results in host arrays are complete when the group has ended, results in device arrays when their streams
    have completed. With `simulate=True` (NCCL >= 2.22) nothing is issued, and `estimated_microseconds`
    returns NCCL's estimate of the group's duration.

    The end of the body raises the NcclError of the call that failed; see Communicator.all_reduce.
    """

    _simulate = False
    _recording: Recording | None = None
    _open: fastcall.Open | None = None
    _estimate: float | None = None

    __reduce__ = refuse_copy

    @property
    def estimated_microseconds(self) -> float:
        """NCCL's estimate of the group's duration in microseconds.

        Raises NcclInvalidUsage before the group has ended, or without `simulate=True`.
        """
        if self._estimate is None:
            raise NcclInvalidUsage("there is no estimate: expected a group(simulate=True) that has ended")
        return self._estimate

    def __enter__(self) -> Group:
        if self._recording is not None:
            raise NcclInvalidUsage("this group is open already; call pynccl.group() for another one")
        recording = _spare.pop() if _spare else _new_recording()
        self._open = recording.begin(nested=False)
        if self._open is not None:
            self._recording = recording
            return self
        # Inside a group or a prepare, the outer recording takes the calls.
        _spare.append(recording)
        if self._simulate:
            raise NcclInvalidUsage("simulate=True inside an open group; expected it on the outermost one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recording, opened = self._recording, self._open
        if recording is None or opened is None:
            return
        runs = kind is None and not self._simulate
        try:
            result = end(runs, opened, recording.kept)
            self._recording = self._open = None
            if runs and not result:
                _spare.append(recording)
            elif runs:
                recording.finish(result)
            elif kind is None:
                self._estimate = _simulate(recording)
        except BaseException:
            recording.let_go()
            raise


def _new_recording() -> Recording:
    if loader.loaded() is None:
        loader.load()
    recording = Recording()
    recording.calls.grouped = 1
    return recording


def _simulate(recording: Recording) -> float:
    estimate = SimInfo().pack()
    result = lib.pynccl_list_simulate(recording.calls, estimate)
    if result:
        for core in recording.cores():
            core.refuse(result)
        check(result, "ncclGroupSimulateEnd")
    # NCCL returns -1 for an empty group.
    return max(0.0, float(SimInfo.unpack(estimate).estimatedTime or 0.0))


def group(simulate: bool = False) -> Group:
    """Record the calls of a `with` body and issue them as one group at its end; see Group.

    Raises NcclInvalidUsage for `simulate=True` inside another group.
    """
    made = Group()
    # Every group passes here.
    if simulate is not False:
        if simulate is not True:
            raise TypeError(f"simulate is {shown(simulate)}; expected True or False")
        made._simulate = True
    return made
