"""What reads the node: the kernel's files, a network driver's answers, a DCGM exporter's page."""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

from haiprof.agent.process_ends import Stream, take_mark
from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.gpu import DcgmSampler, fetch, parse_page
from haiprof.agent.samplers.host import CgroupSampler, HostSampler, NumaSampler
from haiprof.agent.samplers.network import Ethtool, find_positions
from haiprof.agent.samplers.ranks import PlacementSampler, ProcessSampler
from haiprof.agent.samplers.registry import find_permissions, software
from haiprof.agent.samplers.table import Node, TableSampler
from haiprof.linux.topology import read_cpu
from haiprof.run_format.layout import RunPaths
from tests.fake_cgroup import FakeCgroups, FakeGroup
from tests.fake_mounts import FakeLustre, FakeMounts, FakeNfs
from tests.fakes import FakeProcess, FakeTree
from tests.fuzz.run_readers import answers, named
from tests.fuzz.scratch import folder

_PID, _START, _HOST, _GROUP = 10, 1000, "node1", "/job"
_LUSTRE = f"{FakeMounts.debug}/lus-ffff9c0512345800/stats"


@cache
def _root() -> Path:
    """A node with every kind of file."""
    root = folder() / "node"
    root.mkdir()
    tree = FakeTree(root)
    groups = FakeCgroups(tree)
    groups.mount_v2()
    groups.member(f"0::{_GROUP}")
    for path in ("/", _GROUP):
        groups.put_v2(FakeGroup(path=path, quota_us=250_000, memory_max=1 << 30))
    mounts = (root / "proc/self/mountinfo").read_text()
    requests = {"READ": (1, 1, 0, 5, 6, 7, 8, 9, 0), "GETATTR": (2, 2, 0, 5, 6, 7, 8, 9)}
    FakeMounts(root).put(
        FakeNfs(moved=(1, 2, 3, 4, 5, 6, 7, 8), requests=requests),
        FakeLustre(counts={"read_bytes": (3, 4096), "open": (2, 5)}),
    )
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write(mounts)
    tree.process(FakeProcess(pid=_PID, start=_START, io=(1, 2, 3, 4)))
    tree.process(FakeProcess(pid=_PID + 1, parent=_PID, io=(1, 2, 3, 4)))
    tree.write(
        "proc/cpuinfo", "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 0x6a\nflags : a\n"
    )
    tree.write("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n")
    tree.write(
        "sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 9 kB\nNode 0 MemFree: 5\n"
    )
    tree.write("sys/devices/system/node/node0/numastat", "numa_hit 5\nnuma_miss 6\nlocal_node 7\n")
    tree.write("sys/devices/system/node/node0/cpulist", "0-3,8\n")
    report = RunPaths(folder() / "node-run").rank(0).report
    report.parent.mkdir(parents=True)
    said = {"version": 1, "rank": 0, "pid": _PID, "start_ticks": _START, "host": _HOST}
    report.write_text(json.dumps(said))
    return root


def _run() -> RunPaths:
    return RunPaths(folder() / "node-run")


def _clock() -> Callable[[], int]:
    return itertools.count(0, 10_000_000_000).__next__


def _host() -> TableSampler:
    return HostSampler(Node(root=_root(), clock=_clock()))


def _mounts() -> TableSampler:
    return FilesystemSampler(Node(root=_root(), clock=_clock()))


def _process() -> TableSampler:
    return ProcessSampler(Node(run=_run(), host=_HOST, root=_root(), clock=_clock()))


def _placement() -> TableSampler:
    return PlacementSampler(Node(run=_run(), host=_HOST, root=_root(), clock=_clock()))


def _cgroup() -> TableSampler:
    return CgroupSampler(Node(root=_root(), clock=_clock()))


def _numa() -> TableSampler:
    return NumaSampler(Node(root=_root(), clock=_clock()))


FILES: dict[str, Callable[[], TableSampler]] = {
    **dict.fromkeys((
        "proc/stat", "proc/meminfo", "proc/vmstat", "proc/diskstats", "proc/net/dev",
        "proc/net/snmp", "proc/net/netstat", "proc/pressure/cpu",
    ), _host),
    **dict.fromkeys(("proc/self/mountinfo", "proc/self/mountstats", _LUSTRE), _mounts),
    **dict.fromkeys((f"proc/{_PID}/stat", f"proc/{_PID}/io", f"proc/{_PID}/statm",
                     f"proc/{_PID + 1}/stat"), _process),
    f"proc/{_PID}/status": _placement,
    "sys/devices/system/node/node0/cpulist": _placement,
    **dict.fromkeys(("proc/self/cgroup", f"sys/fs/cgroup{_GROUP}/cpu.stat",
                     f"sys/fs/cgroup{_GROUP}/cpu.max", f"sys/fs/cgroup{_GROUP}/memory.stat",
                     f"sys/fs/cgroup{_GROUP}/memory.max", f"sys/fs/cgroup{_GROUP}/io.pressure"),
                    _cgroup),
    "sys/devices/system/node/node0/meminfo": _numa,
    "sys/devices/system/node/node0/numastat": _numa,
    "proc/cpuinfo": _host,
    "proc/self/status": _host,
}  # fmt: skip


@cache
def _originals() -> dict[str, bytes]:
    return {name: (_root() / name).read_bytes() for name in FILES}


