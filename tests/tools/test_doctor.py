"""`pynccl doctor`: each test brings a fault about and reads what is said of it."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fake_nccl
import pynccl
from bench_runs import changed_library, library_with
from conftest import ROOT
from hosts import Hosts, needs_root
from hosts import joined as joined_hosts
from launchers import PYNCCL_RUN, without_launchers
from meeting import free_port, state, until
from parameters import slow_except
from processes import completed, piped
from pynccl._tools.doctor import devices, known, network
from pynccl._tools.doctor import environment as variables_of
from pynccl._tools.doctor.command import Check
from pynccl._tools.machine import Machine
from pynccl.bootstrap._variables import PYNCCL
from sysfs import GPU, pci
from terminals import GREEN, RED, YELLOW, in_terminal

pytestmark = pytest.mark.timeout(50)

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels used here are for x86_64")
COMMAND = [sys.executable, "-m", "pynccl", "doctor", "--json"]
Finding = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    outside = ("CUDA_VISIBLE_DEVICES", "container")
    kept = {name: value for name, value in without_launchers().items() if not name.startswith(outside)}
    return kept | {"PYNCCL_LIBRARY": "cpu", "HOME": "/nonexistent"} | more


def start(
    *args: str | Path,
    prefix: Sequence[str] = (),
    preexec: Callable[[], None] | None = None,
    **env: str,
) -> subprocess.Popen[str]:
    return piped([*prefix, *COMMAND, *map(str, args)], env=environment(**env), cwd=ROOT, preexec_fn=preexec)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert not err, out + err
    return process.returncode, out


def doctor(*args: str | Path, **options: Any) -> list[Finding]:
    """Return the findings of a run whose exit code fits them."""
    code, out = ended(start(*args, **options))
    said = json.loads(out)
    levels = [finding["level"] for finding in said["findings"]]
    assert said["worst"] == ("error" if "error" in levels else "warning" if "warning" in levels else "ok")
    assert code == (2 if "error" in levels else 0)
    assert all(bool(one["why"] and one["fix"]) == (one["level"] != "ok") for one in said["findings"])
    return list(said["findings"])


def those(findings: list[Finding], name: str, level: str | None = None) -> list[Finding]:
    return [one for one in findings if one["name"] == name and level in (None, one["level"])]


def only(findings: list[Finding], name: str, level: str) -> Finding:
    (found,) = those(findings, name)
    assert found["level"] == level, found
    return found


def found_by(check: Check, root: Path = Path("/"), **environ: str) -> list[Any]:
    """Return the findings of one check, called here."""
    return list(check(Machine(root, environ)))


def said(check: Check, root: Path = Path("/"), **environ: str) -> Any:
    """Return the only finding of one check, called here."""
    (found,) = found_by(check, root, **environ)
    return found


# --- the command --------------------------------------------------------------------------------------------


def plain(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pynccl", "doctor", *args]
    return completed(command, env=environment(**env), timeout=40)


def test_text_and_exit_codes() -> None:
    done = plain("--only", "environment", "--strict", NCCL_DEBUGG="INFO")
    assert done.returncode == 1
    name, why, fix, *_ = done.stdout.splitlines()
    assert name.startswith("warning  variables  NCCL_DEBUGG is a name that no NCCL from 2.16 ")
    assert why.split() == ["why:", "The", "setting", "has", "no", "effect."]
    assert fix.strip() == "to do: unset NCCL_DEBUGG, or set NCCL_DEBUG"
    assert done.stdout.endswith("errors: 0, warnings: 1, ok: 1\n")
    assert plain("--only", "environment", "--strict", RANK="x").returncode == 2
    assert plain("--only", "libraries", "--strict").returncode == 0
    wrong = plain("--root", "/nonexistent")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.endswith(
        "Error: Invalid value for '--root': Directory '/nonexistent' does not exist.\n"
    )


def test_control_characters_of_values_are_escaped() -> None:
    hostile = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234", "MASTER_ADDR": "a\x1b[31mX\nerror FAKE"}
    done = plain("--only", "network", "--timeout", "1", **hostile)
    assert r"cannot listen at a\x1b[31mX\nerror FAKE:1234" in done.stdout
    assert "\x1b" not in done.stdout and "\nerror FAKE" not in done.stdout


def test_levels_have_colours_in_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pynccl", "doctor", "--only", "libraries", "--only", "environment"]
    env = environment(NCCL_DEBUGG="1", PYNCCL_LIBRARY=str(tmp_path / "gone"))
    shown, code = in_terminal(command, env)
    assert code == 2
    levels = {"error": RED, "warning": YELLOW, "ok": GREEN}
    starts = [f"{colour}{level:8}\x1b[0m " for level, colour in levels.items()]
    found = [start for line in shown for start in starts if line.startswith(start)]
    assert set(found) == set(starts)
    # Each finding, and the sums; what to do about it is plain.
    assert sum("\x1b" in line for line in shown) == len(found) + 1
    assert shown[-2].startswith(f"{RED}errors: 1, warnings: 1, ok: ")
    plain, _ = in_terminal(command, env, NO_COLOR="1")
    assert plain == [re.sub(r"\x1b\[\d+m", "", line) for line in shown]


def findings_of_the_source() -> dict[str, set[str]]:
    """Return the names of findings, each with the names of the functions that make them."""
    names: dict[str, set[str]] = {}
    for path in (ROOT / "pynccl/_tools/doctor").glob("*.py"):
        module = ast.parse(path.read_text())
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            # A name is a text, or a constant of the module or the function.
            texts = {
                ast.unparse(node.targets[0]): ast.literal_eval(node.value)
                for node in (*module.body, *ast.walk(function))
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            }
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) in ("ok", "warning", "error"):
                    first = call.args[0]
                    name = first.value if isinstance(first, ast.Constant) else texts.get(ast.unparse(first))
                    # A helper gets the name from the check, which makes others with it.
                    if name is not None:
                        names.setdefault(str(name), set()).add(function.name)
    return names


def test_every_check_has_a_test_and_a_line_in_the_docs() -> None:
    made = findings_of_the_source()
    rows = re.findall(
        r"^\|[^|]*\| ([^|]+?) \|", (ROOT / "docs/doctor.md").read_text().split("## The checks")[1], re.M
    )
    # The table begins with its head.
    assert set(rows[1:]) == set(made)
    tests = Path(__file__).read_text()
    untested = [
        name for name, functions in made.items()
        if f'"{name}"' not in tests and not any(f".{function}," in tests for function in functions)
    ]  # fmt: skip
    assert not untested


# --- libraries ----------------------------------------------------------------------------------------------


def banner_file(path: Path, version: str, cuda: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\0" * 5000 + f"NCCL version {version}+cuda{cuda}".encode() + b"\0")
    return path


def test_no_library(tmp_path: Path) -> None:
    gone = tmp_path / "libnccl.so"
    found = doctor("--only", "libraries", PYNCCL_LIBRARY=str(gone))
    assert f"names {gone}, which does not exist" in only(found, "library", "error")["text"]
    assert only(doctor("--only", "libraries"), "library", "ok")["text"].startswith("the CPU library 2.32.3, ")


def test_no_library_and_no_driver() -> None:
    """What can work here comes first, and nothing claims that the CPU library is selected."""
    themes = ("--only", "libraries", "--only", "devices")
    found = doctor(*themes, PYNCCL_LIBRARY="auto")
    fix = only(found, "library", "warning")["fix"]
    assert fix.startswith("To run on CPU memory, set PYNCCL_LIBRARY=cpu")
    assert only(found, "driver", "ok")["text"].startswith("no NVIDIA GPU; PYNCCL_LIBRARY=cpu would select")
    text = only(doctor("--only", "devices"), "driver", "ok")["text"]
    assert text == "no NVIDIA GPU; programs run on the CPU library, which is selected"


def test_several_libraries(tmp_path: Path) -> None:
    wheel = banner_file(tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2", "2.28.9", "12.9")
    conda = banner_file(tmp_path / "conda" / "lib" / "libnccl.so.2", "2.19.3", "12.3")
    both = {"PYTHONPATH": str(tmp_path / "site"), "CONDA_PREFIX": str(tmp_path / "conda")}
    text = only(doctor("--only", "libraries", **both), "copies", "warning")["text"]
    assert f"{wheel} (2.28.9 with CUDA 12.9)" in text
    assert f"{conda} (2.19.3 with CUDA 12.3)" in text
    conda.write_bytes(wheel.read_bytes())
    only(doctor("--only", "libraries", **both), "copies", "ok")


@pytest.mark.parametrize("by", ["LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_a_library_that_the_dynamic_linker_finds(
    tmp_path: Path, compile_library: Callable[..., str], by: str
) -> None:
    """Or that it has loaded before the program starts."""
    conda = banner_file(tmp_path / "conda" / "lib" / "libnccl.so.2", "2.19.3", "12.3")
    banner = 'const char banner[] = "NCCL version 2.28.9+cuda12.9";\n'
    other = compile_library(fake_nccl.source(22809) + banner, "libnccl.so.2")
    named = {by: other if by == "LD_PRELOAD" else str(Path(other).parent)}
    text = only(
        doctor("--only", "libraries", CONDA_PREFIX=str(tmp_path / "conda"), **named), "copies", "warning"
    )["text"]
    assert f"{other} (2.28.9 with CUDA 12.9)" in text
    assert f"{conda} (2.19.3 with CUDA 12.3)" in text


def test_a_library_of_a_newer_cuda(
    fake_gpus: dict[str, str], compile_library: Callable[..., str], tmp_path: Path
) -> None:
    gpus = {"LD_LIBRARY_PATH": fake_gpus["LD_LIBRARY_PATH"]}
    for cuda, level in (("13.4", "ok"), ("14.0", "error")):
        banner = f'const char banner[] = "NCCL version 2.28.9+cuda{cuda}";\n'
        library = compile_library(fake_nccl.source(22809) + banner, "libnccl.so.2")
        found = doctor("--only", "libraries", PYNCCL_LIBRARY=library, **gpus)
        assert f"CUDA {cuda}" in only(found, "library's CUDA", level)["text"]


def test_the_other_package(tmp_path: Path) -> None:
    (tmp_path / "pynccl-0.1.2.dist-info").mkdir()
    (tmp_path / "pynccl-0.1.2.dist-info" / "METADATA").write_text("Name: pynccl\nVersion: 0.1.2\n")
    found = doctor("--only", "libraries", PYTHONPATH=str(tmp_path))
    assert only(found, "package", "error")["text"].endswith("version 0.1.2")


# --- devices ------------------------------------------------------------------------------------------------


def acs(control: int) -> bytes:
    """Return a configuration space whose second extended capability is ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x140 << 20 | 1 << 16 | 0x01)
    struct.pack_into("<IHH", space, 0x140, 1 << 16 | 0x0D, 0, control)
    return bytes(space)


