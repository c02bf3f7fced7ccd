"""The libraries under test. Each turns an operation's name into a closure: one call and its wait."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Call = Callable[[], object]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
# Those whose larger buffer has a part for each rank.
BY_PARTS = ("all_gather", "reduce_scatter", "all_to_all")
# The variable with the address of a rank's host, where the ranks have hosts of their own.
ADDRESS = "BENCHMARK_ADDRESS"
DDP_STEP, DDP_BYTES = "DDP step", 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)


class Peer:
    """One rank of one library. All get the same two NumPy buffers and are called from the same loop."""

    module: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {}
    # Options of mpirun, for those that it starts.
    mpirun: ClassVar[list[str] | None] = None

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.next, self.previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def offer(self) -> bytes:
        """What rank 0 tells the others so that they find each other."""
        return b""

    def connect(self, token: bytes) -> None:
        """Join the group that rank 0 offered."""

    def barrier(self) -> None:
        """Return when all ranks are here."""
        raise NotImplementedError

    def buffer(self, count: int) -> Array:
        """Return memory for the operations."""
        return np.zeros(count, np.float32)

    def prepare(self, op: str, send: Array, recv: Array) -> Call:
        """Return the closure for an operation; look-ups and conversions happen here, untimed."""
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        """Name every version that this peer's numbers depend on."""
        return {"Python": platform.python_version(), "NumPy": np.__version__}

    def close(self) -> None:
        """Leave the group."""


class Pynccl(Peer):
    """The CPU library by prepared calls, pynccl's fastest form."""

    module = "pynccl"
    environment: ClassVar[dict[str, str]] = {"PYNCCL_LIBRARY": "cpu", "PYNCCL_CPU_DIRECT": "1"}

    def __init__(self) -> None:
        super().__init__()
        self.pynccl: Any = importlib.import_module("pynccl")

    def offer(self) -> bytes:
        return bytes(self.pynccl.get_unique_id())

    def connect(self, token: bytes) -> None:
        self.comm = self.pynccl.Communicator(self.size, token, self.rank)

    def barrier(self) -> None:
        self.comm.barrier()

    def prepare(self, op: str, send: Array, recv: Array) -> Call:
        arguments = {"broadcast": (recv,), "send_recv": (send, self.next, recv, self.previous)}
        call: Call = getattr(self.comm.prepare, op)(*arguments.get(op, (send, recv)))
        return call

    def versions(self) -> dict[str, str]:
        info = self.pynccl.library_info()
        if info.backend != "cpu":
            raise RuntimeError(f"pynccl loaded the {info.backend} library, not the CPU library")
        library = ".".join(map(str, info.version))
        return {**super().versions(), "pynccl": self.pynccl.__version__, "CPU library's NCCL API": library}

    def close(self) -> None:
        self.comm.destroy()


class PyncclStaged(Pynccl):
    """The same, forbidden to read other processes' memory: everything is staged through shared memory."""

    environment: ClassVar[dict[str, str]] = {"PYNCCL_LIBRARY": "cpu", "PYNCCL_CPU_DIRECT": "0"}


class PyncclTCP(Pynccl):
    """Every rank says that it has a host of its own, so that all data go over TCP."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["NCCL_HOSTID"] = f"host-{self.rank}"


class PyncclWindow(Pynccl):
    """Direct reads are allowed, and all buffers lie in windows over memory of ncclMemAlloc."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Array] = []

    def buffer(self, count: int) -> Array:
        made: Array = self.pynccl.empty(count, np.float32)
        made.fill(0)
        self.buffers.append(made)
        return made

    def connect(self, token: bytes) -> None:
        super().connect(token)
        self.windows = [self.comm.window(buffer) for buffer in self.buffers]


class PyncclStagedWindow(PyncclWindow):
    """The same, forbidden to read other processes' memory: peers reach it by their mappings alone."""

    environment: ClassVar[dict[str, str]] = PyncclStaged.environment


