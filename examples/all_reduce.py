"""The MPI example of NCCL's documentation: every rank sums 32 Mi floats with all the others.

pynccl run -n 4 examples/all_reduce.py
mpirun -n 4 python examples/all_reduce.py
"""

from __future__ import annotations

import argparse
from typing import Any

import pynccl


def array_module() -> Any:
    """Return cupy for NVIDIA's NCCL and numpy for the CPU library."""
    if pynccl.library_info().backend == "cpu":
        import numpy

        return numpy
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return cupy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=32 * 1024 * 1024, help="floats per rank")
    count = parser.parse_args().count

    # Finds the other ranks through mpi4py or the launcher's store, and picks this rank's device.
    with pynccl.init() as comm:
        xp = array_module()
        pattern = xp.arange(count, dtype=xp.float32) % 7
        send, recv = pattern + comm.rank, xp.empty(count, xp.float32)
        comm.all_reduce(send, recv, "sum")
        comm.synchronize()

        expected = pattern * comm.size + sum(range(comm.size))
        if not bool((recv == expected).all()):
            raise SystemExit(f"rank {comm.rank} of {comm.size}: the sum is wrong")
        print(f"rank {comm.rank} of {comm.size}: success, {count} floats summed", flush=True)


if __name__ == "__main__":
    main()