def test_gpus_without_a_driver(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", **GPU)
    pci(tmp_path, "0000:02:00.0", **(GPU | {"class": "0x0c0330\n"}))
    text = only(doctor("--only", "devices", "--root", tmp_path), "driver", "error")["text"]
    assert text.startswith("the machine has 1 NVIDIA GPUs, and no driver can be used: ")


def test_devices_of_a_driver(fake_gpus: dict[str, str]) -> None:
    found = doctor("--only", "devices", **fake_gpus)
    assert only(found, "driver", "ok")["text"] == "supports CUDA 13.1; devices: 0 Fake 0, 1 Fake 1"
    only(found, "peer access", "ok")
    cut = doctor("--only", "devices", FAKE_CUDA_PEERS="0", **fake_gpus)
    assert only(cut, "peer access", "warning")["text"].endswith(": 0 to 1, 1 to 0")


def test_links_that_are_slower(fake_gpus: dict[str, str]) -> None:
    gpus = {"FAKE_CUDA_DEVICES": "3", **fake_gpus}
    same = only(doctor("--only", "devices", **gpus), "links", "ok")
    assert same["text"] == "rank 0 with atomics, as NVLink: 0 and 1, 0 and 2, 1 and 2"
    # Each of the driver's two answers counts.
    unlike = doctor("--only", "devices", FAKE_CUDA_LINKS="02:0:0 12:1:0", **gpus)
    assert only(unlike, "links", "warning")["text"] == (
        "some devices are joined by slower paths than others: rank 0 with atomics, as NVLink: 0 and 1; "
        "rank 0 without atomics, as PCIe: 0 and 2; rank 1 without atomics, as PCIe: 1 and 2"
    )
    unknown = doctor("--only", "devices", FAKE_CUDA_LINKS="none", **gpus)
    assert only(unknown, "links", "ok")["text"].startswith("not known: cuDeviceGetP2PAttribute failed with ")


def test_lanes_that_are_not_used(tmp_path: Path) -> None:
    gpu = GPU | {"current_link_speed": "2.5 GT/s PCIe\n", "max_link_width": "16\n"}
    first = pci(tmp_path, "0000:01:00.0", current_link_width="16\n", **gpu)
    pci(tmp_path, "0000:02:00.0", current_link_width="8\n", **gpu)
    # A virtual machine shows no link.
    pci(tmp_path, "0000:03:00.0", **GPU)
    pci(tmp_path, "0000:04:00.0", **(gpu | {"vendor": "0x8086\n", "current_link_width": "1\n"}))
    found = said(devices.check_pcie, tmp_path)
    assert (found.level, found.text) == (
        "warning",
        "GPUs that use fewer lanes than they have: 0000:02:00.0 x8 of x16",
    )
    (tmp_path / "sys/bus/pci/devices/0000:02:00.0/current_link_width").write_text("16\n")
    found = only(doctor("--only", "devices", "--root", tmp_path), "PCIe lanes", "ok")
    assert found["text"] == "0000:01:00.0 2.5 GT/s x16, 0000:02:00.0 2.5 GT/s x16"
    (first / "current_link_width").write_text("Unknown\n")
    assert said(devices.check_pcie, tmp_path).text == "0000:02:00.0 2.5 GT/s x16"


@pytest.mark.parametrize("value", ["", "0,0", "0,-1", "gpu0", "0,"])
def test_visible_devices_that_hide_others(value: str) -> None:
    found = said(devices.check_visible_devices, CUDA_VISIBLE_DEVICES=value)
    assert found.level == "error"
    assert f"{value.split(',')[-1]!r} is empty, repeated, or names no device" in found.text


def test_more_ranks_and_names_than_devices(fake_gpus: dict[str, str]) -> None:
    found = doctor("--only", "devices", LOCAL_WORLD_SIZE="3", CUDA_VISIBLE_DEVICES="0,GPU-1,5", **fake_gpus)
    assert "lists 3 devices, and the driver shows 2" in only(found, "visible devices", "error")["text"]
    assert only(found, "ranks and devices", "error")["text"].startswith("3 ranks on this machine, ")
    found = doctor("--only", "devices", LOCAL_WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="0,1", **fake_gpus)
    only(found, "visible devices", "ok")
    only(found, "ranks and devices", "ok")


def test_paths_and_bridges(tmp_path: Path) -> None:
    bridge = pci(tmp_path, "0000:00:01.0", config=acs(0x1D))
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        pci(tmp_path, gpu, "0000:00:01.0", numa_node="0\n", **GPU)
    pci(tmp_path, "0000:81:00.0", "0000:80:01.0", bus="pci0000:80", numa_node="1\n", **GPU)
    found = doctor("--only", "devices", "--root", tmp_path)
    assert only(found, "PCI paths", "ok")["text"] == (
        "one PCIe switch: 0000:01:00.0 and 0000:02:00.0; the link between NUMA nodes: "
        "0000:01:00.0 and 0000:81:00.0, 0000:02:00.0 and 0000:81:00.0"
    )
    text = only(found, "ACS", "warning")["text"]
    assert text == "PCI bridges with ACS redirection: 0000:00:01.0"
    (bridge / "config").write_bytes(acs(0x01))
    assert said(devices.check_acs, tmp_path).level == "ok"


def test_a_process_far_from_its_device(tmp_path: Path, fake_gpus: dict[str, str]) -> None:
    pci(tmp_path, "0000:01:00.0", numa_node="0\n", **GPU)
    pci(tmp_path, "0000:02:00.0", numa_node="1\n", **GPU)
    for node, cpus in (("node0", "5000-5003,5008"), ("node1", "0-4095")):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "sys/devices/system/node" / node / "cpulist").write_text(cpus)
    far = doctor("--only", "devices", "--root", tmp_path, LOCAL_RANK="0", **fake_gpus)
    assert "device 0 is at NUMA node 0 (processors 5000-" in only(far, "NUMA", "warning")["text"]
    near = doctor("--only", "devices", "--root", tmp_path, LOCAL_RANK="1", **fake_gpus)
    assert "NUMA node 1, next to device 1" in only(near, "NUMA", "ok")["text"]
    (tmp_path / "sys/bus/pci/devices/0000:02:00.0/numa_node").write_text("-1\n")
    unknown = doctor("--only", "devices", "--root", tmp_path, LOCAL_RANK="1", **fake_gpus)
    assert only(unknown, "NUMA", "ok")["text"] == "the NUMA node of device 1 is not known"


