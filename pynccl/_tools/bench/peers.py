"""The libraries that --compare measures beside NCCL: one call of each, on memory of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np

from pynccl._tools.bench.alltoallv import traffic
from pynccl._tools.bench.measure import Case
from pynccl._tools.bench.ranks import World

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

# torch.distributed has only this form of them, so that it is NCCL's and MPI's form here, too.
IN_PLACE = ("all_reduce", "broadcast", "reduce")


class Peer:
    """One library on this rank."""

    name: ClassVar[str]
    module: ClassVar[str]
    # The package's name in `pip install`.
    package: ClassVar[str]
    # nccl-tests' names of the datatypes and reductions, and the library's.
    types: ClassVar[dict[str, str]]
    ops: ClassVar[dict[str, str]]

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.control.rank, world.control.size

    @property
    def version(self) -> str:
        """The library's version."""
        raise NotImplementedError

    @classmethod
    def absent(cls) -> str | None:
        """Return why the library cannot be used on this machine."""
        if importlib.util.find_spec(cls.module) is None:
            return f"{cls.module} is not installed; expected it, as by pip install {cls.package}"
        return None

    def call(self, case: Case, send: Any, recv: Any) -> Call | None:
        """Return a call that waits for its result; None: the library has no such operation."""
        if case.type_name not in self.types or (case.operation.reduces and case.op not in self.ops):
            return None
        # A method has the name of its program.
        method: Callable[..., Call] = getattr(self, case.operation.name)
        return method(case, send, recv)

    def place(self, data: Array, case: Case) -> Any:
        """Copy an array to this library's memory."""
        raise NotImplementedError

    def read(self, buffer: Any, dtype: np.dtype[Any]) -> Array:
        """Return what a buffer holds."""
        raise NotImplementedError

    def clear(self, buffer: Any) -> None:
        """Fill a buffer with zeros."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the library's group."""

    def _sides(self) -> tuple[int, int]:
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def _shares(self, case: Case) -> tuple[list[int], list[int]]:
        """Return the elements that this rank sends to each rank, and receives from each, in alltoallv."""
        itemsize = case.shape.itemsize
        sent = traffic(self.size, case.counts.param * self.size * itemsize) // itemsize
        return sent[self.rank].tolist(), sent[:, self.rank].tolist()


# --- torch.distributed ---


