"""A node with two sockets, two GPUs and three adapters, as /sys and the NVIDIA driver show it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from tests.fakes import FakeTree

# Root port, switch upstream port, switch downstream port, device.
PCI = {
    "gpu0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
    "gpu1": "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0",
    "mlx5_0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0",
    "mlx5_1": "pci0000:15/0000:15:03.0/0000:1a:00.0",
    "mlx5_2": "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9b:00.0",
}
NODE_CPUS = {0: "0-3,8-11", 1: "4-7,12-15"}
GPU_UUIDS = {
    name: f"GPU-0a1b2c3d-0000-0000-0000-00000000000{name[-1]}" for name in PCI if name[0] == "g"
}


class FakeTopology:
    """Puts the node below a tree's root."""

    def __init__(self, tree: FakeTree) -> None:
        self.tree = tree
        for node, cpus in NODE_CPUS.items():
            tree.write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
        tree.write("sys/devices/system/node/node2/cpulist", "\n")  # memory without CPUs
        tree.write("sys/devices/system/node/online", "0-2\n")
        for name, path in PCI.items():
            self._device(name, path)

    def frequency(self, cpu: int, khz: int) -> None:
        """What one CPU runs at."""
        self.tree.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{khz}\n")

    def numa_node(self, name: str, node: int) -> None:
        """What the firmware says of a device."""
        self.tree.write(f"sys/devices/{PCI[name]}/numa_node", f"{node}\n")

    def show_gpu(self, name: str) -> None:
        """What the NVIDIA driver says of a GPU that was started."""
        address = PCI[name].rpartition("/")[2]
        text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 64\nGPU UUID: \t {GPU_UUIDS[name]}\n"
        text += f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t 0\n"
        self.tree.write(f"proc/driver/nvidia/gpus/{address}/information", text)

    def _device(self, name: str, path: str) -> None:
        node = 0 if "0000:15" in path else 1
        self.numa_node(name, node)
        self.tree.write(f"sys/devices/{path}/local_cpulist", f"{NODE_CPUS[node]}\n")
        address = path.rpartition("/")[2]
        self._link(f"sys/bus/pci/devices/{address}", f"../../../devices/{path}")
        if name in GPU_UUIDS:
            self.show_gpu(name)
        else:
            device = f"../../devices/{path}/infiniband/{name}"
            self.tree.write(f"sys/devices/{path}/infiniband/{name}/node_type", "1: CA\n")
            self._link(f"sys/class/infiniband/{name}", device)
            self._link(f"sys/devices/{path}/infiniband/{name}/device", "../..")

    def _link(self, path: str, target: str) -> None:
        link = self.tree.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


class FakePages:
    """Stands for move_pages(2): pages of processes by node."""

    def __init__(self, nodes: Mapping[int, Sequence[int]]) -> None:
        self.nodes = dict(nodes)
        self.denied: set[int] = set()
        """Processes of other users."""
        self.filtered = False
        """A container's seccomp filter."""
        self.asked: list[tuple[int, Sequence[int]]] = []

    def __call__(self, pid: int, addresses: Sequence[int]) -> list[int]:
        self.asked.append((pid, addresses))
        if self.filtered or pid in self.denied:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        if pid and pid not in self.nodes:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        nodes = self.nodes.get(pid, [0])
        found = [nodes[(address >> 12) % len(nodes)] for address in addresses]
        return [-errno.ENOENT if node < 0 else node for node in found]


def anonymous(tree: FakeTree, pid: int, *, pages: int = 4096) -> None:
    """Gives a process private writable memory, between a library and the driver's mapping."""
    low = 0x7F0000000000
    lines = (
        "55d0-55d1 r-xp 00000000 fe:00 42 /usr/bin/python3.11",
        f"{low:x}-{low + (pages << 12):x} rw-p 00000000 00:00 0 ",
        "7fe000000000-7ff000000000 rw-s 00000000 00:05 400 /dev/nvidiactl",
        "7ffd00000000-7ffd10000000 ---p 00000000 00:00 0 ",
    )
    tree.write(f"proc/{pid}/maps", "\n".join(lines) + "\n")