# --- network ------------------------------------------------------------------------------------------------


def test_no_interface_of_this_name() -> None:
    found = doctor("--only", "network", NCCL_SOCKET_IFNAME="nope0")
    assert "'nope0' matches no interface that is up; there are: " in only(found, "interface", "error")["text"]


@needs_root
def test_no_interface_of_this_family() -> None:
    prefix = ["unshare", "--net", "sh", "-ec", 'ip link set lo up; ip -6 addr flush lo; exec "$@"', "sh"]
    found = doctor("--only", "network", prefix=prefix, NCCL_SOCKET_FAMILY="AF_INET6")
    said = only(found, "interface", "error")
    assert said["text"] == (
        "NCCL_SOCKET_FAMILY='AF_INET6' matches no interface that is up; there are: lo 127.0.0.1"
    )
    assert said["fix"] == "unset NCCL_SOCKET_FAMILY"


@needs_root
def test_no_interface_that_is_up() -> None:
    found = doctor("--only", "network", prefix=["unshare", "--net"])
    said = only(found, "interface", "error")
    assert said["text"] == "no interface is up"
    assert said["fix"] == "ip link set lo up"


# What stands before the command, in a network namespace of its own; the shell's "$@" is the command.
ALONE = 'ip link set lo up; {} exec "$@"'


def within(script: str) -> list[str]:
    return ["unshare", "--net", "--mount", "sh", "-ec", ALONE.format(script), "sh"]


def with_interfaces(*names: str) -> list[str]:
    """Return a script that makes interfaces, each the end of a virtual cable."""
    steps = [
        f"ip link add {name} type veth peer name veth{i}; ip addr add 10.77.{i}.1/24 dev {name}; "
        f"ip link set {name} up; ip link set veth{i} up; "
        for i, name in enumerate(names)
    ]
    return within("".join(steps))


@needs_root
@pytest.mark.parametrize(
    ("names", "level", "chosen"),
    [("", "warning", "lo"), ("docker0", "warning", "docker0"), ("docker0 eth0", "ok", "eth0")],
)
def test_the_interface_that_is_chosen(names: str, level: str, chosen: str) -> None:
    found = doctor("--only", "network", prefix=with_interfaces(*names.split()))
    assert only(found, "interface", level)["text"].startswith(f"{chosen} ")


@needs_root
def test_an_address_of_one_link() -> None:
    """It is a trap for who names its interface; without a name it comes last."""
    prefix = within(
        "ip link add eth0 type veth peer name veth0; ip addr add 169.254.7.1/16 dev eth0; "
        "ip link set eth0 up; ip link set veth0 up; "
    )
    for name, chosen in (("eth0", "eth0 169.254.7.1 "), ("", "lo 127.0.0.1 ")):
        found = doctor("--only", "network", prefix=prefix, NCCL_SOCKET_IFNAME=name)
        assert only(found, "interface", "warning")["text"].startswith(chosen)


@needs_root
def test_a_bridge_of_virtual_machines() -> None:
    """It comes last, and is a trap for who names it."""
    prefix = with_interfaces("virbr0")
    for name, chosen in (("virbr0", "virbr0 10.77.0.1 "), ("", "lo 127.0.0.1 ")):
        found = doctor("--only", "network", prefix=prefix, NCCL_SOCKET_IFNAME=name)
        assert only(found, "interface", "warning")["text"].startswith(chosen)
    found = doctor("--only", "network", prefix=with_interfaces("virbr0", "eth0"))
    assert only(found, "interface", "ok")["text"].startswith("eth0 10.77.1.1 ")


@needs_root
def test_a_name_that_is_a_prefix() -> None:
    prefix = with_interfaces("net1", "net10")
    found = doctor("--only", "network", prefix=prefix, NCCL_SOCKET_IFNAME="net1")
    (warned,) = those(found, "interface", "warning")
    assert warned["text"] == "NCCL_SOCKET_IFNAME='net1' selects net10, too"
    assert warned["fix"] == "NCCL_SOCKET_IFNAME==net1"
    exact = doctor("--only", "network", prefix=prefix, NCCL_SOCKET_IFNAME="=net10")
    assert only(exact, "interface", "ok")["text"].startswith("net10 10.77.1.1 ")


def test_names() -> None:
    found = doctor("--only", "network", MASTER_ADDR="no.such.host.invalid")
    (master,) = those(found, "names", "error")
    assert "'no.such.host.invalid', which cannot be resolved" in master["text"]


