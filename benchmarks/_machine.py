"""What the numbers depend on beside the peers: the machine, and the transport that Open MPI chose on it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from _group import mpirun


def read(path: str) -> str | None:
    """Return a /proc or /sys file's text, None where this kernel has none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def describe() -> dict[str, str]:
    """Describe the machine without naming it."""
    cpu = dict(re.findall(r"^([\w ]+?)\s*:\s*(.+)$", read("/proc/cpuinfo") or "", re.MULTILINE))
    kind = ", ".join(f"{name} {cpu[name]}" for name in ("cpu family", "model") if name in cpu)
    pages = re.search(r"\[(\w+)\]", read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{cpu.get('model name', platform.machine())} ({kind or 'kind unknown'})",
        "cores": f"{os.cpu_count()} ({len(os.sched_getaffinity(0))} usable)",
        "L3 cache": read("/sys/devices/system/cpu/cpu0/cache/index3/size") or "unknown",
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "C library": " ".join(platform.libc_ver()),
        "Yama ptrace_scope": read("/proc/sys/kernel/yama/ptrace_scope") or "no Yama",
        "transparent huge pages": pages[1] if pages else "unknown",
        "load before the run": f"{os.getloadavg()[0]:.2f}",
    }


class Meter:
    """Tells how much of the machine others took while a run lasted."""

    def __init__(self) -> None:
        self._start, self._own = time.monotonic(), time.process_time()
        self._busy, self._stolen = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        fields = [int(field) / os.sysconf("SC_CLK_TCK") for field in (read("/proc/stat") or "").split()[1:9]]
        user, nice, system, _idle, _iowait, interrupts, softirqs, steal = fields
        return user + nice + system + interrupts + softirqs, steal

    def text(self, peers: float) -> str:
        """Say what others used, given the CPU seconds of the peers' processes."""
        elapsed, (busy, stolen) = time.monotonic() - self._start, self._read()
        others = busy - self._busy - peers - (time.process_time() - self._own)
        taken = (stolen - self._stolen) / elapsed
        return f"other programs used {max(0.0, others) / elapsed:.2f} cores, the host took {taken:.2f}"


def openmpi_transport() -> str:
    """Ask Open MPI which components carry its messages; in a run of its own, since verbosity costs time."""
    levels = {"smsc_base_verbose": 100, "pml_base_verbose": 20, "btl_base_verbose": 20}
    verbose = [word for name, level in levels.items() for word in ("--mca", name, str(level))]
    program = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
    launcher = [str(mpirun()), "-n", "2", "--oversubscribe", "--allow-run-as-root", *verbose]
    command = [*launcher, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    text = done.stdout + done.stderr
    pml = re.search(r"select: component (\w+) selected", text)
    ready = set(re.findall(r"select: init of component (\w+) returned success", text))
    # Of those ready, ob1 takes sm between the ranks of one machine.
    btl = "sm" if "sm" in ready else "/".join(sorted(ready)) or "unknown"
    single_copy = re.search(r"selected shared-memory single-copy component: (\w+)", text)
    copies = f"single copy by {single_copy[1]}" if single_copy else "copies through shared memory"
    return f"pml {pml[1] if pml else 'unknown'}, btl {btl}, {copies}"
