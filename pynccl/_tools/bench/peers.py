"""The libraries that --compare measures beside NCCL: one call of each, on memory of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import numpy as np

from pynccl._tools.bench.alltoallv import traffic
from pynccl._tools.bench.measure import Case
from pynccl._tools.bench.ranks import World

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

# torch.distributed has only this form of them, so that it is NCCL's and MPI's form here, too.
IN_PLACE = ("all_reduce", "broadcast", "reduce")


class Peer(Protocol):
    """One library on this rank."""

    name: ClassVar[str]
    # nccl-tests' names of the datatypes and reductions, and the library's.
    types: ClassVar[dict[str, str]]
    ops: ClassVar[dict[str, str]]
    rank: int

    def __init__(self, world: World) -> None: ...

    @property
    def version(self) -> str:
        """The library's version."""

    @classmethod
    def absent(cls) -> str | None:
        """Return why the library cannot be used on this machine."""

    def call(self, case: Case, send: Any, recv: Any) -> Call | None:
        """Return a call that waits for its result; None: the library has no such operation."""

    def lacks(self, error: Exception) -> bool:
        """Tell whether an error of a call says that the library has no such operation."""

    def place(self, data: Array, case: Case) -> Any:
        """Copy an array to this library's memory."""

    def read(self, buffer: Any, dtype: np.dtype[Any]) -> Array:
        """Return what a buffer holds."""

    def clear(self, buffer: Any) -> None:
        """Fill a buffer with zeros."""

    def close(self) -> None:
        """Leave the library's group."""


def _not_installed(module: str) -> str | None:
    """Return why a library, whose package has the name of its module, cannot be used."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed; install it, for example by pip install {module}"
    return None


def _has(peer: Peer, case: Case) -> bool:
    """Tell whether a library has the datatype and the reduction of a case."""
    return case.type_name in peer.types and (not case.operation.reduces or case.op in peer.ops)


def _sides(rank: int, size: int) -> tuple[int, int]:
    return (rank + 1) % size, (rank - 1) % size


def _shares(case: Case, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the elements that a rank sends to each rank, and receives from each, in alltoallv."""
    itemsize = case.shape.itemsize
    sent = traffic(size, case.counts.param * size * itemsize) // itemsize
    return sent[rank].tolist(), sent[:, rank].tolist()


# --- torch.distributed ---