class OpenMPI(Peer):
    """MPI through mpi4py's buffer interface, with count and datatype spelled out: its fastest form."""

    module = "mpi4py"
    mpirun: ClassVar[list[str] | None] = []

    def __init__(self) -> None:
        super().__init__()
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm: Any = self.mpi.COMM_WORLD

    def barrier(self) -> None:
        self.comm.Barrier()

    def prepare(self, op: str, send: Array, recv: Array) -> Call:
        comm = self.comm
        source, target = ([buf, buf.size, self.mpi.FLOAT] for buf in (send, recv))
        send_blocks, recv_blocks = [send, recv.size, self.mpi.FLOAT], [recv, send.size, self.mpi.FLOAT]
        shares = [[buf, buf.size // self.size, self.mpi.FLOAT] for buf in (send, recv)]
        to, by = self.next, self.previous
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(source, target),
            "all_gather": lambda: comm.Allgather(source, recv_blocks),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(send_blocks, target),
            "broadcast": lambda: comm.Bcast(target),
            "all_to_all": lambda: comm.Alltoall(*shares),
            "send_recv": lambda: comm.Sendrecv(source, to, 0, target, by, 0),
        }
        return calls[op]

    def versions(self) -> dict[str, str]:
        mpi4py: Any = importlib.import_module("mpi4py")
        library = self.mpi.Get_library_version().split(",")[0]
        return {**super().versions(), "mpi4py": mpi4py.__version__, "MPI": library}


class OpenMPIStaged(OpenMPI):
    """The same without single copy: everything is staged through shared memory."""

    mpirun: ClassVar[list[str] | None] = ["--mca", "smsc", "^cma"]


class OpenMPITCP(OpenMPI):
    """The same over TCP."""

    mpirun: ClassVar[list[str] | None] = ["--mca", "btl", "tcp,self"]


class Gloo(Peer):
    """torch.distributed's Gloo backend, on loopback or between hosts; its all_reduce exists only in place."""

    module = "torch"
    environment: ClassVar[dict[str, str]] = {"GLOO_SOCKET_IFNAME": "lo"}
    backend = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self.torch: Any = importlib.import_module("torch")
        self.dist: Any = importlib.import_module("torch.distributed")

    def offer(self) -> bytes:
        address = os.environ.get(ADDRESS, "127.0.0.1")
        self.store = self.dist.TCPStore(address, 0, self.size, True, wait_for_workers=False)
        return f"{address}:{self.store.port}".encode()

    def connect(self, token: bytes) -> None:
        if self.rank:
            address, _, port = token.decode().rpartition(":")
            self.store = self.dist.TCPStore(address, int(port), self.size, False, wait_for_workers=False)
        self.dist.init_process_group(self.backend, store=self.store, rank=self.rank, world_size=self.size)

    def barrier(self) -> None:
        self.dist.barrier()

    def prepare(self, op: str, send: Array, recv: Array) -> Call:
        dist, to, by = self.dist, self.next, self.previous
        source, target = self.torch.from_numpy(send), self.torch.from_numpy(recv)

        def send_recv() -> None:
            sending = dist.isend(source, to)
            dist.irecv(target, by).wait()
            sending.wait()

        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "all_gather": lambda: dist.all_gather_single(target, source),
            "reduce_scatter": lambda: dist.reduce_scatter_single(target, source),
            "broadcast": lambda: dist.broadcast(target, 0),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "send_recv": send_recv,
        }
        return self.ddp_step() if op == DDP_STEP else calls[op]

    def ddp_step(self) -> Call:
        """Return a training step of a small model: its gradients are DDP_BYTES."""
        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        parallel = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.rank))

        def call() -> None:
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()

        return call

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "torch": self.torch.__version__}

    def close(self) -> None:
        self.dist.destroy_process_group()


class TorchPynccl(Gloo):
    """torch.distributed's pynccl backend, called exactly as Gloo is."""

    environment: ClassVar[dict[str, str]] = {"PYNCCL_LIBRARY": "cpu"}
    backend = "pynccl"

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module("pynccl.torch")


PEERS: dict[str, type[Peer]] = {
    "pynccl": Pynccl,
    "pynccl-staged": PyncclStaged,
    "pynccl-tcp": PyncclTCP,
    "pynccl-window": PyncclWindow,
    "pynccl-staged-window": PyncclStagedWindow,
    "openmpi": OpenMPI,
    "openmpi-staged": OpenMPIStaged,
    "openmpi-tcp": OpenMPITCP,
    "gloo": Gloo,
    "torch-pynccl": TorchPynccl,
}
