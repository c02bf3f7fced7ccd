"""The functions around device communicators: what they must have, their creation, and their memory.

A device communicator is a struct whose layout belongs to a version of NCCL. Kernels of that version read it;
here it is only bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pynccl._base.values import shown
from pynccl._errors import NotSupportedError
from pynccl._library import loader
from pynccl._library.binding import address_of, ffi, lib
from pynccl._library.fields import pack
from pynccl._library.generated.structs import DevCommRequirements, Team
from pynccl._library.loader import functions, version_text
from pynccl._library.status import NOT_FOUND, check

__all__ = [
    "DevComm",
    "DevCommRequirements",
    "Requirement",
    "TeamRequirement",
    "ncclDevCommCreate",
    "ncclDevCommDestroy",
    "ncclGetCftDeviceLeInfo",
    "ncclGetMultimemDeviceLeInfo",
    "ncclGetMultimemDevicePointer",
    "ncclGetPeerDeviceLeInfo",
    "ncclGinBarrierCreateRequirement",
    "ncclGinInboxA2ACreateRequirement",
    "ncclGinOutboxCreateRequirement",
    "ncclLLA2ACreateRequirement",
    "ncclLsaBarrierCreateRequirement",
]

# More than ncclDevComm has in any version so far; from 2.31 on the library tells.
_DEV_COMM_BYTES = 4096


class Requirement:
    """Something that a device communicator must have, from a function named CreateRequirement."""

    def __init__(self, handle: str) -> None:
        self._handle = ffi.new(f"{handle}*")
        self.cell = ffi.new("ncclDevResourceRequirements_t*")

    @property
    def handle(self) -> dict[str, int]:
        """The fields of NCCL's handle, for kernels; complete once the device communicator is made."""
        return {name: int(getattr(self._handle, name)) for name, _ in ffi.typeof(self._handle[0]).fields}

    @property
    def size(self) -> int:
        """The bytes of memory that it needs on every rank."""
        return int(self.cell.bufferSize)


class TeamRequirement:
    """A team whose ranks a device communicator connects, by multicast memory if `multimem`."""

    def __init__(self, team: Team, multimem: bool = False) -> None:
        self._handle = ffi.new("ncclMultimemHandle_t*")
        self.cell = ffi.new("ncclTeamRequirements_t*")
        self.cell.team, self.cell.multimem = tuple(team), multimem
        self.cell.outMultimemHandle = self._handle

    @property
    def multimem(self) -> int:
        """The base of the multicast memory, for ncclGetMultimemDevicePointer; 0 without it."""
        return int(ffi.cast("uintptr_t", self._handle.mcBasePtr))


class DevComm:
    """An ncclDevComm_t in host memory, to be passed to kernels by value."""

    def __init__(self, kept: Any) -> None:
        self._memory, self._kept = ffi.new("char[]", _DEV_COMM_BYTES), kept

    @property
    def ptr(self) -> int:
        """The address of the struct."""
        return address_of(self._memory)

    @property
    def cell(self) -> Any:
        """The struct, for cffi."""
        return ffi.cast("ncclDevComm_t*", self._memory)


def _linked(requirements: Sequence[Requirement] | Sequence[TeamRequirement]) -> Any:
    """Link requirements to a list of NCCL's; return its first one, or NULL."""
    cells = [requirement.cell for requirement in requirements]
    for cell, following in zip(cells, [*cells[1:], ffi.NULL], strict=False):
        cell.next = following
    return cells[0] if cells else ffi.NULL


def ncclDevCommCreate(
    comm: int,
    reqs: DevCommRequirements | Mapping[str, Any] | None = None,
    resources: Sequence[Requirement] = (),
    teams: Sequence[TeamRequirement] = (),
) -> DevComm:
    """Take the requirements' lists as `resources` and `teams`."""
    version = loader.get_version()
    if not lib.nccl_api_find(b"ncclDevCommCreate"):
        check(NOT_FOUND, "ncclDevCommCreate")
    if version < DevCommRequirements.oldest:
        raise NotSupportedError(
            f"ncclDevCommCreate: ncclDevCommRequirements_t has no version before NCCL "
            f"{version_text(DevCommRequirements.oldest)}; loaded {version_text(version)}",
            function="ncclDevCommCreate",
        )
    cell = pack(DevCommRequirements, DevCommRequirements() if reqs is None else reqs)
    cell.resourceRequirementsList, cell.teamRequirementsList = _linked(resources), _linked(teams)
    made = DevComm((cell, resources, teams))
    if r := functions.ncclDevCommCreate(comm, cell, made.cell):
        check(r, "ncclDevCommCreate", comm)
    return made