class Gloo:
    """torch.distributed's gloo backend, on CPU tensors."""

    name: ClassVar[str] = "gloo"
    backend: ClassVar[str] = "gloo"
    types: ClassVar[dict[str, str]] = {
        "int8": "int8",
        "uint8": "uint8",
        "int32": "int32",
        "int64": "int64",
        "half": "float16",
        "float": "float32",
        "double": "float64",
        "bfloat16": "bfloat16",
    }
    ops: ClassVar[dict[str, str]] = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN"}
    device = "cpu"

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.control.rank, world.control.size
        self.torch: Any = importlib.import_module("torch")
        self.dist: Any = importlib.import_module("torch.distributed")
        self._owner = not self.dist.is_initialized()
        timeout = timedelta(seconds=world.settings.longest_wait)
        if self._owner:
            store = self._store(world)
            self.dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout
            )
        self.group = self.dist.new_group(backend=self.backend, timeout=timeout)

    def _store(self, world: World) -> Any:
        host = world.meeting_host()
        if host == "127.0.0.1":
            # Otherwise gloo resolves the name of the host, which a container may not be able to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        if self.rank == 0:
            store = self.dist.TCPStore(host, 0, self.size, True, wait_for_workers=False)
        port = int(world.texts(str(store.port) if store else "")[0])
        return store or self.dist.TCPStore(host, port, self.size, False, wait_for_workers=False)

    @property
    def version(self) -> str:
        """The library's version."""
        return f"torch {self.torch.__version__}"

    @classmethod
    def absent(cls) -> str | None:
        """Return why the library cannot be used on this machine."""
        return _not_installed("torch")

    def call(self, case: Case, send: Any, recv: Any) -> Call | None:
        """Return a call that waits for its result; None: the library has no such operation."""
        calls = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "alltoall": self._alltoall,
            "alltoallv": self._alltoallv,
            "scatter": self._scatter,
            "gather": self._gather,
            "sendrecv": self._sendrecv,
        }
        return calls[case.operation.name](case, send, recv) if _has(self, case) else None

    def lacks(self, error: Exception) -> bool:
        """Tell whether an error of a call says that the library has no such operation."""
        # Its errors have no codes, and differ by torch's versions.
        text = str(error).lower()
        return isinstance(error, NotImplementedError) or "support" in text or "implement" in text

    def place(self, data: Array, case: Case) -> Any:
        """Copy an array to a tensor."""
        dtype = getattr(self.torch, self.types.get(case.type_name, "uint8"))
        return self.torch.from_numpy(data.copy().view(np.uint8)).view(dtype).to(self.device)

    def read(self, buffer: Any, dtype: np.dtype[Any]) -> Array:
        """Return what a tensor holds."""
        found: Array = buffer.cpu().view(self.torch.uint8).numpy().view(dtype)
        return found

    def clear(self, buffer: Any) -> None:
        """Fill a tensor with zeros."""
        buffer.zero_()

    def close(self) -> None:
        """End torch.distributed's groups."""
        if self._owner:
            self.dist.destroy_process_group()

    def _waiting(self, function: Callable[..., Any], *args: Any, **more: Any) -> Call:
        return lambda: function(*args, **more, group=self.group)

    def _newest(self, *names: str) -> Callable[..., Any]:
        """Return the first of some functions that this torch has; the later names are older."""
        found: Callable[..., Any] = next(
            getattr(self.dist, name) for name in names if hasattr(self.dist, name)
        )
        return found

    def _op(self, case: Case) -> Any:
        return getattr(self.dist.ReduceOp, self.ops[case.op])

    def _all_reduce(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.all_reduce, recv, op=self._op(case))

    def _reduce(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.reduce, recv, case.root, op=self._op(case))

    def _broadcast(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.broadcast, recv, case.root)

    def _reduce_scatter(self, case: Case, send: Any, recv: Any) -> Call:
        function = self._newest("reduce_scatter_single", "reduce_scatter_tensor")
        return self._waiting(function, recv, send, op=self._op(case))

    def _all_gather(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self._newest("all_gather_single", "all_gather_into_tensor"), recv, send)

    def _alltoall(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.all_to_all_single, recv, send)

    def _alltoallv(self, case: Case, send: Any, recv: Any) -> Call:
        out, into = _shares(case, self.rank, self.size)
        function = self.dist.all_to_all_single
        return self._waiting(function, recv[: sum(into)], send[: sum(out)], into, out)

    def _scatter(self, case: Case, send: Any, recv: Any) -> Call:
        blocks = self._blocks(send) if self.rank == case.root else None
        return self._waiting(self.dist.scatter, recv, blocks, src=case.root)

    def _gather(self, case: Case, send: Any, recv: Any) -> Call:
        blocks = self._blocks(recv) if self.rank == case.root else None
        return self._waiting(self.dist.gather, send, blocks, dst=case.root)

    def _blocks(self, buffer: Any) -> list[Any]:
        return list(buffer.view(self.size, -1).unbind())

    def _sendrecv(self, case: Case, send: Any, recv: Any) -> Call:
        right, left = _sides(self.rank, self.size)
        both = [
            self.dist.P2POp(self.dist.isend, send, right, self.group),
            self.dist.P2POp(self.dist.irecv, recv, left, self.group),
        ]

        def call() -> None:
            for work in self.dist.batch_isend_irecv(both):
                work.wait()

        return call


