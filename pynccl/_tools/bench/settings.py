"""The settings of a run, as the flags of nccl-tests give them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pynccl.bootstrap._init import DEFAULT_TIMEOUT

# Seconds after which a wait ends the run without -T: a rank that hangs must not hold it without an end.
LONGEST_WAIT = 3600
# Seconds of a wait without -T after which a rank says what it waits for.
LONG_WAIT = 30


# Bytes by which the largest element may shift a buffer, for each place of -u.
_WIDEST = 8


@dataclass(frozen=True)
class Settings:
    """nccl-tests' flags with its defaults, then pynccl's own; sizes are in bytes."""

    nthreads: int = 1
    ngpus: int = 1
    minbytes: int = 32 << 20
    maxbytes: int = 32 << 20
    stepbytes: int = 1 << 20
    stepfactor: int = 1
    iters: int = 20
    agg_iters: int = 1
    warmup_iters: int = 1
    run_cycles: int = 1
    parallel_init: int = 0
    check: int = 1
    op: str = "sum"
    datatype: str = "float"
    root: int = 0
    blocking: int = 0
    stream_null: int = 0
    timeout: int = 0
    report_cputime: int = 0
    report_timestamps: int = 0
    output_file: str | None = None
    average: int = 1
    local_register: int = 0
    cta_policy: int | None = None
    memory: int = 0
    unalign: int = 0
    per_iter_timing: int = 0
    per_iter_skip: int = 0
    cudagraph: int = 0
    # Files beyond nccl-tests', and percent.
    csv: str | None = None
    save: str | None = None
    against: str | None = None
    tolerance: float = 5.0
    # Names of peers.
    compare: tuple[str, ...] = ()
    p2p: bool = False
    plot: str | None = None
    # Documents of other runs, for --plot.
    beside: tuple[str, ...] = ()
    percentiles: bool = False
    # Where rank 0 shows its progress, and whether it writes its output there, too.
    terminal: str | None = None
    onto_terminal: bool = False

    @property
    def long_wait(self) -> float:
        """The seconds of a wait after which a rank says what it waits for."""
        return float(self.timeout or LONG_WAIT)

    @property
    def longest_wait(self) -> float:
        """The seconds after which a wait ends the run."""
        return float(self.timeout or LONGEST_WAIT)

    @property
    def watched(self) -> float | None:
        """The communicators' time-out; with one they have a control channel, which tells who is late.

        With -T, too, their creation may last as long as usual.
        """
        if not self.timeout or os.environ.get("PYNCCL_TIMEOUT"):
            return None
        return max(self.longest_wait, DEFAULT_TIMEOUT)

    @property
    def ranks_each(self) -> int:
        """The ranks of one process."""
        return self.nthreads * self.ngpus

    @property
    def buffer_bytes(self) -> int:
        """The bytes of a buffer; each rank has two."""
        return self.maxbytes + _WIDEST * self.unalign

    @property
    def replaced(self) -> dict[str, str | None]:
        """The files that a run that succeeds replaces, by their flags."""
        return {"--save": self.save, "--csv": self.csv, "--plot": self.plot}

    def sizes(self) -> list[int]:
        """Return the sizes of one cycle."""
        found, size = [], self.minbytes
        while size <= self.maxbytes:
            found.append(size)
            size = size * self.stepfactor if self.stepfactor > 1 else size + self.stepbytes
        return found