def ncclDevCommDestroy(comm: int, devComm: DevComm) -> int:
    if not isinstance(devComm, DevComm):
        raise TypeError(f"devComm is {shown(devComm)}; expected a result of ncclDevCommCreate")
    r: int = functions.ncclDevCommDestroy(comm, devComm.cell)
    if r:
        check(r, "ncclDevCommDestroy", comm)
    return r


def _team(team: Team) -> Any:
    return ffi.new("ncclTeam_t*", team)[0]


def _required(name: str, handle: str, *arguments: Any, comm: int = 0) -> Requirement:
    made = Requirement(handle)
    if r := getattr(functions, name)(*arguments, made._handle, made.cell):
        check(r, name, comm)
    return made


def ncclLsaBarrierCreateRequirement(team: Team, nBarriers: int) -> Requirement:
    return _required("ncclLsaBarrierCreateRequirement", "ncclLsaBarrierHandle_t", _team(team), nBarriers)


def ncclGinBarrierCreateRequirement(comm: int, team: Team, nBarriers: int) -> Requirement:
    handle = "ncclGinBarrierHandle_t"
    return _required("ncclGinBarrierCreateRequirement", handle, comm, _team(team), nBarriers, comm=comm)


def ncclLLA2ACreateRequirement(nBlocks: int, nSlots: int) -> Requirement:
    return _required("ncclLLA2ACreateRequirement", "ncclLLA2AHandle_t", nBlocks, nSlots)


def ncclGinOutboxCreateRequirement(nBlocks: int, size_log2: int) -> Requirement:
    return _required("ncclGinOutboxCreateRequirement", "ncclGinOutboxHandle", nBlocks, size_log2)


def ncclGinInboxA2ACreateRequirement(peers: Team, nBlocks: int, size_log2: int) -> Requirement:
    handle = "ncclGinInboxA2AHandle"
    return _required("ncclGinInboxA2ACreateRequirement", handle, _team(peers), nBlocks, size_log2)


def ncclGetMultimemDevicePointer(window: int, offset: int, multimem: int) -> int:
    """Take the handle as its base address, TeamRequirement.multimem."""
    out = ffi.new("uintptr_t*")
    handle = ffi.new("ncclMultimemHandle_t*", (ffi.cast("void*", multimem),))[0]
    if r := functions.ncclGetMultimemDevicePointer(window, offset, handle, out):
        check(r, "ncclGetMultimemDevicePointer")
    return int(out[0])


def _le_info(name: str, *arguments: Any) -> tuple[int, int]:
    le, offset = ffi.new("ncclCftLeId*"), ffi.new("size_t*")
    if r := getattr(functions, name)(*arguments, le, offset):
        check(r, name)
    return int(le[0]), int(offset[0])


def ncclGetMultimemDeviceLeInfo(window: int, offset: int) -> tuple[int, int]:
    """Return leId and leOffset."""
    return _le_info("ncclGetMultimemDeviceLeInfo", window, offset)


def ncclGetCftDeviceLeInfo(window: int, offset: int, peerCft: int, cftTeam: Team) -> tuple[int, int]:
    """Return leId and leOffset."""
    return _le_info("ncclGetCftDeviceLeInfo", window, offset, peerCft, _team(cftTeam))


def ncclGetPeerDeviceLeInfo(window: int, offset: int, peerWorld: int) -> tuple[int, int]:
    """Return leId and leOffset."""
    return _le_info("ncclGetPeerDeviceLeInfo", window, offset, peerWorld)
