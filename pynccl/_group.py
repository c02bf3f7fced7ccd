"""group(): calls recorded in the body, issued together at its end."""

from __future__ import annotations

from types import TracebackType

from pynccl import _library
from pynccl._binding import lib
from pynccl._errors import NcclInvalidUsage
from pynccl._fastcall import get_recording
from pynccl._recording import Recording
from pynccl._status import check
from pynccl._structs import SimInfo


class Group:
    """The calls of a `with` body as one group of NCCL's, issued by one call at its end.

    An exception in the body drops them all. Groups may be nested, and hold calls of several communicators.
    Results are there when the group has ended (host arrays), or when the streams get there.
    """

    def __init__(self, simulate: bool = False) -> None:
        self._simulate = simulate
        self._recording: Recording | None = None
        self._open = False
        self._estimate: float | None = None

    @property
    def estimated_microseconds(self) -> float:
        """How long NCCL expects the group to take, in microseconds; only after a simulated one."""
        if self._estimate is None:
            raise NcclInvalidUsage("there is no estimate: the group was not simulated, or has not ended")
        return self._estimate

    def __enter__(self) -> Group:
        if self._open:
            raise NcclInvalidUsage("this group is open already; call pynccl.group() for another one")
        _library.load()
        if self._simulate and get_recording() is not None:
            raise NcclInvalidUsage("simulate=True inside an open group; expected it on the outermost one")
        self._open = True
        # Inside a group, or while a call is prepared, the calls join what is being recorded.
        if get_recording() is None:
            self._recording = Recording()
            self._recording.calls.grouped = 1
            self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.__exit__()
        if kind is None:
            if self._simulate:
                self._estimate = _simulate(recording)
            else:
                recording.run()


def _simulate(recording: Recording) -> float:
    estimate = SimInfo().pack()
    result = lib.pynccl_list_simulate(recording.calls, estimate)
    if result:
        for comm in recording.communicators():
            comm._refuse(result)
        check(result, "ncclGroupSimulateEnd")
    # NCCL leaves -1 where there was nothing to do.
    return max(0.0, float(SimInfo.unpack(estimate).estimatedTime or 0.0))


def group(simulate: bool = False) -> Group:
    """Record the calls of a `with` body, and issue them as one group at its end; see Group.

    `simulate=True` issues nothing and asks NCCL (>= 2.22) how long the group would take:
    `estimated_microseconds` has the answer.
    """
    return Group(simulate)