AGENT = "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2"
SLURM = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=node[1-2]"
FEW = "only 2 of 4 ranks are on this machine"


@pytest.mark.parametrize(
    ("variables", "others"),
    [
        ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500", FEW),
        ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500", ""),
        ("RANK=x WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500", ""),
        # `pynccl run` has a store of its own.
        ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 PYNCCL_STORE=a:1", ""),
        # torchrun's agent on rank 0's machine listens at every address.
        (f"{AGENT} GROUP_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500", ""),
        (f"{AGENT} GROUP_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29500", FEW),
        (f"{OPEN_MPI} MASTER_ADDR=node1 MASTER_PORT=29500", FEW),
        (f"{SLURM} SLURM_NNODES=2", "SLURM_NNODES is 2"),
        (f"{SLURM} SLURM_NNODES=2 SLURM_STEP_NUM_NODES=1", ""),
        # A shell of salloc.
        ("SLURM_NNODES=2 MASTER_ADDR=node1", ""),
    ],
)
def test_a_name_of_rank_0_that_other_machines_cannot_reach(
    variables: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a machine with Debian's /etc/hosts."""
    looped = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: looped)
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environ = dict(pair.split("=") for pair in variables.split())
    _, found = found_by(network.check_names, **environ)
    source = "MASTER_ADDR" if "MASTER_ADDR" in environ else "the first host of Slurm's node list"
    text = f"{source} node1 is 127.0.1.1"
    if not others:
        assert (found.level, found.text) == ("ok", text)
        return
    assert (found.level, found.text) == ("error", f"{text}, which other machines cannot reach, and {others}")
    assert found.fix.startswith("On every rank MASTER_ADDR=the address of rank 0's machine")
    assert found.fix.endswith("; or take node1 out of the line of 127.0.1.1 in /etc/hosts.")
    assert said(variables_of.check_launcher, **environ).level == "ok"


def test_the_address_of_rank_0_is_proposed_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    looped = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: looped)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    eth0 = network.Interface("eth0", "192.0.2.7", 0)
    monkeypatch.setattr(network, "interfaces", lambda: [eth0])
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}
    _, found = found_by(network.check_names, **variables)
    assert found.level == "error"
    assert found.fix.startswith("On every rank MASTER_ADDR=192.0.2.7; or take node1 out of ")


@needs_root
def test_the_name_of_this_machine() -> None:
    prefix = ["unshare", "--uts", "sh", "-ec", 'hostname strange-name.invalid; exec "$@"', "sh"]
    (own,) = those(doctor("--only", "network", prefix=prefix), "names")
    assert own["level"] == "warning"
    assert "'strange-name.invalid' cannot be resolved" in own["text"]


def card(root: Path, state: str) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (root / "dev/infiniband").mkdir(parents=True)
    (root / "dev/infiniband/uverbs0").touch()


def test_rdma(tmp_path: Path) -> None:
    found = doctor("--only", "network", NCCL_IB_HCA="mlx5")
    assert "this machine has no RDMA device" in only(found, "RDMA", "error")["text"]
    card(tmp_path, "4: ACTIVE")
    assert said(network.check_rdma, tmp_path, NCCL_IB_HCA="=mlx5_0:1").text == "mlx5_0:1 4: ACTIVE"
    for spec in ("mlx5_1", "^mlx5", "mlx5_0:2", "=mlx5"):
        assert "matches no active port" in said(network.check_rdma, tmp_path, NCCL_IB_HCA=spec).text
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    found = said(network.check_rdma, tmp_path)
    assert found.level == "error" and "has no uverbs device" in found.text


def test_a_port_that_is_down_and_gpus(tmp_path: Path) -> None:
    card(tmp_path, "1: DOWN")
    pci(tmp_path, "0000:01:00.0", **GPU)
    found = doctor("--only", "network", "--root", tmp_path)
    assert only(found, "RDMA", "warning")["text"] == "mlx5_0:1 1: DOWN"
    only(found, "GPUDirect RDMA", "warning")
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert said(network.check_peer_memory, tmp_path).level == "ok"


# --- limits -------------------------------------------------------------------------------------------------


@needs_root
def test_a_small_shm() -> None:
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm; exec "$@"'
    found = doctor("--only", "limits", prefix=["unshare", "--mount", "sh", "-ec", mount, "sh"])
    assert only(found, "/dev/shm", "warning")["text"] == "8 MiB free of 8"


def test_no_shm_and_little_locked_memory(tmp_path: Path) -> None:
    card(tmp_path, "4: ACTIVE")
    found = doctor(
        "--only", "limits", "--root", tmp_path,
        preexec=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)),
    )  # fmt: skip
    only(found, "/dev/shm", "error")
    assert only(found, "memlock", "error")["text"] == "64 KiB of locked memory, and RDMA devices: mlx5_0"


def test_few_descriptors() -> None:
    found = doctor("--only", "limits", preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400)))
    said = only(found, "descriptors", "warning")
    assert said["text"] == "at most 200 open files; expected 1024 or more"
    assert said["fix"] == "ulimit -n 1024 as root: the hard limit is 400"


def test_few_descriptors_for_each_rank() -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 4000))  # noqa: E731
    said = only(doctor("--only", "limits", preexec=limit, WORLD_SIZE="300"), "descriptors", "warning")
    assert said["text"] == "at most 2000 open files; expected 2400 or more"
    assert said["fix"] == "ulimit -n 2400"
    only(doctor("--only", "limits", preexec=limit, WORLD_SIZE="250"), "descriptors", "ok")


def test_yama_and_containers(tmp_path: Path, compile_library: Callable[..., str]) -> None:
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    (tmp_path / "proc/1").mkdir()
    (tmp_path / "proc/1/cgroup").write_text("0::/kubepods/pod1\n")
    found = doctor("--only", "limits", "--root", tmp_path, container="podman")
    assert only(found, "Yama", "warning")["text"] == "ptrace_scope is 1"
    assert "signs: container=podman, kubepods;" in only(found, "container", "ok")["text"]
    nvidias = compile_library(fake_nccl.source(21903), "libnccl.so.2")
    found = doctor("--only", "limits", "--root", tmp_path, PYNCCL_LIBRARY=nvidias)
    assert only(found, "Yama", "ok")["text"].endswith("which NVIDIA's library does not need")
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("0\n")
    (tmp_path / "proc/1/cgroup").write_text("0::/\n")
    found = doctor("--only", "limits", "--root", tmp_path)
    only(found, "Yama", "ok")
    assert only(found, "container", "ok")["text"] == "no sign of one"


@pytest.mark.parametrize(
    ("scope", "fix"), [("2", "sysctl kernel.yama.ptrace_scope=1, "), ("3", "Accept it, or set ")]
)
def test_scopes_of_yama_that_no_program_can_allow(tmp_path: Path, scope: str, fix: str) -> None:
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    said = only(doctor("--only", "limits", "--root", tmp_path), "Yama", "warning")
    assert said["text"] == f"ptrace_scope is {scope}"
    assert said["fix"].startswith(fix)


