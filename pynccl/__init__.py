"""NCCL's C API from Python, on GPUs and, by the included CPU library, on any machine.

The public names. What they stand for lives in the rooms below, of which docs/architecture.md has a picture;
each room's docstring says what is in it. Imported by `_tools`, `compat`.
"""

__distribution__ = "pynccl-cffi"

import importlib as _importlib
import typing as _typing

from pynccl._base.installation import require_built as _require_built

# Before every other import: it may change the folder that they come from.
_require_built()

from pynccl._base.interrupts import interrupted_later as _interrupted_later
from pynccl._base.version import __version__ as __version__
from pynccl._run import ended_record as _ended_record
from pynccl._run import stack_requests as _stack_requests

if _typing.TYPE_CHECKING:
    from pynccl import allocators as allocators
    from pynccl import bootstrap as bootstrap
    from pynccl import capi as capi
    from pynccl import mpi as mpi
    from pynccl import testing as testing
    from pynccl import transfer as transfer
    from pynccl._arrays.buffers import Buffer as Buffer
    from pynccl._comm.communicator import Communicator as Communicator
    from pynccl._comm.communicator import init_all as init_all
    from pynccl._comm.groups import Group as Group
    from pynccl._comm.groups import group as group
    from pynccl._comm.metrics import CommunicatorMetrics as CommunicatorMetrics
    from pynccl._comm.metrics import OperationMetrics as OperationMetrics
    from pynccl._comm.metrics import metrics as metrics
    from pynccl._comm.prepared import Plan as Plan
    from pynccl._comm.prepared import Prepared as Prepared
    from pynccl._comm.reductions import PreMulSum as PreMulSum
    from pynccl._comm.work import Work as Work
    from pynccl._device.devices import array_module as array_module
    from pynccl._device.devices import current_device as current_device
    from pynccl._device.devices import device_count as device_count
    from pynccl._device.devices import set_device as set_device
    from pynccl._device.streams import Event as Event
    from pynccl._device.streams import Stream as Stream
    from pynccl._errors import BootstrapError as BootstrapError
    from pynccl._errors import CollectiveMismatchError as CollectiveMismatchError
    from pynccl._errors import LibraryNotFoundError as LibraryNotFoundError
    from pynccl._errors import NcclError as NcclError
    from pynccl._errors import NcclInternalError as NcclInternalError
    from pynccl._errors import NcclInvalidArgument as NcclInvalidArgument
    from pynccl._errors import NcclInvalidUsage as NcclInvalidUsage
    from pynccl._errors import NcclRemoteError as NcclRemoteError
    from pynccl._errors import NcclSystemError as NcclSystemError
    from pynccl._errors import NcclTimeoutError as NcclTimeoutError
    from pynccl._errors import NcclUnhandledCudaError as NcclUnhandledCudaError
    from pynccl._errors import NotSupportedError as NotSupportedError
    from pynccl._errors import RankFailedError as RankFailedError
    from pynccl._library.discovery import cpu_library as cpu_library
    from pynccl._library.generated.structs import CollConfig as CollConfig
    from pynccl._library.generated.structs import CommProperties as CommProperties
    from pynccl._library.generated.structs import Config as Config
    from pynccl._library.generated.structs import SimInfo as SimInfo
    from pynccl._library.loader import LibraryInfo as LibraryInfo
    from pynccl._library.loader import get_version as get_version
    from pynccl._library.loader import library_info as library_info
    from pynccl._library.loader import load as load
    from pynccl._memory.creation import empty as empty
    from pynccl._memory.creation import zeros as zeros
    from pynccl._memory.registration import Registration as Registration
    from pynccl._memory.statistics import MemoryStats as MemoryStats
    from pynccl._memory.window import Window as Window
    from pynccl._trace.recorder import TraceRecord as TraceRecord
    from pynccl._trace.recorder import dump_trace as dump_trace
    from pynccl._types import DataType as DataType
    from pynccl._types import RedOp as RedOp
    from pynccl._types import UniqueId as UniqueId
    from pynccl._types import get_unique_id as get_unique_id
    from pynccl._watch.check_mode import check_mode as check_mode
    from pynccl.bootstrap._init import init as init

_stack_requests.listen()
_ended_record.listen()

