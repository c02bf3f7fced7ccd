"""nccl4py's own bindings over the CPU library, preloaded in place of NVIDIA's: windows, puts and signals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import clean_environment
from pynccl import cpu_library

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
    library = Path(cpu_library()).parent / "forward" / "libnccl.so.2"
    # nccl4py waits for streams by CUDA's functions, which are not there.
    env = clean_environment() | {"LD_PRELOAD": str(library), "PYNCCL_CPU_BLOCKING": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=50) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in answers] == ["right\n"] * 2, answers
