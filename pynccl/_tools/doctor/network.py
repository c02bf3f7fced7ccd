"""Interfaces, names and RDMA devices."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from pynccl._errors import BootstrapError
from pynccl._tools.doctor.finding import Finding, error, ok, warning
from pynccl._tools.doctor.libraries import loaded
from pynccl._tools.machine import Machine
from pynccl.bootstrap import _environment
from pynccl.bootstrap._address import is_loopback, resolve
from pynccl.bootstrap._environment import Launcher

_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_RESOLVE_SECONDS = 5.0
_NET = "sys/class/net"
# Where launchers say how many of the ranks are on this machine; Slurm says on how many machines they are.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_MASTER = "the address of rank 0's machine, which ip -brief address shows there"
_FIX_NAME = "Set NCCL_SOCKET_IFNAME to the interface that the other machines reach: NCCL_SOCKET_IFNAME={}"


@dataclass(frozen=True)
class Interface:
    """An address of an interface that is up."""

    name: str
    address: str
    flags: int

    @property
    def link_local(self) -> bool:
        """Tell whether the address is valid on one link only."""
        return self.address.startswith(("169.254.", "fe80:"))

    @property
    def loopback(self) -> bool:
        """Tell whether only this machine can reach it."""
        return bool(self.flags & _LOOPBACK)


class _Entry(ctypes.Structure):
    """The beginning of struct ifaddrs."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def interfaces() -> list[Interface]:
    """Return the addresses of the interfaces that are up, in the kernel's order."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found, at = [], first.value
    try:
        while at:
            entry = _Entry.from_address(at)
            if entry.flags & _UP and entry.flags & _RUNNING and (address := _address(entry.address)):
                found.append(Interface(entry.name.decode(errors="replace"), address, entry.flags))
            at = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


def _address(at: int | None) -> str | None:
    """Return the text of a struct sockaddr at an address, or None if it is neither IPv4 nor IPv6."""
    if not at:
        return None
    family = ctypes.c_ushort.from_address(at).value
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(at + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(at + 8, 16))
    return None


def candidates(machine: Machine) -> list[Interface]:
    """Return the interfaces that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY leave, the first choice first."""
    spec, family = (
        machine.environ.get("NCCL_SOCKET_IFNAME", ""),
        machine.environ.get("NCCL_SOCKET_FAMILY", ""),
    )
    library = loaded()
    on_cpu = isinstance(library, Exception) or library.backend == "cpu"
    left = [one for one in interfaces() if _accepts(spec, one.name) and _fits(family, one.address)]
    if spec and not spec.startswith("^"):
        return sorted(left, key=lambda one: one.link_local)
    return sorted(left, key=lambda one: (one.link_local, _kind(one, on_cpu)))


def _accepts(spec: str, name: str) -> bool:
    """Tell whether [^][=]NAME[,NAME...] selects an interface."""
    without, names = spec.startswith("^"), spec.removeprefix("^")
    exact, listed = names.startswith("="), [part for part in names.removeprefix("=").split(",") if part]
    if not listed:
        return True
    return any(name == part if exact else name.startswith(part) for part in listed) != without


def _fits(family: str, address: str) -> bool:
    wanted = {"AF_INET": False, "AF_INET6": True}.get(family.upper())
    return wanted is None or (":" in address) == wanted


def _kind(one: Interface, on_cpu: bool) -> int:
    """Return the place in the order of choice: NCCL's, or the CPU library's."""
    prefixes = ("veth", "docker", "lo", "virbr") if on_cpu else ("docker", "lo", "virbr")
    if not on_cpu and one.name.startswith("ib"):
        return 0
    return next((i for i, prefix in enumerate(prefixes, 2) if one.name.startswith(prefix)), 1)


def _none_left(machine: Machine, everything: list[Interface], listed: str) -> tuple[str, str]:
    """Return why no interface is left, and what to do."""
    if not everything:
        return "no interface is up", "ip link set lo up"
    names = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")
    given = [f"{name}={value!r}" for name in names if (value := machine.environ.get(name))]
    spec = machine.environ.get("NCCL_SOCKET_IFNAME", "")
    usable = next((one.name for one in everything if not one.loopback), "lo")
    fix = _FIX_NAME.format(usable)
    if any(_accepts(spec, one.name) for one in everything):
        fix = "unset NCCL_SOCKET_FAMILY"
    return f"{' with '.join(given)} matches no interface that is up; there are: {listed}", fix


def check_interfaces(machine: Machine) -> Iterator[Finding]:
    """Choose the interface as the library does."""
    spec = machine.environ.get("NCCL_SOCKET_IFNAME", "")
    everything, left = interfaces(), candidates(machine)
    listed = ", ".join(f"{one.name} {one.address}" for one in everything) or "none"
    if not left:
        text, fix = _none_left(machine, everything, listed)
        yield error("interface", text, "Creating a communicator fails: no socket interface found.", fix)
        return
    chosen = left[0]
    text = f"{chosen.name} {chosen.address} would be chosen of: {listed}"
    if _traps(chosen):
        yield warning(
            "interface",
            text,
            "Other machines do not reach this address. On one machine it does.",
            _FIX_NAME.format("eth0"),
        )
    else:
        yield ok("interface", text)
    yield from _prefixes(spec, everything)


def _traps(one: Interface) -> bool:
    return one.loopback or one.link_local or one.name.startswith(("docker", "virbr", "veth"))


def _prefixes(spec: str, everything: list[Interface]) -> Iterator[Finding]:
    """Look for names that select other interfaces, too, since a name without = is a prefix."""
    if not spec or spec.removeprefix("^").startswith("="):
        return
    sign = "^" if spec.startswith("^") else ""
    for part in filter(None, spec.removeprefix("^").split(",")):
        more = sorted({one.name for one in everything if one.name.startswith(part) and one.name != part})
        if more and any(one.name == part for one in everything):
            yield warning(
                "interface",
                f"NCCL_SOCKET_IFNAME={spec!r} selects {', '.join(more)}, too",
                "A name without = is a prefix.",
                f"NCCL_SOCKET_IFNAME={sign}={spec.removeprefix('^')}",
            )


def mtu(machine: Machine) -> tuple[str, int] | None:
    """Return the name and the MTU of the interface that would be chosen."""
    left = candidates(machine)
    text = machine.read(_NET, left[0].name, "mtu") if left else None
    return (left[0].name, int(text)) if text else None


def check_names(machine: Machine) -> Iterator[Finding]:
    """Resolve the name of this machine and that of rank 0's, which other machines must reach."""
    own = socket.gethostname()
    try:
        addresses = _addresses(own)
    except OSError as failure:
        yield warning(
            "names",
            f"this machine's name {own!r} cannot be resolved: {failure}",
            "Launchers give it to other ranks as MASTER_ADDR.",
            "Add it to /etc/hosts or the name service.",
        )
    else:
        looped = all(map(is_loopback, addresses))
        text = f"{own} is {', '.join(addresses)}"
        yield ok("names", text + (", which other machines cannot reach" if looped else ""))
    launcher, at = _environment.NOBODY, None
    # The check of the launcher reports variables that cannot be read.
    with suppress(BootstrapError):
        launcher = _environment.detect(machine.environ)
        at = _environment.master(machine.environ, launcher)
    if host := at[0] if at else machine.environ.get("MASTER_ADDR", "").strip("[]"):
        yield _master(machine, launcher, host)


