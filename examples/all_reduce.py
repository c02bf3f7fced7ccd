"""The MPI example of NCCL's documentation: every rank sums 32 Mi floats with all the others.

pynccl run -n 4 examples/all_reduce.py
mpirun -n 4 python examples/all_reduce.py
torchrun --nproc-per-node 4 examples/all_reduce.py      # README.md has the other launchers
"""

from __future__ import annotations

import argparse

import pynccl


def program(comm: pynccl.Communicator, count: int) -> str:
    """Sum `count` floats over all ranks, and say how that went."""
    xp = pynccl.array_module()
    pattern = xp.arange(count, dtype=xp.float32) % 7
    send, recv = pattern + comm.rank, xp.empty(count, xp.float32)
    comm.all_reduce(send, recv, "sum")
    comm.synchronize()

    expected = pattern * comm.size + sum(range(comm.size))
    if not bool((recv == expected).all()):
        raise SystemExit(f"rank {comm.rank} of {comm.size}: the sum is wrong")
    return f"rank {comm.rank} of {comm.size}: success, {count} floats summed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=32 * 1024 * 1024, help="floats per rank")
    parser.add_argument(
        "--method", help="where the ranks meet, such as tcp://host:port; else by the launcher"
    )
    args = parser.parse_args()

    # Finds the other ranks by what the launcher says, and picks this rank's device.
    with pynccl.init(args.method) as comm:
        print(program(comm, args.count), flush=True)


if __name__ == "__main__":
    main()