def sample_node(data: bytes) -> object:
    """A node with one other file: the first line says which; it is sampled twice."""
    name, content = named(data, list(FILES))
    original = _originals()[name]
    path = _root() / name
    path.write_bytes(content)
    try:
        sampler = FILES[name]()
        missing = sampler.open()
        records = sampler.sample() + sampler.sample()
        sampler.header()
        sampler.states()
        sampler.close()
        if name in ("proc/cpuinfo", "proc/self/status", "proc/self/cgroup"):
            str(read_cpu(_root())), software(_root()), find_permissions(_root())
    finally:
        path.write_bytes(original)
    assert len(records) % sampler.table.record_bytes == 0
    return name, len(records), sorted({each.metric for each in missing})[:5]


@cache
def node_seeds() -> list[bytes]:
    return [name.encode() + b"\n" + content for name, content in _originals().items()]


NODE_TOKENS = (
    b"18446744073709551615", b" - nfs4 server:/x rw", b"max 100000", b"\\040", b"\\777", b"0-3,8",
    b"0-9999999999", b"kB", b"total=", b"some ", b"device x mounted on /y with fstype nfs ",
    b"\tage:\t5\n", b"snapshot_time 1.5\n", b") S 1 1 1 0 -1 4194304", b"0::/..", b"nodev",
)  # fmt: skip


def read_exporter(data: bytes) -> object:
    """A DCGM exporter's answer, with its head or without."""
    whole = data if data[:4] == b"HTTP" else b"HTTP/1.0 200 OK\r\n\r\n" + data
    with answers(whole):
        page = parse_page(fetch("http://127.0.0.1:9400/metrics"))
        sampler = DcgmSampler(Node(clock=_clock()), url="http://127.0.0.1:9400/metrics")
        kinds = [type(f).__name__ for uuid in page for f in sampler._figures(uuid)]
    return len(page), sorted(set(kinds))


@cache
def exporter_seeds() -> list[bytes]:
    fields = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_DEV_XID_ERRORS")
    lines = [f"# HELP {field} Words\n# TYPE {field} gauge\n" for field in fields]
    for gpu in (0, 1):
        labels = f'gpu="{gpu}",UUID="GPU-{gpu}",modelName="NVIDIA \\"A100\\", 80GB"'
        lines += [f"{field}{{{labels}}} 0.5 1700000000000\n" for field in fields]
    lines.append(f'{fields[0]}{{UUID="GPU-0",GPU_I_ID="3"}} NaN\n')
    page = "".join(lines).encode()
    return [page, b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + page]


EXPORTER_TOKENS = (
    b'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-0"} 0.5\n', b"DCGM_FI_DEV_XID_ERRORS{", b'UUID="', b'"} ',
    b'GPU_I_ID="1"', b"\\\"", b"NaN", b"+Inf", b"-Inf", b"1e308", b"HTTP/1.1 302 Found\r\n",
)  # fmt: skip
_ETHTOOL_BYTES = 1 << 16


def ask_driver(data: bytes) -> object:
    """What a network driver answers: each ioctl writes the next part into our buffer."""
    parts = iter([*data.split(b"<next>"), b"", b"", b""])

    def ioctl(_: int, __: int, argument: bytes) -> None:
        (address,) = struct.unpack_from("=16xQ", argument)
        part = next(parts)[:_ETHTOOL_BYTES]
        ctypes.memmove(address, part, len(part))

    tool = Ethtool(ioctl=ioctl)
    try:
        names = tool.names("eth0")
        values = tool.values("eth0", len(names))
    finally:
        tool.close()
    assert all(value >= 0 for value in values)
    return len(names) > 0, sorted(find_positions(names)), len(values) > 0


@cache
def driver_seeds() -> list[bytes]:
    names = [b"rx_prio0_pause", b"rx_discards_phy", b"x" * 32]
    strings = b"".join(name.ljust(32, b"\0") for name in names)
    parts = (
        struct.pack("=IIQI", 0x37, 0, 2, 3),
        struct.pack("=III", 0x1B, 1, 3) + strings,
        struct.pack("=II3Q", 0x1D, 3, 1, 2, (1 << 64) - 1),
    )
    return [b"<next>".join(parts)]


def read_printed(data: bytes) -> object:
    """What a job printed, line by line."""
    streams: dict[int | None, Stream] = {}
    found = []
    for raw in data.replace(b"\r", b"\n").split(b"\n"):
        line, rank, _ = take_mark(raw.decode(errors="replace"))
        for word in streams.setdefault(rank, Stream()).read_line(line):
            found.append((word.kind, word.unit, word.step is not None))
            assert len(word.text) <= 2000
    return sorted(set(found), key=str)


def printed_seeds() -> list[bytes]:
    return [
        b"step 12 loss nan\n[rank1]: step 3 loss: 2.0 | 12.5k tok/s\r 3/9 [00:01<1, 4.0s/it]",
        b'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x\nKeyError: 1\n',
        b"n1:31:40 [1] NCCL WARN x\nCUDA out of memory\ntrain_samples_per_second: 4.1 tps: 5,4",
    ]


PRINTED_TOKENS = (
    b"loss", b": nan", b"step ", b"/s", b"_per_second: ", b"tokens", b"[rank7]: ", b"    ",
    b"Traceback (most recent call last):\n", b'  File "', b'", line ', b"1,000.5", b"\xc2\xb2",
)  # fmt: skip