# Where the public names live: a module is imported at the first access to one of its names.
_PLACES = {
    "_arrays.buffers": ["Buffer"],
    "_comm.communicator": ["Communicator", "init_all"],
    "_comm.groups": ["Group", "group"],
    "_comm.metrics": ["CommunicatorMetrics", "OperationMetrics", "metrics"],
    "_comm.prepared": ["Plan", "Prepared"],
    "_comm.reductions": ["PreMulSum"],
    "_comm.work": ["Work"],
    "_device.devices": ["array_module", "current_device", "device_count", "set_device"],
    "_device.streams": ["Event", "Stream"],
    "_errors": [
        "BootstrapError",
        "CollectiveMismatchError",
        "LibraryNotFoundError",
        "NcclError",
        "NcclInternalError",
        "NcclInvalidArgument",
        "NcclInvalidUsage",
        "NcclRemoteError",
        "NcclSystemError",
        "NcclTimeoutError",
        "NcclUnhandledCudaError",
        "NotSupportedError",
        "RankFailedError",
    ],
    "_library.discovery": ["cpu_library"],
    "_library.generated.structs": ["CollConfig", "CommProperties", "Config", "SimInfo"],
    "_library.loader": ["LibraryInfo", "get_version", "library_info", "load"],
    "_memory.creation": ["empty", "zeros"],
    "_memory.registration": ["Registration"],
    "_memory.statistics": ["MemoryStats"],
    "_memory.window": ["Window"],
    "_trace.recorder": ["TraceRecord", "dump_trace"],
    "_types": ["DataType", "RedOp", "UniqueId", "get_unique_id"],
    "_watch.check_mode": ["check_mode"],
    "bootstrap._init": ["init"],
}
_PLACE = {name: f"pynccl.{module}" for module, names in _PLACES.items() for name in names}

__all__ = sorted([*_PLACE, "__version__"])


# Modules that `pynccl.<name>` imports at the first access.
_MODULES = ("allocators", "bootstrap", "capi", "mpi", "testing", "transfer")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _imported(module: str) -> object:
    # Python drops a KeyboardInterrupt in the callbacks of its import system.
    with _interrupted_later():
        return _importlib.import_module(module)


# mypy must see wrong names.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if place := _PLACE.get(name):
            value = globals()[name] = getattr(_imported(place), name)
            return value
        if name in _MODULES:
            return _imported(f"pynccl.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")


# Names of other libraries' modules that are no communicator's.
_OTHER_NAMES = {
    "COMM_WORLD": "init()",
    "Comm": "Communicator",
    "NcclCommunicator": "Communicator",
    "ReduceOp": "RedOp",
    "empty_like": "empty(array.shape, like=array)",
    "init_process_group": "init",
    "zeros_like": "zeros(array.shape, like=array)",
}
# Subpackages that their import statement loads, and not their name: they need more than pynccl.
_IMPORTED = ("compat", "ras", "ray", "torch")


def _error_name(name: str) -> str:
    """Return "timeout" for NcclTimeoutError, NcclTimeout and TimeoutError; "" for NcclError."""
    return name.lower().replace("nccl", "", 1).removesuffix("error")


def _meant(name: str) -> str:
    """Return a hint with pynccl's name for what other libraries' modules call so."""
    if name.startswith("_"):
        return ""
    if name in _IMPORTED:
        return f": import pynccl.{name}"
    from pynccl._base.hints import meant
    from pynccl._comm.communicator import Communicator
    from pynccl._types import DataType, RedOp

    for codes in (RedOp, DataType):
        if name.upper() in codes.__members__:
            return f"; pynccl's name is {codes.__name__}.{name.upper()}"
    if name.startswith("nccl"):
        from pynccl import capi

        if hasattr(capi, name):
            return f"; pynccl's name is capi.{name}"
    for error in (each for each in __all__ if each.endswith("Error") and name[0].isupper()):
        if _error_name(error) == _error_name(name):
            return f"; pynccl's name is {error}"
    if name in _OTHER_NAMES:
        return f"; pynccl's name is {_OTHER_NAMES[name]}"
    ours = meant(Communicator, name) or ""
    if ours.startswith("pynccl."):
        return f"; pynccl's name is {ours}"
    return f"; a communicator has it: pynccl.init().{ours}" if ours else ""
