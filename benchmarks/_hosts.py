"""Hosts on one machine: network namespaces that a virtual switch joins. They need root and the ip command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class Hosts:
    """Network namespaces, joined by a bridge in a namespace of its own."""

    NETWORK = "10.199.0"

    def __init__(self, tag: str, count: int = 2) -> None:
        self.switch = f"pynccl-{tag}-switch"
        self.names = [f"pynccl-{tag}-{letter}" for letter in "abcdefgh"[:count]]
        self.links = [f"pn{tag}{letter}" for letter in "abcdefgh"[:count]]
        self.addresses = [f"{self.NETWORK}.{i + 1}" for i in range(count)]
        self.machine = f"pn{tag}m"
        self.ip("netns", "add", self.switch)
        self.ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        self.ip("-n", self.switch, "link", "set", "switch", "up")
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            self.ip("netns", "add", name)
            self._plug(link, f"port{i}", "netns", name)
            self.ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", link)
            self.ip("-n", name, "addr", "add", f"fd99::{i + 1}/64", "dev", link, "nodad")
            self.ip("-n", name, "link", "set", link, "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def _plug(self, link: str, port: str, *where: str) -> None:
        self.ip("link", "add", link, *where, "type", "veth", "peer", "netns", self.switch, "name", port)
        self.ip("-n", self.switch, "link", "set", port, "master", "switch", "up")

    def enter(self, host: int) -> list[str]:
        """Return what a command begins with to run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def limit(self, rate: str) -> None:
        """Limit what every host sends and receives, such as to 1gbit."""
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            for namespace, device in ((name, link), (self.switch, f"port{i}")):
                where = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root"]
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
                subprocess.run([*where, *shape], check=True, timeout=20)

    def reach(self) -> None:
        """Join this machine's own namespace to the switch, where mpirun's daemons connect to it."""
        self._plug(self.machine, "machine")
        self.ip("addr", "add", f"{self.NETWORK}.254/24", "dev", self.machine)
        self.ip("link", "set", self.machine, "up")

    def lose(self, a: int, b: int) -> None:
        """Lose all packets between two hosts, without a word to either."""
        for here, there in ((a, b), (b, a)):
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            wrong = ("neigh", "replace", self.addresses[there], *nobody, "dev", self.links[here])
            self.ip("-n", self.names[here], *wrong)

    @staticmethod
    def ip(*args: str) -> None:
        """Call the ip command."""
        subprocess.run(["ip", *args], check=True, timeout=20)

    def close(self) -> None:
        """Remove the hosts. Their links go with the switch."""
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], timeout=20, check=False)


@contextmanager
def joined(count: int) -> Iterator[Hosts]:
    """Make hosts, and remove them at the end."""
    made = Hosts(str(os.getpid() % 10000), count)
    try:
        yield made
    finally:
        made.close()
