"""The machine as checks see it: files below a root, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Where the kernel shows the devices of the PCI buses.
PCI = "sys/bus/pci/devices"


@dataclass(frozen=True)
class Machine:
    """The folder that has proc, sys, etc and dev, and the environment's variables."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, *parts: str) -> Path:
        """Return a path below the root."""
        return self.root.joinpath(*(part.lstrip("/") for part in parts))

    def read(self, *parts: str) -> str | None:
        """Return the text of a file without the space around it; None if it cannot be read."""
        try:
            return self.path(*parts).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, *parts: str) -> list[str]:
        """Return the names in a folder, sorted; none if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def number(self, name: str) -> int | None:
        """Return a variable that is a number; None if it is not set or no number."""
        text = self.environ.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    def pci_devices(self, vendor: str) -> list[str]:
        """Return the PCI addresses of a vendor's devices."""
        folder = "sys/bus/pci/devices"
        return [name for name in self.names(folder) if self.read(folder, name, "vendor") == vendor]

    def gpus(self) -> list[str]:
        """Return the PCI addresses of NVIDIA's display and compute devices."""
        return [
            name
            for name in self.pci_devices("0x10de")
            if (self.read("sys/bus/pci/devices", name, "class") or "").startswith("0x03")
        ]


def cpu_list(text: str) -> set[int]:
    """Return the numbers of a list in the kernel's notation, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
