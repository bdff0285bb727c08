"""Stand-ins for performance counters: PMUs in a `FakeTree`, and the kernel's perf events."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from haiprof.linux.perf_events import ATTR, EXCLUDE_KERNEL, INHERIT, READ_FORMAT, RECORD, Kernel
from tests.fakes import FakeTree

DEVICES = "sys/bus/event_source/devices"
SECOND_NS = 1_000_000_000


def cpu(
    tree: FakeTree, vendor: str, family: int, model: int, *, flags: str = "fpu amx_bf16"
) -> None:
    """Puts an x86 /proc/cpuinfo of two CPUs in place."""
    text = (
        f"processor\t: {{}}\nvendor_id\t: {vendor}\ncpu family\t: {family}\n"
        f"model\t\t: {model}\nmodel name\t: A CPU\nflags\t\t: {flags}\n\n"
    )
    tree.write("proc/cpuinfo", text.format(0) + text.format(1))


def sockets(tree: FakeTree, cpus: Mapping[int, Sequence[int]]) -> None:
    """Puts the CPUs of each socket in place; a socket has one last-level cache."""
    for socket, numbers in cpus.items():
        for number in numbers:
            folder = f"sys/devices/system/cpu/cpu{number}"
            tree.write(f"{folder}/topology/physical_package_id", f"{socket}\n")
            tree.write(f"{folder}/cache/index3/id", f"{socket}\n")


def pmu(
    tree: FakeTree,
    name: str,
    type_: int,
    *,
    cpumask: str = "0,4",
    formats: Mapping[str, str] | None = None,
    events: Mapping[str, str] | None = None,
) -> None:
    """Puts a PMU in place, with `event` and `umask` as Intel's unless given."""
    tree.write(f"{DEVICES}/{name}/type", f"{type_}\n")
    tree.write(f"{DEVICES}/{name}/cpumask", f"{cpumask}\n")
    for word, bits in (formats or {"event": "config:0-7", "umask": "config:8-15"}).items():
        tree.write(f"{DEVICES}/{name}/format/{word}", f"{bits}\n")
    for event, terms in (events or {}).items():
        tree.write(f"{DEVICES}/{name}/events/{event}", f"{terms}\n")


def threads(tree: FakeTree, pid: int, numbers: Iterable[int]) -> None:
    """Puts the threads of a process in place."""
    for number in numbers:
        tree.write(f"proc/{pid}/task/{number}/comm", "python\n")


@dataclass
class FakeEvent:
    """One open event."""

    type: int
    config: int
    config1: int
    bits: int
    pid: int
    cpu: int
    members: set[int]
    """Threads that it counts."""
    count: float = 0
    enabled_ns: float = 0
    running_ns: float = 0

    def record(self) -> bytes:
        return RECORD.pack(int(self.count), int(self.enabled_ns), int(self.running_ns))


@dataclass
class FakePerf(Kernel):
    """perf_event_open and its files, with the checks that the kernel makes."""

    tree: FakeTree
    known: set[tuple[int, int]] | None = None
    privileged: bool = False
    open_limit: int = 10_000
    events: dict[int, FakeEvent] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    """errno by thread or process."""
    _next: int = 100

    def open(self, attr: bytes, pid: int, cpu: int) -> int:
        type_, size, config, period, sample, read, bits, _, _, config1, _ = ATTR.unpack(attr)
        assert (size, period, sample, read) == (len(attr), 0, 0, READ_FORMAT)
        uncore = self._cpumasks().get(type_)
        self._check_permission(bits, pid)
        if len(self.events) >= self.open_limit:
            raise _error(errno.EMFILE)
        if pid in self.refused:
            raise _error(self.refused[pid])
        if uncore is not None and (pid != -1 or cpu not in uncore or bits):
            raise _error(errno.EINVAL)
        if uncore is None and self.known is not None and (type_, config) not in self.known:
            raise _error(errno.ENOENT)
        if pid > 0 and not list(self.tree.root.glob(f"proc/*/task/{pid}")):
            raise _error(errno.ESRCH)
        self._next += 1
        self.events[self._next] = FakeEvent(type_, config, config1, bits, pid, cpu, {pid})
        return self._next

    def read(self, fd: int) -> bytes:
        return self.events[fd].record()

    def close(self, fd: int) -> None:
        del self.events[fd]

    def starts(self, parent: int, thread: int) -> None:
        """A thread starts another: what is inherited counts that one too."""
        for event in self.events.values():
            if event.bits & INHERIT and parent in event.members:
                event.members.add(thread)

    def runs(self, thread: int, config: int, count: int, *, share: float = 1) -> None:
        """A thread has caused events for a second; the hardware saw that share of them."""
        found = [e for e in self.events.values() if e.config == config and thread in e.members]
        _count(found, count, share)

    def traffic(self, config: int, count: int, *, type_: int, cpu: int, share: float = 1) -> None:
        """An uncore PMU has counted for a second."""
        at = (type_, config, cpu)
        found = [e for e in self.events.values() if (e.type, e.config, e.cpu) == at]
        assert found, f"nobody counts {config:#x} of PMU {type_} on CPU {cpu}"
        _count(found, count, share)

    def _check_permission(self, bits: int, pid: int) -> None:
        setting = int((self.tree.root / "proc/sys/kernel/perf_event_paranoid").read_text())
        whole_cpu, with_kernel = pid == -1, not bits & EXCLUDE_KERNEL
        denied = (whole_cpu and setting > 0) or (with_kernel and setting > 1) or setting > 2
        if denied and not self.privileged:
            raise _error(errno.EACCES)

    def _cpumasks(self) -> dict[int, set[int]]:
        masks = {}
        for folder in (self.tree.root / DEVICES).glob("*"):
            if (folder / "cpumask").exists():
                cpus = {int(word) for word in (folder / "cpumask").read_text().split(",")}
                masks[int((folder / "type").read_text())] = cpus
        return masks


def _count(events: Iterable[FakeEvent], count: int, share: float) -> None:
    for event in events:
        event.count += count * share
        event.enabled_ns += SECOND_NS
        event.running_ns += SECOND_NS * share


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
