"""Kills by the kernel for want of memory: counted by control group, and named in its log."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.cgroup_tree import Cgroup, CgroupTree
from haiprof.linux.readings import Unavailable

_KIB = 1024
_RECORD_BYTES = 8192
_RECORD_LIMIT = 20_000
_KILLED = re.compile(
    rb"Killed process (\d+) \((.*)\).*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """One process that the kernel killed, as its log has it."""

    pid: int
    """In the machine's own numbering: in a container a process has another one too."""
    command: str
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    in_cgroup: bool
    """Whether a control group's limit was reached, and not the machine's memory."""


def memory_cgroup(pid: int, *, root: Path = Path("/")) -> Cgroup | None:
    """The control group that a process's memory is counted in; None where that is not visible."""
    try:
        memberships = (root / f"proc/{pid}/cgroup").read_text(errors="replace")
        mountinfo = (root / "proc/self/mountinfo").read_text(errors="replace")
        return CgroupTree(memberships, mountinfo, root).cgroup("memory")
    except (OSError, Unavailable):
        return None


def oom_kill_count(cgroup: Cgroup) -> int | None:
    """How many processes of a control group the kernel has killed for want of memory.

    Source: Linux Documentation/admin-guide/cgroup-v2.rst (memory.events), memcontrol-v1.c.
    """
    name = "memory.oom_control" if cgroup.version == 1 else "memory.events"
    with contextlib.suppress(OSError, ValueError):
        for line in (cgroup.folder / name).read_text().splitlines():
            word, _, value = line.partition(" ")
            if word == "oom_kill":
                return int(value)
    return None


class KernelLog:
    """What the kernel writes into its log from now on; nothing where this user may not read it."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def new_oom_kills(self) -> list[OomKill]:
        """Those since the last call."""
        found = []
        for _ in range(_RECORD_LIMIT if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring has gone on: what is left follows
                    continue
                break
            kill = parse_oom_kill(record)
            if kill is not None:
                found.append(kill)
            if not record:
                break
        return found

    def close(self) -> None:
        """Lets go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_oom_kill(record: bytes) -> OomKill | None:
    """A record of the kernel's log as a kill; None for any other.

    Source: mm/oom_kill.c, __oom_kill_process().
    """
    match = _KILLED.search(record)
    if match is None or b"out of memory" not in record.lower():
        return None
    pid, command, anonymous, file, shared = match.groups()
    return OomKill(
        pid=int(pid),
        command=command.decode(errors="replace"),
        anonymous_bytes=int(anonymous) * _KIB,
        file_bytes=int(file) * _KIB,
        shared_bytes=int(shared or 0) * _KIB,
        in_cgroup=b"Memory cgroup" in record,
    )
