"""Devices as the kernel shows them in /sys, below a folder of a test."""

from __future__ import annotations

from pathlib import Path

GPU = {"vendor": "0x10de\n", "class": "0x030200\n"}


def pci(root: Path, device: str, *above: str, bus: str = "pci0000:00", **files: str | bytes) -> Path:
    """Make a PCI device below others."""
    real = root.joinpath("sys/devices", bus, *above, device)
    real.mkdir(parents=True)
    for name, content in files.items():
        (real / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    link = root / "sys/bus/pci/devices" / device
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(real)
    return real