class Gloo(Peer):
    """torch.distributed's gloo backend, on CPU tensors."""

    name, module, package = "gloo", "torch", "torch"
    backend: ClassVar[str] = "gloo"
    types: ClassVar = {
        "int8": "int8",
        "uint8": "uint8",
        "int32": "int32",
        "int64": "int64",
        "half": "float16",
        "float": "float32",
        "double": "float64",
        "bfloat16": "bfloat16",
    }
    ops: ClassVar = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN"}
    device = "cpu"

    def __init__(self, world: World) -> None:
        super().__init__(world)
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

    def all_reduce(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.all_reduce, recv, op=self._op(case))

    def reduce(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.reduce, recv, case.root, op=self._op(case))

    def broadcast(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.broadcast, recv, case.root)

    def reduce_scatter(self, case: Case, send: Any, recv: Any) -> Call:
        function = self._newest("reduce_scatter_single", "reduce_scatter_tensor")
        return self._waiting(function, recv, send, op=self._op(case))

    def all_gather(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self._newest("all_gather_single", "all_gather_into_tensor"), recv, send)

    def alltoall(self, case: Case, send: Any, recv: Any) -> Call:
        return self._waiting(self.dist.all_to_all_single, recv, send)

    def alltoallv(self, case: Case, send: Any, recv: Any) -> Call:
        out, into = self._shares(case)
        function = self.dist.all_to_all_single
        return self._waiting(function, recv[: sum(into)], send[: sum(out)], into, out)

    def scatter(self, case: Case, send: Any, recv: Any) -> Call:
        blocks = self._blocks(send) if self.rank == case.root else None
        return self._waiting(self.dist.scatter, recv, blocks, src=case.root)

    def gather(self, case: Case, send: Any, recv: Any) -> Call:
        blocks = self._blocks(recv) if self.rank == case.root else None
        return self._waiting(self.dist.gather, send, blocks, dst=case.root)

    def _blocks(self, buffer: Any) -> list[Any]:
        return list(buffer.view(self.size, -1).unbind())

    def sendrecv(self, case: Case, send: Any, recv: Any) -> Call:
        right, left = self._sides()
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
    types: ClassVar = {**Gloo.types, "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    ops: ClassVar = {**Gloo.ops, "avg": "AVG"}

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


class Mpi(Peer):
    """MPI by mpi4py, with counts and datatypes given, on NumPy arrays."""

    name, module, package = "mpi", "mpi4py", "mpi4py"
    types: ClassVar = {
        "int8": "INT8_T",
        "uint8": "UINT8_T",
        "int32": "INT32_T",
        "uint32": "UINT32_T",
        "int64": "INT64_T",
        "uint64": "UINT64_T",
        "float": "FLOAT",
        "double": "DOUBLE",
    }
    ops: ClassVar = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}

    def __init__(self, world: World) -> None:
        super().__init__(world)
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

    def place(self, data: Array, case: Case) -> Array:
        """Copy an array."""
        return np.array(data)

    def read(self, buffer: Array, dtype: np.dtype[Any]) -> Array:
        """Return what a buffer holds."""
        return buffer

    def clear(self, buffer: Array) -> None:
        """Fill a buffer with zeros."""
        buffer.fill(0)

    def _type(self, case: Case) -> Any:
        return getattr(self.mpi, self.types[case.type_name])

    def _op(self, case: Case) -> Any:
        return getattr(self.mpi, self.ops[case.op])

    def all_reduce(self, case: Case, send: Array, recv: Array) -> Call:
        target, op = [recv, recv.size, self._type(case)], self._op(case)
        return lambda: self.comm.Allreduce(self.mpi.IN_PLACE, target, op)

    def reduce(self, case: Case, send: Array, recv: Array) -> Call:
        here, op = [recv, recv.size, self._type(case)], self._op(case)
        sides = (self.mpi.IN_PLACE, here) if self.rank == case.root else (here, None)
        return lambda: self.comm.Reduce(*sides, op, case.root)

    def broadcast(self, case: Case, send: Array, recv: Array) -> Call:
        here = [recv, recv.size, self._type(case)]
        return lambda: self.comm.Bcast(here, case.root)

    def reduce_scatter(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        op = self._op(case)
        return lambda: self.comm.Reduce_scatter_block(source, target, op)

    def all_gather(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Allgather(source, target)

    def alltoall(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Alltoall(source, target)

    def alltoallv(self, case: Case, send: Array, recv: Array) -> Call:
        (out, into), kind = self._shares(case), self._type(case)
        source, target = [send, out, kind], [recv, into, kind]
        return lambda: self.comm.Alltoallv(source, target)

    def scatter(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Scatter(source if self.rank == case.root else None, target, case.root)

    def gather(self, case: Case, send: Array, recv: Array) -> Call:
        source, target = self._parts(case, send, recv)
        return lambda: self.comm.Gather(source, target if self.rank == case.root else None, case.root)

    def _parts(self, case: Case, send: Array, recv: Array) -> tuple[list[Any], list[Any]]:
        """Return both buffers with the elements of one rank's part."""
        n, kind = case.counts.param, self._type(case)
        return [send, n, kind], [recv, n, kind]

    def sendrecv(self, case: Case, send: Array, recv: Array) -> Call:
        (right, left), kind = self._sides(), self._type(case)
        source, target = [send, send.size, kind], [recv, recv.size, kind]
        return lambda: self.comm.Sendrecv(source, right, 0, target, left, 0)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Gloo, Mpi, Torch)}
# A program of nccl-tests' own, and one that no peer has.
WITHOUT_PEERS = ("hypercube", "put_signal")
