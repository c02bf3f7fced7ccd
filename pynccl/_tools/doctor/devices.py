"""The CUDA driver, its devices and the paths between them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import combinations, permutations

from pynccl._errors import NcclError
from pynccl._library import cuda
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded
from pynccl._tools.machine import PCI, Machine, cpu_list
from pynccl._tools.topology import LINKS, bridges, link

# PCI Express: where extended capabilities begin, the number of ACS, and its control bits that redirect.
_EXTENDED, _ACS = 0x100, 0x0D
_REDIRECTS = 0x04 | 0x08


def check_driver(machine: Machine) -> Iterator[Finding]:
    """Open the driver and list its devices."""
    if cuda.available():
        names = [f"{i} {cuda.device_name(i)}" for i in range(cuda.device_count())]
        version = ".".join(map(str, cuda.driver_version()))
        yield ok("driver", f"supports CUDA {version}; devices: {', '.join(names)}")
    elif count := len(machine.gpus()):
        yield error(
            "driver",
            f"the machine has {count} NVIDIA GPUs, and no driver can be used: {cuda.why_unavailable()}",
            "NCCL cannot run, and programs fall back to the CPU library or fail.",
            "Install the driver; in a container, start it with --gpus all; check CUDA_VISIBLE_DEVICES.",
        )
    elif not isinstance(library := loaded(), NcclError) and library.backend == "cpu":
        yield ok("driver", "no NVIDIA GPU; programs run on the CPU library, which is selected")
    else:
        yield ok("driver", "no NVIDIA GPU; PYNCCL_LIBRARY=cpu would select the CPU library, which needs none")


def check_visible_devices(machine: Machine) -> Iterator[Finding]:
    """Read CUDA_VISIBLE_DEVICES as the driver does: the first entry that is wrong hides all that follow."""
    text = machine.environ.get("CUDA_VISIBLE_DEVICES")
    name = "visible devices"
    if text is None:
        yield ok(name, "CUDA_VISIBLE_DEVICES is not set: every device is visible")
        return
    entries = [entry.strip() for entry in text.split(",")]
    wrong = next((entry for i, entry in enumerate(entries) if _is_wrong(entry, entries[:i])), None)
    if wrong is not None:
        yield error(
            name,
            f"CUDA_VISIBLE_DEVICES={text!r}: {wrong!r} is empty, repeated, or names no device",
            "The driver hides this device and all after it.",
            "unset CUDA_VISIBLE_DEVICES, or list each device once: 0,1,2 or UUIDs of nvidia-smi -L.",
        )
    elif cuda.available() and cuda.device_count() < len(entries):
        yield error(
            name,
            f"CUDA_VISIBLE_DEVICES={text!r} lists {len(entries)} devices, and the driver shows "
            f"{cuda.device_count()}",
            "Ranks whose device is not there fail.",
            "List only devices that nvidia-smi -L shows.",
        )
    else:
        yield ok(name, f"CUDA_VISIBLE_DEVICES={text!r}")


def _is_wrong(entry: str, before: list[str]) -> bool:
    known = entry.startswith(("GPU-", "MIG-")) or (entry.isascii() and entry.isdecimal())
    return not known or entry in before


def check_ranks_have_devices(machine: Machine) -> Iterator[Finding]:
    """Compare the ranks of this machine with its devices."""
    ranks, count = machine.number("LOCAL_WORLD_SIZE"), cuda.device_count()
    if ranks is None or not count or machine.environ.get("PYNCCL_LIBRARY") == "cpu":
        return
    if 1 < count < ranks:
        yield error(
            "ranks and devices",
            f"{ranks} ranks on this machine, and the driver shows {count} devices",
            "NCCL allows one rank per device.",
            f"Start at most {count} ranks here, or make more devices visible.",
        )
    else:
        yield ok("ranks and devices", f"{ranks} ranks on this machine, {count} devices")


def check_peers(machine: Machine) -> Iterator[Finding]:
    """Ask the driver which devices reach each other's memory."""
    count = cuda.device_count()
    if count < 2:
        return
    cut = [f"{a} to {b}" for a, b in permutations(range(count), 2) if not cuda.can_access_peer(a, b)]
    if cut:
        yield warning(
            "peer access",
            f"devices without direct access: {', '.join(cut)}",
            "NCCL copies between them through host memory, at a fraction of the speed.",
            "See nvidia-smi topo -p2p r; IOMMU, ACS or a virtual machine may forbid it.",
        )
    else:
        yield ok("peer access", f"every one of the {count} devices reaches every other")


