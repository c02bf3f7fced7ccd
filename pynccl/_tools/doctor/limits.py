"""Shared memory, limits of the process, and what sandboxes forbid."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator

from pynccl._library import loader
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded
from pynccl._tools.machine import Machine

_MIB = 1 << 20
# NVIDIA's advice for containers is --shm-size=1g; docker's default is 64 MiB.
_SMALL_SHM = 256 * _MIB
_FEW_DESCRIPTORS = 1024
_DESCRIPTORS_EACH = 8
_LITTLE_LOCKED = 64 * _MIB
# What to do by Yama's scope; the kernel refuses to change the last one.
_ALLOW_READS = {
    "1": "pynccl run --direct, under other launchers PYNCCL_CPU_PTRACER=-1, or accept it.",
    "2": "sysctl kernel.yama.ptrace_scope=1, and pynccl run --direct; or accept it.",
    "3": "Accept it, or set kernel.yama.ptrace_scope=1 in /etc/sysctl.d, start the machine anew, and "
    "pynccl run --direct.",
}
_BY_HAND = "The CPU library copies through shared memory instead of reading the other process's memory."


def check_shm(machine: Machine) -> Iterator[Finding]:
    """Look at the size of /dev/shm."""
    path = machine.path("dev/shm")
    try:
        room = os.statvfs(path)
    except OSError as failure:
        yield error(
            "/dev/shm",
            f"cannot be used: {failure.strerror}",
            "NCCL's ranks of one machine share memory there, and fail without it.",
            "mount -t tmpfs -o size=1g tmpfs /dev/shm",
        )
        return
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{free // _MIB} MiB free of {size // _MIB}"
    if free < _SMALL_SHM:
        yield warning(
            "/dev/shm",
            text,
            "NCCL needs several MiB for each pair of ranks there; the CPU library does not use it.",
            "Start the container with --shm-size=1g or --ipc=host, or: mount -o remount,size=1g /dev/shm",
        )
    else:
        yield ok("/dev/shm", text)


def check_descriptors(machine: Machine) -> Iterator[Finding]:
    """Compare the limit of file descriptors with the number of ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_FEW_DESCRIPTORS, _DESCRIPTORS_EACH * (machine.number("WORLD_SIZE") or 1))
    if soft != resource.RLIM_INFINITY and soft < needed:
        yield warning(
            "descriptors",
            f"at most {soft} open files; expected {needed} or more",
            "Every connection between ranks takes some; without one, creating a communicator fails.",
            f"ulimit -n {needed}" + ("" if hard >= needed else f" as root: the hard limit is {hard}"),
        )
    else:
        yield ok("descriptors", f"at most {_limit(soft)} open files")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_memlock(machine: Machine) -> Iterator[Finding]:
    """Look at the limit of locked memory, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = machine.names("sys/class/infiniband")
    if cards and soft != resource.RLIM_INFINITY and soft < _LITTLE_LOCKED:
        yield error(
            "memlock",
            f"{soft // 1024} KiB of locked memory, and RDMA devices: {', '.join(cards)}",
            "NCCL registers its buffers with the device, which locks them; ibv_reg_mr fails.",
            "ulimit -l unlimited; in docker --ulimit memlock=-1; for Slurm's daemon LimitMEMLOCK=infinity",
        )
    else:
        yield ok("memlock", f"{_limit(soft)} bytes" + ("" if cards else "; no RDMA device needs more"))


def check_yama(machine: Machine) -> Iterator[Finding]:
    """Look whether Yama forbids processes to read each other's memory."""
    scope = machine.read("proc/sys/kernel/yama/ptrace_scope")
    found = loaded()
    if scope in (None, "0"):
        yield ok("Yama", "does not restrict reads between processes")
    elif isinstance(found, loader.LibraryInfo) and found.backend == "cpu":
        yield warning(
            "Yama",
            f"ptrace_scope is {scope}",
            _BY_HAND,
            _ALLOW_READS.get(scope, _ALLOW_READS["2"]),
        )
    else:
        yield ok("Yama", f"ptrace_scope is {scope}, which NVIDIA's library does not need")


def check_seccomp(machine: Machine) -> Iterator[Finding]:
    """Read own memory as ranks read each other's: only a filter of system calls refuses that."""
    code = _read_own_memory()
    if code:
        yield warning(
            "seccomp",
            f"process_vm_readv is refused: {os.strerror(code)}",
            _BY_HAND,
            "Start the container with --cap-add=SYS_PTRACE, or accept it.",
        )
    else:
        yield ok("seccomp", "process_vm_readv is allowed")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read_own_memory() -> int:
    """Return 0, or the error of the system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.c_long(1), ctypes.c_long(0)
    here = _Vector(ctypes.addressof(target), ctypes.sizeof(target))
    there = _Vector(ctypes.addressof(source), ctypes.sizeof(source))
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    got = libc.process_vm_readv(os.getpid(), ctypes.byref(here), one, ctypes.byref(there), one, none)
    return 0 if got == ctypes.sizeof(target) else ctypes.get_errno() or errno.EIO


def check_container(machine: Machine) -> Iterator[Finding]:
    """Look for signs of a container."""
    signs = [path for path in (".dockerenv", "run/.containerenv") if machine.path(path).exists()]
    signs += [f"container={kind}" for kind in [machine.environ.get("container")] if kind]
    groups = machine.read("proc/1/cgroup") or ""
    signs += [word for word in ("docker", "kubepods", "containerd", "libpod", "lxc") if word in groups]
    text = f"signs: {', '.join(signs)}" if signs else "no sign of one"
    yield ok("container", text + ("; its limits and /dev/shm are the container's own" if signs else ""))


def check_cores(_: Machine) -> Iterator[Finding]:
    """Count the processors on which this process may run."""
    yield ok("processors", f"{len(os.sched_getaffinity(0))} on which this process may run")


CHECKS = (
    check_shm,
    check_descriptors,
    check_memlock,
    check_yama,
    check_seccomp,
    check_container,
    check_cores,
)
