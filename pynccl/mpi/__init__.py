"""An mpi4py-shaped communicator: NCCL for device arrays, MPI for everything else.

    comm = pynccl.mpi.Comm(MPI.COMM_WORLD)
    comm.Allreduce(x, y, op=MPI.SUM)      # x, y: CuPy arrays by NCCL, NumPy arrays by MPI

The methods have mpi4py's signatures and accept all forms of its buffer arguments: counts, displacements and
datatypes. On device arrays they use the current stream of the array's library, as CuPy's own
operations do: later work on this stream sees the result. With the CPU library, CuPy arrays and
other objects with `__cuda_array_interface__` also go through NCCL, and the call returns when the result is
complete. Features that NCCL lacks (tags, ANY_SOURCE, logical and user operations) raise NotSupportedError.

Imported by `pynccl`.
"""

from __future__ import annotations

# mpi4py's finder imports it where Python holds the lock of all imports, which another thread may wait for:
# https://github.com/mpi4py/mpi4py/blob/4.1.2/src/mpi4py/_mpiabi.py
import ctypes  # noqa: F401

import mpi4py

from pynccl.mpi._comm import Comm
from pynccl.mpi._requests import Prequest
from pynccl.mpi._win import Win

__all__ = ["Comm", "Prequest", "Win"]

if int(mpi4py.__version__.partition(".")[0]) < 4:
    raise ImportError(f"pynccl.mpi needs mpi4py 4 or newer; mpi4py {mpi4py.__version__} is installed")