def _addresses(host: str) -> list[str]:
    return list(dict.fromkeys(str(where[0]) for _, where in resolve(host, 0, _RESOLVE_SECONDS)))


def _master(machine: Machine, launcher: Launcher, host: str) -> Finding:
    source = _environment.host_source(machine.environ)
    try:
        addresses = _addresses(host)
    except OSError as failure:
        return error(
            "names",
            f"{source} is {host!r}, which cannot be resolved: {failure}",
            "The ranks cannot find rank 0.",
            "Set MASTER_ADDR to a name or address that every machine knows.",
        )
    text = f"{source} {host} is {', '.join(addresses)}"
    # The check of the launcher reports addresses and localhost.
    looped = host not in ("localhost", *addresses) and all(map(is_loopback, addresses))
    if not (looped and (others := elsewhere(machine, launcher))) or _listens_everywhere(machine):
        return ok("names", text)
    own = listener_host(machine)
    # Rank 0 runs here if the name is this machine's.
    named = host == socket.gethostname() and not is_loopback(own)
    return error(
        "names",
        f"{text}, which other machines cannot reach, and {others}",
        "Rank 0 would listen at this address, where no other machine finds it; other ranks would look for it "
        "on their own machines.",
        f"On every rank MASTER_ADDR={own if named else _MASTER}; or take {host} out of the line of "
        f"{addresses[0]} in /etc/hosts.",
    )


