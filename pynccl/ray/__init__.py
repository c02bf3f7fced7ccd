"""pynccl in Ray: a backend of ray.util.collective, communicators for Compiled Graphs, a tensor transport.

Importing this module registers the backend "pynccl"; then
`ray.util.collective.init_collective_group(..., backend="pynccl")`.

Imported by no other room.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import ray

with warnings.catch_warnings():
    # CuPy's, which Ray imports, where there is no libnccl.
    warnings.filterwarnings("ignore", r"\s*nccl library could not be loaded", UserWarning)
    if find_spec("ray.util.collective.backend_registry") is None:
        raise ImportError(
            f"Ray {ray.__version__} is installed; expected one whose collectives take backends, such as 2.60"
        )
    from pynccl.ray._group import BACKEND, Group, communicator, register, shrink

if TYPE_CHECKING:
    from pynccl.ray._graph import DeviceCommunicator, HostCommunicator, register_graphs
    from pynccl.ray._transport import TensorTransport, register_transport

__all__ = [
    "BACKEND",
    "DeviceCommunicator",
    "Group",
    "HostCommunicator",
    "TensorTransport",
    "communicator",
    "register",
    "register_graphs",
    "register_transport",
    "shrink",
]

# Imported late, since they import more of Ray, and torch.
_LATE = {
    "DeviceCommunicator": "_graph",
    "HostCommunicator": "_graph",
    "register_graphs": "_graph",
    "TensorTransport": "_transport",
    "register_transport": "_transport",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)


register()
