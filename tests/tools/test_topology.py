"""`pynccl info --topology` of machines that a folder shows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from conftest import Run
from sysfs import GPU, pci

INFO = ["-m", "pynccl", "info"]
SWITCH = ("0000:00:01.0", "0000:01:00.0")


def node(root: Path, number: int, cpus: str, kib: int) -> None:
    folder = root / f"sys/devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    (folder / "meminfo").write_text(f"Node {number} MemTotal: {kib} kB\nNode {number} MemFree: 1 kB\n")


def card(root: Path, folder: str, name: str, device: Path, **files: str) -> None:
    real = device / Path(folder).name / name
    for file, content in files.items():
        path = real / file.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    (real / "device").symlink_to(device)
    link = root / "sys/class" / folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(real)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the root of a machine with two nodes, three GPUs, an RDMA device and two interfaces."""
    node(tmp_path, 0, "0-31", 1 << 20)
    node(tmp_path, 1, "32-63", 2 << 20)
    fast = {"current_link_speed": "32.0 GT/s PCIe\n", "current_link_width": "16\n"}
    pci(tmp_path, "0000:03:00.0", *SWITCH, "0000:02:00.0", numa_node="0\n", **(GPU | fast))
    pci(tmp_path, "0000:05:00.0", "0000:00:02.0", numa_node="0\n", **GPU)
    pci(tmp_path, "0000:83:00.0", "0000:80:01.0", bus="pci0000:80", numa_node="1\n", **GPU)
    nic = pci(tmp_path, "0000:04:00.0", *SWITCH, "0000:02:01.0", numa_node="0\n")
    ports = {"ports__1__state": "4: ACTIVE", "ports__1__rate": "400 Gb/sec (4X NDR)"}
    card(tmp_path, "infiniband", "mlx5_0", nic, **ports)
    slow = pci(tmp_path, "0000:20:00.0", bus="pci0000:20", numa_node="0\n")
    card(tmp_path, "net", "eth0", slow, operstate="up", speed="10000")
    (tmp_path / "sys/class/net/lo").symlink_to(tmp_path)
    return tmp_path


def test_text(machine: Path, run_python: Run) -> None:
    text = run_python(args=[*INFO, "--topology", "--root", str(machine)]).stdout
    assert text.splitlines() == [
        "NUMA node 0: processors 0-31, 1024 MiB",
        "  GPU0    0000:03:00.0  not visible to the driver, PCIe 32.0 GT/s x16",
        "  GPU1    0000:05:00.0  not visible to the driver",
        "  mlx5_0  0000:04:00.0  port 1 ACTIVE 400 Gb/sec (4X NDR)",
        "  eth0    0000:20:00.0  up, 10000 Mb/s",
        "NUMA node 1: processors 32-63, 2048 MiB",
        "  GPU2  0000:83:00.0  not visible to the driver",
        "",
        "       GPU0   GPU1   GPU2   mlx5_0 eth0",
        "GPU0   X      PHB    SYS    PIX    NODE",
        "GPU1   PHB    X      SYS    PHB    NODE",
        "GPU2   SYS    SYS    X      SYS    SYS",
        "mlx5_0 PIX    PHB    SYS    X      NODE",
        "eth0   NODE   NODE   SYS    NODE   X",
        "",
        "PIX  = one PCIe switch",
        "PHB  = a PCIe host bridge, usually the processor",
        "NODE = host bridges of one NUMA node",
        "SYS  = the link between NUMA nodes",
        "NVLink is known only between GPUs that the driver shows: nvidia-smi topo -m",
    ]


def matrix(text: str) -> dict[str, list[str]]:
    """Return the rows of the matrix by their names."""
    rows = [line.split() for line in text.split("\n\n")[1].splitlines()]
    return {row[0]: row[1:] for row in rows[1:]}


def test_nvlink(tmp_path: Path, run_python: Run, fake_gpus: dict[str, str]) -> None:
    """The driver's devices 0 and 1 have it, and 2 is joined to neither of them."""
    for bus in "123":
        pci(tmp_path, f"0000:0{bus}:00.0", "0000:00:01.0", numa_node="0\n", **GPU)
    command = [*INFO, "--topology", "--root", str(tmp_path)]
    gpus = {"FAKE_CUDA_DEVICES": "3", **fake_gpus}
    text = run_python(args=command, FAKE_CUDA_LINKS="02:1:0 12:1:0", **gpus).stdout
    assert matrix(text) == {
        "GPU0": ["X", "NVL", "PIX"],
        "GPU1": ["NVL", "X", "PIX"],
        "GPU2": ["PIX", "PIX", "X"],
    }
    assert text.splitlines()[-2:] == [
        "NVL  = a path with atomics, which NVLink has and PCIe has not",
        "PIX  = one PCIe switch",
    ]
    # The driver does not answer.
    text = run_python(args=command, FAKE_CUDA_LINKS="none", **gpus).stdout
    assert matrix(text)["GPU0"] == ["X", "PIX", "PIX"]
    assert text.splitlines()[-1].startswith("NVLink is not known: cuDeviceGetP2PAttribute failed with ")