def elsewhere(machine: Machine, launcher: Launcher) -> str:
    """Return what says that ranks of other machines look for rank 0's address; "" if nothing does."""
    environ = machine.environ
    by_mpi = launcher.names.mpi and importlib.util.find_spec("mpi4py") is not None
    if (launcher.size or 1) == 1 or "PYNCCL_STORE" in environ or by_mpi:
        # There are no others, or they meet by other ways.
        return ""
    local = next((count for name in _LOCAL_SIZES if (count := machine.number(name)) is not None), None)
    if local is not None:
        few = local < (launcher.size or 1)
        return f"only {local} of {launcher.size} ranks are on this machine" if few else ""
    nodes = [name for name in _NODES if machine.number(name) is not None]
    several = nodes and (machine.number(nodes[0]) or 0) > 1 and _environment.by_srun(environ)
    return f"{nodes[0]} is {environ[nodes[0]]}" if several else ""


def _listens_everywhere(machine: Machine) -> bool:
    """Tell whether the agent of torchrun on this machine serves the ranks, at every address of it."""
    return _environment.uses_agent_store(machine.environ) and machine.environ.get("GROUP_RANK") == "0"


def check_rdma(machine: Machine) -> Iterator[Finding]:
    """Look at the ports of the InfiniBand and RoCE devices."""
    folder = "sys/class/infiniband"
    cards = machine.names(folder)
    wanted = machine.environ.get("NCCL_IB_HCA", "")
    if not cards:
        if wanted:
            yield error(
                "RDMA",
                f"NCCL_IB_HCA={wanted!r}, and this machine has no RDMA device",
                "NCCL uses TCP.",
                "unset NCCL_IB_HCA, or load the driver; in a container, pass --device /dev/infiniband.",
            )
        else:
            yield ok("RDMA", "no device; ranks of other machines are reached by TCP")
        return
    ports = {
        f"{card}:{port}": machine.read(folder, card, "ports", port, "state") or "unknown"
        for card in cards
        for port in machine.names(folder, card, "ports")
    }
    active = [port for port, state in ports.items() if "ACTIVE" in state]
    text = ", ".join(f"{port} {state}" for port, state in ports.items())
    if not active:
        yield warning("RDMA", text, "NCCL uses TCP.", "Check the cable, and the subnet manager: ibstat")
    elif wanted and not any(_is_selected(wanted, port) for port in active):
        yield error(
            "RDMA",
            f"NCCL_IB_HCA={wanted!r} matches no active port of {text}",
            "NCCL uses TCP.",
            f"NCCL_IB_HCA={active[0].partition(':')[0]}",
        )
    elif not [name for name in machine.names("dev/infiniband") if name.startswith("uverbs")]:
        yield error(
            "RDMA",
            f"{text}; /dev/infiniband has no uverbs device",
            "NCCL cannot open the device and uses TCP.",
            "modprobe ib_uverbs; in a container, pass --device /dev/infiniband.",
        )
    else:
        yield ok("RDMA", text)


def _is_selected(spec: str, port: str) -> bool:
    """Tell whether [^][=]CARD[:PORT][,...] selects a port."""
    without, names = spec.startswith("^"), spec.removeprefix("^")
    exact, listed = names.startswith("="), [part for part in names.removeprefix("=").split(",") if part]
    card, _, number = port.partition(":")
    for part in listed:
        name, _, wanted = part.partition(":")
        if (card == name if exact else card.startswith(name)) and wanted in ("", number):
            return not without
    return without


def check_peer_memory(machine: Machine) -> Iterator[Finding]:
    """Look whether RDMA devices can reach the memory of GPUs."""
    if not (machine.names("sys/class/infiniband") and machine.gpus()):
        return
    modules = [
        name for name in ("nvidia_peermem", "nv_peer_mem") if machine.path("sys/module", name).exists()
    ]
    if modules:
        yield ok("GPUDirect RDMA", f"{modules[0]} is loaded")
    else:
        yield warning(
            "GPUDirect RDMA",
            "neither nvidia_peermem nor nv_peer_mem is loaded",
            "Without one of them, and without DMA-BUF, data of GPUs goes through host memory.",
            "modprobe nvidia_peermem",
        )


def listener_host(machine: Machine) -> str:
    """Return the address at which other ranks would reach this one."""
    left = [one.address for one in candidates(machine) if not one.link_local]
    return left[0] if left else "127.0.0.1"


CHECKS = (check_interfaces, check_names, check_rdma, check_peer_memory)
