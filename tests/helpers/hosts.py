"""Two hosts on one machine: network namespaces that a virtual cable joins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the ip command"
)


class Hosts:
    """Two network namespaces joined by a virtual cable."""

    def __init__(self, tag: str) -> None:
        self.names = [f"pynccl-{tag}-a", f"pynccl-{tag}-b"]
        links = [f"pn{tag}a", f"pn{tag}b"]
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(self.names, links, strict=True)):
            self.ip("link", "set", link, "netns", name)
            self.ip("-n", name, "addr", "add", f"10.199.0.{i + 1}/24", "dev", link)
            self.ip("-n", name, "addr", "add", f"fd99::{i + 1}/64", "dev", link, "nodad")
            self.ip("-n", name, "link", "set", link, "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    @staticmethod
    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, timeout=20)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], timeout=20, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(str(os.getpid() % 10000))
    yield made
    made.close()