# Refuses process_vm_readv with EPERM in this process and those that it becomes.
FILTER = """
import ctypes, os, platform, struct, sys
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_filter_of_system_calls() -> None:
    prefix = [sys.executable, "-c", FILTER]
    found = doctor("--only", "limits", "--only", "all_reduce", prefix=prefix)
    assert "process_vm_readv is refused: Operation not permitted" in only(found, "seccomp", "warning")["text"]
    assert "shared memory in place of direct reads" in only(found, "all_reduce", "warning")["text"]
    only(doctor("--only", "limits"), "seccomp", "ok")


def test_processors() -> None:
    found = doctor(
        "--only", "limits", preexec=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    )
    assert only(found, "processors", "ok")["text"] == "1 on which this process may run"


# --- the environment ----------------------------------------------------------------------------------------


def test_variables() -> None:
    found = doctor(
        "--only", "environment",
        NCCL_SOCKET_IFNAMES="eth0", NCCL_XYZZY="1", NCCL_BLOCKING_WAIT="1", PYNCCL_TIMEOUTS="3",
        NCCL_TESTS_DEVICE="0", NCCL_VERSION="2.28.9", NCCL_NET_GDR_LEVEL="PHB",
        NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="0", NCCL_DEBUG="info",
    )  # fmt: skip
    assert {one["text"].split()[0]: one["fix"] for one in those(found, "variables")} == {
        "NCCL_BLOCKING_WAIT": "unset NCCL_BLOCKING_WAIT, or set TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_SOCKET_IFNAMES": "unset NCCL_SOCKET_IFNAMES, or set NCCL_SOCKET_IFNAME",
        "NCCL_XYZZY": "unset NCCL_XYZZY",
        "PYNCCL_TIMEOUTS": "unset PYNCCL_TIMEOUTS, or set PYNCCL_TIMEOUT",
    }
    assert [one["text"] for one in those(found, "left-over", "warning")] == [
        "NCCL_P2P_DISABLE=1",
        "NCCL_DEBUG=info",
    ]


@pytest.mark.parametrize(
    ("name", "harmful", "harmless"),
    [
        ("NCCL_P2P_DISABLE", "1", ["0"]),
        ("NCCL_SHM_DISABLE", "1", ["0"]),
        ("NCCL_IB_DISABLE", "1", ["0"]),
        ("NCCL_NVLS_ENABLE", "0", ["1", "2"]),
        ("NCCL_CHECK_POINTERS", "1", ["0"]),
        ("NCCL_ALGO", "Ring", []),
        ("NCCL_PROTO", "Simple", []),
        ("PYNCCL_CPU_BLOCKING", "1", ["0"]),
        ("PYNCCL_CPU_DIRECT", "0", ["1"]),
        ("PYNCCL_CPU_FAULT", "call=1,action=die", []),
        ("PYNCCL_TRACE_STACKS", "1", ["0"]),
        ("NCCL_DEBUG", "trace", ["WARN", "VERSION"]),
    ],
)
def test_a_variable_that_was_left_over(name: str, harmful: str, harmless: list[str]) -> None:
    found = said(variables_of.check_left_over, **{name: harmful})
    assert (found.name, found.level, found.text) == ("left-over", "warning", f"{name}={harmful}")
    assert found.fix.startswith("NCCL_DEBUG=WARN" if name == "NCCL_DEBUG" else f"unset {name}")
    for value in ("", *harmless):
        assert not found_by(variables_of.check_left_over, **{name: value})


@pytest.mark.parametrize("value", slow_except(["abc"], ["abc", "-1", "nan", "0"]))
def test_a_time_out_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_TIMEOUT", value)
    found = said(variables_of.check_values, PYNCCL_TIMEOUT=value)
    assert (found.name, found.level) == ("PYNCCL_TIMEOUT", "error")
    assert found.text == f"PYNCCL_TIMEOUT is '{value}'; expected a positive number of seconds"
    monkeypatch.setenv("PYNCCL_TIMEOUT", "2.5")
    assert not found_by(variables_of.check_values, PYNCCL_TIMEOUT="2.5")


def test_a_check_mode_that_is_none() -> None:
    text = only(doctor("--only", "environment", PYNCCL_CHECK="x"), "PYNCCL_CHECK", "error")["text"]
    assert text == "PYNCCL_CHECK is 'x'; expected 0 or 1"
    assert not those(doctor("--only", "environment", PYNCCL_CHECK="1"), "PYNCCL_CHECK")


@pytest.mark.parametrize("value", slow_except(["xx"], ["xx", "::1:5", "localhost:0"]))
def test_an_address_of_ras_that_is_none(value: str) -> None:
    found = said(variables_of.check_ras_address, NCCL_RAS_ADDR=value)
    assert (found.name, found.level) == ("NCCL_RAS_ADDR", "warning")
    assert found.text == f"NCCL_RAS_ADDR is '{value}'; expected HOST:PORT or [IPV6]:PORT"
    assert not found_by(variables_of.check_ras_address, NCCL_RAS_ADDR="[::1]:5")


def test_a_variable_that_only_the_library_knows(compile_library: Callable[..., str]) -> None:
    source = fake_nccl.source(23300) + 'const char tomorrow[] = "NCCL_OF_TOMORROW";\n'
    library = compile_library(source, "libnccl.so.2")
    # Behind what is loaded into memory, as debug information.
    with open(library, "ab") as file:
        file.write(b"\0NCCL_CONSTANT_OF_TOMORROW\0")
    found = doctor("--only", "environment", PYNCCL_LIBRARY=library, NCCL_OF_TOMORROW="1")
    assert only(found, "variables", "ok")["text"].endswith("all known")
    found = doctor("--only", "environment", PYNCCL_LIBRARY=library, NCCL_CONSTANT_OF_TOMORROW="1")
    assert only(found, "variables", "warning")["text"].startswith("NCCL_CONSTANT_OF_TOMORROW is a name ")


# Some are names of 2.31, of 2.32, and of 2.31 alone.
NEWEST = ("CFT_ENABLE", "IB_RAIL_POLICY", "RUN_DIAGNOSTICS", "DEBUG_LEVELS", "TOPO_SCATTER_START_NET")
# Strings of the library 2.32.3 that are no variables: constants of debug information and of messages.
NO_VARIABLES = ("P2P", "SHM", "TUNING", "IPC_SENDRECV", "CONFIG_INITIALIZER", "GIN_CONNECTION_FULL")


def test_variables_of_the_newest_nccl() -> None:
    """They are known without NVIDIA's library; variables of pynccl without its first letters are not."""
    some = {f"NCCL_{name}": "1" for name in (*NEWEST, "CPU_DIRECT", *NO_VARIABLES)}
    strange = those(doctor("--only", "environment", **some), "variables", "warning")
    assert {one["text"].split()[0] for one in strange} == {
        f"NCCL_{name}" for name in ("CPU_DIRECT", *NO_VARIABLES)
    }


@needs_x86
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_strings_of_nvidias_library_that_are_no_variables(released: Callable[[str], str]) -> None:
    library = released("2.32.3")
    content = Path(library).read_bytes()
    assert all(f"NCCL_{name}\0".encode() in content for name in NO_VARIABLES)
    some = {f"NCCL_{name}": "1" for name in (*NEWEST, *NO_VARIABLES)}
    found = those(doctor("--only", "environment", PYNCCL_LIBRARY=library, **some), "variables", "warning")
    assert {one["text"].split()[0] for one in found} == {f"NCCL_{name}" for name in NO_VARIABLES}


