"""Send a model's key-value cache from a prefill rank to decode ranks, block by block, without receives.

pynccl run -n 3 examples/key_value_cache.py

Rank 0 computes blocks of keys and values and puts each into a free slot of a decode rank's window. The decode
rank waits for the signal, uses the block, and signals that its slot is free. So many blocks are on their way
as a decode rank has slots, and no rank waits for another without need.
"""

from __future__ import annotations

import argparse
from typing import Any

import pynccl


def block_of(request: int, number: int, shape: tuple[int, ...]) -> Any:
    """Compute the keys and values of one block of a request; here, numbers that can be checked."""
    xp = pynccl.array_module()
    size = 1
    for axis in shape:
        size *= axis
    return ((xp.arange(size) + 31 * request + 7 * number) % 1009).astype("float16").reshape(shape)


def prefill(comm: pynccl.Communicator, window: pynccl.Window, staging: Any, blocks: int) -> None:
    """Put the blocks of one request to each decode rank, the ranks in turn."""
    slots, size = len(staging), staging[0].size
    for number in range(blocks):
        slot = number % slots
        for peer in range(1, comm.size):
            # The slot is free from the beginning, or once its last block has been used.
            if number >= slots:
                comm.wait_signal(peer)
            staging[slot] = block_of(peer, number, staging[slot].shape)
            comm.put_signal(staging[slot], peer, window, offset=slot * size)


def decode(comm: pynccl.Communicator, slots: Any, blocks: int) -> None:
    """Use each block as soon as it has arrived."""
    for number in range(blocks):
        comm.wait_signal(0)
        block = slots[number % len(slots)]
        if not bool((block == block_of(comm.rank, number, block.shape)).all()):
            raise SystemExit(f"rank {comm.rank}: block {number} is wrong")
        if number < blocks - len(slots):
            comm.signal(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a request")
    parser.add_argument("--slots", type=int, default=4, help="blocks that a decode rank has room for")
    args = parser.parse_args()
    with pynccl.init() as comm:
        if comm.size < 2:
            raise SystemExit("one rank; expected a prefill rank and at least one decode rank")
        # Keys and values of 16 tokens, 8 heads, 64 elements each.
        slots = pynccl.empty((args.slots, 2, 16, 8, 64), "float16")
        with comm.window(slots, symmetric=True) as window:
            if comm.rank == 0:
                prefill(comm, window, slots, args.blocks)
            else:
                decode(comm, slots, args.blocks)
            comm.synchronize()
        nbytes = args.blocks * slots[0].nbytes
        what = "sent to each decode rank" if comm.rank == 0 else "received and checked"
        print(f"rank {comm.rank} of {comm.size}: {args.blocks} blocks, {nbytes} bytes, {what}", flush=True)


if __name__ == "__main__":
    main()
