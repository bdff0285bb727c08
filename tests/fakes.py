"""Stand-ins for hardware: a tree like /proc and /sys; pynvml's is in fake_nvml.py."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_MEMINFO = """\
MemTotal:       16384000 kB
MemFree:         1024000 kB
MemAvailable:    8192000 kB
Buffers:           10240 kB
Cached:          4096000 kB
SwapCached:            0 kB
SwapTotal:       2048000 kB
SwapFree:        2000000 kB
Dirty:               512 kB
AnonPages:        131296 kB
Shmem:            300000 kB
ShmemHugePages:        0 kB
AnonHugePages:      4096 kB
HugePages_Total:       8
HugePages_Free:        6
Hugepagesize:       2048 kB
"""

_VMSTAT = """\
nr_free_pages 2489517
numa_hit 193040443
pgpgin 9825253
pswpin 3
pswpout 4
pgfault 1000
pgmajfault 20
oom_kill 1
numa_hint_faults 7
numa_hint_faults_local 6
numa_pages_migrated 5
compact_stall 2
compact_fail 1
nr_unstable 0
"""

_SNMP = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 242
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens OutSegs RetransSegs InErrs
Tcp: 1 200 120000 -1 2129 5000 135 0
Udp: InDatagrams NoPorts
Udp: 12 0
"""

_NETSTAT = """\
TcpExt: SyncookiesSent ListenOverflows ListenDrops TCPTimeouts
TcpExt: 0 1 2 3
IpExt: InNoRoutes InTruncatedPkts
IpExt: 0 0
"""

_DISKSTATS = """\
   7       0 loop0 11 0 900 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 500 10 2000 300 700 20 4000 900 0 500 1200 0 0 0 0 0 0
 259       1 nvme0n1p1 400 10 1900 300 600 20 3900 900 0 500 1200 0 0 0 0 0 0
   8       0 sda 50 0 100 30 70 2 200 90 0 50 120
 253       0 dm-0 500 10 2100 300 700 20 4100 900 0 500 1200 0 0 0 0 0 0
"""

_NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:     999       9    0    0    0     0          0         0      999       9    0    0    0
  eth0:    1000      10    0    0    0     0          0         0     2000      10    0    0    0
eth1:123456789012     1    0    0    0     0          0         0       30       1    0    0    0
 bond0:    5000      10    0    0    0     0          0         0     5000      10    0    0    0
"""

_NET_HEADER = "".join(_NET_DEV.splitlines(keepends=True)[:2])
_PRESSURE = "some avg10=0.00 avg60=0.10 avg300=0.00 total={}\nfull avg10=0.00 avg60=0 total=3\n"
_STAT_TAIL = """\
intr 8307859 0 0 9 0
ctxt 5
btime 1795264429
processes 52048
procs_running 4
procs_blocked 2
softirq 3104650 0 458953 5
"""


class FakeTree:
    """A root folder with the files that samplers read, in the kernel's own form."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc").mkdir()
        self.cpu(user=100)
        self.write("proc/meminfo", _MEMINFO)
        self.write("proc/diskstats", _DISKSTATS)
        self.write("proc/net/dev", _NET_DEV)
        self.write("proc/vmstat", _VMSTAT)
        self.write("proc/net/snmp", _SNMP)
        self.write("proc/net/netstat", _NETSTAT)
        for name, total_us in (("cpu", 7), ("memory", 8), ("io", 9)):
            self.write(f"proc/pressure/{name}", _PRESSURE.format(total_us))
        for zone, name in (("0", "package-0"), ("0:0", "core"), ("0:2", "dram"), ("1", "package-1"),
                           ("1:2", "dram"), ("2", "psys")):  # fmt: skip
            self.energy(f"intel-rapl:{zone}", name, 1_000_000)
        self.energy("intel-rapl-mmio:0", "package-0", 1_000_000)
        for name in ("loop0", "nvme0n1", "sda"):
            (root / "sys/block" / name / "slaves").mkdir(parents=True)
        (root / "sys/block/dm-0/slaves/nvme0n1").mkdir(parents=True)
        for name in ("lo", "eth0/device", "eth1/device", "bond0/lower_eth0", "bond0/lower_eth1"):
            (root / "sys/class/net" / name).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        """Puts a file in place; one that is open goes on being read."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def energy(self, zone: str, name: str, microjoules: int) -> None:
        """Puts a zone of RAPL in place, whose counter begins anew after 10 J."""
        folder = f"sys/class/powercap/{zone}"
        self.write(f"{folder}/name", f"{name}\n")
        self.write(f"{folder}/max_energy_range_uj", "9999999\n")
        self.write(f"{folder}/energy_uj", f"{microjoules}\n")

    def remove(self, path: str) -> None:
        """Takes a file or a process away."""
        target = self.root / path
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    def cpu(self, *, user: int = 0, idle: int = 0, iowait: int = 0, cpu_count: int = 4) -> None:
        """Puts /proc/stat in place; times in ticks."""
        times = f"{user} 10 50 {idle} {iowait} 3 2 1 40 0"
        lines = [f"cpu  {times}", *(f"cpu{n} {times}" for n in range(cpu_count)), _STAT_TAIL]
        self.write("proc/stat", "\n".join(lines))

    def disks(self, **counts: tuple[int, int, int]) -> None:
        """Puts /proc/diskstats in place: by disk, sectors read, sectors written, ms busy."""
        lines = [
            f" 259 {at} {name} 10 0 {read} 3 20 0 {written} 9 0 {busy % (1 << 32)} 120"
            for at, (name, (read, written, busy)) in enumerate(counts.items())
        ]
        self.write("proc/diskstats", "\n".join(lines) + "\n")
        for name in counts:
            (self.root / "sys/block" / name / "slaves").mkdir(parents=True, exist_ok=True)

    def interfaces(self, **counts: tuple[int, int]) -> None:
        """Puts /proc/net/dev in place: by interface, bytes received and sent."""
        lines = [
            f"{name:>6}: {received} 10 1 2 0 0 0 0 {sent} 20 3 4 0 0 0 0\n"
            for name, (received, sent) in counts.items()
        ]
        self.write("proc/net/dev", _NET_HEADER + "".join(lines))

    def process(self, process: FakeProcess) -> None:
        """Puts a process in place, or its new values."""
        folder = f"proc/{process.pid}"
        self.write(f"{folder}/stat", process.stat())
        self.write(f"{folder}/statm", f"900 {process.rss_pages} 5 1 0 300 0\n")
        if process.io is not None:
            names = ("rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes")
            values = (*process.io[:2], 1, 1, *process.io[2:])
            pairs = zip(names, values, strict=True)
            self.write(f"{folder}/io", "".join(f"{name}: {value}\n" for name, value in pairs))
        self.write(f"{folder}/status", process.status())
        if process.schedstat is not None:
            self.write(f"{folder}/schedstat", "{} {} {}\n".format(*process.schedstat))
        self.write(f"{folder}/cmdline", "".join(f"{word}\0" for word in process.argv))
        environ = "".join(f"{name}={value}\0" for name, value in process.environ.items())
        self.write(f"{folder}/environ", environ)
        lines = [f"7f{n:010x}-7f{n + 1:010x} r-xp 00000000 fe:00 {n} {process.mapped}" for n in
                 range(3)]  # fmt: skip
        self.write(f"{folder}/maps", "\n".join(lines) + "\n")
        exe = self.root / folder / "exe"
        exe.unlink(missing_ok=True)
        exe.symlink_to(process.exe)


def fail_reads_of_removed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an open file whose driver or cgroup is gone fail as the kernel's do: ENODEV."""
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_nlink == 0:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)