def test_the_list_of_our_variables_is_that_of_the_page() -> None:
    text = (ROOT / "docs" / "variables.md").read_text()
    page = set(re.findall(r"^\| `(PYNCCL_\w+)`", text, re.M)) | {"PYNCCL_SECRET_FILE"}
    assert page == PYNCCL
    documented = set(re.findall(r"^\| `(NCCL_\w+)`", text, re.M))
    assert documented <= known.NCCL


def test_files_of_settings(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# of the administrator\nNCCL_DEBUG=WARN\nNCCL_IBHCA=mlx5\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    found = doctor("--only", "environment", "--root", tmp_path, HOME=str(tmp_path), NCCL_DEBUG="WARN")
    texts = [one["text"] for one in those(found, "nccl.conf", "ok")]
    assert texts == [
        f"{tmp_path}/.nccl.conf sets NCCL_ALGO=Ring",
        f"{tmp_path}/etc/nccl.conf sets NCCL_DEBUG=WARN, NCCL_IBHCA=mlx5; the environment covers NCCL_DEBUG",
    ]
    (strange,) = those(found, "nccl.conf", "warning")
    assert strange["fix"] == f"remove it from {tmp_path}/etc/nccl.conf, or set NCCL_IB_HCA"


def test_a_file_of_settings_that_is_not_there(tmp_path: Path) -> None:
    found = said(variables_of.check_files, tmp_path, NCCL_CONF_FILE=str(tmp_path / "gone"))
    assert f"{tmp_path}/gone, which is not a file" in found.text
    os.mkfifo(tmp_path / "pipe")
    named = doctor("--only", "environment", NCCL_CONF_FILE=str(tmp_path / "pipe"))
    assert f"{tmp_path}/pipe, which is not a file" in only(named, "nccl.conf", "error")["text"]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ("RANK=two WORLD_SIZE=4", "RANK is 'two'; expected a number"),
        ("RANK=4 WORLD_SIZE=4", "RANK is 4 and WORLD_SIZE 4"),
        ("RANK=0", "RANK is 0, and WORLD_SIZE is not set"),
        ("WORLD_SIZE=4", "WORLD_SIZE is 4, and RANK is not set"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE is 4, more than WORLD_SIZE 2"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE 1"),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1234",
            "MASTER_ADDR is localhost, and only 2 of 4 ranks are on this machine",
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2 MASTER_ADDR=127.0.1.1 MASTER_PORT=1234",
            "MASTER_ADDR is 127.0.1.1, and SLURM_NNODES is 2",
        ),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT is 70000"),
    ],
)
def test_launchers_that_contradict_themselves(variables: str, text: str) -> None:
    environ = dict(pair.split("=") for pair in variables.split())
    found = said(variables_of.check_launcher, **environ)
    assert found.level == "error"
    assert text in found.text


def test_ranks_of_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert said(variables_of.check_launcher, **ranks).level == "ok"
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    found = said(variables_of.check_launcher, **ranks)
    assert found.level == "error"
    assert found.text.startswith("Open MPI's variables (")
    assert found.text.endswith(" started the ranks, and mpi4py is not installed")
    assert found.fix == "pip install mpi4py, or set MASTER_ADDR and MASTER_PORT."
    at = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert said(variables_of.check_launcher, **ranks, **at).level == "ok"


def test_two_launchers() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    one, other = found_by(variables_of.check_launcher, RANK="1", WORLD_SIZE="2", **slurm)
    assert (one.level, other.level) == ("ok", "warning")
    assert other.text == "RANK=1 of 2, but SLURM_PROCID=0 of SLURM_NTASKS=1"
    assert "Slurm's variables" in said(variables_of.check_launcher, SLURM_PROCID="1", SLURM_NTASKS="2").text


def test_a_batch_script_of_slurm() -> None:
    """Several tasks without srun are an error; mpirun, whose ranks have the script's variables, is none."""
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    alone = said(variables_of.check_launcher, **batch)
    assert alone.level == "error"
    assert "the job has 2 tasks; expected `srun python ...`" in alone.text
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert said(variables_of.check_launcher, **batch, **mpirun).level == "ok"
    found = doctor("--only", "environment", "--only", "job", **batch)
    only(found, "launcher", "error")


# --- all_reduce ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", slow_except(["1"], ["0", "1"]))
def test_all_reduce_over_each_transport(direct: str) -> None:
    """Also over the one that a variable keeps programs from."""
    found = doctor("--only", "all_reduce", PYNCCL_CPU_DIRECT=direct)
    text = only(found, "all_reduce", "ok")["text"]
    assert re.fullmatch(r"1 MiB on 2 ranks: direct reads \d+ us, shared memory \d+ us, tcp \d+ us", text)


def test_an_all_reduce_that_fails() -> None:
    fault = {"PYNCCL_CPU_FAULT": "rank=1,call=1,action=fail:3"}
    only(doctor("--only", "all_reduce", "--timeout", "20", **fault), "all_reduce", "error")


def test_an_all_reduce_that_hangs() -> None:
    fault = {"PYNCCL_CPU_FAULT": "rank=1,call=3,action=sleep:100"}
    text = only(doctor("--only", "all_reduce", "--timeout", "6", **fault), "all_reduce", "error")["text"]
    assert re.match(r"rank \d: .*all_reduce", text) and re.search(r"did not (complete|return)", text)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PYNCCL_TIMEOUT=x", "PYNCCL_TIMEOUT is 'x'; expected a positive number of seconds"),
        pytest.param("PYNCCL_CHECK=x", "PYNCCL_CHECK is 'x'; expected 0 or 1", marks=pytest.mark.slow),
        ("PYNCCL_LIBRARY=/etc/passwd", "PYNCCL_LIBRARY names /etc/passwd, a library that cannot be used: "),
    ],
)
def test_a_variable_with_which_programs_fail(variable: str, text: str) -> None:
    """It fails here as in a job."""
    env = dict([variable.split("=")])
    alone = doctor("--only", "all_reduce", **env)
    first, second = job("--only", "all_reduce", "--timeout", "10", each=[env, env])
    assert second == (0, "")
    for found in (alone, findings(first)):
        failed = only(found, "all_reduce", "error")["text"]
        assert re.sub(r"^rank \d: ", "", failed).startswith(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_doctor_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    process = start("--only", "all_reduce", TMPDIR=str(tmp_path), PYNCCL_CPU_FAULT="call=1,action=sleep:100")
    try:
        until(lambda: list(tmp_path.glob("pynccl-testing-*/*")))
        process.send_signal(number)
        process.communicate(timeout=20)
    finally:
        process.kill()
    # pynccl.testing removes its folders of runs that were killed in its next run.
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("pynccl-testing-")]


# --- jobs ---------------------------------------------------------------------------------------------------


def test_no_job() -> None:
    found = only(doctor("--only", "job"), "ranks", "error")
    assert found["text"] == "no launcher has started this process, so there is no job"
    assert plain("--only", "job").returncode == 2
    alone = doctor("--only", "job", RANK="0", WORLD_SIZE="1")
    assert only(alone, "ranks", "ok")["text"] == "this is the only rank of its job"
    for theme in ("job", "all_reduce"):
        (wrong,) = doctor("--only", theme, RANK="3", WORLD_SIZE="2")
        assert (wrong["name"], wrong["text"][:27]) == ("launcher", "RANK is 3 and WORLD_SIZE 2:")


