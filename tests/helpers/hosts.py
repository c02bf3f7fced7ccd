"""Hosts on one machine: network namespaces that a virtual switch joins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the ip command"
)


class Hosts:
    """Network namespaces, joined by a bridge in a namespace of its own."""

    def __init__(self, tag: str, count: int = 2) -> None:
        self.switch = f"pynccl-{tag}-switch"
        self.names = [f"pynccl-{tag}-{letter}" for letter in "abcdefgh"[:count]]
        self.links = [f"pn{tag}{letter}" for letter in "abcdefgh"[:count]]
        self.addresses = [f"10.199.0.{i + 1}" for i in range(count)]
        self.ip("netns", "add", self.switch)
        self.ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        self.ip("-n", self.switch, "link", "set", "switch", "up")
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            self.ip("netns", "add", name)
            port = ("netns", self.switch, "name", f"port{i}")
            self.ip("link", "add", link, "netns", name, "type", "veth", "peer", *port)
            self.ip("-n", self.switch, "link", "set", f"port{i}", "master", "switch", "up")
            self.ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", link)
            self.ip("-n", name, "addr", "add", f"fd99::{i + 1}/64", "dev", link, "nodad")
            self.ip("-n", name, "link", "set", link, "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def lose(self, a: int, b: int) -> None:
        """Lose all packets between two hosts, without a word to either."""
        for here, there in ((a, b), (b, a)):
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            wrong = ("neigh", "replace", self.addresses[there], *nobody, "dev", self.links[here])
            self.ip("-n", self.names[here], *wrong)

    @staticmethod
    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, timeout=20)

    def close(self) -> None:
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], timeout=20, check=False)


@contextmanager
def joined(count: int) -> Iterator[Hosts]:
    made = Hosts(str(os.getpid() % 10000), count)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with joined(2) as made:
        yield made