class Torch(Gloo):
    """torch.distributed's nccl backend, on tensors of a GPU."""

    name, backend = "torch", "nccl"
    types: ClassVar[dict[str, str]] = {**Gloo.types, "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    ops: ClassVar[dict[str, str]] = {**Gloo.ops, "avg": "AVG"}

    def __init__(self, world: World) -> None:
        device = world.control.device
        self.device = f"cuda:{device}"
        importlib.import_module("torch").cuda.set_device(device)
        super().__init__(world)

    @classmethod
    def absent(cls) -> str | None:
        """Return why the library cannot be used on this machine."""
        missing = super().absent()
        if missing is not None:
            return missing
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return "torch finds no GPU on this machine; torch.distributed's nccl backend expects one"
        if not importlib.import_module("torch.distributed").is_nccl_available():
            return f"torch {torch.__version__} is built without NCCL"
        return None

    @property
    def version(self) -> str:
        """The library's version, and its NCCL's."""
        return f"{super().version} with NCCL {'.'.join(map(str, self.torch.cuda.nccl.version()))}"

    def call(self, case: Case, send: Any, recv: Any) -> Call | None:
        """Return a call that waits for its result; None: the library has no such operation."""
        start, stream = super().call(case, send, recv), self.torch.cuda.current_stream()

        def call() -> None:
            assert start is not None
            start()
            stream.synchronize()

        return None if start is None else call


# --- MPI ---


class Mpi:
    """MPI by mpi4py, with counts and datatypes given, on NumPy arrays."""

    name: ClassVar[str] = "mpi"
    types: ClassVar[dict[str, str]] = {
        "int8": "INT8_T",
        "uint8": "UINT8_T",
        "int32": "INT32_T",
        "uint32": "UINT32_T",
        "int64": "INT64_T",
        "uint64": "UINT64_T",
        "float": "FLOAT",
        "double": "DOUBLE",
    }
    ops: ClassVar[dict[str, str]] = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.control.rank, world.control.size
        try:
            self.mpi: Any = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            raise ValueError(f"--compare mpi: MPI cannot be initialised: {error}") from None
        self.comm: Any = self.mpi.COMM_WORLD
        if (self.comm.size, self.comm.rank) != (self.size, self.rank):
            raise ValueError(
                f"--compare mpi: this is rank {self.comm.rank} of {self.comm.size} of MPI's COMM_WORLD; "
                f"expected rank {self.rank} of {self.size}: start the ranks by mpirun, or by srun with its "
                "plugin for MPI"
            )

    @property
    def version(self) -> str:
        """The library's version."""
        return str(self.mpi.Get_library_version()).split(",")[0].strip().strip("\0")

    @classmethod
    def absent(cls) -> str | None:
        """Return why the library cannot be used on this machine."""
        return _not_installed("mpi4py")

    def call(self, case: Case, send: Any, recv: Any) -> Call | None:
        """Return a call that waits for its result; None: the library has no such operation."""
        calls = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "alltoall": self._alltoall,
            "alltoallv": self._alltoallv,
            "scatter": self._scatter,
            "gather": self._gather,
            "sendrecv": self._sendrecv,
        }
        return calls[case.operation.name](case, send, recv) if _has(self, case) else None

    def lacks(self, error: Exception) -> bool:
        """Tell whether an error of a call says that the library has no such operation."""
        unsupported = self.mpi.ERR_UNSUPPORTED_OPERATION
        known = isinstance(error, self.mpi.Exception) and error.Get_error_class() == unsupported
        return isinstance(error, NotImplementedError) or known

    def place(self, data: Array, case: Case) -> Array:
        """Copy an array."""
        return np.array(data)

    def read(self, buffer: Array, dtype: np.dtype[Any]) -> Array:
        """Return what a buffer holds."""
        return buffer

    def clear(self, buffer: Array) -> None:
        """Fill a buffer with zeros."""
        buffer.fill(0)

    def close(self) -> None:
        """Leave MPI running: mpi4py ends it with the process."""

    def _type(self, case: Case) -> Any:
        return getattr(self.mpi, self.types[case.type_name])

    def _op(self, case: Case) -> Any:
        return getattr(self.mpi, self.ops[case.op])

    def _all_reduce(self, case: Case, send: Array, recv: Array) -> Call:
        target, op = [recv, recv.size, self._type(case)], self._op(case)
        return lambda: self.comm.Allreduce(self.mpi.IN_PLACE, target, op)

    def _reduce(self, case: Case, send: Array, recv: Array) -> Call:
        here, op = [recv, recv.size, self._type(case)], self._op(case)
        sides = (self.mpi.IN_PLACE, here) if self.rank == case.root else (here, None)
        return lambda: self.comm.Reduce(*sides, op, case.root)

    def _broadcast(self, case: Case, send: Array, recv: Array) -> Call:
        here = [recv, recv.size, self._type(case)]
        return lambda: self.comm.Bcast(here, case.root)

    def _reduce_scatter(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        op = self._op(case)
        return lambda: self.comm.Reduce_scatter_block(source, target, op)

    def _all_gather(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Allgather(source, target)

    def _alltoall(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Alltoall(source, target)

    def _alltoallv(self, case: Case, send: Array, recv: Array) -> Call:
        (out, into), kind = _shares(case, self.rank, self.size), self._type(case)
        source, target = [send, out, kind], [recv, into, kind]
        return lambda: self.comm.Alltoallv(source, target)

    def _scatter(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Scatter(source if self.rank == case.root else None, target, case.root)

    def _gather(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Gather(source, target if self.rank == case.root else None, case.root)

    def _parts(self, case: Case, send: Array, recv: Array) -> tuple[list[Any], list[Any]]:
        """Return both buffers with the elements of one rank's part."""
        n, kind = case.counts.param, self._type(case)
        return [send, n, kind], [recv, n, kind]

    def _sendrecv(self, case: Case, send: Array, recv: Array) -> Call:
        (right, left), kind = _sides(self.rank, self.size), self._type(case)
        source, target = [send, send.size, kind], [recv, recv.size, kind]
        return lambda: self.comm.Sendrecv(source, right, 0, target, left, 0)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Gloo, Mpi, Torch)}
# A program of nccl-tests' own, and one that no peer has.
WITHOUT_PEERS = ("hypercube", "put_signal")
