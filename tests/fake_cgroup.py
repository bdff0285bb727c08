"""Control groups of a `FakeTree`: version 1, version 2, or both, as the kernel lays them out."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fakes import FakeTree

V2_MOUNT = "/sys/fs/cgroup"
V1_UNLIMITED = 9223372036854771712


@dataclass(kw_only=True)
class FakeGroup:
    """What one cgroup shows; change a field and put it in place again."""

    path: str
    """Below the mount."""
    quota_us: int | None = None
    periods: int = 0
    throttled: int = 0
    throttled_us: int = 0
    usage_us: int = 1000
    memory: int = 1 << 20
    memory_max: int | None = None
    oom_kills: int = 0
    limit_hits: int = 0
    stalled_us: int = 0
    cpu_enabled: bool = True


class FakeCgroups:
    """Puts /proc/self/cgroup, mountinfo and the trees in place."""

    def __init__(self, tree: FakeTree) -> None:
        self._tree = tree
        self._mounts = ["23 1 0:20 / /sys rw,nosuid - sysfs sysfs rw"]
        self.write_mounts()

    def member(self, *lines: str) -> None:
        """Says where the process is, as in /proc/PID/cgroup."""
        self._tree.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount_v2(self, point: str = V2_MOUNT, *, root: str = "/") -> None:
        """Mounts the tree of version 2."""
        self._mounts.append(f"32 23 0:29 {root} {point} rw - cgroup2 cgroup2 rw,nsdelegate")
        self.write_mounts()

    def mount_v1(self, controllers: str, *, root: str = "/") -> None:
        """Mounts a tree of version 1 at /sys/fs/cgroup/CONTROLLERS."""
        point = f"/sys/fs/cgroup/{controllers}"
        self._mounts.append(f"33 31 0:30 {root} {point} rw shared:9 - cgroup cg rw,{controllers}")
        self.write_mounts()

    def write_mounts(self) -> None:
        """Puts mountinfo in place."""
        text = "".join(f"{line}\n" for line in self._mounts)
        self._tree.write("proc/self/mountinfo", text)

    def put_v2(self, group: FakeGroup, *, mount: str = V2_MOUNT) -> None:
        """A cgroup of version 2; the top of the tree has fewer files."""
        folder = f"{mount}{group.path}".strip("/")
        files = {
            "cpu.stat": f"usage_usec {group.usage_us}\nuser_usec 1\nsystem_usec 2\n",
            "memory.stat": "anon 4096\nfile 8192\nfile_mapped 5\nanon_thp 7\n",
        }
        stall = f"avg10=0.00 avg60=0.00 avg300=0.00 total={group.stalled_us}\n"
        for what in ("cpu", "memory", "io"):
            files[f"{what}.pressure"] = f"some {stall}full {stall}"
        if group.path != "/":
            files["cgroup.type"] = "domain\n"
            files |= self._limited_v2(group)
        for name, text in files.items():
            self._tree.write(f"{folder}/{name}", text)

    def _limited_v2(self, group: FakeGroup) -> dict[str, str]:
        files = {
            "memory.current": f"{group.memory}\n",
            "memory.peak": f"{group.memory * 2}\n",
            "memory.swap.current": "4096\n",
            "memory.max": f"{'max' if group.memory_max is None else group.memory_max}\n",
            "memory.events": f"low 0\nhigh 0\nmax {group.limit_hits}\noom 9\n"
            f"oom_kill {group.oom_kills}\n",
        }
        if group.cpu_enabled:
            quota = "max" if group.quota_us is None else group.quota_us
            files["cpu.max"] = f"{quota} 100000\n"
            files["cpu.stat"] = (
                f"usage_usec {group.usage_us}\nuser_usec 1\nsystem_usec 2\n"
                f"nr_periods {group.periods}\nnr_throttled {group.throttled}\n"
                f"throttled_usec {group.throttled_us}\n"
            )
        return files

    def put_v1_cpu(self, group: FakeGroup, controllers: str = "cpu,cpuacct") -> None:
        """A cgroup in a tree of version 1 with the CPU controllers; throttled time is in ns."""
        folder = f"sys/fs/cgroup/{controllers}{group.path}".rstrip("/")
        files = {
            "cpu.stat": f"nr_periods {group.periods}\nnr_throttled {group.throttled}\n"
            f"throttled_time {group.throttled_us * 1000}\n",
            "cpu.cfs_quota_us": f"{-1 if group.quota_us is None else group.quota_us}\n",
            "cpu.cfs_period_us": "100000\n",
            "cpuacct.usage": f"{group.usage_us * 1000}\n",
        }
        for name, text in files.items():
            self._tree.write(f"{folder}/{name}", text)

    def put_v1_memory(self, group: FakeGroup, *, hierarchical: int | None = None) -> None:
        """A cgroup in the memory tree of version 1."""
        folder = f"sys/fs/cgroup/memory{group.path}".rstrip("/")
        own = V1_UNLIMITED if group.memory_max is None else group.memory_max
        least = own if hierarchical is None else hierarchical
        files = {
            "memory.usage_in_bytes": f"{group.memory}\n",
            "memory.max_usage_in_bytes": f"{group.memory * 2}\n",
            "memory.limit_in_bytes": f"{own}\n",
            "memory.failcnt": f"{group.limit_hits}\n",
            "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {group.oom_kills}\n",
            "memory.stat": "cache 1\nrss 2\nhierarchical_memory_limit "
            f"{least}\ntotal_cache 8192\ntotal_rss 4096\ntotal_swap 0\n",
        }
        for name, text in files.items():
            self._tree.write(f"{folder}/{name}", text)
