"""`pynccl info --topology`: NUMA nodes, GPUs and network devices of this machine, and what joins each two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import combinations, takewhile

from pynccl._errors import NcclError
from pynccl._library import cuda
from pynccl._tools.machine import PCI, Machine

_NODES = "sys/devices/system/node"

# What joins two devices, the nearest first, by the names of nvidia-smi topo.
LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge, usually the processor",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "?": "not known, since /sys does not show one of the two",
}
# In the matrix this stands in place of the path on PCI, as NV does in that of nvidia-smi.
_NVLINK = "NVL"


@dataclass(frozen=True)
class Device:
    """A GPU or a network device on PCI."""

    kind: str  # GPU, RDMA or net
    name: str
    pci: str
    node: int | None
    text: str
    # The driver's number of a GPU that it shows.
    ordinal: int | None = None


@dataclass(frozen=True)
class Node:
    """A NUMA node: its number, its processors as the kernel lists them, and its memory in MiB."""

    number: int
    cpus: str
    mib: int | None


def nodes(machine: Machine) -> list[Node]:
    """Return the NUMA nodes."""
    names = [name for name in machine.names(_NODES) if name.startswith("node") and name[4:].isdecimal()]
    return [
        Node(int(name[4:]), machine.read(_NODES, name, "cpulist") or "", _memory(machine, name))
        for name in sorted(names, key=lambda name: int(name[4:]))
    ]


def _memory(machine: Machine, name: str) -> int | None:
    for line in (machine.read(_NODES, name, "meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 3 and words[2] == "MemTotal:" and words[3].isdecimal():
            return int(words[3]) // 1024
    return None


def devices(machine: Machine) -> list[Device]:
    """Return GPUs, RDMA devices and network interfaces that are on PCI."""
    return [*_gpus(machine), *_cards(machine, "RDMA"), *_cards(machine, "net")]


def _gpus(machine: Machine) -> Iterator[Device]:
    known = {cuda.device_pci(i): i for i in range(cuda.device_count())} if cuda.available() else {}
    for number, pci in enumerate(dict.fromkeys([*known, *machine.gpus()])):
        what = cuda.device_name(known[pci]) if pci in known else "not visible to the driver"
        name = f"GPU{known.get(pci, number)}"
        text = f"{what}{_speed(machine, pci)}"
        yield Device("GPU", name, pci, _node_of(machine, pci), text, known.get(pci))


_CLASSES = {"RDMA": "sys/class/infiniband", "net": "sys/class/net"}


def _cards(machine: Machine, kind: str) -> Iterator[Device]:
    folder = _CLASSES[kind]
    for name in machine.names(folder):
        pci = _address(os.path.realpath(machine.path(folder, name, "device")))
        if pci is not None:
            text = _ports(machine, name) if kind == "RDMA" else _interface(machine, name)
            yield Device(kind, name, pci, _node_of(machine, pci), f"{text}{_speed(machine, pci)}")


def _ports(machine: Machine, name: str) -> str:
    folder = (_CLASSES["RDMA"], name, "ports")

    def read(port: str, file: str) -> str:
        return machine.read(*folder, port, file) or ""

    ports = [
        # The kernel writes a number before the state: 4: ACTIVE.
        " ".join(("port", port, read(port, "state").partition(": ")[2], read(port, "rate")))
        for port in machine.names(*folder)
    ]
    return ", ".join(port.strip() for port in ports) or "no port"


def _interface(machine: Machine, name: str) -> str:
    state = machine.read(_CLASSES["net"], name, "operstate") or "state unknown"
    speed = machine.read(_CLASSES["net"], name, "speed") or ""
    return f"{state}, {speed} Mb/s" if speed.isdecimal() else state


def _speed(machine: Machine, pci: str) -> str:
    speed = machine.read(PCI, pci, "current_link_speed")
    width = machine.read(PCI, pci, "current_link_width")
    return f", PCIe {speed.removesuffix(' PCIe')} x{width}" if speed and width else ""


def _node_of(machine: Machine, pci: str) -> int | None:
    text = machine.read(PCI, pci, "numa_node") or ""
    # The kernel says -1 on a machine with one node, or where the firmware does not tell.
    return int(text) if text.isdecimal() else None


def _address(path: str) -> str | None:
    """Return the PCI address of the device to which a folder of /sys belongs: its last part that is one."""
    parts = [part for part in path.split(os.sep) if part.count(":") == 2]
    return parts[-1] if parts else None


def bridges(machine: Machine, device: str) -> list[str]:
    """Return the PCI addresses above a device, from the root: the folders of its real path."""
    real = os.path.realpath(machine.path(PCI, device))
    return [part for part in real.split(os.sep)[:-1] if part.count(":") == 2]


def link(machine: Machine, one: str, other: str) -> str:
    """Return what joins two devices on PCI, as a key of LINKS."""
    if not all(machine.path(PCI, device).exists() for device in (one, other)):
        return "?"
    ours, theirs = bridges(machine, one), bridges(machine, other)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    if common:
        # A switch is one bridge above, and one below it for each of its ports.
        return "PIX" if max(len(ours), len(theirs)) - common <= 1 else "PXB"
    if _root(machine, one) == _root(machine, other):
        return "PHB"
    return "NODE" if _node_of(machine, one) == _node_of(machine, other) else "SYS"


def _root(machine: Machine, device: str) -> str:
    real = os.path.realpath(machine.path(PCI, device)).split(os.sep)
    return next((part for part in real if part.startswith("pci") and ":" in part), device)


# --- text ---------------------------------------------------------------------------------------------------


def lines(machine: Machine) -> Iterator[str]:
    """Yield the topology as text: the nodes with their devices, then a matrix of what joins the devices."""
    found = devices(machine)
    for node, mine in _by_node(machine, found):
        yield _title(node)
        width = max((len(device.name) for device in mine), default=0)
        yield from (f"  {device.name:{width}}  {device.pci}  {device.text}" for device in mine)
    if not found:
        yield "no GPU, RDMA device or network interface is on PCI"
    if len(found) > 1:
        yield from ("", *_matrix(machine, found))


def _by_node(machine: Machine, found: list[Device]) -> list[tuple[Node | None, list[Device]]]:
    known = nodes(machine)
    if len(known) == 1:
        return [(known[0], found)]
    numbers = {node.number for node in known}
    groups: list[tuple[Node | None, list[Device]]] = [
        (node, [device for device in found if device.node == node.number]) for node in known
    ]
    rest = [device for device in found if device.node not in numbers]
    return [*groups, (None, rest)] if rest else groups


def _title(node: Node | None) -> str:
    if node is None:
        return "NUMA node unknown"
    memory = "" if node.mib is None else f", {node.mib} MiB"
    return f"NUMA node {node.number}: processors {node.cpus}{memory}"


def _matrix(machine: Machine, found: list[Device]) -> Iterator[str]:
    pairs = {(a.pci, b.pci): link(machine, a.pci, b.pci) for a, b in combinations(found, 2)}
    notes = []
    try:
        pairs |= _nvlinks(found)
    except NcclError as failure:
        notes.append(f"NVLink is not known: {failure}")
    gpus = [device.ordinal for device in found if device.kind == "GPU"]
    if len(gpus) > 1 and None in gpus:
        notes.append("NVLink is known only between GPUs that the driver shows: nvidia-smi topo -m")
    width = max(4, *(len(device.name) for device in found))
    yield " ".join(f"{name:{width}}" for name in ["", *(device.name for device in found)]).rstrip()
    for one in found:
        cells = ["X" if one is other else _cell(pairs, one, other) for other in found]
        yield " ".join(f"{cell:{width}}" for cell in [one.name, *cells]).rstrip()
    yield ""
    names = {_NVLINK: "a path with atomics, which NVLink has and PCIe has not", **LINKS}
    yield from (f"{name:4} = {names[name]}" for name in names if name in pairs.values())
    yield from notes


def _nvlinks(found: list[Device]) -> dict[tuple[str, str], str]:
    """Return the pairs of GPUs whose path has atomics. The driver does not say what a path is made of."""
    gpus = [(device.pci, device.ordinal) for device in found if device.ordinal is not None]
    return {(a, b): _NVLINK for (a, i), (b, j) in combinations(gpus, 2) if cuda.peer_link(i, j)[1]}


def _cell(pairs: dict[tuple[str, str], str], one: Device, other: Device) -> str:
    # Ports of one card share its address.
    if one.pci == other.pci:
        return "PIX"
    return pairs.get((one.pci, other.pci)) or pairs[other.pci, one.pci]


# --- a picture ----------------------------------------------------------------------------------------------

_COLOURS = {"GPU": "#76b900", "RDMA": "#f4a261", "net": "#8ecae6"}
_WIDTH, _ROW, _GAP = 720, 34, 12


def svg(machine: Machine) -> str:
    """Return the nodes, the switches in them and the devices as an SVG picture: boxes in boxes."""
    top, parts = _GAP, list[str]()
    for node, mine in _by_node(machine, devices(machine)):
        inner, end = list[str](), top + _ROW
        for group in _below_switches(machine, mine):
            if len(group) > 1:
                height = _ROW * (len(group) + 1)
                inner.append(_box(3 * _GAP, end, _WIDTH - 6 * _GAP, height, "#fff", "PCIe switch"))
                end += _ROW
            for device in group:
                text = f"{device.name}  {device.pci}  {device.text}"
                left = (3 if len(group) == 1 else 5) * _GAP
                inner.append(_box(left, end, _WIDTH - 2 * left, _ROW - 6, _COLOURS[device.kind], text))
                end += _ROW
            # A switch's box ends here.
            end += 6 if len(group) > 1 else 0
        parts += [_box(_GAP, top, _WIDTH - 2 * _GAP, end + _GAP - top, "#f3f3f3", _title(node)), *inner]
        top = end + 2 * _GAP
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"".join(parts)}</svg>\n'


def _below_switches(machine: Machine, found: list[Device]) -> list[list[Device]]:
    """Return the devices in groups: those below one switch, or switches below each other, and single ones."""
    groups = list[list[Device]]()
    for device in found:
        for group in groups:
            joined = link(machine, group[0].pci, device.pci)
            if group[0].pci == device.pci or joined in ("PIX", "PXB"):
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _box(x: int, y: int, width: int, height: int, colour: str, text: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{colour}" stroke="#555"/>\n'
        f'<text x="{x + 10}" y="{y + 19}" font-family="sans-serif" font-size="13">{escape(text)}</text>\n'
    )
