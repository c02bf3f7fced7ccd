"""A forked child that ends by sys.exit, with all that Python does then, while its parent's groups go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conftest import Run

# What every program does: fork at the worst time, and see how the child ended before it goes on.
FORK = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")

def fork(child):
    pid = os.fork()
    if not pid:
        child()
        sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 3, code
"""

PLAIN = """
import numpy as np
import pynccl
comm = pynccl.init(timeout=20)
half = comm.split(comm.rank % 2)
x = np.ones(4, np.float32)
comm.all_reduce(x)
plan = comm.prepare.all_reduce(x)

def child():
    try:
        comm.all_reduce(x)
    except pynccl.NcclError as error:
        assert "forked" in str(error), error
    else:
        raise AssertionError("a child used its parent's communicator")

for _ in range(3):
    fork(child)
    plan()
    half.barrier()
    comm.barrier()
with pynccl.Stream() as stream:
    # With an operation in flight, too.
    comm.all_reduce(x, stream=stream)
    fork(lambda: None)
    comm.synchronize()
with comm, half, pynccl.Event():
    fork(lambda: None)
    plan()
print("well", flush=True)
"""

STORE = """
from pynccl.bootstrap import Store, StoreServer
server = StoreServer(secret="a secret of some length", timeout=20)
store = Store(server.address, server.secret, timeout=20)
store.will("lost", b"the parent has died")

def child():
    assert store.get("key") == b"value"
    store.set("from the child", b"1")

store.set("key", b"value")
for _ in range(3):
    waiter = threading.Thread(target=store.barrier, args=("both", 2))
    waiter.start()
    other = Store(server.address, server.secret, timeout=20)
    fork(child)
    other.barrier("both", 2)
    waiter.join()
    assert store.get("from the child") == b"1"
    other.close()
time.sleep(1)
try:
    store.get("lost", 0)
except TimeoutError:
    print("well", flush=True)
store.close()
server.close()
"""

TORCH = """
from datetime import timedelta
import torch
import torch.distributed as dist
import pynccl.torch
# Longer than the launcher waits, which then shows where the ranks are.
dist.init_process_group("pynccl", timeout=timedelta(seconds=200))
rank = dist.get_rank()

def total():
    x = torch.ones(4)
    dist.all_reduce(x)
    return x[0].item()

assert total() == 2
half = dist.new_group([0, 1])
called = []
# The thread that runs callbacks is there when the child is made, and so are operations under way.
dist.all_reduce(torch.ones(4), async_op=True).get_future().then(called.append).wait()
pending = dist.irecv(torch.ones(3), 1) if rank == 0 else None

def uses():
    try:
        total()
    except RuntimeError as error:
        assert "belongs to the parent of this forked process" in str(error), error
    else:
        raise AssertionError("a child used its parent's group")

def waits():
    if pending is not None:
        try:
            pending.wait()
        except RuntimeError as error:
            assert "belongs to the parent of this forked process" in str(error), error
        else:
            raise AssertionError("a child waited for its parent's message")

for child in (lambda: None, uses, waits, dist.destroy_process_group):
    fork(child)
    assert total() == 2
if rank == 1:
    dist.send(torch.ones(3), 0)
else:
    pending.wait()
assert total() == 2
dist.destroy_process_group()
print("well", flush=True)
"""


@pytest.fixture
def run_ranks(run_program: Run) -> Callable[[str, int], None]:
    def run_ranks(program: str, nranks: int) -> None:
        done = run_program(FORK + program, nranks, options=["--timeout", "80"])
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("well") == nranks, done.stdout
        assert done.stderr == ""

    return run_ranks


def test_communicators(run_ranks: Callable[[str, int], None]) -> None:
    run_ranks(PLAIN, 2)


def test_the_store(run_ranks: Callable[[str, int], None]) -> None:
    run_ranks(STORE, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_backend")
def test_the_torch_backend(run_ranks: Callable[[str, int], None]) -> None:
    run_ranks(TORCH, 2)


def test_a_childs_own_communicator(run_ranks: Callable[[str, int], None]) -> None:
    run_ranks(
        """
import numpy as np
import pynccl
comm = pynccl.Communicator(1, pynccl.get_unique_id(), 0)

def child():
    own = pynccl.Communicator(1, pynccl.get_unique_id(), 0)
    assert own.all_reduce(np.ones(3))[0] == 1

fork(child)
comm.all_reduce(np.ones(3))
comm.destroy()
print("well", flush=True)
""",
        1,
    )
