"""nccl4py over the CPU library, preloaded in place of NVIDIA's: its bindings, and its examples as released.

What the examples need of CUDA is host_cuda.py's.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from clients_page import rows
from conftest import ROOT, clean_environment
from engines import environment, open_mpi
from processes import completed, piped
from pynccl import cpu_library
from released_files import cached

FORWARD = str(Path(cpu_library()).parent / "forward" / "libnccl.so.2")

RANK = """
import ctypes, os, sys, time
import numpy as np
import nccl.bindings.nccl as nccl

rank, folder = int(sys.argv[1]), sys.argv[2]
path = f"{folder}/id"
if rank == 0:
    uid = nccl.get_unique_id()
    with open(path + ".new", "wb") as file:
        file.write(ctypes.string_at(uid.ptr, 128))
    os.rename(path + ".new", path)
while not os.path.exists(path):
    time.sleep(0.01)
data = np.fromfile(path, np.uint8)
comm = nccl.comm_init_rank(2, nccl.UniqueId.from_ptr(data.ctypes.data), rank)

pointer, peer = nccl.mem_alloc(4096), 1 - rank
memory = np.frombuffer((ctypes.c_char * 4096).from_address(pointer), np.float32)
memory[:] = 0
window = nccl.comm_window_register(comm, pointer, 4096, 1)  # NCCL_WIN_COLL_SYMMETRIC
wait = nccl.WaitSignalDesc()
for turn in range(1, 4):
    out = np.full(10, 10 * rank + turn, np.float32)
    nccl.put_signal(out.ctypes.data, 10, 7, peer, window, 40, 0, 0, 0, comm, 0)
    wait.op_cnt, wait.peer, wait.sig_idx, wait.ctx = 1, peer, 0, 0
    nccl.wait_signal(1, wait, comm, 0)
    assert (memory[10:20] == 10 * peer + turn).all() and memory.sum() == 10 * (10 * peer + turn), memory
    nccl.signal(peer, 1, 0, 0, comm, 0)
    wait.sig_idx = 1
    nccl.wait_signal(1, wait, comm, 0)
theirs = nccl.get_peer_device_pointer(window, 0, peer)
seen = np.frombuffer((ctypes.c_char * 4096).from_address(theirs), np.float32)
assert (seen[10:20] == 10 * rank + 3).all()
lsa = nccl.team_lsa(comm)
assert (lsa.n_ranks, lsa.rank, lsa.stride) == (2, rank, 1)
try:
    nccl.put_signal(out.ctypes.data, 10, 7, peer, window, 4090, 0, 0, 0, comm, 0)
except Exception as error:
    assert "INVALID_ARGUMENT" in str(error).upper().replace(" ", "_"), error
else:
    raise AssertionError("a put beyond the window")
nccl.comm_window_deregister(comm, window)
nccl.comm_finalize(comm)
nccl.comm_destroy(comm)
nccl.mem_free(pointer)
print("right")
"""


@pytest.mark.timeout(60)
def test_windows_puts_and_signals(tmp_path: Path) -> None:
    # nccl4py waits for streams by CUDA's functions, which are not there.
    env = clean_environment() | {"LD_PRELOAD": FORWARD, "PYNCCL_CPU_BLOCKING": "1"}
    ranks = [piped([sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=env) for rank in range(2)]
    try:
        answers = [rank.communicate(timeout=50) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in answers] == ["right\n"] * 2, answers


# --- the examples of nccl4py, as released, over the same ----------------------------------------------------

REPOSITORY, TAG = "https://github.com/NVIDIA/nccl", "nccl4py-v0.3.1"
# How many ranks mpirun starts; none where one process has all devices. The largest takes 4.5 GB.
LARGE = pytest.mark.full
EXAMPLES = {
    "bindings/nccl4py/examples/01_basic/01_allreduce.py": 2,
    "bindings/nccl4py/examples/01_basic/02_send_recv.py": 2,
    "docs/examples/01_communicators/01_multiple_devices_single_process/python/"
    "multiple_devices_single_process.py": 0,
    "docs/examples/01_communicators/03_one_device_per_process_mpi/python/one_device_per_process_mpi.py": 2,
    "docs/examples/02_point_to_point/01_ring_pattern/python/ring_pattern.py": 0,
    "docs/examples/03_collectives/01_allreduce/python/allreduce.py": 0,
    "docs/examples/04_user_buffer_registration/01_allreduce/python/allreduce_ub.py": 2,
    "docs/examples/05_symmetric_memory/01_allreduce/python/allreduce_sm.py": 2,
    "docs/examples/05_symmetric_memory/02_allgather/python/allgather_ce.py": 2,
}
# Its kernel calls the functions of NCCL that run on a device.
EXCLUDED = {"bindings/nccl4py/examples/cute/main.py"}


@pytest.fixture(scope="module")
def repository() -> Path:
    """Return NCCL's sources, which alone have the examples."""
    with cached(f"nccl-{TAG}") as folder:
        clone = folder / "clone"
        if not clone.exists():
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                git = [
                    "git",
                    "clone",
                    "--quiet",
                    "--depth",
                    "1",
                    "--branch",
                    TAG,
                    REPOSITORY,
                    f"{draft}/clone",
                ]
                done = completed(git, timeout=250)
                if done.returncode:
                    pytest.skip("NCCL's repository cannot be cloned here")
                Path(draft, "clone").rename(clone)
        return clone


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("path", "nranks"),
    [
        pytest.param(path, nranks, id=Path(path).stem, marks=[LARGE] if "ring_pattern" in path else [])
        for path, nranks in EXAMPLES.items()
    ],
)
def test_examples(path: str, nranks: int, repository: Path) -> None:
    pytest.importorskip("cupy")
    variables = {
        "LD_PRELOAD": FORWARD,
        "PYNCCL_CPU_BLOCKING": "1",
        "HOST_CUDA_DEVICES": "2",
        "PYTHONPATH": f"{ROOT}/tests/helpers:{ROOT}",
    }
    program = ["-c", "import sys, host_cuda; host_cuda.run(sys.argv[1])", str(repository / path)]
    launcher = [] if nranks == 0 else open_mpi(nranks)
    done = completed([*launcher, sys.executable, *program], env=environment(**variables), timeout=280)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)
def test_every_example_is_run_or_excluded(repository: Path) -> None:
    found = [*repository.glob("bindings/nccl4py/examples/**/*.py"), *repository.glob("docs/examples/**/*.py")]
    assert {str(path.relative_to(repository)) for path in found} == EXAMPLES.keys() | EXCLUDED


@pytest.mark.slow
def test_the_page() -> None:
    ((files, over, passed, excluded),) = rows(0, f"nccl4py {version('nccl4py')}")
    assert f"the examples of the tag {TAG} of {REPOSITORY.removeprefix('https://github.com/')}" in files
    assert over == "the CPU library, preloaded under nccl.core"
    assert passed == f"{len(EXAMPLES)} of {len(EXAMPLES) + len(EXCLUDED)}"
    assert (
        excluded == ", ".join(name.removeprefix("bindings/nccl4py/examples/") for name in EXCLUDED) + " (3)"
    )