def test_a_gpu_that_sys_lacks(tmp_path: Path, run_python: Run, fake_gpus: dict[str, str]) -> None:
    """Its path is not known: neither to a device that is there, nor to another that is not."""
    pci(tmp_path, "0000:01:00.0", numa_node="0\n", **GPU)
    links = {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_LINKS": "01:1:0 02:1:0 12:1:0", **fake_gpus}
    text = run_python(args=[*INFO, "--topology", "--root", str(tmp_path)], **links).stdout
    assert matrix(text) == {"GPU0": ["X", "?", "?"], "GPU1": ["?", "X", "?"], "GPU2": ["?", "?", "X"]}
    assert text.splitlines()[-1] == "?    = not known, since /sys does not show one of the two"


def test_two_switches(machine: Path, run_python: Run) -> None:
    below = (*SWITCH, "0000:02:02.0", "0000:06:00.0", "0000:07:00.0")
    pci(machine, "0000:08:00.0", *below, numa_node="0\n", **GPU)
    text = run_python(args=[*INFO, "--topology", "--root", str(machine)]).stdout
    assert "PXB  = several PCIe switches" in text
    assert next(line for line in text.splitlines() if line.startswith("GPU2 ")).split()[1:4] == [
        "PXB",
        "PHB",
        "X",
    ]


def test_one_node_and_no_device(tmp_path: Path, run_python: Run) -> None:
    node(tmp_path, 0, "0-3", 4096)
    text = run_python(args=[*INFO, "--topology", "--root", str(tmp_path)]).stdout
    assert text.splitlines() == [
        "NUMA node 0: processors 0-3, 4 MiB",
        "no GPU, RDMA device or network interface is on PCI",
    ]
    # The kernel does not tell a device's node where there is but one.
    pci(tmp_path, "0000:01:00.0", numa_node="-1\n", **GPU)
    text = run_python(args=[*INFO, "--topology", "--root", str(tmp_path)]).stdout
    assert text.splitlines()[1] == "  GPU0  0000:01:00.0  not visible to the driver"


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int

    @classmethod
    def of(cls, attributes: dict[str, str]) -> Box:
        return cls(*(int(attributes[name]) for name in cls._fields))

    def has(self, other: Box) -> bool:
        across = self.x < other.x and other.x + other.width < self.x + self.width
        return across and self.y < other.y and other.y + other.height < self.y + self.height


def test_picture(machine: Path, tmp_path: Path, run_python: Run) -> None:
    file = tmp_path / "topology.svg"
    run_python(args=[*INFO, "--topology", "--root", str(machine), "--svg", str(file)])
    elements = list(ElementTree.parse(file).iter())
    texts = ["".join(element.itertext()) for element in elements if element.tag.endswith("text")]
    boxes = [Box.of(element.attrib) for element in elements if element.tag.endswith("rect")]
    names = [text.split(" ")[0] for text in texts]
    assert names == ["NUMA", "PCIe", "GPU0", "mlx5_0", "GPU1", "eth0", "NUMA", "GPU2"]
    # Boxes in boxes: the switch has two devices, and the first node all but the last one.
    inside = {
        name: [n for n, other in zip(names, boxes, strict=True) if box.has(other)]
        for name, box in zip(names[:-2], boxes, strict=False)
    }
    assert inside["PCIe"] == ["GPU0", "mlx5_0"]
    assert inside["NUMA"] == names[1:6]
    assert not inside["GPU0"] + inside["eth0"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--svg", "x.svg"], "--svg needs --topology"),
        (["--root", "/proc"], "--root needs --topology"),
        (["--topology", "--root", "/nonexistent"], "'--root': Directory '/nonexistent' does not exist."),
        (["--json", "--topology"], "--json and --topology are given; expected one of them"),
        (["--topology", "--svg", "/proc/x.svg"], "Could not open file '/proc/x.svg'"),
    ],
)
def test_wrong_options(args: list[str], words: str, run_python: Run) -> None:
    assert words in run_python(args=[*INFO, *args], fails=True).stderr
