"""Two nodes on this machine, for tests: processes, a network and a host name of their own each.

A node is a set of namespaces that one process holds; whatever runs in it ends with that process,
which ends with the test, however that ends. Needs root and Debian's iproute2; without them tests
skip and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERFACE = "cable"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}
"""What ranks need to find each other: no name server knows the nodes."""
_PROGRAMS = ("unshare", "nsenter", "hostname", "mount", "ip")
_NAMESPACES = ("--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
# cat ends when this process does, and takes the node with it; ranks without parents are reaped.
_HOLD = 'hostname "$1" && ip link set lo up && trap "" CHLD && echo held && exec cat'
_IN_FOLDER = 'cd "$1" && shift && exec "$@"'
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Node:
    """One of them."""

    host: str
    address: str
    pid: int
    """Of the process that holds it, as the machine outside knows it."""

    def words(self, *command: str, folder: Path = Path("/")) -> list[str]:
        """The command that runs another one in the node, in a folder."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount"]
        return [*enter, "sh", "-c", _IN_FOLDER, "sh", str(folder), *command]

    def run(self, *command: str) -> None:
        """Runs a short command in the node."""
        subprocess.run(
            self.words(*command), check=True, capture_output=True, text=True, timeout=_TIMEOUT_S,
            env={**os.environ, "PATH": _path()},
        )  # fmt: skip

    def own_disk(self, folder: Path) -> None:
        """Puts an empty file system there, which only this node sees."""
        self.run("mount", "-t", "tmpfs", "tmpfs", str(folder))

    def seen(self, path: Path) -> Path:
        """What the node sees at a path, as a path of the machine outside."""
        return Path(f"/proc/{self.pid}/root{path}")


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Starts them, with a cable between them; skips where they cannot be had."""
    lacking = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking or os.geteuid():
        reason = f"no {', '.join(lacking)}" if lacking else "not root"
        pytest.skip(f"two nodes on this machine: {reason} (apt-get install iproute2)")
    holders: list[subprocess.Popen[str]] = []
    try:
        first, second = (_start(holders, place) for place in (1, 2))
        peer = ("peer", "name", INTERFACE, "netns", str(second.pid))
        # The second node is named by its process as the machine outside knows it.
        outside = ["nsenter", f"--target={first.pid}", "--net", "ip", "link", "add", INTERFACE]
        subprocess.run([*outside, "type", "veth", *peer], check=True, timeout=_TIMEOUT_S,
                       env={**os.environ, "PATH": _path()})  # fmt: skip
        for node in (first, second):
            node.run("ip", "address", "add", f"{node.address}/24", "dev", INTERFACE)
            node.run("ip", "link", "set", INTERFACE, "up")
        yield first, second
    finally:
        for holder in holders:
            holder.communicate(timeout=_TIMEOUT_S)  # closes its input


def _start(holders: list[subprocess.Popen[str]], place: int) -> Node:
    host = f"node-{place}"
    holder = subprocess.Popen(
        ["unshare", *_NAMESPACES, "sh", "-c", _HOLD, "sh", host],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PATH": _path()},
    )  # fmt: skip
    holders.append(holder)
    assert holder.stdout is not None
    said = holder.stdout.readline().strip()
    if said != "held":
        pytest.skip(f"two nodes on this machine: {said}")
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
    return Node(host, f"10.213.7.{place}", int(children.split()[0]))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