@dataclass(kw_only=True)
class FakeProcess:
    """One process of a `FakeTree`; change a field and put it in place again."""

    pid: int
    parent: int = 1
    name: str = "pt (main) x"
    state: str = "S"
    start: int = 1000
    ticks: int = 0
    waited_ticks: int = 0
    faults: int = 100
    waited_faults: int = 0
    major_faults: int = 0
    waited_major_faults: int = 0
    cpu: int = 0
    """The CPU that its main thread was last on."""
    allowed_cpus: str = "0-3"
    schedstat: tuple[int, int, int] | None = (7_000, 5_000, 3)
    """Of its main thread: ns on a CPU, ns waiting for one, times put on one."""
    switches: tuple[int, int] = (20, 4)
    """Voluntary and involuntary context switches of its main thread."""
    threads: int = 1
    rss_pages: int = 10
    io: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    """rchar, wchar, read_bytes, write_bytes; None leaves the file out."""
    exe: str = "/usr/bin/python3.11"
    argv: Sequence[str] = ("python", "train.py")
    environ: Mapping[str, str] = field(default_factory=dict)
    mapped: str = "/usr/lib/libc.so.6"

    def stat(self) -> str:
        """The line in /proc/PID/stat."""
        head = f"{self.pid} ({self.name}) {self.state} {self.parent} 1 1 0 -1 4194304"
        faults = (
            f"{self.faults} {self.waited_faults} {self.major_faults} {self.waited_major_faults}"
        )
        own, waited = _halves(self.ticks), _halves(self.waited_ticks)  # in user and kernel mode
        times = f"{own} {waited} 20 0 {self.threads} 0 {self.start}"
        memory = "99999 7 18446744073709551615 0 0 0"
        rest = f"0 0 0 0 0 0 0 0 0 17 {self.cpu} 0 0 0 0 0"
        return f"{head} {faults} {times} {memory} {rest}\n"

    def status(self) -> str:
        """The lines of /proc/PID/status that somebody reads."""
        return (
            f"Name:\t{self.name}\nState:\t{self.state}\nPid:\t{self.pid}\n"
            f"Cpus_allowed:\tf\nCpus_allowed_list:\t{self.allowed_cpus}\n"
            f"Mems_allowed_list:\t0\nvoluntary_ctxt_switches:\t{self.switches[0]}\n"
            f"nonvoluntary_ctxt_switches:\t{self.switches[1]}\n"
        )

    def waits_for(self, child: FakeProcess) -> None:
        """What the kernel does at wait(): the child's counters become the parent's."""
        self.waited_ticks += child.ticks + child.waited_ticks
        self.waited_faults += child.faults + child.waited_faults
        self.waited_major_faults += child.major_faults + child.waited_major_faults
        if self.io is not None and child.io is not None:
            sums = [mine + theirs for mine, theirs in zip(self.io, child.io, strict=True)]
            self.io = (sums[0], sums[1], sums[2], sums[3])


def _halves(ticks: int) -> str:
    return f"{ticks // 2} {ticks - ticks // 2}"
