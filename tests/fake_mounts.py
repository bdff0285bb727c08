"""Mounted file systems as /proc and debugfs show them: NFS and Lustre clients that count."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LOCAL = "22 27 0:21 / /proc rw,relatime - proc proc rw\n27 1 254:0 / / rw - ext4 /dev/vda rw\n"
_U64 = 1 << 64


@dataclass
class FakeNfs:
    """One NFS mount; change what it has counted and `put` it again."""

    point: str = "/data"
    source: str = "server:/export"
    device: str = "0:50"
    type: str = "nfs4"
    age_s: int = 100
    moved: Sequence[int] = (0, 0, 0, 0, 0, 0, 0, 0)
    """Bytes: normal read and write, direct read and write, server read and write; then pages."""
    requests: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Number, transmissions, timeouts, bytes out, bytes in, ms queued, rtt, execute, errors."""

    def block(self) -> str:
        """Its part of mountstats."""
        lines = [
            f"device {_escaped(self.source)} mounted on {_escaped(self.point)} with fstype"
            f" {self.type} statvers=1.1",
            "\topts:\trw,vers=4.1,rsize=1048576,proto=tcp",
            f"\tage:\t{self.age_s}",
            "\tevents:\t1 2 3 4",
            "\tbytes:\t" + " ".join(str(n % _U64) for n in self.moved),
            "\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)",
            "\txprt:\ttcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726",
            "\tper-op statistics",
        ]
        for name, numbers in self.requests.items():
            lines.append(f"\t{name:>12}: " + " ".join(str(n % _U64) for n in numbers))
        return "\n".join(lines) + "\n\n"


@dataclass
class FakeLustre:
    """One Lustre mount and its client's counts."""

    point: str = "/scratch"
    name: str = "lus"
    instance: str = "ffff9c0512345800"
    device: str = "0:60"
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By name: how often, and the sum."""

    def stats(self) -> str:
        """Its llite stats: what has not happened is left out."""
        lines = ["snapshot_time             1595361869.139151000 secs.nsecs"]
        for name, (count, total) in self.counts.items():
            if count:
                unit = "[bytes]" if name.endswith("_bytes") else "[usecs]"
                lines.append(f"{name:<25} {count} samples {unit} 1 9 {total} {total * 9}")
        return "\n".join(lines) + "\n"


class FakeMounts:
    """A root folder with /proc/self and, for Lustre, debugfs."""

    debug = "sys/kernel/debug/lustre/llite"

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, *mounts: FakeNfs | FakeLustre | tuple[str, str, str]) -> None:
        """All that is mounted, in order; others are (type, source, point)."""
        info, stats = _LOCAL, "device proc mounted on /proc with fstype proc\n"
        lustre = [mount for mount in mounts if isinstance(mount, FakeLustre)]
        for folder in (self.root / self.debug).glob("*"):
            if folder.name not in [f"{mount.name}-{mount.instance}" for mount in lustre]:
                shutil.rmtree(folder)
        for at, mount in enumerate(mounts):
            if isinstance(mount, FakeNfs):
                kind, source, point, device = mount.type, mount.source, mount.point, mount.device
                stats += mount.block()
            elif isinstance(mount, FakeLustre):
                kind, source, point = "lustre", f"10.0.0.1@tcp:/{mount.name}", mount.point
                device = mount.device
                folder = self.root / self.debug / f"{mount.name}-{mount.instance}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "stats").write_text(mount.stats())
            else:
                (kind, source, point), device = mount, f"0:{90 + at}"
            info += f"{30 + at} 27 {device} / {_escaped(point)} rw - {kind} {_escaped(source)} rw\n"
        self._write("proc/self/mountinfo", info)
        self._write("proc/self/mountstats", stats)

    def _write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\134").replace(" ", "\\040")