@pytest.mark.parametrize("theme", ["all_reduce", "limits"])
def test_a_job_makes_one_report_of_any_theme(theme: str) -> None:
    first, second = job("--only", theme, each=[{}, {}])
    assert second == (0, "")
    names = {one["name"] for one in findings(first)}
    assert names == {"all_reduce"} if theme == "all_reduce" else "descriptors" in names
    assert not names & {"ranks", "versions", "MTU"}


def job(
    *args: str,
    each: Sequence[dict[str, str]],
    size: int = 0,
    places: Sequence[Sequence[str]] = (),
    host: str = "127.0.0.1",
) -> list[tuple[int, str]]:
    """Run one rank with each of these environments, and return their exit codes and output."""
    at = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size or len(each))}
    ranks = [
        start(*args, prefix=places[i] if places else (), **({"RANK": str(i)} | at | env))
        for i, env in enumerate(each)
    ]
    return [ended(rank) for rank in ranks]


def findings(done: tuple[int, str]) -> list[Finding]:
    return list(json.loads(done[1])["findings"])


@pytest.mark.parametrize("launcher", ["pynccl run", "mpirun"])
def test_a_job_of_a_launcher(launcher: str) -> None:
    starts = [*PYNCCL_RUN, "-n", "2", "--no-tag"]
    if launcher == "mpirun":
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert mpirun is not None
        starts = [mpirun, "-n", "2", sys.executable]
    command = [*starts, "-m", "pynccl", "doctor"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = environment(NCCL_DEBUGG="1", **root)
    done = completed(command, env=env, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("errors: 0, warnings: ") == 1
    assert re.search(r"^warning  variables +NCCL_DEBUGG .* \(ranks 0, 1\)$", done.stdout, re.M), done.stdout
    assert re.search(r"^ok       ranks +all 2 came, on 1 machine$", done.stdout, re.M)
    assert re.search(r"^ok       all_reduce +1 MiB on 2 ranks: direct reads \d+ us, ", done.stdout, re.M)


@pytest.mark.parametrize("call", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_that_dies(call: int) -> None:
    """Rank 0 reports it before the launcher kills it."""
    env = environment(PYNCCL_CPU_FAULT=f"rank=1,call={call},action=die")
    command = [*PYNCCL_RUN, "-n", "3", "--no-tag", "-m", "pynccl", "doctor", "--only", "all_reduce"]
    done = completed(command, env=env, timeout=40)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"^error +all_reduce +rank [02]: rank 1 .*died", done.stdout, re.M), (
        done.stdout + done.stderr
    )


DIES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
int ncclCommDestroy(void* comm) {
  int (*real)(void*) = dlsym(RTLD_NEXT, "ncclCommDestroy");
  int result = real(comm);
  if (atoi(getenv("RANK")) == 1) raise(SIGKILL);
  return result;
}
"""


def test_a_rank_that_dies_between_two_transports(tmp_path: Path) -> None:
    """The others wait for it in pynccl.init, and report it before the launcher kills them."""
    env = environment(PYNCCL_LIBRARY=changed_library(tmp_path, DIES))
    command = [*PYNCCL_RUN, "-n", "3", "--no-tag", "-m", "pynccl", "doctor", "--only", "all_reduce"]
    done = completed(command, env=env, timeout=40)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"^error +all_reduce +rank 1 did not finish$", done.stdout, re.M), (
        done.stdout + done.stderr
    )


def test_ranks_that_differ(compile_library: Callable[..., str]) -> None:
    library = compile_library(fake_nccl.source(21903), "libnccl.so.2")
    other = {"PYNCCL_LIBRARY": library, "NCCL_ALGO": "Tree", "NCCL_HOSTID": "b"}
    first, second = job("--only", "job", each=[{"NCCL_ALGO": "Ring"}, other])
    assert second == (0, "")
    assert first[0] == 2
    (different,) = those(findings(first), "versions", "error")
    assert different["text"] == "library differs: the CPU library 2.32.3 on rank 0, NCCL 2.19.3 on rank 1"
    (warned,) = those(findings(first), "variables of ranks")
    assert warned["text"] == "NCCL_ALGO differs: Ring on rank 0, Tree on rank 1"


# Other releases than this rank's own.
OTHER_VERSIONS = """
import platform, pynccl._base.version
pynccl._base.version.__version__ = "9.8.7"
platform.python_version_tuple = lambda: ("3", "99", "0")
"""


def test_versions_that_differ(tmp_path: Path, fake_gpus: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSIONS)
    other = {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": fake_gpus["LD_LIBRARY_PATH"]}
    (code, out), _ = job("--only", "job", each=[{}, other])
    assert code == 2
    found = findings((code, out))
    mine, python = pynccl.__version__, ".".join(map(str, sys.version_info[:2]))
    (package,) = those(found, "versions", "error")
    assert package["text"] == f"pynccl differs: {mine} on rank 0, 9.8.7 on rank 1"
    assert [one["text"] for one in those(found, "versions", "warning")] == [
        f"Python differs: {python} on rank 0, 3.99 on rank 1",
        "CUDA driver differs: not set on rank 0, 13.1 on rank 1",
    ]


def test_more_ranks_than_processors() -> None:
    """However each rank is bound: mpirun gives each a processor of its own, srun may give all the same."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert len(cores) == 2, "this test needs two processors"
    one, other = ([["taskset", "-c", str(core)] for core in where] for where in (cores, cores[:1] * 2))
    first, _ = job("--only", "job", each=[{}, {}], places=one)
    assert (
        only(findings(first), "processors", "ok")["text"]
        == "no machine has more ranks than processors for them"
    )
    first, _ = job("--only", "job", each=[{}, {}], places=other)
    text = only(findings(first), "processors", "warning")["text"]
    assert re.fullmatch(r"2 ranks on \S+, and 1 of its processors for them", text)


def test_a_job_without_a_library(tmp_path: Path) -> None:
    """Without a driver the ranks use the CPU library, unless they name another one."""
    themes = ("--only", "job", "--only", "all_reduce")
    first, _ = job(*themes, each=[{"PYNCCL_LIBRARY": "auto"}] * 2)
    assert only(findings(first), "all_reduce", "ok")["text"].startswith("1 MiB on 2 ranks: direct reads ")
    gone = {"PYNCCL_LIBRARY": str(tmp_path / "libnccl.so")}
    first, _ = job(*themes, "--timeout", "10", each=[gone] * 2)
    text = only(findings(first), "all_reduce", "error")["text"]
    assert text.startswith(f"rank 0: PYNCCL_LIBRARY names {tmp_path / 'libnccl.so'}, which does not exist")


@pytest.mark.slow
def test_ranks_that_do_not_come() -> None:
    begin = time.monotonic()
    first, second = job("--only", "job", "--timeout", "8", each=[{}, {"RANK": "2"}], size=4)
    assert time.monotonic() - begin < 20
    assert second == (0, "")
    absent = only(findings(first), "ranks", "error")
    assert absent["text"] == "ranks 1, 3 of 4 did not come"


STOPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
int ncclAllReduce(const void* s, void* r, size_t n, int type, int op, void* comm, void* stream) {
  if (atoi(getenv("RANK")) == 1) raise(SIGSTOP);
  int (*real)(const void*, void*, size_t, int, int, void*, void*) = dlsym(RTLD_NEXT, "ncclAllReduce");
  return real(s, r, n, type, op, comm, stream);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["meeting", "all_reduce"])
def test_a_rank_that_is_stopped(tmp_path: Path, where: str) -> None:
    """The others end in time, and name it."""
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    if where == "all_reduce":
        at["PYNCCL_LIBRARY"] = changed_library(tmp_path, STOPS)
    begin = time.monotonic()
    themes = ("--only", "job", "--only", "all_reduce", "--timeout", "14")
    ranks = [start(*themes, RANK=str(rank), **at) for rank in range(2)]
    try:
        if where == "meeting":
            # It has said what it knows of itself, and waits with rank 0 for the last rank.
            until(lambda: state(ranks[1].pid) == "S" and joined(ranks[1].pid))
            time.sleep(2)
            ranks[1].send_signal(signal.SIGSTOP)
        ranks.append(start(*themes, RANK="2", **at))
        first, last = ended(ranks[0]), ended(ranks[2])
    finally:
        for rank in ranks:
            rank.kill()
            if not rank.stdout.closed:
                rank.communicate()
    assert time.monotonic() - begin < 14 + 10
    assert (first[0], last) == (2, (0, ""))
    found = findings(first)
    if where == "meeting":
        (silent,) = those(found, "ranks", "error")
        assert silent["text"] == "rank 1 of 3 came, then did not answer"
        assert not those(found, "all_reduce")
    else:
        failed = only(found, "all_reduce", "error")["text"]
        assert "rank 1 " in failed, failed


def joined(pid: int) -> bool:
    """Tell whether a process has a TCP connection."""
    try:
        sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    except FileNotFoundError:
        return False
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{row[9]}]" in sockets and row[3] == "01" for row in rows)


def test_a_wrong_sum(tmp_path: Path) -> None:
    """Of one element of rank 1's, in one bit."""
    wrong = 'if (n == 1 << 18 && atoi(getenv("RANK")) == 1) ((unsigned char*)r)[4 * 77777] ^= 1;'
    library = {"PYNCCL_LIBRARY": library_with(tmp_path, wrong)}
    first, _ = job("--only", "job", "--only", "all_reduce", each=[library] * 2)
    assert first[0] == 2
    text = only(findings(first), "all_reduce", "error")["text"]
    assert text == "rank 1: all_reduce: wrong sums of 2 ranks"


def test_rank_0_does_not_come() -> None:
    ((code, out),) = job("--only", "job", "--timeout", "2", each=[{"RANK": "1"}], size=2)
    assert code == 2
    assert "rank 1 of 2 did not meet rank 0" in json.loads(out)["findings"][0]["text"]


SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec* now) {
  long result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 100;
  return (int)result;
}
"""


@needs_root
def test_two_machines(hosts: Hosts, compile_library: Callable[..., str]) -> None:
    places = [["ip", "netns", "exec", name] for name in hosts.names]
    hosts.ip("-n", hosts.names[1], "link", "set", f"{link_of(hosts, 1)}", "mtu", "1400")
    clock = {"LD_PRELOAD": compile_library(SHIFTED_CLOCK, "libclock.so")}
    first, second = job(
        "--only", "job", "--only", "all_reduce",
        each=[{}, clock], places=places, host="10.199.0.1",
    )  # fmt: skip
    assert second == (0, "")
    found = findings(first)
    assert "all 2 came, on 2 machines" in only(found, "ranks", "ok")["text"]
    assert only(found, "MTU", "warning")["text"] == "differs: 1500 on rank 0, 1400 on rank 1"
    assert re.search(r"\(rank 1\) is (99\.9|100\.[01]) s ahead of", only(found, "clocks", "warning")["text"])
    assert only(found, "connections", "ok")["text"] == "each of 2 machines reaches every other"
    assert re.fullmatch(r"1 MiB on 2 ranks: tcp \d+ us", only(found, "all_reduce", "ok")["text"])


def link_of(hosts: Hosts, index: int) -> str:
    return f"pn{hosts.names[index].split('-')[1]}{'ab'[index]}"


@needs_root
def test_machines_that_do_not_reach_each_other(hosts: Hosts) -> None:
    places = [["ip", "netns", "exec", name] for name in hosts.names]
    # An interface of the second machine to which the first has no route.
    name = hosts.names[1]
    hosts.ip("-n", name, "link", "add", "apart0", "type", "veth", "peer", "name", "apart1")
    hosts.ip("-n", name, "addr", "add", "10.78.0.1/24", "dev", "apart0")
    for end in ("apart0", "apart1"):
        hosts.ip("-n", name, "link", "set", end, "up")
    first, _ = job(
        "--only", "job", "--only", "all_reduce",
        each=[{}, {"NCCL_SOCKET_IFNAME": "apart0"}], places=places, host="10.199.0.1",
    )  # fmt: skip
    found = findings(first)
    cut = only(found, "connections", "error")
    assert re.search(r"^rank 0 on \S+ cannot reach rank 1 on \S+ at 10\.78\.0\.1: .*unreachable", cut["text"])
    assert not those(found, "all_reduce")


@pytest.mark.slow
@needs_root
def test_each_direction_between_each_two_machines() -> None:
    """Nobody reaches rank 0, which reaches all, and rank 1 does not reach rank 2."""
    with joined_hosts(3) as hosts:
        first, second, _ = hosts.names
        for words in (
            "add apart0 type veth peer name apart1",
            "set apart0 up",
            "set apart1 up",
        ):
            hosts.ip("-n", first, "link", *words.split())
        hosts.ip("-n", first, "addr", "add", "10.78.0.1/24", "dev", "apart0")
        hosts.ip("-n", second, "route", "add", "unreachable", f"{hosts.addresses[2]}/32")
        done, *_ = job(
            "--only", "job",
            each=[{"NCCL_SOCKET_IFNAME": "apart0"}, {}, {}],
            places=[hosts.enter(i) for i in range(3)],
            host=hosts.addresses[0],
        )  # fmt: skip
    cut = [
        re.match(r"rank (\d) on .* cannot reach rank (\d)", one["text"])
        for one in those(findings(done), "connections", "error")
    ]
    pairs = {match.groups() for match in cut if match}
    # An answer from rank 1 to rank 2 does not come either.
    assert pairs == {("1", "0"), ("2", "0"), ("1", "2"), ("2", "1")}
    assert not those(findings(done), "connections", "ok")


def test_ranks_that_cannot_import_pynccl(tmp_path: Path) -> None:
    """The finding is the error, which names its cause; `pynccl.testing.run` shows the traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pynccl': raise ImportError('pynccl is out of order')\n"
        "if '-c' in sys.orig_argv: sys.meta_path.insert(0, Refuse())\n"
    )
    found = doctor("--only", "all_reduce", PYTHONPATH=str(tmp_path))
    assert [(one["level"], one["text"]) for one in found] == [
        ("error", "ImportError: pynccl is out of order")
    ]