def check_links(machine: Machine) -> Iterator[Finding]:
    """Ask the driver how fast the paths between devices are."""
    count = cuda.device_count()
    if count < 2:
        return
    kinds: dict[tuple[int, bool], list[str]] = {}
    try:
        for one, other in combinations(range(count), 2):
            kinds.setdefault(cuda.peer_link(one, other), []).append(f"{one} and {other}")
    except NcclError as failure:
        yield ok("links", f"not known: {failure}")
        return
    text = "; ".join(
        f"rank {rank} {'with atomics, as NVLink' if atomics else 'without atomics, as PCIe'}: "
        f"{', '.join(kinds[rank, atomics])}"
        for rank, atomics in sorted(kinds, key=lambda kind: (kind[0], not kind[1]))
    )
    if len(kinds) > 1:
        yield warning(
            "links",
            f"some devices are joined by slower paths than others: {text}",
            "NCCL's rings and trees run at the speed of their slowest path.",
            "nvidia-smi topo -m shows how they are joined, nvidia-smi nvlink -s a link that is down; or "
            "choose devices of one kind by CUDA_VISIBLE_DEVICES.",
        )
    else:
        yield ok("links", text)


def check_pcie(machine: Machine) -> Iterator[Finding]:
    """Compare the PCIe lanes that each GPU uses with those that it has."""
    found, narrow = [], []
    for gpu in machine.gpus():
        names = ("current_link_speed", "current_link_width", "max_link_width")
        speed, width, most = (machine.read(PCI, gpu, name) for name in names)
        if not (speed and width and most and width.isdecimal() and most.isdecimal()):
            continue
        # An idle device lowers its speed, and no width.
        found.append(f"{gpu} {speed.removesuffix(' PCIe')} x{width}")
        if int(width) < int(most):
            narrow.append(f"{gpu} x{width} of x{most}")
    if narrow:
        yield warning(
            "PCIe lanes",
            f"GPUs that use fewer lanes than they have: {', '.join(narrow)}",
            "Copies from and to the host, and to devices without NVLink, are slower by as much.",
            "Seat the card anew, choose a slot with as many lanes, and look at the BIOS's bifurcation.",
        )
    elif found:
        yield ok("PCIe lanes", ", ".join(found))


def check_acs(machine: Machine) -> Iterator[Finding]:
    """Look for PCI bridges above a GPU that redirect requests between devices to the root (ACS)."""
    gpus = machine.gpus()
    if len(gpus) < 2:
        return
    above = {bridge for gpu in gpus for bridge in bridges(machine, gpu)}
    redirecting = sorted(bridge for bridge in above if _redirects(machine, bridge))
    if redirecting:
        yield warning(
            "ACS",
            f"PCI bridges with ACS redirection: {', '.join(redirecting)}",
            "Traffic between GPUs takes the way through the root complex: it is slow, or hangs.",
            "On bare metal: setpci -s BRIDGE ECAP_ACS+0x6.w=0000 for each, or disable ACS in the BIOS.",
        )
    else:
        yield ok("ACS", f"none of the {len(above)} bridges above the GPUs is seen to redirect")


def _redirects(machine: Machine, bridge: str) -> bool:
    try:
        config = machine.path(PCI, bridge, "config").read_bytes()
    except OSError:
        return False
    at = _EXTENDED
    for _ in range(64):
        # Only root reads more than the first 64 bytes.
        if at < _EXTENDED or at + 8 > len(config):
            return False
        header = struct.unpack_from("<I", config, at)[0]
        if header & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", config, at + 6)[0] & _REDIRECTS)
        at = header >> 20
    return False


def check_paths(machine: Machine) -> Iterator[Finding]:
    """Name what joins each two GPUs on PCI."""
    gpus = machine.gpus()
    if len(gpus) < 2:
        return
    kinds: dict[str, list[str]] = {}
    for one, other in combinations(gpus, 2):
        kinds.setdefault(link(machine, one, other), []).append(f"{one} and {other}")
    text = "; ".join(f"{LINKS[kind]}: {', '.join(pairs)}" for kind, pairs in kinds.items())
    yield ok("PCI paths", text)


def check_affinity(machine: Machine) -> Iterator[Finding]:
    """Compare the processors on which this process may run with those next to its device."""
    local, count = machine.number("LOCAL_RANK"), cuda.device_count()
    nodes = [name for name in machine.names("sys/devices/system/node") if name[4:].isdecimal()]
    if not count or len(nodes) < 2:
        return
    device = (local or 0) % count
    node = machine.read(PCI, cuda.device_pci(device), "numa_node")
    cpus = machine.read("sys/devices/system/node", f"node{node}", "cpulist")
    if cpus is None:
        yield ok("NUMA", f"the NUMA node of device {device} is not known")
    elif not cpu_list(cpus) & os.sched_getaffinity(0):
        yield warning(
            "NUMA",
            f"device {device} is at NUMA node {node} (processors {cpus}), where this process may not run",
            "Copies and NCCL's threads cross the link between processors.",
            f"Start the rank with numactl --cpunodebind={node}, or let the launcher bind it so.",
        )
    else:
        yield ok("NUMA", f"this process may run at NUMA node {node}, next to device {device}")


CHECKS = (
    check_driver,
    check_visible_devices,
    check_ranks_have_devices,
    check_peers,
    check_links,
    check_paths,
    check_pcie,
    check_acs,
    check_affinity,
)
