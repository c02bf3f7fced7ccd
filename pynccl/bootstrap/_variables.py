"""The names of the variables that pynccl reads, names that resemble one of them, and those of NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# tests/tools/test_doctor.py compares these with docs/variables.md.
_NAMES = """
BUILD_CPU_LIBRARY CACHE CHECK CPU_BLOCKING CPU_BLOCK_BYTES CPU_BY_HOSTS CPU_DEVICES CPU_DIRECT
CPU_FAULT CPU_INIT_TIMEOUT CPU_INLINE_BYTES CPU_PTRACER CPU_RING_BYTES CPU_SHOWN_BYTES CPU_SPIN_US CPU_TIMEOUT
EXIT_TIMEOUT JOB_ID KEEP_GOING LIBRARY MESH_RANKS NVTX RESTART_COUNT SECRET SECRET_FILE
STACKS_DIR STORE TIMEOUT TORCH_PROFILER TRACE_DIR TRACE_SIGNAL TRACE_SIZE TRACE_STACKS WERROR
"""
PYNCCL = frozenset(f"PYNCCL_{name}" for name in _NAMES.split())
_ALIKE = 0.8
# NCCL's variables that may differ between ranks.
PRIVATE = frozenset({"NCCL_HOSTID", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_COMM_ID"})


def nearest(name: str, names: Iterable[str] = PYNCCL) -> str | None:
    """Return the known name that is most like a name, or None."""
    # Imported here, since few programs need it.
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(names), 1, _ALIKE)), None)


def misspelled(environ: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each name that looks like a misspelled variable of pynccl."""
    for name in environ:
        if name.startswith("PYNCCL_") and name not in PYNCCL and (meant := nearest(name)):
            yield f"the variable {name!r} has no effect: pynccl does not read it; the nearest name is {meant}"
